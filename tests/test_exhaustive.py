"""The whole sweep of ``make test-exhaustive``, and a slice of it in every run.

Each implementation is held to the exact reference on random-bit Q4_K records against random legal Q8_K
records, on blocks of every kind, and on records whose bsum is any bytes.
"""

from __future__ import annotations

import exact
import jax
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, run_on

import jaxquant as jq

gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))
pairwise = jax.vmap(jq.quantized_dot)

SLICE, WHOLE = pytest.param(1, id="slice"), pytest.param(40, id="whole", marks=pytest.mark.exhaustive)


def mismatches(got, want) -> int:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    return int((~same).sum())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rounds", [SLICE, WHOLE])
def test_single_records(implementation, rounds, record_property):
    """Dots of one record each: every bit of v is seen. 3,300 records a round, 65536 patterns of d in 20."""
    rng = np.random.default_rng(1)
    patterns = exact.random_q4k(rng, (3300 * rounds, 1), finite=0)
    wrong = finite = 0
    for w in np.split(patterns, rounds):
        x = exact.random_q8k(rng, (3300, 1))
        want = exact.dots(w, x)
        finite += int(np.isfinite(want).sum())
        with run_on(implementation):
            wrong += mismatches(pairwise(w, x), want)
    record_property("records", 3300 * rounds)
    assert finite > 1000 * rounds
    assert wrong == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rounds", [SLICE, WHOLE])
def test_matrices(implementation, rounds):
    """GEMMs: 2,560 weight records a round, each with five columns, half of the bsum bytes random."""
    rng = np.random.default_rng(2)
    wrong = 0
    for i in range(rounds):
        w = exact.random_q4k(rng, (160, 16))
        x = (exact.random_illegal_q8k if i % 2 else exact.random_q8k)(rng, (5, 16))
        x[0, :, :4] = rng.standard_normal((16, 1), np.float32).view(np.uint8)
        want = exact.gemm(w, x).T
        assert np.isfinite(want[0]).mean() > 0.2
        with run_on(implementation):
            wrong += mismatches(gemm(w, x), want)
    assert wrong == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rounds", [SLICE, WHOLE])
def test_any_bsum(implementation, rounds):
    """250 records a round with random bsum bytes: 10,000 in the whole sweep."""
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(rounds):
        w, x = exact.random_q4k(rng, (250, 1)), exact.random_illegal_q8k(rng, (250, 1))
        with run_on(implementation):
            wrong += mismatches(pairwise(w, x), exact.dots(w, x))
    assert wrong == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", exact.KINDS)
@pytest.mark.parametrize("rounds", [SLICE, WHOLE])
def test_blocks(implementation, kind, rounds):
    """220 blocks of each of 12 kinds a round: 105,600 in the whole sweep."""
    rng = np.random.default_rng(4)
    wrong = 0
    for _ in range(rounds):
        x = exact.blocks(rng, kind, 220)
        with run_on(implementation):
            wrong += int((np.asarray(jq.quantize(x)) != exact.quantize(x)).any(-1).sum())
    assert wrong == 0
