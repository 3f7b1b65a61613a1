"""Products with block-scaled matrices against decoding and then contracting."""

from __future__ import annotations

import types
from fractions import Fraction

import block_oracle
import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant import DType
from jaxquant.arrays import BlockScaledArray, block_dot, quantize_blocks, swizzle
from jaxquant.arrays import block_dot as public

# The package exports the function under the name of its module.
module = __import__("sys").modules["jaxquant.arrays.block_dot"]
ALL = tuple(block_oracle.ELEMENTS)


def weight(name, shape=(64, 24), library=np.asarray, axis=0, seed=0) -> BlockScaledArray:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return quantize_blocks(library(x), DType.from_name(name), axis=axis)


def reference(a, b):
    """The pinned program, on decoded operands."""
    dense = [
        np.asarray(x, np.float32) if not isinstance(x, BlockScaledArray) else np.asarray(x.dequantize())
        for x in (a, b)
    ]
    return np.asarray(jax.jit(lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST))(*dense))


def in_float64(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


@pytest.mark.parametrize("name", ALL)
class TestFormats:
    def test_operators_are_block_dot_for_every_library(self, name):
        x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
        host, device = weight(name), weight(name, library=jnp.asarray)
        expected = block_dot(x, host)
        assert isinstance(expected, np.ndarray)
        assert expected.dtype == np.float32
        assert exact.same_bits(expected, reference(x, host))
        np.testing.assert_allclose(expected, in_float64(x, host), rtol=1e-5, atol=1e-4)
        for got in (
            x @ host,
            x @ device,
            jnp.asarray(x) @ host,
            jnp.asarray(x) @ device,
            jax.jit(lambda x, w: x @ w)(x, device),
            jax.jit(lambda x: x @ device)(x),
            block_dot(jnp.asarray(x), device),
        ):
            assert exact.same_bits(np.asarray(got), expected)
        left = weight(name, (24, 64), axis=1)
        swapped = block_dot(left, x.T)
        assert exact.same_bits(swapped, reference(left, x.T))
        for got in (left @ x.T, left @ jnp.asarray(x.T), jax.jit(lambda w, x: w @ x)(left, x.T)):
            assert exact.same_bits(np.asarray(got), swapped)

    def test_two_block_scaled_operands(self, name):
        a, b = weight(name, (8, 64), axis=1, seed=2), weight(name)
        expected = reference(a, b)
        assert exact.same_bits(a @ b, expected)
        np.testing.assert_allclose(expected, in_float64(a, b), rtol=1e-5, atol=1e-4)
        assert exact.same_bits(np.asarray(jax.jit(lambda a, b: a @ b)(a, b)), expected)

    def test_the_gradient_of_activations(self, name):
        w = weight(name, library=jnp.asarray)
        x = jnp.ones((3, 64), jnp.float32)
        cotangent = np.random.default_rng(4).standard_normal((3, 24)).astype(np.float32)
        _, pull = jax.vjp(lambda x: x @ w, x)
        (got,) = pull(cotangent)
        np.testing.assert_allclose(got, in_float64(cotangent, w.T), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((64,), (64, 24)),
        ((3, 5, 64), (64, 24)),
        ((2, 1, 5, 64), (3, 64, 24)),
        ((5, 64), (64,)),
        ((64,), (64,)),
    ],
    ids=str,
)
def test_shapes_as_matmul(left, right):
    x = np.random.default_rng(0).standard_normal(left).astype(np.float32)
    axis = -1 if len(right) == 1 else -2
    w = weight("MXFP8_E4M3", right, axis=axis)
    with jax.numpy_rank_promotion("allow"):
        expected = reference(x, w)
    got = block_dot(x, w)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_half_precision_activations(dtype):
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(dtype)
    w = weight("MXFP4")
    assert exact.same_bits(x @ w, reference(x.astype(np.float32), w))
    assert exact.same_bits(np.asarray(jnp.asarray(x) @ w), x @ w)


def test_swizzled_scales():
    w = weight("MXFP8_E4M3", (64, 64), axis=1)
    tiled = BlockScaledArray(swizzle(w.scales, "f8_4x128"), w.elements, format=w.format)
    x = np.ones((2, 64), np.float32)
    assert exact.same_bits(x @ tiled, x @ w)


def test_vmap_over_items():
    x = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    ws = [weight("MXFP8_E4M3", seed=seed, library=jnp.asarray) for seed in range(3)]
    stacked = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *ws)
    got = jax.vmap(block_dot)(x, stacked)
    np.testing.assert_allclose(
        got, np.stack([block_dot(x[i], ws[i]) for i in range(3)]), rtol=1e-5, atol=1e-5
    )


def test_nothing_decodes_a_block_scaled_array_silently():
    w = weight("MXFP4", library=jnp.asarray)
    assert not hasattr(w, "__jax_array__")
    with pytest.raises(TypeError):
        jnp.ones((2, 64)) + w
    with pytest.raises(TypeError):
        np.ones((64, 24)) + w
    with pytest.raises(TypeError):
        [1.0] @ w


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (
            np.ones((2, 32), np.float32),
            weight("MXFP4"),
            ValueError,
            r"\(2, 32\) and \(64, 24\).*32 is not 64",
        ),
        (weight("MXFP4"), np.ones((2, 4), np.float32), ValueError, r"\(64, 24\) and \(2, 4\)"),
        (np.ones((), np.float32), weight("MXFP4"), ValueError, "axis"),
        (np.ones((2, 5, 64), np.float32), weight("MXFP4", (3, 64, 2), axis=1), ValueError, "leading axes"),
        (np.ones((2, 64), np.int32), weight("MXFP4"), TypeError, "int32"),
        (np.ones((2, 64), np.float64), weight("MXFP4"), TypeError, "float64"),
        ([[1.0] * 64], weight("MXFP4"), TypeError, "list"),
        (np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), TypeError, "neither"),
    ],
    ids=["k", "k_left", "0-d", "batch", "int32", "float64", "list", "dense"],
)
def test_refused(a, b, error, message):
    with pytest.raises(error, match=message):
        public(a, b)


# Hardware


@pytest.mark.parametrize(
    ("platform", "capability", "chosen"),
    [
        ("gpu", "10.0", True),
        ("gpu", "12.0", True),
        ("gpu", "9.0", False),
        ("gpu", "gfx950", False),
        ("cpu", None, False),
    ],
)
def test_hardware_is_chosen_by_capability(monkeypatch, platform, capability, chosen):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(module.jax, "devices", lambda: [device])
    assert module._has_scaled_matmul() is chosen


def test_this_machine_decodes():
    assert not module._has_scaled_matmul()


@pytest.mark.parametrize(
    ("a", "b", "suits"),
    [
        (("MXFP8_E4M3", 1), ("MXFP8_E5M2", 0), True),
        (("NVFP4", 1), ("NVFP4", 0), True),
        (("NVFP4", 1), ("MXFP8_E4M3", 0), False),
        (("MXFP8_E4M3", 0), ("MXFP8_E4M3", 0), False),
        (("MXFP4", 1), ("MXFP4", 0), False),
    ],
    ids=str,
)
def test_what_suits_hardware(a, b, suits):
    left, right = weight(a[0], (64, 64), axis=a[1]), weight(b[0], (64, 64), axis=b[1])
    assert module._suits_hardware(left, right) is suits
    assert not module._suits_hardware(np.ones((64, 64), np.float32), right)


@pytest.mark.parametrize("name", ["MXFP8_E4M3", "MXFP8_E5M2", "NVFP4"])
def test_the_hardware_program_multiplies_the_same_matrices(name):
    a, b = weight(name, (32, 128), jnp.asarray, axis=1), weight(name, (128, 16), jnp.asarray, seed=1)
    traced = jax.jit(module._hardware_dot).trace(a, b)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "block_scaled_dot" in text or "scaled_dot" in text
    operands = module._for_hardware(a), module._for_hardware(b.T)
    left, right = (
        np.asarray(elements[0]).astype(np.float64)
        * np.repeat(np.asarray(scales[0]).astype(np.float64), elements.shape[-1] // scales.shape[-1], -1)
        for elements, scales in operands
    )
    product = left @ right.T
    if name == "NVFP4":
        product = product * np.asarray(a.levels[1], np.float64) * np.asarray(b.levels[1], np.float64)
    np.testing.assert_allclose(product, in_float64(a, b), rtol=1e-5, atol=1e-5)


# The integer path


def mxint8(rng, shape, axis, exponents=(-3, 4)):
    scale = np.exp2(rng.integers(*exponents, shape))
    return quantize_blocks((rng.standard_normal(shape) * scale).astype(np.float32), DType.MXINT8, axis=axis)


def integer_oracle(a, b) -> np.ndarray:
    """Exact sums of a block's products times both scales, added in order with one rounding each."""
    x, y = a.elements.astype(object), b.elements.astype(object)
    x_scales, y_scales = (plane.view(np.uint8).astype(int) for plane in (a.scales, b.scales))
    result = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i, j in np.ndindex(*result.shape):
        total = 0
        for g in range(a.shape[1] // 32):
            block = slice(32 * g, 32 * (g + 1))
            power = int(x_scales[i, g]) + int(y_scales[g, j]) - 2 * 133
            term = Fraction(sum(x[i, block] * y[block, j])) * Fraction(2) ** power
            total = exact.rational(exact.round_f32(total + term))
        result[i, j] = float(total)
    return result


@pytest.mark.parametrize("library", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_integer_path_is_exact_up_to_its_additions(library, rng):
    a, b = mxint8(rng, (5, 96), -1), mxint8(rng, (96, 3), 0)
    on = lambda array: jax.tree_util.tree_map(library, array)  # noqa: E731
    got = block_dot(on(a), on(b), integer=True)
    assert isinstance(got, np.ndarray) == (library is np.asarray)
    np.testing.assert_array_equal(got, integer_oracle(a, b))
    np.testing.assert_array_equal(jax.jit(lambda a, b: block_dot(a, b, integer=True))(on(a), on(b)), got)


def test_integer_path_agrees_with_the_decoded_one(rng):
    a, b = mxint8(rng, (8, 512), -1), mxint8(rng, (512, 8), 0)
    magnitudes = np.abs(a.dequantize()).astype(np.float64) @ np.abs(b.dequantize()).astype(np.float64)
    difference = np.abs(block_dot(a, b, integer=True).astype(np.float64) - block_dot(a, b))
    assert (difference <= 512 * 2.0**-24 * magnitudes).all()


def test_integer_path_passes_nan_on(rng):
    x = rng.standard_normal((4, 64), np.float32)
    x[1, 40] = np.nan
    a = quantize_blocks(x, DType.MXINT8)
    got = block_dot(a, mxint8(rng, (64, 2), 0), integer=True)
    np.testing.assert_array_equal(np.isnan(got), np.arange(4)[:, None] == np.full((4, 2), 1))


@pytest.mark.parametrize("which", ["dense", "format", "axis"])
def test_integer_path_wants_blocks_of_mxint8_along_the_contracted_axis(which, rng):
    a = mxint8(rng, (32, 64), -1)
    other = {
        "dense": np.ones((64, 32), np.float32),
        "format": quantize_blocks(np.ones((64, 32), np.float32), DType.MXFP4, axis=0),
        "axis": mxint8(rng, (64, 32), -1),
    }[which]
    with pytest.raises(ValueError, match=r"integer=True wants MXINT8 .* of shape \(64, 32\)"):
        block_dot(a, other, integer=True)
