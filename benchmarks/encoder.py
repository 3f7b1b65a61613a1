"""Error of the Q4_K encoder beside ggml's and rounding to nearest: three kinds of data, then a model's ffn_down.

    python benchmarks/encoder.py [--model PATH]

RMSE counts every weight alike, weighted RMSE by one random importance per column, which both encoders are
given. Errors are relative to ggml's; below 1 is better. Times are of one thread, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import jaxquant as jq
from jaxquant import gguf
from jaxquant.examples.ggml import Ggml

F32 = NDArray[np.float32]
ROWS, COLUMNS = 512, 2048


def nearest(weights: F32) -> NDArray[np.uint8]:
    """Each sub-block's range in 15 steps, both numbers rounded to the record's grid, and no search."""
    x = weights.reshape(-1, 8, 32)
    least = np.minimum(x.min(-1), 0)
    numbers = (x.max(-1) - least) / 15, -least
    d, dmin = ((values.max(-1) / 63).astype(np.float16) for values in numbers)
    scales = [half.astype(np.float32)[:, None] for half in (d, dmin)]
    with np.errstate(all="ignore"):
        sc, m = (
            np.nan_to_num(np.rint(values / scale)).clip(0, 63)
            for values, scale in zip(numbers, scales, strict=True)
        )
        step, offset = scales[0] * sc, scales[1] * m
        q = np.nan_to_num(np.rint((x + offset[..., None]) / step[..., None])).clip(0, 15)
    bytes_ = [values.astype(np.uint8) for values in (sc, m, q.reshape(-1, 256))]
    records = jq.records.pack(jq.records.Q4K(d, dmin, *bytes_), jq.quant.q4_k)
    return np.asarray(records).reshape(len(weights), -1, 144)


def data(model: Path | None) -> Iterator[tuple[str, F32]]:
    rng = np.random.default_rng(0)
    shape = ROWS, COLUMNS
    yield "gaussian", rng.normal(0, 0.02, shape).astype(np.float32)
    yield "Student's t, 3 degrees", (0.02 * rng.standard_t(3, shape)).astype(np.float32)
    yield "Laplace", rng.laplace(0, 0.02, shape).astype(np.float32)
    if model:
        with gguf.open(model) as file:
            for name, info in file.tensors.items():
                if name.endswith("ffn_down.weight"):
                    yield f"{name} ({info.type})", file.array(name)


def rmse(weights: F32, records: NDArray[np.uint8], importance: F32) -> float:
    decoded = jq.records.dequantize(records, jq.quant.q4_k).reshape(weights.shape)
    squares = (decoded.astype(np.float64) - weights) ** 2
    return float(np.sqrt(np.average(squares.mean(axis=0), weights=importance)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="a GGUF file")
    model = parser.parse_args().model
    ggml = Ggml()
    print(f"{'':32} {'RMSE / ggml':>20} {'weighted / ggml':>20} {'Mweights/s':>15}")
    print(f"{'weights':32} {'ours':>10} {'nearest':>9} {'ours':>10} {'nearest':>9} {'ours':>7} {'ggml':>7}")
    for name, weights in data(model):
        importance = np.random.default_rng(1).exponential(size=weights.shape[1]).astype(np.float32)
        alike = np.ones_like(importance)
        columns, speeds = [], []
        simple = nearest(weights)
        for given, factors in ((None, alike), (importance, importance)):
            start = time.perf_counter()
            ours = jq.records.encode_q4_k(weights, given)
            middle = time.perf_counter()
            theirs = ggml.encode_q4_k(weights, given)
            end = time.perf_counter()
            jq.records.validate_records(ours, jq.quant.q4_k)
            scale = rmse(weights, theirs, factors) or np.nan  # 0: the weights came from Q4_K, unchanged
            columns += [rmse(weights, records, factors) / scale for records in (ours, simple)]
            speeds.append((weights.size / (middle - start) / 1e6, weights.size / (end - middle) / 1e6))
        one, two, three, four = columns
        print(
            f"{name:32} {one:10.4f} {two:9.3f} {three:10.4f} {four:9.3f}"
            f" {speeds[0][0]:7.2f} {speeds[0][1]:7.2f}"
        )


if __name__ == "__main__":
    main()
