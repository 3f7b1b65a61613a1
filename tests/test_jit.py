"""jit: constants, operands of any origin, donation, modes, and the fallback's memory."""

from __future__ import annotations

import exact
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq
from jaxquant import gguf  # noqa: F401  (importing it must not disturb float modes)

gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))


@pytest.fixture
def operands(rng):
    return exact.random_q4k(rng, (5, 6)), exact.random_q8k(rng, (3, 6))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("constant", ["both", "lhs", "rhs"])
def test_constant_operands(operands, implementation, constant):
    w, x = operands
    with run_on(implementation):
        match constant:
            case "both":
                got = jax.jit(lambda: gemm(w, x))()
            case "lhs":
                got = jax.jit(lambda x: gemm(w, x))(x)
            case _:
                got = jax.jit(lambda w: gemm(w, x))(w)
        assert exact.same_bits(np.asarray(got), exact.gemm(w, x).T)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_constant_values(rng, implementation):
    x = np.concatenate([exact.blocks(rng, kind, 20) for kind in ("subnormal_ds", "halves", "nan")])
    with run_on(implementation):
        got = np.asarray(jax.jit(lambda: jq.quantize(x))())
    np.testing.assert_array_equal(got, exact.quantize(x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_modes(rng, operands, implementation, x64):
    w, x = operands
    values = exact.blocks(rng, "subnormal_ds", 9)
    with jax.enable_x64(x64), run_on(implementation):
        result = jax.jit(gemm)(w, x)
        records = jax.jit(jq.quantize)(values)
        assert result.dtype == jnp.float32
        assert exact.same_bits(np.asarray(result), exact.gemm(w, x).T)
        np.testing.assert_array_equal(np.asarray(records), exact.quantize(values))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_whole_layer_in_one_program(rng, implementation):
    """XLA sees both operations together, and may not fuse across what they round."""
    w = exact.random_q4k(rng, (7, 4))
    values = exact.blocks(rng, "gaussian", 12).reshape(3, 4, 256)

    @jax.jit
    def layer(w, values):
        return gemm(w, jax.vmap(jq.quantize)(values))

    with run_on(implementation):
        got = np.asarray(layer(w, values))
    assert exact.same_bits(got, exact.gemm(w, exact.quantize(values)).T)


class TestOperandsOfAnyOrigin:
    @pytest.fixture(params=IMPLEMENTATIONS)
    def check(self, request, operands):
        w, x = operands
        want = exact.gemm(w, x).T

        def check(w, x):
            with run_on(request.param):
                assert exact.same_bits(np.asarray(gemm(w, x)), want)

        return check

    def test_strided(self, operands, check):
        w, x = operands
        apart = np.zeros((10, 6, 160), np.uint8)
        apart[::2, :, 5:149] = w
        check(apart[::2, :, 5:149], np.repeat(x, 2, axis=0)[::2])

    def test_misaligned(self, operands, check):
        w, x = operands
        raw = np.zeros(w.size + 64, np.uint8)
        odd = raw[3 : 3 + w.size].reshape(w.shape)
        odd[...] = w
        check(odd, x)

    def test_reversed_and_transposed(self, operands, check):
        w, x = operands
        check(w[::-1].copy()[::-1], np.ascontiguousarray(x.T).T)

    def test_read_only(self, operands, check):
        w, x = operands
        w.setflags(write=False)
        check(w, x)

    def test_sliced_on_device(self, operands, check):
        w, x = operands
        padded = jnp.pad(jnp.asarray(w), ((1, 2), (1, 0), (0, 0)))
        check(padded[1:6, 1:], jnp.asarray(x))

    def test_transposed_on_device(self, operands, check):
        w, x = operands
        check(jnp.transpose(jnp.asarray(w.transpose(1, 0, 2)), (1, 0, 2)), x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sliced_inside_jit(operands, implementation):
    w, x = operands

    @jax.jit
    def f(w, x, i):
        one = jax.lax.dynamic_index_in_dim(w, i, keepdims=False)
        return jq.quantized_dot(one[1:4], x[2][1:4])

    with run_on(implementation):
        for i in range(5):
            assert exact.same_bits(np.asarray(f(w, x, i)), exact.dot(w[i, 1:4], x[2, 1:4]))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated(rng, operands, implementation):
    w, x = operands
    values = exact.blocks(rng, "gaussian", 4)
    with run_on(implementation):
        got = jax.jit(gemm, donate_argnums=(0, 1))(jnp.asarray(w), jnp.asarray(x))
        assert exact.same_bits(np.asarray(got), exact.gemm(w, x).T)
        records = jax.jit(jq.quantize, donate_argnums=0)(jnp.asarray(values))
        np.testing.assert_array_equal(np.asarray(records), exact.quantize(values))


def test_ahead_of_time(operands):
    w, x = operands
    compiled = jax.jit(gemm).lower(w, x).compile()
    assert exact.same_bits(np.asarray(compiled(w, x)), exact.gemm(w, x).T)
    assert jax.eval_shape(gemm, w, x) == jax.ShapeDtypeStruct((3, 5), jnp.float32)
    assert jax.eval_shape(jq.quantize, jax.ShapeDtypeStruct((7, 256), jnp.float32)).shape == (7, 292)


def test_one_quantize_serves_three_weights(rng, operands):
    w, _ = operands
    values = exact.blocks(rng, "gaussian", 6)

    def f(a, b, c, values):
        records = jq.quantize(values)
        return [jax.vmap(jq.quantized_dot, (0, None))(each, records) for each in (a, b, c)]

    text = hlo.compiled(f, w, w[::-1], w[:3], values)
    assert sorted(hlo.calls(text)) == [hlo.QUANTIZE] + [hlo.DOT] * 3


def test_the_program_holds_the_call_alone(rng):
    """Nothing but the kernel: no check, cast or copy is left in the HLO."""
    text = hlo.compiled(jq.quantize, exact.blocks(rng, "gaussian", 4))
    entry = text[text.index("ENTRY") :]
    operations = [line.split(" = ")[1] for line in entry.splitlines() if " = " in line]
    assert [o.split("(")[0].split(" ")[-1] for o in operations] == ["parameter", "custom-call"]


def test_fallback_memory_is_the_result_and_one_step(rng):
    """Scratch grows with the result and one record of each operand, not with the records."""
    shape = {"w": (64, 144), "x": (32, 292)}
    scratch = []
    for records in (2, 64):
        w = jax.ShapeDtypeStruct((shape["w"][0], records, 144), jnp.uint8)
        x = jax.ShapeDtypeStruct((shape["x"][0], records, 292), jnp.uint8)
        with jq.use_backend("fallback"):
            scratch.append(jax.jit(gemm).lower(w, x).compile().memory_analysis().temp_size_in_bytes)
    assert scratch[0] == scratch[1]
    decoded = 4 * 256 * (64 + 32)
    assert scratch[1] < 4 * (64 * 32 * 4 + decoded)
