"""Eight virtual devices, which a process must ask for before JAX starts: each file has a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import exact
import gguf as peer
import numpy as np
import pytest

TESTS = Path(__file__).parent
FILES = sorted(path.name for path in (TESTS / "devices").glob("on_*.py"))


def run(*arguments: object, folder: Path = TESTS) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
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


def test_the_recipe_runs_as_written(tmp_path):
    document = (TESTS.parent / "docs" / "sharding.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    writer = peer.GGUFWriter(tmp_path / "model.gguf", "tiny")
    for layer in range(2):
        records = exact.random_q4k(np.random.default_rng(layer), (16, 2))
        name = f"blk.{layer}.ffn_down.weight"
        writer.add_tensor(name, records.reshape(16, 288), raw_dtype=peer.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    run("-W", "error", "-c", recipe, folder=tmp_path)
