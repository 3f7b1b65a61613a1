"""Record bytes and the numbers they hold: decode, encode, dequantize, check and compare.

Every function takes NumPy or JAX arrays and answers in kind. With NumPy arrays each float step is one
separately rounded operation. With JAX arrays every step that a compiler pass or a flush-to-zero mode
could change is integer arithmetic on float32 bits.

Source: sections 2 and 3 of the record contract (``docs/numerics.md``).
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant.encode import encode_blocks
from jaxquant.ops import float32
from jaxquant.quant import Field, RecordFormat, q4_k, q8_k

__all__ = [
    *("Q4K", "Q8K", "Statistics", "dequantize", "encode_q4_k", "explain", "pack", "split", "unpack"),
    "validate_records",
]

HostArray: TypeAlias = np.ndarray[Any, Any]
Array: TypeAlias = HostArray | jax.Array
_A = TypeVar("_A", HostArray, jax.Array)


class Q4K(NamedTuple):
    """The fields of ``q4_k`` records: ``w[i] = d * sc[i // 32] * q[i] - dmin * m[i // 32]``."""

    d: Array
    """float16 [...]"""
    dmin: Array
    """float16 [...]"""
    sc: Array
    """uint8 [..., 8], 0 to 63"""
    m: Array
    """uint8 [..., 8], 0 to 63"""
    q: Array
    """uint8 [..., 256], 0 to 15"""


class Q8K(NamedTuple):
    """The fields of ``q8_k`` records: ``x[i] = ds * q[i]``, and the sums of sixteen ``q`` each."""

    ds: Array
    """float32 [...]"""
    q: Array
    """int8 [..., 256]"""
    bsum: Array
    """int16 [..., 16]; legal records have ``bsum[j] = sum(q[16*j : 16*j + 16])``"""


class Statistics(NamedTuple):
    """What ``explain`` finds in each record of a dot product."""

    S: Array
    """int32 [G], ``sum(sc * sum(wq * xq))``"""
    T: Array
    """int32 [G], ``sum(m * (bsum pairs))``"""
    p: Array
    """float32 [G], ``R32(d * S)``"""
    n: Array
    """float32 [G], ``R32(dmin * T)``"""
    v: Array
    """float32 [G], ``R32(ds * R32(p - n))``; the dot is their left fold"""


_FIELDS: dict[RecordFormat, type[Q4K] | type[Q8K]] = {q4_k: Q4K, q8_k: Q8K}


def unpack(r: Array, format: RecordFormat) -> Q4K | Q8K:
    """Decode records into their named fields, as new arrays.

    Args:
        r: uint8 [..., 144] for ``q4_k``, uint8 [..., 292] for ``q8_k``; NumPy or JAX.
        format: ``jaxquant.quant.q4_k`` or ``q8_k``.

    Returns:
        ``Q4K`` or ``Q8K``, bit for bit: every byte pattern decodes, NaN payloads included.

    Raises:
        TypeError: ``r`` is not a uint8 array, or ``format`` is no record format.
        ValueError: the last axis of ``r`` is not one record long.

    Source: the formulas of section 2 of the record contract.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> fields = jq.records.unpack(np.full((3, 144), 0x21, np.uint8), jq.quant.q4_k)
        >>> fields.q[0, 30:34], fields.sc[0, 0]
        (array([1, 1, 2, 2], dtype=uint8), np.uint8(33))
    """
    _check_records("r", r, format)
    return _unpack(r, format) if isinstance(r, np.ndarray) else _unpack_jax(r, format)


def pack(fields: Q4K | Q8K, format: RecordFormat) -> Array:
    """Encode fields as record bytes; the inverse of ``unpack``.

    Args:
        fields: ``Q4K`` or ``Q8K`` with the dtypes given there and one leading shape in all fields. If any
            of them is a JAX array the answer is one.
        format: the format of ``fields``.

    Returns:
        uint8 [..., 144] or [..., 292]. ``bsum`` is stored as it comes (``validate_records`` judges it).

    Raises:
        TypeError: ``format`` is no record format, ``fields`` belongs to the other one, or a field has
            another dtype.
        ValueError: a field has another shape, or a value needs more bits than the record has for it.
            Values under a ``jax.jit`` trace are not known here: there the check is a
            ``checkify.debug_check``, for ``checkify.checkify(..., errors=checkify.user_checks)``, and
            the bits beyond the width of the field are dropped.

    Source: section 2 of the record contract.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> q = np.ones(256, np.int8)
        >>> fields = jq.records.Q8K(np.array(0.5, np.float32), q, np.full(16, 16, np.int16))
        >>> record = jq.records.pack(fields, jq.quant.q8_k)
        >>> record[[0, 1, 2, 3, 4, 260, 261]].tolist()
        [0, 0, 0, 63, 1, 16, 0]
    """
    _check_format(format)
    if not isinstance(fields, _FIELDS[format]):
        raise TypeError(
            f"fields: got {type(fields).__name__}, want jaxquant.records.{_FIELDS[format].__name__} "
            f"for format {format!r}"
        )
    for field, value in zip(format.fields, fields, strict=True):
        _check_array(f"fields.{field.name}", value, field.dtype)
    lead = fields[0].shape
    for field, value in zip(format.fields, fields, strict=True):
        if value.shape != (*lead, *field.shape):
            raise ValueError(
                f"fields.{field.name}: got shape {value.shape}, want {(*lead, *field.shape)}: the leading "
                f"shape of fields.{format.fields[0].name}, then {field.shape}"
            )
        if field.bits < 8:
            _check_width(field, value)
    if all(isinstance(value, np.ndarray) for value in fields):
        return _pack(fields, format)
    return cast("jax.Array", _pack_jax(fields, format))


def dequantize(r: _A, format: RecordFormat) -> _A:
    """The 256 values of each record, exact to the bit.

    Args:
        r: uint8 [..., 144] for ``q4_k``, uint8 [..., 292] for ``q8_k``; NumPy or JAX.
        format: ``jaxquant.quant.q4_k`` or ``q8_k``.

    Returns:
        float32 [..., 256]. For ``q4_k`` ``R32(d*sc*q - dmin*m)``, where both products are exact; for
        ``q8_k`` ``R32(ds*q)``. R32 rounds once, to nearest even, subnormals kept; infinities and NaN in
        the scales propagate. NaN payloads are not promised.

    Raises:
        TypeError: ``r`` is not a uint8 array, or ``format`` is no record format.
        ValueError: the last axis of ``r`` is not one record long.

    A dot of dequantized values is not ``quantized_dot``, which rounds elsewhere.

    Source: section 2 of the record contract; ggml's ``dequantize_row_q4_K`` gives the same bits.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> r = jnp.zeros((1, 292), jnp.uint8).at[0, 3:5].set(jnp.array([0x40, 3], jnp.uint8))
        >>> jq.records.dequantize(r, jq.quant.q8_k)[0, :2]  # ds = 2 and q[0] = 3
        Array([6., 0.], dtype=float32)
    """
    _check_records("r", r, format)
    if isinstance(r, np.ndarray):
        return _dequantize(r, format)
    return cast("jax.Array", _dequantize_jax(r, format))


def validate_records(r: Array, format: RecordFormat) -> None:
    """Return None if every record is legal, else say which is not, and why. Reads values on the host.

    Args:
        r: uint8 [..., 144] for ``q4_k``, uint8 [..., 292] for ``q8_k``; NumPy or a concrete JAX array.
        format: ``jaxquant.quant.q4_k`` or ``q8_k``.

    Raises:
        ValueError: naming the index of the first illegal record, the field and the reason: ``d``,
            ``dmin`` or ``ds`` is not finite (``quantize`` answers an out-of-domain block with such a
            record), or ``bsum`` is not the sum of its ``q``. Also when the last axis of ``r`` is not one
            record long.
        TypeError: ``r`` is not a uint8 array or is traced, or ``format`` is no record format.

    Source: section 2 of the record contract.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> records = np.zeros((2, 292), np.uint8)
        >>> jq.records.validate_records(records, jq.quant.q8_k)
        >>> records[1, 4] = 5
        >>> jq.records.validate_records(records, jq.quant.q8_k)
        Traceback (most recent call last):
        ...
        ValueError: r[1]: bsum[0] is 0, but q[0:16] sums to 5
    """
    _check_records("r", r, format)
    if isinstance(r, jax.core.Tracer):
        raise TypeError("r: got a traced array, want a concrete one: validate_records reads its values")
    records = np.asarray(r).reshape(-1, format.record_bytes)
    first, reason = len(records), ""
    for field in format.fields:
        if field.dtype.kind == "f":
            values = _read(records, field)
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size and bad[0] < first:
                first = int(bad[0])
                reason = f"{field.name} is {values[first]}, not finite"
                if format is q8_k and np.isnan(values[first]):
                    reason += " (quantize marks out-of-domain blocks so)"
    if format is q8_k:
        fields = cast("Q8K", _unpack(records, q8_k))
        sums = fields.q.reshape(-1, 16, 16).sum(axis=-1, dtype=np.int32)
        bad = np.flatnonzero((fields.bsum != sums).any(axis=-1))
        if bad.size and bad[0] < first:
            first = int(bad[0])
            j = int(np.flatnonzero(fields.bsum[first] != sums[first])[0])
            span = f"q[{16 * j}:{16 * j + 16}]"
            reason = f"bsum[{j}] is {fields.bsum[first, j]}, but {span} sums to {sums[first, j]}"
    if reason:
        index = [int(i) for i in np.unravel_index(first, r.shape[:-1])]
        raise ValueError(f"r{index or ''}: {reason}")


def split(x: _A) -> _A:
    """Split the last axis into blocks of 256, the shape ``quantize`` wants.

    Args:
        x: [..., K] of any dtype, NumPy or JAX, K a multiple of 256.

    Returns:
        [..., K // 256, 256]; a view where ``x`` is a NumPy array.

    Raises:
        TypeError: ``x`` is not an array.
        ValueError: ``x`` has no axis, or K is not a multiple of 256; nothing is padded.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> jq.records.split(np.zeros((3, 1024), np.float32)).shape
        (3, 4, 256)
    """
    _check_kind("x", x, "")
    if x.ndim == 0:
        raise ValueError("x: got shape (), want [..., K] with K a multiple of 256")
    K = x.shape[-1]
    if K % 256 != 0:
        raise ValueError(f"x: got shape {x.shape}, K = {K}, want K a multiple of 256 (nothing is padded)")
    return x.reshape(*x.shape[:-1], K // 256, 256)


def explain(w: Array, x: Array) -> Statistics:
    """The steps of one ``quantized_dot``, record by record: where does another engine differ?

    Args:
        w: uint8 [G, 144], ``q4_k`` records.
        x: uint8 [G, 292], ``q8_k`` records. If either is a JAX array the answer is in JAX arrays.

    Returns:
        ``Statistics``: S, T int32 [G]; p, n, v float32 [G]. The dot is ``v[0] + v[1] + ...`` from the
        left, each sum rounded to float32.

    Raises:
        TypeError: ``w`` or ``x`` is not a uint8 array.
        ValueError: the rank or the last axis of one is wrong, or the two disagree about G.

    Source: section 3 of the record contract.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> w = np.zeros((1, 144), np.uint8)
        >>> w[0, [1, 4, 16]] = 0x3C, 2, 3  # d = 1, sc[0] = 2, q[0] = 3
        >>> x = np.zeros((1, 292), np.uint8)
        >>> x[0, [3, 4, 260]] = 0x40, 5, 5  # ds = 2, q[0] = 5
        >>> s = jq.records.explain(w, x)
        >>> s.S, s.v
        (array([30], dtype=int32), array([60.], dtype=float32))
    """
    for name, operand, wanted in (("w", w, q4_k), ("x", x, q8_k)):
        _check_records(name, operand, wanted)
        if operand.ndim != 2:
            hint = "; use jax.vmap for more axes" if operand.ndim > 2 else ""
            raise ValueError(f"{name}: got shape {operand.shape}, want (G, {wanted.record_bytes}){hint}")
    if w.shape[0] != x.shape[0]:
        raise ValueError(f"w and x: got shapes {w.shape} and {x.shape}, want (G, 144) and (G, 292), one G")
    if isinstance(w, np.ndarray) and isinstance(x, np.ndarray):
        return _explain(w, x)
    return cast("Statistics", _explain_jax(w, x))


def encode_q4_k(weights: _A, importance: Array | None = None) -> _A:
    """Encode float weights as ``q4_k`` records with a small squared error; on the host, for tools.

    It searches for the records that minimise ``sum(importance * (weights - dequantize(records))**2)``.

    Args:
        weights: float32 [..., K], K a multiple of 256; NumPy or a concrete JAX array.
        importance: how much each squared error counts, float32 [K] or of the shape of ``weights``, not
            negative; all alike where it is None.

    Returns:
        uint8 [..., K // 256, 144], legal records, of the kind of ``weights``. The same on every machine
        whose NumPy rounds alike; no promise is made that another release finds the same records.

    Raises:
        TypeError: an argument is no float32 array, or is traced.
        ValueError: K is no multiple of 256, ``importance`` has another shape, a value is not finite, an
            importance is negative, or weights are beyond what a record holds (about 4e6 below and 6e7 above
            zero); the message names the first such index.

    Source: ``jaxquant.encode``, where the search is described.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> weights = np.sin(np.arange(1024, dtype=np.float32)).reshape(2, 512)
        >>> records = jq.records.encode_q4_k(weights)
        >>> decoded = jq.records.dequantize(records, jq.quant.q4_k).reshape(2, 512)
        >>> records.shape, bool(np.abs(decoded - weights).max() < 0.1)
        ((2, 2, 144), True)
    """
    values: HostArray = _host("weights", weights)
    blocks = split(values).reshape(-1, 256)
    _check_finite("weights", values)
    scales: HostArray | None = None
    if importance is not None:
        scales = _host("importance", importance)
        if scales.shape not in (values.shape, values.shape[-1:]):
            raise ValueError(
                f"importance: got shape {scales.shape}, want {values.shape[-1:]} or {values.shape}, as weights"
            )
        _check_finite("importance", scales)
        if (scales < 0).any():
            index = [int(i) for i in np.argwhere(scales < 0)[0]]
            raise ValueError(f"importance{index}: got {scales[tuple(index)]}, want no negative number")
        scales = scales.reshape(-1, 256)
    try:
        d, dmin, sc, m, q = encode_blocks(blocks, scales)
    except OverflowError as error:
        index = [
            int(i) for i in np.unravel_index(error.args[0], (*values.shape[:-1], values.shape[-1] // 256))
        ]
        raise ValueError(f"weights: block {index} is beyond what a record can hold") from None
    half, byte = np.float16, np.uint8
    fields = Q4K(d.astype(half), dmin.astype(half), sc.astype(byte), m.astype(byte), q.astype(byte))
    records = cast("HostArray", _pack(fields, q4_k)).reshape(*values.shape[:-1], values.shape[-1] // 256, 144)
    return records if isinstance(weights, np.ndarray) else jnp.asarray(records)


def _host(name: str, array: Array) -> HostArray:
    _check_array(name, array, np.dtype(np.float32))
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name}: got a traced array, want a concrete one: encode_q4_k reads its values")
    return np.asarray(array)


def _check_finite(name: str, values: HostArray) -> None:
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        index = [int(i) for i in bad[0]]
        raise ValueError(f"{name}{index}: got {values[tuple(index)]}, want finite numbers")


# Decoding and encoding, for NumPy and JAX alike


def _namespace(*arrays: Array) -> Any:
    return np if all(isinstance(a, np.ndarray) for a in arrays) else jnp


def _read(r: Array, field: Field) -> Array:
    """A field of whole bytes."""
    shape, size = (*r.shape[:-1], *field.shape), field.dtype.itemsize
    data = r[..., field.start : field.stop]
    if isinstance(data, np.ndarray):
        return data.copy().view(field.dtype).reshape(shape)
    # Not one bitcast: one that changes the width cannot be exported with symbolic sizes.
    unsigned = np.dtype(f"u{size}")
    split = data.reshape(*shape, size).astype(unsigned)
    joined = functools.reduce(
        jnp.bitwise_or, [split[..., i] << np.array(8 * i, unsigned) for i in range(size)]
    )
    return lax.bitcast_convert_type(joined, field.dtype)


def _written(value: Array, field: Field, lead: tuple[int, ...]) -> Array:
    """The bytes of such a field."""
    shape = (*lead, field.stop - field.start)
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value[..., None]).view(np.uint8).reshape(shape)
    unsigned = np.dtype(f"u{field.dtype.itemsize}")
    bits = lax.bitcast_convert_type(value, unsigned)
    split = [(bits >> np.array(8 * i, unsigned)).astype(jnp.uint8) for i in range(field.dtype.itemsize)]
    return jnp.stack(split, axis=-1).reshape(shape)


def _unpack(r: Array, format: RecordFormat) -> Q4K | Q8K:
    if format is q8_k:
        return Q8K(*(_read(r, field) for field in q8_k.fields))
    xp, lead = _namespace(r), r.shape[:-1]
    d, dmin, scales, _, nibbles = q4_k.fields
    low, high, top = (r[..., at : at + 4] for at in range(scales.start, scales.stop, 4))
    packed = r[..., nibbles.start : nibbles.stop].reshape(*lead, 4, 32)
    return Q4K(
        _read(r, d),
        _read(r, dmin),
        xp.concatenate([low & 63, (top & 15) | (low >> 6 << 4)], axis=-1),
        xp.concatenate([high & 63, (top >> 4) | (high >> 6 << 4)], axis=-1),
        xp.stack([packed & 15, packed >> 4], axis=-2).reshape(*lead, 256),
    )


def _pack(fields: Q4K | Q8K, format: RecordFormat) -> Array:
    xp, lead = _namespace(*fields), fields[0].shape
    if isinstance(fields, Q8K):
        values = zip(q8_k.fields, fields, strict=True)
        return cast("Array", xp.concatenate([_written(v, field, lead) for field, v in values], axis=-1))
    d, dmin = q4_k.fields[:2]
    sc, m = fields.sc & 63, fields.m & 63
    low = sc[..., :4] | (sc[..., 4:] >> 4 << 6)
    high = m[..., :4] | (m[..., 4:] >> 4 << 6)
    top = (sc[..., 4:] & 15) | (m[..., 4:] << 4)
    q = (fields.q & 15).reshape(*lead, 4, 2, 32)
    nibbles = (q[..., 0, :] | (q[..., 1, :] << 4)).reshape(*lead, 128)
    heads = [_written(fields.d, d, lead), _written(fields.dmin, dmin, lead)]
    return cast("Array", xp.concatenate([*heads, low, high, top, nibbles], axis=-1))


_unpack_jax = partial(jax.jit, static_argnums=1)(_unpack)
_pack_jax = partial(jax.jit, static_argnums=1)(_pack)


# Values


def _dequantize(r: HostArray, format: RecordFormat) -> HostArray:
    fields = _unpack(r, format)
    with np.errstate(all="ignore"):
        if isinstance(fields, Q8K):
            return cast("HostArray", fields.ds[..., None] * fields.q.astype(np.float32))
        scale = fields.d.astype(np.float32)[..., None] * fields.sc.astype(np.float32)
        offset = fields.dmin.astype(np.float32)[..., None] * fields.m.astype(np.float32)
        q = fields.q.reshape(*fields.sc.shape, 32).astype(np.float32)
        return cast("HostArray", (scale[..., None] * q - offset[..., None]).reshape(fields.q.shape))


@partial(jax.jit, static_argnums=1)
def _dequantize_jax(r: jax.Array, format: RecordFormat) -> jax.Array:
    fields = _unpack(r, format)
    if isinstance(fields, Q8K):
        bits = float32.multiply(float32_bits(fields.ds)[..., None], _int_bits(fields.q))
        return lax.bitcast_convert_type(bits, jnp.float32)
    # Plain float32 is safe here, unlike anywhere else. Both products are exact in any order, being integers
    # of at most 21 bits times 2**k with k >= -24: fused or not, there is one rounding, and no subnormal.
    d, dmin = (lax.bitcast_convert_type(float32_bits(half), jnp.float32)[..., None] for half in fields[:2])
    scale, offset = d * fields.sc.astype(jnp.float32), dmin * fields.m.astype(jnp.float32)
    q = fields.q.reshape(*scale.shape, 32).astype(jnp.float32)
    return (scale[..., None] * q - offset[..., None]).reshape(fields.q.shape)


def float_steps(
    d: jax.Array, dmin: jax.Array, ds: jax.Array, S: jax.Array, T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contract's p, n and v as float32 bits; d, dmin and ds are float32 bits, S and T int32."""
    p = float32.multiply(d, float32.from_int32(S))
    n = float32.multiply(dmin, float32.from_int32(T))
    return p, n, float32.multiply(ds, float32.subtract(p, n))


def float32_bits(x: Array) -> jax.Array:
    """The float32 bits of a float32 or float16 array."""
    if x.dtype == jnp.float16:
        return float32.from_float16(lax.bitcast_convert_type(x, jnp.uint16))
    return lax.bitcast_convert_type(x, jnp.uint32)


def _int_bits(x: Array) -> jax.Array:
    return float32.from_int32(lax.convert_element_type(x, jnp.int32))


def _sums(w: Q4K, x: Q8K) -> tuple[Any, Any]:
    """S and T, int32 [G]."""
    G = w.q.shape[0]
    wq, xq, sc, m, bsum = (field.astype(np.int32) for field in (w.q, x.q, w.sc, w.m, x.bsum))
    S = (sc * (wq * xq).reshape(G, 8, 32).sum(axis=-1, dtype=np.int32)).sum(axis=-1, dtype=np.int32)
    T = (m * bsum.reshape(G, 8, 2).sum(axis=-1, dtype=np.int32)).sum(axis=-1, dtype=np.int32)
    return S, T


def _explain(w: HostArray, x: HostArray) -> Statistics:
    a, b = cast("Q4K", _unpack(w, q4_k)), cast("Q8K", _unpack(x, q8_k))
    S, T = _sums(a, b)
    with np.errstate(all="ignore"):
        p = a.d.astype(np.float32) * S.astype(np.float32)
        n = a.dmin.astype(np.float32) * T.astype(np.float32)
        return Statistics(S, T, p, n, b.ds * (p - n))


@jax.jit
def _explain_jax(w: jax.Array, x: jax.Array) -> Statistics:
    a, b = cast("Q4K", _unpack(w, q4_k)), cast("Q8K", _unpack(x, q8_k))
    S, T = _sums(a, b)
    steps = float_steps(float32_bits(a.d), float32_bits(a.dmin), float32_bits(b.ds), S, T)
    return Statistics(S, T, *(lax.bitcast_convert_type(step, jnp.float32) for step in steps))


# Checks


def _check_format(format: object) -> None:
    if not isinstance(format, RecordFormat):
        raise TypeError(
            f"format: got {format!r} of type {type(format).__name__}, "
            "want jaxquant.quant.q4_k or jaxquant.quant.q8_k"
        )


def _check_kind(name: str, value: object, wanted: str) -> None:
    if not isinstance(value, np.ndarray | jax.Array):
        raise TypeError(f"{name}: got {type(value).__name__}, want a {wanted}NumPy or JAX array")


def _check_array(name: str, value: Array, dtype: np.dtype[Any]) -> None:
    _check_kind(name, value, f"{dtype.name} ")
    if value.dtype != dtype:
        raise TypeError(f"{name}: got dtype {value.dtype}, want {dtype.name}")


def _check_records(name: str, r: Array, format: RecordFormat) -> None:
    _check_format(format)
    _check_array(name, r, np.dtype(np.uint8))
    if r.ndim == 0 or r.shape[-1] != format.record_bytes:
        raise ValueError(
            f"{name}: got shape {r.shape}, want (..., {format.record_bytes}) for {format.name} records"
        )


def _check_width(field: Field, value: Array) -> None:
    largest = (1 << field.bits) - 1
    if isinstance(value, jax.core.Tracer):
        from jax.experimental import checkify  # here alone, to keep it out of the package's import

        checkify.debug_check(
            jnp.all(value <= largest), f"fields.{field.name}: a value is above {largest} ({field.bits} bits)"
        )
        return
    values = np.asarray(value)
    bad = np.argwhere(values > largest)
    if len(bad):
        index = [int(i) for i in bad[0]]
        raise ValueError(
            f"fields.{field.name}: got {values[tuple(index)]} at {index}, "
            f"want 0 to {largest} ({field.bits} bits)"
        )
