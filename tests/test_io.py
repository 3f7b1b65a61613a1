"""Saving and loading: safetensors against its own package and hostile files, vendors' layouts, states."""

# The ids of the bug reports are upper case.
# ruff: noqa: N802

from __future__ import annotations

import doctest
import importlib
import io as std_io
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path

import exact
import gguf as gguf_peer
import gguf.quants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from dtype_samples import block_scaled

import jaxquant.gguf
import jaxquant.io as jio
import jaxquant.io_safetensors
from jaxquant import DType, Level, Whole
from jaxquant.arrays import BlockScaledArray, NarrowArray, f8_4x128, quantize_blocks, swizzle
from jaxquant.io import SafetensorsError

DOCS = Path(__file__).parents[1] / "docs"
E8M0, E4M3, F4 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
QTYPE = gguf_peer.GGMLQuantizationType
LIBRARIES = {"numpy": np.asarray, "jax": jnp.array}

# A header's type, and the dtype of an array of it.
DENSE = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": E4M3,
    "F8_E8M0": E8M0,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "C64": np.complex64,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
}
NARROW = {"F4": "E2M1", "F6_E2M3": "E2M3", "F6_E3M2": "E3M2"}


@pytest.fixture(params=list(LIBRARIES))
def library(request):
    return LIBRARIES[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.safetensors"


def random_bits(shape, dtype, seed=0) -> np.ndarray:
    """Every bit pattern may occur, NaN included."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return (raw & 1).astype(np.bool_)[..., 0] if dtype == np.bool_ else raw.view(dtype)[..., 0]


def container(header, data=b"", *, length=None) -> bytes:
    """A file written by hand, so that every field can be made wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype, shape, begin, end) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def host(leaf) -> np.ndarray:
    return np.asarray(leaf)


def assert_same(got, want, library=None) -> None:
    """The same static data, and leaves of the same dtype, shape, bytes and array library."""
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(want)
    leaves = jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(want)
    for a, b in zip(*leaves, strict=True):
        assert isinstance(a, np.ndarray) == (
            isinstance(b, np.ndarray) if library is None else library == "numpy"
        )
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert host(a).tobytes() == host(b).tobytes()


# Types of the header


@pytest.mark.parametrize("stored", DENSE)
@pytest.mark.parametrize("shape", [(16, 32), (), (0, 3)], ids=["2d", "0d", "empty"])
def test_dense_types_keep_every_bit(path, stored, shape):
    x = random_bits(shape, DENSE[stored])
    jio.save(path, {"x": x})
    with jio.open(path) as file:
        assert file.tensors["x"].type == stored
        assert not file.metadata
        assert file["x"].dtype == DENSE[stored]
        assert file["x"].shape == shape
        assert file["x"].tobytes() == x.tobytes()
    assert_same(jio.load(path)["x"], x)


@pytest.mark.parametrize("stored", [name for name in DENSE if "64" not in name])
def test_dense_types_of_jax_keep_every_bit(path, stored):
    x = random_bits((16, 32), DENSE[stored])
    jio.save(path, {"x": jnp.array(x)})
    got = jio.load(path, library="jax")["x"]
    assert isinstance(got, jax.Array)
    assert got.dtype == DENSE[stored]
    assert host(got).tobytes() == x.tobytes()
    assert jio.load(path)["x"].tobytes() == x.tobytes()


@pytest.mark.parametrize("stored", NARROW)
def test_narrow_types_are_packed_low_bits_first(path, library, stored):
    bits = 4 if stored == "F4" else 6
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 8), np.uint8)
    jio.save(path, {"x": NarrowArray.from_codes(library(codes), NARROW[stored])})
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    data = int.from_bytes(path.read_bytes()[8 + length :], "little")
    assert [data >> (bits * i) & ((1 << bits) - 1) for i in range(24)] == codes.ravel().tolist()
    with jio.open(path) as file:
        assert (file.tensors["x"].type, file.tensors["x"].shape) == (stored, (3, 8))
        assert not file.metadata
        assert np.array_equal(file["x"].codes(), codes)


@pytest.mark.parametrize("stored", NARROW)
def test_dense_narrow_floats_are_packed_and_come_back_dense(path, stored):
    dtype = DType.from_name(NARROW[stored]).numpy_dtype
    codes = np.arange(1 << (4 if stored == "F4" else 6), dtype=np.uint8).reshape(2, -1)
    jio.save(path, {"x": codes.view(dtype)})
    with jio.open(path) as file:
        assert file.tensors["x"].type == stored
        assert file.tensors["x"].nbytes == codes.size * (4 if stored == "F4" else 6) // 8
    got = jio.load(path)["x"]
    assert got.dtype == dtype
    assert np.array_equal(got.view(np.uint8), codes)


def test_dense_float4_of_jax(path):
    values = np.float32([[0.5, -6, 0, 1.5]])
    jio.save(path, {"x": jnp.array(values).astype(F4)})
    got = jio.load(path, library="jax")["x"]
    assert got.dtype == F4
    assert np.array_equal(host(got).astype(np.float32), values)


def test_header_of_a_file_written_by_hand(path):
    header = {"w": entry("F4", (2, 4), 1, 5), "s": entry("F8_E8M0", (1,), 0, 1), "__metadata__": {"a": "b"}}
    path.write_bytes(container(header, bytes([128, 0x10, 0x32, 0x54, 0x76])))
    with jio.open(path) as file:
        assert list(file) == ["s", "w"]
        assert dict(file.metadata) == {"a": "b"}
        assert file["w"].codes().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert file["s"].astype(np.float32).tolist() == [2.0]
        assert file.names == ("s", "w")
        assert file.array("s").tobytes() == b"\x80"


PACKAGE_NAMES = {
    "bool": "BOOL",
    **{
        f"{kind}{bits}": f"{kind[0].upper()}{bits}"
        for kind in ("int", "uint", "float")
        for bits in (16, 32, 64)
    },
    "int8": "I8",
    "uint8": "U8",
    "bfloat16": "BF16",
    "complex64": "C64",
    **{
        f"float8_{name}": f"F8_{name.removesuffix('fn').removesuffix('fnu').upper()}"
        for name in ("e5m2", "e4m3fn")
    },
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def test_bytes_are_those_of_the_package(path):
    arrays = {
        name: random_bits((3, 2), DENSE[stored], seed)
        for seed, (name, stored) in enumerate(PACKAGE_NAMES.items())
    }
    specs = {
        name: safetensors.TensorSpec(dtype=name, shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
        for name, x in arrays.items()
    }
    four = NarrowArray(random_bits((2, 4), np.uint8), "E2M1")
    specs['é "quoted"'] = safetensors.TensorSpec(
        dtype="float4_e2m1fn_x2", shape=(2, 4), data_ptr=four.data.ctypes.data, data_len=8
    )
    jio.save(path, {**arrays, 'é "quoted"': four}, metadata={"made": "by\nhand"})
    assert len(specs) == len(DENSE) + 1
    assert path.read_bytes() == safetensors.serialize(specs, metadata={"made": "by\nhand"})


def test_the_package_reads_what_is_written(path):
    arrays = {stored: random_bits((4, 8), dtype) for stored, dtype in DENSE.items()}
    arrays |= {stored: NarrowArray(random_bits((4, 12), np.uint8), name) for stored, name in NARROW.items()}
    jio.save(path, arrays)
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(arrays)
    for stored, x in arrays.items():
        assert (read[stored]["dtype"], tuple(read[stored]["shape"])) == (stored, x.shape)
        assert bytes(read[stored]["data"]) == (x.data if isinstance(x, NarrowArray) else x).tobytes()


def test_other_byte_orders_and_strides_are_written_in_order(path):
    x = np.arange(12, dtype=">i4").reshape(3, 4)
    jio.save(
        path, {"big": x, "turned": np.arange(6, dtype=np.int16).reshape(2, 3).T, "one": np.float32(3)[None]}
    )
    got = jio.load(path)
    assert got["big"].dtype == np.dtype("<i4")
    assert got["big"].tolist() == x.tolist()
    assert got["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]


# Arrays of the library

TWO_LEVELS = block_scaled("test.io.TwoLevels", DType.E2M1, [Level(DType.E4M3, 16), Level(DType.E8M0, 8)])


def block_samples() -> dict[str, BlockScaledArray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x[1, 3] = np.nan
    formats = [name.name for name in DType.registered() if name.name.startswith(("MX", "NVFP4"))]
    samples = {name: quantize_blocks(x, DType.from_name(name)) for name in formats}
    samples |= {
        f"{name}-codes": quantize_blocks(x[:2], DType.from_name(name), packed=False)
        for name in ("MXFP4", "MXFP6_E2M3")
    }
    samples["down-the-rows"] = quantize_blocks(x, DType.MXFP4, axis=0)
    samples["32x32"] = quantize_blocks(x, DType.MXFP8_E4M3, block_shape=(32, 32))
    samples["padded"] = quantize_blocks(x[:3, :70], DType.MXFP6_E3M2, pad=True)
    samples["empty"] = quantize_blocks(x[:0, :64], DType.MXFP4)
    samples["0-d"] = BlockScaledArray(np.array(2, np.float32), np.array(3, np.int8))
    mx = samples["MXFP8_E4M3"]
    samples["swizzled"] = BlockScaledArray(f8_4x128(mx.scales), mx.elements, format=mx.format)
    samples["free"] = BlockScaledArray(
        x[:4, :2].astype(ml_dtypes.bfloat16), np.ones((4, 8), np.float16), dtype=np.float16
    )
    samples["whole"] = BlockScaledArray(np.ones((4, 1), np.float32), np.ones((4, 8), np.int8), (1, Whole))
    samples["uint4"] = BlockScaledArray(
        np.ones((4, 1), np.float32), NarrowArray(np.ones((4, 4), np.uint8), ml_dtypes.uint4)
    )
    two = quantize_blocks(x, DType.NVFP4)
    samples["two-levels"] = BlockScaledArray(
        (two.scales, np.full((64, 2), 127, np.uint8).view(E8M0)), two.elements, format=TWO_LEVELS
    )
    many = [quantize_blocks(x[i : i + 2], DType.NVFP4) for i in range(3)]
    samples["stack"] = jax.tree_util.tree_map(lambda *leaves: np.stack(leaves), *many)
    samples["transposed"] = quantize_blocks(x, DType.NVFP4).T
    return samples


BLOCK_SAMPLES = block_samples()
SAMPLES = BLOCK_SAMPLES | {
    "narrow-E2M1": NarrowArray(random_bits((3, 4), np.uint8), "E2M1"),
    "narrow-axis-0": NarrowArray(random_bits((3, 4), np.uint8), "E2M3", axis=0),
    "narrow-uint4": NarrowArray(random_bits((3, 4), np.uint8), ml_dtypes.uint4),
    "narrow-uint2": NarrowArray(random_bits((3, 4), np.uint8), ml_dtypes.uint2),
    "narrow-bool": NarrowArray(random_bits((3, 4), np.uint8), np.bool_),
    "narrow-E8M0": NarrowArray(random_bits((3, 4), np.uint8), "E8M0"),
    "f8_4x128": f8_4x128(random_bits((2, 5, 3), E8M0)),
    "swizzled-bf16": swizzle(random_bits((5, 6), ml_dtypes.bfloat16), "(a b) c -> c b a", b=4),
    "swizzled-grouped": swizzle(random_bits((5, 6), np.int16), "(a b) c -> (c b) a", b=4),
    "swizzled-whole": swizzle(random_bits((5, 6), np.float16), "a b -> b a"),
}
on_samples = pytest.mark.parametrize("name", SAMPLES)


def on(library, array):
    return array if library is np.asarray else jax.tree_util.tree_map(jnp.array, array)


@on_samples
def test_file_round_trip(path, library, name):
    array = on(library, SAMPLES[name])
    jio.save(path, {"w": array}, metadata={"note": "kept"})
    with jio.open(path) as file:
        assert dict(file.metadata) == {"note": "kept"}
        assert file.names == ("w",)
        assert_same(file.array("w"), SAMPLES[name])
    for back in LIBRARIES:
        assert_same(jio.load(path, library=back)["w"], SAMPLES[name], back)
    again = path.with_name("again.safetensors")
    jio.save(again, jio.load(path), metadata={"note": "kept"})
    assert again.read_bytes() == path.read_bytes()


@on_samples
def test_state_round_trip_through_npz(library, name):
    state = jio.to_state(on(library, SAMPLES[name]))
    assert all(type(plane) is np.ndarray and plane.dtype.isbuiltin for plane in state.values())
    buffer = std_io.BytesIO()
    np.savez(buffer, **state)
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as loaded:
        assert_same(jio.from_state(loaded), SAMPLES[name])


@on_samples
def test_state_of_jax_arrays_gives_jax_arrays(name):
    state = jio.to_state(SAMPLES[name])
    moved = {key: jnp.array(plane) for key, plane in state.items()}
    assert_same(jio.from_state(moved), SAMPLES[name], "jax")


def test_planes_have_the_types_of_the_header(path):
    jio.save(
        path, {"w": BLOCK_SAMPLES["NVFP4"], "v": BLOCK_SAMPLES["MXFP6_E3M2"], "u": BLOCK_SAMPLES["MXINT8"]}
    )
    with jio.open(path) as file:
        types = {name: (tensor.type, tensor.shape) for name, tensor in file.tensors.items()}
    assert types == {
        "w.elements": ("F4", (64, 256)),
        "w.scales.0": ("F8_E4M3", (64, 16)),
        "w.scales.1": ("F32", (1, 1)),
        "v.elements": ("F6_E3M2", (64, 256)),
        "v.scales.0": ("F8_E8M0", (64, 8)),
        "u.elements": ("I8", (64, 256)),
        "u.scales.0": ("F8_E8M0", (64, 8)),
    }


def test_values_survive(path):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    weight = quantize_blocks(x, DType.NVFP4)
    jio.save(path, {"w": weight})
    want = weight.dequantize()
    assert exact.same_bits(jio.load(path)["w"].dequantize(), want)
    assert exact.same_bits(host(jio.load(path, library="jax")["w"].dequantize()), want)


# What a file object is


def test_tensors_are_read_only_views_that_outlive_the_file(path):
    jio.save(path, {"w": BLOCK_SAMPLES["MXFP4"], "x": np.arange(5, dtype=np.int32)})
    file = jio.open(path)
    x, weight = file["x"], file.array("w")
    assert np.shares_memory(x, file["x"])
    assert not x.flags.writeable
    assert not x.flags.owndata
    assert str(path) in Path("/proc/self/maps").read_text()
    file.close()
    file.close()
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert_same(weight, BLOCK_SAMPLES["MXFP4"])
    for use in (lambda: file["x"], lambda: file.array("w"), file.__enter__):
        with pytest.raises(ValueError, match=r"file\.safetensors is closed"):
            use()
    assert file.tensors["x"].nbytes == 20
    assert repr(file).endswith("3 tensors, closed>")
    del x, weight, use
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_loaded_arrays_own_their_memory(path):
    jio.save(path, {"w": BLOCK_SAMPLES["MXFP4"], "x": np.arange(5)})
    for array in jio.load(path).values():
        for leaf in jax.tree_util.tree_leaves(array):
            assert leaf.flags.writeable
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_saving_over_an_open_file_leaves_its_views(path):
    jio.save(path, {"x": np.arange(5000)})
    with jio.open(path) as file:
        x = file["x"]
    jio.save(path, {"x": x[:3] + 1})
    assert x[-1] == 4999
    assert jio.load(path)["x"].tolist() == [1, 2, 3]
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_save_leaves_the_old_file_alone(path, monkeypatch):
    jio.save(path, {"x": np.arange(5)})
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        jio.save(path, {"x": np.arange(6)})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_shrank_is_refused(path):
    jio.save(path, {"x": np.arange(5000)})
    with jio.open(path) as file:
        os.truncate(path, 100)
        with pytest.raises(SafetensorsError, match=r"shrank from \d+ to 100 bytes"):
            file["x"]


def test_file_is_a_mapping_and_immutable(path):
    jio.save(path, {"a.weight": np.arange(2), "b": np.arange(3)})
    with jio.open(path) as file:
        assert set(file) == {"a.weight", "b"}
        assert len(file) == 2
        assert "b" in file
        assert file.get("c") is None
        assert hash(file) == hash(file)
        with pytest.raises(KeyError, match=r"no tensor 'a\.weigth'; did you mean 'a\.weight'"):
            file["a.weigth"]
        with pytest.raises(KeyError, match="no tensor 'z'"):
            file.array("z")
        with pytest.raises(AttributeError, match="immutable: cannot set 'path'"):
            file.path = "x"
        with pytest.raises(TypeError):
            file.tensors["b"] = None


@pytest.mark.parametrize("kind", [str, Path, os.fsencode], ids=["str", "Path", "bytes"])
def test_path_kinds(path, kind):
    jio.save(kind(path), {"x": np.arange(2)})
    with jio.open(kind(path)) as file:
        assert file.path == str(path)


def test_new_files_have_ordinary_permissions(path):
    jio.save(path, {})
    reference = path.with_name("reference")
    reference.touch()
    assert path.stat().st_mode == reference.stat().st_mode
    assert jio.load(path) == {}


def test_import_is_light():
    code = "import sys, jaxquant.io; sys.exit(bool({'safetensors', 'orbax', 'gguf', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What cannot be saved or loaded


@pytest.mark.parametrize(
    ("arrays", "metadata", "error", "message"),
    [
        ({"x": np.array(["a"])}, None, TypeError, "dtype <U1 cannot be saved"),
        ({"x": np.array([None])}, None, TypeError, "dtype object cannot be saved"),
        ({"x": np.zeros(2, "M8[s]")}, None, TypeError, "cannot be saved"),
        ({"x": np.zeros(2, np.complex128)}, None, TypeError, "complex128, which safetensors has no type for"),
        ({"x": [1.0]}, None, TypeError, "'x' must be a NumPy or JAX array.*got list"),
        ({1: np.zeros(2)}, None, TypeError, "a name is a str, got int"),
        ({"__metadata__": np.zeros(2)}, None, ValueError, "is the name of the file's metadata"),
        ({"\ud800": np.zeros(2)}, None, ValueError, "no Unicode text"),
        ({"x": np.zeros((2, 3), F4)}, None, ValueError, r"shape \(2, 3\): F4 wants .* multiple of 2"),
        ({"x": np.zeros((), F4)}, None, ValueError, "F4 wants"),
        (
            {"x": np.zeros((4, 6), ml_dtypes.float6_e2m3fn)},
            None,
            ValueError,
            "F6_E2M3 wants .* multiple of 4",
        ),
        ({}, {"jaxquant": "x"}, ValueError, "'jaxquant' is this library's own"),
        ({}, {"a": 1}, TypeError, "metadata must be strings by strings, got 'a': int"),
        (
            {"w": BLOCK_SAMPLES["MXFP4"], "w.elements": np.zeros(2)},
            None,
            ValueError,
            "two tensors would have the name 'w.elements'",
        ),
        (
            {"x": swizzle(np.zeros((4, 2)), "(a shape) c -> (c shape) a", shape=2)},
            None,
            ValueError,
            "named 'shape'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_saves(path, arrays, metadata, error, message):
    with pytest.raises(error, match=message):
        jio.save(path, arrays, metadata=metadata)
    assert not path.exists()


def test_jax_cannot_hold_every_dtype(path):
    jio.save(path, {"x": np.arange(3)})
    with pytest.raises(TypeError, match="x: int64 under JAX needs jax_enable_x64"):
        jio.load(path, library="jax")
    jio.save(path, {"x": np.zeros(4, ml_dtypes.float6_e2m3fn)})
    with pytest.raises(TypeError, match="XLA has no float6_e2m3fn"):
        jio.load(path, library="jax")
    with pytest.raises(ValueError, match="library must be 'numpy' or 'jax', got 'torch'"):
        jio.load(path, library="torch")


# Bad files

OK = entry("U8", (2,), 0, 2)
BAD = {
    "empty": (b"", "has 0 bytes"),
    "seven-bytes": (bytes(7), "has 7 bytes"),
    "header-past-the-end": (
        container({}, length=1000),
        "claims a header of 1000 bytes, but the file ends at 10",
    ),
    "header-of-2**63": (container({}, length=2**63), f"claims a header of {2**63} bytes, at most 100000000"),
    "header-of-2**64-1": (container({}, length=2**64 - 1), "at most 100000000"),
    "header-no-json": (container(b'{"a":'), "the header is no JSON"),
    "header-no-object": (container([1]), "starts with .*not a safetensors file"),
    "header-empty": (container(b""), "starts with b'', wanted"),
    "header-no-utf8": (container(b'{"\xff": 1}'), "not UTF-8"),
    "header-deep": (container(b'{"a":' + b"[" * 100_000), "nested too deep|no JSON"),
    "header-huge-integer": (container(b'{"a":' + b"1" * 10_000 + b"}"), "no JSON"),
    "header-trailing-json": (container(b"{}{}"), "no JSON"),
    "leading-space": (container(b" {}"), "starts with b' {}'"),
    "metadata-no-object": (
        container({"__metadata__": [1]}),
        r"__metadata__ is \[1\], wanted an object of strings",
    ),
    "metadata-no-string": (container({"__metadata__": {"a": 1}}), "holds 1 under 'a', wanted a string"),
    "duplicate-name": (
        container(b'{"a":%b,"a":%b}' % ((json.dumps(OK).encode(),) * 2), bytes(2)),
        "'a' twice",
    ),
    "duplicate-field": (container(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' twice"),
    "entry-no-object": (container({"a": 5}), "tensor 'a' is described by 5, wanted an object"),
    "entry-no-shape": (
        container({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, bytes(2)),
        "'a' has no 'shape'",
    ),
    "unknown-dtype": (container({"a": entry("F3", (2,), 0, 2)}, bytes(2)), "dtype 'F3', known are BOOL, F4"),
    "dtype-no-string": (
        container({"a": entry(["U8"], (2,), 0, 2)}, bytes(2)),
        "has dtype a list of 1 entries",
    ),
    "negative-extent": (container({"a": entry("U8", (-2,), 0, 2)}, bytes(2)), r"has shape \[-2\]"),
    "float-extent": (container({"a": entry("U8", (2.0,), 0, 2)}, bytes(2)), "has shape a list of 1 entries"),
    "boolean-extent": (container({"a": entry("U8", (True,), 0, 1)}, bytes(1)), "has shape"),
    "shape-no-list": (container({"a": OK | {"shape": 2}}, bytes(2)), "has shape 2, wanted a list"),
    "rank-65": (container({"a": entry("U8", (1,) * 65, 0, 1)}, bytes(1)), "65 dimensions, at most 64"),
    "too-many-elements": (container({"a": entry("U8", (2**40, 2**40, 0), 0, 0)}), "too many elements"),
    "one-offset": (container({"a": OK | {"data_offsets": [0]}}, bytes(2)), r"data_offsets \[0\], wanted two"),
    "offsets-backwards": (
        container({"a": entry("U8", (2,), 2, 0)}, bytes(2)),
        r"data_offsets \[2, 0\] span -2",
    ),
    "offsets-negative": (container({"a": entry("U8", (2,), -2, 0)}, bytes(2)), "wanted two integers"),
    "offsets-huge": (container({"a": entry("U8", (2,), 2**63, 2**63 + 2)}, bytes(2)), "the file ends at"),
    "bytes-do-not-match": (
        container({"a": entry("F32", (2,), 0, 2)}, bytes(2)),
        r"'a' is F32 of shape \(2,\), that is 8 bytes, but its data_offsets \[0, 2\] span 2",
    ),
    "F6-bytes": (container({"a": entry("F6_E2M3", (4,), 0, 4)}, bytes(4)), "that is 3 bytes"),
    "odd-F4-dimension": (
        container({"a": entry("F4", (2, 3), 0, 3)}, bytes(3)),
        r"F4 of shape \(2, 3\).*multiple of 2",
    ),
    "odd-F4-in-all": (container({"a": entry("F4", (3, 3), 0, 5)}, bytes(5)), r"F4 of shape \(3, 3\)"),
    "F4-scalar": (container({"a": entry("F4", (), 0, 1)}, bytes(1)), r"F4 of shape \(\)"),
    "F6-of-six": (container({"a": entry("F6_E3M2", (2, 6), 0, 9)}, bytes(9)), "multiple of 4"),
    "truncated-data": (
        container({"a": OK}, bytes(1)),
        "lies at offsets .* but the file ends at .* truncated",
    ),
    "overlap": (
        container({"a": OK, "b": entry("U8", (2,), 1, 3)}, bytes(3)),
        "tensor 'b' at offset .* overlaps tensor 'a'",
    ),
    "same-bytes-twice": (container({"a": OK, "b": OK}, bytes(2)), "overlaps"),
    "gap-before": (
        container({"a": entry("U8", (2,), 1, 3)}, bytes(3)),
        "leaves 1 bytes unused after the header",
    ),
    "gap-between": (
        container({"a": OK, "b": entry("U8", (2,), 3, 5)}, bytes(5)),
        "leaves 1 bytes unused after",
    ),
    "bytes-behind": (container({"a": OK}, bytes(3)), "has bytes that belong to no tensor"),
    "bytes-without-tensors": (container({}, bytes(3)), "belong to no tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(path, name):
    content, message = BAD[name]
    path.write_bytes(content)
    with pytest.raises(SafetensorsError, match=f"(?s)file.safetensors: .*({message})") as caught:
        jio.open(path)
    assert len(str(caught.value)) < 1000


def test_good_relatives_of_the_bad_files(path):
    path.write_bytes(container({"a": OK | {"more": 1}, "e": entry("F4", (3, 0), 2, 2)}, bytes(2)))
    with jio.open(path) as file:
        assert file["a"].tolist() == [0, 0]
        assert file["e"].shape == (3, 0)


def test_every_truncation_is_refused(path):
    jio.save(path, {"w": BLOCK_SAMPLES["uint4"], "x": np.arange(3, dtype=np.int32)})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(SafetensorsError):
            jio.open(path)


def test_damaged_files_raise_nothing_else(path):
    jio.save(path, {"w": BLOCK_SAMPLES["padded"], "s": SAMPLES["f8_4x128"], "n": SAMPLES["narrow-axis-0"]})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    rng = random.Random(5)
    refused = 0
    for _ in range(600):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(8 + length)] = rng.choice(b'0123456789{}[]",:aF\\ \xff')
        path.write_bytes(damaged)
        try:
            jio.load(path)
        except SafetensorsError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    "piece", [b"{},", b"[],", b"1,", b'"",'], ids=["objects", "lists", "numbers", "strings"]
)
def test_headers_of_many_values_cost_little_memory(path, monkeypatch, piece):
    monkeypatch.setattr(jaxquant.io_safetensors, "_MAX_VALUES", 1 << 14)
    header = b'{"a":[' + piece * (1 << 17) + b"1]}"
    path.write_bytes(container(header))
    tracemalloc.start()
    with pytest.raises(SafetensorsError, match="more than 16384 values"):
        jio.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(header)


def test_the_limit_on_values_is_for_dishonest_headers_only(path):
    rows = {f"layers.{i}.weight": entry("U8", (1, 1), i, i + 1) for i in range(20_000)}
    path.write_bytes(container(rows, bytes(20_000)))
    with jio.open(path) as file:
        assert len(file) == 20_000
    assert jaxquant.io_safetensors._MAX_VALUES >= 100 * 20_000


def test_strings_that_do_not_end_take_linear_time(path):
    path.write_bytes(container(b'{"a":"' + b',\\"' * (3 << 20)))
    with pytest.raises(SafetensorsError, match="no JSON"):
        jio.open(path)


def test_long_strings_are_no_values(path):
    header = {"__metadata__": {"text": '[{,"\\' * 1_000_000}}
    path.write_bytes(container(header))
    with jio.open(path) as file:
        assert len(file.metadata["text"]) == 5_000_000


def test_odd_places_are_refused(tmp_path):
    with pytest.raises(SafetensorsError, match="is a directory"):
        jio.open(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SafetensorsError, match="is no regular file"):
        jio.open(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        jio.open(tmp_path / "missing")


def test_booleans_are_zero_or_one(path):
    path.write_bytes(container({"a": entry("BOOL", (2,), 0, 2)}, b"\x01\x02"))
    with jio.open(path) as file, pytest.raises(SafetensorsError, match="'a' holds the boolean 2"):
        file["a"]


# Bad descriptions


def described(path, change, sample="NVFP4") -> None:
    """Save a sample with its description changed."""
    jio.save(path, {"w": SAMPLES[sample]})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["jaxquant"])
    changed = change(ours)
    header["__metadata__"]["jaxquant"] = json.dumps(ours if changed is None else changed)
    path.write_bytes(container(header, content[8 + length :]))


def within(*keys, value):
    def change(ours):
        node = ours
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return change


W = ("arrays", "w")
BAD_DESCRIPTIONS = [
    ("NVFP4", within("version", value=2), "format version 2 by a newer jaxquant; this one reads up to 1"),
    ("NVFP4", within("version", value="1"), "format version '1', wanted an integer"),
    ("NVFP4", within("version", value=0), "format version 0, wanted an integer"),
    ("NVFP4", lambda _: [], "is list, wanted an object"),
    ("NVFP4", within("arrays", value=[]), "has no object 'arrays'"),
    ("NVFP4", within("arrays", "v", value={"kind": "array", "dtype": "int8"}), "the file has no tensor 'v'"),
    ("NVFP4", within(*W, "kind", value="sparse"), "has no tensor 'w'|unknown kind 'sparse'"),
    ("NVFP4", within(*W, "kind", value=1), "no 'kind' of type str"),
    (
        "NVFP4",
        within(*W, "coding", "name", value="Nothing"),
        "no BlockScaledDType 'Nothing' is registered here",
    ),
    ("NVFP4", within(*W, "coding", "element", value="E3M2"), "was saved with another NVFP4"),
    ("NVFP4", within(*W, "coding", value=None), "has format 'NVFP4', but codes of None"),
    ("NVFP4", within(*W, "format", value="MXFP4"), "has format 'MXFP4', but codes of"),
    ("NVFP4", within(*W, "block_size", value=[32]), "block_size 32 along axis 1"),
    ("NVFP4", within(*W, "block_size", value=["Half"]), "block_size must hold ints and Whole"),
    ("NVFP4", within(*W, "dtype", value="float7"), "unknown dtype 'float7'"),
    ("NVFP4", within(*W, "dtype", value="bool"), "dtype must be a float"),
    ("NVFP4", within(*W, "padding", value=[257]), r"padding \(257,\) does not fit"),
    ("NVFP4", within(*W, "padding", value=[0, 0, 1]), r"padding \(0, 0, 1\) does not fit"),
    ("NVFP4", within(*W, "padding", value=["a"]), "does not fit"),
    ("NVFP4", within(*W, "elements", "name", value="E2M3"), "was saved with E2M3 of 4 bits, here it has 6"),
    ("NVFP4", within(*W, "elements", "axis", value=0), "described as"),
    ("NVFP4", within(*W, "scales", 0, "dtype", value="float8_e8m0fnu"), "stores float8_e4m3fn, described as"),
    ("NVFP4", within(*W, "scales", 1, "kind", value="block_scaled"), "cannot be block-scaled itself"),
    ("MXINT8", within(*W, "elements", "dtype", value="uint8"), "stores int8, described as uint8"),
    ("narrow-uint4", within(*W, "dtype", value="float32"), "must have 1 to 8 bits"),
    ("narrow-uint4", within(*W, "axis", value=5), "axis 5 is none of"),
    ("narrow-axis-0", within(*W, "bits", value=4), "of 4 bits, here it has 6"),
    ("f8_4x128", within(*W, "pattern", value="a b -> b"), "on one side of '->' only"),
    ("f8_4x128", within(*W, "shape", value=[500, 3]), "of which storage holds 128"),
    ("f8_4x128", within(*W, "shape", value=[-1, 3]), "must not be negative"),
    ("f8_4x128", within(*W, "sizes", value={"q": 3}), "for which sizes are given"),
    ("f8_4x128", within(*W, "sizes", value={"shape": 3}), "sizes a factor named 'shape'"),
    ("swizzled-grouped", within(*W, "sizes", "b", value="4"), "size 'b' must be an integer"),
]


@pytest.mark.parametrize(
    ("sample", "change", "message"), BAD_DESCRIPTIONS, ids=[f"{s}: {m[:30]}" for s, _, m in BAD_DESCRIPTIONS]
)
def test_bad_descriptions_are_refused(path, sample, change, message):
    described(path, change, sample)
    with pytest.raises(SafetensorsError, match=f"file.safetensors: .*({message})"):
        jio.load(path)


def test_a_description_that_is_no_json(path):
    path.write_bytes(container({"__metadata__": {"jaxquant": "{"}}))
    with pytest.raises(SafetensorsError, match="the description is no JSON"):
        jio.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": None}, "state has no 'version'"),
        ({"description": None}, "state has no 'description'"),
        ({"elements": None}, "state has no plane 'elements'"),
        ({"elements": 3}, "plane 'elements' must be an array, got int"),
        ({"version": np.int32(2)}, "format version 2 by a newer jaxquant"),
        ({"version": np.float32(1)}, "format version 1.0, wanted an integer"),
        ({"version": np.arange(2)}, r"format version \[0, 1\], wanted an integer"),
        ({"description": np.zeros(3)}, r"description is float64\(3,\), wanted uint8"),
        ({"description": np.uint8([123])}, "the description is no JSON"),
        ({"scales.0": np.zeros((64, 16), np.int8)}, "stores int8, described as float8_e4m3fn"),
        ({"scales.0": np.zeros((64, 5), np.uint8)}, "is no multiple of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_states_are_refused(change, message):
    state = jio.to_state(BLOCK_SAMPLES["NVFP4"]) | change
    with pytest.raises(ValueError, match=message):
        jio.from_state({key: value for key, value in state.items() if value is not None})


def test_a_state_names_what_it_cannot_hold():
    with pytest.raises(TypeError, match="dtype object cannot be saved"):
        jio.to_state(np.array([None]))
    with pytest.raises(TypeError, match=r"must be a NumPy or JAX array.*got dict"):
        jio.to_state({})


# gpt-oss

GOLDEN = exact.load("golden_pack")


@pytest.mark.parametrize("separator", ["_", "."])
def test_gpt_oss_pair(path, library, separator):
    blocks, scales = GOLDEN["gptoss_blocks"], GOLDEN["gptoss_scales"]
    names = f"mlp.w{separator}blocks", f"mlp.w{separator}scales"
    weight = jio.from_gpt_oss(dict(zip(names, (library(blocks), library(scales)), strict=True)), "mlp.w")
    assert weight.format is DType.MXFP4
    assert weight.shape == (3, 128)
    assert exact.same_bits(host(weight.dequantize()), GOLDEN["gptoss_deq"])
    pair = jio.to_gpt_oss(weight, "mlp.w", separator=separator)
    jio.save(path, pair)
    with jio.open(path) as file:
        assert file[names[0]].tobytes() == blocks.tobytes()
        assert file[names[0]].shape == blocks.shape
        assert file[names[1]].tobytes() == scales.tobytes()
        assert file.tensors[names[1]].type == "U8"
        assert exact.same_bits(jio.from_gpt_oss(file, "mlp.w").dequantize(), GOLDEN["gptoss_deq"])
    assert all(isinstance(tensor, np.ndarray) == (library is np.asarray) for tensor in pair.values())


def test_gpt_oss_experts_keep_their_axes():
    rng = np.random.default_rng(1)
    blocks, scales = (
        rng.integers(0, 256, (2, 3, 4, 16), np.uint8),
        rng.integers(100, 140, (2, 3, 4), np.uint8),
    )
    weight = jio.from_gpt_oss({"w_blocks": blocks, "w_scales": scales.view(E8M0)}, "w")
    assert weight.shape == (2, 3, 128)
    assert np.shares_memory(weight.elements.data, blocks)
    back = jio.to_gpt_oss(weight, "w")
    assert np.array_equal(back["w_blocks"], blocks)
    assert np.array_equal(back["w_scales"], scales)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"w_block": None, "w_scales": None}, KeyError, "no w_blocks with w_scales, nor w.blocks"),
        (
            {"w_blocks": np.zeros((2, 16), np.int8), "w_scales": np.zeros(2, np.uint8)},
            TypeError,
            "w_blocks has dtype int8",
        ),
        (
            {"w_blocks": np.zeros((2, 16), np.uint8), "w_scales": np.zeros(2)},
            TypeError,
            "w_scales has dtype float64",
        ),
        (
            {"w_blocks": [0], "w_scales": np.zeros(2)},
            TypeError,
            "w_blocks must be a NumPy or JAX array, got list",
        ),
        (
            {"w_blocks": np.zeros((2, 15), np.uint8), "w_scales": np.zeros(2, np.uint8)},
            ValueError,
            r"shape \(2, 15\)",
        ),
        (
            {"w_blocks": np.zeros((3, 16), np.uint8), "w_scales": np.zeros(2, np.uint8)},
            ValueError,
            r"\(3, 16\) .* \(2,\)",
        ),
        (
            {"w_blocks": np.zeros(16, np.uint8), "w_scales": np.array(0, np.uint8)},
            ValueError,
            r"wanted \[\*rows, G",
        ),
    ],
    ids=["missing", "dtype", "scale-dtype", "no-array", "width", "groups", "rank"],
)
def test_bad_gpt_oss_pairs(tensors, error, message):
    with pytest.raises(error, match=message):
        jio.from_gpt_oss(tensors, "w")


# compressed-tensors


def nvfp4_tensors(divisor, rows=3, K=64, seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "m.weight_packed": rng.integers(0, 256, (rows, K // 2), np.uint8),
        "m.weight_scale": rng.integers(0, 0x7F, (rows, K // 16), np.uint8).view(E4M3),
        "m.weight_global_scale": np.float32([divisor]),
    }


def on_library(tensors, library):
    return {name: library(tensor) for name, tensor in tensors.items()}


def assert_same_tensors(got, want) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert host(got[name]).tobytes() == host(tensor).tobytes()


def test_compressed_tensors_mxfp4(path, library):
    packed, scales = GOLDEN["gptoss_blocks"].reshape(3, 64), GOLDEN["gptoss_scales"]
    tensors = {"m.weight_packed": packed, "m.weight_scale": scales}
    weight = jio.from_compressed_tensors(on_library(tensors, library), "m")
    assert weight.format is DType.MXFP4
    assert exact.same_bits(host(weight.dequantize()), GOLDEN["gptoss_deq"])
    written = jio.to_compressed_tensors(weight, "m")
    assert_same_tensors(written, tensors)
    jio.save(path, written)
    with jio.open(path) as file:
        assert {name: tensor.type for name, tensor in file.tensors.items()} == dict.fromkeys(tensors, "U8")
        assert_same(jio.from_compressed_tensors(file, "m"), jio.from_compressed_tensors(tensors, "m"))


def test_compressed_tensors_nibbles_are_in_our_order():
    weight = NarrowArray(GOLDEN["c4_pack_compressed_tensors"], DType.E2M1)
    assert np.array_equal(weight.codes(), GOLDEN["c4"])


@pytest.mark.parametrize("divisor", [1.0, 4.0, 2688 / 7.25, 1.9999999, 3.3e38, 2.95e-39], ids=str)
def test_compressed_tensors_nvfp4(path, library, divisor):
    tensors = nvfp4_tensors(divisor)
    weight = jio.from_compressed_tensors(on_library(tensors, library), "m")
    assert weight.format is DType.NVFP4
    assert weight.levels[1].shape == (1, 1)
    # The global scale is a divisor: values are code * scale / divisor.
    codes = decoded(tensors["m.weight_packed"])
    scales = np.repeat(tensors["m.weight_scale"].astype(np.float64), 16, -1)
    stored = Fraction(float(tensors["m.weight_global_scale"][0]))
    got = host(weight.dequantize())
    for q, s, value in zip(codes.ravel(), scales.ravel(), got.ravel(), strict=True):
        want = Fraction(float(q)) * Fraction(float(s)) / stored
        if abs(want) < Fraction(2) ** 128:
            assert (
                abs(Fraction(float(value)) - want)
                <= abs(want) * Fraction(2) ** -23 + Fraction(2) ** -149 * 2000
            )
    written = jio.to_compressed_tensors(weight, "m", global_scale=np.float32(divisor))
    assert_same_tensors(written, tensors)
    jio.save(path, written)
    with jio.open(path) as file:
        assert file.tensors["m.weight_scale"].type == "F8_E4M3"
        assert_same(jio.from_compressed_tensors(file, "m"), jio.from_compressed_tensors(tensors, "m"))


def decoded(packed) -> np.ndarray:
    table = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((table, -table))
    return np.stack((values[packed & 15], values[packed >> 4]), -1).reshape(*packed.shape[:-1], -1)


def test_global_scales_that_a_reciprocal_gives_back():
    significands = np.float32(1) + np.arange(0, 1 << 23, 4099, dtype=np.float32) * np.float32(2.0**-23)
    kept = 0
    for divisor in significands:
        tensors = nvfp4_tensors(divisor, rows=1, K=16)
        weight = jio.from_compressed_tensors(tensors, "m")
        (got,) = jio.to_compressed_tensors(weight, "m")["m.weight_global_scale"]
        assert abs(int(got.view(np.uint32)) - int(divisor.view(np.uint32))) <= 1
        if divisor <= 1.4142:
            assert got == divisor
        kept += got == divisor
    assert kept < len(significands)  # why global_scale is an argument


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m.weight_packed": None}, KeyError, "no tensor 'm.weight_packed'; did you mean"),
        (
            {"m.weight_packed": np.zeros((3, 32), np.int32)},
            TypeError,
            "weight_packed has dtype int32, wanted uint8",
        ),
        (
            {"m.weight_scale": np.zeros((3, 4), np.uint8)},
            TypeError,
            "weight_scale has dtype uint8, wanted float8_e4m3fn",
        ),
        ({"m.weight_scale": np.zeros((3, 2), E4M3)}, ValueError, r"\(3, 32\) .*\(3, 2\), wanted .*K / 16"),
        (
            {"m.weight_global_scale": None},
            TypeError,
            "weight_scale has dtype float8_e4m3fn, wanted uint8 or float8_e8m0fnu",
        ),
        (
            {"m.weight_global_scale": np.float32([0])},
            ValueError,
            "weight_global_scale is 0.0, wanted a positive",
        ),
        ({"m.weight_global_scale": np.float32([-1])}, ValueError, "is -1.0, wanted a positive"),
        ({"m.weight_global_scale": np.float32([np.nan])}, ValueError, "is nan, wanted a positive"),
        ({"m.weight_global_scale": np.float32([np.inf])}, ValueError, "is inf, wanted a positive"),
        ({"m.weight_global_scale": np.float32([1e-45])}, ValueError, "finite reciprocal"),
        (
            {"m.weight_global_scale": np.float32([1, 2])},
            ValueError,
            r"float32 of shape \(2,\), wanted float32 of one",
        ),
        ({"m.weight_global_scale": np.float16([1])}, ValueError, "is float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_compressed_tensors(change, error, message):
    tensors = {name: tensor for name, tensor in (nvfp4_tensors(2.0) | change).items() if tensor is not None}
    with pytest.raises(error, match=message):
        jio.from_compressed_tensors(tensors, "m")


def test_bad_global_scales_to_write():
    weight = jio.from_compressed_tensors(nvfp4_tensors(4.0), "m")
    for divisor, message in (
        (5.0, "is not the tensor scale 0.25"),
        (0.1, "is no float32"),
        (1e39, "is no float32"),
    ):
        with pytest.raises(ValueError, match=message):
            jio.to_compressed_tensors(weight, "m", global_scale=divisor)
    with pytest.raises(ValueError, match="MXFP4 has no global scale, got 4"):
        jio.to_compressed_tensors(BLOCK_SAMPLES["MXFP4"], "m", global_scale=4.0)
    with pytest.raises(ValueError, match=r"tensor scale has shape \(3, 1, 1\)"):
        jio.to_compressed_tensors(BLOCK_SAMPLES["stack"], "m")
    tiny = quantize_blocks(np.ones((1, 16), np.float32), DType.NVFP4, tensor_scale=np.float32(1e-45))
    with pytest.raises(ValueError, match=r"the tensor scale is 1\.4"):
        jio.to_compressed_tensors(tiny, "m")


# GGUF


def write_gguf(path, tensors: dict[str, tuple[np.ndarray, str]]) -> None:
    writer = gguf_peer.GGUFWriter(path, "tiny")
    for name, (x, kind) in tensors.items():
        if kind == "F32":
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, x.reshape(*x.shape[:-2], -1), raw_dtype=QTYPE[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def nvfp4_blocks(shape, seed=0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape, 36), np.uint8)
    blocks[..., :4] = rng.integers(0, 0x7F, (*shape, 4), np.uint8)
    return blocks


def assert_equal_but_for_the_sign_of_zero(got, want) -> None:
    """gguf looks codes up in a table of integers, where code 8 is 0; here it is -0.0."""
    got = host(got)
    assert exact.same_bits(np.where(got == 0, np.float32(0), got), np.where(want == 0, np.float32(0), want))


def dequantized_by_gguf(blocks, kind) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks.reshape(*blocks.shape[:-2], -1), QTYPE[kind]).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (4,), (2, 0), (0, 2)], ids=str)
def test_gguf_mxfp4_blocks(library, shape):
    blocks = np.random.default_rng(2).integers(0, 255, (*shape, 17), np.uint8)
    weight = jio.from_gguf_blocks(library(blocks), DType.MXFP4)
    assert weight.format is DType.MXFP4
    assert weight.shape == (*shape[:-1], shape[-1] * 32)
    if blocks.size:
        assert_equal_but_for_the_sign_of_zero(weight.dequantize(), dequantized_by_gguf(blocks, "MXFP4"))
    back = jio.to_gguf_blocks(weight)
    assert isinstance(back, np.ndarray) == (library is np.asarray)
    assert back.shape == blocks.shape
    assert host(back).tobytes() == blocks.tobytes()


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (4,)], ids=str)
def test_gguf_nvfp4_blocks(library, shape):
    blocks = nvfp4_blocks(shape)
    weight = jio.from_gguf_blocks(library(blocks), DType.NVFP4, tensor_scale=np.float32(0.3))
    assert weight.format is DType.NVFP4
    want = dequantized_by_gguf(blocks, "NVFP4") * np.float32(0.3)
    assert_equal_but_for_the_sign_of_zero(weight.dequantize(), want)
    assert host(jio.to_gguf_blocks(weight)).tobytes() == blocks.tobytes()


def test_gguf_nan_scales_are_nan():
    mx = np.full((1, 17), 0x22, np.uint8)
    mx[0, 0] = 0xFF
    assert np.isnan(jio.from_gguf_blocks(mx, DType.MXFP4).dequantize()).all()
    nv = nvfp4_blocks((1,))
    nv[0, 2] = 0x7F
    values = jio.from_gguf_blocks(nv, DType.NVFP4).dequantize()
    assert np.isnan(values).tolist() == [32 <= i < 48 for i in range(64)]
    assert jio.to_gguf_blocks(jio.from_gguf_blocks(mx, DType.MXFP4)).tobytes() == mx.tobytes()


@pytest.mark.parametrize(("dtype", "K"), [(DType.MXFP4, 96), (DType.NVFP4, 128)], ids=["MXFP4", "NVFP4"])
def test_quantized_weights_go_to_gguf_and_back(dtype, K):
    weight = quantize_blocks(np.random.default_rng(0).standard_normal((5, K)).astype(np.float32), dtype)
    scale = weight.levels[1] if dtype is DType.NVFP4 else None
    assert_same(jio.from_gguf_blocks(jio.to_gguf_blocks(weight), dtype, tensor_scale=scale), weight)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = {
        "blk.0.attn_q.weight": (nvfp4_blocks((4, 2)), "NVFP4"),
        "blk.0.attn_q.scale": (np.float32([0.37]), "F32"),
        "blk.0.ffn_up_exps.weight": (nvfp4_blocks((3, 4, 1), 1), "NVFP4"),
        "blk.0.ffn_up_exps.scale": (np.float32([0.5, 0.37, 3]), "F32"),
        "blk.0.attn_k.weight": (nvfp4_blocks((4, 2), 2), "NVFP4"),
        "blk.0.attn_v.weight": (GOLDEN["gguf_mxfp4_rec"][:, None], "MXFP4"),
        "norm": (np.ones(4, np.float32), "F32"),
    }
    write_gguf(path, tensors)
    return path, tensors


def test_gguf_tensors(model):
    path, tensors = model
    scales = {
        "attn_q": np.float32(0.37),
        "ffn_up_exps": np.float32([0.5, 0.37, 3])[:, None, None],
        "attn_k": np.float32(1),
    }
    with jaxquant.gguf.open(path) as file:
        for name, scale in scales.items():
            weight = jio.from_gguf(file, f"blk.0.{name}.weight")
            blocks = tensors[f"blk.0.{name}.weight"][0]
            assert weight.shape == file.tensors[f"blk.0.{name}.weight"].shape
            assert_equal_but_for_the_sign_of_zero(
                weight.dequantize(), dequantized_by_gguf(blocks, "NVFP4") * scale
            )
            assert jio.to_gguf_blocks(weight).tobytes() == blocks.tobytes()
        borrowed = jio.from_gguf(file, "blk.0.attn_k.weight", tensor_scale="blk.0.attn_q.scale")
        given = jio.from_gguf(file, "blk.0.attn_k.weight", tensor_scale=0.25)
        assert borrowed.levels[1].tolist() == [[np.float32(0.37)]]
        assert given.levels[1].tolist() == [[0.25]]
    del file
    assert str(path) not in Path("/proc/self/maps").read_text()  # the planes are no views of it
    assert given.shape == (4, 128)


@pytest.mark.parametrize(
    ("name", "scale", "error", "message"),
    [
        ("norm", None, TypeError, "'norm' is F32, wanted MXFP4 or NVFP4"),
        ("blk.0.attn_q.wieght", None, KeyError, "did you mean"),
        ("blk.0.attn_q.weight", "nothing", KeyError, "no tensor 'nothing'"),
        ("blk.0.attn_v.weight", 2.0, ValueError, "MXFP4 has no tensor scale, got 2.0"),
        ("blk.0.attn_q.weight", np.float32([1, 2]), ValueError, r"tensor_scale has shape \(2,\)"),
        ("blk.0.ffn_up_exps.weight", np.float32([1, 2]), ValueError, r"tensor_scale has shape \(2,\)"),
        ("blk.0.attn_q.weight", np.float16([1]), ValueError, "tensor_scale must be float32, got float16"),
        ("blk.0.attn_q.weight", 0.1, ValueError, "tensor_scale must be float32, got float64: 0.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_gguf_tensors(model, name, scale, error, message):
    with jaxquant.gguf.open(model[0]) as file, pytest.raises(error, match=message):
        jio.from_gguf(file, name, tensor_scale=scale)


@pytest.mark.parametrize(
    ("blocks", "dtype", "error", "message"),
    [
        (np.zeros((2, 16), np.uint8), DType.MXFP4, ValueError, r"shape \(2, 16\), wanted \[\*rows, G, 17\]"),
        (np.zeros((2, 17), np.uint8), DType.NVFP4, ValueError, r"wanted \[\*rows, G, 36\]"),
        (np.zeros(17, np.uint8), DType.MXFP4, ValueError, r"shape \(17,\)"),
        (np.zeros((2, 17), np.int8), DType.MXFP4, TypeError, "blocks has dtype int8, wanted uint8"),
        (np.zeros((2, 17), np.uint8), DType.MXINT8, ValueError, "dtype must be DType.MXFP4 or DType.NVFP4"),
        (np.full((2, 36), 0x80, np.uint8), DType.NVFP4, ValueError, "8 of 8 scale bytes are 0x80 or more"),
    ],
    ids=["16-bytes", "17-for-NVFP4", "rank", "int8", "format", "signed-scales"],
)
def test_bad_gguf_blocks(blocks, dtype, error, message):
    with pytest.raises(error, match=message):
        jio.from_gguf_blocks(blocks, dtype)


def test_raw_bytes_of_gguf_tensors(model):
    path, tensors = model
    with jaxquant.gguf.open(path) as file:
        for name, (x, kind) in tensors.items():
            raw = file.raw(name)
            assert raw.tobytes() == x.tobytes()
            assert raw.shape == (x.shape if kind != "F32" else (*x.shape, 4))
            assert not raw.flags.owndata


# What no vendor's layout holds

WRITERS = {
    "to_gpt_oss": lambda array: jio.to_gpt_oss(array, "w"),
    "to_compressed_tensors": lambda array: jio.to_compressed_tensors(array, "w"),
    "to_gguf_blocks": jio.to_gguf_blocks,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("MXFP8_E4M3", "array has MXFP8_E4M3, wanted MXFP4"),
        ("free", "array has no format, wanted MXFP4"),
        ("down-the-rows", r"array has blocks of \(32, 1\), wanted 32 along the last of 2 axes"),
    ],
    ids=["format", "free", "axis"],
)
def test_other_arrays_are_refused(writer, sample, message):
    with pytest.raises(ValueError, match=f"{writer}: {message}"):
        WRITERS[writer](BLOCK_SAMPLES[sample])
    with pytest.raises(TypeError, match=f"{writer}: array must be a BlockScaledArray of MXFP4.*got ndarray"):
        WRITERS[writer](np.zeros((2, 32)))


def test_padded_arrays_and_half_blocks_are_refused():
    padded = quantize_blocks(np.ones((2, 40), np.float32), DType.MXFP4, pad=True)
    with pytest.raises(ValueError, match=r"shape \(2, 40\) is padded to \(2, 64\)"):
        jio.to_gguf_blocks(padded)
    with pytest.raises(ValueError, match=r"shape \(2, 48\), the last axis must be a multiple of 64"):
        jio.to_gguf_blocks(quantize_blocks(np.ones((2, 48), np.float32), DType.NVFP4))
    with pytest.raises(ValueError, match=r"separator must be '_' or '\.', got"):
        jio.to_gpt_oss(BLOCK_SAMPLES["MXFP4"], "w", separator="-")


@pytest.mark.parametrize("writer", WRITERS)
def test_codes_and_swizzled_scales_are_written_as_packed_and_dense_ones(writer, library):
    weight = on(library, BLOCK_SAMPLES["MXFP4"])
    codes = weight.elements.codes()
    others = [
        BlockScaledArray(f8_4x128(weight.scales), weight.elements, format=weight.format),
        BlockScaledArray(weight.scales, codes, format=weight.format),
        BlockScaledArray(
            weight.scales, NarrowArray.from_codes(codes, DType.E2M1, axis=0), format=weight.format
        ),
    ]
    if library is np.asarray:
        others.append(BlockScaledArray(weight.scales, codes.view(F4), format=weight.format))
    want = jax.tree_util.tree_leaves(WRITERS[writer](weight))
    for other in others:
        got = jax.tree_util.tree_leaves(WRITERS[writer](other))
        assert [host(leaf).tobytes() for leaf in got] == [host(leaf).tobytes() for leaf in want]


# Orbax: pip install orbax-checkpoint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["NVFP4", "MXFP6_E3M2", "swizzled", "stack", "f8_4x128", "narrow-uint4"])
def test_orbax_round_trip(tmp_path, name):
    orbax = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    array = jax.tree_util.tree_map(jnp.array, SAMPLES[name])
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jio.to_state(array))
        checkpointer.save(tmp_path / "tree", {"w": array})
        checkpointer.wait_until_finished()
        assert_same(jio.from_state(checkpointer.restore(tmp_path / "state")), SAMPLES[name])
        shapes = jax.tree_util.tree_map(orbax.utils.to_shape_dtype_struct, {"w": array})
        assert_same(checkpointer.restore(tmp_path / "tree", shapes)["w"], array)


# Public bug reports; ids of data/cases.json


def test_P01(path, library):
    jio.save(path, {"x": NarrowArray.from_codes(library(np.uint8([1, 2, 3, 4])), DType.E2M1)})
    assert path.read_bytes()[-2:] == bytes([0x21, 0x43])


def test_P05(path, library):
    dirty = library(np.uint8([0xF3, 0x03]))
    assert host(NarrowArray.from_codes(dirty, DType.E2M1).codes()).tolist() == [3, 3]
    jio.save(path, {"x": np.uint8([0xF3, 0x03]).view(F4)})
    assert path.read_bytes()[-1] == 0x33
    assert jio.load(path)["x"].view(np.uint8).tolist() == [3, 3]


def test_P06(path, library):
    jio.save(path, {"x": NarrowArray.from_codes(library(np.uint8([0, 1, 2, 1])), ml_dtypes.uint2)})
    assert path.read_bytes()[-1] == 0x64
    assert jio.load(path)["x"].codes().tolist() == [0, 1, 2, 1]


def test_P08(library):
    weight = jio.from_gguf_blocks(library(GOLDEN["gguf_mxfp4_rec"]), DType.MXFP4)
    assert_equal_but_for_the_sign_of_zero(weight.dequantize(), GOLDEN["gguf_mxfp4_deq"].reshape(-1))


def test_P09(path, library):
    packed = NarrowArray.from_codes(library(np.zeros((2, 32), np.uint8)), DType.E2M1)
    assert (packed.shape, packed.data.shape, packed.data.dtype, packed.nbytes) == (
        (2, 32),
        (2, 16),
        np.uint8,
        32,
    )
    jio.save(path, {"x": packed})
    with jio.open(path) as file:
        assert (file.tensors["x"].shape, file.tensors["x"].nbytes) == ((2, 32), 32)
        assert file["x"].shape == (2, 32)


@pytest.mark.parametrize(
    "dtype",
    [
        *DENSE.values(),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "int2", "int4", "uint2", "uint4"),
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_R01(path, dtype):
    dtype = np.dtype(dtype)
    bits = ml_dtypes.finfo(dtype).bits if dtype.name.startswith("float") and dtype.itemsize == 1 else 8
    width = int(dtype.name[-1]) if dtype.name[-4:-1] == "int" and dtype.name[-1] in "24" else bits
    x = random_bits((4, 64), dtype)
    if dtype.itemsize == 1:
        x = (x.view(np.uint8) & np.uint8((1 << width) - 1)).view(dtype)
    buffer = std_io.BytesIO()
    np.savez(buffer, **jio.to_state(x))
    buffer.seek(0)
    jio.save(path, {"x": x})
    for got in (jio.from_state(np.load(buffer)), jio.load(path)["x"]):
        assert got.dtype == dtype
        assert got.tobytes() == x.tobytes()


def test_R03(path):
    path.write_bytes(container({"a": entry("F4", (2, 3), 0, 3)}, bytes(3)))
    with pytest.raises(SafetensorsError, match=r"tensor 'a' is F4 of shape \(2, 3\)"):
        jio.open(path)


# Documentation


@pytest.mark.parametrize("name", ["jaxquant.io", "jaxquant.io_state", "jaxquant.io_vendors"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted >= 5
    assert result.failed == 0


def test_page_examples():
    result = doctest.testfile(str(DOCS / "interchange.md"), module_relative=False)
    assert result.attempted >= 5
    assert result.failed == 0
