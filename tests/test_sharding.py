"""Eight virtual devices, which a process must ask for before JAX starts: each file has a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path.name for path in (TESTS / "devices").glob("on_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_on_eight_devices(file):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--no-header", f"devices/{file}"],
        cwd=TESTS,
        env=os.environ | {"XLA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
