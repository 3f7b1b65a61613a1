"""Prove the bits on this machine: every implementation of both operations against exact arithmetic.

``python -m jaxquant selftest`` runs the native kernels of every instruction set this CPU has, and the
fallback on every kind of device, on the vectors of the record contract, on random-bit records and on all
kinds of data. It needs no test framework and no file.

The reference here is written from the contract alone and shares nothing with the operations: integers
are exact, and each float step is one NumPy operation, which rounds once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import jaxquant as jq
from jaxquant.ops import native

__all__ = ["devices", "exact_dot", "exact_quantize", "lowering", "run"]

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

POISON: U8 = np.array([0x00, 0x00, 0xC0, 0x7F] + [0] * 288, np.uint8)
SMALLEST_EXTREME = 0x02FE0001  # float32 bits


# The exact reference


def _scales(records: U8) -> tuple[F32, F32]:
    """uint8 [M, 144] to d and dmin [M]."""
    halves = np.ascontiguousarray(records[:, :4]).view("<f2").astype(np.float32)
    return halves[:, 0], halves[:, 1]


def _decode_q4_k(records: U8) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """uint8 [M, 144] to sc, m [M, 8] and q [M, 256]."""
    a = records[:, :16].astype(np.int64)
    fields = []
    for r in (0, 1):
        first = [a[:, 4 + 4 * r + i] & 63 for i in range(4)]
        last = [a[:, 12 + t] >> 4 * r & 15 | a[:, 4 + 4 * r + t] >> 6 << 4 for t in range(4)]
        fields.append(np.stack(first + last, axis=-1))
    i = np.arange(256)
    packed = records[:, 16 + 32 * (i // 64) + i % 32]
    return fields[0], fields[1], packed >> np.where(i % 64 < 32, 0, 4).astype(np.uint8) & 15


def _decode_q8_k(records: U8) -> tuple[F32, NDArray[Any], NDArray[Any]]:
    """uint8 [N, 292] to ds [N], q [N, 256] and bsum [N, 16]."""
    ds = np.ascontiguousarray(records[:, :4]).view("<f4")[:, 0]
    bsum = np.ascontiguousarray(records[:, 260:]).view("<i2")
    return ds, records[:, 4:260].view(np.int8), bsum.astype(np.int64)


def _encode_q8_k(ds: NDArray[Any], q: NDArray[Any], bsum: NDArray[Any] | None = None) -> U8:
    """float32 [...] and integers [..., 256] to uint8 [..., 292]."""
    if bsum is None:
        bsum = q.reshape(*q.shape[:-1], 16, 16).sum(axis=-1)
    fields = (ds.astype("<f4")[..., None], q.astype(np.int8), bsum.astype("<i2"))
    return np.concatenate([np.ascontiguousarray(field).view(np.uint8) for field in fields], axis=-1)


def exact_statistics(w: U8, x: U8) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """S and T of every pair of records: uint8 [M, 144] and [N, 292] to integers [N, M]."""
    sc, m, wq = _decode_q4_k(w)
    _, xq, bsum = _decode_q8_k(x)
    # All numbers are integers below 2**53, so that float64 products and sums are exact in any order.
    weights = (sc[..., None] * wq.reshape(-1, 8, 32)).reshape(-1, 256).astype(np.float64)
    pairs = (bsum[:, 0::2] + bsum[:, 1::2]).astype(np.float64)
    return xq.astype(np.float64) @ weights.T, pairs @ m.astype(np.float64).T


def exact_dot(w: U8, x: U8, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """All dots of uint8 [M, G, 144] with uint8 [N, G, 292]: ``dtype`` [N, M].

    In float32 every step rounds where the contract says, and the result has its bits. In float64 the
    integers are as exact and the float steps carry 53 bits: what the dot would be without rounding.

    Source: record contract, section 3.

    Example:
        >>> import numpy as np
        >>> x = exact_quantize(np.ones((1, 1, 256), np.float32))
        >>> w = np.zeros((2, 1, 144), np.uint8)
        >>> w[:, 0, [1, 4, 16]] = 0x3C, 2, 3  # d = 1, sc[0] = 2, q[0] = 3
        >>> exact_dot(w, x, np.float64).round(6)
        array([[6., 6.]])
    """
    total = np.zeros((len(x), len(w)), dtype)
    with np.errstate(all="ignore"):
        for g in range(w.shape[1]):
            d, dmin = (half.astype(dtype) for half in _scales(w[:, g]))
            ds = _decode_q8_k(x[:, g])[0].astype(dtype)[:, None]
            S, T = (integers.astype(dtype) for integers in exact_statistics(w[:, g], x[:, g]))
            v = ds * (d * S - dmin * T)
            total = v if g == 0 else total + v
    return total


def exact_quantize(values: F32) -> U8:
    """float32 [..., 256] to uint8 [..., 292], poison records where the values are out of domain.

    Source: record contract, section 4.

    Example:
        >>> import numpy as np
        >>> exact_quantize(np.ones((1, 256), np.float32))[0, 4:8].view(np.int8)
        array([-127, -127, -127, -127], dtype=int8)
    """
    high, low = values.max(axis=-1, keepdims=True), values.min(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        extreme = np.where(high > -low, high, low)
        inverse = np.float32(-127) / extreme
        ds = np.float32(1) / inverse
        q = np.clip(np.rint(values * inverse), -128, 127)
    zero = extreme == 0
    poison = ~np.isfinite(values).all(axis=-1, keepdims=True) | (~zero & ~np.isfinite(inverse))
    empty = zero | poison
    records = _encode_q8_k(np.where(empty, np.float32(0), ds)[..., 0], np.where(empty, np.float32(0), q))
    return np.where(poison, POISON, records)


# Data


def _random_q4_k(rng: np.random.Generator, shape: tuple[int, int], finite: bool) -> U8:
    """Random bits. If not finite, 65536 records hold every bit pattern of d and of dmin."""
    records = rng.integers(0, 256, (*shape, 144), np.uint8)
    for start in (0, 2):
        patterns = np.resize(rng.permutation(65536), shape).astype("<u2")
        if finite:
            patterns &= 0xBFFF
        records[..., start : start + 2] = patterns[..., None].view(np.uint8)
    return records


def _random_q8_k(rng: np.random.Generator, shape: tuple[int, int], legal: bool) -> U8:
    """All values of q, bsum true or random, and all kinds of ds, but for ordinary ones in the first row."""
    fraction = rng.integers(0, 1 << 23, shape)
    kinds = (
        rng.integers(115, 135, shape) << 23 | fraction,  # where the order of the sum decides bits
        rng.integers(0, 255, shape) << 23 | fraction,
        fraction >> rng.integers(0, 23, shape),  # subnormal
        np.full(shape, 0x7F800000),
        np.full(shape, 0x7FC00000),
        np.zeros(shape, np.int64),
    )
    ordinary = rng.random((shape[0], 1)) < 0.7
    ordinary[0] = True
    kind = np.where(ordinary, 0, rng.integers(0, len(kinds), shape))
    ds = (np.choose(kind, kinds) | rng.integers(0, 2, shape) << 31).astype(np.uint32).view(np.float32)
    q = rng.integers(-128, 128, (*shape, 256))
    q = np.where(rng.random((*shape, 1)) < 0.1, -128, q)
    return _encode_q8_k(ds, q, None if legal else rng.integers(-32768, 32768, (*shape, 16)))


def _blocks(rng: np.random.Generator, n: int) -> Iterator[tuple[str, F32]]:
    """float32 [n, 256] of each kind of data."""

    def bits(pattern: NDArray[Any]) -> F32:
        signs = rng.integers(0, 2, pattern.shape) << 31
        values: F32 = (pattern | signs).astype(np.uint32).view(np.float32)
        return values

    def spiked(values: F32, spike: NDArray[Any]) -> F32:
        values = values.copy()
        values[np.arange(n), rng.integers(0, 256, n)] = spike
        return values

    gaussian = np.ldexp(rng.standard_normal((n, 256), np.float32), rng.integers(-20, 20, (n, 1)))
    largest = np.abs(gaussian).max(axis=-1)
    near_smallest = bits(rng.integers(SMALLEST_EXTREME, SMALLEST_EXTREME + 0x01000000, n))
    small = bits(rng.integers(0, SMALLEST_EXTREME, (n, 256)))
    yield "gaussian", gaussian
    yield "heavy tails", rng.standard_cauchy((n, 256)).astype(np.float32)
    yield "ties for the extreme", spiked(spiked(gaussian, largest), -largest)
    yield (
        "halves of ds",
        spiked(rng.integers(-126, 126, (n, 256)).astype(np.float32) + np.float32(0.5), np.full(n, -127)),
    )
    yield "subnormal ds", spiked(small, near_smallest)
    yield "subnormal values", spiked(bits(rng.integers(0, 1 << 23, (n, 256))), near_smallest)
    yield "near the largest float32", bits(0x7F7FFFFF - rng.integers(0, 1 << 24, (n, 256)))
    yield "bfloat16 values", (gaussian.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    yield "one value", spiked(np.zeros((n, 256), np.float32), gaussian[:, 0])
    yield "zeros of both signs", bits(np.zeros((n, 256), np.int64))
    yield "finite bits", bits(rng.integers(0, 0x7F800000, (n, 256)))
    yield "NaN", spiked(gaussian, bits(rng.integers(0x7F800001, 0x80000000, n)))
    yield "infinity", spiked(gaussian, bits(np.full(n, 0x7F800000)))
    yield (
        "too small",
        spiked(bits(rng.integers(0, 1 << 23, (n, 256))), bits(np.full(n, SMALLEST_EXTREME - 1))),
    )


def _quantize_vectors() -> tuple[F32, U8]:
    """The contract's table: blocks and their records."""

    def padded(*values: float) -> NDArray[np.float64]:
        return np.pad(values, (0, 256 - len(values)))

    ramp = np.arange(256) - 128
    sums = [-1912, -1656, -1400, -1144, -904, -648, -392, -136, 120, 376, 632, 888, 1129, 1384, 1640, 1896]
    table: list[tuple[Any, int, Any, Any]] = [  # values, bits of ds, q, bsum
        (np.zeros(256), 0, np.zeros(256), [0] * 16),
        (np.full(256, -0.0), 0, np.zeros(256), [0] * 16),
        (padded(1, -1), 0x3C010204, padded(127, -127), [0] * 16),
        (np.ones(256), 0xBC010204, np.full(256, -127), [-2032] * 16),
        (ramp, 0x3F810204, np.rint(ramp * (127 / 128)), sums),
        (
            padded(-127, 0.5, 1.5, 2.5, -0.5, -1.5),
            0x3F800000,
            padded(-127, 0, 2, 2, 0, -2),
            [-125] + [0] * 15,
        ),
    ]
    values, ds, q, bsum = (np.array(column) for column in zip(*table, strict=True))
    return values.astype(np.float32), _encode_q8_k(ds.astype(np.uint32).view(np.float32), q, bsum)


def _dot_vector() -> tuple[U8, U8]:
    """The contract's dot: uint8 [3, 144] and float32 [3, 256] quantized."""
    g, i = np.arange(3)[:, None], np.arange(256)
    w = ((37 * i[:144] + 11 + 101 * g) % 256).astype(np.uint8)
    scales = [(0.5, 0.25), (-1.25, 0.75), (3.140625, -0.09997559)]
    w[:, :4] = np.array(scales, "<f2").view(np.uint8)
    return w, exact_quantize((((73 * i + 19 + 31 * g) % 257 - 128) / 16).astype(np.float32))


_DOT_S, _DOT_T = [-209781, -132734, 221902], [-7083, 9900, 25041]
_DOT_V: F32 = np.array([0xC5CAFDDC, 0x461BFF1E, 0x472C199B], np.uint32).view(np.float32)
_DOT_RESULT: F32 = np.array([0x4739B9A7], np.uint32).view(np.float32)


class _Case(NamedTuple):
    """One call of an operation, and what it must answer."""

    operation: str  # "quantize", "dot", "GEMV" or "GEMM"
    operands: tuple[NDArray[Any], ...]
    wanted: Any


def _cases() -> dict[str, list[_Case]]:
    rng = np.random.default_rng(256)
    values, records = _quantize_vectors()
    w, x = _dot_vector()
    vectors = [_Case("quantize", (values,), records), _Case("dot", (w, x), _DOT_RESULT[0])]
    vectors += [_Case("dot", (w[g : g + 1], x[g : g + 1]), _DOT_V[g]) for g in range(3)]
    vectors += [_Case("dot", (w[:0], x[:0]), np.float32(0))]
    cases = {"contract vectors": vectors}
    blocks = np.concatenate([values for _, values in _blocks(rng, 201)])
    cases["quantize: 14 kinds of data"] = [_Case("quantize", (blocks,), exact_quantize(blocks))]
    for legal in (True, False):
        group = []
        for M, N, G in ((16384, 3, 4), (31, 1, 57), (45, 67, 5)):
            # One NaN hides a whole dot: long ones are for the sum, short ones for all kinds of records.
            w, x = _random_q4_k(rng, (M, G), finite=G > 4), _random_q8_k(rng, (N, G), legal)
            wanted = exact_dot(w, x)
            group.append(_Case("GEMV", (w, x[0]), wanted[0]) if N == 1 else _Case("GEMM", (w, x), wanted))
        cases[f"dot: random bits, {'legal' if legal else 'random'} bsum"] = group
    return cases


# Implementations


class _Implementation(NamedTuple):
    name: str
    device: jax.Device
    backend: str
    isa: str | None


_gemv = jax.vmap(jq.quantized_dot, (0, None))
_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "quantize": jq.quantize,
    "dot": jq.quantized_dot,
    "GEMV": _gemv,
    "GEMM": jax.vmap(_gemv, (None, 0)),
}


def devices() -> list[jax.Device]:
    """One device of every platform in this process, the CPU last unless it is the only one."""
    found = {device.platform: device for device in reversed(jax.devices())}
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
        found.setdefault("cpu", jax.devices("cpu")[0])
    return list(found.values())


def lowering(operation: str, device: jax.Device) -> str:
    """``"native"`` or ``"fallback"``: what ``"quantize"`` or ``"quantized_dot"``, traced now, lowers to.

    Raises:
        NotImplementedError: the backend ``"native"`` is forced, and there is no kernel for the device.
    """
    w, x, values = (
        jax.device_put(np.zeros((1, size), dtype), device)
        for size, dtype in ((144, np.uint8), (292, np.uint8), (256, np.float32))
    )
    if operation == "quantize":
        lowered = jax.jit(jq.quantize).lower(values)
    else:
        lowered = jax.jit(jq.quantized_dot).lower(w, x)
    return "native" if any(target in lowered.as_text() for target in native.FFI_TARGETS) else "fallback"


def _implementations() -> Iterator[_Implementation]:
    for device in devices():
        with jq.use_backend("auto"):
            has_kernels = lowering("quantized_dot", device) == "native"
        if has_kernels and device.platform == "cpu":
            for isa in native.supported_isas():
                yield _Implementation(f"cpu {isa}", device, "native", isa)
        elif has_kernels:
            yield _Implementation(f"{device.platform} native", device, "native", None)
        yield _Implementation(f"{device.platform} fallback", device, "fallback", None)


@contextlib.contextmanager
def _jitted(implementation: _Implementation) -> Iterator[Callable[[_Case], NDArray[Any]]]:
    """What answers a case by the implementation, under jit."""
    # New functions for every implementation, so that none answers with the program of another.
    operations = {name: jax.jit(partial(operation)) for name, operation in _OPERATIONS.items()}

    def answer(case: _Case) -> NDArray[Any]:
        operands = (jax.device_put(operand, implementation.device) for operand in case.operands)
        return np.asarray(operations[case.operation](*operands))

    force = native.use_isa(implementation.isa) if implementation.isa else contextlib.nullcontext()
    with jq.use_backend(implementation.backend), force:
        yield answer


# The report


def _mismatches(answer: NDArray[Any], wanted: NDArray[Any]) -> int:
    """Records (uint8) or results (float32) that differ in any bit; all NaN are one value."""
    if answer.shape != wanted.shape or answer.dtype != wanted.dtype:
        return max(1, wanted.size)
    if wanted.dtype == np.uint8:
        return int((answer != wanted).any(axis=-1).sum())
    same = (answer.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(answer) & np.isnan(wanted))
    return int((~same).sum())


def _reference_mismatches() -> int:
    """The reference itself on the contract's vectors; wrong, too, where the process flushes subnormals."""
    values, records = _quantize_vectors()
    w, x = _dot_vector()
    S, T = exact_statistics(w, x)
    subnormal = np.full(16, 2e-38, np.float32) * np.float32(0.25)
    return (
        _mismatches(exact_quantize(values), records)
        + _mismatches(exact_dot(w[None], x[None])[0], _DOT_RESULT)
        + int((np.diag(S) != _DOT_S).sum() + (np.diag(T) != _DOT_T).sum() + (subnormal == 0).sum())
    )


def run() -> int:
    """Run all checks and print one line for each; the number of mismatches."""
    wrong = 0

    def report(name: str, check: str, records: int, mismatches: int) -> None:
        nonlocal wrong
        wrong += mismatches
        verdict = "FAIL" if mismatches else "ok"
        print(
            f"{verdict:4}  {name:14}  {check:30}  {records:7} records  {mismatches:6} mismatches", flush=True
        )

    report("reference", "contract vectors", 9, _reference_mismatches())
    cases = _cases()
    for implementation in _implementations():
        with _jitted(implementation) as answer:
            for check, group in cases.items():
                records = sum(operand[..., 0].size for case in group for operand in case.operands)
                mismatches = sum(_mismatches(answer(case), case.wanted) for case in group)
                report(implementation.name, check, records, mismatches)
    if wrong:
        print(f"{wrong} mismatches: this machine does not compute what the contract says")
    elif (problem := native.status().problem) is not None:
        print(f"all bits of the fallback right, but the native kernels were not tested: {problem}")
    else:
        print("all bits right")
    return wrong
