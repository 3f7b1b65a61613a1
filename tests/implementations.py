"""Every implementation that this machine can run, for tests that hold each to the exact reference."""

from __future__ import annotations

import contextlib

import jaxquant as jq
from jaxquant.ops import native

IMPLEMENTATIONS = (*native.supported_isas(), "fallback")


@contextlib.contextmanager
def run_on(implementation: str):
    """Trace and run on one implementation; fetch results inside, since JAX dispatches asynchronously."""
    if implementation == "fallback":
        with jq.use_backend("fallback"):
            yield
    else:
        with jq.use_backend("native"), native.use_isa(implementation):
            yield
