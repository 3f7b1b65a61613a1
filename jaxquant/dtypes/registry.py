"""The one registry: names, block-scaled representations and scalar types, each held by one descriptor."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxquant.dtypes.kinds import DType

# Names are the str keys, representations tuples, scalar types numpy dtypes. One dict, so that one update
# publishes a descriptor whole.
_claims: dict[Hashable, DType] = {}
_lock = threading.RLock()


def holder(key: Hashable) -> DType | None:
    return _claims.get(key)


def holders() -> tuple[DType, ...]:
    with _lock:
        return tuple(dtype for key, dtype in _claims.items() if type(key) is str)


def check_free(name: str, representation: Hashable | None) -> None:
    if name in _claims:
        raise ValueError(f"the name {name!r} is taken by {_claims[name]!r}")
    if representation in _claims:
        raise ValueError(
            f"{name!r} duplicates {_claims[representation]!r}: the same element and the same chain of levels"
        )


def publish(
    dtype: DType, name: str, representation: Hashable | None, numpy_dtype: np.dtype[Any] | None
) -> None:
    with _lock:
        check_free(name, representation)
        claims: dict[Hashable, DType] = {name: dtype}
        if representation is not None:
            claims[representation] = dtype
        # Several descriptors may name one scalar type; the first one answers for it.
        if numpy_dtype is not None and numpy_dtype not in _claims:
            claims[numpy_dtype] = dtype
        _claims.update(claims)
