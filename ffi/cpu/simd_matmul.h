// The matrix products, written once for every vector width.
//
// Few rows or columns: rows are streamed as they lie in memory, transposed in registers (simd_gemv.h) or with S
// and T of eight records at a time (`dot`). Otherwise two vectors of rows are transposed into a panel and
// multiplied with a few columns at a time (`panel`). Either way each output folds its records in order, lanes
// being outputs.
#pragma once

#include <immintrin.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "kernels.h"
#include "record.h"
#include "simd_gemv.h"

namespace jaxquant {
namespace {

// ---------------------------------------------------------------------------------------------- dot

constexpr int kBatch = 4;           // records of two rows whose S and T are reduced together
constexpr int kRowGroup = 8;        // rows folded together
constexpr int kParkedRecords = 64;  // of a row, whose values are kept before the fold
constexpr int kPrefetchBytes = 2048;

// Lane i becomes the sum of the eight lanes of a[i].
JAXQUANT_INLINE __m256i sums_of_each(const __m256i a[8]) {
  const __m256i b0 = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
  const __m256i b1 = _mm256_hadd_epi32(_mm256_hadd_epi32(a[4], a[5]), _mm256_hadd_epi32(a[6], a[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(b0, b1, 0x20), _mm256_permute2x128_si256(b0, b1, 0x31));
}

// sc[8], m[8] as bytes, of one record in each half. As q4k_scales, in vectors.
JAXQUANT_INLINE __m256i scale_bytes(const uint8_t* low, const uint8_t* high) {
  const __m256i words =
      _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low))),
                              _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);  // d and dmin, a, b, c
  const __m256i acbc = _mm256_shuffle_epi32(words, 0b11101101);
  const __m256i bits_low = _mm256_and_si256(_mm256_srlv_epi32(acbc, _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4)),
                                            _mm256_set1_epi64x(0x0F0F0F0F3F3F3F3F));
  const __m256i aabb = _mm256_srli_epi32(_mm256_shuffle_epi32(words, 0b10100101), 2);
  return _mm256_or_si256(bits_low, _mm256_and_si256(aabb, _mm256_set1_epi64x(0x3030303000000000)));
}

// Eight int32 partial sums whose total is T of one pair of records, for any bytes in bsum.
JAXQUANT_INLINE __m256i partial_t(const uint8_t* x, __m256i scales) {
  const __m256i m =
      _mm256_shuffle_epi8(scales, _mm256_setr_epi8(8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11, -1, 12, -1,
                                                   12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15, -1));
  return _mm256_madd_epi16(m, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + q8k::kBsum)));
}

struct Halves {
  __m256 low;
  __m256 high;
};

// The float16 in the low and in the high half of each 32-bit lane.
JAXQUANT_INLINE Halves halves_to_float(__m256i pairs) {
  const __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF));
  const __m256i high = _mm256_srli_epi32(pairs, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1))};
}

// v of `count` <= 4 consecutive records of two rows, which share the loads of x, into v[0] and v[kParkedRecords].
// `ahead` is memory that will be wanted soon, as much as is read here.
template <typename V, bool kFull>
JAXQUANT_INLINE void values_of_batch(const MatMul& p, const uint8_t* const w[2], const uint8_t* ahead, const uint8_t* x,
                                     const float* ds, int count, float* v) {
  __m256i s[2 * kBatch];
  __m256i t[2 * kBatch];
  alignas(32) uint32_t d[2 * kBatch] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kBatch; ++i) {
    if (!kFull && i >= count) {
      s[i] = s[kBatch + i] = t[i] = t[kBatch + i] = _mm256_setzero_si256();
      continue;
    }
    const uint8_t* w0 = w[0] + i * p.w_record;
    const uint8_t* w1 = w[1] + i * p.w_record;
    const uint8_t* column = x + i * p.x_record;
    const __m256i scales = scale_bytes(w0, w1);
    const __m256i scales0 = _mm256_permute2x128_si256(scales, scales, 0x00);
    const __m256i scales1 = _mm256_permute2x128_si256(scales, scales, 0x11);
    d[i] = load<uint32_t>(w0 + q4k::kD);
    d[kBatch + i] = load<uint32_t>(w1 + q4k::kD);
#pragma GCC unroll 5
    for (int line = 9 * i / 2; line < 9 * (i + 1) / 2; ++line) prefetch(ahead + 64 * line);
    V::partial_s(w0, w1, column, scales0, scales1, s[i], s[kBatch + i]);
    t[i] = partial_t(column, scales0);
    t[kBatch + i] = partial_t(column, scales1);
  }
  const Halves scale = halves_to_float(_mm256_load_si256(reinterpret_cast<const __m256i*>(d)));
  const __m256 product = _mm256_mul_ps(scale.low, _mm256_cvtepi32_ps(sums_of_each(s)));
  const __m256 offset = _mm256_mul_ps(scale.high, _mm256_cvtepi32_ps(sums_of_each(t)));
  const __m256 both = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(ds));
  const __m256 values = _mm256_mul_ps(both, _mm256_sub_ps(product, offset));
  _mm_storeu_ps(v, _mm256_castps256_ps128(values));
  _mm_storeu_ps(v + kParkedRecords, _mm256_extractf128_ps(values, 1));
}

// One column against all rows.
template <typename V>
__attribute__((noinline)) void dot(const MatMul& p, int64_t column) {
  const uint8_t* x = p.x + column * p.x_column;
  float* out = p.out + column * p.out_column;
  alignas(64) float v[kRowGroup][kParkedRecords] = {};
  alignas(64) float ds[kParkedRecords] = {};
  // Rows follow each other in memory. They are read two at a time but fetched one after the other, and the
  // second must be there when the first begins.
  const int64_t distance = p.records * p.w_record + kPrefetchBytes;
  for (int64_t row = 0; row < p.rows; row += kRowGroup) {
    const int rows = static_cast<int>(p.rows - row < kRowGroup ? p.rows - row : kRowGroup);
    float total[kRowGroup];
    for (float& each : total) each = p.records == 0 ? 0.0f : -0.0f;
    for (int64_t first = 0; first < p.records; first += kParkedRecords) {
      const int count = static_cast<int>(p.records - first < kParkedRecords ? p.records - first : kParkedRecords);
      const uint8_t* xs = x + first * p.x_record;
      if (row == 0 || p.records > kParkedRecords) {
        for (int g = 0; g < count; ++g) ds[g] = load<float>(xs + g * p.x_record + q8k::kDs);
      }
      for (int r = 0; r < rows; r += 2) {
        // The last of an odd number of rows is its own partner; its double is dropped.
        const uint8_t* w = p.w + (row + r) * p.w_row;
        const int64_t partner = r + 1 < rows ? p.w_row : 0;
        for (int g = 0; g < count; g += kBatch) {
          const int64_t at = (first + g) * p.w_record;
          const uint8_t* pair[2] = {w + at, w + at + partner};
          const uint8_t* ahead = w + 2 * at + distance;
          if (g + kBatch <= count) {
            values_of_batch<V, true>(p, pair, ahead, xs + g * p.x_record, ds + g, kBatch, &v[r][g]);
          } else {
            values_of_batch<V, false>(p, pair, ahead, xs + g * p.x_record, ds + g, count - g, &v[r][g]);
          }
        }
      }
      // The totals of rows past the last are dropped.
      for (int g = 0; g < count; ++g) {
        for (int r = 0; r < kRowGroup; ++r) total[r] = jaxquant::add(total[r], v[r][g]);
      }
    }
    for (int r = 0; r < rows; ++r) out[(row + r) * p.out_row] = total[r];
  }
}

// -------------------------------------------------------------------------------------------- panel

// One record of kRows rows, ready to be multiplied: lanes are rows.
template <typename V>
struct alignas(64) PanelRecord {
  static constexpr int kRows = 2 * V::kLanes;
  uint32_t q[kBlock / 4][kRows];      // four consecutive 4-bit elements as bytes
  uint32_t sc[kSubBlocks][kRows];     // twice, as int16
  uint32_t m[kSubBlocks / 2][kRows];  // of two neighbouring sub-blocks, as int16
  float d[kRows];
  float dmin[kRows];
};

JAXQUANT_INLINE void transpose_8x8(__m256i a[8]) {
  __m256i b[8];
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  __m256i c[8];
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    c[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    c[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    c[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2x128_si256(c[i], c[i + 4], 0x20);
    a[i + 4] = _mm256_permute2x128_si256(c[i], c[i + 4], 0x31);
  }
}

// Rows past `rows` repeat the last one; their results are never stored.
template <typename V>
JAXQUANT_INLINE void pack_record(const uint8_t* w, int64_t w_row, int rows, PanelRecord<V>& panel) {
  const __m256i low = _mm256_set1_epi8(15);
  for (int group = 0; group < PanelRecord<V>::kRows; group += 8) {
    const uint8_t* row[8];
    for (int r = 0; r < 8; ++r) row[r] = w + (group + r < rows ? group + r : rows - 1) * w_row;
    const auto store = [group](uint32_t* lanes, __m256i a) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + group), a);
    };

    for (int c = 0; c < 4; ++c) {
      __m256i packed[8];
      for (int r = 0; r < 8; ++r) {
        packed[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[r] + q4k::kQ + 32 * c));
      }
      transpose_8x8(packed);
      for (int j = 0; j < 8; ++j) {
        store(panel.q[16 * c + j], _mm256_and_si256(packed[j], low));
        store(panel.q[16 * c + 8 + j], _mm256_and_si256(_mm256_srli_epi16(packed[j], 4), low));
      }
    }

    alignas(32) uint32_t d[8];
    for (int r = 0; r < 8; ++r) d[r] = load<uint32_t>(row[r] + q4k::kD);
    const Halves half = halves_to_float(_mm256_load_si256(reinterpret_cast<const __m256i*>(d)));
    _mm256_store_ps(panel.d + group, half.low);
    _mm256_store_ps(panel.dmin + group, half.high);
    __m256i words[4];  // word i of every row: sc[0..3], sc[4..7], m[0..3], m[4..7]
    for (int r = 0; r < 4; ++r) words[r] = scale_bytes(row[r], row[r + 4]);
    const __m256i ab_low = _mm256_unpacklo_epi32(words[0], words[1]);
    const __m256i ab_high = _mm256_unpackhi_epi32(words[0], words[1]);
    const __m256i cd_low = _mm256_unpacklo_epi32(words[2], words[3]);
    const __m256i cd_high = _mm256_unpackhi_epi32(words[2], words[3]);
    words[0] = _mm256_unpacklo_epi64(ab_low, cd_low);
    words[1] = _mm256_unpackhi_epi64(ab_low, cd_low);
    words[2] = _mm256_unpacklo_epi64(ab_high, cd_high);
    words[3] = _mm256_unpackhi_epi64(ab_high, cd_high);
    for (int s = 0; s < kSubBlocks; ++s) {
      store(panel.sc[s], _mm256_shuffle_epi8(words[s / 4], picker(s % 4, s % 4)));
    }
    for (int s = 0; s < kSubBlocks; s += 2) {
      store(panel.m[s / 2], _mm256_shuffle_epi8(words[2 + s / 4], picker(s % 4, s % 4 + 1)));
    }
  }
}

// T of a panel's record and a column whose sums of sub-blocks need not be int16.
template <int kRows>
__attribute__((noinline)) void any_t(const uint32_t m[][kRows], const uint8_t* x, int32_t t[kRows]) {
  for (int r = 0; r < kRows; ++r) t[r] = 0;
  for (int b = 0; b < kSubBlocks; ++b) {
    const uint8_t* bsum = x + q8k::kBsum + 4 * b;
    const int32_t sum = load<int16_t>(bsum) + load<int16_t>(bsum + 2);
    for (int r = 0; r < kRows; ++r) t[r] += static_cast<int32_t>(m[b / 2][r] >> (16 * (b % 2)) & 63) * sum;
  }
}

// totals[c * kRows + r] += v of `records` records of the panel's rows and kColumns columns at x, in order.
// `fetch` bytes at `ahead` per sub-block are fetched meanwhile.
template <typename V, int kColumns>
__attribute__((noinline)) void tile(const PanelRecord<V>* panel, int records, const uint8_t* x, int64_t x_column,
                                    int64_t x_record, float* totals, const uint8_t* ahead, int64_t fetch) {
  constexpr int kRows = PanelRecord<V>::kRows;
  for (int g = 0; g < records; ++g) {
    const PanelRecord<V>& record = panel[g];
    const uint8_t* column[kColumns];
    for (int c = 0; c < kColumns; ++c) column[c] = x + c * x_column + g * x_record;

    typename V::Int s[kColumns][2];
    for (int b = 0; b < kSubBlocks; ++b) {
      for (const uint8_t* end = ahead + fetch; ahead < end; ahead += 64) prefetch(ahead);
      typename V::Int sum[kColumns][2];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const typename V::Int w0 = V::load(record.q[8 * b + j]);
        const typename V::Int w1 = V::load(record.q[8 * b + j] + V::kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          const typename V::Int activation = V::broadcast(column[c] + q8k::kQ + kSubBlock * b + 4 * j);
          if (j == 0) {
            sum[c][0] = V::products(w0, activation);
            sum[c][1] = V::products(w1, activation);
          } else {
            sum[c][0] = V::add_products(sum[c][0], w0, activation);
            sum[c][1] = V::add_products(sum[c][1], w1, activation);
          }
          V::pin(sum[c][0]);
          V::pin(sum[c][1]);
        }
      }
      const typename V::Int sc0 = V::load(record.sc[b]);
      const typename V::Int sc1 = V::load(record.sc[b] + V::kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const typename V::Int s0 = V::scaled_sum(sum[c][0], sc0);
        const typename V::Int s1 = V::scaled_sum(sum[c][1], sc1);
        s[c][0] = b == 0 ? s0 : V::add32(s[c][0], s0);
        s[c][1] = b == 0 ? s1 : V::add32(s[c][1], s1);
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      alignas(16) uint32_t pairs[4];
      alignas(64) int32_t any[kRows];
      const bool legal = bsum_pairs(column[c], pairs);
      if (!legal) any_t<kRows>(record.m, column[c], any);
      const typename V::Float ds = V::splat(load<float>(column[c] + q8k::kDs));
      for (int i = 0; i < 2; ++i) {
        typename V::Int t;
        if (legal) {
          const auto product = [&](int j) {
            return V::madd(V::load(record.m[j] + i * V::kLanes), V::broadcast(reinterpret_cast<uint8_t*>(&pairs[j])));
          };
          t = V::add32(V::add32(product(0), product(1)), V::add32(product(2), product(3)));
        } else {
          t = V::load(any + i * V::kLanes);
        }
        const typename V::Float p = V::mul(V::load_float(record.d + i * V::kLanes), V::to_float(s[c][i]));
        const typename V::Float n = V::mul(V::load_float(record.dmin + i * V::kLanes), V::to_float(t));
        float* total = totals + c * kRows + i * V::kLanes;
        V::store_float(total, V::add(V::load_float(total), V::mul(ds, V::sub(p, n))));
      }
    }
  }
}

template <typename V>
using Tile = void (*)(const PanelRecord<V>*, int, const uint8_t*, int64_t, int64_t, float*, const uint8_t*, int64_t);

// tiles[c] is the tile of c columns.
template <typename V, int... kColumns>
constexpr Tile<V> tile_of(int columns, std::integer_sequence<int, kColumns...>) {
  constexpr Tile<V> tiles[] = {tile<V, kColumns + 1>...};
  return tiles[columns - 1];
}

constexpr int kPanelRecords = 16;  // of a panel that many columns share: it stays in the L2 cache
constexpr int kFewColumns = 64;    // up to here one record is packed and used at once, in the L1 cache

template <typename V>
struct Scratch {
  PanelRecord<V> panel[kPanelRecords];
  alignas(64) float totals[kFewColumns * PanelRecord<V>::kRows];
};

template <typename V>
Scratch<V>& scratch() {
  struct Free {
    void operator()(Scratch<V>* p) const { free(p); }
  };
  thread_local std::unique_ptr<Scratch<V>, Free> mine(static_cast<Scratch<V>*>(aligned_alloc(64, sizeof(Scratch<V>))));
  if (!mine) throw std::bad_alloc();
  return *mine;
}

// All columns against the rows from `row` on that fit a panel.
template <typename V>
void panel(const MatMul& p, int64_t row) {
  constexpr int kRows = PanelRecord<V>::kRows;
  constexpr int kColumns = V::kTileColumns;
  Scratch<V>& mine = scratch<V>();
  count_packed_panel();
  const int rows = static_cast<int>(p.rows - row < kRows ? p.rows - row : kRows);
  const uint8_t* w = p.w + row * p.w_row;
  float* out = p.out + row * p.out_row;
  const bool few = p.columns <= kFewColumns;
  const int64_t step = few ? 1 : kPanelRecords;

  if (few) {
    for (int64_t i = 0; i < p.columns * kRows; ++i) mine.totals[i] = -0.0f;
  }
  for (int64_t first = 0; first < p.records; first += step) {
    const int records = static_cast<int>(p.records - first < step ? p.records - first : step);
    for (int g = 0; g < records; ++g) pack_record<V>(w + (first + g) * p.w_record, p.w_row, rows, mine.panel[g]);
    for (int64_t c = 0; c < p.columns; c += kColumns) {
      const int columns = static_cast<int>(p.columns - c < kColumns ? p.columns - c : kColumns);
      const Tile<V> multiply_tile = tile_of<V>(columns, std::make_integer_sequence<int, kColumns>());
      const uint8_t* x = p.x + c * p.x_column + first * p.x_record;
      float* totals = few ? mine.totals + c * kRows : mine.totals;
      float* results = out + c * p.out_column;
      if (!few) {
        for (int i = 0; i < columns; ++i) {
          for (int r = 0; r < kRows; ++r) {
            totals[i * kRows + r] = first == 0 || r >= rows ? -0.0f : results[r * p.out_row + i * p.out_column];
          }
        }
      }
      const int64_t fetch = c == 0 ? kRows * q4k::kBytes / kSubBlocks : 0;
      multiply_tile(mine.panel, records, x, p.x_column, p.x_record, totals, w + (p.w_row + first * q4k::kBytes) * kRows,
                    fetch);
      if (!few || first + records == p.records) {
        for (int i = 0; i < columns; ++i) {
          for (int r = 0; r < rows; ++r) results[r * p.out_row + i * p.out_column] = totals[i * kRows + r];
        }
      }
    }
  }
}

template <typename V>
void matmul(const MatMul& p) {
  // A panel of so few rows would multiply mostly copies of the last one.
  const bool few_rows = p.rows <= PanelRecord<V>::kRows / 4;
  if (p.columns <= V::kStreamedColumns || few_rows || p.records == 0) {
    for (int64_t c = 0; c < p.columns;) {
      const bool two = p.columns - c >= 2;
      const bool transposes = V::kTransposesInRegisters && p.rows > kRowsTogether / 2 && p.records > 0;
      const bool done = transposes && (two ? gemv<2>(p, c) : gemv<1>(p, c));
      for (const int64_t end = c + (two ? 2 : 1); c < end; ++c) {
        if (!done) dot<V>(p, c);
      }
    }
    return;
  }
  for (int64_t row = 0; row < p.rows; row += PanelRecord<V>::kRows) panel<V>(p, row);
}

}  // namespace
}  // namespace jaxquant
