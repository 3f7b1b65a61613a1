"""The CUDA kernels on a simulated multiprocessor, bit for bit, without a GPU."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import exact
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import simulate

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the simulation with"),
]

TILES = {
    "bytes": (4, 1),
    "dot1": (4, 1),
    "dot2": (4, 2),
    "dot4": (4, 4),
    "narrow8": (32, 8),
    "narrow16": (32, 16),
    "wide64": (64, 64),
    "wide192": (192, 64),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return simulate.build(tmp_path_factory.mktemp("simulation"))


@pytest.fixture
def device(library):
    return simulate.Device(library)


def operands(rng, rows, columns, records, *, legal=True):
    make = exact.random_q8k if legal else exact.random_illegal_q8k
    w = simulate.aligned(exact.random_q4k(rng, (rows, records)), 16)
    return w, simulate.aligned(make(rng, (columns, records)), 4)


# The simulation itself


@pytest.mark.parametrize("which", simulate.MISTAKES)
def test_the_simulation_finds_mistakes(device, which):
    with pytest.raises(simulate.SimulationError, match=simulate.MISTAKES[which]):
        device.mistake(which)


def test_the_simulation_lets_correct_code_pass(device):
    device.mistake(simulate.NO_MISTAKE)


def test_fragments_are_where_the_instruction_has_them(library):
    """PTX ISA, "Matrix Fragments for mma.m16n8k32", int8; the order of k is free, but the same in A and B."""
    elements = set()
    for lane in range(32):
        group, member = lane >> 2, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            assert library.fragment_index(0, lane, i // 4 % 2) == row
            byte = library.fragment_index(2, lane, 0) + 4 * (i // 8) + i % 4
            elements.add((row, byte))
        assert library.fragment_index(1, lane, 0) == group
        for i in range(4):
            assert library.fragment_index(3, lane, i) == (group if i < 2 else group + 8)
            assert library.fragment_index(4, lane, i) == member * 2 + (i & 1)
    assert elements == {(row, byte) for row in range(16) for byte in range(32)}


# Quantization


@pytest.mark.parametrize("kind", [*exact.KINDS, *exact.POISON_KINDS])
def test_quantize(rng, device, kind):
    values = simulate.aligned(exact.blocks(rng, kind, 101), 16)
    np.testing.assert_array_equal(device.quantize(values), exact.quantize(values))


def test_quantize_by_bytes(rng, device):
    values = simulate.aligned(exact.blocks(rng, "gaussian", 9), 16, off=4)
    np.testing.assert_array_equal(device.quantize(values, by_bytes=True), exact.quantize(values))
    with pytest.raises(simulate.SimulationError, match="not aligned"):
        device.quantize(values)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_quantize_counts(rng, device, count):
    values = simulate.aligned(exact.blocks(rng, "heavy_tailed", count), 16)
    np.testing.assert_array_equal(device.quantize(values), exact.quantize(values))


# Products


@pytest.mark.parametrize("kernel", simulate.KERNELS)
@pytest.mark.parametrize("order", [0, 1, 2], ids=["forward", "backward", "shuffled"])
def test_one_full_tile_and_a_bit(rng, library, kernel, order):
    """Rows and columns past one tile, records past one round of warps, in several orders of the threads."""
    rows, columns = TILES[kernel]
    w, x = operands(rng, rows + 1, columns + 1, 9 if kernel.startswith(("dot", "bytes", "narrow")) else 3)
    got, _ = simulate.Device(library, order).gemm(w, x, kernel=kernel)
    assert exact.same_bits(got, exact.gemm(w, x))


@pytest.mark.parametrize("kernel", simulate.KERNELS)
@pytest.mark.parametrize("records", [0, 1, 3, 4, 5, 9])
def test_record_counts(rng, device, kernel, records):
    w, x = operands(rng, 5, 3, records, legal=False)
    got, _ = device.gemm(w, x, kernel=kernel)
    assert exact.same_bits(got, exact.gemm(w, x))


@pytest.mark.parametrize("kernel", simulate.KERNELS)
def test_the_fold_is_in_order(rng, device, kernel):
    """Finite vectors, whose bits depend on the order in which records are added."""
    w, x = operands(rng, 8, 2, 12)
    w[..., 1] &= 0xBB  # no infinity or NaN
    w[..., 3] &= 0xBB
    ds = np.ldexp(rng.uniform(1, 2, (2, 12)), rng.integers(-6, 6, (2, 12))).astype(np.float32)
    x[..., :4] = ds[..., None].view(np.uint8)
    want = exact.gemm(w, x)
    assert np.isfinite(want).all()
    assert not exact.same_bits(exact.gemm(w[:, ::-1], x[:, ::-1]), want)
    assert exact.same_bits(device.gemm(w, x, kernel=kernel)[0], want)


@pytest.mark.parametrize("kernel", simulate.KERNELS)
def test_extreme_statistics(device, kernel):
    """All fields at the ends of their ranges: the largest S and T there are, legal bsum and not."""
    w = np.zeros((3, 1, 144), np.uint8)
    w[..., 4:] = 0xFF
    w[..., :4] = np.array([1.0, -1.0], np.float16).view(np.uint8)
    x = np.concatenate(
        [
            exact.encode_q8k(np.float32(1), np.full(256, q), bsum)[None]
            for q, bsum in (
                (-128, None),
                (127, None),
                (-128, np.full(16, 32767)),
                (127, np.full(16, -32768)),
            )
        ]
    )[:, None]
    w, x = simulate.aligned(w, 16), simulate.aligned(x, 4)
    assert abs(exact.statistics(w[0], x[0]).S[0]) == 30965760
    assert abs(exact.statistics(w[0], x[3]).T[0]) == 63 * 16 * 32768
    assert exact.same_bits(device.gemm(w, x, kernel=kernel)[0], exact.gemm(w, x))


@pytest.mark.parametrize("kernel", simulate.KERNELS)
def test_golden_vectors(device, kernel):
    golden = exact.load("gemv_small")
    w, x = (simulate.aligned(golden[name], 16) for name in ("w_q4k", "x_q8k_contract"))
    rows, columns = min(len(w), 40), min(len(x), 20)
    got, _ = device.gemm(w[:rows], x[:columns], kernel=kernel)
    assert exact.same_bits(got, golden["y_contract"].T[:rows, :columns])


@pytest.mark.parametrize(
    ("w_dims", "x_dims", "w_shape", "x_shape"),
    [
        ((-1,), (-1,), (3,), (3,)),
        ((0, -1), (-1,), (6, 3), (3,)),
        ((1, -1), (0, -1), (6, 3), (5, 3)),
        ((-1, 0), (-1, 1), (3, 6), (3, 5)),
        ((0, 2, -1), (0, 1, -1), (2, 6, 3), (2, 5, 3)),
        ((3, 0, -1), (1, 0, 2, -1), (6, 2, 3), (4, 2, 5, 3)),
        ((0, 1, -1), (0, 1, -1), (2, 3, 2), (2, 3, 2)),
        ((1, -1, 0), (1, 2, -1, 0), (2, 3, 4), (2, 5, 3, 4)),
    ],
    ids=["dot", "gemv", "gemm", "records first", "batch", "batch between", "batch only", "records inside"],
)
def test_axes(rng, device, w_dims, x_dims, w_shape, x_shape):
    w = simulate.aligned(exact.random_q4k(rng, w_shape), 16)
    x = simulate.aligned(exact.random_q8k(rng, x_shape), 4)
    rank = len({*w_dims, *x_dims}) - 1

    def as_result(array, dims):
        """Axes in the order of the result, missing ones of one element, then records and bytes."""
        order = [*sorted(range(len(dims)), key=lambda i: dims[i] if dims[i] >= 0 else rank), len(dims)]
        missing = [i for i in range(rank) if i not in dims]
        return np.expand_dims(np.transpose(array, order), missing)

    want = exact.dots(as_result(w, w_dims), as_result(x, x_dims))
    for kernel in (None, "bytes", "dot2", "narrow8", "wide64"):
        got, _ = device.dot(w, x, w_dims, x_dims, kernel=kernel)
        assert exact.same_bits(got, want), kernel


@pytest.mark.parametrize(
    ("columns", "rows", "capability", "shared", "kernel"),
    [
        (1, 4, 90, 227, "dot1"),
        (2, 4, 90, 227, "dot2"),
        (3, 4, 90, 227, "narrow8"),
        (8, 4, 75, 64, "dot4"),
        (8, 4, 120, 99, "narrow8"),
        (9, 4, 120, 99, "narrow16"),
        (17, 4, 120, 99, "wide64"),
        (65, 193, 120, 99, "wide192"),
        (64, 193, 80, 48, "dot4"),
    ],
)
def test_choice(rng, device, columns, rows, capability, shared, kernel):
    w, x = operands(rng, rows, columns, 1)
    got, chosen = device.gemm(w, x, capability=capability, processors=2, shared_bytes=shared << 10)
    assert chosen == kernel
    assert exact.same_bits(got, exact.gemm(w, x))


@pytest.mark.parametrize("name", ["w", "x"])
def test_operands_that_are_not_aligned_are_read_by_bytes(rng, device, name):
    w, x = operands(rng, 5, 3, 2)
    if name == "w":
        w = simulate.aligned(w, 16, off=8)
    else:
        x = simulate.aligned(x, 4, off=1)
    got, chosen = device.gemm(w, x)
    assert chosen == "bytes"
    assert exact.same_bits(got, exact.gemm(w, x))
    with pytest.raises(simulate.SimulationError, match="not aligned"):
        device.gemm(w, x, kernel="narrow8")


@pytest.mark.parametrize("kernel", simulate.KERNELS)
def test_random_records(rng, device, kernel):
    rows, columns = TILES[kernel]
    rows, columns = max(rows, 32), max(columns, 4)
    w, x = operands(rng, rows, columns, 2, legal=False)
    x[:, 0] = exact.quantize(exact.blocks(rng, "gaussian", columns))
    assert exact.same_bits(device.gemm(w, x, kernel=kernel)[0], exact.gemm(w, x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", simulate.KERNELS)
def test_a_hundred_thousand_records(rng, device, kernel):
    for _ in range(100_000 // (64 * 16 * 4)):
        w, x = operands(rng, 64, 16, 4, legal=False)
        assert exact.same_bits(device.gemm(w, x, kernel=kernel)[0], exact.gemm(w, x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [*exact.KINDS, *exact.POISON_KINDS])
def test_seven_thousand_blocks_of_each_kind(rng, device, kind):
    values = simulate.aligned(exact.blocks(rng, kind, 7000), 16)
    np.testing.assert_array_equal(device.quantize(values), exact.quantize(values))
