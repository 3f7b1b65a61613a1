"""Placing the records of a GGUF file over a mesh, each device's rows read from the file."""

from __future__ import annotations

import gguf as peer
import jax
import numpy as np
import pytest

import jaxquant.gguf
from devices import layouts

P = jax.P
Q4_K = peer.GGMLQuantizationType.Q4_K


@pytest.fixture(scope="module")
def stored():
    rng = np.random.default_rng(5)
    return {
        "blk.0.w": rng.integers(0, 256, (16, 4, 144), np.uint8),
        "blk.1.w": rng.integers(0, 256, (16, 4, 144), np.uint8),
        "experts": rng.integers(0, 256, (8, 4, 2, 144), np.uint8),
        "narrow": rng.integers(0, 256, (8, 4, 144), np.uint8),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory, stored):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = peer.GGUFWriter(path, "tiny")
    for name, records in stored.items():
        writer.add_tensor(name, records.reshape(*records.shape[:-2], -1), raw_dtype=Q4_K)
    writer.add_tensor("norm", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with jaxquant.gguf.open(path) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "mesh", "spec"),
    [
        ("blk.0.w", "8", P("a")),
        ("blk.0.w", "4x2", P("b")),
        ("blk.0.w", "4x2", P(("b", "a"))),
        ("blk.0.w", "4x2", P("b", "a")),
        ("blk.0.w", "4x2", P(None, None, "a")),
        ("blk.0.w", "8", P()),
        ("blk.0.w", "1", P("a")),
        ("experts", "4x2", P("a", "b")),
        ("experts", "2", P(None, "a")),
        (["blk.0.w", "blk.1.w"], "8", P(None, "a")),
        (["blk.0.w", "blk.1.w"], "2x4", P("a", "b")),
        (("blk.1.w",), "8", P(None, "a")),
    ],
    ids=str,
)
def test_every_device_holds_its_tile(file, stored, name, mesh, spec):
    want = stored[name] if isinstance(name, str) else np.stack([stored[each] for each in name])
    sharding = jax.NamedSharding(layouts.mesh(mesh), spec)
    records = file.device_records(name, sharding)
    assert records.sharding == sharding
    assert records.dtype == np.uint8
    for shard in records.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def test_pieces_of_a_copy(file, stored, monkeypatch):
    """What is larger than one piece is copied along its first axis that can be split."""
    monkeypatch.setattr(jaxquant.gguf, "_COPIED_AT_ONCE", 200)
    sharding = jax.NamedSharding(layouts.mesh("2"), P(None, "a"))
    np.testing.assert_array_equal(np.asarray(file.device_records("experts", sharding)), stored["experts"])
    np.testing.assert_array_equal(
        np.asarray(file.device_records(["blk.0.w", "blk.1.w"], sharding)),
        [stored["blk.0.w"], stored["blk.1.w"]],
    )


def test_views_of_the_file_stay_valid(file, stored):
    view = file.records("blk.0.w")
    file.device_records("blk.0.w", jax.NamedSharding(layouts.mesh("8"), P("a"))).block_until_ready()
    np.testing.assert_array_equal(view, stored["blk.0.w"])


@pytest.mark.parametrize(
    ("name", "spec", "error", "message"),
    [
        ("blk.0.v", P("a"), KeyError, "did you mean 'blk.0.w'"),
        ("norm", P(), TypeError, "tensor 'norm' is F32, records are Q4_K"),
        ([], P(), ValueError, "no tensor is named"),
        (["blk.0.w", "narrow"], P(), ValueError, r"'blk.0.w' has records \(16, 4, 144\) and 'narrow' \(8, 4"),
        (["blk.0.w", 3], P(), TypeError, "a tensor's name is a str, got int"),
        ("blk.0.w", P(None, "a"), ValueError, "evenly divide"),
    ],
    ids=["unknown", "type", "none", "shapes", "name", "indivisible"],
)
def test_errors(file, name, spec, error, message):
    with pytest.raises(error, match=message):
        file.device_records(name, jax.NamedSharding(layouts.mesh("8"), spec))


def test_sharding_of_another_kind(file):
    with pytest.raises(TypeError, match=r"sharding must be a jax\.sharding\.Sharding, got P"):
        file.device_records("blk.0.w", P("a"))


def test_closed_file(tmp_path, file):
    other = jaxquant.gguf.open(file.path)
    other.close()
    with pytest.raises(ValueError, match="is closed"):
        other.device_records("blk.0.w", jax.NamedSharding(layouts.mesh("8"), P("a")))
