"""Narrow formats by table and search: float64 values of every code, and the two that lie around an input.

Slow and independent of `jaxquant.casts`: ml_dtypes gives the value of a code (which `test_casts` checks against
the golden values), and float64 holds every float32, every value and every midpoint exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DIRECTIONS = ("nearest_even", "nearest_away", "toward_zero", "up", "down")


@dataclass(frozen=True)
class Format:
    """`name` is that of the descriptor, or of the ml_dtypes or numpy scalar type."""

    name: str
    bits: int
    largest: int
    """The code of the largest finite value."""
    overflowed: int | None = None
    """The code, without sign, of what lies beyond under the policy "overflow"."""
    nan: int = 0
    signed: bool = True

    @property
    def dtype(self):
        return np.dtype(np.uint8) if self.name == "uint8" else getattr(ml_dtypes, self.name, self.name)


FLOATS = (
    Format("E4M3", 8, 0x7E, 0x7F, 0x7F),
    Format("E5M2", 8, 0x7B, 0x7C, 0x7F),
    Format("E3M2", 6, 0x1F),
    Format("E2M3", 6, 0x1F),
    Format("E2M1", 4, 0x7),
)
E8M0 = Format("E8M0", 8, 254, 255, 255, signed=False)
INTEGERS = (
    Format("Int8", 8, 127),
    Format("int4", 4, 7),
    Format("int2", 2, 1),
    Format("uint8", 8, 255, signed=False),
    Format("uint4", 4, 15, signed=False),
    Format("uint2", 2, 3, signed=False),
)
FORMATS = (*FLOATS, E8M0, *INTEGERS)
BY_NAME = {f.name: f for f in FORMATS}
_SCALARS = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E8M0": ml_dtypes.float8_e8m0fnu,
}


def policies(format: Format) -> tuple[str, ...]:
    return ("saturate",) if format.overflowed is None else ("saturate", "overflow")


def magnitudes(format: Format) -> np.ndarray:
    """float64, the values of the codes 0 to `largest`, and what would come after them."""
    if format in INTEGERS:
        return np.arange(format.largest + 2, dtype=np.float64)
    codes = np.arange(format.largest + 1, dtype=np.uint8)
    values = codes.view(_SCALARS[format.name]).astype(np.float64)
    assert (np.diff(values) > 0).all()
    beyond = 2 * values[-1] if format is E8M0 else 2 * values[-1] - values[-2]
    return np.append(values, beyond)


def widened(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def encode(x: np.ndarray, format: Format, rounding: str = "nearest_even", overflow: str | None = None):
    """uint8 codes of float16, bfloat16 or float32 values."""
    if overflow is None:
        overflow = policies(format)[-1]
    return encodings(x, format, [(rounding, overflow)])[0]


def encodings(x: np.ndarray, format: Format, modes) -> list[np.ndarray]:
    """One array of codes per (rounding, overflow); the search is done once."""
    if format in INTEGERS:
        return [_encode_integers(widened(x), format, rounding) for rounding, _ in modes]
    value = widened(x)
    table = magnitudes(format)
    absolute = np.where(np.isnan(value), 0, np.abs(value))
    # Index `largest + 1` stands for everything beyond; below the first value is the first value.
    below = np.searchsorted(table, absolute, side="right") - 1
    at_bottom = below < 0
    below = np.maximum(below, 0)
    above = np.minimum(below + 1, len(table) - 1)
    inexact = (absolute != table[below]) & (below < len(table) - 1) & ~at_bottom
    middle = (table[below] + table[above]) / 2
    return [
        _encode_floats(value, format, below, inexact, absolute - middle, rounding, overflow)
        for rounding, overflow in modes
    ]


def _encode_floats(value, format, below, inexact, from_middle, rounding, overflow):
    negative = np.signbit(value)
    away = {
        "nearest_even": (from_middle > 0) | ((from_middle == 0) & (below % 2 == 1)),
        "nearest_away": from_middle >= 0,
        "toward_zero": np.zeros(value.shape, bool),
        "up": ~negative,
        "down": negative,
    }[rounding]
    if format is E8M0 and rounding == "nearest_even":
        away = away | ((from_middle == 0) & (below == format.largest))
    index = below + (inexact & away)
    beyond = index > format.largest
    towards_zero = (rounding == "toward_zero") | ((rounding == "up") & negative)
    towards_zero = towards_zero | ((rounding == "down") & ~negative)
    if overflow == "saturate" or format.overflowed is None:
        code = np.where(beyond, format.largest, index)
    else:
        code = np.where(
            beyond, np.where(towards_zero & np.isfinite(value), format.largest, format.overflowed), index
        )
    if format.signed:
        code = code | (negative.astype(np.int64) << (format.bits - 1))
    elif format is E8M0:
        code = np.where(~np.isfinite(value) | (value < 0), format.nan, code)
    return np.where(np.isnan(value), format.nan, code).astype(np.uint8)


def _encode_integers(value, format, rounding):
    least = -format.largest - 1 if format.signed else 0
    # Every value beyond 1000 saturates; within, a half added to a float32 is exact in float64.
    near = np.clip(np.where(np.isnan(value), 0, value), -1000, 1000)
    rounded = {
        "nearest_even": np.rint(near),
        "nearest_away": np.copysign(np.floor(np.abs(near) + 0.5), near),
        "toward_zero": np.trunc(near),
        "up": np.ceil(near),
        "down": np.floor(near),
    }[rounding]
    return (np.clip(rounded, least, format.largest).astype(np.int64) & ((1 << format.bits) - 1)).astype(
        np.uint8
    )


def edges(format: Format) -> np.ndarray:
    """float32: every value, every midpoint, their neighbours on both sides, and the ends of float32."""
    table = magnitudes(format)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [table[0] / 2, table[0] / 4]])
    points = points[points <= np.finfo(np.float32).max].astype(np.float32)
    bits = points.view(np.uint32)
    # fmt: off
    special = np.array(
        [0, 1, 2, 0x1FFFFF, 0x200000, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF,
         0x800000, 0x33800000, 0x437FFFFF, 0x43800000, 0x4B800000, 0x7EFFFFFF, 0x7F000000, 0x7F3FFFFF, 0x7F400000,
         0x7F400001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF],
        np.uint32,
    )
    # fmt: on
    every = np.unique(
        np.concatenate([bits, bits + np.uint32(1), np.maximum(bits, 1) - np.uint32(1), special])
    )
    return np.concatenate([every, every | np.uint32(1 << 31)]).view(np.float32)
