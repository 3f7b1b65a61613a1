"""``python -m jaxquant inspect``: what is in a file of weights, whether it is legal, and what other formats would lose."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from jaxquant.arrays import quantize_blocks
from jaxquant.cli_files import (
    CommandError,
    Entry,
    HostArray,
    open_weights,
    printable,
    progress,
    replace_file,
    said,
    size_of,
    table,
)
from jaxquant.dtypes import BlockScaledDType

__all__ = ["run"]

FORMATS = ("MXFP8_E4M3", "MXFP6_E2M3", "MXFP4", "NVFP4")
_COLORS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")  # Okabe and Ito's; the markers differ too
_MARKERS = ("o", "s", "^", "D")
_SAMPLE = 1 << 14  # values of a tensor whose error is measured
_MOST_BARS = 40

Errors = dict[str, tuple[float, float, float]]


def run(path: Path, as_json: bool, plot: Path | None) -> int:
    """Exit code: 0, or 1 where something in the file is illegal. Raises CommandError."""
    if plot is not None:
        _check_plot(plot)
    file = open_weights(path)
    problems: dict[str, str] = {}
    errors: dict[str, Errors] = {}
    with closing(progress(file.entries, "inspect")) as entries:
        for entry in entries:
            problem = file.problem(entry)
            if problem is not None:
                problems[entry.name] = problem
            if plot is not None and len(entry.shape) > 1 and entry.elements:
                values = _values(file, entry)
                if values is not None:
                    errors[entry.name] = _errors(values)
    if plot is not None:
        if not errors:
            raise CommandError(f"{path} has no matrix of floats to draw")
        _save(plot, path.name, errors)
    report = _report(file.path, file.kind, path.stat().st_size, file.about, file.entries, problems, errors)
    print(json.dumps(report, indent=2) if as_json else _text(report))
    return 1 if problems else 0


def _values(file: Any, entry: Entry) -> HostArray | None:
    try:
        values: HostArray | None = file.values(entry, _SAMPLE)
    except ImportError as error:
        raise CommandError(str(error)) from error
    except NotImplementedError:
        return None
    return values


def _errors(x: HostArray) -> Errors:
    """By format the error relative to the values, root of the sums of squares: of all, of the best and worst row."""
    found: Errors = {}
    for name in FORMATS:
        y = np.asarray(quantize_blocks(x, BlockScaledDType.from_name(name), pad=True).dequantize())
        finite = np.isfinite(x) & np.isfinite(y)
        noise = (np.where(finite, y, 0) - np.where(finite, x, 0)).astype(np.float64) ** 2
        signal = np.where(finite, x, 0).astype(np.float64) ** 2
        rows = signal.sum(axis=-1) > 0
        if rows.any():
            each = np.sqrt(noise[rows].sum(axis=-1) / signal[rows].sum(axis=-1))
            found[name] = math.sqrt(noise.sum() / signal.sum()), float(each.min()), float(each.max())
    return found


def _report(
    path: str,
    kind: str,
    size: int,
    about: dict[str, str],
    entries: list[Entry],
    problems: dict[str, str],
    errors: dict[str, Errors],
) -> dict[str, Any]:
    tensors = []
    totals: dict[str, dict[str, Any]] = {}
    for entry in entries:
        shown: dict[str, Any] = {
            "name": entry.name,
            "type": entry.type,
            "shape": list(entry.shape),
            "elements": entry.elements,
            "bytes": entry.nbytes,
            "bits_per_element": entry.bits,
            "problem": problems.get(entry.name),
        }
        if entry.name in errors:
            shown["relative_error"] = {
                name: dict(zip(("all", "best_row", "worst_row"), three, strict=True))
                for name, three in errors[entry.name].items()
            }
        tensors.append(shown)
        total = totals.setdefault(entry.type, {"tensors": 0, "elements": 0, "bytes": 0})
        for key, value in (("tensors", 1), ("elements", entry.elements), ("bytes", entry.nbytes)):
            total[key] += value
    for total in totals.values():
        total["bits_per_element"] = 8 * total["bytes"] / total["elements"] if total["elements"] else None
    return {
        "file": path,
        "kind": kind,
        "bytes": size,
        "about": about,
        "totals": totals,
        "tensors": tensors,
        "problems": len(problems),
    }


def _text(report: dict[str, Any]) -> str:
    tensors, totals = report["tensors"], report["totals"]
    with_errors = any("relative_error" in tensor for tensor in tensors)
    lines = [f"{report['file']}: {report['kind']}, {size_of(report['bytes'])}, {len(tensors)} tensors"]
    lines += [f"{printable(key)}: {printable(value)}" for key, value in report["about"].items()]
    head = ["tensor", "type", "shape", "bits/weight", "size"]
    rows = [[*head, *FORMATS] if with_errors else head]
    for tensor in tensors:
        row = [
            printable(tensor["name"]),
            tensor["type"],
            " x ".join(map(str, tensor["shape"])) or "scalar",
            _number(tensor["bits_per_element"]),
            size_of(tensor["bytes"]),
        ]
        if with_errors:
            measured = tensor.get("relative_error", {})
            row += [f"{measured[name]['all']:.2%}" if name in measured else "" for name in FORMATS]
        rows.append(row)
    lines += ["", *table(rows, 3)]
    if with_errors:
        lines.append("per format: the error that converting would add, relative to the values")
    summary = [["type", "tensors", "elements", "bits/weight", "size"]]
    for type_, total in totals.items():
        bits = _number(total["bits_per_element"])
        summary.append(
            [type_, str(total["tensors"]), f"{total['elements']:,}", bits, size_of(total["bytes"])]
        )
    if len(totals) > 1:
        elements, nbytes = (sum(total[key] for total in totals.values()) for key in ("elements", "bytes"))
        bits = _number(8 * nbytes / elements if elements else None)
        summary.append(["all", str(len(tensors)), f"{elements:,}", bits, size_of(nbytes)])
    lines += ["", *table(summary, 1), ""]
    bad = [tensor for tensor in tensors if tensor["problem"] is not None]
    lines += [f"PROBLEM  {printable(tensor['name'])}: {printable(tensor['problem'], 1000)}" for tensor in bad]
    lines.append(f"{len(bad)} tensors are illegal" if bad else "no illegal records or blocks")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# The picture


def _check_plot(plot: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise CommandError("--plot draws with matplotlib: pip install 'jaxquant[plot]'") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if plot.suffix[1:].lower() not in known:
        raise CommandError(f"--plot {plot}: the name must end in one of {', '.join(known)}")
    if not plot.absolute().parent.is_dir():
        raise CommandError(f"--plot {plot}: there is no such folder")


def _save(plot: Path, title: str, errors: dict[str, Errors]) -> None:
    image = io.BytesIO()
    _figure(title, errors).savefig(image, format=plot.suffix[1:].lower(), dpi=110)
    try:
        replace_file(plot, image.getvalue())
    except OSError as error:
        raise CommandError(said(error, plot)) from error


def _figure(title: str, errors: dict[str, Errors]) -> Any:
    """A mark for a tensor's error and a bar from its best to its worst row; of layers together if there are many."""
    from matplotlib.figure import Figure

    bars, groups = _bars(errors)
    if len(bars) < groups:
        title += f", {len(bars)} of {groups} groups"
    longest = max(len(label) for label in bars)
    figure = Figure(figsize=(6.2 + 0.075 * min(longest, 60), 1.7 + 0.34 * len(bars)), layout="constrained")
    ax = figure.subplots()
    for i, name in enumerate(FORMATS):
        marks = [(at, group[name]) for at, group in enumerate(bars.values()) if name in group]
        if marks:
            y = np.array([at for at, _ in marks]) + 0.17 * (i - 1.5)
            middle, low, high = np.array([three for _, three in marks]).T
            ax.errorbar(
                middle,
                y,
                xerr=np.maximum([middle - low, high - middle], 0),
                fmt=_MARKERS[i],
                color=_COLORS[i],
                label=name,
                markersize=4.5,
                elinewidth=1.2,
                capsize=2,
            )
    for at in range(1, len(bars), 2):
        ax.axhspan(at - 0.5, at + 0.5, color="#F3F3F3", zorder=0)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
    ax.set_yticks(range(len(bars)), [label if len(label) <= 60 else f"{label[:57]}..." for label in bars])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_xlabel("error of converting, relative to the values (bars: best to worst)")
    figure.suptitle(printable(title), x=0.01, ha="left", fontsize="medium")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(errors: dict[str, Errors]) -> tuple[dict[str, Errors], int]:
    """What is drawn, by label, and how many there would be if there were room."""
    if len(errors) <= _MOST_BARS:
        return {printable(name): three for name, three in errors.items()}, len(errors)
    groups: dict[str, list[Errors]] = {}
    for name, found in errors.items():
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(found)
    kept = list(groups.items())[:_MOST_BARS]
    shown = {
        f"{printable(name)} ({len(group)})" if len(group) > 1 else printable(name): _joined(group)
        for name, group in kept
    }
    return shown, len(groups)


def _joined(group: Sequence[Errors]) -> Errors:
    joined: Errors = {}
    for name in FORMATS:
        each = np.array([found[name] for found in group if name in found])
        if len(each):
            joined[name] = float(np.median(each[:, 0])), float(each[:, 1].min()), float(each[:, 2].max())
    return joined
