"""Quantization to block-scaled formats: scales from the largest magnitude of each block, exact to the bit.

All arithmetic is on the bits of float32, with neither logarithm nor division, the same for NumPy and JAX.

Source: section "Block-scaled" of the arrays contract; OCP Microscaling Formats v1.0, section 6.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import casts
from jaxquant.arrays.block_scaled import Block, BlockScaledArray, build
from jaxquant.arrays.narrow import NarrowArray
from jaxquant.dtypes import BlockScaledDType, DType, Whole, WholeExtent
from jaxquant.ops import blocks, float32
from jaxquant.ops.blocks import Nonfinite, ScaleRule

__all__ = ["Nonfinite", "Recipe", "ScaleRule", "fake_quantize_blocks", "quantize_blocks"]

Array: TypeAlias = Any
Recipe: TypeAlias = Literal["exact"]

_SOURCES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
_ZERO = np.uint32(0)


@dataclass(frozen=True, slots=True)
class _Options:
    dtype: BlockScaledDType
    blocks: tuple[Block, ...]
    """One entry per axis."""
    scale_rule: ScaleRule
    rounding: casts.Rounding
    nonfinite: Nonfinite
    packed: bool


def quantize_blocks(
    x: Array,
    dtype: BlockScaledDType,
    *,
    axis: int = -1,
    block_shape: int | Sequence[Block] | None = None,
    scale_rule: ScaleRule = "floor",
    rounding: casts.Rounding = "nearest_even",
    nonfinite: Nonfinite = "nan",
    tensor_scale: Any = None,
    recipe: Recipe = "exact",
    packed: bool = True,
    pad: bool = False,
    key: jax.Array | None = None,
) -> BlockScaledArray:
    """Quantize to elements under shared scales.

    Formats of one E8M0 level take the scale ``2**(byte - 127)`` from a block's largest magnitude ``amax`` by a
    ``scale_rule``. With e() the exponent and m() the significand in [1, 2) of a number, and ``max`` the largest
    element (448, 57344, 28, 7.5, 6; 127/64 for INT8), ``byte - 127`` is

    * ``"floor"`` (OCP MX v1.0): ``e(amax) - e(max)``, where the largest elements may saturate
    * ``"ceil"``: one more if ``m(amax) > 1``
    * ``"rceil"``: one more than floor if ``m(amax) > m(max)``, the smallest scale that saturates nothing
    * ``"even"``: one more than floor if amax rounds up to a power of two in the element's significand

    clamped to bytes 0 to 254. Then elements round once from ``x / scale``, and saturate. Near the float32
    maximum a block may decode to infinity, except under floor.

    NVFP4 (E2M1 elements, E4M3 scales, one float32 scale for all) takes ``recipe="exact"``: the tensor scale is
    ``ts = max(R32(amax / 2688), 2**-149)``, or 1 where amax is 0 or not finite; the block scale is the real
    number ``amax_block / (6 * ts)`` rounded once to E4M3, at most 448; an element is ``|x| / (scale * ts)``
    rounded once to E2M1, with the sign of x, and zero under a zero scale. With a small ``tensor_scale`` blocks
    above ``2688 * tensor_scale`` saturate.

    A block of zeros gives zero elements with their signs, under E8M0 code 0. A NaN or infinity makes its whole
    block NaN: the scale is NaN (0xFF, in E4M3 0x7F) and the codes 0.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX.
        dtype: ``DType.MXFP8_E4M3`` and the other built-in formats, or a registered one of float elements (or
            Int8, read as in MXINT8) under one level of E8M0 scales.
        axis: the axis along which a block lies, if ``block_shape`` does not say; its length is the format's.
        block_shape: extents of a block for the last axes, such as ``(32, 1)`` or ``(128, 128)``, ints or Whole;
            or one int, along ``axis``. Where they do not hold as many elements as the format says, the result
            is a free combination: its ``format`` is None.
        scale_rule: as above; NVFP4 has none but the default.
        rounding: of the elements, as in `jaxquant.casts.encode`; in NVFP4 nearest even.
        nonfinite: ``"nan"`` as above; with ``"saturate"`` infinities count as the largest float32, and only a
            NaN makes a block NaN.
        tensor_scale: for NVFP4, a positive finite float32 scalar in place of the recipe's ts.
        recipe: of NVFP4, by name, since vendors differ in roundings.
        packed: elements of 4 and 6 bits as a `NarrowArray`, packed along the last axis that blocks extend over,
            others in their own dtype; False keeps one uint8 code per element.
        pad: zeros complete the last blocks of an axis, and the result keeps the shape of ``x``; without it
            a remainder is refused.
        key: a ``jax.random`` key for stochastic rounding, and only there.

    Returns:
        A `BlockScaledArray` of the shape of ``x``, with NumPy planes for NumPy and JAX for JAX; the same bytes
        from both, eager and jitted.

    Raises:
        TypeError: if ``x`` is no array or of another dtype, or ``dtype`` no block-scaled dtype.
        ValueError: for an unknown option, a format without a recipe, an axis out of range, no whole number of
            blocks without ``pad``, blocks that cannot be packed, and a ``tensor_scale`` that is not positive and
            finite or is for a format without one.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType
        >>> from jaxquant.arrays import quantize_blocks
        >>> q = quantize_blocks(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32), DType.MXFP4)
        >>> q.shape, q.nbytes, q.scales.view(np.uint8).tolist()
        ((2, 32), 34, [[125], [125]])
        >>> q.dequantize()[0, :4].tolist()
        [-1.0, -1.0, -1.0, -1.0]

    Source: section "Block-scaled" of the arrays contract; OCP MX v1.0, section 6.3, for floor.
    """
    _check_source(x)
    options = _checked_options(x, dtype, axis, block_shape, scale_rule, rounding, nonfinite, recipe, packed)
    stored = _stored_shape(x, options, pad)
    if (rounding == "stochastic") != (key is not None):
        raise ValueError(
            f'quantize_blocks: rounding="stochastic" and key go together, got rounding={rounding!r} and '
            f"{'no' if key is None else 'a'} key"
        )
    scale = _checked_tensor_scale(x, dtype, tensor_scale)
    result: BlockScaledArray
    if isinstance(x, jax.Array) and _suits_kernels(options, stored):
        result = _quantize_by_kernels(x, scale, options, stored)
        return result
    run = _quantize if isinstance(x, np.ndarray) else _quantize_jitted
    result = run(x, scale, key, options, stored)
    # Packed in a program of its own: XLA would fuse packing with all that leads to the codes, and do it twice.
    return result._with(result.levels, _elements(result.elements, options), result._blocks, result._padding)


def fake_quantize_blocks(x: Array, dtype: BlockScaledDType, **options: Any) -> Array:
    """Quantize to blocks and back: the values that the format can hold, with a straight-through gradient.

    The cotangent passes unchanged everywhere, saturated elements and NaN blocks included.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX.
        dtype, options: as in `quantize_blocks`.

    Returns:
        Of the shape, dtype and library of ``x``: the decoded values, rounded once to the dtype.

    Raises:
        TypeError, ValueError: as `quantize_blocks` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxquant import DType
        >>> from jaxquant.arrays import fake_quantize_blocks
        >>> x = jnp.linspace(0.0, 7.0, 32)
        >>> float(fake_quantize_blocks(x, DType.MXFP4)[-1])
        6.0
        >>> float(jax.grad(lambda x: fake_quantize_blocks(x, DType.MXFP4).sum())(x)[-1])
        1.0

    Source: section "Block-scaled" of the arrays contract.
    """
    _check_source(x)
    if isinstance(x, np.ndarray):
        host: Array = quantize_blocks(x, dtype, **options).dequantize(x.dtype)
        return host
    arrays = {name: options.pop(name, None) for name in ("tensor_scale", "key")}
    block_shape = options.get("block_shape")
    if isinstance(block_shape, list):
        options["block_shape"] = tuple(block_shape)
    result: jax.Array = _straight_through((dtype, tuple(sorted(options.items()))), x, arrays)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(static: tuple[Any, ...], x: jax.Array, arrays: dict[str, Any]) -> jax.Array:
    dtype, options = static
    values: jax.Array = quantize_blocks(x, dtype, **dict(options), **arrays).dequantize(x.dtype)
    return values


def _straight_through_forward(
    static: tuple[Any, ...], x: jax.Array, arrays: dict[str, Any]
) -> tuple[jax.Array, None]:
    return _straight_through(static, x, arrays), None


def _straight_through_backward(
    static: tuple[Any, ...], residual: None, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    return cotangent, None


_straight_through.defvjp(_straight_through_forward, _straight_through_backward)


# Checks


def _check_source(x: object) -> None:
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"quantize_blocks: x must be a NumPy or JAX array, got {type(x).__name__}")
    if x.dtype not in _SOURCES:
        raise TypeError(f"quantize_blocks: x has dtype {x.dtype}, wanted float16, bfloat16 or float32")


def _checked_options(
    x: Array,
    dtype: object,
    axis: int,
    block_shape: int | Sequence[Block] | None,
    scale_rule: ScaleRule,
    rounding: casts.Rounding,
    nonfinite: Nonfinite,
    recipe: Recipe,
    packed: bool,
) -> _Options:
    if not isinstance(dtype, BlockScaledDType):
        raise TypeError(f"quantize_blocks: dtype must be a BlockScaledDType, got {dtype!r}")
    for name, value, allowed in (
        ("scale_rule", scale_rule, get_args(ScaleRule)),
        ("rounding", rounding, get_args(casts.Rounding)),
        ("nonfinite", nonfinite, get_args(Nonfinite)),
        ("recipe", recipe, get_args(Recipe)),
    ):
        if value not in allowed:
            raise ValueError(f"quantize_blocks: {name} must be one of {allowed}, got {value!r}")
    if _is_nvfp4(dtype):
        if rounding != "nearest_even" or scale_rule != "floor":
            raise ValueError(
                f"quantize_blocks: the exact recipe of {dtype.name} rounds to nearest even and has no scale "
                f"rules, got rounding={rounding!r}, scale_rule={scale_rule!r}"
            )
    elif not _is_mx(dtype):
        raise ValueError(
            f"quantize_blocks: no recipe for {dtype.name}, which is neither elements under one level of E8M0 "
            "scales nor E2M1 under E4M3 under one Float32"
        )
    if not x.ndim:
        raise ValueError("quantize_blocks: x has no axis to lay blocks along, its shape is ()")
    block = dtype.levels[0].block if block_shape is None else block_shape
    rank = x.ndim
    if isinstance(block, int):
        if not -rank <= axis < rank:
            raise ValueError(f"quantize_blocks: axis {axis} is out of range for x of shape {x.shape}")
        trailing: tuple[Block, ...] = (block, *(1,) * (rank - 1 - axis % rank))
    else:
        trailing = (Whole,) * rank if isinstance(block, WholeExtent) else tuple(block)
    if len(trailing) > rank:
        raise ValueError(f"quantize_blocks: block_shape {trailing} has more axes than x of shape {x.shape}")
    for size in trailing:
        if not isinstance(size, WholeExtent) and (
            isinstance(size, bool) or not isinstance(size, int) or size < 1
        ):
            raise ValueError(
                f"quantize_blocks: block_shape must hold positive ints and Whole, got {trailing}"
            )
    blocks = (*(1,) * (rank - len(trailing)), *trailing)
    return _Options(dtype, blocks, scale_rule, rounding, nonfinite, bool(packed))


def _is_nvfp4(dtype: BlockScaledDType) -> bool:
    scales = tuple(level.scale for level in dtype.levels)
    return (
        dtype.element is DType.E2M1 and scales == (DType.E4M3, DType.Float32) and dtype.levels[1].is_whole()
    )


def _is_mx(dtype: BlockScaledDType) -> bool:
    return (
        dtype.element in blocks.MAX_SIGNIFICAND
        and len(dtype.levels) == 1
        and dtype.levels[0].scale is DType.E8M0
    )


def _stored_shape(x: Array, options: _Options, pad: bool) -> tuple[int, ...]:
    stored = []
    for axis, (extent, block) in enumerate(zip(x.shape, options.blocks, strict=True)):
        rest = 0 if isinstance(block, WholeExtent) else extent % block
        if rest and not pad:
            raise ValueError(
                f"quantize_blocks: axis {axis} of x, whose shape is {x.shape}, is no whole number of blocks "
                f"{options.blocks}; pad=True completes them with zeros"
            )
        stored.append(extent + (block - rest if rest and isinstance(block, int) else 0))
    if options.packed and options.dtype.element.bits < 8:
        axis, values = _packed_axis(options.blocks), {4: 2, 6: 4}[options.dtype.element.bits]
        if stored[axis] % values:
            raise ValueError(
                f"quantize_blocks: axis {axis} of extent {stored[axis]} cannot be packed: whole bytes hold "
                f"multiples of {values} elements; packed=False keeps one code per byte"
            )
    return tuple(stored)


def _packed_axis(blocks: tuple[Block, ...]) -> int:
    """The last axis that blocks extend over, counted from the end."""
    return next((i - len(blocks) for i in reversed(range(len(blocks))) if blocks[i] != 1), -1)


def _checked_tensor_scale(x: Array, dtype: BlockScaledDType, tensor_scale: Any) -> Array | None:
    if tensor_scale is None:
        return None
    if not _is_nvfp4(dtype):
        raise ValueError(f"quantize_blocks: {dtype.name} has no tensor scale, got {tensor_scale!r}")
    if isinstance(tensor_scale, jax.Array):
        scale: Array = tensor_scale
    else:
        scale = np.asarray(tensor_scale, np.float32)
    if scale.size != 1 or scale.dtype != np.float32:
        raise ValueError(
            f"quantize_blocks: tensor_scale must be a float32 scalar, got {scale.dtype}{scale.shape}"
        )
    if not isinstance(scale, jax.core.Tracer):
        bits = int(np.asarray(scale).view(np.uint32).reshape(()))
        if not 0 < bits < int(float32.INFINITY):
            raise ValueError(f"quantize_blocks: tensor_scale must be positive and finite, got {scale}")
    if isinstance(x, np.ndarray):
        return np.asarray(scale).reshape(1)
    return jnp.asarray(scale).reshape(1)


# Quantization; arrays are NumPy or JAX


def _quantize(
    x: Array, tensor_scale: Array | None, key: jax.Array | None, options: _Options, stored: tuple[int, ...]
) -> BlockScaledArray:
    dtype = options.dtype
    bits = _padded(float32.to_bits(x), stored)
    split, axes, scale_shape = _block_axes(stored, options.blocks)
    bits = bits.reshape(split)
    magnitude = blocks.magnitudes(bits, options.nonfinite)
    amax = magnitude.max(axis=axes, keepdims=True, initial=_ZERO)
    if _is_nvfp4(dtype):
        if tensor_scale is None:
            tensor = blocks.tensor_scale(amax.max(initial=_ZERO).reshape(1))
        else:
            tensor = tensor_scale.view(np.uint32)
        codes, scales = blocks.encode_nvfp4(bits, magnitude, amax, tensor)
        levels: tuple[Array, ...] = (scales, tensor.view(np.float32))
    else:
        codes, scales = blocks.encode_mx(
            bits, magnitude, amax, dtype.element, options.scale_rule, options.rounding, key
        )
        levels = (scales,)
    return _assembled(codes, levels, scale_shape, x.shape, options, stored)


def _assembled(
    elements: Array,
    levels: tuple[Array, ...],
    scale_shape: tuple[int, ...],
    shape: tuple[int, ...],
    options: _Options,
    stored: tuple[int, ...],
) -> BlockScaledArray:
    """The planes as an array; elements may be packed already."""
    dtype = options.dtype
    inner = levels[0].reshape(scale_shape).view(dtype.levels[0].scale.numpy_dtype)
    outer = (level.reshape((1,) * len(stored)) for level in levels[1:])
    trimmed = _trimmed(options.blocks)
    padding = _trimmed_padding(tuple(full - extent for full, extent in zip(stored, shape, strict=True)))
    whole = dtype.levels[0].is_whole()
    fits = (
        all(block is Whole for block in options.blocks)
        if whole
        else Whole not in options.blocks
        and math.prod(b for b in options.blocks if isinstance(b, int)) == dtype.levels[0].block
    )
    if not isinstance(elements, NarrowArray):
        elements = elements.reshape(stored)
    return build(
        (inner, *outer), elements, dtype if fits else None, np.dtype(np.float32), trimmed, dtype, padding
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _quantize_jitted(
    x: jax.Array,
    tensor_scale: jax.Array | None,
    key: jax.Array | None,
    options: _Options,
    stored: tuple[int, ...],
) -> BlockScaledArray:
    return _quantize(x, tensor_scale, key, options, stored)


def _suits_kernels(options: _Options, stored: tuple[int, ...]) -> bool:
    """Whether blocks lie along one axis and elements round as the kernels do."""
    axes = [axis for axis, block in enumerate(options.blocks) if block != 1]
    if len(axes) != 1 or options.rounding != "nearest_even":
        return False
    extent = options.blocks[axes[0]]
    block = stored[axes[0]] if isinstance(extent, WholeExtent) else extent
    return block > 0 and block % blocks.UNIT == 0


@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize_by_kernels(
    x: jax.Array, tensor_scale: jax.Array | None, options: _Options, stored: tuple[int, ...]
) -> BlockScaledArray:
    dtype = options.dtype
    axis = len(stored) + _packed_axis(options.blocks)
    split, _, scale_shape = _block_axes(stored, options.blocks)
    batch, inner = split[: axis + 1], math.prod(split[axis + 2 :])
    bits = _padded(float32.to_bits(x), stored)
    outer: tuple[jax.Array, ...] = ()
    if _is_nvfp4(dtype):
        if tensor_scale is None:
            largest = blocks.largest_magnitude(bits, options.nonfinite)
            tensor_scale = blocks.tensor_scale(largest).view(jnp.float32)
        outer = (tensor_scale.reshape((1,) * len(batch)),)
    element = dtype.element
    packs = options.packed and element.bits < 8
    codes, scales = blocks.encode(
        bits.view(jnp.float32).reshape((*batch, split[axis + 1], *((inner,) if inner != 1 else ()))),
        *outer,
        element=element,
        scale=dtype.levels[0].scale,
        packed=packs,
        across=inner != 1,
        scale_rule=options.scale_rule,
        nonfinite=options.nonfinite,
        code_dtype=np.uint8 if packs or not options.packed else element.numpy_dtype,
    )
    elements: Any = codes
    if packs:
        packed = list(stored)
        packed[axis] = stored[axis] * element.bits // 8
        elements = NarrowArray(codes.reshape(packed), element, axis - len(stored))
    return _assembled(elements, (scales, *outer), scale_shape, x.shape, options, stored)


def _trimmed(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    first = next((i for i, block in enumerate(blocks) if block != 1), len(blocks))
    return blocks[first:]


def _trimmed_padding(padding: tuple[int, ...]) -> tuple[int, ...]:
    first = next((i for i, extra in enumerate(padding) if extra), len(padding))
    return padding[first:]


def _padded(bits: Array, stored: tuple[int, ...]) -> Array:
    widths = [(0, full - extent) for full, extent in zip(stored, bits.shape, strict=True)]
    if not any(extra for _, extra in widths):
        return bits
    return float32.library(bits).pad(bits, widths)


def _block_axes(
    stored: tuple[int, ...], blocks: tuple[Block, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shape with blocked axes split in two, the axes inside a block, and the shape of the scales."""
    split: list[int] = []
    inside: list[int] = []
    scales: list[int] = []
    for extent, block in zip(stored, blocks, strict=True):
        if block == 1:
            split.append(extent)
            scales.append(extent)
            continue
        count, size = (1, extent) if isinstance(block, WholeExtent) else (extent // block, block)
        inside.append(len(split) + 1)
        split += [count, size]
        scales.append(count)
    return tuple(split), tuple(inside), tuple(scales)


def _elements(codes: Array, options: _Options) -> Any:
    element = options.dtype.element
    if not options.packed:
        return codes
    if element.bits < 8:
        return NarrowArray.from_codes(codes, element, _packed_axis(options.blocks))
    return codes.view(element.numpy_dtype)
