"""Train low-rank adapters on frozen Q4_K layers.

    python -m jaxquant.examples.lora [--model FILE.gguf --tensors NAME,NAME] [--steps 200]

The model is a stack of frozen layers, each with an adapter beside it (LoRA): ``layer(x) = W x + B A x``. The
weights stay Q4_K records, in training as in use. Gradients reach the adapters of the lower layers through the
upper ones by the dequantized weights, one record at a time. What is learnt is a teacher with the same frozen
layers and hidden adapters, so that a loss of zero is within reach. Without a model file the records are random.

Source: Hu et al. 2021, arXiv:2106.09685 (LoRA); Kingma and Ba 2015, arXiv:1412.6980 (Adam).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxquant import gguf, quant, records
from jaxquant.nn import quantized_linear

__all__ = ["Adapter", "load", "main", "model", "random_layer", "train"]


class Adapter(NamedTuple):
    """The trained part of a layer: down is float32 [K, rank], up is float32 [rank, M]."""

    down: jax.Array
    up: jax.Array


def random_layer(key: jax.Array, outputs: int, inputs: int) -> jax.Array:
    """Q4_K records uint8 [outputs, inputs / 256, 144] of values around zero, about 1 / sqrt(inputs) each."""
    shape = (outputs, inputs // 256)
    # 8 q - 60 with q from 0 to 15 has mean 0 and standard deviation 37.
    scale = jnp.full(shape, inputs**-0.5 / 37, jnp.float16)
    fields = records.Q4K(
        d=scale,
        dmin=scale,
        sc=jnp.full((*shape, 8), 8, jnp.uint8),
        m=jnp.full((*shape, 8), 60, jnp.uint8),
        q=jax.random.randint(key, (*shape, 256), 0, 16, jnp.uint8),
    )
    return jnp.asarray(records.pack(fields, quant.q4_k))


def load(path: Path, names: Sequence[str]) -> list[jax.Array]:
    """The records of Q4_K tensors of a GGUF file, each uint8 [M, G, 144]."""
    with gguf.open(path) as file:
        return [jax.device_put(file.records(name)) for name in names]


def model(adapters: Sequence[Adapter], layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """float32 [N, K] to float32 [N, M] through all layers, with tanh between them."""
    for index, (adapter, weights) in enumerate(zip(adapters, layers, strict=True)):
        x = jnp.tanh(x) if index else x
        x = quantized_linear(x, weights) + x @ adapter.down @ adapter.up
    return x


def _adapters(key: jax.Array, layers: Sequence[jax.Array], rank: int, up: float) -> list[Adapter]:
    made = []
    for layer, weights in zip(jax.random.split(key, len(layers)), layers, strict=True):
        outputs, inputs = weights.shape[0], 256 * weights.shape[1]
        down, other = jax.random.split(layer)
        made.append(
            Adapter(
                jax.random.normal(down, (inputs, rank), jnp.float32) * jnp.float32(inputs**-0.5),
                jax.random.normal(other, (rank, outputs), jnp.float32) * jnp.float32(up),
            )
        )
    return made


def train(
    layers: Sequence[jax.Array], steps: int = 200, rank: int = 4, batch: int = 64, seed: int = 0
) -> tuple[list[Adapter], jax.Array]:
    """Train adapters by Adam to do what a teacher with hidden adapters does.

    Args:
        layers: Q4_K records, each uint8 [M, G, 144], the M of one the 256 * G of the next.

    Returns:
        The adapters and the loss before every step, float32 [steps].
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    teacher = _adapters(keys[0], layers, rank, up=0.5)
    start = _adapters(keys[1], layers, rank, up=0.0)  # as usual, the adapted model begins as the frozen one
    inputs = 256 * layers[0].shape[1]

    def loss(adapters: Sequence[Adapter], x: jax.Array) -> jax.Array:
        return jnp.mean((model(adapters, layers, x) - model(teacher, layers, x)) ** 2)

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        adapters, mean, square, time = state
        x = jax.random.normal(key, (batch, inputs), jnp.float32)
        value, gradient = jax.value_and_grad(loss)(adapters, x)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
        rate = 0.02 * jnp.sqrt(1 - 0.99**time) / (1 - 0.9**time)
        adapters = jax.tree.map(lambda a, m, s: a - rate * m / (jnp.sqrt(s) + 1e-8), adapters, mean, square)
        return (adapters, mean, square, time + 1), value

    zeros = jax.tree.map(jnp.zeros_like, start)
    state = (start, zeros, zeros, jnp.float32(1))
    (adapters, *_), losses = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))(
        state, jax.random.split(keys[2], steps)
    )
    return adapters, losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if the loss fell to less than half, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m jaxquant.examples.lora")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file; without it, random records")
    parser.add_argument("--tensors", metavar="NAMES", help="its Q4_K tensors, from the lowest layer up")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.tensors is None):
        parser.error("--model and --tensors go together")
    if options.model is not None:
        layers = load(options.model, options.tensors.split(","))
    else:
        first, second = jax.random.split(jax.random.key(1))
        layers = [random_layer(first, 512, 768), random_layer(second, 384, 512)]
    _, losses = train(layers, options.steps)
    shown = range(0, options.steps, max(1, options.steps // 8))
    for index in (*shown, options.steps - 1):
        print(f"step {index:4d}  loss {float(losses[index]):.5f}")
    return 0 if float(losses[-1]) < 0.5 * float(losses[0]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
