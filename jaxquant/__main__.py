"""``python -m jaxquant``: what runs here (info), whether its bits are right (selftest), and on a model (demo).

Exit codes: 0, 1 for wrong results, 2 for wrong arguments or no usable model, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxquant", description="Block-quantized numbers in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="print versions, devices, and which implementation runs where and why"
    )
    info.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("selftest", help="check every implementation on this machine, bit for bit")
    demo = commands.add_parser(
        "demo", help="multiply every Q4_K tensor of a model, checked and timed against ggml"
    )
    demo.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file (default: Gemma 3 270M from PyPI)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.command == "info":
            return _info(options.json)
        if options.command == "selftest":
            return _selftest()
        return _demo(options.model)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _selftest() -> int:
    from jaxquant import selftest

    return 1 if selftest.run() else 0


def _demo(model: Path | None) -> int:
    from jaxquant.examples import demo

    try:
        return 1 if demo.run(model or demo.model_path()) else 0
    except demo.ModelError as error:
        print(f"python -m jaxquant demo: {error}", file=sys.stderr)
        return 2


def _info(as_json: bool) -> int:
    facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(f"  {key}: {_text(entry)}")
        else:
            print(f"{name}: {_text(value)}")
    return 0


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def _facts() -> dict[str, Any]:
    import jax

    import jaxquant
    from jaxquant import selftest
    from jaxquant.examples.demo import cpu_threads

    status = jaxquant.status()
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("jaxquant", "jax", "jaxlib", "numpy", "ml_dtypes")},
        },
        "devices": [f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()],
        "cpu": _cpu_name(),
        "threads": cpu_threads(),
        "library": status.library,
        "problem": status.problem,
        "isa": status.isa,
        "supported_isas": list(status.supported_isas),
        "backend": status.backend,
        "lowering": {
            f"{operation} on {device.platform}": _lowering(operation, device)
            for device in selftest.devices()
            for operation in ("quantize", "quantized_dot")
        },
        "environment": {name: os.environ.get(name) for name in ("JAXQUANT_BACKEND", "JAXQUANT_ISA")},
    }


def _lowering(operation: str, device: Any) -> str:
    import jaxquant
    from jaxquant import selftest

    status = jaxquant.status()
    try:
        kind = selftest.lowering(operation, device)
    except NotImplementedError as error:
        return f"error: {error}"
    if kind == "native":
        return f"native: the kernels for {status.isa}" if device.platform == "cpu" else "native"
    if status.backend == "fallback":
        return "fallback: it is the selected backend"
    if device.platform == "cpu":
        return f"fallback: {status.problem}"
    return f"fallback: there are no kernels for {device.platform}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
