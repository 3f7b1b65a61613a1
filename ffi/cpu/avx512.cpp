#include "avx512.h"

#include "kernels.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {

const Kernels kAvx512 = {Avx512::kIsa, quantize<Avx512>, matmul<Avx512>, PanelRecord<Avx512>::kRows,
                         Avx512::kTileColumns};

}  // namespace jaxquant
