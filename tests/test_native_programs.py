"""The C++ programs around the handlers, and half a minute of fuzzing; `make fuzz` and `make asan` go further."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.toolchain

TESTS = Path(__file__).parent
needs_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None, reason="needs cmake and g++"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("native")
    configure = ["cmake", "-S", TESTS / "native", "-B", directory, "-DCMAKE_BUILD_TYPE=None"]
    configure += ["-DCMAKE_CXX_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
    build = ["cmake", "--build", directory, "--parallel", "2", "--target", "handlers", "fuzz_native"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return directory


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
def test_handlers_between_fences(programs):
    found = re.fullmatch(
        r"(\d+) instruction sets, (\d+) comparisons, (\d+) failures\n", run(programs / "handlers", 3)
    )
    assert int(found[1]) >= 1
    assert int(found[2]) > 2000
    assert int(found[3]) == 0


@needs_compiler
def test_fuzzing_the_kernels(programs):
    found = re.match(
        r"(\d+) inputs, \d+ bytes, \d+ s, no mismatch",
        run(programs / "fuzz_native", TESTS / "fuzz" / "corpus", 12),
    )
    assert int(found[1]) > 20


def test_fuzzing_files_and_records():
    pytest.importorskip("jaxquant.io")
    output = run(sys.executable, TESTS / "fuzz" / "fuzz_files.py", 12, "--seed", 20)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z ]+)", output)}
    for name in ("gguf read", "gguf refused", "safetensors read", "safetensors refused", "records"):
        assert counts[name] > 0, output
