"""Narrow arrays: values of 1 to 8 bits, packed without gaps into bytes.

The bytes are a little-endian bit stream along one axis: value 0 sits in the lowest bits of byte 0.

Source: sections "Pytrees, orientation, names" and "Narrow" of the array contract.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxquant import casts
from jaxquant.dtypes import DType, SimpleDType
from jaxquant.ops import bit_stream, blocks

__all__ = ["Narrow", "NarrowArray", "basic_index", "bit_width", "narrow"]

HostArray: TypeAlias = np.ndarray[Any, Any]
Array: TypeAlias = HostArray | jax.Array
NumpyDType: TypeAlias = np.dtype[Any]
NarrowDType: TypeAlias = SimpleDType | NumpyDType

# A longer array would be unpacked and copied to the host for its repr.
_LONGEST_SHOWN = 1000


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class NarrowArray:
    """An array of a dtype of 1 to 8 bits, packed along one axis into uint8.

    ``NarrowArray(data, dtype)`` presents existing bytes, without a copy; `pack` makes the bytes from values
    and `from_codes` from one code per byte. Shape, size and indices are those of the values.

    The object is a pytree whose one leaf is ``data``; dtype and axis are static, so that equal ones share a
    trace. The axis is counted from the end: `jax.vmap` and `jax.lax.scan` may strip and add leading axes, but
    not map over the packed one.

    Args:
        data: uint8 [...], NumPy or JAX, the packed bytes.
        dtype: a scalar type, numpy dtype, registered name or SimpleDType of 1 to 8 bits.
        axis: the packed axis.

    Raises:
        TypeError: if ``data`` is no uint8 array, ``dtype`` no simple dtype or ``axis`` no int.
        ValueError: if ``dtype`` is wider than 8 bits, ``data`` has no such axis, or its bytes along the axis
            are no whole number of chunks (3 bytes for 6 bits, 1 byte for 1, 2, 4 and 8).

    Example:
        >>> import numpy as np
        >>> from jaxquant.arrays.narrow import NarrowArray
        >>> packed = NarrowArray.pack(np.float32([0.5, 1, 1.5, 2]), "E2M1")
        >>> packed.data, packed.shape, packed.nbytes
        (array([33, 67], dtype=uint8), (4,), 2)
        >>> packed.unpack()
        array([0.5, 1. , 1.5, 2. ], dtype=float32)

    Source: NarrowArray of the microscaling seed; section "Narrow" of the array contract.
    """

    data: Any
    """uint8, the packed bytes."""
    dtype: NarrowDType
    """The descriptor, or the numpy dtype where no descriptor is registered for it."""
    axis: int
    """The packed axis, counted from the end."""

    def __init__(self, data: Array, dtype: object, axis: int = -1) -> None:
        resolved = _resolve("NarrowArray", dtype)
        _check_bytes("NarrowArray", "data", data)
        position = _negative_axis("NarrowArray", data, axis)
        _, chunk = bit_stream.chunk(bit_width(resolved))
        if data.shape[position] % chunk:
            raise ValueError(
                f"NarrowArray: data has shape {data.shape}, but axis {position} must hold a multiple of {chunk} "
                f"bytes for {_name(resolved)}"
            )
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "dtype", resolved)
        object.__setattr__(self, "axis", position)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("NarrowArray is final")

    @classmethod
    def pack(cls, x: Array, dtype: object, axis: int = -1) -> NarrowArray:
        """Round values to a dtype and pack them.

        Args:
            x: NumPy or JAX. Floats of 16 or 32 bits round to the nearest value, ties to even, as by
                `jaxquant.casts.encode` with its default policy; integers go to an integer dtype and saturate;
                booleans go to Bool; an array of ``dtype`` itself goes as it is.
            dtype: as in the constructor.
            axis: the axis to pack.

        Returns:
            A NarrowArray of the shape of ``x``, on NumPy or JAX like it.

        Raises:
            TypeError: if ``x`` is no array or cannot be converted so, ``dtype`` has no values, or ``axis`` is
                no int.
            ValueError: if ``dtype`` is wider than 8 bits, or the axis of ``x`` is missing or no whole number of
                bytes long: a multiple of 8 values for Bool, of 2 for 4 bits, of 4 for 2 and 6; nothing is padded.

        Example:
            >>> import ml_dtypes, numpy as np
            >>> NarrowArray.pack(np.int32([8, -9, 300, 7]), ml_dtypes.int4).unpack()
            array([ 7, -8,  7,  7], dtype=int8)

        Source: section "Narrow" of the array contract.
        """
        resolved = _resolve("NarrowArray.pack", dtype)
        if not isinstance(x, np.ndarray | jax.Array):
            raise TypeError(
                f"NarrowArray.pack: x must be a jax.Array or numpy.ndarray, got {type(x).__name__}"
            )
        return _from_codes("NarrowArray.pack", "x", _encode(x, resolved), resolved, axis)

    @classmethod
    def from_codes(cls, codes: Array, dtype: object, axis: int = -1) -> NarrowArray:
        """Pack codes.

        Args:
            codes: uint8 [...], NumPy or JAX, one code per byte; bits above the width of the dtype are dropped.
            dtype, axis: as in `pack`.

        Returns:
            A NarrowArray of the shape of ``codes``.

        Raises:
            TypeError: if ``codes`` is no uint8 array.
            ValueError: as in `pack`.

        Example:
            >>> import numpy as np
            >>> NarrowArray.from_codes(np.uint8([1, 2, 3, 4]), "E2M3").data.tobytes().hex()
            '813010'

        Source: section "Narrow" of the array contract.
        """
        resolved = _resolve("NarrowArray.from_codes", dtype)
        _check_bytes("NarrowArray.from_codes", "codes", codes)
        return _from_codes("NarrowArray.from_codes", "codes", codes, resolved, axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        shape = list(self.data.shape)
        values, chunk = bit_stream.chunk(bit_width(self.dtype))
        shape[self.axis] = shape[self.axis] // chunk * values
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.data.shape)

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        return math.prod(self.data.shape)

    def codes(self) -> Any:
        """The codes, uint8 of `shape`, one per byte with the upper bits zero; NumPy or JAX like ``data``.

        >>> import numpy as np
        >>> NarrowArray(np.uint8([0x21, 0x43]), "E2M1").codes()
        array([1, 2, 3, 4], dtype=uint8)
        """
        unpack = bit_stream.unpack if isinstance(self.data, np.ndarray) else _unpack_jitted
        return unpack(self.data, bit_width(self.dtype), self.axis)

    def unpack(self) -> Any:
        """The values, exactly, in the narrowest type that every backend can compute with.

        Returns:
            float32 for a float dtype, int8 or uint8 for an integer, bool for Bool, of `shape`; NumPy or JAX
            like ``data``.

        Raises:
            TypeError: if the dtype has no scalar type, or one that `jaxquant.casts.decode` does not know.

        Example:
            >>> import numpy as np
            >>> NarrowArray(np.uint8([0x55]), np.bool_).unpack().tolist()
            [True, False, True, False, True, False, True, False]

        Source: section "Narrow" of the array contract.
        """
        scalar = _scalar_dtype("NarrowArray.unpack", self.dtype)
        element = _KERNEL_ELEMENTS.get(scalar)
        extent = self.shape[self.axis]
        if element is not None and isinstance(self.data, jax.Array) and extent and extent % blocks.UNIT == 0:
            return _unpack_values(self.data, element, self.axis)
        codes = self.codes()
        if scalar == np.bool_:
            return codes != np.uint8(0)
        values = casts.decode(codes, scalar)
        return values.astype(_byte_integer(scalar)) if _is_integer(scalar) else values

    def astype(self, dtype: object) -> Any:
        """The values in another dtype.

        Args:
            dtype: a scalar type, numpy dtype, registered name or SimpleDType gives a dense array; ``narrow`` of
                one of 1 to 8 bits gives a NarrowArray packed along the same axis. Towards a narrow dtype values
                round and saturate as in `pack`, otherwise as ``astype`` of the array library does.

        Returns:
            A NumPy or JAX array, like ``data``, or a NarrowArray, of `shape`.

        Raises:
            TypeError: if either dtype has no values; for a dense six-bit float under JAX, which XLA cannot hold;
                for Bool from another dtype.
            ValueError: as in `pack`.

        Example:
            >>> import numpy as np
            >>> packed = NarrowArray.pack(np.float32([0.5, 1, 3, 6]), "E2M1")
            >>> packed.astype(np.float16), packed.astype(narrow("E2M3")).data.tobytes().hex()
            (array([0.5, 1. , 3. , 6. ], dtype=float16), '044271')

        Source: NarrowArray of the microscaling seed.
        """
        values = self.unpack()
        if isinstance(dtype, Narrow):
            return NarrowArray.pack(_towards(values, dtype.dtype), dtype.dtype, self.axis)
        wanted = casts.numpy_dtype(dtype)
        if wanted is None:
            raise TypeError(
                f"NarrowArray.astype: {dtype!r} has no scalar type, so no dense array can hold it"
            )
        if wanted == values.dtype:
            return values
        if wanted == np.bool_:
            raise TypeError(
                f"NarrowArray.astype: {_name(self.dtype)} does not convert to Bool; compare instead"
            )
        if bit_width(wanted) <= 8:
            return casts.cast(values.astype(np.float32), wanted)
        return values.astype(wanted)

    def bitcast(self, dtype: object) -> NarrowArray:
        """The same bytes as another dtype; the packed axis is rescaled.

        Args:
            dtype: as in the constructor, or ``narrow`` of one.

        Returns:
            A NarrowArray on the same ``data``.

        Raises:
            TypeError: if ``dtype`` is no simple dtype.
            ValueError: if it is wider than 8 bits, or the bytes are no whole number of its chunks.

        Example:
            >>> import numpy as np
            >>> NarrowArray(np.uint8([0x21, 0x43, 0x65]), "E2M1").bitcast("E2M3").codes()
            array([33, 12, 20, 25], dtype=uint8)

        Source: section "Narrow" of the array contract.
        """
        resolved = dtype.dtype if isinstance(dtype, Narrow) else _resolve("NarrowArray.bitcast", dtype)
        return NarrowArray(self.data, resolved, self.axis)

    def __getitem__(self, index: Any) -> Any:
        """The values at an index, dense as from `unpack`, whatever the array library allows.

        Where integers, slices and an ellipsis are all there is, only the rows that they choose are unpacked.
        """
        entries = basic_index(index, self.ndim)
        if entries is None:
            return self.unpack()[index]
        place = self.ndim + self.axis
        along = entries[place]
        after = sum(isinstance(entry, slice) for entry in entries[place + 1 :])
        rows = self.data[(*entries[:place], slice(None), *entries[place + 1 :])]
        values = _rebuild(rows, self.dtype, -1 - after).unpack()
        return values[(Ellipsis, along, *(slice(None),) * after)]

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized NarrowArray")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unpack())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        if copy is False:
            raise ValueError(
                "NarrowArray: its values are unpacked into a new array, which copy=False forbids"
            )
        return np.asarray(self.unpack(), dtype)

    def __repr__(self) -> str:
        shape = getattr(self.data, "shape", None)
        if not shape:
            return f"NarrowArray({self.data!r}, {_name(self.dtype)}, axis={self.axis})"
        backend = "numpy" if isinstance(self.data, np.ndarray) else "jax"
        head = f"NarrowArray({_name(self.dtype)}, shape={self.shape}, axis={self.axis}, {backend})"
        if self.size > _LONGEST_SHOWN or not _is_readable(self.data):
            return head
        try:
            values = self.unpack()
        except TypeError:
            values = self.codes()
        return f"{head}\n{np.asarray(values)}"


@final
@dataclass(frozen=True, slots=True, init=False)
class Narrow:
    """The packed form of a dtype, where a dtype is wanted or values are converted; made by `narrow`."""

    dtype: NarrowDType

    def __init__(self, dtype: object) -> None:
        object.__setattr__(self, "dtype", _resolve("narrow", dtype))

    def __call__(self, x: Array, axis: int = -1) -> NarrowArray:
        """Pack values, as `NarrowArray.pack` does."""
        return NarrowArray.pack(x, self.dtype, axis)

    def zeros(self, shape: int | Sequence[int], axis: int = -1) -> NarrowArray:
        """A NarrowArray of code 0 everywhere, on JAX: the value 0, but 2**-127 in E8M0.

        Raises ValueError where the axis of ``shape`` is missing or no whole number of bytes long.

        >>> narrow("E2M1").zeros((4, 32)).data.shape
        (4, 16)
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        position = _check_axis("narrow.zeros", sizes, axis)
        values, chunk = bit_stream.chunk(bit_width(self.dtype))
        _check_whole("narrow.zeros", "the result", sizes, position, self.dtype)
        stored = list(sizes)
        stored[position] = sizes[position] // values * chunk
        return NarrowArray(jnp.zeros(stored, jnp.uint8), self.dtype, position)

    def __repr__(self) -> str:
        return f"narrow({_name(self.dtype)})"


def narrow(dtype: object) -> Narrow:
    """The packed form of a dtype: ``narrow(dtype)(x)`` packs, ``x.astype(narrow(dtype))`` converts and packs.

    Args:
        dtype: a scalar type, numpy dtype, registered name or SimpleDType of 1 to 8 bits.

    Returns:
        A tag that is callable, hashable, equal to another of the same dtype, and has ``zeros(shape)``.

    Raises:
        TypeError: if ``dtype`` is no simple dtype.
        LookupError: if no dtype has the name ``dtype``.
        ValueError: if it is wider than 8 bits.

    Example:
        >>> import numpy as np
        >>> narrow("E2M1")(np.float32([1, -1])).data
        array([162], dtype=uint8)

    Source: Narrow of the microscaling seed.
    """
    return Narrow(dtype)


def bit_width(dtype_or_array: object) -> int:
    """The bits of one value: 1 for Bool, 4 and 6 for the floats of these widths, else those of the storage.

    Args:
        dtype_or_array: a scalar type, numpy dtype, registered name or SimpleDType, or an array of one.

    Raises:
        TypeError: if it is none of these, or has no fixed number of bits.
        LookupError: if no dtype has the name.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> bit_width("E2M1"), bit_width(np.bool_), bit_width(ml_dtypes.int4), bit_width(np.zeros(3))
        (4, 1, 4, 64)

    Source: bitwidth of the microscaling seed.
    """
    dtype = dtype_or_array
    if not isinstance(dtype, type) and isinstance(getattr(dtype, "dtype", None), np.dtype | DType):
        dtype = cast(Any, dtype).dtype
    numpy_dtype = casts.numpy_dtype(dtype)
    if numpy_dtype == np.bool_:
        return 1
    if isinstance(dtype, DType | str):
        return cast(SimpleDType, DType.from_any(dtype)).bits
    return _value_bits(cast(NumpyDType, numpy_dtype))


def _value_bits(dtype: NumpyDType) -> int:
    if dtype.kind == "c":  # finfo speaks of one of the two parts
        return 8 * dtype.itemsize
    for info in (ml_dtypes.iinfo, ml_dtypes.finfo):
        try:
            return int(cast(Any, info)(dtype).bits)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"bit_width: wanted a dtype or an array of booleans or numbers, got {dtype}")


def _resolve(operation: str, dtype: object) -> NarrowDType:
    """The one form in which a dtype is static data: the descriptor wherever there is one."""
    numpy_dtype = casts.numpy_dtype(dtype)
    found: NarrowDType
    if isinstance(dtype, DType | str):
        found = cast(SimpleDType, DType.from_any(dtype))
    else:
        found = cast(NumpyDType, numpy_dtype)
        try:
            registered = SimpleDType.from_any(found)
        except LookupError:
            pass
        else:
            if bit_width(registered) == bit_width(found):
                found = registered
    if bit_width(found) > 8:
        raise ValueError(f"{operation}: dtype must have 1 to 8 bits, {_name(found)} has {bit_width(found)}")
    return found


def _scalar_dtype(operation: str, dtype: NarrowDType) -> NumpyDType:
    numpy_dtype = casts.numpy_dtype(dtype)
    if numpy_dtype is None:
        raise TypeError(f"{operation}: {_name(dtype)} has no scalar type, so its codes stand for no values")
    return numpy_dtype


def _is_integer(dtype: NumpyDType) -> bool:
    try:
        cast(Any, ml_dtypes.iinfo)(dtype)
    except (TypeError, ValueError):
        return False
    return True


def _towards(values: Any, dtype: NarrowDType) -> Any:
    """Unpacked values in a type that packs as a dtype; exact."""
    numpy_dtype = casts.numpy_dtype(dtype)
    if numpy_dtype is None or numpy_dtype == np.bool_:
        return values
    if not _is_integer(numpy_dtype):
        return values.astype(np.float32)
    return values.astype(np.uint8) if values.dtype == np.bool_ else values


def _byte_integer(dtype: NumpyDType) -> type[np.generic]:
    return np.int8 if cast(Any, ml_dtypes.iinfo)(dtype).min < 0 else np.uint8


def _name(dtype: NarrowDType) -> str:
    return str(dtype.name)


def _check_bytes(operation: str, name: str, value: object) -> None:
    if not isinstance(value, np.ndarray | jax.Array):
        raise TypeError(
            f"{operation}: {name} must be a jax.Array or numpy.ndarray, got {type(value).__name__}"
        )
    if value.dtype != np.uint8:
        raise TypeError(f"{operation}: {name} has dtype {value.dtype}, wanted uint8")


def _negative_axis(operation: str, array: Array, axis: object) -> int:
    return _check_axis(operation, array.shape, axis)


def _check_axis(operation: str, shape: Sequence[int], axis: object) -> int:
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"{operation}: axis must be an int, got {type(axis).__name__}")
    ndim = len(shape)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{operation}: axis {axis} is none of shape {tuple(shape)}")
    return int(axis) - ndim if axis >= 0 else int(axis)


def _check_whole(operation: str, what: str, shape: Sequence[int], axis: int, dtype: NarrowDType) -> None:
    values, _ = bit_stream.chunk(bit_width(dtype))
    if shape[axis] % values:
        raise ValueError(
            f"{operation}: {what} has shape {tuple(shape)}, but axis {axis} must be a multiple of {values} "
            f"to pack {_name(dtype)} into whole bytes"
        )


def _encode(x: Array, dtype: NarrowDType) -> Any:
    """Codes in the low bits of uint8; the upper ones may be dirty."""
    scalar = _scalar_dtype("NarrowArray.pack", dtype)
    if x.dtype == scalar and not _is_integer(scalar):
        return _own_codes(x, scalar)
    if _is_integer(scalar) and _is_integer(x.dtype):
        return _saturate(x, scalar)
    if scalar == np.bool_ or _is_integer(x.dtype) or x.dtype == np.bool_:
        raise TypeError(
            f"NarrowArray.pack: x has dtype {x.dtype}, wanted {_accepted(scalar)} to pack {_name(dtype)}"
        )
    return casts.encode(cast(Any, x), scalar)


def _accepted(scalar: NumpyDType) -> str:
    if scalar == np.bool_:
        return "bool"
    floats = "float16, bfloat16, float32"
    return f"{floats} or an integer" if _is_integer(scalar) else f"{floats} or {scalar}"


def _own_codes(x: Array, scalar: NumpyDType) -> Any:
    if isinstance(x, np.ndarray):
        return x.view(np.uint8)
    if scalar == np.bool_:
        return x.astype(np.uint8)
    if _value_bits(scalar) == 8:
        return lax.bitcast_convert_type(x, np.uint8)
    return casts.encode(x.astype(np.float32), scalar)


def _saturate(x: Array, scalar: NumpyDType) -> Any:
    wanted, given = (cast(Any, ml_dtypes.iinfo)(dtype) for dtype in (scalar, x.dtype))
    wide = x.astype(_byte_integer(x.dtype)) if given.bits < 8 else x
    low, high = (wide.dtype.type(bound) for bound in (max(wanted.min, given.min), min(wanted.max, given.max)))
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.minimum(xp.maximum(wide, low), high).astype(np.uint8)


def _from_codes(operation: str, name: str, codes: Any, dtype: NarrowDType, axis: object) -> NarrowArray:
    position = _negative_axis(operation, codes, axis)
    _check_whole(operation, name, codes.shape, position, dtype)
    pack = bit_stream.pack if isinstance(codes, np.ndarray) else _pack_jitted
    return NarrowArray(pack(codes, bit_width(dtype), position), dtype, position)


_KERNEL_ELEMENTS = {
    cast(NumpyDType, dtype.numpy_dtype): dtype for dtype in (DType.E2M1, DType.E2M3, DType.E3M2)
}
_LONGEST_PIECE = 4096


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpack_values(data: jax.Array, element: SimpleDType, axis: int) -> jax.Array:
    """float32, by a kernel, which shares its pieces among the threads."""
    before, after = data.shape[: data.ndim + axis], math.prod(data.shape[data.ndim + axis + 1 :])
    extent = data.shape[axis] * 8 // element.bits
    piece = math.gcd(extent, _LONGEST_PIECE)
    inner = (after,) if after != 1 else ()
    codes = data.reshape((*before, extent // piece, piece * element.bits // 8, *inner))
    values = blocks.decode(codes, element=element, scale="", packed=True, across=after != 1)
    shape = list(data.shape)
    shape[axis] = extent
    return values.reshape(shape)


_pack_jitted = jax.jit(bit_stream.pack, static_argnums=(1, 2))
_unpack_jitted = jax.jit(bit_stream.unpack, static_argnums=(1, 2))


def basic_index(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """One integer or slice per axis, or None where the index holds anything else."""
    entries: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    ellipses = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    missing = ndim - len(entries) + len(ellipses)
    if len(ellipses) > 1 or missing < 0:
        return None
    place = ellipses[0] if ellipses else len(entries)
    full = (*entries[:place], *(slice(None),) * missing, *entries[place + len(ellipses) :])
    return full if all(_is_basic(entry) for entry in full) else None


def _is_basic(entry: object) -> bool:
    return isinstance(entry, slice | int | np.integer) and not isinstance(entry, bool)


def _is_readable(data: object) -> bool:
    if isinstance(data, np.ndarray):
        return True
    if not isinstance(data, jax.Array) or isinstance(data, jax.core.Tracer):
        return False
    return data.is_fully_addressable and not data.is_deleted()


def _rebuild(data: Any, dtype: NarrowDType, axis: int) -> NarrowArray:
    """A NarrowArray of any leaf: a tracer, a placeholder, what a transformation made of an array."""
    array = object.__new__(NarrowArray)
    object.__setattr__(array, "data", data)
    object.__setattr__(array, "dtype", dtype)
    object.__setattr__(array, "axis", axis)
    return array


jax.tree_util.register_pytree_with_keys(
    NarrowArray,
    lambda array: (((jax.tree_util.GetAttrKey("data"), array.data),), (array.dtype, array.axis)),
    lambda static, leaves: _rebuild(next(iter(leaves)), *static),
    lambda array: ((array.data,), (array.dtype, array.axis)),
)
