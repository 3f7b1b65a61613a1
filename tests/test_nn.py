"""``quantized_matmul`` against the exact reference."""

from __future__ import annotations

import exact
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq


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
