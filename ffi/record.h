// The record formats and the float steps of the contract: the only place that knows a byte layout.
// Host and device code include it alike.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAXQUANT_INLINE static __host__ __device__ __forceinline__
#else
// Always inline: translation units built for different instruction sets must not share a copy.
#define JAXQUANT_INLINE static inline __attribute__((always_inline))
#endif

namespace jaxquant {

constexpr int kBlock = 256;    // logical elements of a record
constexpr int kSubBlock = 32;  // elements that share a q4_k scale and minimum
constexpr int kSubBlocks = kBlock / kSubBlock;

namespace q4k {
constexpr int kBytes = 144;
constexpr int kD = 0;       // float16
constexpr int kDmin = 2;    // float16
constexpr int kScales = 4;  // twelve bytes: 6-bit sc[8] and m[8]
constexpr int kQ = 16;      // per 64 elements 32 bytes: the first 32 in the low nibbles, the rest in the high
}  // namespace q4k

namespace q8k {
constexpr int kBytes = 292;
constexpr int kDs = 0;      // float32
constexpr int kQ = 4;       // int8
constexpr int kBsum = 260;  // int16 sums of 16 elements
constexpr int kSums = 16;
constexpr int kSumBlock = kBlock / kSums;
constexpr uint32_t kPoison = 0x7FC00000u;  // ds of a record whose input was out of domain
}  // namespace q8k

template <typename T>
JAXQUANT_INLINE T load(const uint8_t* bytes) {
  T value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T>
JAXQUANT_INLINE void store(uint8_t* bytes, T value) {
  memcpy(bytes, &value, sizeof value);
}

template <typename To, typename From>
JAXQUANT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The five float steps, each rounded once to nearest even.
JAXQUANT_INLINE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

JAXQUANT_INLINE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

JAXQUANT_INLINE float subtract(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

JAXQUANT_INLINE float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

JAXQUANT_INLINE float to_float(int32_t i) {
#if defined(__CUDA_ARCH__)
  return __int2float_rn(i);
#else
  return static_cast<float>(i);
#endif
}

// Exact, in integers: no flag of the float unit matters. On the device one exact instruction.
JAXQUANT_INLINE float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1Fu;
  uint32_t fraction = half & 0x3FFu;
  if (exponent == 31) return bit_cast<float>(sign | 0x7F800000u | (fraction << 13));
  if (exponent != 0) return bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  if (fraction == 0) return bit_cast<float>(sign);
  uint32_t field = 113;
  while ((fraction & 0x400u) == 0) {
    fraction <<= 1;
    --field;
  }
  return bit_cast<float>(sign | (field << 23) | ((fraction & 0x3FFu) << 13));
#endif
}

// The 6-bit scales and minimums, one per byte, the first in the lowest byte.
struct Q4KScales {
  uint64_t sc;
  uint64_t m;
};

// From the twelve bytes at kScales, as little-endian words.
JAXQUANT_INLINE Q4KScales q4k_scales(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t sc_high = (c & 0x0F0F0F0Fu) | ((a >> 2) & 0x30303030u);
  const uint32_t m_high = ((c >> 4) & 0x0F0F0F0Fu) | ((b >> 2) & 0x30303030u);
  return {(a & 0x3F3F3F3Fu) | static_cast<uint64_t>(sc_high) << 32, (b & 0x3F3F3F3Fu) | static_cast<uint64_t>(m_high)
                                                                                            << 32};
}

JAXQUANT_INLINE Q4KScales q4k_scales(const uint8_t* record) {
  return q4k_scales(load<uint32_t>(record + q4k::kScales), load<uint32_t>(record + q4k::kScales + 4),
                    load<uint32_t>(record + q4k::kScales + 8));
}

// What one pair of records adds to a dot product.
JAXQUANT_INLINE float record_value(float d, float dmin, float ds, int32_t s, int32_t t) {
  const float p = multiply(d, to_float(s));
  const float n = multiply(dmin, to_float(t));
  return multiply(ds, subtract(p, n));
}

// The float that a q8_k block is scaled by, and what undoes it, from its extreme element.
struct Q8KScale {
  float inverse;
  float ds;
};

JAXQUANT_INLINE Q8KScale q8k_scale(float extreme) {
  const float inverse = divide(-127.0f, extreme);
  return {inverse, divide(1.0f, inverse)};
}

// An order of float bits in which the greatest is the largest magnitude, and of a tie the negative one.
JAXQUANT_INLINE uint32_t extreme_key(uint32_t bits) { return (bits << 1) | (bits >> 31); }
JAXQUANT_INLINE uint32_t extreme_bits(uint32_t key) { return (key >> 1) | (key << 31); }
constexpr uint32_t kInfinityKey = 0xFF000000u;  // this or more: the block holds an infinity or NaN
// The least valid extreme is 0x02FE0001; below it, -127 / extreme overflows.
constexpr uint32_t kLeastKey = 0x02FE0001u << 1;

// Whether the block of this greatest key has a scale; if not, its record is zero or poison.
JAXQUANT_INLINE bool has_scale(uint32_t key) { return key >= kLeastKey && key < kInfinityKey; }

JAXQUANT_INLINE void write_scaleless_record(uint32_t key, uint8_t* out) {
  memset(out, 0, q8k::kBytes);
  const bool zero = key <= 1;
  if (!zero) store(out + q8k::kDs, q8k::kPoison);
}

}  // namespace jaxquant
