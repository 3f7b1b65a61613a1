"""Block-quantized numbers in JAX, exact to the bit."""

from jaxquant import quant as quant
