"""Public bug reports of peer libraries: the cases of ``data/cases.json``.

Each test is named by the id of its case; the input and the right value are those of the file. ``run`` calls a
function on NumPy arrays, on JAX arrays, and under jit. Cases about files and other layouts in memory are in
``test_io.py``; `test_every_case_has_a_test` knows where each is.
"""

# The ids of the cases are upper case.
# ruff: noqa: N802

from __future__ import annotations

import ast
import json
import pickle
import re
from functools import partial
from pathlib import Path

import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import DType, Whole
from jaxquant.arrays import BlockScaledArray, NarrowArray, f8_4x128, quantize_blocks, swizzle
from jaxquant.casts import decode, encode
from jaxquant.quant import q4_k, q8_k

HERE = Path(__file__).parent
CASES = {case["id"]: case for case in json.loads((HERE / "data" / "cases.json").read_text())}
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
KINDS = [(dtype, rule) for dtype in FORMATS for rule in RULES if dtype is not DType.NVFP4 or rule == "floor"]
# A rule changes one constant of the program; each is compiled once, and on NumPy all of them run.
COMPILED_KINDS = [(dtype, rule) for dtype, rule in KINDS if rule == "floor" or dtype is DType.MXFP4]
PACK, QK, SWIZZLE = (exact.load(f"golden_{name}") for name in ("pack", "qk", "swizzle"))


def _on_host(function, *arrays):
    return function(*arrays)


def _on_device(function, *arrays):
    return function(*map(jnp.asarray, arrays))


def _under_jit(function, *arrays):
    return jax.jit(function)(*map(jnp.asarray, arrays))


@pytest.fixture(params=[_on_host, _on_device, _under_jit], ids=["numpy", "jax", "jit"])
def run(request):
    return request.param


@pytest.fixture(params=[_on_device, _under_jit], ids=["jax", "jit"])
def run_jax(request):
    """For operations of JAX alone."""
    return request.param


def quantized(run, x, dtype, **options):
    return run(partial(quantize_blocks, dtype=dtype, **options), x)


def in_every_kind(x):
    """float32 [2, 64] in every format under every rule; one shape, so that tests share what is compiled."""
    kinds = KINDS if isinstance(x, np.ndarray) else COMPILED_KINDS
    return {f"{d.name} {rule}": quantize_blocks(x, d, scale_rule=rule) for d, rule in kinds}


def decoded(array):
    return np.asarray(array.dequantize())


def codes(array):
    elements = array.elements
    return np.asarray(elements.codes() if isinstance(elements, NarrowArray) else elements.view(np.uint8))


def scales(array):
    return np.asarray(array.scales).view(np.uint8)


def scales_of(run, amax, dtype, rule):
    """The scale byte of blocks with these largest magnitudes."""
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 7] = amax
    return scales(quantized(run, x, dtype, scale_rule=rule))[:, 0].tolist()


def found_by_case():
    """Where the tests named by an id are: ``test_S01`` and ``test_s01_what_it_says``, in every test file."""
    found = {case: [] for case in CASES}
    for path in sorted(HERE.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.FunctionDef) and re.match(r"test_([A-Za-z]\d\d)(?:_|$)", node.name)
            if named and named[1].upper() in found:
                found[named[1].upper()].append(f"{path.name}::{node.name}")
    return found


def test_every_case_has_a_test():
    assert len(CASES) == 44
    found = found_by_case()
    assert not [case for case, tests in found.items() if not tests]
    # These need the reader and writer of a file.
    elsewhere = {case for case, tests in found.items() if not any("test_cases.py" in t for t in tests)}
    assert elsewhere == {"P08", "R01", "R03"}


# Scales


def test_S01(run):
    x = np.float32([*range(1, 32), np.nextafter(np.float32(128), np.float32(0))])[None]
    array = quantized(run, x, DType.MXFP8_E5M2, scale_rule="floor")
    assert scales(array).tolist() == [[118]]
    assert codes(array)[0, -1] == 0x7B
    assert decoded(array)[0, -1] == 112.0


def test_S04(run):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 2.0**-120
    array = quantized(run, x, DType.MXFP8_E4M3, scale_rule="rceil")
    assert scales(array).tolist() == [[0]]
    assert codes(array)[0, 0] == 0x70
    assert exact.same_bits(decoded(array), x)


def test_S05(run):
    # With elements of a largest exponent 0, a block's byte is its amax rounded up to a power of two.
    assert scales_of(run, [1.125, 1.25, 5.0, 1.0, 4.0], DType.MXINT8, "ceil") == [128, 128, 130, 127, 129]


def test_S06(run):
    got = run(partial(encode, dtype=DType.E8M0), np.float32([3.0, 0.75, 1.5, 6.0]))
    assert got.tolist() == [0x80, 0x7E, 0x80, 0x82]


def test_S09(run):
    byte = np.arange(255, dtype=np.uint8)
    expected = (byte.astype(np.uint32) << 23).view(np.float32)
    expected.view(np.uint32)[0] = 0x00400000
    ones = np.ones((255, 32), ml_dtypes.float8_e4m3fn)
    values = run(
        lambda s, q: BlockScaledArray(s, q, format=DType.MXFP8_E4M3).dequantize(),
        byte.view(ml_dtypes.float8_e8m0fnu)[:, None],
        ones,
    )
    assert exact.same_bits(np.asarray(values), np.repeat(expected[:, None], 32, 1))


def test_S10(run):
    assert scales_of(run, [6.99, 7.0, 3.5, 3.49], DType.MXFP4, "even") == [127, 128, 127, 126]


def test_S12(run):
    amax = np.nextafter(np.float32(7), np.float32(8))
    assert scales_of(run, [amax], DType.MXFP8_E4M3, "rceil") == [122]
    golden = exact.load("golden_scale")
    for name, dtype in (("e4m3fn", DType.MXFP8_E4M3), ("e5m2", DType.MXFP8_E5M2), ("e2m1fn", DType.MXFP4)):
        assert np.array_equal(scales_of(run, golden["amax"], dtype, "rceil"), golden[f"{name}_rceil"])


def test_S14(run):
    x = np.repeat(np.float32(2.0) ** (np.arange(64) // 32)[:, None], 32, 1).astype(np.float32)
    formats = FORMATS[:-1] if run is _on_host else [DType.MXFP8_E4M3, DType.MXFP6_E3M2]
    for dtype in formats:
        array, turned = run(lambda x, d=dtype: (quantize_blocks(x, d, axis=0), quantize_blocks(x.T, d)), x)
        assert array.scales.shape == (2, 32)
        assert (scales(array) == scales(array)[:, :1]).all()
        assert scales(array)[1, 0] == scales(array)[0, 0] + 1
        assert np.array_equal(scales(array), scales(turned.T))
        assert np.array_equal(codes(array), codes(turned.T))


# Zeros, infinities


def test_Z01(run):
    zeros = np.zeros((2, 64), np.float32)
    for array in run(in_every_kind, zeros).values():
        assert exact.same_bits(decoded(array), zeros)


def test_Z04(run):
    array = quantized(run, np.zeros((2, 32), np.float32), DType.NVFP4)
    assert np.asarray(array.levels[1]).tolist() == [[1.0]]
    assert exact.same_bits(decoded(array), np.zeros((2, 32), np.float32))


def test_Z07(run):
    x = np.ones((2, 64), np.float32)
    x[1, 35] = np.inf
    for kind, array in run(in_every_kind, x).items():
        nvfp4 = kind.startswith("NVFP4")
        poisoned = np.zeros((2, 64), bool)
        poisoned[1, 32 : 48 if nvfp4 else 64] = True
        assert np.array_equal(np.isnan(decoded(array)), poisoned)
        assert (scales(array) == (0x7F if nvfp4 else 0xFF)).sum() == 1
    saturated = quantized(run, x[1:, 32:], DType.MXFP8_E4M3, nonfinite="saturate")
    assert scales(saturated).tolist() == [[246]]


def test_Z09(run):
    x = np.full((2, 64), -0.0, np.float32)
    expected = [0x80, 0x80, 0x20, 0x20, 0x8]
    arrays = run(in_every_kind, x)
    assert [codes(arrays[f"{dtype.name} floor"])[1, 0] for dtype in FORMATS[:5]] == expected
    elements = [dtype.element for dtype in FORMATS[:5]]
    assert [int(c[1, 0]) for c in run(lambda x: [encode(x, e) for e in elements], x)] == expected


# Casts


def test_E01(run):
    x = np.float32([448, 464, 464.00003, 480, 1e9, -1e9])
    assert run(partial(encode, dtype="E4M3", overflow="saturate"), x).tolist() == [0x7E] * 5 + [0xFE]


def test_E05(run):
    values = run(lambda x: decode(encode(x, "E4M3"), "E4M3"), np.float32([4.25, 4.75]))
    assert values.tolist() == [4.0, 5.0]


def test_E06(run):
    values = run(partial(decode, dtype="E4M3"), np.uint8([1, 7, 8]))
    assert values.tolist() == [0.001953125, 0.013671875, 0.015625]


def test_E08(run):
    x = np.float32([1e-45, 2.0**-128, 2.0**-127])
    assert run(partial(encode, dtype="E8M0", overflow="saturate"), x).tolist() == [0, 0, 0]


def test_E10(run):
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001]).view(np.float32)
    for name in ("E2M1", "E3M2", "E2M3"):
        assert run(partial(encode, dtype=name), nans).tolist() == [0, 0, 0]


def test_E13(run):
    x = np.float32([8, -9, 300, 7])
    assert run(lambda x: NarrowArray.pack(x, ml_dtypes.int4).astype(np.int8), x).tolist() == [7, -8, 7, 7]
    values = run(lambda x: decode(encode(x, ml_dtypes.int4), ml_dtypes.int4), x)
    assert values.tolist() == [7, -8, 7, 7]


# E8M0


def test_F01(run):
    values = np.asarray(run(partial(decode, dtype=DType.E8M0), np.uint8([0, 1, 127, 254, 255])))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(values[4])


def test_F03(run):
    top = np.uint8([[254]]).view(ml_dtypes.float8_e8m0fnu)
    values = run(
        lambda s, q: BlockScaledArray(
            s, NarrowArray.from_codes(q, DType.E2M1), format=DType.MXFP4
        ).dequantize(),
        top,
        np.uint8([[1, 2, 3, 4] * 8]),
    )
    assert np.asarray(values)[0, :4].tolist() == [2.0**126, 2.0**127, 1.5 * 2.0**127, np.inf]


def test_F06(run):
    ones = np.full((127, 4), 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    stored = np.asarray(run(lambda x: swizzle(x, "f8_4x128").storage, ones)).view(np.uint8).reshape(-1)
    # Row 127 lies at (127 % 32) * 16 + 127 // 32 * 4.
    padding = slice(508, 512)
    assert stored[padding].tolist() == [0, 0, 0, 0]
    assert np.delete(stored, padding).tolist() == [127] * 508


# Swizzled scales


def test_W01(run):
    array = run(f8_4x128, SWIZZLE["s_100x3_in"])
    assert array.shape == (100, 3)
    assert array.storage.size == 512
    assert np.asarray(array.storage).tobytes() == SWIZZLE["s_100x3_blocked"].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.float8_e8m0fnu], ids=["float32", "e8m0"])
def test_W05(run, dtype):
    array = run(f8_4x128, np.ones((5, 3), dtype))
    assert (float(array.min()), float(array.max())) == (1.0, 1.0)


def test_W06(run):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    dense = quantized(run, x, DType.MXFP8_E4M3)
    assert dense.scales.shape == (64, 2)
    tiled = BlockScaledArray(swizzle(dense.scales, "f8_4x128"), dense.elements, format=dense.format)
    assert tiled.scales.storage.size == 512
    assert exact.same_bits(np.asarray(x @ tiled), np.asarray(x @ dense))


def test_W07(run):
    array = run(lambda x: swizzle(x, "f8_4x8"), SWIZZLE["s8x4_3x5_in"])
    assert array.storage.size == 64
    assert np.asarray(array.storage).tobytes() == SWIZZLE["s8x4_3x5_out"].tobytes()


# Packing; P08 is in test_io.py


def test_P01(run):
    packed = run(lambda c: NarrowArray.from_codes(c, DType.E2M1).data, np.uint8([1, 2, 3, 4]))
    assert packed.tolist() == [0x21, 0x43]


def test_P05(run):
    assert run(partial(decode, dtype=DType.E2M1), np.uint8([0xF3])).tolist() == [1.5]
    canonical = run(lambda c: NarrowArray.from_codes(c, DType.E2M1).codes(), np.uint8([0xF3, 0xF3]))
    assert canonical.tolist() == [3, 3]
    # Arrays of the scalar type itself, one value a byte, as NumPy keeps them.
    dirty = np.uint8([0xF3, 0x03]).view(ml_dtypes.float4_e2m1fn)
    assert run(lambda x: NarrowArray.pack(x, DType.E2M1).codes(), dirty).tolist() == [3, 3]


def test_P06(run):
    packed = run(lambda c: NarrowArray.from_codes(c, ml_dtypes.uint2).data, np.uint8([0, 1, 2, 1]))
    assert packed.tolist() == [0x64]


def test_P09(run):
    packed = run(lambda x: NarrowArray.pack(x, DType.E2M1), np.zeros((2, 32), np.float32))
    assert (packed.shape, packed.data.shape, packed.data.dtype) == ((2, 32), (2, 16), np.uint8)
    assert packed.nbytes == 32


# JAX


def test_J01(run):
    x = np.arange(-8, 8, dtype=np.int8)
    back = run(lambda x: NarrowArray.pack(x, ml_dtypes.int4).astype(np.int8), x)
    assert back.dtype == np.int8
    assert back.tolist() == list(range(-8, 8))


def test_J02():
    x = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32)
    a = quantize_blocks(jnp.asarray(x[0]), DType.MXFP4)
    b = quantize_blocks(jnp.asarray(x[1].T), DType.MXFP4, axis=0)
    expected = jnp.matmul(a.dequantize(), b.dequantize(), precision=jax.lax.Precision.HIGHEST)
    assert exact.same_bits(np.asarray(a @ b), np.asarray(expected))
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
    assert back.block_size[1] is Whole
    assert pickle.loads(pickle.dumps(arrays[0])).format is DType.MXFP4


def test_J07(run):
    text = repr(quantized(run, np.float32([0.5, -6] * 16), DType.MXFP4))
    assert "0.5" in text
    assert "-6" in text


def test_J10(run_jax, rng):
    x = rng.standard_normal((2, 64)).astype(np.float32)
    kinds = [(dtype, packed) for dtype in (DType.MXFP6_E3M2, DType.MXFP6_E2M3) for packed in (True, False)]
    arrays = run_jax(lambda x: [quantize_blocks(x, d, packed=p) for d, p in kinds], x)
    for (dtype, packed), array in zip(kinds, arrays, strict=True):
        assert exact.same_bits(decoded(array), quantize_blocks(x, dtype, packed=packed).dequantize())
        assert all(
            leaf.dtype == np.uint8 or leaf.dtype == DType.E8M0.numpy_dtype
            for leaf in jax.tree_util.tree_leaves(array)
        )


# Checkpoints; R01 and R03 are in test_io.py


def test_R05(run):
    values = run(
        lambda s, q: BlockScaledArray(s, NarrowArray(q, DType.E2M1), format=DType.MXFP4).dequantize(),
        PACK["gptoss_scales"].view(ml_dtypes.float8_e8m0fnu),
        PACK["gptoss_blocks"].reshape(3, 64),
    )
    assert exact.same_bits(np.asarray(values), PACK["gptoss_deq"])


# NVFP4


def test_N01(run):
    x = np.float32([[5376] + [0] * 15])
    single = quantized(run, x, DType.NVFP4, tensor_scale=1.0)
    assert decoded(single)[0, 0] == 2688
    assert decoded(quantized(run, x, DType.NVFP4))[0, 0] == 5376


def test_N02(run):
    x = np.linspace(-8, 1, 16, dtype=np.float32)[None]
    array = quantized(run, x, DType.NVFP4)
    assert np.asarray(array.levels[1]).item() == np.float32(8) / np.float32(2688)


def test_N04(run):
    x = np.float32([[1e9] + [0] * 15])
    array = quantized(run, x, DType.NVFP4, tensor_scale=1.0)
    assert np.asarray(array.scales).astype(np.float32).tolist() == [[448.0]]


# Records


def test_K01(run):
    fields = run(partial(jq.records.unpack, format=q4_k), QK["q4k_rec"])
    for name in ("sc", "m", "q"):
        assert np.array_equal(np.asarray(getattr(fields, name)), QK[f"q4k_{name}"])


def test_K05(run_jax):
    half = np.float32([127, *[0.5] * 255])
    more = np.float32([127, *[1.5, 2.5, -1.5, -2.5, 3.5] * 51])
    records = run_jax(partial(jq.quantize, format=q8_k), np.stack([half, more]))
    q = np.asarray(jq.records.unpack(records, q8_k).q)
    assert q[0].tolist() == [-127, *[0] * 255]
    assert q[1].tolist() == [-127, *[-2, -2, 2, 2, -4] * 51]
    assert np.array_equal(exact.quantize(np.stack([half, more])), np.asarray(records))


def test_K06(run_jax):
    w, x = QK["q4k_rec"], QK["q8k_rec"]
    for run in (_on_host, run_jax):
        assert exact.same_bits(np.asarray(run(jq.records.explain, w, x).v), QK["dot_v"])
    dot = partial(jq.quantized_dot, lhs_format=q4_k, rhs_format=q8_k)
    each = run_jax(jax.vmap(dot), w[:, None], x[:, None])
    assert exact.same_bits(np.asarray(each), QK["dot_v"])
    none = run_jax(dot, w[:0], x[:0])
    assert exact.same_bits(np.asarray(none), np.float32(0))


def test_encoding_and_decoding_agree_on_codes():
    for dtype in FORMATS[:5]:
        all_codes = np.arange(1 << dtype.element.bits, dtype=np.uint8)
        finite = all_codes[np.isfinite(decode(all_codes, dtype.element))]
        assert np.array_equal(encode(decode(finite, dtype.element), dtype.element), finite)
