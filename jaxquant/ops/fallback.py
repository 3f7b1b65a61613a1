"""Both operations in pure jnp, with the bits of the native kernels on every platform.

Sums over a record are integer contractions; the few float steps per record are integer arithmetic on
float32 bits (`jaxquant.ops.float32`), so that no compiler pass can change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant import records
from jaxquant.ops import float32
from jaxquant.quant import q4_k, q8_k

__all__ = ["quantize", "quantized_dot"]

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_MINUS_127 = np.uint32(0xC2FE0000)
_ONE = np.uint32(0x3F800000)


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
    ds = lax.bitcast_convert_type(scale[..., 0], jnp.float32)
    return cast("jax.Array", records.pack(records.Q8K(ds, q.astype(jnp.int8), sums.astype(jnp.int16)), q8_k))


def _statistics(
    w: records.Q4K, x: records.Q8K, lhs: list[int], rhs: list[int], rank: int
) -> tuple[jax.Array, jax.Array]:
    """S and T of every pair of records, int32; lhs and rhs name the result axes of w's and x's records."""

    def contract(a: jax.Array, b: jax.Array) -> jax.Array:
        out = list(range(rank))
        return jnp.einsum(a, [*lhs, rank], b, [*rhs, rank], out, preferred_element_type=jnp.int32)

    sc, m, wq, xq, bsum = (
        cast("jax.Array", field).astype(jnp.int32) for field in (w.sc, w.m, w.q, x.q, x.bsum)
    )
    pairs = bsum.reshape(*bsum.shape[:-1], 8, 2).sum(axis=-1, dtype=jnp.int32)
    return contract(jnp.repeat(sc, 32, axis=-1) * wq, xq), contract(m, pairs)


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
    lhs_out = [d for d in lhs_dims if d >= 0]
    rhs_out = [d for d in rhs_dims if d >= 0]
    rank = len({*lhs_out, *rhs_out})
    extents = dict(zip(lhs_dims, lhs.shape[:-1], strict=True))
    extents |= dict(zip(rhs_dims, rhs.shape[:-1], strict=True))
    shape = tuple(extents[axis] for axis in range(rank))
    count = lhs.shape[lhs_dims.index(-1)]
    if count == 0:
        return jnp.zeros(shape, jnp.float32)

    def step(g: jax.Array, total: jax.Array) -> jax.Array:
        w_bytes = lax.dynamic_index_in_dim(lhs, g, lhs_dims.index(-1), keepdims=False)
        x_bytes = lax.dynamic_index_in_dim(rhs, g, rhs_dims.index(-1), keepdims=False)
        w = cast("records.Q4K", records.unpack(w_bytes, q4_k))
        x = cast("records.Q8K", records.unpack(x_bytes, q8_k))
        s, t = _statistics(w, x, lhs_out, rhs_out, rank)
        scales = [(w.d, lhs_out), (w.dmin, lhs_out), (x.ds, rhs_out)]
        d, dmin, ds = (_aligned(records.float32_bits(field), dims, rank) for field, dims in scales)
        _, _, v = records.float_steps(d, dmin, ds, s, t)
        return float32.add(total, v)

    # -0 is the identity of float addition: the fold has no initial term.
    total = lax.fori_loop(0, count, step, jnp.full(shape, _SIGN))
    return lax.bitcast_convert_type(total, jnp.float32)
