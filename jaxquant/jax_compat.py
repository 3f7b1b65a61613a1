"""What this library needs of JAX beyond its documented names, in one place.

The rest of the package uses public modules only (`jax`, `jax.ffi`, `jax.extend`, `jax.interpreters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

__all__ = ["leading_spec", "result_aval", "to_common_varying"]


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
