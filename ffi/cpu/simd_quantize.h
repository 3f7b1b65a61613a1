// float32 blocks to q8_k records, once for every vector width: eight blocks share one pair of divisions.
#pragma once

#include <immintrin.h>

#include "record.h"

namespace jaxquant {
namespace {

JAXQUANT_INLINE void write_empty_record(uint32_t key, uint8_t* out) {
  memset(out, 0, q8k::kBytes);
  const bool zero = key <= 1;
  if (!zero) store(out + q8k::kDs, q8k::kPoison);
}

template <typename V>
void quantize(const uint8_t* values, uint8_t* out, int64_t records) {
  constexpr int kTogether = 8;
  for (int64_t first = 0; first < records; first += kTogether) {
    const int count = static_cast<int>(records - first < kTogether ? records - first : kTogether);
    const uint8_t* v = values + first * (kBlock * 4);
    uint8_t* o = out + first * q8k::kBytes;
    alignas(32) uint32_t keys[kTogether] = {};
    for (int r = 0; r < count; ++r) keys[r] = V::greatest_key(v + r * (kBlock * 4));
    alignas(32) float extremes[kTogether];
    alignas(32) float inverses[kTogether];
    alignas(32) float scales[kTogether];
    for (int r = 0; r < kTogether; ++r) extremes[r] = bit_cast<float>(extreme_bits(keys[r]));
    const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(-127.0f), _mm256_load_ps(extremes));
    _mm256_store_ps(inverses, inverse);
    _mm256_store_ps(scales, _mm256_div_ps(_mm256_set1_ps(1.0f), inverse));
    for (int r = 0; r < count; ++r) {
      if (keys[r] < kLeastKey || keys[r] >= kInfinityKey) {
        write_empty_record(keys[r], o + r * q8k::kBytes);
      } else {
        V::write_record(v + r * (kBlock * 4), inverses[r], scales[r], o + r * q8k::kBytes);
      }
    }
  }
}

}  // namespace
}  // namespace jaxquant
