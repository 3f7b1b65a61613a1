#!/usr/bin/env python3
"""Build the native library with a sanitizer and drive every kernel of this CPU.

    python tests/native/sanitize.py address      (make asan)
    python tests/native/sanitize.py undefined    (make ubsan)
    python tests/native/sanitize.py thread       (make tsan)

Three programs: handlers.cpp (the XLA handlers between fences, odd shapes, many threads, any float
environment), tests/emulate/check_kernels.py (the kernels against the exact reference), and, but for thread,
tests of the operations in Python with the sanitizer's runtime preloaded. Any report ends it with status 1. Needs cmake and g++.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = {
    "address": "-fsanitize=address -fno-omit-frame-pointer",
    "undefined": "-fsanitize=undefined,float-cast-overflow -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so"}
OPTIONS = {
    # The interpreter and XLA leak by design, and end with memory in use.
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
}
PYTHON_TESTS = ["test_quantized_dot.py", "test_quantize.py", "test_native.py", "test_quantize_blocks.py"]
PYTHON_TESTS += ["-m", "arrays or not arrays", "-k"]
PYTHON_TESTS += ["contract or golden or number_of_records or beyond_the_caches or threads_agree"]


def build(sanitizer: str, directory: Path) -> None:
    configure = ["cmake", "-S", ROOT / "tests" / "native", "-B", directory, "-DCMAKE_BUILD_TYPE=None"]
    configure += [f"-DCMAKE_CXX_FLAGS=-O1 -g {FLAGS[sanitizer]}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    command = ["cmake", "--build", directory, "--parallel", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def check_kernels(sanitizer: str, directory: Path, isas: list[str]) -> int:
    compiler = directory / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ {FLAGS[sanitizer]} "$@" -Wno-error\n')
    compiler.chmod(0o755)
    command = [
        sys.executable,
        ROOT / "tests" / "emulate" / "check_kernels.py",
        "--records",
        "300",
        "--isa",
        *isas,
    ]
    return subprocess.run(command, env=os.environ | OPTIONS | {"CXX": str(compiler)}).returncode


def python_tests(sanitizer: str, directory: Path) -> int:
    """The operations in Python on the sanitized library, which a copy of the package holds."""
    package = directory / "python" / "jaxquant"
    shutil.copytree(ROOT / "jaxquant", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(directory / "ffi" / "libjaxquant.so", package)
    # An environment whose jaxquant is this copy. A plain line in a .pth file leads to the packages without running
    # the finder of an editable install among them.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"], check=True)
    site = next((directory / "venv" / "lib").glob("python*/site-packages"))
    (site / "copy.pth").write_text(f"{package.parent}\n{sysconfig.get_path('purelib')}\n")
    # The C++ runtime too: the sanitizer looks for what throws exceptions before XLA brings it.
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in (RUNTIMES[sanitizer], "libstdc++.so.6")
    ]
    environment = os.environ | OPTIONS | {"LD_PRELOAD": " ".join(libraries), "PYTHONDONTWRITEBYTECODE": "1"}
    python = directory / "venv" / "bin" / "python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PYTHON_TESTS]
    return subprocess.run(command, cwd=ROOT / "tests", env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizer", choices=FLAGS)
    parser.add_argument("--seconds", type=float, default=20, help="of random shapes (20)")
    parser.add_argument("--without-python", action="store_true", help="only the C++ programs")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{options.sanitizer}-") as name:
        directory = Path(name)
        build(options.sanitizer, directory)
        handlers = [directory / "handlers", str(options.seconds)]
        results = {"handlers": subprocess.run(handlers, env=os.environ | OPTIONS).returncode}
        isas = ["avx2", "portable"] if " avx2 " in Path("/proc/cpuinfo").read_text() else ["portable"]
        isas += ["avx512"] if " avx512bw " in Path("/proc/cpuinfo").read_text() else []
        results["check_kernels"] = check_kernels(options.sanitizer, directory, isas)
        # Under tsan the C++ program is the test: XLA's own pool is not instrumented, so that every task it
        # hands over would be reported as a race with whoever scheduled it.
        if not options.without_python and options.sanitizer != "thread":
            results["python"] = python_tests(options.sanitizer, directory)
    print(f"{options.sanitizer}: exit statuses {results}, in {time.monotonic() - start:.0f} s")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
