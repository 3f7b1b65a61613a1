"""Explicit INT4 and INT2 decoding followed by an ordinary ``jnp.dot``: nothing ties you to the record operations.

Bytes become integers with shifts and masks on uint8, and what comes after is plain JAX. Mind that this is
another computation than ``jaxquant.quantized_dot``: activations stay float32, and the roundings differ.

Low bits come first, as everywhere in GGUF. Do not bitcast uint8 to ``jnp.int4`` instead: XLA folds a
bitcast of a constant to sub-byte elements into wrong numbers.

``python -m jaxquant.examples.int4_dot`` runs it.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

import jaxquant as jq
from jaxquant import records

__all__ = ["decode_int2", "decode_int4", "decode_q4_k", "main", "q4_k_dot"]


def decode_int4(packed: jax.Array) -> jax.Array:
    """uint8 [..., n], two signed 4-bit integers each, to int8 [..., 2 * n] in -8 to 7.

    Example:
        >>> import jax.numpy as jnp
        >>> decode_int4(jnp.array([0x21, 0xF8], jnp.uint8))
        Array([ 1,  2, -8, -1], dtype=int8)
    """
    return _decode(packed, 4)


def decode_int2(packed: jax.Array) -> jax.Array:
    """uint8 [..., n], four signed 2-bit integers each, to int8 [..., 4 * n] in -2 to 1.

    Example:
        >>> import jax.numpy as jnp
        >>> decode_int2(jnp.array([0b11_10_01_00], jnp.uint8))
        Array([ 0,  1, -2, -1], dtype=int8)
    """
    return _decode(packed, 2)


def _decode(packed: jax.Array, bits: int) -> jax.Array:
    # Each field in turn goes to the top of the byte; an arithmetic shift brings it back with its sign.
    fields = [packed << np.uint8(8 - bits - start) for start in range(0, 8, bits)]
    tops = jax.lax.bitcast_convert_type(jnp.stack(fields, axis=-1), jnp.int8)
    return (tops >> np.int8(8 - bits)).reshape(*packed.shape[:-1], packed.shape[-1] * len(fields))


def decode_q4_k(weights: jax.Array) -> jax.Array:
    """uint8 [..., G, 144], q4_k records, to float32 [..., 256 * G]: ``d * sc * q - dmin * m``.

    Example:
        >>> import jax.numpy as jnp
        >>> decode_q4_k(jnp.zeros((8, 2, 144), jnp.uint8)).shape
        (8, 512)
    """
    fields = cast("records.Q4K", records.unpack(weights, jq.quant.q4_k))
    d, dmin, sc, m, q = (jnp.asarray(field).astype(jnp.float32) for field in fields)
    q = q.reshape(*sc.shape, 32)
    values = (d[..., None] * sc)[..., None] * q - (dmin[..., None] * m)[..., None]
    return values.reshape(*weights.shape[:-2], -1)


@jax.jit
def q4_k_dot(weights: jax.Array, x: jax.Array) -> jax.Array:
    """uint8 [M, G, 144] and float32 [256 * G] to float32 [M] by ``jnp.dot`` on decoded weights."""
    return jnp.dot(decode_q4_k(weights), x)


def main() -> None:
    """Print a few dots of random weights, decoded Q4_K beside the record operations."""
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, (8, 4, 144), np.uint8)
    weights[..., :4] = rng.uniform(0, 0.01, (8, 4, 2)).astype("<f2").view(np.uint8)
    w, x = jnp.asarray(weights), jnp.asarray(rng.standard_normal(1024, np.float32))
    with_records = jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(records.split(x)))
    print("Q4_K decoded, jnp.dot:   ", q4_k_dot(w, x)[:4])
    print("Q4_K x Q8_K records:     ", with_records[:4])

    activations = rng.integers(-128, 128, 256, np.int8)
    for name, decode, bits in (("INT4", decode_int4, 4), ("INT2", decode_int2, 2)):
        packed = jnp.asarray(rng.integers(0, 256, (8, 256 * bits // 8), np.uint8))
        result = jnp.dot(decode(packed), activations, preferred_element_type=jnp.int32)
        print(f"{name} decoded, integer dot:", result[:4])


if __name__ == "__main__":
    main()
