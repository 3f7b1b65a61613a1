#include "avx2.h"

#include "kernels.h"
#include "simd_blocks.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {

void avx2_decode_blocks(const DecodeBlocks& problem, int64_t begin, int64_t end) { decode_blocks(problem, begin, end); }

void avx2_encode_blocks(const EncodeBlocks& problem, int64_t begin, int64_t end) { encode_blocks(problem, begin, end); }

const Kernels kAvx2 = {Avx2::kIsa,         quantize<Avx2>,           matmul<Avx2>,      avx2_decode_blocks,
                       avx2_encode_blocks, PanelRecord<Avx2>::kRows, Avx2::kTileColumns};

}  // namespace jaxquant
