"""Weak scaling: two jax.distributed processes, pinned to one core each, against one process with half the work.

    python benchmarks/weak_scaling.py [--rounds 15] [--quick]

Every process multiplies the same number of weight rows, so that two hold a matrix of twice the rows between
them. The efficiency is the time of one process over that of two. Both are measured in one run, in turns
there and back (one on each core, both, both, one on each core), and the figure is the median of the rounds'
ratios: a clock that drifts or a neighbour that works hits both sides. Virtual devices would prove nothing,
since they share one pool of threads. Efficiency is given by wall clock and by the processor time of the
processes, in which other programs' turns on a core do not count. Prints a table, saves JSON under
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECORDS = 16  # K = 4096
WORKS = {"GEMV, weights from memory": (16384, 1), "GEMM, 64 columns": (1024, 64)}  # rows and columns
TURN_SECONDS = 0.3
CLOCKS = ("wall", "processor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a process fails; 2 for wrong arguments or a machine of one core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small matrices and few rounds, to see it work")
    parser.add_argument("--worker", nargs=3, metavar=("CORE", "PROCESS", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        work(*options.worker, quick=options.quick)
        return 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("two cores are needed", file=sys.stderr)
        return 2
    rounds = 3 if options.quick else options.rounds
    load = os.getloadavg()
    if load[0] > 0.5:
        print(f"the load average is {load[0]:.1f}: other programs disturb the timings", file=sys.stderr)
    try:
        efficiencies = measure(cores, rounds, options.quick)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    report = {"cores": cores, "rounds": rounds, "quick": options.quick, "load": load, "works": efficiencies}
    for name, of_clocks in efficiencies.items():
        for clock, found in of_clocks.items():
            print(
                f"{name:28} efficiency {found['efficiency']:.3f} by {clock} time "
                f"(quartiles {found['quartiles'][0]:.3f} to {found['quartiles'][1]:.3f})"
            )
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "weak_scaling.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(cores: Sequence[int], rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Efficiencies of all works by both clocks."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    alone = [Worker(core, "-", "-", quick) for core in cores]
    together = [Worker(core, str(process), str(port), quick) for process, core in enumerate(cores)]
    try:
        found: dict[str, dict[str, Any]] = {}
        for name in WORKS:
            for worker in alone:
                worker.ask(f"prepare {name}")
                worker.answer()
            for worker in together:
                worker.ask(f"prepare {name}")
            for worker in together:
                worker.answer()
            times = [one_round(alone, together) for _ in range(rounds)]
            found[name] = {clock: summary([each[clock] for each in times]) for clock in CLOCKS}
        return found
    finally:
        for worker in (*alone, *together):
            worker.dismiss()
        for worker in (*alone, *together):
            worker.end()


def one_round(alone: Sequence[Worker], together: Sequence[Worker]) -> dict[str, tuple[float, float]]:
    """Seconds of one process and of two, by clock, there and back."""
    one: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    two: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    for side in ("one", "two", "two", "one"):
        if side == "one":
            for worker in alone:
                worker.ask("turn")
                answer = worker.answer()
                for clock in CLOCKS:
                    one[clock].append(answer[clock])
        else:
            for worker in together:
                worker.ask("turn")
            answers = [worker.answer() for worker in together]
            two["wall"].append(max(answer["wall"] for answer in answers))  # the slower one holds up both
            two["processor"].append(statistics.mean(answer["processor"] for answer in answers))
    return {clock: (statistics.mean(one[clock]), statistics.mean(two[clock])) for clock in CLOCKS}


def summary(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median and quartiles of the rounds' ratios."""
    ratios = [one / two for one, two in times]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {
        "efficiency": float(middle),
        "quartiles": [float(low), float(high)],
        "seconds of one": statistics.median(one for one, _ in times),
        "seconds of two": statistics.median(two for _, two in times),
    }


class Worker:
    """A pinned process that answers each line with a line of JSON."""

    def __init__(self, core: int, process: str, port: str, quick: bool) -> None:
        command = [sys.executable, __file__, "--worker", str(core), process, port]
        self._process = subprocess.Popen(
            command + ["--quick"] * quick,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        )

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with exit code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def dismiss(self) -> None:
        """Let it end; processes of one program wait for each other in this."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def work(core: str, process: str, port: str, quick: bool) -> None:
    """What a process does: its part of a matrix product, as often as it is asked."""
    os.sched_setaffinity(0, {int(core)})  # before JAX counts the cores for its threads
    import jax

    import jaxquant as jq

    if process != "-":
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=120)
    processes = jax.process_count()
    mesh = jax.make_mesh((processes,), ("rows",))
    by_rows, everywhere = jax.NamedSharding(mesh, jax.P("rows")), jax.NamedSharding(mesh, jax.P())
    gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))
    program = jax.jit(lambda w, x: gemm(w, jax.vmap(jq.quantize)(x)))
    state: dict[str, Any] = {}

    def prepare(name: str) -> None:
        rows, columns = WORKS[name]
        rows //= 16 if quick else 1
        generator = np.random.default_rng(1)  # the same rows everywhere: one process's work is another's
        mine = generator.integers(0, 256, (rows, RECORDS, 144), np.uint8)
        mine[..., :4] = np.array([0, 20, 0, 20], np.uint8)
        values = generator.standard_normal((columns, RECORDS, 256), np.float32)
        w = jax.make_array_from_callback((processes * rows, RECORDS, 144), by_rows, lambda _: mine)
        x = jax.make_array_from_callback(values.shape, everywhere, lambda _: values)
        compiled = program.lower(w, x).compile()
        assert "all-gather" not in compiled.as_text()
        state["run"] = lambda: jax.block_until_ready(compiled(w, x))
        state["run"]()
        start = time.perf_counter()
        state["run"]()
        state["calls"] = max(1, round((0.02 if quick else TURN_SECONDS) / (time.perf_counter() - start)))

    def turn() -> dict[str, float]:
        state["run"]()  # takes back the caches
        times: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        for _ in range(state["calls"]):
            wall, processor = time.perf_counter(), time.process_time()
            state["run"]()
            times["wall"].append(time.perf_counter() - wall)
            times["processor"].append(time.process_time() - processor)
        return {clock: statistics.median(found) for clock, found in times.items()}

    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        if command == "prepare":
            prepare(name)
            answer: dict[str, float] = {}
        else:
            answer = turn()
        print(json.dumps(answer), flush=True)
    if process != "-":
        jax.distributed.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
