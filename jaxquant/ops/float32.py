"""IEEE 754 binary32 arithmetic on bit patterns, in integer operations only.

XLA may contract ``a*b-c`` into a fused multiply-add, rewrite divisions and flush subnormals, on some
platforms always. It may not change integer arithmetic. Every function here takes and returns uint32
bit patterns, elementwise, rounds to nearest even, honours signed zeros, subnormals and infinities, and
returns one quiet NaN (0x7FC00000) for every NaN. What block scales need (`normalized` to `round_to`) works on
NumPy and JAX arrays alike and gives both the same bytes.

Significands travel as 24.8 fixed point: the leading bit at bit 31, eight guard bits of which the lowest
is sticky. IEEE 754-2019, sections 4.3.1 and 5.4.1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

__all__ = [
    "FRACTION",
    "IMPLICIT",
    "INFINITY",
    "MAGNITUDE",
    "NAN",
    "SHORT",
    "SIGN",
    "add",
    "divide",
    "from_float16",
    "from_int32",
    "is_nan",
    "library",
    "multiply",
    "multiply_short",
    "normalized",
    "round_to",
    "round_to_int8",
    "scale_by_power",
    "subtract",
    "to_bits",
]

Array: TypeAlias = Any

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
FRACTION = np.uint32(0x007FFFFF)
IMPLICIT = np.uint32(0x00800000)
NAN = np.uint32(0x7FC00000)
SHORT = 8
"""Significand bits of the shorter operand of `multiply_short`."""
_ZERO = np.uint32(0)
_ONE = np.uint32(1)


def library(array: Array) -> ModuleType:
    """The array library of an operand; tracers count as JAX."""
    return jnp if isinstance(array, jax.Array) else np


def to_bits(x: Array) -> Array:
    """The float32 bits of float16, bfloat16 or float32 values, which is always exact."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).view(np.uint32)


def is_nan(bits: Array) -> Array:
    return (bits & MAGNITUDE) > INFINITY


def _u32(x: Array) -> Array:
    return x.astype(np.uint32)


def _i32(x: Array) -> Array:
    return x.astype(np.int32)


def _is_infinite(bits: Array) -> Array:
    return (bits & MAGNITUDE) == INFINITY


def _is_zero(bits: Array) -> Array:
    return (bits & MAGNITUDE) == _ZERO


def _shift_right_sticky(x: Array, count: Array) -> Array:
    """``x >> count`` for count >= 0, with every bit shifted out or-ed into the lowest."""
    count = _u32(library(x).minimum(count, np.int32(31)))
    lost = x & ((_ONE << count) - _ONE)
    return (x >> count) | _u32(lost != _ZERO)


def _round_half_even(x: Array) -> Array:
    """Drop the eight guard bits of ``x``."""
    kept = x >> np.uint32(8)
    guard = x & np.uint32(0xFF)
    up = (guard > np.uint32(0x80)) | ((guard == np.uint32(0x80)) & ((kept & _ONE) == _ONE))
    return kept + _u32(up)


def _pack(sign: Array, exponent: Array, significand: Array) -> Array:
    """Round ``significand / 2**31 * 2**exponent``; the leading bit is bit 31, or all of it is zero."""
    xp = library(significand)
    below_normal = xp.maximum(np.int32(-126) - exponent, np.int32(0))
    significand = _shift_right_sticky(significand, below_normal)
    # A kept leading bit adds one to the exponent field, and so does a carry out of the rounding.
    field = xp.maximum(exponent + np.int32(126), np.int32(0))
    rounded = (_u32(xp.minimum(field, np.int32(254))) << np.uint32(23)) + _round_half_even(significand)
    overflow = (exponent > np.int32(127)) | (rounded >= INFINITY)
    magnitude = xp.where(significand == _ZERO, _ZERO, xp.where(overflow, INFINITY, rounded))
    return sign | magnitude


def normalized(bits: Array) -> tuple[Array, Array]:
    """Exponent (int32) and 24-bit significand of finite magnitudes, the leading bit always set.

    Zero gets an exponent so small that any product with it rounds to zero.
    """
    xp = library(bits)
    magnitude = bits & MAGNITUDE
    subnormal = magnitude < IMPLICIT
    # A subnormal is fraction * 2**-149, and an integer below 2**24 converts exactly.
    shifted = magnitude.astype(np.int32).astype(np.float32).view(np.uint32)
    full = xp.where(subnormal, shifted, magnitude)
    exponent = _i32(full >> np.uint32(23)) - xp.where(subnormal, np.int32(276), np.int32(127))
    exponent = xp.where(magnitude == _ZERO, np.int32(-900), exponent)
    return exponent, (full & FRACTION) | IMPLICIT


def scale_by_power(bits: Array, exponents: Array) -> Array:
    """The product with ``2**(exponent - 127)``, rounded once; exponents are E8M0 codes, of which 255 is NaN."""
    xp = library(bits)
    exponent, significand = normalized(bits)
    byte = _i32(exponents)
    result = _pack(bits & SIGN, exponent + byte - np.int32(127), significand << np.uint32(8))
    result = xp.where(_is_infinite(bits), bits, result)
    return xp.where(is_nan(bits) | (byte == np.int32(255)), NAN, result)


def multiply_short(a: Array, b: Array) -> Array:
    """The product, rounded once, where no significand of ``a`` has more than `SHORT` bits: one multiplication."""
    xp = library(a)
    sign = (a ^ b) & SIGN
    exponent_a, x = normalized(a)
    exponent_b, y = normalized(b)
    product = (x >> np.uint32(16)) * y
    two_or_more = product >= SIGN
    significand = xp.where(two_or_more, product, product << _ONE)
    result = _pack(sign, exponent_a + exponent_b + _i32(two_or_more), significand)
    large, small = xp.maximum(a & MAGNITUDE, b & MAGNITUDE), xp.minimum(a & MAGNITUDE, b & MAGNITUDE)
    result = xp.where(large == INFINITY, sign | INFINITY, result)
    invalid = (large > INFINITY) | ((large == INFINITY) & (small == _ZERO))
    return xp.where(invalid, NAN, result)


def round_to(bits: Array, dtype: np.dtype[Any]) -> Array:
    """The values as float16, bfloat16, float32 or float64, rounded once.

    Converting would do, but for XLA, which may drop a conversion down and up again, and flushes subnormals
    on the way to float64.
    """
    xp = library(bits)
    if dtype == np.float32:
        return bits.view(np.float32)
    if dtype == np.float64:
        exponent, significand = normalized(bits)
        power = (
            (xp.maximum(exponent, np.int32(-149)) + np.int32(1000)).astype(np.uint64) << np.uint64(52)
        ).view(np.float64)
        finite = significand.astype(np.float64) * power
        value = xp.where(_is_zero(bits), np.float64(0), finite)
        value = xp.where(_is_infinite(bits), np.float64(np.inf), value)
        value = xp.where((bits & SIGN) != _ZERO, -value, value)
        return xp.where(is_nan(bits), np.float64(np.nan), value)
    high = ((bits & SIGN) >> np.uint32(16)).astype(np.uint16)
    if dtype == ml_dtypes.bfloat16:
        magnitude = bits & MAGNITUDE
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & _ONE)) >> np.uint32(16)
        nan = np.uint16(0x7FC0)
    elif dtype == np.float16:
        exponent, significand = normalized(bits)
        below_normal = xp.clip(np.int32(-14) - exponent, np.int32(0), np.int32(12))
        significand = xp.where(exponent < np.int32(-25), _ZERO, significand)
        field = _u32(xp.clip(exponent + np.int32(14), np.int32(0), np.int32(30)))
        guarded = _shift_right_sticky(significand, below_normal + np.int32(5))
        rounded = (field << np.uint32(10)) + _round_half_even(guarded)
        rounded = xp.minimum(rounded, np.uint32(0x7C00))
        nan = np.uint16(0x7E00)
    else:
        raise TypeError(f"values are float16, bfloat16, float32 or float64, not {dtype}")
    return xp.where(is_nan(bits), nan, high | rounded.astype(np.uint16)).view(dtype)


def multiply(a: Array, b: Array) -> Array:
    """The product, rounded once."""
    xp = library(a)
    sign = (a ^ b) & SIGN
    exponent_a, x = normalized(a)
    exponent_b, y = normalized(b)
    # 24 x 24 bits by 12-bit halves; high * 2**24 + low is the exact product in [2**46, 2**48).
    low_mask, half = np.uint32(0xFFF), np.uint32(12)
    x_high, x_low, y_high, y_low = x >> half, x & low_mask, y >> half, y & low_mask
    middle = x_high * y_low + x_low * y_high
    low = x_low * y_low + ((middle & low_mask) << half)
    high = x_high * y_high + (middle >> half) + (low >> np.uint32(24))
    low = low & np.uint32(0xFFFFFF)
    significand = (high << np.uint32(8)) | (low >> np.uint32(16)) | _u32((low & np.uint32(0xFFFF)) != _ZERO)
    two_or_more = significand >= SIGN
    significand = xp.where(two_or_more, significand, significand << _ONE)
    result = _pack(sign, exponent_a + exponent_b + _i32(two_or_more), significand)

    zero = _is_zero(a) | _is_zero(b)
    infinite = _is_infinite(a) | _is_infinite(b)
    result = xp.where(zero, sign, xp.where(infinite, sign | INFINITY, result))
    return xp.where(is_nan(a) | is_nan(b) | (zero & infinite), NAN, result)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum, rounded once; a zero sum of unlike signs is +0."""
    swap = (a & MAGNITUDE) < (b & MAGNITUDE)
    large, small = jnp.where(swap, b, a), jnp.where(swap, a, b)

    def parts(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        field = _i32((bits & MAGNITUDE) >> np.uint32(23))
        significand = (bits & FRACTION) | jnp.where(field == 0, _ZERO, IMPLICIT)
        return jnp.maximum(field, np.int32(1)), significand << np.uint32(7)

    field, x = parts(large)
    field_small, y = parts(small)
    y = _shift_right_sticky(y, field - field_small)
    unlike = ((a ^ b) & SIGN) != _ZERO
    total = jnp.where(unlike, x - y, x + y)
    leading = _i32(lax.clz(total))
    # clz(0) is 32, and a shift by 32 is no zero on every platform.
    significand = total << _u32(jnp.minimum(leading, np.int32(31)))
    sign = large & jnp.where(unlike & (total == _ZERO), _ZERO, SIGN)
    result = _pack(sign, field - np.int32(126) - leading, significand)

    result = jnp.where(_is_infinite(large), large, result)
    invalid = _is_infinite(a) & _is_infinite(b) & unlike
    return jnp.where(is_nan(a) | is_nan(b) | invalid, NAN, result)


def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
    """The difference, rounded once."""
    return add(a, b ^ SIGN)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient, rounded once."""
    sign = (a ^ b) & SIGN
    exponent_a, x = normalized(a)
    exponent_b, y = normalized(b)
    below_one = x < y
    x = jnp.where(below_one, x << _ONE, x)
    x, y = jnp.broadcast_arrays(x, y)

    def step(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        quotient, remainder = state
        fits = remainder >= y
        return (quotient << _ONE) | _u32(fits), jnp.where(fits, remainder - y, remainder) << _ONE

    quotient, remainder = lax.fori_loop(0, 32, step, (x ^ x, x))
    significand = quotient | _u32(remainder != _ZERO)
    result = _pack(sign, exponent_a - exponent_b - _i32(below_one), significand)

    zero_result = _is_zero(a) | _is_infinite(b)
    infinite_result = _is_infinite(a) | _is_zero(b)
    result = jnp.where(zero_result, sign, jnp.where(infinite_result, sign | INFINITY, result))
    return jnp.where(is_nan(a) | is_nan(b) | (zero_result & infinite_result), NAN, result)


def from_int32(x: jax.Array) -> jax.Array:
    """An int32, rounded once."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits & SIGN
    magnitude = jnp.where(sign == _ZERO, bits, _ZERO - bits)
    leading = _i32(lax.clz(magnitude))
    significand = magnitude << _u32(jnp.minimum(leading, np.int32(31)))
    result: jax.Array = _pack(sign, np.int32(31) - leading, significand)
    return result


def from_float16(x: jax.Array) -> jax.Array:
    """The float32 bits of float16 bits (uint16), which is always exact."""
    half = _u32(x)
    sign = (half & np.uint32(0x8000)) << np.uint32(16)
    field = (half >> np.uint32(10)) & np.uint32(0x1F)
    fraction = half & np.uint32(0x3FF)
    normal = ((field + np.uint32(112)) << np.uint32(23)) | (fraction << np.uint32(13))
    # 0.fraction * 2**-14: bring the leading bit to bit 10, one exponent down per place.
    up = lax.clz(fraction) - np.uint32(21)
    shifted = (fraction << (up & np.uint32(0x1F))) & np.uint32(0x3FF)
    subnormal = ((np.uint32(113) - up) << np.uint32(23)) | (shifted << np.uint32(13))
    special = jnp.where(fraction == _ZERO, INFINITY, NAN)
    magnitude = jnp.where(field == np.uint32(31), special, normal)
    magnitude = jnp.where(field == _ZERO, jnp.where(fraction == _ZERO, _ZERO, subnormal), magnitude)
    return jnp.where(magnitude == NAN, NAN, sign | magnitude)


def round_to_int8(bits: jax.Array) -> jax.Array:
    """The nearest integer, ties to even, saturated to [-128, 127], as int32; NaN gives 0."""
    exponent = _i32((bits & MAGNITUDE) >> np.uint32(23)) - np.int32(127)
    significand = ((bits & FRACTION) | IMPLICIT) << np.uint32(8)
    # Below one half everything rounds to zero, and from 256 on everything saturates.
    fixed = _shift_right_sticky(significand, np.int32(23) - jnp.clip(exponent, -2, 8))
    magnitude = _i32(jnp.where(exponent > 8, np.uint32(256), _round_half_even(fixed)))
    value = jnp.where((bits & SIGN) == _ZERO, magnitude, -magnitude)
    value = jnp.clip(value, -128, 127)
    return jnp.where(is_nan(bits), np.int32(0), value)
