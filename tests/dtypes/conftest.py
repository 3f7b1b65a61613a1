"""Lists the requirements and scenarios with their outcomes when this folder is tested on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not all(path == HERE or HERE in path.parents for path in asked):
        return
    outcomes: dict[str, dict[str, str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            file, *scopes, test = report.nodeid.split("[")[0].split("::")
            if "contract" in file and scopes:
                tests = outcomes.setdefault(scopes[0].removeprefix("Test"), {})
                if tests.get(test) in (None, "passed"):
                    tests[test] = outcome
    for requirement, tests in outcomes.items():
        terminalreporter.write_line(requirement)
        for test, outcome in tests.items():
            terminalreporter.write_line(f"  {outcome}  {test.removeprefix('test_').replace('_', ' ')}")
