// Matrix products on the int8 tensor cores: one sub-block of 32 elements per instruction, so that S is
// exact, then the float steps of the record in registers.
#pragma once

#include "device.h"
#include "fragments.h"
#include "problem.h"

namespace jaxquant {

// Records in shared memory, at strides that let eight rows of a fragment be read without a bank conflict.
// A weight record lies as it is, padded. An activation record lies without its ds, which has an array of
// its own: q, then bsum.
constexpr int kWeightStride = 160;
constexpr int kActivationStride = 288;
constexpr int kStagedBsum = 256;

// One record of each of kRows rows and kColumns columns.
template <int kRows, int kColumns>
struct Stage {
  static constexpr int kX = kRows * kWeightStride;
  static constexpr int kDs = kX + kColumns * kActivationStride;
  static constexpr int kBytes = kDs + kColumns * 4;
  static_assert(kBytes % 16 == 0, "stages follow each other, and each is aligned to 16 bytes");
};

// What a warp copies of each record of a tile: of kRows rows, three at a time by nine lanes each, and of
// kColumns columns. What is past the end stays as it was; no result that is written depends on it.
template <int kRows, int kColumns>
struct Copy {
  static constexpr int kPieces = q4k::kBytes / 16;
  static constexpr int kRowsAtOnce = kWarp / kPieces;
  static constexpr int kWords = q8k::kBytes / 4;

  // Where this lane reads first, of the next record to copy.
  const uint8_t* w;
  const uint8_t* x;
  // Rows and columns from this lane's first on.
  int rows;
  int columns;

  // Rows from `row` and columns from `column` of the tile on.
  // `columns` is how many the tile has from `column` on, which may be none.
  JAXQUANT_DEVICE Copy begin(const Problem& problem, const Tile& tile, int64_t record, int row, int column, int columns,
                             int lane) {
    const int64_t first_row = tile.row + row + lane / kPieces;
    const int64_t first_column = tile.column + column;
    return {
        tile.w + first_row * problem.w_row + record * problem.w_record + 16 * (lane % kPieces),
        tile.x + first_column * problem.x_column + record * problem.x_record + 4 * lane,
        lane < kRowsAtOnce * kPieces ? static_cast<int>(lesser(kRows - lane / kPieces, problem.rows - first_row)) : 0,
        static_cast<int>(lesser(columns < kColumns ? columns : kColumns, problem.columns - first_column))};
  }

  // Starts to copy to the places of the first row, column and ds; then goes `records` records on.
  JAXQUANT_DEVICE void start(Copy& copy, const Problem& problem, uint8_t* to_w, uint8_t* to_x, uint8_t* to_ds, int lane,
                             int records) {
    const uint8_t* from = copy.w;
    uint8_t* to = to_w + lane / kPieces * kWeightStride + 16 * (lane % kPieces);
#pragma unroll 4
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
      if (row < copy.rows) copy_async<16>(to, from);
      from += kRowsAtOnce * problem.w_row;
      to += kRowsAtOnce * kWeightStride;
    }
    copy.w += records * problem.w_record;
    from = copy.x;
    to = to_x + 4 * lane - q8k::kQ;
#pragma unroll 4
    for (int column = 0; column < kColumns; ++column) {
      if (column < copy.columns) {
        copy_async<4>(lane == 0 ? to_ds + 4 * column : to, from);
        copy_async<4>(to + 4 * kWarp, from + 4 * kWarp);
        if (lane < kWords - 2 * kWarp) copy_async<4>(to + 8 * kWarp, from + 8 * kWarp);
      }
      from += problem.x_column;
      to += kActivationStride;
    }
    copy.x += records * problem.x_record;
  }
};

// Multiplies one record of kTilesDown * 16 rows from `w` on with one of kTilesAcross * 8 columns from `x` on,
// and passes what it adds to each result to emit(i, j, k, value): tile (i, j), accumulator k of this lane.
template <int kTilesDown, int kTilesAcross, typename Emit>
JAXQUANT_DEVICE void multiply_record(const uint8_t* w, const uint8_t* x, const uint8_t* ds, int lane,
                                     const Emit& emit) {
  // A lane has two rows of each tile, the same ones as operand and in the results.
  const uint8_t* first = w + operand_row(lane, 0) * kWeightStride;
  constexpr int kHalfTile = kTileRows / 2 * kWeightStride;
  int32_t s[kTilesDown][kTilesAcross][4] = {};
  uint32_t sc[kTilesDown][2];  // four sub-blocks of each row
#pragma unroll
  for (int pair = 0; pair < kSubBlocks / 2; ++pair) {
    // Keeps the compiler from working on several pairs at once, for which the registers are too few.
    sync_warp();
    if (pair % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto head = read_shared<Words4>(first + (2 * i + half) * kHalfTile);
          sc[i][half] = static_cast<uint32_t>(q4k_scales(head.word[1], head.word[2], head.word[3]).sc >> (16 * pair));
        }
      }
    }
    Words2 packed[kTilesDown][2];
#pragma unroll
    for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        packed[i][half] =
            read_shared<Words2>(first + (2 * i + half) * kHalfTile + q4k::kQ + operand_byte(lane) + kSubBlock * pair);
      }
    }
#pragma unroll
    for (int nibble = 0; nibble < 2; ++nibble) {
      const int sub_block = 2 * pair + nibble;
      uint32_t a[kTilesDown][4];
#pragma unroll
      for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) a[i][k] = (packed[i][k % 2].word[k / 2] >> (4 * nibble)) & 0x0F0F0F0Fu;
      }
#pragma unroll
      for (int j = 0; j < kTilesAcross; ++j) {
        const auto b = read_shared<Words2>(x + (kTileColumns * j + operand_column(lane)) * kActivationStride +
                                           kSubBlock * sub_block + operand_byte(lane));
#pragma unroll
        for (int i = 0; i < kTilesDown; ++i) {
          int32_t dot[4];
          multiply_s8_k32(dot, a[i], b);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            s[i][j][k] += static_cast<int32_t>((sc[i][k / 2] >> (8 * (sub_block % 4))) & 63) * dot[k];
          }
        }
      }
    }
  }

  // T from the bytes of the stored bsum, low ones unsigned and high ones signed: exact for any bytes. Each
  // minimum meets two bsums: as an operand of four k, member j holds minimums 2j and 2j + 1 twice.
#pragma unroll
  for (int i = 0; i < kTilesDown; ++i) {
    uint32_t m[2];
    float d[2];
    float dmin[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto head = read_shared<Words4>(first + (2 * i + half) * kHalfTile);
      const uint64_t all = q4k_scales(head.word[1], head.word[2], head.word[3]).m;
      m[half] = pick_bytes(static_cast<uint32_t>(all >> (16 * fragment_member(lane))), 0, 0x1100);
      d[half] = half_to_float(static_cast<uint16_t>(head.word[0] & 0xFFFFu));
      dmin[half] = half_to_float(static_cast<uint16_t>(head.word[0] >> 16));
    }
#pragma unroll
    for (int j = 0; j < kTilesAcross; ++j) {
      sync_warp();
      const auto sums = read_shared<Words2>(x + (kTileColumns * j + operand_column(lane)) * kActivationStride +
                                            kStagedBsum + operand_byte(lane));
      const auto scale = read_shared<Words2>(ds + 4 * (kTileColumns * j + result_column(lane, 0)));
      int32_t low[4];
      int32_t high[4];
      multiply_u8_k16(low, m, pick_bytes(sums.word[0], sums.word[1], 0x6420));
      multiply_u8_s8_k16(high, m, pick_bytes(sums.word[0], sums.word[1], 0x7531));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        emit(i, j, k,
             record_value(d[k / 2], dmin[k / 2], bit_cast<float>(scale.word[k % 2]), s[i][j][k],
                          low[k] + high[k] * 256));
      }
    }
  }
}

// Many columns: the warps of a block share its rows and columns, and take the records one after the other.
template <int kWarpsDown, int kWarpsAcross, int kTilesDown, int kTilesAcross>
struct Wide {
  static constexpr int kThreads = kWarpsDown * kWarpsAcross * kWarp;
  static constexpr int kRows = kWarpsDown * kTilesDown * kTileRows;
  static constexpr int kColumns = kWarpsAcross * kTilesAcross * kTileColumns;
  // Each warp copies its share of both.
  static constexpr int kWarps = kWarpsDown * kWarpsAcross;
  static constexpr int kRowsOfWarp = kRows / kWarps;
  static constexpr int kColumnsOfWarp = (kColumns + kWarps - 1) / kWarps;
  static_assert(kRows % kWarps == 0, "each warp copies as many rows");
  using Part = Copy<kRowsOfWarp, kColumnsOfWarp>;
  using Layout = Stage<kRows, kColumns>;
  static constexpr int kShared = 2 * Layout::kBytes;
  // Blocks that a multiprocessor of sm_80 has the shared memory for.
  static constexpr int kBlocks = 163840 / kShared;

  JAXQUANT_DEVICE void run(const Problem& problem, uint8_t* shared, int64_t block, int thread) {
    const Tile tile = tile_of(problem, block, kRows, kColumns);
    const int lane = thread % kWarp;
    const int first_row = thread / kWarp / kWarpsAcross * (kTilesDown * kTileRows);
    const int first_column = thread / kWarp % kWarpsAcross * (kTilesAcross * kTileColumns);
    float total[kTilesDown][kTilesAcross][4];
#pragma unroll
    for (int i = 0; i < kTilesDown * kTilesAcross * 4; ++i) {
      total[i / 4 / kTilesAcross][i / 4 % kTilesAcross][i % 4] = empty_sum(problem);
    }

    const int row = thread / kWarp * kRowsOfWarp;
    const int column = thread / kWarp * kColumnsOfWarp;
    auto copy = Part::begin(problem, tile, 0, row, column, kColumns - column, lane);
    const auto start_copy = [&](uint8_t* stage) {
      Part::start(copy, problem, stage + row * kWeightStride, stage + Layout::kX + column * kActivationStride,
                  stage + Layout::kDs + 4 * column, lane, 1);
    };

    const int records = static_cast<int>(problem.records);
    if (records > 0) start_copy(shared);
    commit_copies();
    for (int record = 0; record < records; ++record) {
      uint8_t* stage = shared + record % 2 * Layout::kBytes;
      if (record + 1 < records) start_copy(shared + (record + 1) % 2 * Layout::kBytes);
      commit_copies();
      wait_for_copies<1>();
      sync_block();
      multiply_record<kTilesDown, kTilesAcross>(
          stage + first_row * kWeightStride, stage + Layout::kX + first_column * kActivationStride,
          stage + Layout::kDs + 4 * first_column, lane,
          [&](int i, int j, int k, float value) { total[i][j][k] = add(total[i][j][k], value); });
      // The next round copies over this stage.
      sync_block();
    }

    // Found anew, since registers are short in the loop.
    const Results results(problem, tile_of(problem, anew(block), kRows, kColumns), first_row + result_row(lane, 0),
                          first_column + result_column(lane, 0));
#pragma unroll
    for (int i = 0; i < kTilesDown; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesAcross; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          results.write(problem, kTileRows * i + 8 * (k / 2), kTileColumns * j + k % 2, total[i][j][k]);
        }
      }
    }
  }
};

// Few columns: the warps of a block share the records, and add up in order what each found.
template <int kWarps, int kTilesDown, int kTilesAcross>
struct Narrow {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRows = kTilesDown * kTileRows;
  static constexpr int kColumns = kTilesAcross * kTileColumns;
  using Part = Copy<kRows, kColumns>;
  using Layout = Stage<kRows, kColumns>;
  static constexpr int kResults = kRows * kColumns;
  static constexpr int kResultsOfThread = kResults / kThreads;
  static constexpr int kValues = kWarps * 2 * Layout::kBytes;
  static constexpr int kShared = kValues + kWarps * kResults * 4;
  static constexpr int kBlocks = 163840 / kShared;
  static_assert(kResults % kThreads == 0, "each thread adds up as many results");

  JAXQUANT_DEVICE void run(const Problem& problem, uint8_t* shared, int64_t block, int thread) {
    const Tile tile = tile_of(problem, block, kRows, kColumns);
    const int lane = thread % kWarp;
    const int warp = thread / kWarp;
    uint8_t* stages = shared + warp * 2 * Layout::kBytes;
    uint8_t* values = shared + kValues;
    float total[kResultsOfThread];
#pragma unroll
    for (int i = 0; i < kResultsOfThread; ++i) total[i] = empty_sum(problem);

    auto copy = Part::begin(problem, tile, warp, 0, 0, kColumns, lane);
    const auto start_copy = [&](uint8_t* stage) {
      Part::start(copy, problem, stage, stage + Layout::kX, stage + Layout::kDs, lane, kWarps);
    };

    const int records = static_cast<int>(problem.records);
    if (warp < records) start_copy(stages);
    commit_copies();
    int round = 0;
    for (int first = 0; first < records; first += kWarps, ++round) {
      uint8_t* stage = stages + round % 2 * Layout::kBytes;
      const int record = first + warp;
      if (record + kWarps < records) start_copy(stages + (round + 1) % 2 * Layout::kBytes);
      commit_copies();
      wait_for_copies<1>();
      uint8_t* mine = values + warp * (kResults * 4);
      if (record < records) {
        multiply_record<kTilesDown, kTilesAcross>(stage, stage + Layout::kX, stage + Layout::kDs, lane,
                                                  [&](int i, int j, int k, float value) {
                                                    const int row = kTileRows * i + result_row(lane, k);
                                                    const int column = kTileColumns * j + result_column(lane, k);
                                                    write_shared(mine + 4 * (row * kColumns + column), value);
                                                  });
      }
      sync_block();
      const int count = records - first < kWarps ? records - first : kWarps;
#pragma unroll
      for (int i = 0; i < kResultsOfThread; ++i) {
        for (int each = 0; each < count; ++each) {
          total[i] = add(total[i], read_shared<float>(values + 4 * (each * kResults + i * kThreads + thread)));
        }
      }
      // The next round writes over the values, and copies over the stages.
      sync_block();
    }

    const Results results(problem, tile, 0, 0);
#pragma unroll
    for (int i = 0; i < kResultsOfThread; ++i) {
      const int result = i * kThreads + thread;
      results.write(problem, result / kColumns, result % kColumns, total[i]);
    }
  }
};

using Narrow8 = Narrow<4, 2, 1>;
using Narrow16 = Narrow<4, 2, 2>;
using Wide64 = Wide<2, 2, 2, 4>;
using Wide192 = Wide<6, 2, 2, 4>;

}  // namespace jaxquant
