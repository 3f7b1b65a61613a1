"""How the compiler splits calls of the kernels over devices: along axes that a kernel treats one by one.

A lowered call carries a sharding rule, by which XLA decides where its operands and results lie. It is then
split by a partitioner registered under the name of its FFI target. Nothing of that is in the program, which
can be cached and exported like that of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.interpreters import mlir

from jaxquant import jax_compat
from jaxquant.jax_compat import Tiling, Value

__all__ = ["WHOLE", "Axes", "register", "rule"]

WHOLE = -1
"""An axis that every device needs as a whole."""

_NAMED = 18  # of Shardy's factors; i to z, then z_1, z_2 and so on


class Axes(NamedTuple):
    """What the axes of a call's values are: equal numbers from 0 up are split alike, `WHOLE` is never split."""

    operands: Sequence[Sequence[int]]
    results: Sequence[Sequence[int]]


Describe: TypeAlias = Callable[[Sequence[Value], Sequence[Value], str], Axes]
"""The axes of a call, from its operands, its results and its attributes as MLIR prints them."""


def register(target: str, describe: Describe) -> None:
    """Let XLA split the calls of an FFI target that are lowered with a `rule`."""

    def partition(operands: Sequence[Value], results: Sequence[Value], attributes: str) -> Any:
        axes = describe(operands, results, attributes)
        wanted = _tilings(axes, operands, results)
        here = [_part(value, tiling) for value, tiling in zip((*operands, *results), wanted, strict=True)]
        count = len(operands)
        return _call(target, here[:count], here[count:], attributes), wanted[:count], wanted[count:]

    jax_compat.register_partitioner(target, partition)


def rule(axes: Axes, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """The attribute that tells XLA of the axes of a call on these abstract values."""
    shared = sorted({axis for own in (*axes.operands, *axes.results) for axis in own if axis != WHOLE})
    number = {axis: factor for factor, axis in enumerate(shared)}
    sizes: list[Any] = [None] * len(shared)
    mappings = []
    for value, own in zip((*operands, *results), (*axes.operands, *axes.results), strict=True):
        factors = []
        for axis, extent in zip(own, value.shape, strict=True):
            factor = number.get(axis, len(sizes))
            if axis == WHOLE:
                sizes.append(extent)
            else:
                sizes[factor] = extent
            factors.append(_symbol(factor))
        mappings.append(f"[{', '.join(factors)}]")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return {}  # a rule cannot name a symbolic or an empty axis
    count = len(operands)
    extents = ", ".join(f"{_symbol(factor)}={size}" for factor, size in enumerate(sizes))
    kept = ", ".join(map(_symbol, range(len(shared), len(sizes))))
    text = (
        f"#sdy.op_sharding_rule<({', '.join(mappings[:count])})->({', '.join(mappings[count:])}) "
        f"{{{extents}}} need_replication={{{kept}}}, custom>"
    )
    return {"sdy.sharding_rule": mlir.ir.Attribute.parse(text)}


def _symbol(factor: int) -> str:
    return chr(ord("i") + factor) if factor < _NAMED else f"z_{factor - _NAMED + 1}"


def _tilings(axes: Axes, operands: Sequence[Value], results: Sequence[Value]) -> list[Tiling | None]:
    """How operands and results must lie.

    An axis keeps the tiling it has in the first operand, then in the next ones, then in the results. One that
    the devices cannot tile together with the axes before it stays whole.
    """
    values = [*operands, *results]
    every = [*axes.operands, *axes.results]
    known = [value.tiling for value in values if value.tiling is not None]
    if not known:
        return [None] * len(values)
    manual = known[0].manual
    whole = np.zeros(len(manual), np.int64)
    chosen: dict[int, Any] = {}
    for value, own in zip(values, every, strict=True):
        if value.tiling is None:
            continue
        for place, axis in enumerate(own):
            count = value.tiling.counts[place]
            if axis == WHOLE or axis in chosen or count == 1 or value.shape[place] % count:
                continue
            tiles = value.tiling.tiles[:, place]
            if _independent([manual, *chosen.values(), tiles]):
                chosen[axis] = tiles

    def tiling(own: Sequence[int]) -> Tiling:
        columns = [chosen.get(axis, whole) for axis in own]
        counts = tuple(int(column.max()) + 1 for column in columns)
        return Tiling(counts, np.reshape(columns, (len(own), len(manual))).T, manual)

    return [tiling(own) for own in every]


def _independent(columns: Sequence[Any]) -> bool:
    """Whether every combination of the columns' values belongs to equally many devices."""
    combinations, devices = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    possible = math.prod(len(np.unique(column)) for column in columns)
    return len(combinations) == possible and bool((devices == devices[0]).all())


def _part(value: Value, tiling: Tiling | None) -> Value:
    if tiling is None:
        return value
    shape = tuple(extent // count for extent, count in zip(value.shape, tiling.counts, strict=True))
    return value._replace(shape=shape)


def _call(target: str, operands: Sequence[Value], results: Sequence[Value], attributes: str) -> str:
    """The call that one device makes, as StableHLO."""
    with mlir.make_ir_context():
        elements = [str(mlir.dtype_to_ir_type(value.dtype)) for value in (*operands, *results)]
    types = [
        f"tensor<{'x'.join(map(str, (*value.shape, element)))}>"
        for value, element in zip((*operands, *results), elements, strict=True)
    ]
    count = len(operands)
    names = [f"%operand{i}" for i in range(count)]
    parameters = ", ".join(f"{name}: {type_}" for name, type_ in zip(names, types, strict=False))
    made = f"({', '.join(types[count:])})"
    returned = ", ".join(f"%results#{i}" for i in range(len(results)))

    def layouts(values: Sequence[Value]) -> str:
        ranks = [len(value.shape) for value in values]
        return ", ".join(f"dense<{[*reversed(range(rank))] or ''}> : tensor<{rank}xindex>" for rank in ranks)

    return f"""
module {{
  func.func public @main({parameters}) -> {made} {{
    %results:{len(results)} = stablehlo.custom_call @{target}({", ".join(names)}) {{
      api_version = 4 : i32,
      backend_config = {attributes},
      operand_layouts = [{layouts(operands)}],
      result_layouts = [{layouts(results)}]
    }} : ({", ".join(types[:count])}) -> {made}
    return {returned} : {", ".join(types[count:])}
  }}
}}
"""
