"""Loops and branches: scan, map, while, cond."""

from __future__ import annotations

import exact
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq

gemv = jax.vmap(jq.quantized_dot, (0, None))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers(rng, implementation):
    """Stacked weights, an activation that goes through all of them."""
    w = exact.random_q4k(rng, (4, 256, 1))
    w[..., :4] = np.array([0, 20, 0, 20], np.uint8)  # small scales keep the values finite
    values = exact.blocks(rng, "one_hot", 1)
    values[...] = np.sign(values)

    def step(values, w):
        result = gemv(w, jq.quantize(values))
        scaled = result / jnp.max(jnp.abs(result), keepdims=True)
        return scaled[None], result

    with run_on(implementation):
        _, got = jax.jit(lambda v, w: jax.lax.scan(step, v, w))(values, w)
        got = np.asarray(got)
        each = values
        for layer in range(4):
            want = exact.gemm(w[layer], exact.quantize(each)[None])[:, 0]
            assert exact.same_bits(got[layer], want)
            each = np.asarray(jnp.asarray(want) / jnp.max(jnp.abs(jnp.asarray(want)), keepdims=True))[None]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_map(rng, implementation):
    w, x = exact.random_q4k(rng, (6, 3)), exact.random_q8k(rng, (3,))
    with run_on(implementation):
        got = np.asarray(jax.lax.map(lambda w: jq.quantized_dot(w, x), w))
    assert exact.same_bits(got, exact.dots(w, x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_of_scan(rng, implementation):
    w, x = exact.random_q4k(rng, (3, 5, 2)), exact.random_q8k(rng, (3, 2))

    def total(w, x):
        return jax.lax.scan(lambda carry, w: (carry, jq.quantized_dot(w, x)), 0, w)[1]

    with run_on(implementation):
        got = np.asarray(jax.vmap(total)(w, x))
    assert exact.same_bits(got, exact.dots(w, x[:, None]))


def test_scan_body_holds_one_call(rng):
    w, x = exact.random_q4k(rng, (4, 5, 2)), exact.random_q8k(rng, (2,))
    text = hlo.compiled(lambda w, x: jax.lax.scan(lambda c, w: (c, gemv(w, x)), 0, w)[1], w, x)
    assert hlo.calls(text) == [hlo.DOT]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("choice", [True, False])
def test_cond(rng, implementation, choice):
    w, x = exact.random_q4k(rng, (2, 3)), exact.random_q8k(rng, (3,))
    f = jax.jit(
        lambda c: jax.lax.cond(c, lambda: jq.quantized_dot(w[0], x), lambda: jq.quantized_dot(w[1], x))
    )
    with run_on(implementation):
        assert exact.same_bits(np.asarray(f(choice)), exact.dot(w[0 if choice else 1], x))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_while(rng, implementation):
    w, x = exact.random_q4k(rng, (4, 2)), exact.random_q8k(rng, (2,))

    def body(state):
        i, results = state
        return i + 1, results.at[i].set(jq.quantized_dot(w_device[i], x))

    with run_on(implementation):
        w_device = jnp.asarray(w)
        _, got = jax.lax.while_loop(lambda s: s[0] < 4, body, (0, jnp.zeros(4, jnp.float32)))
        assert exact.same_bits(np.asarray(got), exact.dots(w, x))
