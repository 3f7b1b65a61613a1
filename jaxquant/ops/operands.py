"""Checks that both operations share; every message names the operand, what came and what was wanted."""

from __future__ import annotations

import jax
import numpy as np

from jaxquant.quant import RecordFormat

__all__ = ["check_array", "check_format", "check_kind_and_dtype"]


def check_format(operation: str, name: str, value: object, wanted: RecordFormat) -> None:
    if not isinstance(value, RecordFormat):
        raise TypeError(
            f"{operation}: {name} must be the record format {wanted!r}, got {value!r} of type {type(value).__name__}"
        )
    if value is not wanted:
        raise ValueError(f"{operation}: {name} accepts only {wanted!r}, got {value!r}")


def check_kind_and_dtype(operation: str, name: str, value: object, dtype: str) -> None:
    """Check that ``value`` is an array of ``dtype``."""
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(
            f"{operation}: {name} must be a jax.Array or numpy.ndarray of dtype {dtype}, got {type(value).__name__}"
        )
    if value.dtype != np.dtype(dtype):
        raise TypeError(f"{operation}: {name} has dtype {value.dtype}, wanted {dtype}")


def check_array(operation: str, name: str, value: jax.Array, dtype: str, last: int) -> None:
    """Check that ``value`` is an array of ``dtype`` and shape (G, last)."""
    check_kind_and_dtype(operation, name, value, dtype)
    if value.ndim != 2 or value.shape[1] != last:
        hint = "; map further axes with jax.vmap" if value.ndim > 2 else ""
        raise ValueError(f"{operation}: {name} has shape {value.shape}, wanted (G, {last}){hint}")
