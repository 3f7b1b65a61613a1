// What the vector kernels need of AVX2.
#pragma once

#include <immintrin.h>

#include "prefetch.h"
#include "record.h"

namespace jaxquant {
namespace {

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kLanes = 8;        // of 32 bits
  static constexpr int kTileColumns = 4;  // two row vectors of int16 sums fit sixteen registers
  static constexpr int kStreamedColumns = 2;
  static constexpr bool kTransposesInRegisters = true;
  static constexpr const char* kIsa = "avx2";

  JAXQUANT_INLINE Int zero() { return _mm256_setzero_si256(); }
  JAXQUANT_INLINE Int load(const void* p) { return _mm256_loadu_si256(static_cast<const Int*>(p)); }
  JAXQUANT_INLINE Int broadcast(const uint8_t* p) { return _mm256_set1_epi32(jaxquant::load<int32_t>(p)); }
  JAXQUANT_INLINE Int maddubs(Int u8, Int s8) { return _mm256_maddubs_epi16(u8, s8); }
  JAXQUANT_INLINE Int madd(Int a, Int b) { return _mm256_madd_epi16(a, b); }
  JAXQUANT_INLINE Int add16(Int a, Int b) { return _mm256_add_epi16(a, b); }
  JAXQUANT_INLINE Int add32(Int a, Int b) { return _mm256_add_epi32(a, b); }
  // A running sum of products along a sub-block, eight times four elements: int16 holds 8 * 2 * 15 * 128.
  JAXQUANT_INLINE Int products(Int u8, Int s8) { return maddubs(u8, s8); }
  JAXQUANT_INLINE Int add_products(Int sum, Int u8, Int s8) { return add16(sum, maddubs(u8, s8)); }
  // Such a sum times a scale, which comes twice as int16, as int32.
  JAXQUANT_INLINE Int scaled_sum(Int sum, Int sc) { return madd(sum, sc); }
  // Keeps a running sum in its register and its order: GCC would reassociate the chain and spill it.
  JAXQUANT_INLINE void pin(Int& a) { asm volatile("" : "+x"(a)); }

  JAXQUANT_INLINE Float load_float(const float* p) { return _mm256_loadu_ps(p); }
  JAXQUANT_INLINE void store_float(float* p, Float a) { _mm256_storeu_ps(p, a); }
  JAXQUANT_INLINE Float splat(float a) { return _mm256_set1_ps(a); }
  JAXQUANT_INLINE Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  JAXQUANT_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  JAXQUANT_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  JAXQUANT_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }

  // Eight int32 partial sums each whose total is S of two weight records with one activation record.
  // `scales` holds sc[8], m[8] as bytes in both halves.
  JAXQUANT_INLINE void partial_s(const uint8_t* w0, const uint8_t* w1, const uint8_t* x, __m256i scales0,
                                 __m256i scales1, __m256i& s0, __m256i& s1) {
    const __m256i low = _mm256_set1_epi8(15);
    s0 = s1 = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m256i x_even = load(x + q8k::kQ + 64 * c);
      const __m256i x_odd = load(x + q8k::kQ + 64 * c + 32);
      const __m256i even = _mm256_set1_epi16(static_cast<short>(0x8000 + 2 * c));
      const __m256i odd = _mm256_set1_epi16(static_cast<short>(0x8001 + 2 * c));
      const auto sum = [&](const uint8_t* w, __m256i scales) {
        const __m256i packed = load(w + q4k::kQ + 32 * c);
        const __m256i products_even = maddubs(_mm256_and_si256(packed, low), x_even);
        const __m256i products_odd = maddubs(_mm256_and_si256(_mm256_srli_epi16(packed, 4), low), x_odd);
        return add32(madd(products_even, _mm256_shuffle_epi8(scales, even)),
                     madd(products_odd, _mm256_shuffle_epi8(scales, odd)));
      };
      s0 = add32(s0, sum(w0, scales0));
      s1 = add32(s1, sum(w1, scales1));
      pin(s0);
      pin(s1);
    }
  }

  // Eight keys, the greatest of which is that of the block.
  JAXQUANT_INLINE __m256i greatest_keys(const uint8_t* values) {
    // As signed integers floats have their greatest above, as unsigned ones their least.
    Int greatest[2];
    Int least[2];
#pragma GCC unroll 32
    for (int i = 0; i < kBlock / 8; ++i) {
      Int bits = load(values + 32 * i);
      pin(bits);  // else each of the two would load it
      greatest[i % 2] = i < 2 ? bits : _mm256_max_epi32(greatest[i % 2], bits);
      least[i % 2] = i < 2 ? bits : _mm256_max_epu32(least[i % 2], bits);
    }
    const auto keys = [](Int bits) {
      return _mm256_or_si256(_mm256_add_epi32(bits, bits), _mm256_srli_epi32(bits, 31));
    };
    return _mm256_max_epu32(keys(_mm256_max_epi32(greatest[0], greatest[1])),
                            keys(_mm256_max_epu32(least[0], least[1])));
  }

  // Eight scaled floats as int32, rounded to nearest even.
  JAXQUANT_INLINE Int scaled(const uint8_t* values, Float inverse) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(values)), inverse));
  }

  // What lies `ahead` of the values is fetched meanwhile.
  JAXQUANT_INLINE void write_record(const uint8_t* values, float inverse, float ds, uint8_t* out, int64_t ahead) {
    const Float factor = splat(inverse);
    const Int in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const Int ones = _mm256_set1_epi8(1);
    store(out + q8k::kDs, ds);
    Int pair_sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const uint8_t* v = values + 128 * i;
      prefetch(v + ahead);
      prefetch(v + ahead + 64);
      const Int a = _mm256_packs_epi32(scaled(v, factor), scaled(v + 32, factor));
      const Int b = _mm256_packs_epi32(scaled(v + 64, factor), scaled(v + 96, factor));
      const Int q = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), in_order);
      _mm256_storeu_si256(reinterpret_cast<Int*>(out + q8k::kQ + 32 * i), q);
      pair_sums[i] = maddubs(ones, q);
    }
    // Each 128-bit half of pair_sums[i] adds up to one bsum.
    const Int all = _mm256_hadd_epi16(
        _mm256_hadd_epi16(_mm256_hadd_epi16(pair_sums[0], pair_sums[1]), _mm256_hadd_epi16(pair_sums[2], pair_sums[3])),
        _mm256_hadd_epi16(_mm256_hadd_epi16(pair_sums[4], pair_sums[5]),
                          _mm256_hadd_epi16(pair_sums[6], pair_sums[7])));
    const __m128i even = _mm256_castsi256_si128(all);
    const __m128i odd = _mm256_extracti128_si256(all, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + q8k::kBsum), _mm_unpacklo_epi16(even, odd));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + q8k::kBsum + 16), _mm_unpackhi_epi16(even, odd));
  }
};

}  // namespace
}  // namespace jaxquant
