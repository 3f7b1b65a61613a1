#!/usr/bin/env python3
"""Make the mistakes of mutants.py one at a time and see whether the suite notices.

    python tests/mutate/run.py                  all mutants (make mutate)
    python tests/mutate/run.py --only portable  those with this text in their file, tests or description

Works in copies of the files that git tracks, never in the tree itself. A mutant is killed by an assertion
about a value in a test, or by a refusal that did not come (pytest.raises); a crash, a compile error, an import error or a
timeout is no kill. What survives the quick tests named with it meets all tests of its area. Exit status: 0 if at least 95% were
killed and every mutant's text was found; the unmutated copy must pass all those tests first.

Needs cmake, a C++ compiler and what the tests need.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from mutants import AREAS, MUTANTS, QUICK, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = sysconfig.get_path("purelib")
WANTED = 0.95
TIMEOUT = 600


class Tree:
    """A copy of the tracked files with a compiled library of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path / name)
        # An environment whose jaxquant is this copy, for the processes that tests start too. A plain line in a .pth
        # file leads to the packages without running the finder of an editable install among them.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path / "venv"], check=True)
        site = next((path / "venv" / "lib").glob("python*/site-packages"))
        (site / "copy.pth").write_text(f"{path}\n{SITE}\n")
        configure = ["cmake", "-S", path / "ffi", "-B", path / "build", "-DCMAKE_BUILD_TYPE=None"]
        configure += ["-DCMAKE_CXX_FLAGS=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        assert self.build(), "the unmutated library does not build"

    def build(self) -> bool:
        done = subprocess.run(
            ["cmake", "--build", self.path / "build"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode == 0:
            shutil.copy2(self.path / "build" / "libjaxquant.so", self.path / "jaxquant")
        return done.returncode == 0

    def test(self, arguments: list[str]) -> tuple[str, str]:
        """How the tests ended (pass, value, refusal, error or timeout), and the first telling test."""
        report = self.path / "report.json"
        report.unlink(missing_ok=True)
        command = [
            self.path / "venv" / "bin" / "python",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "kill_report",
        ]
        command += [
            "-m",
            "not model and not exhaustive and (arrays or not arrays)",
            "--hypothesis-seed=0",
            *arguments,
        ]
        environment = os.environ | {
            "PYTHONPATH": str(self.path / "tests" / "mutate"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAXQUANT_KILL_REPORT": str(report),
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.path / "tests",
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return "timeout", ""
        if not report.exists():
            return "error", done.stdout[-300:] + done.stderr[-300:]
        found = json.loads(report.read_text())
        for wanted in ("value", "refusal", "error"):
            for kind, test, message in found["failures"]:
                if kind == wanted:
                    return kind, f"{test}: {message.splitlines()[0] if message else ''}"
        if done.returncode != 0:
            return "error", f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
        return "pass", f"{found['ran']} tests"


def area_of(mutant: Mutant) -> list[str]:
    return next(tests for prefix, tests in AREAS.items() if mutant.file.startswith(prefix))


def existing(tree: Tree, arguments: list[str]) -> list[str]:
    return [a for a in arguments if not a.endswith(".py") or (tree.path / "tests" / a).exists()]


def judge(tree: Tree, mutant: Mutant) -> tuple[str, str]:
    path = tree.path / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1:
        return "not found", f"{mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}"
    native = mutant.file.startswith("ffi/")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        if native and not tree.build():
            return "no build", "the mutant does not compile"
        verdict = tree.test(existing(tree, QUICK[mutant.tests]))
        if verdict[0] not in ("value", "refusal"):
            verdict = tree.test(existing(tree, area_of(mutant)))
        return verdict
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="text in the file, tests or description of a mutant")
    parser.add_argument("--jobs", type=int, default=2, help="copies that work at once (2)")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="do not run the tests on the unmutated copy first: they are known to pass",
    )
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only in f"{m.file} {m.tests} {m.why}"]
    start = time.monotonic()
    results: list[tuple[Mutant, str, str]] = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        free: queue.Queue[Tree] = queue.Queue()
        for i in range(options.jobs):
            free.put(Tree(Path(directory) / str(i)))

        def borrow(work, *arguments):
            tree = free.get()
            try:
                return work(tree, *arguments)
            finally:
                # After a mutant in C++ the library must be the right one again.
                if arguments and getattr(arguments[0], "file", "").startswith("ffi/"):
                    assert tree.build()
                free.put(tree)

        def unmutated(tree: Tree, tests: str) -> tuple[str, str, str]:
            return tests, *tree.test(existing(tree, QUICK[tests]))

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            used = [] if options.trust else sorted({m.tests for m in chosen})
            for tests, verdict, detail in pool.map(lambda t: borrow(unmutated, t), used):
                if verdict != "pass":
                    print(f"without a mutant, {tests} ends with {verdict}: {detail}")
                    return 2
                print(f"without a mutant: {tests}: {detail}", flush=True)
            waiting = {pool.submit(borrow, judge, mutant): mutant for mutant in chosen}
            for done in concurrent.futures.as_completed(waiting):
                mutant, (verdict, detail) = waiting[done], done.result()
                results.append((mutant, verdict, detail))
                print(f"{verdict:9} {mutant.file}: {mutant.why} [{detail[:160]}]", flush=True)
    return summary(results, time.monotonic() - start)


def summary(results: list[tuple[Mutant, str, str]], seconds: float) -> int:
    counts = collections.Counter(verdict for _, verdict, _ in results)
    killed = counts["value"] + counts["refusal"]
    for mutant, verdict, detail in results:
        if verdict not in ("value", "refusal"):
            name = "SURVIVED" if verdict == "pass" else verdict.upper()
            print(f"{name} {mutant.file}: {mutant.why}: {mutant.old!r} -> {mutant.new!r} [{detail[:300]}]")
    print(
        f"{len(results)} mutants, {killed} killed ({counts['value']} by a value, {counts['refusal']} by a refusal that "
        f"did not come), {counts['pass']} survived, {len(results) - killed - counts['pass']} no verdict, in {seconds / 60:.0f} min"
    )
    return 0 if killed >= WANTED * len(results) and not counts["not found"] else 1


if __name__ == "__main__":
    sys.exit(main())
