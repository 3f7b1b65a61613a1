"""Lowering for other platforms, and serialized programs."""

from __future__ import annotations

import subprocess
import sys

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import run_on
from jax import export

import jaxquant as jq
from jaxquant.ops import native

gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))
CHECKS = [export.DisabledSafetyCheck.custom_call(target) for target in native.FFI_TARGETS]


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_lower_to_the_fallback(rng, platform):
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2, 2))
    text = jax.jit(gemm).trace(w, x).lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call" not in text
    text = (
        jax.jit(jq.quantize)
        .trace(jnp.zeros((2, 256), jnp.float32))
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    assert "custom_call" not in text


def test_cpu_lowers_to_the_published_targets(rng):
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2, 2))
    assert f"@{native.FFI_TARGETS[1]}(" in jax.jit(gemm).lower(w, x).as_text()
    values = jnp.zeros((2, 256), jnp.float32)
    assert f"@{native.FFI_TARGETS[0]}(" in jax.jit(jq.quantize).lower(values).as_text()


def test_one_module_for_several_platforms(rng):
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2, 2))
    program = export.export(jax.jit(gemm), platforms=["cpu", "tpu"], disabled_checks=CHECKS)(w, x)
    assert "stablehlo.case" in program.mlir_module()
    assert exact.same_bits(np.asarray(program.call(w, x)), exact.gemm(w, x).T)


@pytest.mark.parametrize("implementation", ["native", "fallback"])
def test_serialized_program_of_symbolic_sizes(rng, implementation):
    m, n, g = export.symbolic_shape("m, n, g")
    lhs = jax.ShapeDtypeStruct((m, g, 144), jnp.uint8)
    values = jax.ShapeDtypeStruct((n, g, 256), jnp.float32)

    def layer(w, values):
        return gemm(w, jax.vmap(jq.quantize)(values))

    with jq.use_backend(implementation):
        data = export.export(jax.jit(layer), disabled_checks=CHECKS)(lhs, values).serialize()
    program = export.deserialize(data)
    for rows, columns, records in ((1, 1, 1), (5, 3, 4), (2, 7, 3)):
        w = exact.random_q4k(rng, (rows, records))
        x = exact.blocks(rng, "gaussian", columns * records).reshape(columns, records, 256)
        got = np.asarray(program.call(w, x))
        assert exact.same_bits(got, exact.gemm(w, exact.quantize(x)).T)


def test_program_runs_in_a_process_that_only_imports(rng, tmp_path):
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2, 2))
    program = export.export(jax.jit(gemm), disabled_checks=CHECKS)(w, x)
    (tmp_path / "program").write_bytes(program.serialize())
    np.savez(tmp_path / "operands.npz", w=w, x=x)
    script = f"""
import pathlib, numpy as np, jax, jaxquant
folder = pathlib.Path({str(tmp_path)!r})
data = np.load(folder / "operands.npz")
program = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
np.save(folder / "result.npy", program.call(data["w"], data["x"]))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert exact.same_bits(np.load(tmp_path / "result.npy"), exact.gemm(w, x).T)


def test_persistent_cache_is_hit_by_a_second_process(tmp_path):
    script = f"""
import jax, jax.numpy as jnp, jaxquant as jq
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
f = jax.jit(jax.vmap(jq.quantized_dot, (0, None)))
f(jnp.zeros((3, 2, 144), jnp.uint8), jnp.zeros((2, 292), jnp.uint8)).block_until_ready()
print("hits", len(hits))
"""
    first, second = (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert "hits 0" in first
    assert "hits 0" not in second


def test_run_on_forces_what_it_says(rng):
    """The comparisons of this suite would be worthless if they compared a kernel with itself."""
    w, x = exact.random_q4k(rng, (3, 2)), exact.random_q8k(rng, (2, 2))
    with run_on("fallback"):
        assert "custom_call" not in jax.jit(lambda *a: gemm(*a)).lower(w, x).as_text()
    with run_on("portable"):
        assert native.FFI_TARGETS[1] in jax.jit(lambda *a: gemm(*a)).lower(w, x).as_text()
        assert native.status().isa == "portable"
