"""The offline Q4_K encoder: legal records, exact special cases, and errors beside those of ggml's."""

from __future__ import annotations

import os
import tracemalloc

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
import jaxquant.gguf
from jaxquant.examples.ggml import Ggml
from jaxquant.records import encode_q4_k

K = 1024


def decode(records: np.ndarray) -> np.ndarray:
    return exact.dequantize_q4k(records).reshape(*records.shape[:-2], -1).astype(np.float64)


def error(weights: np.ndarray, records: np.ndarray, importance: np.ndarray | float = 1.0) -> float:
    p = np.broadcast_to(importance, weights.shape).astype(np.float64)
    return float(np.sqrt((p * (decode(records) - weights) ** 2).sum() / p.sum()))


def nearest(weights: np.ndarray) -> np.ndarray:
    """Round to nearest on the grid that the smallest and largest weights of each sub-block span."""
    x = weights.reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    step, offset = (x.max(-1) - low) / 15, -low
    d, dmin = ((values.max(-1) / 63).astype(np.float16) for values in (step, offset))
    wide = [half.astype(np.float32)[:, None] for half in (d, dmin)]
    with np.errstate(all="ignore"):
        sc, m = (
            np.nan_to_num(np.rint(values / scale)).clip(0, 63)
            for values, scale in zip((step, offset), wide, strict=True)
        )
        q = np.nan_to_num(np.rint((x + (wide[1] * m)[..., None]) / (wide[0] * sc)[..., None])).clip(0, 15)
    byte = [values.astype(np.uint8) for values in (sc, m, q.reshape(-1, 256))]
    records = jq.records.pack(jq.records.Q4K(d, dmin, *byte), jq.quant.q4_k)
    return records.reshape(*weights.shape[:-1], -1, 144)


def gaussian(rng, shape):
    return rng.normal(0, 0.02, shape)


def heavy_tailed(rng, shape):
    return 0.02 * rng.standard_t(3, shape)


def one_sided(rng, shape):
    return rng.uniform(1, 2, shape)


def sparse(rng, shape):
    return rng.normal(size=shape) * (rng.random(shape) < 0.1)


def tiny(rng, shape):
    return rng.normal(0, 3e-6, shape)  # d and dmin are float16 subnormals


def mixed(rng, shape):
    return rng.normal(size=shape) * 10 ** rng.uniform(-4, 3, (*shape[:-1], 1))


KINDS = [gaussian, heavy_tailed, one_sided, sparse, tiny, mixed]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    pytest.importorskip("libggml")
    return Ggml()


@every_kind
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
def test_the_error_is_no_larger_than_ggmls(kind, weighted, ggml, rng):
    weights = kind(rng, (64, K)).astype(np.float32)
    importance = rng.exponential(size=K).astype(np.float32) if weighted else None
    records = encode_q4_k(weights, importance)
    jq.records.validate_records(records, jq.quant.q4_k)
    factors = 1.0 if importance is None else importance
    ours = error(weights, records, factors)
    assert ours < error(weights, ggml.encode_q4_k(weights, importance), factors)
    assert ours < error(weights, nearest(weights), factors)
    assert ours > 0


def test_importance_goes_where_it_is_asked_to(rng):
    weights = gaussian(rng, (32, K)).astype(np.float32)
    importance = np.where(np.arange(K) % 4 == 0, 100, 1).astype(np.float32)
    plain, weighted = (decode(encode_q4_k(weights, p)) - weights for p in (None, importance))
    assert np.abs(weighted[:, ::4]).mean() < 0.8 * np.abs(plain[:, ::4]).mean()
    whole = np.broadcast_to(importance, weights.shape)
    assert exact.same_bits(encode_q4_k(weights, whole.copy()), encode_q4_k(weights, importance))


def test_importance_of_zero_does_not_count(rng):
    weights = gaussian(rng, (8, K)).astype(np.float32)
    importance = np.ones(K, np.float32)
    importance[:256] = 0  # a whole record
    importance[300:] = 0  # all but one sub-block
    records = encode_q4_k(weights, importance)
    jq.records.validate_records(records, jq.quant.q4_k)
    got = decode(records)
    assert np.abs(got[:, :256] - weights[:, :256]).max() < 0.02
    assert np.abs(got[:, 256:300] - weights[:, 256:300]).max() < 0.01


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_zero_bytes(zero):
    records = encode_q4_k(np.full((2, 512), zero, np.float32))
    assert records.shape == (2, 2, 144)
    assert not records.any()


@pytest.mark.parametrize(
    "value", [1.0, -1.0, 0.1, -0.3, 1e-3, -7e-5, 3.14159, 1000.1, -12345.678, 65504.0, 1e6, -4e6, 2.0**-24]
)
def test_constants_are_nearly_exact(value):
    weights = np.full((1, 256), value, np.float32)
    records = encode_q4_k(weights)
    jq.records.validate_records(records, jq.quant.q4_k)
    got = decode(records)
    assert (got == got[0, 0]).all()
    # What the offset misses, a step makes up for, to half a unit of the smaller of the two float16 numbers.
    np.testing.assert_allclose(got, weights, rtol=1e-6, atol=2.0**-25)


@pytest.mark.parametrize("value", [5.0, -5.0, 0.37], ids=str)
def test_constant_sub_blocks_among_others(value, rng):
    weights = rng.normal(0, 1, (4, 8, 32)).astype(np.float32)
    weights[:, 3] = value
    got = decode(encode_q4_k(weights.reshape(4, 256))).reshape(4, 8, 32)
    assert np.abs(got[:, 3] - value).max() < 0.06
    assert np.abs(got - weights).max() < 0.5


@pytest.mark.parametrize("place", [0, 77, 255])
def test_one_large_value(place):
    weights = np.zeros((1, 256), np.float32)
    weights[0, place] = 3.0
    got = decode(encode_q4_k(weights))
    assert got[0, place] == pytest.approx(3, rel=1e-3)
    assert np.abs(np.delete(got[0], place)).max() == 0


def test_values_that_a_record_can_hold_are_found(rng):
    """Random records with their full range come back with an error far below one step."""
    sc, m = rng.integers(32, 64, (64, 8), np.uint8), rng.integers(32, 64, (64, 8), np.uint8)
    q = rng.integers(0, 16, (64, 256), np.uint8)
    q.reshape(64, 8, 32)[..., :2] = [0, 15]
    fields = jq.records.Q4K(np.full(64, 0.01, np.float16), np.full(64, 0.05, np.float16), sc, m, q)
    weights = decode(jq.records.pack(fields, jq.quant.q4_k)[:, None]).astype(np.float32)
    step = (fields.d.astype(np.float64)[:, None] * sc).repeat(32, -1)
    assert (np.abs(decode(encode_q4_k(weights)) - weights) / step).max() < 0.5
    assert np.sqrt(np.mean(((decode(encode_q4_k(weights)) - weights) / step) ** 2)) < 0.06


def test_the_scale_does_not_matter(rng):
    """Weights times a power of two give records with the scales times it."""
    weights = gaussian(rng, (16, K)).astype(np.float32) * 8
    one, other = (jq.records.unpack(encode_q4_k(w), jq.quant.q4_k) for w in (weights, 64 * weights))
    assert exact.same_bits(one.q, other.q)
    assert exact.same_bits(one.sc, other.sc)
    assert exact.same_bits(one.d * np.float16(64), other.d)


@pytest.mark.parametrize("shape", [(256,), (3, 2, 512), (0, 256), (2, 0)], ids=str)
def test_shapes(shape, rng):
    weights = gaussian(rng, shape).astype(np.float32)
    records = encode_q4_k(weights)
    assert records.shape == (*shape[:-1], shape[-1] // 256, 144)
    assert records.dtype == np.uint8
    if weights.size:
        assert exact.same_bits(records.reshape(-1, 1, 144), encode_q4_k(weights.reshape(-1, 256)))


def test_jax_arrays_answer_in_kind(rng):
    weights = gaussian(rng, (2, 512)).astype(np.float32)
    records = encode_q4_k(jnp.asarray(weights))
    assert isinstance(records, jax.Array)
    assert exact.same_bits(records, encode_q4_k(weights))
    with pytest.raises(TypeError, match="weights: got a traced array"):
        jax.jit(encode_q4_k)(weights)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_weights_that_are_not_finite_are_refused(value):
    weights = np.zeros((2, 512), np.float32)
    weights[1, 300] = value
    with pytest.raises(ValueError, match=rf"weights\[1, 300\]: got {value}, want finite"):
        encode_q4_k(weights)
    with pytest.raises(ValueError, match=rf"importance\[1, 300\]: got {value}, want finite"):
        encode_q4_k(np.zeros_like(weights), weights)


@pytest.mark.parametrize("value", [-5e6, 7e7, 1e38, -3e38], ids=str)
def test_weights_beyond_a_record_are_refused(value):
    weights = np.zeros((2, 512), np.float32)
    weights[1, 300] = value
    with pytest.raises(ValueError, match=r"weights: block \[1, 1\] is beyond what a record can hold"):
        encode_q4_k(weights)
    with pytest.raises(ValueError, match=r"weights: block \[0\] is beyond"):
        encode_q4_k(np.full(256, 3e38, np.float32))


@pytest.mark.parametrize(
    ("weights", "importance", "kind", "message"),
    [
        (np.zeros(256), None, TypeError, "weights: got dtype float64, want float32"),
        ([0.0] * 256, None, TypeError, "weights: got list"),
        (np.zeros(255, np.float32), None, ValueError, "K = 255, want K a multiple of 256"),
        (np.zeros(256, np.float32), np.zeros(256), TypeError, "importance: got dtype float64"),
        (
            np.zeros((2, 256), np.float32),
            np.zeros(2, np.float32),
            ValueError,
            r"importance: got shape \(2,\)",
        ),
        (
            np.zeros((2, 256), np.float32),
            np.full(256, -1, np.float32),
            ValueError,
            r"importance\[0\]: got -1.0, want no negative number",
        ),
    ],
    ids=["float64", "list", "K", "importance dtype", "importance shape", "negative"],
)
def test_wrong_arguments_are_refused(weights, importance, kind, message):
    with pytest.raises(kind, match=message):
        encode_q4_k(weights, importance)


def test_memory_is_bounded(rng):
    weights = gaussian(rng, (1024, K)).astype(np.float32)
    tracemalloc.start()
    try:
        encode_q4_k(weights, np.ones(K, np.float32))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * weights.nbytes + 32 * 2**20


@pytest.mark.model
def test_real_weights_beat_ggml(ggml):
    with jaxquant.gguf.open(os.environ["JAXQUANT_MODEL"]) as file:
        for layer in (0, 1, 4):  # layers that are stored finer than Q4_K
            weights = file.array(f"blk.{layer}.ffn_down.weight")
            assert error(weights, encode_q4_k(weights)) < error(weights, ggml.encode_q4_k(weights))
