"""The page on dtypes: its examples run, and its table names every contract test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "dtypes.md"


def test_the_examples_run():
    done = subprocess.run([sys.executable, "-m", "doctest", str(PAGE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_table_names_each_requirement_and_test_once():
    module = ast.parse((HERE / "test_dtypes_contract.py").read_text())
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    tests = [
        (cls.name, f"{cls.name}::{test.name}")
        for cls in classes
        for test in cls.body
        if isinstance(test, ast.FunctionDef)
    ]
    requirement, rows, requirements = "", [], []
    for line in PAGE.read_text().splitlines():
        row = re.fullmatch(r"\| (.*?) ?\| .+ \| `(Test\w+::test_\w+)` \|", line)
        if row:
            if row[1]:
                requirement = row[1]
                requirements.append(requirement)
            rows.append(("Test" + _words(requirement), row[2]))
    assert [(name.lower(), test) for name, test in tests] == [(name.lower(), test) for name, test in rows]
    assert len(requirements) == len(classes) == 10


def _words(requirement: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "", requirement)
