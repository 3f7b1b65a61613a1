// What a kernel is to multiply, and how a block finds its part of it.
#pragma once

#include "axes.h"
#include "device.h"

namespace jaxquant {

// out[p, r, c] = dot of weight row r with activation column c, each of `records` records, in product p.
// Strides of w and x are in bytes, those of out in elements.
struct Problem {
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
  int64_t products;
  int batch_axes;
  Axis batch[kMaxAxes];
};

constexpr int kMostOfTile = 1024;  // rows, or columns

// A tile of the results of one product.
struct Tile {
  const uint8_t* w;
  const uint8_t* x;
  float* out;
  int64_t row;
  int64_t column;
};

// Tiles that share rows follow each other, so that their weights are read while the cache has them.
JAXQUANT_DEVICE Tile tile_of(const Problem& problem, int64_t index, int tile_rows, int tile_columns) {
  const int64_t column_tiles = (problem.columns + tile_columns - 1) / tile_columns;
  const int64_t row_tiles = (problem.rows + tile_rows - 1) / tile_rows;
  Tile tile = {problem.w, problem.x, problem.out, 0, 0};
  tile.column = index % column_tiles * tile_columns;
  index /= column_tiles;
  tile.row = index % row_tiles * tile_rows;
  index /= row_tiles;
  for (int i = problem.batch_axes; i-- > 0;) {
    const int64_t extent = problem.batch[i].extent;
    const int64_t at = index % extent;
    index /= extent;
    tile.w += at * problem.batch[i].w;
    tile.x += at * problem.batch[i].x;
    tile.out += at * problem.batch[i].out;
  }
  return tile;
}

JAXQUANT_DEVICE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The identity of addition, so that the fold needs no initial term; no records at all give +0.
JAXQUANT_DEVICE float no_value() { return -0.0f; }
JAXQUANT_DEVICE float empty_sum(const Problem& problem) { return problem.records == 0 ? 0.0f : no_value(); }

// The results of a tile from a row and a column of it on, as far as there are any.
struct Results {
  float* out;
  int rows;
  int columns;

  JAXQUANT_DEVICE_MEMBER Results(const Problem& problem, const Tile& tile, int row, int column)
      : out(tile.out + (tile.row + row) * problem.out_row + (tile.column + column) * problem.out_column),
        rows(static_cast<int>(lesser(problem.rows - tile.row - row, kMostOfTile))),
        columns(static_cast<int>(lesser(problem.columns - tile.column - column, kMostOfTile))) {}

  JAXQUANT_DEVICE_MEMBER void write(const Problem& problem, int row, int column, float value) const {
    if (row < rows && column < columns) write_global(out + row * problem.out_row + column * problem.out_column, value);
  }
};

}  // namespace jaxquant
