"""What this library needs of JAX beyond its documented names, in one place.

The rest of the package uses public modules only (`jax`, `jax.ffi`, `jax.extend`, `jax.interpreters`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import checkify
from jax.sharding import PartitionSpec

__all__ = ["add_user_check", "leading_spec", "result_aval", "to_common_varying"]


def leading_spec(aval: Any, axis: int) -> Any:
    """The mesh axes that ``axis`` of a value is explicitly sharded over, or None."""
    spec = tuple(aval.sharding.spec)
    return spec[axis] if axis < len(spec) else None


def result_aval(operand: Any, shape: Sequence[Any], dtype: Any, spec: Sequence[Any]) -> Any:
    """The abstract value of a result: ``operand``'s mesh and varying axes with another shape, dtype and spec."""
    return operand.update(
        shape=tuple(shape),
        dtype=np.dtype(dtype),
        weak_type=False,
        sharding=operand.sharding.update(spec=PartitionSpec(*spec)),
    )


def to_common_varying(*operands: jax.Array) -> list[jax.Array]:
    """Make operands vary over the same manual mesh axes, as an operation of several operands inside shard_map needs."""
    varying = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in operands]
    union = frozenset[Any]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def add_user_check(primitive: Any, failed: Callable[[jax.Array], jax.Array], message: str) -> None:
    """Let ``checkify`` with ``errors=user_checks`` see where ``failed(result)`` is true.

    Unlike `checkify.check` inside a function, this leaves no trace in programs that checkify never sees.
    ``{index}`` in the message becomes the index of the first failure.
    """

    def rule(*args: Any, **params: Any) -> tuple[Any, Any]:
        head = 0 if isinstance(args[0], checkify.Error) else 1  # since jax 0.12 a context comes first
        context, (error, enabled, *operands) = args[:head], args[head:]
        result = primitive.bind(*operands, **params)
        if checkify.FailedCheckError in enabled:
            where = failed(result)
            first = jnp.sum(jnp.cumsum(where.reshape(-1)) == 0)
            index = jnp.unravel_index(first, where.shape)
            text = ", ".join(f"{{{axis}}}" for axis in range(len(index)))
            shown = message.replace("{index}", text if len(index) == 1 else f"({text})")
            failure = checkify.FailedCheckError(checkify.get_traceback(), shown, *index)
            assert_func: Any = checkify.assert_func
            error = assert_func(*context, error, where.any(), failure)
        return error, result

    checkify.error_checks[primitive] = rule
