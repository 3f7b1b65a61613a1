"""The main job: every Q4_K tensor of a real model, multiplied exactly, checked and timed against ggml; then text.

``python -m jaxquant demo [--model PATH]``. The computation is the first twenty lines; the rest checks every
result and prints the table. A Gemma 3 model then writes (``jaxquant.examples.demo_text``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import jaxquant as jq
from jaxquant import gguf, records
from jaxquant.examples import demo_text
from jaxquant.examples.ggml import Ggml, race
from jaxquant.examples.model import ModelError, model_path
from jaxquant.selftest import exact_dot, exact_quantize

__all__ = ["ModelError", "cpu_threads", "matmul", "matvec", "model_path", "run"]

# One dot is uint8 [G, 144], uint8 [G, 292] -> float32 []; vmap makes it a matrix product.
gemv = jax.vmap(jq.quantized_dot, (0, None))  # [M, G, 144], [G, 292] -> [M]
gemm = jax.vmap(gemv, (None, 0))  # [M, G, 144], [N, G, 292] -> [N, M]


@jax.jit
def matvec(weights: jax.Array, x: jax.Array) -> jax.Array:
    """uint8 [M, G, 144], float32 [256 * G] -> float32 [M]."""
    return gemv(weights, jq.quantize(records.split(x)))


@jax.jit
def matmul(weights: jax.Array, x: jax.Array) -> jax.Array:
    """uint8 [M, G, 144], float32 [N, 256 * G] -> float32 [N, M]; x is quantized once for all rows."""
    return gemm(weights, jax.vmap(jq.quantize)(records.split(x)))


COLUMNS = 64
GGML_TOLERANCE = 1e-4  # ggml adds records in another order and with fused operations


class Timing(NamedTuple):
    """Median seconds of one call."""

    ours: float
    ggml: float  # NaN without ggml


class Row(NamedTuple):
    """What was found for one tensor."""

    name: str
    shape: tuple[int, int]
    nbytes: int
    one: Timing
    many: Timing
    results: int
    wrong: int  # results that differ from the exact reference in any bit
    difference: float  # largest, of ours from the dot without rounding, relative to its largest value
    ggml_difference: float


def q4_k_tensors(path: Path) -> dict[str, NDArray[np.uint8]]:
    """The Q4_K tensors of a GGUF file, uint8 [M, G, 144] each, mapped and not yet read.

    Raises:
        ModelError: the file cannot be read or holds no Q4_K tensor.
    """
    try:
        with gguf.open(path) as file:
            names = [name for name, info in file.tensors.items() if info.type == "Q4_K" and info.nbytes]
            tensors = {name: file.records(name) for name in names}
            types = sorted({info.type for info in file.tensors.values()})
    except (OSError, gguf.GGUFError) as error:
        raise ModelError(str(error)) from error
    if not tensors:
        raise ModelError(f"{path} has no Q4_K tensor; its tensors are {', '.join(types) or 'none'}")
    return {name: tensor.reshape(-1, *tensor.shape[-2:]) for name, tensor in tensors.items()}


def cpu_threads() -> int:
    """How many threads XLA computes with on CPU: the cores this process may use, or ``NPROC``."""
    return int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))


def run(path: Path) -> int:
    """Multiply, check, time and print; how many results are wrong, and tensors on which ggml disagrees.

    Raises:
        ModelError: there is no usable model at ``path``.
    """
    tensors = q4_k_tensors(path)
    try:
        ggml = Ggml()
    except (ImportError, OSError) as error:
        ggml = None
        print(f"not compared with ggml: {error}", file=sys.stderr)
    cpu = jax.devices("cpu")[0]
    status = jq.status()
    threads, load = cpu_threads(), os.getloadavg()[0]
    print(f"{path}: {len(tensors)} Q4_K tensors")
    print(
        f"jaxquant {status.cpu} ({status.isa}), ggml {ggml.version if ggml else 'missing'}, {threads} threads each"
    )
    if load > threads:
        print(f"the load average is {load:.1f} on {threads} cores: other programs disturb the timings")
    print()
    with np.errstate(invalid="ignore"):  # a damaged model may give infinities, and their difference
        rows = [_measure(name, tensors[name], ggml, cpu) for name in _progress(list(tensors))]
    nothing = jax.jit(lambda x: x + 1)
    scalar = jax.device_put(np.float32(0), cpu)
    _print_table(rows, race(lambda: nothing(scalar).block_until_ready())[0])
    print()
    try:
        demo_text.run(path)
    except ModelError as error:
        print(f"no text: {error}", file=sys.stderr)
    return sum(row.wrong + (row.ggml_difference > GGML_TOLERANCE) for row in rows)


def _measure(name: str, weights: NDArray[np.uint8], ggml: Ggml | None, cpu: jax.Device) -> Row:
    M, G, _ = weights.shape
    x = np.random.default_rng(0).standard_normal((COLUMNS, 256 * G), np.float32)
    w, columns, column = (jax.device_put(array, cpu) for array in (weights, x, x[0]))

    def time(function: Any, operand: jax.Array, values: NDArray[np.float32]) -> tuple[Timing, Any]:
        ours = lambda: function(w, operand).block_until_ready()  # noqa: E731
        if ggml is None:
            return Timing(*race(ours)), None
        with ggml.mul_mat(weights, values, cpu_threads()) as theirs:
            return Timing(*race(ours, theirs)), theirs.result()

    one, theirs_one = time(matvec, column, x[:1])
    many, theirs = time(matmul, columns, x)
    got, got_one = np.asarray(matmul(w, columns)), np.asarray(matvec(w, column))

    wrong, difference, ggml_difference, largest = 0, 0.0, 0.0, 0.0
    quantized = exact_quantize(x.reshape(COLUMNS, G, 256))
    for start in range(0, M, 1024):  # bounds the memory that the check takes
        part = slice(start, start + 1024)
        exact = exact_dot(weights[part], quantized)
        wrong += _different_bits(got[:, part], exact) + _different_bits(got_one[part], exact[0])
        unrounded = exact_dot(weights[part], quantized, np.float64)
        largest = max(largest, _largest(unrounded))
        difference = max(difference, _largest(got[:, part] - unrounded))
        if ggml:
            both = np.concatenate([theirs[:, part] - unrounded, theirs_one[:, part] - unrounded[:1]])
            ggml_difference = max(ggml_difference, _largest(both))
    scale = largest or 1.0
    return Row(
        name,
        (M, 256 * G),
        weights.nbytes,
        one,
        many,
        M * (COLUMNS + 1),
        wrong,
        difference / scale,
        ggml_difference / scale if ggml else np.nan,
    )


def _different_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> int:
    same = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return int((~same).sum())


def _largest(values: NDArray[np.float64]) -> float:
    return float(np.abs(values).max(initial=0, where=np.isfinite(values)))


def _progress(names: Sequence[str]) -> Iterator[str]:
    if sys.stderr.isatty():
        try:
            tqdm: Any = importlib.import_module("tqdm")
            yield from tqdm.tqdm(names, unit="tensor", leave=False)
            return
        except ImportError:
            pass
    yield from names


def _print_table(rows: Sequence[Row], call: float) -> None:
    width = max(len(row.name) for row in rows)
    print(
        f"{'':{width}}  {'':>12}  {'1 column':^30}  {f'{COLUMNS} columns':^23}  largest difference\n"
        f"{'tensor':{width}}  {'shape':>12}  {'ms':>7} {'GB/s':>6} {'ggml ms':>8} {'ratio':>6}"
        f"  {'ms':>7} {'ggml ms':>8} {'ratio':>6}  {'ours':>8} {'ggml':>8}"
    )
    for row in rows:
        (one, one_ggml), (many, many_ggml) = row.one, row.many
        print(
            f"{row.name:{width}}  {'{} x {}'.format(*row.shape):>12}"
            f"  {1e3 * one:7.3f} {row.nbytes / one / 1e9:6.2f} {1e3 * one_ggml:8.3f} {one_ggml / one:6.2f}"
            f"  {1e3 * many:7.3f} {1e3 * many_ggml:8.3f} {many_ggml / many:6.2f}"
            f"  {row.difference:8.1e} {row.ggml_difference:8.1e}"
        )
    disagreeing = sum(row.ggml_difference > GGML_TOLERANCE for row in rows)
    compared = not np.isnan(rows[0].ggml_difference)
    against = (
        f"ggml disagrees by more than {GGML_TOLERANCE:g} on {disagreeing}"
        if compared
        else "not compared with ggml"
    )
    results, wrong = sum(row.results for row in rows), sum(row.wrong for row in rows)
    print(f"""
ms: median of one call on float32 activations, quantizing them included; the two libraries take turns.
Of ours, {1e3 * call:.3f} ms is what JAX takes to call any compiled function.
GB/s: bytes of weights per second. Small weights stay in the CPU's cache between calls.
ratio: ggml's ms / ours.
largest difference: |result - exact| over {COLUMNS} columns / largest |exact| of the tensor, where exact is the same dot
of the same records with exact integers and float64 steps.
{results} results, {wrong} differ from the exact float32 reference in any bit.
{len(rows)} tensors, {against}.""")
