"""Gemma 3 in NumPy float64, whole texts at once and without a cache: what the decoder in JAX is held to.

Written from the technical report (arXiv:2503.19786) alone. It shares nothing with ``jaxquant.examples.gemma``
but the numbers: weights come decoded by the gguf package. ``write_model`` makes small files of the same
architecture with random weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf as peer
import gguf.quants
import numpy as np

import jaxquant.gguf

Linear = Callable[[str, np.ndarray], np.ndarray]


class Oracle:
    """``linear(name, x)`` may replace the product ``x @ weights(name).T`` of matrices, Q4_K ones for instance."""

    def __init__(self, path: Path, linear: Linear | None = None) -> None:
        self.file = jaxquant.gguf.open(path)
        self.meta = {key: self.file.metadata[f"gemma3.{key}"] for key in META}
        self._linear = linear or self.linear

    def stored(self, name: str) -> np.ndarray:
        info = self.file.tensors[name]
        raw = np.memmap(self.file.path, np.uint8, "r", info.offset, (info.nbytes,))
        kind = peer.GGMLQuantizationType[info.type]
        rows = raw.reshape(*info.shape[:-1], -1)
        return gguf.quants.dequantize(rows, kind).reshape(info.shape)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.stored(name).astype(np.float64).T

    def hidden(self, ids: list[int]) -> np.ndarray:
        """[T, width], what the embedding's rows are multiplied by."""
        meta, T = self.meta, len(ids)
        heads, length = meta["attention.head_count"], meta["attention.key_length"]
        groups = heads // meta["attention.head_count_kv"]
        i, j = np.mgrid[:T, :T]

        def norm(x, name):
            weights = self.stored(name).astype(np.float64)
            return (
                x
                / np.sqrt((x**2).mean(-1, keepdims=True) + meta["attention.layer_norm_rms_epsilon"])
                * weights
            )

        def turned(x, base):  # [T, heads, length]: element k and k + length / 2 are one complex number
            z = x[..., : length // 2] + 1j * x[..., length // 2 :]
            z = (
                z
                * np.exp(1j * np.outer(np.arange(T), base ** (-2 * np.arange(length // 2) / length)))[:, None]
            )
            return np.concatenate([z.real, z.imag], -1)

        x = self.stored("token_embd.weight")[ids].astype(np.float64) * math.sqrt(meta["embedding_length"])
        for block in range(meta["block_count"]):

            def named(name, block=block):
                return f"blk.{block}.{name}.weight"

            everything = block % 6 == 5
            base = meta["rope.freq_base"] if everything else 10000.0
            seen = (j <= i) & (everything | (i - j < meta["attention.sliding_window"]))
            h = norm(x, named("attn_norm"))
            q, k, v = (self._linear(named(f"attn_{n}"), h).reshape(T, -1, length) for n in "qkv")
            q, k = turned(norm(q, named("attn_q_norm")), base), turned(norm(k, named("attn_k_norm")), base)
            out = np.empty_like(q)
            for head in range(heads):
                scores = q[:, head] @ k[:, head // groups].T / math.sqrt(length)
                weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
                out[:, head] = weights @ v[:, head // groups] / weights.sum(-1, keepdims=True)
            x = x + norm(self._linear(named("attn_output"), out.reshape(T, -1)), named("post_attention_norm"))
            h = norm(x, named("ffn_norm"))
            gate = self._linear(named("ffn_gate"), h)
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
            h = self._linear(named("ffn_down"), gate * self._linear(named("ffn_up"), h))
            x = x + norm(h, named("post_ffw_norm"))
        return norm(x, "output_norm.weight")

    def logits(self, ids: list[int], first: int = 0) -> np.ndarray:
        """[T - first, vocabulary], of the positions from ``first`` on."""
        return self.linear("token_embd.weight", self.hidden(ids)[first:])


META = {
    "embedding_length": 256,
    "block_count": 7,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 24,
    "rope.freq_base": 1e6,
}
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["  ", "\u2581", "\u2581a", "a", "b", "ab", "\u2581ab", "c"]
VOCABULARY = len(PIECES)


def write_model(path: Path, seed: int = 0, leave_out: str = "", **changed: object) -> Path:
    """A small Gemma 3 of random weights, one tensor type for each role and both for ``ffn_down`` and ``attn_v``."""
    rng = np.random.default_rng(seed)
    architecture = str(changed.pop("architecture", "gemma3"))
    meta = {**META, **changed}
    width, hidden, length = (
        META["embedding_length"],
        META["feed_forward_length"],
        META["attention.key_length"],
    )
    queries, keys = META["attention.head_count"] * length, META["attention.head_count_kv"] * length
    writer = peer.GGUFWriter(path, architecture)
    for key, value in meta.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0] * 260 + [-1000.0] + [-float(i) for i in range(VOCABULARY - 261)])
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [4] + [1] * (VOCABULARY - 261))
    for key, number in (("bos", 2), ("eos", 1), ("unknown", 3), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)

    def matrix(name: str, kind: str, rows: int, columns: int) -> None:
        if name != leave_out:
            type_ = peer.GGMLQuantizationType[kind]
            writer.add_tensor(name, random_matrix(rng, kind, rows, columns), raw_dtype=type_)

    def vector(name: str, extent: int) -> None:
        if name != leave_out:
            writer.add_tensor(name, rng.uniform(0.5, 2, extent).astype(np.float32))

    matrix("token_embd.weight", "Q8_0", VOCABULARY, width)
    vector("output_norm.weight", width)
    for block in range(META["block_count"]):
        prefix = f"blk.{block}."
        matrix(prefix + "attn_q.weight", "Q5_0", queries, width)
        matrix(prefix + "attn_k.weight", "Q5_K", keys, width)
        matrix(prefix + "attn_v.weight", ("Q8_0", "Q5_0")[block % 2], keys, width)
        matrix(prefix + "attn_output.weight", "Q4_K", width, queries)
        matrix(prefix + "ffn_gate.weight", "Q5_0", hidden, width)
        matrix(prefix + "ffn_up.weight", "F16" if block == 3 else "Q5_0", hidden, width)
        matrix(prefix + "ffn_down.weight", ("Q4_K", "Q6_K")[block % 2], width, hidden)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            vector(f"{prefix}{name}.weight", width)
        for name in ("attn_q_norm", "attn_k_norm"):
            vector(f"{prefix}{name}.weight", length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_matrix(rng: np.random.Generator, kind: str, rows: int, columns: int) -> np.ndarray:
    """Random bits under scales that make the values about as large as those of a model."""
    if kind == "F16":
        return rng.normal(0, 0.05, (rows, columns)).astype(np.float16)
    block_size, block_bytes = peer.GGML_QUANT_SIZES[peer.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, columns // block_size, block_bytes), np.uint8)
    # Half the range of the integers that multiply d, so that values spread over about -0.1 to 0.1
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,), "Q8_0": (0,)}[kind]
    largest = {"Q4_K": (63 * 15 / 2, 63 * 2), "Q5_K": (63 * 31 / 2, 63 * 2), "Q6_K": (128 * 32,)}.get(
        kind, ({"Q5_0": 16, "Q8_0": 128}.get(kind),)
    )
    for at, extent in zip(places, largest, strict=True):
        scales = rng.uniform(0.05, 0.15, data.shape[:2]) / extent
        data[..., at : at + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    return data.reshape(rows, -1)
