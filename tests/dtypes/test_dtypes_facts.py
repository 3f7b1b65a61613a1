"""Float facts against an independent decoder of all codes, and against ml_dtypes.finfo."""

from __future__ import annotations

import math
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dtype_samples import FLOAT16

from jaxquant.dtypes import BlockScaledDType, DType, DTypeCategory, SimpleDType

# sign, exponent, significand bits, and which codes are not finite, as the format documents (OCP MX v1.0, IEEE 754)
# define them.
FIELDS = {
    "Float64": (1, 11, 52, "ieee"),
    "Float32": (1, 8, 23, "ieee"),
    "E8M0": (0, 8, 0, "all-ones"),
    "E5M2": (1, 5, 2, "ieee"),
    "E4M3": (1, 4, 3, "all-ones"),
    "E3M2": (1, 3, 2, "finite"),
    "E2M3": (1, 2, 3, "finite"),
    "E2M1": (1, 2, 1, "finite"),
}
SIMPLE_TYPES = {
    "Float64": np.float64,
    "Float32": np.float32,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
NARROW = [name for name in FIELDS if not name.startswith("Float")]


def decode(name: str, code: int) -> Fraction | float:
    """The exact value of one code: a Fraction, or an infinity or NaN."""
    sign_bits, exponent_bits, significand_bits, nonfinite = FIELDS[name]
    significand = code % 2**significand_bits
    exponent = code >> significand_bits & 2**exponent_bits - 1
    negative = sign_bits and code >> significand_bits + exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    top = exponent == 2**exponent_bits - 1
    if nonfinite == "ieee" and top:
        return math.nan if significand else (-math.inf if negative else math.inf)
    if nonfinite == "all-ones" and top and significand == 2**significand_bits - 1:
        return math.nan
    if exponent == 0 and sign_bits:
        value = Fraction(significand, 2**significand_bits) * Fraction(2) ** (1 - bias)
    else:
        value = (1 + Fraction(significand, 2**significand_bits)) * Fraction(2) ** (exponent - bias)
    return -value if negative else value


def is_normal(name: str, code: int) -> bool:
    sign_bits, exponent_bits, significand_bits, _ = FIELDS[name]
    return not sign_bits or code >> significand_bits & 2**exponent_bits - 1 > 0


@pytest.mark.parametrize("name", NARROW)
def test_all_codes_decode_to_the_facts(name):
    dtype = SimpleDType.from_name(name)
    codes = range(2**dtype.bits)
    values = {code: decode(name, code) for code in codes}
    finite = {code: value for code, value in values.items() if isinstance(value, Fraction)}
    normal = [value for code, value in finite.items() if is_normal(name, code) and value > 0]
    subnormal = [value for code, value in finite.items() if not is_normal(name, code) and value > 0]
    assert dtype.max_normal == max(normal)
    assert dtype.min_normal == min(normal)
    assert dtype.max_subnormal == (max(subnormal) if subnormal else None)
    assert dtype.min_subnormal == (min(subnormal) if subnormal else None)
    assert dtype.max == max(finite.values())
    assert dtype.min == min(finite.values())
    assert dtype.has_nan == any(map(_is_nan, values.values()))
    assert dtype.has_inf == (math.inf in values.values())
    assert dtype.eps == min(value for value in finite.values() if value > 1) - 1


@pytest.mark.parametrize("name", NARROW)
def test_all_codes_decode_as_ml_dtypes_does(name):
    dtype = SimpleDType.from_name(name)
    decoded = np.arange(2**dtype.bits, dtype=np.uint8).view(dtype.numpy_dtype).astype(np.float64)
    expected = [float(decode(name, code)) for code in range(2**dtype.bits)]
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize(("name", "codes"), [("Float32", np.uint32), ("Float64", np.uint64)])
def test_wide_formats_at_the_codes_where_the_classes_meet(name, codes):
    """Positive codes ascend, so the extremes lie at the borders of the exponent field."""
    dtype, (_, exponent_bits, significand_bits, _) = SimpleDType.from_name(name), FIELDS[name]
    infinity = 2**exponent_bits - 1 << significand_bits
    borders = [1, 2**significand_bits - 1, 2**significand_bits, infinity - 1]
    facts = [dtype.min_subnormal, dtype.max_subnormal, dtype.min_normal, dtype.max_normal]
    assert [decode(name, code) for code in borders] == [Fraction(fact) for fact in facts]
    assert decode(name, infinity) == math.inf
    assert _is_nan(decode(name, infinity + 1))
    assert np.array(borders, codes).view(dtype.scalar_type).tolist() == facts
    assert (dtype.has_inf, dtype.has_nan, dtype.nonfinite_behavior) == (True, True, "ieee")
    assert (dtype.min, dtype.max) == (-dtype.max_normal, dtype.max_normal)


@pytest.mark.parametrize("name", FIELDS)
def test_facts_agree_with_finfo(name):
    dtype = SimpleDType.from_name(name)
    finfo = ml_dtypes.finfo(dtype.numpy_dtype)
    assert dtype.bits == finfo.bits
    assert dtype.exponent_bits == dtype.nexp == finfo.nexp
    assert dtype.significand_bits == dtype.nmant == finfo.nmant
    assert dtype.max_normal == dtype.max == float(finfo.max)
    assert dtype.min_normal == dtype.smallest_normal == float(finfo.smallest_normal)
    assert dtype.min == float(finfo.min)
    assert dtype.eps == float(finfo.eps)
    assert dtype.smallest_subnormal == dtype.min_subnormal
    if name == "E8M0":  # the contract says N/A; ml_dtypes repeats its smallest normal
        assert dtype.min_subnormal is None
    else:
        assert dtype.min_subnormal == float(finfo.smallest_subnormal)


FINFO_NAMES = [
    "tiny",
    "dtype",
    "precision",
    "resolution",
    "epsneg",
    "iexp",
    "machep",
    "negep",
    "minexp",
    "maxexp",
]


@pytest.mark.parametrize("finfo", [ml_dtypes.finfo, jnp.finfo], ids=["ml_dtypes", "jax"])
@pytest.mark.parametrize("fact", FINFO_NAMES)
@pytest.mark.parametrize("name", FIELDS)
def test_the_other_names_of_finfo_agree_with_it(name, fact, finfo):
    found, wanted = (getattr(x, fact) for x in (SimpleDType.from_name(name), finfo(SIMPLE_TYPES[name])))
    assert found == (wanted if fact == "dtype" else float(wanted))
    assert type(found) in (int, float) or fact == "dtype"


@pytest.mark.parametrize("name", FIELDS)
def test_bit_fields(name):
    dtype, (sign_bits, exponent_bits, significand_bits, _) = SimpleDType.from_name(name), FIELDS[name]
    assert (dtype.sign_bits, dtype.exponent_bits, dtype.significand_bits) == (
        sign_bits,
        exponent_bits,
        significand_bits,
    )
    assert sign_bits + exponent_bits + significand_bits == dtype.bits


@pytest.mark.parametrize(
    ("name", "nonfinite", "overflow"),
    [
        ("Float64", "ieee", "overflow"),
        ("Float32", "ieee", "overflow"),
        ("E8M0", "nan_only_all_ones", "overflow"),
        ("E5M2", "ieee", "overflow"),
        ("E4M3", "nan_only_all_ones", "overflow"),
        ("E3M2", "finite_only", "saturate"),
        ("E2M3", "finite_only", "saturate"),
        ("E2M1", "finite_only", "saturate"),
    ],
)
def test_behaviour(name, nonfinite, overflow):
    dtype = SimpleDType.from_name(name)
    assert (dtype.nonfinite_behavior, dtype.overflow_policy) == (nonfinite, overflow)
    assert dtype.has_inf == (nonfinite == "ieee")
    assert dtype.has_nan == (nonfinite != "finite_only")


@pytest.mark.parametrize("dtype", [DType.Int8, DType.Bool, FLOAT16], ids=repr)
@pytest.mark.parametrize(
    "fact", ["float_facts", "max_normal", "has_inf", "max", "eps", "min_subnormal", "tiny", "dtype", "iexp"]
)
def test_other_dtypes_have_no_float_facts(dtype, fact):
    assert not hasattr(dtype, fact)
    with pytest.raises(AttributeError, match="built-in floats"):
        getattr(dtype, fact)


class TestDescribe:
    @pytest.mark.parametrize("dtype", DType.registered(), ids=repr)
    def test_it_names_the_dtype_and_its_parts(self, dtype):
        text = dtype.describe()
        assert text.startswith(dtype.name + ":")
        assert all(line == line.rstrip() for line in text.splitlines())
        if dtype.is_compound():
            lines = text.splitlines()[1:]
            for line, plane in zip(lines, dtype.simple_types, strict=False):
                assert plane.name in line
                assert f"{plane.bits} bits" in line

    def test_mxfp4(self):
        assert DType.MXFP4.describe().splitlines() == [
            "MXFP4: 4.25 bits per element",
            "  element  E2M1   4 bits  s ee m    one each    4 bits/element",
            "  scale 0  E8M0   8 bits  eeeeeeee  one for 32  0.25 bits/element",
        ]

    def test_block_scaled_chains_show_cumulative_blocks(self):
        for dtype in BlockScaledDType.registered():
            if len(dtype.levels) == 2 and not dtype.levels[1].is_whole():
                inner, outer = (level.block for level in dtype.levels)
                assert f"one for {inner * outer} ({outer} of scale 0)" in dtype.describe()

    def test_categories_list_their_members(self):
        assert "  E4M3" in DType.Floating.describe().splitlines()
        assert DTypeCategory.from_name("Any").describe().startswith("Any: a category, opaque storage\n")


def _is_nan(value):
    return isinstance(value, float) and math.isnan(value)
