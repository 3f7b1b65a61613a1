"""Derivatives: zero, in float0, through every way of asking for them."""

from __future__ import annotations

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0

import jaxquant as jq


@pytest.fixture
def operands(rng):
    w = exact.random_q4k(rng, (3, 2))
    w[..., :4] = np.array([0, 60, 0, 56], np.uint8)
    return w, exact.blocks(rng, "gaussian", 2)


def layer(w, values):
    return jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(values)).sum()


def test_jvp_of_quantize_is_float0(operands):
    _, values = operands
    primal, tangent = jax.jvp(jq.quantize, (values,), (np.ones_like(values),))
    np.testing.assert_array_equal(np.asarray(primal), exact.quantize(values))
    assert tangent.dtype == float0
    assert tangent.shape == (2, 292)


def test_jvp_of_dot_is_zero(operands):
    w, values = operands
    x = jq.quantize(values)
    zeros = (np.zeros(w[0].shape, float0), np.zeros(x.shape, float0))
    primal, tangent = jax.jvp(jq.quantized_dot, (w[0], x), zeros)
    assert exact.same_bits(np.asarray(primal), exact.dot(w[0], np.asarray(x)))
    assert tangent.dtype == jnp.float32
    assert float(tangent) == 0


def test_grad_through_both_is_zero(operands):
    w, values = operands
    value, gradient = jax.value_and_grad(layer, argnums=1)(w, values)
    assert float(value) == float(layer(w, values))
    np.testing.assert_array_equal(gradient, np.zeros_like(values))


def test_gradient_of_the_rest_flows_past(operands):
    w, values = operands
    gradient = jax.jit(jax.grad(lambda v: layer(w, v) + (3 * v).sum()))(values)
    np.testing.assert_array_equal(gradient, np.full_like(values, 3))


def test_vjp_takes_float0(operands):
    _, values = operands
    records, pullback = jax.vjp(jq.quantize, values)
    (cotangent,) = pullback(np.zeros(records.shape, float0))
    np.testing.assert_array_equal(cotangent, np.zeros_like(values))


def test_linearize(operands):
    w, values = operands
    value, linear = jax.linearize(lambda v: layer(w, v), values)
    assert float(value) == float(layer(w, values))
    assert float(linear(np.ones_like(values))) == 0


def test_per_example_gradients(operands):
    w, values = operands
    batch = np.stack([values, 2 * values])
    gradients = jax.vmap(jax.grad(lambda v: layer(w, v) + v[0, 0]))(batch)
    want = np.zeros_like(batch)
    want[:, 0, 0] = 1
    np.testing.assert_array_equal(gradients, want)


def test_jacobians_are_zero(operands):
    w, values = operands
    f = lambda v: jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(v))  # noqa: E731
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_array_equal(jacobian(f)(values), np.zeros((3, 2, 256), np.float32))


def test_straight_through(operands):
    """What a user writes to train through quantization."""
    w, values = operands
    dense = jq.records.dequantize(jnp.asarray(w), jq.quant.q4_k)

    @jax.custom_vjp
    def linear(values):
        return jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(values))

    linear.defvjp(lambda v: (linear(v), None), lambda _, ct: (jnp.einsum("m,mgk->gk", ct, dense),))
    gradient = jax.grad(lambda v: linear(v).sum())(values)
    np.testing.assert_array_equal(gradient, jnp.einsum("m,mgk->gk", jnp.ones(3, jnp.float32), dense))
