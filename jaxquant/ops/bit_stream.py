"""Codes of 1 to 8 bits as a little-endian bit stream along one axis, for NumPy and JAX alike.

Shifts on uint8: XLA folds constant bitcasts to types below a byte wrongly. Source: section "Narrow" of the
array contract.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["chunk", "pack", "unpack"]


def chunk(width: int) -> tuple[int, int]:
    """The fewest values of a width that fill whole bytes, and these bytes."""
    common = math.gcd(width, 8)
    return 8 // common, width // common


def pack(codes: Any, width: int, axis: int) -> Any:
    """Bytes of codes, uint8 [...], of which the low ``width`` bits count; the axis is counted from the end."""
    codes = codes & np.uint8((1 << width) - 1)
    if width == 8:
        return codes
    count, size = chunk(width)
    pieces = _split(codes, axis, count)
    made: list[Any] = [None] * size
    for i, piece in enumerate(pieces):
        byte, start = divmod(width * i, 8)
        low = piece << np.uint8(start)
        made[byte] = low if made[byte] is None else made[byte] | low
        if start + width > 8:
            made[byte + 1] = piece >> np.uint8(8 - start)
    return _join(made, axis, codes.shape)


def unpack(data: Any, width: int, axis: int) -> Any:
    """The codes of bytes, one in each byte, the upper bits zero."""
    if width == 8:
        return data
    count, size = chunk(width)
    pieces = _split(data, axis, size)
    made: list[Any] = []
    for i in range(count):
        byte, start = divmod(width * i, 8)
        code = pieces[byte] >> np.uint8(start)
        if start + width > 8:
            code = code | (pieces[byte + 1] << np.uint8(8 - start))
        made.append(code & np.uint8((1 << width) - 1))
    return _join(made, axis, data.shape)


def _split(array: Any, axis: int, count: int) -> list[Any]:
    """Every ``count``-th slice along the axis, from each of the first ``count`` places."""
    shape = array.shape
    after = shape[len(shape) + axis + 1 :]
    chunked = array.reshape(*shape[: len(shape) + axis], shape[axis] // count, count, *after)
    return [chunked[(Ellipsis, i, *(slice(None),) * len(after))] for i in range(count)]


def _join(pieces: list[Any], axis: int, shape: tuple[int, ...]) -> Any:
    xp: Any = np if isinstance(pieces[0], np.ndarray | np.generic) else jnp
    joined = list(shape)
    joined[axis] = pieces[0].shape[axis] * len(pieces)
    return xp.stack(pieces, axis=axis).reshape(joined)
