#include "avx2.h"
#include "kernels.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {
namespace {

// AVX2 whose sums along a sub-block are of int32, four products an instruction.
struct AvxVnni : Avx2 {
  static constexpr const char* kIsa = "avx_vnni";

  JAXQUANT_INLINE Int products(Int u8, Int s8) { return _mm256_dpbusd_avx_epi32(zero(), u8, s8); }
  JAXQUANT_INLINE Int add_products(Int sum, Int u8, Int s8) { return _mm256_dpbusd_avx_epi32(sum, u8, s8); }
  JAXQUANT_INLINE Int scaled_sum(Int sum, Int sc) { return _mm256_mullo_epi32(sum, _mm256_srli_epi32(sc, 16)); }
};

}  // namespace

// Whatever is not named here is as in Avx2.
const Kernels kAvxVnni = [] {
  Kernels table = kAvx2;
  table.isa = AvxVnni::kIsa;
  table.quantize = quantize<AvxVnni>;
  table.matmul = matmul<AvxVnni>;
  table.row_step = PanelRecord<AvxVnni>::kRows;
  table.column_step = AvxVnni::kTileColumns;
  return table;
}();

}  // namespace jaxquant
