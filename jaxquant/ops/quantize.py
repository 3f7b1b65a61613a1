"""``quantize``: float32 blocks to q8_k records."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxquant import jax_compat
from jaxquant.ops import fallback, native, partition
from jaxquant.ops.operands import check_array, check_format
from jaxquant.quant import RecordFormat, q8_k

__all__ = ["quantize", "quantize_p"]

# float32 [*batch, G, 256] -> uint8 [*batch, G, 292]; every axis but the last is a batch axis.
quantize_p = Primitive("quantize")
quantize_p.def_impl(functools.partial(xla.apply_primitive, quantize_p))


def quantize(values: jax.Array, format: RecordFormat = q8_k) -> jax.Array:
    """Quantize blocks of 256 floats to q8_k records.

    Each row is one block. Its extreme ``e`` is the signed element of largest magnitude, the minimum on a
    tie; then, each step rounded once to nearest even in float32, ``inverse = -127 / e``, ``ds = 1 / inverse``,
    ``q = saturate_int8(round_half_even(values * inverse))``, and ``bsum`` holds the exact sums of sixteen q.
    An all-zero block gives an all-zero record. A block with a NaN or infinity, or so small that
    ``inverse`` overflows (largest magnitude below 3.7321948e-37), gives a poison record: ds is NaN, the rest
    zero, so that every dot with it is NaN; `jaxquant.validate_records` reports it, and so does
    ``jax.experimental.checkify`` with ``errors=checkify.user_checks``.

    Args:
        values: float32 [G, 256]; ``jax.vmap`` maps further axes.
        format: ``jaxquant.quant.q8_k``, the only format that values can be quantized to.

    Returns:
        uint8 [G, 292], one record per row. The derivative is zero.

    Raises:
        TypeError: if values is no array or not float32, or format is no record format.
        ValueError: if values has another shape, or format is another record format.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> records = jq.quantize(jnp.ones((2, 256), jnp.float32))
        >>> records.shape, int(jq.records.unpack(records, jq.quant.q8_k).q[0, 0])
        ((2, 292), -127)

    Source: record contract, section 4.
    """
    check_format("quantize", "format", format, q8_k)
    check_array("quantize", "values", values, "float32", q8_k.block_size)
    records: jax.Array = _quantize(values, backend=native.selected_backend())
    return records


@functools.partial(jax.jit, static_argnames="backend")
def _quantize(values: jax.Array, *, backend: str) -> jax.Array:
    records: jax.Array = quantize_p.bind(values, backend=backend)
    return records


def _abstract_eval(values: Any, *, backend: str) -> Any:
    assert values.dtype == jnp.float32
    assert values.shape[-1] == q8_k.block_size
    spec = [jax_compat.leading_spec(values, axis) for axis in range(values.ndim)]
    if spec[-1] is not None:
        raise ValueError(
            "quantize: the 256 elements of a block may not be sharded over devices, got values "
            f"{values.str_short()}; reshard them first, as with jax.reshard"
        )
    return jax_compat.result_aval([values], (*values.shape[:-1], q8_k.record_bytes), jnp.uint8, spec)


quantize_p.def_abstract_eval(_abstract_eval)


def _batch(args: Any, dims: Any, *, backend: str) -> Any:
    (values,), (axis,) = args, dims
    if axis == values.ndim - 1:
        values, axis = jnp.moveaxis(values, axis, 0), 0
    return quantize_p.bind(values, backend=backend), axis


batching.primitive_batchers[quantize_p] = _batch


def _jvp(primals: Any, tangents: Any, *, backend: str) -> Any:
    records = quantize_p.bind(*primals, backend=backend)
    return records, ad.Zero(jax.typeof(records).to_tangent_aval())


ad.primitive_jvps[quantize_p] = _jvp


def _poison(records: jax.Array, values: jax.Array) -> dict[str, jax.Array]:
    """Which records are poison, those whose ds has the bits 0x7FC00000, by cause."""
    poison = (records[..., 3] == np.uint8(0x7F)) & (records[..., 2] == np.uint8(0xC0))
    nan, infinite = jnp.isnan(values).any(-1), jnp.isinf(values).any(-1)
    return {
        "quantize: record {index} is poison: its block holds a NaN": poison & nan,
        "quantize: record {index} is poison: its block holds an infinity": poison & infinite,
        "quantize: record {index} is poison: its block is not zero, but nowhere above 3.7321948e-37": poison
        & ~nan
        & ~infinite,
    }


jax_compat.add_user_checks(quantize_p, _poison)


def _axes(operands: Any, *_: Any) -> partition.Axes:
    own = [*range(len(operands[0].shape) - 1), partition.WHOLE]
    return partition.Axes([own], [own])


def _lower(ctx: Any, values: Any, *, backend: str, platform: str) -> Any:
    if native.runs_native(backend, platform, "quantize"):
        rule = partition.rule(_axes(ctx.avals_in), ctx.avals_in, ctx.avals_out)
        return jax.ffi.ffi_lowering(native.FFI_TARGETS[0], extra_attributes=rule)(ctx, values)
    return mlir.lower_fun(fallback.quantize, multiple_results=False)(ctx, values)


mlir.register_lowering(quantize_p, functools.partial(_lower, platform="other"))
mlir.register_lowering(quantize_p, functools.partial(_lower, platform="cpu"), platform="cpu")
mlir.register_lowering(quantize_p, functools.partial(_lower, platform="cuda"), platform="cuda")
partition.register(native.FFI_TARGETS[0], _axes)
