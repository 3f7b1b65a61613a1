"""Structures: the plain tuples that say what a descriptor or a rule is, compared type-exactly.

A structure is a tuple of fields `(label, value)`. Values are exact strings, ints, None, Whole, other
structures, and tagged tuples: `("tuple", ...)`, `("bool", text)`, `("float", hexadecimal)`. With the tags,
ordinary `==` and `hash` keep True, 1 and 1.0 apart, and 0.0 and -0.0, and let a NaN equal itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

from jaxquant.dtypes.extents import Whole

Structure: TypeAlias = tuple[tuple[str, object], ...]


def freeze(value: object) -> object:
    """Give a structure value in tagged form.

    Raises TypeError for anything but exact str, int, bool, float, None, Whole and exact tuples of these.
    """
    kind = type(value)
    if value is None or value is Whole or kind is str or kind is int:
        return value
    if kind is bool:
        return ("bool", repr(value))
    if kind is float:
        return ("float", cast(float, value).hex())
    if kind is tuple:
        return sequence(freeze(item) for item in cast("tuple[object, ...]", value))
    raise TypeError(
        "a structure holds exact str, int, bool, float, None, Whole and tuples of them, "
        f"not {kind.__qualname__}"
    )


def freeze_extension(value: object) -> object:
    """Freeze what a `structure_extension` returned; raises TypeError unless it is an exact tuple."""
    if type(value) is not tuple:
        raise TypeError(f"structure_extension must return a tuple, got {type(value).__qualname__}")
    return freeze(cast("tuple[object, ...]", value))


def sequence(values: Iterable[object]) -> tuple[object, ...]:
    return ("tuple", *values)


def class_identity(cls: type) -> Structure:
    # Two fields: joined by a dot, the class C of module a.b would be the class b.C of module a.
    return (("module", cls.__module__), ("qualname", cls.__qualname__))


def first_difference(theirs: object, ours: object, path: str = "") -> str | None:
    """Where two structures first differ, as "bits: 17 there, 16 here", or None where they are the same."""
    left, right = _as_tuple(theirs), _as_tuple(ours)
    if left is None or right is None:
        same = _same_type(theirs, ours) and theirs == ours
        return None if same else f"{path or 'structure'}: {_shown(theirs)} there, {_shown(ours)} here"
    if _is_scalar(left) or _is_scalar(right):
        return None if left == right else f"{path}: {_shown(left)} there, {_shown(right)} here"
    if left[:1] == ("tuple",) == right[:1]:
        parts = [f"{path}[{i}]" for i in range(len(right) - 1)]
        left, right = left[1:], right[1:]
    elif _is_field(left) and _is_field(right) and left[0] == right[0]:
        return first_difference(left[1], right[1], f"{path}.{left[0]}" if path else str(left[0]))
    else:
        parts = [path] * len(right)
    for part, a, b in zip(parts, left, right, strict=False):
        found = first_difference(a, b, part)
        if found is not None:
            return found
    if len(left) != len(right):
        return f"{path or 'structure'}: {len(left)} entries there, {len(right)} here"
    return None


def _as_tuple(value: Any) -> tuple[object, ...] | None:
    return cast("tuple[object, ...]", value) if type(value) is tuple else None


def _same_type(a: Any, b: Any) -> bool:
    return type(a) is type(b)


def _is_field(value: tuple[object, ...]) -> bool:
    return len(value) == 2 and type(value[0]) is str


def _is_scalar(value: tuple[object, ...]) -> bool:
    return _is_field(value) and value[0] in ("bool", "float")


def _shown(value: object) -> str:
    """A value as it was before freezing, as far as a tag tells."""
    parts = _as_tuple(value)
    if parts is not None and _is_scalar(parts):
        return str(parts[1] if parts[0] == "bool" else float.fromhex(str(parts[1])))
    return repr(value)
