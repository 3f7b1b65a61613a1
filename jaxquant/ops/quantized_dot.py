"""``quantized_dot``: the dot product of q4_k weights with q8_k activations, and all that vmap makes of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.typing import DTypeLike

from jaxquant import jax_compat
from jaxquant.ops import fallback, native, partition
from jaxquant.ops.operands import check_array, check_format
from jaxquant.quant import RecordFormat, q4_k, q8_k

__all__ = ["quantized_dot", "quantized_dot_p"]

# A dot_general over the record axis. `lhs_dims` says, for each axis of lhs but the last, along which axis
# of the result it runs, or -1 for the record axis; `rhs_dims` the same. A result axis named by both is a
# batch axis. [G, 144] . [G, 292] -> [] is (-1,), (-1,); a GEMV (0, -1), (-1,); a GEMM with the rows of
# lhs last in the result (1, -1), (0, -1). Operands are never transposed, broadcast or copied.
quantized_dot_p = Primitive("quantized_dot")
quantized_dot_p.def_impl(functools.partial(xla.apply_primitive, quantized_dot_p))

_RECORD_AXIS = (-1,)


def quantized_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_format: RecordFormat = q4_k,
    rhs_format: RecordFormat = q8_k,
    acc_dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """The dot product of a row of q4_k weight records with a row of q8_k activation records.

    Per pair of records the sums over elements are exact integers; with R32 one rounding to nearest even in
    float32, ``v = R32(ds * R32(R32(d * S) - R32(dmin * T)))``. The result is v[0], plus v[1], plus v[2]
    and so on, rounded after each, the same bits on every backend, batching and sharding. No records give +0.

    ``jax.vmap`` over lhs, over rhs, or over both, in any nesting and on any axes, stays one kernel call:
    ``vmap(quantized_dot, (0, None))`` is a GEMV, a second vmap a GEMM.

    Args:
        lhs: uint8 [G, 144], weight records.
        rhs: uint8 [G, 292], activation records, as `jaxquant.quantize` makes them.
        lhs_format: ``jaxquant.quant.q4_k``.
        rhs_format: ``jaxquant.quant.q8_k``.
        acc_dtype: float32, what the records are added in.

    Returns:
        float32 of rank zero. The derivative is zero.

    Raises:
        TypeError: if an operand is no array or not uint8, a format is no record format, or acc_dtype is
            not float32.
        ValueError: if a shape is wrong, the record counts differ, or a format is the wrong one.

    Example:
        >>> import jax, jax.numpy as jnp, jaxquant as jq
        >>> weights = jnp.zeros((8, 2, 144), jnp.uint8)
        >>> x = jq.quantize(jnp.ones((2, 256), jnp.float32))
        >>> jax.vmap(jq.quantized_dot, (0, None))(weights, x).shape
        (8,)

    Source: record contract, section 3.
    """
    check_format("quantized_dot", "lhs_format", lhs_format, q4_k)
    check_format("quantized_dot", "rhs_format", rhs_format, q8_k)
    _check_acc_dtype(acc_dtype)
    check_array("quantized_dot", "lhs", lhs, "uint8", q4_k.record_bytes)
    check_array("quantized_dot", "rhs", rhs, "uint8", q8_k.record_bytes)
    if lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"quantized_dot: lhs and rhs must have the same number of records G, "
            f"got lhs {tuple(lhs.shape)} and rhs {tuple(rhs.shape)}"
        )
    result: jax.Array = _quantized_dot(lhs, rhs, backend=native.selected_backend())
    return result


def _check_acc_dtype(acc_dtype: DTypeLike) -> None:
    try:
        dtype = np.dtype(acc_dtype)
    except TypeError:
        dtype = None
    if acc_dtype is None or dtype != np.float32:
        got = acc_dtype if dtype is None or acc_dtype is None else dtype
        raise TypeError(f"quantized_dot: acc_dtype is {got!r}, wanted float32")


@functools.partial(jax.jit, static_argnames="backend")
def _quantized_dot(lhs: jax.Array, rhs: jax.Array, *, backend: str) -> jax.Array:
    lhs, rhs = jax_compat.to_common_varying(lhs, rhs)
    result: jax.Array = quantized_dot_p.bind(
        lhs, rhs, lhs_dims=_RECORD_AXIS, rhs_dims=_RECORD_AXIS, backend=backend
    )
    return result


def _abstract_eval(
    lhs: Any, rhs: Any, *, lhs_dims: tuple[int, ...], rhs_dims: tuple[int, ...], backend: str
) -> Any:
    assert lhs.dtype == rhs.dtype == jnp.uint8
    extents: dict[int, Any] = {}
    specs: dict[int, Any] = {}
    for name, operand, dims in (("lhs", lhs, lhs_dims), ("rhs", rhs, rhs_dims)):
        if _record_spec(operand, dims) is not None:
            raise ValueError(
                "quantized_dot: records are added in order, so the record axis and the bytes of a record may not be "
                f"sharded over devices, got {name} {operand.str_short()}; reshard it first, as with jax.reshard"
            )
        for axis, dim in enumerate(dims):
            if extents.setdefault(dim, operand.shape[axis]) != operand.shape[axis]:
                raise ValueError(
                    f"quantized_dot: extents of a mapped axis differ, got lhs {lhs.shape} and rhs {rhs.shape}"
                )
            spec = jax_compat.leading_spec(operand, axis)
            if specs.setdefault(dim, spec) is None:
                specs[dim] = spec
    rank = len(extents) - 1
    return jax_compat.result_aval(
        [lhs, rhs], [extents[i] for i in range(rank)], jnp.float32, [specs[i] for i in range(rank)]
    )


quantized_dot_p.def_abstract_eval(_abstract_eval)


def _record_spec(operand: Any, dims: tuple[int, ...]) -> Any:
    """The mesh axes over which the record axis or the bytes of an operand are sharded, or None."""
    record = jax_compat.leading_spec(operand, dims.index(-1))
    return record if record is not None else jax_compat.leading_spec(operand, operand.ndim - 1)


def _batch(
    args: Any, axes: Any, *, lhs_dims: tuple[int, ...], rhs_dims: tuple[int, ...], backend: str
) -> Any:
    def insert(operand: Any, dims: tuple[int, ...], axis: int | None) -> tuple[Any, tuple[int, ...]]:
        shifted = tuple(dim + 1 if dim >= 0 else dim for dim in dims)
        if axis is None:
            return operand, shifted
        if axis == operand.ndim - 1:
            operand, axis = jnp.moveaxis(operand, axis, 0), 0
        return operand, (*shifted[:axis], 0, *shifted[axis:])

    lhs, lhs_dims = insert(args[0], lhs_dims, axes[0])
    rhs, rhs_dims = insert(args[1], rhs_dims, axes[1])
    return quantized_dot_p.bind(lhs, rhs, lhs_dims=lhs_dims, rhs_dims=rhs_dims, backend=backend), 0


batching.primitive_batchers[quantized_dot_p] = _batch


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    result = quantized_dot_p.bind(*primals, **params)
    return result, ad.Zero(jax.typeof(result).to_tangent_aval())


ad.primitive_jvps[quantized_dot_p] = _jvp


def _axes(lhs_dims: Sequence[int], rhs_dims: Sequence[int]) -> partition.Axes:
    rank = 1 + max((*lhs_dims, *rhs_dims))
    operands = [[partition.WHOLE if dim < 0 else dim for dim in (*dims, -1)] for dims in (lhs_dims, rhs_dims)]
    return partition.Axes(operands, [range(rank)])


def _axes_of_call(operands: Any, results: Any, attributes: str) -> partition.Axes:
    def dims(name: str) -> list[int]:
        found = re.search(rf"\b{name} = dense<\[?(.*?)\]?>", attributes)
        assert found, attributes
        return [int(dim) for dim in found.group(1).split(",")]

    return _axes(dims("lhs_dims"), dims("rhs_dims"))


def _lower(
    ctx: Any,
    lhs: Any,
    rhs: Any,
    *,
    lhs_dims: tuple[int, ...],
    rhs_dims: tuple[int, ...],
    backend: str,
    platform: str,
) -> Any:
    if native.runs_native(backend, platform, "quantized_dot"):
        rule = partition.rule(_axes(lhs_dims, rhs_dims), ctx.avals_in, ctx.avals_out)
        return jax.ffi.ffi_lowering(native.FFI_TARGETS[1], extra_attributes=rule)(
            ctx, lhs, rhs, lhs_dims=np.array(lhs_dims, np.int64), rhs_dims=np.array(rhs_dims, np.int64)
        )
    run = functools.partial(fallback.quantized_dot, lhs_dims=lhs_dims, rhs_dims=rhs_dims)
    return mlir.lower_fun(run, multiple_results=False)(ctx, lhs, rhs)


mlir.register_lowering(quantized_dot_p, functools.partial(_lower, platform="other"))
mlir.register_lowering(quantized_dot_p, functools.partial(_lower, platform="cpu"), platform="cpu")
mlir.register_lowering(quantized_dot_p, functools.partial(_lower, platform="cuda"), platform="cuda")
partition.register(native.FFI_TARGETS[1], _axes_of_call)
