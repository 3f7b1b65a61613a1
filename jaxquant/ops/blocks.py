"""Blocks of narrow elements under shared scales, to float32 and back: one primitive for each direction.

Values are [*batch, block] under scales [*batch], their codes [*batch, bytes], packed along the block or one in a
byte. Or, ``across``, as many blocks lie side by side along a last axis that all three have. An outer float32
scale has the rank of the batch, its first axes equal to the batch's and the rest 1.

Source: section "Block-scaled" of the arrays contract; OCP Microscaling Formats v1.0, section 6.3.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxquant import casts, jax_compat
from jaxquant.dtypes import DType, SimpleDType
from jaxquant.ops import bit_stream, float32, native, partition

__all__ = [
    "MAX_SIGNIFICAND",
    "UNIT",
    "Nonfinite",
    "ScaleRule",
    "decode",
    "decode_blocks_p",
    "element_bits",
    "encode",
    "encode_blocks_p",
    "encode_mx",
    "encode_nvfp4",
    "largest_magnitude",
    "magnitudes",
    "scale_bytes",
    "tensor_scale",
]

Array: TypeAlias = Any
ScaleRule: TypeAlias = Literal["floor", "ceil", "rceil", "even"]
Nonfinite: TypeAlias = Literal["nan", "saturate"]

UNIT = 16
"""The kernels want blocks of multiples of this."""
_LARGEST = np.uint32(0x7F7FFFFF)
_STEP = 16
_ZERO = np.uint32(0)
_ELEMENTS = {
    str(dtype.name): dtype
    for dtype in (DType.E4M3, DType.E5M2, DType.E3M2, DType.E2M3, DType.E2M1, DType.Int8)
}


def decode(
    codes: jax.Array, *scales: jax.Array, element: SimpleDType, scale: str, packed: bool, across: bool
) -> jax.Array:
    """The values of blocks, exactly as their scales multiply.

    Args:
        codes: of one byte each, [*batch, bytes]; without ``packed`` the bits above the element's are ignored.
        scales: none, or of one byte each [*batch], and under E4M3 possibly an outer float32.
        element: E4M3, E5M2, E3M2, E2M3, E2M1, or Int8, of which code c is ``c * 2**-6``.
        scale: ``"E8M0"``, ``"E4M3"``, or ``""`` for no scales, which elements with NaN do not have.
        packed: whether elements of 4 and 6 bits lie without gaps.
        across: whether blocks lie side by side along another last axis.

    Returns:
        float32 [*batch, block]; every NaN is 0x7FC00000.
    """
    operands = jax_compat.to_common_varying(codes, *scales)
    values: jax.Array = decode_blocks_p.bind(
        *operands,
        element=str(element.name),
        scale=scale,
        packed=packed,
        across=across,
        backend=native.selected_backend(),
    )
    return values


def encode(
    values: jax.Array,
    *outer: jax.Array,
    element: SimpleDType,
    scale: SimpleDType,
    packed: bool,
    across: bool,
    scale_rule: ScaleRule,
    nonfinite: Nonfinite,
    code_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of blocks, elements rounded to nearest even.

    Args:
        values: float32 [*batch, block].
        outer: float32, the outer scale of NVFP4 and of nothing else.
        element, packed, across: as in `decode`.
        scale: E8M0 by ``scale_rule``, or E4M3 by NVFP4's exact recipe.
        nonfinite: ``"saturate"`` replaces infinities by the largest finite number first.
        code_dtype: of the codes, one byte each.

    Returns:
        ``code_dtype`` [*batch, bytes] and the scale's dtype [*batch].
    """
    operands = jax_compat.to_common_varying(values, *outer)
    codes, scales = encode_blocks_p.bind(
        *operands,
        element=str(element.name),
        scale=str(scale.name),
        packed=packed,
        across=across,
        scale_rule=scale_rule,
        nonfinite=nonfinite,
        code_dtype=np.dtype(code_dtype),
        backend=native.selected_backend(),
    )
    return codes, scales


# The arithmetic, for NumPy and JAX alike. Bits are those of float32.


def element_bits(codes: Array, element: SimpleDType) -> Array:
    """The bits of the values of codes, uint8; of Int8 in units of 2**-6."""
    bits = casts.decode(codes, element).view(np.uint32)
    if element is not DType.Int8:
        return bits
    zero = (bits & float32.MAGNITUDE) == 0
    return float32.library(bits).where(zero, bits, bits - np.uint32(6 << 23))


def magnitudes(bits: Array, nonfinite: Nonfinite) -> Array:
    """Bits without sign, and without infinities where these saturate."""
    magnitude = bits & float32.MAGNITUDE
    if nonfinite == "saturate":
        magnitude = float32.library(bits).where(magnitude == float32.INFINITY, _LARGEST, magnitude)
    return magnitude


# The significand of the largest element as float32 fraction bits, its exponent, and its significand bits.
MAX_SIGNIFICAND: dict[SimpleDType, tuple[int, int, int]] = {
    **{
        dtype: (
            int(np.float32(dtype.max_normal).view(np.uint32)) & 0x7FFFFF,
            math.frexp(dtype.max_normal)[1] - 1,
            dtype.significand_bits,
        )
        for dtype in (DType.E4M3, DType.E5M2, DType.E3M2, DType.E2M3, DType.E2M1)
    },
    DType.Int8: (int(np.float32(127 / 64).view(np.uint32)) & 0x7FFFFF, 0, 6),
}


def _rule(element: SimpleDType, scale_rule: ScaleRule) -> tuple[int, int]:
    """The 24-bit significand from which a scale is one exponent up, and the exponent of the largest element."""
    fraction_of_max, exponent_of_max, significand_bits = MAX_SIGNIFICAND[element]
    least_fraction_up = {
        "floor": 1 << 23,
        "ceil": 1,
        "rceil": fraction_of_max + 1,
        "even": (1 << 23) - (1 << (22 - significand_bits)),
    }[scale_rule]
    return (1 << 23) + least_fraction_up, exponent_of_max


def scale_bytes(amax: Array, element: SimpleDType, scale_rule: ScaleRule) -> Array:
    """The E8M0 code for blocks of a largest magnitude, uint32 bits [...] of finite float32 values, as int32."""
    up_from, exponent_of_max = _rule(element, scale_rule)
    xp = float32.library(amax)
    exponent, significand = float32.normalized(amax)
    up = (significand >= np.uint32(up_from)).astype(np.int32)
    return xp.clip(exponent + up + np.int32(127 - exponent_of_max), np.int32(0), np.int32(254))


def encode_mx(
    bits: Array,
    magnitude: Array,
    amax: Array,
    element: SimpleDType,
    scale_rule: ScaleRule,
    rounding: casts.Rounding = "nearest_even",
    key: jax.Array | None = None,
) -> tuple[Array, Array]:
    """Codes and scales, uint8, of blocks whose largest magnitudes are ``amax``, which broadcasts."""
    xp = float32.library(bits)
    poisoned = amax >= float32.INFINITY
    byte = scale_bytes(amax, element, scale_rule)
    exponent, significand = float32.normalized(magnitude)
    # INT8 counts in units of 2**-6.
    unit = np.int32(127 + 6 if element is DType.Int8 else 127)
    # Far below the smallest element a value only has to stay nonzero, and where it lies between zero and that
    # one matters only to a probability under 2**-100. Zero itself has an exponent below all others.
    field = exponent - byte + np.int32(127) + unit
    field = xp.clip(field, np.int32(1), np.int32(254)).astype(np.uint32)
    quotient = (field << np.uint32(23)) | (significand & float32.FRACTION)
    quotient = xp.where(poisoned | (magnitude == _ZERO), _ZERO, quotient) | (bits & float32.SIGN)
    codes = casts.encode(quotient.view(np.float32), element, rounding=rounding, overflow="saturate", key=key)
    if element is DType.Int8:
        codes = xp.where(codes == np.uint8(0x80), np.uint8(0x81), codes)
    codes = xp.where(poisoned, np.uint8(0), codes)
    return codes, xp.where(poisoned, np.int32(255), byte).astype(np.uint8)


# NVFP4

_MIDPOINTS = ((4, -4), (6, -3), (5, -2), (7, -2), (5, -1), (7, -1), (5, 0))
"""Between consecutive E2M1 magnitudes, 0.25 to 5: significands of 4 to 7, and exponents."""


def _thresholds(significand: Array, exponent: Array, bits: Array, up_at_tie: Array) -> Array:
    """The bits of the least float32 that lies above ``significand * 2**exponent * value(bits)``, or on it where
    ``up_at_tie``.

    ``significand`` is uint32 of 64 to 127, so that the product has 31 bits.
    """
    xp = float32.library(bits)
    power, other = float32.normalized(bits)
    product = significand * other
    two_or_more = product >= np.uint32(1 << 30)
    product = xp.where(two_or_more, product, product << np.uint32(1))
    # The leading bit is bit 30 now, and stands for 2**exponent.
    exponent = exponent + power + np.int32(6) + two_or_more.astype(np.int32)
    shift = xp.clip(np.int32(-126) - exponent, np.int32(0), np.int32(24)).astype(np.uint32) + np.uint32(7)
    tiny = exponent < np.int32(-149)
    kept = xp.where(tiny, _ZERO, product >> shift)
    exact = ~tiny & (kept << shift == product)
    field = xp.clip(exponent + np.int32(126), np.int32(0), np.int32(254)).astype(np.uint32)
    below = xp.minimum((field << np.uint32(23)) + kept, float32.INFINITY)
    return below + (~(exact & up_at_tie)).astype(np.uint32)


def _scale_midpoints() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Six times the midpoints of consecutive E4M3 magnitudes, as significands of 64 to 127 and exponents."""
    codes = np.arange(126)
    significand = np.where(codes < 8, codes, 8 + codes % 8)
    # (significand + 1/2) * 2**unit * 6
    unit = np.maximum(codes // 8, 1) - 10
    significand, exponent = 3 * (2 * significand + 1), unit
    up = 6 - np.floor(np.log2(significand)).astype(int)
    return (significand << up).astype(np.uint32), (exponent - up).astype(np.int32)


def encode_nvfp4(bits: Array, magnitude: Array, amax: Array, tensor: Array) -> tuple[Array, Array]:
    """Codes and block scales, uint8, under the bits of one tensor scale, uint32 [1]."""
    xp = float32.library(bits)
    poisoned = amax >= float32.INFINITY
    odd_below = np.arange(126) % 2 == 1
    scales = xp.searchsorted(_thresholds(*_scale_midpoints(), tensor, odd_below), amax, side="right")
    scales = scales.astype(np.uint8)
    power, full = float32.normalized(casts.decode(scales, DType.E4M3).view(np.uint32))
    codes = xp.zeros_like(magnitude)
    unit = tensor.reshape((1,) * bits.ndim)
    for i, (midpoint, exponent) in enumerate(_MIDPOINTS):
        # Four significand bits of the scale by three of the midpoint.
        product = (full >> np.uint32(20)) * np.uint32(midpoint)
        large = product >= np.uint32(64)
        product = xp.where(large, product, product << np.uint32(1))
        place = power + np.int32(exponent - 3) - (~large).astype(np.int32)
        threshold = _thresholds(product, place, unit, np.bool_(i % 2 == 1))
        codes = codes + (magnitude >= threshold).astype(np.uint32)
    codes = xp.where(poisoned | (scales == np.uint8(0)), _ZERO, codes)
    sign = xp.where(poisoned, _ZERO, (bits & float32.SIGN) >> np.uint32(28))
    return (codes | sign).astype(np.uint8), xp.where(poisoned, np.uint8(0x7F), scales)


def tensor_scale(amax: Array) -> Array:
    """max(R32(amax / 2688), 2**-149), or 1; bits of and for NVFP4's outermost scale."""
    xp = float32.library(amax)
    largest = np.float32(2688).view(np.uint32)
    if xp is np:
        with np.errstate(all="ignore"):
            quotient = (amax.view(np.float32) / largest.view(np.float32)).view(np.uint32)
    else:
        quotient = float32.divide(amax, jnp.full(amax.shape, largest, jnp.uint32))
    one = np.float32(1).view(np.uint32)
    unusable = (amax == _ZERO) | (amax >= float32.INFINITY)
    return xp.where(unusable, one, xp.maximum(quotient, np.uint32(1)))


def largest_magnitude(bits: jax.Array, nonfinite: Nonfinite) -> jax.Array:
    """Of all values, uint32 [1]. In steps: XLA on CPU reduces short axes as it reads, and copies for long ones."""
    magnitude = magnitudes(bits, nonfinite)
    while magnitude.shape[-1] > _STEP and magnitude.shape[-1] % _STEP == 0:
        shape = (*magnitude.shape[:-1], magnitude.shape[-1] // _STEP, _STEP)
        magnitude = jax.lax.optimization_barrier(magnitude.reshape(shape).max(axis=-1))
    result: jax.Array = magnitude.max(initial=_ZERO).reshape(1)
    return result


# The primitives


def _decode_twin(
    codes: jax.Array, *scales: jax.Array, element: str, scale: str, packed: bool, across: bool
) -> jax.Array:
    dtype = _ELEMENTS[element]
    axis = _block_axis(across)
    codes = codes.view(jnp.uint8)
    bits = element_bits(bit_stream.unpack(codes, dtype.bits, axis) if packed else codes, dtype)
    inner = [jnp.expand_dims(plane.view(jnp.uint8), axis) for plane in scales[:1]]
    if scale == "E8M0":
        bits = float32.scale_by_power(bits, *inner)
    elif scale == "E4M3":
        bits = float32.multiply_short(bits, casts.decode(inner[0], DType.E4M3).view(jnp.uint32))
        if len(scales) > 1:
            # The first product has eight bits at most.
            outer = scales[1].view(jnp.uint32)
            bits = float32.multiply_short(bits, outer.reshape(*outer.shape, *(1,) * -axis))
    values: jax.Array = bits.view(jnp.float32)
    return values


def _encode_twin(
    values: jax.Array,
    *outer: jax.Array,
    element: str,
    scale: str,
    packed: bool,
    across: bool,
    scale_rule: ScaleRule,
    nonfinite: Nonfinite,
    code_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    dtype = _ELEMENTS[element]
    axis = _block_axis(across)
    bits = values.view(jnp.uint32)
    magnitude = magnitudes(bits, nonfinite)
    amax = magnitude.max(axis=axis, keepdims=True)
    if scale == "E8M0":
        codes, scales = encode_mx(bits, magnitude, amax, dtype, scale_rule)
    else:
        # A tensor scale each for the blocks of these many leading axes.
        tensors = outer[0].view(jnp.uint32).reshape(-1, 1)
        groups = [x.reshape(tensors.shape[0], -1, *x.shape[axis:]) for x in (bits, magnitude, amax)]
        codes, scales = jax.vmap(encode_nvfp4)(groups[0], groups[1], groups[2], tensors)
        codes, scales = codes.reshape(bits.shape), scales.reshape(amax.shape)
    if packed:
        codes = bit_stream.pack(codes, dtype.bits, axis)
    return codes.view(code_dtype), scales.squeeze(axis).view(_scale_dtype(scale))


def _block_axis(across: bool) -> int:
    return -2 if across else -1


def _scale_dtype(scale: str) -> Any:
    return {"E8M0": DType.E8M0, "E4M3": DType.E4M3}[scale].numpy_dtype


def _resized(operand: Any, across: bool, numerator: int, denominator: int) -> tuple[list[Any], list[Any]]:
    """The shape with another extent of the block axis, and the sharding of the batch alone."""
    axis = operand.ndim + _block_axis(across)
    shape = list(operand.shape)
    shape[axis] = shape[axis] * numerator // denominator
    batch = [jax_compat.leading_spec(operand, i) for i in range(axis)]
    return shape, batch + [None] * (operand.ndim - axis)


def _decode_aval(codes: Any, *scales: Any, element: str, packed: bool, across: bool, **_: Any) -> Any:
    shape, spec = _resized(codes, across, 8, _ELEMENTS[element].bits if packed else 8)
    return jax_compat.result_aval([codes, *scales], shape, jnp.float32, spec)


def _encode_aval(
    values: Any,
    *outer: Any,
    element: str,
    scale: str,
    packed: bool,
    across: bool,
    code_dtype: Any,
    **_: Any,
) -> Any:
    shape, spec = _resized(values, across, _ELEMENTS[element].bits if packed else 8, 8)
    axis = len(shape) + _block_axis(across)
    return [
        jax_compat.result_aval([values, *outer], shape, code_dtype, spec),
        jax_compat.result_aval(
            [values, *outer],
            [*shape[:axis], *shape[axis + 1 :]],
            _scale_dtype(scale),
            [*spec[:axis], *spec[axis + 1 :]],
        ),
    ]


def _decode_attributes(**params: Any) -> dict[str, Any]:
    return params


def _encode_attributes(
    *, element: str, scale_rule: ScaleRule, nonfinite: Nonfinite, code_dtype: Any, **params: Any
) -> dict[str, Any]:
    up_from, exponent_of_max = _rule(_ELEMENTS[element], scale_rule)
    return {
        **params,
        "element": element,
        "saturate": nonfinite == "saturate",
        "up_from": np.int32(up_from),
        "lowered": np.int32(exponent_of_max),
    }


def _batch(primitive: Any, args: Any, dims: Any, **params: Any) -> Any:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)

    def mapped_first(x: jax.Array, dim: Any) -> jax.Array:
        if dim is None:  # not mapped
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    result = primitive.bind(*map(mapped_first, args, dims), **params)
    return result, [0] * len(result) if primitive.multiple_results else 0


def _jvp(primitive: Any, primals: Any, tangents: Any, **params: Any) -> Any:
    result = primitive.bind(*primals, **params)
    if primitive.multiple_results:
        return result, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in result]
    return result, ad.Zero(jax.typeof(result).to_tangent_aval())


def _axes(operands: Any, results: Any, across: bool) -> partition.Axes:
    """Every axis but that of a block's elements may be split over devices."""
    shape = operands[0].shape
    block = len(shape) + _block_axis(across)
    whole = [partition.WHOLE if axis == block else axis for axis in range(len(shape))]

    def own(value: Any) -> list[int]:
        if len(value.shape) == len(shape) - 1:  # of scales
            return [*whole[:block], *whole[block + 1 :]]
        return whole

    def outer(value: Any) -> list[int]:
        # Of extent 1 where one outer scale is for all.
        return [
            axis if extent == shape[axis] and axis < block else partition.WHOLE
            for axis, extent in enumerate(value.shape)
        ]

    decodes = len(results) == 1
    mine = 2 if decodes else 1
    return partition.Axes(
        [own(value) for value in operands[:mine]] + [outer(value) for value in operands[mine:]],
        [own(value) for value in results],
    )


def _axes_of_call(operands: Any, results: Any, attributes: str) -> partition.Axes:
    return _axes(operands, results, "across = true" in attributes)


def _lower(
    ctx: Any,
    *operands: Any,
    platform: str,
    target: str,
    twin: Any,
    attributes: Any,
    backend: str,
    **params: Any,
) -> Any:
    empty = any(math.prod(aval.shape) == 0 for aval in ctx.avals_out)
    if not empty and native.runs_native(backend, platform, target):
        rule = partition.rule(
            _axes(ctx.avals_in, ctx.avals_out, params["across"]), ctx.avals_in, ctx.avals_out
        )
        lower = jax.ffi.ffi_lowering(f"jaxquant_{target}_v1", extra_attributes=rule)
        return lower(ctx, *operands, **attributes(**params))
    multiple = len(ctx.avals_out) > 1
    return mlir.lower_fun(functools.partial(twin, **params), multiple_results=multiple)(ctx, *operands)


def _primitive(name: str, aval: Any, twin: Any, attributes: Any, multiple_results: bool) -> Any:
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    lower = functools.partial(_lower, target=name, twin=twin, attributes=attributes)
    mlir.register_lowering(primitive, functools.partial(lower, platform="other"))
    mlir.register_lowering(primitive, functools.partial(lower, platform="cpu"), platform="cpu")
    partition.register(f"jaxquant_{name}_v1", _axes_of_call)
    return primitive


decode_blocks_p = _primitive("decode_blocks", _decode_aval, _decode_twin, _decode_attributes, False)
encode_blocks_p = _primitive("encode_blocks", _encode_aval, _encode_twin, _encode_attributes, True)
