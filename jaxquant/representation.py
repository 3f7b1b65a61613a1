"""Representations: the planes that store a logical value, validated against its dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast, final

import jax
import numpy as np

from jaxquant.dtypes import CompoundDType, DType, RepresentationValidationContext, SimpleDType
from jaxquant.dtypes.kinds import is_kind, is_registered, items
from jaxquant.layout import IntTree, Layout, immutable, shown

_T = TypeVar("_T")


@final
@immutable
@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One stored plane: an array, the placement layout of its level, and where that begins.

    `array` is a NumPy or JAX array, or a pytree of such leaves that says its own `dtype` and `shape` (a
    packed array); the value at a coordinate is element `offset + layout.index(coordinate)` of it, counted
    row-major. `Representation` checks it. A plane is a pytree whose one child is the array.
    """

    array: Any
    layout: Layout
    offset: int = 0

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Plane is final")


@final
@immutable
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Representation:
    """A logical dtype, one plane per entry of its schema, and the adjacent layouts between consecutive
    levels.

    Adjacent layout i maps the coordinates of plane i to integer coordinates of plane i + 1: it says which
    elements share a scale, not where anything is stored. The constructor checks, in this order, and names
    what is wrong:

    1. `dtype` is a registered DType, `planes` an iterable of Plane, `adjacent_layouts` an iterable: TypeError
    2. there is one plane per schema entry: ValueError
    3. there is one adjacent layout fewer: ValueError
    4. each plane stores the identical schema entry: ValueError
    5. each plane holds an array: TypeError
    6. its elements are of that dtype: ValueError
    7. each offset is an exact int: TypeError; and not negative: ValueError
    8. each placement is a Layout: TypeError
    9. offset and placement fit the plane: ValueError
    10. the planes are all NumPy or all JAX, tracers included: TypeError
    11. each adjacent layout is a Layout: TypeError
    12. it has the shape of its source: ValueError
    13. it reaches only indices of its target: ValueError

    Then the rules of the dtype run in order; an exception of theirs passes unchanged, and a result other than
    None is a TypeError. Nothing is mutated. A representation is a pytree whose children are the planes;
    rebuilding one from leaves checks nothing, as the leaves may be tracers or placeholders (contract:
    "Representation").

    >>> elements = np.ones((2, 64), DType.E2M1.numpy_dtype)
    >>> scales = np.ones((2, 2), DType.E8M0.numpy_dtype)
    >>> shape = (2, (32, 2))
    >>> shown = Representation(
    ...     DType.MXFP4,
    ...     [Plane(elements, Layout(shape, (64, (1, 32)))), Plane(scales, Layout.row_major((2, 2)))],
    ...     [Layout(shape, (1, (0, 2)))],
    ... )
    >>> shown.level_shapes
    ((2, (32, 2)), (2, 2))
    """

    dtype: DType
    planes: tuple[Plane, ...]
    adjacent_layouts: tuple[Layout, ...]

    def __init__(
        self, dtype: DType, planes: Iterable[Plane], adjacent_layouts: Iterable[Layout] = ()
    ) -> None:
        if not is_registered(dtype, DType):
            raise TypeError(f"dtype must be a registered DType, got {shown(dtype)}")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "planes", items(planes, "planes"))
        object.__setattr__(self, "adjacent_layouts", items(adjacent_layouts, "adjacent_layouts"))
        for i, plane in enumerate(self.planes):
            if type(plane) is not Plane:
                raise TypeError(f"planes[{i}] must be a Plane, got {type(plane).__name__}")
        schema = _schema(dtype)
        _check_counts(dtype, schema, self.planes, self.adjacent_layouts)
        _check_storage(schema, self.planes)
        _check_placement(self.planes)
        _check_array_class(self.planes)
        _check_adjacent(self.planes, self.adjacent_layouts)
        _run_rules(dtype, schema, self.planes, self.adjacent_layouts)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Representation is final")

    @property
    def level_shapes(self) -> tuple[IntTree, ...]:
        """The shape of each plane's placement layout."""
        return tuple(plane.layout.shape for plane in self.planes)


def _schema(dtype: DType) -> tuple[SimpleDType, ...]:
    if is_kind(dtype, CompoundDType):
        return dtype.simple_types
    return (dtype,) if is_kind(dtype, SimpleDType) else ()


def _check_counts(
    dtype: DType, schema: tuple[SimpleDType, ...], planes: tuple[Plane, ...], adjacent: tuple[Layout, ...]
) -> None:
    if not schema:
        raise ValueError(f"{dtype!r} is a category: it has no planes")
    if len(planes) != len(schema):
        raise ValueError(f"{dtype!r} has {len(schema)} planes, got {len(planes)}")
    if len(adjacent) != len(schema) - 1:
        raise ValueError(f"{dtype!r} has {len(schema) - 1} adjacent layouts, got {len(adjacent)}")


def _check_storage(schema: tuple[SimpleDType, ...], planes: tuple[Plane, ...]) -> None:
    for i, (plane, wanted) in enumerate(zip(planes, schema, strict=True)):
        stored = _storage_dtype(plane.array, wanted)
        if is_kind(stored, CompoundDType):
            raise ValueError(
                f"plane {i} must store {wanted!r}, got {stored!r}, "
                f"which needs several planes ({stored.num_carriers})"
            )
        if stored is not None and stored is not wanted:
            raise ValueError(f"plane {i} must store {wanted!r}, got {stored!r}")
    for i, plane in enumerate(planes):
        if _array_class(plane.array) is None:
            raise TypeError(f"plane {i} must hold a NumPy or JAX array, got {type(plane.array).__name__}")
    for i, (plane, wanted) in enumerate(zip(planes, schema, strict=True)):
        if _storage_dtype(plane.array, wanted) is not wanted:
            raise ValueError(f"plane {i} must hold elements of {wanted!r}, got {plane.array.dtype}")


def _check_placement(planes: tuple[Plane, ...]) -> None:
    for i, plane in enumerate(planes):
        if type(plane.offset) is not int:
            raise TypeError(f"offset of plane {i} must be an int, got {type(plane.offset).__name__}")
        if plane.offset < 0:
            raise ValueError(f"offset of plane {i} must not be negative, got {plane.offset}")
    _check_layouts("placement layout", (plane.layout for plane in planes))
    for i, plane in enumerate(planes):
        size = math.prod(plane.array.shape)
        end = plane.offset + plane.layout.cosize
        if end > size:
            raise ValueError(
                f"plane {i} of {size} elements is reached up to {end - 1} (offset {plane.offset})"
            )


def _check_array_class(planes: tuple[Plane, ...]) -> None:
    classes = [_array_class(plane.array) for plane in planes]
    for i, found in enumerate(classes):
        if found != classes[0] or found == "mixed":
            raise TypeError(f"planes must be all NumPy or all JAX; 0 is {classes[0]}, {i} is {found}")


def _check_adjacent(planes: tuple[Plane, ...], adjacent: tuple[Layout, ...]) -> None:
    _check_layouts("adjacent layout", adjacent)
    for i, layout in enumerate(adjacent):
        source = planes[i].layout.shape
        if layout.shape != source:
            raise ValueError(
                f"adjacent layout {i} must have shape {source}, as level {i}, got {layout.shape}"
            )
    for i, layout in enumerate(adjacent):
        target = planes[i + 1].layout.size
        if layout.cosize > target:
            raise ValueError(
                f"adjacent layout {i} reaches index {layout.cosize - 1}, "
                f"but level {i + 1} has {target} coordinates"
            )


def _check_layouts(what: str, layouts: Iterable[object]) -> None:
    for i, layout in enumerate(layouts):
        if type(layout) is not Layout:
            raise TypeError(f"{what} {i} must be a Layout, got {type(layout).__name__}")


def _run_rules(
    dtype: DType, schema: tuple[SimpleDType, ...], planes: tuple[Plane, ...], adjacent: tuple[Layout, ...]
) -> None:
    if not is_kind(dtype, CompoundDType):
        return
    context = RepresentationValidationContext(
        logical_dtype=dtype,
        storage_dtypes=schema,
        placement_layouts=(plane.layout for plane in planes),
        adjacent_layouts=adjacent,
        level_shapes=(plane.layout.shape for plane in planes),
    )
    for rule in dtype.representation_rules:
        # The class's: the rule's own constructor may have set another on the instance.
        result = cast(object, type(rule).validate(rule, context))
        if result is not None:
            raise TypeError(f"{rule!r}.validate must return None, got {result!r}")


def _storage_dtype(array: Any, wanted: SimpleDType) -> DType | None:
    """The dtype that an array stores, or None where no descriptor answers for it."""
    for attribute in ("format", "dtype"):
        declared: object = getattr(array, attribute, None)
        if is_kind(declared, DType):
            return declared
    dtype: object = getattr(array, "dtype", None)
    if not issubclass(type(dtype), np.dtype):
        return None
    # Several descriptors may name one scalar type, so the wanted one is asked first.
    if wanted.numpy_dtype == dtype:
        return wanted
    try:
        return DType.from_any(dtype)
    except LookupError:
        return None


def _array_class(array: object) -> str | None:
    """ "NumPy" or "JAX" by the leaves of an array, "mixed" where they differ, None where it is no array."""
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        return None
    leaves: Iterable[object] = jax.tree_util.tree_leaves(array)
    classes = {_leaf_class(leaf) for leaf in leaves}
    if not classes or None in classes:
        return None
    return classes.pop() if len(classes) == 1 else "mixed"


def _leaf_class(leaf: object) -> str | None:
    if isinstance(leaf, jax.Array):
        return "JAX"
    return "NumPy" if isinstance(leaf, np.ndarray) else None


def _rebuild(cls: type[_T], **fields: object) -> _T:
    instance = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
    return instance


jax.tree_util.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]
    Plane,
    lambda plane: ((plane.array,), (plane.layout, plane.offset)),
    lambda static, children: _rebuild(Plane, array=children[0], layout=static[0], offset=static[1]),
)
jax.tree_util.register_pytree_node(  # pyright: ignore[reportUnknownMemberType]
    Representation,
    lambda shown: (shown.planes, (shown.dtype, shown.adjacent_layouts)),
    lambda static, planes: _rebuild(
        Representation, dtype=static[0], planes=tuple(planes), adjacent_layouts=static[1]
    ),
)
