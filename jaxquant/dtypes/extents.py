"""Exact ints and strings, and Whole, the symbolic extent that covers a whole level."""

from __future__ import annotations

from typing import Final, NoReturn, cast, final


@final
class WholeExtent:
    """The extent that groups an entire source level into one target coordinate.

    There is one such object, `Whole`: constructing, copying and unpickling give it back
    (contract: "Whole is one persistent symbolic extent").

    >>> WholeExtent() is Whole
    True
    >>> Whole
    Whole
    """

    __slots__ = ()

    def __new__(cls) -> WholeExtent:
        return Whole

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("WholeExtent has one value, Whole, and no subclasses")

    def __reduce__(self) -> tuple[type[WholeExtent], tuple[()]]:
        return WholeExtent, ()

    def __repr__(self) -> str:
        return "Whole"


Whole: Final[WholeExtent] = object.__new__(WholeExtent)


def exact_int(value: object) -> int | None:
    """The value as an exact int, or None if it is no int or is a bool."""
    if not issubclass(type(value), int) or type(value) is bool:
        return None
    # int.__index__ ignores whatever a subclass overrides.
    return int.__index__(cast(int, value))


def exact_str(value: object) -> str | None:
    """The value as an exact str, or None if it is no str."""
    if not issubclass(type(value), str):
        return None
    return str.__str__(cast(str, value))
