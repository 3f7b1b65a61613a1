"""Products with block-scaled matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxquant import casts
from jaxquant.arrays.block_scaled import BlockScaledArray
from jaxquant.arrays.narrow import NarrowArray
from jaxquant.arrays.swizzled import SwizzledArray
from jaxquant.dtypes import DType
from jaxquant.ops import float32

__all__ = ["block_dot"]

_DENSE = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))


def block_dot(a: Any, b: Any, *, integer: bool = False) -> Any:
    """The matrix product of which one operand or both are block-scaled, in float32.

    ``a @ b`` is the same. Operands are decoded exactly to float32, and contracted by `jax.numpy.matmul` at
    HIGHEST precision; that program is pinned on CPU, for NumPy operands too. On an NVIDIA GPU of compute
    capability 10.0 or more, two MXFP8 or two NVFP4 matrices whose blocks lie along the contracted axis go to
    `jax.nn.scaled_matmul`, which sums in another order: expect a relative difference of up to ``K * 2**-23`` of
    the sum of magnitudes. A block-scaled operand is a constant to differentiation.

    Args:
        a: `BlockScaledArray`, or NumPy or JAX array of float16, bfloat16 or float32, [..., M, K] or [K].
        b: the same, [..., K, N] or [K].
        integer: contract the int8 codes of two MXINT8 matrices [M, K] and [K, N], whose blocks lie along K, without
            decoding them: each pair of blocks gives an exact int32 sum of 32 products, which takes both scales in
            float32, and the blocks are added in order. Each of these additions rounds once, so that the result
            differs from the other one by their order alone; what falls below 2**-126 on the way may become zero.

    Returns:
        float32 [..., M, N] as `jax.numpy.matmul`: a NumPy array if both operands are NumPy, else a JAX array.

    Raises:
        TypeError: if no operand is block-scaled, or one is no array of these dtypes.
        ValueError: for an operand without axes, extents that do not contract, or ``integer`` for other operands.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType
        >>> from jaxquant.arrays import block_dot, quantize_blocks
        >>> w = quantize_blocks(np.ones((32, 2), np.float32), DType.MXFP4, axis=0)
        >>> block_dot(np.ones((1, 32), np.float32), w).tolist()
        [[32.0, 32.0]]

    Source: section "Block-scaled" of the arrays contract.
    """
    _check(a, b)
    if integer and not (_is_integer_matrix(a, -1) and _is_integer_matrix(b, -2)):
        raise ValueError(
            "block_dot: integer=True wants MXINT8 matrices with blocks of 32 along the contracted axis, got "
            f"{_described(a)} and {_described(b)}"
        )
    result = _integer_dot(a, b) if integer else _float_dot(a, b)
    leaves = jax.tree_util.tree_leaves((a, b))
    return np.asarray(result) if all(isinstance(leaf, np.ndarray) for leaf in leaves) else result


def _float_dot(a: Any, b: Any) -> jax.Array:
    on_hardware = _suits_hardware(a, b) and _has_scaled_matmul()
    result: jax.Array = _hardware_dot(a, b) if on_hardware else _reference_dot(a, b)
    return result


def matmul(a: Any, b: Any) -> Any:
    """``a @ b``, or NotImplemented where another type may know better."""
    for operand in (a, b):
        if not isinstance(operand, BlockScaledArray | np.ndarray | jax.Array):
            return NotImplemented
    return block_dot(a, b)


def _check(a: Any, b: Any) -> None:
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, BlockScaledArray):
            continue
        if not isinstance(operand, np.ndarray | jax.Array):
            raise TypeError(
                f"block_dot: {name} must be a BlockScaledArray or an array, got {type(operand).__name__}"
            )
        if operand.dtype not in _DENSE:
            raise TypeError(
                f"block_dot: {name} has dtype {operand.dtype}, wanted float16, bfloat16 or float32"
            )
    if not isinstance(a, BlockScaledArray) and not isinstance(b, BlockScaledArray):
        raise TypeError("block_dot: neither operand is a BlockScaledArray")
    if not a.ndim or not b.ndim:
        raise ValueError(f"block_dot: operands of shapes {a.shape} and {b.shape} must have an axis each")
    batches = a.shape[:-2], b.shape[:-2]
    contracted = b.shape[-2] if b.ndim > 1 else b.shape[-1]
    try:
        np.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(f"block_dot: shapes {a.shape} and {b.shape} have different leading axes") from None
    if a.shape[-1] != contracted:
        raise ValueError(
            f"block_dot: shapes {a.shape} and {b.shape} do not contract: {a.shape[-1]} is not {contracted}"
        )


@jax.jit
def _reference_dot(a: Any, b: Any) -> jax.Array:
    left, right = _decoded(a), _decoded(b)
    # Leading axes broadcast by themselves also where the rank may not be promoted.
    rank = max(left.ndim, right.ndim)
    if left.ndim > 1 and right.ndim > 1:
        left = left.reshape((1,) * (rank - left.ndim) + left.shape)
        right = right.reshape((1,) * (rank - right.ndim) + right.shape)
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _decoded(operand: Any) -> jax.Array:
    if isinstance(operand, BlockScaledArray):
        values: jax.Array = operand.dequantize(np.float32)
        return values
    return jnp.asarray(operand).astype(jnp.float32)


# Integers

_BLOCK = 32


def _described(operand: Any) -> str:
    name = getattr(getattr(operand, "format", None), "name", None)
    return f"{name or type(operand).__name__} of shape {tuple(operand.shape)}"


def _is_integer_matrix(operand: Any, axis: int) -> bool:
    return (
        isinstance(operand, BlockScaledArray)
        and operand.format is DType.MXINT8
        and operand.ndim == 2
        and operand.shape == operand.padded_shape
        and operand.block_size[axis] == _BLOCK
    )


@jax.jit
def _integer_dot(a: BlockScaledArray, b: BlockScaledArray) -> jax.Array:
    """One int32 product of matrices for each block of K, scaled and added in order."""
    left, left_scales = _integer_planes(a)
    right, right_scales = _integer_planes(b.T)

    def step(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        x, x_scale, y, y_scale = block
        sums = lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        # Below 2**19, so exact in float32; powers of two keep it exact.
        return total + sums.astype(jnp.float32) * x_scale[:, None] * y_scale[None, :], None

    zero = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    total, _ = lax.scan(step, zero, (left, left_scales, right, right_scales))
    return total


def _integer_planes(operand: BlockScaledArray) -> tuple[jax.Array, jax.Array]:
    """int8 codes [K / 32, rows, 32] and what they count in, float32 [K / 32, rows]."""
    rows, count = operand.shape[0], operand.shape[1] // _BLOCK
    elements: Any = jnp.asarray(operand.elements).view(jnp.int8)
    plane: Any = operand.scales
    dense = plane.unswizzle() if isinstance(plane, SwizzledArray) else plane
    bits = jnp.asarray(dense).view(jnp.uint8).astype(jnp.uint32)
    # A code counts in 2**-6; what is no normal number is zero, and 255 is NaN.
    field = jnp.maximum(bits, np.uint32(6)) - np.uint32(6)
    scales = jnp.where(bits == np.uint32(255), float32.NAN, field << np.uint32(23)).view(jnp.float32)
    return jnp.moveaxis(elements.reshape(rows, count, _BLOCK), 1, 0), scales.T


# Hardware

_ON_HARDWARE = (DType.MXFP8_E4M3, DType.MXFP8_E5M2, DType.NVFP4)


def _has_scaled_matmul() -> bool:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    # ROCm devices give a name, "gfx942".
    version = str(capability).split(".")
    return device.platform in ("gpu", "cuda") and version[0].isdigit() and int(version[0]) >= 10


def _suits_hardware(a: Any, b: Any) -> bool:
    if not (isinstance(a, BlockScaledArray) and isinstance(b, BlockScaledArray)):
        return False
    formats = {a.format, b.format}
    nvfp4 = DType.NVFP4 in formats
    return (
        formats <= set(_ON_HARDWARE)
        and (not nvfp4 or len(formats) == 1)
        and a.ndim == b.ndim == 2
        and a.shape == a.padded_shape
        and b.shape == b.padded_shape
        and a.block_size == (1, 16 if nvfp4 else 32)
        and b.block_size == (16 if nvfp4 else 32, 1)
    )


@jax.jit
def _hardware_dot(a: BlockScaledArray, b: BlockScaledArray) -> jax.Array:
    (left, left_scales), (right, right_scales) = _for_hardware(a), _for_hardware(b.T)
    result = jax.nn.scaled_matmul(left, right, left_scales, right_scales, jnp.float32)[0]
    for operand in (a, b):
        if operand.format is DType.NVFP4:
            result = result * operand.levels[1]
    return result


def _for_hardware(operand: BlockScaledArray) -> tuple[jax.Array, jax.Array]:
    """Elements [1, M, K] and scales [1, M, K / block] in dtypes of the hardware."""
    elements: Any = operand.elements
    scales: Any = operand.scales
    dtype = operand.element_dtype
    codes: Any = elements.codes() if isinstance(elements, NarrowArray) else elements
    if dtype == ml_dtypes.float4_e2m1fn:
        # A bitcast of constants to less than a byte is folded wrongly, a conversion is not.
        codes = casts.decode(codes.view(jnp.uint8), DType.E2M1).astype(dtype)
    elif codes.dtype == jnp.uint8:
        codes = codes.view(dtype)
    dense: Any = scales.unswizzle() if isinstance(scales, SwizzledArray) else scales
    return codes[None], dense[None]
