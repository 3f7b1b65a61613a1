"""Layouts: how a coordinate of a (possibly nested) shape becomes an integer index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import NoReturn, TypeAlias, TypeVar, cast, final

IntTree: TypeAlias = "int | tuple[IntTree, ...]"
_T = TypeVar("_T")


def immutable(cls: type[_T]) -> type[_T]:
    """Refuse to set or delete any attribute of an instance with AttributeError.

    A frozen dataclass with slots does so for its fields; any other name ends in a TypeError about super().
    """

    def refuse(self: object, name: str, *value: object) -> NoReturn:
        raise FrozenInstanceError(f"{cls.__name__} is immutable: cannot set or delete {name!r}")

    for method in ("__setattr__", "__delattr__"):
        setattr(cls, method, refuse)
    return cls


@final
@immutable
@dataclass(frozen=True, slots=True)
class Layout:
    """A shape and a congruent stride; the index of a coordinate is the sum of coordinate times stride.

    Shape and stride are integers or nested tuples of them, of the same form; extents are at least 1, strides
    at least 0. Layouts compare and hash by value. An integer given for a tuple of modes is unravelled first
    mode fastest, at every level of nesting (contract: "Layout").

    Raises TypeError for what is no tree of integers, ValueError for a bad extent or stride, or where the two
    trees differ in form.

    The elements of an MXFP4 array of shape (2, 64), as two blocks of 32 per row:

    >>> layout = Layout((2, (32, 2)), (64, (1, 32)))
    >>> layout.size, layout.cosize
    (128, 128)
    >>> layout.index((1, (3, 1))), layout.index((1, 35))
    (99, 99)
    """

    shape: IntTree
    stride: IntTree

    def __post_init__(self) -> None:
        shape = _tree(self.shape, "shape", "extents", 1)
        stride = _tree(self.stride, "stride", "strides", 0)
        if not _congruent(shape, stride):
            raise ValueError(f"shape and stride must have one form, got shape {shape} and stride {stride}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "stride", stride)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Layout is final")

    def __reduce__(self) -> tuple[type[Layout], tuple[IntTree, IntTree]]:
        return Layout, (self.shape, self.stride)

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> Layout:
        """The layout of a JAX array of this shape: the last axis is contiguous.

        Raises TypeError for a nested shape and ValueError for an extent below 1.

        >>> Layout.row_major((2, 3, 4)).stride
        (12, 4, 1)
        """
        extents = _tree(shape, "shape", "extents", 1)
        if not isinstance(extents, tuple) or any(isinstance(extent, tuple) for extent in extents):
            raise TypeError(f"row_major wants the flat shape of an array, got {shown(shape)}")
        flat = cast("tuple[int, ...]", extents)
        return cls(flat, tuple(math.prod(flat[axis + 1 :]) for axis in range(len(flat))))

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return tree_product(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest index reached."""
        return 1 + sum((extent - 1) * stride for extent, stride in self._modes())

    def index(self, coordinate: IntTree) -> int:
        """The index of a coordinate: an integer, or a tuple that follows the shape as deep as it likes.

        Raises TypeError for what is no tree of integers, ValueError for a tuple that does not follow the
        shape, and IndexError for a coordinate outside the shape.

        >>> Layout((2, 3), (3, 1)).index((1, 2)), Layout((2, 3), (3, 1)).index(1)
        (5, 3)
        """
        return _index(_tree(coordinate, "coordinate", "coordinates", None), self.shape, self.stride)

    def uniform_preimage_extent(self, target_size: int) -> int | None:
        """How many coordinates share each index of `range(target_size)`, or None where the numbers differ.

        Algebraic: the cost depends on the number of modes, never on the number of coordinates.

        Raises TypeError where `target_size` is no exact int and ValueError where it is below 1.

        >>> Layout((2, (32, 2)), (1, (0, 2))).uniform_preimage_extent(4)
        32
        >>> Layout(10**18, 0).uniform_preimage_extent(1)
        1000000000000000000
        """
        if type(target_size) is not int:
            raise TypeError(f"target_size must be an int, got {type(target_size).__name__}")
        if target_size < 1:
            raise ValueError(f"target_size must be at least 1, got {shown(target_size)}")
        modes = [(stride, extent) for extent, stride in self._modes() if extent > 1]
        reached = 1
        for stride, extent in sorted(mode for mode in modes if mode[0] > 0):
            # The indices below `reached` are each hit once so far; only this stride continues them without a
            # gap.
            if stride != reached:
                return None
            reached *= extent
        if reached != target_size:
            return None
        return math.prod(extent for stride, extent in modes if stride == 0)

    def _modes(self) -> Iterator[tuple[int, int]]:
        return zip(_leaves(self.shape), _leaves(self.stride), strict=True)


def shown(value: object) -> str:
    """The repr for an error message; a repr that fails (an int of thousands of digits) must not replace it."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__} without a repr"


def tree_product(tree: IntTree) -> int:
    """The product of all integers of a tree."""
    return math.prod(_leaves(tree))


def _leaves(tree: IntTree) -> Iterator[int]:
    if isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def _tree(value: object, what: str, leaves: str, minimum: int | None) -> IntTree:
    # By the real class: a false `__class__` does not pass.
    if issubclass(type(value), tuple | list):
        parts = cast("Sequence[object]", value)
        return tuple(_tree(part, what, leaves, minimum) for part in parts)
    if not issubclass(type(value), int) or type(value) is bool:
        raise TypeError(f"{what} must be an int or a nested tuple of ints, got {type(value).__name__}")
    # int.__index__ ignores whatever a subclass overrides.
    exact = int.__index__(cast(int, value))
    if minimum is not None and exact < minimum:
        raise ValueError(f"{leaves} must be at least {minimum}, got {shown(exact)}")
    return exact


def _congruent(shape: IntTree, stride: IntTree) -> bool:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        return len(shape) == len(stride) and all(map(_congruent, shape, stride))
    return not isinstance(shape, tuple) and not isinstance(stride, tuple)


def _index(coordinate: IntTree, shape: IntTree, stride: IntTree) -> int:
    if isinstance(coordinate, tuple):
        if not isinstance(shape, tuple) or len(coordinate) != len(shape):
            raise ValueError(f"coordinate {coordinate} does not follow the shape {shape}")
        return sum(map(_index, coordinate, shape, cast("tuple[IntTree, ...]", stride)))
    if not 0 <= coordinate < tree_product(shape):
        raise IndexError(f"coordinate {coordinate} is outside the shape {shape}")
    total = 0
    for extent, step in zip(_leaves(shape), _leaves(stride), strict=True):
        coordinate, position = divmod(coordinate, extent)
        total += position * step
    return total
