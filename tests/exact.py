"""The slow reference that every backend is compared with; nothing here comes from the package.

The integer statistics are NumPy int64 sums and each float step is one float32 ufunc, that is one
separately rounded IEEE operation. ``rational_dot`` and ``rational_quantize`` repeat the float steps
in exact rational arithmetic, to check the NumPy ones without a floating-point unit.

Do not call any of this inside a JAX callback: XLA runs callbacks with subnormals flushed to zero.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

POISON = np.array([0x00, 0x00, 0xC0, 0x7F] + [0] * 288, np.uint8)
SMALLEST_EXTREME_BITS = 0x02FE0001

KINDS = (
    "gaussian",
    "heavy_tailed",
    "integers",
    "ties",
    "halves",
    "subnormal_ds",
    "subnormal_values",
    "near_max",
    "bf16_rounded",
    "one_hot",
    "zeros",
    "random_bits",
)
POISON_KINDS = ("nan", "infinite", "too_small")


class Q4K(NamedTuple):
    d: np.ndarray
    dmin: np.ndarray
    sc: np.ndarray
    m: np.ndarray
    q: np.ndarray


class Q8K(NamedTuple):
    ds: np.ndarray
    q: np.ndarray
    bsum: np.ndarray


class Statistics(NamedTuple):
    S: np.ndarray
    T: np.ndarray
    p: np.ndarray
    n: np.ndarray
    v: np.ndarray


def same_bits(a, b) -> bool:
    """Whether shape, dtype and every bit agree; all NaNs of a float dtype count as one value."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    same = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)
    if a.dtype.kind not in "iub":
        same |= np.isnan(a) & np.isnan(b)
    return bool(same.all())


def keeps_subnormals() -> bool:
    """Whether this thread computes with subnormal operands and results, in NumPy's float32 loops."""
    subnormal_result = np.full(16, 2e-38, np.float32) * np.full(16, 0.25, np.float32)
    subnormal_operand = np.full(16, 1e-40, np.float32) * np.full(16, 1e10, np.float32)
    return bool((subnormal_result > 0).all() and (subnormal_operand > 0).all())


def load(name: str) -> dict[str, np.ndarray]:
    """The arrays of ``tests/data/<name>.npz``."""
    with np.load(Path(__file__).parent / "data" / f"{name}.npz") as arrays:
        return dict(arrays)


# Decoding, by the formulas of the contract in plain integers


def decode_q4k(records) -> Q4K:
    a = _bytes(records, 144)
    sc, m = ([None] * 8, [None] * 8)
    for r, field in ((0, sc), (1, m)):
        for i in range(4):
            field[i] = a[..., 4 + 4 * r + i] & 63
        for t in range(4):
            field[4 + t] = ((a[..., 12 + t] >> (4 * r)) & 15) | ((a[..., 4 + 4 * r + t] >> 6) << 4)
    q = [(a[..., 16 + 32 * (i // 64) + (i % 32)] >> (0 if i % 64 < 32 else 4)) & 15 for i in range(256)]
    return Q4K(
        _half(a[..., 0] | a[..., 1] << 8),
        _half(a[..., 2] | a[..., 3] << 8),
        np.stack(sc, -1),
        np.stack(m, -1),
        np.stack(q, -1),
    )


def decode_q8k(records) -> Q8K:
    a = _bytes(records, 292)
    ds = a[..., 0] | a[..., 1] << 8 | a[..., 2] << 16 | a[..., 3] << 24
    bsum = a[..., 260:292:2] | a[..., 261:292:2] << 8
    return Q8K(
        ds.astype(np.uint32).view(np.float32),
        _twos_complement(a[..., 4:260], 8),
        _twos_complement(bsum, 16),
    )


def _bytes(records, extent: int) -> np.ndarray:
    records = np.asarray(records)
    assert records.dtype == np.uint8, records.dtype
    assert records.shape[-1] == extent, records.shape
    return records.astype(np.int64)


def _twos_complement(field: np.ndarray, bits: int) -> np.ndarray:
    return field - ((field >> (bits - 1)) << bits)


def _half(bits: np.ndarray) -> np.ndarray:
    sign, exponent, fraction = bits >> 15, (bits >> 10) & 31, bits & 1023
    significand = np.where(exponent > 0, fraction + 1024, fraction)
    value = np.ldexp(significand.astype(np.float32), np.maximum(exponent, 1) - 25)
    special = np.where(fraction == 0, np.float32(np.inf), np.float32(np.nan))
    value = np.where(exponent == 31, special, value)
    return np.where(sign == 1, -value, value).astype(np.float32)


# Dots


def statistics(w, x) -> Statistics:
    """Per record, ``w`` u8 [..., 144] against ``x`` u8 [..., 292]; leading axes broadcast."""
    a, b = decode_q4k(w), decode_q8k(x)
    products = (a.q * b.q).reshape(*np.broadcast_shapes(a.q.shape, b.q.shape)[:-1], 8, 32)
    S = (a.sc * products.sum(-1)).sum(-1)
    T = (a.m * (b.bsum[..., 0::2] + b.bsum[..., 1::2])).sum(-1)
    return _float_steps(a.d, a.dmin, b.ds, S, T)


def dot(w, x) -> np.float32:
    """``w`` u8 [G, 144], ``x`` u8 [G, 292]."""
    return np.float32(dots(w, x))


def dots(w, x) -> np.ndarray:
    """``w`` u8 [..., G, 144], ``x`` u8 [..., G, 292] to f32 [...]; leading axes broadcast."""
    assert w.shape[-2] == x.shape[-2], (w.shape, x.shape)
    return left_fold(statistics(w, x).v)


def gemm(w, x) -> np.ndarray:
    """Every row of ``w`` u8 [M, G, 144] with every row of ``x`` u8 [N, G, 292], f32 [M, N]."""
    assert w.ndim == x.ndim == 3
    assert w.shape[1] == x.shape[1], (w.shape, x.shape)
    v = np.empty((len(w), len(x), w.shape[1]), np.float32)
    for g in range(w.shape[1]):
        a, b = decode_q4k(w[:, g]), decode_q8k(x[:, g])
        S = (np.repeat(a.sc, 32, axis=-1) * a.q) @ b.q.T
        T = a.m @ (b.bsum[:, 0::2] + b.bsum[:, 1::2]).T
        v[..., g] = _float_steps(a.d[:, None], a.dmin[:, None], b.ds, S, T).v
    return left_fold(v)


def left_fold(v) -> np.ndarray:
    """v0, then + v1, + v2, ... over the last axis, +0 when it is empty."""
    if v.shape[-1] == 0:
        return np.zeros(v.shape[:-1], np.float32)
    total = v[..., 0].copy()
    with np.errstate(all="ignore"):
        for g in range(1, v.shape[-1]):
            total = np.add(total, v[..., g], dtype=np.float32)
    return total


def _float_steps(d, dmin, ds, S, T) -> Statistics:
    assert S.dtype == T.dtype == np.int64
    with np.errstate(all="ignore"):
        p = np.multiply(d, S.astype(np.float32), dtype=np.float32)
        n = np.multiply(dmin, T.astype(np.float32), dtype=np.float32)
        difference = np.subtract(p, n, dtype=np.float32)
        v = np.multiply(ds, difference, dtype=np.float32)
    return Statistics(S, T, p, n, v)


def dequantize_q4k(records) -> np.ndarray:
    """``R32(R32(d*sc) * q - R32(dmin*m))`` elementwise, f32 [..., 256]; the products are exact."""
    a = decode_q4k(records)
    with np.errstate(all="ignore"):
        scale = np.multiply(a.d[..., None], a.sc.astype(np.float32), dtype=np.float32)
        offset = np.multiply(a.dmin[..., None], a.m.astype(np.float32), dtype=np.float32)
        product = np.multiply(np.repeat(scale, 32, -1), a.q.astype(np.float32), dtype=np.float32)
        return np.subtract(product, np.repeat(offset, 32, -1), dtype=np.float32)


def dequantize_q8k(records) -> np.ndarray:
    """``R32(ds * q)``, f32 [..., 256]."""
    b = decode_q8k(records)
    with np.errstate(all="ignore"):
        return np.multiply(b.ds[..., None], b.q.astype(np.float32), dtype=np.float32)


# Quantization


def quantize(x) -> np.ndarray:
    """``x`` f32 [..., G, 256] to u8 [..., G, 292]; out-of-domain blocks become poison records."""
    x = np.asarray(x)
    assert x.dtype == np.float32, x.dtype
    assert x.shape[-1] == 256, x.shape
    with np.errstate(all="ignore"):
        high, low = x.max(-1), x.min(-1)
        extreme = np.where(high > -low, high, low)
        inverse = np.divide(np.float32(-127), extreme, dtype=np.float32)
        ds = np.divide(np.float32(1), inverse, dtype=np.float32)
        rounded = np.rint(np.multiply(x, inverse[..., None], dtype=np.float32))
    zero = (x == 0).all(-1)
    poison = ~np.isfinite(x).all(-1) | (~zero & ~np.isfinite(inverse))
    rounded = np.where((zero | poison)[..., None], np.float32(0), rounded)
    q = np.clip(rounded, -128, 127).astype(np.int64)
    ds = np.where(zero, np.float32(0), ds)
    return np.where(poison[..., None], POISON, encode_q8k(ds, q))


def encode_q8k(ds, q, bsum=None) -> np.ndarray:
    """Fields to bytes: ``ds`` f32 [...], ``q`` int64 [..., 256], and by default the legal bsum."""
    q = np.asarray(q, np.int64)
    assert q.min(initial=0) >= -128
    assert q.max(initial=0) <= 127
    bsum = q.reshape(*q.shape[:-1], 16, 16).sum(-1) if bsum is None else bsum
    bits = np.array(ds, np.float32).view(np.uint32)
    records = np.empty((*q.shape[:-1], 292), np.uint8)
    for i in range(4):
        records[..., i] = (bits >> (8 * i)) & 255
    records[..., 4:260] = q & 255
    records[..., 260:292:2] = bsum & 255
    records[..., 261:292:2] = (bsum >> 8) & 255
    return records


# The float steps once more, without a floating-point unit: float32 bits in, float32 bits out

NAN_BITS, INFINITY_BITS = 0x7FC00000, 0x7F800000


def round_f32(value: Fraction, negative_zero: bool = False) -> int:
    """The bits of the float32 nearest to ``value``, ties to even."""
    if value == 0:
        return int(negative_zero) << 31
    sign, value = int(value < 0) << 31, abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, -126)
    # round() of a Fraction goes to even on a tie; a carry into the exponent is just the sum below.
    bits = ((exponent + 126) << 23) + round(value / Fraction(2) ** (exponent - 23))
    return sign | min(bits, INFINITY_BITS)


def rational(bits: int) -> Fraction:
    """The exact value of a finite float32."""
    exponent, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    assert exponent < 255
    significand = fraction + (0x800000 if exponent else 0)
    value = significand * Fraction(2) ** (max(exponent, 1) - 150)
    return -value if bits >> 31 else value


def rational_multiply(a: int, b: int) -> int:
    sign = (a ^ b) & 0x80000000
    if _is_nan(a) or _is_nan(b) or (_is_infinite(a) and _is_zero(b)) or (_is_zero(a) and _is_infinite(b)):
        return NAN_BITS
    if _is_infinite(a) or _is_infinite(b):
        return sign | INFINITY_BITS
    return round_f32(rational(a) * rational(b), sign != 0)


def rational_divide(a: int, b: int) -> int:
    sign = (a ^ b) & 0x80000000
    if _is_nan(a) or _is_nan(b) or (_is_infinite(a) and _is_infinite(b)) or (_is_zero(a) and _is_zero(b)):
        return NAN_BITS
    if _is_infinite(a) or _is_zero(b):
        return sign | INFINITY_BITS
    if _is_infinite(b):
        return sign
    return round_f32(rational(a) / rational(b), sign != 0)


def rational_add(a: int, b: int) -> int:
    if _is_nan(a) or _is_nan(b) or (_is_infinite(a) and _is_infinite(b) and a != b):
        return NAN_BITS
    if _is_infinite(a) or _is_infinite(b):
        return a if _is_infinite(a) else b
    return round_f32(rational(a) + rational(b), a == b == 0x80000000)


def rational_subtract(a: int, b: int) -> int:
    return rational_add(a, b ^ 0x80000000)


def rational_dot(w, x) -> int:
    """The bits of ``dot(w, x)``; ``w`` u8 [G, 144], ``x`` u8 [G, 292]."""
    total = None
    for a, b in zip(w.tolist(), x.tolist(), strict=True):
        v = _rational_record(a, b)
        total = v if total is None else rational_add(total, v)
    return 0 if total is None else total


def _rational_record(a: list[int], b: list[int]) -> int:
    def field(r: int, i: int) -> int:
        if i < 4:
            return a[4 + 4 * r + i] & 63
        return ((a[8 + i] >> (4 * r)) & 15) | ((a[4 * r + i] >> 6) << 4)

    def signed(value: int, bits: int) -> int:
        return value - (1 << bits) if value >> (bits - 1) else value

    def weight(i: int) -> int:
        return (a[16 + 32 * (i // 64) + i % 32] >> (4 if i % 64 >= 32 else 0)) & 15

    bsum = [signed(b[260 + 2 * j] | b[261 + 2 * j] << 8, 16) for j in range(16)]
    S = sum(field(0, i // 32) * weight(i) * signed(b[4 + i], 8) for i in range(256))
    T = sum(field(1, s) * (bsum[2 * s] + bsum[2 * s + 1]) for s in range(8))
    p = rational_multiply(_half_to_f32_bits(a[0] | a[1] << 8), round_f32(Fraction(S)))
    n = rational_multiply(_half_to_f32_bits(a[2] | a[3] << 8), round_f32(Fraction(T)))
    ds = b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24
    return rational_multiply(ds, rational_subtract(p, n))


def rational_quantize(x) -> np.ndarray:
    """One block, ``x`` f32 [256] to u8 [292]."""
    values = [int(bits) for bits in x.view(np.uint32)]
    if any(_is_nan(bits) or _is_infinite(bits) for bits in values):
        return POISON
    if all(_is_zero(bits) for bits in values):
        return np.zeros(292, np.uint8)
    high, low = max(values, key=rational), min(values, key=rational)
    extreme = high if rational(high) > -rational(low) else low
    inverse = rational_divide(round_f32(Fraction(-127)), extreme)
    if _is_infinite(inverse):
        return POISON
    ds = rational_divide(round_f32(Fraction(1)), inverse)
    q = [round(rational(rational_multiply(bits, inverse))) for bits in values]
    q = [min(max(i, -128), 127) for i in q]
    return encode_q8k(np.array(ds, np.uint32).view(np.float32), np.array(q))


def _is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INFINITY_BITS


def _is_infinite(bits: int) -> bool:
    return bits & 0x7FFFFFFF == INFINITY_BITS


def _is_zero(bits: int) -> bool:
    return bits & 0x7FFFFFFF == 0


def _half_to_f32_bits(bits: int) -> int:
    sign, exponent, fraction = (bits >> 15) << 31, (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        return NAN_BITS if fraction else sign | INFINITY_BITS
    value = (fraction + (1024 if exponent else 0)) * Fraction(2) ** (max(exponent, 1) - 25)
    return sign | round_f32(value)


# Data


def random_q4k(rng: np.random.Generator, shape, finite: float = 0.5) -> np.ndarray:
    """u8 [*shape, 144] of random bits; 65536 records hold every bit pattern of d, and of dmin.

    A share ``finite`` of the rows of records has no infinity or NaN in d and dmin: one such record
    makes a whole dot NaN, which then shows nothing.
    """
    records = rng.integers(0, 256, (*shape, 144), np.uint8)
    count = records.size // 144
    for start in (0, 2):
        patterns = np.resize(rng.permutation(65536), count).reshape(shape)
        records[..., start] = patterns & 255
        records[..., start + 1] = patterns >> 8
    tamed = rng.random((*shape[:-1], 1) if shape else ()) < finite
    for high in (1, 3):
        special = (records[..., high] & 0x7C) == 0x7C
        records[..., high] ^= np.where(tamed & special, np.uint8(0x40), np.uint8(0))
    return records


def random_q8k(rng: np.random.Generator, shape) -> np.ndarray:
    """u8 [*shape, 292] with consistent bsum, q from -128 on, and every kind of ds."""
    q = rng.integers(-128, 128, (*shape, 256))
    q = np.where(rng.random((*shape, 1)) < 0.1, np.where(rng.random(q.shape) < 0.9, -128, q), q)
    return encode_q8k(_random_ds(rng, shape), q)


def random_illegal_q8k(rng: np.random.Generator, shape) -> np.ndarray:
    """Like ``random_q8k`` with random bsum bytes, some of them at the ends of int16."""
    records = random_q8k(rng, shape)
    bsum = rng.integers(-32768, 32768, (*shape, 16))
    end = np.where(rng.random((*shape, 1)) < 0.5, -32768, 32767)
    bsum = np.where(rng.random((*shape, 1)) < 0.2, end, bsum)
    records[..., 260:292:2] = bsum & 255
    records[..., 261:292:2] = (bsum >> 8) & 255
    return records


def _random_ds(rng: np.random.Generator, shape) -> np.ndarray:
    fraction = rng.integers(0, 1 << 23, shape)
    subnormal = fraction >> rng.integers(0, 23, shape)
    kinds = (
        (rng.integers(115, 135, shape) << 23) | fraction,  # ordinary magnitudes
        (rng.integers(1, 255, shape) << 23) | fraction,
        (rng.integers(1, 30, shape) << 23) | fraction,
        subnormal,  # and so is many a product
        subnormal,
        INFINITY_BITS | fraction,  # NaN
        np.full(shape, INFINITY_BITS),
        np.zeros(shape, np.int64),
    )
    # Half of the vectors hold ordinary scales alone: there the order of the fold decides bits.
    ordinary = rng.random((*shape[:-1], 1)) < 0.5
    kind = np.where(ordinary, 0, rng.integers(0, len(kinds), shape))
    bits = np.choose(kind, kinds) | (rng.integers(0, 2, shape) << 31)
    return bits.astype(np.uint32).view(np.float32)


def blocks(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """f32 [n, 256] of one of ``KINDS``, or of ``POISON_KINDS`` where every block is out of domain."""
    with np.errstate(all="ignore"):
        values = _BLOCKS[kind](rng, n)
    assert values.shape == (n, 256)
    assert values.dtype == np.float32
    return values


def _gaussian(rng, n):
    return np.ldexp(rng.standard_normal((n, 256), np.float32), rng.integers(-20, 20, (n, 1)))


def _heavy_tailed(rng, n):
    return rng.standard_cauchy((n, 256)).astype(np.float32)


def _integers(rng, n):
    values = rng.integers(-128, 129, (n, 256)).astype(np.float32)
    style = rng.integers(0, 3, (n, 1))  # mixed signs, no negative value, no positive value
    return np.select([style == 1, style == 2], [np.abs(values), -np.abs(values)], values)


def _ties(rng, n):
    values = _gaussian(rng, n)
    largest = np.abs(values).max(-1)
    rows, places = np.arange(n), rng.permuted(np.tile(np.arange(256), (n, 1)), axis=1)
    values[rows, places[:, 0]] = largest
    values[rows, places[:, 1]] = -largest
    return values


def _halves(rng, n):
    """Multiples of a half of ds: exact in even blocks, within one ulp in odd ones."""
    halves = rng.integers(-126, 126, (n, 256)) + 0.5
    exact = np.ldexp(halves, rng.integers(-60, 60, (n, 1))).astype(np.float32)
    exact[:, 0] = -127 * np.abs(exact[:, 1] / halves[:, 1])
    extreme = np.abs(_gaussian(rng, n)[:, :1]) + np.float32(1e-6)
    near = (halves * (extreme / 127.0)).astype(np.float32)
    near = (near.view(np.int32) + rng.integers(-1, 2, near.shape, np.int32)).view(np.float32)
    near[:, :1] = np.where(rng.random((n, 1)) < 0.5, extreme, -extreme)
    return np.where(np.arange(n)[:, None] % 2 == 0, exact, near)


def _subnormal_ds(rng, n):
    """Extremes from the smallest legal one to 1.49e-36, the ends included."""
    last = int(np.float32(1.49e-36).view(np.uint32))
    extreme = rng.integers(SMALLEST_EXTREME_BITS, last + 1, (n, 1))
    extreme[:1] = SMALLEST_EXTREME_BITS
    extreme = extreme.astype(np.uint32).view(np.float32)
    values = extreme * rng.uniform(-1, 1, (n, 256)).astype(np.float32)
    values[:, :1] = np.where(rng.random((n, 1)) < 0.5, extreme, -extreme)
    return values


def _subnormal_values(rng, n):
    values = rng.integers(0, 1 << 23, (n, 256)) | (rng.integers(0, 2, (n, 256)) << 31)
    values = values.astype(np.uint32).view(np.float32).copy()
    exponent = rng.choice([-121, -120, -118, -100, 0], n)
    values[np.arange(n), rng.integers(0, 256, n)] = np.ldexp(rng.uniform(1, 2, n), exponent)
    return values


def _near_max(rng, n):
    bits = 0x7F7FFFFF - rng.integers(0, 1 << 24, (n, 256)) * (rng.random((n, 256)) < 0.9)
    return (bits | (rng.integers(0, 2, (n, 256)) << 31)).astype(np.uint32).view(np.float32)


def _bf16_rounded(rng, n):
    bits = _gaussian(rng, n).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _one_hot(rng, n):
    values = np.where(rng.random((n, 256)) < 0.5, np.float32(0), np.float32(-0.0))
    values[np.arange(n), rng.integers(0, 256, n)] = np.ldexp(
        rng.choice([-1, 1], n) * rng.uniform(1, 2, n), rng.integers(-120, 128, n)
    )
    return values


def _zeros(rng, n):
    return np.where(rng.random((n, 256)) < 0.5, np.float32(0), np.float32(-0.0))


def _random_bits(rng, n):
    """Any finite bits, with exponents up to a bound that differs per block."""
    bound = rng.integers(8, 255, (n, 1))
    exponent = rng.integers(0, bound + 1, (n, 256))
    exponent[:, :1] = bound
    bits = (rng.integers(0, 512, (n, 256)) >> 8 << 31) | (exponent << 23) | rng.integers(0, 1 << 23, (n, 256))
    return bits.astype(np.uint32).view(np.float32)


def _nan(rng, n):
    values = _gaussian(rng, n)
    payload = rng.integers(1, 1 << 23, n) | 0x7F800000 | (rng.integers(0, 2, n) << 31)
    values.view(np.uint32)[np.arange(n), rng.integers(0, 256, n)] = payload
    return values


def _infinite(rng, n):
    values = _gaussian(rng, n)
    values[np.arange(n), rng.integers(0, 256, n)] = rng.choice([-np.inf, np.inf], n)
    return values


def _too_small(rng, n):
    """Nonzero blocks whose largest magnitude is below the smallest legal extreme, often by one ulp."""
    extreme = rng.integers(1, SMALLEST_EXTREME_BITS, n)
    extreme[::2] = SMALLEST_EXTREME_BITS - 1
    values = rng.integers(0, extreme[:, None] + 1, (n, 256))
    values[np.arange(n), rng.integers(0, 256, n)] = extreme
    return (values | (rng.integers(0, 2, (n, 256)) << 31)).astype(np.uint32).view(np.float32)


_BLOCKS = {
    "gaussian": _gaussian,
    "heavy_tailed": _heavy_tailed,
    "integers": _integers,
    "ties": _ties,
    "halves": _halves,
    "subnormal_ds": _subnormal_ds,
    "subnormal_values": _subnormal_values,
    "near_max": _near_max,
    "bf16_rounded": _bf16_rounded,
    "one_hot": _one_hot,
    "zeros": _zeros,
    "random_bits": _random_bits,
    "nan": _nan,
    "infinite": _infinite,
    "too_small": _too_small,
}
