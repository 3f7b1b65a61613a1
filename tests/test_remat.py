"""Rematerialization and dead code."""

from __future__ import annotations

import exact
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_checkpoint_keeps_the_bits(rng, implementation):
    w, values = exact.random_q4k(rng, (3, 2)), exact.blocks(rng, "gaussian", 2)
    w[..., :4] = np.array([0, 60, 0, 56], np.uint8)

    @jax.checkpoint
    def f(values):
        return jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(values)) * values[0, :3]

    want = exact.gemm(w, exact.quantize(values)[None])[:, 0]
    with run_on(implementation):
        result, pullback = jax.vjp(jax.jit(f), values)
        (gradient,) = pullback(jnp.ones(3, jnp.float32))
        np.testing.assert_array_equal(np.asarray(result), want * values[0, :3])
        np.testing.assert_array_equal(np.asarray(gradient)[0, :3], want)
        assert not np.asarray(gradient)[0, 3:].any()


def test_unused_results_are_not_computed(rng):
    w, values = exact.random_q4k(rng, (3, 2)), exact.blocks(rng, "gaussian", 2)

    def f(w, values):
        jq.quantized_dot(w[0], jq.quantize(values))
        return values + 1

    assert hlo.calls(hlo.compiled(f, w, values)) == []


def test_equal_calls_are_merged(rng):
    values = exact.blocks(rng, "gaussian", 2)
    text = hlo.compiled(lambda v: (jq.quantize(v), jq.quantize(v)), values)
    assert hlo.calls(text) == [hlo.QUANTIZE]
