"""Public bug reports of peer libraries: the cases of ``data/cases.json`` about scales, blocks and decoding.

Each test is named by the id of its case; the input and the right value are those of the file.
"""

# The ids of the cases are upper case.
# ruff: noqa: N802, SIM905

from __future__ import annotations

import json
import pickle
from pathlib import Path

import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant import DType, Whole
from jaxquant.arrays import BlockScaledArray, NarrowArray, quantize_blocks, swizzle
from jaxquant.arrays.quantize_blocks import scale_bytes
from jaxquant.casts import decode, encode

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "cases.json").read_text())}
FORMATS = [
    DType.MXFP8_E4M3,
    DType.MXFP8_E5M2,
    DType.MXFP6_E3M2,
    DType.MXFP6_E2M3,
    DType.MXFP4,
    DType.MXINT8,
    DType.NVFP4,
]
RULES = ["floor", "ceil", "rceil", "even"]


@pytest.fixture(params=[np.asarray, jnp.asarray], ids=["numpy", "jax"])
def library(request):
    return request.param


def codes(array):
    elements = array.elements
    return np.asarray(elements.codes() if isinstance(elements, NarrowArray) else elements.view(np.uint8))


def scales(array):
    return np.asarray(array.scales).view(np.uint8)


def bytes_of(amax, element, rule, library):
    return np.asarray(scale_bytes(library(np.float32(amax).view(np.uint32)), element, rule)).tolist()


def test_every_case_is_a_test_here_or_elsewhere():
    here = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(HERE) <= here
    assert set(HERE) | set(ELSEWHERE) == set(CASES)


HERE = """S01 S04 S05 S09 S10 S12 S14 Z01 Z04 Z07 Z09 F01 F03 W06 J02 J04 J07 J10 N01 N02 N04 R05""".split()
ELSEWHERE = (
    """S06 E01 E05 E06 E08 E10 E13 F06 W01 W05 W07 P01 P05 P06 P08 P09 J01 R01 R03 K01 K05 K06""".split()
)


def test_S01(library):
    x = np.float32([*range(1, 32), np.nextafter(np.float32(128), np.float32(0))])[None]
    array = quantize_blocks(library(x), DType.MXFP8_E5M2, scale_rule="floor")
    assert scales(array).tolist() == [[118]]
    assert codes(array)[0, -1] == 0x7B
    assert np.asarray(array.dequantize())[0, -1] == 112.0


def test_S04(library):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 2.0**-120
    array = quantize_blocks(library(x), DType.MXFP8_E4M3, scale_rule="rceil")
    assert scales(array).tolist() == [[0]]
    assert codes(array)[0, 0] == 0x70
    assert exact.same_bits(np.asarray(array.dequantize()), x)


def test_S05(library):
    # With elements of a largest exponent 0, a block's byte is its amax rounded up to a power of two.
    assert bytes_of([1.125, 1.25, 5.0, 1.0, 4.0], DType.Int8, "ceil", library) == [128, 128, 130, 127, 129]


def test_S09():
    byte = np.arange(255, dtype=np.uint8)
    expected = (byte.astype(np.uint32) << 23).view(np.float32)
    expected.view(np.uint32)[0] = 0x00400000
    ones = np.ones((255, 32), ml_dtypes.float8_e4m3fn)
    array = BlockScaledArray(byte.view(ml_dtypes.float8_e8m0fnu)[:, None], ones, format=DType.MXFP8_E4M3)
    for decoded in (array.dequantize(), jax.jit(lambda a: a.dequantize())(array)):
        assert exact.same_bits(np.asarray(decoded), np.repeat(expected[:, None], 32, 1))


def test_S10(library):
    assert bytes_of([6.99, 7.0, 3.5, 3.49], DType.E2M1, "even", library) == [127, 128, 127, 126]


def test_S12(library):
    amax = np.nextafter(np.float32(7), np.float32(8))
    assert bytes_of([amax], DType.E4M3, "rceil", library) == [122]
    golden = exact.load("golden_scale")
    for name, element in (("e4m3fn", DType.E4M3), ("e5m2", DType.E5M2), ("e2m1fn", DType.E2M1)):
        assert np.array_equal(bytes_of(golden["amax"], element, "rceil", library), golden[f"{name}_rceil"])


def test_S14(library):
    x = np.repeat(np.float32(2.0) ** (np.arange(64) // 32)[:, None], 32, 1).astype(np.float32)
    for dtype in FORMATS[:-1]:
        array = quantize_blocks(library(x), dtype, axis=0)
        assert array.scales.shape == (2, 32)
        assert (scales(array) == scales(array)[:, :1]).all()
        turned = quantize_blocks(library(np.ascontiguousarray(x.T)), dtype, axis=-1).T
        assert np.array_equal(scales(array), scales(turned))
        assert np.array_equal(codes(array), codes(turned))


def test_Z01(library):
    for dtype in FORMATS:
        for rule in RULES if dtype is not DType.NVFP4 else ["floor"]:
            zeros = library(np.zeros((2, 64), np.float32))
            eager = quantize_blocks(zeros, dtype, scale_rule=rule).dequantize()
            assert exact.same_bits(np.asarray(eager), np.zeros((2, 64), np.float32))
    jitted = jax.jit(lambda x: [quantize_blocks(x, dtype).dequantize() for dtype in FORMATS])
    for values in jitted(jnp.zeros((2, 64), jnp.float32)):
        assert exact.same_bits(np.asarray(values), np.zeros((2, 64), np.float32))


def test_Z04(library):
    array = quantize_blocks(library(np.zeros((2, 32), np.float32)), DType.NVFP4)
    assert np.asarray(array.levels[1]).tolist() == [[1.0]]
    assert exact.same_bits(np.asarray(array.dequantize()), np.zeros((2, 32), np.float32))


def test_Z07(library):
    x = np.ones((1, 32), np.float32)
    x[0, 3] = np.inf
    for dtype in FORMATS[:-1]:
        for rule in RULES:
            array = quantize_blocks(library(x), dtype, scale_rule=rule)
            assert scales(array).tolist() == [[255]]
            assert np.isnan(np.asarray(array.dequantize())).all()
    saturated = quantize_blocks(library(x), DType.MXFP8_E4M3, nonfinite="saturate")
    assert scales(saturated).tolist() == [[246]]


def test_Z09(library):
    x = library(np.full((1, 32), -0.0, np.float32))
    got = [codes(quantize_blocks(x, dtype))[0, 0] for dtype in FORMATS[:5]]
    assert got == [0x80, 0x80, 0x20, 0x20, 0x8]


def test_F01(library):
    values = np.asarray(decode(library(np.uint8([0, 1, 127, 254, 255])), DType.E8M0))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(values[4])


def test_F03(library):
    elements = NarrowArray.from_codes(library(np.uint8([[1, 2, 3, 4] * 8])), DType.E2M1)
    top = library(np.uint8([[254]]).view(ml_dtypes.float8_e8m0fnu))
    values = BlockScaledArray(top, elements, format=DType.MXFP4).dequantize()
    assert np.asarray(values)[0, :4].tolist() == [2.0**126, 2.0**127, 1.5 * 2.0**127, np.inf]


def test_W06(library):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    dense = quantize_blocks(library(x), DType.MXFP8_E4M3)
    assert dense.scales.shape == (64, 2)
    tiled = BlockScaledArray(swizzle(dense.scales, "f8_4x128"), dense.elements, format=dense.format)
    assert tiled.scales.storage.size == 512
    assert exact.same_bits(np.asarray(x @ tiled), np.asarray(x @ dense))


def test_J02():
    x = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32)
    a = quantize_blocks(jnp.asarray(x[0]), DType.MXFP4)
    b = quantize_blocks(jnp.asarray(x[1].T), DType.MXFP4, axis=0)
    expected = jnp.matmul(a.dequantize(), b.dequantize(), precision=jax.lax.Precision.HIGHEST)
    assert exact.same_bits(np.asarray(jax.jit(lambda a, b: a @ b)(a, b)), np.asarray(expected))


def test_J04():
    traces = []

    @jax.jit
    def run(array):
        traces.append(1)
        return array.dequantize()

    arrays = [quantize_blocks(jnp.full((2, 32), i + 1.0, jnp.float32), DType.MXFP4) for i in range(2)]
    for array in (*arrays, pickle.loads(pickle.dumps(arrays[0]))):
        run(array)
    assert traces == [1]
    trees = {jax.tree_util.tree_structure(array) for array in arrays}
    assert len(trees) == 1
    whole = BlockScaledArray(
        np.ones((1, 1), np.float32), np.ones((1, 4), np.int8), (1, Whole), dtype=np.float32
    )
    back = pickle.loads(pickle.dumps(whole))
    assert back.block_size == (1, Whole)
    assert pickle.loads(pickle.dumps(arrays[0])).format is DType.MXFP4


def test_J07(library):
    text = repr(quantize_blocks(library(np.float32([0.5, -6] * 16)), DType.MXFP4))
    assert "0.5" in text
    assert "-6" in text


def test_J10(rng):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    for dtype in (DType.MXFP6_E3M2, DType.MXFP6_E2M3):
        for packed in (True, False):
            device = jax.jit(lambda x, d=dtype, p=packed: quantize_blocks(x, d, packed=p))(x)
            host = quantize_blocks(x, dtype, packed=packed)
            assert exact.same_bits(np.asarray(device.dequantize()), host.dequantize())
            assert all(leaf.dtype.itemsize == 1 for leaf in jax.tree_util.tree_leaves(device))


def test_N01(library):
    x = np.float32([[5376] + [0] * 15])
    single = quantize_blocks(library(x), DType.NVFP4, tensor_scale=1.0)
    assert np.asarray(single.dequantize())[0, 0] == 2688
    assert np.asarray(quantize_blocks(library(x), DType.NVFP4).dequantize())[0, 0] == 5376


def test_N02(library):
    x = np.linspace(-8, 1, 16, dtype=np.float32)[None]
    array = quantize_blocks(library(x), DType.NVFP4)
    assert np.asarray(array.levels[1]).item() == np.float32(8) / np.float32(2688)


def test_N04(library):
    x = np.float32([[1e9] + [0] * 15])
    array = quantize_blocks(library(x), DType.NVFP4, tensor_scale=1.0)
    assert np.asarray(array.scales).astype(np.float32).tolist() == [[448.0]]


def test_R05(library):
    golden = exact.load("golden_pack")
    blocks = golden["gptoss_blocks"].reshape(3, 64)
    array = BlockScaledArray(
        library(golden["gptoss_scales"].view(ml_dtypes.float8_e8m0fnu)),
        NarrowArray(library(blocks), DType.E2M1),
        format=DType.MXFP4,
    )
    assert exact.same_bits(np.asarray(array.dequantize()), golden["gptoss_deq"])


def test_encoding_and_decoding_agree_on_codes(library):
    for dtype in FORMATS[:5]:
        all_codes = np.arange(1 << dtype.element.bits, dtype=np.uint8)
        finite = all_codes[np.isfinite(decode(all_codes, dtype.element))]
        assert np.array_equal(
            np.asarray(encode(decode(library(finite), dtype.element), dtype.element)), finite
        )
