// The kernels of one instruction set, and the table they are reached through. A kernel runs on the
// calling thread and expects round-to-nearest without flushing (float_environment.h).
#pragma once

#include <cstdint>

namespace jaxquant {

// out[r, c] = dot of weight row r with activation column c, each of `records` records.
// Strides of w and x are in bytes, those of out in elements.
struct MatMul {
  const uint8_t* w;
  int64_t w_row;
  int64_t w_record;
  const uint8_t* x;
  int64_t x_column;
  int64_t x_record;
  float* out;
  int64_t out_row;
  int64_t out_column;
  int64_t rows;
  int64_t columns;
  int64_t records;
};

struct Kernels {
  const char* isa;
  // float32 [records, 256] to q8_k records, both contiguous, of any alignment; `stream` writes past the caches.
  void (*quantize)(const uint8_t* values, uint8_t* out, int64_t records, bool stream);
  void (*matmul)(const MatMul& problem);
  // Splitting a matmul between threads at multiples of these wastes nothing.
  int64_t row_step;
  int64_t column_step;
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// The table in use.
const Kernels& kernels();

}  // namespace jaxquant
