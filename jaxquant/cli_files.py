"""What the commands share: files of weights seen in one way, texts for a terminal, progress, whole files or none."""

from __future__ import annotations

import fnmatch
import importlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import ml_dtypes
import numpy as np

from jaxquant import gguf, io, quant, records
from jaxquant.arrays import BlockScaledArray, NarrowArray, SwizzledArray
from jaxquant.gguf_types import Blocks

__all__ = [
    "CommandError",
    "Entry",
    "WeightFile",
    "matching",
    "open_weights",
    "printable",
    "progress",
    "table",
]

HostArray = np.ndarray[Any, Any]
_T = TypeVar("_T")

_FLOATS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
}
_INTEGERS = {f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)}
_BLOCKS = ("Q5_K", "Q6_K", "Q5_0", "Q8_0")
_RECORDS = {"Q4_K": quant.q4_k, "Q8_K": quant.q8_k}


class CommandError(Exception):
    """A file or a request that a command can do nothing with: one line for the user, and exit code 2."""


class Entry(NamedTuple):
    """One tensor of a file; ``nbytes`` counts all of its planes."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def bits(self) -> float | None:
        return 8 * self.nbytes / self.elements if self.elements else None


class WeightFile(Protocol):
    """A GGUF or safetensors file, as the commands see it."""

    kind: str
    path: str
    entries: list[Entry]
    about: dict[str, str]

    def problem(self, entry: Entry) -> str | None:
        """What is illegal about a tensor, if anything."""

    def stored(self, entry: Entry) -> Any:
        """What `jaxquant.io.save` keeps without a change, or None for types that only GGUF has."""

    def values(self, entry: Entry, most: int | None = None) -> HostArray | None:
        """float32 [rows, K] of about ``most`` values in rows evenly spread, or of all; None for integers."""


class _GGUF:
    kind = "GGUF"

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = gguf.open(path)
        self.entries = [Entry(i.name, i.type, i.shape, i.nbytes) for i in self.file.tensors.values()]
        known = self.file.metadata
        self.about = {
            key: str(known[key]) for key in ("general.architecture", "general.name") if key in known
        }

    def problem(self, entry: Entry) -> str | None:
        if entry.type not in _RECORDS or not entry.elements:
            return None
        return _illegal(self.file.raw(entry.name), _RECORDS[entry.type])

    def stored(self, entry: Entry) -> Any:
        if entry.type in ("MXFP4", "NVFP4"):
            return io.from_gguf(self.file, entry.name)
        dtype = (_FLOATS | _INTEGERS).get(entry.type)
        return None if dtype is None else self.file.raw(entry.name).view(dtype).reshape(entry.shape)

    def values(self, entry: Entry, most: int | None = None) -> HostArray | None:
        if entry.type in _INTEGERS:
            return None
        name = entry.name
        if not entry.elements:
            return np.zeros((0, _last(entry)), np.float32)
        if entry.type in ("MXFP4", "NVFP4"):
            return _rows(np.asarray(self.stored(entry).dequantize()), most)
        if entry.type in _FLOATS:
            return _float32(_rows(self.stored(entry), most))
        if entry.type == "Q4_K" or entry.type in _BLOCKS:
            raw = self.file.raw(name)
            blocks = _spread(raw.reshape(-1, *raw.shape[-2:]), most, _last(entry))
            if entry.type == "Q4_K":
                return records.dequantize(blocks, quant.q4_k).reshape(-1, _last(entry))
            return np.asarray(Blocks(blocks, entry.type).dequantize())
        return _rows(self.file.array(name), most)


class _Safetensors:
    kind = "safetensors"

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = io.open(path)
        self.about = dict(self.file.metadata)
        self.entries = []
        self._broken: dict[str, str] = {}
        for name in self.file.names:
            try:
                array = self.file.array(name)
            except io.SafetensorsError as error:
                self._broken[name] = str(error).removeprefix(f"{self.file.path}: ")
                self.entries.append(Entry(name, "unreadable", (), 0))
            else:
                type_ = self.file.tensors[name].type if name in self.file.tensors else None
                self.entries.append(Entry(name, _type_of(array, type_), tuple(array.shape), _nbytes(array)))

    def problem(self, entry: Entry) -> str | None:
        if entry.name in self._broken:
            return self._broken[entry.name]
        array = self.file.array(entry.name)
        return nan_blocks(array) if isinstance(array, BlockScaledArray) else None

    def stored(self, entry: Entry) -> Any:
        return self.file.array(entry.name)

    def values(self, entry: Entry, most: int | None = None) -> HostArray | None:
        if entry.name in self._broken:
            return None
        array = self.file.array(entry.name)
        if isinstance(array, BlockScaledArray):
            return _rows(np.asarray(array.dequantize()), most)
        if isinstance(array, np.ndarray) and array.dtype in _FLOATS.values():
            return _float32(_rows(array, most))
        return None


def open_weights(path: Path) -> WeightFile:
    """A file of weights, told apart by how it begins. Raises CommandError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CommandError(f"{path} is {'a directory' if path.is_dir() else 'no regular file'}")
        with path.open("rb") as file:
            head = file.read(9)
        if head.startswith(b"GGUF") or path.suffix == ".gguf":
            return _GGUF(str(path))
        if head[8:] == b"{" or path.suffix == ".safetensors":
            return _Safetensors(str(path))
    except OSError as error:
        raise CommandError(said(error, path)) from error
    except (gguf.GGUFError, io.SafetensorsError) as error:
        raise CommandError(printable(str(error), 1000)) from error
    raise CommandError(f"{path} is neither a GGUF nor a safetensors file: it begins with {head[:8]!r}")


def said(error: OSError, path: object) -> str:
    """An error of the system in words."""
    return f"{error.filename or path}: {error.strerror or error}"


def nan_blocks(array: BlockScaledArray) -> str | None:
    """How many blocks are NaN throughout, which is how `quantize_blocks` marks what is not finite."""
    scales = np.asarray(array.scales)
    count = int(np.isnan(scales.astype(np.float32)).sum())
    return f"{count} of {scales.size} blocks are NaN" if count else None


def matching(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """The tensors whose names match one of the patterns, of which each must match some. Raises CommandError."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(entry.name, pattern) for entry in entries):
            raise CommandError(f"no tensor is called {pattern!r}")
    return [entry for entry in entries if any(fnmatch.fnmatchcase(entry.name, p) for p in patterns)]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside ``path`` and put it there when it is whole."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# What a terminal shows


def printable(text: str, most: int = 120) -> str:
    """A text from a file, which may try to write to the terminal, as characters that are seen."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def table(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of aligned columns, of which the first ``left`` are texts."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size_of(nbytes: int) -> str:
    """Bytes as a person reads them."""
    if nbytes < 1024:
        return f"{nbytes} B"
    scaled, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if scaled < 1000:
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.4g} {unit}"


EVERY = 5.0  # seconds between lines


def progress(items: Sequence[_T], what: str) -> Generator[_T, None, None]:
    """The items, with a bar of tqdm on a terminal, and a line on stderr every few seconds elsewhere.

    Close it (`contextlib.closing`), so that an interrupted bar is gone before anything else is written.
    """
    try:
        bar: Callable[..., Any] | None = importlib.import_module("tqdm").tqdm if sys.stderr.isatty() else None
    except ImportError:
        bar = None
    if bar is not None:
        yield from bar(items, desc=what, unit="tensor", file=sys.stderr, leave=False)
        return
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= EVERY:
            print(f"{what}: {done} of {len(items)} tensors", file=sys.stderr, flush=True)
            last = time.monotonic()


# Tensors


def _illegal(raw: HostArray, format: quant.RecordFormat) -> str | None:
    try:
        records.validate_records(raw, format)
    except ValueError as error:
        return f"record {str(error).removeprefix('r')}"
    return None


def _last(entry: Entry) -> int:
    return entry.shape[-1] if entry.shape else 1


def _spread(rows: HostArray, most: int | None, width: int) -> HostArray:
    """At most about ``most`` values, ``width`` to a row, in rows evenly spread; a view where it is all."""
    count = len(rows) if most is None else min(len(rows), max(1, most // max(1, width)))
    if count == len(rows):
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _rows(array: HostArray, most: int | None) -> HostArray:
    K = array.shape[-1] if array.ndim else 1
    return _spread(array.reshape(-1, K) if array.size else array.reshape(0, K), most, K)


def _float32(array: HostArray) -> HostArray:
    with np.errstate(over="ignore", invalid="ignore"):  # a float64 may exceed float32: infinity
        return array.astype(np.float32)


def _type_of(array: Any, stored: str | None) -> str:
    if isinstance(array, BlockScaledArray):
        return array.format.name if array.format is not None else "block-scaled"
    if stored is not None and not isinstance(array, SwizzledArray | NarrowArray):
        return stored
    if isinstance(array, NarrowArray):
        return stored or str(array.dtype.name)
    return (
        f"{np.dtype(array.storage.dtype).name}, swizzled"
        if isinstance(array, SwizzledArray)
        else str(array.dtype)
    )


def _nbytes(array: Any) -> int:
    return int(array.storage.nbytes if isinstance(array, SwizzledArray) else array.nbytes)
