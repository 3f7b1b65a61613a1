"""Two processes of one program over loopback: each reads its own rows of a GGUF file and multiplies them."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import exact
import gguf as peer
import numpy as np
import pytest

TESTS = Path(__file__).parent
RECORD = 144


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two(model: Path, tensor: str, big: Path | None) -> list[dict]:
    """What each process reports; both end within a minute or are ended."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, TESTS / "devices" / "worker.py", str(process), port, model, tensor, big or ""],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def assert_products(reports: list[dict], rows: int) -> None:
    for report in reports:
        one, two = report["rows"], report["rows and columns"]
        assert one["collectives"] == two["collectives"] == []
        assert one["calls"] == [[8, rows // 8]]
        assert two["calls"] == [[4, rows // 4]]
        assert (one["spec"], two["spec"]) == ([None, "rows"], ["columns", "rows"])
        assert one["shards"] == two["shards"] == 4
        assert one["finite"]
        assert one["same"]
        assert two["same"]


@pytest.fixture
def small(tmp_path) -> Path:
    """Weights that ggml quantized, 48 rows of 3 records."""
    records = exact.load("q4k_records")["records"][:144].reshape(48, 3 * RECORD)
    writer = peer.GGUFWriter(tmp_path / "small.gguf", "tiny")
    writer.add_tensor("w", np.ascontiguousarray(records), raw_dtype=peer.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


@pytest.fixture
def big(tmp_path) -> Path:
    """A Q4_K tensor of 576 MiB, in a file with holes; its rows differ."""
    rows, records = 16384, 256
    entry = struct.pack("<Q1sIQQIQ", 1, b"w", 2, 256 * records, rows, 12, 0)
    header = (struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + entry).ljust(96, b"\0")
    path = tmp_path / "big.gguf"
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + rows * records * RECORD)
        for row in range(63, rows, 64):
            file.seek(len(header) + row * records * RECORD)
            file.write(struct.pack("<I", row))
    return path


def test_two_processes_on_one_file(small, big):
    """Also that loading holds little more than the process's own rows in memory."""
    reports = run_two(small, "w", big)
    assert_products(reports, rows=48)
    for report in reports:
        load = report["load"]
        assert load["held"] == 288 << 20
        assert load["added"] <= 1.3 * load["held"]
        assert load["added"] >= 0.9 * load["held"], "the peak was not measured"
        assert load["same"]


@pytest.mark.model
def test_two_processes_on_the_real_model():
    assert_products(run_two(Path(os.environ["JAXQUANT_MODEL"]), "blk.2.ffn_down.weight", None), rows=640)
