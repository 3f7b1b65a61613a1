"""Encode float weights as Q4_K records, offline: a search for the smallest squared error.

A record writes each sub-block of 32 weights as ``a * q - b`` with ``a = d * sc`` and ``b = dmin * m``. The
encoder fits a and b to each sub-block on its own, rounds them to the grid that one d and one dmin per
record allow, and then improves in turns: the integers under fixed d and dmin, and d and dmin under fixed
integers. Only what lowers the error is kept.

Source: the format is that of section 2 of the record contract (``docs/numerics.md``); the search is this
library's own, alternating least squares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["encode_blocks"]

F32 = NDArray[np.float32]

CHUNK = 512  # records at a time: a few megabytes of temporaries, which a CPU's cache holds
STARTS = np.linspace(-1.4, 1.0, 13, dtype=np.float32)  # tried step widths: the range over 15 + these
ROUNDS = 3
NEIGHBOURS = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
F16_MAX, F16_MIN = np.float32(65504), np.float32(2.0**-24)


class _Record(NamedTuple):
    """The numbers of n records; ``dmin`` carries its sign."""

    d: F32  # [n], a float16 value each
    dmin: F32  # [n], likewise
    sc: F32  # [n, 8], integers
    m: F32  # [n, 8], integers

    @property
    def step(self) -> F32:
        return self.d[:, None] * self.sc

    @property
    def least(self) -> F32:
        return -self.dmin[:, None] * self.m


def encode_blocks(x: F32, importance: F32 | None) -> tuple[F32, F32, F32, F32, F32]:
    """Finite float32 [n, 256] to d, dmin [n], sc, m [n, 8], q [n, 256].

    All are float32 arrays whose values fit into their fields. ``importance`` is [period, 256], for blocks
    that repeat it; not negative and finite.

    Raises:
        OverflowError: the argument is the index of the first block whose d or dmin no float16 holds.
    """
    found: list[tuple[F32, ...]] = []
    for start in range(0, len(x), CHUNK):
        blocks = x[start : start + CHUNK].reshape(-1, 8, 32)
        if importance is None:
            weights = np.ones_like(blocks)
        else:
            rows = np.arange(start, start + len(blocks)) % len(importance)
            weights = importance[rows].reshape(-1, 8, 32)
        try:
            with np.errstate(all="ignore"):  # candidates that are not finite lose
                found.append(_encode(blocks, weights))
        except OverflowError as error:
            raise OverflowError(start + error.args[0]) from None
    if not found:
        found.append(_encode(np.zeros((0, 8, 32), np.float32), np.zeros((0, 8, 32), np.float32)))
    d, dmin, sc, m, q = (np.concatenate(field) for field in zip(*found, strict=True))
    return d, dmin, sc, m, q.reshape(-1, 256)


def _encode(x: F32, p: F32) -> tuple[F32, ...]:
    mean = p.mean(axis=(1, 2), keepdims=True, dtype=np.float64)
    p = np.where(mean > 0, p / np.where(mean > 0, mean, 1), 1).astype(np.float32)
    # A sub-block that does not matter at all is still to be encoded, and must not divide by zero.
    p = np.where(p.sum(axis=-1, keepdims=True) > 0, p, np.float32(1))

    # b is not negative, so a record of weights that all lie above zero needs a negative dmin.
    sign = np.where(x.min(axis=(1, 2)) > 0, np.float32(-1), np.float32(1))
    step, least = _fit(x, p, sign[:, None])
    record, errors = _round(x, p, step, least * -sign[:, None], sign)
    for _ in range(ROUNDS):
        record, errors = _improve_integers(x, p, record, errors)
        record, errors = _improve_scales(x, p, record, errors)
    record, errors = _improve_integers(x, p, record, errors)
    record, q = _constants(x, record, _levels(x, record.step, record.least))
    # One zero for every value that is not there
    sc = np.where(record.d[:, None] == 0, np.float32(0), record.sc)
    m = np.where(record.dmin[:, None] == 0, np.float32(0), record.m)
    return record.d + np.float32(0), record.dmin + np.float32(0), sc, m, q


def _levels(x: F32, step: F32, least: F32) -> F32:
    """The q nearest to each x, float32 [n, 8, 32], where values are ``step * q + least``."""
    inverse = np.where(step != 0, 1 / step, np.float32(0))
    inverse = np.where(np.isfinite(inverse), inverse, np.float32(0))  # of a step too small to matter
    q = x - least[..., None]
    q *= inverse[..., None]
    np.rint(q, out=q)
    return np.clip(q, 0, 15, out=q)


def _errors(x: F32, p: F32, step: F32, least: F32) -> F32:
    """The weighted squared error of each sub-block, [n, 8]."""
    error = _levels(x, step, least)
    error *= step[..., None]
    error += least[..., None]
    error -= x
    errors: F32 = np.einsum("...i,...i,...i->...", error, error, p)
    return errors


def _fit(x: F32, p: F32, sign: F32) -> tuple[F32, F32]:
    """The real step and least value of each sub-block, [n, 8] each, with the smallest error found."""
    low, high = x.min(axis=-1), x.max(axis=-1)
    low = np.where(sign > 0, np.minimum(low, 0), low)
    step, least = (high - low) / 15, low
    best = _errors(x, p, step, least)
    first, width = least, high - low
    weight, moment = p.sum(axis=-1), np.einsum("...i,...i->...", p, x)

    def consider(q: F32) -> None:
        nonlocal step, least, best
        pq = p * q
        sq, sqq, sqx = pq.sum(axis=-1), np.einsum("...i,...i->...", pq, q), np.einsum("...i,...i->...", pq, x)
        determinant = weight * sqq - sq * sq
        a, c = (weight * sqx - sq * moment) / determinant, (sqq * moment - sq * sqx) / determinant
        outside = c * sign > 0
        a, c = np.where(outside, sqx / sqq, a), np.where(outside, np.float32(0), c)
        usable = np.isfinite(a) & np.isfinite(c) & (a > 0)
        a, c = np.where(usable, a, step), np.where(usable, c, least)
        errors = _errors(x, p, a, c)
        better = errors < best
        step, least, best = (
            np.where(better, new, old) for new, old in ((a, step), (c, least), (errors, best))
        )

    for start in STARTS:
        consider(_levels(x, width / (15 + start), first))
    for _ in range(2):
        consider(_levels(x, step, least))
    return step, least


def _half(values: F32) -> F32:
    """Rounded to float16; but a step that matters does not vanish."""
    rounded = values.astype(np.float16).astype(np.float32)
    return np.where((rounded == 0) & (np.abs(values) > 0), np.copysign(F16_MIN, values), rounded)


def _round(x: F32, p: F32, step: F32, offset: F32, sign: F32) -> tuple[_Record, F32]:
    """The nearest record to real steps and offsets, [n, 8] each, not negative; and its errors."""
    d, dmin = _half(step.max(axis=-1) / 63), _half(offset.max(axis=-1) / 63)
    bad = np.flatnonzero(~((d <= F16_MAX) & (dmin <= F16_MAX)))
    if len(bad):
        raise OverflowError(int(bad[0]))

    def integers(values: F32, scale: F32) -> F32:
        rounded = np.clip(np.rint(values / scale[:, None]), 0, 63)
        return np.where(scale[:, None] > 0, rounded, np.float32(0))

    record = _Record(d, dmin * sign, integers(step, d), integers(offset, dmin))
    return record, _errors(x, p, record.step, record.least)


def _improve_integers(x: F32, p: F32, record: _Record, errors: F32) -> tuple[_Record, F32]:
    """The best of all neighbours of each sub-block's sc and m."""
    best_sc, best_m, best = record.sc, record.m, errors
    for i, j in NEIGHBOURS:
        if i == j == 0:
            continue
        sc, m = np.clip(record.sc + np.float32(i), 0, 63), np.clip(record.m + np.float32(j), 0, 63)
        found = _errors(x, p, record.d[:, None] * sc, -record.dmin[:, None] * m)
        better = found < best
        best_sc, best_m = np.where(better, sc, best_sc), np.where(better, m, best_m)
        best = np.where(better, found, best)
    return record._replace(sc=best_sc, m=best_m), best


def _improve_scales(x: F32, p: F32, record: _Record, errors: F32) -> tuple[_Record, F32]:
    """d and dmin by least squares over the whole record, where that is better."""
    u = record.sc[..., None] * _levels(x, record.step, record.least)
    v = np.broadcast_to(record.m[..., None], u.shape)

    def total(*factors: F32) -> NDArray[np.float64]:
        product: Any = p * factors[0]
        for factor in factors[1:]:
            product = product * factor
        return np.asarray(product.sum(axis=(1, 2), dtype=np.float64))

    uu, uv, vv, ux, vx = total(u, u), total(u, v), total(v, v), total(u, x), total(v, x)
    determinant = uu * vv - uv * uv
    # Of two unknowns, or of d alone where no sub-block has an offset
    d = np.where(vv > 0, (vv * ux - uv * vx) / determinant, ux / uu)
    dmin = np.where(vv > 0, (uv * ux - uu * vx) / determinant, record.dmin)
    usable = np.isfinite(d) & np.isfinite(dmin) & (np.abs(d) <= F16_MAX) & (np.abs(dmin) <= F16_MAX)
    d = _half(np.where(usable, d, record.d).astype(np.float32))
    dmin = _half(np.where(usable, dmin, record.dmin).astype(np.float32))
    moved = record._replace(d=d, dmin=dmin)
    found = _errors(x, p, moved.step, moved.least)
    better = found.sum(axis=-1) < errors.sum(axis=-1)
    return (
        record._replace(d=np.where(better, d, record.d), dmin=np.where(better, dmin, record.dmin)),
        np.where(better[:, None], found, errors),
    )


def _constants(x: F32, record: _Record, q: F32) -> tuple[_Record, F32]:
    """Blocks of one value: the offset alone reaches it to 2**-17, and a step of one quantum adds what is missing."""
    values = x[:, 0, 0]
    constant = (x == values[:, None, None]).all(axis=(1, 2)) & (np.abs(values) <= 63 * F16_MAX)
    if not constant.any():
        return record, q
    values = np.where(constant, values, np.float32(0))
    m = np.arange(1, 64, dtype=np.float32)
    scales = (-values[:, None] / m).astype(np.float16).astype(np.float32)
    best = np.argmin(np.abs(values[:, None] + scales * m), axis=1)
    dmin = np.take_along_axis(scales, best[:, None], axis=1)[:, 0]
    missing = values + dmin * m[best]
    d = missing.astype(np.float16).astype(np.float32)
    one = (d != 0).astype(np.float32)
    rows = constant[:, None]
    return _Record(
        np.where(constant, d, record.d),
        np.where(constant, dmin, record.dmin),
        np.where(rows, one[:, None], record.sc),
        np.where(rows, m[best][:, None], record.m),
    ), np.where(rows[..., None], one[:, None, None], q)
