// The XLA handler of jaxquant.quantized_dot and everything vmap makes of it.
//
// Attributes lhs_dims and rhs_dims name, for each axis of an operand but the last, the axis of the
// result that it runs along, or -1 for the record axis. Nothing is ever transposed: axes become strides.
#include <algorithm>
#include <array>

#include "kernels.h"
#include "parallel.h"
#include "record.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxAxes = 64;

// An axis of the result, with the strides it makes in the operands (bytes, 0 if absent) and in the result.
struct Axis {
  int64_t extent = 1;
  int64_t w = 0;
  int64_t x = 0;
  int64_t out = 0;

  bool is_row() const { return w != 0 && x == 0; }
  bool is_column() const { return w == 0 && x != 0; }
};

struct Axes {
  std::array<Axis, kMaxAxes> axis;
  int count = 0;
};

// Strides of an operand's axes into `axes`, by `stride` of Axis; returns the stride of the record axis.
int64_t place(ffi::AnyBuffer::Dimensions shape, ffi::Span<const int64_t> dims, int64_t Axis::* stride, Axes& axes) {
  int64_t step = shape.back();
  int64_t record = 0;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] < 0) {
      record = step;
    } else {
      axes.axis[static_cast<size_t>(dims[i])].*stride = step;
    }
    step *= shape[i];
  }
  return record;
}

// Drops axes of one element and joins neighbours that are one axis in each operand and in the result.
void simplify(Axes& axes) {
  int kept = 0;
  for (int i = 0; i < axes.count; ++i) {
    const Axis inner = axes.axis[i];
    if (inner.extent == 1) continue;
    if (kept > 0) {
      Axis& outer = axes.axis[kept - 1];
      if (outer.w == inner.w * inner.extent && outer.x == inner.x * inner.extent &&
          outer.out == inner.out * inner.extent) {
        outer = {outer.extent * inner.extent, inner.w, inner.x, inner.out};
        continue;
      }
    }
    axes.axis[kept++] = inner;
  }
  axes.count = kept;
}

// Takes the longest axis that `wanted` accepts out of `axes`; one of a single element if there is none.
Axis take_longest(Axes& axes, bool (Axis::*wanted)() const) {
  int best = -1;
  for (int i = 0; i < axes.count; ++i) {
    if ((axes.axis[i].*wanted)() && (best < 0 || axes.axis[i].extent > axes.axis[best].extent)) best = i;
  }
  if (best < 0) return {};
  const Axis taken = axes.axis[best];
  std::copy(axes.axis.begin() + best + 1, axes.axis.begin() + axes.count, axes.axis.begin() + best);
  --axes.count;
  return taken;
}

constexpr int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }

// Pairs of records that are worth a thread of their own, about 50 us of one core.
constexpr int64_t kPairsPerTask = 4096;
// More tasks than threads, so that a thread that was held up does not hold up the rest.
constexpr int64_t kTasksPerThread = 8;

ffi::Error quantized_dot(ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Result<ffi::AnyBuffer> result,
                         ffi::Span<const int64_t> lhs_dims, ffi::Span<const int64_t> rhs_dims, ffi::ThreadPool pool) {
  const Kernels& chosen = kernels();
  const ffi::AnyBuffer::Dimensions shape = result->dimensions();
  if (shape.size() > kMaxAxes) return ffi::Error::InvalidArgument("quantized_dot: more than 64 axes in the result");
  if (result->element_count() == 0) return ffi::Error::Success();

  Axes axes;
  axes.count = static_cast<int>(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    axes.axis[i].extent = shape[i];
    axes.axis[i].out = step;
    step *= shape[i];
  }
  MatMul whole = {};
  whole.w = static_cast<const uint8_t*>(lhs.untyped_data());
  whole.x = static_cast<const uint8_t*>(rhs.untyped_data());
  whole.out = static_cast<float*>(result->untyped_data());
  whole.w_record = place(lhs.dimensions(), lhs_dims, &Axis::w, axes);
  whole.x_record = place(rhs.dimensions(), rhs_dims, &Axis::x, axes);
  for (size_t i = 0; i < lhs_dims.size(); ++i) {
    if (lhs_dims[i] < 0) whole.records = lhs.dimensions()[i];
  }

  simplify(axes);
  const Axis rows = take_longest(axes, &Axis::is_row);
  const Axis columns = take_longest(axes, &Axis::is_column);
  whole.w_row = rows.w;
  whole.out_row = rows.out;
  whole.x_column = columns.x;
  whole.out_column = columns.out;
  int64_t products = 1;
  for (int i = 0; i < axes.count; ++i) products *= axes.axis[i].extent;

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
