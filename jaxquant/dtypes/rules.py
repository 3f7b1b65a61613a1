"""Representation rules: logical constraints that a compound dtype puts on its representations."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard, TypeVar, cast, final

from jaxquant.dtypes.extents import Whole, WholeExtent
from jaxquant.dtypes.model import ModelMeta, has_slot, is_accepted, owned_members, read_slot
from jaxquant.dtypes.structure import Structure, class_identity, first_difference, freeze_extension
from jaxquant.layout import IntTree, Layout, immutable, shown, tree_product

if TYPE_CHECKING:
    from jaxquant.dtypes.kinds import DType, SimpleDType

_T = TypeVar("_T")


@final
@immutable
@dataclass(frozen=True, slots=True, init=False)
class RepresentationValidationContext:
    """The facts of a representation that universal validation has accepted, for rules to read.

    `level_shapes[i]` is the shape of placement layout i; `adjacent_layouts[i]` maps coordinates of level i to
    indices of level i + 1. Every sequence is copied into a tuple (contract: "Rules consume a read-only
    validated context").
    """

    logical_dtype: DType
    storage_dtypes: tuple[SimpleDType, ...]
    placement_layouts: tuple[Layout, ...]
    adjacent_layouts: tuple[Layout, ...]
    level_shapes: tuple[IntTree, ...]

    def __init__(
        self,
        *,
        logical_dtype: DType,
        storage_dtypes: Iterable[SimpleDType],
        placement_layouts: Iterable[Layout],
        adjacent_layouts: Iterable[Layout],
        level_shapes: Iterable[IntTree],
    ) -> None:
        object.__setattr__(self, "logical_dtype", logical_dtype)
        object.__setattr__(self, "storage_dtypes", tuple(storage_dtypes))
        object.__setattr__(self, "placement_layouts", tuple(placement_layouts))
        object.__setattr__(self, "adjacent_layouts", tuple(adjacent_layouts))
        object.__setattr__(self, "level_shapes", tuple(map(_frozen, level_shapes)))

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("RepresentationValidationContext is final")


def _frozen(shape: Any) -> IntTree:
    return tuple(map(_frozen, cast("list[Any]", shape))) if isinstance(shape, tuple | list) else shape


class RuleMeta(ModelMeta):
    """Completes and seals a rule when its outermost constructor returns."""

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:  # noqa: N805
        rule = cast(_T, super().__call__(*args, **kwargs))  # type: ignore[misc]
        _finish(cast(Any, rule))
        return rule


class RepresentationRule(metaclass=RuleMeta):
    """An immutable logical constraint; subclass it, implement `validate`, and name own state in
    `structure_extension`.

    A subclass sets its state in its constructor; when the outermost constructor returns, the rule is sealed:
    assigning or deleting an attribute is AttributeError. Rules compare and hash by class and structure,
    copies are the same object, and one rule may serve many dtypes. Shadowing a member of the model is
    TypeError at class creation (contract: "Representation rules have immutable structural identity").

    >>> class AtMost(RepresentationRule):
    ...     def __init__(self, blocks):
    ...         self.blocks = blocks
    ...     def structure_extension(self):
    ...         return (self.blocks,)
    ...     def validate(self, context):
    ...         if len(context.level_shapes) > self.blocks:
    ...             raise ValueError("too many levels")
    >>> AtMost(2).structure() == AtMost(2).structure() != AtMost(True).structure()
    True
    """

    __slots__ = ("__structure", "__weakref__")
    __structure: Structure

    def validate(self, context: RepresentationValidationContext) -> None:
        """Return None where the context satisfies the rule, and raise where it does not; change nothing."""
        raise NotImplementedError

    def structure_extension(self) -> tuple[object, ...]:
        """The rule's own state: a tuple of str, int, bool, float, None, Whole and such tuples."""
        return ()

    def structure(self) -> Structure:
        """The rule's class and own state, recorded at construction; structures compare type-exactly under
        `==`.

        Raises TypeError during construction.
        """
        if not _is_sealed(self):
            raise TypeError(f"this {type(self).__name__} is not constructed yet")
        return self.__structure

    def __setattr__(self, name: str, value: object) -> None:
        self.__check_change(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__check_change(name)
        object.__delattr__(self, name)

    def __check_change(self, name: str) -> None:
        if _is_sealed(self):
            raise AttributeError(f"{type(self).__name__} is immutable: cannot set or delete {name!r}")
        if name in owned_members(type(self)):
            raise AttributeError(
                f"{name!r} of {type(self).__name__} belongs to the model: cannot set or delete it"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RepresentationRule) or type(self) is not type(other):
            return NotImplemented
        return self.structure() == other.structure()

    def __hash__(self) -> int:
        return hash(self.structure())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        names = cast("list[str]", copyreg._slotnames(type(self)))  # type: ignore[attr-defined]
        slots = {name: read_slot(self, name) for name in names if has_slot(self, name)}
        return _restore, (type(self), {**slots, **read_slot(self, "__dict__", {})}, self.structure())


@final
class LevelExtent(RepresentationRule):
    """Requires that each coordinate of level `level + 1` groups exactly `extent` coordinates of level
    `level`.

    `extent` is a positive int, or Whole: one target coordinate groups the complete source level. The check is
    algebraic; it costs the same for any number of elements (contract: "LevelExtent validates uniform logical
    grouping").

    Raises TypeError for a level or extent of another type (bools and int subclasses included), ValueError for
    a negative level or an extent below 1.

    >>> LevelExtent(0, 32)
    LevelExtent(level=0, extent=32)
    """

    __slots__ = ("__extent", "__level")
    __extent: int | WholeExtent
    __level: int

    def __init__(self, level: int, extent: int | WholeExtent) -> None:
        if type(level) is not int:
            raise TypeError(f"level must be an int, got {type(level).__name__}")
        if extent is not Whole and type(extent) is not int:
            raise TypeError(f"extent must be an int or Whole, got {type(extent).__name__}")
        if level < 0:
            raise ValueError(f"level must not be negative, got {shown(level)}")
        if isinstance(extent, int) and extent < 1:
            raise ValueError(f"extent must be at least 1, got {shown(extent)}")
        if _is_sealed(self):
            raise AttributeError("LevelExtent is immutable: cannot construct it again")
        object.__setattr__(self, "_LevelExtent__level", level)
        object.__setattr__(self, "_LevelExtent__extent", extent)

    @property
    def level(self) -> int:
        """The zero-based adjacent edge: from level `level` to level `level + 1`."""
        return self.__level

    @property
    def extent(self) -> int | WholeExtent:
        """How many source coordinates each target coordinate groups, or Whole."""
        return self.__extent

    def structure_extension(self) -> tuple[object, ...]:
        return self.__level, self.__extent

    def validate(self, context: RepresentationValidationContext) -> None:
        """Check the edge. Raises ValueError for a missing edge, wrong cardinalities, or a non-uniform
        grouping."""
        edge = self.__level
        if edge >= len(context.adjacent_layouts) or edge + 1 >= len(context.level_shapes):
            raise ValueError(f"{self!r}: there is no adjacent layout {edge}")
        layout = context.adjacent_layouts[edge]
        source, target = map(tree_product, context.level_shapes[edge : edge + 2])
        wanted = source if isinstance(self.__extent, WholeExtent) else self.__extent
        if isinstance(self.__extent, WholeExtent) and target != 1:
            raise ValueError(f"{self!r}: wanted one target coordinate, got {target}")
        if source != wanted * target:
            raise ValueError(
                f"{self!r}: {source} source coordinates are not {wanted} for each of {target} targets"
            )
        if layout.size != source:
            raise ValueError(
                f"{self!r}: adjacent layout {edge} has {layout.size} coordinates, the level has {source}"
            )
        if layout.uniform_preimage_extent(target) != wanted:
            raise ValueError(
                f"{self!r}: {layout} does not map {wanted} coordinates to each of {target} indices"
            )

    def __repr__(self) -> str:
        return f"LevelExtent(level={self.__level}, extent={self.__extent!r})"


def is_complete_rule(value: object) -> TypeGuard[RepresentationRule]:
    """Whether a value is a rule whose construction has ended."""
    return issubclass(type(value), RepresentationRule) and is_accepted(type(value)) and _is_sealed(value)


def _is_sealed(rule: object) -> bool:
    return has_slot(rule, "_RepresentationRule__structure")


def _finish(rule: RepresentationRule) -> None:
    cls = type(rule)
    if cls.validate is RepresentationRule.validate:
        raise TypeError(f"{cls.__qualname__} does not implement validate(context)")
    structure: Structure = (
        ("class", class_identity(cls)),
        ("extension", freeze_extension(rule.structure_extension())),
    )
    object.__setattr__(rule, "_RepresentationRule__structure", structure)


def _restore(
    cls: type[RepresentationRule], state: dict[str, object], structure: Structure
) -> RepresentationRule:
    """Unpickle a rule: its state, sealed again, if the class here makes the same structure of it."""
    rule = object.__new__(cls)
    for name, value in state.items():
        if name != "_RepresentationRule__structure":
            object.__setattr__(rule, name, value)
    _finish(rule)
    difference = first_difference(structure, rule.structure())
    if difference is not None:
        raise ValueError(f"the pickled {cls.__qualname__} is not what its class makes here: {difference}")
    return rule
