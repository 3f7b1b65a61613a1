"""Composites of the two record operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant.ops.operands import check_kind_and_dtype
from jaxquant.ops.quantize import quantize
from jaxquant.ops.quantized_dot import quantized_dot
from jaxquant.quant import q4_k
from jaxquant.records import dequantize, split

__all__ = ["quantized_linear", "quantized_matmul"]


def quantized_matmul(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply activations by the rows of a q4_k matrix: ``x @ dequantize(weights).T``, with x quantized to q8_k.

    Every element has the bits of ``quantized_dot(weights[m], quantize(split(x[...])))``.

    Args:
        x: float32 [..., K], K a multiple of 256.
        weights: uint8 [M, G, 144], M rows of G = K / 256 records.

    Returns:
        float32 [..., M].

    Raises:
        TypeError: if an operand is no array or has another dtype.
        ValueError: if K is no multiple of 256, weights has another shape, or K and G disagree.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> weights = jnp.zeros((8, 2, 144), jnp.uint8)
        >>> jq.quantized_matmul(jnp.ones((3, 5, 512), jnp.float32), weights).shape
        (3, 5, 8)

    Source: record contract, sections 1, 3 and 4.
    """
    check_kind_and_dtype("quantized_matmul", "x", x, "float32")
    check_kind_and_dtype("quantized_matmul", "weights", weights, "uint8")
    if weights.ndim != 3 or weights.shape[2] != q4_k.record_bytes:
        raise ValueError(
            f"quantized_matmul: weights has shape {weights.shape}, wanted (M, G, {q4_k.record_bytes})"
        )
    if x.ndim == 0 or x.shape[-1] % q4_k.block_size != 0:
        raise ValueError(
            f"quantized_matmul: x has shape {x.shape}, wanted (..., K) with K a multiple of {q4_k.block_size}; "
            "nothing is padded"
        )
    blocks = split(x)
    if blocks.shape[-2] != weights.shape[1]:
        raise ValueError(
            f"quantized_matmul: x has K = {x.shape[-1]}, that is {blocks.shape[-2]} records, "
            f"but weights {weights.shape} has G = {weights.shape[1]}"
        )

    def one(blocks: jax.Array) -> jax.Array:
        return jax.vmap(quantized_dot, (0, None))(weights, quantize(blocks))

    for _ in range(x.ndim - 1):
        one = jax.vmap(one)
    return one(blocks)


@jax.custom_vjp
def quantized_linear(x: jax.Array, weights: jax.Array) -> jax.Array:
    """`quantized_matmul` with a gradient for x, so that what comes before a frozen layer can be trained.

    The result has the bits of `quantized_matmul`. The cotangent of x is that of
    ``x @ dequantize(weights).T``, as if x were not quantized (a straight-through estimator); it is computed
    one record at a time, so that the dequantized weights never exist as a whole. Weights have no gradient.
    Reverse mode only: `jax.grad`, `jax.vjp`, under `jax.vmap`, `jax.checkpoint`, `jax.lax.scan`.

    Args:
        x: float32 [..., K], K a multiple of 256.
        weights: uint8 [M, G, 144], M rows of G = K / 256 records.

    Returns:
        float32 [..., M].

    Raises:
        TypeError: if an operand is no array or has another dtype.
        ValueError: if K is no multiple of 256, weights has another shape, or K and G disagree.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxquant.nn import quantized_linear
        >>> weights = jnp.zeros((8, 2, 144), jnp.uint8)
        >>> jax.grad(lambda x: quantized_linear(x, weights).sum())(jnp.ones((3, 512), jnp.float32)).shape
        (3, 512)

    Source: record contract, sections 1 to 4; Bengio, Leonard and Courville 2013, arXiv:1308.3432 (the estimator).
    """
    return quantized_matmul(x, weights)


def _linear_forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantized_matmul(x, weights), weights


def _linear_backward(weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    def of_record(g: jax.Array) -> Any:
        return cotangent @ dequantize(lax.dynamic_index_in_dim(weights, g, 1, keepdims=False), q4_k)

    blocks: jax.Array = lax.map(of_record, jnp.arange(weights.shape[1], dtype=np.int32))
    blocks = jnp.moveaxis(blocks, 0, -2)
    gradient: jax.Array = blocks.reshape(*cotangent.shape[:-1], weights.shape[1] * q4_k.block_size)
    return gradient, None


quantized_linear.defvjp(_linear_forward, _linear_backward)
