// Narrow elements under shared scales: how codes stand for numbers, and how they lie in bytes. The only place
// that knows; host and device code include it alike. Rounding is to nearest even and wants the IEEE environment.
#pragma once

#include <cstdint>

#include "record.h"

namespace jaxquant {

constexpr int32_t kSign = INT32_MIN;
constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kInfinity = 0x7F800000;
constexpr int32_t kNan = 0x7FC00000;
constexpr int32_t kLargestFinite = 0x7F7FFFFF;

// The codecs are written for scalars and for vectors of the compiler's: I is int32_t or a vector of it, F the
// same of float. Integers are signed, because vector units compare those in one step; magnitudes have no sign bit.

template <class F, class I>
JAXQUANT_INLINE F as_float(I bits) {
  if constexpr (sizeof(I) == 4) {
    return bit_cast<F>(bits);
  } else {
    return (F)bits;
  }
}

template <class I, class F>
JAXQUANT_INLINE I as_bits(F value) {
  if constexpr (sizeof(F) == 4) {
    return bit_cast<I>(value);
  } else {
    return (I)value;
  }
}

template <class F, class I>
JAXQUANT_INLINE F to_floats(I integers) {
#if defined(__CUDACC__)
  return to_float(integers);
#else
  if constexpr (sizeof(I) == 4) {
    return static_cast<F>(integers);
  } else {
    return __builtin_convertvector(integers, F);
  }
#endif
}

// Sign, exponent and significand of fewer than nine bits. A format with NaN has it at the codes above `largest`,
// a format with infinity has that first.
template <int exponent_bits, int significand_bits, int largest, bool infinity>
struct NarrowFloat {
  static constexpr int kBits = 1 + exponent_bits + significand_bits;
  static constexpr int kLargest = largest;
  static constexpr bool kHasNan = largest != (1 << (kBits - 1)) - 1;
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kDropped = 23 - significand_bits;
  static constexpr int kSmallestNormal = (128 - kBias) << 23;  // as float32 bits
  static constexpr int kUnit = 0;                              // codes count in 2**-kUnit

  // `code` has no bits above kBits. NaN comes without sign.
  template <class F, class I>
  JAXQUANT_INLINE F value(I code) {
    const I magnitude = code & ((1 << (kBits - 1)) - 1);
    const I sign = (code << (32 - kBits)) & kSign;
    const I placed = magnitude << kDropped;
    const I normal = placed + ((127 - kBias) << 23);
    // With a leading bit that is subtracted again: exact.
    const I subnormal = as_bits<I>(as_float<F>(placed + kSmallestNormal) - bit_cast<float>(kSmallestNormal));
    I bits = (magnitude < (1 << significand_bits) ? subnormal : normal) | sign;
    if (infinity) bits = magnitude == largest + 1 ? (sign | kInfinity) : bits;
    if (kHasNan) bits = magnitude > largest + (infinity ? 1 : 0) ? (sign & 0) | kNan : bits;
    return as_float<F>(bits);
  }

  // The code of a finite magnitude, saturating, with the sign bit of `signed_bits`.
  template <class F, class I>
  JAXQUANT_INLINE I code(I signed_bits, F quotient) {
    const I magnitude = as_bits<I>(quotient);
    const I odd = (magnitude >> kDropped) & 1;
    const I normal =
        ((magnitude + ((1 << (kDropped - 1)) - 1) + odd) >> kDropped) - ((127 - kBias) << significand_bits);
    // Added to this, the smallest subnormal counts in the lowest bit.
    constexpr int kCounter = (127 + 1 - kBias - significand_bits + 23) << 23;
    const I subnormal = as_bits<I>(quotient + bit_cast<float>(kCounter)) - kCounter;
    const I rounded = magnitude < kSmallestNormal ? subnormal : normal;
    const I saturated = rounded < largest ? rounded : (rounded & 0) | largest;
    return saturated | ((signed_bits >> (32 - kBits)) & (1 << (kBits - 1)));
  }
};

// Fixed point of OCP MX: code c is c * 2**-6, and no number encodes to -128.
struct FixedPoint {
  static constexpr int kBits = 8;
  static constexpr int kUnit = 6;

  template <class F, class I>
  JAXQUANT_INLINE F value(I code) {
    return to_floats<F>((code << 24) >> 24);
  }

  template <class F, class I>
  JAXQUANT_INLINE I code(I signed_bits, F quotient) {
    constexpr int kCounter = (127 - 6 + 23) << 23;
    const I rounded = as_bits<I>(quotient + bit_cast<float>(kCounter)) - kCounter;
    const I saturated = rounded < 127 ? rounded : (rounded & 0) | 127;
    const I negative = signed_bits >> 31;
    return ((saturated ^ negative) - negative) & 255;
  }
};

using E4M3 = NarrowFloat<4, 3, 0x7E, false>;
using E5M2 = NarrowFloat<5, 2, 0x7B, true>;
using E3M2 = NarrowFloat<3, 2, 0x1F, false>;
using E2M3 = NarrowFloat<2, 3, 0x1F, false>;
using E2M1 = NarrowFloat<2, 1, 7, false>;

// 2**(byte - 127 - unit), exactly, subnormals included; 255 is NaN.
JAXQUANT_INLINE float power_of_two(int byte, int unit) {
  if (byte == 255) return bit_cast<float>(kNan);
  const int field = byte - unit;
  return bit_cast<float>(field > 0 ? field << 23 : 0x00800000 >> (1 - field));
}

// The E8M0 byte of a block of finite largest magnitude, float32 bits: its exponent field, one more where its
// significand of 24 bits is `up_from` or more, less `lowered`.
JAXQUANT_INLINE int scale_byte(int32_t magnitude, int32_t up_from, int lowered) {
  if (magnitude == 0) return 0;
  int field = magnitude >> 23;
  int32_t significand = (magnitude & 0x7FFFFF) | 0x800000;
  if (field == 0) {
    significand = magnitude;
    for (field = 1; significand < 0x800000; --field) significand <<= 1;
  }
  const int byte = field + (significand >= up_from ? 1 : 0) - lowered;
  return byte < 0 ? 0 : byte > 254 ? 254 : byte;
}

// Codes of `bits` bits lie as a little-endian bit stream; eight of them, in bytes, to `bits` bytes and back.
template <int bits>
JAXQUANT_INLINE uint64_t packed_eight(uint64_t codes) {
  if (bits == 8) return codes;
  constexpr uint64_t kLow = ((uint64_t{1} << bits) - 1) * 0x0001000100010001u;
  constexpr uint64_t kPair = ((uint64_t{1} << 2 * bits) - 1) * 0x0000000100000001u;
  constexpr uint64_t kFour = (uint64_t{1} << 4 * bits) - 1;
  codes = (codes & kLow) | ((codes >> (8 - bits)) & (kLow << bits));
  codes = (codes & kPair) | ((codes >> 2 * (8 - bits)) & (kPair << 2 * bits));
  return (codes & kFour) | ((codes >> 4 * (8 - bits)) & (kFour << 4 * bits));
}

template <int bits>
JAXQUANT_INLINE uint64_t unpacked_eight(uint64_t stream) {
  if (bits == 8) return stream;
  constexpr uint64_t kLow = ((uint64_t{1} << bits) - 1) * 0x0001000100010001u;
  constexpr uint64_t kPair = ((uint64_t{1} << 2 * bits) - 1) * 0x0000000100000001u;
  constexpr uint64_t kFour = (uint64_t{1} << 4 * bits) - 1;
  stream = (stream & kFour) | ((stream & (kFour << 4 * bits)) << 4 * (8 - bits));
  stream = (stream & kPair) | ((stream & (kPair << 2 * bits)) << 2 * (8 - bits));
  return (stream & kLow) | ((stream & (kLow << bits)) << (8 - bits));
}

}  // namespace jaxquant
