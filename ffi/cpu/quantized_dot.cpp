// The XLA handler of jaxquant.quantized_dot and everything vmap makes of it.
#include <algorithm>

#include "axes.h"
#include "kernels.h"
#include "parallel.h"
#include "record.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }

// Pairs of records that are worth a thread of their own, about 10 us of one core.
constexpr int64_t kPairsPerTask = 2048;
// More tasks than threads, so that a thread that was held up does not hold up the rest.
constexpr int64_t kTasksPerThread = 8;

ffi::Error quantized_dot(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Result<ffi::AnyBuffer> result,
                         ffi::Span<const int64_t> lhs_dims, ffi::Span<const int64_t> rhs_dims, ffi::ThreadPool pool) {
  const Kernels& chosen = kernels();
  const ffi::AnyBuffer::Dimensions shape = result->dimensions();
  if (shape.size() > kMaxAxes) return ffi::Error::InvalidArgument("quantized_dot: more than 64 axes in the result");
  if (result->element_count() == 0) return ffi::Error::Success();

  const auto dimensions = [](ffi::AnyBuffer::Dimensions extents) { return Shape{extents.begin(), extents.size()}; };
  const Contraction all = contraction(dimensions(shape), dimensions(lhs.dimensions()), lhs_dims.begin(),
                                      dimensions(rhs.dimensions()), rhs_dims.begin());
  const Axes& axes = all.batch;
  const Axis& rows = all.rows;
  const Axis& columns = all.columns;
  const int64_t products = all.products;
  MatMul whole = {};
  whole.w = static_cast<const uint8_t*>(lhs.untyped_data());
  whole.w_row = rows.w;
  whole.w_record = all.w_record;
  whole.x = static_cast<const uint8_t*>(rhs.untyped_data());
  whole.x_column = columns.x;
  whole.x_record = all.x_record;
  whole.out = static_cast<float*>(result->untyped_data());
  whole.out_row = rows.out;
  whole.out_column = columns.out;
  whole.records = all.records;

  // Split rows first, and columns only where rows are too few: a panel of rows is packed once per split.
  const int64_t depth = std::max<int64_t>(whole.records, 1);
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t pairs = products * rows.extent * columns.extent * depth;
  const int64_t tasks = std::clamp<int64_t>(pairs / kPairsPerTask, 1, threads * kTasksPerThread);
  const int64_t tasks_of_product = (tasks + products - 1) / products;
  const int64_t row_block =
      std::min(rows.extent, round_up((rows.extent + tasks_of_product - 1) / tasks_of_product, chosen.row_step));
  const int64_t row_blocks = (rows.extent + row_block - 1) / row_block;
  const int64_t column_splits = (tasks_of_product + row_blocks - 1) / row_blocks;
  const int64_t column_block =
      std::min(columns.extent, round_up((columns.extent + column_splits - 1) / column_splits, chosen.column_step));
  const int64_t column_blocks = (columns.extent + column_block - 1) / column_block;

  const int64_t blocks = products * row_blocks * column_blocks;
  parallel_for(pool, blocks, (blocks + tasks - 1) / tasks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block / column_blocks % row_blocks * row_block;
      const int64_t column = block % column_blocks * column_block;
      MatMul part = whole;
      int64_t product = block / column_blocks / row_blocks;
      for (int i = axes.count; i-- > 0;) {
        const int64_t at = product % axes.axis[i].extent;
        product /= axes.axis[i].extent;
        part.w += at * axes.axis[i].w;
        part.x += at * axes.axis[i].x;
        part.out += at * axes.axis[i].out;
      }
      part.w += row * rows.w;
      part.x += column * columns.x;
      part.out += row * rows.out + column * columns.out;
      part.rows = std::min(row_block, rows.extent - row);
      part.columns = std::min(column_block, columns.extent - column);
      chosen.matmul(part);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxquant_quantized_dot_v1, quantized_dot,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("lhs_dims")
                                  .Attr<ffi::Span<const int64_t>>("rhs_dims")
                                  .Ctx<ffi::ThreadPool>());
#pragma GCC visibility pop

}  // namespace jaxquant
