"""The block kernels of every instruction set and their jnp twin, against NumPy's integer code.

That code is held to rational arithmetic and golden vectors elsewhere; here it meets every element code under
every scale byte, blocks that lie side by side in widths that fill no vector, and what only kernels have: pieces,
outer scales of several groups, streams.
"""

from __future__ import annotations

import hlo
import implementations
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant import DType
from jaxquant.arrays import BlockScaledArray, NarrowArray, quantize_blocks
from jaxquant.ops import blocks

MX = ("MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E3M2", "MXFP6_E2M3", "MXFP4", "MXINT8")
FORMATS = (*MX, "NVFP4")
KERNELS = tuple(name for name in implementations.IMPLEMENTATIONS if name != "fallback")
each_kernel = pytest.mark.parametrize("implementation", KERNELS)
each_implementation = pytest.mark.parametrize("implementation", implementations.IMPLEMENTATIONS)
each_format = pytest.mark.parametrize("name", FORMATS)


def on_jax(array: BlockScaledArray) -> BlockScaledArray:
    return jax.tree_util.tree_map(jnp.asarray, array)


def assert_same(got, wanted) -> None:
    for one, other in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


def every_code_and_scale(name: str) -> BlockScaledArray:
    """[256, 1, codes]: row i has scale byte i; NVFP4 with an outer scale that makes some products subnormal."""
    dtype = getattr(DType, name)
    bits = dtype.element.bits
    codes = np.tile(np.arange(1 << bits, dtype=np.uint8), 1 if bits > 4 else 32 >> bits)
    elements = np.broadcast_to(codes, (256, codes.size))
    if bits < 8:
        elements = NarrowArray.from_codes(elements, dtype.element)
    else:
        elements = np.ascontiguousarray(elements).view(dtype.element.numpy_dtype)
    scales = np.repeat(np.arange(256, dtype=np.uint8), codes.size // dtype.levels[0].block).reshape(256, -1)
    levels = (scales.view(dtype.levels[0].scale.numpy_dtype),)
    if name == "NVFP4":
        levels = (*levels, np.full((1, 1), 1.2345e-38, np.float32))
    return BlockScaledArray(levels, elements, format=dtype)


@each_implementation
@each_format
def test_every_code_under_every_scale(name, implementation):
    array = every_code_and_scale(name)
    with implementations.run_on(implementation):
        got = np.asarray(on_jax(array).dequantize())
    np.testing.assert_array_equal(got.view(np.uint32), array.dequantize().view(np.uint32))


@each_implementation
@pytest.mark.parametrize(
    "outer", [0.0, -0.0, -1.5, 3e38, 1e-45, np.inf, -np.inf, np.nan, -np.nan], ids=lambda x: f"outer={x}"
)
def test_any_outer_scale(outer, implementation):
    array = every_code_and_scale("NVFP4")
    array = BlockScaledArray((array.scales, np.full((1, 1), outer, np.float32)), array.elements)
    with implementations.run_on(implementation):
        got = np.asarray(on_jax(array).dequantize())
    np.testing.assert_array_equal(got.view(np.uint32), array.dequantize().view(np.uint32))


def awkward(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All magnitudes, ties, blocks of zeros, subnormals, and a few that are not finite."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-150, 126, shape))
    x[rng.random(shape) < 0.3] = 0.0
    x = np.where(rng.random(shape) < 0.3, rng.integers(-48, 49, shape) / 8, x).astype(np.float32)
    x.reshape(-1)[:64] = 0.0
    x.reshape(-1)[rng.integers(0, x.size, 3)] = np.nan, np.inf, -np.inf
    return x


# Side by side: fewer than a vector, vectors with a rest, tiles with a rest.
SHAPES = {
    "along": ((3, 96), 1),
    "across 5": ((64, 5), 0),
    "across 130": ((2, 32, 130), 1),
    "middle": ((2, 64, 3, 7), 1),
}


# The twin compiles for seconds, and is the jnp code of test_quantize_blocks.py on other axes.
CASES = [
    *((name, case, kernel) for name in FORMATS for case in SHAPES for kernel in KERNELS),
    ("MXFP6_E3M2", "across 5", "fallback"),
    ("NVFP4", "across 5", "fallback"),
    ("MXINT8", "along", "fallback"),
]


@pytest.mark.parametrize(("name", "case", "implementation"), CASES)
def test_blocks_along_any_axis(name, case, implementation, rng):
    shape, axis = SHAPES[case]
    x = awkward(rng, shape)
    dtype = getattr(DType, name)
    for options in ({}, {"nonfinite": "saturate", "packed": False}):
        wanted = quantize_blocks(x, dtype, axis=axis, **options)
        with implementations.run_on(implementation):
            got = quantize_blocks(jnp.asarray(x), dtype, axis=axis, **options)
            decoded = np.asarray(on_jax(wanted).dequantize())
            assert_same(got, wanted)
        np.testing.assert_array_equal(decoded.view(np.uint32), wanted.dequantize().view(np.uint32))


@each_kernel
@pytest.mark.parametrize("rule", ["ceil", "rceil", "even"])
@pytest.mark.parametrize("name", MX)
def test_scale_rules(name, rule, implementation, rng):
    x = awkward(rng, (64, 32))
    x[:48] = np.exp2(rng.integers(-149, 128, (48, 1))) * rng.choice(
        [1, 1.5, 1.75, 1.875, 1.9375, 1.99], (48, 32)
    )
    wanted = quantize_blocks(x, getattr(DType, name), scale_rule=rule)
    with implementations.run_on(implementation):
        assert_same(quantize_blocks(jnp.asarray(x), getattr(DType, name), scale_rule=rule), wanted)


@each_kernel
@pytest.mark.parametrize("tensor_scale", [1e-45, 1e-38, 0.0007, 1.0, 3.3e4, 3e38])
def test_nvfp4_ties_and_tensor_scales(tensor_scale, implementation, rng):
    """Midpoints of elements and of scales, and their neighbours, where a quotient in floats goes astray."""
    scale = np.float32(tensor_scale)
    with np.errstate(all="ignore"):
        midpoints = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]) * scale
        steps = np.arange(-2, 3, dtype=np.int32)
        near = (midpoints.view(np.int32)[:, None] + steps).clip(0, 0x7F7FFFFF).reshape(-1).view(np.float32)
        x = (rng.choice(near, (256, 16)) * rng.choice([1, -1, 1.125, 448, 3, 2**-6], (256, 1))).astype(
            np.float32
        )
    wanted = quantize_blocks(x, DType.NVFP4, tensor_scale=tensor_scale)
    with implementations.run_on(implementation):
        assert_same(quantize_blocks(jnp.asarray(x), DType.NVFP4, tensor_scale=tensor_scale), wanted)


@each_implementation
@pytest.mark.parametrize("name", ["E2M1", "E2M3", "E3M2"])
@pytest.mark.parametrize(("shape", "axis"), [((48,), 0), ((3, 8192), 1), ((32, 5), 0)], ids=str)
def test_unpack(name, shape, axis, implementation, rng):
    codes = rng.integers(0, 256, shape, np.uint8)
    packed = NarrowArray.from_codes(codes, name, axis)
    with implementations.run_on(implementation):
        got = np.asarray(NarrowArray(jnp.asarray(packed.data), name, axis).unpack())
    np.testing.assert_array_equal(got.view(np.uint32), packed.unpack().view(np.uint32))


@each_kernel
def test_large_results_are_streamed(implementation, rng):
    """Above 16 MiB results pass the caches, and threads share them."""
    x = np.tile(rng.standard_normal((16, 4096), np.float32), (68, 1))
    with implementations.run_on(implementation):
        array = quantize_blocks(jnp.asarray(x), DType.MXFP4)
        got = np.asarray(array.dequantize())
        assert_same(array.scales[:16], quantize_blocks(x[:16], DType.MXFP4).scales)
    wanted = quantize_blocks(x[:16], DType.MXFP4).dequantize()
    np.testing.assert_array_equal(got.reshape(68, 16, 4096), np.broadcast_to(wanted, (68, 16, 4096)))


@each_implementation
def test_mapped_arrays_have_scales_of_their_own(implementation, rng):
    x = rng.standard_normal((3, 4, 8, 32)).astype(np.float32) * np.float32([1, 10, 100])[:, None, None, None]
    quantize = lambda x: quantize_blocks(x, DType.NVFP4)  # noqa: E731
    with implementations.run_on(implementation):
        mapped = jax.vmap(jax.vmap(quantize), 1, 1)(jnp.asarray(x))
        decoded = np.asarray(jax.vmap(jax.vmap(lambda array: array.dequantize()), 1, 1)(mapped))
    for i in range(3):
        for j in range(4):
            one = quantize(x[i, j])
            assert_same(jax.tree_util.tree_map(lambda leaf, i=i, j=j: leaf[i, j], mapped), one)
            np.testing.assert_array_equal(decoded[i, j], one.dequantize())


def test_an_operand_that_is_not_mapped_is_shared(rng):
    array = on_jax(quantize_blocks(rng.standard_normal((4, 32), np.float32), DType.NVFP4))
    scales = jnp.float32([1, 2, 3]).reshape(3, 1, 1)
    decode = lambda outer: BlockScaledArray((array.scales, outer), array.elements).dequantize()  # noqa: E731
    wanted = np.stack([np.asarray(decode(outer)) for outer in scales])
    np.testing.assert_array_equal(jax.vmap(decode)(scales), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_each_and_no_copy(name):
    dtype = getattr(DType, name)
    x = jnp.ones((4, 64), jnp.float32)
    with implementations.run_on(implementations.IMPLEMENTATIONS[0]):
        array = quantize_blocks(x, dtype)
        encoding = hlo.compiled(lambda x: quantize_blocks(x, dtype), x)
        decoding = hlo.compiled(lambda array: array.dequantize(), array)
    assert hlo.calls(encoding) == ["jaxquant_encode_blocks_v1"]
    assert hlo.calls(decoding) == ["jaxquant_decode_blocks_v1"]
    assert " copy(" not in decoding
    assert " fusion(" not in decoding


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rounding": "toward_zero"}, "another rounding"),
        ({"block_shape": (8,)}, "short blocks"),
        ({"block_shape": (2, 16)}, "blocks of two axes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_kernels_do_not_know_is_left_to_jnp(options, why, rng):
    x = awkward(rng, (4, 32))
    got = quantize_blocks(jnp.asarray(x), DType.MXFP4, **options)
    assert_same(got, quantize_blocks(x, DType.MXFP4, **options))
    text = hlo.compiled(lambda x: quantize_blocks(x, DType.MXFP4, **options), jnp.asarray(x))
    assert "jaxquant_encode_blocks_v1" not in hlo.calls(text)


def test_a_7b_weight_takes_four_and_a_quarter_bits_per_element():
    shape = (14336, 4096)
    weight = jax.eval_shape(
        lambda x: quantize_blocks(x, DType.MXFP4), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    leaves = jax.tree_util.tree_leaves(weight)
    assert all(leaf.dtype.itemsize == 1 for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) * 8 == 4.25 * shape[0] * shape[1]


@pytest.mark.parametrize("name", ["MXFP4", "MXFP6_E2M3", "NVFP4", "MXINT8"])
@pytest.mark.parametrize("library", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        (2, 40),
        (slice(1, 5), slice(33, 70)),
        (..., 95),
        (slice(None, None, -2), slice(90, 3, -7)),
        (slice(2, 2), 0),
        (0, slice(5, 6)),
        (slice(4, None), slice(-3, None)),
    ],
    ids=str,
)
def test_indexing_decodes_what_it_names(name, library, index, rng):
    array = quantize_blocks(rng.standard_normal((6, 96), np.float32), getattr(DType, name))
    wanted = array.dequantize()[index]
    got = jax.tree_util.tree_map(library, array)[index]
    assert np.shape(got) == np.shape(wanted)
    np.testing.assert_array_equal(got, wanted)


def test_a_row_is_decoded_alone(rng):
    array = on_jax(quantize_blocks(rng.standard_normal((64, 256), np.float32), DType.MXFP4))
    text = hlo.compiled(lambda array: array[5, 10:20], array)
    assert "f32[64,256]" not in text
    assert "f32[1,32]" in text


def test_bits_above_an_element_are_ignored():
    codes = jnp.uint8([[0xF7] * 16])
    array = blocks.decode(
        codes, jnp.uint8([127]), element=DType.E2M1, scale="E8M0", packed=False, across=False
    )
    np.testing.assert_array_equal(array, np.full((1, 16), 6, np.float32))
    assert ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max == 6
