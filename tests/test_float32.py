"""The integer float32 arithmetic against NumPy's and against exact rationals."""

from __future__ import annotations

import exact
import jax
import numpy as np
import pytest

from jaxquant.ops import float32

OPERATIONS = {
    "multiply": (float32.multiply, np.multiply),
    "add": (float32.add, np.add),
    "subtract": (float32.subtract, np.subtract),
    "divide": (float32.divide, np.divide),
}
# fmt: off
SPECIAL = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x33800000, 0x34000000, 0x3EFFFFFF, 0x3F000000, 0x3F7FFFFF,
     0x3F800000, 0x4B000000, 0x4B800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000],
    np.uint32,
)
# fmt: on
SPECIAL = np.concatenate([SPECIAL, SPECIAL | np.uint32(1 << 31)])


def operands(rng, n):
    """Pairs of bit patterns: any, of near exponents, both tiny, near cancellation, short significands, special."""

    def bits():
        return rng.integers(0, 2**32, n, dtype=np.uint32)

    def with_exponent(low, high):
        exponent = rng.integers(low, high, n).astype(np.uint32) << np.uint32(23)
        return (bits() & np.uint32(0x807FFFFF)) | exponent

    middle, short = with_exponent(100, 150), np.uint32(0xFFF80000)
    close = middle ^ rng.integers(0, 8, n).astype(np.uint32) ^ np.uint32(1 << 31)
    pairs = [
        (bits(), bits()),
        (with_exponent(100, 150), with_exponent(100, 150)),
        (with_exponent(0, 30), with_exponent(0, 30)),
        (with_exponent(0, 30), with_exponent(100, 150)),
        (middle, close),
        (bits() & short, bits() & short),
        (np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))),
    ]
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_arithmetic_equals_numpy(rng, name, jit):
    ours, numpys = OPERATIONS[name]
    a, b = operands(rng, 200_000 if jit else 2_000)
    got = (jax.jit(ours) if jit else ours)(jax.numpy.asarray(a), jax.numpy.asarray(b))
    with np.errstate(all="ignore"):
        want = numpys(a.view(np.float32), b.view(np.float32))
    assert exact.same_bits(np.asarray(got).view(np.float32), want)


@pytest.mark.parametrize("name", OPERATIONS)
def test_constant_operands_fold_to_the_same_bits(rng, name):
    ours, numpys = OPERATIONS[name]
    a, b = operands(rng, 500)
    got = jax.jit(lambda: ours(jax.numpy.asarray(a), jax.numpy.asarray(b)))()
    with np.errstate(all="ignore"):
        want = numpys(a.view(np.float32), b.view(np.float32))
    assert exact.same_bits(np.asarray(got).view(np.float32), want)


@pytest.mark.parametrize(
    ("ours", "rational"),
    [
        (float32.multiply, exact.rational_multiply),
        (float32.add, exact.rational_add),
        (float32.subtract, exact.rational_subtract),
        (float32.divide, exact.rational_divide),
    ],
    ids=OPERATIONS,
)
def test_arithmetic_equals_rationals(rng, ours, rational):
    a, b = operands(rng, 200)
    got = np.asarray(jax.jit(ours)(a, b)).view(np.float32)
    want = np.array([rational(int(x), int(y)) for x, y in zip(a, b, strict=True)], np.uint32).view(np.float32)
    assert exact.same_bits(got, want)


def test_from_int32_rounds_to_nearest_even(rng):
    edges = [0, 1, -1, -(2**31), 2**31 - 1, 16777217, 16777219, -16777217, 33554433]
    x = np.concatenate([rng.integers(-(2**31), 2**31, 200_000), edges]).astype(np.int32)
    got = np.asarray(jax.jit(float32.from_int32)(x)).view(np.float32)
    assert exact.same_bits(got, x.astype(np.float32))


def test_from_float16_covers_every_pattern():
    bits = np.arange(65536, dtype=np.uint16)
    got = np.asarray(jax.jit(float32.from_float16)(bits)).view(np.float32)
    assert exact.same_bits(got, bits.view(np.float16).astype(np.float32))


def test_round_to_int8_is_half_even_and_saturates(rng):
    random_bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate(
        [
            rng.uniform(-300, 300, 100_000).astype(np.float32),
            np.arange(-600, 600, dtype=np.float32) / 2,
            np.nextafter(np.arange(-300, 300, dtype=np.float32) + np.float32(0.5), np.float32(np.inf)),
            random_bits[~np.isnan(random_bits)],
        ]
    )
    got = np.asarray(jax.jit(float32.round_to_int8)(x.view(np.uint32)))
    want = np.clip(np.rint(x.astype(np.float64)), -128, 127).astype(np.int32)
    np.testing.assert_array_equal(got, want)
    assert int(float32.round_to_int8(jax.numpy.uint32(0x7FC00000))) == 0
