"""Arrays of narrow numbers: packed, under block scales, and with scales in vendors' tiled order."""

from jaxquant.arrays.block_dot import block_dot as block_dot
from jaxquant.arrays.block_scaled import BlockScaledArray as BlockScaledArray
from jaxquant.arrays.narrow import NarrowArray as NarrowArray
from jaxquant.arrays.narrow import bit_width as bit_width
from jaxquant.arrays.narrow import narrow as narrow
from jaxquant.arrays.quantize_blocks import fake_quantize_blocks as fake_quantize_blocks
from jaxquant.arrays.quantize_blocks import quantize_blocks as quantize_blocks
from jaxquant.arrays.swizzled import SWIZZLES as SWIZZLES
from jaxquant.arrays.swizzled import Pattern as Pattern
from jaxquant.arrays.swizzled import SwizzledArray as SwizzledArray
from jaxquant.arrays.swizzled import f8_4x128 as f8_4x128
from jaxquant.arrays.swizzled import swizzle as swizzle
