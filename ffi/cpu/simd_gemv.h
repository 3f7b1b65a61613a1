// Few columns against many rows, four rows at a time: their records are transposed in registers, so that lanes
// are rows, and nothing of them is written back.
//
// The columns are laid out once for all rows: every four elements of one replicated over the rows.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "prefetch.h"
#include "record.h"

namespace jaxquant {
namespace {

constexpr int kRowsTogether = 4;
constexpr int kMostSpread = 64;   // records of the columns that are laid out at a time: 70 KiB, on the stack
constexpr int kGemvAhead = 2048;  // bytes, beyond the rows that are read

JAXQUANT_INLINE __m256i load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// The sums of two neighbouring sub-blocks, as int16, in the first two lanes of each half. False if one is no
// int16, which the sums of 8-bit elements are.
JAXQUANT_INLINE bool bsum_pairs(const uint8_t* x, __m256i& pairs) {
  const __m256i sums = _mm256_madd_epi16(load_ints(x + q8k::kBsum), _mm256_set1_epi16(1));
  pairs = _mm256_packs_epi32(sums, sums);
  const __m256i again = _mm256_srai_epi32(_mm256_unpacklo_epi16(pairs, pairs), 16);
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(again, sums)) == -1;
}

// The same side by side.
JAXQUANT_INLINE bool bsum_pairs(const uint8_t* x, uint32_t pairs[4]) {
  __m256i lanes;
  const bool legal = bsum_pairs(x, lanes);
  _mm_store_si128(reinterpret_cast<__m128i*>(pairs), _mm256_castsi256_si128(_mm256_permute4x64_epi64(lanes, 0x08)));
  return legal;
}

// One record of a column. The lower half of each vector meets the first 16 elements of a sub-block (the first
// four sub-blocks in `pairs`), the upper half the others.
struct alignas(32) SpreadRecord {
  uint32_t q[kSubBlocks][4][8];
  uint32_t pairs[2][8];  // the sums of two neighbouring sub-blocks, as int16
  float ds[8];
};

// False if the sums are out of range.
JAXQUANT_INLINE bool spread(const uint8_t* x, SpreadRecord& out) {
  const auto replicate = [](__m256i a, uint32_t (*to)[8]) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to[0]), _mm256_shuffle_epi32(a, 0x00));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to[1]), _mm256_shuffle_epi32(a, 0x55));
  };
  for (int s = 0; s < kSubBlocks; ++s) {
    const __m256i q = load_ints(x + q8k::kQ + kSubBlock * s);
    replicate(q, out.q[s]);
    replicate(_mm256_unpackhi_epi64(q, q), out.q[s] + 2);
  }
  __m256i pairs;
  const bool legal = bsum_pairs(x, pairs);
  replicate(pairs, out.pairs);
  _mm256_store_ps(out.ds, _mm256_set1_ps(load<float>(x + q8k::kDs)));
  return legal;
}

// A 4x4 transposition of 32-bit lanes in each half.
JAXQUANT_INLINE void transpose_4x4(__m256i a[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(a[0], a[1]);
  const __m256i high01 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(a[2], a[3]);
  const __m256i high23 = _mm256_unpackhi_epi32(a[2], a[3]);
  a[0] = _mm256_unpacklo_epi64(low01, low23);
  a[1] = _mm256_unpackhi_epi64(low01, low23);
  a[2] = _mm256_unpacklo_epi64(high01, high23);
  a[3] = _mm256_unpackhi_epi64(high01, high23);
}

// Picks the bytes `low` and `high` of each 32-bit lane, as int16.
JAXQUANT_INLINE __m256i picker(int low, int high) {
  return _mm256_add_epi32(
      _mm256_setr_epi32(0, 0x00040004, 0x00080008, 0x000C000C, 0, 0x00040004, 0x00080008, 0x000C000C),
      _mm256_set1_epi32(static_cast<int>(0x80008000u | (high << 16) | low)));
}

// The scales of one record of four rows, the same in both halves but for `m`.
struct RowScales {
  __m256i sc_low;   // sc[0..3] of each row
  __m256i sc_high;  // sc[4..7]
  __m256i m;        // m[0..3], in the upper half m[4..7]
  __m128i d;        // d of each row, then dmin: float16
};

// Adds v of one record of four rows and kColumns columns to their totals.
template <int kColumns>
JAXQUANT_INLINE void add_record(const uint8_t* const w[kRowsTogether], int64_t at, const SpreadRecord* const x[], int g,
                                const RowScales& scales, const uint8_t* ahead, __m128 total[kColumns]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i s[kColumns];
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m256i a[4];
    for (int r = 0; r < 4; ++r) a[r] = load_ints(w[r] + at + q4k::kQ + 32 * c);
    transpose_4x4(a);
#pragma GCC unroll 3
    for (int line = 9 * c / 4; line < 9 * (c + 1) / 4; ++line) prefetch(ahead + 64 * line);
    __m256i even[kColumns];
    __m256i odd[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i low = _mm256_and_si256(a[j], nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(a[j], 4), nibble);
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) {
        const __m256i products = _mm256_maddubs_epi16(low, load_ints(x[n][g].q[2 * c][j]));
        const __m256i others = _mm256_maddubs_epi16(high, load_ints(x[n][g].q[2 * c + 1][j]));
        even[n] = j == 0 ? products : _mm256_add_epi16(even[n], products);
        odd[n] = j == 0 ? others : _mm256_add_epi16(odd[n], others);
        if (kColumns > 1) {
          asm volatile("" : "+x"(even[n]));
          asm volatile("" : "+x"(odd[n]));
        }
      }
    }
    const __m256i sc = c < 2 ? scales.sc_low : scales.sc_high;
    const __m256i sc_even = _mm256_shuffle_epi8(sc, picker(2 * c % 4, 2 * c % 4));
    const __m256i sc_odd = _mm256_shuffle_epi8(sc, picker(2 * c % 4 + 1, 2 * c % 4 + 1));
#pragma GCC unroll 4
    for (int n = 0; n < kColumns; ++n) {
      const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even[n], sc_even), _mm256_madd_epi16(odd[n], sc_odd));
      s[n] = c == 0 ? sum : _mm256_add_epi32(s[n], sum);
      asm volatile("" : "+x"(s[n]));
    }
  }
  const __m256i m_first = _mm256_shuffle_epi8(scales.m, picker(0, 1));
  const __m256i m_second = _mm256_shuffle_epi8(scales.m, picker(2, 3));
  const __m256 d = _mm256_cvtph_ps(scales.d);
#pragma GCC unroll 4
  for (int n = 0; n < kColumns; ++n) {
    const __m256i t = _mm256_add_epi32(_mm256_madd_epi16(m_first, load_ints(x[n][g].pairs[0])),
                                       _mm256_madd_epi16(m_second, load_ints(x[n][g].pairs[1])));
    // S of each row, then T.
    const __m256i st =
        _mm256_add_epi32(_mm256_permute2x128_si256(s[n], t, 0x20), _mm256_permute2x128_si256(s[n], t, 0x31));
    const __m256 products = _mm256_mul_ps(d, _mm256_cvtepi32_ps(st));
    const __m128 difference = _mm_sub_ps(_mm256_castps256_ps128(products), _mm256_extractf128_ps(products, 1));
    total[n] = _mm_add_ps(total[n], _mm_mul_ps(_mm_load_ps(x[n][g].ds), difference));
  }
}

// The same of two neighbouring records, or of one if not kBoth.
template <int kColumns, bool kBoth>
JAXQUANT_INLINE void add_records(const uint8_t* const w[kRowsTogether], int64_t w_record, const SpreadRecord* const x[],
                                 int g, const uint8_t* ahead, __m128 total[kColumns]) {
  __m256i words[4];  // a record in each half; then d and dmin, and the words a, b, c of q4k_scales
  for (int r = 0; r < 4; ++r) {
    words[r] =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w[r]))),
                                _mm_loadu_si128(reinterpret_cast<const __m128i*>(w[r] + (kBoth ? w_record : 0))), 1);
  }
  transpose_4x4(words);
  const __m256i six_bits = _mm256_set1_epi8(0x3F);
  const __m256i low_bits = _mm256_set1_epi8(0x0F);
  const __m256i high_bits = _mm256_set1_epi8(0x30);
  const __m256i sc_low = _mm256_and_si256(words[1], six_bits);
  const __m256i m_low = _mm256_and_si256(words[2], six_bits);
  const __m256i sc_high = _mm256_or_si256(_mm256_and_si256(words[3], low_bits),
                                          _mm256_and_si256(_mm256_srli_epi32(words[1], 2), high_bits));
  const __m256i m_high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(words[3], 4), low_bits),
                                         _mm256_and_si256(_mm256_srli_epi32(words[2], 2), high_bits));
  const __m256i d =
      _mm256_packus_epi32(_mm256_and_si256(words[0], _mm256_set1_epi32(0xFFFF)), _mm256_srli_epi32(words[0], 16));
  add_record<kColumns>(
      w, 0, x, g,
      {_mm256_permute2x128_si256(sc_low, sc_low, 0x00), _mm256_permute2x128_si256(sc_high, sc_high, 0x00),
       _mm256_permute2x128_si256(m_low, m_high, 0x20), _mm256_castsi256_si128(d)},
      ahead, total);
  if (kBoth) {
    add_record<kColumns>(
        w, w_record, x, g + 1,
        {_mm256_permute2x128_si256(sc_low, sc_low, 0x11), _mm256_permute2x128_si256(sc_high, sc_high, 0x11),
         _mm256_permute2x128_si256(m_low, m_high, 0x31), _mm256_extracti128_si256(d, 1)},
        ahead + 9 * 64, total);
  }
}

// kColumns columns from `column` on against all rows. False, with results unfinished, if a bsum is out of range.
template <int kColumns>
__attribute__((noinline)) bool gemv(const MatMul& p, int64_t column) {
  constexpr int kMost = kMostSpread / kColumns;
  SpreadRecord spread_records[kColumns][kMost];
  float* out = p.out + column * p.out_column;
  for (int64_t first = 0; first < p.records; first += kMost) {
    const int count = static_cast<int>(p.records - first < kMost ? p.records - first : kMost);
    const SpreadRecord* x[kColumns];
    for (int n = 0; n < kColumns; ++n) {
      x[n] = spread_records[n];
      for (int g = 0; g < count; ++g) {
        if (!spread(p.x + (column + n) * p.x_column + (first + g) * p.x_record, spread_records[n][g])) return false;
      }
    }
    for (int64_t row = 0; row < p.rows; row += kRowsTogether) {
      const int64_t left = p.rows - row;
      const uint8_t* w[kRowsTogether];  // the last row stands in for rows past it
      for (int r = 0; r < kRowsTogether; ++r) {
        w[r] = p.w + (row + (r < left ? r : left - 1)) * p.w_row + first * p.w_record;
      }
      float* results = out + row * p.out_row;
      const bool dense = left >= kRowsTogether && p.out_row == 1;
      __m128 total[kColumns];
      for (int n = 0; n < kColumns; ++n) {
        float* each = results + n * p.out_column;
        if (first == 0) {
          total[n] = _mm_set1_ps(-0.0f);
        } else if (dense) {
          total[n] = _mm_loadu_ps(each);
        } else {
          float some[kRowsTogether];
          for (int r = 0; r < kRowsTogether; ++r) some[r] = each[(r < left ? r : left - 1) * p.out_row];
          total[n] = _mm_loadu_ps(some);
        }
      }
      // Rows follow each other in memory: what the next ones hold is fetched while these are multiplied.
      const uint8_t* ahead = w[0] + kRowsTogether * p.w_row + kGemvAhead;
      int g = 0;
      for (; g + 2 <= count; g += 2) {
        add_records<kColumns, true>(w, p.w_record, x, g, ahead, total);
        for (const uint8_t*& each : w) each += 2 * p.w_record;
        ahead += 2 * kRowsTogether * p.w_record;
      }
      if (g < count) add_records<kColumns, false>(w, p.w_record, x, g, ahead, total);
      for (int n = 0; n < kColumns; ++n) {
        float* each = results + n * p.out_column;
        if (dense) {
          _mm_storeu_ps(each, total[n]);
        } else {
          float some[kRowsTogether];
          _mm_storeu_ps(some, total[n]);
          for (int r = 0; r < kRowsTogether && r < left; ++r) each[r * p.out_row] = some[r];
        }
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace jaxquant
