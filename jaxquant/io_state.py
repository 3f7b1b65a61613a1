"""Arrays as named planes and a description in JSON, and back; what is saved carries a format version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import casts
from jaxquant.arrays.block_scaled import BlockScaledArray, build
from jaxquant.arrays.narrow import NarrowArray, bit_width
from jaxquant.arrays.swizzled import SwizzledArray
from jaxquant.dtypes import BlockScaledDType, SimpleDType, Whole

__all__ = [
    "FORMAT_VERSION",
    "check_version",
    "describe",
    "from_state",
    "parse",
    "planes_of",
    "rebuild",
    "scalar_dtype",
    "to_jax",
    "to_state",
]

FORMAT_VERSION = 1
"""The version of descriptions written here; a newer one is refused."""

Node: TypeAlias = dict[str, Any]

# What a description may name besides the native dtypes; more than one byte wide only bfloat16.
_EXTENSIONS = {
    np.dtype(scalar).name: np.dtype(scalar)
    for scalar in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e3m4,
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
        ml_dtypes.float6_e2m3fn,
        ml_dtypes.float6_e3m2fn,
        ml_dtypes.float4_e2m1fn,
        ml_dtypes.int2,
        ml_dtypes.int4,
        ml_dtypes.uint2,
        ml_dtypes.uint4,
    )
}
_NATIVE = {
    dtype.name: dtype
    for dtype in map(np.dtype, ("bool", *"bhilBHILefdFD"))  # by letters, as "int" differs by platform
}
_SUB_BYTE = tuple(dtype for dtype in _EXTENSIONS.values() if bit_width(dtype) < 8)


def scalar_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The little-endian form of a dtype that can be saved. Raises TypeError for any other."""
    known = _EXTENSIONS.get(dtype.name) or _NATIVE.get(dtype.name)
    if known is None or known != dtype.newbyteorder("="):
        raise TypeError(f"an array of dtype {dtype} cannot be saved")
    return known


def describe(array: Any, what: str) -> Node:
    """The static description of an array, whose planes are those of `planes_of`. Raises TypeError."""
    if isinstance(array, BlockScaledArray):
        coding = array._coding
        return {
            "kind": "block_scaled",
            "format": None if array.format is None else array.format.name,
            "coding": None if coding is None else _describe_chain(coding),
            "dtype": array.dtype.name,
            "block_size": ["Whole" if block is Whole else block for block in array._blocks],
            "padding": list(array._padding),
            "elements": describe(array.elements, f"{what}.elements"),
            "scales": [describe(level, f"{what}.scales.{i}") for i, level in enumerate(array.levels)],
        }
    if isinstance(array, NarrowArray):
        dtype = array.dtype
        if isinstance(dtype, SimpleDType):
            return {"kind": "narrow", "name": dtype.name, "bits": bit_width(dtype), "axis": array.axis}
        return {"kind": "narrow", "dtype": scalar_dtype(dtype).name, "axis": array.axis}
    if isinstance(array, SwizzledArray):
        pattern = array.pattern
        rearranged = len(pattern.left) - 1
        grouped = [name for group in pattern.right if len(group) > 1 for name in group]
        if "shape" in grouped:
            raise ValueError(f"{what}: a swizzled array with a factor named 'shape' cannot be saved")
        return {
            "kind": "swizzled",
            "dtype": scalar_dtype(array.dtype).name,
            "pattern": str(pattern),
            "sizes": {name: array.sizes[name] for name in grouped},
            "shape": list(array.shape[array.ndim - rearranged :]),
        }
    if isinstance(array, np.ndarray | jax.Array):
        return {"kind": "array", "dtype": scalar_dtype(np.dtype(array.dtype)).name}
    raise TypeError(
        f"{what} must be a NumPy or JAX array, a BlockScaledArray, a NarrowArray or a SwizzledArray, "
        f"got {type(array).__name__}"
    )


def _describe_chain(dtype: BlockScaledDType) -> Node:
    levels = [[level.scale.name, "Whole" if level.is_whole() else level.block] for level in dtype.levels]
    return {"name": dtype.name, "element": dtype.element.name, "levels": levels}


def planes_of(array: Any) -> Iterator[tuple[str, Any]]:
    """The planes by name: one nameless, or ``elements`` and ``scales.0`` (inner) and up. A plane is an array of
    the library, not its bytes."""
    if isinstance(array, BlockScaledArray):
        yield "elements", array.elements
        for i, level in enumerate(array.levels):
            yield f"scales.{i}", level
    else:
        yield "", array


def plane_names(node: Any, what: str) -> list[str]:
    """The names of the planes that a description speaks of."""
    if _field(node, "kind", str, what) == "block_scaled":
        return ["elements", *(f"scales.{i}" for i in range(len(_field(node, "scales", list, what))))]
    return [""]


def rebuild(node: Any, planes: Mapping[str, Any], what: str) -> Any:
    """The array of a description and its planes as they were stored: arrays of its dtype or of unsigned integers
    of its size, or a NarrowArray. Raises ValueError for what does not fit."""
    kind = _field(node, "kind", str, what)
    if kind == "block_scaled":
        return _rebuild_block_scaled(node, planes, what)
    plane = planes[""]
    if kind == "array":
        return _typed(plane, _field(node, "dtype", str, what), what)
    if kind == "narrow":
        return _rebuild_narrow(node, plane, what)
    if kind == "swizzled":
        storage = _typed(plane, _field(node, "dtype", str, what), what)
        sizes, shape = _field(node, "sizes", dict, what), _field(node, "shape", list, what)
        if "shape" in sizes:
            raise ValueError(f"{what}: the description sizes a factor named 'shape'")
        try:
            return SwizzledArray(storage, _field(node, "pattern", str, what), shape=shape, **sizes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}: {error}") from error
    raise ValueError(f"{what}: the description is of the unknown kind {kind!r}")


def _rebuild_narrow(node: Any, plane: Any, what: str) -> NarrowArray:
    dtype: Any
    if "name" in node:
        dtype = _registered(SimpleDType, _field(node, "name", str, what), what)
        bits = _field(node, "bits", int, what)
        if bit_width(dtype) != bits:
            raise ValueError(
                f"{what}: was saved with {dtype.name} of {bits} bits, here it has {bit_width(dtype)}"
            )
    else:
        dtype = _named_dtype(_field(node, "dtype", str, what), what)
    axis = _field(node, "axis", int, what)
    if isinstance(plane, NarrowArray):
        if (plane.dtype, plane.axis) != (dtype, axis):
            raise ValueError(f"{what}: stores {plane.dtype} along axis {plane.axis}, described as {node}")
        return plane
    try:
        return NarrowArray(plane, dtype, axis)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _rebuild_block_scaled(node: Any, planes: Mapping[str, Any], what: str) -> BlockScaledArray:
    names = plane_names(node, what)
    described = [_field(node, "elements", dict, what), *_field(node, "scales", list, what)]
    for name, part in zip(names, described, strict=True):
        if _field(part, "kind", str, f"{what}.{name}") == "block_scaled":
            raise ValueError(f"{what}.{name}: a plane cannot be block-scaled itself")
    elements, *levels = (
        rebuild(part, {"": planes[name]}, f"{what}.{name}")
        for name, part in zip(names, described, strict=True)
    )
    coding = _rebuild_chain(node, what)
    name = node.get("format")
    if name is not None and (coding is None or name != coding.name):
        raise ValueError(f"{what}: has format {name!r}, but codes of {coding!r}")
    blocks = tuple(Whole if block == "Whole" else block for block in _field(node, "block_size", list, what))
    padding = tuple(_field(node, "padding", list, what))
    try:
        # Checks planes and blocks. The format's own check would refuse a stack, which has an outermost scale
        # for each of its arrays.
        array = BlockScaledArray(
            tuple(levels), elements, blocks, dtype=_named_dtype(_field(node, "dtype", str, what), what)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error
    stored = array.padded_shape[array.ndim - len(padding) :]
    fits = len(padding) <= array.ndim and all(
        type(extra) is int and 0 <= extra <= extent for extra, extent in zip(padding, stored, strict=True)
    )
    if not fits:
        raise ValueError(f"{what}: padding {padding} does not fit elements of shape {array.padded_shape}")
    if coding is not None:
        _check_coding(coding, array, what)
    return build(
        array.levels, elements, coding if name else None, array.dtype, array._blocks, coding, padding
    )


def _check_coding(coding: BlockScaledDType, array: BlockScaledArray, what: str) -> None:
    if len(array.levels) != len(coding.levels):
        raise ValueError(f"{what}: {coding.name} has {len(coding.levels)} levels, got {len(array.levels)}")
    wanted = (coding.element, *(level.scale for level in coding.levels))
    for name, plane, dtype in zip(
        ("elements", *(f"scales.{i}" for i in range(len(array.levels)))),
        (array.elements, *array.levels),
        wanted,
        strict=True,
    ):
        codes = name == "elements" and not isinstance(plane, NarrowArray) and plane.dtype == np.uint8
        if not codes and plane.dtype not in (dtype, dtype.numpy_dtype):
            raise ValueError(f"{what}: {name} of {coding.name} must store {dtype.name}, got {plane.dtype}")


def _rebuild_chain(node: Any, what: str) -> BlockScaledDType | None:
    if node.get("coding") is None:
        return None
    chain = _field(node, "coding", dict, what)
    dtype: BlockScaledDType = _registered(BlockScaledDType, _field(chain, "name", str, what), what)
    if _describe_chain(dtype) != chain:
        raise ValueError(
            f"{what}: was saved with another {dtype.name} ({chain}) than the one registered here"
        )
    return dtype


def _registered(kind: Any, name: str, what: str) -> Any:
    try:
        return kind.from_name(name)
    except LookupError:
        raise ValueError(f"{what}: no {kind.__name__} {name!r} is registered here") from None


def _named_dtype(name: str, what: str) -> np.dtype[Any]:
    dtype = _EXTENSIONS.get(name) or _NATIVE.get(name)
    if dtype is None:
        raise ValueError(f"{what}: the description has the unknown dtype {name[:80]!r}")
    return dtype


def _typed(plane: Any, name: str, what: str) -> Any:
    dtype = _named_dtype(name, what)
    if isinstance(plane, NarrowArray):
        if casts.numpy_dtype(plane.dtype) != dtype:
            raise ValueError(f"{what}: stores {plane.dtype}, described as {name}")
        plane = plane.codes()
    if plane.dtype == dtype:
        return plane
    if name not in _EXTENSIONS or plane.dtype.kind != "u" or plane.dtype.itemsize != dtype.itemsize:
        raise ValueError(f"{what}: stores {plane.dtype}, described as {name}")
    if isinstance(plane, jax.Array) and dtype in _SUB_BYTE:
        return casts.cast(casts.decode(plane, dtype), dtype)
    return plane.view(dtype)


def _field(node: Any, key: str, kind: type, what: str) -> Any:
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what}: the description has no {key!r} of type {kind.__name__}")
    return value


def check_version(version: object, what: str) -> None:
    """Raises ValueError for a version that is none, or newer than this library's."""
    if type(version) is not int or version < 1:
        raise ValueError(f"{what}: has format version {version!r}, wanted an integer from 1 up")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{what}: was saved in format version {version} by a newer jaxquant; this one reads up to "
            f"{FORMAT_VERSION}"
        )


def parse(text: str | bytes, what: str) -> Any:
    """JSON of a description. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: the description is no JSON: {error}") from error


def to_jax(array: Any, what: str) -> Any:
    """The array with its planes copied into JAX arrays, bit for bit. Raises TypeError where JAX lacks the dtype."""

    def converted(leaf: Any) -> jax.Array:
        if leaf.dtype in _SUB_BYTE and leaf.dtype.name.startswith("float6"):
            raise TypeError(f"{what}: XLA has no {leaf.dtype}; save a NarrowArray, or load with NumPy")
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise TypeError(f"{what}: {leaf.dtype} under JAX needs jax_enable_x64")
        return jnp.array(leaf)

    return jax.tree_util.tree_map(converted, array)


def to_state(array: Any) -> dict[str, np.ndarray[Any, Any]]:
    """An array as a flat dict of NumPy arrays of native dtypes, for ``np.savez`` or a checkpoint.

    Args:
        array: a `BlockScaledArray`, a `NarrowArray`, a `SwizzledArray`, or a NumPy or JAX array of any dtype that
            NumPy or ml_dtypes has a name for.

    Returns:
        ``version``, int32 [], the format version; ``description``, uint8 [n], the static data as UTF-8 JSON; and
        the planes: ``elements``, ``scales.0`` (innermost), ``scales.1`` ... of a `BlockScaledArray`, ``values``
        of anything else. A plane of a dtype that is not NumPy's own, which ``np.save`` would lose, is stored as
        unsigned integers of its size. NumPy planes are not copied.

    Raises:
        TypeError: for what is no array, or of a dtype that has no portable bytes (objects, strings, dates).

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType, quantize_blocks
        >>> from jaxquant.io import from_state, to_state
        >>> state = to_state(quantize_blocks(np.ones((1, 32), np.float32), DType.MXFP4))
        >>> {name: (plane.dtype.name, plane.shape) for name, plane in state.items() if name != "description"}
        {'version': ('int32', ()), 'elements': ('uint8', (1, 16)), 'scales.0': ('uint8', (1, 1))}
        >>> from_state(state).format
        BlockScaledDType('MXFP4')

    Source: section "Interchange" of ``docs/interchange.md``.
    """
    node = describe(array, "to_state: array")
    text = json.dumps(node, separators=(",", ":")).encode()
    state: dict[str, np.ndarray[Any, Any]] = {
        "version": np.array(FORMAT_VERSION, np.int32),
        "description": np.frombuffer(text, np.uint8).copy(),
    }
    for name, plane in planes_of(array):
        (leaf,) = jax.tree_util.tree_leaves(plane)
        values = np.asarray(leaf)
        dtype = scalar_dtype(values.dtype)
        native = (
            values.astype(dtype, copy=False) if dtype.name in _NATIVE else values.view(f"u{dtype.itemsize}")
        )
        state[name or "values"] = native
    return state


def from_state(state: Mapping[str, Any]) -> Any:
    """The array of a state that `to_state` made, bit for bit.

    Args:
        state: a mapping such as ``np.load`` gives for an ``.npz`` file, or a checkpoint restored to NumPy or JAX
            arrays; other keys are ignored.

    Returns:
        The array, on NumPy or JAX as its planes are.

    Raises:
        ValueError: for a missing entry, a newer format version, a description that is damaged or speaks of a
            dtype that is not registered here, and planes that do not fit it.

    Example:
        >>> import io, ml_dtypes, numpy as np
        >>> from jaxquant.io import from_state, to_state
        >>> buffer = io.BytesIO()
        >>> np.savez(buffer, **to_state(np.array([1, 2], ml_dtypes.float8_e8m0fnu)))
        >>> _ = buffer.seek(0)
        >>> from_state(np.load(buffer))
        array([1, 2], dtype='float8_e8m0fnu')

    Source: section "Interchange" of ``docs/interchange.md``.
    """
    what = "from_state"
    for key in ("version", "description"):
        if key not in state:
            raise ValueError(f"{what}: state has no {key!r}, wanted what to_state makes")
    version = np.asarray(state["version"])
    check_version(
        int(version) if version.ndim == 0 and version.dtype.kind in "iu" else version.tolist(), what
    )
    description = np.asarray(state["description"])
    if description.dtype != np.uint8 or description.ndim != 1:
        raise ValueError(f"{what}: description is {description.dtype}{description.shape}, wanted uint8 [n]")
    node = parse(description.tobytes(), what)
    planes = {}
    for name in plane_names(node, what):
        key = name or "values"
        if key not in state:
            raise ValueError(f"{what}: state has no plane {key!r}")
        planes[name] = state[key]
        if not isinstance(planes[name], np.ndarray | jax.Array):
            raise ValueError(f"{what}: plane {key!r} must be an array, got {type(planes[name]).__name__}")
    return rebuild(node, planes, what)
