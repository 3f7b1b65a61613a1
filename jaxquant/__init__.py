"""Block-quantized numbers in JAX, exact to the bit."""

from jaxquant import quant as quant
from jaxquant import records as records
from jaxquant.ops.native import status as status
from jaxquant.ops.native import use_backend as use_backend
from jaxquant.ops.quantize import quantize as quantize
from jaxquant.ops.quantized_dot import quantized_dot as quantized_dot
