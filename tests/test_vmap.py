"""vmap: any nesting, any axes, one kernel call, and nothing copied."""

from __future__ import annotations

import itertools

import exact
import hlo
import jax
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq

EXTENTS = (3, 5, 2)  # of the vmaps, outermost first
RECORDS = 4
NESTINGS = [n for depth in (1, 2, 3) for n in itertools.product(["lhs", "rhs", "both"], repeat=depth)]
NAMES = ["-".join(n) for n in NESTINGS]


def operand(rng, make, nesting, side):
    return make(rng, (*[e for e, s in zip(EXTENTS, nesting, strict=False) if s in (side, "both")], RECORDS))


def expected(w, x, nesting):
    """By broadcasting: an axis that an operand does not have gets extent 1."""
    rows = [slice(None) if s != "rhs" else None for s in nesting]
    columns = [slice(None) if s != "lhs" else None for s in nesting]
    return exact.dots(w[tuple(rows)], x[tuple(columns)])


def mapped(nesting, lhs_axes=None, rhs_axes=None, out_axes=None):
    """quantized_dot under one vmap per entry of nesting, the first outermost."""
    f = jq.quantized_dot
    for i in reversed(range(len(nesting))):
        lhs = None if nesting[i] == "rhs" else lhs_axes[i] if lhs_axes else 0
        rhs = None if nesting[i] == "lhs" else rhs_axes[i] if rhs_axes else 0
        f = jax.vmap(f, (lhs, rhs), out_axes[i] if out_axes else 0)
    return f


@pytest.mark.parametrize("nesting", NESTINGS, ids=NAMES)
def test_every_nesting_is_one_call_on_untouched_operands(rng, nesting):
    w = operand(rng, exact.random_q4k, nesting, "lhs")
    x = operand(rng, exact.random_q8k, nesting, "rhs")
    f = mapped(nesting)
    text = hlo.compiled(f, w, x)
    assert hlo.calls(text) == [hlo.DOT]
    assert hlo.byte_operations(text) <= {"parameter", "bitcast"}
    assert exact.same_bits(np.asarray(f(w, x)), expected(w, x, nesting))


@pytest.mark.parametrize("order", ["rows in result", "columns in result"])
def test_either_order_of_a_gemm_writes_its_result_in_place(rng, order):
    nesting = ("lhs", "rhs") if order == "rows in result" else ("rhs", "lhs")
    w, x = exact.random_q4k(rng, (8, RECORDS)), exact.random_q8k(rng, (16, RECORDS))
    text = hlo.compiled(mapped(nesting), w, x)
    shape = "f32[8,16]" if nesting[0] == "lhs" else "f32[16,8]"
    assert f"{shape}{{1,0}} custom-call(" in text
    assert "transpose(" not in text
    assert "copy(" not in text


def arranged(rng, operand, own):
    """A random order of an operand's axes with records before bytes, and the in_axes that undo it."""
    count = len(own)
    while True:
        order = rng.permutation(count + 2)
        if np.flatnonzero(order == count) < np.flatnonzero(order == count + 1):
            break
    remaining, axes = list(order), []
    for i in range(count):
        axes.append(remaining.index(i))
        remaining.remove(i)
    return np.ascontiguousarray(np.transpose(operand, order)), axes


def spread(axes, nesting, side):
    taken = iter(axes)
    return [next(taken) if s in (side, "both") else None for s in nesting]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("nesting", NESTINGS[3::4], ids=NAMES[3::4])
def test_any_in_axes_and_out_axes(rng, implementation, nesting):
    w = operand(rng, exact.random_q4k, nesting, "lhs")
    x = operand(rng, exact.random_q8k, nesting, "rhs")
    want = expected(w, x, nesting)
    for _ in range(6 if implementation != "fallback" else 1):
        moved_w, lhs = arranged(rng, w, [s for s in nesting if s != "rhs"])
        moved_x, rhs = arranged(rng, x, [s for s in nesting if s != "lhs"])
        out_axes = [int(rng.integers(0, len(nesting) - i)) for i in range(len(nesting))]
        result_order = []
        for i in reversed(range(len(nesting))):
            result_order.insert(out_axes[i], i)
        with run_on(implementation):
            f = mapped(nesting, spread(lhs, nesting, "lhs"), spread(rhs, nesting, "rhs"), out_axes)
            got = np.asarray(f(moved_w, moved_x))
        assert exact.same_bits(got, np.transpose(want, result_order))


@pytest.mark.parametrize("outer", [0, 1])
def test_leading_axes_in_any_order_move_no_bytes(rng, outer):
    """Two vmaps over weights [a, b, G, 144], whichever axis is outermost, are strides, not a transpose."""
    w, x = exact.random_q4k(rng, (3, 5, RECORDS)), exact.random_q8k(rng, (RECORDS,))
    f = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (outer, None))
    text = hlo.compiled(f, w, x)
    assert hlo.calls(text) == [hlo.DOT]
    assert hlo.byte_operations(text) <= {"parameter", "bitcast"}
    want = exact.dots(w, x)
    assert exact.same_bits(np.asarray(f(w, x)), want if outer == 0 else want.T)


def test_records_axis_behind_the_mapped_axis_moves_no_bytes(rng):
    w, x = exact.random_q4k(rng, (RECORDS, 7)), exact.random_q8k(rng, (RECORDS,))
    f = jax.vmap(jq.quantized_dot, (1, None))
    assert hlo.byte_operations(hlo.compiled(f, w, x)) <= {"parameter", "bitcast"}
    assert exact.same_bits(np.asarray(f(w, x)), exact.dots(w.transpose(1, 0, 2), x))


def test_attention_like_batches(rng):
    """[B, H, M, G, 144] with [B, H, N, G, 292] to [B, H, M, N]."""
    w, x = exact.random_q4k(rng, (2, 3, 17, 2)), exact.random_q8k(rng, (2, 3, 9, 2))
    gemm = jax.vmap(jax.vmap(jq.quantized_dot, (None, 0)), (0, None))
    f = jax.vmap(jax.vmap(gemm))
    assert hlo.calls(hlo.compiled(f, w, x)) == [hlo.DOT]
    want = exact.dots(w[:, :, :, None], x[:, :, None])
    assert exact.same_bits(np.asarray(f(w, x)), want)


def test_grouped_weights_share_activations_of_their_batch(rng):
    """Rows of a batch that are no single axis of memory: [B, E, M] weights with [B, N] activations."""
    w, x = exact.random_q4k(rng, (2, 3, 18, 2)), exact.random_q8k(rng, (2, 5, 2))
    gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))  # [N, M]
    f = jax.vmap(jax.vmap(gemm, (0, None)))
    want = exact.dots(w[:, :, None], x[:, None, :, None])
    assert exact.same_bits(np.asarray(f(w, x)), want)


def test_many_axes(rng):
    w, x = exact.random_q4k(rng, (1, 2, 1, 2, 1, 2, 1, 2, 3)), exact.random_q8k(rng, (2, 1, 3))
    f = jq.quantized_dot
    for _ in range(2):
        f = jax.vmap(f, (None, 0))
    for _ in range(8):
        f = jax.vmap(f, (0, None))
    want = exact.dots(w.reshape(16, 1, 3, 144), x.reshape(1, 2, 3, 292)).reshape(1, 2, 1, 2, 1, 2, 1, 2, 2, 1)
    assert exact.same_bits(np.asarray(f(w, x)), want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("in_axes", "out_axes"), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 2), (2, 2)], ids=str)
def test_quantize(rng, implementation, in_axes, out_axes):
    x = exact.blocks(rng, "gaussian", 15).reshape(5, 3, 256)
    with run_on(implementation):
        got = np.asarray(jax.vmap(jq.quantize, in_axes, out_axes)(np.moveaxis(x, 0, in_axes)))
    np.testing.assert_array_equal(got, np.moveaxis(exact.quantize(x), 0, out_axes))


@pytest.mark.parametrize("axes", [(0, 0, 0), (2, 1, 0), (0, 1, 0)], ids=str)
def test_quantize_nested_is_one_call_on_an_untouched_operand(rng, axes):
    x = exact.blocks(rng, "gaussian", 2 * 3 * 4 * 5).reshape(2, 3, 4, 5, 256)
    f = jq.quantize
    for axis in reversed(axes):
        f = jax.vmap(f, axis)
    text = hlo.compiled(f, x)
    assert hlo.calls(text) == [hlo.QUANTIZE]
    moved, want = x, exact.quantize(x)
    for i, axis in enumerate(axes):
        moved, want = np.moveaxis(moved, axis + i, i), np.moveaxis(want, axis + i, i)
    np.testing.assert_array_equal(np.asarray(f(x)), want)
    if axes == (0, 0, 0):
        assert "transpose(" not in text
        assert "copy(" not in text


def test_axis_sizes_must_agree(rng):
    w, x = exact.random_q4k(rng, (3, 1)), exact.random_q8k(rng, (4, 1))
    with pytest.raises(ValueError, match="vmap got inconsistent sizes"):
        jax.vmap(jq.quantized_dot)(w, x)


def test_collectives_over_a_vmapped_axis(rng):
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2,))
    w[..., :4], x[..., :4] = [0, 60, 0, 56], [0, 0, 128, 63]
    summed = jax.vmap(lambda w: jax.lax.pmax(jq.quantized_dot(w, x), "rows"), axis_name="rows")(w)
    assert exact.same_bits(np.asarray(summed), np.full(3, exact.dots(w, x).max()))
