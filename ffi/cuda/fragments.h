// Which lane of a warp holds what: index arithmetic alone.
#pragma once

#include "record.h"

namespace jaxquant {

// Matrix products of a warp (PTX ISA, "Matrix Fragments for mma.m16n8k32" and m16n8k16, integer types): a
// lane is member lane % 4 of group lane / 4. A register holds four int8 of consecutive k.
//   A: registers 0 and 2 are row `group`, 1 and 3 row `group + 8`; of k32, 0 and 1 hold the first half of k
//   B: column `group`; of k32, register 0 holds the first half of k
//   C: 0 and 1 are row `group`, 2 and 3 row `group + 8`; 0 and 2 are column 2 * member, 1 and 3 the next
// The order of k within a sub-block is free as long as A and B agree: member j takes the eight bytes from
// 8 * j, four as first and four as second half, so that one load of eight bytes is a whole fragment.
constexpr int kTileRows = 16;
constexpr int kTileColumns = 8;

JAXQUANT_INLINE int fragment_group(int lane) { return lane / 4; }
JAXQUANT_INLINE int fragment_member(int lane) { return lane % 4; }
JAXQUANT_INLINE int operand_row(int lane, int half) { return fragment_group(lane) + 8 * half; }
JAXQUANT_INLINE int operand_column(int lane) { return fragment_group(lane); }
JAXQUANT_INLINE int operand_byte(int lane) { return 8 * fragment_member(lane); }
JAXQUANT_INLINE int result_row(int lane, int i) { return fragment_group(lane) + 8 * (i / 2); }
JAXQUANT_INLINE int result_column(int lane, int i) { return 2 * fragment_member(lane) + i % 2; }

// A dot product by a warp: eight lanes share a record, each with a piece of 16 bytes of its nibbles.
constexpr int kPieces = 8;
constexpr int kPieceBytes = 16;
constexpr int kSlots = 4;  // records that a warp has at a time

JAXQUANT_INLINE int dot_slot(int lane) { return lane / kPieces; }
JAXQUANT_INLINE int dot_piece(int lane) { return lane % kPieces; }
// The low nibbles of a piece belong to this sub-block, the high ones to the next.
JAXQUANT_INLINE int piece_sub_block(int piece) { return piece / 2 * 2; }
// The element that the first low nibble of a piece is; its high nibble is kSubBlock further on.
JAXQUANT_INLINE int piece_element(int piece) { return piece_sub_block(piece) * kSubBlock + piece % 2 * kPieceBytes; }

// Quantization of a record by a warp: a lane has four elements of each half.
constexpr int kHalf = kBlock / 2;
JAXQUANT_INLINE int quantize_element(int lane, int half) { return half * kHalf + 4 * lane; }
// Word i of the eight words of bsum (two sums each): the half, and the lane that has the first sum; four
// lanes on is the one that has the second.
JAXQUANT_INLINE int sum_half(int word) { return word / 4; }
JAXQUANT_INLINE int sum_lane(int word) { return word % 4 * 8; }

}  // namespace jaxquant
