"""`quantize_blocks` and decoding against golden vectors and exact rational arithmetic."""

from __future__ import annotations

import functools
import subprocess
import sys
from fractions import Fraction

import block_oracle
import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dtype_samples import block_scaled

from jaxquant import BlockScaledDType, DType, Level, SimpleDType, Whole
from jaxquant.arrays import BlockScaledArray, NarrowArray, fake_quantize_blocks, quantize_blocks
from jaxquant.ops.blocks import scale_bytes

pytestmark = pytest.mark.arrays

GOLDEN = {
    "MXFP8_E4M3": "e4m3fn",
    "MXFP8_E5M2": "e5m2",
    "MXFP6_E3M2": "e3m2fn",
    "MXFP6_E2M3": "e2m3fn",
    "MXFP4": "e2m1fn",
    "MXINT8": "int8",
}
ALL = tuple(block_oracle.ELEMENTS)
MX = block_oracle.MX
RULES = block_oracle.SCALE_RULES


@functools.cache
def jitted_with(dtype, options):
    return jax.jit(lambda x, **arrays: quantize_blocks(x, dtype, **dict(options), **arrays))


def jitted(x, dtype, **options):
    arrays = {name: options.pop(name) for name in ("tensor_scale", "key") if options.get(name) is not None}
    options.pop("tensor_scale", None)
    if "tensor_scale" in arrays:
        arrays["tensor_scale"] = jnp.float32(arrays["tensor_scale"])
    return jitted_with(dtype, tuple(options.items()))(jnp.asarray(x), **arrays)


PATHS = {
    "numpy": quantize_blocks,
    "jax": lambda x, dtype, **options: quantize_blocks(jnp.asarray(x), dtype, **options),
    "jit": jitted,
}


@pytest.fixture(params=PATHS)
def quantized(request):
    return PATHS[request.param]


def codes(array) -> np.ndarray:
    elements = array.elements
    if isinstance(elements, NarrowArray):
        return np.asarray(elements.codes())
    return np.asarray(elements).view(np.uint8)


def scales(array) -> np.ndarray:
    return np.asarray(array.scales).view(np.uint8)


@jax.jit
def dequantized(array):
    return array.dequantize()


def same_values(array, expected) -> bool:
    return exact.same_bits(array.dequantize(), expected) and exact.same_bits(dequantized(array), expected)


def floats(bits) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def mx_blocks(rng, count) -> np.ndarray:
    """Blocks of 32 bit patterns: any finite bits, near one exponent, subnormal, near the maximum, with ties."""
    kinds = [
        rng.integers(0, 0x7F800000, (count, 32)),
        (rng.integers(0, 255, (count, 1)) << 23)
        + (rng.integers(0, 1 << 23, (count, 32)) >> rng.integers(0, 24)),
        rng.integers(0, 1 << 23, (count, 32)),
        rng.integers(1, 64, (count, 32)),
        0x7F7FFFFF - (rng.integers(0, 1 << 26, (count, 32))),
        (np.float32(2.0) ** rng.integers(-20, 20, (count, 1)) * rng.integers(0, 129, (count, 32)) / 16)
        .astype(np.float32)
        .view(np.uint32)
        .astype(np.int64),
    ]
    bits = np.concatenate(kinds) | rng.integers(0, 2, (6 * count, 32)) << 31
    bits[::7, 3] = 0x80000000
    bits[::11, 4:] &= 0x80000000
    return bits.astype(np.uint32)


# Golden vectors


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("path", ["numpy", "jax", "jit"])
def test_golden_scales(path, name, rule):
    golden = exact.load("golden_scale")
    amax, element = golden["amax"].view(np.uint32), DType.from_name(name).element
    if path == "numpy":
        got = scale_bytes(amax, element, rule)
    else:
        run = jax.jit(scale_bytes, static_argnums=(1, 2)) if path == "jit" else scale_bytes
        got = run(jnp.asarray(amax), element, rule)
    assert np.array_equal(np.asarray(got), golden[f"{GOLDEN[name]}_{rule}"])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_golden_mx(quantized, name, rule, packed):
    golden, key = exact.load("golden_mx"), f"ref_{GOLDEN[name]}_{rule}"
    array = quantized(golden["X"], DType.from_name(name), scale_rule=rule, packed=packed)
    assert array.format is DType.from_name(name)
    assert np.array_equal(scales(array)[:, 0], golden[f"{key}_scale"])
    finite = golden["finite_block"]
    assert np.array_equal(codes(array)[finite], golden[f"{key}_code"][finite])
    assert not codes(array)[~finite].any()
    assert same_values(array, golden[f"{key}_deq"])


NVFP4_INPUTS = [key[2:] for key in exact.load("golden_nvfp4") if key.startswith("x_")]


@pytest.mark.parametrize("name", NVFP4_INPUTS)
def test_golden_nvfp4(quantized, name):
    golden = exact.load("golden_nvfp4")
    array = quantized(golden[f"x_{name}"], DType.NVFP4)
    expected = golden[f"ref_{name}_scale"]
    assert exact.same_bits(np.asarray(array.levels[1]), golden[f"ref_{name}_ts"].reshape(1, 1))
    assert np.array_equal(scales(array), expected)
    finite = np.repeat(expected != 0x7F, 16, axis=-1)
    assert np.array_equal(codes(array)[finite], golden[f"ref_{name}_code"][finite])
    assert same_values(array, golden[f"ref_{name}_deq"])


# Rational arithmetic


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down"])
@pytest.mark.parametrize("name", MX)
def test_mx_equals_rational_arithmetic(rng, name, rounding):
    blocks = mx_blocks(rng, 4 if rounding == "nearest_even" else 2)
    for rule in RULES if rounding == "nearest_even" else ("floor", "rceil"):
        expected = [block_oracle.quantize_mx(block, name, rule, rounding) for block in blocks.tolist()]
        for path, run in PATHS.items():
            array = run(floats(blocks), DType.from_name(name), scale_rule=rule, rounding=rounding)
            assert scales(array)[:, 0].tolist() == [byte for byte, _ in expected], (path, rule)
            assert codes(array).tolist() == [row for _, row in expected], (path, rule)


def nvfp4_inputs(rng):
    def signed(bits):
        return (np.asarray(bits, np.int64) | rng.integers(0, 2, np.shape(bits)) << 31).astype(np.uint32)

    gaussian = rng.standard_normal((6, 32)).astype(np.float32)
    wide = (gaussian * np.float32(10.0) ** rng.integers(-20, 20, (6, 32)).astype(np.float32)).astype(
        np.float32
    )
    ties = (rng.integers(0, 25, (6, 32)) / 4).astype(np.float32)
    ties[0, 0] = 2688
    return {
        "gaussian": gaussian.view(np.uint32),
        "wide": wide.view(np.uint32),
        "ties": ties.view(np.uint32),
        "any_bits": signed(rng.integers(0, 0x7F800000, (6, 32))),
        "near_max": signed(0x7F7FFFFF - rng.integers(0, 1 << 25, (6, 32))),
        "subnormal": signed(rng.integers(0, 1 << 23, (6, 32))),
        "few_ulps": signed(rng.integers(0, 5, (6, 32))),
        "one_ulp": signed(np.ones((6, 32), np.int64)),
        "small_tensor_scale": signed(rng.integers(0, 1 << 27, (6, 32))),
        "zeros": signed(np.zeros((6, 32), np.int64)),
    }


@pytest.mark.parametrize("tensor_scale", [None, 1.0, 2.0**-149, 3e-39, 1e30], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "gaussian",
        "wide",
        "ties",
        "any_bits",
        "near_max",
        "subnormal",
        "few_ulps",
        "one_ulp",
        "small_tensor_scale",
        "zeros",
    ],
)
def test_nvfp4_equals_rational_arithmetic(rng, kind, tensor_scale):
    bits = nvfp4_inputs(rng)[kind]
    given = None if tensor_scale is None else int(np.float32(tensor_scale).view(np.uint32))
    ts, expected = block_oracle.quantize_nvfp4(bits.reshape(-1, 16).tolist(), given)
    values = [
        block_oracle.decoded("NVFP4", code, ("e4m3", scale), ("f32", ts))
        for scale, row in expected
        for code in row
    ]
    for path, run in PATHS.items():
        array = run(floats(bits), DType.NVFP4, tensor_scale=tensor_scale)
        assert np.asarray(array.levels[1]).view(np.uint32).tolist() == [[ts]], path
        assert scales(array).reshape(-1).tolist() == [scale for scale, _ in expected], path
        assert codes(array).reshape(-1, 16).tolist() == [row for _, row in expected], path
        assert same_values(array, floats(values).reshape(bits.shape)), path


def test_a_scale_of_zero_leaves_only_signs(quantized):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 1e30
    x[0, 16:] = np.float32([1e-10, -1e-10] * 8)
    array = quantized(x, DType.NVFP4)
    assert scales(array).tolist() == [[126, 0]]
    assert codes(array)[0, 16:].tolist() == [0, 8] * 8


@pytest.mark.parametrize("name", MX)
def test_every_code_under_every_scale(name):
    count = len(block_oracle.magnitudes(name))
    bits = {"MXFP8_E4M3": 8, "MXFP8_E5M2": 8, "MXINT8": 8, "MXFP4": 4}.get(name, 6)
    assert count <= 1 << (bits - 1)
    element = np.arange(1 << bits, dtype=np.uint8)
    bytes_ = np.array([0, 1, 2, 5, 22, 126, 127, 128, 240, 252, 253, 254, 255], np.uint8)
    expected = [
        [block_oracle.decoded(name, code, ("e8m0", byte)) for code in element.tolist()]
        for byte in bytes_.tolist()
    ]
    array = BlockScaledArray(
        bytes_.view(ml_dtypes.float8_e8m0fnu)[:, None],
        np.tile(np.resize(element, (1, max(32, 1 << bits))), (len(bytes_), 1))[:, : 1 << bits]
        if bits > 4
        else np.tile(element, (len(bytes_), 2)),
        format=None,
    )
    dtype = DType.from_name(name)
    rows = np.asarray(array.elements)
    whole = rows.reshape(len(bytes_), -1, 32)
    planes = np.repeat(bytes_[:, None], whole.shape[1], 1).view(ml_dtypes.float8_e8m0fnu)
    for to_library in (np.asarray, jnp.asarray):
        shown = BlockScaledArray(to_library(planes), to_library(rows), format=dtype)
        want = np.tile(np.array(expected, np.uint32), (1, rows.shape[1] // (1 << bits)))
        assert same_values(shown, floats(want))


@pytest.mark.parametrize("name", ALL)
def test_half_precision_input_is_widened_exactly(rng, quantized, name):
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = rng.integers(0, 1 << 16, (8, 32)).astype(np.uint16).view(dtype)
        x = np.where(np.isfinite(x.astype(np.float32)), x, dtype(0.0))
        with_half = quantized(x, DType.from_name(name))
        assert np.array_equal(
            codes(with_half), codes(quantize_blocks(x.astype(np.float32), DType.from_name(name)))
        )


@pytest.mark.parametrize("name", ALL)
def test_decoding_rounds_once_to_other_dtypes(rng, name):
    array = quantize_blocks(floats(mx_blocks(rng, 4)), DType.from_name(name))
    values = array.dequantize()
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
            expected = values.astype(dtype)
            assert exact.same_bits(array.dequantize(dtype), expected)
            if dtype is not np.float64:
                got = jax.jit(lambda a, dtype=dtype: a.dequantize(dtype))(array)
                assert exact.same_bits(np.asarray(got), expected)


# Blocks that are not finite, and zeros


RULES_OF = [(name, rule) for name in ALL for rule in (RULES if name != "NVFP4" else ["floor"])]


@pytest.mark.parametrize(("name", "rule"), RULES_OF)
def test_one_bad_value_poisons_its_block_alone(quantized, name, rule):
    x = np.ones((4, 64), np.float32)
    x[1, 3], x[2, 0], x[3, 7] = np.inf, -np.inf, np.nan
    array = quantized(x, DType.from_name(name), scale_rule=rule)
    block = DType.from_name(name).levels[0].block
    assert (scales(array)[1:, 0] == (0x7F if name == "NVFP4" else 0xFF)).all()
    assert not codes(array)[1:, :block].any()
    values = np.asarray(array.dequantize())
    assert np.isnan(values[1:, :block]).all()
    assert (values[0] == values[0, 0]).all()
    assert np.isfinite(values[:, block:]).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_saturate_takes_infinities_for_the_largest_float32(quantized, name, rule):
    bits = np.full((1, 32), 0x3F800000, np.int64)
    bits[0, 3], bits[0, 5] = 0x7F800000, 0xFF800000
    array = quantized(floats(bits), DType.from_name(name), scale_rule=rule, nonfinite="saturate")
    byte, row = block_oracle.quantize_mx(bits[0].tolist(), name, rule, nonfinite="saturate")
    assert scales(array).tolist() == [[byte]]
    assert codes(array).tolist() == [row]
    if (name, rule) == ("MXFP8_E4M3", "floor"):
        assert byte == 246
    with_nan = floats(bits).copy()
    with_nan[0, 7] = np.nan
    poisoned = quantized(with_nan, DType.from_name(name), scale_rule=rule, nonfinite="saturate")
    assert scales(poisoned).tolist() == [[255]]


def test_saturate_in_nvfp4(quantized):
    bits = np.full((1, 32), 0x3F800000, np.int64)
    bits[0, 3] = 0xFF800000
    array = quantized(floats(bits), DType.NVFP4, nonfinite="saturate")
    ts, blocks = block_oracle.quantize_nvfp4(bits.reshape(2, 16).tolist(), nonfinite="saturate")
    assert np.asarray(array.levels[1]).view(np.uint32).item() == ts
    assert scales(array).tolist() == [[scale for scale, _ in blocks]]
    assert codes(array).reshape(2, 16).tolist() == [row for _, row in blocks]


@pytest.mark.parametrize(("name", "rule"), RULES_OF)
def test_zeros_keep_their_signs(quantized, name, rule):
    x = np.float32([[0.0, -0.0] * 16])
    array = quantized(x, DType.from_name(name), scale_rule=rule)
    assert not scales(array).any()
    values = np.asarray(array.dequantize())
    assert exact.same_bits(values, np.zeros((1, 32), np.float32) if name == "MXINT8" else x)
    if name == "NVFP4":
        assert np.asarray(array.levels[1]).item() == 1.0


# Where blocks lie


@pytest.mark.parametrize("name", ALL)
def test_axis(rng, quantized, name):
    dtype = DType.from_name(name)
    x = rng.standard_normal((3, 64, 5, 4)).astype(np.float32)
    moved = quantized(x, dtype, axis=1)
    last = quantized(np.ascontiguousarray(np.moveaxis(x, 1, -1)), dtype)
    block = dtype.levels[0].block
    assert moved.block_size == (1, block, 1, 1)
    assert moved.scales.shape == (3, 64 // block, 5, 4)
    assert moved.format is dtype
    assert np.array_equal(np.moveaxis(codes(moved), 1, -1), codes(last))
    assert np.array_equal(np.moveaxis(scales(moved), 1, -1), scales(last))
    assert exact.same_bits(np.moveaxis(np.asarray(moved.dequantize()), 1, -1), np.asarray(last.dequantize()))
    if dtype.element.bits < 8:
        assert moved.elements.axis == -3


@pytest.mark.parametrize("name", ["MXFP8_E4M3", "MXINT8", "MXFP4", "MXFP6_E3M2", "NVFP4"])
@pytest.mark.parametrize(
    "block_shape", [(1, 32), (32, 1), (4, 8), (128, 128), (16, 16), (Whole, 32)], ids=str
)
def test_blocks_of_any_shape(rng, quantized, name, block_shape):
    dtype = DType.from_name(name)
    x = (rng.standard_normal((128, 256)) * 2.0 ** rng.integers(-8, 8, (128, 256))).astype(np.float32)
    array = quantized(x, dtype, block_shape=block_shape)
    rows, columns = (128 if block is Whole else block for block in block_shape)
    # The same blocks, one after another along the last axis of a format-free oracle.
    tiles = (
        x.reshape(128 // rows, rows, 256 // columns, columns)
        .transpose(0, 2, 1, 3)
        .reshape(-1, rows * columns)
    )
    if name == "NVFP4":
        amax = Fraction(float(abs(x).max()))
        ts = exact.rational(exact.round_f32(amax / 2688))
        e4m3 = block_oracle.magnitudes("MXFP8_E4M3")
        expected = [
            block_oracle.nearest_even(e4m3, Fraction(float(m)) / (6 * ts))
            for m in abs(tiles).max(-1).tolist()
        ]
    else:
        expected = [
            block_oracle.scale_byte(name, "floor", Fraction(float(m))) for m in abs(tiles).max(-1).tolist()
        ]
    assert array.scales.shape == (128 // rows, 256 // columns)
    assert scales(array).reshape(-1).tolist() == expected
    matches = block_shape != (Whole, 32) and rows * columns == dtype.levels[0].block
    assert array.format is (dtype if matches else None)
    assert array.element_dtype == dtype.element.numpy_dtype
    assert array.block_size == block_shape
    values = np.asarray(array.dequantize())
    each = quantize_blocks(
        x[:rows, :columns].reshape(1, -1),
        dtype,
        block_shape=(1, rows * columns),
        tensor_scale=(float(np.asarray(array.levels[1]).item()) if name == "NVFP4" else None),
    )
    assert exact.same_bits(values[:rows, :columns].reshape(1, -1), each.dequantize())


def test_a_registered_format_of_other_blocks(rng):
    dtype = block_scaled("test.MXFP8_16x16", DType.E4M3, [Level(DType.E8M0, 256)])
    x = rng.standard_normal((32, 32)).astype(np.float32)
    array = quantize_blocks(x, dtype, block_shape=(16, 16))
    assert array.format is dtype
    assert array.representation().level_shapes == (((16, 2), (16, 2)), (2, 2))
    free = quantize_blocks(x, DType.MXFP8_E4M3, block_shape=(16, 16))
    assert exact.same_bits(array.dequantize(), free.dequantize())


@pytest.mark.parametrize("name", ALL)
def test_padding_keeps_the_logical_shape(rng, quantized, name):
    dtype = DType.from_name(name)
    x = rng.standard_normal((3, 70)).astype(np.float32)
    array = quantized(x, dtype, pad=True)
    block = dtype.levels[0].block
    padded = -(-70 // block) * block
    full = quantized(np.pad(x, [(0, 0), (0, padded - 70)]), dtype)
    assert (array.shape, array.padded_shape, array.size) == ((3, 70), (3, padded), 210)
    assert np.array_equal(codes(array), codes(full))
    assert exact.same_bits(array.dequantize(), np.asarray(full.dequantize())[:, :70])
    assert exact.same_bits(array[2, 65:], np.asarray(full.dequantize())[2, 65:70])
    assert exact.same_bits(np.asarray(array.T), np.asarray(full.dequantize())[:, :70].T)
    assert array.representation().level_shapes[0] == (3, (block, padded // block))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0), (0,), (3, 0, 32)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_empty_arrays(quantized, name, shape):
    array = quantized(np.zeros(shape, np.float32), DType.from_name(name))
    assert array.shape == shape
    assert np.asarray(array.dequantize()).shape == shape
    assert array.block_size[-1] == DType.from_name(name).levels[0].block
    with pytest.raises(ValueError, match="no elements"):
        array.representation()


def test_bits_per_element():
    for name in MX:
        dtype = DType.from_name(name)
        array = quantize_blocks(jnp.ones((64, 128), jnp.float32), dtype)
        assert 8 * array.nbytes / array.size == dtype.bits_per_element
        assert sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(array)) == array.nbytes
    array = quantize_blocks(jnp.ones((64, 128), jnp.float32), DType.NVFP4)
    assert 8 * array.nbytes / array.size == DType.NVFP4.bits_per_element.evaluate(array.size)


# Stochastic rounding


@pytest.mark.parametrize("name", MX)
def test_stochastic_rounding(rng, name):
    dtype = DType.from_name(name)
    x = rng.uniform(-1, 1, (1, 32)).astype(np.float32)
    x[0, 0] = 1.0
    many = np.repeat(x, 4000, 0)
    key = jax.random.key(3)
    arrays = [run(many, dtype, rounding="stochastic", key=key) for run in PATHS.values()]
    for array in arrays[1:]:
        assert np.array_equal(codes(array), codes(arrays[0]))
    values = arrays[0].dequantize().astype(np.float64)
    down = quantize_blocks(x, dtype, rounding="down").dequantize()[0].astype(np.float64)
    up = quantize_blocks(x, dtype, rounding="up").dequantize()[0].astype(np.float64)
    assert ((values == down) | (values == up)).all()
    error = abs(values.mean(0) - x[0])
    assert (error <= 5 * (up - down) / 2 / np.sqrt(4000) + 1e-12).all()


# Straight-through gradient


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda t: np.dtype(t).name
)
@pytest.mark.parametrize("name", ALL)
def test_fake_quantize(rng, name, dtype):
    x = (rng.standard_normal((4, 64)) * 10).astype(dtype)
    expected = quantize_blocks(x, DType.from_name(name)).dequantize(dtype)
    got = fake_quantize_blocks(jnp.asarray(x), DType.from_name(name))
    assert exact.same_bits(np.asarray(got), expected)
    assert exact.same_bits(fake_quantize_blocks(x, DType.from_name(name)), expected)
    jitted = jax.jit(lambda x: fake_quantize_blocks(x, DType.from_name(name)))
    assert exact.same_bits(np.asarray(jitted(x)), expected)


@pytest.mark.parametrize("name", ALL)
def test_the_cotangent_passes_unchanged(rng, name):
    x = (rng.standard_normal((4, 64)) * 10).astype(np.float32)
    x[0, 0], x[1, 1], x[2] = 1e38, np.nan, 0.0
    cotangent = rng.standard_normal((4, 64)).astype(np.float32)
    for options in ({}, {"pad": True, "axis": -1}, {"block_shape": [2, 16]}):
        _, pull = jax.vjp(
            lambda x, options=options: fake_quantize_blocks(x, DType.from_name(name), **options), x
        )
        assert exact.same_bits(np.asarray(pull(cotangent)[0]), cotangent)
    gradient = jax.jit(
        jax.grad(lambda x: (fake_quantize_blocks(x, DType.from_name(name)) * cotangent).sum())
    )(x)
    assert exact.same_bits(np.asarray(gradient), cotangent)


def test_fake_quantize_with_keys_and_tensor_scales_under_transformations():
    x = jnp.linspace(-1, 1, 96, dtype=jnp.float32).reshape(3, 32)
    keys = jax.random.split(jax.random.key(0), 3)

    def one(x, key):
        return fake_quantize_blocks(x, DType.MXFP4, rounding="stochastic", key=key)

    gradients = jax.vmap(jax.grad(lambda x, key: one(x, key).sum()))(x, keys)
    assert (np.asarray(gradients) == 1).all()
    each = np.stack([one(x[i], keys[i]) for i in range(3)])
    assert exact.same_bits(np.asarray(jax.vmap(one)(x, keys)), each)

    def scaled(x, ts):
        return fake_quantize_blocks(x, DType.NVFP4, tensor_scale=ts).sum()

    by_x, by_scale = jax.grad(scaled, argnums=(0, 1))(x, jnp.float32(0.01))
    assert (np.asarray(by_x) == 1).all()
    assert float(by_scale) == 0


@pytest.mark.parametrize("name", ALL)
def test_vmap_is_per_item(rng, name):
    dtype = DType.from_name(name)
    x = (rng.standard_normal((3, 4, 64)) * np.float32([1, 100, 1e-30])[:, None, None]).astype(np.float32)
    stacked = jax.vmap(lambda x: quantize_blocks(x, dtype))(jnp.asarray(x))
    assert stacked.shape == (3, 4, 64)
    for i in range(3):
        item = jax.tree_util.tree_map(lambda leaf, i=i: leaf[i], stacked)
        alone = quantize_blocks(x[i], dtype)
        assert np.array_equal(codes(item), codes(alone))
        assert exact.same_bits(np.asarray(item.dequantize()), alone.dequantize())
    assert exact.same_bits(
        np.asarray(stacked.dequantize()), np.stack([quantize_blocks(part, dtype).dequantize() for part in x])
    )


# Wide integers switched on

X64 = """
import sys
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
import jax.numpy as jnp
from jaxquant import BlockScaledDType, DType
from jaxquant.arrays import quantize_blocks, block_dot, fake_quantize_blocks
bits = np.random.default_rng(0).integers(0, 0x7F800000, (16, 64)).astype(np.uint32)
x = bits.view(np.float32)
for dtype in (DType.MXFP8_E4M3, DType.MXFP6_E2M3, DType.MXFP4, DType.MXINT8, DType.NVFP4):
    host, device = quantize_blocks(x, dtype), quantize_blocks(jnp.asarray(x), dtype)
    for a, b in zip(jax.tree_util.tree_leaves(host), jax.tree_util.tree_leaves(device), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == np.asarray(b).tobytes(), dtype
    for wanted in (np.float32, np.float64):
        a, b = host.dequantize(wanted), jax.jit(lambda d: d.dequantize(wanted))(device)
        assert a.dtype == b.dtype == wanted and a.tobytes() == np.asarray(b).tobytes(), (dtype, wanted)
    assert fake_quantize_blocks(jnp.asarray(x), dtype).dtype == np.float32
    assert block_dot(np.ones((2, 16), np.float32), host).dtype == np.float32
"""


def test_x64():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", X64], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr


# Refusals

X = np.ones((4, 64), np.float32)
E8 = SimpleDType("test.quantize.Odd", bits=8, supertype=DType.Floating)


def custom(element, *levels):
    name = f"test.quantize.{element.name}.{len(BlockScaledDType.registered())}"
    return block_scaled(name, element, levels)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "list"),
        (X.astype(np.float64), {}, TypeError, "float64"),
        (X.astype(np.int32), {}, TypeError, "int32"),
        (X, {"dtype": DType.E4M3}, TypeError, "BlockScaledDType"),
        (X, {"dtype": "MXFP4"}, TypeError, "BlockScaledDType"),
        (X, {"scale_rule": "round"}, ValueError, "scale_rule"),
        (X, {"rounding": "nearest"}, ValueError, "rounding"),
        (X, {"nonfinite": "zero"}, ValueError, "nonfinite"),
        (X, {"recipe": "te"}, ValueError, "recipe"),
        (X, {"axis": 2}, ValueError, r"axis 2 .*\(4, 64\)"),
        (X[:, :40], {}, ValueError, r"\(4, 40\).*pad=True"),
        (X, {"axis": 0}, ValueError, r"axis 0 .*\(4, 64\)"),
        (np.ones((), np.float32), {}, ValueError, r"\(\)"),
        (X, {"block_shape": (1, 2, 32)}, ValueError, "more axes"),
        (X, {"block_shape": (0, 32)}, ValueError, "positive"),
        (X, {"block_shape": (True, 32)}, ValueError, "positive"),
        (X, {"rounding": "stochastic"}, ValueError, "key"),
        (X, {"key": jax.random.key(0)}, ValueError, "key"),
        (X, {"tensor_scale": 1.0}, ValueError, "no tensor scale"),
        (X, {"dtype": DType.NVFP4, "tensor_scale": 0.0}, ValueError, "positive"),
        (X, {"dtype": DType.NVFP4, "tensor_scale": np.inf}, ValueError, "finite"),
        (X, {"dtype": DType.NVFP4, "tensor_scale": -1.0}, ValueError, "positive"),
        (X, {"dtype": DType.NVFP4, "tensor_scale": np.ones(2)}, ValueError, "scalar"),
        (X, {"dtype": DType.NVFP4, "scale_rule": "ceil"}, ValueError, "scale"),
        (X, {"dtype": DType.NVFP4, "rounding": "up"}, ValueError, "nearest even"),
        (X[:, :63], {"dtype": DType.MXFP4, "block_shape": (1, 7)}, ValueError, "packed=False"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else None,
)
def test_refused(x, options, error, message):
    options = {"dtype": DType.MXFP8_E4M3, **options}
    with pytest.raises(error, match=message):
        quantize_blocks(x, **options)


def test_a_format_without_a_recipe_is_refused():
    for dtype in (
        custom(DType.E4M3, Level(DType.Float32, 32)),
        custom(DType.E2M1, Level(DType.E4M3, 16), Level(DType.E8M0, 8)),
        custom(E8, Level(DType.E8M0, 32)),
    ):
        with pytest.raises(ValueError, match="no recipe"):
            quantize_blocks(X, dtype)
