// Dot products of a few columns: a warp streams the records of four rows.
#pragma once

#include "device.h"
#include "fragments.h"
#include "problem.h"

namespace jaxquant {

constexpr int kDotRows = 4;   // of a warp
constexpr int kDotWarps = 8;  // of a block

// A lane's part of a weight record, decoded.
struct DotWeights {
  uint32_t low[4];   // nibbles, four to a word, of sub-block piece_sub_block
  uint32_t high[4];  // of the next
  int32_t sc_low;
  int32_t sc_high;
  int32_t m;            // of sub-block `piece`
  uint32_t d_and_dmin;  // float16 each
};

JAXQUANT_DEVICE DotWeights decode_dot_weights(const Words4& head, const Words4& q, int piece) {
  const Q4KScales scales = q4k_scales(head.word[1], head.word[2], head.word[3]);
  const uint64_t sc = scales.sc >> (8 * piece_sub_block(piece));
  DotWeights w;
  for (int i = 0; i < 4; ++i) {
    w.low[i] = q.word[i] & 0x0F0F0F0Fu;
    w.high[i] = (q.word[i] >> 4) & 0x0F0F0F0Fu;
  }
  w.sc_low = static_cast<int32_t>(sc & 63);
  w.sc_high = static_cast<int32_t>((sc >> 8) & 63);
  w.m = static_cast<int32_t>((scales.m >> (8 * piece)) & 63);
  w.d_and_dmin = head.word[0];
  return w;
}

// Sums each of the eight values over the eight lanes of a record; lane `piece` gets that of its number.
JAXQUANT_DEVICE int32_t sum_over_pieces(const int32_t (&values)[kPieces], int piece) {
  int32_t four[4];
  int32_t two[2];
  for (int i = 0; i < 4; ++i) {
    const int32_t give = piece & 4 ? values[i] : values[i + 4];
    const int32_t keep = piece & 4 ? values[i + 4] : values[i];
    four[i] = keep + static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(give), 4));
  }
  for (int i = 0; i < 2; ++i) {
    const int32_t give = piece & 2 ? four[i] : four[i + 2];
    const int32_t keep = piece & 2 ? four[i + 2] : four[i];
    two[i] = keep + static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(give), 2));
  }
  const int32_t give = piece & 1 ? two[0] : two[1];
  const int32_t keep = piece & 1 ? two[1] : two[0];
  return keep + static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(give), 1));
}

// Rows row to row + 3 with kColumns columns from `column` on.
template <int kColumns, typename Read>
JAXQUANT_DEVICE void dot_warp(const Problem& problem, const Tile& tile, int lane) {
  const int slot = dot_slot(lane);
  const int piece = dot_piece(lane);
  const uint8_t* w[kDotRows];
  for (int r = 0; r < kDotRows; ++r) w[r] = tile.w + lesser(tile.row + r, problem.rows - 1) * problem.w_row;
  const uint8_t* x[kColumns];
  float total[kColumns];
  for (int c = 0; c < kColumns; ++c) {
    x[c] = tile.x + lesser(tile.column + c, problem.columns - 1) * problem.x_column;
    total[c] = empty_sum(problem);
  }

  for (int64_t first = 0; first < problem.records; first += kSlots) {
    const bool present = first + slot < problem.records;
    const int64_t record = present ? first + slot : problem.records - 1;
    Words4 head[kDotRows];
    Words4 q[kDotRows];
    for (int r = 0; r < kDotRows; ++r) {
      const uint8_t* at = w[r] + record * problem.w_record;
      head[r] = Read::words4(at);
      q[r] = Read::words4(at + q4k::kQ + kPieceBytes * piece);
    }
    DotWeights weights[kDotRows];
    for (int r = 0; r < kDotRows; ++r) weights[r] = decode_dot_weights(head[r], q[r], piece);
    // After the sums, lanes 2r and 2r + 1 of a record have what row r needs.
    const uint32_t scales = piece & 4 ? (piece & 2 ? weights[3].d_and_dmin : weights[2].d_and_dmin)
                                      : (piece & 2 ? weights[1].d_and_dmin : weights[0].d_and_dmin);
    const float d = half_to_float(static_cast<uint16_t>(scales & 0xFFFFu));
    const float dmin = half_to_float(static_cast<uint16_t>(scales >> 16));

    for (int c = 0; c < kColumns; ++c) {
      const uint8_t* at = x[c] + record * problem.x_record;
      const uint8_t* elements = at + q8k::kQ + piece_element(piece);
      uint32_t low[4];
      uint32_t high[4];
      for (int i = 0; i < 4; ++i) {
        low[i] = Read::word(elements + 4 * i);
        high[i] = Read::word(elements + kSubBlock + 4 * i);
      }
      const uint32_t sums = Read::word(at + q8k::kBsum + 4 * piece);
      const int32_t pair = static_cast<int16_t>(sums & 0xFFFFu) + static_cast<int16_t>(sums >> 16);
      const float ds = bit_cast<float>(Read::word(at + q8k::kDs));
      int32_t values[kPieces];  // S and T of each row
      for (int r = 0; r < kDotRows; ++r) {
        int32_t dot_low = 0;
        int32_t dot_high = 0;
        for (int i = 0; i < 4; ++i) {
          dot_low = dot4(weights[r].low[i], low[i], dot_low);
          dot_high = dot4(weights[r].high[i], high[i], dot_high);
        }
        values[2 * r] = weights[r].sc_low * dot_low + weights[r].sc_high * dot_high;
        values[2 * r + 1] = weights[r].m * pair;
      }
      const int32_t mine = sum_over_pieces(values, piece);
      const auto other = static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(mine), 1));
      const int32_t s = piece & 1 ? other : mine;
      const int32_t t = piece & 1 ? mine : other;
      const float value = present ? record_value(d, dmin, ds, s, t) : no_value();
      for (int k = 0; k < kSlots; ++k) {
        total[c] = add(total[c], bit_cast<float>(shuffle(bit_cast<uint32_t>(value), kPieces * k + piece)));
      }
    }
  }

  if (slot == 0 && piece % 2 == 0) {
    const Results results(problem, tile, piece / 2, 0);
    for (int c = 0; c < kColumns; ++c) results.write(problem, 0, c, total[c]);
  }
}

template <int kColumns, typename Read>
JAXQUANT_DEVICE void dot_block(const Problem& problem, int64_t block, int thread) {
  const int64_t index = block * kDotWarps + thread / kWarp;
  const int64_t row_tiles = (problem.rows + kDotRows - 1) / kDotRows;
  const int64_t column_tiles = (problem.columns + kColumns - 1) / kColumns;
  if (index >= problem.products * row_tiles * column_tiles) return;
  dot_warp<kColumns, Read>(problem, tile_of(problem, index, kDotRows, kColumns), thread % kWarp);
}

}  // namespace jaxquant
