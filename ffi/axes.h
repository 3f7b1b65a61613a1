// What XLA hands a quantized_dot handler, as matrices: axes become strides, nothing is ever transposed.
//
// lhs_dims and rhs_dims name, for each axis of an operand but the last, the axis of the result that it
// runs along, or -1 for the record axis.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace jaxquant {

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

// The shape of an operand or of the result.
struct Shape {
  const int64_t* extents;
  size_t rank;
};

// Strides of an operand's axes into `axes`, by `stride` of Axis; returns the stride of the record axis.
inline int64_t place_axes(Shape shape, const int64_t* dims, int64_t Axis::* stride, Axes& axes) {
  int64_t step = shape.extents[shape.rank - 1];
  int64_t record = 0;
  for (size_t i = shape.rank - 1; i-- > 0;) {
    if (dims[i] < 0) {
      record = step;
    } else {
      axes.axis[static_cast<size_t>(dims[i])].*stride = step;
    }
    step *= shape.extents[i];
  }
  return record;
}

// Drops axes of one element and joins neighbours that are one axis in each operand and in the result.
inline void simplify(Axes& axes) {
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
inline Axis take_longest(Axes& axes, bool (Axis::*wanted)() const) {
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

// A matrix product of rows and columns over `records`, repeated along the `batch` axes.
struct Contraction {
  Axis rows;
  Axis columns;
  Axes batch;
  int64_t products = 1;  // elements of the batch axes
  int64_t w_record = 0;
  int64_t x_record = 0;
  int64_t records = 0;
};

// The result may have at most kMaxAxes axes.
inline Contraction contraction(Shape result, Shape lhs, const int64_t* lhs_dims, Shape rhs, const int64_t* rhs_dims) {
  Contraction whole;
  whole.batch.count = static_cast<int>(result.rank);
  int64_t step = 1;
  for (size_t i = result.rank; i-- > 0;) {
    whole.batch.axis[i].extent = result.extents[i];
    whole.batch.axis[i].out = step;
    step *= result.extents[i];
  }
  whole.w_record = place_axes(lhs, lhs_dims, &Axis::w, whole.batch);
  whole.x_record = place_axes(rhs, rhs_dims, &Axis::x, whole.batch);
  for (size_t i = 0; i + 1 < lhs.rank; ++i) {
    if (lhs_dims[i] < 0) whole.records = lhs.extents[i];
  }
  simplify(whole.batch);
  whole.rows = take_longest(whole.batch, &Axis::is_row);
  whole.columns = take_longest(whole.batch, &Axis::is_column);
  for (int i = 0; i < whole.batch.count; ++i) whole.products *= whole.batch.axis[i].extent;
  return whole;
}

}  // namespace jaxquant
