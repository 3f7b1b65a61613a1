"""``python -m jaxquant convert``: the matrices of a file of weights to a block-scaled format, in a safetensors file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import io
from jaxquant.arrays import BlockScaledArray, quantize_blocks
from jaxquant.cli_files import (
    CommandError,
    Entry,
    HostArray,
    WeightFile,
    matching,
    nan_blocks,
    open_weights,
    printable,
    progress,
    said,
    size_of,
    table,
)
from jaxquant.dtypes import BlockScaledDType

__all__ = ["run"]

_SOURCES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
_AT_ONCE = 1 << 22  # values whose error is summed at once


class _Done(NamedTuple):
    entry: Entry
    to: str
    nbytes: int
    sqnr: float | None
    note: str | None
    """Why it was not converted, or what is wrong with what it became."""


def run(
    source: Path, target: Path, format: str, tensors: Sequence[str], keep: Sequence[str], as_json: bool
) -> int:
    """Exit code: 0, or 1 if a block became NaN. Raises CommandError; ``target`` is whole, or as it was."""
    _check_target(source, target)
    file = open_weights(source)
    entries = matching(file.entries, tensors) if tensors else file.entries
    kept = {entry.name for entry in matching(entries, keep)} if keep else set()
    dtype = BlockScaledDType.from_name(format)
    arrays: dict[str, Any] = {}
    done = []
    with closing(progress(entries, "convert")) as steps:
        for entry in steps:
            arrays[entry.name], outcome = _convert(file, entry, dtype, entry.name in kept)
            done.append(outcome)
    if not any(outcome.sqnr is not None for outcome in done):
        reasons = sorted({outcome.note for outcome in done if outcome.note})
        raise CommandError(
            f"{source} has nothing to convert to {format}: {'; '.join(reasons) or 'it holds no tensors'}"
        )
    try:
        io.save(target, arrays, metadata=file.about if file.kind == "safetensors" else None)
    except OSError as error:
        raise CommandError(said(error, target)) from error
    except (TypeError, ValueError) as error:
        raise CommandError(f"{target}: {printable(str(error), 1000)}") from error
    _show(file, target, format, done, as_json)
    return 1 if any(outcome.sqnr is not None and outcome.note for outcome in done) else 0


def _check_target(source: Path, target: Path) -> None:
    folder = target.absolute().parent
    if target.suffix != ".safetensors":
        raise CommandError(f"{target}: the name of what is written must end in .safetensors")
    if not folder.is_dir():
        raise CommandError(f"{target}: there is no folder {folder}")
    if target.is_dir():
        raise CommandError(f"{target} is a directory")
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{target}: {folder} cannot be written")
    if target.exists() and source.exists() and target.samefile(source):
        raise CommandError(f"{target} is the file to convert; write beside it")


def _convert(file: WeightFile, entry: Entry, dtype: BlockScaledDType, keep: bool) -> tuple[Any, _Done]:
    reason = "as asked" if keep else _unfit(file, entry, dtype)
    try:
        if reason is None:
            values = file.values(entry)
            assert values is not None  # or else it were unfit
            return _quantized(entry, values, dtype)
        kept = file.stored(entry)
        if kept is None:  # a type that only GGUF has
            values = file.values(entry)
            assert values is not None
            kept = values.reshape(entry.shape)
            return kept, _Done(entry, "F32", kept.nbytes, None, reason)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise CommandError(printable(str(error), 1000)) from error
    return kept, _Done(entry, entry.type, entry.nbytes, None, reason)


def _unfit(file: WeightFile, entry: Entry, dtype: BlockScaledDType) -> str | None:
    """Why a tensor stays as it is."""
    block = dtype.levels[0].block
    assert isinstance(block, int)
    if file.problem(entry) is not None and entry.type == "unreadable":
        raise CommandError(
            f"{file.path}: {printable(entry.name)}: {printable(str(file.problem(entry)), 1000)}"
        )
    if len(entry.shape) < 2 or not entry.elements:
        return "not a matrix"
    if entry.shape[-1] % block:
        return f"rows of {entry.shape[-1]}, no multiple of {block}"
    stored = file.stored(entry)
    if isinstance(stored, BlockScaledArray):
        return "block-scaled already"
    if stored is not None and not (isinstance(stored, np.ndarray) and stored.dtype in _SOURCES):
        return "not float16, bfloat16 or float32"
    return None


def _quantized(entry: Entry, values: HostArray, dtype: BlockScaledDType) -> tuple[Any, _Done]:
    x = values.reshape(entry.shape)
    # JAX's kernels rather than NumPy: the same bytes, much sooner.
    array = jax.tree_util.tree_map(np.asarray, quantize_blocks(jnp.asarray(x), dtype))
    back = np.asarray(array.dequantize()).reshape(values.shape)
    return array, _Done(entry, dtype.name, array.nbytes, _sqnr(values, back), nan_blocks(array))


def _sqnr(x: HostArray, y: HostArray) -> float:
    """In decibels, over what is finite."""
    signal = noise = 0.0
    step = max(1, _AT_ONCE // x.shape[-1])
    for at in range(0, len(x), step):
        was, became = (part[at : at + step].astype(np.float64) for part in (x, y))
        finite = np.isfinite(was) & np.isfinite(became)
        signal += float((was[finite] ** 2).sum())
        noise += float(((became[finite] - was[finite]) ** 2).sum())
    return 10 * math.log10(signal / noise) if signal and noise else math.inf


def _show(file: WeightFile, target: Path, format: str, done: list[_Done], as_json: bool) -> None:
    size = target.stat().st_size
    if as_json:
        tensors = [
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "from": entry.type,
                "to": to,
                "bytes": nbytes,
                "sqnr_db": sqnr if sqnr is None or math.isfinite(sqnr) else None,
                "note": note,
            }
            for entry, to, nbytes, sqnr, note in done
        ]
        report = {"source": file.path, "target": str(target), "format": format, "bytes": size}
        print(json.dumps({**report, "tensors": tensors}, indent=2))
        return
    rows = [["tensor", "shape", "from", "to", "size", "SQNR dB", ""]]
    for entry, to, nbytes, sqnr, note in done:
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        decibels = "" if sqnr is None else "exact" if sqnr == math.inf else f"{sqnr:.2f}"
        remark = f"copied: {note}" if sqnr is None else note or ""
        rows.append([printable(entry.name), shape, entry.type, to, size_of(nbytes), decibels, remark])
    lines = table(rows, 4)
    count = sum(outcome.sqnr is not None for outcome in done)
    before = sum(outcome.entry.nbytes for outcome in done)
    lines.append(f"{count} of {len(done)} tensors are {format} now: {size_of(before)} became {size_of(size)}")
    print("\n".join(lines))
