// float32 blocks to q8_k records, once for every vector width: eight blocks share one pair of divisions.
#pragma once

#include <immintrin.h>

#include "record.h"

namespace jaxquant {
namespace {

constexpr int kTogether = 8;

// Up to eight blocks. What follows the values is fetched while the extremes are found.
template <typename V>
JAXQUANT_INLINE void quantize_few(const uint8_t* values, uint8_t* out, int count) {
  constexpr int kValueBytes = kBlock * 4;
  alignas(32) uint32_t keys[kTogether] = {};
  for (int r = 0; r < count; ++r) {
    const uint8_t* ahead = values + (kTogether + r) * kValueBytes;
    for (int line = 0; line < kValueBytes; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
    keys[r] = V::greatest_key(values + r * kValueBytes);
  }
  alignas(32) float extremes[kTogether];
  alignas(32) float inverses[kTogether];
  alignas(32) float scales[kTogether];
  for (int r = 0; r < kTogether; ++r) extremes[r] = bit_cast<float>(extreme_bits(keys[r]));
  const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(-127.0f), _mm256_load_ps(extremes));
  _mm256_store_ps(inverses, inverse);
  _mm256_store_ps(scales, _mm256_div_ps(_mm256_set1_ps(1.0f), inverse));
  for (int r = 0; r < count; ++r) {
    if (!has_scale(keys[r])) {
      write_scaleless_record(keys[r], out + r * q8k::kBytes);
    } else {
      V::write_record(values + r * kValueBytes, inverses[r], scales[r], out + r * q8k::kBytes);
    }
  }
}

// So many records fill cache lines exactly.
constexpr int kStreamed = 16;
static_assert(kStreamed * q8k::kBytes % 64 == 0, "streamed records end with a cache line");

template <typename V>
void quantize(const uint8_t* values, uint8_t* out, int64_t records, bool stream) {
  int64_t r = 0;
  if (stream && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
    alignas(64) uint8_t lines[kStreamed * q8k::kBytes];
    for (; r + kStreamed <= records; r += kStreamed) {
      quantize_few<V>(values + r * (kBlock * 4), lines, kTogether);
      quantize_few<V>(values + (r + kTogether) * (kBlock * 4), lines + kTogether * q8k::kBytes, kTogether);
      for (size_t i = 0; i < sizeof lines; i += 32) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + r * q8k::kBytes + i),
                            _mm256_load_si256(reinterpret_cast<const __m256i*>(lines + i)));
      }
    }
    _mm_sfence();
  }
  for (; r < records; r += kTogether) {
    const int count = static_cast<int>(records - r < kTogether ? records - r : kTogether);
    quantize_few<V>(values + r * (kBlock * 4), out + r * q8k::kBytes, count);
  }
}

}  // namespace
}  // namespace jaxquant
