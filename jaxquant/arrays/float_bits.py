"""Float32 arithmetic on bit patterns, written once for NumPy and JAX.

Integer operations only: XLA flushes subnormals, contracts and rewrites float operations, and no integer
ones, so that both libraries give the same bytes. Bits are uint32 arrays; every rounding is to nearest even;
every NaN becomes 0x7FC00000. `jaxquant.ops.float32` multiplies two full significands; here one of them is
short, which is all that block scales need and much cheaper.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.ops import float32

__all__ = [
    "INFINITY",
    "MAGNITUDE",
    "NAN",
    "SIGN",
    "is_nan",
    "library",
    "multiply",
    "normalized",
    "round_half_even",
    "round_to",
    "scale_by_power",
    "to_bits",
]

Array: TypeAlias = Any

SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000)
_FRACTION = np.uint32(0x007FFFFF)
_IMPLICIT = np.uint32(0x00800000)
_ONE = np.uint32(1)
_ZERO = np.uint32(0)
SHORT = 8
"""Significand bits of the shorter operand of the cheap multiply."""


def library(array: Array) -> ModuleType:
    """The array library of an operand; tracers count as JAX."""
    return jnp if isinstance(array, jax.Array) else np


def to_bits(x: Array) -> Array:
    """The float32 bits of float16, bfloat16 or float32 values, which is always exact."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).view(np.uint32)


def is_nan(bits: Array) -> Array:
    return (bits & MAGNITUDE) > INFINITY


def normalized(bits: Array) -> tuple[Array, Array]:
    """Exponent (int32) and 24-bit significand of finite magnitudes, the leading bit always set.

    Zero gets an exponent so small that any product with it rounds to zero.
    """
    xp = library(bits)
    magnitude = bits & MAGNITUDE
    subnormal = magnitude < _IMPLICIT
    # A subnormal is fraction * 2**-149, and an integer below 2**24 converts exactly.
    shifted = magnitude.astype(np.int32).astype(np.float32).view(np.uint32)
    full = xp.where(subnormal, shifted, magnitude)
    exponent = (full >> np.uint32(23)).astype(np.int32) - xp.where(subnormal, np.int32(276), np.int32(127))
    exponent = xp.where(magnitude == _ZERO, np.int32(-900), exponent)
    return exponent, (full & _FRACTION) | _IMPLICIT


def round_half_even(significand: Array, count: Array) -> Array:
    """``significand >> count`` to nearest even, for significands below 2**31 and counts of 1 to 31."""
    half = (_ONE << (count - _ONE)) - _ONE
    return (significand + half + ((significand >> count) & _ONE)) >> count


def _pack(sign: Array, exponent: Array, significand: Array) -> Array:
    """Round ``significand * 2**(exponent - 30)`` to float32; the leading bit is bit 30."""
    xp = library(significand)
    # Half of the smallest subnormal is 2**-150; below it all is zero.
    significand = xp.where(exponent < np.int32(-150), _ZERO, significand)
    below_normal = xp.clip(np.int32(-126) - exponent, np.int32(0), np.int32(24))
    rounded = round_half_even(significand, below_normal.astype(np.uint32) + np.uint32(7))
    # A kept leading bit adds one to the exponent field, and so does a carry out of the rounding.
    field = xp.clip(exponent + np.int32(126), np.int32(0), np.int32(254)).astype(np.uint32)
    return sign | xp.minimum((field << np.uint32(23)) + rounded, INFINITY)


def scale_by_power(bits: Array, exponents: Array) -> Array:
    """The product with ``2**(exponent - 127)``, rounded once; exponents are E8M0 codes, of which 255 is NaN."""
    xp = library(bits)
    exponent, significand = normalized(bits)
    byte = exponents.astype(np.int32)
    result = _pack(bits & SIGN, exponent + byte - np.int32(127), significand << np.uint32(7))
    result = xp.where((bits & MAGNITUDE) == INFINITY, bits, result)
    return xp.where(is_nan(bits) | (byte == np.int32(255)), NAN, result)


def multiply(a: Array, b: Array, significand_bits: int) -> Array:
    """The product, rounded once; ``significand_bits`` bounds the significands of ``a``."""
    if significand_bits <= SHORT:
        return _multiply_short(a, b)
    if library(a) is jnp:
        return float32.multiply(a, b)
    with np.errstate(all="ignore"):
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
    return np.where(is_nan(product), NAN, product)


def _multiply_short(a: Array, b: Array) -> Array:
    xp = library(a)
    sign = (a ^ b) & SIGN
    exponent_a, x = normalized(a)
    exponent_b, y = normalized(b)
    product = (x >> np.uint32(16)) * y
    two_or_more = product >= SIGN
    # The lowest of 32 bits is kept as a sticky bit.
    significand = xp.where(two_or_more, (product >> _ONE) | (product & _ONE), product)
    result = _pack(sign, exponent_a + exponent_b + two_or_more.astype(np.int32), significand)
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
        value = xp.where((bits & MAGNITUDE) == _ZERO, np.float64(0), finite)
        value = xp.where((bits & MAGNITUDE) == INFINITY, np.float64(np.inf), value)
        value = xp.where((bits & SIGN) != _ZERO, -value, value)
        return xp.where(is_nan(bits), np.float64(np.nan), value)
    high = ((bits & SIGN) >> np.uint32(16)).astype(np.uint16)
    if dtype == ml_dtypes.bfloat16:
        magnitude = bits & MAGNITUDE
        rounded = (magnitude + np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & _ONE)) >> np.uint32(16)
        nan = np.uint16(0x7FC0)
    elif dtype == np.float16:
        exponent, significand = normalized(bits)
        below_normal = xp.clip(np.int32(-14) - exponent, np.int32(0), np.int32(12)).astype(np.uint32)
        significand = xp.where(exponent < np.int32(-25), _ZERO, significand)
        field = xp.clip(exponent + np.int32(14), np.int32(0), np.int32(30)).astype(np.uint32)
        rounded = (field << np.uint32(10)) + round_half_even(significand, below_normal + np.uint32(13))
        rounded = xp.minimum(rounded, np.uint32(0x7C00))
        nan = np.uint16(0x7E00)
    else:
        raise TypeError(f"values are float16, bfloat16, float32 or float64, not {dtype}")
    return xp.where(is_nan(bits), nan, high | rounded.astype(np.uint16)).view(dtype)
