"""Lowering for NVIDIA GPUs, finding the CUDA library, and what nvcc makes of the kernels; none of it runs on a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxquant as jq
from jaxquant.ops import native

PROJECT = Path(__file__).parent.parent
CUDA = PROJECT / "ffi" / "cuda"
ARCHITECTURE = 90

QUANTIZE, DOT = native.FFI_TARGETS[:2]
CHECKS = [export.DisabledSafetyCheck.custom_call(target) for target in (QUANTIZE, DOT)]
gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))


def layer(w, values):
    return gemm(w, jax.vmap(jq.quantize)(values))


@pytest.fixture
def operands(rng):
    return exact.random_q4k(rng, (3, 2)), exact.blocks(rng, "gaussian", 4).reshape(2, 2, 256)


# Lowering


def calls(text):
    return re.findall(r"custom_call @(jaxquant\w+)\(", text)


def test_lowering_for_cuda_names_the_targets(operands):
    text = jax.jit(layer).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == [QUANTIZE, DOT]
    assert "dot_general" not in text


def test_lowering_for_cuda_follows_the_backend(operands):
    with jq.use_backend("fallback"):
        text = jax.jit(layer).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == []
    with jq.use_backend("native"):
        text = jax.jit(layer).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == [QUANTIZE, DOT]


def test_a_program_for_cuda_alone(operands):
    program = export.export(jax.jit(layer), platforms=["cuda"], disabled_checks=CHECKS)(*operands)
    again = export.deserialize(program.serialize())
    assert again.platforms == ("cuda",)
    assert calls(again.mlir_module()) == [QUANTIZE, DOT]


def test_a_program_for_cpu_and_cuda_runs_here(operands):
    w, values = operands
    program = export.export(jax.jit(layer), platforms=["cpu", "cuda", "tpu"], disabled_checks=CHECKS)(
        *operands
    )
    assert calls(program.mlir_module()).count(DOT) == 2
    assert exact.same_bits(np.asarray(program.call(*operands)), exact.gemm(w, exact.quantize(values)).T)


def test_symbolic_sizes_for_cuda():
    m, n, g = export.symbolic_shape("m, n, g")
    shapes = (
        jax.ShapeDtypeStruct((m, g, 144), jnp.uint8),
        jax.ShapeDtypeStruct((n, g, 256), jnp.float32),
    )
    program = export.export(jax.jit(layer), platforms=["cuda"], disabled_checks=CHECKS)(*shapes)
    assert calls(program.mlir_module()) == [QUANTIZE, DOT]


# Finding the library


def run(script, *paths):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


NO_LIBRARY = """
import importlib.metadata, importlib.util
found, entries = importlib.util.find_spec, importlib.metadata.entry_points
importlib.util.find_spec = lambda name, *a: None if name == "jaxquant.libjaxquant_cuda" else found(name, *a)
importlib.metadata.entry_points = lambda **k: () if k.get("group") == "jaxquant.cuda" else entries(**k)
"""


def test_a_gpu_without_the_library_is_one_warning_and_the_fallback():
    script = (
        NO_LIBRARY
        + """
import warnings
import jax, jax.numpy as jnp, jaxquant as jq
from jaxquant.ops import native
native._has_cuda_device = lambda: True
def text():
    return jax.jit(lambda x: jq.quantize(x)).trace(jnp.ones((1, 256), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "custom_call" not in text()
    assert "custom_call" not in text()
assert [w.category for w in caught] == [RuntimeWarning], caught
message = str(caught[0].message)
assert "slow fallback on CUDA" in message and "pip install jaxquant[cuda13]" in message, message
assert jq.status().cuda == "fallback" and jq.status().cpu == "native"
try:
    with jq.use_backend("native"):
        text()
except NotImplementedError as error:
    assert "pip install jaxquant[cuda13]" in str(error)
else:
    raise AssertionError("native was forced and not refused")
print("done")
"""
    )
    assert run(script) == ["done"]


def test_without_a_gpu_the_library_is_not_missed():
    script = (
        NO_LIBRARY
        + """
import jax, jax.numpy as jnp, jaxquant as jq
from jaxquant.ops import native
native._has_cuda_device = lambda: False
lowered = jax.jit(jq.quantize).trace(jnp.ones((1, 256), jnp.float32)).lower(lowering_platforms=("cuda",))
print(native.FFI_TARGETS[0] in lowered.as_text(), jq.status().cuda, jq.status().cuda_library)
"""
    )
    assert run(script) == ["True", "native", "None"]


def test_the_library_is_found_by_its_entry_point(tmp_path):
    """Any library with the handlers will do to be found; that of the CPU is at hand."""
    information = tmp_path / "jaxquant_cuda13-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxquant-cuda13\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[jaxquant.cuda]\nlibrary = stand_in:library\n")
    (tmp_path / "stand_in.py").write_text(f"def library(): return {native.status().library!r}\n")
    script = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jaxquant.libjaxquant_cuda" else found(name, *a)
import jaxquant as jq
status = jq.status()
print(status.cuda_library == status.library, status.cuda_problem, status.cuda)
"""
    assert run(script, tmp_path) == ["True", "None", "native"]


def test_a_library_that_does_not_load_is_a_problem_not_an_error(tmp_path):
    information = tmp_path / "jaxquant_cuda13-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxquant-cuda13\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[jaxquant.cuda]\nlibrary = stand_in:library\n")
    (tmp_path / "stand_in.py").write_text("def library(): return '/nowhere/libjaxquant_cuda.so'\n")
    script = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jaxquant.libjaxquant_cuda" else found(name, *a)
import jaxquant as jq
print("/nowhere/libjaxquant_cuda.so" in jq.status().cuda_problem)
"""
    assert run(script, tmp_path) == ["True"]


# What nvcc makes of the kernels


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels compiled with the options of ffi/cuda/CMakeLists.txt, and what ptxas says of them."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc to compile the CUDA kernels with")
    text = (CUDA / "CMakeLists.txt").read_text()
    options = re.search(r"COMPILE_LANGUAGE:CUDA>:(.*?)>\)", text, re.DOTALL)[1].split()
    out = tmp_path_factory.mktemp("cuda") / "kernels.o"
    command = [nvcc, "-std=c++17", "-O3", *options, f"-I{PROJECT / 'ffi'}", "-gencode"]
    command += [f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}", "-c", CUDA / "kernels.cu", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out, done.stderr + done.stdout


@pytest.mark.toolchain
def test_nvcc_compiles_without_warnings_or_spills(compiled):
    _, report = compiled
    assert "warning" not in report
    assert report.count("Compiling entry function") == 10
    assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report) == [("0", "0")] * 10
    assert "-fmad=false" in (CUDA / "CMakeLists.txt").read_text()


@pytest.mark.toolchain
def test_handlers_compile_without_warnings(tmp_path, compiled):
    command = ["nvcc", "-std=c++17", "-Xcompiler=-Wall,-Wextra,-Werror", f"-I{PROJECT / 'ffi'}"]
    command += ["-isystem", jax.ffi.include_dir(), "-c", CUDA / "handlers.cpp", "-o", tmp_path / "handlers.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def instructions(cubin):
    """The SASS of each kernel."""
    cuobjdump = shutil.which("cuobjdump") or next(
        (str(p) for path in sys.path for p in Path(path).glob("nvidia/cu13/bin/cuobjdump")), None
    )
    if cuobjdump is None:
        pytest.skip("no cuobjdump to disassemble the CUDA kernels with")
    # It calls nvdisasm, which lies beside it.
    path = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [cuobjdump, "-sass", cubin],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        check=True,
    )
    kernels = {}
    for part in done.stdout.split("Function : ")[1:]:
        kernels[part.split()[0]] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", part)
    assert len(kernels) == 10
    return kernels


@pytest.mark.toolchain
def test_instructions_of_the_kernels(compiled):
    kernels = instructions(compiled[0])
    for name, code in kernels.items():
        opcodes = {instruction.split(".")[0] for instruction in code}
        assert "FMUL" in opcodes, name
        # IEEE division is made of fused steps, whose result is correctly rounded: in the other kernels, which
        # do not divide, nothing may be fused, and subnormals are never flushed.
        if "quantize" not in name:
            assert "FFMA" not in opcodes, name
            assert "FADD" in opcodes, name
            assert not [i for i in code if "FTZ" in i and i.startswith(("FMUL", "FADD"))], name
        if "dot_kernel" in name:
            assert "IDP" in opcodes, name  # dp4a
        if "matmul_kernel" in name:
            assert "IMMA.16832.S8.S8" in code, name
            assert "IMMA.16816.U8.U8" in code, name
            assert "IMMA.16816.U8.S8" in code, name
            assert "LDGSTS" in opcodes, name


@pytest.mark.toolchain
def test_products_of_quantize_are_not_fused(compiled):
    """Each value is multiplied and then rounded, with nothing added in between."""
    for name, code in instructions(compiled[0]).items():
        if "quantize" in name:
            multiplied = [i for i in code if i == "FMUL"]  # not FMUL.FTZ
            rounded = [i for i in code if i.startswith(("F2I", "FRND"))]
            assert len(multiplied) >= 8, name
            assert len(rounded) == 8, name


# The check on a GPU


def check(*arguments):
    script = PROJECT / "tests" / "cuda" / "check.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env=environment
    )


def test_check_says_that_there_is_no_gpu():
    done = check()
    assert done.returncode == 77
    assert "no NVIDIA GPU here" in done.stdout
    assert "nothing was checked" in done.stdout


@pytest.mark.toolchain
def test_check_runs_dry():
    done = check("--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    table = done.stdout.partition("a dry run")[2]
    assert re.findall(r"^  (GEMM N=\d+) +\d", table, re.MULTILINE) == [f"GEMM N={n}" for n in (1, 8, 64)]
    assert "GEMV 40x768" in table
