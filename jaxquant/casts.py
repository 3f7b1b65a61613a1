"""Narrow formats by bits: encode, decode and cast, alike for NumPy and JAX.

Everything is integer arithmetic on float32 bit patterns, one piece of code for both libraries: XLA flushes
subnormals, contracts products into sums and has its own idea of a NaN, but it may not change integers. (The
one float step is the conversion of integers below 2**11 to float32, which is exact everywhere.)

Source: section "Casts" of the microscaling contract; OCP Microscaling Formats v1.0, sections 5 and 6;
IEEE 754-2019, section 4.3, for the directions of rounding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from typing import cast as typed

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxquant import jax_compat
from jaxquant.dtypes import DType, FloatFacts, SimpleDType
from jaxquant.ops.float32 import FRACTION, IMPLICIT, INFINITY, MAGNITUDE, NAN

__all__ = ["Overflow", "Rounding", "cast", "decode", "encode"]

HostArray: TypeAlias = np.ndarray[Any, Any]
_A = TypeVar("_A", HostArray, jax.Array)
NumpyDType: TypeAlias = np.dtype[Any]

Rounding: TypeAlias = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow: TypeAlias = Literal["saturate", "overflow"]

_ZERO = np.uint32(0)
_ONE = np.uint32(1)
_HALF = np.uint32(1 << 31)
_SMALLEST_E8M0 = np.uint32(0x00400000)
_256 = np.uint32(0x43800000)


@dataclass(frozen=True, slots=True)
class _Float:
    """A sign, an exponent of bias 2**(exponent_bits - 1) - 1, a significand; codes here are magnitudes."""

    exponent_bits: int
    significand_bits: int
    largest: int
    overflowed: int | None
    """The infinity, or the NaN that stands for it; always `largest + 1`."""
    nan: int
    saturates: bool

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.significand_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1


@dataclass(frozen=True, slots=True)
class _PowerOfTwo:
    """E8M0: code c is 2**(c - 127), and 255 is NaN."""

    bits: int = 8
    saturates: bool = False


@dataclass(frozen=True, slots=True)
class _Integer:
    bits: int
    signed: bool
    saturates: bool = True


_Format: TypeAlias = _Float | _PowerOfTwo | _Integer
_SOURCES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))


def encode(
    x: _A,
    dtype: object,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow | None = None,
    key: jax.Array | None = None,
) -> _A:
    """Round values to a narrow fmt, and give the codes.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX.
        dtype: E4M3, E5M2, E3M2, E2M3, E2M1, E8M0 or an integer of up to 8 bits, signed or not: a SimpleDType,
            its name, its scalar type or numpy dtype.
        rounding: ``"nearest_even"``, ``"nearest_away"`` (ties away from zero), ``"toward_zero"``, ``"up"``
            (towards plus infinity), ``"down"`` or ``"stochastic"``: away from zero with a probability of the
            distance to the code below over the distance of both codes, cut to a multiple of 2**-32, so that
            the expected value is ``x``.
        overflow: what becomes of a value that is out of range once rounded: ``"saturate"`` to the largest
            finite value, ``"overflow"`` to infinity (E5M2) or NaN (E4M3 with the value's sign, E8M0). The
            default is the dtype's own policy: overflow for E4M3, E5M2 and E8M0, saturate for the others,
            which know nothing else. A finite value rounded towards zero never overflows.
        key: for stochastic rounding, and only there, a ``jax.random`` key. A key gives NumPy and JAX the same
            bytes.

    Returns:
        uint8 [...], one code in the low bits of each byte, of the library of ``x``; the same bytes from NumPy
        and JAX, eager and jitted. Its derivative is zero.

        NaN gives 0x7F in E4M3 and E5M2 (without its sign), 0xFF in E8M0, and code 0 in the formats without
        NaN, under every rounding and policy; ``jax.experimental.checkify`` with ``errors=user_checks``
        reports it. Negative zero keeps its sign in every signed float.

        E8M0 has no zero: 0 and all below 2**-127 give code 0 (2**-127), negative values and infinities 0xFF.
        Nearest goes to the even code on a tie, save that 1.5 * 2**127 overflows.

    Raises:
        TypeError: if ``x`` is no array or of another dtype, or ``dtype`` is no such fmt.
        LookupError: if no dtype has the name ``dtype``.
        ValueError: for an unknown rounding or policy, ``overflow="overflow"`` on a format without infinity or
            NaN, stochastic rounding without a key, or a key without it.

    Example:
        >>> import numpy as np
        >>> from jaxquant.casts import decode, encode
        >>> codes = encode(np.float32([1.31640625, 464, 465, -0.0]), "E4M3")
        >>> codes.tolist(), decode(codes, "E4M3").tolist()
        ([59, 126, 127, 128], [1.375, 448.0, nan, -0.0])

    Source: section "Casts" of the microscaling contract; overflow and NaN as in OCP MX v1.0, section 5.3.
    """
    fmt = _format("encode", dtype)
    _check_source("encode", x)
    saturate = _check_mode("encode", dtype, fmt, rounding, overflow, key)
    random = None if key is None else jax.random.bits(key, x.shape, jnp.uint32)
    if isinstance(x, np.ndarray):
        # NumPy's scalars, which it makes of 0-d arrays, warn where arrays wrap.
        flat = np.atleast_1d(x)
        host_random = None if random is None else np.atleast_1d(np.asarray(random))
        bits = _float32_bits(np, flat)
        return typed(_A, _encode(np, bits, host_random, fmt, rounding, saturate).reshape(x.shape))
    return typed(_A, _encode_jitted(x, random, fmt, rounding, saturate))


def decode(codes: _A, dtype: object) -> _A:
    """The values of codes, exactly.

    Args:
        codes: uint8 [...], NumPy or JAX; bits above the format's width are ignored.
        dtype: as in `encode`.

    Returns:
        float32 [...] of the library of ``codes``. NaN is 0x7FC00000 with the code's
        sign. An integer code gives the integer
        (the 2**-6 of MXINT8 belongs to the block fmt), and E8M0's code 0 gives 2**-127, a subnormal: most
        float operations of XLA flush it to zero.

    Raises:
        TypeError: if ``codes`` is no array of uint8, or ``dtype`` is no such fmt.
        LookupError: if no dtype has the name ``dtype``.

    Example:
        >>> import numpy as np
        >>> from jaxquant.casts import decode
        >>> decode(np.uint8([1, 7, 8, 0xFE]), "E4M3").tolist()
        [0.001953125, 0.013671875, 0.015625, -448.0]

    Source: table of the microscaling contract; OCP MX v1.0, section 5.3.
    """
    fmt = _format("decode", dtype)
    _check_array("decode", "codes", codes)
    if codes.dtype != np.uint8:
        raise TypeError(f"decode: codes has dtype {codes.dtype}, wanted uint8")
    if isinstance(codes, np.ndarray):
        return np.asarray(_values(fmt)[codes])
    return typed(_A, _decode_jitted(codes, fmt))


def cast(
    x: _A,
    dtype: object,
    *,
    rounding: Rounding = "nearest_even",
    overflow: Overflow | None = None,
    key: jax.Array | None = None,
) -> _A:
    """Round values to a narrow fmt, as an array of that dtype.

    Arguments, rounding and errors are those of `encode`.

    Returns:
        An array of ``dtype``'s numpy dtype and the shape of ``x``, of the library of ``x``. Its derivative is
        zero.

    Raises:
        TypeError: also for the six-bit formats under JAX, which XLA cannot hold: use `encode`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxquant.casts import cast
        >>> cast(jnp.float32([4.25, 4.75]), "E4M3")
        Array([4, 5], dtype=float8_e4m3fn)

    Source: section "Casts" of the microscaling contract.
    """
    fmt = _format("cast", dtype)
    _check_source("cast", x)
    wanted = typed(NumpyDType, numpy_dtype(dtype))
    on_host = isinstance(x, np.ndarray)
    if isinstance(fmt, _Float) and fmt.bits == 6 and not on_host:
        raise TypeError(
            f"cast: JAX has no arrays of {wanted}; jaxquant.casts.encode gives its codes as uint8"
        )
    codes = encode(x, dtype, rounding=rounding, overflow=overflow, key=key)
    if isinstance(codes, np.ndarray):
        if isinstance(fmt, _Integer):
            return np.asarray(_integers(np, codes, fmt).astype(wanted))
        return codes.view(wanted)
    if fmt.bits == 8:
        return lax.bitcast_convert_type(codes, wanted)
    # XLA folds constant bitcasts to less than a byte wrongly; conversions of values in range are exact.
    if isinstance(fmt, _Integer):
        return typed(jax.Array, _integers(jnp, codes, fmt)).astype(wanted)
    return decode(codes, dtype).astype(wanted)


def numpy_dtype(dtype: object) -> NumpyDType | None:
    """The numpy dtype of a descriptor, registered name, numpy dtype or scalar type.

    None where a descriptor has none. Raises TypeError for anything else, a compound descriptor included.
    """
    if isinstance(dtype, DType | str):
        found = DType.from_any(dtype)
        if not isinstance(found, SimpleDType):
            raise TypeError(f"wanted a simple dtype, got {found!r}")
        return found.numpy_dtype
    # The scalar types of jax.numpy are classes that carry their numpy dtype.
    carried = getattr(dtype, "dtype", None) if isinstance(dtype, type) else None
    found_dtype = carried if isinstance(carried, np.dtype) else dtype
    if isinstance(found_dtype, np.dtype):
        return found_dtype
    if isinstance(found_dtype, type) and issubclass(found_dtype, np.generic):
        return np.dtype(found_dtype)
    raise TypeError(
        "wanted a descriptor, a registered name, a numpy dtype or a scalar type, "
        f"got {dtype!r} of type {type(dtype).__name__}"
    )


def _format(operation: str, dtype: object) -> _Format:
    found = numpy_dtype(dtype)
    fmt = None if found is None else _format_of(found)
    if fmt is None:
        raise TypeError(
            f"{operation}: dtype must be E4M3, E5M2, E3M2, E2M3, E2M1, E8M0 or an integer of up to 8 bits, "
            f"got {dtype!r}"
        )
    return fmt


@functools.cache
def _format_of(dtype: NumpyDType) -> _Format | None:
    if dtype == DType.E8M0.numpy_dtype:
        return _PowerOfTwo()
    for descriptor in (DType.E5M2, DType.E4M3, DType.E3M2, DType.E2M3, DType.E2M1):
        if descriptor.numpy_dtype == dtype:
            return _float_of(descriptor.float_facts)
    try:
        info = typed(Any, ml_dtypes).iinfo(dtype)
    except (TypeError, ValueError):
        return None
    return _Integer(int(info.bits), signed=int(info.min) < 0) if info.bits <= 8 else None


def _float_of(facts: FloatFacts) -> _Float:
    ones = (1 << (facts.exponent_bits + facts.significand_bits)) - 1
    infinity = ones - ((1 << facts.significand_bits) - 1)
    if facts.nonfinite_behavior == "finite_only":
        largest, overflowed, nan = ones, None, 0
    else:
        overflowed = infinity if facts.has_inf else ones
        largest, nan = overflowed - 1, ones
    return _Float(
        facts.exponent_bits,
        facts.significand_bits,
        largest,
        overflowed,
        nan,
        facts.overflow_policy == "saturate",
    )


def _check_array(operation: str, name: str, value: object) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{operation}: {name} must be a jax.Array or numpy.ndarray, got {type(value).__name__}"
        )


def _check_source(operation: str, x: HostArray | jax.Array) -> None:
    _check_array(operation, "x", x)
    if x.dtype not in _SOURCES:
        raise TypeError(f"{operation}: x has dtype {x.dtype}, wanted float16, bfloat16 or float32")


def _check_mode(
    operation: str, dtype: object, fmt: _Format, rounding: object, overflow: object, key: object
) -> bool:
    """Whether to saturate."""
    if rounding not in get_args(Rounding):
        raise ValueError(f"{operation}: rounding must be one of {get_args(Rounding)}, got {rounding!r}")
    if overflow not in (None, *get_args(Overflow)):
        raise ValueError(
            f"{operation}: overflow must be None or one of {get_args(Overflow)}, got {overflow!r}"
        )
    if overflow == "overflow" and fmt.saturates:
        raise ValueError(
            f'{operation}: overflow="overflow" needs an infinity or NaN, and {dtype!r} has neither'
        )
    if (rounding == "stochastic") != (key is not None):
        raise ValueError(
            f'{operation}: rounding="stochastic" and key go together, got rounding={rounding!r} '
            f"and {'no' if key is None else 'a'} key"
        )
    return fmt.saturates if overflow is None else overflow == "saturate"


# The code that NumPy and JAX share: `xp` is numpy or jax.numpy, arrays are uint32 unless they say otherwise.


def _encode(xp: Any, bits: Any, random: Any, fmt: _Format, rounding: Rounding, saturate: bool) -> Any:
    magnitude = bits & MAGNITUDE
    negative = bits > MAGNITUDE
    if isinstance(fmt, _Float):
        kept, lost = _split_float(xp, magnitude, fmt, rounding)
    elif isinstance(fmt, _PowerOfTwo):
        kept, lost = _split_power_of_two(xp, magnitude)
    else:
        kept, lost = _split_integer(xp, magnitude, rounding)
    rounded = kept + _rounds_away(kept, lost, negative, random, rounding).astype(xp.uint32)
    not_a_number = magnitude > INFINITY
    if isinstance(fmt, _Float):
        limit = _limit(xp, fmt, rounding, saturate, negative, magnitude)
        sign = negative.astype(xp.uint32) << np.uint32(fmt.bits - 1)
        code = xp.where(not_a_number, np.uint32(fmt.nan), sign | xp.minimum(rounded, limit))
    elif isinstance(fmt, _PowerOfTwo):
        if rounding == "nearest_even":
            # What lies above 254 is odd, yet the tie below it overflows.
            tie = (kept == np.uint32(254)) & (lost == _HALF)
            rounded = rounded + tie.astype(xp.uint32)
        invalid = (magnitude >= INFINITY) | (negative & (magnitude != _ZERO))
        limit = np.uint32(254 if saturate else 255)
        code = xp.where(invalid, np.uint32(255), xp.minimum(rounded, limit))
    else:
        top = np.uint32((1 << (fmt.bits - 1)) - 1 if fmt.signed else (1 << fmt.bits) - 1)
        bottom = np.uint32(1 << (fmt.bits - 1) if fmt.signed else 0)
        absolute = xp.minimum(rounded, xp.where(negative, bottom, top))
        signed = xp.where(negative, _ZERO - absolute, absolute) & np.uint32((1 << fmt.bits) - 1)
        code = xp.where(not_a_number, _ZERO, signed)
    return code.astype(xp.uint8)


def _float32_bits(xp: Any, x: Any) -> Any:
    if x.dtype == np.float32:
        return _bitcast(xp, x, np.uint32)
    half = _bitcast(xp, x, np.uint16).astype(xp.uint32)
    if x.dtype != np.float16:
        return half << np.uint32(16)
    field = (half >> np.uint32(10)) & np.uint32(31)
    fraction = half & np.uint32(0x3FF)
    significand = fraction | xp.where(field == _ZERO, _ZERO, np.uint32(0x400))
    finite = _scaled(xp, significand, xp.maximum(field, _ONE) - np.uint32(25))
    magnitude = xp.where(field == np.uint32(31), INFINITY | (fraction << np.uint32(13)), finite)
    return ((half >> np.uint32(15)) << np.uint32(31)) | magnitude


def _bitcast(xp: Any, x: Any, dtype: Any) -> Any:
    return x.view(dtype) if xp is np else lax.bitcast_convert_type(x, dtype)


def _scaled(xp: Any, significand: Any, exponent: Any) -> Any:
    """The float32 bits of ``significand * 2**exponent``, which must be zero or normal; wraps at 2**32."""
    bits = _bitcast(xp, significand.astype(xp.float32), np.uint32)
    return xp.where(significand == _ZERO, _ZERO, bits + (exponent << np.uint32(23)))


def _significand(xp: Any, magnitude: Any) -> Any:
    return (magnitude & FRACTION) | xp.where(magnitude < IMPLICIT, _ZERO, IMPLICIT)


def _split(xp: Any, significand: Any, shift: Any, rounding: Rounding) -> tuple[Any, Any]:
    """The whole part of ``significand / 2**shift``, and the rest in units of 2**-32.

    The significand has 24 bits and the shift is at least 1. The rest is never zero where a bit is lost,
    except under stochastic rounding, which wants its size.
    """
    near = xp.minimum(shift, np.uint32(31))
    lost = significand << (np.uint32(32) - near)
    if rounding == "stochastic":
        lost = lost >> xp.minimum(shift - near, np.uint32(31))
    return significand >> near, lost


def _split_float(xp: Any, magnitude: Any, fmt: _Float, rounding: Rounding) -> tuple[Any, Any]:
    exponent = xp.maximum(magnitude >> np.uint32(23), _ONE)
    smallest_normal = np.uint32(128 - fmt.bias)
    normal = xp.maximum(exponent, smallest_normal)
    shift = np.uint32(23 - fmt.significand_bits) + (normal - exponent)
    kept, lost = _split(xp, _significand(xp, magnitude), shift, rounding)
    # The leading bit of a normal significand adds the missing one to the exponent field.
    return ((normal - smallest_normal) << np.uint32(fmt.significand_bits)) + kept, lost


def _split_power_of_two(xp: Any, magnitude: Any) -> tuple[Any, Any]:
    magnitude = xp.maximum(magnitude, _SMALLEST_E8M0)
    # In the float32 subnormals the leading bit is one place lower, and explicit.
    up = xp.where(magnitude < IMPLICIT, np.uint32(10), np.uint32(9))
    return magnitude >> np.uint32(23), magnitude << up


def _split_integer(xp: Any, magnitude: Any, rounding: Rounding) -> tuple[Any, Any]:
    magnitude = xp.minimum(magnitude, _256)
    exponent = xp.maximum(magnitude >> np.uint32(23), _ONE)
    return _split(xp, _significand(xp, magnitude), np.uint32(150) - exponent, rounding)


def _rounds_away(kept: Any, lost: Any, negative: Any, random: Any, rounding: Rounding) -> Any:
    if rounding == "nearest_even":
        return (lost > _HALF) | ((lost == _HALF) & ((kept & _ONE) == _ONE))
    if rounding == "nearest_away":
        return lost >= _HALF
    if rounding == "stochastic":
        return random < lost
    inexact = lost != _ZERO
    if rounding == "up":
        return inexact & ~negative
    if rounding == "down":
        return inexact & negative
    return inexact & ~inexact


def _limit(xp: Any, fmt: _Float, rounding: Rounding, saturate: bool, negative: Any, magnitude: Any) -> Any:
    """The largest code of a magnitude."""
    largest = np.uint32(fmt.largest)
    if saturate or fmt.overflowed is None:
        return largest
    overflowed = np.uint32(fmt.overflowed)
    infinite = magnitude >= INFINITY
    if rounding == "toward_zero":
        return xp.where(infinite, overflowed, largest)
    if rounding == "up":
        return xp.where(infinite | ~negative, overflowed, largest)
    if rounding == "down":
        return xp.where(infinite | negative, overflowed, largest)
    return overflowed


def _decode(xp: Any, codes: Any, fmt: _Format) -> Any:
    if isinstance(fmt, _Integer):
        return _integers(xp, codes, fmt).astype(xp.float32)
    code = codes.astype(xp.uint32)
    if isinstance(fmt, _PowerOfTwo):
        bits = xp.where(code == _ZERO, _SMALLEST_E8M0, code << np.uint32(23))
        bits = xp.where(code == np.uint32(255), NAN, bits)
    else:
        ones = np.uint32((1 << fmt.significand_bits) - 1)
        magnitude = code & np.uint32((1 << (fmt.bits - 1)) - 1)
        field = magnitude >> np.uint32(fmt.significand_bits)
        leading = xp.where(field == _ZERO, _ZERO, ones + _ONE)
        offset = np.uint32(fmt.bias + fmt.significand_bits)
        finite = _scaled(xp, (magnitude & ones) | leading, xp.maximum(field, _ONE) - offset)
        sign = ((code >> np.uint32(fmt.bits - 1)) & _ONE) << np.uint32(31)
        bits = sign | finite
        if fmt.overflowed is not None:
            if fmt.overflowed != fmt.nan:
                bits = xp.where(magnitude == np.uint32(fmt.overflowed), sign | INFINITY, bits)
            first_nan = fmt.largest + 1 + (fmt.overflowed != fmt.nan)
            bits = xp.where(magnitude >= np.uint32(first_nan), sign | NAN, bits)
    return _bitcast(xp, bits, np.float32)


def _integers(xp: Any, codes: Any, fmt: _Integer) -> Any:
    """int8 or uint8."""
    unused = 8 - fmt.bits
    if not fmt.signed:
        return codes & np.uint8((1 << fmt.bits) - 1)
    return (codes << np.uint8(unused)).astype(xp.int8) >> np.int8(unused)


@functools.cache
def _values(fmt: _Format) -> HostArray:
    """The value of every byte."""
    values: HostArray = _decode(np, np.arange(256, dtype=np.uint8), fmt)
    values.flags.writeable = False
    return values


# A primitive of its own, so that checkify has something to look at, and programs without it have nothing more.
float32_bits_p = Primitive("float32_bits")
float32_bits_p.def_impl(functools.partial(xla.apply_primitive, float32_bits_p))
float32_bits_p.def_abstract_eval(lambda x: x.update(dtype=np.dtype(np.uint32), weak_type=False))
batching.defvectorized(float32_bits_p)
mlir.register_lowering(
    float32_bits_p, mlir.lower_fun(functools.partial(_float32_bits, jnp), multiple_results=False)
)
jax_compat.add_user_check(
    float32_bits_p, lambda bits: (bits & MAGNITUDE) > INFINITY, "encode: x is NaN at index {index}"
)


def _jvp(primals: Any, tangents: Any) -> Any:
    bits = float32_bits_p.bind(*primals)
    return bits, ad.Zero(jax.typeof(bits).to_tangent_aval())


ad.primitive_jvps[float32_bits_p] = _jvp


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _encode_jitted(
    x: jax.Array, random: jax.Array | None, fmt: _Format, rounding: Rounding, saturate: bool
) -> jax.Array:
    bits = float32_bits_p.bind(x)
    return typed(jax.Array, _encode(jnp, bits, random, fmt, rounding, saturate))


@functools.partial(jax.jit, static_argnums=1)
def _decode_jitted(codes: jax.Array, fmt: _Format) -> jax.Array:
    return typed(jax.Array, _decode(jnp, codes, fmt))
