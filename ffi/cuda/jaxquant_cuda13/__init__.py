"""The CUDA kernels of jaxquant, which finds them by the entry point group ``jaxquant.cuda``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["library"]


def library() -> str:
    """Path of the shared library."""
    return str(Path(__file__).parent / "libjaxquant_cuda.so")
