// The kernels in plain C++: the reference the others are held to, and what runs where nothing better does.
#include <cmath>

#include "kernels.h"
#include "record.h"
#include "simd_blocks.h"

namespace jaxquant {
namespace {

void quantize_record(const uint8_t* values, uint8_t* out) {
  uint32_t key = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t candidate = extreme_key(load<uint32_t>(values + 4 * i));
    if (candidate > key) key = candidate;
  }
  if (!has_scale(key)) {
    write_scaleless_record(key, out);
    return;
  }
  const Q8KScale scale = q8k_scale(bit_cast<float>(extreme_bits(key)));
  store(out + q8k::kDs, scale.ds);
  for (int j = 0; j < q8k::kSums; ++j) {
    int sum = 0;
    for (int i = j * q8k::kSumBlock; i < (j + 1) * q8k::kSumBlock; ++i) {
      const float scaled = std::nearbyintf(multiply(load<float>(values + 4 * i), scale.inverse));
      const int q = scaled > 127.0f ? 127 : scaled < -128.0f ? -128 : static_cast<int>(scaled);
      store(out + q8k::kQ + i, static_cast<int8_t>(q));
      sum += q;
    }
    store(out + q8k::kBsum + 2 * j, static_cast<int16_t>(sum));
  }
}

void quantize(const uint8_t* values, uint8_t* out, int64_t records, bool /*stream*/) {
  for (int64_t r = 0; r < records; ++r) {
    quantize_record(values + r * (kBlock * 4), out + r * q8k::kBytes);
  }
}

float dot_record(const uint8_t* w, const uint8_t* x) {
  const Q4KScales scales = q4k_scales(w);
  int32_t s = 0;
  int32_t t = 0;
  for (int b = 0; b < kSubBlocks; ++b) {
    const uint8_t* packed = w + q4k::kQ + kSubBlock * (b / 2);
    const int shift = 4 * (b % 2);
    int32_t sum = 0;
    for (int i = 0; i < kSubBlock; ++i) {
      sum += ((packed[i] >> shift) & 15) * load<int8_t>(x + q8k::kQ + kSubBlock * b + i);
    }
    const uint8_t* bsum = x + q8k::kBsum + 4 * b;
    s += static_cast<int32_t>((scales.sc >> (8 * b)) & 63) * sum;
    t += static_cast<int32_t>((scales.m >> (8 * b)) & 63) * (load<int16_t>(bsum) + load<int16_t>(bsum + 2));
  }
  return record_value(half_to_float(load<uint16_t>(w + q4k::kD)), half_to_float(load<uint16_t>(w + q4k::kDmin)),
                      load<float>(x + q8k::kDs), s, t);
}

void matmul(const MatMul& problem) {
  for (int64_t r = 0; r < problem.rows; ++r) {
    for (int64_t c = 0; c < problem.columns; ++c) {
      const uint8_t* w = problem.w + r * problem.w_row;
      const uint8_t* x = problem.x + c * problem.x_column;
      // No initial term: -0 is the identity of addition, +0 the dot of no records.
      float total = problem.records == 0 ? 0.0f : -0.0f;
      for (int64_t g = 0; g < problem.records; ++g) {
        total = add(total, dot_record(w + g * problem.w_record, x + g * problem.x_record));
      }
      problem.out[r * problem.out_row + c * problem.out_column] = total;
    }
  }
}

}  // namespace

const Kernels kPortable = {"portable", quantize, matmul, decode_blocks, encode_blocks, 1, 1};

}  // namespace jaxquant
