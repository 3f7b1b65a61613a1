#include "kernels.h"
#include "neon.h"

namespace jaxquant {

// Whatever is not named here is as in Portable.
const Kernels kNeonDotprod = [] {
  Kernels table = kPortable;
  table.isa = "neon_dotprod";
  table.quantize = quantize;
  table.matmul = matmul;
  table.row_step = kDecodedRows;
  table.column_step = 2;
  return table;
}();

}  // namespace jaxquant
