"""``quantize`` on every implementation against the exact reference, and its errors."""

from __future__ import annotations

import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on
from jax.experimental import checkify

import jaxquant as jq


def quantize_on(implementation, x):
    with run_on(implementation):
        return np.asarray(jq.quantize(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [*exact.KINDS, *exact.POISON_KINDS])
def test_blocks_equal_the_reference(rng, implementation, kind):
    x = exact.blocks(rng, kind, 301)
    np.testing.assert_array_equal(quantize_on(implementation, x), exact.quantize(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden_vectors(implementation):
    golden = exact.load("q8k_quant")
    np.testing.assert_array_equal(quantize_on(implementation, golden["x"]), golden["contract"])


def block(*values):
    return np.array([*values, *[0.0] * (256 - len(values))], np.float32)


CONTRACT = {
    "zeros": (block(), 0x00000000, [0] * 256),
    "negative zeros": (np.full(256, -0.0, np.float32), 0x00000000, [0] * 256),
    "tie takes the minimum": (block(1, -1), 0x3C010204, [127, -127] + [0] * 254),
    "all ones": (np.ones(256, np.float32), 0xBC010204, [-127] * 256),
    "halves go to even": (
        block(-127, 0.5, 1.5, 2.5, -0.5, -1.5),
        0x3F800000,
        [-127, 0, 2, 2, 0, -2] + [0] * 250,
    ),
    "ramp": (
        np.arange(-128, 128).astype(np.float32),
        0x3F810204,
        np.rint(np.arange(-128, 128) * (127 / 128)).astype(int).tolist(),
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CONTRACT)
def test_contract_table(implementation, name):
    x, ds, q = CONTRACT[name]
    record = quantize_on(implementation, x[None])[0]
    assert int(record[:4].view("<u4")[0]) == ds
    np.testing.assert_array_equal(record[4:260].view(np.int8), q)
    np.testing.assert_array_equal(record[260:].view("<i2"), np.reshape(q, (16, 16)).sum(-1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_domain_ends_at_the_least_extreme(implementation):
    bits = np.array([[0x02FE0001], [0x02FE0000], [0x82FE0001], [0x82FE0000], [1], [0x7F7FFFFF]], np.uint32)
    x = np.zeros((6, 256), np.float32)
    x[:, 7:8] = bits.view(np.float32)
    records = quantize_on(implementation, x)
    poisoned = (records == exact.POISON).all(-1)
    np.testing.assert_array_equal(poisoned, [False, True, False, True, True, False])
    np.testing.assert_array_equal(records[:, 11].view(np.int8), [-127, 0, -127, 0, 0, -127])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [0, 1, 3, 5, 7, 8, 9, 15, 17, 1025])
def test_any_number_of_records(rng, implementation, count):
    x = exact.blocks(rng, "gaussian", count)
    got = quantize_on(implementation, x)
    assert got.shape == (count, 292)
    np.testing.assert_array_equal(got, exact.quantize(x))


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "fallback"])
def test_results_beyond_the_caches(rng, implementation):
    """So many records are written past the caches, whole lines at a time; the last ones are not."""
    x = np.concatenate([exact.blocks(rng, kind, 251) for kind in (*exact.KINDS, *exact.POISON_KINDS)])
    times = 60_003 // len(x) + 1
    many, want = np.tile(x, (times, 1))[:60_003], np.tile(exact.quantize(x), (times, 1))[:60_003]
    np.testing.assert_array_equal(quantize_on(implementation, many), want)


def test_poison_makes_every_dot_nan(rng):
    x = exact.blocks(rng, "gaussian", 3)
    x[1, 200] = np.nan
    records = jq.quantize(x)
    w = exact.random_q4k(rng, (5, 3))
    w[..., :4] = np.array([0, 60, 0, 60], np.uint8)
    assert np.isnan(jax.vmap(jq.quantized_dot, (0, None))(w, records)).all()


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])], ids=["eager", "jit", "vmap"]
)
class TestErrors:
    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((256,), r"(?m)quantize: values has shape \(256,\), wanted \(G, 256\)$"),
            ((2, 128), r"(?m)quantize: values has shape \(2, 128\), wanted \(G, 256\)$"),
            ((2, 3, 256), r"quantize: values has shape \(2, 3, 256\), wanted \(G, 256\).*jax\.vmap"),
            ((), r"(?m)quantize: values has shape \(\), wanted \(G, 256\)$"),
        ],
    )
    def test_shape(self, wrap, shape, message):
        with pytest.raises(ValueError, match=message):
            wrap(jq.quantize)(jnp.zeros(shape, jnp.float32))

    @pytest.mark.parametrize(
        "dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool, ml_dtypes.float8_e4m3fn]
    )
    def test_dtype(self, wrap, dtype):
        with pytest.raises(TypeError, match=rf"quantize: values has dtype {np.dtype(dtype)}, wanted float32"):
            wrap(jq.quantize)(jnp.zeros((2, 256), dtype))


@pytest.mark.parametrize(
    "values",
    [np.zeros((1, 256)), np.zeros((1, 256), ">f4"), [[0.0] * 256], 1.0, None, "values", object()],
    ids=["float64", "big-endian", "list", "scalar", "none", "str", "object"],
)
def test_foreign_operands_are_refused(values):
    with pytest.raises(TypeError, match=r"quantize: values .*float32"):
        jq.quantize(values)


@pytest.mark.parametrize("format", ["q8_k", None, 8, {}, jq.quant.RecordFormat], ids=repr)
def test_foreign_format(format):
    with pytest.raises(TypeError, match=r"quantize: format must be the record format jaxquant\.quant\.q8_k"):
        jq.quantize(jnp.zeros((1, 256), jnp.float32), format=format)


def test_wrong_format():
    with pytest.raises(
        ValueError, match=r"format accepts only jaxquant\.quant\.q8_k, got jaxquant\.quant\.q4_k"
    ):
        jq.quantize(jnp.zeros((1, 256), jnp.float32), format=jq.quant.q4_k)


def test_float64_is_refused_under_x64_too():
    with jax.enable_x64(True), pytest.raises(TypeError, match="dtype float64, wanted float32"):
        jq.quantize(jnp.zeros((1, 256), jnp.float64))


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (np.nan, "its block holds a NaN"),
        (-np.inf, "its block holds an infinity"),
        (1e-38, "its block is not zero, but nowhere above 3.7321948e-37"),
    ],
    ids=["nan", "infinity", "too small"],
)
def test_checkify_names_operation_record_and_cause(rng, value, cause):
    x = exact.blocks(rng, "gaussian", 5)
    checked = checkify.checkify(jax.jit(jq.quantize), errors=checkify.user_checks)
    error, _ = checked(x)
    assert error.get() is None
    x[3] = 0
    x[3, 9] = value
    error, records = checked(x)
    assert f"quantize: record 3 is poison: {cause}" in error.get()
    np.testing.assert_array_equal(np.asarray(records), exact.quantize(x))
    error, _ = checkify.checkify(jax.vmap(jq.quantize), errors=checkify.user_checks)(
        np.stack([x[:2], x[2:4]])
    )
    assert f"quantize: record (1, 1) is poison: {cause}" in error.get()


def test_checkify_inside_a_scan(rng):
    x = exact.blocks(rng, "gaussian", 12).reshape(3, 4, 256)
    x[2, 1, 0] = np.nan

    def layers(x):
        return jax.lax.scan(lambda carry, x: (carry, jq.quantize(x)), 0, x)[1]

    error, _ = jax.jit(checkify.checkify(layers, errors=checkify.user_checks))(x)
    assert "quantize: record 1 is poison: its block holds a NaN" in error.get()


def test_programs_without_checkify_hold_no_check(rng):
    """The plain program is the same before and after checkify has seen the function, and the call alone."""
    x = exact.blocks(rng, "gaussian", 4)
    plain = jax.jit(lambda x: jq.quantize(x)).lower(x).as_text()
    checked = jax.jit(checkify.checkify(lambda x: jq.quantize(x), errors=checkify.user_checks)).lower(x)
    assert "is_finite" in checked.as_text() or "compare" in checked.as_text()
    assert jax.jit(lambda x: jq.quantize(x)).lower(x).as_text() == plain
    operations = [line.split(" = ")[1].split("(")[0] for line in plain.splitlines() if "%0 = " in line]
    assert [o for o in operations if "call @_quantize" not in o] == [
        "stablehlo.custom_call @jaxquant_quantize_v1"
    ]


def test_debug_nans_passes_over_poison(rng):
    """Records are bytes, so that debug_nans sees the poison in the first dot that reads it."""
    x = exact.blocks(rng, "gaussian", 2)
    w = exact.random_q4k(rng, (3, 2))
    w[..., :4] = np.array([0, 60, 0, 60], np.uint8)
    with jax.debug_nans(True):
        healthy = jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(x))
        assert np.isfinite(healthy).all()
        x[1, 5] = np.nan
        records = jq.quantize(x)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.vmap(jq.quantized_dot, (0, None))(w, records)
        with pytest.raises(FloatingPointError, match="nan"):
            jax.jit(jax.vmap(jq.quantized_dot, (0, None)))(w, records)
