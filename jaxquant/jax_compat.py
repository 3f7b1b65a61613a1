"""What this library needs of JAX beyond its documented names, in one place.

The rest of the package uses public modules only (`jax`, `jax.ffi`, `jax.extend`, `jax.interpreters`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import checkify, xla_bridge
from jax.sharding import PartitionSpec
from jaxlib import xla_client
from numpy.typing import NDArray

__all__ = [
    "Tiling",
    "Value",
    "add_user_check",
    "add_user_checks",
    "leading_spec",
    "register_partitioner",
    "result_aval",
    "to_common_varying",
]


def leading_spec(aval: Any, axis: int) -> Any:
    """The mesh axes that ``axis`` of a value is explicitly sharded over, or None."""
    spec = tuple(aval.sharding.spec)
    return spec[axis] if axis < len(spec) else None


def result_aval(operands: Sequence[Any], shape: Sequence[Any], dtype: Any, spec: Sequence[Any]) -> Any:
    """The abstract value of a result: the operands' mesh and varying axes with another shape, dtype and spec."""
    on_mesh = [operand for operand in operands if not operand.sharding.mesh.empty]  # a constant is on none
    like = (on_mesh or operands)[0]
    return like.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=like.sharding.update(spec=PartitionSpec(*spec)),
    )


def to_common_varying(*operands: jax.Array) -> list[jax.Array]:
    """Make operands vary over the same manual mesh axes, as an operation of several operands inside shard_map needs."""
    varying = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in operands]
    union = frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def add_user_checks(primitive: Any, failures: Callable[..., Mapping[str, jax.Array]]) -> None:
    """Let ``checkify`` with ``errors=user_checks`` see where ``failures(result, *operands)`` says so, by message.

    Unlike `checkify.check` inside a function, this leaves no trace in programs that checkify never sees.
    ``{index}`` in a message becomes the index of its first failure; of several messages the first counts.
    """

    def rule(*args: Any, **params: Any) -> tuple[Any, Any]:
        head = 0 if isinstance(args[0], checkify.Error) else 1  # since jax 0.12 a context comes first
        context, (error, enabled, *operands) = args[:head], args[head:]
        result = primitive.bind(*operands, **params)
        if checkify.FailedCheckError in enabled:
            assert_func: Any = checkify.assert_func
            for message, where in failures(result, *operands).items():
                first = jnp.sum(jnp.cumsum(where.reshape(-1)) == 0)
                index = jnp.unravel_index(first, where.shape)
                text = ", ".join(f"{{{axis}}}" for axis in range(len(index)))
                shown = message.replace("{index}", text if len(index) == 1 else f"({text})")
                failure = checkify.FailedCheckError(checkify.get_traceback(), shown, *index)
                error = assert_func(*context, error, where.any(), failure)
        return error, result

    checkify.error_checks[primitive] = rule


def add_user_check(primitive: Any, failed: Callable[[jax.Array], jax.Array], message: str) -> None:
    """`add_user_checks` with one message, where ``failed(result)`` is true."""
    add_user_checks(primitive, lambda result, *_: {message: failed(result)})


class Tiling(NamedTuple):
    """Which tile of a value each device holds.

    Attributes:
        counts: how many tiles each axis has.
        tiles: int64 [devices, rank], the tile of every axis that a device holds; devices count as in the program.
        manual: int64 [devices], which group a device is in where shard_map has split the program itself already.
    """

    counts: tuple[int, ...]
    tiles: NDArray[np.int64]
    manual: NDArray[np.int64]


class Value(NamedTuple):
    """An operand or a result of a call; without a tiling every device holds all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    tiling: Tiling | None


# Operands, results and attributes of a call, to the StableHLO of one device's call, how its operands must lie,
# and how its results lie.
Partition = Callable[
    [list[Value], list[Value], str], tuple[str, Sequence[Tiling | None], Sequence[Tiling | None]]
]


def register_partitioner(target: str, partition: Partition) -> None:
    """Let ``partition`` split the calls of an FFI target over devices, on every platform.

    `jax.experimental.custom_partitioning` does so with callbacks that only the process that traced a program
    has, and programs that hold one are neither cached on disk (jax#21159) nor exported. A call by this name
    holds nothing but its operands and attributes.
    """

    def value(shape: Any, sharding: Any) -> Value:
        extents = tuple(shape.dimensions())
        return Value(extents, np.dtype(shape.numpy_dtype()), _tiling(sharding, len(extents)))

    def split(shapes: Any, shardings: Any, made: Any, made_sharding: Any, attributes: bytes) -> Any:
        several = made.is_tuple()
        made_shapes = made.tuple_shapes() if several else [made]
        made_shardings = [made_sharding] * len(made_shapes)
        if several and made_sharding is not None:
            made_shardings = made_sharding.tuple_elements()
        operands = [value(*pair) for pair in zip(shapes, shardings, strict=True)]
        results = [value(*pair) for pair in zip(made_shapes, made_shardings, strict=True)]
        call, *wanted = partition(operands, results, attributes.decode())
        operand_shardings, result_shardings = (
            [_wanted_sharding(*each) for each in zip(have, values, tilings, strict=True)]
            for have, values, tilings in zip(
                (shardings, made_shardings), (operands, results), wanted, strict=True
            )
        )
        if several:
            result_sharding = xla_client.HloSharding.tuple_sharding(made, result_shardings)
        else:
            (result_sharding,) = result_shardings
        return call.encode(), operand_shardings, result_sharding

    def infer(shapes: Any, shardings: Any, made: Any, attributes: bytes) -> Any:
        return split(shapes, shardings, made, None, attributes)[2]

    def propagate(sharding: Any, shape: Any, attributes: bytes) -> Any:
        return sharding

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=target,
        prop_user_sharding=propagate,
        partition=split,
        infer_sharding_from_operands=infer,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def _tiling(sharding: Any, rank: int) -> Tiling | None:
    if sharding is None or not sharding.is_tiled():
        return None
    shape = sharding.tile_assignment_dimensions()
    devices = np.array(sharding.tile_assignment_devices(), np.int64)
    tiles = np.empty((len(devices), len(shape)), np.int64)
    tiles[devices] = np.stack(np.unravel_index(np.arange(len(devices)), shape), axis=1)
    groups = [
        tiles[:, axis]
        for axis, kind in enumerate(sharding.subgroup_types(), rank)
        if kind == xla_client.OpSharding.Type.MANUAL
    ]
    manual = groups[0] if groups else np.zeros(len(devices), np.int64)
    return Tiling(tuple(shape[:rank]), tiles[:, :rank], manual)


def _wanted_sharding(sharding: Any, value: Value, tiling: Tiling | None) -> Any:
    # One that is right already is handed back as it is, so that nothing looks moved.
    return sharding if sharding is not None and _same(value.tiling, tiling) else _sharding(tiling)


def _same(a: Tiling | None, b: Tiling | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.counts == b.counts and np.array_equal(a.tiles, b.tiles) and np.array_equal(a.manual, b.manual)


def _sharding(tiling: Tiling | None) -> Any:
    groups = 1 if tiling is None else int(tiling.manual.max()) + 1
    if tiling is None or (groups == 1 and set(tiling.counts) <= {1}):
        return xla_client.HloSharding.replicate()
    by_tile = np.lexsort([tiling.manual, *reversed(tiling.tiles.T)])
    kinds = xla_client.OpSharding.Type
    return xla_client.HloSharding.subgroup_with_device_ordering(
        by_tile.reshape(*tiling.counts, groups, -1), subgroup_types=[kinds.MANUAL, kinds.REPLICATED]
    )
