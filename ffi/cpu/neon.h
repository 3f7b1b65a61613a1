// The kernels of 64-bit ARM, once with dot products of bytes (dotprod), once with 2x2 products besides (i8mm).
//
// Weight records are decoded into the L1 cache, a few rows at a time, and multiplied with the columns four
// results at a time: two rows with two columns, or four rows with the only column.
#pragma once

#include <arm_neon.h>

#include "kernels.h"
#include "record.h"

namespace jaxquant {
namespace {

// ------------------------------------------------------------------------------------------ quantize

JAXQUANT_INLINE uint32_t greatest_key(const uint8_t* values) {
  // As signed integers floats have their greatest above, as unsigned ones their least.
  uint32x4_t bits = vreinterpretq_u32_u8(vld1q_u8(values));
  int32x4_t greatest = vreinterpretq_s32_u32(bits);
  uint32x4_t least = bits;
  for (int i = 16; i < kBlock * 4; i += 16) {
    bits = vreinterpretq_u32_u8(vld1q_u8(values + i));
    greatest = vmaxq_s32(greatest, vreinterpretq_s32_u32(bits));
    least = vmaxq_u32(least, bits);
  }
  const uint32_t above = extreme_key(static_cast<uint32_t>(vmaxvq_s32(greatest)));
  const uint32_t below = extreme_key(vmaxvq_u32(least));
  return above > below ? above : below;
}

// Four scaled floats, rounded to nearest even.
JAXQUANT_INLINE int32x4_t scaled(const uint8_t* values, float32x4_t inverse) {
  return vcvtnq_s32_f32(vmulq_f32(vreinterpretq_f32_u8(vld1q_u8(values)), inverse));
}

void quantize(const uint8_t* values, uint8_t* out, int64_t records, bool /*stream*/) {
  for (int64_t r = 0; r < records; ++r, values += kBlock * 4, out += q8k::kBytes) {
    const uint32_t key = greatest_key(values);
    if (!has_scale(key)) {
      write_scaleless_record(key, out);
      continue;
    }
    const Q8KScale scale = q8k_scale(bit_cast<float>(extreme_bits(key)));
    store(out + q8k::kDs, scale.ds);
    const float32x4_t inverse = vdupq_n_f32(scale.inverse);
    for (int j = 0; j < q8k::kSums; ++j) {
      const uint8_t* v = values + 64 * j;
      const int16x8_t low = vcombine_s16(vqmovn_s32(scaled(v, inverse)), vqmovn_s32(scaled(v + 16, inverse)));
      const int16x8_t high = vcombine_s16(vqmovn_s32(scaled(v + 32, inverse)), vqmovn_s32(scaled(v + 48, inverse)));
      const int8x16_t q = vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
      vst1q_s8(reinterpret_cast<int8_t*>(out + q8k::kQ + 16 * j), q);
      store(out + q8k::kBsum + 2 * j, vaddlvq_s8(q));
    }
  }
}

// -------------------------------------------------------------------------------------------- matmul

constexpr int kDecodedRows = 4;

// A weight record with its elements in order.
struct Decoded {
  int8_t q[kBlock];
  int32_t sc[kSubBlocks];
  int32_t m[kSubBlocks];
  float d;
  float dmin;
};

JAXQUANT_INLINE void decode(const uint8_t* w, Decoded& out) {
  const uint8x16_t low = vdupq_n_u8(15);
  for (int c = 0; c < 4; ++c) {
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t packed = vld1q_u8(w + q4k::kQ + 32 * c + 16 * half);
      vst1q_s8(out.q + 64 * c + 16 * half, vreinterpretq_s8_u8(vandq_u8(packed, low)));
      vst1q_s8(out.q + 64 * c + 32 + 16 * half, vreinterpretq_s8_u8(vshrq_n_u8(packed, 4)));
    }
  }
  const Q4KScales scales = q4k_scales(w);
  const auto widen = [](uint64_t bytes, int32_t to[kSubBlocks]) {
    const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)));
    vst1q_s32(to, vmovl_s16(vget_low_s16(wide)));
    vst1q_s32(to + 4, vmovl_high_s16(wide));
  };
  widen(scales.sc, out.sc);
  widen(scales.m, out.m);
  out.d = half_to_float(load<uint16_t>(w + q4k::kD));
  out.dmin = half_to_float(load<uint16_t>(w + q4k::kDmin));
}

// Lane i becomes the sum of the lanes of a[i].
JAXQUANT_INLINE int32x4_t sums_of_each(const int32x4_t a[4]) {
  return vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3]));
}

JAXQUANT_INLINE const int8_t* elements(const uint8_t* x) { return reinterpret_cast<const int8_t*>(x + q8k::kQ); }

// S of four pairs of records.
JAXQUANT_INLINE int32x4_t four_s(const Decoded* const w[4], const uint8_t* const x[4]) {
  int32x4_t s[4];
  for (int i = 0; i < 4; ++i) {
    s[i] = vdupq_n_s32(0);
    for (int b = 0; b < kSubBlocks; ++b) {
      const int8_t* a = w[i]->q + kSubBlock * b;
      const int8_t* c = elements(x[i]) + kSubBlock * b;
      const int32x4_t first = vdotq_s32(vdupq_n_s32(0), vld1q_s8(a), vld1q_s8(c));
      s[i] = vmlaq_n_s32(s[i], vdotq_s32(first, vld1q_s8(a + 16), vld1q_s8(c + 16)), w[i]->sc[b]);
    }
  }
  return sums_of_each(s);
}

// S of two weight records with two activation records, each pair in w and x twice: as four_s.
JAXQUANT_INLINE int32x4_t two_by_two_s(const Decoded* const w[4], const uint8_t* const x[4]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  const auto both = [](const int8_t* a, const int8_t* b) { return vcombine_s8(vld1_s8(a), vld1_s8(b)); };
  int32x4_t s = vdupq_n_s32(0);
  for (int b = 0; b < kSubBlocks; ++b) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int at = kSubBlock * b; at < kSubBlock * (b + 1); at += 8) {
      sum = vmmlaq_s32(sum, both(w[0]->q + at, w[2]->q + at), both(elements(x[0]) + at, elements(x[1]) + at));
    }
    s = vmlaq_s32(s, sum, vcombine_s32(vdup_n_s32(w[0]->sc[b]), vdup_n_s32(w[2]->sc[b])));
  }
  return s;
#else
  return four_s(w, x);
#endif
}

// T of four pairs of records, for any bytes in bsum.
JAXQUANT_INLINE int32x4_t four_t(const Decoded* const w[4], const uint8_t* const x[4]) {
  int32x4_t t[4];
  for (int i = 0; i < 4; ++i) {
    const auto* bsum = reinterpret_cast<const int16_t*>(x[i] + q8k::kBsum);
    const int32x4_t low = vmulq_s32(vld1q_s32(w[i]->m), vpaddlq_s16(vld1q_s16(bsum)));
    t[i] = vmlaq_s32(low, vld1q_s32(w[i]->m + 4), vpaddlq_s16(vld1q_s16(bsum + 8)));
  }
  return sums_of_each(t);
}

// v of four pairs of records.
JAXQUANT_INLINE float32x4_t four_values(const Decoded* const w[4], const uint8_t* const x[4], bool two_by_two) {
  const float d[4] = {w[0]->d, w[1]->d, w[2]->d, w[3]->d};
  const float dmin[4] = {w[0]->dmin, w[1]->dmin, w[2]->dmin, w[3]->dmin};
  const float ds[4] = {load<float>(x[0]), load<float>(x[1]), load<float>(x[2]), load<float>(x[3])};
  static_assert(q8k::kDs == 0, "ds is read from the first bytes");
  const int32x4_t s = two_by_two ? two_by_two_s(w, x) : four_s(w, x);
  const float32x4_t p = vmulq_f32(vld1q_f32(d), vcvtq_f32_s32(s));
  const float32x4_t n = vmulq_f32(vld1q_f32(dmin), vcvtq_f32_s32(four_t(w, x)));
  return vmulq_f32(vld1q_f32(ds), vsubq_f32(p, n));
}

// kDecodedRows rows from `row` on, with up to kMost columns from `column` on.
JAXQUANT_INLINE void multiply_rows(const MatMul& p, int64_t row, int64_t column) {
  constexpr int kMost = 8;
  const int64_t rows = p.rows - row < kDecodedRows ? p.rows - row : kDecodedRows;
  const int64_t columns = p.columns - column < kMost ? p.columns - column : kMost;
  const auto clamp = [](int64_t i, int64_t count) { return i < count ? i : count - 1; };
  const bool one = columns == 1;
  // Of each group of four results: one column and four rows, or two of both.
  float32x4_t totals[kDecodedRows / 2][kMost / 2];
  for (auto& line : totals) {
    for (float32x4_t& total : line) total = vdupq_n_f32(p.records == 0 ? 0.0f : -0.0f);
  }
  for (int64_t g = 0; g < p.records; ++g) {
    Decoded w[kDecodedRows];
    for (int r = 0; r < kDecodedRows; ++r) {
      if (r < rows) decode(p.w + (row + r) * p.w_row + g * p.w_record, w[r]);
    }
    const Decoded* row_at[kDecodedRows];
    for (int r = 0; r < kDecodedRows; ++r) row_at[r] = &w[clamp(r, rows)];
    const uint8_t* x = p.x + column * p.x_column + g * p.x_record;
    if (one) {
      const uint8_t* same[4] = {x, x, x, x};
      totals[0][0] = vaddq_f32(totals[0][0], four_values(row_at, same, false));
      continue;
    }
    for (int64_t r = 0; r < rows; r += 2) {
      const Decoded* w4[4] = {row_at[r], row_at[r], row_at[r + 1], row_at[r + 1]};
      for (int64_t c = 0; c < columns; c += 2) {
        const uint8_t* x0 = x + c * p.x_column;
        const uint8_t* x1 = x + clamp(c + 1, columns) * p.x_column;
        const uint8_t* x4[4] = {x0, x1, x0, x1};
        float32x4_t& total = totals[r / 2][c / 2];
        total = vaddq_f32(total, four_values(w4, x4, true));
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      float lanes[4];
      vst1q_f32(lanes, one ? totals[0][0] : totals[r / 2][c / 2]);
      p.out[(row + r) * p.out_row + (column + c) * p.out_column] = lanes[one ? r : r % 2 * 2 + c % 2];
    }
  }
}

void matmul(const MatMul& p) {
  for (int64_t row = 0; row < p.rows; row += kDecodedRows) {
    for (int64_t column = 0; column < p.columns; column += 8) multiply_rows(p, row, column);
  }
}

}  // namespace
}  // namespace jaxquant
