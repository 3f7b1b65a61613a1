"""Eight virtual devices, which a process must ask for before JAX starts: each file has a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(path.name for path in (TESTS / "devices").glob("on_*.py"))


def run(*arguments: object) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=TESTS,
        env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("file", FILES)
def test_on_eight_devices(file):
    run("-m", "pytest", "--no-header", f"devices/{file}")


def test_sharded_programs_outlive_their_process(tmp_path):
    """A second process finds them in the persistent cache, and runs what the first one exported."""
    first, second = (json.loads(run("devices/programs.py", tmp_path).splitlines()[-1]) for _ in range(2))
    for kind in ("auto", "explicit"):
        assert first[kind]["hits"] == 0
        assert second[kind]["hits"] > 0
        assert not first[kind]["exported before"]
        assert second[kind]["exported before"]
        for report in (first[kind], second[kind]):
            assert report["same"]
            assert report["exported same"]
            assert report["devices"] == 8
            assert report["collectives"] == []
            assert report["calls"] == [[4, 4]]
