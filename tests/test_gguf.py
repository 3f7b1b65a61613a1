"""The GGUF reader against the gguf package's reader, writer and dequantizer, and against hostile files."""

from __future__ import annotations

import collections
import doctest
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf as peer
import gguf.quants
import numpy as np
import pytest

import jaxquant.gguf
from jaxquant.gguf import GGUFError, TensorInfo

QTYPE = peer.GGMLQuantizationType
VTYPE = peer.GGUFValueType

# What gguf.quants can dequantize and jaxquant.gguf hands to it.
BLOCK_TYPES = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS"),
    *("IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"),
]


def q4_k_bytes(rows: tuple[int, ...], groups: int, seed: int) -> np.ndarray:
    """Q4_K rows of random bits, with finite d and dmin."""
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (*rows, groups, 144), np.uint8)
    records[..., :4] = rng.normal(size=(*rows, groups, 2)).astype("<f2").view(np.uint8)
    return records.reshape(*rows, groups * 144)


def write_everything(path: Path) -> dict[str, np.ndarray]:
    """A small file of many types, by gguf's own writer; returns the bytes of the block types."""
    rng = np.random.default_rng(7)
    writer = peer.GGUFWriter(path, "tiny")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4000000000)
    writer.add_int32("a.i32", -2000000000)
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.text", "weights: \u2581\U0001f9ee")
    writer.add_array("b.strings", ["", "a", "\u2581the", "\U0001f9ee"])
    writer.add_array("b.ints", [1, -2, 3])
    writer.add_array("b.floats", [0.5, -0.25])
    writer.add_array("b.bools", [True, False, True])
    writer.add_array("b.nested", [[1, 2], [3], [4, 5, 6]])
    stored = {
        "q4_k": q4_k_bytes((3,), 2, 1),
        "q4_k_3d": q4_k_bytes((2, 3), 1, 2),
        "q4_k_1d": q4_k_bytes((), 1, 3),
    }
    for name, raw in stored.items():
        writer.add_tensor(name, raw, raw_dtype=QTYPE.Q4_K)
    for type_name in BLOCK_TYPES:
        block_size, block_bytes = peer.GGML_QUANT_SIZES[QTYPE[type_name]]
        stored[type_name] = rng.integers(0, 256, (2, 256 // block_size * block_bytes), np.uint8)
        writer.add_tensor(type_name, stored[type_name], raw_dtype=QTYPE[type_name])
    writer.add_tensor("F32", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("F16", rng.normal(size=(2, 2, 3)).astype(np.float16))
    writer.add_tensor("BF16", rng.integers(0, 256, (4, 6), np.uint8), raw_dtype=QTYPE.BF16)
    writer.add_tensor("F64", np.array([0.1, -1e300, 5e-324]))
    writer.add_tensor("I8", np.array([-128, 127], np.int8))
    writer.add_tensor("I16", np.array([-32768, 32767], np.int16))
    writer.add_tensor("I32", np.array([2**24 + 1, -(2**31)], np.int32))
    writer.add_tensor("I64", np.array([2**62 + 1, -1], np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "everything.gguf"
    return path, write_everything(path)


@pytest.fixture
def file(everything):
    with jaxquant.gguf.open(everything[0]) as file:
        yield file


# A container written by hand, so that every field can be made wrong.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def array(item: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + payload


def tensor(
    name: str | bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    rank = len(shape) if rank is None else rank
    extents = b"".join(struct.pack("<Q", extent) for extent in reversed(shape))
    return text(name) + struct.pack("<I", rank) + extents + struct.pack("<IQ", kind, offset)


def container(
    *,
    keys: list[bytes] = (),
    tensors: list[bytes] = (),
    data: bytes = b"",
    key_count: int | None = None,
    tensor_count: int | None = None,
    version: bytes = struct.pack("<I", 3),
    alignment: int = 32,
) -> bytes:
    counts = struct.pack(
        "<QQ",
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = b"GGUF" + version + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def opened(tmp_path: Path, content: bytes) -> jaxquant.gguf.GGUFFile:
    path = tmp_path / "hand.gguf"
    path.write_bytes(content)
    return jaxquant.gguf.open(path)


# Against the gguf package


def test_type_table_is_ggufs():
    ours = {number: (t.name, t.block_size, t.block_bytes) for number, t in jaxquant.gguf._TYPES.items()}
    theirs = {int(t): (t.name, *peer.GGML_QUANT_SIZES[t]) for t in QTYPE if t.name != "Q8_1"}
    known = {number: entry for number, entry in theirs.items() if number in ours}
    assert ours == known
    assert len(ours) >= 33


def test_tensors_are_what_ggufs_reader_says(everything):
    path, _ = everything
    theirs = {
        t.name: TensorInfo(
            t.name, t.tensor_type.name, tuple(t.shape[::-1].tolist()), int(t.data_offset), int(t.n_bytes)
        )
        for t in peer.GGUFReader(path).tensors
    }
    with jaxquant.gguf.open(path) as file:
        assert dict(file.tensors) == theirs
        assert list(file.tensors) == list(theirs)
    assert theirs["q4_k_3d"].shape == (2, 3, 256)


def test_metadata_are_what_ggufs_reader_says(file, everything):
    fields = peer.GGUFReader(everything[0]).fields
    theirs = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(theirs)
    for name, want in theirs.items():
        got = file.metadata[name]
        if name == "b.nested":  # gguf's reader flattens it
            assert [inner.tolist() for inner in got] == [[1, 2], [3], [4, 5, 6]]
        elif isinstance(got, np.ndarray):
            assert got.tolist() == want
        else:
            assert (list(got) if isinstance(got, tuple) else got) == want


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("general.architecture", "tiny"),
        ("a.u8", 200),
        ("a.i64", -(2**63)),
        ("a.u64", 2**64 - 1),
        ("a.f32", 0.10000000149011612),
        ("a.f64", 0.1),
        ("a.true", True),
        ("a.false", False),
        ("a.text", "weights: \u2581\U0001f9ee"),
        ("b.strings", ("", "a", "\u2581the", "\U0001f9ee")),
    ],
)
def test_metadata_value_and_type(file, name, want):
    got = file.metadata[name]
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("name", "dtype", "want"),
    [
        ("b.ints", np.int32, [1, -2, 3]),
        ("b.floats", np.float32, [0.5, -0.25]),
        ("b.bools", np.bool_, [True, False, True]),
    ],
)
def test_metadata_number_arrays_are_read_only_numpy(file, name, dtype, want):
    got = file.metadata[name]
    assert got.dtype == dtype
    assert got.tolist() == want
    assert not got.flags.writeable


def test_empty_metadata_arrays(tmp_path):
    keys = [key(str(item), 9, array(item, 0)) for item in (5, 8, 9)]
    metadata = opened(tmp_path, container(keys=[*keys, key("after", 8, text(""))])).metadata
    assert metadata["5"].shape == (0,)
    assert metadata["5"].dtype == np.int32
    assert [metadata[name] for name in ("8", "9", "after")] == [(), (), ""]


def test_metadata_mapping(file):
    assert "a.u8" in file.metadata
    assert "a.u9" not in file.metadata
    assert file.metadata.get("a.u9") is None
    assert file.metadata["b.strings"] is file.metadata["b.strings"]
    with pytest.raises(KeyError, match=r"no metadata key 'a.u9'; did you mean .*'a.u8'"):
        file.metadata["a.u9"]


@pytest.mark.parametrize(
    ("name", "shape"), [("q4_k", (3, 2, 144)), ("q4_k_3d", (2, 3, 1, 144)), ("q4_k_1d", (1, 144))]
)
def test_records_are_the_stored_bytes_uncopied(file, everything, name, shape):
    records = file.records(name)
    assert records.shape == shape
    assert records.dtype == np.uint8
    assert records.tobytes() == everything[1][name].tobytes()
    assert not records.flags.writeable
    assert not records.flags.owndata
    assert np.shares_memory(records, file.records(name))


def assert_float32(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == np.float32
    assert got.flags.owndata or got.base.flags.owndata  # fresh memory, none of the file's
    np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("name", ["q4_k", "q4_k_3d", "q4_k_1d"])
def test_q4_k_array_is_ggufs(file, everything, name):
    assert_float32(file.array(name), gguf.quants.dequantize(everything[1][name], QTYPE.Q4_K))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_type_array_is_ggufs(file, everything, name):
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(everything[1][name], QTYPE[name])
    assert want.shape == (2, 256)
    assert_float32(file.array(name), want)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_array_is_ggufs(file, everything, name):
    (theirs,) = (t for t in peer.GGUFReader(everything[0]).tensors if t.name == name)
    assert_float32(file.array(name), np.array(gguf.quants.dequantize(theirs.data, QTYPE[name])))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("F64", [0.1, -np.inf, 0.0]),
        ("I8", [-128, 127]),
        ("I16", [-32768, 32767]),
        ("I32", [2**24, -(2**31)]),
        ("I64", [2**62, -1]),
    ],
)
def test_number_array_is_rounded(file, name, want):
    assert_float32(file.array(name), np.array(want, np.float32))


def test_q8_k_array_is_scale_times_integers(tmp_path):
    rng = np.random.default_rng(5)
    q = rng.integers(-127, 128, (2, 256), np.int8)
    ds = np.array([0.375, -2.5], np.float32)
    sums = q.reshape(2, 16, 16).sum(-1, dtype=np.int16)
    data = b"".join(d.tobytes() + r.tobytes() + s.tobytes() for d, r, s in zip(ds, q, sums, strict=True))
    file = opened(tmp_path, container(tensors=[tensor("x", (2, 256), 15)], data=data))
    assert_float32(file.array("x"), ds[:, None] * q.astype(np.float32))


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_alignment(tmp_path, alignment):
    path = tmp_path / "aligned.gguf"
    writer = peer.GGUFWriter(path, "tiny")
    writer.add_custom_alignment(alignment)
    for seed in range(3):
        writer.add_tensor(f"w{seed}", q4_k_bytes((1,), 1, seed), raw_dtype=QTYPE.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with jaxquant.gguf.open(path) as file:
        for seed in range(3):
            assert file.tensors[f"w{seed}"].offset % alignment == 0
            assert file.records(f"w{seed}").tobytes() == q4_k_bytes((1,), 1, seed).tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_versions_two_and_three(tmp_path, version):
    content = container(
        version=struct.pack("<I", version), tensors=[tensor("w", (2,))], data=struct.pack("<2f", 1, -2)
    )
    assert opened(tmp_path, content).array("w").tolist() == [1, -2]


@pytest.mark.parametrize(
    ("shape", "kind", "records"),
    [
        ((), 0, None),
        ((0, 256), 12, (0, 1, 144)),
        ((3, 0), 12, (3, 0, 144)),
        ((2**47, 0), 12, (2**47, 0, 144)),
    ],
    ids=["scalar", "no-rows", "no-columns", "many-empty-rows"],
)
def test_scalar_and_empty_tensors(tmp_path, shape, kind, records):
    file = opened(tmp_path, container(tensors=[tensor("w", shape, kind)], data=struct.pack("<f", 2.5)))
    assert file.tensors["w"].shape == shape
    if records is None:
        assert file.array("w").tolist() == 2.5
    else:
        assert file.records("w").shape == records
        assert file.array("w").shape == shape


# What a file object is


def test_works_without_with_and_views_outlive_it(everything):
    file = jaxquant.gguf.open(everything[0])
    records, metadata = file.records("q4_k"), file.metadata
    file.close()
    file.close()
    del file
    assert records.tobytes() == everything[1]["q4_k"].tobytes()
    assert metadata["a.u8"] == 200


def test_mapping_goes_with_the_last_view(tmp_path, everything):
    path = tmp_path / "mapped.gguf"
    path.write_bytes(everything[0].read_bytes())

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    assert not mapped()
    with jaxquant.gguf.open(path) as file:
        records = file.records("q4_k")
    assert mapped()
    del records
    assert not mapped()


def test_closed_file_refuses_but_keeps_its_list(everything):
    with jaxquant.gguf.open(everything[0]) as file:
        pass
    for use in (
        lambda: file.records("q4_k"),
        lambda: file.array("F32"),
        lambda: file.metadata,
        file.__enter__,
    ):
        with pytest.raises(ValueError, match=r"everything\.gguf is closed"):
            use()
    assert file.tensors["F32"].shape == (3, 5)
    assert repr(file).endswith("closed>")


def test_file_object_is_immutable(file):
    with pytest.raises(AttributeError, match="immutable: cannot set 'path'"):
        file.path = "elsewhere"
    with pytest.raises(TypeError):
        file.tensors["F32"] = None
    with pytest.raises(TypeError):
        file.metadata["a.u8"] = 1
    with pytest.raises(AttributeError):
        file.tensors["F32"].offset = 0


@pytest.mark.parametrize("kind", [str, Path, os.fsencode], ids=["str", "Path", "bytes"])
def test_path_kinds(everything, kind):
    with jaxquant.gguf.open(kind(everything[0])) as file:
        assert file.path == str(everything[0])


def test_docstring_examples():
    result = doctest.testmod(jaxquant.gguf)
    assert result.attempted >= 10
    assert result.failed == 0


def test_import_is_light():
    code = "import sys, jaxquant.gguf; sys.exit(bool({'gguf', 'yaml', 'tqdm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Wrong use


@pytest.mark.parametrize("method", ["records", "array"])
def test_unknown_name_suggests_near_ones(file, method):
    with pytest.raises(KeyError, match=r"no tensor 'q4_k_2d'; did you mean 'q4_k_3d'"):
        getattr(file, method)("q4_k_2d")
    with pytest.raises(KeyError, match=r"no tensor 'zzzzzzzz'\""):
        getattr(file, method)("zzzzzzzz")
    with pytest.raises(TypeError, match="a tensor's name is a str, got int"):
        getattr(file, method)(3)


@pytest.mark.parametrize("name", ["F32", "Q6_K"])
def test_records_of_another_type(file, name):
    with pytest.raises(TypeError, match=f"tensor '{name}' is {name}, records are Q4_K; use array"):
        file.records(name)


def test_missing_gguf_package(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"tensor 'Q6_K' is Q6_K.*pip install jaxquant\[gguf\]"):
        file.array("Q6_K")
    assert file.array("q4_k").shape == (3, 512)


def test_type_that_gguf_cannot_dequantize(file, monkeypatch):
    monkeypatch.delitem(gguf.quants._type_traits, QTYPE.Q6_K)
    with pytest.raises(NotImplementedError, match="tensor 'Q6_K' is Q6_K, which the installed gguf"):
        file.array("Q6_K")


# Bad files: each is refused by one clear exception, in bounded time and memory

F4 = struct.pack("<f", 1.0)
BAD_FILES = {
    "empty": (b"", "is empty, not a GGUF file"),
    "wrong-magic": (b"GGML" + bytes(60), "starts with b'GGML', not with b'GGUF'"),
    "magic-cut": (b"GG", "the magic number takes 4 bytes at offset 0, but the file ends at 2"),
    "version-0": (container(version=struct.pack("<I", 0)), "has GGUF version 0"),
    "version-1": (container(version=struct.pack("<I", 1)), "has GGUF version 1; versions 2 and 3 are read"),
    "version-4": (container(version=struct.pack("<I", 4)), "has GGUF version 4"),
    "big-endian": (container(version=struct.pack(">I", 3)), r"is big-endian \(version 3\)"),
    "tensors-2**32": (container(tensor_count=2**32), "claims 4294967296 tensors, but has room for 0"),
    "tensors-2**63": (container(tensor_count=2**63, data=bytes(4096)), "claims 9223372036854775808 tensors"),
    "tensors-too-many": (
        container(tensor_count=2**18 + 1, data=bytes(24 * 2**18 + 48)),
        "claims 262145 tensors, more than the 262144 a file may hold in all",
    ),
    "keys-2**64": (container(key_count=2**64 - 1), "claims 18446744073709551615 metadata keys"),
    "key-length-2**63": (
        container(keys=[struct.pack("<QI", 2**63 - 1, 4)], data=bytes(64)),
        "metadata key 0 is 9223372036854775807 bytes long, at most 65535",
    ),
    "key-cut": (container(keys=[struct.pack("<QIQ", 1000, 4, 0)]), "metadata key 0 takes 1000 bytes"),
    "key-not-utf8": (container(keys=[key(b"\xff", 0, b"\0")]), "metadata key 0 is not UTF-8"),
    "key-twice": (container(keys=[key("a", 0, b"\0")] * 2), "metadata key 'a' occurs twice"),
    "value-type": (container(keys=[key("a", 13, bytes(8))]), "metadata 'a' has value type 13"),
    "item-type": (container(keys=[key("a", 9, array(77, 1, bytes(8)))]), "metadata 'a' has value type 77"),
    "text-length-2**64": (
        container(keys=[key("a", 8, struct.pack("<Q", 2**64 - 1))]),
        "metadata 'a' takes 18446744073709551615 bytes",
    ),
    "array-2**63-numbers": (
        container(keys=[key("a", 9, array(12, 2**63))]),
        "metadata 'a' takes 73786976294838206464 bytes",
    ),
    "array-2**40-strings": (
        container(keys=[key("a", 9, array(8, 2**40))], data=bytes(4096)),
        "claims 1099511627776 strings in metadata 'a', but has room for",
    ),
    "string-length-2**64": (
        container(keys=[key("a", 9, array(8, 3, text("x") + struct.pack("<QQ", 2**64 - 1, 0)))]),
        "string 1 of metadata 'a' ends at offset 18446744073709551",
    ),
    "last-string-cut": (
        container(keys=[key("a", 9, array(8, 2, text("x") + struct.pack("<Q", 50)))], data=bytes(8)),
        "string 1 of metadata 'a' ends at offset",
    ),
    "arrays-2**60": (
        container(keys=[key("a", 9, array(9, 2**60))], data=bytes(4096)),
        "claims 1152921504606846976 arrays in metadata 'a'",
    ),
    "nested-deep": (
        container(keys=[key("a", 9, array(9, 1) * 100_000 + array(0, 0))]),
        "metadata 'a' nests arrays more than 4 deep",
    ),
    "alignment-0": (container(keys=[key("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
    "alignment-4": (container(keys=[key("general.alignment", 4, struct.pack("<I", 4))]), "alignment is 4"),
    "alignment-24": (
        container(keys=[key("general.alignment", 4, struct.pack("<I", 24))]),
        "general.alignment is 24, wanted a power of two from 8 up",
    ),
    "alignment-huge": (
        container(
            keys=[key("general.alignment", 4, struct.pack("<I", 2**31))], tensors=[tensor("w", (1,))], data=F4
        ),
        "tensor 'w' lies at offsets 2147483648 to 2147483652, but the file ends at",
    ),
    "alignment-type": (
        container(keys=[key("general.alignment", 10, struct.pack("<Q", 32))]),
        "general.alignment has value type 10, wanted 4",
    ),
    "rank-2**32": (
        container(tensors=[tensor("w", (1,), rank=2**32 - 1)], data=F4),
        "tensor 'w' has 4294967295 dimensions, at most 4",
    ),
    "rank-5": (container(tensors=[tensor("w", (1,) * 5)], data=F4), "tensor 'w' has 5 dimensions"),
    "extent-2**64": (container(tensors=[tensor("w", (2**64 - 1,))], data=F4), "too many elements"),
    "extents-wrap": (container(tensors=[tensor("w", (2**32, 2**32))], data=F4), "too many elements"),
    "extents-empty": (container(tensors=[tensor("w", (2**63, 0))], data=F4), "too many elements"),
    "type-unknown": (
        container(tensors=[tensor("w", (1,), 99)], data=F4),
        "tensor 'w' has the unknown type 99",
    ),
    "type-removed": (container(tensors=[tensor("w", (1,), 4)], data=F4), "tensor 'w' has the unknown type 4"),
    "K-not-multiple": (
        container(tensors=[tensor("w", (256, 255), 12)], data=bytes(144 * 256)),
        "tensor 'w' is Q4_K with K = 255, wanted a multiple of 256",
    ),
    "K-scalar": (container(tensors=[tensor("w", (), 12)], data=bytes(144)), "tensor 'w' is Q4_K with K = 1"),
    "offset-unaligned": (
        container(tensors=[tensor("w", (1,), offset=4)], data=bytes(64)),
        "tensor 'w' has offset 4, wanted a multiple of 32",
    ),
    "offset-2**64": (
        container(tensors=[tensor("w", (1,), offset=2**64 - 32)], data=F4),
        "tensor 'w' lies at offsets 1844674407370955",
    ),
    "past-the-end": (container(tensors=[tensor("w", (2,))], data=F4), "tensor 'w' lies at offsets 64 to 72"),
    "overlap": (
        container(tensors=[tensor("v", (9,)), tensor("w", (1,), offset=32)], data=bytes(64)),
        "tensors 'v' and 'w' overlap at offset 128",
    ),
    "overlap-same": (
        container(tensors=[tensor("w", (1,)), tensor("v", (1,))], data=F4),
        "tensors 'w' and 'v' overlap at offset 96",
    ),
    "tensor-twice": (
        container(tensors=[tensor("w", (1,)), tensor("w", (1,), offset=32)], data=bytes(64)),
        "tensor name 'w' occurs twice",
    ),
    "tensor-name-long": (
        container(tensors=[tensor("w" * 70_000, (1,))], data=F4),
        "name of tensor 0 is 70000 bytes long",
    ),
    "tensor-name-not-utf8": (
        container(tensors=[tensor(b"\xc3", (1,))], data=F4),
        "name of tensor 0 is not UTF-8",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=message) as caught:
            jaxquant.gguf.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 2**20


@pytest.mark.parametrize(
    ("kind", "payload", "message"),
    [
        (8, text(b"\xff"), "metadata 'a' is not UTF-8"),
        (9, array(8, 2, text("x") + text(b"\xff")), "a string in metadata 'a' is not UTF-8"),
        (7, b"\2", "metadata 'a' holds the boolean 2"),
        (9, array(7, 3, b"\0\1\3"), "metadata 'a' holds the boolean 3"),
    ],
    ids=["text", "string-array", "boolean", "boolean-array"],
)
def test_bad_value_is_refused_when_read(tmp_path, kind, payload, message):
    file = opened(tmp_path, container(keys=[key("a", kind, payload), key("b", 0, b"\5")]))
    with pytest.raises(GGUFError, match=message):
        file.metadata["a"]
    assert file.metadata["b"] == 5


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (container(keys=[key("a", 9, array(8, 2**30))]), "claims 1073741824 strings"),
        (container(keys=[key("a", 9, array(9, 2**29))]), "claims 536870912 arrays"),
        (container(tensor_count=2**28), "claims 268435456 tensors"),
    ],
    ids=["strings", "arrays", "tensors"],
)
def test_claims_that_a_sparse_file_has_room_for(tmp_path, header, message):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(header)
    os.truncate(path, 2**34)
    with pytest.raises(GGUFError, match=f"{message}.* more than the"):
        jaxquant.gguf.open(path)


def test_most_strings_a_file_may_hold_open_within_128_mib(tmp_path):
    path = tmp_path / "strings.gguf"
    path.write_bytes(container(keys=[key("a", 9, array(8, 2**22))]))
    os.truncate(path, 2**26)
    code = (
        "import resource, sys, jaxquant.gguf\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))\n"
        "print(list(jaxquant.gguf.open(sys.argv[1]).metadata))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    assert result.stdout == "['a']\n"


def test_directory(tmp_path):
    with pytest.raises(GGUFError, match="is a directory, not a GGUF file"):
        jaxquant.gguf.open(tmp_path)


def test_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(GGUFError, match="is no regular file"):
        jaxquant.gguf.open(tmp_path / "fifo")


def test_device():
    with pytest.raises(GGUFError, match="/dev/zero is no regular file"):
        jaxquant.gguf.open("/dev/zero")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        jaxquant.gguf.open(tmp_path / "none.gguf")


@pytest.mark.parametrize("path", [3, None], ids=["descriptor", "None"])
def test_path_that_is_none(path):
    with pytest.raises(TypeError):
        jaxquant.gguf.open(path)


def test_refused_files_leave_no_descriptor(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(BAD_FILES["overlap"][0])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for bad in (tmp_path, tmp_path / "bad.gguf"):
            with pytest.raises(GGUFError):
                jaxquant.gguf.open(bad)
    assert len(os.listdir("/proc/self/fd")) == before


def test_file_that_shrinks_while_open(tmp_path, everything):
    content = everything[0].read_bytes()
    file = opened(tmp_path, content)
    os.truncate(file.path, 8192)
    message = f"shrank from {len(content)} to 8192 bytes while it was open"
    for read in (lambda: file.records("q4_k"), lambda: file.array("F32"), lambda: file.metadata["a.u8"]):
        with pytest.raises(GGUFError, match=message):
            read()


def small_file(path: Path) -> bytes:
    writer = peer.GGUFWriter(path, "s")
    writer.add_array("strings", ["a", "bc"])
    writer.add_array("nested", [[1], [2, 3]])
    writer.add_bool("flag", True)
    writer.add_custom_alignment(32)
    writer.add_tensor("q4_k", q4_k_bytes((2,), 1, 4), raw_dtype=QTYPE.Q4_K)
    writer.add_tensor("q8_0", np.full((1, 34), 3, np.uint8), raw_dtype=QTYPE.Q8_0)
    writer.add_tensor("f32", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_all(path: Path) -> int:
    """Read everything a file has to give; the number of values read."""
    count = 0
    with jaxquant.gguf.open(path) as file:
        count += len(dict(file.metadata))
        for info in file.tensors.values():
            count += file.array(info.name).size
            if info.type == "Q4_K":
                count += file.records(info.name).size
    return count


def test_truncated_at_every_byte(tmp_path):
    whole = small_file(tmp_path / "small.gguf")
    with jaxquant.gguf.open(tmp_path / "small.gguf") as file:
        needed = max(info.offset + info.nbytes for info in file.tensors.values())
    assert 500 < needed <= len(whole)
    values = read_all(tmp_path / "small.gguf")
    assert values == 5 + 2 * 256 + 2 * 144 + 32 + 3
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length >= needed:  # only padding is gone
            assert read_all(path) == values
        else:
            with pytest.raises(GGUFError):
                jaxquant.gguf.open(path)


def test_mutated_bytes_parse_or_are_refused(tmp_path):
    whole = small_file(tmp_path / "small.gguf")
    with jaxquant.gguf.open(tmp_path / "small.gguf") as file:
        header_end = min(info.offset for info in file.tensors.values())
    rng = random.Random(2024)
    outcomes: collections.Counter[str] = collections.Counter()
    for trial in range(3000):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 4))):
            content[rng.randrange(header_end)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path = tmp_path / f"{trial}.gguf"
        path.write_bytes(content)
        try:
            read_all(path)
        except GGUFError:
            outcomes["refused"] += 1
        except NotImplementedError:  # a type that gguf lists but does not dequantize
            outcomes["no dequantizer"] += 1
        else:
            outcomes["read"] += 1
        path.unlink()
    assert outcomes["refused"] > 1000
    assert outcomes["read"] > 300


# The real model


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(os.environ["JAXQUANT_MODEL"])


@pytest.mark.model
def test_real_model_is_what_ggufs_reader_says(model):
    theirs = peer.GGUFReader(model)
    with jaxquant.gguf.open(model) as file:
        assert len(file.tensors) == len(theirs.tensors) == 236
        assert collections.Counter(info.type for info in file.tensors.values())["Q4_K"] == 27
        for want in theirs.tensors:
            info = file.tensors[want.name]
            assert info == TensorInfo(
                want.name,
                want.tensor_type.name,
                tuple(want.shape[::-1].tolist()),
                int(want.data_offset),
                int(want.n_bytes),
            )
            if info.name != "token_embd.weight":  # 671 MB as float32
                values = gguf.quants.dequantize(want.data, want.tensor_type)
                np.testing.assert_array_equal(file.array(info.name), values, strict=True)
            if info.type == "Q4_K":
                assert file.records(info.name).tobytes() == want.data.tobytes()
        for name, field in theirs.fields.items():
            if not name.startswith("GGUF."):
                got = file.metadata[name]
                got = got.tolist() if isinstance(got, np.ndarray) else got
                assert (list(got) if isinstance(got, tuple) else got) == field.contents()


@pytest.mark.model
def test_real_model_opens_in_little_memory(model):
    tracemalloc.start()
    try:
        with jaxquant.gguf.open(model) as file:
            assert file.metadata["general.architecture"] == "gemma3"
            assert (
                sum(file.records(i.name).nbytes for i in file.tensors.values() if i.type == "Q4_K")
                == 13271040
            )
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
