"""Speed of block quantization, dequantization, packing and unpacking beside copying the same float32 bytes, in one run.

    python benchmarks/arrays.py [--mib 4,128] [--only MXFP4,E2M1] [--quick] [--json PATH]

Prints a table and saves JSON under benchmarks/results/. The baseline is np.copyto into a buffer that was touched
before; ratios are medians over rounds in which all sides take turns (measure.py), so above 1 is slower than
the copy. Where torchao is installed its CPU path runs beside, on as many threads, with the ratio of its time
to ours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import Side, interleave, median_ratio, quartiles
from records import ROOT, commit, duration, machine, versions

import jaxquant as jq
from jaxquant import DType
from jaxquant.arrays import NarrowArray, quantize_blocks

FORMATS = ("MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP4", "MXINT8", "NVFP4")
PACKED = ("E2M1", "E2M3", "E3M2")
COLUMNS = 4096
Sides = dict[str, Side]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if there are no kernels to measure; 2 for wrong arguments."""
    options = parse(arguments)
    if jq.status().cpu != "native":
        print(f"arrays.py: no kernels to measure: {jq.status().problem}", file=sys.stderr)
        return 1
    rounds, turn_seconds = (3, 0.005) if options.quick else (11, 0.05)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": {**versions(), **peer_versions()},
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load": os.getloadavg(),
        "rounds": rounds,
        "isa": jq.status().isa,
        "weight": seven_billion_weight(),
    }
    peer = Torchao.find()
    rows: list[dict[str, Any]] = []
    for mib in options.mib:
        x = np.random.default_rng(0).standard_normal((mib * 2**18 // COLUMNS, COLUMNS), np.float32)
        for work, sides in works(x, peer, options.only):
            rows.append(row(work, mib, interleave(sides, rounds, turn_seconds)))
            print("  ".join(cells(rows[-1])), flush=True)
    report |= {"load at the end": os.getloadavg(), "rows": rows}
    path = options.json or ROOT / "benchmarks" / "results" / f"arrays-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nsaved {path}\n\n{table(rows)}\n\n{caption(report)}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="4,128", metavar="N,...", help="MiB of float32 (default: 4,128)")
    parser.add_argument("--only", default=",".join((*FORMATS, *PACKED)), metavar="NAME,...")
    parser.add_argument("--quick", action="store_true", help="3 short rounds: whether it works, not how fast")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where to save (default: a new file in results/)"
    )
    options = parser.parse_args(arguments)
    try:
        options.mib = [int(size) for size in options.mib.split(",")]
    except ValueError:
        parser.error(f"--mib {options.mib}: wanted numbers with commas between them")
    if min(options.mib) < 1:
        parser.error("--mib: wanted at least 1")
    options.only = tuple(options.only.split(","))
    if unknown := set(options.only) - {*FORMATS, *PACKED}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join((*FORMATS, *PACKED))}")
    return options


def works(x: np.ndarray, peer: Torchao | None, only: Sequence[str]) -> Iterator[tuple[str, Sides]]:
    copy = np.zeros_like(x)
    baseline = {"copyto": Side(lambda: np.copyto(copy, x))}
    values = jnp.asarray(x)
    for name in FORMATS:
        if name in only:
            dtype = getattr(DType, name)
            encode = lambda x, dtype=dtype: quantize_blocks(x, dtype)  # noqa: E731
            array = jax.block_until_ready(encode(values))
            theirs = peer.sides(name, x) if peer else {}
            yield f"quantize {name}", baseline | both(encode, values) | theirs.get("quantize", {})
            decode = lambda array: array.dequantize()  # noqa: E731
            yield f"dequantize {name}", baseline | both(decode, array) | theirs.get("dequantize", {})
    for name in PACKED:
        if name in only:
            pack = lambda x, name=name: NarrowArray.pack(x, name)  # noqa: E731
            yield f"pack {name}", baseline | both(pack, values)
            unpack = lambda packed: packed.unpack()  # noqa: E731
            yield f"unpack {name}", baseline | both(unpack, pack(values))


def both(function: Callable[[Any], Any], operand: Any) -> Sides:
    jitted = jax.jit(function)
    return {
        "eager": Side(lambda: jax.block_until_ready(function(operand))),
        "in jit": Side(lambda: jax.block_until_ready(jitted(operand))),
    }


class Torchao:
    """The peer's MX conversions, eager and compiled by nothing, as its CPU users get them."""

    def __init__(self) -> None:
        import torch
        from torchao.prototype.mx_formats import mx_tensor
        from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.torch, self.mx = torch, mx_tensor
        self.elements = {
            "MXFP8_E4M3": torch.float8_e4m3fn,
            "MXFP8_E5M2": torch.float8_e5m2,
            "MXFP6_E2M3": DTYPE_FP6_E2M3,
            "MXFP6_E3M2": DTYPE_FP6_E3M2,
            "MXFP4": torch.float4_e2m1fn_x2,
        }

    @classmethod
    def find(cls) -> Torchao | None:
        try:
            return cls()
        except ImportError as error:
            print(f"not compared with torchao: {error}", file=sys.stderr)
            return None

    def sides(self, name: str, x: np.ndarray) -> dict[str, Sides]:
        element = self.elements.get(name)
        if element is None:
            return {}
        values = self.torch.from_numpy(x)
        scales, codes = self.mx.to_mx(values, element, 32)
        decode = lambda: self.mx.to_dtype(codes, scales, element, 32, self.torch.float32)  # noqa: E731
        return {
            "quantize": {"torchao": Side(lambda: self.mx.to_mx(values, element, 32))},
            "dequantize": {"torchao": Side(decode)},
        }


def peer_versions() -> dict[str, str | None]:
    import importlib.metadata

    found: dict[str, str | None] = {}
    for name in ("torch", "torchao"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def seven_billion_weight() -> dict[str, float]:
    """What one weight of a 7B model takes as MXFP4, by the bytes of its leaves on the device."""
    shape = (14336, 4096)
    weight = quantize_blocks(jnp.zeros(shape, jnp.float32), DType.MXFP4)
    nbytes = sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(weight))
    bits = 8 * nbytes / (shape[0] * shape[1])
    print(f"a {shape[0]}x{shape[1]} MXFP4 weight: {nbytes} bytes, {bits} bits per element")
    return {"nbytes": nbytes, "bits per element": bits}


def row(work: str, mib: int, seconds: dict[str, Any]) -> dict[str, Any]:
    return {
        "work": work,
        "MiB": mib,
        "seconds": {side: quartiles(times) for side, times in seconds.items()},
        "times copyto": {
            side: median_ratio(times, seconds["copyto"])
            for side, times in seconds.items()
            if side != "copyto"
        },
        "torchao to ours": median_ratio(seconds["torchao"], seconds["eager"])
        if "torchao" in seconds
        else None,
        "rounds": {side: times.tolist() for side, times in seconds.items()},
    }


HEADER = ("work", "MiB", "copyto", "eager", "x copyto", "in jit", "x copyto", "torchao", "torchao / eager")


def cells(row: dict[str, Any]) -> list[str]:
    seconds, times = row["seconds"], row["times copyto"]
    shown = [row["work"], str(row["MiB"]), duration(seconds["copyto"][1])]
    for side in ("eager", "in jit"):
        shown += [duration(seconds[side][1]), f"{times[side]:.2f}"]
    if row["torchao to ours"] is None:
        return [*shown, "", ""]
    return [*shown, duration(seconds["torchao"][1]), f"{row['torchao to ours']:.1f}x"]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, for the README."""
    lines = [HEADER, ("---", *["--:"] * (len(HEADER) - 1)), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(report: dict[str, Any]) -> str:
    named = [f"{name} {version}" for name, version in report["versions"].items() if version]
    load = f"load average {report['load'][0]:.1f} before and {report['load at the end'][0]:.1f} after"
    cpu = f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {report['isa']}"
    return ", ".join([cpu, *named, f"commit {report['commit']}", load])


if __name__ == "__main__":
    sys.exit(main())
