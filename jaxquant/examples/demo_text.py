"""The second half of the demo: Gemma 3 writes text in each mode, with speed, memory, and what quantizing changes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxquant.examples import gemma
from jaxquant.examples.gemma import Matrix, Model, Tokenizer
from jaxquant.examples.model import ModelError
from jaxquant.gguf_types import Blocks

__all__ = ["PROMPTS", "run"]

PROMPTS = (
    "Monday, Tuesday, Wednesday,",
    "Water boils at 100 degrees Celsius. Ice melts at",
    "English: Good morning, my friend.\nFrench:",
)
TOKENS = 32  # added to each prompt
PREFILL = 256


class Cost(NamedTuple):
    """What a mode takes."""

    mode: str
    weights: int  # bytes
    peak: float  # bytes of the process, NaN where the kernel does not say
    prefill: float  # tokens per second, NaN if not measured
    decode: float  # tokens per second


def run(path: Path) -> None:
    """Print texts, costs and differences of the model at ``path``.

    Raises:
        ModelError: it is no model that ``jaxquant.examples.gemma`` runs.
    """
    tokenizer = Tokenizer(path)
    costs = [
        _write(path, "bytes", tokenizer, PROMPTS[:1], 8),
        _write(path, "quantized", tokenizer, PROMPTS, TOKENS),
        _write(path, "float32", tokenizer, PROMPTS, TOKENS),
    ]
    print("Text (greedy) is above. What each way to hold the weights takes:\n")
    print(
        f"{'mode':10} {'weights MB':>11} {'peak MB':>8} {f'prefill {PREFILL}':>13} {'decode':>9}  tokens per second"
    )
    for cost in costs:
        print(
            f"{cost.mode:10} {cost.weights / 1e6:11.1f} {cost.peak / 1e6:8.0f} {cost.prefill:13.1f} {cost.decode:9.2f}"
        )
    print(
        f"\npeak: of the process while loading and writing. The file has {path.stat().st_size / 1e6:.1f} MB.\n"
    )
    plain, quantized = gemma.load(path, "float32"), gemma.load(path, "quantized")
    _print_layers(plain, quantized)
    _print_differences(plain, quantized, tokenizer)


def _write(path: Path, mode: str, tokenizer: Tokenizer, prompts: Sequence[str], count: int) -> Cost:
    reset = _reset_peak()
    model = gemma.load(path, mode)
    print(f"--- {mode} ---")
    gaps: list[float] = []
    for prompt in prompts:
        print(prompt, end="|", flush=True)
        gaps += _show(model, tokenizer, prompt, count)
        print("\n")
    prefill = PREFILL / _prefill_seconds(model) if mode != "bytes" else np.nan
    peak = _peak() if reset else np.nan
    return Cost(mode, model.nbytes, peak, prefill, float(1 / np.median(gaps)) if gaps else np.nan)


def _show(model: Model, tokenizer: Tokenizer, prompt: str, count: int) -> list[float]:
    """Print the continuation; the seconds from each id to the next."""
    times: list[float] = []
    gemma.stream(
        model,
        tokenizer,
        prompt,
        count,
        show=lambda text: print(text, end="", flush=True),
        tick=lambda: times.append(time.perf_counter()),
    )
    return [after - before for before, after in pairwise(times)][1:]  # the first one holds the compilation


def _prefill_seconds(model: Model) -> float:
    config, ids = model.config, np.arange(PREFILL, dtype=np.int32) % model.config.vocabulary
    zero, last = np.int32(0), np.int32(PREFILL - 1)

    def once() -> None:
        cache = gemma.empty_cache(config, PREFILL)
        jax.block_until_ready(gemma.step(config, model.weights, cache, ids, zero, last))

    return _alternate([once], rounds=3)[0]


def _alternate(functions: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each; they take turns, so that a busy machine slows all of them alike."""
    seconds: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 1):
        for function, found in zip(functions, seconds, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first call compiles
                found.append(time.perf_counter() - start)
    return [float(np.median(found)) for found in seconds]


# The matrices that are stored as Q4_K, alone


@jax.jit
def products(matrices: Sequence[Matrix], xs: dict[int, jax.Array]) -> jax.Array:
    """Each matrix [M, K] by the activations [T, K] of its length, one after the other as in the model."""
    carried = jnp.zeros((), jnp.float32)
    for matrix in matrices:
        y = gemma.linear(xs[matrix.shape[-1]] + carried, matrix)
        carried = jnp.max(y) * np.float32(1e-30)
    return carried


def _print_layers(plain: Model, quantized: Model) -> None:
    pairs = [
        (wide[name], held)
        for wide, layer in zip(plain.weights["layers"], quantized.weights["layers"], strict=True)
        for name, held in layer.items()
        if isinstance(held, Blocks)
    ]
    if not pairs:
        raise ModelError("the model has no Q4_K matrix")
    wide, blocks = zip(*pairs, strict=True)
    nbytes = [sum(matrix.nbytes for matrix in side) / 1e6 for side in (wide, blocks)]
    print(
        f"The {len(pairs)} Q4_K matrices alone, {nbytes[0]:.1f} MB as float32, {nbytes[1]:.1f} MB as records:\n"
    )
    print(f"{'':14} {'float32 ms':>11} {'records ms':>11} {'ratio':>6}")
    rng = np.random.default_rng(0)
    for name, T, rounds in (("decode", 1, 40), (f"prefill {PREFILL}", PREFILL, 8)):
        xs = {K: jnp.asarray(rng.standard_normal((T, K), np.float32)) for K in {m.shape[-1] for m in blocks}}
        sides = [lambda side=side, xs=xs: products(side, xs).block_until_ready() for side in (wide, blocks)]
        one, other = _alternate(sides, rounds)
        print(f"{name:14} {1e3 * one:11.2f} {1e3 * other:11.2f} {one / other:6.2f}")
    print("\nActivations are quantized in the records' time.\n")


def _print_differences(plain: Model, quantized: Model, tokenizer: Tokenizer) -> None:
    print("What quantized activations and exact record dots change, against float32:\n")
    print(
        f"{'text':34} {'tokens':>7} {'perplexity':>11} {'quantized':>10} {'mean KL':>8} {'max KL':>8} {'same top-1':>11}"
    )
    found = []
    for text in gemma.texts():
        found.append(gemma.compare(plain, quantized, tokenizer.encode(text)))
        if len(found) == 1:
            _print_row("first 64 of the next one", _first(found[0], 64))
        _print_row(f"{text[:30]}...", found[-1])
    losses, divergences, agreements = zip(*found, strict=True)
    everything = np.concatenate(losses, axis=1), np.concatenate(divergences), np.concatenate(agreements)
    _print_row(f"all {len(found)}", gemma.Comparison(*everything))


def _first(found: gemma.Comparison, count: int) -> gemma.Comparison:
    losses, divergences, agreements = found
    return gemma.Comparison(losses[:, :count], divergences[:count], agreements[:count])


def _print_row(name: str, found: gemma.Comparison) -> None:
    one, other = found.perplexities
    same = f"{found.agreements.sum()}/{len(found.agreements)}"
    print(
        f"{name:34} {len(found.agreements):7} {one:11.3f} {other:10.3f} {found.divergences.mean():8.4f}"
        f" {found.divergences.max():8.4f} {same:>11}"
    )


# Memory of this process


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> float:
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024.0 * int(line.split()[1])
    return float("nan")
