"""The machine's own limits, measured beside the works by code that does nothing else."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from measure import Side, fastest

PIECES = 6
BYTES = 32 * 2**20  # of one piece: milliseconds, long beside starting a thread and short beside a time slice
STEPS = 2**18  # of eight multiply-adds: about half a millisecond
PREFETCH_BYTES = (0, 512, 1024, 2048, 4096, 8192, 16384)


def build(folder: Path) -> Path | None:
    """Compile ``limits.cpp`` for this CPU; None, with a message, where there is no working g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        print("the machine's limits are not measured: there is no g++", file=sys.stderr)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "limits.so"
    source = Path(__file__).with_suffix(".cpp")
    options = ("-std=c++17", "-O3", "-march=native", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")
    try:
        subprocess.run([compiler, *options, "-o", library, source], check=True)
    except subprocess.CalledProcessError:
        print("the machine's limits are not measured: limits.cpp does not compile here", file=sys.stderr)
        return None
    return library


class ReadLimit:
    """Reading memory from DRAM with the prefetch distance that is best here.

    Attributes:
        side: one call reads the next of `PIECES` pieces of `BYTES`.
        ahead: the prefetch distance, bytes.
    """

    def __init__(self, library: Path, threads: int, turn_seconds: float) -> None:
        function = ctypes.CDLL(str(library)).read_bytes
        function.restype = ctypes.c_uint64
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t]
        room = np.ones(PIECES * BYTES + 4096, np.uint8)  # written, so that every page exists
        self._room = room
        start = -(-room.ctypes.data // 4096) * 4096
        pieces = itertools.cycle(range(start, start + PIECES * BYTES, BYTES))
        size = BYTES // (256 * threads) * (256 * threads)
        sides = {
            str(ahead): Side(lambda ahead=ahead: function(next(pieces), size, threads, ahead))
            for ahead in PREFETCH_BYTES
        }
        best = fastest(sides, turn_seconds)
        self.side, self.ahead = sides[best], int(best)


class MultiplyAddLimit:
    """Multiplying and adding 8-bit integers in registers, in the widest vectors that `isa` has.

    Attributes:
        side: one call does `operations` of them, a product and its addition counted as two; None where there
            are no such vectors.
    """

    def __init__(self, library: Path, threads: int, isa: str) -> None:
        function = ctypes.CDLL(str(library)).multiply_add
        function.restype = ctypes.c_bool
        function.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        bits = 512 if isa.startswith("avx512") else 256
        self.operations = 2 * bits * STEPS * threads
        there = isa.startswith("avx") and function(2, threads, bits)
        self.side = Side(lambda: function(STEPS, threads, bits)) if there else None
