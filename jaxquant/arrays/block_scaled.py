"""Block-scaled arrays: narrow elements under one or several levels of shared scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import casts
from jaxquant.arrays.narrow import NarrowArray, basic_index, bit_width
from jaxquant.arrays.swizzled import SwizzledArray
from jaxquant.dtypes import BlockScaledDType, DType, SimpleDType, Whole, WholeExtent
from jaxquant.layout import IntTree, Layout
from jaxquant.ops import bit_stream, blocks, float32
from jaxquant.representation import Plane, Representation

__all__ = ["BlockScaledArray"]

Array: TypeAlias = Any
Block: TypeAlias = "int | WholeExtent"
NumpyDType: TypeAlias = np.dtype[Any]

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_DECODED = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))


@final
@dataclass(frozen=True, slots=True, eq=False, init=False, repr=False)
class BlockScaledArray:
    """Elements, each the member of a block that shares one scale; the scales may be scaled again.

    The value at an index is ``T(element) * T(scale)``: both are converted to the value type T, then multiplied
    once. Several levels multiply inner to outer, ``(element * scale) * outer``, rounding in T each time.

    An int8 element under a format of int8 under E8M0 scales, such as ``DType.MXINT8``, is a fixed-point number:
    code c stands for ``c * 2**-6``, as in OCP MX, and -128 for -2. A plain array of int8 without a format is
    integer times scale.

    Args:
        scales: one plane, or a tuple of planes from the inner to the outer level; NumPy or JAX arrays, packed
            arrays or swizzled ones. Each has the rank of ``elements`` and per axis an extent that divides that
            of the level below.
        elements: the encoded elements: an array, a `NarrowArray`, or under a ``format`` uint8 codes, one per
            element.
        block_size: per axis, how many consecutive elements share an innermost scale: an int, or Whole for all
            (the scale's extent is then 1). Fewer entries than axes are for the last axes, the missing ones
            being 1. The default is the quotient of the extents.
        format: the `BlockScaledDType` of the planes, or None for a free combination.
        dtype: the value type T. The default is the promoted type of the planes, float32 if one of them is
            narrower than 16 bits.

    Attributes: ``scales`` (innermost), ``levels`` (all), ``elements``, ``block_size``, ``scale_dtype``,
    ``element_dtype``, ``format``, ``dtype``, and what an array has: ``shape``, ``ndim``, ``size``, ``nbytes``
    (the memory of all planes).

    It is a pytree: the planes are its leaves, and what is static holds no leading sizes, so that `jax.vmap` and
    `jax.lax.scan` may map over leading axes that no block covers. Only this constructor checks.

    Raises:
        TypeError: for a plane that is no array, planes of NumPy and JAX together, a ``format`` or ``dtype``
            of another type.
        ValueError: for no scales, other ranks, extents that do not divide, another block size than asked, and
            planes that are not the format's.

    Example:
        >>> import numpy as np
        >>> from jaxquant.arrays import BlockScaledArray
        >>> array = BlockScaledArray(np.float32([[0.5, 2.0]]), np.int8([[1, 2, 3, 4]]))
        >>> array.block_size, array.dtype
        ((1, 2), dtype('float32'))
        >>> array[0].tolist(), array[0, 3].item()
        ([0.5, 1.0, 6.0, 8.0], 8.0)

    Source: BlockscaledArray of the microscaling contract; section "Block-scaled" of the arrays contract.
    """

    levels: tuple[Any, ...]
    elements: Any
    format: BlockScaledDType | None
    dtype: NumpyDType
    _blocks: tuple[Block, ...]
    """Block sizes of the last axes, the first of which is not 1."""
    _coding: BlockScaledDType | None
    """The dtype whose element codes these are, where the blocks are not the format's."""
    _padding: tuple[int, ...]
    """How many elements at the end of each of the last axes are no part of the value."""

    __array_ufunc__ = None

    def __init__(
        self,
        scales: Any,
        elements: Any,
        block_size: Block | Sequence[Block] | None = None,
        *,
        format: BlockScaledDType | None = None,
        dtype: Any = None,
    ) -> None:
        levels = tuple(scales) if isinstance(scales, tuple | list) else (scales,)
        _check_planes(levels, elements)
        blocks = _checked_blocks(levels[0].shape, elements.shape, block_size)
        if format is not None:
            _check_format(format, levels, elements)
        value_type = _promoted(levels, elements, format) if dtype is None else np.dtype(dtype)
        if value_type not in _DECODED and value_type.kind not in "iu":
            raise TypeError(
                f"BlockScaledArray: dtype must be a float of 16 bits or more or an integer, got {dtype}"
            )
        _set(self, levels, elements, format, value_type, blocks, format, ())
        if format is not None and math.prod(elements.shape):
            self.representation()

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("BlockScaledArray is final")

    # What an array has

    @property
    def scales(self) -> Any:
        """The innermost scales."""
        return self.levels[0]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The extents of the stored elements, padding included."""
        return tuple(self.elements.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical extents."""
        stored = self.padded_shape
        padding = _last(self._padding, len(stored), 0)
        return tuple(extent - extra for extent, extra in zip(stored, padding, strict=True))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.elements.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(self))

    @property
    def block_size(self) -> tuple[Block, ...]:
        """How many elements share an innermost scale, per axis: an int, or Whole."""
        return _last(self._blocks, self.ndim, 1)

    @property
    def scale_dtype(self) -> NumpyDType:
        """The numpy dtype of the innermost scales."""
        return plane_dtype(self.scales)

    @property
    def element_dtype(self) -> NumpyDType:
        """The numpy dtype of the elements, also where they are stored as uint8 codes."""
        coded = None if self._coding is None else self._coding.element.numpy_dtype
        return plane_dtype(self.elements) if coded is None else coded

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a BlockScaledArray without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        name = "" if self.format is None else f", format={self.format.name}"
        about = f"block_size={self.block_size}{name}, dtype={self.dtype}"
        leaves = jax.tree_util.tree_leaves(self)
        if any(isinstance(leaf, jax.core.Tracer) or not hasattr(leaf, "nbytes") for leaf in leaves):
            return f"BlockScaledArray(shape={self.shape}, {about})"
        values = np.array2string(np.asarray(self), separator=", ", prefix="BlockScaledArray(", threshold=100)
        return f"BlockScaledArray({values}, {about})"

    # Values

    def dequantize(self, dtype: Any = np.float32) -> Any:
        """The values as a dense array: decoded in float32, then rounded once to ``dtype``.

        Exact to the bit on every backend, subnormals included, whatever T is.

        Args:
            dtype: float16, bfloat16, float32 or float64 (float64 under JAX only with x64 enabled).

        Returns:
            ``dtype`` [shape], of the library of the planes.

        Raises:
            TypeError: for another dtype.

        Source: section "Block-scaled" of the arrays contract.
        """
        wanted = np.dtype(dtype)
        if wanted not in _DECODED:
            raise TypeError(f"dequantize: dtype must be float16, bfloat16, float32 or float64, got {wanted}")
        if wanted == np.float64 and _library(self) is jnp and jnp.zeros(0, float).dtype != np.float64:
            raise TypeError("dequantize: float64 under JAX needs jax_enable_x64")
        return _run(_dequantized, self, wanted)

    def astype(self, dtype: Any) -> Any:
        """The values as a dense array of ``dtype``, as `dequantize` gives them."""
        return self.dequantize(dtype)

    def __getitem__(self, index: Any) -> Any:
        """The values ``T(element) * T(scale)`` at any index of a NumPy or JAX array, as a dense array of T.

        Where integers, slices and an ellipsis are all there is, only the blocks that they touch are decoded.
        """
        touched = _touched(self, index)
        if touched is None:
            return _run(_values, self)[index]
        part, within = touched
        return _run(_values, part)[within]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(
                "BlockScaledArray: values are decoded into a new array, which copy=False forbids"
            )
        values: np.ndarray[Any, Any] = np.asarray(_run(_values, self))
        return values if dtype is None else values.astype(dtype)

    def __matmul__(self, other: Any) -> Any:
        from jaxquant.arrays.block_dot import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        from jaxquant.arrays.block_dot import matmul

        return matmul(other, self)

    # The planes moved together

    def transpose(self, *axes: int | Sequence[int]) -> BlockScaledArray:
        """Permute the axes, those of the scales with those of the elements; swizzled scales become dense.

        Args:
            axes: as for ``numpy.transpose``; none reverses the axes.

        Raises:
            ValueError: where ``axes`` is no permutation.
        """
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        asked = tuple(cast("Sequence[int]", given)) or tuple(reversed(range(self.ndim)))
        order = tuple(axis + self.ndim if axis < 0 else axis for axis in asked)
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"transpose: {asked} is no permutation of the {self.ndim} axes")

        def permuted(entries: tuple[Any, ...], missing: Any) -> tuple[Any, ...]:
            full = _last(entries, self.ndim, missing)
            return _trimmed(tuple(full[axis] for axis in order), missing)

        return self._with(
            tuple(_transposed(_dense(level), order) for level in self.levels),
            _transposed(self.elements, order),
            permuted(self._blocks, 1),
            permuted(self._padding, 0),
        )

    @property
    def T(self) -> BlockScaledArray:  # noqa: N802
        """All axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> BlockScaledArray:  # noqa: N802
        """The last two axes exchanged. Raises ValueError where there are fewer."""
        if self.ndim < 2:
            raise ValueError(f"mT: shape {self.shape} has fewer than two axes")
        return self.swapaxes(-1, -2)

    def swapaxes(self, first: int, second: int) -> BlockScaledArray:
        """Exchange two axes. Raises ValueError for an axis out of range."""
        order = list(range(self.ndim))
        first, second = (_axis("swapaxes", axis, self.ndim) for axis in (first, second))
        order[first], order[second] = order[second], order[first]
        return self.transpose(order)

    def reshape(self, *shape: int | Sequence[int]) -> BlockScaledArray:
        """Another shape with the same elements in the same order, every block whole; swizzled scales become
        dense.

        Possible where the axes from the first blocked one on keep their extents, or where blocks lie along the
        last axis only and the new last extent holds whole blocks.

        Args:
            shape: the new extents, of which one may be -1.

        Raises:
            ValueError: for another number of elements, padded elements, or a shape that would split a block.
        """
        given = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        asked = _resolved("reshape", tuple(cast("Sequence[int]", given)), self.size)
        if any(self._padding):
            raise ValueError("reshape: the elements are padded to whole blocks")
        return self._with(
            tuple(_reshaped_level(self, i, asked) for i in range(len(self.levels))),
            _reshaped(self.elements, asked),
            _trimmed(_last(self._blocks, len(asked), 1), 1),
            (),
        )

    def block_slice(self, *slices: slice) -> BlockScaledArray:
        """The part inside borders of blocks, still block-scaled; swizzled scales become dense.

        Args:
            slices: one per axis from the first on, of step 1, over logical extents; the rest is taken whole.
                Along an axis that one scale covers whole (Whole), any slice is possible.

        Raises:
            TypeError: for what is no slice.
            IndexError: for more slices than axes.
            ValueError: for another step, or a slice that splits a block.

        Example:
            >>> import numpy as np
            >>> from jaxquant.arrays import BlockScaledArray
            >>> array = BlockScaledArray(np.float32([[0.5, 2.0]]), np.int8([[1, 2, 3, 4]]))
            >>> array.block_slice(slice(None), slice(2, 4))[0].tolist()
            [6.0, 8.0]
        """
        if len(slices) > self.ndim:
            raise IndexError(f"block_slice: {len(slices)} slices for shape {self.shape}")
        bounds, padding = _bounds(self, slices)
        levels: list[Any] = []
        for i, level in enumerate(self.levels):
            ranges = []
            for axis, (start, stop) in enumerate(bounds):
                block = math.prod(_block(self, j, axis) for j in range(i + 1))
                if stop - start == self.padded_shape[axis] or _is_whole(self, i, axis):
                    ranges.append(slice(None))
                elif start % block or stop % block:
                    raise ValueError(
                        f"block_slice: {start}:{stop} splits a block of {block} along axis {axis} of shape "
                        f"{self.shape}"
                    )
                else:
                    ranges.append(slice(start // block, stop // block))
            levels.append(_sliced(_dense(level), tuple(ranges)))
        elements = _sliced(self.elements, tuple(slice(*pair) for pair in bounds))
        return self._with(tuple(levels), elements, self._blocks, _trimmed(padding, 0))

    @staticmethod
    def concatenate(arrays: Sequence[BlockScaledArray], axis: int = 0) -> BlockScaledArray:
        """Join arrays of one kind along an axis, planes with planes; swizzled scales become dense.

        Args:
            arrays: of one format, element dtype, block size and value type, with equal extents elsewhere.
            axis: along it each scale covers whole blocks of one extent; an axis that one scale covers whole
                (Whole), such as any axis of NVFP4, cannot grow.

        Raises:
            TypeError: for what is no BlockScaledArray.
            ValueError: for no arrays, different ones, an axis out of range, padded along the axis, or covered
                whole.
        """
        return _concatenated(tuple(arrays), axis)

    def representation(self) -> Representation:
        """The planes with their layouts, checked against the format's rules.

        Raises:
            ValueError: for a free combination, an array without elements, and a grouping that is not the
                format's, such as a stack of NVFP4 arrays, which has several outermost scales.

        Source: section "Representation" of the descriptor contract.
        """
        if self.format is None:
            raise ValueError("representation: a free combination has no registered dtype")
        if not math.prod(self.elements.shape):
            raise ValueError(f"representation: an array of shape {self.shape} has no elements")
        planes = (_declared(self.elements, self.format.element), *self.levels)
        blocks = [[_block(self, i, axis) for axis in range(self.ndim)] for i in range(len(self.levels))]
        shapes, strides, edges = [], [], []
        for i, plane in enumerate(planes):
            extents = tuple(int(extent) for extent in plane.shape)
            whole = [i < len(blocks) and _is_whole(self, i, axis) for axis in range(self.ndim)]
            split = [1] * self.ndim if i == len(blocks) else blocks[i]
            modes: list[tuple[IntTree, IntTree, IntTree]] = []
            target = 1
            for axis in range(self.ndim):
                stride = math.prod(extents[axis + 1 :])
                size, block = extents[axis], split[axis]
                if whole[axis]:
                    modes.append((size, stride, 0))
                    continue
                if block == 1:
                    modes.append((size, stride, target))
                else:
                    modes.append(((block, size // block), (stride, stride * block), (0, target)))
                target *= size // block
            shapes.append(tuple(shape for shape, _, _ in modes))
            strides.append(tuple(stride for _, stride, _ in modes))
            edges.append(tuple(edge for _, _, edge in modes))
        return Representation(
            self.format,
            [
                Plane(plane, Layout(shape, stride))
                for plane, shape, stride in zip(planes, shapes, strides, strict=True)
            ],
            [Layout(shape, edge) for shape, edge in zip(shapes[:-1], edges[:-1], strict=True)],
        )

    def _with(
        self, levels: tuple[Any, ...], elements: Any, blocks: tuple[Block, ...], padding: tuple[int, ...]
    ) -> BlockScaledArray:
        return build(levels, elements, self.format, self.dtype, blocks, self._coding, padding)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return build, (self.levels, self.elements, *_static(self))


def build(
    levels: tuple[Any, ...],
    elements: Any,
    format: BlockScaledDType | None,
    dtype: NumpyDType,
    blocks: tuple[Block, ...],
    coding: BlockScaledDType | None,
    padding: tuple[int, ...],
) -> BlockScaledArray:
    """An array of parts that are known to fit; checks nothing."""
    array = object.__new__(BlockScaledArray)
    _set(array, levels, elements, format, dtype, blocks, coding, padding)
    return array


def _set(array: BlockScaledArray, levels: tuple[Any, ...], elements: Any, *static: Any) -> None:
    object.__setattr__(array, "levels", levels)
    object.__setattr__(array, "elements", elements)
    for name, value in zip(_STATIC, static, strict=True):
        object.__setattr__(array, name, value)


_STATIC = ("format", "dtype", "_blocks", "_coding", "_padding")


def _static(array: BlockScaledArray) -> tuple[Any, ...]:
    return tuple(getattr(array, name) for name in _STATIC)


jax.tree_util.register_pytree_with_keys(
    BlockScaledArray,
    lambda array: (
        (
            (jax.tree_util.GetAttrKey("levels"), array.levels),
            (jax.tree_util.GetAttrKey("elements"), array.elements),
        ),
        _static(array),
    ),
    lambda static, children: build(*cast("tuple[Any, Any]", children), *static),
    lambda array: ((array.levels, array.elements), _static(array)),
)


# Checks of the constructor


def _check_planes(levels: tuple[Any, ...], elements: Any) -> None:
    if not levels:
        raise ValueError("BlockScaledArray: there must be at least one level of scales")
    classes = {}
    for name, plane in (("elements", elements), *((f"scales[{i}]", s) for i, s in enumerate(levels))):
        leaves = jax.tree_util.tree_leaves(plane)
        if not (hasattr(plane, "dtype") and hasattr(plane, "shape") and leaves):
            raise TypeError(f"BlockScaledArray: {name} must be an array, got {type(plane).__name__}")
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray | jax.Array):
                raise TypeError(
                    f"BlockScaledArray: {name} must be a NumPy or JAX array, got {type(leaf).__name__}"
                )
            classes[float32.library(leaf)] = name
    if len(classes) > 1:
        raise TypeError(
            f"BlockScaledArray: planes must be all NumPy or all JAX, but {classes[np]} is NumPy and "
            f"{classes[jnp]} is JAX"
        )
    below, name = tuple(elements.shape), "elements"
    for i, level in enumerate(levels):
        shape = tuple(level.shape)
        if len(shape) != len(below):
            raise ValueError(
                f"BlockScaledArray: scales[{i}] of shape {shape} must have the rank of {name} of shape {below}"
            )
        for axis, (extent, scaled) in enumerate(zip(shape, below, strict=True)):
            if extent != 1 and (scaled % extent if extent else scaled):
                raise ValueError(
                    f"BlockScaledArray: extent {scaled} of {name} {below} along axis {axis} is no multiple of "
                    f"extent {extent} of scales[{i}] {shape}"
                )
        below, name = shape, f"scales[{i}]"


def _checked_blocks(
    scales: tuple[int, ...], elements: tuple[int, ...], asked: Block | Sequence[Block] | None
) -> tuple[Block, ...]:
    pairs = list(zip(scales, elements, strict=True))
    if asked is None:
        return _trimmed(tuple(scaled // extent if extent and scaled else 1 for extent, scaled in pairs), 1)
    given = (asked,) if isinstance(asked, int | WholeExtent) else tuple(asked)
    if len(given) > len(elements):
        raise ValueError(f"BlockScaledArray: block_size {given} has more axes than elements {elements}")
    blocks = _last(given, len(elements), 1)
    for axis, (block, (extent, scaled)) in enumerate(zip(blocks, pairs, strict=True)):
        if not isinstance(block, WholeExtent) and (isinstance(block, bool) or not isinstance(block, int)):
            raise TypeError(
                f"BlockScaledArray: block_size must hold ints and Whole, got {type(block).__name__}"
            )
        if not isinstance(block, WholeExtent) and block < 1:
            raise ValueError(f"BlockScaledArray: block sizes must be at least 1, got {block}")
        fits = extent == 1 if isinstance(block, WholeExtent) else block * extent == scaled
        if not fits:
            raise ValueError(
                f"BlockScaledArray: block_size {block} along axis {axis} does not relate scales of shape "
                f"{scales} to elements of shape {elements}"
            )
    return _trimmed(tuple(block if isinstance(block, WholeExtent) else int(block) for block in blocks), 1)


def _check_format(format: object, levels: tuple[Any, ...], elements: Any) -> None:
    if not isinstance(format, BlockScaledDType):
        raise TypeError(f"BlockScaledArray: format must be a BlockScaledDType, got {type(format).__name__}")
    if len(levels) != len(format.levels):
        raise ValueError(
            f"BlockScaledArray: {format.name} has {len(format.levels)} levels of scales, got {len(levels)}"
        )
    wanted = (format.element, *(level.scale for level in format.levels))
    for name, plane, dtype in zip(
        ("elements", *(f"scales[{i}]" for i in range(len(levels)))),
        (_declared(elements, format.element), *levels),
        wanted,
        strict=True,
    ):
        stored = plane.dtype if isinstance(plane.dtype, SimpleDType) else np.dtype(plane.dtype)
        if stored not in (dtype, dtype.numpy_dtype):
            raise ValueError(
                f"BlockScaledArray: {name} of {format.name} must store {dtype!r}, got {stored!r}"
            )


def _promoted(levels: tuple[Any, ...], elements: Any, format: BlockScaledDType | None) -> NumpyDType:
    if format is not None or isinstance(elements, NarrowArray):
        return np.dtype(np.float32)
    planes = [plane_dtype(plane) for plane in (elements, *levels)]
    if any(dtype.itemsize < 2 for dtype in planes):
        return np.dtype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(planes[0], _promote_all(planes[1:])))


def _promote_all(dtypes: list[NumpyDType]) -> NumpyDType:
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = np.dtype(jnp.promote_types(found, dtype))
    return found


# Static sizes of the last axes


def _last(entries: tuple[Any, ...], rank: int, missing: Any) -> tuple[Any, ...]:
    """The entries of the last axes, or of as many as there are."""
    return (missing,) * (rank - len(entries)) + entries[max(len(entries) - rank, 0) :]


def _trimmed(entries: tuple[Any, ...], missing: Any) -> tuple[Any, ...]:
    for i, entry in enumerate(entries):
        if entry is Whole or entry != missing:
            return entries[i:]
    return ()


def _axis(operation: str, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"{operation}: axis {axis} is out of range for {rank} axes")
    return axis % rank


def _below(array: BlockScaledArray, level: int) -> Any:
    return array.levels[level - 1] if level else array.elements


def _block(array: BlockScaledArray, level: int, axis: int) -> int:
    """How many entries of the level below share a scale along an axis."""
    extent, scaled = array.levels[level].shape[axis], _below(array, level).shape[axis]
    if extent and scaled:
        return int(scaled // extent)
    block = array.block_size[axis] if level == 0 else 1
    return block if isinstance(block, int) else 1


def _is_whole(array: BlockScaledArray, level: int, axis: int) -> bool:
    if level == 0 and array.block_size[axis] is Whole:
        return True
    dtype = array.format if array.format is not None else array._coding
    return dtype is not None and dtype.levels[level].is_whole() and array.levels[level].shape[axis] == 1


# Planes


def _dense(plane: Any) -> Any:
    return plane.unswizzle() if isinstance(plane, SwizzledArray) else plane


def plane_dtype(plane: Any) -> NumpyDType:
    """The numpy dtype of a plane's values. Raises TypeError for packed codes of a dtype that has none."""
    dtype = plane.dtype.numpy_dtype if isinstance(plane.dtype, SimpleDType) else np.dtype(plane.dtype)
    if dtype is None:
        raise TypeError(f"{plane.dtype!r} has no scalar type, so its codes have no values")
    return cast(NumpyDType, dtype)


def _moved(plane: Any, move: Callable[[Any], Any]) -> Any:
    """XLA moves one-byte floats through float32, which changes some NaNs; bytes stay as they are."""
    if plane.dtype.itemsize > 1 or plane.dtype.kind != "V" or plane.dtype.name in _PACKED_BY_XLA:
        return move(plane)
    return move(plane.view(np.uint8)).view(plane.dtype)


_PACKED_BY_XLA = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


@final
class _Coded:
    """uint8 codes, declared to be of a dtype."""

    def __init__(self, codes: Any, dtype: NumpyDType) -> None:
        self.codes = codes
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)


jax.tree_util.register_pytree_node(
    _Coded, lambda coded: ((coded.codes,), coded.dtype), lambda dtype, children: _Coded(children[0], dtype)
)


def _declared(elements: Any, element: SimpleDType) -> Any:
    dtype = element.numpy_dtype
    coded = isinstance(elements, np.ndarray | jax.Array) and elements.dtype == np.uint8
    return _Coded(elements, dtype) if coded and dtype is not None and dtype.itemsize == 1 else elements


def _transposed(plane: Any, order: tuple[int, ...]) -> Any:
    if not isinstance(plane, NarrowArray):
        return _moved(plane, lambda stored: stored.transpose(order))
    axis = order.index(plane.axis % plane.ndim) - plane.ndim
    return NarrowArray(plane.data.transpose(order), plane.dtype, axis)


def _reshaped(plane: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(plane, NarrowArray):
        return plane.reshape(shape)
    from_end = plane.axis % plane.ndim - plane.ndim
    if shape[from_end:] != plane.shape[from_end:] and from_end != -1:
        raise ValueError(f"reshape: {plane.shape} to {shape} would split the packed axis {from_end}")
    packed = plane.data.shape[from_end], plane.shape[from_end]
    stored = list(shape)
    if packed[1]:
        if shape[from_end] * packed[0] % packed[1]:
            raise ValueError(f"reshape: an extent of {shape[from_end]} does not hold whole bytes")
        stored[from_end] = shape[from_end] * packed[0] // packed[1]
    return NarrowArray(plane.data.reshape(stored), plane.dtype, from_end)


def _sliced(plane: Any, ranges: tuple[slice, ...]) -> Any:
    if not isinstance(plane, NarrowArray):
        return _moved(plane, lambda stored: stored[ranges])
    axis = plane.axis % plane.ndim
    packed, logical = plane.data.shape[axis], plane.shape[axis]
    start, stop, _ = ranges[axis].indices(logical)
    if logical and (start * packed % logical or stop * packed % logical):
        raise ValueError(f"block_slice: {start}:{stop} splits a byte along the packed axis {axis}")
    stored = list(ranges)
    if logical:
        stored[axis] = slice(start * packed // logical, stop * packed // logical)
    return NarrowArray(plane.data[tuple(stored)], plane.dtype, plane.axis)


def _joined(planes: Sequence[Any], axis: int) -> Any:
    if isinstance(planes[0], NarrowArray):
        first = planes[0]
        if any(plane.axis % plane.ndim != first.axis % first.ndim for plane in planes):
            raise ValueError("concatenate: elements are packed along different axes")
        data = _joined([plane.data for plane in planes], axis)
        return NarrowArray(data, first.dtype, first.axis)
    dtype = planes[0].dtype
    if dtype in _BYTES:
        return _joined([plane.view(np.uint8) for plane in planes], axis).view(dtype)
    return float32.library(planes[0]).concatenate(planes, axis)


def _touched(array: BlockScaledArray, index: Any) -> tuple[BlockScaledArray, tuple[Any, ...]] | None:
    """The blocks that a basic index needs, and the index in them; None for other indices and nothing to gain."""
    entries = basic_index(index, array.ndim)
    if entries is None:
        return None
    ranges: list[slice] = []
    within: list[Any] = []
    for axis, (entry, extent) in enumerate(zip(entries, array.shape, strict=True)):
        is_slice = isinstance(entry, slice)
        if not is_slice and not -extent <= entry < extent:
            return None  # the array library answers
        chosen = range(extent)[entry] if is_slice else range(entry % extent, entry % extent + 1)
        if not chosen:
            return None
        start, stop = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1]) + 1
        unit = _unit(array, axis)
        start, stop = start // unit * unit, min(-(-stop // unit) * unit, array.padded_shape[axis])
        ranges.append(slice(start, stop))
        if not is_slice:
            within.append(chosen[0] - start)
            continue
        end = chosen.stop - start
        within.append(slice(chosen.start - start, None if end < 0 else end, chosen.step))
    if all(part == slice(0, extent) for part, extent in zip(ranges, array.padded_shape, strict=True)):
        return None
    levels = tuple(
        _sliced(level, _scaled_ranges(level, ranges, array)) for level in map(_dense, array.levels)
    )
    part = array._with(levels, _sliced(array.elements, tuple(ranges)), array._blocks, ())
    return part, tuple(within)


def _scaled_ranges(level: Any, ranges: list[slice], array: BlockScaledArray) -> tuple[slice, ...]:
    """Where the scales of ranges of elements lie; one scale for all stays."""
    return tuple(
        slice(None) if extent == 1 else slice(part.start * extent // stored, part.stop * extent // stored)
        for part, extent, stored in zip(ranges, level.shape, array.padded_shape, strict=True)
    )


def _unit(array: BlockScaledArray, axis: int) -> int:
    """How many elements along an axis only go together: those of a block, and of whole bytes."""
    stored = array.padded_shape[axis]
    unit: int = max([1, *(stored // level.shape[axis] for level in array.levels if level.shape[axis] > 1)])
    elements = array.elements
    if isinstance(elements, NarrowArray) and elements.axis % array.ndim == axis:
        unit = math.lcm(unit, bit_stream.chunk(bit_width(elements.dtype))[0])
    return unit


def _bounds(
    array: BlockScaledArray, slices: tuple[slice, ...]
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    bounds, padding = [], []
    for axis, extent in enumerate(array.shape):
        part: object = slices[axis] if axis < len(slices) else slice(None)
        if not isinstance(part, slice):
            raise TypeError(f"block_slice: wanted slices, got {type(part).__name__}")
        start, stop, step = part.indices(extent)
        if step != 1:
            raise ValueError(f"block_slice: the step along axis {axis} must be 1, got {step}")
        stop = max(start, stop)
        stored = array.padded_shape[axis]
        to_end = stop == extent and stored != extent
        bounds.append((start, stored if to_end else stop))
        padding.append(stored - extent if to_end else 0)
    return bounds, tuple(padding)


def _resolved(operation: str, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    known = math.prod(extent for extent in shape if extent != -1)
    if shape.count(-1) == 1 and known and size % known == 0:
        shape = tuple(size // known if extent == -1 else extent for extent in shape)
    if any(extent < 0 for extent in shape) or math.prod(shape) != size:
        raise ValueError(f"{operation}: {size} elements do not make shape {shape}")
    return shape


def _reshaped_level(array: BlockScaledArray, level: int, shape: tuple[int, ...]) -> Any:
    plane = _dense(array.levels[level])
    old, rank = array.shape, array.ndim
    blocks = [math.prod(_block(array, i, axis) for i in range(level + 1)) for axis in range(rank)]
    if all(extent == 1 for extent in plane.shape):
        whole = all(_is_whole(array, level, axis) or blocks[axis] == old[axis] == 1 for axis in range(rank))
        if whole:
            return plane.reshape((1,) * len(shape))
    first = next((axis for axis, block in enumerate(blocks) if block != 1), rank)
    kept = rank - first
    if kept <= len(shape) and old[first:] == shape[len(shape) - kept :]:
        return plane.reshape((*shape[: len(shape) - kept], *plane.shape[first:]))
    if first == rank - 1 and shape and shape[-1] % blocks[-1] == 0:
        return plane.reshape((*shape[:-1], shape[-1] // blocks[-1]))
    raise ValueError(f"reshape: {old} to {shape} would split a block of {tuple(blocks)}")


def _concatenated(arrays: tuple[BlockScaledArray, ...], axis: int) -> BlockScaledArray:
    if not arrays:
        raise ValueError("concatenate: there must be at least one array")
    for i, array in enumerate(arrays):
        if not isinstance(array, BlockScaledArray):
            raise TypeError(
                f"concatenate: arrays[{i}] must be a BlockScaledArray, got {type(array).__name__}"
            )
    first = arrays[0]
    axis = _axis("concatenate", axis, first.ndim)
    for i, array in enumerate(arrays):
        same = _static(array)[:4] == _static(first)[:4] and len(array.levels) == len(first.levels)
        if not same or type(array.elements) is not type(first.elements):
            raise ValueError(f"concatenate: arrays[{i}] is of another kind than arrays[0]")
        elsewhere = [shape[:axis] + shape[axis + 1 :] for shape in (array.shape, first.shape)]
        if array.ndim != first.ndim or elsewhere[0] != elsewhere[1]:
            raise ValueError(
                f"concatenate: arrays[{i}] of shape {array.shape} does not fit {first.shape} along axis {axis}"
            )
        if _last(array._padding, array.ndim, 0)[axis]:
            raise ValueError(f"concatenate: arrays[{i}] is padded along axis {axis}")
        for level in range(len(first.levels)):
            if _is_whole(array, level, axis) or _block(array, level, axis) != _block(first, level, axis):
                raise ValueError(
                    f"concatenate: level {level} of arrays[{i}] does not continue along axis {axis}: its scales "
                    f"have shape {tuple(array.levels[level].shape)}"
                )
    levels = [_joined([_dense(array.levels[i]) for array in arrays], axis) for i in range(len(first.levels))]
    elements = _joined([array.elements for array in arrays], axis)
    return first._with(tuple(levels), elements, first._blocks, first._padding)


# Decoding


def _library(array: BlockScaledArray) -> Any:
    return float32.library(jax.tree_util.tree_leaves(array)[0])


def _run(function: Callable[..., Any], array: BlockScaledArray, *static: Any) -> Any:
    if _library(array) is np:
        return function(array, *static)
    if isinstance(array.elements, NarrowArray) and array._coding is not None and _kernel_call(array) is None:
        # Unpacked in a program of its own: XLA would fuse it into the decoding, which no longer vectorizes.
        array = array._with(array.levels, array.elements.codes(), array._blocks, array._padding)
    return _jitted(function, array, *static)


@partial(jax.jit, static_argnums=(0, 2))
def _jitted(function: Callable[..., Any], array: BlockScaledArray, *static: Any) -> Any:
    return function(array, *static)


def _is_fixed_point(coding: BlockScaledDType | None) -> bool:
    return coding is not None and coding.element is DType.Int8 and coding.levels[0].scale is DType.E8M0


def plane_bits(plane: Any, element: SimpleDType | None = None) -> tuple[Any, int]:
    """The float32 bits of a plane's values, and how many significand bits they have at most.

    ``element`` says what uint8 codes stand for.
    """
    plane = _dense(plane)
    if isinstance(plane, NarrowArray):
        return plane.unpack().astype(np.float32).view(np.uint32), float32.SHORT
    if element is not None and plane.dtype == np.uint8:
        return casts.decode(plane, element).view(np.uint32), float32.SHORT
    if plane.dtype in _BYTES:
        return casts.decode(plane.view(np.uint8), plane.dtype).view(np.uint32), float32.SHORT
    wide = plane.dtype.itemsize > 1 and plane.dtype != ml_dtypes.bfloat16
    with np.errstate(all="ignore"):
        values = plane.astype(np.float32)
    return values.view(np.uint32), 24 if wide else float32.SHORT


_BYTES = tuple(
    np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
)


def _element_bits(array: BlockScaledArray) -> tuple[Any, int]:
    coding = array._coding
    if _is_fixed_point(coding) and not isinstance(array.elements, NarrowArray):
        return blocks.element_bits(array.elements.view(np.uint8), DType.Int8), float32.SHORT
    return plane_bits(array.elements, None if coding is None else coding.element)


def _spread(array: BlockScaledArray, level: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes that broadcast: the elements split into blocks, and the scales with one entry per block."""
    split: list[int] = []
    single: list[int] = []
    for extent, scaled in zip(array.levels[level].shape, array.elements.shape, strict=True):
        if extent == scaled:
            split.append(scaled)
            single.append(scaled)
        elif extent <= 1:
            split.append(scaled)
            single.append(extent)
        else:
            split += [extent, scaled // extent]
            single += [extent, 1]
    return tuple(split), tuple(single)


# What the kernels know, by the dtypes of the elements that are stored and by those of the scales.
_KERNEL_ELEMENTS = {
    np.dtype(ml_dtypes.float8_e4m3fn): DType.E4M3,
    np.dtype(ml_dtypes.float8_e5m2): DType.E5M2,
    np.dtype(ml_dtypes.float6_e3m2fn): DType.E3M2,
    np.dtype(ml_dtypes.float6_e2m3fn): DType.E2M3,
    np.dtype(ml_dtypes.float4_e2m1fn): DType.E2M1,
}
_KERNEL_SCALES = {_E8M0: "E8M0", np.dtype(ml_dtypes.float8_e4m3fn): "E4M3"}


def _kernel_call(array: BlockScaledArray) -> Callable[[], Any] | None:
    """What decodes the array to float32 by a kernel, or None where its planes are not of the kernels' kind."""
    levels, elements, stored = array.levels, array.elements, tuple(array.elements.shape)
    packed = isinstance(elements, NarrowArray)
    coded = not packed and elements.dtype == np.uint8 and array._coding is not None
    if _library(array) is np or any(isinstance(level, NarrowArray) for level in levels):
        return None
    element = _KERNEL_ELEMENTS.get(array.element_dtype) if packed or elements.dtype.itemsize == 1 else None
    if not packed and not coded and elements.dtype.name in _PACKED_BY_XLA:
        return None
    if array.element_dtype == np.int8 and _is_fixed_point(array._coding) and not packed:
        element = DType.Int8
    scale = _KERNEL_SCALES.get(np.dtype(levels[0].dtype))
    axes = [axis for axis, pair in enumerate(zip(levels[0].shape, stored, strict=True)) if pair[0] != pair[1]]
    if element is None or scale is None or len(axes) != 1 or math.prod(stored) == 0:
        return None
    axis = axes[0]
    count, block = levels[0].shape[axis], stored[axis] // levels[0].shape[axis]
    if block % blocks.UNIT or (packed and elements.axis % array.ndim != axis):
        return None
    outer: tuple[Any, ...] = ()
    if len(levels) > 1:
        extents = tuple(levels[1].shape)
        kept = next((i for i, extent in enumerate(extents) if extent == 1), array.ndim)
        fits = kept <= axis and extents == (*stored[:kept], *(1,) * (array.ndim - kept))
        if len(levels) > 2 or scale != "E4M3" or levels[1].dtype != np.float32 or not fits:
            return None
        outer = (_dense(levels[1]).reshape((*extents[:axis], 1)),)
    batch, across = (*stored[:axis], count), math.prod(stored[axis + 1 :])
    inner = (across,) if across != 1 else ()
    data = elements.data if packed else elements

    def call() -> Any:
        values = blocks.decode(
            data.reshape((*batch, data.shape[axis] // count, *inner)),
            _dense(levels[0]).reshape((*batch, *inner)),
            *outer,
            element=element,
            scale=scale,
            packed=packed and element.bits < 8,
            across=across != 1,
        )
        return values.reshape(stored)

    return call


def _decoded_bits(array: BlockScaledArray) -> Any:
    call = _kernel_call(array)
    if call is not None:
        return _unpadded(array, call()).view(np.uint32)
    bits, width = _element_bits(array)
    stored = tuple(array.elements.shape)
    for level, plane in enumerate(array.levels):
        split, single = _spread(array, level)
        bits = bits.reshape(split)
        if plane.dtype == _E8M0 and not isinstance(plane, NarrowArray):
            bits = float32.scale_by_power(bits, _dense(plane).view(np.uint8).reshape(single))
        else:
            scales, scale_width = plane_bits(plane)
            scales = scales.reshape(single)
            if scale_width < width:
                scales, bits = bits, scales
            bits = (float32.multiply_short if min(width, scale_width) <= float32.SHORT else float32.multiply)(
                bits, scales
            )
            width = min(width + scale_width, 24)
            # Two codes of 4 significand bits make 8, and so on; the sum bounds what is short again.
        bits = bits.reshape(stored)
    return _unpadded(array, bits)


def _unpadded(array: BlockScaledArray, values: Any) -> Any:
    if not any(array._padding):
        return values
    return values[tuple(slice(0, extent) for extent in array.shape)]


def _dequantized(array: BlockScaledArray, dtype: NumpyDType) -> Any:
    return float32.round_to(_decoded_bits(array), dtype)


def _values(array: BlockScaledArray) -> Any:
    """T(element) * T(scale)."""
    if array.dtype == np.float32:
        return _dequantized(array, array.dtype)
    if array.dtype not in _DECODED:
        product = _integers(array.elements, array.dtype)
    else:
        product = _typed(array.elements, _element_bits(array)[0], array.dtype)
    stored = product.shape
    for level, plane in enumerate(array.levels):
        split, single = _spread(array, level)
        product = product.reshape(split)
        if array.dtype not in _DECODED:
            product = product * _integers(plane, array.dtype).reshape(single)
            continue
        scales = _typed(plane, plane_bits(plane)[0], array.dtype).reshape(single)
        if array.dtype == np.float64:
            product = product * scales
        else:
            # A float32 product of two 16-bit numbers is exact where it matters, so that this rounds once.
            multiply = float32.multiply_short if array.dtype == ml_dtypes.bfloat16 else float32.multiply
            bits = multiply(float32.to_bits(product), float32.to_bits(scales))
            product = float32.round_to(bits, array.dtype)
        product = product.reshape(stored)
    return _unpadded(array, product.reshape(stored))


def _typed(plane: Any, bits: Any, dtype: NumpyDType) -> Any:
    """A plane's values in a float type."""
    if dtype == np.float64 and plane_dtype(plane) == np.float64:
        return _dense(plane)
    return float32.round_to(bits, dtype)


def _integers(plane: Any, dtype: NumpyDType) -> Any:
    dense = _dense(plane)
    return (dense.unpack() if isinstance(dense, NarrowArray) else dense).astype(dtype)
