"""Draws what records.py measured: a roofline, growth with each extent, and instruction sets.

    python benchmarks/picture.py results/records-....json

writes a PNG beside the JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

PER_BYTE = "operations per byte of weights"


def draw(report: dict[str, Any], path: Path) -> Path:
    """Draw a report of records.py into a new PNG at `path`."""
    figure, (roofline, growth, isas) = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
    for run in report["runs"]:
        _roofline(roofline, run)
        _growth(growth, run)
    _isas(isas, report["runs"][0])
    figure.suptitle(f"{report['machine']['cpu']}, commit {str(report['commit'])[:9]}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _roofline(axes: Any, run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if PER_BYTE in row["notes"]]
    bandwidth = [
        r["amount"] / r["seconds"]["read"][1] for r in rows if "read" in r["seconds"] and "GB/s" in r["unit"]
    ]
    chain = [r["amount"] / r["seconds"]["chain"][1] for r in rows if "chain" in r["seconds"]]
    name = f"{run['threads']} threads, {run['isa']}"
    colour = f"C{run['threads'] - 1}"
    if bandwidth and chain:
        x = np.geomspace(2, 4000, 100)
        roof = np.minimum(x * np.median(bandwidth), np.median(chain)) / 1e9
        axes.loglog(x, roof, color=colour, label=f"limit, {name}")
    for side, marker in (("jaxquant", "o"), ("ggml", "x"), ("XLA float32", "+")):
        points = [
            (r["notes"][PER_BYTE], _operations(r) / r["seconds"][side][1] / 1e9)
            for r in rows
            if side in r["seconds"]
        ]
        if points:
            axes.loglog(*zip(*points, strict=True), marker, color=colour, label=f"{side}, {name}")
    axes.set(xlabel=PER_BYTE, ylabel="GFLOP/s, or as many integer operations", title="roofline")
    axes.legend(fontsize=7)


def _operations(row: dict[str, Any]) -> float:
    return row["amount"] * (row["notes"][PER_BYTE] if "GB/s" in row["unit"] else 1.0)


def _growth(axes: Any, run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if "grows" in row["notes"]]
    for i, axis in enumerate(dict.fromkeys(row["notes"]["grows"] for row in rows)):
        mine = [row for row in rows if row["notes"]["grows"] == axis]
        extents = [row["notes"]["extent"] for row in mine]
        times = [1e3 * row["seconds"]["jaxquant"][1] for row in mine]
        style = "-" if run["threads"] == 1 else "--"
        axes.loglog(extents, times, f"o{style}", color=f"C{i}", label=f"{axis}, {run['threads']} threads")
        if run["threads"] == 1:
            linear = [times[-1] * extent / extents[-1] for extent in extents]
            axes.loglog(extents, linear, ":", color=f"C{i}", linewidth=0.8)
    axes.set(
        xlabel="extent (dotted: in proportion)",
        ylabel="ms",
        title="1024 rows, 16 columns, 16 records but one",
    )
    axes.legend(fontsize=7)


def _isas(axes: Any, run: dict[str, Any]) -> None:
    rows = [row for row in run["rows"] if row["work"].startswith("ISA: ")]
    names = [side for side in rows[0]["seconds"] if side != "jaxquant"] if rows else []
    for i, name in enumerate(names):
        speeds = [row["amount"] / row["seconds"][name][1] / 1e9 for row in rows]
        axes.bar(np.arange(len(rows)) + 0.8 * i / len(names), speeds, 0.8 / len(names), label=name)
    axes.set_xticks(range(len(rows)), [row["work"].removeprefix("ISA: ") for row in rows], fontsize=7)
    axes.set(yscale="log", ylabel="GFLOP/s, GB/s", title=f"instruction sets, {run['threads']} threads")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(draw(json.loads(source.read_text()), source.with_suffix(".png")))
