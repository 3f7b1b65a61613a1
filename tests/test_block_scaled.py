"""`BlockScaledArray`: construction, values, moves of planes, and every transformation of JAX."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import block_oracle
import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dtype_samples import block_scaled

from jaxquant import DType, Level, Whole
from jaxquant.arrays import BlockScaledArray, NarrowArray, quantize_blocks, swizzle

pytestmark = pytest.mark.arrays

ALL = tuple(block_oracle.ELEMENTS)
E8M0 = ml_dtypes.float8_e8m0fnu
TWO_LEVELS = block_scaled("test.TwoLevels", DType.E2M1, [Level(DType.E4M3, 16), Level(DType.E8M0, 8)])


@pytest.fixture(params=[np.asarray, jnp.asarray], ids=["numpy", "jax"])
def library(request):
    return request.param


def sample(name, shape=(4, 64), library=np.asarray, seed=0, **options) -> BlockScaledArray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)
    return quantize_blocks(library(x.astype(np.float32)), DType.from_name(name), **options)


def leaves_equal(a, b) -> bool:
    left, right = jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b)
    return jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype
        for x, y in zip(left, right, strict=True)
    )


@jax.jit
def dequantized(array):
    return array.dequantize()


def values(array) -> np.ndarray:
    return np.asarray(array.dequantize())


# Construction


class TestConstruction:
    def test_the_default_block_size_is_the_quotient(self, library):
        array = BlockScaledArray(
            library(np.ones((1, 3, 2), np.float32)), library(np.ones((1, 6, 8), np.int8))
        )
        assert (array.block_size, array.shape, array.ndim, array.size) == ((1, 2, 4), (1, 6, 8), 3, 48)
        assert array.nbytes == 6 * 4 + 48
        assert len(array) == 1

    @pytest.mark.parametrize(
        ("block_size", "shown"),
        [(4, (1, 4)), ((4,), (1, 4)), ((1, 4), (1, 4)), ((np.int64(1), 4), (1, 4))],
        ids=str,
    )
    def test_block_sizes_cover_the_last_axes(self, block_size, shown):
        if not isinstance(block_size, int):
            block_size = tuple(int(size) for size in block_size)
        array = BlockScaledArray(np.ones((2, 2), np.float32), np.ones((2, 8), np.int8), block_size)
        assert array.block_size == shown

    def test_whole(self, library):
        scales, elements = library(np.float32([[2.0], [3.0]])), library(np.int8([[1, 2], [3, 4]]))
        array = BlockScaledArray(scales, elements, (1, Whole))
        assert array.block_size == (1, Whole)
        assert values(array).tolist() == [[2, 4], [9, 12]]
        both = BlockScaledArray(scales[:1], elements, (Whole, Whole))
        assert values(both).tolist() == [[2, 4], [6, 8]]

    @pytest.mark.parametrize(
        ("scales", "elements", "block_size", "error", "message"),
        [
            ((), np.ones(4, np.int8), None, ValueError, "at least one level"),
            (np.ones(2, np.float32), [1, 2], None, TypeError, "elements must be an array"),
            (1.0, np.ones(2, np.int8), None, TypeError, r"scales\[0\] must be an array"),
            (None, np.ones(2, np.int8), None, TypeError, r"scales\[0\]"),
            (np.ones(2, np.float32), jnp.ones(4, jnp.int8), None, TypeError, "all NumPy or all JAX"),
            (np.ones(2, np.float32), np.ones((2, 4), np.int8), None, ValueError, r"\(2,\).*\(2, 4\)"),
            (
                np.ones((2, 3), np.float32),
                np.ones((2, 64), np.int8),
                None,
                ValueError,
                r"64 .*\(2, 64\).*\(2, 3\)",
            ),
            (np.ones((2, 0), np.float32), np.ones((2, 4), np.int8), None, ValueError, "extent 0"),
            (np.ones((2, 2), np.float32), np.ones((2, 4), np.int8), (1, 4), ValueError, "block_size 4"),
            (
                np.ones((2, 2), np.float32),
                np.ones((2, 4), np.int8),
                (1, Whole),
                ValueError,
                "block_size Whole",
            ),
            (np.ones((2, 2), np.float32), np.ones((2, 4), np.int8), (1, 1, 2), ValueError, "more axes"),
            (np.ones((2, 2), np.float32), np.ones((2, 4), np.int8), (0,), ValueError, "at least 1"),
            (np.ones((2, 2), np.float32), np.ones((2, 4), np.int8), (2.0,), TypeError, "float"),
            (np.ones((2, 2), np.float32), np.ones((2, 4), np.int8), (True, 2), TypeError, "bool"),
            (
                (np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)),
                np.ones((2, 8), np.int8),
                None,
                ValueError,
                r"scales\[0\] \(2, 4\).*scales\[1\] \(2, 3\)",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refused(self, scales, elements, block_size, error, message):
        with pytest.raises(error, match=message):
            BlockScaledArray(scales, elements, block_size)

    def test_a_remainder_shows_both_shapes(self):
        with pytest.raises(ValueError, match=r"\(2, 70\).*\(2, 3\)"):
            BlockScaledArray(np.ones((2, 3), np.float32), np.ones((2, 70), np.int8))

    @pytest.mark.parametrize(
        "dtype", [np.bool_, ml_dtypes.float8_e4m3fn, np.complex64], ids=lambda t: t.__name__
    )
    def test_a_value_type_is_wide_or_an_integer(self, dtype):
        with pytest.raises(TypeError, match="dtype must be"):
            BlockScaledArray(np.ones(2, np.float32), np.ones(2, np.int8), dtype=dtype)

    @pytest.mark.parametrize(
        ("elements", "scales", "dtype"),
        [
            (np.int8, np.float32, np.float32),
            (ml_dtypes.float8_e4m3fn, np.float16, np.float32),
            (np.float16, E8M0, np.float32),
            (np.float16, np.float16, np.float16),
            (ml_dtypes.bfloat16, ml_dtypes.bfloat16, ml_dtypes.bfloat16),
            (ml_dtypes.bfloat16, np.float16, np.float32),
            (np.int16, np.int32, np.int32),
            (np.int32, np.float32, np.float32),
        ],
        ids=lambda t: np.dtype(t).name,
    )
    def test_the_default_value_type(self, elements, scales, dtype):
        array = BlockScaledArray(np.ones(2, scales), np.ones(4, elements))
        assert array.dtype == np.dtype(dtype)
        assert isinstance(array.dtype, np.dtype)
        assert (array.element_dtype, array.scale_dtype) == (np.dtype(elements), np.dtype(scales))
        assert array[1].dtype == array.dtype


class TestFormat:
    def test_planes_of_the_format(self, library):
        rng = np.random.default_rng(0)
        packed = NarrowArray.from_codes(library(rng.integers(0, 16, (2, 64)).astype(np.uint8)), DType.E2M1)
        scales = library(np.full((2, 2), 127, np.uint8).view(E8M0))
        array = BlockScaledArray(scales, packed, format=DType.MXFP4)
        assert (array.format, array.dtype, array.element_dtype) == (
            DType.MXFP4,
            np.dtype(np.float32),
            np.dtype(ml_dtypes.float4_e2m1fn),
        )
        assert exact.same_bits(values(array), np.asarray(packed.unpack()))
        shown = array.representation()
        assert shown.level_shapes == ((2, (32, 2)), (2, 2))
        assert [plane.layout.stride for plane in shown.planes] == [(64, (1, 32)), (2, 1)]
        assert [edge.stride for edge in shown.adjacent_layouts] == [(1, (0, 2))]
        assert shown.planes[0].array is packed

    @pytest.mark.parametrize(
        ("scales", "elements", "format", "error", "message"),
        [
            (np.ones((2, 2), E8M0), np.ones((2, 64), np.int8), "MXINT8", TypeError, "BlockScaledDType"),
            (np.ones((2, 2), E8M0), np.ones((2, 64), np.int8), DType.Int8, TypeError, "BlockScaledDType"),
            (np.ones((2, 2), E8M0), np.ones((2, 64), np.int8), DType.MXFP8_E4M3, ValueError, "E4M3.*int8"),
            (
                np.ones((2, 2), np.float32),
                np.ones((2, 64), np.int8),
                DType.MXINT8,
                ValueError,
                "E8M0.*float32",
            ),
            (np.ones((2, 2), E8M0), np.ones((2, 64), np.int8), DType.NVFP4, ValueError, "2 levels"),
            (np.ones((2, 4), E8M0), np.ones((2, 64), np.int8), DType.MXINT8, ValueError, "LevelExtent"),
            (np.ones((1, 2), E8M0), np.ones((2, 64), np.int8), DType.MXINT8, ValueError, "LevelExtent"),
            (np.ones((0, 2), E8M0), np.ones((0, 64), np.int8), DType.MXFP8_E4M3, ValueError, "E4M3.*int8"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refused(self, scales, elements, format, error, message):
        with pytest.raises(error, match=message):
            BlockScaledArray(scales, elements, format=format)

    def test_a_free_combination_has_no_representation(self):
        with pytest.raises(ValueError, match="no registered dtype"):
            BlockScaledArray(np.ones(2, np.float32), np.ones(4, np.int8)).representation()

    def test_levels_over_levels(self, library):
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 16, (2, 256)).astype(np.uint8)
        inner = rng.integers(0, 120, (2, 16)).astype(np.uint8)
        outer = rng.integers(0, 255, (2, 2)).astype(np.uint8)
        array = BlockScaledArray(
            (library(inner.view(ml_dtypes.float8_e4m3fn)), library(outer.view(E8M0))),
            NarrowArray.from_codes(library(codes), DType.E2M1),
            format=TWO_LEVELS,
        )
        expected = [
            [
                block_oracle.decoded(
                    "MXFP4",
                    int(codes[i, j]),
                    ("e4m3", int(inner[i, j // 16])),
                    ("e8m0", int(outer[i, j // 128])),
                )
                for j in range(256)
            ]
            for i in range(2)
        ]
        assert exact.same_bits(values(array), np.array(expected, np.uint32).view(np.float32))
        assert array.representation().level_shapes == ((2, (16, 16)), (2, (8, 2)), (2, 2))

    def test_int8_with_and_without_the_format(self, library):
        elements = library(np.int8([[-128, -127, 64, 1] * 8]))
        scales = library(np.uint8([[128]]).view(E8M0))
        fixed = BlockScaledArray(scales, elements, format=DType.MXINT8)
        assert values(fixed)[0, :4].tolist() == [-4, -3.96875, 2, 0.03125]
        assert values(BlockScaledArray(scales, elements))[0, :4].tolist() == [-256, -254, 128, 2]

    @pytest.mark.parametrize("name", ALL)
    def test_uint8_codes(self, name):
        unpacked = sample(name, packed=False)
        assert unpacked.elements.dtype == np.uint8
        assert unpacked.element_dtype == DType.from_name(name).element.numpy_dtype
        again = BlockScaledArray(unpacked.levels, unpacked.elements, format=unpacked.format)
        assert exact.same_bits(values(again), values(sample(name)))

    @pytest.mark.parametrize("name", ALL)
    def test_reconstruction_checks_and_keeps_everything(self, name, library):
        array = sample(name, library=library)
        again = BlockScaledArray(array.levels, array.elements, array.block_size, format=array.format)
        assert leaves_equal(array, again)


def test_swizzled_scales(library):
    dense = sample("MXFP8_E4M3", (200, 256), library)
    tiled = BlockScaledArray(swizzle(dense.scales, "f8_4x128"), dense.elements, format=DType.MXFP8_E4M3)
    assert tiled.block_size == (1, 32)
    assert tiled.scale_dtype == np.dtype(E8M0)
    assert exact.same_bits(values(tiled), values(dense))
    assert tiled.representation().level_shapes == dense.representation().level_shapes
    assert exact.same_bits(values(tiled.T), values(dense).T)
    part = tiled.block_slice(slice(3, 9), slice(32, 96))
    assert exact.same_bits(values(part), values(dense)[3:9, 32:96])


# Values

SCALARS = {
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
SCALE_SCALARS = {
    "e8m0": E8M0,
    "e4m3": ml_dtypes.float8_e4m3fn,
    **{k: SCALARS[k] for k in ("bfloat16", "float16", "float32")},
}


def random_plane(rng, scalar, shape):
    """Any bits of a scalar type."""
    size = np.dtype(scalar).itemsize
    bits = rng.integers(0, 1 << (8 * size), shape).astype(f"u{size}")
    if np.dtype(scalar).name in ("int4", "float4_e2m1fn"):
        bits = bits & 15
        if scalar is ml_dtypes.int4:
            return (bits.astype(np.int8) - 8).astype(scalar)
    return bits.view(scalar)


@pytest.mark.parametrize("scale", SCALE_SCALARS)
@pytest.mark.parametrize("element", SCALARS)
def test_free_combinations_equal_one_rational_product(rng, library, element, scale):
    elements = random_plane(rng, SCALARS[element], (3, 64))
    scales = random_plane(rng, SCALE_SCALARS[scale], (3, 4))
    with np.errstate(all="ignore"):
        left = elements.astype(np.float32).view(np.uint32)
        right = np.repeat(scales.astype(np.float32), 16, -1).view(np.uint32)
    expected = [exact.rational_multiply(int(a), int(b)) for a, b in zip(left.flat, right.flat, strict=True)]
    array = BlockScaledArray(library(scales), library(elements))
    want = np.array(expected, np.uint32).view(np.float32).reshape(3, 64)
    assert exact.same_bits(values(array), want)
    assert exact.same_bits(np.asarray(dequantized(array)), want)


@pytest.mark.parametrize("value_type", [np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("element", ["int8", "e4m3", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", ["e8m0", "float16", "float32"])
def test_the_value_type_converts_both_and_rounds_the_product_once(rng, library, element, scale, value_type):
    elements = random_plane(rng, SCALARS[element], (3, 64))
    scales = random_plane(rng, SCALE_SCALARS[scale], (3, 4))
    array = BlockScaledArray(library(scales), library(elements), dtype=value_type)
    with np.errstate(all="ignore"):
        left, right = (
            elements.astype(np.float32).astype(value_type),
            scales.astype(np.float32).astype(value_type),
        )
        product = left.astype(np.float64) * np.repeat(right, 16, -1).astype(np.float64)
        # Exact in float64; rounded once by way of its neighbours, as float64 to bfloat16 goes through float32.
        expected = rounded_once(product, value_type)
    assert exact.same_bits(np.asarray(array), expected)
    assert exact.same_bits(np.asarray(array[1]), expected[1])
    assert exact.same_bits(np.asarray(jax.jit(lambda a: a[:, ::3])(array)), expected[:, ::3])


def rounded_once(x, dtype):
    with np.errstate(all="ignore"):
        single = x.astype(np.float32)
        # Round to odd, so that rounding again is the same as rounding once.
        bits = single.view(np.uint32).astype(np.int64)
        too_far = abs(single.astype(np.float64)) > abs(x)
        bits = np.where(np.isfinite(x) & too_far, bits - 1, bits)
        truncated = bits.astype(np.uint32).view(np.float32)
        inexact = np.isfinite(x) & (truncated.astype(np.float64) != x)
        return (bits | inexact).astype(np.uint32).view(np.float32).astype(dtype)


def test_integer_value_types(library):
    array = BlockScaledArray(library(np.int32([3, -2])), library(np.int16([1, 2, 3, 4])))
    assert array.dtype == np.int32
    assert np.asarray(array).tolist() == [3, 6, -6, -8]
    assert array.dequantize().dtype == np.float32
    narrow = BlockScaledArray(
        library(np.int32([3, -2])),
        NarrowArray.pack(library(np.int32([1, 2, 3, -8])), ml_dtypes.int4),
        dtype=np.int32,
    )
    assert np.asarray(narrow).tolist() == [3, 6, -6, 16]


def test_float64_on_numpy():
    array = BlockScaledArray(np.float64([0.1]), np.float64([3.0, 7.0]))
    assert array.dtype == np.float64
    assert np.asarray(array).tolist() == [0.1 * 3.0, 0.1 * 7.0]
    with pytest.raises(TypeError, match="x64"):
        sample("MXFP4", library=jnp.asarray).dequantize(np.float64)
    with pytest.raises(TypeError, match="int32"):
        sample("MXFP4").dequantize(np.int32)


@pytest.mark.parametrize("name", ALL)
def test_indexing(name, library):
    array = sample(name, (3, 4, 64), library)
    dense = values(array)
    for index in (
        0,
        -1,
        (1, 2, 3),
        np.s_[1, :, 5],
        np.s_[..., 3:40:5],
        np.s_[:, None, 1],
        (np.array([0, 2]), np.array([1, 1])),
        np.s_[::-1],
    ):
        assert exact.same_bits(np.asarray(array[index]), dense[index])
    assert exact.same_bits(np.asarray(array), dense)
    assert exact.same_bits(np.asarray(array, np.float64), dense.astype(np.float64))
    assert exact.same_bits(np.asarray(array.astype(np.float16)), np.asarray(array.dequantize(np.float16)))
    with pytest.raises(IndexError):
        array[5] if library is np.asarray else array[0, 0, 0, 0]
    with pytest.raises(ValueError, match="copy"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("name", ALL)
def test_numpy_and_jax_hold_the_same_bytes(name):
    assert leaves_equal(sample(name), sample(name, library=jnp.asarray))
    assert isinstance(sample(name).dequantize(), np.ndarray)
    assert isinstance(sample(name, library=jnp.asarray).dequantize(), jax.Array)
    assert isinstance(sample(name, library=jnp.asarray)[0], jax.Array)


def test_repr(library):
    array = quantize_blocks(library(np.float32([[0.5, -6.0] * 16])), DType.MXFP4)
    text = repr(array)
    assert "0.5" in text
    assert "-6." in text
    assert "format=MXFP4" in text
    assert "block_size=(1, 32)" in text
    shown = []
    jax.jit(lambda a: shown.append(repr(a)))(array)
    assert shown == ["BlockScaledArray(shape=(1, 32), block_size=(1, 32), format=MXFP4, dtype=float32)"]
    assert "shape=(1, 32)" in repr(jax.eval_shape(lambda a: a, array))


# Planes moved together


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("axis", [-1, -2], ids=str)
def test_transpose(name, axis, library):
    array = sample(name, (2, 32, 64), library, axis=axis)
    dense = values(array)
    for order in ((0, 2, 1), (2, 0, 1), (-1, -2, -3)):
        moved = array.transpose(order)
        assert exact.same_bits(values(moved), dense.transpose(order))
        assert moved.block_size == tuple(array.block_size[i] for i in order)
        assert moved.representation().dtype is array.format
        assert leaves_equal(moved.transpose(tuple(np.argsort([i % 3 for i in order]))), array)
    assert exact.same_bits(values(array.T), dense.T)
    assert exact.same_bits(values(array.mT), np.swapaxes(dense, -1, -2))
    assert exact.same_bits(values(array.swapaxes(0, 1)), np.swapaxes(dense, 0, 1))
    assert array.nbytes == array.T.nbytes
    with pytest.raises(ValueError, match="permutation"):
        array.transpose(0, 1)
    with pytest.raises(ValueError, match="out of range"):
        array.swapaxes(0, 3)


@pytest.mark.parametrize("name", ALL)
def test_reshape(name, library):
    array = sample(name, (2, 6, 64), library)
    dense = values(array)
    for shape in ((12, 64), (2, 2, 3, 64), (768,), (3, 256), (24, 32), (-1, 64), (1, 2, 6, 64)):
        moved = array.reshape(shape)
        assert exact.same_bits(values(moved), dense.reshape(shape))
        assert moved.representation().dtype is array.format
    assert array.reshape(4, 3, 64).shape == (4, 3, 64)
    for shape in ((2, 48, 8), (8, 96, 1), (2, 6, 8, 8)):
        with pytest.raises(ValueError, match="split"):
            array.reshape(shape)
    with pytest.raises(ValueError, match="768 elements"):
        array.reshape(5, -1)
    columns = sample(name, (2, 64, 3), library, axis=1)
    assert exact.same_bits(values(columns.reshape(1, 2, 64, 3)), values(columns).reshape(1, 2, 64, 3))
    with pytest.raises(ValueError, match="split"):
        columns.reshape(2, 192)
    with pytest.raises(ValueError, match="padded"):
        sample(name, (2, 40), library, pad=True).reshape(80)


@pytest.mark.parametrize("name", ALL)
def test_block_slice(name, library):
    array = sample(name, (6, 128), library)
    dense = values(array)
    for slices in (
        (slice(1, 4),),
        (slice(None), slice(32, 96)),
        (slice(2, 2),),
        (slice(-2, None), slice(None, 64)),
    ):
        part = array.block_slice(*slices)
        assert isinstance(part, BlockScaledArray)
        assert exact.same_bits(values(part), dense[slices])
        assert part.format is array.format
    with pytest.raises(ValueError, match="splits a block"):
        array.block_slice(slice(None), slice(8, 32))
    with pytest.raises(ValueError, match="step"):
        array.block_slice(slice(None, None, 2))
    with pytest.raises(TypeError, match="int"):
        array.block_slice(1)
    with pytest.raises(IndexError, match="3 slices"):
        array.block_slice(slice(None), slice(None), slice(None))
    ragged = sample(name, (6, 70), library, pad=True)
    assert ragged.block_slice(slice(0, 2)).shape == (2, 70)
    assert exact.same_bits(values(ragged.block_slice(slice(0, 2), slice(0, 64))), values(ragged)[:2, :64])
    tail = ragged.block_slice(slice(0, 2), slice(64, None))
    assert exact.same_bits(values(tail), values(ragged)[:2, 64:])


@pytest.mark.parametrize("name", [name for name in ALL if name != "NVFP4"])
def test_concatenate(name, library):
    a, b = sample(name, (2, 64), library), sample(name, (3, 64), library, seed=1)
    joined = BlockScaledArray.concatenate([a, b])
    assert exact.same_bits(values(joined), np.concatenate([values(a), values(b)]))
    assert joined.representation().dtype is a.format
    wide = BlockScaledArray.concatenate([a, sample(name, (2, 96), library)], axis=-1)
    assert wide.shape == (2, 160)
    assert exact.same_bits(values(wide)[:, :64], values(a))
    columns = [sample(name, (64, 2), library, axis=0, seed=i) for i in range(2)]
    side = BlockScaledArray.concatenate(columns, axis=1)
    assert exact.same_bits(values(side), np.concatenate([values(c) for c in columns], 1))
    for bad, message in (
        ([], "at least one"),
        ([a, sample(name, (2, 32), library)], "does not fit"),
        ([a, sample("NVFP4", (2, 64), library)], "another kind"),
        ([a, sample(name, (64, 2), library, axis=0)], "another kind"),
    ):
        with pytest.raises(ValueError, match=message):
            BlockScaledArray.concatenate(bad)
    with pytest.raises(TypeError, match="ndarray"):
        BlockScaledArray.concatenate([a, np.ones((2, 64))])
    with pytest.raises(ValueError, match="out of range"):
        BlockScaledArray.concatenate([a, b], axis=2)
    ragged = sample(name, (2, 40), library, pad=True)
    assert BlockScaledArray.concatenate([ragged, ragged]).shape == (4, 40)
    with pytest.raises(ValueError, match="padded"):
        BlockScaledArray.concatenate([ragged, ragged], axis=1)


def test_nvfp4_has_one_scale_that_cannot_be_joined():
    a = sample("NVFP4")
    with pytest.raises(ValueError, match="does not continue"):
        BlockScaledArray.concatenate([a, a])


# Transformations


def test_treedefs_are_equal_hashable_and_hold_no_leading_sizes():
    a, b = sample("MXFP4", (2, 64)), sample("MXFP4", (7, 64), seed=3)
    one, other = jax.tree_util.tree_structure(a), jax.tree_util.tree_structure(b)
    assert one == other
    assert hash(one) == hash(other)
    assert jax.tree_util.tree_structure(sample("MXFP4", (2, 3, 64))) == one
    built = BlockScaledArray(a.scales, a.elements, format=DType.MXFP4)
    assert jax.tree_util.tree_structure(built) == one
    assert jax.tree_util.tree_structure(sample("MXFP4", (2, 64), axis=-1, block_shape=(1, 16))) != one


@pytest.mark.parametrize("name", ALL)
def test_one_trace_for_equal_static_data(name):
    traced = []

    @jax.jit
    def run(array):
        traced.append(array.format)
        return array.dequantize()

    for seed in range(3):
        array = sample(name, library=jnp.asarray, seed=seed)
        assert exact.same_bits(np.asarray(run(array)), values(array))
    run(BlockScaledArray(array.levels, array.elements, format=array.format))
    run(pickle.loads(pickle.dumps(array)))
    assert traced == [DType.from_name(name)]


@pytest.mark.parametrize("name", ALL)
class TestTransformations:
    def test_jit(self, name, library):
        array = sample(name, library=library)
        assert leaves_equal(jax.jit(lambda a: a)(array), array)
        assert leaves_equal(jax.jit(lambda a: a.T)(array), array.T)

    def test_vmap(self, name):
        array = sample(name, (3, 4, 64), jnp.asarray) if name != "NVFP4" else self.stacked(name)
        got = jax.vmap(lambda a: a.dequantize())(array)
        assert exact.same_bits(np.asarray(got), values(array))
        moved = jax.vmap(lambda a: a.T, out_axes=0)(array)
        assert exact.same_bits(values(moved), np.swapaxes(values(array), 1, 2))
        if name != "NVFP4":
            nested = jax.vmap(jax.vmap(lambda a: a.dequantize()))(array)
            assert exact.same_bits(np.asarray(nested), values(array))
        last = jax.vmap(lambda a: a.dequantize(), out_axes=-1)(array)
        assert exact.same_bits(np.asarray(last), np.moveaxis(values(array), 0, -1))

    def stacked(self, name):
        layers = [sample(name, (4, 64), jnp.asarray, seed=seed) for seed in range(3)]
        return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *layers)

    def test_out_axes_of_an_array(self, name):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32))
        middle = jax.vmap(lambda x: quantize_blocks(x, DType.from_name(name)), out_axes=1)(x)
        assert middle.shape == (4, 3, 64)
        assert exact.same_bits(
            values(middle), np.stack([values(quantize_blocks(part, DType.from_name(name))) for part in x], 1)
        )

    def test_scan_over_layers(self, name):
        layers = self.stacked(name)
        assert layers.shape == (3, 4, 64)

        def step(carry, layer):
            return carry + 1, layer.dequantize()

        count, got = jax.lax.scan(step, 0, layers)
        assert int(count) == 3
        for i in range(3):
            assert exact.same_bits(np.asarray(got[i]), values(sample(name, (4, 64), seed=i)))
        _, same = jax.lax.scan(lambda carry, layer: (carry, layer), 0, layers)
        assert leaves_equal(same, layers)
        carried, _ = jax.lax.scan(
            lambda carry, _: (carry, None), sample(name, library=jnp.asarray), None, length=2
        )
        assert leaves_equal(carried, sample(name))

    def test_stacks_of_leading_axes(self, name):
        layers = self.stacked(name)
        assert layers.block_size == (1, 1, DType.from_name(name).levels[0].block)
        item = jax.tree_util.tree_map(lambda leaf: leaf[1], layers)
        assert leaves_equal(item, sample(name, (4, 64), seed=1))

    def test_grad_with_a_constant(self, name):
        array = sample(name, (64, 4), jnp.asarray, axis=0)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32))
        gradient = jax.grad(lambda x: (x @ array).sum())(x)
        expected = np.broadcast_to(values(array).astype(np.float64).sum(1), (2, 64))
        np.testing.assert_allclose(np.asarray(gradient), expected, rtol=1e-5, atol=1e-3)
        by_jit = jax.jit(jax.grad(lambda x, w: (x @ w).sum()))(x, array)
        np.testing.assert_allclose(np.asarray(by_jit), expected, rtol=1e-5, atol=1e-3)

    def test_eval_shape(self, name):
        array = sample(name, library=jnp.asarray)
        shown = jax.eval_shape(lambda a: a.T, array)
        assert (shown.shape, shown.format, shown.dtype) == ((64, 4), array.format, array.dtype)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree_util.tree_leaves(shown))
        dense = jax.eval_shape(lambda a: a.dequantize(), array)
        assert (dense.shape, dense.dtype) == ((4, 64), np.float32)

    def test_tree_map_and_placeholders(self, name):
        array = sample(name, library=jnp.asarray)
        assert leaves_equal(jax.tree_util.tree_map(lambda leaf: leaf, array), array)
        count = len(jax.tree_util.tree_leaves(array))
        assert count == 1 + len(DType.from_name(name).levels)
        empty = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(array), [None] * count)
        assert empty.format is array.format
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(array)]
        assert paths[0] == ".levels[0]"
        assert paths[-1].startswith(".elements")

    def test_device_put(self, name):
        array = jax.device_put(sample(name), jax.devices()[0])
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(array))
        assert leaves_equal(array, sample(name))

    def test_pickle_and_copy(self, name, library):
        for array in (sample(name, library=library), sample(name, (4, 40), library, pad=True)):
            back = pickle.loads(pickle.dumps(array))
            assert leaves_equal(back, array)
            assert back.format is array.format
            assert back.shape == array.shape
            assert leaves_equal(copy.deepcopy(array), array)
        whole = BlockScaledArray(np.ones((2, 1), np.float32), np.ones((2, 4), np.int8), (1, Whole))
        assert pickle.loads(pickle.dumps(whole)).block_size[1] is Whole


def test_arrays_are_immutable():
    array = sample("MXFP4")
    for name in ("elements", "levels", "format", "dtype"):
        with pytest.raises(AttributeError):
            setattr(array, name, None)


SHARDED = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxquant import DType
from jaxquant.arrays import block_dot, quantize_blocks
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
x = rng.standard_normal((16, 64)).astype(np.float32)
w = quantize_blocks(rng.standard_normal((64, 24)).astype(np.float32), DType.MXFP8_E4M3, axis=0)
for name in ("MXFP8_E4M3", "MXFP6_E3M2", "MXFP4", "MXINT8"):
    dtype = DType.from_name(name)
    expected = quantize_blocks(x, dtype)
    mapped = jax.jit(jax.shard_map(lambda x: quantize_blocks(x, dtype), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    got = mapped(x)
    assert got.shape == (16, 64)
    for a, b in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
        assert len(a.sharding.device_set) == 8
    decode = jax.jit(jax.shard_map(lambda a: a.dequantize(), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    assert np.asarray(decode(got)).tobytes() == expected.dequantize().tobytes(), name
    placed = jax.device_put(expected, NamedSharding(mesh, P("d")))
    assert np.asarray(jax.jit(lambda a: a.dequantize())(placed)).tobytes() == expected.dequantize().tobytes()
    dot = jax.shard_map(lambda a, w: block_dot(a, w), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    np.testing.assert_allclose(np.asarray(dot(got, w)), block_dot(expected, w), rtol=1e-5, atol=1e-5)
ts = jnp.float32(1.0)
mapped = jax.shard_map(
    lambda x, ts: quantize_blocks(x, DType.NVFP4, tensor_scale=ts).dequantize(),
    mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
assert np.asarray(mapped(x, ts)).tobytes() == quantize_blocks(x, DType.NVFP4, tensor_scale=1.0).dequantize().tobytes()
mapped = jax.shard_map(lambda x: quantize_blocks(x, DType.NVFP4), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
shards = mapped(x)
assert shards.levels[1].shape == (8, 1)
"""


def test_shard_map_on_eight_devices():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["MXFP4", "MXFP8_E4M3"])
def test_a_large_weight_is_as_small_as_promised(name):
    dtype = DType.from_name(name)
    shape = jax.eval_shape(
        lambda x: quantize_blocks(x, dtype), jax.ShapeDtypeStruct((14336, 4096), np.float32)
    )
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(shape))
    assert 8 * stored == dtype.bits_per_element * 14336 * 4096
