"""The reference itself, against the contract's vectors, ggml's, and rational arithmetic."""

from __future__ import annotations

import exact
import numpy as np
import pytest


def f32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def bits_of(values) -> list[int]:
    return np.asarray(values, np.float32).reshape(-1).view(np.uint32).tolist()


def padded(*values: float) -> np.ndarray:
    return np.array([*values, *[0.0] * (256 - len(values))], np.float32)


# The contract's vectors

QUANTIZE_VECTORS = {
    "all +0": (padded(), 0, [0] * 256, [0] * 16),
    "all -0": (-padded(), 0, [0] * 256, [0] * 16),
    "tie": (padded(1, -1), 0x3C010204, [127, -127] + [0] * 254, [0] * 16),
    "all one": (np.ones(256, np.float32), 0xBC010204, [-127] * 256, [-2032] * 16),
    "ramp": (
        np.arange(-128, 128, dtype=np.float32),
        0x3F810204,
        None,
        [-1912, -1656, -1400, -1144, -904, -648, -392, -136, 120, 376, 632, 888, 1129, 1384, 1640, 1896],
    ),
    "halves": (
        padded(-127, 0.5, 1.5, 2.5, -0.5, -1.5),
        0x3F800000,
        [-127, 0, 2, 2, 0, -2] + [0] * 250,
        [-125] + [0] * 15,
    ),
}


@pytest.mark.parametrize("name", QUANTIZE_VECTORS)
@pytest.mark.parametrize("quantize", [exact.quantize, exact.rational_quantize], ids=["numpy", "rational"])
def test_quantize_vectors_of_the_contract(quantize, name):
    x, ds, q, bsum = QUANTIZE_VECTORS[name]
    fields = exact.decode_q8k(quantize(x))
    assert bits_of(fields.ds) == [ds]
    assert q is None or fields.q.tolist() == q
    assert fields.bsum.tolist() == bsum


def test_ramp_quantizes_to_the_contract_s_first_and_largest_q():
    q = exact.decode_q8k(exact.quantize(np.arange(-128, 128, dtype=np.float32))).q
    assert q[:3].tolist() == [-127, -126, -125]
    assert q.max() == 126


def contract_dot_records() -> tuple[np.ndarray, np.ndarray]:
    i, g = np.arange(256), np.arange(3)[:, None]
    w = ((37 * i[:144] + 11 + 101 * g) % 256).astype(np.uint8)
    scales = np.array([(0.5, 0.25), (-1.25, 0.75), (3.140625, -0.09997559)], np.float16)
    w[:, :4] = scales.view(np.uint8)
    x = ((73 * i + 19 + 31 * g) % 257 - 128).astype(np.float32) / np.float32(16)
    return w, exact.quantize(x)


def test_dot_vector_of_the_contract():
    w, x = contract_dot_records()
    steps = exact.statistics(w, x)
    assert steps.S.tolist() == [-209781, -132734, 221902]
    assert steps.T.tolist() == [-7083, 9900, 25041]
    assert bits_of(steps.v) == [0xC5CAFDDC, 0x461BFF1E, 0x472C199B]
    assert bits_of(exact.dot(w, x)) == [0x4739B9A7]
    assert exact.rational_dot(w, x) == 0x4739B9A7
    assert bits_of(exact.gemm(w[None], x[None])) == [0x4739B9A7]


def test_the_contract_s_dot_vector_tells_the_left_fold_from_the_right():
    v = exact.statistics(*contract_dot_records()).v
    assert bits_of(exact.left_fold(v)) == [0x4739B9A7]
    assert bits_of(v[0] + (v[1] + v[2])) == [0x4739B9A6]


def test_the_contract_s_dot_vector_tells_two_roundings_from_a_fused_one():
    w, x = contract_dot_records()
    a, steps = exact.decode_q4k(w), exact.statistics(w, x)
    fused = np.float64(a.d[2]) * np.float64(steps.S[2]) - np.float64(steps.n[2])
    assert bits_of(np.float32(fused) * exact.decode_q8k(x).ds[2]) != bits_of(steps.v[2])


def test_integers_above_24_bits_round():
    assert bits_of(np.int64(16777217).astype(np.float32)) == bits_of(16777216.0)
    assert exact.round_f32(exact.Fraction(16777217)) == bits_of(16777216.0)[0]


def test_the_smallest_legal_extreme():
    legal = exact.quantize(padded(*f32(exact.SMALLEST_EXTREME_BITS)))
    assert np.isfinite(exact.decode_q8k(legal).ds)
    assert exact.decode_q8k(legal).q.tolist() == [-127] + [0] * 255
    poison = exact.quantize(padded(*f32(exact.SMALLEST_EXTREME_BITS - 1)))
    assert poison.tolist() == [0, 0, 0xC0, 0x7F] + [0] * 288


# Golden files


def test_quantize_golden():
    golden = exact.load("q8k_quant")
    assert exact.same_bits(exact.quantize(golden["x"]), golden["contract"])


def test_decode_golden():
    golden = exact.load("q4k_records")
    fields = exact.decode_q4k(golden["records"])
    for name in exact.Q4K._fields:
        expected = golden[name]
        assert exact.same_bits(getattr(fields, name).astype(expected.dtype), expected), name
    assert exact.same_bits(exact.dequantize_q4k(golden["records"]), golden["dequant_ggml"])


def test_dot_golden():
    golden = exact.load("dots")
    w = exact.load("q4k_records")["records"][golden["w_index"]]
    x = exact.load("q8k_quant")["contract"][golden["x_index"]]
    steps = exact.statistics(w, x)
    assert steps.S.tolist() == golden["S"].tolist()
    assert steps.T.tolist() == golden["T"].tolist()
    assert exact.same_bits(steps.v, golden["v"])
    spans = zip(golden["offsets"][:-1], golden["offsets"][1:], golden["contract_leftfold"], strict=True)
    for number, (start, stop, expected) in enumerate(spans):
        assert exact.same_bits(exact.dot(w[start:stop], x[start:stop]), expected), number
        if number % 40 == 0:
            assert exact.rational_dot(w[start:stop], x[start:stop]) == bits_of(expected)[0], number


def test_gemv_golden():
    golden = exact.load("gemv_small")
    x = exact.quantize(golden["x_f32"].reshape(5, 2, 256))
    assert exact.same_bits(x, golden["x_q8k_contract"])
    assert exact.same_bits(exact.gemm(golden["w_q4k"], x), np.ascontiguousarray(golden["y_contract"].T))


def test_golden_qk():
    golden = exact.load("golden_qk")
    w, x = golden["q4k_rec"], golden["q8k_rec"]
    a, b, steps = exact.decode_q4k(w), exact.decode_q8k(x), exact.statistics(w, x)
    assert exact.same_bits(a.d, golden["q4k_d"].astype(np.float32))
    assert exact.same_bits(a.dmin, golden["q4k_dmin"].astype(np.float32))
    for field, expected in (
        (a.sc, golden["q4k_sc"]),
        (a.m, golden["q4k_m"]),
        (a.q, golden["q4k_q"]),
        (b.q, golden["q8k_q"]),
        (b.bsum, golden["q8k_bsum"]),
        (steps.S, golden["dot_S"]),
        (steps.T, golden["dot_T"]),
    ):
        assert field.tolist() == expected.tolist()
    assert exact.same_bits(b.ds, golden["q8k_ds"])
    assert exact.same_bits(steps.v, golden["dot_v"])
    assert exact.same_bits(exact.dequantize_q4k(w), golden["q4k_deq_gguf"])
    assert exact.same_bits(exact.quantize(golden["q8k_x"]), x)


# NumPy against rational arithmetic

SPECIAL = f32(
    0x00000000,
    0x80000000,
    0x00000001,
    0x80000001,
    0x007FFFFF,
    0x00800000,
    0x00800001,
    0x02FE0000,
    0x02FE0001,
    0x33800000,
    0x3F7FFFFF,
    0x3F800000,
    0xBF800000,
    0x3F800001,
    0x42FE0000,
    0x4B800000,
    0x7E800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
)


def operands(rng) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of special values, random bits, and random bits of close exponents."""
    a, b = (grid.reshape(-1) for grid in np.meshgrid(SPECIAL, SPECIAL))
    c, d = rng.integers(0, 1 << 32, (2, 1000), np.uint32).view(np.float32)
    e = rng.integers(0, 1 << 32, 1000, np.uint32)
    f = (e + rng.integers(0, 1 << 26, 1000, np.uint32)) ^ (
        rng.integers(0, 2, 1000, np.uint32) << np.uint32(31)
    )
    return np.concatenate([a, c, e.view(np.float32)]), np.concatenate([b, d, f.view(np.float32)])


@pytest.mark.parametrize(
    ("ufunc", "rational"),
    [
        pytest.param(np.multiply, exact.rational_multiply, id="multiply"),
        pytest.param(np.divide, exact.rational_divide, id="divide"),
        pytest.param(np.add, exact.rational_add, id="add"),
        pytest.param(np.subtract, exact.rational_subtract, id="subtract"),
    ],
)
def test_float_steps(rng, ufunc, rational):
    a, b = operands(rng)
    with np.errstate(all="ignore"):
        expected = ufunc(a, b)
    result = f32(*(rational(x, y) for x, y in zip(bits_of(a), bits_of(b), strict=True)))
    assert exact.same_bits(result, expected)


@pytest.mark.parametrize("kind", exact.KINDS + exact.POISON_KINDS)
def test_quantize_against_rational(rng, kind):
    x = exact.blocks(rng, kind, 6)
    assert exact.same_bits(exact.quantize(x), np.stack([exact.rational_quantize(block) for block in x]))


@pytest.mark.parametrize(
    "activations", [exact.random_q8k, exact.random_illegal_q8k], ids=["legal", "illegal"]
)
@pytest.mark.parametrize("groups", [0, 1, 2, 5])
def test_dot_against_rational(rng, activations, groups):
    w, x = exact.random_q4k(rng, (20, groups)), activations(rng, (20, groups))
    expected = f32(*(exact.rational_dot(a, b) for a, b in zip(w, x, strict=True)))
    assert exact.same_bits(exact.dots(w, x), expected)
    assert exact.same_bits(exact.dot(w[7], x[7]), expected[7])


def test_gemm_holds_every_dot(rng):
    w, x = exact.random_q4k(rng, (5, 3)), exact.random_q8k(rng, (7, 3))
    assert exact.same_bits(exact.gemm(w, x), exact.dots(w[:, None], x))


def test_left_fold_has_no_initial_term():
    assert bits_of(exact.left_fold(np.array([-0.0], np.float32))) == [0x80000000]
    assert bits_of(exact.left_fold(np.array([], np.float32))) == [0]


def test_every_dot_of_a_poison_record_is_nan(rng):
    w = exact.random_q4k(rng, (50, 2))
    x = np.stack([exact.POISON, exact.random_q8k(rng, (1,))[0]])
    assert np.isnan(exact.dots(w, x)).all()


def test_dot_of_zero_activations_is_zero(rng):
    w = exact.random_q4k(rng, (50, 1))
    w[..., 1] &= 0x7B  # d and dmin finite and not negative
    w[..., 3] &= 0x7B
    assert bits_of(exact.dots(w, exact.quantize(np.zeros((1, 256), np.float32)))) == [0] * 50


# The generators


def test_random_q4k_covers_every_scale():
    records = exact.random_q4k(np.random.default_rng(1), (256, 256), finite=0)
    for start in (0, 2):
        patterns = records[..., start] | records[..., start + 1].astype(np.int64) << 8
        assert len(np.unique(patterns)) == 65536


def test_random_q4k_keeps_rows_finite():
    fields = exact.decode_q4k(exact.random_q4k(np.random.default_rng(1), (400, 64)))
    finite = (np.isfinite(fields.d) & np.isfinite(fields.dmin)).all(-1)
    assert 100 < finite.sum() < 300


def test_random_q8k_is_legal_and_covers_every_kind_of_scale(rng):
    fields = exact.decode_q8k(exact.random_q8k(rng, (500, 8)))
    assert (fields.bsum == fields.q.reshape(500, 8, 16, 16).sum(-1)).all()
    assert fields.bsum.min() == -2048
    assert fields.q.min() == -128
    assert fields.q.max() == 127
    magnitude = np.abs(fields.ds)
    for kind in (
        np.isnan(magnitude),
        np.isinf(magnitude),
        magnitude == 0,
        (magnitude > 0) & (magnitude < np.finfo(np.float32).tiny),
        (magnitude >= np.finfo(np.float32).tiny) & (magnitude < 1e-30),
        (magnitude > 1e-3) & (magnitude < 1e3),
    ):
        assert (kind & np.signbit(fields.ds)).any()
        assert (kind & ~np.signbit(fields.ds)).any()


def test_random_dots_tell_the_order_of_the_fold_and_reach_subnormals(rng):
    v = exact.statistics(exact.random_q4k(rng, (500, 5), finite=0), exact.random_q8k(rng, (500, 5))).v
    fold, backwards = exact.left_fold(v), exact.left_fold(v[:, ::-1])
    finite = np.isfinite(fold)
    assert (fold[finite] != backwards[finite]).mean() > 0.1
    assert ((np.abs(v) > 0) & (np.abs(v) < np.finfo(np.float32).tiny)).any()


def test_random_illegal_q8k_differs_only_in_bsum(rng):
    fields = exact.decode_q8k(exact.random_illegal_q8k(rng, (100,)))
    assert (fields.bsum != fields.q.reshape(100, 16, 16).sum(-1)).any(-1).all()
    assert {-32768, 32767} <= set(fields.bsum.reshape(-1).tolist())


@pytest.mark.parametrize("kind", exact.KINDS)
def test_blocks_are_legal(rng, kind):
    x = exact.blocks(rng, kind, 200)
    assert np.isfinite(exact.decode_q8k(exact.quantize(x)).ds).all()


@pytest.mark.parametrize("kind", exact.POISON_KINDS)
def test_poison_blocks_are_out_of_domain(rng, kind):
    records = exact.quantize(exact.blocks(rng, kind, 200))
    assert (records == exact.POISON).all()


def test_blocks_hold_what_their_names_say(rng):
    tiny = np.finfo(np.float32).tiny
    x = exact.blocks(rng, "ties", 50)
    assert (x.max(-1) == -x.min(-1)).all()
    ds = np.abs(exact.decode_q8k(exact.quantize(exact.blocks(rng, "subnormal_ds", 50))).ds)
    assert ((ds > 0) & (ds < tiny)).all()
    x = np.abs(exact.blocks(rng, "subnormal_values", 50))
    assert ((x < tiny).sum(-1) == 255).all()
    assert (exact.blocks(rng, "bf16_rounded", 50).view(np.uint32) & 0xFFFF == 0).all()
    assert ((exact.blocks(rng, "one_hot", 50) != 0).sum(-1) == 1).all()
    assert (np.abs(exact.blocks(rng, "near_max", 50)).max(-1) > 3.39e38).all()
    x = exact.blocks(rng, "halves", 50)[::2]
    scaled = x / exact.decode_q8k(exact.quantize(x)).ds[:, None]
    assert ((scaled[:, 1:] % 1) == 0.5).all()


# same_bits


def test_same_bits():
    zero, one = np.float32(0), np.float32(1)
    assert exact.same_bits(f32(0x7FC00000), f32(0xFFC00001))
    assert exact.same_bits(one, np.asarray(one))
    assert not exact.same_bits(zero, -zero)
    assert not exact.same_bits(f32(1), f32(2))
    assert not exact.same_bits(f32(0x7FC00000), one[None])
    assert not exact.same_bits(one, np.float64(1))
    assert not exact.same_bits(np.zeros(2, np.float32), np.zeros((1, 2), np.float32))
    assert not exact.same_bits(np.array([3], np.int8), np.array([4], np.int8))
