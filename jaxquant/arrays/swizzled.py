"""Swizzled arrays: a buffer in a vendor's tiled order, presented as the dense array that it holds.

Source: sections "Pytrees, orientation, names" and "Swizzle" of the array contract.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

__all__ = ["SWIZZLES", "Pattern", "Preset", "SwizzledArray", "f8_4x128", "swizzle"]

HostArray: TypeAlias = np.ndarray[Any, Any]
Array: TypeAlias = HostArray | jax.Array
Group: TypeAlias = tuple[str, ...]

_ELLIPSIS: Group = ("...",)


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pattern:
    """A rearrangement in einops notation: the dense axes, an arrow, the axes as they are stored.

    Each axis is a name, a group of names in parentheses (first name slowest), or ``1``; one ``...`` on both
    sides stands for any number of axes. Patterns compare and hash by structure, not by the names in them.

    >>> Pattern.parse("(a b) c -> c b a") == Pattern.parse("(rows tile) k -> k tile rows")
    True
    >>> Pattern.parse("...(a b)->... b a")
    Pattern.parse('... (a b) -> ... b a')

    Source: section "Swizzle" of the array contract.
    """

    left: tuple[Group, ...]
    right: tuple[Group, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises ValueError for a missing or second arrow, parentheses that do not match, what is no name, a
        name given twice on one side or on one side only, an ellipsis in a group; it names the axis.
        """
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError(f"pattern {text!r} must have one '->', got {len(sides) - 1}")
        left, right = (_groups(side, text) for side in sides)
        unpaired = sorted(set(itertools.chain(*left)) ^ set(itertools.chain(*right)))
        if unpaired:
            raise ValueError(f"pattern {text!r} has {_quoted(unpaired)} on one side of '->' only")
        return cls(left, right)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order of the left side, without the ellipsis."""
        return tuple(name for group in self.left if group != _ELLIPSIS for name in group)

    def _structure(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        number = {name: i for i, name in enumerate(self.names)} | {"...": -1}
        return tuple(
            tuple(tuple(number[name] for name in group) for group in side) for side in (self.left, self.right)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pattern):
            return NotImplemented
        return self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash(self._structure())

    def __str__(self) -> str:
        return " -> ".join(" ".join(map(_spell, side)) for side in (self.left, self.right))

    def __repr__(self) -> str:
        return f"Pattern.parse({str(self)!r})"


def _groups(side: str, text: str) -> tuple[Group, ...]:
    groups: list[Group] = []
    inside: list[str] | None = None
    for token in re.findall(r"[()]|[^\s()]+", side):
        if token == "(":
            if inside is not None:
                raise ValueError(f"pattern {text!r} has a group inside another, after {_quoted(inside)}")
            inside = []
        elif token == ")":
            if inside is None:
                raise ValueError(f"pattern {text!r} has a ')' that opens nowhere, after {_quoted(groups)}")
            groups.append(tuple(inside))
            inside = None
        elif token == "...":
            if inside is not None:
                raise ValueError(f"pattern {text!r} has an ellipsis inside a group; it stands for whole axes")
            groups.append(_ELLIPSIS)
        elif token == "1":
            if inside is None:
                groups.append(())
        elif not token.isidentifier():
            raise ValueError(f"pattern {text!r} has {token!r}, which is no axis name")
        elif inside is None:
            groups.append((token,))
        else:
            inside.append(token)
    if inside is not None:
        raise ValueError(f"pattern {text!r} has a '(' that is not closed, before {_quoted(inside)}")
    names = list(itertools.chain(*groups))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"pattern {text!r} has {_quoted(repeated)} twice on one side")
    return tuple(groups)


def _spell(group: Group) -> str:
    if not group:
        return "1"
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


def _quoted(parts: Sequence[str | Group]) -> str:
    spelled = (part if isinstance(part, str) else _spell(part) for part in parts)
    return ", ".join(f"'{part}'" for part in spelled) or "nothing"


class Preset(NamedTuple):
    """A named layout: its pattern and the sizes that make its tile."""

    pattern: Pattern
    sizes: Mapping[str, int]


SWIZZLES: Mapping[str, Preset] = MappingProxyType(
    {
        "f8_4x128": Preset(
            Pattern.parse("... (m0 m2 m1) (k0 k1) -> ... m0 k0 m1 m2 k1"),
            MappingProxyType({"m1": 32, "m2": 4, "k1": 4}),
        ),
        "f8_4x8": Preset(
            Pattern.parse("... (m0 m1) (k0 k1) -> ... m0 k0 m1 k1"), MappingProxyType({"m1": 8, "k1": 4})
        ),
    }
)
"""The named layouts of block scales, on (..., M, K) with K the scales of one row.

``f8_4x128`` is NVIDIA's 128x4 tile (cuBLAS "1D block scaling factors layout", cuDNN ``F8_128x4``): scale
(m, k) of a tile is byte ``(m % 32) * 16 + (m // 32) * 4 + k`` of 512, tiles follow each other k fastest.
``f8_4x8`` is the 8x4 tile of the small-batch kernels of TensorRT-LLM and FlashInfer: byte ``m * 4 + k`` of 32.
"""


@dataclass(frozen=True, slots=True)
class _Tiling:
    """All that is static: a pattern over trailing axes without an ellipsis, its sizes, the logical sizes."""

    pattern: Pattern
    sizes: tuple[int, ...]
    logical: tuple[int, ...]

    @property
    def named_sizes(self) -> dict[str, int]:
        return dict(zip(self.pattern.names, self.sizes, strict=True))

    @property
    def physical(self) -> tuple[int, ...]:
        return _extents(self.pattern.left, self.named_sizes)

    @property
    def stored(self) -> tuple[int, ...]:
        return _extents(self.pattern.right, self.named_sizes)


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False, init=False)
class SwizzledArray:
    """A buffer laid out as the right side of a pattern says, presented as the dense array of its left side.

    The constructor wraps a buffer that exists, without moving it; `swizzle` makes one from a dense array.
    Factor sizes come from the axes of the buffer; those that a grouped axis cannot tell are given by name,
    and any other that is given is checked. Padding lies in the buffer only: the shape, indexing, `min`,
    `max`, ``==`` and the repr show logical values.

    A pytree with the buffer as its one leaf. Axes in front of those that the pattern rearranges are not
    static, so vmap and scan may add and strip them; mapping over a rearranged axis is not supported.
    ``a == b`` is one boolean: equal shapes and equal values. Not hashable.

    Args:
        storage: NumPy or JAX array [..., *stored axes] of any dtype.
        pattern: a name of `SWIZZLES`, a pattern in einops notation, or a `Pattern`.
        shape: the logical trailing sizes of a padded buffer, at least one per rearranged axis; by default
            nothing is padding.
        sizes: sizes by factor name.

    Raises:
        TypeError: if storage is no array, or a size no integer.
        ValueError: if the pattern is malformed or no preset, a size has no factor or disagrees with the
            buffer, two sizes of one stored axis are unknown, or the buffer cannot hold `shape`.

    Example:
        >>> buffer = np.zeros((2, 2, 32, 4, 4), np.uint8)
        >>> scales = SwizzledArray(buffer, "f8_4x128", shape=(200, 8))
        >>> scales.shape, scales.padded_shape, scales.is_f8_4x128
        ((200, 8), (256, 8), True)

    Source: section "Swizzle" of the array contract.
    """

    storage: Array
    _tiling: _Tiling

    # An operator between a NumPy array and a swizzled one is refused, except ==, which comes here.
    __array_ufunc__ = None

    def __init__(
        self,
        storage: Array,
        pattern: str | Pattern,
        /,
        *,
        shape: Sequence[int] | None = None,
        **sizes: int,
    ) -> None:
        _check_array("storage", storage)
        given_pattern, given = _resolve(pattern, sizes)
        expanded = _expand(given_pattern, given_pattern.right, storage.ndim, "storage")
        known = _sizes_of_stored(expanded, storage.shape, given)
        physical = _extents(expanded.left, known)
        logical = physical if shape is None else _logical_shape(expanded, physical, shape)
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "_tiling", _trailing(expanded, known, logical))

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("SwizzledArray is final")

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return (*self._leading, *self._tiling.logical)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The dense shape that the buffer holds: the logical one with grouped axes rounded up to tiles."""
        return (*self._leading, *self._tiling.physical)

    @property
    def ndim(self) -> int:
        """The number of logical axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of logical values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the buffer."""
        return np.dtype(self.storage.dtype)

    @property
    def pattern(self) -> Pattern:
        """The pattern in the names it came with; axes that are not rearranged are the ellipsis.

        The names are no part of the type: out of a compiled function come those of its first trace.
        """
        fixed = self._tiling.pattern
        return Pattern((_ELLIPSIS, *fixed.left), (_ELLIPSIS, *fixed.right))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each factor of `pattern`, by name."""
        return self._tiling.named_sizes

    @property
    def is_f8_4x128(self) -> bool:
        """Whether the layout is that of the preset ``"f8_4x128"``, however it was spelled."""
        preset = SWIZZLES["f8_4x128"]
        if self.pattern != preset.pattern:
            return False
        sizes = dict(zip(preset.pattern.names, self._tiling.sizes, strict=True))
        return all(sizes[name] == size for name, size in preset.sizes.items())

    def unswizzle(self) -> Array:
        """The dense array without the padding: NumPy or JAX, as the buffer is.

        Raises ValueError where the buffer has lost its shape, because a rearranged axis was mapped.

        >>> x = np.arange(15, dtype=np.uint8).reshape(5, 3)
        >>> np.array_equal(f8_4x128(x).unswizzle(), x)
        True
        """
        _ = self._leading  # refuses a buffer that has lost its shape
        return _move(_restore, self._tiling, self.storage)

    def min(self) -> Any:
        """The smallest logical value, NaN if one is; ValueError if there is none.

        >>> swizzle(np.ones((5, 3), np.float32), "f8_4x8").min()
        np.float32(1.0)
        """
        return _extreme(self.unswizzle(), "min")

    def max(self) -> Any:
        """The largest logical value, NaN if one is; ValueError if there is none."""
        return _extreme(self.unswizzle(), "max")

    def __getitem__(self, index: Any) -> Any:
        return self.unswizzle()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a SwizzledArray without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Any:
        # Without this, iteration would index until IndexError, which JAX arrays never raise.
        return iter(self.unswizzle())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:
        if copy is False:
            raise ValueError(
                "the dense array of a SwizzledArray is made when asked for: copy cannot be False"
            )
        return np.array(self.unswizzle(), dtype, copy=copy)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, SwizzledArray | np.ndarray | jax.Array):
            return NotImplemented
        if self.shape != other.shape:
            return np.False_
        dense = other.unswizzle() if isinstance(other, SwizzledArray) else other
        return (self.unswizzle() == dense).all()

    def __ne__(self, other: object) -> Any:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else ~equal

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if isinstance(self.storage, np.ndarray) or (
            isinstance(self.storage, jax.Array)
            and not isinstance(self.storage, jax.core.Tracer)
            and self.storage.is_fully_addressable
        ):
            shown = np.array2string(np.asarray(self), separator=", ", prefix="SwizzledArray(")
            return f"SwizzledArray({shown}, shape={self.shape}, dtype={self.dtype}, pattern='{self.pattern}')"
        # A tracer, a placeholder of a pytree, or values that other hosts hold.
        return f"SwizzledArray({self.storage!r}, pattern='{self.pattern}')"

    @property
    def _leading(self) -> tuple[int, ...]:
        shape = tuple(self.storage.shape)
        stored = self._tiling.stored
        count = len(shape) - len(stored)
        if shape[max(count, 0) :] != stored:
            raise ValueError(
                f"storage has shape {shape}, but '{self.pattern}' wants {stored} behind its leading axes: "
                "was one of its axes mapped or moved?"
            )
        return shape[:count]


def swizzle(x: Array, pattern: str | Pattern, /, pad: bool = True, **sizes: int) -> SwizzledArray:
    """Rearrange a dense array into a swizzled buffer that presents the shape of the array.

    Args:
        x: NumPy or JAX array of any dtype; the buffer is of the same kind and dtype.
        pattern: a name of `SWIZZLES`, a pattern in einops notation, or a `Pattern`: dense axes -> stored axes.
        pad: fill grouped axes with zero bytes up to a whole tile; False refuses what does not tile.
        sizes: sizes by factor name; at most one factor of each dense axis may be left out.

    Returns:
        A SwizzledArray of the shape of x. Every byte of x is kept, except that XLA on CPU may change the
        payload of a bfloat16 NaN.

    Raises:
        TypeError: if x is no array, or a size no integer.
        ValueError: if the pattern is malformed or no preset, a size has no factor, two sizes of one axis are
            unknown, an axis is larger than its sizes, or does not tile and pad is False.

    Example:
        >>> x = np.arange(6).reshape(2, 3)
        >>> swizzle(x, "rows (tiles k) -> tiles rows k", k=2).storage.tolist()
        [[[0, 1], [3, 4]], [[2, 0], [5, 0]]]

    Source: section "Swizzle" of the array contract.
    """
    _check_array("x", x)
    given_pattern, given = _resolve(pattern, sizes)
    expanded = _expand(given_pattern, given_pattern.left, x.ndim, "x")
    known = _sizes_of_dense(expanded, x.shape, given, pad)
    tiling = _trailing(expanded, known, x.shape)
    return _rebuild(tiling, _move(_arrange, tiling, x))


def f8_4x128(x: Array, /, pad: bool = True, **sizes: int) -> SwizzledArray:
    """Swizzle block scales into the 128x4 tiles that Blackwell tensor cores read: ``swizzle(x, "f8_4x128")``.

    Args:
        x: NumPy or JAX array [..., M, K], of one byte per scale where hardware is to read it.
        pad: fill up to whole tiles with zero bytes; False refuses what does not tile.
        sizes: sizes by factor name, checked.

    Returns:
        A SwizzledArray of shape [..., M, K] over a buffer [..., ceil(M/128), ceil(K/4), 32, 4, 4].

    Raises:
        TypeError: if x is no array.
        ValueError: if x has fewer than two axes, or does not tile and pad is False.

    Example:
        >>> f8_4x128(np.ones((200, 8), np.uint8)).storage.shape
        (2, 2, 32, 4, 4)

    Source: section "Swizzle" of the array contract; cuBLAS manual, "1D block scaling factors layout".
    """
    return swizzle(x, "f8_4x128", pad, **sizes)


def _check_array(what: str, x: object) -> None:
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"{what} must be a NumPy or JAX array, got {type(x).__name__}")


def _resolve(pattern: str | Pattern, sizes: Mapping[str, int]) -> tuple[Pattern, dict[str, int]]:
    """The pattern, and the sizes that are given by it and beside it."""
    preset: Mapping[str, int] = {}
    if isinstance(pattern, str) and pattern in SWIZZLES:
        pattern, preset = SWIZZLES[pattern]
    elif isinstance(pattern, str):
        if "->" not in pattern:
            raise ValueError(
                f"pattern {pattern!r} is neither a preset ({_quoted(list(SWIZZLES))}) nor a pattern with '->'"
            )
        pattern = Pattern.parse(pattern)
    elif not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a str or a Pattern, got {type(pattern).__name__}")
    given = {name: _index(f"size {name!r}", size) for name, size in sizes.items()}
    unknown = sorted(set(given) - set(pattern.names))
    if unknown:
        raise ValueError(f"pattern '{pattern}' has no {_quoted(unknown)}, for which sizes are given")
    for name, size in given.items():
        if preset.get(name, size) != size:
            raise ValueError(f"size {name!r} of the preset is {preset[name]}, got {size}")
    return pattern, {**preset, **given}


def _index(what: str, value: object) -> int:
    try:
        size = operator.index(cast("Any", value))
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {type(value).__name__}") from None
    if size < 0:
        raise ValueError(f"{what} must not be negative, got {size}")
    return size


def _expand(pattern: Pattern, side: tuple[Group, ...], ndim: int, what: str) -> Pattern:
    """The pattern with a name for each axis that its ellipsis stands for, where `side` has ndim axes."""
    extra = ndim - sum(group != _ELLIPSIS for group in side)
    if extra < 0 or (extra > 0 and _ELLIPSIS not in side):
        wanted = f"{'at least ' if _ELLIPSIS in side else ''}{ndim - extra}"
        raise ValueError(f"{what} has {ndim} axes, '{' '.join(map(_spell, side))}' wants {wanted}")
    free = (name for name in (f"axis{i}" for i in itertools.count()) if name not in pattern.names)
    axes = [(name,) for name in itertools.islice(free, extra)]

    def expanded(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(
            itertools.chain.from_iterable(axes if group == _ELLIPSIS else [group] for group in groups)
        )

    return Pattern(expanded(pattern.left), expanded(pattern.right))


def _tile(group: Group, sizes: Mapping[str, int], axis: str) -> tuple[int, str | None]:
    """The product of the known sizes of a group, and the name of the unknown one."""
    unknown = [name for name in group if name not in sizes]
    if len(unknown) > 1:
        raise ValueError(f"{axis}: sizes of {_quoted(unknown)} are unknown, all but one must be given")
    tile = math.prod(sizes[name] for name in group if name in sizes)
    if unknown and tile == 0:
        raise ValueError(f"{axis}: the size of {unknown[0]!r} cannot be told beside a size of 0")
    return tile, unknown[0] if unknown else None


def _sizes_of_dense(
    pattern: Pattern, shape: tuple[int, ...], given: Mapping[str, int], pad: bool
) -> dict[str, int]:
    sizes = dict(given)
    for i, (group, extent) in enumerate(zip(pattern.left, shape, strict=True)):
        axis = f"axis {i} '{_spell(group)}' of size {extent}"
        tile, unknown = _tile(group, given, axis)
        if unknown is not None and tile == 1:
            # An axis as it is, possibly of a size that is only a symbol yet.
            sizes[unknown] = extent
            continue
        if unknown is not None:
            sizes[unknown] = -(-extent // tile)
        padded = tile if unknown is None else tile * sizes[unknown]
        if extent > padded or (extent != padded and len(group) <= 1):
            raise ValueError(f"{axis} must have size {padded}")
        if extent != padded and not pad:
            raise ValueError(f"{axis} is no whole number of tiles of {tile}, and pad is False")
    return sizes


def _sizes_of_stored(pattern: Pattern, shape: tuple[int, ...], given: Mapping[str, int]) -> dict[str, int]:
    sizes = dict(given)
    for i, (group, extent) in enumerate(zip(pattern.right, shape, strict=True)):
        axis = f"stored axis {i} '{_spell(group)}' of size {extent}"
        tile, unknown = _tile(group, given, axis)
        if unknown is not None:
            sizes[unknown] = extent // tile
            if extent % tile:
                raise ValueError(f"{axis} must have a multiple of {tile} as its size")
        elif extent != tile:
            raise ValueError(f"{axis} must have size {tile}")
    return sizes


def _logical_shape(pattern: Pattern, physical: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...]:
    trailing = tuple(_index(f"shape[{i}]", size) for i, size in enumerate(shape))
    least = len(pattern.left) - _leading_count(pattern)
    if not least <= len(trailing) <= len(physical):
        raise ValueError(
            f"shape {trailing} must have {least} to {len(physical)} sizes, storage holds {physical}"
        )
    first = len(physical) - len(trailing)
    for i, size in enumerate(trailing, first):
        group = pattern.left[i]
        if size > physical[i] or (size != physical[i] and len(group) <= 1):
            raise ValueError(
                f"shape {trailing} has {size} on axis {i} '{_spell(group)}', of which storage holds {physical[i]}"
            )
    return (*physical[:first], *trailing)


def _leading_count(pattern: Pattern) -> int:
    """How many axes in front are the same on both sides: those that nothing static may remember."""
    same = (a == b and len(a) == 1 for a, b in zip(pattern.left, pattern.right, strict=False))
    return sum(itertools.takewhile(bool, same))


def _trailing(pattern: Pattern, sizes: Mapping[str, int], logical: tuple[int, ...]) -> _Tiling:
    count = _leading_count(pattern)
    fixed = Pattern(pattern.left[count:], pattern.right[count:])
    return _Tiling(fixed, tuple(sizes[name] for name in fixed.names), tuple(logical[count:]))


def _extents(groups: tuple[Group, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


_Step: TypeAlias = "Callable[[_Tiling, Array], Array]"


def _arrange(tiling: _Tiling, x: Array) -> Array:
    count = x.ndim - len(tiling.logical)
    leading = x.shape[:count]
    left = tiling.pattern.names
    right = tuple(itertools.chain(*tiling.pattern.right))
    factors = _pad(x, tiling.physical).reshape((*leading, *tiling.sizes))
    order = (*range(count), *(count + left.index(name) for name in right))
    return factors.transpose(order).reshape((*leading, *tiling.stored))


def _restore(tiling: _Tiling, storage: Array) -> Array:
    count = storage.ndim - len(tiling.pattern.right)
    leading = storage.shape[:count]
    right = tuple(itertools.chain(*tiling.pattern.right))
    sizes = tiling.named_sizes
    factors = storage.reshape((*leading, *(sizes[name] for name in right)))
    order = (*range(count), *(count + right.index(name) for name in tiling.pattern.names))
    dense = factors.transpose(order).reshape((*leading, *tiling.physical))
    logical: Any = (..., *map(slice, tiling.logical))
    return cast("Array", dense[logical])


def _pad(x: Array, trailing: tuple[int, ...]) -> Array:
    """Zero bytes behind the trailing axes, up to these sizes."""
    count = x.ndim - len(trailing)
    if x.shape[count:] == trailing:
        return x
    if isinstance(x, np.ndarray):
        shape = (*x.shape[:count], *trailing)
        zeros = np.zeros(math.prod(shape) * x.dtype.itemsize, np.uint8)
        padded = zeros.view(x.dtype).reshape(shape)
        padded[tuple(map(slice, x.shape))] = x
        return padded
    widths = [(0, 0)] * count + [(0, size - old) for size, old in zip(trailing, x.shape[count:], strict=True)]
    return jnp.pad(x, widths)


def _move(step: _Step, tiling: _Tiling, x: Array) -> Array:
    if isinstance(x, np.ndarray):
        return np.asarray(step(tiling, x), order="C")
    return cast("jax.Array", _move_traced(step, tiling, x))


@partial(jax.jit, static_argnums=(0, 1))
def _move_traced(step: _Step, tiling: _Tiling, x: jax.Array) -> jax.Array:
    if _float_bits(x.dtype) >= 8:
        return _move_bits(step, tiling, x)
    return cast("jax.Array", step(tiling, x))


def _float_bits(dtype: Any) -> int:
    finfo: Callable[[Any], Any] = ml_dtypes.finfo
    return int(finfo(dtype).bits) if jnp.issubdtype(dtype, jnp.floating) else 0


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _move_bits(step: _Step, tiling: _Tiling, x: jax.Array) -> jax.Array:
    # XLA:CPU carries narrow floats through wider ones even where it only moves them, which changes NaNs; and
    # float8_e8m0fnu has no zero to pad with: jnp.pad would write NaN. Integers stay as they are.
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{_float_bits(x.dtype)}"))
    return lax.bitcast_convert_type(step(tiling, bits), x.dtype)


@_move_bits.defjvp
def _move_bits_jvp(
    step: _Step, tiling: _Tiling, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _move_bits(step, tiling, *primals), cast("jax.Array", step(tiling, *tangents))


def _extreme(values: Array, which: str) -> Any:
    if values.size == 0:
        raise ValueError(f"{which} of a SwizzledArray of shape {values.shape}, which has no values")
    if isinstance(values, jax.Array) and values.dtype == jnp.float8_e8m0fnu:
        # The codes are ordered as the values, NaN (255) last; XLA starts from a zero, which E8M0 lacks, and
        # gives NaN always.
        codes = lax.bitcast_convert_type(values, jnp.uint8)
        largest = codes.max()
        code = largest if which == "max" else jnp.where(largest == 255, largest, codes.min())
        return lax.bitcast_convert_type(code, values.dtype)
    with np.errstate(invalid="ignore"):  # NumPy warns of a bfloat16 NaN, which is an answer here
        return getattr(values, which)()


def _rebuild(tiling: _Tiling, storage: Any) -> SwizzledArray:
    # Unchecked: a pytree is rebuilt from tracers and placeholders too.
    shown = object.__new__(SwizzledArray)
    object.__setattr__(shown, "storage", storage)
    object.__setattr__(shown, "_tiling", tiling)
    return shown


jax.tree_util.register_pytree_with_keys(
    SwizzledArray,
    lambda shown: (((jax.tree_util.GetAttrKey("storage"), shown.storage),), shown._tiling),
    lambda tiling, children: _rebuild(tiling, *children),
    lambda shown: ((shown.storage,), shown._tiling),
)
