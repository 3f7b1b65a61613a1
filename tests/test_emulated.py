"""The native kernels without JAX: compiled alone, between fences, and emulated where the CPU lacks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxquant.ops import native

TESTS = Path(__file__).parent
MISSING = 77

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernels with"),
]


def check_kernels(*arguments, project=TESTS.parent):
    script = project / "tests" / "emulate" / "check_kernels.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=1800)


def assert_all_checked(done, isa):
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(
        rf"^{isa}: (\d+) blocks .* (\d+) pairs of records .* 0 mismatches", done.stdout, re.MULTILINE
    )
    assert summary, done.stdout
    assert int(summary[1]) >= 1000
    assert int(summary[2]) >= 1_000_000


def test_kernels_of_this_cpu():
    isas = native.supported_isas() or ("portable",)  # without the library nothing names the others
    done = check_kernels("--isa", *isas, "--records", "1000")
    for isa in isas:
        assert_all_checked(done, isa)


@pytest.mark.exhaustive
def test_one_wrong_bit_is_found(tmp_path):
    shutil.copytree(TESTS.parent / "ffi", tmp_path / "ffi")
    shutil.copytree(TESTS / "emulate", tmp_path / "tests" / "emulate")
    shutil.copy(TESTS / "exact.py", tmp_path / "tests")
    kernels = tmp_path / "ffi" / "cpu" / "portable.cpp"
    right, wrong = "(scales.m >> (8 * b)) & 63", "(scales.m >> (8 * b)) & (b == 7 ? 31 : 63)"
    assert kernels.read_text().count(right) == 1
    kernels.write_text(kernels.read_text().replace(right, wrong))
    done = check_kernels("--isa", "portable", "--records", "16", project=tmp_path)
    assert done.returncode == 1
    assert "MISMATCH matmul legal bsum" in done.stdout
    assert "MISMATCH quantize" not in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ["avx512", "avx512_vnni", "avx_vnni", "neon_dotprod", "neon_i8mm"])
def test_kernels_of_other_cpus(isa):
    done = check_kernels("--isa", isa, "--records", "4000")
    if done.returncode == MISSING:
        pytest.skip(done.stderr)
    assert_all_checked(done, isa)
