"""ggml's CPU kernels for Q4_K by ctypes, from the libraries in the PyPI wheel ``libggml-python``.

Only what a side-by-side comparison needs: the row quantizer, one dot product, and ``mul_mat`` with the
weights repacked for the CPU where ggml can, on threads that stay alive between calls.

Source: ``ggml.h``, ``ggml-backend.h`` and ``ggml-cpu.h`` of that wheel (``libggml/include``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import time
from collections.abc import Callable
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ggml", "MulMat", "race"]

_TYPE_F32, _TYPE_Q4_K = 0, 12
_USAGE_WEIGHTS = 1


_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENCE = _Log(lambda level, text, data: None)  # ggml reports every tensor it repacks


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


_BASE: dict[str, tuple[Any, ...]] = {  # name: result, arguments
    "ggml_version": (c_char_p,),
    "ggml_log_set": (None, _Log, c_void_p),
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_threadpool_params_default": (_ThreadpoolParams, c_int),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buffer_set_usage": (None, c_void_p, c_int),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
    "ggml_backend_get_device": (c_void_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "quantize_q4_K": (c_size_t, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "quantize_row_q8_K_ref": (None, c_void_p, c_void_p, c_int64),
}
_CPU: dict[str, tuple[Any, ...]] = {
    "ggml_cpu_init": (None,),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
    "ggml_threadpool_new": (c_void_p, ctypes.POINTER(_ThreadpoolParams)),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_threadpool_pause": (None, c_void_p),
    "ggml_vec_dot_q4_K_q8_K": (
        *(None, c_int, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_size_t, c_int),
    ),
}


def _declare(library: ctypes.CDLL, functions: dict[str, tuple[Any, ...]]) -> ctypes.CDLL:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Ggml:
    """The loaded libraries.

    Attributes:
        version: ggml's version.

    Raises:
        ImportError: ``libggml-python`` is not installed.

    Example:
        >>> import numpy as np
        >>> from jaxquant.examples.ggml import Ggml
        >>> Ggml().quantize(np.ones((1, 256), np.float32)).shape
        (1, 292)
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("libggml")
        if spec is None or spec.origin is None:
            raise ImportError("ggml is not installed: pip install libggml-python")
        folder = Path(spec.origin).parent / "lib64"
        self._base = _declare(ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL), _BASE)
        self._cpu = _declare(ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL), _CPU)
        self._base.ggml_log_set(_SILENCE, None)
        self._cpu.ggml_cpu_init()
        self.version: str = self._base.ggml_version().decode()

    def quantize(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """float32 [G, 256] to Q8_K records, uint8 [G, 292], by ``quantize_row_q8_K_ref``."""
        values = np.ascontiguousarray(x, np.float32)
        records = np.zeros((len(values), 292), np.uint8)  # zeroed: ggml leaves bsum of a zero block as it was
        self._base.quantize_row_q8_K_ref(values.ctypes.data, records.ctypes.data, values.size)
        return records

    def encode_q4_k(
        self, weights: NDArray[np.float32], importance: NDArray[np.float32] | None = None
    ) -> NDArray[np.uint8]:
        """float32 [M, K] to Q4_K records, uint8 [M, K / 256, 144], by ``quantize_q4_K``; importance is [K]."""
        values = np.ascontiguousarray(weights, np.float32)
        records = np.zeros((len(values), values.shape[1] // 256, 144), np.uint8)
        factors = None if importance is None else np.ascontiguousarray(importance, np.float32)
        address = None if factors is None else factors.ctypes.data
        self._base.quantize_q4_K(values.ctypes.data, records.ctypes.data, *values.shape, address)
        return records

    def dot(self, w: NDArray[np.uint8], x: NDArray[np.uint8]) -> np.float32:
        """uint8 [G, 144] and uint8 [G, 292] to float32, by ``ggml_vec_dot_q4_K_q8_K``."""
        w, x = np.ascontiguousarray(w), np.ascontiguousarray(x)
        result = np.zeros(1, np.float32)
        self._cpu.ggml_vec_dot_q4_K_q8_K(
            256 * len(w), result.ctypes.data, 0, w.ctypes.data, 0, x.ctypes.data, 0, 1
        )
        return np.float32(result[0])

    def mul_mat(self, w: NDArray[np.uint8], x: NDArray[np.float32], threads: int) -> MulMat:
        """A matrix product that can be run again and again; close it, or use it in ``with``.

        Args:
            w: uint8 [M, G, 144], Q4_K records.
            x: float32 [N, 256 * G]. ggml quantizes it in every run.
            threads: how many threads compute, this one included.
        """
        return MulMat(self, w, x, threads)


class MulMat:
    """``mul_mat`` of fixed operands; made by `Ggml.mul_mat`.

    Attributes:
        repacked: whether ggml stores the weights in its interleaved layout for this CPU.
    """

    def __init__(self, ggml: Ggml, w: NDArray[np.uint8], x: NDArray[np.float32], threads: int) -> None:
        base, cpu = ggml._base, ggml._cpu
        self._base, self._ggml_cpu = base, cpu
        M, G, _ = w.shape
        self._shape = (len(x), M)
        w, x = np.ascontiguousarray(w), np.ascontiguousarray(x, np.float32)

        self._backend = cpu.ggml_backend_cpu_init()
        pool = base.ggml_threadpool_params_default(threads)
        self._pool = cpu.ggml_threadpool_new(ctypes.byref(pool))
        cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        cpu.ggml_backend_cpu_set_threadpool(self._backend, self._pool)

        memory = _InitParams(8 * base.ggml_tensor_overhead() + base.ggml_graph_overhead(), None, True)
        device = base.ggml_backend_get_device(self._backend)
        plain = base.ggml_backend_cpu_buffer_type()
        for buffer_type in (*self._repacking_buffer_types(device), plain):
            self._weights, self._rest = base.ggml_init(memory), base.ggml_init(memory)
            weights = base.ggml_new_tensor_2d(self._weights, _TYPE_Q4_K, 256 * G, M)
            values = base.ggml_new_tensor_2d(self._rest, _TYPE_F32, 256 * G, len(x))
            self._product = base.ggml_mul_mat(self._rest, weights, values)
            self._buffers = [
                base.ggml_backend_alloc_ctx_tensors_from_buft(self._weights, buffer_type),
                base.ggml_backend_alloc_ctx_tensors_from_buft(self._rest, plain),
            ]
            # Not every shape can be repacked, and storing one that cannot ends the process.
            if base.ggml_backend_dev_supports_op(device, self._product):
                break
            self._free_tensors()
        self.repacked = buffer_type != plain
        base.ggml_backend_buffer_set_usage(self._buffers[0], _USAGE_WEIGHTS)
        base.ggml_backend_tensor_set(weights, w.ctypes.data, 0, w.nbytes)
        base.ggml_backend_tensor_set(values, x.ctypes.data, 0, x.nbytes)
        self._graph = base.ggml_new_graph(self._rest)
        base.ggml_build_forward_expand(self._graph, self._product)

    def _repacking_buffer_types(self, device: int) -> list[int]:
        registry = self._base.ggml_backend_dev_backend_reg(device)
        address = self._base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        types = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(device)
        found = []
        for buffer_type in types:  # ends with a null pointer
            if buffer_type is None:
                break
            if self._base.ggml_backend_buft_name(buffer_type) == b"CPU_REPACK":
                found.append(buffer_type)
        return found

    def run(self) -> None:
        """Compute the product. The threads go on polling for work until `rest`."""
        if self._base.ggml_backend_graph_compute(self._backend, self._graph):
            raise RuntimeError("ggml_backend_graph_compute failed")

    def rest(self) -> None:
        """Put the threads to sleep, so that they take no time from what runs next; `run` wakes them."""
        self._ggml_cpu.ggml_threadpool_pause(self._pool)

    def result(self) -> NDArray[np.float32]:
        """What the last run computed, float32 [N, M]."""
        result = np.empty(self._shape, np.float32)
        self._base.ggml_backend_tensor_get(self._product, result.ctypes.data, 0, result.nbytes)
        return result

    def close(self) -> None:
        """Free ggml's copies and threads; the object cannot be used afterwards."""
        self._free_tensors()
        self._base.ggml_backend_free(self._backend)
        self._ggml_cpu.ggml_threadpool_free(self._pool)

    def _free_tensors(self) -> None:
        for buffer in self._buffers:
            self._base.ggml_backend_buffer_free(buffer)
        self._base.ggml_free(self._weights)
        self._base.ggml_free(self._rest)

    def __enter__(self) -> MulMat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def race(
    ours: Callable[[], object], theirs: MulMat | None = None, rounds: int = 10, calls: int = 5
) -> tuple[float, float]:
    """Median seconds of a call of ``ours`` and of ``theirs.run``, measured in turns: A B B A A B B A ...

    Turns make drifting clocks and busy neighbours hit both sides alike. Each turn starts with a call that
    is not counted, in which a side wakes its threads and takes back the cache. Without ``theirs`` the
    second number is NaN.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * rounds):
        side = (turn + 1) // 2 % 2
        if side and theirs is None:
            continue
        run = theirs.run if side and theirs else ours
        run()
        for _ in range(calls):
            start = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - start)
        if theirs:
            theirs.rest()
    return float(np.median(seconds[0])), float(np.median(seconds[1])) if theirs else math.nan
