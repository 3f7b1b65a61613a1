"""Composites against the exact reference, and the training of adapters through them."""

from __future__ import annotations

import exact
import gguf as peer
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.examples import lora
from jaxquant.nn import quantized_linear


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 2)], ids=str)
def test_any_leading_axes(rng, lead):
    w = exact.random_q4k(rng, (7, 2))
    count = int(np.prod(lead))
    blocks = exact.blocks(rng, "gaussian", 2 * count).reshape(*lead, 2, 256)
    got = np.asarray(jq.quantized_matmul(blocks.reshape(*lead, 512), w))
    records = exact.quantize(blocks).reshape(count, 2, 292)
    assert exact.same_bits(got, exact.gemm(w, records).T.reshape(*lead, 7))


def test_two_calls_and_no_moved_bytes(rng):
    w, x = exact.random_q4k(rng, (7, 2)), jnp.ones((4, 5, 512), jnp.float32)
    text = hlo.compiled(jq.quantized_matmul, x, w)
    assert sorted(hlo.calls(text)) == [hlo.QUANTIZE, hlo.DOT]
    assert hlo.byte_operations(text) <= {"parameter", "bitcast", "custom-call"}
    assert "transpose(" not in text


def test_vmap_over_experts(rng):
    w = exact.random_q4k(rng, (3, 5, 2))
    blocks = exact.blocks(rng, "gaussian", 6).reshape(3, 2, 256)
    got = jax.vmap(jq.quantized_matmul)(blocks.reshape(3, 512), w)
    assert exact.same_bits(np.asarray(got), exact.dots(w, exact.quantize(blocks)[:, None]))


@pytest.mark.parametrize(
    ("x", "weights", "error", "message"),
    [
        (
            np.zeros((2, 300), np.float32),
            np.zeros((3, 1, 144), np.uint8),
            ValueError,
            r"quantized_matmul: x has shape \(2, 300\), wanted \(..., K\)",
        ),
        (
            np.zeros((2, 512), np.float32),
            np.zeros((3, 1, 144), np.uint8),
            ValueError,
            "K = 512, that is 2 records",
        ),
        (
            np.zeros((2, 256), np.float32),
            np.zeros((1, 144), np.uint8),
            ValueError,
            r"weights has shape \(1, 144\)",
        ),
        (
            np.zeros((2, 256), np.float32),
            np.zeros((3, 1, 292), np.uint8),
            ValueError,
            r"wanted \(M, G, 144\)",
        ),
        (
            np.zeros((2, 256)),
            np.zeros((3, 1, 144), np.uint8),
            TypeError,
            "x has dtype float64, wanted float32",
        ),
        (np.zeros((2, 256), np.float32), np.zeros((3, 1, 144), np.int8), TypeError, "weights has dtype int8"),
        ([0.0] * 256, np.zeros((3, 1, 144), np.uint8), TypeError, "x must be a jax.Array or numpy.ndarray"),
        (np.zeros((), np.float32), np.zeros((3, 1, 144), np.uint8), ValueError, r"x has shape \(\)"),
        (np.float32(1), np.zeros((3, 1, 144), np.uint8), TypeError, "x must be a jax.Array or numpy.ndarray"),
    ],
    ids=["K", "G", "rank", "bytes", "float64", "int8", "list", "rank zero", "scalar"],
)
def test_errors(x, weights, error, message):
    with pytest.raises(error, match=message):
        jq.quantized_matmul(x, weights)


class TestLinear:
    @pytest.fixture
    def operands(self, rng):
        w = exact.random_q4k(rng, (5, 2))
        w[..., :4] = np.array([0, 20, 0, 20], np.uint8)  # small scales keep everything finite
        return rng.standard_normal((3, 4, 512), np.float32), w

    def test_forward_is_quantized_matmul(self, operands):
        x, w = operands
        want = exact.gemm(w, exact.quantize(x.reshape(12, 2, 256))).T.reshape(3, 4, 5)
        assert exact.same_bits(np.asarray(quantized_linear(x, w)), want)
        assert exact.same_bits(np.asarray(jax.jit(quantized_linear)(x, w)), want)

    @pytest.mark.parametrize(
        "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
    )
    def test_backward_is_the_product_with_the_dequantized_weight(self, operands, wrap):
        x, w = operands
        dense = np.asarray(jq.records.dequantize(w, jq.quant.q4_k)).reshape(5, 512).astype(np.float64)
        result, pullback = jax.vjp(lambda x: wrap(quantized_linear)(x, w), x)
        cotangent = np.linspace(-1, 1, result.size, dtype=np.float32).reshape(result.shape)
        (gradient,) = pullback(jnp.asarray(cotangent))
        want = cotangent.astype(np.float64) @ dense
        scale = np.abs(cotangent).astype(np.float64) @ np.abs(dense)
        assert (np.abs(gradient - want) <= 1e-6 * scale).all()
        assert np.abs(want).max() > 0

    def test_each_record_multiplies_its_own_columns(self):
        """Row 0 is 1 in its second record alone, so that a gradient in the first would be misplaced."""
        fields = jq.records.unpack(np.zeros((1, 2, 144), np.uint8), jq.quant.q4_k)
        d = np.array([[0, 1]], np.float16)
        ones = fields._replace(d=d, sc=np.ones_like(fields.sc), q=np.ones_like(fields.q))
        w = jq.records.pack(ones, jq.quant.q4_k)
        gradient = jax.grad(lambda x: quantized_linear(x, w).sum())(jnp.ones(512, jnp.float32))
        np.testing.assert_array_equal(gradient, np.repeat([0, 1], 256).astype(np.float32))

    def test_weights_have_no_gradient(self, operands):
        x, w = operands
        _, pullback = jax.vjp(quantized_linear, x, w)
        _, gradient = pullback(jnp.ones((3, 4, 5), jnp.float32))
        assert gradient.dtype == jax.dtypes.float0
        assert gradient.shape == w.shape

    def test_vmap_over_layers(self, operands):
        x, w = operands
        layers = np.stack([w, w[::-1]])
        loss = lambda x, w: (quantized_linear(x, w) ** 2).sum()  # noqa: E731
        got = jax.vmap(jax.grad(loss), (None, 0))(x, layers)
        np.testing.assert_allclose(got[1], jax.grad(loss)(x, w[::-1].copy()), rtol=1e-5, atol=1e-6)

    def test_dequantized_weights_never_exist_as_a_whole(self):
        """Scratch of a backward pass over 64 records: less than half of what the float32 weights would take."""
        x = jax.ShapeDtypeStruct((1, 64 * 256), jnp.float32)
        w = jax.ShapeDtypeStruct((64, 64, 144), jnp.uint8)
        f = jax.jit(jax.grad(lambda x, w: quantized_linear(x, w).sum()))
        scratch = f.lower(x, w).compile().memory_analysis().temp_size_in_bytes
        assert scratch < 64 * 64 * 256 * 4 / 2

    def test_errors_are_those_of_the_product(self, operands):
        x, w = operands
        with pytest.raises(ValueError, match="K = 256, that is 1 records"):
            quantized_linear(x[..., :256], w)


class TestAdapters:
    def test_loss_falls_and_only_by_gradients_through_frozen_layers(self):
        """The adapter of the lower layer learns too, which it can by the straight-through gradient alone."""
        first, second = jax.random.split(jax.random.key(1))
        layers = [lora.random_layer(first, 256, 256), lora.random_layer(second, 64, 256)]
        adapters, losses = lora.train(layers, steps=60, batch=32)
        assert losses.shape == (60,)
        assert float(losses[-10:].mean()) < 0.4 * float(losses[:3].mean())
        assert all(np.abs(adapter.up).max() > 0.05 for adapter in adapters)

    def test_random_layers_are_about_as_large_as_their_inputs_ask(self):
        layer = lora.random_layer(jax.random.key(0), 64, 512)
        values = np.asarray(jq.records.dequantize(layer, jq.quant.q4_k))
        assert abs(values.mean()) < 0.002
        assert values.std() * 512**0.5 == pytest.approx(1, rel=0.05)

    def test_layers_of_a_file(self, tmp_path, rng, capsys):
        writer = peer.GGUFWriter(tmp_path / "tiny.gguf", "tiny")
        layers = {
            name: np.asarray(lora.random_layer(jax.random.key(i), 256, 256))
            for i, name in enumerate(("up", "down"))
        }
        for name, records in layers.items():
            writer.add_tensor(name, records.reshape(256, 144), raw_dtype=peer.GGMLQuantizationType.Q4_K)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        loaded = lora.load(tmp_path / "tiny.gguf", ["up", "down"])
        np.testing.assert_array_equal(loaded[1], layers["down"])
        arguments = ["--model", str(tmp_path / "tiny.gguf"), "--tensors", "up,down", "--steps", "2"]
        assert lora.main(arguments) == 1  # two steps are too few
        assert capsys.readouterr().out.startswith("step    0  loss 0.")

    def test_a_file_without_names_is_refused(self, capsys):
        with pytest.raises(SystemExit):
            lora.main(["--model", "x.gguf"])
        assert "--model and --tensors go together" in capsys.readouterr().err
