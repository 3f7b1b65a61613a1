"""The examples of docstrings and of the README run as they stand."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
MODULES = [
    "jaxquant.arrays.block_dot",
    "jaxquant.arrays.block_scaled",
    "jaxquant.arrays.narrow",
    "jaxquant.arrays.quantize_blocks",
    "jaxquant.arrays.swizzled",
    "jaxquant.casts",
    "jaxquant.nn",
    "jaxquant.ops.native",
    "jaxquant.ops.quantize",
    "jaxquant.ops.quantized_dot",
    "jaxquant.quant",
    "jaxquant.records",
    "jaxquant.examples.ggml",
    "jaxquant.examples.int4_dot",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted > 0


def test_readme_example():
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    promised = re.search(r"print\(.*#\s*(.*)", example).group(1)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == promised
