#!/usr/bin/env python3
"""All fuzzing: the native kernels and the readers of files, for so many seconds each.

    python tests/fuzz/run.py 600     (make fuzz)

The native part is driven by libFuzzer under the address and undefined-behaviour sanitizers where clang++ is to
be had, else by its own mutator under g++'s. What libFuzzer learns beyond tests/fuzz/corpus goes to build/fuzz.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def native(seconds: str, build: Path) -> int:
    clang = shutil.which("clang++-19") or shutil.which("clang++")
    configure = ["cmake", "-S", HERE.parent / "native", "-B", build, f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DCMAKE_BUILD_TYPE=None"]
    if clang:
        flags = "-O1 -g -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -Wno-unknown-warning-option"
        configure += [
            f"-DCMAKE_CXX_COMPILER={clang}",
            "-DJAXQUANT_LIBFUZZER=ON",
            f"-DCMAKE_CXX_FLAGS={flags}",
        ]
    else:
        configure += ["-DCMAKE_CXX_FLAGS=-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        ["cmake", "--build", build, "--target", "fuzz_native"], check=True, stdout=subprocess.DEVNULL
    )
    program = build / "fuzz_native"
    if not clang:
        return subprocess.run([program, HERE / "corpus", seconds]).returncode
    learned = ROOT / "build" / "fuzz"
    learned.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-len_control=0",
        "-print_final_stats=1",
        f"-artifact_prefix={learned}/",
    ]
    return subprocess.run([program, learned, HERE / "corpus", *options]).returncode


def main() -> int:
    seconds = sys.argv[1] if len(sys.argv) > 1 else "600"
    files = subprocess.run([sys.executable, HERE / "fuzz_files.py", seconds]).returncode
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        kernels = native(seconds, Path(directory))
    print(f"fuzzing ended with {files} for files and {kernels} for kernels")
    return int(bool(files or kernels))


if __name__ == "__main__":
    sys.exit(main())
