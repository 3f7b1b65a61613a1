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

enum class Element { kE4M3, kE5M2, kE3M2, kE2M3, kE2M1, kInt8 };
enum class Scale { kNone, kE8M0, kE4M3 };

// Blocks of narrow elements as [blocks, block, inner]: `inner` blocks lie side by side, and each has a scale in
// [blocks, inner]. Packed elements are packed along `block`, a multiple of kUnit.
struct Blocks {
  Element element;
  Scale scale;
  bool packed;
  int64_t block;
  int64_t inner;
  int64_t blocks_per_outer;  // consecutive blocks that share an outer scale, of all of `inner`
  bool stream;               // write past the caches

  // Work is split into pieces of one block: of all of `inner` if that is 1, else of a tile of it.
  static constexpr int64_t kTile = 128;
  static constexpr int kUnit = 16;
  int64_t tiles() const { return (inner + kTile - 1) / kTile; }
};

struct DecodeBlocks : Blocks {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* outer;  // or null
  float* values;
};

struct EncodeBlocks : Blocks {
  const float* values;
  const float* outer;  // of E4M3 scales
  uint8_t* codes;
  uint8_t* scales;
  int32_t up_from;  // of scale_byte
  int lowered;
  bool saturate;  // infinities count as the largest finite number
};

struct Kernels {
  const char* isa;
  // float32 [records, 256] to q8_k records, both contiguous, of any alignment; `stream` writes past the caches.
  void (*quantize)(const uint8_t* values, uint8_t* out, int64_t records, bool stream);
  void (*matmul)(const MatMul& problem);
  // Pieces [begin, end) of a problem.
  void (*decode_blocks)(const DecodeBlocks& problem, int64_t begin, int64_t end);
  void (*encode_blocks)(const EncodeBlocks& problem, int64_t begin, int64_t end);
  // Splitting a matmul between threads at multiples of these wastes nothing.
  int64_t row_step;
  int64_t column_step;
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvxVnni;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
void avx2_decode_blocks(const DecodeBlocks& problem, int64_t begin, int64_t end);
void avx2_encode_blocks(const EncodeBlocks& problem, int64_t begin, int64_t end);
#endif
#if defined(__aarch64__)
extern const Kernels kNeonDotprod;
extern const Kernels kNeonI8mm;
#endif

// Counts weight panels that were packed, all threads together.
void count_packed_panel();

// The table in use.
const Kernels& kernels();

}  // namespace jaxquant
