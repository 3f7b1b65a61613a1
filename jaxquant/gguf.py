"""Open a GGUF file: its metadata, its tensors, Q4_K weights as records, any tensor as float32.

The file is mapped, not read, and only the header is walked: metadata are decoded when they are asked
for, and Q4_K records are handed out as views of the mapping. A file that is damaged, truncated or made
to mislead is refused with :class:`GGUFError` in bounded time and memory.

Source: the GGUF container specification of the ggml project (``docs/gguf.md`` there), versions 2 and 3,
little-endian. Records are laid out as in section 2 of the record contract (``docs/numerics.md``).

Example:
    A file with one 2 x 512 Q4_K tensor ``w``, written by hand:

    >>> import pathlib, struct, tempfile
    >>> import jaxquant.gguf
    >>> info = struct.pack("<Q1sIQQIQ", 1, b"w", 2, 512, 2, 12, 0)  # name, extents, type, offset
    >>> header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + info
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.gguf"
    >>> _ = path.write_bytes(header.ljust(96, b"\\0") + bytes(4 * 144))

    >>> with jaxquant.gguf.open(path) as file:
    ...     print(file.tensors["w"])
    ...     print(file.records("w").shape, file.array("w").shape)
    TensorInfo(name='w', type='Q4_K', shape=(2, 512), offset=96, nbytes=576)
    (2, 2, 144) (2, 512)
    >>> file.records("w")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: .../tiny.gguf is closed

    >>> path.unlink()
    >>> path.parent.rmdir()
"""

from __future__ import annotations

import difflib
import math
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax

    from jaxquant.gguf_types import Blocks

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "open"]


class GGUFError(ValueError):
    """The file is not a GGUF file this library can read: the message names the file, the place and why."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a GGUF file says about one tensor.

    Attributes:
        name: the tensor's name.
        type: ggml's name of the storage type, such as ``"Q4_K"`` or ``"F32"``.
        shape: extents in row-major (NumPy) order, so the last one is K, the length of a row.
        offset: position of the first byte, from the start of the file.
        nbytes: length in bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None


# Q8_1 (9) is missing on purpose: it never leaves a kernel, and its published sizes (36 and 40) disagree.
_TYPES = {
    0: _Type("F32", 1, 4, np.dtype("<f4")),
    1: _Type("F16", 1, 2, np.dtype("<f2")),
    2: _Type("Q4_0", 32, 18),
    3: _Type("Q4_1", 32, 20),
    6: _Type("Q5_0", 32, 22),
    7: _Type("Q5_1", 32, 24),
    8: _Type("Q8_0", 32, 34),
    10: _Type("Q2_K", 256, 84),
    11: _Type("Q3_K", 256, 110),
    12: _Type("Q4_K", 256, 144),
    13: _Type("Q5_K", 256, 176),
    14: _Type("Q6_K", 256, 210),
    15: _Type("Q8_K", 256, 292),
    16: _Type("IQ2_XXS", 256, 66),
    17: _Type("IQ2_XS", 256, 74),
    18: _Type("IQ3_XXS", 256, 98),
    19: _Type("IQ1_S", 256, 50),
    20: _Type("IQ4_NL", 32, 18),
    21: _Type("IQ3_S", 256, 110),
    22: _Type("IQ2_S", 256, 82),
    23: _Type("IQ4_XS", 256, 136),
    24: _Type("I8", 1, 1, np.dtype("i1")),
    25: _Type("I16", 1, 2, np.dtype("<i2")),
    26: _Type("I32", 1, 4, np.dtype("<i4")),
    27: _Type("I64", 1, 8, np.dtype("<i8")),
    28: _Type("F64", 1, 8, np.dtype("<f8")),
    29: _Type("IQ1_M", 256, 56),
    30: _Type("BF16", 1, 2),
    34: _Type("TQ1_0", 256, 54),
    35: _Type("TQ2_0", 256, 66),
    39: _Type("MXFP4", 32, 17),
    40: _Type("NVFP4", 64, 36),
    41: _Type("Q1_0", 128, 18),
}
_TYPES_BY_NAME = {type_.name: type_ for type_ in _TYPES.values()}

_STRING, _ARRAY, _UINT32, _BOOL = 8, 9, 4, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    _UINT32: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# What no honest file comes near (the largest have thousands of tensors and a million strings), so that a
# dishonest one cannot make opening it cost more than a few seconds or a few hundred megabytes.
_MAX_ENTRIES = 1 << 18  # metadata keys, tensors and inner arrays of nested arrays, together
_MAX_STRINGS = 1 << 22  # strings in arrays, together
_MAX_NAME = 0xFFFF  # bytes in a key or a tensor's name; the specification's limit for keys
_MAX_RANK = 4
_MAX_DEPTH = 4
_MAX_ELEMENTS = 1 << 48  # zero extents counted as one, so that every shape is one NumPy can hold

_COPIED_AT_ONCE = 4 << 20  # bytes of the mapped file that a copy holds in memory beside what it copied
_XLA_ALIGNMENT = 64  # bytes; the CPU client takes over a buffer so aligned and copies any other

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_PATH = str | os.PathLike[str]


class _Source:
    """The mapped bytes. Never unmapped by hand: the mapping goes when the last view of it does."""

    __slots__ = ("bytes", "map", "path", "size")

    def __init__(self, path: _PATH) -> None:
        self.path = os.fsdecode(path)
        # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise never return.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
                raise GGUFError(f"{self.path} is {kind}, not a GGUF file")
            if status.st_size == 0:
                raise GGUFError(f"{self.path} is empty, not a GGUF file")
            self.size = status.st_size
            self.map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)

    def check_not_shrunk(self) -> None:
        # Reading a mapped page that lies past the end of the file kills the process (SIGBUS).
        size = self.map.size()
        if size < self.size:
            raise GGUFError(f"{self.path} shrank from {self.size} to {size} bytes while it was open")

    def copy(self, out: NDArray[np.uint8], view: NDArray[np.uint8]) -> None:
        """Copy a view of the mapping, keeping few of the file's pages in memory."""
        if view.nbytes > _COPIED_AT_ONCE and view.ndim > 1:
            step = max(1, _COPIED_AT_ONCE * len(view) // view.nbytes)
            for start in range(0, len(view), step):
                part = slice(start, start + step) if len(view) > 1 else 0
                self.copy(out[part], view[part])
            return
        out[...] = view
        if view.size and hasattr(mmap, "MADV_DONTNEED"):
            first, end = (at - self.bytes.ctypes.data for at in byte_bounds(view))
            first -= first % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, first, end - first)


class _Cursor:
    """Walks the header of a source, never past its end and never beyond the limits above."""

    __slots__ = ("_entries", "_strings", "pos", "source")

    def __init__(self, source: _Source, pos: int = 0) -> None:
        self.source = source
        self.pos = pos
        self._entries = _MAX_ENTRIES
        self._strings = _MAX_STRINGS

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.source.path}: {message}")

    def skip(self, nbytes: int, what: str) -> int:
        """Move past ``nbytes`` and return where they start."""
        start, size = self.pos, self.source.size
        if nbytes > size - start:
            raise self.error(
                f"{what} takes {nbytes} bytes at offset {start}, but the file ends at {size}: "
                "it is truncated or damaged"
            )
        self.pos = start + nbytes
        return start

    def number(self, layout: struct.Struct, what: str) -> int:
        (value,) = layout.unpack_from(self.source.map, self.skip(layout.size, what))
        return int(value)

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number(_U64, f"length of {what}")
        if limit is not None and length > limit:
            raise self.error(f"{what} is {length} bytes long, at most {limit} are allowed")
        start = self.skip(length, what)
        try:
            return self.source.map[start : self.pos].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}") from None

    def claim_entries(self, count: int, least_bytes: int, what: str) -> None:
        self._entries = self._claim(count, least_bytes, self._entries, _MAX_ENTRIES, what)

    def claim_strings(self, count: int, what: str) -> None:
        self._strings = self._claim(count, 8, self._strings, _MAX_STRINGS, what)

    def _claim(self, count: int, least_bytes: int, left: int, limit: int, what: str) -> int:
        room = (self.source.size - self.pos) // least_bytes
        if count > room:
            raise self.error(f"the file claims {count} {what}, but has room for {room}")
        if count > left:
            raise self.error(f"the file claims {count} {what}, more than the {limit} a file may hold in all")
        return left - count

    def string_starts(self, count: int, what: str) -> array[int]:
        """Move past ``count`` strings; where each one's bytes start, and where those of one more would."""
        self.claim_strings(count, f"strings in {what}")
        starts = array("Q")
        # The one loop over a vocabulary: each length says where the next one is.
        pos, last, buffer, length_at = self.pos, self.source.size - 8, self.source.map, _U64.unpack_from
        for _ in range(count):
            if pos > last:
                break
            starts.append(pos + 8)
            pos += 8 + length_at(buffer, pos)[0]
        if pos > self.source.size or len(starts) < count:
            raise self.error(
                f"string {len(starts) - 1} of {what} ends at offset {pos}, but the file ends at "
                f"{self.source.size}: it is truncated or damaged"
            )
        self.pos = pos
        starts.append(pos + 8)
        return starts

    def array_header(self, what: str, depth: int) -> tuple[int, int]:
        if depth == _MAX_DEPTH:
            raise self.error(f"{what} nests arrays more than {_MAX_DEPTH} deep")
        item = self.number(_U32, f"item type of {what}")
        count = self.number(_U64, f"length of {what}")
        if item == _ARRAY:
            self.claim_entries(count, 12, f"arrays in {what}")
        return item, count

    def scalar_dtype(self, kind: int, what: str) -> np.dtype[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.error(f"{what} has value type {kind}, known are 0 to 12")
        return dtype

    def skip_value(self, kind: int, what: str, depth: int = 0) -> None:
        if kind == _STRING:
            self.skip(self.number(_U64, f"length of {what}"), what)
        elif kind == _ARRAY:
            item, count = self.array_header(what, depth)
            if item == _STRING:
                self.string_starts(count, what)
            elif item == _ARRAY:
                for _ in range(count):
                    self.skip_value(_ARRAY, what, depth + 1)
            else:
                self.skip(count * self.scalar_dtype(item, what).itemsize, what)
        else:
            self.skip(self.scalar_dtype(kind, what).itemsize, what)

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0].item()
        item, count = self.array_header(what, depth)
        if item == _STRING:
            starts = self.string_starts(count, what)
            first = starts[0]
            raw = self.source.map[first : self.pos]
            try:
                return tuple(raw[at - first : after - 8 - first].decode() for at, after in pairwise(starts))
            except UnicodeDecodeError as error:
                raise self.error(f"a string in {what} is not UTF-8: {error}") from None
        if item == _ARRAY:
            return tuple(self.value(_ARRAY, what, depth + 1) for _ in range(count))
        numbers = self._numbers(item, count, what)
        numbers.setflags(write=False)
        return numbers

    def _numbers(self, kind: int, count: int, what: str) -> NDArray[Any]:
        dtype = self.scalar_dtype(kind, what)
        start = self.skip(count * dtype.itemsize, what)
        numbers: NDArray[Any] = self.source.bytes[start : self.pos].view(dtype)
        if kind != _BOOL:
            return numbers.copy()
        if numbers.size and numbers.max() > 1:
            raise self.error(f"{what} holds the boolean {numbers.max()}, legal are 0 and 1")
        return numbers.astype(np.bool_)


class _Metadata(Mapping[str, Any]):
    """Decodes a value when it is first asked for, and keeps it."""

    __slots__ = ("_decoded", "_places", "source")

    def __init__(self, source: _Source, places: dict[str, tuple[int, int]]) -> None:
        self.source = source
        self._places = places
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            if key not in self._places:
                raise _unknown(f"{self.source.path} has no metadata key", key, self._places)
            self.source.check_not_shrunk()
            kind, pos = self._places[key]
            self._decoded[key] = _Cursor(self.source, pos).value(kind, f"metadata {key!r}")
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<metadata of {self.source.path}: {len(self)} keys>"


class GGUFFile:
    """An open GGUF file, as :func:`open` returns it; it never changes, except that it can be closed.

    ``close()``, or leaving a ``with`` block, ends this object's hold on the file. Whatever was taken out
    before stays valid: views from :meth:`records` and the :attr:`metadata` mapping keep the file mapped
    for as long as they live. Nothing needs to be closed: a forgotten file costs address space, and its
    mapping goes with the last reference to it.

    The file must not be changed while it is mapped. If it has become shorter, ``metadata``, ``records``
    and ``array`` raise GGUFError; but reading a view whose bytes are gone ends the process, as with every
    mapped file.
    """

    __slots__ = ("_metadata", "_tensors", "path")

    path: str
    _metadata: _Metadata | None
    _tensors: Mapping[str, TensorInfo]

    def __init__(self, path: _PATH) -> None:
        source = _Source(path)
        places, tensors = _read_header(_Cursor(source))
        for attribute, value in (
            ("path", source.path),
            ("_metadata", _Metadata(source, places)),
            ("_tensors", MappingProxyType(tensors)),
        ):
            object.__setattr__(self, attribute, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a GGUFFile is immutable: cannot set {name!r}")

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata, an immutable mapping that decodes a value when it is first asked for.

        Numbers and booleans are Python's, strings ``str``; an array of numbers or booleans is a read-only
        NumPy array of the stored type, an array of strings a tuple of ``str``, an array of arrays a tuple.

        Raises:
            ValueError: the file object is closed.
            GGUFError: on reading a value that is no UTF-8 or no boolean, or whose file has shrunk.
            KeyError: on reading an unknown key; the message suggests near ones.
        """
        return self._held()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the file says about each tensor, by name, in file order; readable after close."""
        return self._tensors

    def records(self, name: str) -> NDArray[np.uint8]:
        """A Q4_K tensor's records, u8 [\\*rows, G, 144] with G = K / 256: a read-only view of the file.

        Nothing is copied. The view keeps the file mapped for as long as it lives, so it is safe to use
        after the file object is closed or gone. Copy it if the file may be changed or cut meanwhile.

        Raises:
            KeyError: no tensor has this name; the message suggests near ones.
            TypeError: the tensor is not Q4_K (:meth:`array` takes any type), or ``name`` is no string.
            ValueError: the file object is closed.
            GGUFError: the file has shrunk since it was opened.
        """
        info, raw = self._tensor(name)
        if info.type != "Q4_K":
            raise TypeError(f"tensor {name!r} is {info.type}, records are Q4_K; use array({name!r})")
        return raw.reshape(*info.shape[:-1], info.shape[-1] // 256, 144)

    def blocks(self, name: str) -> Blocks:
        """A Q4_K, Q5_K, Q6_K, Q5_0 or Q8_0 tensor in its bytes, with a decoder: a read-only view as ``records`` is.

        Raises:
            KeyError: no tensor has this name; the message suggests near ones.
            TypeError: ``name`` is no string.
            ValueError: there is no decoder for the tensor's type, or the file object is closed.
            GGUFError: the file has shrunk since it was opened.
        """
        from jaxquant.gguf_types import Blocks

        info, raw = self._tensor(name)
        type_ = _TYPES_BY_NAME[info.type]
        blocks = info.shape[-1] // type_.block_size if info.shape else 1
        return Blocks(raw.reshape(*info.shape[:-1], blocks, type_.block_bytes), info.type)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes as they are stored, whatever its type: u8 [\\*rows, K / block size, bytes per block].

        A read-only view as :meth:`records` is; a type of single values has blocks of one.

        Raises:
            KeyError: no tensor has this name; the message suggests near ones.
            TypeError: ``name`` is no string.
            ValueError: the file object is closed.
            GGUFError: the file has shrunk since it was opened.
        """
        info, raw = self._tensor(name)
        type_ = _TYPES_BY_NAME[info.type]
        blocks = info.shape[-1] // type_.block_size if info.shape else 1
        return raw.reshape(*info.shape[:-1], blocks, type_.block_bytes)

    def device_records(self, name: str | Sequence[str], sharding: jax.sharding.Sharding) -> jax.Array:
        """Q4_K records placed over devices: u8 [\\*rows, G, 144], or [L, \\*rows, G, 144] of L stacked tensors.

        Every process reads the bytes of its own devices' tiles only, once each, and holds little more than
        them in memory meanwhile. Shard over rows or layers: a dot gathers weights sharded over G.

        Args:
            name: a tensor, or a sequence of tensors of one shape, such as one weight of every layer.
            sharding: where the result lies, for example
                ``jax.NamedSharding(mesh, jax.P("rows"))``, or ``jax.P(None, "rows")`` for stacked tensors.

        Raises:
            KeyError: no tensor has this name; the message suggests near ones.
            TypeError: a tensor is not Q4_K, a name is no string, or ``sharding`` is no sharding.
            ValueError: no name is given, the tensors' shapes differ, the sharding does not divide them, or
                the file object is closed.
            GGUFError: the file has shrunk since it was opened.

        Source: ``docs/sharding.md`` has the whole recipe.
        """
        import jax

        if not isinstance(sharding, jax.sharding.Sharding):
            raise TypeError(f"sharding must be a jax.sharding.Sharding, got {type(sharding).__name__}")
        names = [name] if isinstance(name, str) else list(name)
        if not names:
            raise ValueError("device_records: no tensor is named")
        views = [self.records(each) for each in names]
        for each, view in zip(names, views, strict=True):
            if view.shape != views[0].shape:
                raise ValueError(
                    f"tensors to be stacked must have one shape, but {names[0]!r} has records {views[0].shape} "
                    f"and {each!r} {view.shape}"
                )
        source = self._held().source

        def tile(index: tuple[slice, ...] | None) -> NDArray[np.uint8]:
            assert index is not None  # only JAX's numbers of rank zero have none
            layers, within = (slice(None), index) if isinstance(name, str) else (index[0], index[1:])
            parts = [view[within] for view in views[layers]]
            out = _aligned((len(parts), *parts[0].shape))
            for row, part in zip(out, parts, strict=True):
                source.copy(row, part)
            return out[0] if isinstance(name, str) else out

        shape = views[0].shape if isinstance(name, str) else (len(views), *views[0].shape)
        return jax.make_array_from_callback(shape, sharding, tile)

    def array(self, name: str) -> NDArray[np.float32]:
        """A tensor of any type as float32, in its row-major shape; a fresh array that owns its memory.

        Stored floats and integers are rounded to the nearest float32. Q4_K and Q8_K are dequantized by
        :mod:`jaxquant.records`, other block types by the ``gguf`` package.

        Raises:
            KeyError: no tensor has this name; the message suggests near ones.
            TypeError: ``name`` is no string.
            ImportError: the type needs the ``gguf`` package: ``pip install jaxquant[gguf]``.
            NotImplementedError: the installed ``gguf`` package cannot dequantize the type.
            ValueError: the file object is closed.
            GGUFError: the file has shrunk since it was opened.
        """
        info, raw = self._tensor(name)
        type_ = _TYPES_BY_NAME[info.type]
        if type_.dtype is not None or info.nbytes == 0:
            with np.errstate(over="ignore", invalid="ignore"):  # a float64 may exceed float32: infinity
                return raw.view(type_.dtype or np.float32).astype(np.float32).reshape(info.shape)
        if info.type == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
        blocks = raw.reshape(*info.shape[:-1], info.shape[-1] // type_.block_size, type_.block_bytes)
        if info.type in ("Q4_K", "Q8_K"):
            from jaxquant import quant
            from jaxquant.records import dequantize

            record_format = quant.q4_k if info.type == "Q4_K" else quant.q8_k
            return np.asarray(dequantize(blocks, record_format)).reshape(info.shape)
        return _dequantize_with_gguf(info, blocks)

    def close(self) -> None:
        """End this object's hold on the file; views and mappings taken out of it stay valid."""
        object.__setattr__(self, "_metadata", None)

    def __enter__(self) -> GGUFFile:
        self._held()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._metadata is None else "open"
        return f"<GGUFFile {self.path!r}: {len(self.tensors)} tensors, {state}>"

    def _held(self) -> _Metadata:
        if self._metadata is None:
            raise ValueError(f"{self.path} is closed")
        return self._metadata

    def _tensor(self, name: str) -> tuple[TensorInfo, NDArray[np.uint8]]:
        source = self._held().source
        if not isinstance(name, str):
            raise TypeError(f"a tensor's name is a str, got {type(name).__name__}")
        if name not in self._tensors:
            raise _unknown(f"{self.path} has no tensor", name, self._tensors)
        source.check_not_shrunk()
        info = self._tensors[name]
        return info, source.bytes[info.offset : info.offset + info.nbytes]


def open(path: str | os.PathLike[str]) -> GGUFFile:  # noqa: A001 - read as jaxquant.gguf.open
    """Open a GGUF file (version 2 or 3, little-endian) for reading.

    Only the header is walked; a real file with 262144 vocabulary pieces opens in a fraction of a second.
    The result works as a context manager and without one; see :class:`GGUFFile` for how long views live.

    Raises:
        GGUFError: the file is empty, truncated, no regular file, no GGUF file, big-endian, of another
            version, or inconsistent: a count or length it has no room for, a duplicate key or name, an
            unknown type, a row length that is no multiple of the type's block, an illegal alignment, or
            tensor data that are unaligned, overlap, or lie past the end. Also for more than 262144 keys
            and tensors, 4194304 strings in arrays, 4 dimensions or 4 nested arrays.
        OSError: the file cannot be opened (FileNotFoundError, PermissionError) or mapped.

    Source: the GGUF specification; where its text leaves a choice (alignment a power of two, at most four
    dimensions, no duplicates) what ggml's own reader accepts.
    """
    return GGUFFile(path)


def _read_header(cursor: _Cursor) -> tuple[dict[str, tuple[int, int]], dict[str, TensorInfo]]:
    _read_version(cursor)
    tensor_count = cursor.number(_U64, "the tensor count")
    key_count = cursor.number(_U64, "the metadata count")
    cursor.claim_entries(key_count, 13, "metadata keys")
    cursor.claim_entries(tensor_count, 24, "tensors")

    places: dict[str, tuple[int, int]] = {}
    for index in range(key_count):
        key = cursor.text(f"metadata key {index}", _MAX_NAME)
        if key in places:
            raise cursor.error(f"metadata key {key!r} occurs twice")
        kind = cursor.number(_U32, f"value type of metadata {key!r}")
        places[key] = (kind, cursor.pos)
        cursor.skip_value(kind, f"metadata {key!r}")

    alignment = _alignment(cursor, places)
    relative: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        info = _read_tensor(cursor, index, alignment)
        if info.name in relative:
            raise cursor.error(f"tensor name {info.name!r} occurs twice")
        relative[info.name] = info
    data_start = -(-cursor.pos // alignment) * alignment
    return places, _place_tensors(cursor, relative, data_start)


def _read_version(cursor: _Cursor) -> None:
    magic = cursor.source.map[:4]
    if magic != b"GGUF"[: len(magic)]:
        raise cursor.error(f"starts with {magic!r}, not with b'GGUF': not a GGUF file")
    cursor.skip(4, "the magic number")
    version = cursor.number(_U32, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, 2, 3):
            raise cursor.error(f"is big-endian (version {swapped}); only little-endian files are read")
        raise cursor.error(f"has GGUF version {version}; versions 2 and 3 are read")


def _alignment(cursor: _Cursor, places: dict[str, tuple[int, int]]) -> int:
    if "general.alignment" not in places:
        return 32
    kind, pos = places["general.alignment"]
    if kind != _UINT32:
        raise cursor.error(f"general.alignment has value type {kind}, wanted 4 (uint32)")
    alignment = _Cursor(cursor.source, pos).number(_U32, "general.alignment")
    if alignment % 8 or alignment.bit_count() != 1:
        raise cursor.error(f"general.alignment is {alignment}, wanted a power of two from 8 up")
    return alignment


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """One tensor's entry; its offset still counts from the start of the data."""
    name = cursor.text(f"name of tensor {index}", _MAX_NAME)
    rank = cursor.number(_U32, f"rank of tensor {name!r}")
    if rank > _MAX_RANK:
        raise cursor.error(f"tensor {name!r} has {rank} dimensions, at most {_MAX_RANK} are allowed")
    extents = [cursor.number(_U64, f"extent {axis} of tensor {name!r}") for axis in range(rank)]
    shape = tuple(reversed(extents))  # stored with the fastest axis first
    if math.prod(max(extent, 1) for extent in shape) > _MAX_ELEMENTS:
        raise cursor.error(f"tensor {name!r} has shape {shape}: too many elements")
    type_id = cursor.number(_U32, f"type of tensor {name!r}")
    type_ = _TYPES.get(type_id)
    if type_ is None:
        raise cursor.error(f"tensor {name!r} has the unknown type {type_id}")
    K = shape[-1] if shape else 1
    if K % type_.block_size:
        raise cursor.error(
            f"tensor {name!r} is {type_.name} with K = {K}, wanted a multiple of {type_.block_size}"
        )
    offset = cursor.number(_U64, f"offset of tensor {name!r}")
    if offset % alignment:
        raise cursor.error(f"tensor {name!r} has offset {offset}, wanted a multiple of {alignment}")
    nbytes = math.prod(shape) // type_.block_size * type_.block_bytes
    return TensorInfo(name, type_.name, shape, offset, nbytes)


def _place_tensors(
    cursor: _Cursor, relative: dict[str, TensorInfo], data_start: int
) -> dict[str, TensorInfo]:
    size = cursor.source.size
    tensors = {}
    for name, info in relative.items():
        placed = TensorInfo(name, info.type, info.shape, data_start + info.offset, info.nbytes)
        end = placed.offset + placed.nbytes
        if end > size:
            raise cursor.error(
                f"tensor {name!r} lies at offsets {placed.offset} to {end}, but the file ends at {size}: "
                "it is truncated or damaged"
            )
        tensors[name] = placed
    stored = sorted((info for info in tensors.values() if info.nbytes), key=lambda info: info.offset)
    for before, after in pairwise(stored):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(f"tensors {before.name!r} and {after.name!r} overlap at offset {after.offset}")
    return tensors


def _dequantize_with_gguf(info: TensorInfo, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(
            f"tensor {info.name!r} is {info.type}, which the gguf package dequantizes: "
            "pip install jaxquant[gguf]"
        ) from error
    rows = blocks.reshape(*blocks.shape[:-2], -1)
    try:
        with np.errstate(all="ignore"):  # legal records may hold infinities and NaN
            values = quants.dequantize(rows, GGMLQuantizationType[info.type])
    except (KeyError, NotImplementedError) as error:
        raise NotImplementedError(
            f"tensor {info.name!r} is {info.type}, which the installed gguf package cannot dequantize"
        ) from error
    return values.reshape(info.shape)


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    size = math.prod(shape)
    raw = np.empty(size + _XLA_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _XLA_ALIGNMENT
    return raw[start : start + size].reshape(shape)


def _unknown(message: str, name: object, known: Iterable[str]) -> KeyError:
    # difflib is slow on long and on very many names, and a hostile file may have both.
    candidates = islice((other for other in known if len(other) <= 128), 4096)
    near = difflib.get_close_matches(str(name)[:128], candidates)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    return KeyError(f"{message} {name!r}{hint}")
