"""Comparing formats: every column against sums in exact fractions, and what is refused."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
from fractions import Fraction

import exact
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxquant as jq
from jaxquant import DType, Whole
from jaxquant.compare import Comparison, Row, compare
from jaxquant.quant import q4_k, q8_k

LARGEST = {
    "MXFP8_E4M3": 448,
    "MXFP8_E5M2": 57344,
    "MXFP6_E3M2": 28,
    "MXFP6_E2M3": 7.5,
    "MXFP4": 6,
    "MXINT8": Fraction(127, 64),
    "NVFP4": 6,
}
BLOCK = {name: 16 if name == "NVFP4" else 32 for name in LARGEST}


def by_hand(x, name):
    """The columns of one block-scaled format, blocks along the last axis, element by element."""
    array = jq.quantize_blocks(x, DType.from_name(name))
    values = array.dequantize().reshape(-1)
    block = BLOCK[name]
    inner = array.scales.astype(np.float64).reshape(-1)
    outer = array.levels[1].item() if len(array.levels) > 1 else 1.0
    signal = noise = Fraction(0)
    absolute, relative, saturated, flushed, bad = Fraction(0), Fraction(0), 0, 0, set()
    for i, (a, b) in enumerate(zip(x.reshape(-1).tolist(), values.tolist(), strict=True)):
        scale = inner[i // block] * outer
        if math.isfinite(scale):
            saturated += math.isinf(a) or abs(Fraction(a)) > Fraction(LARGEST[name]) * Fraction(scale)
        if not math.isfinite(b):
            bad.add(i // block)
        if not (math.isfinite(a) and math.isfinite(b)):
            continue
        error = abs(Fraction(b) - Fraction(a))
        signal, noise, absolute = signal + Fraction(a) ** 2, noise + error**2, max(absolute, error)
        if a and b:
            relative = max(relative, error / abs(Fraction(a)))
        flushed += bool(a) and not b
    bits = Fraction(DType.from_name(name).element.bits) + Fraction(8, block)
    whole = Fraction(32, x.size) if name == "NVFP4" else 0
    return Row(
        name,
        pytest.approx(float(bits + whole), rel=1e-15),
        pytest.approx(10 * math.log10(signal / noise), rel=1e-12),
        float(absolute),
        pytest.approx(float(relative), rel=1e-15),
        saturated,
        flushed,
        len(bad),
    )


@pytest.fixture(scope="module")
def x():
    values = np.random.default_rng(4).standard_normal((6, 64)) * np.exp2(np.arange(-6, 6, 2))[:, None]
    values[1, :3] = 0, -0.0, 2.0**-60
    values[2, 40] = np.nan
    values[5, 3] = -np.inf
    return values.astype(np.float32)


@pytest.mark.parametrize("name", LARGEST)
def test_columns(x, name):
    (row,) = compare(x, [name])
    assert row == by_hand(x, name)
    assert row.nonfinite_blocks == 2
    if name in ("MXFP4", "NVFP4"):
        assert row.flushed > 0
        assert row.saturated > 0


def test_q8_k_columns(rng):
    x = rng.standard_normal((3, 512)).astype(np.float32)
    x[1, 256:] = 0
    x[1, 300] = 1e-38  # out of q8_k's domain
    x[2, 7] = 1e-6
    (row,) = compare(x, [q8_k])
    records = exact.quantize(x.reshape(-1, 256))
    values = jq.records.dequantize(records, q8_k).reshape(x.shape).astype(np.float64)
    fine = np.isfinite(values)
    error = np.abs(values - x)[fine]
    assert row.format == "q8_k"
    assert row.bits_per_element == 9.125
    assert row.nonfinite_blocks == 1
    assert row.max_abs_error == error.max()
    assert row.sqnr_db == pytest.approx(10 * np.log10((x[fine].astype(float) ** 2).sum() / (error**2).sum()))
    assert row.flushed == ((values == 0) & (x != 0)).sum() > 0
    assert row.saturated == 0


def test_q8_k_marks_no_rounding_of_its_scale_as_saturation():
    # 1 / inverse rounds below the extreme here, so that 127 * ds < 1 for the element of the other sign.
    x = np.zeros((64, 256), np.float32)
    x[:, 0] = np.linspace(-1, -2, 64)
    x[:, 1] = -x[:, 0]
    ds = jq.records.unpack(exact.quantize(x), q8_k).ds.astype(np.float64)
    assert (np.abs(x[:, 1]) > 127 * np.abs(ds)).any()
    assert compare(x, [q8_k])[0].saturated == 0


def test_jax_and_numpy_agree(x):
    device, host = compare(jnp.asarray(x), ["NVFP4"]), compare(x, ["NVFP4"])
    assert repr(device) == repr(host)
    assert device.rows == host.rows


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_floats_are_measured_as_they_are(dtype, rng):
    half = rng.standard_normal((2, 256)).astype(dtype)
    (of_half,), (of_full,) = compare(half, ["MXFP4"]), compare(half.astype(np.float32), ["MXFP4"])
    assert of_half == of_full
    assert compare(half, [q8_k]).rows == compare(half.astype(np.float32), [q8_k]).rows
    assert compare(half, [q8_k]).dtype == dtype


def test_exact_values_have_no_noise():
    x = np.float32([[0.5, -6, 3, 0] * 8])
    (row,) = compare(x, ["MXFP4"])
    assert row == Row("MXFP4", 4.25, math.inf, 0.0, 0.0, 0, 0, 0)
    assert compare(np.zeros((1, 32), np.float32), ["MXFP4"])[0].sqnr_db == math.inf


def test_nothing_finite_is_nan():
    (row,) = compare(np.full((1, 64), np.inf, np.float32), ["MXFP8_E5M2"])
    assert all(map(math.isnan, (row.sqnr_db, row.max_abs_error, row.max_relative_error)))
    assert (row.saturated, row.flushed, row.nonfinite_blocks) == (0, 0, 2)


def test_saturation_is_strict():
    # Floor takes the scale 1 here: 6 is the largest element itself, all above it are cut.
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 6, -6, np.nextafter(np.float32(6), np.float32(7)), -7.9, 5.9
    assert compare(x, ["MXFP4"])[0].saturated == 2
    assert compare(x, ["MXFP4"], scale_rule="rceil")[0].saturated == 0
    x[0, 0] = np.inf
    (row,) = compare(x, ["MXFP4"], nonfinite="saturate")
    assert (row.saturated, row.nonfinite_blocks) == (1, 0)
    assert row.flushed == 4


def test_blocks_that_overflow_are_not_finite():
    x = np.full((1, 64), 2.0**100, np.float32)
    x[0, 3] = np.finfo(np.float32).max
    (row,) = compare(x, ["MXFP4"], scale_rule="ceil")
    assert row.nonfinite_blocks == 1


@pytest.mark.parametrize(
    ("name", "options", "bits", "blocks"),
    [
        ("MXFP4", {}, 4.25, 3),
        ("MXFP4", {"axis": 0}, 4.25, 3),
        ("MXFP4", {"block_shape": (4, 8)}, 4.25, 2),
        ("MXFP4", {"block_shape": (32, 2)}, 4 + 8 / 64, 2),
        ("MXFP4", {"block_shape": (Whole, Whole)}, 4 + 8 / 2048, 1),
        ("MXFP4", {"packed": False}, 8.25, 3),
        ("NVFP4", {"tensor_scale": 1.0}, 4.5 + 32 / 2048, 3),
    ],
    ids=["default", "axis", "tiles", "columns", "whole", "unpacked", "nvfp4"],
)
def test_options_reach_the_blocks(name, options, bits, blocks, rng):
    x = rng.standard_normal((32, 64)).astype(np.float32)
    x[[0, 3, 1], [0, 1, 60]] = np.nan
    (row,) = compare(x, [name], **options)
    assert row.bits_per_element == bits
    assert row.nonfinite_blocks == blocks


def test_padding_is_counted_as_memory_and_nowhere_else():
    x = np.float32([[1.0] * 40])
    x[0, 39] = np.nan
    (row,) = compare(x, ["MXFP4"], pad=True)
    assert row.bits_per_element == 8 * (32 + 2) / 40
    assert (row.flushed, row.saturated, row.nonfinite_blocks) == (0, 0, 1)


def test_a_stochastic_key_is_passed_on(x):
    key = jax.random.key(3)
    rows = [compare(x, ["MXFP4"], rounding="stochastic", key=key).rows for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0][0].sqnr_db < compare(x, ["MXFP4"])[0].sqnr_db


def test_extensions_are_formats_too(x):
    custom = jq.BlockScaledDType("CompareE2M1Per8", element=DType.E2M1, levels=[jq.Level(DType.E8M0, 8)])
    assert compare(x, [custom])["CompareE2M1Per8"].bits_per_element == 5
    assert compare(x, ["CompareE2M1Per8"]).rows == compare(x, [custom]).rows


def test_table():
    x = (np.arange(256, dtype=np.float32) - 100).reshape(1, 256)
    result = compare(x, ["MXFP8_E4M3", "NVFP4", q8_k])
    text = str(result)
    assert text == repr(result)
    first, head, *lines = text.splitlines()
    assert first == "float32 (1, 256), 256 elements"
    assert len({len(line) for line in (head, *lines)}) == 1
    assert head.split("  ")[0] == "format"
    for line, row in zip(lines, result, strict=True):
        cells = line.split()
        assert cells[0] == row.format
        assert float(cells[1]) == row.bits_per_element
        assert float(cells[2]) == round(row.sqnr_db, 2)
        assert [int(cell) for cell in cells[5:]] == [row.saturated, row.flushed, row.nonfinite_blocks]
    # Numbers end in one column under their heading.
    assert all(
        line.index(cell) + len(cell) == head.index("bits/element") + len("bits/element")
        for line, cell in ((line, line.split()[1]) for line in lines)
    )


def test_rows_are_plain():
    result = compare(np.ones((1, 256), np.float32), ["MXFP4", q8_k])
    assert isinstance(result, Comparison)
    assert len(result) == 2
    assert [row.format for row in result] == ["MXFP4", "q8_k"]
    assert result["q8_k"] is result[1] is result.rows[1]
    assert result.to_dict()["MXFP4"] == {
        "bits_per_element": 4.25,
        "sqnr_db": math.inf,
        "max_abs_error": 0.0,
        "max_relative_error": 0.0,
        "saturated": 0,
        "flushed": 0,
        "nonfinite_blocks": 0,
    }
    assert {type(value) for value in result.to_dict()["q8_k"].values()} == {int, float}
    with pytest.raises(KeyError, match=r"'NVFP4'.*MXFP4, q8_k"):
        result["NVFP4"]


ONES = np.ones((2, 256), np.float32)
REFUSED = {
    "no array": ([1.0], ["MXFP4"], {}, TypeError, "x must be a NumPy or JAX array, got list"),
    "int": (np.ones((2, 32), np.int32), ["MXFP4"], {}, TypeError, "x has dtype int32"),
    "float64": (np.ones((2, 32)), ["MXFP4"], {}, TypeError, "x has dtype float64"),
    "empty": (ONES[:0], ["MXFP4"], {}, ValueError, r"x of shape \(0, 256\)"),
    "one format": (ONES, DType.MXFP4, {}, TypeError, "formats must be a list of formats"),
    "one name": (ONES, "MXFP4", {}, TypeError, "formats must be a list of formats"),
    "no list": (ONES, 4, {}, TypeError, "formats must be a list of formats, got 4"),
    "unknown": (ONES, ["MXFP5"], {}, LookupError, "'MXFP5'"),
    "simple name": (ONES, ["E2M1"], {}, LookupError, "E2M1"),
    "record name": (ONES, ["q8_k"], {}, LookupError, r"jaxquant\.quant\.q8_k"),
    "simple": (
        ONES,
        [DType.MXFP4, DType.E2M1],
        {},
        TypeError,
        r"formats\[1\] must be .* SimpleDType\('E2M1'\)",
    ),
    "q4_k": (ONES, [q4_k], {}, ValueError, r"formats\[0\] is q4_k, to which there is no encoder"),
    "twice": (ONES, ["MXFP4", DType.MXFP4], {}, ValueError, r"formats\[1\] is MXFP4 again"),
    "remainder": (ONES[:, :40], ["MXFP8_E5M2"], {}, ValueError, r"MXFP8_E5M2: .*\(2, 40\)"),
    "records": (ONES[:, :64], ["MXFP4", q8_k], {}, ValueError, r"q8_k: .*\(2, 64\)"),
    "no axis": (
        np.ones((), np.float32),
        ["MXFP4"],
        {},
        ValueError,
        r"MXFP4: .*\(\)",
    ),
    "rule": (ONES, ["MXFP4", "NVFP4"], {"scale_rule": "even"}, ValueError, "NVFP4: .*scale_rule='even'"),
    "option": (ONES, ["MXFP4"], {"blocks": 3}, TypeError, "unexpected keyword argument 'blocks'"),
    "idle option": (ONES, [q8_k], {"axis": 0}, ValueError, "axis given, but no block-scaled format"),
}


@pytest.mark.parametrize(("x", "formats", "options", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused(x, formats, options, error, message):
    with pytest.raises(error, match=message):
        compare(x, formats, **options)


def test_traced_values_are_refused():
    with pytest.raises(TypeError, match="x is traced"):
        jax.jit(lambda x: compare(x, ["MXFP4"]).rows[0].sqnr_db)(jnp.ones((1, 32), jnp.float32))


def test_the_name_is_the_function_whatever_was_imported():
    program = (
        "import jaxquant, importlib, jaxquant.compare, jaxquant.compare as module\n"
        "from jaxquant.compare import Row\n"
        "assert module is jaxquant.compare is importlib.import_module('jaxquant.compare').compare\n"
        "assert importlib.import_module('jaxquant.compare').Row is Row\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120)


def test_docstrings():
    result = doctest.testmod(importlib.import_module("jaxquant.compare"))
    assert (result.failed, result.attempted > 0) == (0, True)
