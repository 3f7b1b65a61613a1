"""What records.py measures. Import it after the process has its cores and its environment: it imports JAX.

Every side starts from float32 x in memory and may use the same number of threads. Products read their
weights (and x) from copies that take turns, so that no cache holds what a call needs.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from limits import BYTES as READ_BYTES
from limits import MultiplyAddLimit, ReadLimit
from measure import Side, fastest, interleave
from numpy.typing import NDArray
from peer import Peer, Products

import jaxquant as jq
from jaxquant.ops import native

ROTATED_BYTES = 128 * 2**20
SHAPES = ((4096, 4096), (14336, 4096))  # M, K
COLUMNS = (2, 4, 8, 16, 64, 512)
GROWTH = {
    "rows": (256, 512, 1024, 2048, 4096),
    "columns": (8, 16, 32, 64, 128),
    "records": (4, 8, 16, 32, 64),
}
CHAIN = 64  # operations whose cost is told from the cost of a call
REPEATED = 32


@dataclass
class Setting:
    """How to measure in this process; `ggml`, `read` and `chain` are None where there is none."""

    threads: int
    rounds: int
    turn_seconds: float
    ggml: Peer | None
    read: ReadLimit | None
    chain: MultiplyAddLimit | None

    @classmethod
    def make(
        cls, threads: int, rounds: int, turn_seconds: float, folder: Path | None, library: Path | None
    ) -> Setting:
        try:
            ggml = Peer(folder)
        except (ImportError, OSError, AttributeError) as error:
            if folder:
                raise RuntimeError(f"the libraries in {folder} cannot be used: {error}") from error
            ggml = None
            print(f"not compared with ggml: {error}", file=sys.stderr)
        read = ReadLimit(library, threads, turn_seconds) if library else None
        chain = MultiplyAddLimit(library, threads, jq.status().isa or "") if library else None
        return cls(threads, rounds, turn_seconds, ggml, read, chain if chain and chain.side else None)

    def race(self, sides: dict[str, Side]) -> dict[str, NDArray[np.float64]]:
        return interleave(sides, self.rounds, self.turn_seconds)


@dataclass
class Row:
    """One line of the table: seconds of a call per side and round.

    ``amount / seconds`` is the speed in ``1e9 * unit``; without a unit the time itself is what counts. ``differences`` are the largest ones of our result
    from another side's, relative to that side's largest value.
    """

    work: str
    amount: float
    unit: str
    seconds: dict[str, NDArray[np.float64]]
    differences: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


@jax.jit
def gemv(w: jax.Array, x: jax.Array) -> jax.Array:
    """uint8 [M, G, 144], float32 [G, 256] -> float32 [M]."""
    return jax.vmap(jq.quantized_dot, (0, None))(w, jq.quantize(x))


@jax.jit
def gemm(w: jax.Array, x: jax.Array) -> jax.Array:
    """uint8 [M, G, 144], float32 [N, G, 256] -> float32 [N, M]."""
    rows = jax.vmap(jq.quantized_dot, (0, None))
    return jax.vmap(rows, (None, 0))(w, jax.vmap(jq.quantize)(x))


@jax.jit
def float_rows(w: jax.Array, x: jax.Array) -> jax.Array:
    """float32 [M, K], float32 [N, K] -> float32 [M, N]."""
    return w @ x.T


@jax.jit
def float_columns(w: jax.Array, x: jax.Array) -> jax.Array:
    """The same as float32 [N, M]: which of the two XLA computes faster depends on N."""
    return x @ w.T


def run_gemv(setting: Setting) -> Iterator[Row]:
    for M, K in SHAPES:
        yield product(setting, f"GEMV {M}x{K}", M, K, None)


def run_gemm(setting: Setting) -> Iterator[Row]:
    M, K = SHAPES[0]
    for columns in COLUMNS:
        yield product(setting, f"GEMM {M}x{K}, {columns} columns", M, K, columns)


def product(setting: Setting, work: str, M: int, K: int, columns: int | None) -> Row:
    """One vector where `columns` is None."""
    rng = np.random.default_rng(M)
    w = random_weights(rng, M, K // 256)
    x = rng.standard_normal((columns or 1, K), np.float32)
    copies = copies_of(w.nbytes)

    function, blocks = (gemm, x.reshape(-1, K // 256, 256)) if columns else (gemv, x.reshape(-1, 256))
    ours = rotate(function, device_copies(w, copies), device_copies(blocks, copies))
    sides = {"jaxquant": Side(ours)}

    decoded = jq.records.dequantize(w, jq.quant.q4_k).reshape(M, K)
    float_copies = copies_of(decoded.nbytes)
    operands = device_copies(decoded, float_copies), device_copies(x, float_copies)
    del decoded
    ways = {way.__name__: Side(rotate(way, *operands)) for way in (float_rows, float_columns)}
    way = fastest(ways, setting.turn_seconds)
    sides["XLA float32"] = ways[way]
    notes: dict[str, Any] = {"copies": copies, "float32 copies": float_copies, "float32 dot": way}

    theirs = None
    if setting.ggml:
        theirs = Products(setting.ggml, w, x, setting.threads, copies)
        notes["ggml repacked"] = theirs.repacked
        sides["ggml"] = Side(theirs.run, theirs.rest)
    if setting.read:
        sides["read"] = setting.read.side
    if setting.chain and columns and setting.chain.side:
        sides["chain"] = setting.chain.side

    got = np.asarray(ours()).reshape(-1, M)
    seconds = setting.race(sides)
    floats = np.asarray(sides["XLA float32"].call())
    differences = {"XLA float32": difference(got, floats.T if way == "float_rows" else floats)}
    if theirs:
        differences["ggml"] = difference(got, theirs.result())
        theirs.close()
    if "read" in seconds:
        seconds["read"] *= w.nbytes / READ_BYTES
    if setting.chain and columns and "chain" in seconds:
        seconds["chain"] *= 2.0 * M * K * columns / setting.chain.operations
    notes["operations per byte of weights"] = 2.0 * M * K * (columns or 1) / w.nbytes
    if columns:
        return Row(work, 2.0 * M * K * columns, "GFLOP/s", seconds, differences, notes)
    return Row(work, w.nbytes, "GB/s of weights", seconds, differences, notes)


def run_quantize(setting: Setting) -> Iterator[Row]:
    """64 KiB and 128 MiB, each with and without what the call costs besides quantizing.

    A call from Python costs as much as 64 KiB do, and the pages of new memory as much as 128 MiB do: so also
    inside a program, and into memory that exists. ggml's quantizers compute on the thread that calls them;
    128 MiB are dealt to as many threads as we have, while waking threads for 64 KiB would take longer than the work.
    """
    x = random_values(64 * 2**10)
    on_device = jnp.array(x)
    one = jax.jit(jq.quantize)
    ours = {"jaxquant": Side(lambda: one(on_device).block_until_ready())}
    yield from quantize(setting, "quantize 64 KiB, one call", x, ours, 1)
    ours = {f"{count} calls": Side(repeated_quantize(on_device, count)) for count in (1, 1 + REPEATED)}
    yield from quantize(setting, "quantize 64 KiB, inside a program", x, ours, 1, four_rows=True)

    large = random_values(128 * 2**20)
    large_on_device = jnp.array(large)
    ours = {"jaxquant": Side(quantize_into_donated(large_on_device))}
    yield from quantize(
        setting, "quantize 128 MiB into given memory", large, ours, setting.threads, four_rows=True
    )
    ours = {"jaxquant": Side(lambda: one(large_on_device).block_until_ready())}
    yield from quantize(
        setting, "quantize 128 MiB into new memory", large, ours, setting.threads, new_memory=True
    )


def quantize(
    setting: Setting,
    work: str,
    x: NDArray[np.float32],
    sides: dict[str, Side],
    peer_threads: int,
    *,
    new_memory: bool = False,
    four_rows: bool = False,
) -> Iterator[Row]:
    out = np.zeros((len(x), 292), np.uint8)
    if setting.ggml:
        ggml = setting.ggml
        sides["ggml"] = Side(ggml.quantizer(x, out, peer_threads))
        if new_memory:
            sides["ggml"] = Side(lambda: ggml.quantizer(x, np.empty_like(out), peer_threads)())
        fours = ggml.four_row_quantizer(x, np.zeros_like(out), peer_threads) if four_rows else None
        if fours:
            sides["ggml four rows"] = Side(fours)
    if setting.read and x.nbytes >= ROTATED_BYTES:
        sides["read"] = setting.read.side
    seconds = setting.race(sides)
    if "jaxquant" not in seconds:
        many, one = seconds.pop(f"{1 + REPEATED} calls"), seconds.pop("1 calls")
        seconds["jaxquant"] = (many - one) / REPEATED
    if "read" in seconds:
        seconds["read"] *= x.nbytes / READ_BYTES
    differences, notes = {}, {"ggml threads": peer_threads}
    if setting.ggml:
        got = np.asarray(jq.quantize(jnp.array(x)))
        setting.ggml.quantizer(x, out, 1)()
        ours, theirs = (jq.records.dequantize(records, jq.quant.q8_k) for records in (got, out))
        differences["ggml"] = difference(ours, theirs)
        notes["records that differ from ggml's"] = int((got != out).any(axis=1).sum())
    unit = "GB/s of float32"
    four_row_seconds = seconds.pop("ggml four rows", None)
    yield Row(work, x.nbytes, unit, seconds, differences, notes)
    if four_row_seconds is not None:
        beside = {"jaxquant": seconds["jaxquant"], "ggml": four_row_seconds}
        yield Row(f"{work}, ggml four rows at a time", x.nbytes, unit, beside, {}, notes)


def random_values(nbytes: int) -> NDArray[np.float32]:
    return np.random.default_rng(nbytes).standard_normal((nbytes // 1024, 256), np.float32)


def quantize_into_donated(x: jax.Array) -> Callable[[], object]:
    """Each call writes over the records of the one before."""

    @functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
    def program(x: jax.Array, old: jax.Array) -> jax.Array:
        return jq.quantize(x)

    records = jq.quantize(x)
    memory = records.unsafe_buffer_pointer()

    def run() -> None:
        nonlocal records
        records = program(x, records).block_until_ready()

    run()
    if records.unsafe_buffer_pointer() != memory:
        raise RuntimeError("quantize did not write into the memory it was given")
    return run


def repeated_quantize(x: jax.Array, count: int) -> Callable[[], object]:
    """A program with `count` quantize operations on the same memory, which XLA cannot know to be the same."""

    @jax.jit
    def program(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([jq.quantize(array)[0, 0] for array in arrays])

    arrays = (x,) * count
    require_calls(program, (arrays,), "jaxquant_quantize_v1", count)
    return lambda: program(arrays).block_until_ready()


def run_overhead(setting: Setting) -> Iterator[Row]:
    """What a call costs beyond its arithmetic: the operands are one record."""
    x = jnp.array(np.random.default_rng(1).standard_normal((1, 256), np.float32))
    w = jnp.array(random_weights(np.random.default_rng(2), 1, 1)[0])
    records = jq.quantize(x)

    for operation, link, operand in (("quantize", next_values, x), ("quantized_dot", next_records, records)):
        sides = {}
        for count in (1, 1 + CHAIN):
            program = jax.jit(functools.partial(chain, link, count))
            require_calls(program, (w, operand), f"jaxquant_{operation}_v1", count)
            call = functools.partial(program, w, operand)
            sides[str(count)] = Side(lambda call=call: call().block_until_ready())
        seconds = setting.race(sides)
        more = (seconds[str(1 + CHAIN)] - seconds["1"]) / CHAIN
        yield Row(f"one more {operation} in a jit", 0, "", {"jaxquant": more})

    eager = {
        "quantize": lambda: jq.quantize(x).block_until_ready(),
        "quantized_dot": lambda: jq.quantized_dot(w, records).block_until_ready(),
    }
    for operation, call in eager.items():
        seconds = setting.race(
            {"jaxquant": Side(call), "XLA float32": Side(lambda: jnp.add(x, x).block_until_ready())}
        )
        yield Row(f"eager {operation}, one record (XLA: jnp.add)", 0, "", seconds)


def next_values(w: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    return jq.quantize(last)[:, :256].astype(jnp.float32)


def next_records(w: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    # The dot never has this value, but XLA cannot know it.
    return first + (jq.quantized_dot(w, last) == 1e30).astype(jnp.uint8)


def chain(
    link: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], count: int, w: jax.Array, operand: jax.Array
) -> jax.Array:
    """Each operation waits for the one before; a small operation of XLA's own lies between them."""
    last = operand
    for _ in range(count):
        last = link(w, operand, last)
    return last


def require_calls(program: Any, operands: tuple[Any, ...], target: str, count: int) -> None:
    found = program.lower(*operands).compile().as_text().count(f'custom_call_target="{target}"')
    if found != count:
        raise RuntimeError(f"the program for {target} has {found} calls, wanted {count}")


def random_weights(rng: np.random.Generator, M: int, G: int) -> NDArray[np.uint8]:
    """uint8 [M, G, 144]: every bit random but for the two scales, which are of the size that models have."""
    w = rng.integers(0, 256, (M, G, 144), np.uint8)
    w[..., :4] = rng.uniform(1e-4, 1e-3, (M, G, 2)).astype("<f2").view(np.uint8)
    return w


def copies_of(nbytes: int) -> int:
    return -(-ROTATED_BYTES // nbytes)


def device_copies(array: NDArray[Any], copies: int) -> list[jax.Array]:
    """Copies in memory of their own: a device array may share NumPy's memory unless it is told to copy."""
    arrays = [jnp.array(array) for _ in range(copies)]
    if len({a.unsafe_buffer_pointer() for a in arrays}) != copies:
        raise RuntimeError("the copies share memory")
    return arrays


def rotate(function: Callable[..., jax.Array], *operands: list[jax.Array]) -> Callable[[], jax.Array]:
    """Each call takes the next copy of every operand."""
    turns = itertools.cycle(list(zip(*operands, strict=True)))
    return lambda: function(*next(turns)).block_until_ready()


def difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """The largest, relative to the largest value."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def run_growth(setting: Setting) -> Iterator[Row]:
    """How the time of a product grows with each extent, the others staying: 1024 rows, 16 columns, 16 records."""
    rng = np.random.default_rng(3)
    for axis, extents in GROWTH.items():
        for extent in extents:
            shape = {"rows": 1024, "columns": 16, "records": 16} | {axis: extent}
            M, N, G = shape["rows"], shape["columns"], shape["records"]
            w = random_weights(rng, M, G)
            copies = copies_of(w.nbytes)
            x = rng.standard_normal((N, G, 256), np.float32)
            ours = rotate(gemm, device_copies(w, copies), device_copies(x, copies))
            seconds = setting.race({"jaxquant": Side(ours)})
            notes = {"grows": axis, "extent": extent}
            yield Row(f"{extent} {axis}", 512.0 * M * N * G, "GFLOP/s", seconds, notes=notes)


def run_isa(setting: Setting) -> Iterator[Row]:
    """Each instruction set forced in turn, on operands that stay in the cache."""
    rng = np.random.default_rng(4)
    w = jnp.array(random_weights(rng, 256, 16))
    x = jnp.array(rng.standard_normal((16, 16, 256), np.float32))
    quantized = jax.jit(jax.vmap(jq.quantize))(x)
    dots = jax.jit(jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0)))
    values = jnp.array(random_values(256 * 2**10))
    programs: dict[str, tuple[float, str, Callable[[], jax.Array]]] = {
        f"dots {columns}": (
            512.0 * 256 * 16 * columns,
            "GFLOP/s",
            functools.partial(dots, w, quantized[:columns]),
        )
        for columns in (1, 4, 16)
    }
    programs["quantize 256 KiB"] = (
        values.nbytes,
        "GB/s of float32",
        functools.partial(jax.jit(jq.quantize), values),
    )
    for work, (amount, unit, program) in programs.items():

        def forced(isa: str, program: Callable[[], jax.Array] = program) -> jax.Array:
            native.force_isa(isa)
            return program().block_until_ready()

        best = native.supported_isas()[0]
        sides = {isa: Side(functools.partial(forced, isa)) for isa in native.supported_isas()}
        seconds = setting.race(sides)
        native.force_isa(best)
        seconds["jaxquant"] = seconds[best]
        yield Row(f"ISA: {work.replace('dots', '256x4096, columns')}", amount, unit, seconds)


WORKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "gemv": run_gemv,
    "gemm": run_gemm,
    "quantize": run_quantize,
    "overhead": run_overhead,
    "growth": run_growth,
    "isa": run_isa,
}
