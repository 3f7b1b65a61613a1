"""Encode, decode and cast against the golden vectors and the oracle of tables, NumPy and JAX alike."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import cast_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cast_oracle import BY_NAME, DIRECTIONS, E8M0, FLOATS, FORMATS, INTEGERS, policies
from jax.experimental import checkify

from jaxquant.casts import cast, decode, encode
from jaxquant.dtypes import DType, SimpleDType

DATA = Path(__file__).parent / "data"
CAST = np.load(DATA / "golden_cast.npz")
DECODE = np.load(DATA / "golden_decode.npz")
GOLDEN_NAMES = {
    "E4M3": "e4m3fn",
    "E5M2": "e5m2",
    "E3M2": "e3m2fn",
    "E2M3": "e2m3fn",
    "E2M1": "e2m1fn",
    "E8M0": "e8m0fnu",
}
SOURCES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

GOLDEN_MODES = {
    "rne": "nearest_even",
    "rtz": "toward_zero",
    "rup": "up",
    "rdn": "down",
    "rna": "nearest_away",
}
GOLDEN_E8M0 = {"rne": "nearest_even", "floor": "toward_zero", "ceil": "up", "rhalfup": "nearest_away"}

# How each implementation is called: NumPy arrays in, NumPy arrays out.
RUNS = {
    "numpy": lambda f, x: f(x),
    "eager": lambda f, x: np.asarray(f(jnp.asarray(x))),
    "jit": lambda f, x: np.asarray(jax.jit(f)(jnp.asarray(x))),
    "vmap": lambda f, x: np.asarray(jax.vmap(f)(jnp.asarray(x).reshape(-1, 1))).reshape(x.shape),
    "constant": lambda f, x: np.asarray(jax.jit(lambda: f(jnp.asarray(x)))()),
}


def named(formats):
    return pytest.mark.parametrize("format", formats, ids=[f.name for f in formats])


runs = pytest.mark.parametrize("run", [RUNS["numpy"], RUNS["eager"]], ids=["numpy", "eager"])
all_runs = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def modes(format):
    return [(rounding, overflow) for rounding in DIRECTIONS for overflow in policies(format)]


def assert_same_codes(got, want, x, what):
    assert got.dtype == np.uint8
    assert got.shape == want.shape
    wrong = np.flatnonzero(got != want)
    shown = [(float(x[i]), int(got[i]), int(want[i])) for i in wrong[:5]]
    assert not wrong.size, f"{what}: {wrong.size} of {x.size} differ; (x, got, wanted): {shown}"


class TestDecode:
    @all_runs
    @named([*FLOATS, E8M0])
    def test_golden_bits(self, run, format):
        want = DECODE[f"{GOLDEN_NAMES[format.name]}_f32bits"]
        codes = np.arange(want.size, dtype=np.uint8)
        got = run(lambda c: decode(c, format.name), codes)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view(np.uint32), want)

    @runs
    def test_golden_int8_is_64_times_its_mxint8_value(self, run):
        got = run(lambda c: decode(c, "Int8"), np.arange(256, dtype=np.uint8))
        np.testing.assert_array_equal(got / np.float32(64), DECODE["int8_f32"])

    @all_runs
    @named(INTEGERS)
    def test_integers(self, run, format):
        got = run(lambda c: decode(c, format.dtype), np.arange(256, dtype=np.uint8))
        low = [code % (1 << format.bits) for code in range(256)]
        assert got.tolist() == [
            code - (1 << format.bits) if format.signed and code > format.largest else code for code in low
        ]

    @runs
    @named([f for f in FORMATS if f.bits < 8])
    def test_bits_above_the_format_are_ignored(self, run, format):
        codes = np.arange(256, dtype=np.uint8)
        got = run(lambda c: decode(c, format.dtype), codes)
        want = decode(codes & np.uint8((1 << format.bits) - 1), format.dtype)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))

    def test_shapes_and_emptiness(self):
        for library in (np, jnp):
            assert decode(library.zeros((2, 0, 3), np.uint8), "E2M1").shape == (2, 0, 3)
            scalar = decode(library.asarray(7, np.uint8), "E2M1")
            assert (scalar.shape, scalar.dtype, float(scalar)) == ((), np.float32, 6.0)
        assert isinstance(decode(np.asarray(7, np.uint8), "E2M1"), np.ndarray)
        assert isinstance(decode(jnp.zeros(3, jnp.uint8), "E2M1"), jax.Array)


class TestGolden:
    @runs
    @pytest.mark.parametrize("mode", GOLDEN_MODES)
    @named(FLOATS)
    def test_floats_saturating(self, run, format, mode):
        prefix = GOLDEN_NAMES[format.name]
        x, want = CAST[f"{prefix}_x"], CAST[f"{prefix}_{mode}_sat"]
        rounding = GOLDEN_MODES[mode]
        got = run(lambda x: encode(x, format.name, rounding=rounding, overflow="saturate"), x)
        # The rows of NaN are expectations under nearest_even alone.
        rows = np.full(x.shape, True) if mode == "rne" else ~np.isnan(x)
        assert (want[rows] >= 0).all()
        assert_same_codes(got[rows], want[rows], x[rows], format.name)

    @runs
    @pytest.mark.parametrize("mode", GOLDEN_E8M0)
    def test_e8m0_saturating(self, run, mode):
        x = CAST["e8m0fnu_x"]
        rounding = GOLDEN_E8M0[mode]
        got = run(lambda x: encode(x, "E8M0", rounding=rounding, overflow="saturate"), x)
        assert_same_codes(got, CAST[f"e8m0fnu_{mode}_sat"], x, "E8M0")


class TestEncode:
    @pytest.mark.parametrize("run", [RUNS["numpy"], RUNS["jit"]], ids=["numpy", "jit"])
    @named(FORMATS)
    def test_edges_in_every_mode(self, run, format):
        x = cast_oracle.edges(format)
        wanted = cast_oracle.encodings(x, format, modes(format))
        for (rounding, overflow), want in zip(modes(format), wanted, strict=True):
            got = run(lambda x, r=rounding, o=overflow: encode(x, format.dtype, rounding=r, overflow=o), x)
            assert_same_codes(got, want, x, (format.name, rounding, overflow))

    @all_runs
    @named(FORMATS)
    def test_edges(self, run, format):
        x = cast_oracle.edges(format)
        assert_same_codes(
            run(lambda x: encode(x, format.dtype), x), cast_oracle.encode(x, format), x, format.name
        )

    @named(FORMATS)
    def test_random_bits(self, rng, format):
        check_every_mode(rng.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32), format)

    @pytest.mark.parametrize("source", ["float16", "bfloat16"])
    @named(FORMATS)
    def test_random_halves(self, rng, format, source):
        x = rng.integers(0, 1 << 16, 20_000, np.uint16).view(SOURCES[source])
        want = cast_oracle.encode(x, format)
        assert_same_codes(encode(x, format.dtype), want, x, format.name)
        assert_same_codes(np.asarray(encode(jnp.asarray(x), format.dtype)), want, x, format.name)

    @runs
    @named(FORMATS)
    def test_every_code_comes_back(self, run, format):
        codes = np.arange(1 << format.bits, dtype=np.uint8)
        values = decode(codes, format.dtype)
        kept = ~np.isnan(values)
        got = run(lambda x: encode(x, format.dtype), values)
        assert_same_codes(got[kept], codes[kept], values[kept], format.name)
        assert set(got[~kept].tolist()) <= {format.nan}

    @runs
    @named(FLOATS)
    def test_the_default_is_that_of_ml_dtypes_but_for_nan(self, rng, run, format):
        x = rng.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32)
        x = np.concatenate([x, cast_oracle.edges(format), CAST[f"{GOLDEN_NAMES[format.name]}_x"]])
        x = x[~np.isnan(x)]
        want = x.astype(DType.from_name(format.name).numpy_dtype).view(np.uint8)
        assert_same_codes(run(lambda x: encode(x, format.name), x), want, x, format.name)

    @named(FORMATS)
    @pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
    def test_x64_changes_nothing(self, format, x64):
        x = cast_oracle.edges(format)
        with jax.enable_x64(x64):
            eager = np.asarray(encode(jnp.asarray(x), format.dtype))
            jitted = np.asarray(jax.jit(lambda x: encode(x, format.dtype))(jnp.asarray(x)))
            values = decode(jnp.asarray(eager), format.dtype)
            assert values.dtype == np.float32
        want = cast_oracle.encode(x, format)
        assert_same_codes(eager, want, x, format.name)
        assert_same_codes(jitted, want, x, format.name)
        np.testing.assert_array_equal(
            np.asarray(values).view(np.uint32), decode(want, format.dtype).view(np.uint32)
        )

    @runs
    @named(FORMATS)
    def test_nan_has_one_code(self, run, format):
        x = np.uint32([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF]).view(np.float32)
        for rounding, overflow in modes(format):
            got = run(lambda x, r=rounding, o=overflow: encode(x, format.dtype, rounding=r, overflow=o), x)
            assert got.tolist() == [format.nan] * 4
        for dtype in SOURCES.values():
            got = run(lambda x: encode(x, format.dtype), np.array([np.nan, -np.nan], dtype))
            assert got.tolist() == [format.nan] * 2

    def test_one_rounding_from_float32(self):
        # Through float16 it would be 1.3125 first, a tie, and then 1.25.
        assert decode(encode(np.float32([1.31640625]), "E4M3"), "E4M3") == 1.375

    @pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
    def test_infinities_under_both_policies(self, library):
        x = library.asarray(np.float32([np.inf, -np.inf]))
        for rounding in DIRECTIONS:
            assert encode(x, "E4M3", rounding=rounding).tolist() == [0x7F, 0xFF]
            assert encode(x, "E5M2", rounding=rounding).tolist() == [0x7C, 0xFC]
            assert encode(x, "E4M3", rounding=rounding, overflow="saturate").tolist() == [0x7E, 0xFE]
            assert encode(x, "E5M2", rounding=rounding, overflow="saturate").tolist() == [0x7B, 0xFB]
            assert encode(x, "E2M1", rounding=rounding).tolist() == [0x7, 0xF]
            assert encode(x, "E8M0", rounding=rounding, overflow="saturate").tolist() == [255, 255]
            assert encode(x, ml_dtypes.int4, rounding=rounding).tolist() == [7, 8]

    def test_finite_values_overflow_only_away_from_zero(self):
        x = np.float32([1e9, -1e9])
        assert encode(x, "E5M2", rounding="toward_zero").tolist() == [0x7B, 0xFB]
        assert encode(x, "E5M2", rounding="up").tolist() == [0x7C, 0xFB]
        assert encode(x, "E5M2", rounding="down").tolist() == [0x7B, 0xFC]

    @pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
    def test_e8m0_ends(self, library):
        x = library.asarray(np.float32([0, -0.0, 1e-45, 2.0**-126, 1.5 * 2.0**127, 2.0**127, -1, -1e-45]))
        assert encode(x, "E8M0").tolist() == [0, 0, 0, 1, 255, 254, 255, 255]
        assert encode(x, "E8M0", overflow="saturate").tolist() == [0, 0, 0, 1, 254, 254, 255, 255]

    def test_dtype_in_every_spelling(self):
        x = np.float32([-3, 0.7])
        for dtype in (
            DType.E2M1,
            "E2M1",
            ml_dtypes.float4_e2m1fn,
            np.dtype(ml_dtypes.float4_e2m1fn),
            jnp.float4_e2m1fn,
        ):
            assert encode(x, dtype).tolist() == [13, 1]
        four = SimpleDType("test_casts.Int4", bits=4, supertype=DType.Integer, scalar_type=ml_dtypes.int4)
        for dtype in (four, ml_dtypes.int4, jnp.int4):
            assert encode(x, dtype).tolist() == [13, 1]

    def test_shapes_and_libraries(self):
        for library, kind in ((np, np.ndarray), (jnp, jax.Array)):
            for shape in ((), (0,), (2, 3), (2, 0, 3)):
                codes = encode(library.ones(shape, np.float32), "E4M3")
                assert isinstance(codes, kind)
                assert (codes.shape, codes.dtype) == (shape, np.uint8)
        x = np.arange(24, dtype=np.float32).reshape(4, 6)
        np.testing.assert_array_equal(encode(x.T[::2], "E4M3"), encode(x, "E4M3").T[::2])

    def test_derivative_is_zero(self):
        x = jnp.float32([0.3, 400])
        gradient = jax.grad(lambda x: decode(encode(x, "E4M3"), "E4M3").sum())(x)
        assert gradient.tolist() == [0, 0]
        assert jax.grad(lambda x: cast(x, "E4M3").astype(np.float32).sum())(x).tolist() == [0, 0]

    def test_checkify_reports_nan(self):
        checked = jax.jit(checkify.checkify(lambda x: encode(x, "E2M1"), errors=checkify.user_checks))
        error, codes = checked(jnp.float32([[1, 2], [np.nan, 4]]))
        assert codes.tolist() == [[2, 4], [0, 6]]
        with pytest.raises(checkify.JaxRuntimeError, match=r"encode: x is NaN at index \(1, 0\)"):
            error.throw()
        error, _ = checked(jnp.float32([[1, 2], [np.inf, 4]]))
        assert error.get() is None

    def test_export(self):
        from jax import export

        x = jnp.asarray(cast_oracle.edges(BY_NAME["E4M3"]))
        exported = export.export(jax.jit(lambda x: encode(x, "E4M3")))(x)
        again = export.deserialize(exported.serialize())
        assert_same_codes(np.asarray(again.call(x)), encode(np.asarray(x), "E4M3"), np.asarray(x), "exported")

    def test_one_trace_for_one_format(self):
        traces = []

        @jax.jit
        def f(x):
            traces.append(x.shape)
            return encode(x, DType.E2M1)

        f(jnp.ones(4))
        f(jnp.zeros(4))
        assert traces == [(4,)]


def check_every_mode(x, format):
    wanted = cast_oracle.encodings(x, format, modes(format))
    on_device = jnp.asarray(x)
    for (rounding, overflow), want in zip(modes(format), wanted, strict=True):
        for library, operand in (("numpy", x), ("jax", on_device)):
            got = np.asarray(encode(operand, format.dtype, rounding=rounding, overflow=overflow))
            assert_same_codes(got, want, x, (format.name, rounding, overflow, library))


class TestExhaustive:
    @pytest.mark.parametrize("source", ["float16", "bfloat16"])
    @pytest.mark.parametrize("name", ["E4M3", "E2M1"])
    def test_all_16_bit_patterns_of_the_default(self, name, source):
        x = np.arange(1 << 16, dtype=np.uint16).view(SOURCES[source])
        want = cast_oracle.encode(x, BY_NAME[name])
        assert_same_codes(encode(x, name), want, x, name)
        assert_same_codes(np.asarray(encode(jnp.asarray(x), name)), want, x, name)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("source", ["float16", "bfloat16"])
    @named(FORMATS)
    def test_all_16_bit_patterns(self, format, source):
        check_every_mode(np.arange(1 << 16, dtype=np.uint16).view(SOURCES[source]), format)

    @pytest.mark.exhaustive
    @named(FORMATS)
    def test_float32_patterns_256_apart(self, format):
        # Every value and midpoint of a narrow format is among them.
        for start in range(0, 1 << 32, 1 << 28):
            check_every_mode(np.arange(start, start + (1 << 28), 256, np.uint32).view(np.float32), format)

    @pytest.mark.exhaustive
    @named(FORMATS)
    def test_float32_patterns_an_odd_step_apart(self, format):
        for start in range(0, 1 << 32, 1 << 28):
            check_every_mode(
                np.arange(start + 255, start + (1 << 28), 257, np.uint32).view(np.float32), format
            )


BETWEEN_CODES = {
    "normal": ("E4M3", 1.03125),
    "negative": ("E4M3", -1.09375),
    "subnormal": ("E4M3", 0.0005),
    "far below the smallest subnormal": ("E5M2", 2.0**-20),
    "fp4": ("E2M1", 4.2),
    "fp6": ("E3M2", -0.01),
    "power of two": ("E8M0", 1.2),
    "subnormal float32": ("E8M0", 1.25 * 2.0**-127),
    "integer": ("Int8", -3.9),
}


class TestStochastic:
    KEY = 7

    @pytest.mark.parametrize(
        "run", [RUNS["numpy"], RUNS["eager"], RUNS["jit"]], ids=["numpy", "eager", "jit"]
    )
    @named(FORMATS)
    def test_goes_away_from_zero_where_the_random_word_is_below_the_distance(self, rng, run, format):
        table = [Fraction(value) for value in cast_oracle.magnitudes(format).tolist()]
        size = 600
        scale = float(table[-1])
        x = np.abs(rng.standard_normal(size)) * scale * 2.0 ** rng.integers(-40, 2, size)
        x = np.clip(x, 0, np.finfo(np.float32).max).astype(np.float32)
        x[:8] = cast_oracle.edges(format)[:8]
        x = x * np.where(rng.random(size) < 0.5, 1, -1).astype(np.float32) if format.signed else x
        key = jax.random.key(self.KEY)
        words = np.asarray(jax.random.bits(key, x.shape, np.uint32)).tolist()
        want = [self._code(Fraction(float(v)), word, format, table) for v, word in zip(x, words, strict=True)]
        if format.signed and format in FLOATS:
            want = [
                c | (1 << (format.bits - 1)) if np.signbit(v) else c for c, v in zip(want, x, strict=True)
            ]
        elif format.signed:
            want = [-c % (1 << format.bits) if np.signbit(v) else c for c, v in zip(want, x, strict=True)]
        got = run(lambda x: encode(x, format.dtype, rounding="stochastic", overflow="saturate", key=key), x)
        assert_same_codes(got, np.array(want, np.uint8), x, format.name)

    @staticmethod
    def _code(value, word, format, table):
        """The code of |value|, saturated (at `largest`, or one more for a negative integer)."""
        absolute = abs(value)
        last = format.largest + (format in INTEGERS and format.signed and value < 0)
        if absolute <= table[0]:
            return 0
        below = max(i for i in range(len(table)) if table[i] <= absolute)
        if below >= len(table) - 1:
            return last
        share = (absolute - table[below]) / (table[below + 1] - table[below])
        return min(below + (word < (share * 2**32).__floor__()), last)

    @pytest.mark.parametrize("case", BETWEEN_CODES)
    def test_is_unbiased(self, case):
        name, value = BETWEEN_CODES[case]
        x = np.full(1 << 16, value, np.float32)
        codes = np.asarray(encode(jnp.asarray(x), name, rounding="stochastic", key=jax.random.key(3)))
        values = decode(codes, name).astype(np.float64)
        low, high = sorted(set(values.tolist()))
        assert low < float(x[0]) < high
        share = (float(x[0]) - low) / (high - low)
        deviation = (share * (1 - share) / x.size) ** 0.5
        assert abs((values == high).mean() - share) < 4 * deviation

    @named(FORMATS)
    def test_exact_values_stay(self, format):
        values = decode(np.arange(1 << format.bits, dtype=np.uint8), format.dtype)
        values = np.repeat(values[np.isfinite(values)], 64)
        got = encode(values, format.dtype, rounding="stochastic", key=jax.random.key(0))
        assert_same_codes(got, encode(values, format.dtype), values, format.name)

    def test_overflow_is_judged_after_rounding(self):
        x = np.full(1000, 470, np.float32)
        codes = encode(x, "E4M3", rounding="stochastic", key=jax.random.key(1))
        assert set(codes.tolist()) == {0x7E, 0x7F}
        assert set(encode(x + 10, "E4M3", rounding="stochastic", key=jax.random.key(1)).tolist()) == {0x7F}

    def test_keys_matter(self):
        x = np.full(64, 1.05, np.float32)
        a, b = (encode(x, "E4M3", rounding="stochastic", key=jax.random.key(seed)) for seed in (0, 1))
        assert (a != b).any()


class TestCast:
    @named(FORMATS)
    def test_numpy(self, format):
        x = cast_oracle.edges(format)
        got = cast(x, format.dtype)
        assert got.dtype == numpy_dtype(format)
        want = decode(cast_oracle.encode(x, format), format.dtype)
        np.testing.assert_array_equal(got.astype(np.float32), want)

    @pytest.mark.parametrize(
        "run", [RUNS["eager"], RUNS["jit"], RUNS["constant"]], ids=["eager", "jit", "constant"]
    )
    @named([f for f in FORMATS if f.bits != 6])
    def test_jax(self, run, format):
        x = cast_oracle.edges(format)
        got = run(lambda x: cast(x, format.dtype), x)
        assert got.dtype == numpy_dtype(format)
        want = cast(x, format.dtype)
        mask = np.uint8((1 << format.bits) - 1)
        np.testing.assert_array_equal(got.view(np.uint8) & mask, want.view(np.uint8) & mask)

    @pytest.mark.parametrize("name", ["E3M2", "E2M3"])
    def test_six_bits_are_refused_under_jax(self, name):
        with pytest.raises(TypeError, match=r"JAX has no arrays of float6_.*encode"):
            cast(jnp.ones(4), name)
        with pytest.raises(TypeError, match=r"JAX has no arrays of float6_.*encode"):
            jax.jit(lambda x: cast(x, name))(jnp.ones(4))

    def test_options(self):
        assert cast(np.float32([1.9]), "Int8", rounding="toward_zero").tolist() == [1]
        assert cast(jnp.float32([1e9]), "E4M3", overflow="saturate").astype(np.float32).tolist() == [448]


def numpy_dtype(format):
    try:
        return DType.from_name(format.name).numpy_dtype
    except LookupError:
        return np.dtype(format.dtype)


class TestBadInput:
    @pytest.mark.parametrize(
        "dtype", [np.float64, np.int32, np.uint8, ml_dtypes.float8_e4m3fn, np.complex64, bool]
    )
    def test_source_dtype(self, dtype):
        for operation in (encode, cast):
            with pytest.raises(TypeError, match=r"x has dtype .*, wanted float16, bfloat16 or float32"):
                operation(np.zeros(3, dtype), "E4M3")

    @pytest.mark.parametrize("x", [1.0, [1.0], np.float32(1), None], ids=["float", "list", "scalar", "None"])
    def test_source_kind(self, x):
        for operation in (encode, cast):
            with pytest.raises(TypeError, match=r"x must be a jax.Array or numpy.ndarray, got"):
                operation(x, "E4M3")

    @pytest.mark.parametrize(
        "dtype",
        [
            np.float32,
            np.int32,
            ml_dtypes.bfloat16,
            np.bool_,
            "Float32",
            "Bool",
            ml_dtypes.float8_e4m3fnuz,
            np.complex64,
        ],
        ids=str,
    )
    def test_target_of_another_kind(self, dtype):
        for operation, operand in (
            (encode, np.ones(3, np.float32)),
            (cast, np.ones(3, np.float32)),
            (decode, np.uint8([1])),
        ):
            with pytest.raises(TypeError, match=r"dtype must be E4M3, .*, got"):
                operation(operand, dtype)

    def test_target_without_values(self):
        five = SimpleDType("test_casts.Five", bits=5, supertype=DType.Any)
        with pytest.raises(TypeError, match=r"dtype must be E4M3, .*test_casts.Five"):
            encode(np.ones(3, np.float32), five)

    @pytest.mark.parametrize("dtype", [DType.MXFP4, DType.Floating, None, 4, np.zeros(3)], ids=repr)
    def test_target_that_is_no_simple_dtype(self, dtype):
        with pytest.raises(TypeError, match="wanted a"):
            encode(np.ones(3, np.float32), dtype)

    def test_unknown_name(self):
        with pytest.raises(LookupError, match="float4"):
            encode(np.ones(3, np.float32), "float4")

    @pytest.mark.parametrize(
        "codes", [np.zeros(3, np.int8), np.zeros(3, np.int32), jnp.zeros(3)], ids=["i8", "i32", "f32"]
    )
    def test_codes_dtype(self, codes):
        with pytest.raises(TypeError, match=r"codes has dtype .*, wanted uint8"):
            decode(codes, "E4M3")
        with pytest.raises(TypeError, match=r"codes must be a jax.Array or numpy.ndarray, got list"):
            decode([1], "E4M3")

    def test_modes(self):
        x = np.ones(3, np.float32)
        with pytest.raises(ValueError, match=r"rounding must be one of .* got 'nearest'"):
            encode(x, "E4M3", rounding="nearest")
        with pytest.raises(ValueError, match=r"overflow must be None or one of .* got 'wrap'"):
            encode(x, "E4M3", overflow="wrap")
        with pytest.raises(ValueError, match=r"go together.* no key"):
            encode(x, "E4M3", rounding="stochastic")
        with pytest.raises(ValueError, match=r"go together.* a key"):
            encode(x, "E4M3", key=jax.random.key(0))

    @named([f for f in FORMATS if f.overflowed is None])
    def test_overflow_needs_somewhere_to_go(self, format):
        with pytest.raises(ValueError, match='overflow="overflow" needs an infinity or NaN'):
            encode(np.ones(3, np.float32), format.dtype, overflow="overflow")


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
class TestCases:
    """Public bug reports of peers, by their number."""

    def test_e01_saturating_e4m3(self, library):
        x = library.asarray(np.float32([448, 464, 464.00003, 480, 1e9, -1e9]))
        assert encode(x, "E4M3", overflow="saturate").tolist() == [0x7E] * 5 + [0xFE]

    def test_e05_nearest_even(self, library):
        codes = encode(library.asarray(np.float32([4.25, 4.75])), "E4M3")
        assert decode(codes, "E4M3").tolist() == [4, 5]

    def test_e06_subnormals_decode(self, library):
        codes = library.asarray(np.uint8([1, 7, 8]))
        assert decode(codes, "E4M3").tolist() == [0.001953125, 0.013671875, 0.015625]

    def test_e08_e8m0_below_its_smallest(self, library):
        x = library.asarray(np.float32([1e-45, 2.0**-128, 2.0**-127]))
        assert encode(x, "E8M0", overflow="saturate").tolist() == [0, 0, 0]

    @pytest.mark.parametrize("name", ["E2M1", "E3M2", "E2M3"])
    def test_e10_nan_without_a_nan(self, library, name):
        assert encode(library.asarray(np.float32([np.nan, -np.nan])), name).tolist() == [0, 0]

    def test_e13_int4_saturates(self, library):
        x = library.asarray(np.float32([8, -9, 300, 7]))
        codes = encode(x, ml_dtypes.int4)
        assert decode(codes, ml_dtypes.int4).tolist() == [7, -8, 7, 7]
        assert cast(x, ml_dtypes.int4).astype(np.int32).tolist() == [7, -8, 7, 7]
