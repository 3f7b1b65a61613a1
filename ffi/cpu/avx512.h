// What the vector kernels need of AVX-512 (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include "prefetch.h"
#include "record.h"

namespace jaxquant {
namespace {

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16;       // of 32 bits
  static constexpr int kTileColumns = 8;  // two row vectors of int16 sums in half of 32 registers
  static constexpr int kStreamedColumns = 1;
  static constexpr bool kTransposesInRegisters = false;
  static constexpr const char* kIsa = "avx512";

  JAXQUANT_INLINE Int zero() { return _mm512_setzero_si512(); }
  JAXQUANT_INLINE Int load(const void* p) { return _mm512_loadu_si512(p); }
  JAXQUANT_INLINE Int broadcast(const uint8_t* p) { return _mm512_set1_epi32(jaxquant::load<int32_t>(p)); }
  JAXQUANT_INLINE Int maddubs(Int u8, Int s8) { return _mm512_maddubs_epi16(u8, s8); }
  JAXQUANT_INLINE Int madd(Int a, Int b) { return _mm512_madd_epi16(a, b); }
  JAXQUANT_INLINE Int add16(Int a, Int b) { return _mm512_add_epi16(a, b); }
  JAXQUANT_INLINE Int add32(Int a, Int b) { return _mm512_add_epi32(a, b); }
  // A running sum of products along a sub-block, eight times four elements: int16 holds 8 * 2 * 15 * 128.
  JAXQUANT_INLINE Int products(Int u8, Int s8) { return maddubs(u8, s8); }
  JAXQUANT_INLINE Int add_products(Int sum, Int u8, Int s8) { return add16(sum, maddubs(u8, s8)); }
  // Such a sum times a scale, which comes twice as int16, as int32.
  JAXQUANT_INLINE Int scaled_sum(Int sum, Int sc) { return madd(sum, sc); }
  // Keeps a running sum in its register and its order: GCC would reassociate the chain and spill it.
  JAXQUANT_INLINE void pin(Int& a) { asm volatile("" : "+v"(a)); }

  JAXQUANT_INLINE Float load_float(const float* p) { return _mm512_loadu_ps(p); }
  JAXQUANT_INLINE void store_float(float* p, Float a) { _mm512_storeu_ps(p, a); }
  JAXQUANT_INLINE Float splat(float a) { return _mm512_set1_ps(a); }
  JAXQUANT_INLINE Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  JAXQUANT_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  JAXQUANT_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  JAXQUANT_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }

  JAXQUANT_INLINE Int load_two(const uint8_t* low, const uint8_t* high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low))),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)), 1);
  }

  JAXQUANT_INLINE Int both(__m256i a) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), a, 1); }
  JAXQUANT_INLINE __m256i halves_sum(Int a) {
    return _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  }
  // Picks byte i of every 128-bit lane, as int16: `low` in the lower half of the vector, `high` in the upper.
  JAXQUANT_INLINE Int picker(int low, int high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16(static_cast<short>(0x8000 + low))),
                              _mm256_set1_epi16(static_cast<short>(0x8000 + high)), 1);
  }

  // Eight int32 partial sums each whose total is S of two weight records with one activation record.
  // `scales` holds sc[8], m[8] as bytes in both halves.
  JAXQUANT_INLINE void partial_s(const uint8_t* w0, const uint8_t* w1, const uint8_t* x, __m256i scales0,
                                 __m256i scales1, __m256i& s0, __m256i& s1) {
    const Int low = _mm512_set1_epi8(15);
    const Int sc0 = both(scales0);
    const Int sc1 = both(scales1);
    Int total0 = zero();
    Int total1 = zero();
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const uint8_t* q = x + q8k::kQ + 128 * c;
      const Int x_even = load_two(q, q + 64);
      const Int x_odd = load_two(q + 32, q + 96);
      const Int even = picker(4 * c, 4 * c + 2);
      const Int odd = picker(4 * c + 1, 4 * c + 3);
      const auto sum = [&](const uint8_t* w, Int sc) {
        const Int packed = load(w + q4k::kQ + 64 * c);
        const Int products_even = maddubs(_mm512_and_si512(packed, low), x_even);
        const Int products_odd = maddubs(_mm512_and_si512(_mm512_srli_epi16(packed, 4), low), x_odd);
        return add32(madd(products_even, _mm512_shuffle_epi8(sc, even)),
                     madd(products_odd, _mm512_shuffle_epi8(sc, odd)));
      };
      total0 = add32(total0, sum(w0, sc0));
      total1 = add32(total1, sum(w1, sc1));
      pin(total0);
      pin(total1);
    }
    s0 = halves_sum(total0);
    s1 = halves_sum(total1);
  }

  // Eight keys, the greatest of which is that of the block.
  JAXQUANT_INLINE __m256i greatest_keys(const uint8_t* values) {
    Int keys[4];
#pragma GCC unroll 16
    for (int i = 0; i < kBlock / 16; ++i) {
      const Int key = _mm512_rol_epi32(load(values + 64 * i), 1);
      keys[i % 4] = i < 4 ? key : _mm512_max_epu32(keys[i % 4], key);
    }
    const Int all = _mm512_max_epu32(_mm512_max_epu32(keys[0], keys[1]), _mm512_max_epu32(keys[2], keys[3]));
    return _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  }

  // What lies `ahead` of the values is fetched meanwhile.
  JAXQUANT_INLINE void write_record(const uint8_t* values, float inverse, float ds, uint8_t* out, int64_t ahead) {
    const Float factor = splat(inverse);
    const __m128i ones = _mm_set1_epi8(1);
    store(out + q8k::kDs, ds);
    __m128i pair_sums[q8k::kSums];
#pragma GCC unroll 16
    for (int j = 0; j < q8k::kSums; ++j) {
      prefetch(values + 64 * j + ahead);
      const Float v = _mm512_loadu_ps(values + 64 * j);
      const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, factor)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + q8k::kQ + 16 * j), q);
      pair_sums[j] = _mm_maddubs_epi16(ones, q);
    }
    for (int half = 0; half < 2; ++half) {
      const __m128i* p = pair_sums + 8 * half;
      const __m128i low = _mm_hadd_epi16(_mm_hadd_epi16(p[0], p[1]), _mm_hadd_epi16(p[2], p[3]));
      const __m128i high = _mm_hadd_epi16(_mm_hadd_epi16(p[4], p[5]), _mm_hadd_epi16(p[6], p[7]));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + q8k::kBsum + 16 * half), _mm_hadd_epi16(low, high));
    }
  }
};

}  // namespace
}  // namespace jaxquant
