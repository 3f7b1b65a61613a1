"""Strict promotion for every test, and proof that the test process itself rounds as IEEE asks."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def keeps_subnormals() -> bool:
    """Whether this thread computes with subnormal operands and results, in NumPy's float32 loops."""
    subnormal_result = np.full(16, 2e-38, np.float32) * np.full(16, 0.25, np.float32)
    subnormal_operand = np.full(16, 1e-40, np.float32) * np.full(16, 1e10, np.float32)
    return bool((subnormal_result > 0).all() and (subnormal_operand > 0).all())


@pytest.fixture(scope="session", autouse=True)
def _no_flush_to_zero():
    # A library built with -ffast-math sets FTZ for the whole process when it is loaded, and then
    # the reference flushes just like the bug it should find.
    assert keeps_subnormals(), "the test process flushes float32 subnormals from the start"
    yield
    assert keeps_subnormals(), "something left the test process flushing float32 subnormals"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def pytest_collection_modifyitems(config, items):
    exhaustive_asked = "exhaustive" in config.getoption("-m")
    for item in items:
        if item.get_closest_marker("exhaustive") and not exhaustive_asked:
            item.add_marker(pytest.mark.skip(reason="long: run with -m exhaustive"))
        if item.get_closest_marker("model") and not os.environ.get("JAXQUANT_MODEL"):
            item.add_marker(pytest.mark.skip(reason="JAXQUANT_MODEL names no GGUF file"))
