"""``quantized_dot`` on every implementation against the exact reference, and its errors."""

from __future__ import annotations

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq

gemv = jax.vmap(jq.quantized_dot, (0, None))
gemm = jax.vmap(gemv, (None, 0))  # [N, M]
gemm_rows_first = jax.vmap(jax.vmap(jq.quantized_dot, (None, 0)), (0, None))  # [M, N]


def contract_operands():
    i, g = np.arange(144), np.arange(3)[:, None]
    w = ((37 * i + 11 + 101 * g) % 256).astype(np.uint8)
    scales = np.array([[0.5, 0.25], [-1.25, 0.75], [3.140625, -0.09997559]], np.float16)
    w[:, :4] = scales.view(np.uint8)
    i = np.arange(256)
    x = ((((73 * i + 19 + 31 * g) % 257) - 128) / 16).astype(np.float32)
    return w, jq.quantize(x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_contract_dot(implementation):
    with run_on(implementation):
        w, x = contract_operands()
        result = np.asarray(jq.quantized_dot(w, x))
        each = np.asarray(jax.vmap(jq.quantized_dot)(w[:, None], x[:, None]))
    assert result.view(np.uint32) == 0x4739B9A7
    assert [hex(v) for v in each.view(np.uint32)] == ["0xc5cafddc", "0x461bff1e", "0x472c199b"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_dots(implementation):
    records, activations = exact.load("q4k_records")["records"], exact.load("q8k_quant")["contract"]
    golden = exact.load("dots")
    offsets = golden["offsets"]
    counts = np.diff(offsets)
    with run_on(implementation):
        for g in np.unique(counts):
            rows = np.flatnonzero(counts == g)
            index = offsets[rows][:, None] + np.arange(g)
            w, x = records[golden["w_index"][index]], activations[golden["x_index"][index]]
            got = np.asarray(jax.vmap(jq.quantized_dot)(w, x))
            assert exact.same_bits(got, golden["contract_leftfold"][rows]), g


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_gemm(implementation):
    golden = exact.load("gemv_small")
    with run_on(implementation):
        got = np.asarray(gemm(golden["w_q4k"], golden["x_q8k_contract"]))
    assert exact.same_bits(got, golden["y_contract"])


# Odd sizes on both sides of every tile, block and batch of the kernels.
SHAPES = [
    (1, 1, 1),
    (3, 1, 7),
    (5, 3, 2),
    (7, 31, 17),
    (17, 5, 9),
    (31, 7, 3),
    (33, 17, 57),
    (40, 66, 18),
    (65, 130, 5),
    (100, 1, 65),
    (2, 3, 130),
    (64, 8, 33),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("legal", [True, False], ids=["legal", "any bsum"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_gemm_equals_the_reference(rng, implementation, legal, shape):
    rows, columns, records = shape
    w = exact.random_q4k(rng, (rows, records))
    x = (exact.random_q8k if legal else exact.random_illegal_q8k)(rng, (columns, records))
    # The first column is ordinary, so that half of its results are no NaN.
    x[0, :, :4] = rng.standard_normal((records, 1), np.float32).view(np.uint8)
    want = exact.gemm(w, x)
    assert rows < 5 or np.isfinite(want[:, 0]).mean() > 0.1
    with run_on(implementation):
        assert exact.same_bits(np.asarray(gemm(w, x)), want.T)
        if implementation != "fallback":
            assert exact.same_bits(np.asarray(gemm_rows_first(w, x)), want)


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "fallback"])
def test_every_record_count(rng, implementation):
    w, x = exact.random_q4k(rng, (9, 57)), exact.random_q8k(rng, (3, 57))
    for records in range(1, 58):
        with run_on(implementation):
            got = np.asarray(gemm(w[:, :records], x[:, :records]))
        assert exact.same_bits(got, exact.gemm(w[:, :records], x[:, :records]).T), records


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_bit_pattern_of_the_scales(rng, implementation):
    w, x = exact.random_q4k(rng, (65536, 1), finite=0), exact.random_q8k(rng, (1, 1))
    x[..., :4] = np.array([[[1.0]]], np.float32).view(np.uint8)
    with run_on(implementation):
        got = np.asarray(gemv(w, x[0]))
    assert exact.same_bits(got, exact.gemm(w, x)[:, 0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(implementation, shape):
    rows, columns, records = shape
    w, x = jnp.zeros((rows, records, 144), jnp.uint8), jnp.zeros((columns, records, 292), jnp.uint8)
    with run_on(implementation):
        got = np.asarray(gemm(w, x))
    assert exact.same_bits(got, np.zeros((columns, rows), np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_lone_negative_zero_stays(implementation):
    w, x = np.zeros((1, 144), np.uint8), np.zeros((1, 292), np.uint8)
    x[0, 3] = 0x80
    with run_on(implementation):
        assert np.asarray(jq.quantized_dot(w, x)).view(np.uint32) == 0x80000000
        no_records = jq.quantized_dot(w[:0], x[:0])
        assert np.asarray(no_records).view(np.uint32) == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_beyond_24_bits_round_once(implementation):
    """S = 16777217 has no float32; the contract rounds it to 16777216 before the product."""
    w, x = np.zeros((1, 144), np.uint8), np.zeros((1, 292), np.uint8)
    w[0, :2] = np.array([1], np.float16).view(np.uint8)
    w[0, 4:8] = 63
    w[0, 12:16] = 0x0F | 0  # sc[4..7] = 15
    w[0, 16:144] = 0xFF
    x[0, :4] = np.array([1], np.float32).view(np.uint8)
    x[0, 4:260] = np.array([127] * 256, np.int8).view(np.uint8)
    s = int(exact.statistics(w, x).S[0])
    assert s == 15 * 127 * 32 * (4 * 63 + 4 * 15)
    x[0, 4] = np.array([126], np.int8).view(np.uint8)[0]
    s -= 63 * 15
    assert s > 1 << 24
    assert s % 2 == 1
    with run_on(implementation):
        assert float(jq.quantized_dot(w, x)) == float(np.float32(s))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_do_not_depend_on_the_batch(rng, implementation):
    """A dot alone, in a GEMV, and at every place of a GEMM, is one number."""
    w, x = exact.random_q4k(rng, (37, 6)), exact.random_q8k(rng, (21, 6))
    with run_on(implementation):
        whole = np.asarray(gemm(w, x))
        for n in (0, 5, 20):
            assert exact.same_bits(np.asarray(gemv(w, x[n])), whole[n])
        for m, n in ((0, 0), (36, 20), (17, 3)):
            assert exact.same_bits(np.asarray(jq.quantized_dot(w[m], x[n])), whole[n, m])
        order = rng.permutation(37)
        assert exact.same_bits(np.asarray(gemm(w[order], x[::-1])), whole[::-1, order])


DOT = jq.quantized_dot
W, X = np.zeros((2, 144), np.uint8), np.zeros((2, 292), np.uint8)


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, jax.jit, lambda f: lambda w, x: jax.vmap(f)(w[None], x[None])],
    ids=["eager", "jit", "vmap"],
)
class TestErrors:
    @pytest.mark.parametrize(
        ("lhs", "rhs", "message"),
        [
            ((144,), (1, 292), r"(?m)lhs has shape \(144,\), wanted \(G, 144\)$"),
            ((3, 2, 144), (2, 292), r"lhs has shape \(3, 2, 144\), wanted \(G, 144\).*jax\.vmap"),
            ((2, 144), (2, 2, 292), r"rhs has shape \(2, 2, 292\), wanted \(G, 292\).*jax\.vmap"),
            ((2, 292), (2, 144), r"(?m)lhs has shape \(2, 292\), wanted \(G, 144\)$"),
            ((2, 144), (2, 144), r"(?m)rhs has shape \(2, 144\), wanted \(G, 292\)$"),
            ((2, 144), (3, 292), r"same number of records G, got lhs \(2, 144\) and rhs \(3, 292\)"),
        ],
    )
    def test_shape(self, wrap, lhs, rhs, message):
        with pytest.raises(ValueError, match=message):
            wrap(DOT)(jnp.zeros(lhs, jnp.uint8), jnp.zeros(rhs, jnp.uint8))

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float32, jnp.bool, jnp.uint32])
    @pytest.mark.parametrize("operand", ["lhs", "rhs"])
    def test_dtype(self, wrap, operand, dtype):
        w, x = jnp.asarray(W), jnp.asarray(X)
        operands = (w.astype(dtype), x) if operand == "lhs" else (w, x.astype(dtype))
        with pytest.raises(
            TypeError, match=rf"quantized_dot: {operand} has dtype {np.dtype(dtype)}, wanted uint8"
        ):
            wrap(DOT)(*operands)


@pytest.mark.parametrize("operand", [[[0] * 144], 3, None, b"\0" * 144], ids=["list", "int", "none", "bytes"])
def test_foreign_operands_are_refused(operand):
    with pytest.raises(
        TypeError, match=r"quantized_dot: lhs must be a jax\.Array or numpy\.ndarray of dtype uint8"
    ):
        jq.quantized_dot(operand, X)
    with pytest.raises(
        TypeError, match=r"quantized_dot: rhs must be a jax\.Array or numpy\.ndarray of dtype uint8"
    ):
        jq.quantized_dot(W, operand)


@pytest.mark.parametrize(
    "acc_dtype", [jnp.float32, "float32", np.dtype("f4"), "f", np.float32(1).dtype], ids=repr
)
def test_acc_dtype_accepts_every_name_of_float32(acc_dtype):
    assert float(jq.quantized_dot(W, X, acc_dtype=acc_dtype)) == 0


@pytest.mark.parametrize(
    "acc_dtype", [jnp.float16, jnp.bfloat16, "float64", float, int, None, "nonsense", 3], ids=repr
)
def test_acc_dtype_refuses_the_rest(acc_dtype):
    with pytest.raises(TypeError, match=r"quantized_dot: acc_dtype is .*wanted float32"):
        jq.quantized_dot(W, X, acc_dtype=acc_dtype)


@pytest.mark.parametrize("name", ["lhs_format", "rhs_format"])
@pytest.mark.parametrize("format", ["q4_k", None, 4, []], ids=repr)
def test_foreign_formats(name, format):
    with pytest.raises(TypeError, match=rf"quantized_dot: {name} must be the record format"):
        jq.quantized_dot(W, X, **{name: format})


def test_formats_in_the_wrong_place():
    with pytest.raises(
        ValueError, match=r"lhs_format accepts only jaxquant\.quant\.q4_k, got jaxquant\.quant\.q8_k"
    ):
        jq.quantized_dot(W, X, lhs_format=jq.quant.q8_k)
    with pytest.raises(
        ValueError, match=r"rhs_format accepts only jaxquant\.quant\.q8_k, got jaxquant\.quant\.q4_k"
    ):
        jq.quantized_dot(W, X, rhs_format=jq.quant.q4_k)
