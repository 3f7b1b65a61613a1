"""Block quantization in exact rational arithmetic, one number at a time; nothing here comes from the package.

Blocks are lists of float32 bit patterns. Formats are named by their ml_dtypes scalar types.
"""

from __future__ import annotations

from fractions import Fraction

import exact
import ml_dtypes
import numpy as np

ELEMENTS = {
    "MXFP8_E4M3": ml_dtypes.float8_e4m3fn,
    "MXFP8_E5M2": ml_dtypes.float8_e5m2,
    "MXFP6_E3M2": ml_dtypes.float6_e3m2fn,
    "MXFP6_E2M3": ml_dtypes.float6_e2m3fn,
    "MXFP4": ml_dtypes.float4_e2m1fn,
    "MXINT8": np.int8,
    "NVFP4": ml_dtypes.float4_e2m1fn,
}
SCALE_RULES = ("floor", "ceil", "rceil", "even")
MX = tuple(name for name in ELEMENTS if name != "NVFP4")
LARGEST = 0x7F7FFFFF


def magnitudes(name) -> list[Fraction]:
    """The finite magnitudes of the element codes, in the order of the codes."""
    if name == "MXINT8":
        return [Fraction(code, 64) for code in range(128)]
    scalar = ELEMENTS[name]
    codes = np.arange(1 << (ml_dtypes.finfo(scalar).bits - 1), dtype=np.uint8)
    values = codes.view(scalar).astype(np.float64)
    return [Fraction(float(value)) for value in values if np.isfinite(value)]


def code(name, negative: bool, magnitude: int) -> int:
    if name == "MXINT8":
        return -magnitude & 255 if negative else magnitude
    sign_bit = ml_dtypes.finfo(ELEMENTS[name]).bits - 1
    return negative << sign_bit | magnitude


def nearest_even(table, value: Fraction) -> int:
    """The index of the nearest entry of an ascending table, even on a tie, the last for all above."""
    best = 0
    for i in range(1, len(table)):
        middle = (table[i - 1] + table[i]) / 2
        if value > middle or (value == middle and i % 2 == 0):
            best = i
    return best


def directed(table, value: Fraction, away: bool) -> int:
    below = max(i for i, entry in enumerate(table) if entry <= value)
    return min(below + (away and table[below] != value), len(table) - 1)


def rounded(table, value: Fraction, negative: bool, rounding: str) -> int:
    if rounding == "nearest_even":
        return nearest_even(table, value)
    if rounding == "nearest_away":
        below = directed(table, value, False)
        if below + 1 == len(table):
            return below
        return below + (value >= (table[below] + table[below + 1]) / 2)
    away = {"toward_zero": False, "up": not negative, "down": negative}[rounding]
    return directed(table, value, away)


def exponent_of(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def scale_byte(name, rule, amax: Fraction) -> int:
    if not amax:
        return 0
    largest = magnitudes(name)[-1]
    e, e_max = exponent_of(amax), exponent_of(largest)
    m, m_max = amax / Fraction(2) ** e, largest / Fraction(2) ** e_max
    bits = {"MXFP8_E4M3": 3, "MXFP8_E5M2": 2, "MXFP6_E3M2": 2, "MXFP6_E2M3": 3, "MXFP4": 1, "MXINT8": 6}[name]
    up = {"floor": False, "ceil": m > 1, "rceil": m > m_max, "even": m >= 2 - Fraction(1, 2 << bits)}[rule]
    return min(max(e - e_max + up + 127, 0), 254)


def quantize_mx(block, name, rule="floor", rounding="nearest_even", nonfinite="nan"):
    """The scale byte and the codes."""
    if nonfinite == "saturate":
        block = [bits & 0x80000000 | LARGEST if bits & 0x7FFFFFFF == 0x7F800000 else bits for bits in block]
    if any(bits & 0x7FFFFFFF >= 0x7F800000 for bits in block):
        return 255, [0] * len(block)
    values = [exact.rational(bits) for bits in block]
    byte = scale_byte(name, rule, max(map(abs, values)))
    table = magnitudes(name)
    codes = [
        code(
            name,
            bits >> 31 == 1,
            rounded(table, abs(value) / Fraction(2) ** (byte - 127), bits >> 31, rounding),
        )
        for bits, value in zip(block, values, strict=True)
    ]
    return byte, codes


def quantize_nvfp4(rows, tensor_scale=None, nonfinite="nan"):
    """The tensor scale's bits, and scale and codes of each block of 16."""
    if nonfinite == "saturate":
        rows = [
            [bits & 0x80000000 | LARGEST if bits & 0x7FFFFFFF == 0x7F800000 else bits for bits in row]
            for row in rows
        ]
    every = [bits & 0x7FFFFFFF for row in rows for bits in row]
    amax = max(every)
    if tensor_scale is None:
        usable = 0 < amax < 0x7F800000
        tensor_scale = max(exact.round_f32(exact.rational(amax) / 2688), 1) if usable else 0x3F800000
    ts = exact.rational(tensor_scale)
    e4m3, e2m1 = magnitudes("MXFP8_E4M3"), magnitudes("NVFP4")
    blocks = []
    for row in rows:
        if max(bits & 0x7FFFFFFF for bits in row) >= 0x7F800000:
            blocks.append((0x7F, [0] * 16))
            continue
        values = [exact.rational(bits) for bits in row]
        scale = nearest_even(e4m3, max(map(abs, values)) / (6 * ts))
        product = e4m3[scale] * ts
        blocks.append(
            (
                scale,
                [
                    (bits >> 31) << 3 | (nearest_even(e2m1, abs(value) / product) if product else 0)
                    for bits, value in zip(row, values, strict=True)
                ],
            )
        )
    return tensor_scale, blocks


def decoded(name, element: int, *scales: tuple[str, int]) -> int:
    """The float32 bits of an element code under scales, inner to outer, each a kind and a code or bits."""
    table = magnitudes(name)
    if name == "MXINT8":
        negative, magnitude = element > 127, Fraction(256 - element if element > 127 else element, 64)
        negative_zero = False
    else:
        sign_bit = ml_dtypes.finfo(ELEMENTS[name]).bits - 1
        negative = element >> sign_bit == 1
        index = element & ((1 << sign_bit) - 1)
        if index >= len(table):
            has_infinity = ELEMENTS[name] is ml_dtypes.float8_e5m2 and index == len(table)
            bits = negative << 31 | exact.INFINITY_BITS if has_infinity else exact.NAN_BITS
            return bits if scales[0] != ("e8m0", 255) else exact.NAN_BITS
        magnitude, negative_zero = table[index], negative
    bits = exact.round_f32(-magnitude if negative else magnitude, negative_zero)
    for kind, scale in scales:
        if kind == "e8m0":
            if scale == 255:
                return exact.NAN_BITS
            bits = exact.round_f32(exact.rational(bits) * Fraction(2) ** (scale - 127), bits >> 31 == 1)
        elif kind == "e4m3":
            value = np.uint8([scale]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            bits = exact.rational_multiply(bits, int(value.view(np.uint32)[0]))
        else:
            bits = exact.rational_multiply(bits, scale)
    return bits
