"""The Gemma 3 example against a decoder in NumPy float64: on small random models, and on the real one."""

from __future__ import annotations

import os
from pathlib import Path

import exact
import gemma_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma_oracle import VOCABULARY, Oracle, write_model

import jaxquant.gguf
from jaxquant.examples import gemma
from jaxquant.examples.model import ModelError

MODES = gemma.MODES


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma") / "small.gguf")


@pytest.fixture(scope="module")
def models(path) -> dict[str, gemma.Model]:
    return {mode: gemma.load(path, mode) for mode in MODES}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """More than two windows and two chunks, and no multiple of either."""
    return [2, *np.random.default_rng(1).integers(4, VOCABULARY, 69).tolist()]


def scores(model: gemma.Model, ids: list[int]) -> np.ndarray:
    """Log-probabilities by chunks, float64 [T, vocabulary]."""
    cache, parts = gemma.empty_cache(model.config, len(ids)), []
    for start, part, filled in gemma._chunks(ids):
        found, cache = gemma.score(model.config, model.weights, cache, part, np.int32(start))
        parts.append(np.asarray(found, np.float64)[:filled])
    return np.concatenate(parts)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (np.exp(p) * (p - q)).sum(-1)


def exact_linear(path: Path, seen: dict[str, np.ndarray] | None = None) -> gemma_oracle.Linear:
    """Products of Q4_K matrices as the record contract says, in Python integers; the others in float64."""
    oracle = Oracle(path)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        if oracle.file.tensors[name].type != "Q4_K":
            return oracle.linear(name, x)
        blocks = x.astype(np.float32).reshape(len(x), -1, 256)
        if seen is not None:
            seen[name] = blocks
        return exact.gemm(oracle.file.records(name), exact.quantize(blocks)).T.astype(np.float64)

    return linear


# Small random models


def test_float32_is_the_oracle(models, path, ids):
    want = log_softmax(Oracle(path).logits(ids))
    got = scores(models["float32"], ids)
    assert want.std() > 0.5  # the model does say something
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


def test_quantized_is_near_the_oracle_with_exact_dots(models, path, ids):
    want = log_softmax(Oracle(path, exact_linear(path)).logits(ids))
    plain = scores(models["float32"], ids)
    got = scores(models["quantized"], ids)
    assert divergence(want, got).mean() < 0.02
    # Rounding activations to int8 does move the model, and in the direction that the contract says.
    assert divergence(want, got).mean() < divergence(want, plain).mean()


def test_bytes_decode_to_what_quantized_holds(models, ids):
    got, want = scores(models["bytes"], ids), scores(models["quantized"], ids)
    assert divergence(want, got).mean() < 0.005
    assert models["bytes"].nbytes < models["quantized"].nbytes < models["float32"].nbytes


def test_matrices_are_held_as_the_mode_says(models, path):
    with jaxquant.gguf.open(path) as file:
        types = {name: info.type for name, info in file.tensors.items()}
        stored = sum(info.nbytes for info in file.tensors.values())
        halves = sum(info.nbytes for info in file.tensors.values() if info.type == "F16")
    for mode, model in models.items():
        for layer, w in enumerate(model.weights["layers"]):
            for name, held in w.items():
                kind = types[f"blk.{layer}.{name}.weight"]
                kept = (mode == "bytes" and kind not in ("F32", "F16")) or (
                    mode == "quantized" and kind == "Q4_K"
                )
                assert isinstance(held, gemma.Blocks) == kept, (mode, layer, name)
                if not kept:
                    assert held.dtype == jnp.float32
    assert models["bytes"].nbytes == stored + halves


def test_q4_k_products_are_exact_on_the_activations_of_the_model(models, path, ids):
    seen: dict[str, np.ndarray] = {}
    Oracle(path, exact_linear(path, seen)).hidden(ids[:9])
    assert len(seen) == 7 + 4
    for name, blocks in seen.items():
        _, layer, role, _ = name.split(".")
        x = blocks.reshape(len(blocks), -1)
        got = jax.jit(gemma.linear)(x, models["quantized"].weights["layers"][int(layer)][role])
        with jaxquant.gguf.open(path) as file:
            assert exact.same_bits(got, exact.gemm(file.records(name), exact.quantize(blocks)).T)


@pytest.mark.parametrize("mode", ["float32", "quantized"])
def test_text_goes_on_with_the_likeliest_id(models, mode, ids):
    """Ids from the step-by-step cache are the likeliest of a whole pass over the text they give."""
    new = list(gemma.generate(models[mode], ids[:65], 6))
    assert len(new) == 6
    p = scores(models[mode], [*ids[:65], *new])
    chosen = np.array([p[64 + i, token] for i, token in enumerate(new)])
    assert (p[64:70].max(-1) - chosen < (1e-3 if mode == "float32" else 0.3)).all()


def test_text_ends_where_the_end_comes(models, ids):
    model = models["float32"]
    new = list(gemma.generate(model, ids[:65], 6))
    assert list(gemma.generate(model, ids[:65], 6, end=new[3])) == new[: new.index(new[3])]
    with pytest.raises(ValueError, match="there are none"):
        next(gemma.generate(model, [], 1))


def test_the_cache_is_donated(models):
    model = models["float32"]
    cache = gemma.empty_cache(model.config, 70)
    gemma.step(model.config, model.weights, cache, np.zeros(32, np.int32), np.int32(0), np.int32(0))
    assert all(array.is_deleted() for array in jax.tree.leaves(cache))


def test_compare_measures_what_it_says(models, ids):
    found = gemma.compare(models["float32"], models["quantized"], ids)
    p, q = (scores(models[mode], ids[:-1]) for mode in ("float32", "quantized"))
    targets = np.array(ids[1:])
    rows = np.arange(len(targets))
    assert found.losses.shape == (2, 69)
    np.testing.assert_allclose(found.losses, [-p[rows, targets], -q[rows, targets]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.divergences, divergence(p, q), rtol=0, atol=1e-4)
    assert (found.agreements == (p.argmax(-1) == q.argmax(-1))).all()
    want = np.exp([-p[rows, targets].mean(), -q[rows, targets].mean()])
    np.testing.assert_allclose(found.perplexities, want, rtol=1e-5)


# What is no such model


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "llama"}, "holds a llama model, this program runs gemma3"),
        ({"rope.scaling.type": "linear"}, "scales its rope"),
        ({"block_count": 8}, "no complete Gemma 3 model: there is no tensor 'blk.7.attn_norm.weight'"),
        (
            {"feed_forward_length": 256},
            r"'blk.0.ffn_gate.weight' has shape \(512, 256\), but the metadata say",
        ),
        (
            {"leave_out": "token_embd.weight"},
            "no complete Gemma 3 model: there is no tensor 'token_embd.weight'",
        ),
    ],
    ids=["architecture", "rope", "layers", "shape", "embedding"],
)
def test_another_model_is_refused(changed, message, tmp_path):
    with pytest.raises(ModelError, match=message) as caught:
        gemma.load(write_model(tmp_path / "other.gguf", **changed))
    assert "other.gguf" in str(caught.value)


def test_no_model_is_refused(tmp_path, path):
    with pytest.raises(ModelError, match="No such file"):
        gemma.load(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="No such file"):
        gemma.Tokenizer(tmp_path / "missing.gguf")
    (tmp_path / "half.gguf").write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        gemma.load(tmp_path / "half.gguf")
    with pytest.raises(ValueError, match="mode: got 'int8', want one of float32, quantized, bytes"):
        gemma.load(path, "int8")


# The tokenizer and the command


def test_tokenizer_is_what_the_file_says(path):
    pytest.importorskip("sentencepiece")
    tokenizer = gemma.Tokenizer(path)
    piece = gemma_oracle.PIECES.index
    assert tokenizer.encode("ab a") == [2, piece("ab"), piece("\u2581a")]
    assert tokenizer.encode("a  b") == [2, piece("a"), piece("  "), piece("b")]
    assert tokenizer.encode("\u00e9") == [2, piece("<0xC3>"), piece("<0xA9>")]
    for text in ("", " a", "a ", "  a  b  ", "\u00e9\u20ac", "ab\nc"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_without_sentencepiece(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ModelError, match=r"pip install jaxquant\[demo\]"):
        gemma.Tokenizer(path)


def test_command(path, capsys, tmp_path):
    pytest.importorskip("sentencepiece")
    assert gemma.main(["ab a", "--model", str(path), "--mode", "float32", "--tokens", "90"]) == 0
    assert capsys.readouterr().out.startswith("ab a")
    assert gemma.main(["ab a", "--model", str(tmp_path / "missing.gguf")]) == 2
    assert "No such file" in capsys.readouterr().err


# The real model

TEXTS = gemma.texts()


@pytest.fixture(scope="module")
def real() -> Path:
    return Path(os.environ["JAXQUANT_MODEL"])


@pytest.fixture(scope="module")
def real_models(real) -> dict[str, gemma.Model]:
    models = {mode: gemma.load(real, mode) for mode in ("float32", "quantized")}
    for layer, w in enumerate(models["quantized"].weights["layers"]):
        for name, held in w.items():  # one copy of what both hold
            if not isinstance(held, gemma.Blocks):
                w[name] = models["float32"].weights["layers"][layer][name]
    models["quantized"].weights["token_embd"] = models["float32"].weights["token_embd"]
    return models


@pytest.fixture(scope="module")
def tokenizer(real) -> gemma.Tokenizer:
    return gemma.Tokenizer(real)


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [9259, 236764, 1902, 236888]),
        ("", []),
    ],
    ids=["hello", "empty"],
)
def test_real_tokenizer(tokenizer, text, ids):
    assert tokenizer.encode(text) == [2, *ids]


@pytest.mark.model
def test_real_tokenizer_keeps_every_text(tokenizer):
    for text in (*TEXTS, "a   b\n\n\tc", "\u65e5\u672c\u8a9e \U0001f9ee na\u00efve", "  two spaces in front"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a   b")[1:] != tokenizer.encode("a b")[1:]


@pytest.mark.model
def test_real_float32_is_the_oracle(real, real_models, tokenizer):
    ids = tokenizer.encode(TEXTS[0])[:48]
    want = log_softmax(Oracle(real).logits(ids))
    np.testing.assert_allclose(scores(real_models["float32"], ids), want, rtol=0, atol=1e-3)


@pytest.mark.model
def test_real_window(real, real_models, tokenizer):
    """At 600 tokens the window of 512 cuts the first ones off in most layers."""
    ids = tokenizer.encode(" ".join(TEXTS))[:600]
    assert len(ids) == 600
    oracle = Oracle(real)
    want = log_softmax(oracle.logits(ids, first=592))
    model, cache = real_models["float32"], gemma.empty_cache(real_models["float32"].config, 600)
    for start, part, _ in gemma._chunks(ids):
        got, cache = gemma.score(model.config, model.weights, cache, part, np.int32(start))
    np.testing.assert_allclose(np.asarray(got)[16:24], want, rtol=0, atol=1e-3)
    oracle.meta["attention.sliding_window"] = 600
    assert np.abs(log_softmax(oracle.logits(ids, first=592)) - want).max() > 0.1


@pytest.mark.model
def test_real_quantized_divergence(real_models, tokenizer):
    found = gemma.compare(real_models["float32"], real_models["quantized"], tokenizer.encode(TEXTS[0])[:65])
    assert found.divergences.shape == (64,)
    assert found.divergences.mean() < 0.02
    assert found.agreements.mean() > 0.9
    plain, quantized = found.perplexities
    assert plain < 30
    assert abs(quantized / plain - 1) < 0.03


@pytest.mark.model
def test_real_q4_k_products_are_exact(real, real_models, tokenizer):
    seen: dict[str, np.ndarray] = {}
    Oracle(real, exact_linear(real, seen)).hidden(tokenizer.encode(TEXTS[1])[:6])
    assert len(seen) == 27
    with jaxquant.gguf.open(real) as file:
        for name, blocks in seen.items():
            _, layer, role, _ = name.split(".")
            weights = real_models["quantized"].weights["layers"][int(layer)][role]
            got = jax.jit(gemma.linear)(blocks.reshape(len(blocks), -1), weights)
            assert exact.same_bits(got, exact.gemm(file.records(name), exact.quantize(blocks)).T)


@pytest.mark.model
@pytest.mark.parametrize("mode", ["float32", "quantized"])
@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday, Sunday, and Monday"),
        ("Water boils at 100 degrees Celsius. Ice melts at", " 0 degrees Celsius."),
        ("English: Good morning, my friend.\nFrench:", " Bonjour, mon ami."),
    ],
    ids=["days", "ice", "French"],
)
def test_real_text(real_models, tokenizer, mode, prompt, continuation):
    shown: list[str] = []
    gemma.stream(real_models[mode], tokenizer, prompt, 10, shown.append)
    assert "".join(shown).startswith(continuation)
