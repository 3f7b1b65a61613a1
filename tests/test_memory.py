"""Thousands of calls of changing shapes leave no memory behind, and a GEMM's scratch does not grow with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Memory of the process, with what malloc could give back given back.
SCRIPT = """
import ctypes, gc, sys
import numpy as np, jax, jaxquant as jq
libc = ctypes.CDLL(None)
def resident():
    gc.collect()
    libc.malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
gemm = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
quantize = jax.jit(jq.quantize)
rng = np.random.default_rng(0)
"""


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_calls_of_changing_shapes_leave_nothing_behind():
    """10,000 calls over 40 shapes, whose programs XLA caches; then as many again of the same shapes."""
    first, second = run("""
shapes = [(int(m), int(n), int(g)) for m, n, g in rng.integers(1, 60, (40, 3))]
w = np.zeros((60, 60, 144), np.uint8)
x = np.zeros((60, 60, 292), np.uint8)
values = np.ones((60, 256), np.float32)
def calls(count):
    for i in range(count):
        m, n, g = shapes[i % len(shapes)]
        if i % 2:
            gemm(w[:m, :g], x[:n, :g])
        else:
            quantize(values[:m])
    return resident()
calls(400)
print(calls(10_000), calls(10_000))
""")
    assert second - first < 4 << 20, f"{second - first} bytes more after 10,000 more calls"


def test_new_shapes_cost_only_xlas_caches():
    """With its caches cleared after each fifty new shapes, the process stays as large as it was."""
    sizes = run("""
sizes = []
for start in range(1, 201, 50):
    for count in range(start, start + 50):
        quantize(np.ones((count, 256), np.float32))
    jax.clear_caches()
    sizes.append(resident())
print(*sizes)
""")
    assert max(sizes[2:]) - sizes[1] < 8 << 20, sizes


@pytest.mark.parametrize("columns", [65, 4096], ids=["few columns", "many columns"])
def test_scratch_of_a_gemm_does_not_grow(columns):
    """Beyond its operands and result a GEMM takes less than 2 MiB a thread, however many columns there are."""
    before, after = run(
        """
import resource
columns = int(sys.argv[1])
w = jax.device_put(rng.integers(0, 256, (512, 16, 144), np.uint8))
x = jax.device_put(np.zeros((columns, 16, 292), np.uint8))
program = gemm.lower(w, x).compile()
assert program.memory_analysis().temp_size_in_bytes == 0
# The peak counts from here on.
open("/proc/self/clear_refs", "w").write("5")
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
result = program(w, x).block_until_ready()
print(before, peak() - result.nbytes)
""",
        columns,
    )

    assert after - before < (os.cpu_count() or 1) * (2 << 20), f"{after - before} bytes of scratch"


def test_the_measure_sees_a_leak():
    first, second = run("""
kept = []
before = resident()
kept.append(np.ones(8 << 20, np.uint8))
print(before, resident())
""")
    assert second - first >= 7 << 20
