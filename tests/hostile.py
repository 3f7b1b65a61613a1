"""Files made to mislead: GGUF and safetensors headers that claim what no file can hold.

Each is a name, the bytes of its beginning, and its length; what lies beyond the bytes is a hole, so that claims of
terabytes cost nothing to store. `GOOD` are small files of every kind of content, for truncation and mutation.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

import numpy as np


class Hostile(NamedTuple):
    content: bytes
    size: int | None = None  # of the file, if longer than its content


U32, U64, TIB = struct.Struct("<I").pack, struct.Struct("<Q").pack, 1 << 40
_STRING, _ARRAY, _UINT32, _UINT8, _Q4_K, _F32 = 8, 9, 4, 0, 12, 0


def text(value: bytes, length: int | None = None) -> bytes:
    return U64(len(value) if length is None else length) + value


def gguf(*body: bytes, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + U32(3) + U64(tensors) + U64(keys) + b"".join(body)


def tensor(name: bytes, shape: tuple[int, ...], offset: int, type_: int = _Q4_K) -> bytes:
    return text(name) + U32(len(shape)) + b"".join(map(U64, shape)) + U32(type_) + U64(offset)


def key(name: bytes, kind: int, *value: bytes) -> bytes:
    return text(name) + U32(kind) + b"".join(value)


def _nested(depth: int) -> bytes:
    return b"".join(U32(_ARRAY) + U64(1) for _ in range(depth)) + U32(_UINT8) + U64(1) + b"x"


_RECORD = bytes(144)
_DATA = b"\0" * 4096

GGUF: dict[str, Hostile] = {
    "tensor count of 2**63": Hostile(gguf(_DATA, tensors=1 << 63)),
    "tensor count of 2**64 - 1": Hostile(gguf(_DATA, tensors=(1 << 64) - 1)),
    "billions of tensors in a hole": Hostile(gguf(tensors=4_000_000_000), TIB),
    "key count of 2**63": Hostile(gguf(_DATA, keys=1 << 63)),
    "billions of keys in a hole": Hostile(gguf(keys=4_000_000_000), TIB),
    "both counts of 2**63": Hostile(gguf(_DATA, tensors=1 << 63, keys=1 << 63), TIB),
    "key of 2**63 bytes": Hostile(gguf(text(b"a", 1 << 63), _DATA, keys=1)),
    "key of 2**64 - 1 bytes": Hostile(gguf(text(b"a", (1 << 64) - 1), _DATA, keys=1), TIB),
    "value of 2**63 - 1 bytes": Hostile(
        gguf(key(b"a", _STRING, text(b"b", (1 << 63) - 1)), _DATA, keys=1), TIB
    ),
    "array of 2**63 bytes": Hostile(gguf(key(b"a", _ARRAY, U32(_UINT8), U64(1 << 63)), _DATA, keys=1), TIB),
    "array of 2**61 64-bit numbers": Hostile(
        gguf(key(b"a", _ARRAY, U32(10), U64(1 << 61)), _DATA, keys=1), TIB
    ),
    "array of 2**40 strings in a hole": Hostile(
        gguf(key(b"a", _ARRAY, U32(_STRING), U64(1 << 36)), keys=1), TIB
    ),
    "array of 2**32 arrays in a hole": Hostile(
        gguf(key(b"a", _ARRAY, U32(_ARRAY), U64(1 << 32)), keys=1), TIB
    ),
    "arrays nested 1000 deep": Hostile(gguf(key(b"a", _ARRAY, _nested(1000)[0:]), _DATA, keys=1)),
    "strings that lead past the end": Hostile(
        gguf(key(b"a", _ARRAY, U32(_STRING), U64(3), text(b"x"), text(b"y", 1 << 62)), _DATA, keys=1)
    ),
    "a string that ends where it began, modulo 2**64": Hostile(
        gguf(key(b"a", _ARRAY, U32(_STRING), U64(9), text(b"", (1 << 64) - 8)), _DATA, keys=1)
    ),
    "value type of 2**32 - 1": Hostile(gguf(key(b"a", (1 << 32) - 1), _DATA, keys=1)),
    "a key twice": Hostile(gguf(key(b"a", _UINT32, U32(1)), key(b"a", _UINT32, U32(2)), _DATA, keys=2)),
    "a name twice": Hostile(gguf(tensor(b"w", (256,), 0), tensor(b"w", (256,), 160), _DATA, tensors=2)),
    "overlapping tensors": Hostile(
        gguf(tensor(b"v", (512,), 0), tensor(b"w", (256,), 256), _DATA, tensors=2)
    ),
    "one tensor inside another": Hostile(
        gguf(tensor(b"v", (2560,), 0), tensor(b"w", (256,), 288), _DATA, tensors=2)
    ),
    "unaligned offset": Hostile(gguf(tensor(b"w", (256,), 17), _DATA, tensors=1)),
    "offset of 2**63": Hostile(gguf(tensor(b"w", (256,), 1 << 63), _DATA, tensors=1)),
    "offset that wraps": Hostile(gguf(tensor(b"w", (256,), (1 << 64) - 32), _DATA, tensors=1)),
    "extent of 2**63": Hostile(gguf(tensor(b"w", (1 << 63,), 0), _DATA, tensors=1), TIB),
    "extents that wrap": Hostile(gguf(tensor(b"w", (1 << 32, 1 << 32), 0), _DATA, tensors=1), TIB),
    "extents of no elements and 2**63": Hostile(gguf(tensor(b"w", (0, 1 << 63), 0), _DATA, tensors=1)),
    "rank of 2**32 - 1": Hostile(gguf(text(b"w"), U32((1 << 32) - 1), _DATA, tensors=1)),
    "alignment of 0": Hostile(gguf(key(b"general.alignment", _UINT32, U32(0)), _DATA, keys=1)),
    "alignment of 2**31": Hostile(
        gguf(
            key(b"general.alignment", _UINT32, U32(1 << 31)),
            tensor(b"w", (256,), 0),
            _DATA,
            keys=1,
            tensors=1,
        )
    ),
    "a partial record": Hostile(gguf(tensor(b"w", (255,), 0), _DATA, tensors=1)),
    "a name that is no UTF-8": Hostile(gguf(tensor(b"\xff\xfe", (256,), 0), _DATA, tensors=1)),
    "ends in the magic number": Hostile(b"GG"),
    "is all zeros": Hostile(b"\0", TIB),
    "is all ones": Hostile(b"\xff" * 8192),
}


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return U64(len(encoded) if length is None else length) + encoded + data


def _entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, Hostile] = {
    "header of 2**63 bytes": Hostile(safetensors(b"{}", length=1 << 63)),
    "header of 2**64 - 1 bytes": Hostile(safetensors(b"{}", length=(1 << 64) - 1), TIB),
    "header of a TiB in a hole": Hostile(safetensors(b"{", length=TIB - 8), TIB),
    "header of 100 MB of zeros": Hostile(safetensors(b"{", length=100_000_000), 100_000_008),
    "header longer than the file": Hostile(safetensors({}, length=100)),
    "shorter than a length": Hostile(b"\2\0\0"),
    "nested 100,000 deep": Hostile(safetensors(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)),
    "brackets nested a million deep": Hostile(safetensors(b'{"a":' + b"[" * 1_000_000)),
    "a number of a million digits": Hostile(
        safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,8]}}')
    ),
    "shape of 2**63": Hostile(safetensors({"a": _entry(shape=(1 << 63,), offsets=(0, 1 << 65))}), TIB),
    "shape that wraps": Hostile(safetensors({"a": _entry(shape=(1 << 32, 1 << 32), offsets=(0, 0))})),
    "shape of 10,000 axes": Hostile(safetensors({"a": _entry(shape=(1,) * 10_000, offsets=(0, 4))}, _DATA)),
    "negative extent": Hostile(safetensors({"a": _entry(shape=(-2, -1))}, bytes(8))),
    "fractional extent": Hostile(
        safetensors(b'{"a":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}', bytes(8))
    ),
    "boolean extent": Hostile(safetensors({"a": _entry(shape=(True, 2))}, bytes(8))),
    "infinite extent": Hostile(
        safetensors(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8))
    ),
    "offsets that go back": Hostile(safetensors({"a": _entry(offsets=(8, 0))}, bytes(8))),
    "offsets past the end": Hostile(safetensors({"a": _entry(shape=(1024,), offsets=(0, 4096))}, bytes(8))),
    "overlapping tensors": Hostile(safetensors({"a": _entry(), "b": _entry(offsets=(4, 12))}, bytes(12))),
    "a hole between tensors": Hostile(safetensors({"a": _entry(), "b": _entry(offsets=(12, 20))}, bytes(20))),
    "bytes after the tensors": Hostile(safetensors({"a": _entry()}, bytes(9))),
    "a name twice": Hostile(
        safetensors(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            bytes(8),
        )
    ),
    "dtype that is no name": Hostile(safetensors({"a": _entry(dtype=["F32"])}, bytes(8))),
    "entry that is a list": Hostile(safetensors({"a": [1]}, bytes(8))),
    "metadata that is no string": Hostile(
        safetensors({"__metadata__": {"a": {"b": 1}}, "a": _entry()}, bytes(8))
    ),
    "header that is a list": Hostile(safetensors([1, 2])),
    "header that is no UTF-8": Hostile(safetensors(b'{"\xff":1}')),
    "half a million empty entries": Hostile(
        safetensors(b"{" + b",".join(b'"%d":{}' % i for i in range(500_000)) + b"}")
    ),
    "ten million values": Hostile(safetensors(b'{"a":[' + b"0," * 10_000_000 + b"0]}")),
    "ours, of another version": Hostile(
        safetensors({"__metadata__": {"jaxquant": '{"version":99,"arrays":{}}'}, "a": _entry()}, bytes(8))
    ),
    "ours, nested 100,000 deep": Hostile(
        safetensors({"__metadata__": {"jaxquant": '{"version":' * 100_000}, "a": _entry()}, bytes(8))
    ),
    "ours, of tensors that are not there": Hostile(
        safetensors(
            {
                "__metadata__": {"jaxquant": '{"version":1,"arrays":{"x":{"type":"NarrowArray"}}}'},
                "a": _entry(),
            },
            bytes(8),
        )
    ),
}


def good_gguf(rows: int = 300) -> bytes:
    """Metadata of every type and tensors of several, about 600 bytes a row."""
    rng = np.random.default_rng(5)
    keys = [key(b"general.architecture", _STRING, text(b"test"))]
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    for kind, size in sizes.items():
        keys.append(key(b"scalar.%d" % kind, kind, b"\1" + bytes(size - 1)))
        keys.append(key(b"array.%d" % kind, _ARRAY, U32(kind), U64(3), (b"\1" + bytes(size - 1)) * 3))
    keys.append(key(b"words", _ARRAY, U32(_STRING), U64(rows), *(text(b"word%d" % i) for i in range(rows))))
    keys.append(key(b"nested", _ARRAY, U32(_ARRAY), U64(2), *(U32(_UINT8) + U64(2) + b"ab",) * 2))
    tensors, data = [], b""
    for name, shape, type_, content in (
        (b"q4_k", (512, rows), _Q4_K, rng.integers(0, 256, 2 * rows * 144, np.uint8).tobytes()),
        (b"f32", (33, 7), _F32, rng.standard_normal(231).astype("<f4").tobytes()),
        (b"f16", (1000,), 1, rng.standard_normal(1000).astype("<f2").tobytes()),
        (b"empty", (256, 0), _Q4_K, b""),
        (b"q8_k", (256, rows), 15, rng.integers(0, 256, rows * 292, np.uint8).tobytes()),
    ):
        tensors.append(tensor(name, shape, len(data), type_))
        data += content + bytes(-len(content) % 32)
    head = gguf(*keys, *tensors, keys=len(keys), tensors=len(tensors))
    return head + bytes(-len(head) % 32) + data


def good_safetensors() -> bytes:
    """Tensors of several types, about 100 kB."""
    rng = np.random.default_rng(6)
    header: dict[str, object] = {"__metadata__": {"made by": "a test"}}
    data = b""
    for name, dtype, shape, content in (
        ("weights", "U8", (200, 144), rng.integers(0, 256, 28800, np.uint8)),
        ("norm", "F32", (2048,), rng.standard_normal(2048).astype("<f4")),
        ("half", "F16", (40, 50), rng.standard_normal(2000).astype("<f2")),
        ("codes", "F4", (300, 256), rng.integers(0, 256, 300 * 128, np.uint8)),
        ("flags", "BOOL", (16,), rng.integers(0, 2, 16, np.uint8)),
        ("nothing", "I64", (0, 3), np.zeros(0, np.int64)),
    ):
        end = len(data) + content.nbytes
        header[name] = _entry(dtype, shape, (len(data), end))
        data += content.tobytes()
    return safetensors(header, data)
