"""Both operations in pure jnp, with the bits of the native kernels on every platform.

Sums over a record are integer contractions; the few float steps per record are integer arithmetic on
float32 bits (`jaxquant.ops.float32`), so that no compiler pass can change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant.ops import float32

__all__ = ["quantize", "quantized_dot", "record_statistics", "record_value"]

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_MINUS_127 = np.uint32(0xC2FE0000)
_ONE = np.uint32(0x3F800000)


def _u32(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.uint32)


def _i32(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.int32)


def _uint32_at(records: jax.Array, offset: int) -> jax.Array:
    return lax.bitcast_convert_type(records[..., offset : offset + 4], jnp.uint32)


def _uint16_at(records: jax.Array, offset: int) -> jax.Array:
    return lax.bitcast_convert_type(records[..., offset : offset + 2], jnp.uint16)


def _bytes_of(x: jax.Array) -> jax.Array:
    """The little-endian bytes of each element, flattened into the last axis."""
    data = lax.bitcast_convert_type(x, jnp.uint8)
    return data.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


class Q4K(NamedTuple):
    """Decoded q4_k records: float32 bits of d and dmin, and int32 sc, m, q."""

    d: jax.Array
    dmin: jax.Array
    sc: jax.Array
    m: jax.Array
    q: jax.Array


class Q8K(NamedTuple):
    """Decoded q8_k records: float32 bits of ds, and int32 q, bsum."""

    ds: jax.Array
    q: jax.Array
    bsum: jax.Array


def decode_q4_k(records: jax.Array) -> Q4K:
    """uint8 [..., 144] to fields."""
    scale_bytes = _i32(records[..., 4:16])
    low, high, top = scale_bytes[..., 0:4], scale_bytes[..., 4:8], scale_bytes[..., 8:12]
    sc = jnp.concatenate([low & 63, (top & 15) | (low >> 6 << 4)], axis=-1)
    m = jnp.concatenate([high & 63, (top >> 4) | (high >> 6 << 4)], axis=-1)
    packed = _i32(records[..., 16:144]).reshape(*records.shape[:-1], 4, 1, 32)
    q = jnp.concatenate([packed & 15, packed >> 4], axis=-2).reshape(*records.shape[:-1], 256)
    return Q4K(
        float32.from_float16(_uint16_at(records, 0)),
        float32.from_float16(_uint16_at(records, 2)),
        sc,
        m,
        q,
    )


def decode_q8_k(records: jax.Array) -> Q8K:
    """uint8 [..., 292] to fields."""
    q = lax.bitcast_convert_type(records[..., 4:260], jnp.int8)
    pairs = records[..., 260:292].reshape(*records.shape[:-1], 16, 2)
    return Q8K(_uint32_at(records, 0), _i32(q), _i32(lax.bitcast_convert_type(pairs, jnp.int16)))


def quantize(values: jax.Array) -> jax.Array:
    """float32 [..., 256] to uint8 [..., 292]."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    # With the sign rotated to the lowest bit, the unsigned maximum is the largest magnitude and
    # prefers the negative one of a tie.
    rotated = (bits << np.uint32(1)) | (bits >> np.uint32(31))
    largest = jnp.max(rotated, axis=-1, keepdims=True)
    extreme = (largest >> np.uint32(1)) | (largest << np.uint32(31))
    inverse = float32.divide(jnp.full_like(extreme, _MINUS_127), extreme)
    scale = float32.divide(jnp.full_like(extreme, _ONE), inverse)
    q = float32.round_to_int8(float32.multiply(bits, inverse))

    zero = (extreme & ~_SIGN) == np.uint32(0)
    poison = ~zero & (((extreme & ~_SIGN) >= _INFINITY) | ((inverse & ~_SIGN) >= _INFINITY))
    q = jnp.where(zero | poison, np.int32(0), q)
    scale = jnp.where(poison, float32.NAN, jnp.where(zero, np.uint32(0), scale))
    sums = jnp.sum(q.reshape(*q.shape[:-1], 16, 16), axis=-1, dtype=jnp.int32)
    return jnp.concatenate(
        [
            _bytes_of(scale),
            lax.bitcast_convert_type(lax.convert_element_type(q, jnp.int8), jnp.uint8),
            _bytes_of(lax.convert_element_type(sums, jnp.int16)),
        ],
        axis=-1,
    )


def record_statistics(w: Q4K, x: Q8K, equation: Sequence[Sequence[int]]) -> tuple[jax.Array, jax.Array]:
    """S and T of every pair of records, int32.

    ``equation`` labels the axes of w's records, x's records and the result as `jnp.einsum` does.
    """
    lhs, rhs, out = (list(labels) for labels in equation)
    contracted = max([*lhs, *rhs, -1]) + 1
    weights = jnp.repeat(w.sc, 32, axis=-1) * w.q
    pairs = x.bsum.reshape(*x.bsum.shape[:-1], 8, 2).sum(axis=-1, dtype=jnp.int32)

    def contract(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            a, [*lhs, contracted], b, [*rhs, contracted], out, preferred_element_type=jnp.int32
        )

    return contract(weights, x.q), contract(w.m, pairs)


class RecordValue(NamedTuple):
    """Float32 bits of the contract's p, n and v of every pair of records."""

    p: jax.Array
    n: jax.Array
    v: jax.Array


def record_value(
    d: jax.Array, dmin: jax.Array, ds: jax.Array, s: jax.Array, t: jax.Array
) -> RecordValue:
    """The float steps of one record; d, dmin and ds are float32 bits that broadcast with s and t."""
    p = float32.multiply(d, float32.from_int32(s))
    n = float32.multiply(dmin, float32.from_int32(t))
    return RecordValue(p, n, float32.multiply(ds, float32.subtract(p, n)))


def _aligned(x: jax.Array, dims: Sequence[int], rank: int) -> jax.Array:
    """Transpose x, whose axis i is result axis dims[i], to ``rank`` axes, missing ones of extent 1."""
    order = sorted(range(len(dims)), key=dims.__getitem__)
    missing = [axis for axis in range(rank) if axis not in dims]
    return jnp.expand_dims(jnp.transpose(x, order), missing)


def quantized_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_dims: Sequence[int],
    rhs_dims: Sequence[int],
) -> jax.Array:
    """The dot over the record axis; see `jaxquant.ops.quantized_dot` for ``lhs_dims`` and ``rhs_dims``."""
    lhs_axis, rhs_axis = lhs_dims.index(-1), rhs_dims.index(-1)
    lhs_out = [d for d in lhs_dims if d >= 0]
    rhs_out = [d for d in rhs_dims if d >= 0]
    rank = len({*lhs_out, *rhs_out})
    extents = dict(zip(lhs_dims, lhs.shape[:-1], strict=True))
    extents |= dict(zip(rhs_dims, rhs.shape[:-1], strict=True))
    shape = tuple(extents[axis] for axis in range(rank))
    records = lhs.shape[lhs_axis]
    if records == 0:
        return jnp.zeros(shape, jnp.float32)

    def step(g: jax.Array, total: jax.Array) -> jax.Array:
        w = decode_q4_k(lax.dynamic_index_in_dim(lhs, g, lhs_axis, keepdims=False))
        x = decode_q8_k(lax.dynamic_index_in_dim(rhs, g, rhs_axis, keepdims=False))
        s, t = record_statistics(w, x, (lhs_out, rhs_out, range(rank)))
        value = record_value(
            _aligned(w.d, lhs_out, rank), _aligned(w.dmin, lhs_out, rank), _aligned(x.ds, rhs_out, rank), s, t
        )
        return float32.add(total, value.v)

    # -0 is the identity of float addition: the fold has no initial term.
    total = lax.fori_loop(0, records, step, jnp.full(shape, _SIGN))
    # A symbolic record count may turn out to be zero.
    total = jnp.where(jnp.asarray(records, jnp.int32) == 0, np.uint32(0), total)
    return lax.bitcast_convert_type(total, jnp.float32)
