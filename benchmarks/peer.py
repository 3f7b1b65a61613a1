"""ggml as the peer: the package's wrapper, plus weights that rotate over copies and quantizing into given memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxquant.examples import ggml


class Peer(ggml.Ggml):
    """The libraries of the PyPI wheel, or of another build in `folder`.

    A build with OpenMP keeps its threads busy after each product, which slows whoever comes next down:
    build with ``-DGGML_OPENMP=OFF``, as the wheel is.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            super().__init__()
            return
        base, cpu = (
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu")
        )
        self._base, self._cpu = ggml._declare(base, ggml._BASE), ggml._declare(cpu, ggml._CPU)
        self._base.ggml_log_set(ggml._SILENCE, None)
        self._cpu.ggml_cpu_init()
        self.version = self._base.ggml_version().decode()

    def quantizer(
        self, x: NDArray[np.float32], records: NDArray[np.uint8], threads: int
    ) -> Callable[[], object]:
        """``quantize_row_q8_K_ref`` of float32 [G, 256] into uint8 [G, 292], the rows dealt to `threads` threads."""
        function = self._base.quantize_row_q8_K_ref
        return _on_threads([(function, *part) for part in _parts(x, records, threads)])

    def four_row_quantizer(
        self, x: NDArray[np.float32], records: NDArray[np.uint8], threads: int
    ) -> Callable[[], object] | None:
        """The same of four rows at once, in the interleaved layout of ggml's products; None if not in this build."""
        try:
            function = self._cpu.ggml_quantize_mat_q8_K_4x8
        except AttributeError:
            return None
        function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        parts = _parts(x, records, threads)
        return _on_threads([(function, *pointers, size // 4) for *pointers, size in parts])


def _parts(
    x: NDArray[np.float32], records: NDArray[np.uint8], threads: int
) -> Iterator[tuple[int, int, int]]:
    """Pointer to floats, pointer to records, number of floats; a multiple of four rows each."""
    fours = (np.array_split(array.reshape(-1, 4, array.shape[-1]), threads) for array in (x, records))
    for floats, out in zip(*fours, strict=True):
        # These pointers keep their arrays alive.
        yield *(array.ctypes.data_as(ctypes.c_void_p) for array in (floats, out)), floats.size


def _on_threads(calls: list[tuple[Any, ...]]) -> Callable[[], object]:
    mine, *rest = [functools.partial(*call) for call in calls]
    if not rest:
        return mine
    helpers = ThreadPoolExecutor(len(rest))

    def run() -> None:
        others = [helpers.submit(call) for call in rest]
        mine()
        for other in others:
            other.result()

    return run


class Products:
    """The same product on several copies of its operands, one after the other, on one set of threads."""

    def __init__(
        self, peer: Peer, w: NDArray[np.uint8], x: NDArray[np.float32], threads: int, copies: int
    ) -> None:
        self._products = [peer.mul_mat(w, x, threads) for _ in range(copies)]
        first = self._products[0]
        for product in self._products[1:]:
            # Threads of its own would go on polling for work while those of the next copy compute.
            peer._cpu.ggml_backend_cpu_set_threadpool(product._backend, first._pool)
        self._turns = itertools.cycle(self._products)
        self.repacked = first.repacked
        self.rest = first.rest
        self.result = first.result

    def run(self) -> None:
        next(self._turns).run()

    def close(self) -> None:
        for product in reversed(self._products):  # the threads of the first serve all
            product.close()
