// float32 blocks to q8_k records, once for every vector width: eight blocks share one pair of divisions.
#pragma once

#include <immintrin.h>

#include "record.h"

namespace jaxquant {
namespace {

constexpr int kTogether = 8;

// Lane i becomes the greatest lane of a[i].
JAXQUANT_INLINE __m256i greatest_of_each(const __m256i a[kTogether]) {
  __m256i b[4];
  for (int i = 0; i < 4; ++i) {
    b[i] =
        _mm256_max_epu32(_mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
  }
  const __m256i low = _mm256_max_epu32(_mm256_unpacklo_epi64(b[0], b[1]), _mm256_unpackhi_epi64(b[0], b[1]));
  const __m256i high = _mm256_max_epu32(_mm256_unpacklo_epi64(b[2], b[3]), _mm256_unpackhi_epi64(b[2], b[3]));
  return _mm256_max_epu32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

// Up to eight blocks. What follows them is fetched while the records are written.
template <typename V>
JAXQUANT_INLINE void quantize_few(const uint8_t* values, uint8_t* out, int count) {
  constexpr int kValueBytes = kBlock * 4;
  __m256i partial[kTogether];
  for (int r = 0; r < kTogether; ++r) {
    partial[r] = r < count ? V::greatest_keys(values + r * kValueBytes) : _mm256_setzero_si256();
  }
  const __m256i key = greatest_of_each(partial);
  alignas(32) uint32_t keys[kTogether];
  alignas(32) float inverses[kTogether];
  alignas(32) float scales[kTogether];
  const __m256i extreme = _mm256_or_si256(_mm256_srli_epi32(key, 1), _mm256_slli_epi32(key, 31));
  const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(-127.0f), _mm256_castsi256_ps(extreme));
  _mm256_store_si256(reinterpret_cast<__m256i*>(keys), key);
  _mm256_store_ps(inverses, inverse);
  _mm256_store_ps(scales, _mm256_div_ps(_mm256_set1_ps(1.0f), inverse));
  for (int r = 0; r < count; ++r) {
    if (!has_scale(keys[r])) {
      write_scaleless_record(keys[r], out + r * q8k::kBytes);
    } else {
      V::write_record(values + r * kValueBytes, inverses[r], scales[r], out + r * q8k::kBytes, kTogether * kValueBytes);
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
