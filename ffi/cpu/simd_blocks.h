// Block kernels on the compiler's vectors: the same source for every instruction set.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "blocks.h"
#include "kernels.h"

namespace jaxquant {
namespace {

constexpr int kLanes = 8;
using Int8s = uint8_t __attribute__((vector_size(kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Floats = float __attribute__((vector_size(4 * kLanes)));

template <class T>
JAXQUANT_INLINE T load_as(const void* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

JAXQUANT_INLINE Ints splat(int32_t value) { return Ints{} + value; }
JAXQUANT_INLINE Floats splat(float value) { return as_float<Floats>(splat(bit_cast<int32_t>(value))); }

// Eight codes of `bits` bits from `bits` bytes.
template <int bits>
JAXQUANT_INLINE Ints unpacked(const uint8_t* from) {
  if constexpr (bits == 8) {
#if defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(load_as<Int8s>(from), Ints);
#endif
  } else if constexpr (bits == 4) {
    const Ints shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    return (splat(load_as<int32_t>(from)) >> shifts) & 15;
  } else {
    const int32_t low = load_as<int32_t>(from);
    const int32_t high = load_as<int32_t>(from + 2) >> 8;
    const Ints words = {low, low, low, low, high, high, high, high};
    const Ints shifts = {0, 6, 12, 18, 0, 6, 12, 18};
    return (words >> shifts) & 63;
  }
}

// Eight codes, one in each byte.
JAXQUANT_INLINE uint64_t bytes_of(Ints codes) {
#if defined(__AVX2__)
  const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
  const __m256i gathered = _mm256_shuffle_epi8((__m256i)codes, low_bytes);
  return static_cast<uint64_t>(
      _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(gathered), _mm256_extracti128_si256(gathered, 1))));
#else
  return bit_cast<uint64_t>(__builtin_convertvector(codes, Int8s));
#endif
}

template <int bits>
JAXQUANT_INLINE void pack(Ints codes, uint8_t* to) {
  const uint64_t stream = packed_eight<bits>(bytes_of(codes));
  memcpy(to, &stream, bits);
}

// Past the caches where the problem says so; `to` is aligned then.
template <bool stream>
JAXQUANT_INLINE void put(Floats values, float* to) {
#if defined(__AVX__)
  if (stream) {
    _mm256_stream_ps(to, values);
    return;
  }
#endif
  memcpy(to, &values, sizeof values);
}

JAXQUANT_INLINE void finish_streaming() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// ------------------------------------------------------------------------------------------- decoding

template <class E>
JAXQUANT_INLINE float scale_value(const DecodeBlocks& p, int64_t index) {
  if (p.scale == Scale::kE8M0) return power_of_two(p.scales[index], E::kUnit);
  if (p.scale == Scale::kE4M3) return E4M3::value<float, int32_t>(p.scales[index]);
  return 1.0f;
}

// The outer scale of one block after the other.
class OuterScale {
 public:
  OuterScale(const Blocks& p, const float* outer, int64_t block)
      : next_(outer ? outer + block / p.blocks_per_outer : nullptr),
        period_(p.blocks_per_outer),
        left_(outer ? p.blocks_per_outer - block % p.blocks_per_outer : INT64_MAX),
        value_(outer ? *next_ : 1.0f) {}

  float value() const { return value_; }
  // Past the last block there may be no scale.
  void step(bool more) {
    if (--left_ == 0 && more) {
      value_ = *++next_;
      left_ = period_;
    }
  }

 private:
  const float* next_;
  int64_t period_;
  int64_t left_;
  float value_;
};

// A scale that may be infinite, zero or negative: products may be NaN that is not ours.
template <bool any, class F, class I>
JAXQUANT_INLINE F scaled(F element, F scale, F outer) {
  const F value = element * scale;
  if constexpr (!any) {
    return value;
  } else {
    const I bits = as_bits<I>(value * outer);
    return as_float<F>((bits & kMagnitude) > kInfinity ? (bits & 0) | kNan : bits);
  }
}

// The decoder of a block, eight elements at a time.
template <class E, bool any>
struct Decoder {
  Floats scale;
  Floats outer;

  JAXQUANT_INLINE Decoder make(float scale, float outer) { return {splat(scale), splat(outer)}; }
  JAXQUANT_INLINE Floats values(const Decoder& d, Ints codes) {
    return scaled<any, Floats, Ints>(E::template value<Floats>(codes), d.scale, d.outer);
  }
};

#if defined(__AVX2__)
// Eight magnitudes are a table that one instruction reads, so that scales meet each of them once.
template <bool any>
struct Decoder<E2M1, any> {
  Ints table;
  Ints sign;

  JAXQUANT_INLINE Decoder make(float scale, float outer) {
    const Floats magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const Ints table = as_bits<Ints>(scaled<any, Floats, Ints>(magnitudes, splat(scale), splat(outer)));
    // NaN has no sign. A power of two is NaN for all magnitudes or for none.
    return {table, (table & kMagnitude) > kInfinity ? Ints{} : splat(kSign)};
  }
  JAXQUANT_INLINE Floats values(const Decoder& d, Ints codes) {
    const Ints indices = codes & 7;
    const Ints sign = any ? __builtin_shuffle(d.sign, indices) : d.sign;
    return as_float<Floats>(__builtin_shuffle(d.table, indices) ^ ((codes << 28) & sign));
  }
};
#endif

template <class E, int bits, bool any, bool stream>
void decode_along(const DecodeBlocks& p, int64_t begin, int64_t end) {
  constexpr int kMask = (1 << E::kBits) - 1;
  const uint8_t* codes = p.codes + begin * p.block * bits / 8;
  float* values = p.values + begin * p.block;
  OuterScale outer(p, p.outer, begin);
  for (int64_t b = begin; b < end; ++b, outer.step(b < end)) {
    const auto decoder = Decoder<E, any>::make(scale_value<E>(p, b), outer.value());
    for (int64_t i = 0; i < p.block; i += kLanes) {
      put<stream>(Decoder<E, any>::values(decoder, unpacked<bits>(codes) & kMask), values);
      codes += bits;
      values += kLanes;
    }
  }
  if (stream) finish_streaming();
}

// Blocks side by side, a tile of them: each step decodes whole bytes of stored rows.
template <class E, int bits, bool any>
void decode_across(const DecodeBlocks& p, int64_t begin, int64_t end) {
  constexpr int kRows = bits == 8 ? 1 : bits == 4 ? 2 : 4;
  constexpr int kBytes = kRows * bits / 8;
  constexpr int kMask = (1 << E::kBits) - 1;
  const int64_t tiles = p.tiles();
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t b = piece / tiles;
    const int64_t from = piece % tiles * Blocks::kTile;
    const int64_t width = std::min(Blocks::kTile, p.inner - from);
    const float outer = OuterScale(p, p.outer, b).value();
    float scales[Blocks::kTile];
    for (int64_t j = 0; j < width; ++j) scales[j] = scale_value<E>(p, b * p.inner + from + j);
    const uint8_t* codes = p.codes + b * p.block * bits / 8 * p.inner + from;
    float* values = p.values + b * p.block * p.inner + from;
    for (int64_t i = 0; i < p.block; i += kRows) {
      for (int r = 0; r < kRows; ++r) {
        const int shift = r * bits % 8;
        const uint8_t* low = codes + r * bits / 8 * p.inner;
        // A code that ends in its first byte takes nothing of the next.
        const uint8_t* high = shift + bits > 8 ? low + p.inner : low;
        float* row = values + r * p.inner;
        int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) {
          const Ints two = unpacked<8>(low + j) | unpacked<8>(high + j) << 8;
          const Floats elements = E::template value<Floats>((two >> shift) & kMask);
          put<false>(scaled<any, Floats, Ints>(elements, load_as<Floats>(scales + j), splat(outer)), row + j);
        }
        for (; j < width; ++j) {
          const int32_t two = low[j] | high[j] << 8;
          const float element = E::template value<float>((two >> shift) & kMask);
          row[j] = scaled<any, float, int32_t>(element, scales[j], outer);
        }
      }
      codes += kBytes * p.inner;
      values += kRows * p.inner;
    }
  }
}

template <class E, int bits, bool any>
void decode_stored(const DecodeBlocks& p, int64_t begin, int64_t end) {
  if (p.inner != 1) {
    decode_across<E, bits, any>(p, begin, end);
  } else if (p.stream) {
    decode_along<E, bits, any, true>(p, begin, end);
  } else {
    decode_along<E, bits, any, false>(p, begin, end);
  }
}

template <class E>
void decode_element(const DecodeBlocks& p, int64_t begin, int64_t end) {
  const bool any = p.scale == Scale::kE4M3;
  if (E::kBits < 8 && p.packed) {
    (any ? decode_stored<E, E::kBits, true> : decode_stored<E, E::kBits, false>)(p, begin, end);
  } else {
    (any ? decode_stored<E, 8, true> : decode_stored<E, 8, false>)(p, begin, end);
  }
}

void decode_blocks(const DecodeBlocks& p, int64_t begin, int64_t end) {
  switch (p.element) {
    case Element::kE4M3:
      return decode_element<E4M3>(p, begin, end);
    case Element::kE5M2:
      return decode_element<E5M2>(p, begin, end);
    case Element::kE3M2:
      return decode_element<E3M2>(p, begin, end);
    case Element::kE2M3:
      return decode_element<E2M3>(p, begin, end);
    case Element::kE2M1:
      return decode_element<E2M1>(p, begin, end);
    case Element::kInt8:
      return decode_element<FixedPoint>(p, begin, end);
  }
}

// ------------------------------------------------------------------------------------------- encoding

template <class I>
JAXQUANT_INLINE I larger(I a, I b) {
  return a > b ? a : b;
}

JAXQUANT_INLINE int32_t greatest_lane(Ints a) {
#if defined(__AVX2__)
  __m128i lanes = _mm_max_epi32(_mm256_castsi256_si128((__m256i)a), _mm256_extracti128_si256((__m256i)a, 1));
  lanes = _mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0x4E));
  lanes = _mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0xB1));
  return _mm_cvtsi128_si32(lanes);
#else
  int32_t all = a[0];
  for (int j = 1; j < kLanes; ++j) all = larger<int32_t>(all, a[j]);
  return all;
#endif
}

template <bool saturate, class I>
JAXQUANT_INLINE I magnitude_of(I bits) {
  const I magnitude = bits & kMagnitude;
  return saturate ? (magnitude == kInfinity ? (magnitude & 0) | kLargestFinite : magnitude) : magnitude;
}

// How blocks get E8M0 scales, and elements their codes.
template <class E>
struct UnderPower {
  static constexpr int kBits = E::kBits;

  // Of `columns` blocks side by side; one column serves all lanes.
  template <int columns>
  struct Quantizers {
    float inverses[columns];

    void set(int64_t column, int byte, double /*outer*/) { inverses[column] = power_of_two(254 - byte, 0); }

    // The inverse is exact, and where its product is not, that lies so far below the smallest element that it is
    // zero anyhow.
    template <class F, class I>
    __attribute__((always_inline)) I code(int64_t column, I bits, I magnitude) const {
      const F inverse = columns == 1 ? F{} + inverses[0] : load_as<F>(inverses + column);
      return E::template code<F, I>(bits, as_float<F>(magnitude) * inverse);
    }
  };

  JAXQUANT_INLINE int scale(const EncodeBlocks& p, int32_t largest, double /*outer*/) {
    return scale_byte(largest, p.up_from, p.lowered);
  }
};

// NVFP4's exact recipe: the E4M3 scale of largest / (6 outer), the E2M1 element of value / (scale outer), each
// rounded once. Doubles decide that exactly: either denominator times the midpoint of two codes has at most 31 bits.
// A quotient that is no midpoint is further away from it than 2**-31 of it, and a midpoint itself is a double.
struct UnderE4M3 {
  static constexpr int kBits = E2M1::kBits;
  static constexpr int kSteps = 7;

  JAXQUANT_INLINE int scale(const EncodeBlocks& /*p*/, int32_t largest, double outer) {
    const double quotient = static_cast<double>(bit_cast<float>(largest)) / (6.0 * outer);
    constexpr int kDropped = 52 - 3;
    constexpr uint64_t kCounter = uint64_t{1023 - 9 + 52} << 52;  // counts in 2**-9, the smallest subnormal
    const uint64_t bits = bit_cast<uint64_t>(quotient);
    const uint64_t normal = ((bits + ((uint64_t{1} << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1)) >> kDropped) -
                            (uint64_t{1023 - 7} << 3);
    const uint64_t subnormal = bit_cast<uint64_t>(quotient + bit_cast<double>(kCounter)) - kCounter;
    const uint64_t rounded = quotient < 0x1p-6 ? subnormal : normal;
    return static_cast<int>(std::min<uint64_t>(rounded, E4M3::kLargest));
  }

  // The least float32, as bits, of each code but 0; the last lane is none.
  JAXQUANT_INLINE Ints least_of(int byte, double outer) {
    using Doubles = double __attribute__((vector_size(32)));
    using FewFloats = float __attribute__((vector_size(16)));
    const double unit = static_cast<double>(E4M3::value<float, int32_t>(byte)) * outer;
    const Doubles low = Doubles{0.25, 0.75, 1.25, 1.75} * unit;
    const Doubles high = Doubles{2.5, 3.5, 5.0, 5.0} * unit;
    const auto low_near = __builtin_convertvector(low, FewFloats);
    const auto high_near = __builtin_convertvector(high, FewFloats);
    const auto low_back = __builtin_convertvector(low_near, Doubles);
    const auto high_back = __builtin_convertvector(high_near, Doubles);
    const Floats near = __builtin_shufflevector(low_near, high_near, 0, 1, 2, 3, 4, 5, 6, 7);
    const Ints below =
        __builtin_shufflevector((Ints)(low_back < low), (Ints)(high_back < high), 0, 2, 4, 6, 8, 10, 12, 14);
    const Ints equal =
        __builtin_shufflevector((Ints)(low_back == low), (Ints)(high_back == high), 0, 2, 4, 6, 8, 10, 12, 14);
    // Ties go to the even code: up at every second.
    const Ints down_at_tie = {-1, 0, -1, 0, -1, 0, -1, 0};
    const Ints least = as_bits<Ints>(near) - (below | (equal & down_at_tie));
    return byte == 0 ? splat(INT32_MAX) : least;
  }

  template <int columns>
  struct Quantizers {
    int32_t least[kLanes][columns];

    void set(int64_t column, int byte, double outer) {
      const Ints all = least_of(byte, outer);
      for (int i = 0; i < kSteps; ++i) least[i][column] = all[i];
    }

    template <class F, class I>
    __attribute__((always_inline)) I code(int64_t column, I bits, I magnitude) const {
      I code = (bits >> 28) & 8;
      for (int i = 0; i < kSteps; ++i) {
        const I from = columns == 1 ? I{} + least[i][0] : load_as<I>(least[i] + column);
        if constexpr (sizeof(I) == 4) {
          code += magnitude >= from ? 1 : 0;
        } else {
          code -= magnitude >= from;
        }
      }
      return code;
    }
  };
};

JAXQUANT_INLINE uint8_t nan_scale(const EncodeBlocks& p) { return p.scale == Scale::kE8M0 ? 0xFF : 0x7F; }

// One step after the other for some blocks, which do not wait for each other's divisions then.
template <class Q, int bits, bool saturate>
void encode_along(const EncodeBlocks& p, int64_t begin, int64_t end) {
  constexpr int kTogether = 16;
  const int64_t bytes = p.block * bits / 8;
  OuterScale outer(p, p.outer, begin);
  for (int64_t b = begin; b < end; b += kTogether) {
    const int count = static_cast<int>(std::min<int64_t>(kTogether, end - b));
    const float* values = p.values + b * p.block;
    uint8_t* codes = p.codes + b * bytes;
    int32_t largest[kTogether];
    for (int k = 0; k < count; ++k) {
      Ints lanes{};
      for (int64_t i = 0; i < p.block; i += kLanes) {
        lanes = larger(lanes, magnitude_of<saturate>(load_as<Ints>(values + k * p.block + i)));
      }
      largest[k] = greatest_lane(lanes);
    }
    typename Q::template Quantizers<1> quantizers[kTogether];
    for (int k = 0; k < count; ++k, outer.step(b + k < end)) {
      const bool finite = largest[k] < kInfinity;
      const int byte = Q::scale(p, finite ? largest[k] : 0, outer.value());
      p.scales[b + k] = finite ? static_cast<uint8_t>(byte) : nan_scale(p);
      quantizers[k].set(0, byte, outer.value());
    }
    for (int k = 0; k < count; ++k, values += p.block, codes += bytes) {
      if (largest[k] >= kInfinity) {
        memset(codes, 0, static_cast<size_t>(bytes));
        continue;
      }
      for (int64_t i = 0; i < p.block; i += kLanes) {
        const Ints value = load_as<Ints>(values + i);
        const Ints code = quantizers[k].template code<Floats, Ints>(0, value, magnitude_of<saturate>(value));
        pack<bits>(code, codes + i * bits / 8);
      }
    }
  }
}

template <class Q, int bits, bool saturate>
void encode_across(const EncodeBlocks& p, int64_t begin, int64_t end) {
  constexpr int kRows = bits == 8 ? 1 : bits == 4 ? 2 : 4;
  constexpr int kBytes = kRows * bits / 8;
  const int64_t tiles = p.tiles();
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t b = piece / tiles;
    const int64_t from = piece % tiles * Blocks::kTile;
    const int64_t width = std::min(Blocks::kTile, p.inner - from);
    const float* values = p.values + b * p.block * p.inner + from;
    uint8_t* codes = p.codes + b * p.block * bits / 8 * p.inner + from;
    uint8_t* scales = p.scales + b * p.inner + from;
    const double outer = OuterScale(p, p.outer, b).value();
    int32_t largest[Blocks::kTile] = {};
    for (int64_t i = 0; i < p.block; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        const int32_t value = bit_cast<int32_t>(values[i * p.inner + j]);
        largest[j] = larger<int32_t>(largest[j], magnitude_of<saturate>(value));
      }
    }
    typename Q::template Quantizers<Blocks::kTile> quantizers;
    int32_t kept[Blocks::kTile];
    for (int64_t j = 0; j < width; ++j) {
      const bool finite = largest[j] < kInfinity;
      const int byte = Q::scale(p, finite ? largest[j] : 0, outer);
      scales[j] = finite ? static_cast<uint8_t>(byte) : nan_scale(p);
      kept[j] = finite ? -1 : 0;
      quantizers.set(j, byte, outer);
    }
    for (int64_t i = 0; i < p.block; i += kRows) {
      uint8_t rows[kRows][Blocks::kTile];
      for (int r = 0; r < kRows; ++r) {
        const float* row = values + r * p.inner;
        int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) {
          const Ints value = load_as<Ints>(row + j);
          const Ints all = load_as<Ints>(kept + j);
          const Ints code = quantizers.template code<Floats, Ints>(j, value, magnitude_of<saturate>(value) & all);
          const uint64_t bytes = bytes_of(code & all);
          memcpy(rows[r] + j, &bytes, sizeof bytes);
        }
        for (; j < width; ++j) {
          const int32_t value = bit_cast<int32_t>(row[j]);
          // What is not finite would overflow where a code is rounded.
          const int32_t magnitude = magnitude_of<saturate>(value) & kept[j];
          const int32_t code = quantizers.template code<float, int32_t>(j, value, magnitude);
          rows[r][j] = static_cast<uint8_t>(code & kept[j]);
        }
      }
      for (int byte = 0; byte < kBytes; ++byte) {
        // The code in which the byte begins, and if it ends in another, that one.
        const int first = 8 * byte / bits;
        const int second = std::min((8 * byte + 7) / bits, kRows - 1);
        const int down = 8 * byte - bits * first;
        const int up = first == second ? 8 : bits - down;
        for (int64_t j = 0; j < width; ++j) {
          codes[byte * p.inner + j] = static_cast<uint8_t>(rows[first][j] >> down | rows[second][j] << up);
        }
      }
      values += kRows * p.inner;
      codes += kBytes * p.inner;
    }
  }
}

template <class Q, int bits>
void encode_stored(const EncodeBlocks& p, int64_t begin, int64_t end) {
  if (p.inner == 1) {
    (p.saturate ? encode_along<Q, bits, true> : encode_along<Q, bits, false>)(p, begin, end);
  } else {
    (p.saturate ? encode_across<Q, bits, true> : encode_across<Q, bits, false>)(p, begin, end);
  }
}

template <class Q>
void encode_element(const EncodeBlocks& p, int64_t begin, int64_t end) {
  (p.packed ? encode_stored<Q, Q::kBits> : encode_stored<Q, 8>)(p, begin, end);
}

void encode_blocks(const EncodeBlocks& p, int64_t begin, int64_t end) {
  if (p.scale == Scale::kE4M3) return encode_element<UnderE4M3>(p, begin, end);
  switch (p.element) {
    case Element::kE4M3:
      return encode_element<UnderPower<E4M3>>(p, begin, end);
    case Element::kE5M2:
      return encode_element<UnderPower<E5M2>>(p, begin, end);
    case Element::kE3M2:
      return encode_element<UnderPower<E3M2>>(p, begin, end);
    case Element::kE2M3:
      return encode_element<UnderPower<E2M3>>(p, begin, end);
    case Element::kE2M1:
      return encode_element<UnderPower<E2M1>>(p, begin, end);
    case Element::kInt8:
      return encode_element<UnderPower<FixedPoint>>(p, begin, end);
  }
}

}  // namespace
}  // namespace jaxquant
