#include "avx512.h"

#include "kernels.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {

// Blocks are bound by memory, which wider vectors do not change.
const Kernels kAvx512 = {Avx512::kIsa,       quantize<Avx512>,           matmul<Avx512>,      avx2_decode_blocks,
                         avx2_encode_blocks, PanelRecord<Avx512>::kRows, Avx512::kTileColumns};

}  // namespace jaxquant
