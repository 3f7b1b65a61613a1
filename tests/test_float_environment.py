"""Callers in any rounding mode, with flushing on or off, get the same bits and keep their environment.

XLA itself leaves the calling thread rounding to nearest when it runs a program on it (jaxlib 0.10.2), so the
rounding mode may come back as either. That our handlers leave nothing behind is held by
tests/native/handlers.cpp.

Each case is a process of its own: the mode is set either before JAX starts its threads, which then inherit
it, or around the calls alone.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import exact
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the MXCSR register of x86-64")

ROUNDING = {"nearest": 0x0000, "down": 0x2000, "up": 0x4000, "toward_zero": 0x6000}
FTZ_AND_DAZ = 0x8040

SCRIPT = """
import ctypes, sys
import numpy as np

# glibc's fenv_t on x86-64: 28 bytes of the x87 unit, then MXCSR.
libc = ctypes.CDLL(None)
def mxcsr(new=None):
    environment = (ctypes.c_uint32 * 8)()
    assert libc.fegetenv(environment) == 0
    old = environment[7]
    if new is not None:
        environment[7] = new
        assert libc.fesetenv(environment) == 0
    return old

path, before, during = sys.argv[1], int(sys.argv[2], 0), int(sys.argv[3], 0)
mxcsr(before)
import jax, jaxquant as jq
gemm = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
quantize = jax.jit(jq.quantize)
data = np.load(path)
many, few, w, x = (data[name] for name in ("many", "few", "w", "x"))
gemm(w, x).block_until_ready(), quantize(few).block_until_ready(), quantize(many).block_until_ready()
results = {}
for name, f in {
    "quantize_many": lambda: quantize(many), "quantize_few": lambda: quantize(few), "gemm": lambda: gemm(w, x),
    "eager": lambda: jq.quantize(few), "eager_dot": lambda: jq.quantized_dot(w[0], x[0]),
}.items():
    mxcsr(during)
    results[name] = np.asarray(f())
    assert mxcsr() & ~0x3F in (during, during & ~0x6000), f"{name} left {mxcsr():#x}, the caller had {during:#x}"
mxcsr(0x1F80)
np.savez(sys.argv[4], **results)
"""


@pytest.fixture(scope="module")
def operands(tmp_path_factory):
    rng = np.random.default_rng(3)
    kinds = [
        exact.blocks(rng, kind, 200) for kind in ("gaussian", "subnormal_ds", "ties", "halves", "near_max")
    ]
    many, few = rng.permutation(np.concatenate(kinds * 2)), np.concatenate([k[:3] for k in kinds])
    # Products and differences below the normal numbers: ds is tiny.
    w, x = (
        exact.random_q4k(rng, (40, 9), finite=1),
        exact.quantize(exact.blocks(rng, "subnormal_ds", 45)).reshape(5, 9, 292),
    )
    path = tmp_path_factory.mktemp("environment") / "operands.npz"
    np.savez(path, many=many, few=few, w=w, x=x)
    wanted = {
        "quantize_many": exact.quantize(many),
        "quantize_few": exact.quantize(few),
        "eager": exact.quantize(few),
        "gemm": exact.gemm(w, x).T,
        "eager_dot": exact.dot(w[0], x[0]),
    }
    return path, wanted


@pytest.mark.parametrize(
    ("before", "during"),
    [
        (0, ROUNDING["up"] | FTZ_AND_DAZ),
        (0, ROUNDING["down"]),
        (0, ROUNDING["toward_zero"] | FTZ_AND_DAZ),
        (ROUNDING["down"] | FTZ_AND_DAZ,) * 2,
    ],
    ids=[
        "up, flushing",
        "down",
        "toward zero, flushing",
        "down, flushing, from the start",
    ],
)
def test_any_environment_gives_the_same_bits(operands, tmp_path, before, during):
    path, wanted = operands
    arguments = [path, hex(0x1F80 | before), hex(0x1F80 | during), tmp_path / "results.npz"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    assert set(results) == set(wanted)
    for name, want in wanted.items():
        if name in ("gemm", "eager_dot"):
            assert exact.same_bits(results[name], want), name
        else:
            np.testing.assert_array_equal(results[name], want, err_msg=name)


def test_the_environments_differ():
    """The modes that the test above sets are real: NumPy's arithmetic changes with them."""
    script = (
        SCRIPT.split("path, before")[0]
        + """
a, b, tiny = np.float32([1]), np.float32([2.0**-30]), np.float32([1e-40])
seen = set()
for mode in (0x0000, 0x2000, 0x4000):
    mxcsr(0x1F80 | mode)
    seen.add(((a + b).tobytes(), (-a - b).tobytes()))
mxcsr(0x1F80 | 0x8040)
flushed = (tiny * a).tobytes()
mxcsr(0x1F80)
assert len(seen) == 3 and flushed == bytes(4) != tiny.tobytes()
"""
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
