"""Save and load arrays: safetensors files, vendors' layouts, and a state that any checkpoint can hold.

`save`, `load` and `open` speak safetensors, with every type of its header: F4, F6_E2M3, F6_E3M2, F8_E8M0 and
the ordinary ones. Block-scaled, narrow and swizzled arrays are saved as named planes, with what is static about
them in the file's metadata; a round trip gives the same bytes. `from_gpt_oss`, `from_compressed_tensors` and
`from_gguf` read what others write, their ``to_`` counterparts write it. `to_state` and `from_state` are for
``np.savez`` and Orbax.

What is saved carries `FORMAT_VERSION`, and a newer one is refused.

Example:
    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> import jaxquant.io
    >>> from jaxquant import DType, quantize_blocks
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "weights.safetensors"
    >>> weight = quantize_blocks(np.ones((2, 64), np.float32), DType.MXFP4)
    >>> jaxquant.io.save(path, {"w": weight, "bias": np.zeros(2, np.float32)})

    >>> with jaxquant.io.open(path) as file:
    ...     for tensor in file.tensors.values():
    ...         print(tensor.name, tensor.type, tensor.shape)
    ...     print(file.array("w").format, file["w.scales.0"].tolist())
    bias F32 (2,)
    w.scales.0 F8_E8M0 (2, 2)
    w.elements F4 (2, 64)
    BlockScaledDType('MXFP4') [[0.25, 0.25], [0.25, 0.25]]

    >>> path.unlink()
    >>> path.parent.rmdir()

Source: ``docs/interchange.md``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import numpy as np

from jaxquant import io_state
from jaxquant.arrays.narrow import NarrowArray
from jaxquant.arrays.swizzled import SwizzledArray
from jaxquant.io_safetensors import (
    TYPES,
    Mapped,
    Outgoing,
    SafetensorsError,
    StoredTensor,
    StoredType,
    read,
    write,
)
from jaxquant.io_state import FORMAT_VERSION, from_state, to_state
from jaxquant.io_vendors import (
    from_compressed_tensors,
    from_gguf,
    from_gguf_blocks,
    from_gpt_oss,
    to_compressed_tensors,
    to_gguf_blocks,
    to_gpt_oss,
)

__all__ = [
    "FORMAT_VERSION",
    "SafetensorsError",
    "SafetensorsFile",
    "StoredTensor",
    "from_compressed_tensors",
    "from_gguf",
    "from_gguf_blocks",
    "from_gpt_oss",
    "from_state",
    "load",
    "open",
    "save",
    "to_compressed_tensors",
    "to_gguf_blocks",
    "to_gpt_oss",
    "to_state",
]

_OURS = "jaxquant"
_PATH = str | os.PathLike[str]


class _Described(NamedTuple):
    """A logical array: its description, and the stored name of each plane."""

    node: Any
    planes: dict[str, str]


class SafetensorsFile(Mapping[str, Any]):
    """An open safetensors file, as :func:`open` returns it: a mapping from the names of tensors to arrays.

    ``file[name]`` is one tensor as it is stored, a read-only NumPy view of the mapped file: an array of the
    header's type, or a `NarrowArray` packed along the last axis for F4 and F6. :meth:`array` gives what was
    saved under a name, put together from its planes. Nothing else is read.

    ``close()``, or leaving a ``with`` block, ends this object's hold on the file. Whatever was taken out before
    stays valid: views keep the file mapped for as long as they live. The file must not be changed while it is
    mapped; `save` replaces files instead of changing them.

    Attributes:
        path: the path.
        tensors: a `StoredTensor` for each name, in the order of the bytes; readable after close.
        metadata: the strings of the file's metadata, without this library's own entry; readable after close.
        names: the names that :meth:`array` and `load` know.
    """

    __slots__ = ("_arrays", "_source", "metadata", "path", "tensors")

    path: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    _source: Mapped | None
    _arrays: dict[str, _Described]

    def __init__(self, path: _PATH) -> None:
        source = Mapped(path)
        metadata, tensors = read(source)
        arrays = _described(source, metadata.pop(_OURS, None), tensors)
        for attribute, value in (
            ("path", source.path),
            ("tensors", MappingProxyType(tensors)),
            ("metadata", MappingProxyType(metadata)),
            ("_source", source),
            ("_arrays", arrays),
        ):
            object.__setattr__(self, attribute, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a SafetensorsFile is immutable: cannot set {name!r}")

    @property
    def names(self) -> tuple[str, ...]:
        planes = {plane for described in self._arrays.values() for plane in described.planes.values()}
        return (*(name for name in self.tensors if name not in planes), *self._arrays)

    def array(self, name: str) -> Any:
        """What was saved under a name: an array or `NarrowArray`, a `BlockScaledArray` or a `SwizzledArray`.

        Its planes are read-only NumPy views of the file. Of a file that others wrote, the same as ``file[name]``.

        Raises:
            KeyError: nothing has this name; the message suggests near ones.
            ValueError: the file object is closed.
            SafetensorsError: the description and the planes do not fit each other, a boolean is neither 0 nor 1,
                or the file has shrunk since it was opened.
        """
        source = self._held()
        if name not in self._arrays:
            return self[name]
        node, planes = self._arrays[name]
        try:
            stored = {plane: self[tensor] for plane, tensor in planes.items()}
            return io_state.rebuild(node, stored, name)
        except SafetensorsError:
            raise
        except ValueError as error:
            raise SafetensorsError(f"{source.path}: {error}") from error

    def __getitem__(self, name: str) -> Any:
        source = self._held()
        if name not in self.tensors:
            raise _unknown(self, name)
        tensor = self.tensors[name]
        type_, raw = TYPES[tensor.type], source.view(tensor)
        if type_.dtype is None:
            *rows, last = tensor.shape
            return NarrowArray(raw.reshape(*rows, last * type_.bits // 8), type_.narrow)
        if type_.dtype == np.bool_ and raw.size and raw.max() > 1:
            source.fail(f"tensor {name!r} holds the boolean {raw.max()}, legal are 0 and 1")
        return raw.view(type_.dtype).reshape(tensor.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def close(self) -> None:
        """End this object's hold on the file; views taken out of it stay valid."""
        object.__setattr__(self, "_source", None)

    def __enter__(self) -> SafetensorsFile:
        self._held()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._source is None else "open"
        return f"<SafetensorsFile {self.path!r}: {len(self.tensors)} tensors, {state}>"

    def _held(self) -> Mapped:
        if self._source is None:
            raise ValueError(f"{self.path} is closed")
        return self._source


def open(path: _PATH) -> SafetensorsFile:  # noqa: A001 - read as jaxquant.io.open
    """Open a safetensors file for reading; only its header is read, tensors are mapped when they are asked for.

    Raises:
        SafetensorsError: the file is empty, truncated, no regular file, or no safetensors file: a header that is
            longer than the file or 100 MB, no JSON, or holds more than 2097152 values; a name that occurs twice,
            an unknown dtype, a shape whose bytes are not those of its offsets, rows of F4 or F6 that are no whole
            bytes, tensors that overlap, leave gaps or lie past the end; a description of a newer format version.
            Each in bounded time and memory.
        OSError: the file cannot be opened (FileNotFoundError, PermissionError) or mapped.

    Source: the format section of the safetensors README; where it leaves a choice, what its reference reader
    accepts, except for names that occur twice and rows that end inside a byte, which that one takes.
    """
    return SafetensorsFile(path)


def load(path: _PATH, *, library: Literal["numpy", "jax"] = "numpy") -> dict[str, Any]:
    """All that is in a safetensors file, by the names it was saved under, in memory of its own.

    Args:
        path: the file.
        library: ``"numpy"`` or ``"jax"``, of which the arrays shall be.

    Returns:
        Arrays, `NarrowArray`, `BlockScaledArray` and `SwizzledArray`, the bytes and dtypes that were saved.

    Raises:
        ValueError: for another ``library``.
        TypeError: under JAX, for a dtype that JAX cannot hold: 64 bits without ``jax_enable_x64``, dense float6.
        SafetensorsError, OSError: as `open` and `SafetensorsFile.array`.

    Example: see the module.
    """
    if library not in ("numpy", "jax"):
        raise ValueError(f"load: library must be 'numpy' or 'jax', got {library!r}")
    with open(path) as file:
        arrays = {name: file.array(name) for name in file.names}
    if library == "jax":
        return {name: io_state.to_jax(array, name) for name, array in arrays.items()}
    return {name: jax.tree_util.tree_map(np.copy, array) for name, array in arrays.items()}


def save(path: _PATH, arrays: Mapping[str, Any], *, metadata: Mapping[str, str] | None = None) -> None:
    """Save arrays in a safetensors file, which is put in place of an older one when it is whole.

    A `BlockScaledArray` becomes the tensors ``<name>.elements``, ``<name>.scales.0`` (innermost) and so on, of the
    types that the header has for them: F4 and F6 for codes packed along the last axis, F8_E8M0 and F8_E4M3 for
    scales. A `NarrowArray` or `SwizzledArray` becomes one tensor, the latter of its buffer. Where the header has
    no type (other widths, another packed axis), bytes are saved as U8. Dense arrays of float4 and float6 are
    packed. What a tensor alone does not tell goes into the metadata, under ``"jaxquant"``, with the format version.

    Args:
        path: the file.
        arrays: `BlockScaledArray`, `NarrowArray`, `SwizzledArray`, or NumPy or JAX arrays, by name.
        metadata: strings by name, to be kept in the file's own metadata.

    Raises:
        TypeError: for what is none of these, or an array of a dtype that the file cannot hold.
        ValueError: for a bad name, one that another array's plane has, dense float4 or float6 whose last axis is
            no whole bytes, or ``"jaxquant"`` among the metadata.
        OSError: the file cannot be written.

    Example: see the module.

    Source: ``docs/interchange.md``.
    """
    tensors: dict[str, Outgoing] = {}
    described: dict[str, Any] = {}
    for name, array in arrays.items():
        _check_name(name)
        node = io_state.describe(array, f"save: {name!r}")
        tells = False
        for plane, values in io_state.planes_of(array):
            stored = f"{name}.{plane}" if plane else name
            if stored in tensors:
                raise ValueError(f"save: two tensors would have the name {stored!r}")
            tensors[stored] = _outgoing(stored, values)
            tells = not plane and _tells_all(tensors[stored].type, values)
        if not tells:
            described[name] = node
    strings = dict(metadata or {})
    for key, value in strings.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"save: metadata must be strings by strings, got {key!r}: {type(value).__name__}")
    if _OURS in strings:
        raise ValueError(f"save: the metadata entry {_OURS!r} is this library's own")
    if described:
        strings[_OURS] = json.dumps({"version": FORMAT_VERSION, "arrays": described}, separators=(",", ":"))
    write(path, list(tensors.values()), strings)


def _described(
    source: Mapped, text: str | None, tensors: Mapping[str, StoredTensor]
) -> dict[str, _Described]:
    if text is None:
        return {}
    what = f"metadata {_OURS!r}"

    def fail(message: str) -> NoReturn:
        raise SafetensorsError(f"{source.path}: {message}")

    try:
        ours = io_state.parse(text, what)
        if not isinstance(ours, dict):
            fail(f"{what} is {type(ours).__name__}, wanted an object")
        io_state.check_version(ours.get("version"), what)
        nodes = ours.get("arrays")
        if not isinstance(nodes, dict):
            fail(f"{what} has no object 'arrays'")
        arrays = {}
        for name, node in nodes.items():
            planes = {
                plane: f"{name}.{plane}" if plane else name for plane in io_state.plane_names(node, name)
            }
            for tensor in planes.values():
                if tensor not in tensors:
                    fail(f"{what} describes {name!r}, but the file has no tensor {tensor!r}")
            arrays[name] = _Described(node, planes)
    except SafetensorsError:
        raise
    except ValueError as error:
        raise SafetensorsError(f"{source.path}: {error}") from error
    return arrays


_BY_DTYPE = {type_.dtype: type_ for type_ in TYPES.values() if type_.dtype is not None}
_BY_NARROW = {type_.narrow: type_ for type_ in TYPES.values() if type_.narrow is not None}
_DENSE_NARROW = {f"float{type_.bits}_{name.lower()}fn": type_ for name, type_ in _BY_NARROW.items()}


def _outgoing(name: str, plane: Any) -> Outgoing:
    """A plane as a tensor of the type that tells most of it."""
    if isinstance(plane, NarrowArray):
        data = plane.data
        narrow = _BY_NARROW.get(plane.dtype.name) if plane.axis == -1 else None
        if narrow is not None and narrow.bits < 8:
            return Outgoing(name, narrow, plane.shape, lambda: np.asarray(data))
        return Outgoing(name, TYPES["U8"], data.shape, lambda: np.asarray(data))
    values = plane.storage if isinstance(plane, SwizzledArray) else plane
    dtype = io_state.scalar_dtype(np.dtype(values.dtype))
    if dtype.name in _DENSE_NARROW:
        dense = _DENSE_NARROW[dtype.name]
        if not values.shape or values.shape[-1] % dense.whole:
            raise ValueError(
                f"save: {name!r} is {dtype} of shape {values.shape}: {dense.name} wants a last axis that is a "
                f"multiple of {dense.whole}, so that rows are whole bytes; uint8 codes can have any"
            )
        narrow_name = dense.narrow
        return Outgoing(
            name,
            dense,
            values.shape,
            lambda: NarrowArray.from_codes(np.asarray(values).view(np.uint8), narrow_name).data,
        )
    if dtype in _BY_DTYPE:
        return Outgoing(
            name, _BY_DTYPE[dtype], values.shape, lambda: np.asarray(values).astype(dtype, copy=False)
        )
    if dtype.itemsize == 1:
        return Outgoing(name, TYPES["U8"], values.shape, lambda: np.asarray(values).view(np.uint8))
    raise TypeError(f"save: {name!r} is {dtype}, which safetensors has no type for")


def _tells_all(type_: StoredType, array: Any) -> bool:
    """Whether a reader makes the same array of the tensor without a description."""
    if isinstance(array, NarrowArray):
        return type_.narrow is not None
    return isinstance(array, np.ndarray | jax.Array) and type_.dtype == array.dtype.newbyteorder("<")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"save: a name is a str, got {type(name).__name__}")
    if name == "__metadata__":
        raise ValueError("save: '__metadata__' is the name of the file's metadata")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"save: the name {name!r} is no Unicode text: {error}") from None


def _unknown(file: SafetensorsFile, name: object) -> KeyError:
    # difflib is slow on long and on very many names, and a hostile file may have both.
    candidates = islice((other for other in file.names if len(other) <= 128), 4096)
    near = difflib.get_close_matches(str(name)[:128], candidates)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    return KeyError(f"{file.path} has no tensor {name!r}{hint}")
