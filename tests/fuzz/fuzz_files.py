#!/usr/bin/env python3
"""Mutated GGUF and safetensors files, and arbitrary bytes as records: an answer or the documented error.

    python tests/fuzz/fuzz_files.py SECONDS [--seed N]

Mutations know the formats: they overwrite lengths, counts, types and offsets with telling numbers, cut, repeat and
swap pieces, and flip bits. Every file is opened and all of it read, with 1 GiB to spare. Records of any
bytes are unpacked, packed, dequantized, explained and validated, and compared with tests/exact.py.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import exact
import hostile

import jaxquant as jq
from jaxquant import gguf, io

TELLING = [
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    12,
    31,
    32,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**48,
    2**61,
]
TELLING += [2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def mutated(rng: np.random.Generator, content: bytes, header: int) -> bytes:
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 6))):
        # Mostly in the header, where a byte says something about others.
        at = int(rng.integers(0, min(header, len(data)) if rng.random() < 0.8 else len(data)))
        match rng.integers(0, 7):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at] = int(rng.integers(0, 256))
            case 2:
                width = int(rng.choice([4, 8]))
                number = TELLING[int(rng.integers(len(TELLING)))] % (1 << (8 * width))
                data[at : at + width] = number.to_bytes(width, "little")
            case 3:
                del data[at : at + int(rng.integers(1, 64))]
            case 4:
                piece = data[at : at + int(rng.integers(1, 64))]
                data[at:at] = piece * int(rng.integers(1, 4))
            case 5:
                other = int(rng.integers(0, len(data)))
                data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
            case _:
                digits = str(TELLING[int(rng.integers(len(TELLING)))]).encode()
                data[at : at + int(rng.integers(0, 4))] = digits if rng.random() < 0.5 else b'"{}[],:-e'
        if not data:
            data = bytearray(b"\0")
        if rng.random() < 0.02:
            del data[at:]
            data += b"\0"
    return bytes(data)


def read_gguf(path: Path) -> None:
    with gguf.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        for info in file.tensors.values():
            assert file.raw(info.name).nbytes == info.nbytes
            assert file.array(info.name).shape == info.shape


def read_safetensors(path: Path) -> None:
    with io.open(path) as file:
        for name in file.names:
            file.array(name)
        for name, tensor in file.tensors.items():
            assert tuple(file[name].shape) == tuple(tensor.shape)


def fuzz_records(rng: np.random.Generator) -> None:
    """Any bytes at all, with runs of equal ones more often than chance."""
    count = int(rng.integers(1, 5))
    for fmt, decode in ((jq.quant.q4_k, exact.decode_q4k), (jq.quant.q8_k, exact.decode_q8k)):
        r = rng.integers(0, 256, (count, fmt.record_bytes), np.uint8)
        if rng.random() < 0.5:
            first, last = sorted(rng.integers(0, fmt.record_bytes, 2))
            r[:, first:last] = rng.choice(np.uint8([0, 127, 128, 255]))
        fields = jq.records.unpack(r, fmt)
        for ours, want in zip(fields, decode(r), strict=True):
            assert (
                np.asarray(ours).tobytes() == np.asarray(want).astype(np.asarray(ours).dtype).tobytes()
                or np.isnan(want).any()
            )
        assert jq.records.pack(fields, fmt).tobytes() == r.tobytes()
        want = exact.dequantize_q4k(r) if fmt is jq.quant.q4_k else exact.dequantize_q8k(r)
        assert exact.same_bits(jq.records.dequantize(r, fmt), want)
        try:
            jq.validate_records(r, fmt)
        except ValueError as error:
            legal = not str(error).startswith("r[")
        else:
            legal = True
        finite = all(
            np.isfinite(np.asarray(f, np.float32)).all() for f in fields if np.asarray(f).dtype.kind == "f"
        )
        sums = (
            fmt is jq.quant.q4_k
            or (fields.bsum == fields.q.reshape(-1, 16, 16).sum(-1, dtype=np.int32)).all()
        )
        assert legal == (finite and bool(sums))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=None, help="of the mutations (drawn anew)")
    options = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
    rng = np.random.default_rng(seed)
    targets = {
        "gguf": (
            [*[hostile.good_gguf(2)] * 3, *(h.content for h in hostile.GGUF.values())],
            read_gguf,
        ),
        "safetensors": (
            [hostile.good_safetensors()] * 3
            + [h.content for h in hostile.SAFETENSORS.values() if len(h.content) < 4096],
            read_safetensors,
        ),
    }
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    counts = dict.fromkeys(
        ("gguf read", "gguf refused", "safetensors read", "safetensors refused", "records"), 0
    )
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory) / "file"
        while time.monotonic() < end:
            for name, (corpus, read) in targets.items():
                # Half of the time a whole small file, else one that is already hostile.
                original = corpus[0] if rng.random() < 0.5 else corpus[int(rng.integers(len(corpus)))]
                content = mutated(rng, original, min(len(original), 4096))
                path.write_bytes(content)
                try:
                    read(path)
                    counts[f"{name} read"] += 1
                except (gguf.GGUFError, io.SafetensorsError, NotImplementedError):
                    counts[f"{name} refused"] += 1
                except BaseException:
                    found = Path(tempfile.gettempdir()) / f"jaxquant-fuzz-{name}-{seed}"
                    found.write_bytes(content)
                    print(f"seed {seed}: {name} file kept as {found}")
                    raise
            fuzz_records(rng)
            counts["records"] += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(
        ", ".join(f"{count} {name}" for name, count in counts.items()),
        f"seed {seed}, peak {peak} MiB",
        sep=", ",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
