"""Strict promotion for every test, and proof that the test process itself rounds as IEEE asks."""

from __future__ import annotations

import os

import exact
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def _no_flush_to_zero():
    # A library built with -ffast-math sets FTZ for the whole process when it is loaded, and then
    # the reference flushes just like the bug it should find.
    assert exact.keeps_subnormals(), "the test process flushes float32 subnormals from the start"
    yield
    assert exact.keeps_subnormals(), "something left the test process flushing float32 subnormals"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def pytest_collection_modifyitems(config, items):
    asked = config.getoption("-m")
    for item in items:
        long = [name for name in ("exhaustive", "arrays") if item.get_closest_marker(name)]
        if long and not any(name in asked for name in long):
            item.add_marker(pytest.mark.skip(reason=f"long: run with -m {long[0]}"))
        if item.get_closest_marker("model") and not os.environ.get("JAXQUANT_MODEL"):
            item.add_marker(pytest.mark.skip(reason="JAXQUANT_MODEL names no GGUF file"))
