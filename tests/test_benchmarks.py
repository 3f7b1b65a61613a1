"""The arithmetic of the benchmarks: the order of turns, what is counted, medians of ratios. No clock is read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the benchmarks are not in this tree")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield load("measure")
    del sys.modules["measure"]


@pytest.fixture
def records(measure):
    yield load("records")
    del sys.modules["records"], sys.modules["limits"]


class Machine:
    """A clock that only programs move, and what they did."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def program(self, name: str, costs):
        """A program whose calls take `costs`, the last one for ever."""
        left = list(costs)

        def call() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_a_round_goes_there_and_back(measure):
    assert measure.turns(["a", "b"]) == ["a", "b", "b", "a"]
    assert measure.turns("abc") == ["a", "b", "c", "c", "b", "a"]


def test_sides_take_turns_and_rest_after_each(measure):
    machine = Machine()
    sides = {
        "a": measure.Side(machine.program("a", [1.0])),
        "b": measure.Side(machine.program("b", [2.0]), lambda: machine.log.append("rest")),
    }
    seconds = measure.interleave(sides, 2, 0.5, machine.clock)
    a, b = ["a", "a"], ["b", "b", "rest"]  # each turn: one call that is not counted, one that is
    calibration = a + b
    assert machine.log == calibration + 2 * (a + b + b + a)
    np.testing.assert_array_equal(seconds["a"], [1.0, 1.0])
    np.testing.assert_array_equal(seconds["b"], [2.0, 2.0])


@pytest.mark.parametrize(
    ("cost", "turn_seconds", "calls"),
    [
        pytest.param(1.0, 0.25, 1, id="one at least"),
        pytest.param(1.0, 5.0, 5, id="as many as fit"),
        pytest.param(2.0**-20, 1.0, 1000, id="not without end"),
    ],
)
def test_calls_of_a_turn(measure, cost, turn_seconds, calls):
    machine = Machine()
    measure.interleave({"a": measure.Side(machine.program("a", [cost]))}, 1, turn_seconds, machine.clock)
    assert len(machine.log) == 2 + 2 * (1 + calls)


def test_a_turn_counts_the_median_of_its_calls_and_not_the_first(measure):
    machine = Machine()
    calibration, first, second = [9.0, 1.0], [50.0, 1.0, 70.0, 2.0], [60.0, 4.0, 5.0, 90.0]
    program = machine.program("a", calibration + first + second)
    seconds = measure.interleave({"a": measure.Side(program)}, 1, 3.0, machine.clock)
    np.testing.assert_array_equal(seconds["a"], [(2.0 + 5.0) / 2])


def test_a_linear_drift_costs_all_sides_the_same(measure):
    # Each turn of the round is one slower than the one before, whoever takes it.
    machine = Machine()
    turn = {name: [] for name in "abc"}
    for position, name in enumerate(measure.turns("abc")):
        turn[name] += [0.0, 10.0 + position]
    sides = {name: measure.Side(machine.program(name, [0.0, 10.0, *turn[name]])) for name in "abc"}
    seconds = measure.interleave(sides, 1, 1.0, machine.clock)
    assert {name: times.tolist() for name, times in seconds.items()} == {
        "a": [12.5],
        "b": [12.5],
        "c": [12.5],
    }


def test_median_of_ratios_is_not_the_ratio_of_medians(measure):
    theirs, ours = np.array([2.0, 30.0, 5.0]), np.array([1.0, 10.0, 20.0])
    assert measure.median_ratio(theirs, ours) == 2.0
    assert np.median(theirs) / np.median(ours) == 0.5


def test_quartiles(measure):
    assert measure.quartiles(np.array([5.0, 1.0, 4.0, 2.0, 3.0])) == (2.0, 3.0, 4.0)


def test_fastest_has_the_least_median(measure, monkeypatch):
    times = {"a": [3.0, 3.0, 3.0], "b": [1.0, 2.0, 9.0], "c": [0.5, 4.0, 4.0]}
    monkeypatch.setattr(measure, "interleave", lambda sides, rounds, turn_seconds: times)
    assert measure.fastest({}, 1.0) == "b"


class Row:
    """What works.py hands over."""

    work, amount, unit = "GEMV", 8e9, "GB/s of weights"
    differences, notes = {"ggml": 2e-7}, {}

    def __init__(self) -> None:
        self.seconds = {
            "jaxquant": np.array([1.0, 2.0, 4.0]),
            "ggml": np.array([3.0, 4.0, 4.0]),
            "read": np.array([0.5, 1.5, 2.0]),
        }


def test_the_table_says_the_medians_and_the_ratios(records):
    row = records.summary(Row())
    assert row["seconds"]["jaxquant"] == (1.5, 2.0, 3.0)
    assert row["ratios"] == {"ggml": 2.0, "read": 0.5}
    assert row["rounds"]["ggml"] == [3.0, 4.0, 4.0]
    assert records.cells(row) == [
        *("GEMV", "2000.00 ms", "4.0 GB/s of weights", "4000.00 ms", "2.00x", "", "", "0.50", "", "2e-07"),
    ]
    lines = records.table([{"threads": 2, "isa": "avx2", "rows": [row]}]).splitlines()
    assert len(lines) == 3
    assert {line.count("|") for line in lines} == {len(records.HEADER) + 3}
    assert lines[2].startswith("| 2 | avx2 | GEMV | 2000.00 ms |")


@pytest.mark.parametrize(
    ("differences", "found"),
    [
        pytest.param({"ggml": 1e-6, "XLA float32": 0.01}, 0, id="close"),
        pytest.param({"ggml": 1e-3, "XLA float32": 0.01}, 1, id="ggml far"),
        pytest.param({"ggml": float("nan"), "XLA float32": 0.5}, 2, id="NaN and far"),
    ],
)
def test_disagreement_is_reported(records, differences, found):
    run = {"threads": 1, "rows": [{"work": "GEMV", "differences": differences}]}
    assert len(list(records.disagreements([run]))) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--only", "gemv,fft"], "fft is not one of gemv", id="unknown work"),
        pytest.param(["--threads", "0"], "may use 1 to", id="no thread"),
        pytest.param(["--threads", "two"], "wanted numbers", id="no number"),
    ],
)
def test_wrong_arguments(records, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        records.parse(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments(records):
    options = records.parse(["--threads", "1", "--only", "gemm,gemv", "--isa", "avx2,portable", "--quick"])
    assert (options.threads, options.only, options.isa) == ([1], ("gemm", "gemv"), ["avx2", "portable"])
    assert options.quick
    assert records.parse(["--threads", "1"]).isa == [None]


def test_the_caption_says_how_busy_the_machine_was(records):
    report = {
        "machine": {"cpu": "Some CPU", "cores": 2},
        "versions": {"jax": "0.10.2", "libggml-python": None},
        "commit": "0123abc",
        "load": (0.25, 1.0, 1.0),
        "load at the end": (2.0, 1.0, 1.0),
    }
    assert records.caption(report) == (
        "Some CPU, 2 cores, jax 0.10.2, commit 0123abc, load average 0.2 before and 2.0 after"
    )
