#!/usr/bin/env python3
"""Hold the native CPU kernels of one or more instruction sets to the exact reference, bit for bit.

    python3 tests/emulate/check_kernels.py --isa portable avx2
    python3 tests/emulate/check_kernels.py --isa avx512 avx512_vnni --records 100000
    python3 tests/emulate/check_kernels.py --isa neon_dotprod neon_i8mm

Compiles the kernels of ffi/cpu with the options of ffi/CMakeLists.txt around check_kernels.cpp, makes
cases with tests/exact.py and runs them: on this CPU where it has the instruction set, else AVX-512 under
run_avx512.py and NEON, cross-compiled, under QEMU. Needs NumPy and g++ (or what CXX names), nothing of JAX;
for NEON elsewhere than on ARM Debian's g++-aarch64-linux-gnu and qemu-user. No emulator at hand has AVX-VNNI.

Exit status: 0 all equal, 1 not, 77 when something needed is missing.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import exact

HERE = Path(__file__).resolve().parent
FFI = HERE.parent.parent / "ffi"

# Both sides of every tile, batch and panel size of the kernels.
ROWS = (1, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 65)
COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 64, 65, 70)
RECORDS = (1, 2, 3, 7, 8, 9, 16, 17, 18, 33, 57, 64, 65, 130)
FLOAT16_PATTERNS = 65536

MISSING = 77
PART_BYTES = 48 << 20  # of cases a run; the emulated machine keeps them in memory
COUNTS = ("cases", "records", "results", "of them NaN", "mismatches")
ALLOCATIONS = re.compile(r"^(\d+) heap allocations of all kernels$", re.MULTILINE)
LINE = re.compile(r"(?P<label>.+): " + ", ".join(rf"(\d+) {name}" for name in COUNTS))


class Case(NamedTuple):
    """``operands`` are the values to quantize, or w and x."""

    label: str
    rows: int
    columns: int
    records: int
    operands: tuple[np.ndarray, ...]
    expected: np.ndarray

    def encoded(self) -> bytes:
        shape = np.array([self.rows, self.columns, self.records], "<i8").tobytes()
        arrays = b"".join(a.tobytes() for a in (*self.operands, self.expected))
        return self.label.encode().ljust(40, b"\0") + shape + arrays

    def pairs(self) -> int:
        return self.rows * self.columns * self.records


def quantize_cases(rng: np.random.Generator, records: int) -> Iterator[Case]:
    kinds = (*exact.KINDS, *exact.POISON_KINDS)
    share = -(-records // (len(kinds) + 1))
    for kind in kinds:
        yield from _quantize_case(f"quantize {kind}", exact.blocks(rng, kind, share))
    # Blocks that are quantized together share a vector: neighbours of any kind.
    every = [exact.blocks(rng, kind, -(-share // len(kinds))) for kind in kinds]
    yield from _quantize_case("quantize mixed", rng.permutation(np.concatenate(every)))


def _quantize_case(label: str, values: np.ndarray) -> Iterator[Case]:
    for part in np.array_split(values, -(-len(values) // 500)):
        yield Case(label, 0, 0, len(part), (part,), exact.quantize(part))


def matmul_cases(rng: np.random.Generator, records: int) -> Iterator[Case]:
    """Cases with ``records`` weight records, but at least every extent once."""
    few = list(zip(ROWS, itertools.cycle(rng.permutation(COLUMNS)), rng.permutation(RECORDS), strict=False))
    few += [(1, 1, 0), (9, 5, 0), (9, 65, 17), (65, 70, 130)]
    grid = [
        (m, n, RECORDS[(3 * i + 5 * j) % len(RECORDS)])
        for (i, m), (j, n) in itertools.product(enumerate(ROWS), enumerate(COLUMNS))
    ]
    for label, activations in (("legal", exact.random_q8k), ("illegal", exact.random_illegal_q8k)):
        yield from (_random_case(rng, f"matmul {label} bsum", *map(int, s), activations) for s in few)
        wanted = records // 2 - sum(m * g for m, _, g in few)
        while wanted > 0:
            for m, n, g in rng.permutation(grid).tolist():
                if wanted > 0:
                    yield _random_case(rng, f"matmul {label} bsum", m, n, g, activations)
                wanted -= m * g
    for m, n, g in itertools.product((1, 9, 33), (1, 9), (3, 9)):
        yield _extreme_case(rng, m, n, g)
    for m, n, g in itertools.product((5, 9, 33), (9, 65), (1, 3, 17)):
        yield _zero_case(rng, m, n, g)
    # Results of one record each, so that no pattern hides behind the NaN of another.
    scales = exact.random_q4k(rng, (min(records, FLOAT16_PATTERNS), 1), finite=0)
    for w in np.array_split(scales, -(-len(scales) // 4096)):
        yield _matmul_case("matmul scales", w, _ordinary_columns(rng, exact.random_q8k(rng, (9, 1))))


def _matmul_case(label: str, w: np.ndarray, x: np.ndarray) -> Case:
    return Case(label, len(w), len(x), w.shape[1], (w, x), exact.gemm(w, x))


def _random_case(rng: np.random.Generator, label: str, m: int, n: int, g: int, activations) -> Case:
    """Any scales in a quarter of the rows and columns, elsewhere finite ones: NaN would hide the rest."""
    w, x = exact.random_q4k(rng, (m, g), finite=0), activations(rng, (n, g))
    tame_rows, tame_columns = ((np.arange(k) + rng.integers(4)) % 4 != 0 for k in (m, n))
    w[tame_rows] = _finite_rows(w[tame_rows])
    x[tame_columns] = _ordinary_columns(rng, x[tame_columns])
    return _matmul_case(label, w, x)


def _extreme_case(rng: np.random.Generator, m: int, n: int, g: int) -> Case:
    """The greatest sums there are: nothing may saturate or wrap."""
    w, q = exact.random_q4k(rng, (m, g)), rng.choice([-128, 127], (n, g, 1)) * np.ones(256, np.int64)
    w[..., 4:16] = 255
    w[..., 16:] = rng.choice(np.array([0xFF, 0xFF, 0x0F, 0xF0], np.uint8), (m, g, 1))
    ends = rng.choice([-32768, 32767], (n, g, 1)) * np.ones(16, np.int64)
    bsum = np.where(rng.random((n, g, 1)) < 0.5, ends, q.reshape(n, g, 16, 16).sum(-1))
    x = exact.encode_q8k(np.ones((n, g), np.float32), q, bsum)
    return _matmul_case("matmul extremes", _finite_rows(w), _ordinary_columns(rng, x))


def _zero_case(rng: np.random.Generator, m: int, n: int, g: int) -> Case:
    """Zeros of every sign: sums of -0 alone, which no initial +0 may join, and differences of zeros."""
    w, q = exact.random_q4k(rng, (m, g)), rng.integers(-128, 0, (n, g, 256))
    w[..., 1] = 0x3C  # d from 1 to 1.25
    w[..., 2:4] = 0
    w[1::2, :, [1, 3]] |= rng.choice(np.array([0, 0x80], np.uint8), (m // 2, g, 2))
    q[1::3] = 0
    negative = np.where(np.arange(n)[:, None] % 2 == 0, rng.random((n, 1)) < 0.5, rng.random((n, g)) < 0.5)
    x = exact.encode_q8k(np.where(negative, np.float32(-0.0), np.float32(0)), q)
    return _matmul_case("matmul zeros", w, x)


def _finite_rows(w: np.ndarray) -> np.ndarray:
    w[..., [1, 3]] &= 0xBF  # d and dmin below 2
    return w


def _ordinary_columns(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    shape = x.shape[:-1]
    magnitude = rng.integers(115 << 23, 135 << 23, shape, np.uint32)
    bits = magnitude | (rng.integers(0, 2, shape, np.uint32) << np.uint32(31))
    x[..., :4] = bits.astype("<u4")[..., None].view(np.uint8)
    return x


X86 = ("avx512_vnni", "avx512", "avx_vnni", "avx2")
ARM = ("neon_i8mm", "neon_dotprod")
ON_ARM = platform.machine() in ("aarch64", "arm64")
ON_X86 = platform.machine() in ("x86_64", "AMD64")
CROSS_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max")


class Program:
    """check_kernels.cpp with the kernels of one architecture, and how it runs."""

    def __init__(self, directory: Path, cpu: str, limit: float, *, arm: bool) -> None:
        self.directory = directory
        self.arm = arm
        self.cross = arm and not ON_ARM
        self.emulator: list[str | Path] = [sys.executable, HERE / "run_avx512.py", "--verbose", "--cpu", cpu]
        self.emulator += ["--limit", f"{limit:g}", "--memory", "512"]
        compiler = CROSS_COMPILER if self.cross else os.environ.get("CXX", "g++")
        self.compiler = [compiler, "-I", FFI]
        self.objects = self._compile()
        self.native = self._link("native", *(("-static",) if self.cross else ()))
        self.static: Path | None = None

    def _compile(self) -> list[Path]:
        cmake = (FFI / "CMakeLists.txt").read_text()
        standard = "-std=c++" + _setting(cmake, r"CMAKE_CXX_STANDARD (\d+)")
        options = [
            standard,
            _setting(cmake, r'CMAKE_CXX_FLAGS_RELEASE "(.*?)"'),
            *_setting(cmake, r"target_compile_options\(jaxquant PRIVATE (.*?)\)").split(),
            "-fPIC",
        ]
        # This one must start on any CPU, to say that it lacks something.
        sources = {HERE / "check_kernels.cpp": [standard, "-O2", "-Wall", "-Wextra", "-Werror"]}
        for isa in ARM if self.arm else X86 if ON_X86 else ():
            properties = rf'cpu/{isa}\.cpp\s+PROPERTIES\s+COMPILE_OPTIONS\s+"(.*?)"'
            sources[FFI / "cpu" / f"{isa}.cpp"] = options + _setting(cmake, properties).split(";")
        sources |= {FFI / "cpu" / "dispatch.cpp": options, FFI / "cpu" / "portable.cpp": options}

        def compile_one(source: Path) -> Path:
            target = self.directory / f"{source.stem}.o"
            subprocess.run([*self.compiler, *sources[source], "-c", source, "-o", target], check=True)
            return target

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(compile_one, sources))

    def _link(self, name: str, *options: str) -> Path:
        program = self.directory / name
        counted = "-Wl,--wrap=malloc,--wrap=aligned_alloc"
        subprocess.run([*self.compiler, *self.objects, counted, *options, "-o", program], check=True)
        return program

    def run(self, isa: str, cases: Path) -> tuple[str, subprocess.CompletedProcess[str]]:
        """Where it ran, and what came of it."""
        if self.cross:
            done = subprocess.run([*ARM_EMULATOR, self.native, isa, cases], stdout=subprocess.PIPE, text=True)
            return "an emulated one", done
        if self.static is None:
            done = subprocess.run([self.native, isa, cases], stdout=subprocess.PIPE, text=True)
            if done.returncode != MISSING or isa not in ("avx512", "avx512_vnni"):
                return "this CPU", done
            self.static = self._link("static", "-static")
        command = [*self.emulator, "--file", cases, self.static, isa, f"/{cases.name}"]
        return "an emulated one", subprocess.run(command, stdout=subprocess.PIPE, text=True)


def _setting(text: str, pattern: str) -> str:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern!r} in CMakeLists.txt: {found}"
    return found[0]


def parts(cases: Iterator[Case], path: Path) -> Iterator[list[Case]]:
    """Write the cases to ``path``, as many at a time as fit a run."""
    waiting: list[Case] = []
    size = 0
    with path.open("wb") as file:
        for case in cases:
            size += file.write(case.encoded())
            waiting.append(case._replace(operands=(), expected=np.empty(0)))
            if size >= PART_BYTES:
                file.flush()
                yield waiting
                waiting, size = [], 0
                file.seek(0)
                file.truncate()
    if waiting:
        yield waiting


def check(program: Program, isa: str, records: int) -> int:
    rng = np.random.default_rng(20)
    cases = itertools.chain(matmul_cases(rng, records), quantize_cases(rng, records))
    path = program.directory / "cases"
    totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    blocks = pairs = 0
    seconds = 0.0
    where = ""
    allocations = 0
    for part in parts(cases, path):
        start = time.monotonic()
        where, done = program.run(isa, path)
        seconds += time.monotonic() - start
        if done.returncode == MISSING:
            return MISSING
        if done.returncode != 0:
            print(f"{done.stdout}{isa}: check_kernels ended with {done.returncode}")
            return 1
        allocations = max(allocations, int(ALLOCATIONS.findall(done.stdout)[0]))
        reported = 0
        for match in map(LINE.fullmatch, done.stdout.splitlines()):
            if match:
                counts = dict(zip(COUNTS, map(int, match.groups()[1:]), strict=True))
                totals[match["label"]].update(counts)
                reported += counts["cases"]
        assert reported == len(part), f"{reported} cases of {len(part)} were checked"
        pairs += sum(case.pairs() for case in part)
        blocks += sum(case.records for case in part if case.rows == 0)
    for label, counts in totals.items():
        print(f"{isa}: {label}: " + ", ".join(f"{counts[name]} {name}" for name in COUNTS))
    mismatches = sum(counts["mismatches"] for counts in totals.values())
    assert blocks + pairs == sum(counts["records"] for counts in totals.values())
    print(
        f"{isa}: {blocks} blocks quantized in 3 ways, {pairs} pairs of records multiplied in 3 ways, "
        f"{mismatches} mismatches, at most {allocations} heap allocation a run, on {where} in {seconds:.0f} s"
    )
    return int(mismatches > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", nargs="+", choices=("portable", *X86, *ARM), required=True)
    parser.add_argument(
        "--records",
        type=int,
        default=3000,
        help="how many blocks to quantize, and weight records to multiply with up to 70 columns (3000); "
        "from 65536 on they hold every d and every dmin",
    )
    parser.add_argument("--cpu", default="corei7_icelake_u", help="the model to emulate, of run_avx512.py")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one emulated run (600)")
    options = parser.parse_args()
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        print("check_kernels: no C++ compiler", file=sys.stderr)
        return MISSING
    with tempfile.TemporaryDirectory(prefix="kernels-") as directory:
        programs: dict[bool, Program] = {}
        results = set()
        for isa in options.isa:
            arm = isa in ARM or ON_ARM
            if (
                arm
                and not ON_ARM
                and (missing := [t for t in (CROSS_COMPILER, ARM_EMULATOR[0]) if not shutil.which(t)])
            ):
                print(
                    f"check_kernels: {isa} not checked, there is no {' and no '.join(missing)}",
                    file=sys.stderr,
                )
                results.add(MISSING)
                continue
            if arm not in programs:
                folder = Path(directory) / ("arm" if arm else "x86")
                folder.mkdir()
                programs[arm] = Program(folder, options.cpu, options.limit, arm=arm)
            results.add(check(programs[arm], isa, options.records))
        return 1 if 1 in results else max(results)


if __name__ == "__main__":
    sys.exit(main())
