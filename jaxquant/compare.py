"""How well formats hold an array: error, bits per element, and what saturates or flushes, as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant import records
from jaxquant.arrays import BlockScaledArray, quantize_blocks
from jaxquant.arrays.block_scaled import plane_bits
from jaxquant.dtypes import BlockScaledDType, DType
from jaxquant.ops.quantize import quantize
from jaxquant.quant import RecordFormat, q4_k, q8_k

__all__ = ["Comparison", "Row", "compare"]

HostArray: TypeAlias = np.ndarray[Any, Any]
Format: TypeAlias = "BlockScaledDType | RecordFormat"

_SOURCES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))


@dataclass(frozen=True, slots=True)
class Row:
    """What one format makes of an array; the formulas are those of `compare`."""

    format: str
    """The name of the format."""
    bits_per_element: float
    """Bits of all planes, scales included, over the number of elements."""
    sqnr_db: float
    """Signal to quantization noise in decibels; infinite without noise."""
    max_abs_error: float
    """The largest absolute error."""
    max_relative_error: float
    """The largest error of an element, relative to that element, among those that did not flush."""
    saturated: int
    """Elements beyond what their block can hold."""
    flushed: int
    """Nonzero elements that became zero."""
    nonfinite_blocks: int
    """Blocks where some value is not finite."""


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """One `Row` per format; printing it gives a table.

    Iteration goes over the rows; an index is a position or the name of a format. Attributes: ``rows``, and the
    ``shape`` and ``dtype`` of the array compared.
    """

    rows: tuple[Row, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int | str) -> Row:
        if not isinstance(index, str):
            return self.rows[index]
        for row in self.rows:
            if row.format == index:
                return row
        raise KeyError(f"{index!r} is none of the formats compared: {', '.join(r.format for r in self.rows)}")

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows as plain numbers by name of the format, and in it by name of the column."""
        return {row.format: {k: v for k, v in asdict(row).items() if k != "format"} for row in self.rows}

    def __repr__(self) -> str:
        head = [_HEADINGS[field.name] for field in fields(Row)]
        table = [head] + [
            [
                row.format,
                f"{row.bits_per_element:.6g}",
                f"{row.sqnr_db:.2f}",
                f"{row.max_abs_error:.4g}",
                f"{row.max_relative_error:.4g}",
                f"{row.saturated}",
                f"{row.flushed}",
                f"{row.nonfinite_blocks}",
            ]
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in table
        ]
        return "\n".join([f"{self.dtype} {self.shape}, {math.prod(self.shape)} elements", *lines])


_HEADINGS = {
    "format": "format",
    "bits_per_element": "bits/element",
    "sqnr_db": "SQNR dB",
    "max_abs_error": "max |error|",
    "max_relative_error": "max relative",
    "saturated": "saturated",
    "flushed": "flushed",
    "nonfinite_blocks": "non-finite blocks",
}


def compare(x: Any, formats: Iterable[Format | str], **options: Any) -> Comparison:
    """Quantize an array to several formats and measure what each of them loses.

    With ``y`` the decoded values, all formulas in float64 on the host, over the elements where both x and y are
    finite:

    * ``bits_per_element``: ``8 * nbytes / size`` with all planes counted, the tensor scale of NVFP4 and any
      padding included
    * ``sqnr_db``: ``10 * log10(sum(x**2) / sum((y - x)**2))``, infinite where nothing is lost
    * ``max_abs_error``: ``max(|y - x|)``
    * ``max_relative_error``: ``max(|y - x| / |x|)`` where neither is zero; flushed elements, which would all
      give 1, are counted on their own
    * ``saturated``: elements with ``|x| > largest * scale``, where largest is the format's largest element
      (448, 57344, 28, 7.5, 6; 127/64 for MXINT8) and scale the product of the scales of all levels; in q8_k
      with ``|x| >= 127.5 * |ds|``, which would need a code beyond 127
    * ``flushed``: elements with ``x != 0`` and ``y == 0``
    * ``nonfinite_blocks``: blocks (of the innermost scale) in which some y is NaN or infinite: a NaN or
      infinity in x poisons its block, and near the largest float32 a block may decode to infinity

    The error columns are NaN where no element is left to measure.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX, with at least one element.
        formats: block-scaled descriptors, their registered names, and ``jaxquant.quant.q8_k``, each once.
        options: for the block-scaled formats, as in `jaxquant.quantize_blocks` (``axis``, ``block_shape``,
            ``scale_rule``, ...). q8_k has none: its blocks are 256 elements along the last axis.

    Returns:
        A `Comparison`, one `Row` per format in the order given.

    Raises:
        TypeError: if ``x`` is no array, is traced or of another dtype, or ``formats`` is a single format or
            holds something else.
        LookupError: for a name that is not registered or names no block-scaled dtype.
        ValueError: if ``x`` is empty or a format is given twice; for q4_k, which has no encoder; if only records
            are compared and there are options; and, naming the format, for what `quantize_blocks` refuses, such
            as a remainder.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> from jaxquant.compare import compare
        >>> x = (np.arange(512, dtype=np.float32) % 101 - 50).reshape(2, 256)
        >>> result = compare(x, ["MXFP8_E4M3", "MXFP4", "NVFP4", jq.quant.q8_k])
        >>> print(result)
        float32 (2, 256), 512 elements
        format      bits/element  SQNR dB  max |error|  max relative  saturated  flushed  non-finite blocks
        MXFP8_E4M3          8.25    30.63            2       0.06667          2        0                  0
        MXFP4               4.25    19.83            8        0.3333         33       11                  0
        NVFP4             4.5625    19.43            8        0.3304         26        0                  0
        q8_k               9.125    48.32       0.1968        0.1811          0        0                  0
        >>> result["MXFP4"].flushed
        11

    Source: saturation and flushing of sections 5.3 and 6.3 of OCP Microscaling Formats v1.0, which clamp and
    round to zero.
    """
    return compared("compare", x, formats, options)


def _row(x: Any, code: Coded) -> Row:
    values = host(x)
    measured = np.isfinite(values) & np.isfinite(code.values)
    flushed = measured & (values != 0) & (code.values == 0)
    signal = np.abs(values[measured])
    noise = np.abs(code.values[measured] - values[measured])
    kept = (signal != 0) & ~flushed[measured]
    return Row(
        format=code.name,
        bits_per_element=8 * code.nbytes / values.size,
        sqnr_db=_decibels(signal, noise) if noise.size else math.nan,
        max_abs_error=float(noise.max()) if noise.size else math.nan,
        max_relative_error=float((noise[kept] / signal[kept]).max(initial=0)) if noise.size else math.nan,
        saturated=int(code.saturated(values).sum()),
        flushed=int(flushed.sum()),
        nonfinite_blocks=int(code.any_in_block(~np.isfinite(code.values)).sum()),
    )


def _decibels(signal: HostArray, noise: HostArray) -> float:
    lost = float((noise**2).sum())
    return 10 * math.log10(float((signal**2).sum()) / lost) if lost else math.inf


# Formats and what they make of an array; the pictures need it too


def compared(operation: str, x: Any, formats: object, options: dict[str, Any]) -> Comparison:
    found = checked(operation, x, formats, options)
    rows = tuple(_row(x, coded(operation, x, entry, options)) for entry in found)
    return Comparison(rows, tuple(x.shape), np.dtype(x.dtype))


def checked(operation: str, x: Any, formats: object, options: dict[str, Any]) -> tuple[Format, ...]:
    """The formats, once all but the fit of x to each of them is checked."""
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"{operation}: x must be a NumPy or JAX array, got {type(x).__name__}")
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{operation}: x is traced, but its values are read: call this outside of jit")
    if x.dtype not in _SOURCES:
        raise TypeError(f"{operation}: x has dtype {x.dtype}, wanted float16, bfloat16 or float32")
    if not x.size:
        raise ValueError(f"{operation}: x of shape {x.shape} has no elements")
    found = _resolved(operation, formats)
    if options and all(isinstance(entry, RecordFormat) for entry in found):
        raise ValueError(
            f"{operation}: {', '.join(options)} given, but no block-scaled format has a use for it"
        )
    return found


def _resolved(operation: str, formats: object) -> tuple[Format, ...]:
    if isinstance(formats, str | DType | RecordFormat) or not isinstance(formats, Iterable):
        raise TypeError(f"{operation}: formats must be a list of formats, got {formats!r}")
    found: list[Format] = []
    for i, given in enumerate(formats):
        if isinstance(given, str):
            if given in (q4_k.name, q8_k.name):
                raise LookupError(
                    f"{operation}: formats[{i}]: a record format goes by no name, give jaxquant.quant.{given}"
                )
            given = BlockScaledDType.from_name(given)
        if given is q4_k:
            raise ValueError(
                f"{operation}: formats[{i}] is q4_k, to which there is no encoder; records of it are read"
            )
        if not isinstance(given, BlockScaledDType | RecordFormat):
            raise TypeError(
                f"{operation}: formats[{i}] must be a block-scaled dtype, its name, or jaxquant.quant.q8_k, "
                f"got {given!r}"
            )
        if given in found:
            raise ValueError(f"{operation}: formats[{i}] is {given.name} again")
        found.append(given)
    return tuple(found)


def host(x: Any) -> HostArray:
    """The values in float64."""
    return np.asarray(x).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Coded:
    """An array in a format, decoded."""

    name: str
    nbytes: int
    values: HostArray
    """float64 [shape]."""
    largest: HostArray
    """float64 [shape]: the largest magnitude that the block of an element can hold."""
    inclusive: bool
    """Whether an element of that magnitude is too large itself."""
    grid: tuple[tuple[int, int], ...]
    """Per axis the number of blocks, and how many elements, padding included, one extends over."""

    def saturated(self, x: HostArray) -> HostArray:
        """bool [shape]."""
        magnitude = np.abs(x)
        if self.inclusive:
            return (magnitude >= self.largest) & (magnitude > 0)
        return magnitude > self.largest

    def sum_in_block(self, x: HostArray) -> HostArray:
        """[number of blocks], in row-major order."""
        padding = [
            (0, count * size - extent) for (count, size), extent in zip(self.grid, x.shape, strict=True)
        ]
        split = np.pad(x, padding).reshape([n for pair in self.grid for n in pair])
        sums: HostArray = split.sum(axis=tuple(range(1, split.ndim, 2)))
        return sums.reshape(-1)

    def any_in_block(self, x: HostArray) -> HostArray:
        """bool [number of blocks]."""
        return self.sum_in_block(x.astype(np.int64)) > 0


def coded(operation: str, x: Any, format: Format, options: dict[str, Any]) -> Coded:
    """Quantize, decode, and describe the blocks."""
    try:
        if isinstance(format, BlockScaledDType):
            return _in_blocks(quantize_blocks(x, format, **options), format)
        return _in_records(x)
    except ValueError as error:
        raise ValueError(f"{operation}: {format.name}: {error}") from error


def _in_records(x: Any) -> Coded:
    blocks = records.split(np.asarray(x).astype(np.float32))
    encoded = np.asarray(quantize(jnp.asarray(blocks.reshape(-1, q8_k.block_size)), q8_k))
    ds = np.abs(record_scales(encoded, q8_k)).reshape(blocks.shape[:-1])
    return Coded(
        q8_k.name,
        encoded.nbytes,
        records.dequantize(encoded, q8_k).reshape(x.shape).astype(np.float64),
        127.5 * np.repeat(ds, q8_k.block_size, axis=-1),
        True,
        (*((extent, 1) for extent in x.shape[:-1]), (blocks.shape[-2], q8_k.block_size)),
    )


def _in_blocks(array: BlockScaledArray, format: BlockScaledDType) -> Coded:
    stored = array.padded_shape
    scale = np.ones(stored)
    for level in array.levels:
        values = plane_values(level)
        for axis, extent in enumerate(stored):
            values = np.repeat(values, extent // values.shape[axis], axis=axis)
        scale = scale * values
    element = format.element
    logical = tuple(slice(0, extent) for extent in array.shape)
    return Coded(
        format.name,
        array.nbytes,
        host(array.dequantize()),
        (127 / 64 if element is DType.Int8 else element.max_normal) * scale[logical],
        False,
        tuple((count, extent // count) for count, extent in zip(array.scales.shape, stored, strict=True)),
    )


def plane_values(plane: Any) -> HostArray:
    """The values of a plane of scales, in float64."""
    bits, _ = plane_bits(plane)
    return np.asarray(bits).view(np.float32).astype(np.float64)


def record_scales(encoded: HostArray, format: RecordFormat) -> HostArray:
    """The scale of each record, d or ds, in float64 [number of records]."""
    scales: HostArray = np.asarray(records.unpack(encoded, format)[0]).astype(np.float64)
    return scales
