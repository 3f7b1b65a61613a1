#include "avx2.h"

#include "kernels.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {

const Kernels kAvx2 = {Avx2::kIsa, quantize<Avx2>, matmul<Avx2>, PanelRecord<Avx2>::kRows, Avx2::kTileColumns};

}  // namespace jaxquant
