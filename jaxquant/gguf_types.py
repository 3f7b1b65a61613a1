"""GGUF weights kept in their bytes: a holder for the block types Q4_K, Q5_K, Q6_K, Q5_0 and Q8_0, and their decoders.

A model held this way takes the memory of its file. A holder is a pytree of one uint8 array, so it goes
through ``jit``, ``vmap``, ``device_put`` and donation like an array, and is decoded where it is used.

Every value is exact: each decoder multiplies a float16 by small integers, which fits into a float32
significand, and the types with an offset subtract one such product from another, which rounds once. So
no fused multiply-add, no order of operations and no flush-to-zero mode can change a bit.

Source: the block layouts ``block_q8_0``, ``block_q5_0``, ``block_q5_K`` and ``block_q6_K`` of ggml
(``ggml-common.h`` there); the gguf package's ``quants.dequantize`` gives the same bits.

Example:
    >>> import numpy as np
    >>> from jaxquant.gguf_types import Blocks
    >>> data = np.zeros((4, 2, 34), np.uint8)  # 4 rows of 2 blocks of 32
    >>> data[..., 1] = 0x3C  # d = 1
    >>> data[..., 2] = 7  # the first value of each block
    >>> weights = Blocks(data, "Q8_0")
    >>> weights
    Blocks(Q8_0, shape=(4, 64), 272 bytes)
    >>> weights.dequantize()[3, 30:34]
    Array([0., 0., 7., 0.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxquant.ops.float32 import from_float16
from jaxquant.quant import q4_k
from jaxquant.records import HostArray
from jaxquant.records import dequantize as dequantize_records

__all__ = ["Blocks"]


@jax.tree_util.register_pytree_with_keys_class
class Blocks:
    """A tensor in the blocks that a GGUF file stores.

    Attributes:
        data: uint8 [\\*rows, blocks, bytes of one block]; NumPy or JAX.
        type: ``"Q4_K"``, ``"Q5_K"``, ``"Q6_K"``, ``"Q5_0"`` or ``"Q8_0"``; static under ``jit``.

    Raises:
        TypeError: ``data`` is no uint8 array.
        ValueError: there is no decoder for ``type``, or ``data`` has another last extent or fewer than
            two axes.

    Under ``vmap`` it is the tensor without the mapped axis.
    """

    __slots__ = ("data", "type")

    data: HostArray | jax.Array
    type: str

    def __init__(self, data: HostArray | jax.Array, type: str) -> None:
        if type not in _TYPES:
            raise ValueError(f"type: there is no decoder for {type!r}, known are {', '.join(_TYPES)}")
        if not isinstance(data, np.ndarray | jax.Array):
            raise TypeError(f"data: got {data.__class__.__name__}, want a uint8 NumPy or JAX array")
        if data.dtype != np.uint8:
            raise TypeError(f"data: got dtype {data.dtype}, want uint8")
        if data.ndim < 2 or data.shape[-1] != _TYPES[type].block_bytes:
            raise ValueError(
                f"data: got shape {data.shape}, want (..., blocks, {_TYPES[type].block_bytes}) for {type}"
            )
        self.data, self.type = data, type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor."""
        *rows, blocks, _ = self.data.shape
        return (*rows, blocks * _TYPES[self.type].block_size)

    @property
    def nbytes(self) -> int:
        """The bytes held."""
        return int(self.data.nbytes)

    def __getitem__(self, rows: Any) -> Blocks:
        """Some rows, indexed as the leading axes of ``data`` are; the two axes of a row stay whole."""
        return Blocks(self.data[rows], self.type)

    def dequantize(self) -> jax.Array:
        """The values, float32 [\\*rows, K], exact to the bit (NaN payloads excepted)."""
        return cast("jax.Array", _dequantize(self.data, self.type))

    def __repr__(self) -> str:
        return f"Blocks({self.type}, shape={self.shape}, {self.nbytes} bytes)"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], str]:
        return ((jax.tree_util.GetAttrKey("data"), self.data),), self.type

    @classmethod
    def tree_unflatten(cls, type: str, children: tuple[Any]) -> Blocks:
        blocks = object.__new__(cls)  # unchecked: transformations put their own objects in
        (blocks.data,), blocks.type = children, type
        return blocks


@partial(jax.jit, static_argnums=1)
def _dequantize(data: jax.Array, type: str) -> jax.Array:
    type_ = _TYPES[type]
    return type_.decode(data).reshape(*data.shape[:-2], data.shape[-2] * type_.block_size)


# One decoder per type: uint8 [..., bytes of one block] to float32 [..., elements, in one or more axes]


def _q8_0(data: jax.Array) -> jax.Array:
    return _half(data, 0) * _signed(data[..., 2:])


def _q5_0(data: jax.Array) -> jax.Array:
    high = _spread(data[..., 2:6], 1, 8)  # one bit of each byte after the other: 4 x 8
    high = high.reshape(*data.shape[:-1], 2, 16)
    q = _spread_rows(data[..., 6:], 4, 2) | high << np.uint8(4)
    return _half(data, 0)[..., None] * (_float(q) - 16)


def _q5_k(data: jax.Array) -> jax.Array:
    low, high, top = data[..., 4:8], data[..., 8:12], data[..., 12:16]  # as in Q4_K
    four, six = np.uint8(4), np.uint8(6)
    sc = jnp.concatenate([low & np.uint8(63), top & np.uint8(15) | low >> six << four], axis=-1)
    m = jnp.concatenate([high & np.uint8(63), top >> four | high >> six << four], axis=-1)
    nibbles = _spread_rows(data[..., 48:].reshape(*data.shape[:-1], 4, 32), 4, 2)
    fifth = _spread_rows(data[..., 16:48], 1, 8).reshape(nibbles.shape)
    q = _float(nibbles | fifth << four).reshape(*sc.shape, 32)
    scale, offset = _half(data, 0) * _float(sc), _half(data, 2) * _float(m)
    return scale[..., None] * q - offset[..., None]


def _q6_k(data: jax.Array) -> jax.Array:
    # Two halves of 128 elements: 64 bytes of low and 32 bytes of high bits each.
    low = _spread_rows(data[..., :128].reshape(*data.shape[:-1], 2, 64), 4, 2)
    high = _spread_rows(data[..., 128:192].reshape(*data.shape[:-1], 2, 32), 2, 4)
    q = low.reshape(*data.shape[:-1], 16, 16) | high.reshape(*data.shape[:-1], 16, 16) << np.uint8(4)
    scale = _half(data, 208) * _signed(data[..., 192:208])
    return scale[..., None] * (_float(q) - 32)


def _q4_k(data: jax.Array) -> jax.Array:
    return dequantize_records(data, q4_k)


def _half(data: jax.Array, at: int) -> jax.Array:
    """The float16 at byte ``at`` as float32 [..., 1]; by integers, since XLA may flush its subnormals."""
    low, high = (data[..., at + i : at + i + 1].astype(jnp.uint16) for i in (0, 1))
    return lax.bitcast_convert_type(from_float16(low | high << np.uint16(8)), jnp.float32)


def _float(q: jax.Array) -> jax.Array:
    return q.astype(jnp.float32)


def _signed(data: jax.Array) -> jax.Array:
    return _float(lax.bitcast_convert_type(data, jnp.int8))


def _spread(data: jax.Array, bits: int, count: int) -> jax.Array:
    """uint8 [..., n] to its fields of ``bits`` bits, low ones first, uint8 [..., n, count]."""
    shifts = np.arange(0, bits * count, bits, dtype=np.uint8)
    return data[..., None] >> shifts.reshape((1,) * data.ndim + (-1,)) & np.uint8((1 << bits) - 1)


def _spread_rows(data: jax.Array, bits: int, count: int) -> jax.Array:
    """The same as uint8 [..., count, n]: first the lowest field of all n bytes, then the next one."""
    shifts = np.arange(0, bits * count, bits, dtype=np.uint8)
    shifts = shifts.reshape((1,) * (data.ndim - 1) + (-1, 1))
    return data[..., None, :] >> shifts & np.uint8((1 << bits) - 1)


class _Type(NamedTuple):
    block_size: int
    block_bytes: int
    decode: Callable[[jax.Array], jax.Array]


_TYPES = {
    "Q4_K": _Type(256, 144, _q4_k),
    "Q5_K": _Type(256, 176, _q5_k),
    "Q6_K": _Type(256, 210, _q6_k),
    "Q5_0": _Type(32, 22, _q5_0),
    "Q8_0": _Type(32, 34, _q8_0),
}
