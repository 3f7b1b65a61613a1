// float32 blocks to q8_k records, one by a warp.
#pragma once

#include "device.h"
#include "fragments.h"

namespace jaxquant {

constexpr int kQuantizeWarps = 8;  // of a block

// `out` is aligned to 4 bytes.
template <typename Read>
JAXQUANT_DEVICE void quantize_record(const uint8_t* values, uint8_t* out, int lane) {
  Words4 bits[2];
  uint32_t key = 0;
  for (int half = 0; half < 2; ++half) {
    bits[half] = Read::words4(values + 4 * quantize_element(lane, half));
    for (const uint32_t word : bits[half].word) {
      const uint32_t candidate = extreme_key(word);
      key = candidate > key ? candidate : key;
    }
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint32_t other = shuffle_xor(key, mask);
    key = other > key ? other : key;
  }

  uint32_t words[2] = {0, 0};
  int32_t sums[2] = {0, 0};
  uint32_t ds = key <= 1 ? 0 : q8k::kPoison;
  // The same for all lanes: they share the key.
  if (has_scale(key)) {
    const Q8KScale scale = q8k_scale(bit_cast<float>(extreme_bits(key)));
    ds = bit_cast<uint32_t>(scale.ds);
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        int32_t q = round_to_int(multiply(bit_cast<float>(bits[half].word[i]), scale.inverse));
        q = q > 127 ? 127 : q < -128 ? -128 : q;
        words[half] |= (static_cast<uint32_t>(q) & 0xFFu) << (8 * i);
        sums[half] += q;
      }
    }
  }
  // Four lanes hold the sixteen elements of a sum, in either half.
  uint32_t bsum = 0;
  for (int half = 0; half < 2; ++half) {
    uint32_t sum = static_cast<uint32_t>(sums[half]);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    const uint32_t first = shuffle(sum, sum_lane(lane % 8));
    const uint32_t second = shuffle(sum, sum_lane(lane % 8) + 4);
    if (half == sum_half(lane % 8)) bsum = (first & 0xFFFFu) | second << 16;
  }

  for (int half = 0; half < 2; ++half) {
    write_global(reinterpret_cast<uint32_t*>(out + q8k::kQ + quantize_element(lane, half)), words[half]);
  }
  if (lane < 8) write_global(reinterpret_cast<uint32_t*>(out + q8k::kBsum + 4 * lane), bsum);
  if (lane == 8) write_global(reinterpret_cast<uint32_t*>(out + q8k::kDs), ds);
}

template <typename Read>
JAXQUANT_DEVICE void quantize_block(const uint8_t* values, uint8_t* out, int64_t records, int64_t block, int thread) {
  const int64_t record = block * kQuantizeWarps + thread / kWarp;
  if (record >= records) return;
  quantize_record<Read>(values + record * (kBlock * 4), out + record * q8k::kBytes, thread % kWarp);
}

}  // namespace jaxquant
