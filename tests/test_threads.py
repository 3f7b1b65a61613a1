"""Many threads, processes, clients and thread pools: no deadlock, no crash, the same bits.

`make stress` sets JAXQUANT_STRESS_SECONDS to 60; the suite spends a few seconds.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import time

import exact
import jax
import numpy as np
import pytest

import jaxquant as jq

SECONDS = float(os.environ.get("JAXQUANT_STRESS_SECONDS", "3"))
THREADS = 8

gemm = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))


def run(script, *, timeout=300, **environment):
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=timeout,
    )


def calls(rng):
    """Name, function and expected bits of calls on operands that all threads share."""
    w, x = exact.random_q4k(rng, (130, 9)), exact.random_q8k(rng, (7, 9))
    values = exact.blocks(rng, "gaussian", 1500)
    few = exact.blocks(rng, "ties", 3)
    floats = rng.standard_normal((64, 128)).astype(np.float32)
    on_device = {name: jax.device_put(array) for name, array in (("w", w), ("x", x), ("values", values))}
    codes = jq.encode(floats, "E4M3")
    return {
        "jitted dot": (lambda: gemm(on_device["w"], on_device["x"]), exact.gemm(w, x).T),
        "eager dot": (lambda: jq.quantized_dot(w[0], x[0]), exact.dot(w[0], x[0])),
        "jitted quantize": (lambda: jax.jit(jq.quantize)(on_device["values"]), exact.quantize(values)),
        "eager quantize": (lambda: jq.quantize(few), exact.quantize(few)),
        "new shape": (
            lambda: jq.quantize(values[: 1 + int(time.monotonic_ns() // 1000) % 40])[0],
            exact.quantize(values[:1])[0],
        ),
        "encode": (lambda: jq.encode(jax.numpy.asarray(floats), "E4M3"), codes),
        "pack": (
            lambda: jq.NarrowArray.from_codes(codes & np.uint8(15), "E2M1").codes(),
            codes & np.uint8(15),
        ),
        "unpack": (lambda: jq.records.dequantize(on_device["x"], jq.quant.q8_k), exact.dequantize_q8k(x)),
    }


def test_eight_threads_on_shared_arrays(rng):
    """Jitted and eager calls, and compilations, each thread in an order of its own."""
    work = calls(rng)
    for name, (function, want) in work.items():  # each once alone, so that what fails is named
        assert exact.same_bits(np.asarray(function()), np.asarray(want)), name
    end = time.monotonic() + SECONDS

    def loop(seed):
        order = np.random.default_rng(seed)
        done, wrong = 0, []
        while time.monotonic() < end:
            name = order.choice(list(work))
            function, want = work[name]
            if not exact.same_bits(np.asarray(function()), np.asarray(want)):
                wrong.append(name)
            done += 1
        return done, wrong

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(loop, range(THREADS)))
    print(f"{THREADS} threads, {SECONDS:g} s, {sum(done for done, _ in results)} calls")
    assert [wrong for _, wrong in results] == [[]] * THREADS
    assert all(done > 0 for done, _ in results)


POOL_SCRIPT = """
import concurrent.futures, os, sys
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np, jax, jaxquant as jq
rng = np.random.default_rng(0)
w, x = (rng.integers(0, 256, shape, np.uint8) for shape in ((300, 16, 144), (40, 16, 292)))
values = rng.standard_normal((1500, 256)).astype(np.float32)
f = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
q = jax.jit(jq.quantize)
want, records = np.asarray(f(w, x)), np.asarray(q(values))
def work(i):
    good = (np.asarray(q(values)) == records).all() if i % 4 == 0 else True
    return good and ((np.asarray(f(w, x)).view("u4") == want.view("u4")) | np.isnan(want)).all()
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    results = list(pool.map(work, range(int(sys.argv[1]))))
print(len(results), all(results))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
        {"ONE_CORE": "1"},
        {"ONE_CORE": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    ],
    ids=["default", "no eigen pool", "one core", "one core, no eigen pool", "eight devices"],
)
def test_the_pool_never_deadlocks_in_200_calls(environment):
    script = POOL_SCRIPT.replace("sys.argv[1]", "200")
    done = run(script, **environment)
    assert done.stdout.split() == ["200", "True"], done.stderr


def child_bits():
    """What a spawned process computes of a fixed block."""
    return np.asarray(jq.quantize(np.linspace(-1, 1, 256, dtype=np.float32)[None])).tobytes()


def test_spawn_after_use(tmp_path):
    want = exact.quantize(np.linspace(-1, 1, 256, dtype=np.float32)[None]).tobytes()
    script = tmp_path / "spawns.py"
    script.write_text(f"""
import multiprocessing, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_threads
if __name__ == "__main__":
    assert test_threads.child_bits()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(*(bits.hex() for bits in pool.starmap(test_threads.child_bits, [()] * 2)))
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [want.hex()] * 2, done.stderr


def test_fork_after_import():
    """Importing starts no thread and no client, so that a forked child may use JAX; forking later is JAX's own limit."""
    script = """
import os, threading
import numpy as np
import jaxquant as jq
assert threading.active_count() == 1
assert len(os.listdir("/proc/self/task")) <= int(os.environ["TASKS"]), os.listdir("/proc/self/task")
child = os.fork()
values = np.linspace(-1, 1, 256, dtype=np.float32)[None]
bits = bytes(np.asarray(jq.quantize(values))[0]).hex()
if child == 0:
    os.write(1, ("child " + bits + "\\n").encode())
    os._exit(0)
_, status = os.waitpid(child, 0)
print("parent", bits, status)
"""
    # NumPy's BLAS has threads of its own from its import on.
    plain = run("import os, jax, numpy; print(len(os.listdir('/proc/self/task')))")
    done = run(script, TASKS=plain.stdout.strip())
    want = exact.quantize(np.linspace(-1, 1, 256, dtype=np.float32)[None]).tobytes().hex()
    assert sorted(done.stdout.split()) == sorted(["child", want, "parent", want, "0"]), done.stderr


def test_a_second_client():
    """Programs and arrays of a client that is gone do not disturb those of the next."""
    script = """
import numpy as np, jax, jaxquant as jq
from jax.extend import backend
values = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
first = jq.quantize(values)
old = jax.devices()[0].client
backend.clear_backends()
second = jq.quantize(values)
assert jax.devices()[0].client is not old
assert first.devices() != second.devices()
print(bytes(np.asarray(first)) == bytes(np.asarray(second)), len(bytes(np.asarray(second))))
"""
    done = run(script)
    assert done.stdout.split() == ["True", "584"], done.stderr


def test_interpreter_ends_with_work_in_flight():
    """Results nobody waited for; a daemon thread that still calls JAX at exit aborts with JAX alone too."""
    script = """
import numpy as np, jax, jaxquant as jq
w, x = np.ones((4096, 16, 144), np.uint8), np.ones((64, 16, 292), np.uint8)
f = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
w, x = jax.device_put(w), jax.device_put(x)
f(w, x).block_until_ready()
results = [f(w, x) for _ in range(8)]
records = [jq.quantize(np.ones((20000, 256), np.float32)) for _ in range(8)]
print("ended")
"""
    for _ in range(3):
        done = run(script)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
