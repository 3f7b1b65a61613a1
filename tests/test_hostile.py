"""Files made to mislead are refused with a clear exception, in little memory and without hanging.

Every file is opened and read in one process whose address space may grow by 1 GiB (beyond the mapping of the
file itself, which is no memory); one that hangs or dies fails them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import hostile
import numpy as np
import pytest

import jaxquant.gguf

KINDS = {"gguf": hostile.GGUF}
try:
    import jaxquant.io
except ImportError:
    pass
else:
    KINDS["safetensors"] = hostile.SAFETENSORS

SCRIPT = """
import importlib, json, os, resource, sys, time
kind, directory = sys.argv[1:]
opener = importlib.import_module({"gguf": "jaxquant.gguf", "safetensors": "jaxquant.io"}[kind]).open

def pages():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

def read_all(path):
    with opener(path) as file:
        count = len(dict(file.metadata))
        for name in file.tensors:
            count += (file.array(name) if kind == "gguf" else file[name]).size
        return count

results = {}
for name in sorted(os.listdir(directory), key=int):
    path = os.path.join(directory, name)
    limit = pages() + os.path.getsize(path) + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    start = time.monotonic()
    try:
        outcome = ["read", str(read_all(path))]
    except BaseException as error:
        outcome = [type(error).__name__, str(error)]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    results[name] = [*outcome, time.monotonic() - start]
print(json.dumps({"results": results, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))
"""
ERRORS = {"gguf": "GGUFError", "safetensors": "SafetensorsError"}


def read_in_a_process(kind, directory, files):
    """What reading each file gave: a type of exception, or 'read', and the message or a count."""
    for i, (content, size) in enumerate(files):
        path = directory / str(i)
        path.write_bytes(content)
        if size is not None:
            os.truncate(path, size)
    command = [sys.executable, "-c", SCRIPT, kind, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    report = json.loads(done.stdout)
    return [report["results"][str(i)] for i in range(len(files))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return {
        kind: dict(
            zip(files, read_in_a_process(kind, tmp_path_factory.mktemp(kind), files.values()), strict=True)
        )
        for kind, files in KINDS.items()
    }


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, files in KINDS.items() for name in files])
def test_hostile_file_is_refused(outcomes, kind, name):
    error, message, _ = outcomes[kind][name]
    assert error == ERRORS[kind], message
    # The message names the file and is short, whatever the file holds.
    assert "/" in message.split(":")[0] or message.startswith("/")
    assert len(message) < 700


@pytest.mark.parametrize("kind", KINDS)
def test_file_cut_at_every_page(tmp_path, kind):
    whole = {"gguf": hostile.good_gguf, "safetensors": hostile.good_safetensors}[kind]()
    cuts = range(4096, len(whole), 4096)
    assert len(cuts) > 15
    outcomes = read_in_a_process(
        kind, tmp_path, [hostile.Hostile(whole[:cut]) for cut in cuts] + [hostile.Hostile(whole)]
    )
    *short, complete = outcomes
    assert complete[0] == "read"
    for cut, (error, message, _) in zip(cuts, short, strict=True):
        assert error == ERRORS[kind], (cut, message)


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_shrinks_between_accesses(tmp_path, kind):
    """Every page of it: after each cut every access is an exception, never a signal."""
    path = tmp_path / "file"
    path.write_bytes({"gguf": hostile.good_gguf, "safetensors": hostile.good_safetensors}[kind]())
    module = jaxquant.gguf if kind == "gguf" else jaxquant.io
    error = jaxquant.gguf.GGUFError if kind == "gguf" else jaxquant.io.SafetensorsError
    with module.open(path) as file:
        for cut in reversed(range(0, path.stat().st_size, 16384)):
            os.truncate(path, cut)
            for name in file.tensors:
                with pytest.raises(error, match=rf"shrank from \d+ to {cut} bytes"):
                    file.array(name) if kind == "gguf" else file[name]


def test_what_is_read_is_right(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(hostile.good_gguf())
    with jaxquant.gguf.open(path) as file:
        rng = np.random.default_rng(5)
        np.testing.assert_array_equal(
            file.records("q4_k").reshape(-1), rng.integers(0, 256, 600 * 144, np.uint8)
        )
        np.testing.assert_array_equal(file.array("f32").reshape(-1), rng.standard_normal(231).astype("f4"))
        assert file.metadata["words"][299] == "word299"
        assert file.metadata["nested"][1].tolist() == [97, 98]
