"""IEEE 754 binary32 arithmetic on bit patterns, in integer operations only.

XLA may contract ``a*b-c`` into a fused multiply-add, rewrite divisions and flush subnormals, on some
platforms always. It may not change integer arithmetic. Every function here takes and returns uint32
bit patterns, elementwise, rounds to nearest even, honours signed zeros, subnormals and infinities, and
returns one quiet NaN (0x7FC00000) for every NaN.

Significands travel as 24.8 fixed point: the leading bit at bit 31, eight guard bits of which the lowest
is sticky. IEEE 754-2019, sections 4.3.1 and 5.4.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "NAN",
    "add",
    "divide",
    "from_float16",
    "from_int32",
    "multiply",
    "round_to_int8",
    "subtract",
]

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_FRACTION = np.uint32(0x007FFFFF)
_IMPLICIT = np.uint32(0x00800000)
_ZERO = np.uint32(0)
_ONE = np.uint32(1)
NAN = np.uint32(0x7FC00000)


def _u32(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.uint32)


def _i32(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.int32)


def _is_nan(bits: jax.Array) -> jax.Array:
    return (bits & _MAGNITUDE) > _INFINITY


def _is_infinite(bits: jax.Array) -> jax.Array:
    return (bits & _MAGNITUDE) == _INFINITY


def _is_zero(bits: jax.Array) -> jax.Array:
    return (bits & _MAGNITUDE) == _ZERO


def _shift_right_sticky(x: jax.Array, count: jax.Array) -> jax.Array:
    """``x >> count`` for count >= 0, with every bit shifted out or-ed into the lowest."""
    count = _u32(jnp.minimum(count, np.int32(31)))
    lost = x & ((_ONE << count) - _ONE)
    return (x >> count) | _u32(lost != _ZERO)


def _round_half_even(x: jax.Array) -> jax.Array:
    """Drop the eight guard bits of ``x``."""
    kept = x >> np.uint32(8)
    guard = x & np.uint32(0xFF)
    up = (guard > np.uint32(0x80)) | ((guard == np.uint32(0x80)) & ((kept & _ONE) == _ONE))
    return kept + _u32(up)


def _pack(sign: jax.Array, exponent: jax.Array, significand: jax.Array) -> jax.Array:
    """Round ``significand / 2**31 * 2**exponent``; the leading bit is bit 31, or all of it is zero."""
    below_normal = jnp.maximum(np.int32(-126) - exponent, np.int32(0))
    significand = _shift_right_sticky(significand, below_normal)
    # A kept leading bit adds one to the exponent field, and so does a carry out of the rounding.
    field = jnp.maximum(exponent + np.int32(126), np.int32(0))
    rounded = (_u32(jnp.minimum(field, np.int32(254))) << np.uint32(23)) + _round_half_even(significand)
    overflow = (exponent > np.int32(127)) | (rounded >= _INFINITY)
    magnitude = jnp.where(significand == _ZERO, _ZERO, jnp.where(overflow, _INFINITY, rounded))
    return sign | magnitude


def _normalized(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent and 24-bit significand of a finite nonzero number, subnormals shifted up."""
    fraction = bits & _FRACTION
    field = _i32((bits & _MAGNITUDE) >> np.uint32(23))
    up = jnp.where(field == 0, _i32(lax.clz(fraction)) - np.int32(8), np.int32(0))
    significand = jnp.where(field == 0, fraction << _u32(up), fraction | _IMPLICIT)
    return jnp.maximum(field, np.int32(1)) - up - np.int32(127), significand


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product, rounded once."""
    sign = (a ^ b) & _SIGN
    exponent_a, x = _normalized(a)
    exponent_b, y = _normalized(b)
    # 24 x 24 bits by 12-bit halves; high * 2**24 + low is the exact product in [2**46, 2**48).
    low_mask, half = np.uint32(0xFFF), np.uint32(12)
    x_high, x_low, y_high, y_low = x >> half, x & low_mask, y >> half, y & low_mask
    middle = x_high * y_low + x_low * y_high
    low = x_low * y_low + ((middle & low_mask) << half)
    high = x_high * y_high + (middle >> half) + (low >> np.uint32(24))
    low = low & np.uint32(0xFFFFFF)
    significand = (high << np.uint32(8)) | (low >> np.uint32(16)) | _u32((low & np.uint32(0xFFFF)) != _ZERO)
    two_or_more = significand >= _SIGN
    significand = jnp.where(two_or_more, significand, significand << _ONE)
    result = _pack(sign, exponent_a + exponent_b + _i32(two_or_more), significand)

    zero = _is_zero(a) | _is_zero(b)
    infinite = _is_infinite(a) | _is_infinite(b)
    result = jnp.where(zero, sign, jnp.where(infinite, sign | _INFINITY, result))
    return jnp.where(_is_nan(a) | _is_nan(b) | (zero & infinite), NAN, result)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum, rounded once; a zero sum of unlike signs is +0."""
    swap = (a & _MAGNITUDE) < (b & _MAGNITUDE)
    large, small = jnp.where(swap, b, a), jnp.where(swap, a, b)

    def parts(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
        field = _i32((bits & _MAGNITUDE) >> np.uint32(23))
        significand = (bits & _FRACTION) | jnp.where(field == 0, _ZERO, _IMPLICIT)
        return jnp.maximum(field, np.int32(1)), significand << np.uint32(7)

    field, x = parts(large)
    field_small, y = parts(small)
    y = _shift_right_sticky(y, field - field_small)
    unlike = ((a ^ b) & _SIGN) != _ZERO
    total = jnp.where(unlike, x - y, x + y)
    leading = _i32(lax.clz(total))
    # clz(0) is 32, and a shift by 32 is no zero on every platform.
    significand = total << _u32(jnp.minimum(leading, np.int32(31)))
    sign = large & jnp.where(unlike & (total == _ZERO), _ZERO, _SIGN)
    result = _pack(sign, field - np.int32(126) - leading, significand)

    result = jnp.where(_is_infinite(large), large, result)
    invalid = _is_infinite(a) & _is_infinite(b) & unlike
    return jnp.where(_is_nan(a) | _is_nan(b) | invalid, NAN, result)


def subtract(a: jax.Array, b: jax.Array) -> jax.Array:
    """The difference, rounded once."""
    return add(a, b ^ _SIGN)


def divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """The quotient, rounded once."""
    sign = (a ^ b) & _SIGN
    exponent_a, x = _normalized(a)
    exponent_b, y = _normalized(b)
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
    result = jnp.where(zero_result, sign, jnp.where(infinite_result, sign | _INFINITY, result))
    return jnp.where(_is_nan(a) | _is_nan(b) | (zero_result & infinite_result), NAN, result)


def from_int32(x: jax.Array) -> jax.Array:
    """An int32, rounded once."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = bits & _SIGN
    magnitude = jnp.where(sign == _ZERO, bits, _ZERO - bits)
    leading = _i32(lax.clz(magnitude))
    significand = magnitude << _u32(jnp.minimum(leading, np.int32(31)))
    return _pack(sign, np.int32(31) - leading, significand)


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
    special = jnp.where(fraction == _ZERO, _INFINITY, NAN)
    magnitude = jnp.where(field == np.uint32(31), special, normal)
    magnitude = jnp.where(field == _ZERO, jnp.where(fraction == _ZERO, _ZERO, subnormal), magnitude)
    return jnp.where(magnitude == NAN, NAN, sign | magnitude)


def round_to_int8(bits: jax.Array) -> jax.Array:
    """The nearest integer, ties to even, saturated to [-128, 127], as int32; NaN gives 0."""
    exponent = _i32((bits & _MAGNITUDE) >> np.uint32(23)) - np.int32(127)
    significand = ((bits & _FRACTION) | _IMPLICIT) << np.uint32(8)
    # Below one half everything rounds to zero, and from 256 on everything saturates.
    fixed = _shift_right_sticky(significand, np.int32(23) - jnp.clip(exponent, -2, 8))
    magnitude = _i32(jnp.where(exponent > 8, np.uint32(256), _round_half_even(fixed)))
    value = jnp.where((bits & _SIGN) == _ZERO, magnitude, -magnitude)
    value = jnp.clip(value, -128, 127)
    return jnp.where(_is_nan(bits), np.int32(0), value)
