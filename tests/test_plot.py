"""Pictures: what the bars, steps and boxes say, against counts made here, and the page that shows them."""

from __future__ import annotations

import doctest
import importlib
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import exact
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dtype_samples import block_scaled

import jaxquant as jq
from jaxquant import DType, Level, Whole, plot
from jaxquant.quant import q4_k, q8_k

os.environ.setdefault("MPLBACKEND", "Agg")
plt = pytest.importorskip("matplotlib.pyplot")

DOCS = Path(__file__).parents[1] / "docs"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.fixture
def x(rng):
    return (rng.standard_normal((8, 64)) * np.exp2(np.arange(-4, 4))[:, None]).astype(np.float32)


def boxes(ax):
    """What is drawn under each gid: x, y and width of every piece."""
    found = {}
    for patch in ax.patches:
        found.setdefault(patch.get_gid(), []).append((patch.get_x(), patch.get_y(), patch.get_width()))
    return found


def texts(ax):
    return [text.get_text() for text in ax.texts]


# Measurements


def test_error_per_block(x):
    x[1, 5] = np.nan
    x[2] = 0
    ax = plot.error_per_block(x, ["MXFP4", DType.NVFP4])
    assert [patch.get_label() for patch in ax.patches] == ["MXFP4", "NVFP4"]
    for patch, block in zip(ax.patches, (32, 16), strict=True):
        array = jq.quantize_blocks(x, DType.from_name(patch.get_label()))
        values, edges, _ = patch.get_data()
        assert np.array_equal(edges, np.arange(0, x.size + 1, block))
        wanted = []
        for i in range(0, x.size, block):
            errors = (
                array.dequantize().reshape(-1)[i : i + block].astype(float) - x.reshape(-1)[i : i + block]
            )
            wanted.append(np.sqrt(np.mean(errors**2)))
        np.testing.assert_allclose(values, wanted, rtol=1e-12)
        assert np.isnan(values).sum() == 1
    assert ax.get_yscale() == "log"
    assert ax.get_xlim() == (0, x.size)


def test_error_per_block_of_records_and_of_blocks_along_the_first_axis(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    ax = plot.error_per_block(x, ["MXFP8_E4M3", q8_k], axis=0)
    first, records = ax.patches
    decoded = jq.quantize_blocks(x, DType.MXFP8_E4M3, axis=0).dequantize().astype(float)
    squares = (decoded - x).reshape(2, 32, 256) ** 2
    np.testing.assert_allclose(first.get_data().values, np.sqrt(squares.mean(axis=1)).reshape(-1), rtol=1e-12)
    decoded = jq.records.dequantize(exact.quantize(x), q8_k).astype(float)
    np.testing.assert_allclose(
        records.get_data().values, np.sqrt(((decoded - x) ** 2).mean(axis=1)), rtol=1e-12
    )
    assert np.array_equal(records.get_data().edges, np.arange(0, x.size + 1, 256))


def test_padding_has_no_part_in_the_error():
    x = np.float32([[5] * 32 + [5] * 8])
    ax = plot.error_per_block(x, ["MXFP4"], pad=True)
    # 5 lies between 4 and 6: an error of 1 throughout.
    assert ax.patches[0].get_data().values.tolist() == [1, 1]
    assert plot.error_per_block(np.ones((1, 32), np.float32), ["MXFP4"]).get_yscale() == "linear"


def test_scale_histogram_of_powers():
    x = np.float32([[6] * 32, [24] * 32, [25] * 32, [3] * 32, [0] * 32, [np.nan] * 32, [0] * 32])
    ax = plot.scale_histogram(jq.quantize_blocks(x, DType.MXFP4))
    powers, zeros, nans = ax.containers
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in powers] == [-1, 0, 1, 2]
    assert [bar.get_height() for bar in powers] == [1, 1, 0, 2]
    assert [bar.get_height() for bar in (*zeros, *nans)] == [2, 1]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["$2^{-1}$", "$2^{0}$", "$2^{1}$", "$2^{2}$", "$2^{-127}$", "not\nfinite"]
    centres = [bars[0].get_x() + bars[0].get_width() / 2 for bars in (zeros, nans)]
    assert ax.get_xticks()[-2:].tolist() == pytest.approx(centres)


@pytest.mark.parametrize("library", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_scale_histogram_of_other_scales(library, x):
    x[3] = 0
    array = jq.quantize_blocks(library(x), DType.NVFP4)
    scales = np.asarray(array.scales).astype(np.float64).reshape(-1)
    wanted = Counter(int(np.floor(np.log2(scale))) for scale in scales if scale)
    powers, zeros = plot.scale_histogram(array).containers
    got = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in powers}
    assert {power: count for power, count in got.items() if count} == wanted
    assert list(got) == list(range(min(wanted), max(wanted) + 1))
    assert zeros[0].get_height() == (scales == 0).sum() == 4


def test_scale_histogram_reads_swizzled_scales(x):
    dense = jq.quantize_blocks(x, DType.MXFP8_E4M3)
    tiled = jq.BlockScaledArray(jq.swizzle(dense.scales, "f8_4x128"), dense.elements, format=dense.format)
    bars = [
        [(bar.get_x(), bar.get_height()) for bar in plot.scale_histogram(a).patches] for a in (dense, tiled)
    ]
    assert bars[0] == bars[1]
    assert sum(height for _, height in bars[0]) == 16


def test_scale_histogram_of_records():
    records = np.zeros((6, 144), np.uint8)
    records[:, :2] = np.float16([1, 1.5, -4, 0, np.inf, 2**-24]).view(np.uint8).reshape(6, 2)
    powers, zeros, infinite = plot.scale_histogram(records, q4_k).containers
    got = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in powers}
    assert {power: count for power, count in got.items() if count} == {-24: 1, 0: 2, 2: 1}
    assert (zeros[0].get_height(), infinite[0].get_height()) == (1, 1)


def test_code_usage_of_four_bits(x):
    x[0, :4] = -0.0
    ax = plot.code_usage(jq.quantize_blocks(x, DType.MXFP4))
    codes = jq.quantize_blocks(x, DType.MXFP4, packed=False).elements
    values = [*(-v for v in reversed(E2M1)), *E2M1]
    order = [*range(15, 7, -1), *range(8)]
    assert [bar.get_height() for bar in ax.patches] == [(codes == code).sum() for code in order]
    labels = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in ax.get_xticklabels()]
    assert list(map(float, labels)) == values
    assert labels[7:9] == ["-0", "0"]
    assert ax.get_title(loc="left") == f"{len(np.unique(codes))} of 16 codes in use"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "codes"])
@pytest.mark.parametrize("name", ["MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E3M2", "MXINT8"])
def test_code_usage_in_the_order_of_values(name, packed, x):
    x[0, 0] = 0
    x[1, 1] = -0.0
    array = jq.quantize_blocks(x, DType.from_name(name), packed=packed)
    codes = np.asarray(jq.quantize_blocks(x, DType.from_name(name), packed=False).elements).reshape(-1)
    dtype = DType.from_name(name).element.numpy_dtype
    width = 64 if "FP6" in name else 256
    values = np.arange(width, dtype=np.uint8).view(dtype).astype(float)
    order = sorted(range(width), key=lambda c: (np.isnan(values[c]), values[c], not np.signbit(values[c])))
    finite_order = [c for c in order if not np.isnan(values[c])]
    heights = [bar.get_height() for bar in plot.code_usage(array).patches]
    assert len(heights) == width
    assert heights[: len(finite_order)] == [(codes == code).sum() for code in finite_order]
    assert sum(heights) == x.size


def test_code_usage_leaves_padding_out():
    ax = plot.code_usage(jq.quantize_blocks(np.ones((1, 40), np.float32), DType.MXFP4, pad=True))
    assert sum(bar.get_height() for bar in ax.patches) == 40


def test_code_usage_of_records(rng):
    weights = exact.load("q4k_records")["records"]
    ax = plot.code_usage(weights, q4_k)
    nibbles = Counter((weights[:, 16:] & 15).reshape(-1).tolist())
    nibbles.update((weights[:, 16:] >> 4).reshape(-1).tolist())
    assert [bar.get_height() for bar in ax.patches] == [nibbles[code] for code in range(16)]
    activations = exact.quantize(rng.standard_normal((4, 256)).astype(np.float32))
    ax = plot.code_usage(jnp.asarray(activations), q8_k)
    signed = Counter(activations[:, 4:260].view(np.int8).reshape(-1).tolist())
    assert [bar.get_height() for bar in ax.patches] == [signed[code] for code in range(-128, 128)]


def test_saturation(x):
    formats = ["MXFP4", "MXFP8_E5M2", q8_k]
    x = np.tile(x, 4)
    ax = plot.saturation(x, formats)
    rows = jq.compare(x, formats).rows
    saturated, flushed = ax.containers
    assert [bar.get_width() for bar in saturated] == [row.saturated for row in rows]
    assert [bar.get_width() for bar in flushed] == [row.flushed for row in rows]
    assert rows[0].saturated > 0
    assert rows[0].flushed > 0
    for i, label in enumerate(("MXFP4", "MXFP8_E5M2", "q8_k")):
        assert ax.get_yticklabels()[i].get_text() == label
        # One above and one below the tick of its format.
        assert saturated[i].get_y() < flushed[i].get_y() < i + 0.5
        assert saturated[i].get_y() + saturated[i].get_height() < i + 0.2
    assert f"{rows[0].flushed} ({rows[0].flushed / x.size:.2%})" in texts(ax)
    longest = max(bar.get_width() for bar in (*saturated, *flushed))
    assert ax.get_xlim()[1] > 1.2 * longest


# Layouts


@pytest.mark.parametrize("record", [q4_k, q8_k], ids=["q4_k", "q8_k"])
def test_a_record_is_a_map_of_its_fields(record):
    ax = plot.bit_layout(record)
    row_bytes = {"q4_k": 16, "q8_k": 32}[record.name]
    covered = {}
    for gid, pieces in boxes(ax).items():
        if not gid.startswith("field "):
            continue
        names, span = gid.removeprefix("field ").rsplit(" ", 1)
        start, stop = map(int, span.split(":"))
        drawn = [int(y * row_bytes + x) + i for x, y, width in pieces for i in range(int(width))]
        assert sorted(drawn) == list(range(start, stop))
        assert all(x >= 0 and x + width <= row_bytes for x, _, width in pieces)
        covered.update(dict.fromkeys(names.split(", "), (start, stop)))
    assert covered == {field.name: (field.start, field.stop) for field in record.fields}
    words = " ".join(texts(ax))
    assert all(field.name in words for field in record.fields)
    assert f"{record.name}: {record.record_bytes} bytes" in words


def test_the_bits_of_a_record_are_those_of_the_contract():
    """Section 2 of the record contract, written out: sc and m share twelve bytes, q two nibbles."""
    ax = plot.bit_layout(q4_k)
    bits = {gid: pieces for gid, pieces in boxes(ax).items() if gid.startswith("bits ")}
    unit = 16 / 8
    wanted = {
        "bits sc[4..7] 5:4 of bytes 4:8": (0, 2),
        "bits sc[0..3] 5:0 of bytes 4:8": (2, 6),
        "bits m[4..7] 5:4 of bytes 8:12": (0, 2),
        "bits m[0..3] 5:0 of bytes 8:12": (2, 6),
        "bits m[4..7] 3:0 of bytes 12:16": (0, 4),
        "bits sc[4..7] 3:0 of bytes 12:16": (4, 4),
    }
    for j in range(4):
        span = f"of bytes {16 + 32 * j}:{48 + 32 * j}"
        wanted[f"bits q[{64 * j + 32}..{64 * j + 63}] 3:0 {span}"] = (0, 4)
        wanted[f"bits q[{64 * j}..{64 * j + 31}] 3:0 {span}"] = (4, 4)
    assert {gid: (x / unit, width / unit) for gid, [(x, _, width)] in bits.items()} == wanted
    assert not [gid for gid in boxes(plot.bit_layout(q8_k)) if gid.startswith("bits ")]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("E2M1", {"sign 3:3": (0, 1), "exponent 2:1": (1, 2), "significand 0:0": (3, 1)}),
        ("E8M0", {"exponent 7:0": (0, 8)}),
        ("E2M3", {"sign 5:5": (0, 1), "exponent 4:3": (1, 2), "significand 2:0": (3, 3)}),
        ("Float64", {"sign 63:63": (0, 1), "exponent 62:52": (1, 11), "significand 51:0": (12, 52)}),
        ("Int32", {"integer 31:0": (0, 32)}),
        ("Bool", {"other 7:0": (0, 8)}),
    ],
)
def test_a_simple_dtype_is_a_row_of_bits(name, fields):
    ax = plot.bit_layout(DType.from_name(name))
    assert {gid: (x, width) for gid, [(x, _, width)] in boxes(ax).items()} == {
        f"bits {name} {field}": place for field, place in fields.items()
    }
    letters = [text for text in texts(ax) if text in ("s", "e", "m")]
    kinds = {"sign": "s", "exponent": "e", "significand": "m"}
    counted = Counter()
    for field, (_, width) in fields.items():
        kind = kinds.get(field.split()[0])
        if kind:
            counted[kind] += width
    assert Counter(letters) == counted


@pytest.mark.parametrize(
    ("name", "element", "levels", "elements", "scales"),
    [
        ("MXFP6_E3M2", None, None, 32, [1]),
        ("NVFP4", None, None, 16, [1, 1]),
        ("PlotTwo", DType.E2M1, [Level(DType.E4M3, 8), Level(DType.E8M0, 4)], 32, [4, 1]),
        ("PlotWhole", DType.E4M3, [Level(DType.Float32, Whole)], 8, [1]),
    ],
    ids=["MXFP6_E3M2", "NVFP4", "two levels", "whole"],
)
def test_scales_lie_over_the_elements_they_scale(name, element, levels, elements, scales):
    dtype = jq.BlockScaledDType(name, element=element, levels=levels) if levels else DType.from_name(name)
    ax = plot.bit_layout(name)
    found = boxes(ax)
    width = found["element 0"][0][2]
    for i in range(elements):
        ((x, _, w),) = found[f"element {i}"]
        assert (x, w) == pytest.approx((i * width, width))
    for level, count in enumerate(scales):
        for i in range(count):
            ((x, _, w),) = found[f"scale {level} {i}"]
            assert (x, w) == pytest.approx((i * elements / count * width, elements / count * width))
    assert f"element {elements}" not in found
    planes = {plane.name for plane in dtype.simple_types}
    assert {gid.split()[1] for gid in found if gid.startswith("bits ")} == planes


def test_many_elements_are_drawn_together():
    many = block_scaled("PlotMany", DType.E2M1, [Level(DType.E4M3, 16), Level(DType.E8M0, 8)])
    found = boxes(plot.bit_layout(many))
    for i in range(8):
        assert found[f"element {16 * i}:{16 * i + 16}"][0][::2] == found[f"scale 0 {i}"][0][::2]
    assert found["scale 1 0"][0][2] == pytest.approx(8 * found["scale 0 0"][0][2])


def test_a_compound_dtype_is_its_planes():
    class Pair(jq.CompoundDType, abstract=False):
        pass

    Pair("PlotPair", supertype=DType.Any, simple_types=(DType.E4M3, DType.Int32), representation_rules=[])
    ax = plot.bit_layout("PlotPair")
    found = boxes(ax)
    assert found["bits Int32 integer 31:0"][0][::2] == (0, 32)
    assert found["bits E4M3 exponent 6:3"][0][::2] == (1, 4)
    assert found["bits Int32 integer 31:0"][0][1] > found["bits E4M3 exponent 6:3"][0][1]
    assert {"plane 0  E4M3", "plane 1  Int32"} <= set(texts(ax))


LAYOUTS = ["E4M3", "Float64", "MXFP4", "NVFP4", q4_k, q8_k]


@pytest.mark.parametrize("shown", LAYOUTS, ids=str)
def test_no_text_overlaps_another_or_leaves_the_figure(shown):
    ax = plot.bit_layout(shown)
    ax.figure.canvas.draw()
    extents = [text.get_window_extent() for text in ax.texts]
    width, height = ax.figure.canvas.get_width_height()
    for text, box in zip(ax.texts, extents, strict=True):
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
    for i, (text, box) in enumerate(zip(ax.texts, extents, strict=True)):
        for other, another in zip(ax.texts[:i], extents[:i], strict=True):
            # The line height of a font is more than its letters take.
            apart = box.padded(-1.5), another.padded(-1.5)
            assert not apart[0].overlaps(apart[1]), (text, other)


# Everything


def everything(ax=None):
    x = np.ones((1, 256), np.float32)
    array = jq.quantize_blocks(x, DType.MXFP4)
    return [
        plot.error_per_block(x, ["MXFP4"], ax=ax),
        plot.scale_histogram(array, ax=ax),
        plot.code_usage(array, ax=ax),
        plot.saturation(x, ["MXFP4"], ax=ax),
        plot.bit_layout(q8_k, ax=ax),
    ]


def test_a_given_axes_is_drawn_into_and_returned():
    figure, ax = plt.subplots()
    assert all(drawn is ax for drawn in everything(ax))
    assert plt.get_fignums() == [figure.number]


def test_without_axes_each_call_makes_a_figure():
    assert len({id(ax.figure) for ax in everything()}) == 5


RECORDS = np.zeros((2, 144), np.uint8)
REFUSED = {
    "name": (lambda: plot.bit_layout("Unknown8"), LookupError, "Unknown8"),
    "category": (lambda: plot.bit_layout(DType.Floating), TypeError, r"got DTypeCategory\('Floating'\)"),
    "no format": (lambda: plot.bit_layout(8), TypeError, "bit_layout: .* got 8"),
    "numpy dtype": (lambda: plot.bit_layout(np.dtype("f4")), TypeError, "bit_layout: .* got dtype"),
    "dense scales": (
        lambda: plot.scale_histogram(np.ones(3)),
        TypeError,
        "scale_histogram: wanted a BlockScaled",
    ),
    "dense codes": (lambda: plot.code_usage(np.ones(3)), TypeError, "code_usage: wanted a BlockScaledArray"),
    "records": (lambda: plot.code_usage(RECORDS, q8_k), ValueError, r"\(2, 144\).*292"),
    "float records": (lambda: plot.code_usage(RECORDS.astype("f4"), q4_k), TypeError, "float32"),
    "array and format": (
        lambda: plot.scale_histogram(jq.quantize_blocks(np.ones((1, 32), "f4"), DType.MXFP4), q4_k),
        TypeError,
        "scale_histogram: a BlockScaledArray needs no format",
    ),
    "wide codes": (
        lambda: plot.code_usage(jq.BlockScaledArray(np.ones((1, 1), "f4"), np.ones((1, 4), np.int16))),
        ValueError,
        "code_usage: elements of int16 have 16 bits",
    ),
    "remainder": (
        lambda: plot.error_per_block(np.ones((1, 40), "f4"), ["MXFP4"]),
        ValueError,
        r"error_per_block: MXFP4: .*\(1, 40\)",
    ),
    "integers": (
        lambda: plot.saturation(np.ones(32, "i4"), ["MXFP4"]),
        TypeError,
        "saturation: x has dtype int32",
    ),
    "one name": (
        lambda: plot.saturation(np.ones(32, "f4"), "MXFP4"),
        TypeError,
        "saturation: formats must be",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert not plt.get_fignums()


def test_free_combinations_of_integers():
    elements = np.arange(-8, 8).astype(ml_dtypes.int4).reshape(1, 16)
    ax = plot.code_usage(jq.BlockScaledArray(np.ones((1, 1), np.float32), elements))
    assert [bar.get_height() for bar in ax.patches] == [1] * 16
    assert next(label.get_text() for label in ax.get_xticklabels()) == "\N{MINUS SIGN}8"


def test_without_matplotlib_the_extra_is_named():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import jaxquant.plot\n"
        "try: jaxquant.plot.bit_layout('E4M3')\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True
    )
    assert "pip install 'jaxquant[plot]'" in run.stdout


def test_importing_does_not_import_matplotlib():
    program = "import sys, jaxquant.plot; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_docstrings():
    result = doctest.testmod(importlib.import_module("jaxquant.plot"))
    assert (result.failed, result.attempted > 0) == (0, True)


def pixels(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_page_of_pictures(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    page = DOCS / "pictures.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert (result.failed, result.attempted > 0) == (0, True)
    drawn = {path.name: pixels(path) for path in (tmp_path / "images").iterdir()}
    assert drawn == {path.name: pixels(path) for path in (DOCS / "images").glob("*.png")}
    assert all(f"(images/{name})" in page.read_text() for name in drawn)
    assert all(path.stat().st_size < 60_000 for path in (DOCS / "images").iterdir())
