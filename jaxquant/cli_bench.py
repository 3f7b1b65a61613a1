"""``python -m jaxquant bench``: a few seconds' measurement of the operations on this machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxquant as jq
from jaxquant.cli_files import progress, table

__all__ = ["run"]

ROWS = K = 4096
COLUMNS = 64
_SECONDS = 0.4  # of measurement for each work, after compilation


class _Work(NamedTuple):
    name: str
    unit: str
    amount: float
    """Of the unit, times 1e9, in one call."""
    call: Callable[[], Any]


def run(as_json: bool) -> int:
    """Exit code: 0."""
    works = _works()
    rows: list[dict[str, Any]] = []
    with closing(progress(works, "bench")) as steps:
        for work in steps:
            seconds = _median(work.call)
            rows.append(
                {
                    "work": work.name,
                    "microseconds": 1e6 * seconds,
                    "rate": work.amount / seconds / 1e9,
                    "unit": work.unit,
                }
            )
    device = jax.devices()[0]
    isa = jq.status().isa if device.platform == "cpu" else None
    if as_json:
        print(json.dumps({"device": device.device_kind, "isa": isa, "works": rows}, indent=2))
        return 0
    print(f"{device.device_kind}{f', kernels for {isa}' if isa else ''}; medians of one call inside jit")
    shown = [[r["work"], f"{r['microseconds']:,.0f} us", f"{r['rate']:.1f} {r['unit']}"] for r in rows]
    print("\n".join(table(shown, 1)))
    print("beside ggml and XLA, with method: make bench, in a clone of the repository")
    return 0


def _works() -> list[_Work]:
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 256, (ROWS, K // 256, 144), np.uint8)
    weights[..., :4] = np.array([0.01, 0.001], np.float16).view(np.uint8)
    w = jax.device_put(weights)
    x = jax.device_put(rng.standard_normal((COLUMNS, K), np.float32))
    matrix = jax.device_put(rng.standard_normal((ROWS, K), np.float32))
    matmul = jax.jit(jq.quantized_matmul)
    quantize = jax.jit(lambda x: jq.quantize(jq.records.split(x).reshape(-1, 256)))
    blocks = jax.jit(lambda x: jq.quantize_blocks(x, jq.DType.MXFP4))
    return [
        _Work(f"quantized_matmul {ROWS} x {K}, 1 column", "GB/s", w.nbytes, lambda: matmul(x[:1], w)),
        _Work(
            f"quantized_matmul {ROWS} x {K}, {COLUMNS} columns",
            "GFLOP/s",
            2 * ROWS * K * COLUMNS,
            lambda: matmul(x, w),
        ),
        _Work(
            f"quantize {matrix.nbytes / 2**20:g} MiB of float32",
            "GB/s",
            matrix.nbytes,
            lambda: quantize(matrix),
        ),
        _Work(
            f"quantize_blocks to MXFP4, {matrix.nbytes / 2**20:g} MiB",
            "GB/s",
            matrix.nbytes,
            lambda: blocks(matrix),
        ),
    ]


def _median(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    times: list[float] = []
    while sum(times) < _SECONDS or len(times) < 3:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
