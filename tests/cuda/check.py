#!/usr/bin/env python3
"""Check the CUDA kernels on an NVIDIA GPU and measure them: one script, under six minutes, no network.

    python3 tests/cuda/check.py            # what `make cuda-check` runs
    python3 tests/cuda/check.py --dry-run  # the same steps on the CPU, with tiny sizes and no CUDA library

Needs JAX with its CUDA plugin and nvcc; compute-sanitizer is used where it is. It builds the library for the
GPU at hand, holds the results to tests/exact.py bit for bit, runs memcheck and racecheck, and then measures
the kernels beside the machine's limits. The last thing printed is a table.

Exit status: 0 all right, 1 wrong bits or a failed step, 77 no GPU or no nvcc, and nothing was checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # where jaxquant is not installed

import exact
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PROJECT = Path(__file__).resolve().parent.parent.parent
MISSING = 77


class Sizes(NamedTuple):
    blocks: int  # quantized, of each kind
    pairs: int  # of records multiplied, for each number of columns
    rows: int
    records: int
    weights: int  # distinct ones that a measurement goes through
    dense: int  # the same, of dequantized weights, which are large
    square: int  # of the int8 product whose speed is the peak
    columns: tuple[int, ...]
    repeats: int


FULL = Sizes(7000, 100_000, 14336, 16, 33, 8, 8192, (1, 2, 4, 8, 16, 64, 512), 10)
SMALL = Sizes(20, 400, 40, 3, 2, 2, 64, (1, 8, 64), 1)


# The library


def build(folder: Path, capability: str) -> None:
    """Compile the library into ``folder``, where jaxquant finds it by an entry point."""
    include = [f"-I{PROJECT / 'ffi'}", "-isystem", jax.ffi.include_dir()]
    options = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-Xcompiler=-fPIC"]
    sources = [PROJECT / "ffi" / "cuda" / name for name in ("kernels.cu", "handlers.cpp")]
    library = folder / "libjaxquant_cuda.so"
    target = [f"-gencode=arch=compute_{capability},code=sm_{capability}"]
    subprocess.run(
        ["nvcc", "-shared", *options, *target, "-lineinfo", *include, *sources, "-o", library], check=True
    )
    information = folder / "jaxquant_cuda13-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxquant-cuda13\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[jaxquant.cuda]\nlibrary = built_for_check:library\n")
    (folder / "built_for_check.py").write_text(f"def library(): return {str(library)!r}\n")


def gpu() -> jax.Device | None:
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


# Exactness


def cases(sizes: Sizes) -> Iterator[tuple[str, str, tuple[np.ndarray, ...], np.ndarray, int]]:
    """A name, an operation, its operands, the bits that it must give, and how many records that checks."""
    rng = np.random.default_rng(5)
    for kind in (*exact.KINDS, *exact.POISON_KINDS):
        values = exact.blocks(rng, kind, sizes.blocks)
        yield f"quantize {kind}", "quantize", (values,), exact.quantize(values), sizes.blocks
    for columns in (*sizes.columns, 3, 5, 17, 65):
        for make in (exact.random_q8k, exact.random_illegal_q8k):
            records = 9
            rows = max(1, sizes.pairs // 2 // (records * columns))
            w = exact.random_q4k(rng, (rows, records))
            x = make(rng, (columns, records))
            yield f"gemm N={columns}", "gemm", (w, x), exact.gemm(w, x).T, rows * columns * records
    halves = np.arange(65536, dtype=np.uint16)[: sizes.pairs]
    w = np.tile(exact.random_q4k(rng, (1, 1)), (len(halves), 1, 1))
    w[:, 0, :2] = halves.view(np.uint8).reshape(-1, 2)
    x = exact.quantize(exact.blocks(rng, "gaussian", 1))[None]
    yield "every float16 d", "gemm", (w, x), exact.gemm(w, x).T, len(halves)
    for records in (0, 1, 4, 5, 130):
        w = exact.random_q4k(rng, (7, records))
        x = exact.random_q8k(rng, (4, records))
        yield f"G={records}", "gemm", (w, x), exact.gemm(w, x).T, 28 * records
    w, x = exact.random_q4k(rng, (5, 33, 6)), exact.random_q8k(rng, (5, 7, 6))
    want = np.stack([exact.gemm(a, b).T for a, b in zip(w, x, strict=True)])
    yield "batch", "batched", (w, x), want, 5 * 33 * 7 * 6
    yield "batch, records first", "records first", (w.swapaxes(1, 2), x.swapaxes(1, 2)), want, 5 * 33 * 7 * 6


def operations() -> dict[str, Callable[..., Any]]:
    import jaxquant as jq

    def gemm(axes: int) -> Callable[..., Any]:
        return jax.vmap(jax.vmap(jq.quantized_dot, (axes, None)), (None, axes))

    return {
        "quantize": jax.jit(jq.quantize),
        "gemm": jax.jit(gemm(0)),
        "batched": jax.jit(jax.vmap(gemm(0))),
        "records first": jax.jit(jax.vmap(gemm(1))),
    }


def check_bits(sizes: Sizes, device: jax.Device) -> int:
    """The number of cases whose bits are wrong."""
    run = operations()
    checked: dict[str, int] = {}
    wrong = 0
    for name, operation, operands, want, records in cases(sizes):
        got = np.asarray(run[operation](*(jax.device_put(operand, device) for operand in operands)))
        if not exact.same_bits(got, want):
            wrong += 1
            print(f"WRONG BITS: {name}, {[operand.shape for operand in operands]}", flush=True)
        checked[operation] = checked.get(operation, 0) + records
    for operation, records in checked.items():
        print(f"{operation}: {records} records compared with the CPU, bit for bit", flush=True)
    return wrong


def check_targets() -> bool:
    """Whether what runs is the kernels, and not the fallback compared with itself."""
    import jaxquant as jq

    lowered = operations()["gemm"].lower(jnp.zeros((2, 1, 144), jnp.uint8), jnp.zeros((2, 1, 292), jnp.uint8))
    return jq.FFI_TARGETS[1] in lowered.as_text()


def sanitize(tool: str, folder: Path) -> str:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "not run: no compute-sanitizer"
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--small"]
    done = subprocess.run([*command, "--built", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-4000:], flush=True)
        return f"FAILED, exit status {done.returncode}"
    return "clean"


# Measurements


def seconds(function: Callable[..., Any], *operands: Any, repeats: int) -> float:
    """The least time of a call, compiled and warm."""
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*operands))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*operands))
        best = min(best, time.perf_counter() - start)
    return best


def over(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """All weights in one program, each an operand of its own, each result used and none kept."""

    def run(weights: Any, x: Any) -> Any:
        return sum(product(w, x).astype(jnp.float32) for w in weights)

    return run


def scanned(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same in a scan over one array of all weights, whose slices XLA may copy before each call."""

    def run(weights: Any, x: Any) -> Any:
        def step(total: Any, w: Any) -> Any:
            return total + product(w, x), None

        return lax.scan(step, jnp.zeros(weights.shape[1], jnp.float32), weights)[0]

    return run


def random_weights(seed: int, sizes: Sizes) -> jax.Array:
    weights = jax.random.bits(jax.random.key(seed), (sizes.rows, sizes.records, 144), jnp.uint8)
    # d and dmin of moderate size, so that no infinity turns up.
    return weights.at[..., 1].set(0x1C).at[..., 3].set(0x1C)


def measure(sizes: Sizes, processors: int | None, clock_mhz: float | None) -> list[tuple[str, str, str]]:
    """Rows of the table: what, how fast, and of which limit that is how much."""
    import jaxquant as jq

    def gemv(w: Any, x: Any) -> Any:
        return jax.vmap(jq.quantized_dot, (0, None))(w, x)

    def gemm(w: Any, x: Any) -> Any:
        return jax.vmap(gemv, (None, 0))(w, x)

    def dense(w: Any, x: Any) -> Any:
        return x @ w.T

    def dequantized(w: Any, x: Any) -> Any:
        wide = jq.records.dequantize(w, jq.quant.q4_k).reshape(sizes.rows, -1)
        return x @ wide.astype(jnp.bfloat16).T

    def timed(function: Callable[..., Any], *operands: Any) -> float:
        return seconds(function, *operands, repeats=sizes.repeats)

    table = []
    weights = [random_weights(seed, sizes) for seed in range(sizes.weights)]
    size = sum(w.size for w in weights)
    words = jnp.zeros(size // 4, jnp.uint32)
    copy = 2 * size / timed(lambda a: a ^ np.uint32(1), words)
    del words
    table.append(("copy", f"{copy / 1e9:8.0f} GB/s", "read and written"))

    elements = sizes.records * 256
    values = jax.random.normal(jax.random.key(1), (max(sizes.columns), sizes.records, 256))
    x = jax.vmap(jq.quantize)(values)
    speed = size / timed(over(gemv), weights, x[0])
    table.append((f"GEMV {sizes.rows}x{elements}", f"{speed / 1e9:8.0f} GB/s", f"{speed / copy:.0%} of copy"))
    stacked = jnp.stack(weights)
    speed = size / timed(scanned(gemv), stacked, x[0])
    del stacked
    table.append(("  in a scan", f"{speed / 1e9:8.0f} GB/s", f"{speed / copy:.0%} of copy"))

    block_count = max(1, size // 1316)
    blocks = jax.random.normal(jax.random.key(2), (block_count, 256))
    moved = 1316 * block_count / timed(jq.quantize, blocks)
    del blocks
    table.append(("quantize", f"{moved / 1e9:8.0f} GB/s", f"{moved / copy:.0%} of copy"))

    square = jnp.ones((sizes.square, sizes.square), jnp.int8)

    def int8(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

    peak = 2 * sizes.square**3 / timed(int8, square, square)
    table.append(("int8 matrix product", f"{peak / 1e12:8.1f} TOP/s", "the peak, by cuBLAS"))
    if processors and clock_mhz:
        # 64 integer multiply-adds a clock and multiprocessor, each for 32 products.
        ceiling = 2 * 32 * 64 * processors * clock_mhz * 1e6
        table.append(("multiply-add ceiling", f"{ceiling / 1e12:8.1f} TOP/s", "one for each 32 products"))

    wide = [
        jax.random.normal(jax.random.key(seed), (sizes.rows, elements), jnp.bfloat16)
        for seed in range(sizes.dense)
    ]
    rows = values.reshape(-1, elements).astype(jnp.bfloat16)
    for columns in sizes.columns:
        work = 2 * sizes.rows * elements * columns
        ours = timed(over(gemm), weights, x[:columns]) / sizes.weights
        bf16 = timed(over(dense), wide, rows[:columns]) / sizes.dense
        fused = timed(over(dequantized), weights[: sizes.dense], rows[:columns]) / sizes.dense
        table.append(
            (
                f"GEMM N={columns}",
                f"{work / ours / 1e12:8.1f} TOP/s",
                f"{bf16 / ours:.2f} x cuBLAS bf16 ({bf16 * 1e6:.0f} us), {fused / ours:.2f} x XLA's dequantize + dot, "
                f"{work / ours / peak:.0%} of int8 peak, {ours * 1e6:.0f} us",
            )
        )
    return table


def ask_nvidia_smi(what: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    done = subprocess.run(
        [program, f"--query-gpu={what}", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def print_table(title: str, table: list[tuple[str, str, str]]) -> None:
    print(f"\n{title}")
    for row in table:
        print(f"  {row[0]:24} {row[1]:18} {row[2]}")


def check(sizes: Sizes, device: jax.Device, folder: Path) -> int:
    if not check_targets():
        print("cuda-check: the programs do not call the CUDA kernels")
        return 1
    table = [("bits", "right" if not (wrong := check_bits(sizes, device)) else f"{wrong} cases WRONG", "")]
    for tool in ("memcheck", "racecheck"):
        table.append((tool, sanitize(tool, folder), "compute-sanitizer, small shapes"))
    clock = ask_nvidia_smi("clocks.max.sm")
    table += measure(sizes, getattr(device, "core_count", None), float(clock) if clock else None)
    driver = ask_nvidia_smi("driver_version")
    print_table(f"{device.device_kind}, driver {driver}, jax {jax.__version__}", table)
    return 1 if wrong or any("FAILED" in row[1] for row in table) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and measure the CUDA kernels on this machine's GPU.")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU, with tiny sizes")
    parser.add_argument("--small", action="store_true", help="the bits only, on small shapes")
    parser.add_argument("--built", type=Path, help="where the library was built")
    options = parser.parse_args()

    if options.dry_run:
        device = jax.devices("cpu")[0]
        wrong = check_bits(SMALL, device)
        table = [
            ("bits", "right" if not wrong else f"{wrong} cases WRONG", "of the CPU"),
            *measure(SMALL, None, None),
        ]
        print_table("a dry run on the CPU: the times say nothing", table)
        return 1 if wrong else 0

    device = gpu()
    if device is None:
        print(f"cuda-check: JAX sees no NVIDIA GPU here, only {jax.default_backend()}; nothing was checked")
        return MISSING
    if options.built is None and shutil.which("nvcc") is None:
        print("cuda-check: no nvcc to build the library with; nothing was checked")
        return MISSING
    with tempfile.TemporaryDirectory(prefix="cuda-check-") as name:
        folder = options.built or Path(name)
        if options.built is None:
            build(folder, str(device.compute_capability).replace(".", ""))
        sys.path.insert(0, str(folder))
        if options.small:
            return 1 if not check_targets() or check_bits(SMALL, device) else 0
        return check(FULL, device, folder)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
