#include "avx512.h"
#include "kernels.h"
#include "simd_matmul.h"
#include "simd_quantize.h"

namespace jaxquant {
namespace {

// AVX-512 whose sums along a sub-block are of int32, four products an instruction.
struct Avx512Vnni : Avx512 {
  static constexpr const char* kIsa = "avx512_vnni";

  JAXQUANT_INLINE Int products(Int u8, Int s8) { return _mm512_dpbusd_epi32(zero(), u8, s8); }
  JAXQUANT_INLINE Int add_products(Int sum, Int u8, Int s8) { return _mm512_dpbusd_epi32(sum, u8, s8); }
  JAXQUANT_INLINE Int scaled_sum(Int sum, Int sc) { return _mm512_mullo_epi32(sum, _mm512_srli_epi32(sc, 16)); }
};

}  // namespace

// Whatever is not named here is as in Avx512.
const Kernels kAvx512Vnni = [] {
  Kernels table = kAvx512;
  table.isa = Avx512Vnni::kIsa;
  table.quantize = quantize<Avx512Vnni>;
  table.matmul = matmul<Avx512Vnni>;
  table.row_step = PanelRecord<Avx512Vnni>::kRows;
  table.column_step = Avx512Vnni::kTileColumns;
  return table;
}();

}  // namespace jaxquant
