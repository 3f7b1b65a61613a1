"""The CUDA kernels on a simulated multiprocessor: builds simulate.cpp and calls it on NumPy arrays.

The kernels of ``ffi/cuda`` reach the machine only through ``device.h``. Here g++ compiles them over
simulation.h, which runs blocks of threads as fibers and checks every access. Needs NumPy and g++ (or what
CXX names), nothing of CUDA or JAX.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
FFI = HERE.parent.parent / "ffi"

KERNELS = ("bytes", "dot1", "dot2", "dot4", "narrow8", "narrow16", "wide64", "wide192")
MISTAKES = {
    0: "race: shared memory touched that another thread just wrote",
    1: "race: shared memory touched that another thread just wrote",
    2: "race: shared memory written that another thread just read",
    3: "not aligned",
    4: "outside the operands",
    5: "threads wait for each other",
    6: "race: shared memory written that another thread just read",
    7: "outside the shared memory",
}
NO_MISTAKE = 8


class SimulationError(Exception):
    """What the simulated machine found wrong with a kernel."""


class Device:
    """A multiprocessor to run kernels on; ``order`` is 0, 1 for the reverse, or a seed to shuffle threads by."""

    def __init__(self, library: ctypes.CDLL, order: int = 0) -> None:
        self.library = library
        self.order = order
        library.simulation_error.restype = ctypes.c_char_p

    def _check(self, failed: int) -> None:
        if failed:
            raise SimulationError(self.library.simulation_error().decode())

    def quantize(self, values: np.ndarray, *, by_bytes: bool = False) -> np.ndarray:
        """``values`` f32 [G, 256] to u8 [G, 292]."""
        out = aligned(np.full((len(values), 292), 0xA5, np.uint8), 4)
        self._check(
            self.library.simulate_quantize(
                _address(values), ctypes.c_int64(len(values)), _address(out), int(by_bytes), self.order
            )
        )
        return out

    def dot(
        self,
        w: np.ndarray,
        x: np.ndarray,
        w_dims: tuple[int, ...],
        x_dims: tuple[int, ...],
        *,
        kernel: str | None = None,
        capability: int = 90,
        processors: int = 132,
        shared_bytes: int = 227 << 10,
    ) -> tuple[np.ndarray, str]:
        """The result, and the kernel: the one that is named, or that the device would choose."""
        extents = dict(zip(w_dims, w.shape, strict=False)) | dict(zip(x_dims, x.shape, strict=False))
        shape = tuple(extents[i] for i in range(len(extents) - 1))
        out = np.full(shape, np.uint32(0xA5A5A5A5).view(np.float32), np.float32)
        chosen = ctypes.c_int(-1 if kernel is None else KERNELS.index(kernel))
        operands = []
        for array, dims in ((w, w_dims), (x, x_dims)):
            operands += [_address(array), _extents(array.shape), array.ndim, _extents(dims)]
        self._check(
            self.library.simulate_dot(
                ctypes.byref(chosen),
                capability,
                processors,
                shared_bytes,
                *operands,
                _address(out),
                _extents(shape),
                len(shape),
                self.order,
            )
        )
        return out, KERNELS[chosen.value]

    def gemm(self, w: np.ndarray, x: np.ndarray, **options) -> tuple[np.ndarray, str]:
        """``w`` u8 [M, G, 144], ``x`` u8 [N, G, 292] to f32 [M, N], and the kernel."""
        return self.dot(w, x, (0, -1), (1, -1), **options)

    def mistake(self, which: int) -> None:
        self._check(self.library.simulate_mistake(which))


def build(folder: Path) -> ctypes.CDLL:
    """Compile the simulation into ``folder`` and load it."""
    library = folder / "simulation.so"
    options = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Werror",
    ]
    include = [f"-I{path}" for path in (FFI, FFI / "cuda", HERE)]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, *options, *include, HERE / "simulate.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library))


def aligned(array: np.ndarray, to: int, off: int = 0) -> np.ndarray:
    """A copy of ``array`` that begins ``off`` bytes past a multiple of ``to``."""
    memory = np.empty(array.nbytes + to + off, np.uint8)
    start = -memory.ctypes.data % to + off
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _address(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def _extents(values: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)
