"""How the compiler splits both operations over devices: by rows, columns and batches, never by records.

A lowered call carries a sharding rule, by which XLA decides where its operands and its result lie. The calls
of `quantize` are then split by XLA itself, since all their axes but the last are batches. A dot has axes that
one operand alone has, so its calls are split by `_partition_dot`, under the name of the FFI target: nothing
of it is in the program, which can be cached and exported like that of one device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jaxquant import jax_compat
from jaxquant.jax_compat import Tiling

__all__ = ["batch_attributes", "dot_attributes", "register_batched", "register_dot"]


def register_batched(target: str) -> None:
    """Let XLA split calls of an FFI target along the axes that `batch_attributes` names."""
    jax.ffi.register_ffi_target_as_batch_partitionable(target)


def register_dot(target: str) -> None:
    """Let XLA split calls of an FFI target that has the operands and attributes of a quantized dot."""
    jax_compat.register_partitioner(target, _partition_dot)


def batch_attributes(operands: Sequence[Any], results: Sequence[Any], batch: int) -> dict[str, Any]:
    """Attributes of a call on these abstract values, for XLA's partitioner: the first ``batch`` axes may be split.

    Every operand and result has them, and works on its other axes as a whole.
    """
    sizes = [*operands[0].shape[:batch]]

    def factors(value: Any) -> list[int]:
        own = value.shape[batch:]
        sizes.extend(own)
        return [*range(batch), *range(len(sizes) - len(own), len(sizes))]

    rule = _sharding_rule([*map(factors, operands)], [*map(factors, results)], sizes, batch)
    return rule and {"mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": str(batch)}), **rule}


def dot_attributes(operands: Sequence[Any], result: Any, dims: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The same for a dot, which may be split along every axis of its result; see `jaxquant.ops.quantized_dot` for the dims."""
    free = result.ndim
    factors = [
        [*(free if dim < 0 else dim for dim in axes), free + own] for own, axes in enumerate(dims, start=1)
    ]
    records = operands[0].shape[dims[0].index(-1)]
    sizes = [*result.shape, records, *(operand.shape[-1] for operand in operands)]
    return _sharding_rule(factors, [[*range(free)]], sizes, free)


def _sharding_rule(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], sizes: Sequence[Any], free: int
) -> dict[str, Any]:
    """Shardy's rule for a call whose axes are named by the factors of ``sizes``; those from ``free`` on stay whole."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return {}  # a rule cannot name a symbolic or an empty axis
    symbols = [chr(ord("i") + i) if i < 18 else f"z_{i - 17}" for i in range(len(sizes))]

    def mapping(factors: Sequence[int]) -> str:
        return f"[{', '.join(symbols[i] for i in factors)}]"

    extents = ", ".join(f"{symbol}={size}" for symbol, size in zip(symbols, sizes, strict=True))
    rule = (
        f"#sdy.op_sharding_rule<({', '.join(map(mapping, operands))})->({', '.join(map(mapping, results))}) "
        f"{{{extents}}} need_replication={{{', '.join(symbols[free:])}}}, custom>"
    )
    return {"sdy.sharding_rule": mlir.ir.Attribute.parse(rule)}


def _partition_dot(
    target: str,
    shapes: Sequence[tuple[int, ...]],
    tilings: Sequence[Tiling | None],
    result_shape: tuple[int, ...],
    result_tiling: Tiling | None,
    config: str,
) -> tuple[str, list[Tiling | None], Tiling | None]:
    """The call that one device makes, as StableHLO, and how its operands and its result must lie.

    An axis keeps the tiling it has in lhs, the weights; then in rhs; then in the result. One that the
    devices cannot tile together with the axes before it stays whole, as the record axis and bytes do.
    """
    dims = [_dims_of(config, name) for name in ("lhs_dims", "rhs_dims")]
    known = [tiling for tiling in (*tilings, result_tiling) if tiling is not None]
    if not known:
        return _local_call(target, shapes, result_shape, config), [None, None], None
    extents = dict(enumerate(result_shape))
    chosen: dict[int, Any] = {}
    for tiling, axes in (*zip(tilings, dims, strict=True), (result_tiling, range(len(result_shape)))):
        if tiling is None:
            continue
        for axis, dim in enumerate(axes):
            tiles = tiling.tiles[:, axis]
            count = tiling.counts[axis]
            if dim < 0 or dim in chosen or count == 1 or extents[dim] % count:
                continue
            if _independent([known[0].manual, *chosen.values(), tiles]):
                chosen[dim] = tiles

    devices = len(known[0].manual)
    whole = np.zeros(devices, np.int64)

    def tiling_of(axes: Sequence[int], rank: int) -> Tiling:
        columns = [chosen.get(dim, whole) for dim in axes] + [whole] * (rank - len(axes))
        return Tiling(
            tuple(int(column.max()) + 1 for column in columns),
            np.stack(columns, axis=1) if columns else np.zeros((devices, 0), np.int64),
            known[0].manual,
        )

    operands = [tiling_of(axes, len(shape)) for axes, shape in zip(dims, shapes, strict=True)]
    result = tiling_of(range(len(result_shape)), len(result_shape))
    local = [_local_shape(shape, tiling) for shape, tiling in zip(shapes, operands, strict=True)]
    call = _local_call(target, local, _local_shape(result_shape, result), config)
    return call, list(operands), result


def _dims_of(config: str, name: str) -> list[int]:
    found = re.search(rf"\b{name} = dense<\[?(.*?)\]?>", config)
    assert found, config
    return [int(dim) for dim in found.group(1).split(",")]


def _independent(columns: Sequence[Any]) -> bool:
    """Whether every combination of the columns' values belongs to equally many devices."""
    combinations, devices = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    possible = math.prod(len(np.unique(column)) for column in columns)
    return len(combinations) == possible and bool((devices == devices[0]).all())


def _local_shape(shape: Sequence[int], tiling: Tiling) -> tuple[int, ...]:
    return tuple(extent // count for extent, count in zip(shape, tiling.counts, strict=True))


def _local_call(target: str, shapes: Sequence[Sequence[int]], result: Sequence[int], config: str) -> str:
    def tensor(shape: Sequence[int], element: str) -> str:
        return f"tensor<{'x'.join(map(str, (*shape, element)))}>"

    def layout(rank: int) -> str:
        return f"dense<{list(reversed(range(rank))) or ''}> : tensor<{rank}xindex>"

    lhs, rhs = (tensor(shape, "ui8") for shape in shapes)
    out = tensor(result, "f32")
    return f"""
module {{
  func.func public @main(%lhs: {lhs}, %rhs: {rhs}) -> {out} {{
    %out = stablehlo.custom_call @{target}(%lhs, %rhs) {{
      api_version = 4 : i32,
      backend_config = {config},
      operand_layouts = [{", ".join(layout(len(shape)) for shape in shapes)}],
      result_layouts = [{layout(len(result))}]
    }} : ({lhs}, {rhs}) -> {out}
    return %out : {out}
  }}
}}
"""
