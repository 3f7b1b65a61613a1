"""The closed set of record formats: ``q4_k`` weights and ``q8_k`` activations.

A record format is a byte schema for 256 logical elements. It is no dtype, no string and no
implementation key, and the set is closed: exactly two members exist, they are immutable and
hashable, and copying or unpickling one returns the member itself.

Source: sections 1 and 2 of the record contract (``docs/numerics.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

__all__ = ["Field", "RecordFormat", "q4_k", "q8_k"]


@dataclass(frozen=True)
class Field:
    """One named field of a record: where it lies and what it holds.

    ``start`` and ``stop`` are byte offsets from the start of the record; fields narrower than a
    byte may share a span. ``bits`` is the stored width of one element, ``dtype`` the NumPy dtype
    that holds the decoded element, ``shape`` the shape per record (``()`` for a scalar).
    """

    name: str
    start: int
    stop: int
    bits: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class RecordFormat:
    """A member of the closed set of record formats; see ``jaxquant.quant.q4_k`` and ``q8_k``.

    Attributes:
        name: ``"q4_k"`` or ``"q8_k"``.
        block_size: logical elements per record, 256.
        record_bytes: bytes per record, 144 or 292.
        fields: the named fields, in byte order.

    Raises:
        TypeError: on construction, subclassing, or setting or deleting an attribute.

    Example:
        >>> import jaxquant as jq
        >>> jq.quant.q4_k.record_bytes, [f.name for f in jq.quant.q8_k.fields]
        (144, ['ds', 'q', 'bsum'])
    """

    __slots__ = ("block_size", "fields", "name", "record_bytes")

    name: str
    block_size: int
    record_bytes: int
    fields: tuple[Field, ...]

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("record formats are a closed set: use jaxquant.quant.q4_k or q8_k")

    def __init_subclass__(cls, **kwargs: object) -> NoReturn:
        raise TypeError("record formats are a closed set: RecordFormat cannot be subclassed")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError(f"record format {self.name} is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise TypeError(f"record format {self.name} is immutable: cannot delete {name!r}")

    def __copy__(self) -> RecordFormat:
        return self

    def __deepcopy__(self, memo: object) -> RecordFormat:
        return self

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"jaxquant.quant.{self.name}"


def _member(name: str, record_bytes: int, fields: tuple[Field, ...]) -> RecordFormat:
    kind: Any = RecordFormat  # whose own __new__ refuses
    member: RecordFormat = object.__new__(kind)
    for attribute, value in (
        ("name", name),
        ("block_size", 256),
        ("record_bytes", record_bytes),
        ("fields", fields),
    ):
        object.__setattr__(member, attribute, value)
    return member


_F16, _F32 = np.dtype("<f2"), np.dtype("<f4")
_U8, _I8, _I16 = np.dtype("u1"), np.dtype("i1"), np.dtype("<i2")

q4_k = _member(
    "q4_k",
    144,
    (
        Field("d", 0, 2, 16, _F16, ()),
        Field("dmin", 2, 4, 16, _F16, ()),
        Field("sc", 4, 16, 6, _U8, (8,)),
        Field("m", 4, 16, 6, _U8, (8,)),
        Field("q", 16, 144, 4, _U8, (256,)),
    ),
)

q8_k = _member(
    "q8_k",
    292,
    (
        Field("ds", 0, 4, 32, _F32, ()),
        Field("q", 4, 260, 8, _I8, (256,)),
        Field("bsum", 260, 292, 16, _I16, (16,)),
    ),
)
