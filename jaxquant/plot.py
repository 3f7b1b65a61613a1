"""Pictures of formats and of what they do to an array (matplotlib, extra ``[plot]``).

Every function draws into ``ax``, or into a new figure where it is None, and returns the Axes; ``ax.figure`` is
the figure. A display is not needed: ``ax.figure.savefig("picture.png")``. The colours are those of Okabe and Ito
(Color Universal Design, 2008), and no picture says anything by colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from jaxquant import casts, records
from jaxquant.arrays import BlockScaledArray, NarrowArray, bit_width
from jaxquant.compare import Format, checked, coded, compared, host, plane_values, record_scales
from jaxquant.dtypes import BlockScaledDType, CompoundDType, DType, Level, SimpleDType, SymbolicBits
from jaxquant.quant import Field, RecordFormat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bit_layout", "code_usage", "error_per_block", "saturation", "scale_histogram"]

HostArray: TypeAlias = np.ndarray[Any, Any]

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_BLUE, _VERMILLION, _GREY = "#0072B2", "#D55E00", "#767676"
_INK = "#1A1A1A"
# Tints of the same colours, light enough to write on.
_FILLS = {
    "sign": "#F2B08A",
    "exponent": "#A6CFEA",
    "significand": "#F7E9A0",
    "integer": "#CFE8DC",
    "other": "#E3E3E3",
}
_PLANES = ("#CFE8DC", "#F7D9A8", "#A6CFEA", "#E8C6D8", "#F7E9A0", "#F2B08A", "#E3E3E3")


def error_per_block(
    x: Any, formats: Iterable[Format | str], *, ax: Axes | None = None, **options: Any
) -> Axes:
    """The root-mean-square error of each block, as one step per block.

    Blocks lie in the order of their scales in memory, each as wide as the elements it holds, so that formats with
    blocks of other sizes meet over the same elements where blocks lie along the last axis. The axis of errors is
    logarithmic. A block that is not finite is a gap, and a block without error falls below the axis.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX.
        formats: as in `jaxquant.compare`.
        ax: where to draw; None makes a figure.
        options: as in `jaxquant.quantize_blocks`, for the block-scaled formats.

    Returns:
        The Axes, with one ``StepPatch`` per format, labelled by its name.

    Raises:
        ImportError: without matplotlib.
        TypeError, LookupError, ValueError: as `jaxquant.compare`.

    Example:
        >>> import numpy as np
        >>> from jaxquant import plot
        >>> ax = plot.error_per_block(np.float32([[0.5, 7] * 16, [6] * 32]), ["MXFP4"])
        >>> ax.patches[0].get_label(), ax.patches[0].get_data().values.round(3).tolist()
        ('MXFP4', [0.707, 0.0])
    """
    found = checked("error_per_block", x, formats, options)
    codes = [coded("error_per_block", x, entry, options) for entry in found]
    ax = _axes(ax, (8, 3.6))
    values = host(x)
    positive = False
    for i, code in enumerate(codes):
        with np.errstate(invalid="ignore"):
            squares = code.sum_in_block((code.values - values) ** 2)
        errors = np.sqrt(squares / code.sum_in_block(np.ones(values.shape)))
        errors[~np.isfinite(errors)] = np.nan
        positive = positive or bool(np.nanmax(errors, initial=0) > 0)
        edges = np.linspace(0, values.size, len(errors) + 1)
        ax.stairs(errors, edges, baseline=None, label=code.name, color=_LINES[i % len(_LINES)], linewidth=1.3)
    if positive:
        ax.set_yscale("log")
    ax.set_xlim(0, values.size)
    ax.set_xlabel("element, in the order of the blocks")
    ax.set_ylabel("RMS error of the block")
    ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return _plain(ax, "y")


def scale_histogram(quantized: Any, format: RecordFormat | None = None, *, ax: Axes | None = None) -> Axes:
    """How many blocks have a scale in each power of two, ``floor(log2(|scale|))``.

    Scales of zero (in E8M0, which has no zero, the least one, 2**-127, that blocks of zeros take) and those that
    are infinite or NaN have grey bars of their own at the right end.

    Args:
        quantized: a `jaxquant.BlockScaledArray`, whose innermost scales count, or uint8 records
            [..., record_bytes] with their ``format``: the ``d`` of q4_k, the ``ds`` of q8_k.
        format: ``jaxquant.quant.q4_k`` or ``q8_k`` for records, else None.
        ax: where to draw; None makes a figure.

    Returns:
        The Axes, with one bar per power of two from the least to the largest, its height the number of blocks.

    Raises:
        ImportError: without matplotlib.
        TypeError: for another ``quantized`` or ``format``.
        ValueError: for records of another length.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> x = np.float32([[6] * 32, [24] * 32, [25] * 32])
        >>> ax = jq.plot.scale_histogram(jq.quantize_blocks(x, jq.DType.MXFP4))
        >>> [(int(bar.get_x() + 0.5), int(bar.get_height())) for bar in ax.patches]
        [(0, 1), (1, 0), (2, 2)]
    """
    _check_quantized("scale_histogram", quantized, format)
    if format is None:
        scales, name = plane_values(quantized.scales), _name_of(quantized.scales.dtype)
    else:
        scales, name = (
            record_scales(np.asarray(quantized), format),
            f"{format.fields[0].name} of {format.name}",
        )
    magnitude = np.abs(scales.reshape(-1))
    # Far below all others: a block of zeros takes it.
    apart = 2.0**-127 if name == "E8M0" else 0.0
    usable = np.isfinite(magnitude) & (magnitude > apart)
    exponents = np.frexp(magnitude[usable])[1] - 1
    low, high = (int(exponents.min()), int(exponents.max())) if exponents.size else (0, 0)
    powers = np.arange(low, high + 1)
    ax = _axes(ax, (7, 3.6))
    width = 0.86
    ax.bar(powers, np.bincount(exponents - low, minlength=len(powers)), width=width, color=_BLUE)
    step = max(1, -(-len(powers) // 12))
    ticks = [int(power) for power in powers[::step]]
    labels = [f"$2^{{{power}}}$" for power in ticks]
    unusable = int((magnitude == apart).sum()), int((~np.isfinite(magnitude)).sum())
    at = high + 1
    for count, label in zip(unusable, ("$2^{-127}$" if apart else "0", "not\nfinite"), strict=True):
        if count:
            at += max(1, len(powers) // 8)
            bars = ax.bar(at, count, width=width, color=_GREY, hatch="///", edgecolor="white")
            ax.bar_label(bars, padding=2, fontsize="small")
            ticks.append(at)
            labels.append(label)
    ax.set_xticks(ticks, labels)
    ax.set_xlabel(f"scale ({name}), rounded down to a power of two")
    ax.set_ylabel("blocks")
    return _plain(ax, "y")


def code_usage(quantized: Any, format: RecordFormat | None = None, *, ax: Axes | None = None) -> Axes:
    """How often each element code occurs: one bar per code, in the order of the values they stand for.

    A format well filled shows a bell over most of its codes; clipping shows as tall bars at the ends. Negative
    zero stands left of zero, NaN codes at the right end.

    Args:
        quantized: a `jaxquant.BlockScaledArray` with elements of at most 8 bits, or uint8 records
            [..., record_bytes] with their ``format``: their ``q``.
        format: ``jaxquant.quant.q4_k`` or ``q8_k`` for records, else None.
        ax: where to draw; None makes a figure.

    Returns:
        The Axes, with one bar per code, its height the number of elements.

    Raises:
        ImportError: without matplotlib.
        TypeError: for another ``quantized`` or ``format``.
        ValueError: for wider elements, or records of another length.

    Example:
        >>> import numpy as np, jaxquant as jq
        >>> x = np.float32([[-6, 0, 1, 1] * 8])
        >>> ax = jq.plot.code_usage(jq.quantize_blocks(x, jq.DType.MXFP4))
        >>> [int(bar.get_height()) for bar in ax.patches]
        [8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 16, 0, 0, 0, 0, 0]
    """
    _check_quantized("code_usage", quantized, format)
    if format is None:
        codes, values, title = _element_codes(quantized)
    else:
        q = np.asarray(records.unpack(np.asarray(quantized), format).q)
        bits = next(field.bits for field in format.fields if field.name == "q")
        codes = q.view(np.uint8)
        values = np.arange(1 << bits).astype(np.uint8).view(q.dtype).astype(np.float64)
        title = f"q of {format.name}"
    counts = np.bincount(codes.reshape(-1), minlength=len(values))
    # -0.0 == 0.0, so that the sign decides second.
    order = np.lexsort((~np.signbit(values), values, np.isnan(values)))
    ax = _axes(ax, (8, 3.6))
    at = np.arange(len(values))
    ax.bar(at, counts[order], width=0.86 if len(values) <= 64 else 1.0, color=_BLUE)
    shown = at if len(values) <= 16 else _spread_ticks(values[order])
    ax.set_xticks(shown, [_number(values[order][i]) for i in shown])
    ax.set_xlim(-1, len(values))
    ax.set_xlabel(f"value of the code ({title})")
    ax.set_ylabel("elements")
    ax.set_title(f"{(counts > 0).sum()} of {len(values)} codes in use", loc="left", fontsize="medium")
    return _plain(ax, "y")


def saturation(x: Any, formats: Iterable[Format | str], *, ax: Axes | None = None, **options: Any) -> Axes:
    """How many elements saturate and how many flush to zero, per format: `jaxquant.compare` as bars.

    Args:
        x: float16, bfloat16 or float32 [...], NumPy or JAX.
        formats: as in `jaxquant.compare`.
        ax: where to draw; None makes a figure.
        options: as in `jaxquant.quantize_blocks`, for the block-scaled formats.

    Returns:
        The Axes, with two containers of horizontal bars, ``saturated`` and ``flushed to zero``, in the order of
        the formats from the top. The length of a bar is a count; the text at its end gives its share too.

    Raises:
        ImportError: without matplotlib.
        TypeError, LookupError, ValueError: as `jaxquant.compare`.

    Example:
        >>> import numpy as np
        >>> from jaxquant import plot
        >>> ax = plot.saturation(np.float32([[7, 0.1] + [1] * 30]), ["MXFP4", "MXFP8_E4M3"])
        >>> {bars.get_label(): [int(bar.get_width()) for bar in bars] for bars in ax.containers}
        {'saturated': [1, 0], 'flushed to zero': [1, 0]}
    """
    rows = compared("saturation", x, formats, options).rows
    size = int(np.prod(x.shape))
    ax = _axes(ax, (8, 0.9 + 0.62 * len(rows)))
    at = np.arange(len(rows))
    largest = max([1, *(max(row.saturated, row.flushed) for row in rows)])
    for shift, label, counts, color, hatch in (
        (-0.2, "saturated", [row.saturated for row in rows], _VERMILLION, None),
        (0.2, "flushed to zero", [row.flushed for row in rows], _BLUE, "///"),
    ):
        bars = ax.barh(
            at + shift, counts, height=0.36, color=color, hatch=hatch, edgecolor="white", label=label
        )
        texts = [f"{count:,} ({count / size:.2%})" if count else "0" for count in counts]
        ax.bar_label(bars, texts, padding=3, fontsize="small")
    ax.set_yticks(at, [row.format for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 1.25 * largest)
    ax.set_xlabel(f"elements, of {size:,}")
    ax.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return _plain(ax, "x")


def bit_layout(format: DType | RecordFormat | str, *, ax: Axes | None = None) -> Axes:
    """A picture of where the bits of a format lie.

    * Simple dtype: its bits from the most significant, by field.
    * Block-scaled dtype: the elements of one outermost block and the scales they share, each over the elements
      it scales; below, the bits of every plane.
    * Another compound dtype: the bits of every plane.
    * Record format: a map of the bytes of one record, row by row; below, where fields are narrower than a byte,
      which bits of a byte belong to which element.

    Args:
        format: a descriptor, its registered name, or ``jaxquant.quant.q4_k`` or ``q8_k``.
        ax: where to draw, without axis lines; None makes a figure of fitting size.

    Returns:
        The Axes. The gid of every box says what it is and where it begins and ends: ``"field q 16:144"`` (bytes)
        for each piece of a record's field, ``"bits sc[4..7] 5:4 of bytes 4:8"`` for bits of a byte,
        ``"bits E4M3 exponent 6:3"`` for a dtype's field, ``"element 3"`` for an element and ``"scale 0 1"`` for
        the scale 1 of level 0.

    Raises:
        ImportError: without matplotlib.
        TypeError: for a category, which has no bits, and for what is no format.
        LookupError: for a name that is not registered.

    Example:
        >>> import jaxquant as jq
        >>> ax = jq.plot.bit_layout(jq.DType.E4M3)
        >>> [(box.get_gid(), box.get_x(), box.get_width()) for box in ax.patches]  # doctest: +NORMALIZE_WHITESPACE
        [('bits E4M3 sign 7:7', 0, 1), ('bits E4M3 exponent 6:3', 1, 4), ('bits E4M3 significand 2:0', 5, 3)]

    Source: the field tables of `jaxquant.quant`, and the descriptors.
    """
    shown = DType.from_name(format) if isinstance(format, str) else format
    if isinstance(shown, SimpleDType):
        return _dtype_picture([("", shown)], f"{shown.name}: {_count(shown.bits, 'bit')}", ax)
    if isinstance(shown, BlockScaledDType):
        return _block_picture(shown, ax)
    if isinstance(shown, CompoundDType):
        planes = [(f"plane {i}  {dtype.name}", dtype) for i, dtype in enumerate(shown.simple_types)]
        return _dtype_picture(planes, f"{shown.name}: {_count(len(planes), 'plane')}", ax)
    if isinstance(shown, DType) or not isinstance(shown, RecordFormat):
        raise TypeError(f"bit_layout: wanted a dtype with bits, its name, or a record format, got {format!r}")
    return _record_picture(shown, ax)


# Axes


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            "jaxquant.plot draws with matplotlib, which is not installed: pip install 'jaxquant[plot]'"
        ) from error
    if ax is not None:
        return ax
    made: Axes = plt.subplots(figsize=size, layout="constrained")[1]
    return made


def _plain(ax: Axes, grid: str) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.grid(axis=grid, color="#DDDDDD", linewidth=0.8)  # type: ignore[arg-type]
    return ax


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if value == 0 and math.copysign(1, value) < 0:
        return "\N{MINUS SIGN}0"
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _spread_ticks(values: HostArray) -> list[int]:
    """Nine positions among the finite values, the ends included."""
    finite = np.flatnonzero(np.isfinite(values))
    return [int(i) for i in finite[np.linspace(0, len(finite) - 1, 9).round().astype(int)]]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# What was quantized


def _check_quantized(operation: str, quantized: object, format: RecordFormat | None) -> None:
    if isinstance(quantized, BlockScaledArray):
        if format is not None:
            raise TypeError(f"{operation}: a BlockScaledArray needs no format, got {format!r}")
    elif format is None:
        raise TypeError(
            f"{operation}: wanted a BlockScaledArray, or records with their format, got {type(quantized).__name__}"
        )


def _name_of(dtype: Any) -> str:
    try:
        return DType.from_any(dtype).name
    except LookupError:
        return str(dtype)


def _element_codes(array: BlockScaledArray) -> tuple[HostArray, HostArray, str]:
    """The codes of the elements, the value of every code, and a name."""
    dtype = array.element_dtype
    width = bit_width(dtype)
    if width > 8:
        raise ValueError(f"code_usage: elements of {dtype} have {width} bits, wanted at most 8")
    stored = array.elements.codes() if isinstance(array.elements, NarrowArray) else array.elements
    codes = np.asarray(stored).view(np.uint8)[tuple(slice(0, extent) for extent in array.shape)]
    values = casts.decode(np.arange(1 << width).astype(np.uint8), dtype).astype(np.float64)
    return codes & np.uint8((1 << width) - 1), values, _name_of(dtype)


# Boxes


def _box(
    ax: Axes, at: tuple[float, float], width: float, fill: str, gid: str, text: str = "", **style: Any
) -> None:
    from matplotlib.patches import Rectangle

    x, y = at
    height = style.pop("height", 1)
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=_INK, linewidth=0.9, gid=gid))
    if text:
        _text(ax, x + width / 2, y + height / 2, text, **style)


def _text(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    ax.text(x, y, text, **{"ha": "center", "va": "center", "color": _INK, "fontsize": 8.5, **style})


def _canvas(ax: Axes | None, title: str, left: float, width: float, rows: float, inches: float) -> Axes:
    """Axes without lines, a row of boxes one unit high, y downwards from 0; the title lies above."""
    top, bottom = -1.5, rows
    ax = _axes(ax, (inches, 0.36 * (bottom - top)))
    ax.set_xlim(-left, width * 1.01)
    ax.set_ylim(bottom, top)
    ax.set_axis_off()
    _text(ax, -left, top + 0.1, title, ha="left", va="top", fontsize=11, fontweight="bold")
    return ax


def _dividers(ax: Axes, y: float, at: Iterable[float]) -> None:
    """Faint lines inside a box."""
    ax.vlines(list(at), y + 0.06, y + 0.94, color="white", linewidth=0.8)


def _label(ax: Axes, y: float, text: str, width: float) -> None:
    _text(ax, -0.012 * width, y + 0.5, text, ha="right")


# Dtypes

_LETTERS = {"sign": "s", "exponent": "e", "significand": "m"}


def _fields_of(dtype: SimpleDType) -> list[tuple[str, int]]:
    """Fields of bits from the most significant."""
    try:
        facts = dtype.float_facts
    except AttributeError:
        return [("integer" if dtype.is_subtype_of(DType.Integer) else "other", dtype.bits)]
    fields = [
        ("sign", facts.sign_bits),
        ("exponent", facts.exponent_bits),
        ("significand", facts.significand_bits),
    ]
    return [(name, bits) for name, bits in fields if bits]


def _bits_row(ax: Axes, y: float, dtype: SimpleDType) -> None:
    at, top = 0, dtype.bits - 1
    for name, bits in _fields_of(dtype):
        low = top - bits + 1
        _box(ax, (at, y), bits, _FILLS[name], f"bits {dtype.name} {name} {top}:{low}")
        if bits <= 64:
            _dividers(ax, y, range(at + 1, at + bits))
        if name in _LETTERS and bits <= 64:
            for i in range(bits):
                _text(ax, at + i + 0.5, y + 0.5, _LETTERS[name], fontsize=8.5 if dtype.bits <= 32 else 6.5)
        else:
            _text(ax, at + bits / 2, y + 0.5, name if name != "other" else dtype.name)
        for number, x in {top: at + 0.5, low: at + bits - 0.5}.items():
            _text(ax, x, y - 0.28, str(number), fontsize=6.5, color="#555555")
        at, top = at + bits, low - 1


def _bits_legend(ax: Axes, y: float, dtypes: Iterable[SimpleDType], width: float) -> None:
    used = {name for dtype in dtypes for name, _ in _fields_of(dtype)}
    words = [f"{letter} {name}" for name, letter in _LETTERS.items() if name in used]
    _text(ax, 0, y + 0.5, "     ".join(words), ha="left", color="#555555")


def _dtype_picture(planes: Sequence[tuple[str, SimpleDType]], title: str, ax: Axes | None) -> Axes:
    width = max(16, *(dtype.bits for _, dtype in planes))
    left = (0.02 + 0.016 * max(len(role) for role, _ in planes)) * max(32, width)
    ax = _canvas(ax, title, left, width, 1.6 * len(planes) + 0.7, min(11, 1 + 0.26 * (left + width)))
    for i, (role, dtype) in enumerate(planes):
        _bits_row(ax, 1.6 * i, dtype)
        _label(ax, 1.6 * i, role, width)
    _bits_legend(ax, 1.6 * len(planes) - 0.4, [dtype for _, dtype in planes], width)
    return ax


# Block-scaled dtypes

_MOST_CELLS = 64


def _block_picture(format: BlockScaledDType, ax: Axes | None) -> Axes:
    levels = format.levels
    shares: list[int] = []
    """How many elements share a scale of each level, but for a Whole one."""
    for level in levels:
        if isinstance(level.block, int):
            shares.append(level.block * (shares[-1] if shares else 1))
    elements = shares[-1] if shares else 8
    planes = (format.element, *(level.scale for level in levels))
    width = max(32, *(dtype.bits for dtype in planes))
    cost = format.bits_per_element
    whole = isinstance(cost, SymbolicBits)
    bits = f"{cost.constant:g} + {cost.whole_scale_bits}/n" if isinstance(cost, SymbolicBits) else f"{cost:g}"
    title = f"{format.name}: {bits} bits per element" + (" in an array of n" if whole else "")
    ax = _canvas(ax, title, 0.17 * width, width, 2.85 * len(planes) + 1.1, 10)
    y = -0.3
    _elements(ax, y, width, elements, shares, format.element)
    _label(ax, y, f"element  {format.element.name}", width)
    for i, (level, share) in enumerate(itertools.zip_longest(levels, shares)):
        y += 1.25
        _scales(ax, y, width, elements, i, level, share)
        _label(ax, y, f"scale {i}  {level.scale.name}", width)
    y += 1.75
    _text(ax, 0, y, "bits, the most significant first", ha="left", color="#555555")
    y += 0.9
    for role, dtype in zip(["element", *(f"scale {i}" for i in range(len(levels)))], planes, strict=True):
        _bits_row(ax, y, dtype)
        _label(ax, y, f"{role}  {dtype.name}", width)
        y += 1.6
    _bits_legend(ax, y - 0.5, planes, width)
    return ax


def _elements(ax: Axes, y: float, width: float, elements: int, shares: list[int], dtype: SimpleDType) -> None:
    """One box per element; too many are drawn as one box per innermost scale."""
    together = 1 if elements <= _MOST_CELLS else shares[0]
    cell = width * together / elements
    for i in range(elements // together):
        first, last = i * together, (i + 1) * together
        text = str(i) if together == 1 else f"{together} elements"
        gid = f"element {i}" if together == 1 else f"element {first}:{last}"
        _box(ax, (i * cell, y), cell, _PLANES[0], gid, text if cell >= width / 32 else "", fontsize=7.5)


def _scales(ax: Axes, y: float, width: float, elements: int, i: int, level: Level, share: int | None) -> None:
    fill, bits = _PLANES[1 + i % (len(_PLANES) - 1)], level.scale.bits
    if share is None:
        _box(ax, (0, y), width, fill, f"scale {i} 0", f"{bits} bits for the whole array")
        return
    cell = width * share / elements
    texts = (
        f"{bits} bits for {share} elements, {bits / share:g} each",
        f"{bits} bits for {share}",
        f"{bits} bits",
        "",
    )
    # About a hundred characters of this size fill the width.
    text = next(text for text in texts if len(text) < 95 * cell / width)
    for j in range(elements // share):
        _box(ax, (j * cell, y), cell, fill, f"scale {i} {j}", text)


# Records


class _Piece(NamedTuple):
    """Neighbouring bits of a byte that belong to one element of a field."""

    field: Field
    element: int
    top: int
    """The bit of the element that is uppermost here."""
    low: int


def _record_picture(format: RecordFormat, ax: Axes | None) -> Axes:
    row_bytes = 16 if format.record_bytes <= 256 else 32
    map_rows = -(-format.record_bytes // row_bytes)
    groups = _byte_groups(format)
    rows = map_rows + 0.4 + (1.7 + 1.15 * len(groups) if groups else 0)
    title = (
        f"{format.name}: {format.record_bytes} bytes for {format.block_size} elements, "
        f"{8 * format.record_bytes / format.block_size:g} bits per element"
    )
    ax = _canvas(ax, title, 0.13 * row_bytes, row_bytes, rows, 10)
    for column in range(0, row_bytes, 4):
        _text(ax, column + 0.5, -0.3, f"+{column}", fontsize=7, color="#555555")
    for row in range(map_rows):
        _label(ax, row, f"byte {row * row_bytes}", row_bytes)
    spans: dict[tuple[int, int], list[Field]] = {}
    for field in format.fields:
        spans.setdefault((field.start, field.stop), []).append(field)
    fills = dict(zip(spans, _PLANES[1:], strict=False))
    for (start, stop), fields in spans.items():
        _span(ax, start, stop, fields, row_bytes, fills[start, stop])
    if not groups:
        return ax
    y = map_rows + 1.1
    _text(ax, 0, y - 0.35, "bits of a byte", ha="left", color="#555555")
    bit = row_bytes / 8
    for number in range(8):
        _text(ax, (7.5 - number) * bit, y + 0.25, str(number), fontsize=7, color="#555555")
    y += 0.5
    for first, last, pieces in groups:
        _label(ax, y, f"bytes {first}\N{EN DASH}{last}", row_bytes)
        at = 0.0
        for piece in pieces:
            bits = piece.top - piece.low + 1
            name = f"{piece.field.name}[{piece.element}..{piece.element + last - first}]"
            text = name if bits == piece.field.bits else f"{name} bits {piece.top}\N{EN DASH}{piece.low}"
            gid = f"bits {name} {piece.top}:{piece.low} of bytes {first}:{last + 1}"
            _box(ax, (at, y), bits * bit, fills[piece.field.start, piece.field.stop], gid, text)
            at += bits * bit
        y += 1.15
    return ax


def _span(ax: Axes, start: int, stop: int, fields: list[Field], row_bytes: int, fill: str) -> None:
    """One box per row of the map, and the text in the widest part."""
    names = ", ".join(field.name for field in fields)
    pieces = []
    for row in range(start // row_bytes, (stop - 1) // row_bytes + 1):
        first, last = max(start, row * row_bytes), min(stop, (row + 1) * row_bytes)
        pieces.append((row, first - row * row_bytes, last - first))
        _box(ax, (first - row * row_bytes, row), last - first, fill, f"field {names} {start}:{stop}")
        _dividers(ax, row, range(first - row * row_bytes + 1, last - row * row_bytes))
    widest = max(width for _, _, width in pieces)
    middle = [piece for piece in pieces if piece[2] == widest]
    row, column, width = middle[len(middle) // 2]
    elements = math.prod(fields[0].shape)
    kind = fields[0].dtype.name if fields[0].bits >= 8 else f"{fields[0].bits} bits"
    count = " + ".join([str(elements)] * len(fields)) + " \N{MULTIPLICATION SIGN} " if fields[0].shape else ""
    bytes_ = f"bytes {start}\N{EN DASH}{stop - 1}"
    text = f"{names}: {count}{kind}, {bytes_}" if width > row_bytes / 3 else f"{names}\n{count}{kind}"
    _text(ax, column + width / 2, row + 0.5, text, fontsize=8.5 if width > row_bytes / 3 else 7)


def _byte_groups(format: RecordFormat) -> list[tuple[int, int, list[_Piece]]]:
    """Runs of bytes that fields narrower than a byte share in one way: first, last, and the pieces of the first.

    Found by decoding records with a single bit set, so that the picture shows what decoding does.
    """
    narrow = [field for field in format.fields if field.bits < 8]
    if not narrow:
        return []
    bits = np.eye(8 * format.record_bytes, dtype=np.uint8)
    decoded = records.unpack(np.packbits(bits, axis=-1, bitorder="little"), format)
    owner: dict[int, tuple[Field, int, int]] = {}
    for field in narrow:
        values = np.asarray(getattr(decoded, field.name)).reshape(len(bits), -1)
        for bit, element in np.argwhere(values):
            owner[int(bit)] = field, int(element), int(values[bit, element]).bit_length() - 1
    groups: list[tuple[int, int, list[_Piece]]] = []
    for byte in sorted({bit // 8 for bit in owner}):
        pieces = _pieces([owner[8 * byte + i] for i in reversed(range(8))])
        if groups:
            first, last, before = groups[-1]
            moved = [piece._replace(element=piece.element + byte - first) for piece in before]
            if byte == last + 1 and pieces == moved:
                groups[-1] = first, byte, before
                continue
        groups.append((byte, byte, pieces))
    return groups


def _pieces(owners: list[tuple[Field, int, int]]) -> list[_Piece]:
    pieces: list[_Piece] = []
    for field, element, bit in owners:
        if pieces and pieces[-1][:2] == (field, element) and pieces[-1].low == bit + 1:
            pieces[-1] = pieces[-1]._replace(low=bit)
        else:
            pieces.append(_Piece(field, element, bit, bit))
    return pieces
