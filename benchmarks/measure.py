"""Times of several programs in one run, so that a drifting clock or a busy neighbour favours none of them.

A round visits every side twice, there and back: A B C C B A. A drift that is linear within a round then
costs all sides the same, and only ratios within a round are compared: the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_CALLS = 1000


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Side:
    """One of the programs: `call` runs it once, `rest` stops what it leaves running after its turn."""

    call: Callable[[], object]
    rest: Callable[[], object] = _nothing


def turns(names: Iterable[str]) -> list[str]:
    """The order of one round: there and back."""
    there = list(names)
    return [*there, *reversed(there)]


def interleave(
    sides: Mapping[str, Side],
    rounds: int,
    turn_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, NDArray[np.float64]]:
    """Seconds per call of every side, float64 [rounds]: the mean of its two turns of each round.

    A turn makes as many calls as fit into `turn_seconds` (one at least, `MOST_CALLS` at most) and counts
    their median. A further call before them is not counted: it wakes threads and takes back the caches.
    """
    calls = {name: _calls_that_fit(side, turn_seconds, clock) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name in turns(sides):
            seconds[name].append(_turn(sides[name], calls[name], clock))
    return {name: np.reshape(times, (rounds, 2)).mean(axis=1) for name, times in seconds.items()}


def fastest(sides: Mapping[str, Side], turn_seconds: float) -> str:
    """The side with the least median of a few rounds: how a peer that has several ways gets its best one."""
    seconds = interleave(sides, 3, turn_seconds)
    return min(seconds, key=lambda name: float(np.median(seconds[name])))


def quartiles(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def median_ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> float:
    """Median of the rounds' ratios, which is not the ratio of the medians."""
    return float(np.median(numerator / denominator))


def _calls_that_fit(side: Side, turn_seconds: float, clock: Callable[[], float]) -> int:
    once = _turn(side, 1, clock)
    return max(1, min(MOST_CALLS, round(turn_seconds / once)))


def _turn(side: Side, calls: int, clock: Callable[[], float]) -> float:
    side.call()
    times = []
    for _ in range(calls):
        start = clock()
        side.call()
        times.append(clock() - start)
    side.rest()
    return statistics.median(times)
