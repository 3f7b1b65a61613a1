// What kernels ask of the machine: loads, copies to shared memory, exchanges within a warp, dot products.
//
// nvcc compiles them to instructions. Any other compiler takes them from a "simulation.h" on its include
// path, which runs blocks of threads on a CPU: the kernels above these functions are the same code.
#pragma once

#include "record.h"

namespace jaxquant {

struct alignas(8) Words2 {
  uint32_t word[2];
};
struct alignas(16) Words4 {
  uint32_t word[4];
};

constexpr int kWarp = 32;

}  // namespace jaxquant

#if !defined(__CUDACC__)
#include "simulation.h"
#else

#define JAXQUANT_DEVICE static __device__ __forceinline__
#define JAXQUANT_DEVICE_MEMBER __device__ __forceinline__

namespace jaxquant {

// Global memory that nothing writes while the kernel runs; p is aligned to the size of what is read.
JAXQUANT_DEVICE uint8_t read_byte(const uint8_t* p) { return __ldg(p); }
JAXQUANT_DEVICE uint32_t read_word(const uint8_t* p) { return __ldg(reinterpret_cast<const uint32_t*>(p)); }
JAXQUANT_DEVICE Words4 read_words4(const uint8_t* p) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(p));
  return {{words.x, words.y, words.z, words.w}};
}

template <typename T>
JAXQUANT_DEVICE void write_global(T* p, T value) {
  *p = value;
}

template <typename T>
JAXQUANT_DEVICE T read_shared(const uint8_t* p) {
  return *reinterpret_cast<const T*>(p);
}

template <typename T>
JAXQUANT_DEVICE void write_shared(uint8_t* p, T value) {
  *reinterpret_cast<T*>(p) = value;
}

// Every lane of the warp takes part in what follows.
JAXQUANT_DEVICE uint32_t shuffle(uint32_t value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
JAXQUANT_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, value, mask); }
JAXQUANT_DEVICE void sync_warp() { __syncwarp(); }
JAXQUANT_DEVICE void sync_block() { __syncthreads(); }

// c plus the dot product of four int8 with four int8.
JAXQUANT_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), c);
}

// The same value, of which the compiler does not know that.
JAXQUANT_DEVICE int64_t anew(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Four of the eight bytes of a and b, each chosen by four bits.
JAXQUANT_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// Round to nearest even, saturating.
JAXQUANT_DEVICE int32_t round_to_int(float value) { return __float2int_rn(value); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// From global to shared memory, behind the thread's back.
template <int kBytes>
JAXQUANT_DEVICE void copy_async(uint8_t* to, const uint8_t* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  } else {
    static_assert(kBytes == 4, "copies are of 4 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
  }
}
JAXQUANT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most kPending of the thread's latest groups of copies are under way.
template <int kPending>
JAXQUANT_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Matrix products of a warp, in the layouts that fragments.h describes.
// [16, 32] int8 times [32, 8] int8.
JAXQUANT_DEVICE void multiply_s8_k32(int32_t (&c)[4], const uint32_t (&a)[4], Words2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.word[0]), "r"(b.word[1]), "r"(0));
}
// [16, 16] uint8 times [16, 8] uint8, or int8.
JAXQUANT_DEVICE void multiply_u8_k16(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(0));
}
JAXQUANT_DEVICE void multiply_u8_s8_k16(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(0));
}

#endif

}  // namespace jaxquant

#endif

namespace jaxquant {

// How operands are read: by words where they are aligned to them, or by bytes.
struct ByWords {
  JAXQUANT_DEVICE Words4 words4(const uint8_t* p) { return read_words4(p); }
  JAXQUANT_DEVICE uint32_t word(const uint8_t* p) { return read_word(p); }
};
struct ByBytes {
  JAXQUANT_DEVICE uint32_t word(const uint8_t* p) {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(read_byte(p + i)) << (8 * i);
    return value;
  }
  JAXQUANT_DEVICE Words4 words4(const uint8_t* p) { return {{word(p), word(p + 4), word(p + 8), word(p + 12)}}; }
};

}  // namespace jaxquant
