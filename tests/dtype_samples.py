"""Descriptors that several tests share; names and block-scaled chains are claimed for the whole process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from jaxquant.dtypes import (
    BlockScaledDType,
    CompoundDType,
    DType,
    Level,
    RepresentationRule,
    RepresentationValidationContext,
    SimpleDType,
)
from jaxquant.layout import Layout

_numbers = itertools.count()


def fresh(stem: str = "dtype") -> str:
    return f"tests.{stem}.{next(_numbers)}"


def fresh_block() -> int:
    """A block extent that no other test uses, so that its chain is free."""
    return 1_000_003 + next(_numbers)


def is_free(name: str) -> bool:
    return all(dtype.name != name for dtype in DType.registered())


def block_scaled(name: str, element: SimpleDType, levels: Iterable[Level]) -> BlockScaledDType:
    """The one descriptor of a chain, whoever made it first."""
    chain = tuple(levels)
    for dtype in BlockScaledDType.registered():
        if dtype.element is element and dtype.levels == chain:
            return dtype
    return BlockScaledDType(name, element=element, levels=chain)


class Planar(CompoundDType, abstract=False):
    """An extension compound dtype with nothing of its own."""


class SizeLimit(RepresentationRule):
    """An extension rule: the first level has at most so many coordinates."""

    def __init__(self, limit: object) -> None:
        self.limit = limit

    def structure_extension(self) -> tuple[object, ...]:
        return (self.limit,)

    def validate(self, context: RepresentationValidationContext) -> None:
        size = context.placement_layouts[0].size
        if size > self.limit:
            raise ValueError(f"{size} coordinates exceed {self.limit}")


def context(adjacent: Layout, target: object) -> RepresentationValidationContext:
    """One edge from the shape of `adjacent` to the shape `target`."""
    return RepresentationValidationContext(
        logical_dtype=DType.MXFP4,
        storage_dtypes=(DType.E2M1, DType.E8M0),
        placement_layouts=(Layout(adjacent.shape, adjacent.stride), Layout(target, target)),
        adjacent_layouts=(adjacent,),
        level_shapes=(adjacent.shape, target),
    )


FLOAT16 = SimpleDType(fresh("Float16"), bits=16, supertype=DType.Floating, scalar_type=np.float16)
BFLOAT16 = SimpleDType(fresh("BFloat16"), bits=16, supertype=DType.Floating, scalar_type=ml_dtypes.bfloat16)
E4M3_PER_16 = block_scaled(fresh("E4M3Per16"), DType.E4M3, [Level(DType.E8M0, 16)])
E4M3_PER_TILE = block_scaled(fresh("E4M3PerTile"), DType.E4M3, [Level(DType.Float32, 128 * 128)])
