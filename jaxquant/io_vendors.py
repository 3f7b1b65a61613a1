"""Vendors' layouts of MXFP4 and NVFP4 weights: gpt-oss, compressed-tensors and GGUF, both ways.

All of them keep E2M1 codes two to a byte and one scale per block along the last axis, as `BlockScaledArray`
does; they differ in names, in the order of the nibbles (GGUF) and in what the outer scale of NVFP4 means.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.arrays.block_scaled import BlockScaledArray, build
from jaxquant.arrays.narrow import NarrowArray
from jaxquant.arrays.swizzled import SwizzledArray
from jaxquant.dtypes import BlockScaledDType, DType

if TYPE_CHECKING:
    from jaxquant.gguf import GGUFFile

__all__ = [
    "from_compressed_tensors",
    "from_gguf",
    "from_gguf_blocks",
    "from_gpt_oss",
    "to_compressed_tensors",
    "to_gguf_blocks",
    "to_gpt_oss",
]

Array = Any

_U8 = np.dtype(np.uint8)
_E8M0, _E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)


def from_gpt_oss(tensors: Mapping[str, Any], name: str) -> BlockScaledArray:
    """An MXFP4 weight of a gpt-oss checkpoint: ``<name>_blocks`` and ``<name>_scales``, or ``.blocks``, ``.scales``.

    Args:
        tensors: arrays by name, NumPy or JAX, such as a `SafetensorsFile`. Blocks are uint8 [\\*rows, G, 16], two
            codes to a byte and the first in the low nibble; scales uint8 or E8M0 [\\*rows, G].
        name: what the two names share, such as ``"model.layers.0.mlp.experts.down_proj"``.

    Returns:
        DType.MXFP4 [\\*rows, G * 32], on NumPy or JAX like the tensors; NumPy planes are views of theirs. The last
        axis is the one a matmul contracts, whatever order of axes a model's code prefers.

    Raises:
        KeyError: there is no such pair.
        TypeError: for other dtypes.
        ValueError: for shapes that do not fit each other.

    Example:
        >>> import numpy as np
        >>> from jaxquant.io import from_gpt_oss
        >>> pair = {"w_blocks": np.full((1, 1, 16), 0x21, np.uint8), "w_scales": np.uint8([[128]])}
        >>> from_gpt_oss(pair, "w").dequantize()[0, :4]
        array([1., 2., 1., 2.], dtype=float32)

    Source: ``gpt_oss/torch/weights.py`` of openai/gpt-oss (``.blocks``, ``.scales``) and
    ``integrations/mxfp4.py`` of Hugging Face transformers (``_blocks``, ``_scales``).
    """
    for mark in "_.":
        names = f"{name}{mark}blocks", f"{name}{mark}scales"
        if names[0] in tensors and names[1] in tensors:
            break
    else:
        raise KeyError(f"no {name}_blocks with {name}_scales, nor {name}.blocks with {name}.scales")
    blocks, scales = (tensors[key] for key in names)
    _check_dtype(names[0], blocks, _U8)
    _check_dtype(names[1], scales, _U8, _E8M0)
    if blocks.ndim < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"{names[0]} has shape {blocks.shape} and {names[1]} {scales.shape}, wanted [*rows, G, 16] and [*rows, G]"
        )
    packed = blocks.reshape((*blocks.shape[:-2], blocks.shape[-2] * 16))
    return _array(DType.MXFP4, packed, scales)


def to_gpt_oss(array: BlockScaledArray, name: str, *, separator: Literal["_", "."] = "_") -> dict[str, Any]:
    """The pair of tensors that `from_gpt_oss` reads, as a dict ready for `save`.

    Args:
        array: DType.MXFP4 [\\*rows, G * 32] with blocks along the last axis; swizzled scales become dense.
        name: what the two names share.
        separator: ``"_"`` as in Hugging Face checkpoints, ``"."`` as in OpenAI's own.

    Returns:
        ``<name>_blocks``, uint8 [\\*rows, G, 16], and ``<name>_scales``, uint8 [\\*rows, G].

    Raises:
        TypeError: ``array`` is no `BlockScaledArray`.
        ValueError: it is of another format, blocked along another axis, or padded.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType, quantize_blocks
        >>> from jaxquant.io import to_gpt_oss
        >>> pair = to_gpt_oss(quantize_blocks(np.ones((8, 64), np.float32), DType.MXFP4), "w")
        >>> {name: tensor.shape for name, tensor in pair.items()}
        {'w_blocks': (8, 2, 16), 'w_scales': (8, 2)}
    """
    if separator not in ("_", "."):
        raise ValueError(f"to_gpt_oss: separator must be '_' or '.', got {separator!r}")
    packed, scales = _last_axis_planes("to_gpt_oss", array, DType.MXFP4)
    blocks = packed.reshape((*scales.shape, 16))
    return {f"{name}{separator}blocks": blocks, f"{name}{separator}scales": scales}


def from_compressed_tensors(tensors: Mapping[str, Any], name: str) -> BlockScaledArray:
    """A weight in the ``mxfp4-pack-quantized`` or ``nvfp4-pack-quantized`` format of compressed-tensors.

    Reads ``<name>.weight_packed`` and ``<name>.weight_scale``, and where there is one
    ``<name>.weight_global_scale``, which makes it NVFP4. That global scale g is a divisor, (448 * 6) / amax, so a
    value is ``q * scale / g``; the tensor scale of NVFP4 here is a factor, the float32 nearest to 1 / g. The two
    products may differ in the last bit of a float32.

    Args:
        tensors: arrays by name, NumPy or JAX, such as a `SafetensorsFile`. ``weight_packed`` is uint8
            [\\*rows, K / 2], the first code in the low nibble; ``weight_scale`` uint8 or E8M0 [\\*rows, K / 32] for
            MXFP4, E4M3 [\\*rows, K / 16] for NVFP4; ``weight_global_scale`` float32 of one value.
        name: the name of the module, such as ``"model.layers.0.mlp.down_proj"``.

    Returns:
        DType.MXFP4 or DType.NVFP4 [\\*rows, K], on NumPy or JAX like the tensors; NumPy planes are views of theirs.

    Raises:
        KeyError: a tensor is missing; the message suggests near names.
        TypeError: for other dtypes.
        ValueError: for shapes that do not fit each other, a global scale that is not positive and finite, and one
            so small that its reciprocal is infinite.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> from jaxquant.io import from_compressed_tensors
        >>> tensors = {
        ...     "proj.weight_packed": np.full((1, 8), 0x21, np.uint8),
        ...     "proj.weight_scale": np.ones((1, 1), ml_dtypes.float8_e4m3fn),
        ...     "proj.weight_global_scale": np.float32([4]),
        ... }
        >>> from_compressed_tensors(tensors, "proj").dequantize()[0, :2]
        array([0.125, 0.25 ], dtype=float32)

    Source: compressed-tensors 0.20.1, ``compressors/nvfp4`` and ``compressors/mxfp4`` for names, order and types,
    ``quantization/utils/helpers.py`` (``generate_gparam``) and ``quantization/lifecycle/forward_helpers.py``
    (``_dequantize``: ``scale / global_scale``) for the divisor.
    """
    names = [f"{name}.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale")]
    for key in names[:2]:
        if key not in tensors:
            raise _unknown(key, tensors)
    packed, scales = tensors[names[0]], tensors[names[1]]
    outer = None
    dtype = DType.MXFP4
    if names[2] in tensors:
        dtype = DType.NVFP4
        outer = _reciprocal(names[2], tensors[names[2]])
    _check_dtype(names[0], packed, _U8)
    _check_dtype(names[1], scales, *((_E4M3,) if outer is not None else (_U8, _E8M0)))
    values = 16 if outer is not None else 32
    if packed.ndim < 1 or (*packed.shape[:-1], packed.shape[-1] * 2) != (
        *scales.shape[:-1],
        *(extent * values for extent in scales.shape[-1:]),
    ):
        raise ValueError(
            f"{names[0]} has shape {packed.shape} and {names[1]} {scales.shape}, wanted [*rows, K / 2] and "
            f"[*rows, K / {values}]"
        )
    return _array(dtype, packed, scales, outer)


def to_compressed_tensors(
    array: BlockScaledArray, name: str, *, global_scale: float | np.floating[Any] | None = None
) -> dict[str, Any]:
    """The tensors that `from_compressed_tensors` reads, as a dict ready for `save`.

    Args:
        array: DType.MXFP4 or DType.NVFP4 [\\*rows, K] with blocks along the last axis; swizzled scales become dense.
        name: the name of the module.
        global_scale: for NVFP4, the divisor to write, a float32 whose reciprocal rounds to the tensor scale. The
            default is the float32 nearest to 1 / tensor scale. A reciprocal cannot be undone for every float32:
            where the significand of the tensor scale is above the square root of 2, a reader may find it one unit
            in the last place away, and only the divisor that was read gives the bytes that were read.

    Returns:
        ``<name>.weight_packed``, uint8 [\\*rows, K / 2]; ``<name>.weight_scale``, uint8 [\\*rows, K / 32] for MXFP4,
        E4M3 [\\*rows, K / 16] for NVFP4, and then ``<name>.weight_global_scale``, float32 [1].

    Raises:
        TypeError: ``array`` is no `BlockScaledArray`.
        ValueError: it is of another format, blocked along another axis, padded, or a stack with several tensor
            scales; the tensor scale has no finite reciprocal; ``global_scale`` is not a divisor for it.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType, quantize_blocks
        >>> from jaxquant.io import to_compressed_tensors
        >>> weight = quantize_blocks(np.ones((8, 64), np.float32), DType.NVFP4, tensor_scale=0.25)
        >>> tensors = to_compressed_tensors(weight, "proj")
        >>> tensors["proj.weight_packed"].shape, tensors["proj.weight_global_scale"]
        ((8, 32), array([4.], dtype=float32))
    """
    what = "to_compressed_tensors"
    packed, scales = _last_axis_planes(what, array, DType.MXFP4, DType.NVFP4)
    tensors = {f"{name}.weight_packed": packed, f"{name}.weight_scale": scales}
    if array.format is not DType.NVFP4:
        if global_scale is not None:
            raise ValueError(f"{what}: MXFP4 has no global scale, got {global_scale}")
        return tensors
    tensors[f"{name}.weight_scale"] = scales.view(_E4M3)
    tensor_scale = np.asarray(array.levels[1])
    if tensor_scale.size != 1:
        raise ValueError(
            f"{what}: the tensor scale has shape {tensor_scale.shape}, wanted one value; save the arrays of a "
            "stack one by one"
        )
    if global_scale is None:
        divisor = _reciprocal("the tensor scale", tensor_scale)
    else:
        with np.errstate(over="ignore"):
            divisor = np.array([global_scale], np.float32)
        if float(divisor[0]) != float(global_scale):
            raise ValueError(f"{what}: global_scale {global_scale} is no float32")
        if _reciprocal("global_scale", divisor)[0] != tensor_scale.reshape(()):
            raise ValueError(
                f"{what}: the reciprocal of global_scale {global_scale} is not the tensor scale "
                f"{tensor_scale.reshape(())}"
            )
    tensors[f"{name}.weight_global_scale"] = divisor if isinstance(packed, np.ndarray) else jnp.array(divisor)
    return tensors


def from_gguf_blocks(blocks: Array, dtype: BlockScaledDType, *, tensor_scale: Any = None) -> BlockScaledArray:
    """MXFP4 or NVFP4 blocks of a GGUF file as an array: the same codes and scale bytes in another order.

    A block of MXFP4 is 17 bytes for 32 values: the E8M0 scale, then 16 bytes of which byte j holds values j and
    j + 16. One of NVFP4 is 36 bytes for 64 values: four E4M3 scales, then for each of them 8 bytes of which byte
    j holds values j and j + 8. Values are those of OCP and NVIDIA: the scale byte 0xFF of MXFP4 and 0x7F of NVFP4
    are NaN, where ggml and gguf compute 2**128 times the element and 0.

    Args:
        blocks: uint8 [\\*rows, K / 32, 17] or [\\*rows, K / 64, 36], NumPy or JAX.
        dtype: DType.MXFP4 or DType.NVFP4.
        tensor_scale: for NVFP4, the factor that GGUF keeps in another tensor: float32, one value or one for each
            index of the first axis of ``blocks``. The default is 1.

    Returns:
        ``dtype`` [\\*rows, K], on NumPy or JAX like ``blocks``.

    Raises:
        TypeError: ``blocks`` is no uint8 array.
        ValueError: for another dtype, shapes that do not fit, a tensor scale for MXFP4 or of another shape or
            dtype, and NVFP4 scale bytes from 0x80 up, which ggml reads without their sign.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType
        >>> from jaxquant.io import from_gguf_blocks
        >>> block = np.uint8([[128] + 16 * [0x21]])  # values 0 to 15 have code 1, the rest code 2
        >>> from_gguf_blocks(block, DType.MXFP4).dequantize()[[15, 16]]
        array([1., 2.], dtype=float32)

    Source: ``block_mxfp4`` and ``block_nvfp4`` of ggml's ``ggml-common.h``; the Python package gguf 0.19.
    """
    what = "from_gguf_blocks"
    scale_bytes, half = _gguf_layout(what, dtype)
    _check_dtype(f"{what}: blocks", blocks, _U8)
    size = scale_bytes * (1 + 2 * half // 2)
    if blocks.ndim < 2 or blocks.shape[-1] != size:
        raise ValueError(
            f"{what}: blocks of {dtype.name} have shape {blocks.shape}, wanted [*rows, G, {size}]"
        )
    rows, groups = blocks.shape[:-2], blocks.shape[-2]
    scales = blocks[..., :scale_bytes].reshape((*rows, groups * scale_bytes))
    pairs = blocks[..., scale_bytes:].reshape((*rows, groups * scale_bytes, half))
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    low, high = np.uint8(0x0F), np.uint8(0xF0)
    first = (even & low) | (odd << np.uint8(4))
    second = (even >> np.uint8(4)) | (odd & high)
    xp = np if isinstance(blocks, np.ndarray) else jnp
    packed = xp.concatenate((first, second), axis=-1).reshape((*rows, groups * scale_bytes * half))
    outer = None
    if dtype is DType.NVFP4:
        signed = int((scales >= np.uint8(0x80)).sum())
        if signed:
            raise ValueError(
                f"{what}: {signed} of {scales.size} scale bytes are 0x80 or more, scales have no sign"
            )
        outer = _tensor_scale(what, tensor_scale, (*rows, groups))
    elif tensor_scale is not None:
        raise ValueError(f"{what}: MXFP4 has no tensor scale, got {tensor_scale!r}")
    # A copy, so that the scales do not keep a file mapped.
    return _array(dtype, packed, scales.copy(), outer)


def to_gguf_blocks(array: BlockScaledArray) -> Array:
    """An array as MXFP4 or NVFP4 blocks of a GGUF file; the inverse of `from_gguf_blocks`.

    The tensor scale of NVFP4, ``array.levels[1]``, is no part of the blocks: GGUF keeps it as an F32 tensor of its
    own, named like the weight with ``scale`` for ``weight``. ``gguf.GGUFWriter.add_tensor`` takes the blocks as
    rows of bytes: ``blocks.reshape(*blocks.shape[:-2], -1)``.

    Args:
        array: DType.MXFP4 or DType.NVFP4 [\\*rows, K] with blocks along the last axis, K a multiple of 64 for NVFP4;
            swizzled scales become dense.

    Returns:
        uint8 [\\*rows, K / 32, 17] or [\\*rows, K / 64, 36], on NumPy or JAX like the array.

    Raises:
        TypeError: ``array`` is no `BlockScaledArray`.
        ValueError: it is of another format, blocked along another axis, padded, or K is no multiple of 64 (NVFP4);
            NVFP4 scale bytes from 0x80 up.

    Example:
        >>> import numpy as np
        >>> from jaxquant import DType, quantize_blocks
        >>> from jaxquant.io import to_gguf_blocks
        >>> to_gguf_blocks(quantize_blocks(np.ones((8, 64), np.float32), DType.MXFP4)).shape
        (8, 2, 17)
    """
    what = "to_gguf_blocks"
    packed, scales = _last_axis_planes(what, array, DType.MXFP4, DType.NVFP4)
    scale_bytes, half = _gguf_layout(what, array.format)
    if scales.shape[-1] % scale_bytes:
        raise ValueError(f"{what}: array has shape {array.shape}, the last axis must be a multiple of 64")
    if array.format is DType.NVFP4 and bool((scales >= np.uint8(0x80)).any()):
        raise ValueError(f"{what}: scale bytes of 0x80 and more have a sign, which GGUF lacks")
    rows, groups = scales.shape[:-1], scales.shape[-1] // scale_bytes
    pairs = packed.reshape((*scales.shape, half))
    first, second = pairs[..., : half // 2], pairs[..., half // 2 :]
    low, high = np.uint8(0x0F), np.uint8(0xF0)
    even = (first & low) | (second << np.uint8(4))
    odd = (first >> np.uint8(4)) | (second & high)
    xp = np if isinstance(packed, np.ndarray) else jnp
    nibbles = xp.stack((even, odd), axis=-1).reshape((*rows, groups, scale_bytes * half))
    return xp.concatenate((scales.reshape((*rows, groups, scale_bytes)), nibbles), axis=-1)


def from_gguf(file: GGUFFile, name: str, *, tensor_scale: Any = None) -> BlockScaledArray:
    """An MXFP4 or NVFP4 tensor of a GGUF file as a NumPy array, as `from_gguf_blocks` makes it of the blocks.

    Args:
        file: as `jaxquant.gguf.open` gives it.
        name: the tensor's name.
        tensor_scale: for NVFP4, the name of the tensor that holds its scale, or the scale itself. The default is
            the tensor that llama.cpp pairs with it, ``blk.0.attn_q.scale`` for ``blk.0.attn_q.weight``, and 1
            where the file has none.

    Returns:
        DType.MXFP4 or DType.NVFP4 of the tensor's shape, in memory of its own.

    Raises:
        KeyError: there is no such tensor, or none of the name ``tensor_scale``.
        TypeError: the tensor is of another type.
        ValueError: as `from_gguf_blocks`; the file is closed, or has shrunk.

    Source: ``load_tensors`` of llama.cpp's ``llama-model.cpp`` for the scale: optional, of one value, or one per
    expert.
    """
    info = file.tensors.get(name)
    if info is not None and info.type not in ("MXFP4", "NVFP4"):
        raise TypeError(f"from_gguf: tensor {name!r} is {info.type}, wanted MXFP4 or NVFP4")
    blocks = file.raw(name)  # raises KeyError with a suggestion
    if info is None or info.type == "MXFP4":
        return from_gguf_blocks(blocks, DType.MXFP4, tensor_scale=tensor_scale)
    beside = f"{name.removesuffix('weight')}scale"
    if tensor_scale is None and name.endswith(".weight") and beside in file.tensors:
        tensor_scale = beside
    if isinstance(tensor_scale, str):
        tensor_scale = file.array(tensor_scale)
    return from_gguf_blocks(blocks, DType.NVFP4, tensor_scale=tensor_scale)


def _gguf_layout(what: str, dtype: object) -> tuple[int, int]:
    """Scales per block, and bytes of codes under each."""
    if dtype is DType.MXFP4:
        return 1, 16
    if dtype is DType.NVFP4:
        return 4, 8
    raise ValueError(f"{what}: dtype must be DType.MXFP4 or DType.NVFP4, got {dtype!r}")


def _tensor_scale(what: str, scale: Any, shape: tuple[int, ...]) -> Array:
    """float32, of shape (1, ..., 1) or (first extent, 1, ..., 1)."""
    values = np.asarray(1.0 if scale is None else scale)
    if values.dtype != np.float32:
        exact = values.ndim == 0 and values.dtype == np.float64 and float(np.float32(values)) == float(values)
        if not exact:
            raise ValueError(f"{what}: tensor_scale must be float32, got {values.dtype}: {values}")
    if values.size == 1:
        return values.astype(np.float32).reshape((1,) * (len(shape)))
    if values.shape != shape[:1] or len(shape) < 3:
        raise ValueError(
            f"{what}: tensor_scale has shape {values.shape}, wanted one value or one per index of the first of "
            f"three axes or more of {shape}"
        )
    return values.reshape((-1,) + (1,) * (len(shape) - 1))


def _reciprocal(what: str, divisor: Any) -> np.ndarray[Any, Any]:
    """float32 [1] nearest to 1 / divisor; by NumPy, which keeps subnormals."""
    values = np.asarray(divisor)
    if values.dtype != np.float32 or values.size != 1:
        raise ValueError(f"{what} is {values.dtype} of shape {values.shape}, wanted float32 of one value")
    flat = values.reshape(1)
    with np.errstate(all="ignore"):
        result = np.float32(1) / flat
    if not (flat[0] > 0 and 0 < result[0] < math.inf):
        raise ValueError(f"{what} is {flat[0]}, wanted a positive finite value with a finite reciprocal")
    return result


def _array(dtype: BlockScaledDType, packed: Array, scales: Array, outer: Any = None) -> BlockScaledArray:
    """MXFP4 or NVFP4 of planes whose shapes are known to fit."""
    scale_dtype = dtype.levels[0].scale.numpy_dtype
    levels: tuple[Array, ...] = (scales if scales.dtype == scale_dtype else scales.view(scale_dtype),)
    if outer is not None:
        full = outer.reshape(outer.shape if outer.size > 1 else (1,) * packed.ndim)
        levels += (full if isinstance(packed, np.ndarray) else jnp.array(full),)
    block = dtype.levels[0].block
    return build(levels, NarrowArray(packed, dtype.element), dtype, np.dtype(np.float32), (block,), dtype, ())


def _last_axis_planes(what: str, array: object, *dtypes: BlockScaledDType) -> tuple[Array, Array]:
    """Packed codes and scale bytes, both uint8, of an array blocked along its last axis."""
    wanted = " or ".join(dtype.name for dtype in dtypes)
    if not isinstance(array, BlockScaledArray):
        raise TypeError(f"{what}: array must be a BlockScaledArray of {wanted}, got {type(array).__name__}")
    if array.format not in dtypes:
        name = "no format" if array.format is None else array.format.name
        raise ValueError(f"{what}: array has {name}, wanted {wanted}")
    if array.padded_shape != array.shape:
        raise ValueError(f"{what}: array of shape {array.shape} is padded to {array.padded_shape}")
    block = array.format.levels[0].block
    if array.block_size != (*(1,) * (array.ndim - 1), block):
        raise ValueError(
            f"{what}: array has blocks of {array.block_size}, wanted {block} along the last of {array.ndim} axes"
        )
    elements = array.elements
    if not (isinstance(elements, NarrowArray) and elements.axis == -1):
        codes = elements.codes() if isinstance(elements, NarrowArray) else elements
        if codes.dtype == np.uint8:
            elements = NarrowArray.from_codes(codes, DType.E2M1)
        else:
            elements = NarrowArray.pack(codes, DType.E2M1)
    scales = array.scales.unswizzle() if isinstance(array.scales, SwizzledArray) else array.scales
    return elements.data, scales.view(np.uint8)


def _check_dtype(name: str, array: object, *wanted: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray | jax.Array):
        raise TypeError(f"{name} must be a NumPy or JAX array, got {type(array).__name__}")
    if array.dtype not in wanted:
        raise TypeError(
            f"{name} has dtype {array.dtype}, wanted {' or '.join(dtype.name for dtype in wanted)}"
        )


def _unknown(name: str, known: Mapping[str, Any]) -> KeyError:
    # difflib is slow on long and on very many names.
    candidates = islice((other for other in known if len(other) <= 128), 4096)
    near = difflib.get_close_matches(name[:128], candidates)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    return KeyError(f"no tensor {name!r}{hint}")
