"""The native library: where it is, what of it runs here, and which implementation an operation uses."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import jax

__all__ = [
    "BACKENDS",
    "FFI_TARGETS",
    "Status",
    "force_isa",
    "selected_backend",
    "status",
    "supported_isas",
    "use_backend",
    "use_isa",
]

#: Names of the FFI targets, for ``jax.export``'s ``DisabledSafetyCheck.custom_call``.
FFI_TARGETS = (
    "jaxquant_quantize_v1",
    "jaxquant_quantized_dot_v1",
    "jaxquant_decode_blocks_v1",
    "jaxquant_encode_blocks_v1",
)

_CUDA_TARGETS = FFI_TARGETS[:2]

#: ``auto`` takes the native kernels where they exist, the others force one implementation.
BACKENDS = ("auto", "native", "fallback")


class Status(NamedTuple):
    """What the operations run on in this process.

    Attributes:
        library: path of the native library, or None.
        problem: why there is no native library, or None.
        isa: instruction set of the CPU kernels in use, or None.
        supported_isas: the instruction sets that this library and this CPU share, the best first.
        backend: the selected backend, one of `BACKENDS`.
        cpu: ``"native"`` or ``"fallback"``: what an operation traced now lowers to on CPU.
        cuda: the same for NVIDIA GPUs. Without the CUDA library it is the fallback on a machine that has such
            a GPU, and native elsewhere: a program exported there names the kernels of the machine it will run on.
        other_platforms: the same for every other platform.
        cuda_library: path of the CUDA library, or None.
        cuda_problem: why there is no CUDA library, or None.
    """

    library: str | None
    problem: str | None
    isa: str | None
    supported_isas: tuple[str, ...]
    backend: str
    cpu: str
    cuda: str
    other_platforms: str
    cuda_library: str | None
    cuda_problem: str | None


class _Library(NamedTuple):
    path: str | None
    handle: ctypes.CDLL | None
    problem: str | None


def _from_environment(name: str, default: str, accepted: tuple[str, ...]) -> str:
    value = os.environ.get(name) or default
    if value not in accepted:
        raise ValueError(f"environment variable {name} is {value!r}, wanted one of {', '.join(accepted)}")
    return value


@functools.cache
def _load() -> _Library:
    # The library counts as a submodule, so that wheels and editable installs are both found.
    spec = importlib.util.find_spec("jaxquant.libjaxquant")
    if spec is None or spec.origin is None:
        return _Library(
            None,
            None,
            f"jaxquant was imported from {os.path.dirname(os.path.dirname(__file__))}, a source tree without the "
            "compiled library. An installed jaxquant is found from any other directory; in this one, use "
            "`pip install --editable .`",
        )
    try:
        handle = ctypes.CDLL(spec.origin)
    except OSError as error:
        return _Library(spec.origin, None, str(error))
    handle.jaxquant_isa.restype = ctypes.c_char_p
    handle.jaxquant_supported_isa.restype = ctypes.c_char_p
    handle.jaxquant_supported_isa.argtypes = [ctypes.c_int]
    handle.jaxquant_force_isa.argtypes = [ctypes.c_char_p]
    for target in FFI_TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="cpu")
    return _Library(spec.origin, handle, None)


@functools.cache
def _load_cuda() -> _Library:
    spec = importlib.util.find_spec("jaxquant.libjaxquant_cuda")
    path = spec.origin if spec is not None else None
    for entry in metadata.entry_points(group="jaxquant.cuda") if path is None else ():
        path = entry.load()()
    if path is None:
        return _Library(
            None,
            None,
            "the CUDA kernels are not installed. Use `pip install jaxquant[cuda13]`, or from a checkout with nvcc "
            "`pip install . -C cmake.define.JAXQUANT_CUDA=ON`",
        )
    try:
        handle = ctypes.CDLL(path)
    except OSError as error:
        return _Library(path, None, str(error))
    for target in _CUDA_TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(handle, target)), platform="CUDA")
    return _Library(path, handle, None)


def _cuda_obstacle() -> str | None:
    """Why an operation cannot be lowered to the CUDA kernels, or None.

    Without an NVIDIA GPU here, the program is for another machine, and so need not find the library on this one.
    """
    problem = _load_cuda().problem
    return problem if problem is not None and _has_cuda_device() else None


def _has_plugins() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None


def _has_cuda_device() -> bool:
    if not _has_plugins():
        return False
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


@functools.cache
def _warn_of_missing_library(platform: str, problem: str) -> None:
    warnings.warn(
        f"jaxquant runs its slow fallback on {platform}: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )


def runs_native(backend: str, platform: str, operation: str) -> bool:
    """Whether ``operation``, bound with ``backend``, lowers to a native kernel on ``platform``."""
    if backend == "fallback":
        return False
    if platform == "cpu":
        problem = _load().problem
    elif platform == "cuda":
        problem = _cuda_obstacle()
    else:
        problem = "there is no kernel for this platform"
    if problem is None:
        return True
    if backend == "native":
        raise NotImplementedError(f"{operation}: backend 'native' was asked for, but {problem}")
    if platform in ("cpu", "cuda"):
        _warn_of_missing_library(platform.upper(), problem)
    return False


# A context that JAX counts into the key of its caches: a program traced under one backend serves no other.
_backend = jax.make_user_context(_from_environment("JAXQUANT_BACKEND", "auto", BACKENDS))


def selected_backend() -> str:
    """The backend of operations traced now, one of `BACKENDS`."""
    return str(_backend.value)


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Force the implementation of operations in the ``with`` block, on this thread.

    Jitted functions are traced anew under another backend. The environment variable ``JAXQUANT_BACKEND``
    sets the initial value.

    Args:
        backend: ``"auto"``, ``"native"`` (an error where there is no kernel) or ``"fallback"``.

    Raises:
        ValueError: for any other name.

    Example:
        >>> import jax.numpy as jnp, jaxquant as jq
        >>> with jq.use_backend("fallback"):
        ...     jq.quantize(jnp.ones((1, 256), jnp.float32)).shape
        (1, 292)
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, wanted one of {', '.join(BACKENDS)}")
    with _backend(backend):
        yield


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that the library and this CPU share, the best first; empty without a library."""
    handle = _load().handle
    names: list[str] = []
    while handle is not None and (name := handle.jaxquant_supported_isa(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def force_isa(isa: str) -> None:
    """Run the CPU kernels of ``isa`` from the next call on, compiled programs included.

    Raises:
        ValueError: if the library or this CPU does not have it.
    """
    handle = _load().handle
    if handle is None or handle.jaxquant_force_isa(isa.encode()):
        raise ValueError(f"instruction set {isa!r} is not to be had here; there are {supported_isas()}")


@contextlib.contextmanager
def use_isa(isa: str) -> Iterator[None]:
    """Run the CPU kernels of ``isa`` in the ``with`` block; process-wide, for tests and benchmarks."""
    handle = _load().handle
    before = handle.jaxquant_isa().decode() if handle is not None else ""
    force_isa(isa)
    try:
        yield
    finally:
        force_isa(before)


def status() -> Status:
    """What this process runs and why.

    Example:
        >>> import jaxquant as jq
        >>> jq.status().cpu in ("native", "fallback")
        True
    """
    library = _load()
    backend = selected_backend()
    cuda = _load_cuda()

    def lowers_to(obstacle: str | None) -> str:
        return "native" if obstacle is None and backend != "fallback" else "fallback"

    return Status(
        library.path,
        library.problem,
        library.handle.jaxquant_isa().decode() if library.handle is not None else None,
        supported_isas(),
        backend,
        lowers_to(library.problem),
        lowers_to(_cuda_obstacle()),
        "fallback",
        cuda.path,
        cuda.problem,
    )


# At import, so that serialized programs find the targets by name in a process that lowers nothing.
_load()
# Where JAX has no plugin there is no GPU to run them on, and looking for entry points takes milliseconds.
if _has_plugins():
    _load_cuda()
if isa := _from_environment("JAXQUANT_ISA", "", (*supported_isas(), "")):
    force_isa(isa)
