"""What a compiled program holds, read from its optimized HLO."""

from __future__ import annotations

import re

import jax

QUANTIZE, DOT = "jaxquant_quantize_v1", "jaxquant_quantized_dot_v1"


def compiled(function, *args) -> str:
    return jax.jit(function).lower(*args).compile().as_text()


def calls(text: str) -> list[str]:
    """Targets of the custom calls."""
    return re.findall(r'custom_call_target="([^"]+)"', text)


def byte_operations(text: str) -> set[str]:
    """The operations that make an array of uint8; a call's operands are among them."""
    return set(re.findall(r"= u8\[[^ ]* ([\w-]+)\(", text))
