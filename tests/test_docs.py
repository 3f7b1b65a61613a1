"""The examples of docstrings and of the README run as they stand."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxquant

ROOT = Path(__file__).parents[1]
PACKAGE = Path(jaxquant.__file__).parent
# These modules are tested with the page that describes them.
ELSEWHERE = ("dtypes", "io", "compare", "plot")
MODULES = sorted(
    ".".join(("jaxquant", *file.relative_to(PACKAGE).with_suffix("").parts))
    for file in PACKAGE.rglob("*.py")
    if ">>> " in file.read_text() and not file.relative_to(PACKAGE).parts[0].startswith(ELSEWHERE)
)
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0


def test_readme_examples(tmp_path):
    """The first, which has to run alone, and the one of arrays, which goes on from it."""
    first, arrays = EXAMPLES[:2]
    promised = re.findall(r"print\([^#\n]*\)\s*#\s*(.*)", first + arrays)
    assert promised == ["(4096,) (2, 4096) native", "17408"]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", first + arrays],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.splitlines()
    assert printed[:2] == promised
    assert [row.split()[:2] for row in printed[4:]] == [
        ["MXFP8_E4M3", "8.25"],
        ["MXFP6_E2M3", "6.25"],
        ["MXFP4", "4.25"],
        ["NVFP4", "4.50098"],
    ]
    assert jaxquant.io.load(tmp_path / "w.safetensors")["w"].shape == (128, 256)
