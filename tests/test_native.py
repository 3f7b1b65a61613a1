"""Choosing implementations, and the native library's manners."""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import subprocess
import sys

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxquant as jq
from jaxquant.ops import native

gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_status_names_what_runs():
    status = jq.status()
    assert status.library is not None
    assert status.problem is None
    assert status.isa == status.supported_isas[0]
    assert status.supported_isas[-1] == "portable"
    assert (status.backend, status.cpu, status.cuda, status.other_platforms) == (
        "auto",
        "native",
        "native",
        "fallback",
    )
    with jq.use_backend("fallback"):
        assert (jq.status().cpu, jq.status().cuda) == ("fallback", "fallback")


def test_a_jitted_function_follows_the_backend(rng):
    w, x = exact.random_q4k(rng, (2, 1)), exact.random_q8k(rng, (1,))
    f = jax.jit(lambda w: jax.vmap(jq.quantized_dot, (0, None))(w, x))
    assert native.FFI_TARGETS[1] in f.lower(w).as_text()
    with jq.use_backend("fallback"):
        assert "custom_call" not in f.lower(w).as_text()
    assert native.FFI_TARGETS[1] in f.lower(w).as_text()


def test_backends_nest_and_do_not_leak():
    with jq.use_backend("fallback"):
        with jq.use_backend("native"):
            assert native.selected_backend() == "native"
        assert native.selected_backend() == "fallback"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(native.selected_backend).result() == "auto"
    assert native.selected_backend() == "auto"


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match="backend is 'cuda', wanted one of auto, native, fallback"),
        jq.use_backend("cuda"),
    ):
        pass


def test_native_backend_says_where_there_is_no_kernel():
    with (
        jq.use_backend("native"),
        pytest.raises(NotImplementedError, match="there is no kernel for this platform"),
    ):
        jax.jit(jq.quantize).trace(jnp.zeros((1, 256), jnp.float32)).lower(lowering_platforms=("tpu",))


def test_unknown_isa():
    with pytest.raises(ValueError, match="instruction set 'mmx' is not to be had here; there are"):
        native.force_isa("mmx")


@pytest.mark.parametrize("isa", native.supported_isas())
def test_isa_from_the_environment(isa):
    result = run("import jaxquant; print(jaxquant.status().isa)", JAXQUANT_ISA=isa)
    assert result.stdout.split()[-1] == isa, result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("JAXQUANT_ISA", "JAXQUANT_ISA is 'nope', wanted one of"),
        ("JAXQUANT_BACKEND", "JAXQUANT_BACKEND is 'nope', wanted one of"),
    ],
)
def test_bad_environment(name, message):
    result = run("import jaxquant", **{name: "nope"})
    assert result.returncode != 0
    assert message in result.stderr


def test_backend_from_the_environment():
    script = "import jaxquant as jq, jax, jax.numpy as jnp; print('custom_call' in jax.jit(jq.quantize).lower(jnp.zeros((1, 256), jnp.float32)).as_text())"
    assert run(script, JAXQUANT_BACKEND="fallback").stdout.split()[-1] == "False"
    assert run(script, JAXQUANT_BACKEND="auto").stdout.split()[-1] == "True"


def test_empty_environment_is_none():
    result = run("import jaxquant; print(jaxquant.status().backend)", JAXQUANT_ISA="", JAXQUANT_BACKEND="")
    assert result.stdout.split()[-1] == "auto", result.stderr


def test_missing_library_is_one_warning_and_the_same_bits():
    script = """
import importlib.util, warnings
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jaxquant.libjaxquant" else found(name, *a)
import jax, jax.numpy as jnp, jaxquant as jq
assert jq.status().cpu == "fallback" and "without the compiled library" in jq.status().problem
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    r = jq.quantize(jnp.ones((1, 256), jnp.float32))
    jq.quantize(jnp.ones((2, 256), jnp.float32))
    jq.quantized_dot(jnp.zeros((1, 144), jnp.uint8), r)
assert [w.category for w in caught] == [RuntimeWarning], caught
assert "slow fallback" in str(caught[0].message)
print("bytes", bytes(r[0, :6]).hex())
"""
    assert run(script).stdout.split()[-1] == "040201bc8181"


def test_import_registers_nothing_twice_and_is_silent():
    result = run("import jaxquant, importlib; importlib.reload(jaxquant)")
    assert (result.returncode, result.stderr) == (0, "")


def test_caller_keeps_its_float_environment(rng):
    """Kernels turn flushing off for themselves; neither this thread nor XLA's may see it."""
    x = exact.blocks(rng, "subnormal_ds", 2000)
    np.testing.assert_array_equal(np.asarray(jq.quantize(x)), exact.quantize(x))
    assert exact.keeps_subnormals()
    flushed = jax.jit(lambda a: (jq.quantize(a), a[0] * np.float32(0.25)))(
        np.full((1, 256), 2e-38, np.float32)
    )[1]
    alone = jax.jit(lambda a: a[0] * np.float32(0.25))(np.full((1, 256), 2e-38, np.float32))
    np.testing.assert_array_equal(flushed, alone)


def test_threads_agree(rng):
    w, x = exact.random_q4k(rng, (257, 16)), exact.random_q8k(rng, (33, 16))
    want = exact.gemm(w, x).T
    values = exact.blocks(rng, "gaussian", 3000)
    records = exact.quantize(values)
    f = jax.jit(gemm)

    def work(_):
        return (
            exact.same_bits(np.asarray(f(w, x)), want) and (np.asarray(jq.quantize(values)) == records).all()
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))


@pytest.mark.parametrize(
    "environment",
    [
        {"NPROC": "1"},
        {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    ],
    ids=["one thread", "no eigen pool", "eight devices"],
)
def test_any_pool_gives_the_same_bits_and_no_deadlock(rng, tmp_path, environment):
    w, x = exact.random_q4k(rng, (300, 16)), exact.random_q8k(rng, (40, 16))
    np.savez(tmp_path / "operands.npz", w=w, x=x)
    script = f"""
import numpy as np, jax, jaxquant as jq
data = np.load({str(tmp_path / "operands.npz")!r})
f = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
results = [np.asarray(f(data["w"], data["x"])) for _ in range(30)]
assert all((r.view("u4") == results[0].view("u4")).all() for r in results)
np.save({str(tmp_path / "result.npy")!r}, results[0])
"""
    result = run(script, **environment)
    assert result.returncode == 0, result.stderr
    assert exact.same_bits(np.load(tmp_path / "result.npy"), exact.gemm(w, x).T)


def test_thread_count_does_not_change_bits(rng, tmp_path):
    x = exact.blocks(rng, "gaussian", 4099)
    np.save(tmp_path / "x.npy", x)
    script = f"import numpy as np, jaxquant as jq; np.save({str(tmp_path / 'r.npy')!r}, jq.quantize(np.load({str(tmp_path / 'x.npy')!r})))"
    assert run(script, NPROC="1").returncode == 0
    np.testing.assert_array_equal(np.load(tmp_path / "r.npy"), exact.quantize(x))
    np.testing.assert_array_equal(np.asarray(jq.quantize(x)), np.load(tmp_path / "r.npy"))


PANEL_ROWS = {"avx2": 16, "avx_vnni": 16, "avx512": 32, "avx512_vnni": 32}


@pytest.mark.parametrize("isa", [isa for isa in native.supported_isas() if isa in PANEL_ROWS])
def test_one_activation_of_three_weights_is_quantized_once_and_each_panel_packed_once(rng, isa):
    """Whatever the threads: rows are split between them at panels while there are panels enough."""
    rows, columns, records = 320, 8, 6
    weights = [exact.random_q4k(rng, (rows, records)) for _ in range(3)]
    x = exact.blocks(rng, "gaussian", columns * records).reshape(columns, records, 256)

    @jax.jit
    def three(weights, x):
        quantized = jax.vmap(jq.quantize)(x)
        return [gemm(w, quantized) for w in weights]

    hlo = three.lower(weights, x).compile().as_text()
    quantize, dot = (hlo.count(f'custom_call_target="{target}"') for target in native.FFI_TARGETS[:2])
    assert (quantize, dot) == (1, 3)
    packed = native._load().handle.jaxquant_packed_panels
    packed.restype = ctypes.c_int64
    with native.use_isa(isa):
        before = packed()
        results = jax.block_until_ready(three(weights, x))
        assert packed() - before == 3 * rows // PANEL_ROWS[isa]
    quantized = exact.quantize(x.reshape(-1, 256)).reshape(columns, records, 292)
    for w, got in zip(weights, results, strict=True):
        assert exact.same_bits(np.asarray(got), exact.gemm(w, quantized).T)
