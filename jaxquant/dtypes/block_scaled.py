"""Block-scaled dtypes: encoded elements under a chain of scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn, final

import numpy as np

from jaxquant.dtypes.extents import Whole, WholeExtent, exact_int
from jaxquant.dtypes.kinds import (
    CompoundDType,
    DType,
    SimpleDType,
    add_field,
    bit_fields,
    claim_representation,
    is_registered,
    items,
)
from jaxquant.dtypes.rules import LevelExtent
from jaxquant.dtypes.structure import sequence
from jaxquant.layout import immutable, shown


@final
@immutable
@dataclass(frozen=True, slots=True)
class Level:
    """One scale of a block-scaled chain: the dtype of the scales, and how many coordinates below share one.

    `block` is a positive int, or Whole for a single scale over the complete level below. Levels compare and
    hash by value (contract: "A Level defines one scale dtype and grouping extent").

    Raises TypeError where `scale` is no registered SimpleDType or `block` neither an int nor Whole,
    ValueError where an int block is below 1.

    >>> Level(DType.E8M0, 32)
    Level(scale=SimpleDType('E8M0'), block=32)
    >>> Level(DType.Float32, Whole).is_whole()
    True
    """

    scale: SimpleDType
    block: int | WholeExtent

    def __post_init__(self) -> None:
        if not is_registered(self.scale, SimpleDType):
            raise TypeError(f"scale must be a registered SimpleDType, got {shown(self.scale)}")
        if self.block is Whole:
            return
        block = exact_int(self.block)
        if block is None:
            raise TypeError(f"block must be an int or Whole, got {type(self.block).__name__}")
        if block < 1:
            raise ValueError(f"block must be at least 1, got {shown(block)}")
        object.__setattr__(self, "block", block)

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("Level is final")

    def __reduce__(self) -> tuple[type[Level], tuple[SimpleDType, int | WholeExtent]]:
        return Level, (self.scale, self.block)

    def is_whole(self) -> bool:
        """Whether one scale covers the complete level below."""
        return self.block is Whole


@final
@immutable
@dataclass(frozen=True, slots=True)
class SymbolicBits:
    """Bits per element of a format with one scale for the whole array: `constant + whole_scale_bits /
    elements`.

    Compares and hashes by value. Raises TypeError where a field is no int or float.

    >>> SymbolicBits(4.5, 32).evaluate(1024)
    4.53125
    """

    constant: float
    whole_scale_bits: int

    def __post_init__(self) -> None:
        fields: tuple[tuple[str, object], ...] = (
            ("constant", self.constant),
            ("whole_scale_bits", self.whole_scale_bits),
        )
        for name, value in fields:
            if type(value) not in (int, float):
                raise TypeError(f"{name} must be an int or a float, got {type(value).__name__}")

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("SymbolicBits is final")

    def evaluate(self, element_count: int) -> float:
        """The cost in bits per element of an array of `element_count` elements.

        Raises TypeError where `element_count` is no integer or is a bool, ValueError where it is below 1
        or too large for a float.
        """
        # The product of a shape is often a numpy integer.
        exact = element_count.item() if isinstance(element_count, np.integer) else element_count
        count = exact_int(exact)
        if count is None:
            raise TypeError(f"element_count must be an int, got {type(element_count).__name__}")
        if count < 1:
            raise ValueError(f"element_count must be at least 1, got {shown(count)}")
        try:
            return self.constant + self.whole_scale_bits / count
        except OverflowError:
            raise ValueError("element_count or a field of the cost is too large for a float") from None


class BlockScaledDType(CompoundDType, abstract=False):
    """A compound dtype whose value is an encoded element times one scale from each level.

    `element` is the registered simple dtype of the encoded elements; `levels` a non-empty iterable of
    `Level`, inner to outer, of which only the last may be Whole. The planes are the element and each level's
    scale, with one `LevelExtent` rule per level, under `DType.Any`. One chain of element and levels is one
    dtype, whatever the name or subclass (contract: "BlockScaledDType derives its complete plane chain").

    Raises TypeError for a bad element or level; ValueError for no levels, a Whole level that is not the last,
    a bad or taken name, and a chain that is registered already. In each case nothing is registered.

    >>> DType.NVFP4.simple_types
    (SimpleDType('E2M1'), SimpleDType('E4M3'), SimpleDType('Float32'))
    >>> DType.NVFP4.bits_per_element
    SymbolicBits(constant=4.5, whole_scale_bits=32)
    """

    __slots__ = ("__element", "__levels")
    __element: SimpleDType
    __levels: tuple[Level, ...]

    def __init__(self, name: str, *, element: SimpleDType, levels: Iterable[Level]) -> None:
        if not is_registered(element, SimpleDType):
            raise TypeError(f"element must be a registered SimpleDType, got {shown(element)}")
        chain = items(levels, "levels")
        for i, level in enumerate(chain):
            if type(level) is not Level:
                raise TypeError(f"levels[{i}] must be a Level, got {shown(level)}")
        if not chain:
            raise ValueError("levels is empty: a block-scaled dtype has at least one scale level")
        for i, level in enumerate(chain[:-1]):
            if level.is_whole():
                raise ValueError(f"levels[{i}] is Whole, which only the last of {len(chain)} levels may be")
        super().__init__(
            name,
            supertype=DType.Any,
            simple_types=(element, *(level.scale for level in chain)),
            representation_rules=[LevelExtent(i, level.block) for i, level in enumerate(chain)],
        )
        add_field(self, "element", element.structure())
        add_field(
            self,
            "levels",
            sequence((("scale", level.scale.structure()), ("block", level.block)) for level in chain),
        )
        claim_representation(self, (element, chain))
        object.__setattr__(self, "_BlockScaledDType__element", element)
        object.__setattr__(self, "_BlockScaledDType__levels", chain)

    @property
    def element(self) -> SimpleDType:
        """The dtype of the encoded elements."""
        return self.__element

    @property
    def levels(self) -> tuple[Level, ...]:
        """The scale levels, inner to outer."""
        return self.__levels

    @property
    def num_axes(self) -> int:
        """The number of levels with an integer block; a final Whole level does not count."""
        return len(self.__blocks())

    @property
    def bits_per_element(self) -> float | SymbolicBits:
        """Storage bits per logical element: a float, or SymbolicBits where the last level is Whole."""
        bits = Fraction(self.__element.bits)
        elements = 1
        for level, block in zip(self.__levels, self.__blocks(), strict=False):
            elements *= block
            bits += Fraction(level.scale.bits, elements)
        last = self.__levels[-1]
        return SymbolicBits(float(bits), last.scale.bits) if last.is_whole() else float(bits)

    def __blocks(self) -> list[int]:
        return [level.block for level in self.__levels if isinstance(level.block, int)]

    def describe(self) -> str:
        """The planes, inner to outer: width, bit fields, the elements that share one value, and the cost.

        >>> print(DType.NVFP4.describe())
        NVFP4: 4.5 + 32/n bits per element, in an array of n elements
          element  E2M1      4 bits  s ee m                              one each     4 bits/element
          scale 0  E4M3      8 bits  s eeee mmm                          one for 16   0.5 bits/element
          scale 1  Float32  32 bits  s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm  one for all  32/n bits/element
        """
        cost = self.bits_per_element
        whole = isinstance(cost, SymbolicBits)
        total = (
            f"{cost.constant:g} + {cost.whole_scale_bits}/n"
            if isinstance(cost, SymbolicBits)
            else f"{cost:g}"
        )
        rows = [("element", self.__element, "one each", f"{self.__element.bits}")]
        blocks = self.__blocks()
        for i, level in enumerate(self.__levels):
            if level.is_whole():
                rows.append((f"scale {i}", level.scale, "one for all", f"{level.scale.bits}/n"))
                continue
            elements = math.prod(blocks[: i + 1])
            share = f"one for {elements}" + (f" ({blocks[i]} of scale {i - 1})" if i else "")
            rows.append(
                (f"scale {i}", level.scale, share, f"{float(Fraction(level.scale.bits, elements)):g}")
            )
        names, fields, shares = (
            max(len(text) for text in column)
            for column in zip(
                *((plane.name, bit_fields(plane), share) for _, plane, share, _ in rows), strict=True
            )
        )
        head = f"{self.name}: {total} bits per element" + (", in an array of n elements" if whole else "")
        return "\n".join(
            [head]
            + [
                f"  {role}  {plane.name:{names}}  {plane.bits:2} bits  {bit_fields(plane):{fields}}  "
                f"{share:{shares}}  {bits} bits/element"
                for role, plane, share, bits in rows
            ]
        )
