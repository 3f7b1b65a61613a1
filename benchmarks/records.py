"""Speed of the two record operations beside ggml, XLA's float32 dot and the machine's read bandwidth, in one run.

    python benchmarks/records.py [--threads 1,2] [--only gemv,gemm,quantize,overhead,growth,isa] [--isa avx2,portable]

Prints tables and saves JSON and a picture (roofline, growth, instruction sets) under benchmarks/results/. Each instruction set and thread count has a process
of its own, pinned to so many cores. The figures are medians of rounds in which all sides take turns
(measure.py), ratios are medians of the rounds' ratios. The peer is ggml from the PyPI wheel libggml-python,
with repacked weights; the environment variable GGML_LIB names the library folder of another build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import limits
from measure import median_ratio, quartiles

ROOT = Path(__file__).resolve().parents[1]
WORKS = ("gemv", "gemm", "quantize", "overhead", "growth", "isa")
FORCED = "ISA: "  # how the works begin in which each instruction set is forced
TOLERANCES = {  # of a result, relative to the largest
    "ggml": 1e-4,  # adds records in another order and with fused operations
    "XLA float32": 0.05,  # does not round x to 8 bits
}


@dataclass(frozen=True)
class Plan:
    """What one process measures."""

    threads: int
    isa: str | None
    works: tuple[str, ...]
    rounds: int
    turn_seconds: float
    ggml: Path | None
    limits: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a process fails or results disagree; 2 for wrong arguments."""
    options = parse(arguments)
    library = limits.build(ROOT / "build" / "benchmarks")
    folder = os.environ.get("GGML_LIB")
    rounds, turn_seconds = (3, 0.005) if options.quick else (15, 0.02)
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "ggml": folder or "libggml-python",
    }
    report |= {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "load": os.getloadavg(), "rounds": rounds}
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"the load average is {busy:.1f}: other programs disturb the timings", file=sys.stderr)

    runs: list[dict[str, Any]] = []
    for isa in options.isa:
        for threads in options.threads:
            plan = Plan(
                threads,
                isa,
                options.only,
                rounds,
                turn_seconds,
                Path(folder) if folder else None,
                library,
            )
            try:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    runs.append(process.submit(measure, plan).result())
            except (BrokenProcessPool, RuntimeError, ValueError) as error:
                print(f"records.py: {threads} threads, {isa or 'best ISA'}: {error}", file=sys.stderr)
                return 1

    report |= {"load at the end": os.getloadavg(), "runs": runs}
    path = options.json or ROOT / "benchmarks" / "results" / f"records-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nsaved {path}\n\n{table(runs)}\n\n{isa_table(runs)}\n\n{caption(report)}")
    try:
        import picture
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    else:
        print(f"saved {picture.draw(report, path.with_suffix('.png'))}")
    wrong = list(disagreements(runs))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default="1,2", metavar="N,...", help="thread counts (default: 1,2)")
    parser.add_argument("--only", default=",".join(WORKS), metavar="WORK,...", help="of " + ", ".join(WORKS))
    parser.add_argument("--isa", default="", metavar="NAME,...", help="instruction sets (default: the best)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds: whether it works, not how fast")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="where to save (default: a new file in results/)"
    )
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    try:
        options.threads = [int(count) for count in options.threads.split(",")]
    except ValueError:
        parser.error(f"--threads {options.threads}: wanted numbers with commas between them")
    if not all(1 <= count <= cores for count in options.threads):
        parser.error(f"--threads: this process may use 1 to {cores} cores")
    options.only = tuple(options.only.split(","))
    if unknown := set(options.only) - set(WORKS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(WORKS)}")
    options.isa = [name or None for name in options.isa.split(",")]
    return options


def measure(plan: Plan) -> dict[str, Any]:
    """Run in a new process, before anything has imported JAX: it reads its cores once."""
    cpus = choose_cpus(plan.threads)
    os.sched_setaffinity(0, cpus)
    os.environ["NPROC"] = str(plan.threads)
    if plan.isa:
        os.environ["JAXQUANT_ISA"] = plan.isa
    import works

    import jaxquant

    status = jaxquant.status()
    if status.cpu != "native":
        raise RuntimeError(f"there are no kernels to measure: {status.problem or status.backend}")
    if plan.isa and status.isa != plan.isa:
        raise RuntimeError(f"this CPU has no {plan.isa}, only {', '.join(status.supported_isas)}")
    setting = works.Setting.make(plan.threads, plan.rounds, plan.turn_seconds, plan.ggml, plan.limits)
    run: dict[str, Any] = {
        "threads": plan.threads,
        "cpus": cpus,
        "isa": status.isa,
        "ggml version": setting.ggml and setting.ggml.version,
        "prefetch distance": setting.read and setting.read.ahead,
        "rows": [],
    }
    print(f"\n{plan.threads} threads, {status.isa}", flush=True)
    for work in plan.works:
        for row in works.WORKS[work](setting):
            run["rows"].append(summary(row) | {"load": os.getloadavg()[0]})
            print("  " + "  ".join(cell for cell in cells(run["rows"][-1]) if cell), flush=True)
    return run


def choose_cpus(count: int) -> list[int]:
    """One hardware thread of each core as long as there are cores."""
    cores: set[str] = set()
    first: list[int] = []
    others: list[int] = []
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        (others if core in cores else first).append(cpu)
        cores.add(core)
    return (first + others)[:count]


def summary(row: Any) -> dict[str, Any]:
    """A row of works.py with its medians and ratios, as JSON holds it."""
    ours = row.seconds["jaxquant"]
    return {
        "work": row.work,
        "amount": row.amount,
        "unit": row.unit,
        "seconds": {side: quartiles(times) for side, times in row.seconds.items()},
        "ratios": {
            side: median_ratio(times, ours) for side, times in row.seconds.items() if times is not ours
        },
        "ratio quartiles": {
            side: quartiles(times / ours) for side, times in row.seconds.items() if times is not ours
        },
        "differences": row.differences,
        "notes": row.notes,
        "rounds": {side: times.tolist() for side, times in row.seconds.items()},
    }


HEADER = (
    "work",
    "jaxquant",
    "speed",
    "ggml",
    "times ggml",
    "XLA float32",
    "times XLA",
    "of read bandwidth",
    "of multiply-add chain",
    "difference from ggml",
)


def cells(row: dict[str, Any]) -> list[str]:
    """What the table says of a row, in the order of HEADER."""
    seconds, ratios = row["seconds"], row["ratios"]

    def time_of(side: str) -> str:
        return duration(seconds[side][1]) if side in seconds else ""

    def times(side: str) -> str:
        return f"{ratios[side]:.2f}x" if side in ratios else ""

    speed = f"{row['amount'] / seconds['jaxquant'][1] / 1e9:.1f} {row['unit']}" if row["unit"] else ""
    read, chain = (f"{ratios[side]:.2f}" if side in ratios else "" for side in ("read", "chain"))
    differs = f"{row['differences']['ggml']:.0e}" if "ggml" in row["differences"] else ""
    return [
        row["work"],
        time_of("jaxquant"),
        speed,
        time_of("ggml"),
        times("ggml"),
        time_of("XLA float32"),
        times("XLA float32"),
        read,
        chain,
        differs,
    ]


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.2f} us"


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown, for the README."""
    lines = [("threads", "ISA", *HEADER), ("--:", "---", "---", *["--:"] * (len(HEADER) - 1))]
    lines += [
        (str(run["threads"]), run["isa"], *cells(row))
        for run in runs
        for row in run["rows"]
        if not row["work"].startswith(FORCED)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def isa_table(runs: list[dict[str, Any]]) -> str:
    """Markdown: speed of each instruction set, forced in turn in one run."""
    rows = [(run["threads"], row) for run in runs for row in run["rows"] if row["work"].startswith(FORCED)]
    if not rows:
        return ""
    isas = [side for side in rows[0][1]["seconds"] if side != "jaxquant"]
    lines = [["threads", "work", "unit", *isas], ["--:", "---", "---", *["--:"] * len(isas)]]
    for threads, row in rows:
        speeds = [f"{row['amount'] / row['seconds'][isa][1] / 1e9:.1f}" for isa in isas]
        lines.append([str(threads), row["work"].removeprefix(FORCED), row["unit"], *speeds])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def caption(report: dict[str, Any]) -> str:
    """Where and with what the table was made, and how busy the machine was."""
    versions = [f"{name} {version}" for name, version in report["versions"].items() if version]
    load = f"load average {report['load'][0]:.1f} before and {report['load at the end'][0]:.1f} after"
    cpu = f"{report['machine']['cpu']}, {report['machine']['cores']} cores"
    return ", ".join([cpu, *versions, f"commit {report['commit']}", load])


def disagreements(runs: list[dict[str, Any]]) -> Iterator[str]:
    for run in runs:
        for row in run["rows"]:
            for side, difference in row["differences"].items():
                if not difference <= TOLERANCES[side]:  # NaN disagrees
                    yield f"{row['work']}, {run['threads']} threads: {side} differs by {difference:.1e}"


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("jaxquant", "jax", "jaxlib", "numpy", "libggml-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of this tree, marked if files were changed since; None outside a clone."""
    try:
        call = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
