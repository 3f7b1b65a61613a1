// Which kernel a product of matrices runs on, and on how many blocks.
#pragma once

#include "axes.h"
#include "dot.h"
#include "matmul.h"
#include "problem.h"
#include "quantize.h"

namespace jaxquant {

enum class Kernel { kBytes, kDot1, kDot2, kDot4, kNarrow8, kNarrow16, kWide64, kWide192 };
constexpr int kKernels = 8;

struct Device {
  int capability;  // 10 * major + minor
  int processors;
  int shared_bytes;  // that a block may have
};

struct Tiling {
  int rows;
  int columns;
  int tiles;  // of a block
  int threads;
  int shared;
};

inline Tiling tiling(Kernel kernel) {
  constexpr int kDotThreads = kDotWarps * kWarp;
  switch (kernel) {
    case Kernel::kBytes:
    case Kernel::kDot1:
      return {kDotRows, 1, kDotWarps, kDotThreads, 0};
    case Kernel::kDot2:
      return {kDotRows, 2, kDotWarps, kDotThreads, 0};
    case Kernel::kDot4:
      return {kDotRows, 4, kDotWarps, kDotThreads, 0};
    case Kernel::kNarrow8:
      return {Narrow8::kRows, Narrow8::kColumns, 1, Narrow8::kThreads, Narrow8::kShared};
    case Kernel::kNarrow16:
      return {Narrow16::kRows, Narrow16::kColumns, 1, Narrow16::kThreads, Narrow16::kShared};
    case Kernel::kWide64:
      return {Wide64::kRows, Wide64::kColumns, 1, Wide64::kThreads, Wide64::kShared};
    case Kernel::kWide192:
      return {Wide192::kRows, Wide192::kColumns, 1, Wide192::kThreads, Wide192::kShared};
  }
  return {};
}

inline int64_t blocks_of(const Problem& problem, Kernel kernel) {
  const Tiling by = tiling(kernel);
  const int64_t tiles =
      problem.products * ((problem.rows + by.rows - 1) / by.rows) * ((problem.columns + by.columns - 1) / by.columns);
  return (tiles + by.tiles - 1) / by.tiles;
}

inline Kernel choose(const Problem& problem, const Device& device) {
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  // Strides are whole records, so that they keep the alignment of the operands.
  if (address(problem.w) % 16 != 0 || address(problem.x) % 4 != 0) return Kernel::kBytes;
  if (problem.columns == 1) return Kernel::kDot1;
  if (problem.columns == 2) return Kernel::kDot2;
  const bool has_tensor_cores = device.capability >= 80;  // for int8 by 32 elements
  Kernel best = Kernel::kNarrow8;
  if (problem.columns > 8) best = Kernel::kNarrow16;
  if (problem.columns > 16) {
    best = blocks_of(problem, Kernel::kWide192) >= 2 * device.processors ? Kernel::kWide192 : Kernel::kWide64;
  }
  return has_tensor_cores && tiling(best).shared <= device.shared_bytes ? best : Kernel::kDot4;
}

inline Problem problem_of(const Contraction& all, const uint8_t* w, const uint8_t* x, float* out) {
  Problem problem = {};
  problem.w = w;
  problem.w_row = all.rows.w;
  problem.w_record = all.w_record;
  problem.x = x;
  problem.x_column = all.columns.x;
  problem.x_record = all.x_record;
  problem.out = out;
  problem.out_row = all.rows.out;
  problem.out_column = all.columns.out;
  problem.rows = all.rows.extent;
  problem.columns = all.columns.extent;
  problem.records = all.records;
  problem.products = all.products;
  problem.batch_axes = all.batch.count;
  std::copy(all.batch.axis.begin(), all.batch.axis.begin() + all.batch.count, problem.batch);
  return problem;
}

}  // namespace jaxquant
