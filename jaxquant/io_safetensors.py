"""The safetensors container: a strict reader of the header, mapped bytes, and a writer; no arrays of values.

The ``safetensors`` package is not used. It cannot write F6 at all, takes rows of F4 that end inside a byte,
keeps the last of two tensors of one name, and its NumPy and Flax loaders know none of the narrow types. Where
it can write a file, the bytes here are the same.

Source: the format section of the safetensors README (version 0.8): 8 bytes of header length, a JSON object,
then the data without holes; the order of types is that of its serializer.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["TYPES", "Mapped", "Outgoing", "SafetensorsError", "StoredTensor", "StoredType", "read", "write"]


class SafetensorsError(ValueError):
    """The file is no safetensors file this library can read: the message names the file, the place and why."""


@dataclass(frozen=True, slots=True)
class StoredType:
    """A type of a header: bits per value, and the numpy dtype, or for F4 and F6 the name of the descriptor."""

    name: str
    bits: int
    dtype: np.dtype[Any] | None
    narrow: str | None = None

    @property
    def whole(self) -> int:
        """How many values fill whole bytes."""
        return 8 // math.gcd(self.bits, 8)


def _type(name: str, dtype: Any) -> StoredType:
    resolved = np.dtype(dtype).newbyteorder("<")
    return StoredType(name, 8 * resolved.itemsize, resolved)


# In the order of the package's serializer, which writes the last type first.
TYPES = {
    type_.name: type_
    for type_ in (
        _type("BOOL", np.bool_),
        StoredType("F4", 4, None, "E2M1"),
        StoredType("F6_E2M3", 6, None, "E2M3"),
        StoredType("F6_E3M2", 6, None, "E3M2"),
        _type("U8", np.uint8),
        _type("I8", np.int8),
        _type("F8_E5M2", ml_dtypes.float8_e5m2),
        _type("F8_E4M3", ml_dtypes.float8_e4m3fn),
        _type("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        _type("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        _type("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        _type("I16", np.int16),
        _type("U16", np.uint16),
        _type("F16", np.float16),
        _type("BF16", ml_dtypes.bfloat16),
        _type("I32", np.int32),
        _type("U32", np.uint32),
        _type("F32", np.float32),
        _type("C64", np.complex64),
        _type("F64", np.float64),
        _type("I64", np.int64),
        _type("U64", np.uint64),
    )
}
_RANK = {name: i for i, name in enumerate(TYPES)}

_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes; the package's limit
# Values in a header, as commas and brackets count them: enough for 250,000 tensors, and few enough that the
# objects of a dishonest header cost a few hundred megabytes at most.
_MAX_VALUES = 1 << 21
_MAX_RANK = 64  # NumPy's
_MAX_ELEMENTS = 1 << 48  # zero extents counted as one, so that every shape is one NumPy can hold


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a safetensors header says about one tensor.

    Attributes:
        name: the tensor's name.
        type: the header's name of its type, such as ``"F8_E8M0"`` or ``"F4"``.
        shape: extents in values, also where several share a byte.
        offset: position of the first byte, from the start of the file.
        nbytes: length in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Mapped:
    """The mapped bytes of a file. Never unmapped by hand: the mapping goes when the last view of it does."""

    __slots__ = ("_map", "bytes", "path", "size")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise never return.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
                self.fail(f"is {kind}, not a safetensors file")
            self.size = status.st_size
            if self.size < 8:
                self.fail(f"has {self.size} bytes, a safetensors file starts with 8 of header length")
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def fail(self, message: str) -> NoReturn:
        raise SafetensorsError(f"{self.path}: {message}")

    def view(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """The bytes of a tensor."""
        # Reading a mapped page that lies past the end of the file kills the process (SIGBUS).
        size = self._map.size()
        if size < self.size:
            self.fail(f"shrank from {self.size} to {size} bytes while it was open")
        return self.bytes[tensor.offset : tensor.offset + tensor.nbytes]


def read(source: Mapped) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The metadata and the tensors, in the order of their bytes. Raises SafetensorsError."""
    length = int(source.bytes[:8].view("<u8")[0])
    if length > _MAX_HEADER:
        source.fail(f"claims a header of {length} bytes, at most {_MAX_HEADER} are allowed")
    if length > source.size - 8:
        source.fail(f"claims a header of {length} bytes, but the file ends at {source.size}: it is truncated")
    entries = _parsed(source, source.bytes[8 : 8 + length].tobytes())
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        source.fail(f"{_METADATA} is {_shown(metadata)}, wanted an object of strings")
    for key, value in metadata.items():
        if not isinstance(value, str):
            source.fail(f"{_METADATA} holds {_shown(value)} under {key!r}, wanted a string")
    start = 8 + length
    tensors = [_tensor(source, name, entry, start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, before = start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else f"leaves {tensor.offset - end} bytes unused after"
            source.fail(
                f"tensor {tensor.name!r} at offset {tensor.offset} {what} {before}, which ends at {end}"
            )
        end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name!r}"
    if end != source.size:
        what = "is truncated" if end > source.size else "has bytes that belong to no tensor"
        source.fail(f"the tensors end at {end}, but the file at {source.size}: it {what}")
    return metadata, {tensor.name: tensor for tensor in tensors}


# A string in JSON, or what is left of one that does not end; possessive, so that it takes linear time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def _too_many_values(header: bytes) -> bool:
    def values(part: bytes) -> int:
        return part.count(b",") + part.count(b"[") + part.count(b"{")

    if values(header) <= _MAX_VALUES:
        return False
    # Long texts in the metadata are no values: look again, outside of strings.
    found = end = 0
    for string in _STRING.finditer(header):
        found += values(header[end : string.start()])
        end = string.end()
        if found > _MAX_VALUES:
            return True
    return found + values(header[end:]) > _MAX_VALUES


def _parsed(source: Mapped, header: bytes) -> dict[str, Any]:
    if header[:1] != b"{":
        source.fail(f"the header starts with {header[:16]!r}, wanted '{{': not a safetensors file")
    if _too_many_values(header):
        source.fail(f"the header holds more than {_MAX_VALUES} values")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            source.fail(f"the header has {_clipped(repr(twice))} twice in one object")
        return made

    try:
        entries = json.loads(header.decode(), object_pairs_hook=distinct)
    except SafetensorsError:
        raise
    except UnicodeDecodeError as error:
        source.fail(f"the header is not UTF-8: {error}")
    except RecursionError:
        source.fail("the header is nested too deep")
    except ValueError as error:  # also an integer of thousands of digits
        source.fail(f"the header is no JSON: {error}")
    if not isinstance(entries, dict):
        source.fail(f"the header is {_shown(entries)}, wanted an object")
    return entries


def _tensor(source: Mapped, name: str, entry: Any, start: int) -> StoredTensor:
    what = f"tensor {_clipped(repr(name))}"
    if not isinstance(entry, dict):
        source.fail(f"{what} is described by {_shown(entry)}, wanted an object")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        source.fail(f"{what} has no {missing[0]!r}")
    type_ = TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if type_ is None:
        source.fail(f"{what} has dtype {_shown(entry['dtype'])}, known are {', '.join(TYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape):
        source.fail(f"{what} has shape {_shown(shape)}, wanted a list of integers from 0 up")
    if len(shape) > _MAX_RANK:
        source.fail(f"{what} has {len(shape)} dimensions, at most {_MAX_RANK} are allowed")
    if math.prod(max(extent, 1) for extent in shape) > _MAX_ELEMENTS:
        source.fail(f"{what} has shape {_shown(shape)}: too many elements")
    if not _naturals(offsets) or len(offsets) != 2:
        source.fail(f"{what} has data_offsets {_shown(offsets)}, wanted two integers from 0 up")
    _check_rows(type_, tuple(shape), what, source.fail)
    begin, end = offsets
    nbytes = math.prod(shape) * type_.bits // 8
    if end - begin != nbytes:
        source.fail(
            f"{what} is {type_.name} of shape {tuple(shape)}, that is {nbytes} bytes, but its data_offsets "
            f"{_shown(offsets)} span {end - begin}"
        )
    if start + end > source.size:
        source.fail(
            f"{what} lies at offsets {start + begin} to {start + end}, but the file ends at {source.size}: "
            "it is truncated or damaged"
        )
    return StoredTensor(name, type_.name, tuple(shape), start + begin, nbytes)


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_rows(
    type_: StoredType, shape: tuple[int, ...], what: str, fail: Callable[[str], NoReturn]
) -> None:
    last = shape[-1] if shape else 1
    if last % type_.whole:
        fail(
            f"{what} is {type_.name} of shape {shape}: the last axis must be a multiple of {type_.whole}, so that "
            "rows are whole bytes"
        )


def _clipped(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _shown(value: object) -> str:
    """A value of JSON for a message; never long, never slow."""
    if isinstance(value, dict):
        return f"an object of {len(value)} entries"
    if isinstance(value, list) and not (len(value) <= 8 and all(type(item) is int for item in value)):
        return f"a list of {len(value)} entries"
    return _clipped(repr(value))


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A tensor to be written: its type, its shape in values, and how to get its bytes when their turn comes."""

    name: str
    type: StoredType
    shape: tuple[int, ...]
    content: Callable[[], NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.type.bits // 8


def write(path: str | os.PathLike[str], tensors: Sequence[Outgoing], metadata: Mapping[str, str]) -> None:
    """Write a file beside ``path`` and put it there when it is whole: views of an older one stay valid."""
    ordered = sorted(tensors, key=lambda tensor: (-_RANK[tensor.type.name], tensor.name))
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.type.name,
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER:
        raise ValueError(f"the header takes {len(header)} bytes, at most {_MAX_HEADER} are allowed")
    target = os.path.realpath(os.fsdecode(path))
    temporary = f"{target}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for tensor in ordered:
                content = np.ascontiguousarray(tensor.content())
                file.write(content.reshape(-1).view(np.uint8).data)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
