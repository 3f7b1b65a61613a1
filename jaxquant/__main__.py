"""``python -m jaxquant``, or ``jaxquant``: the command line.

``info`` says what runs here, ``selftest`` whether its bits are right, ``inspect`` what is in a file of weights;
``convert`` changes its format, ``bench`` measures, and ``demo`` runs a model.

Exit codes: 0; 1 for wrong results, or something illegal in a file; 2 for wrong arguments, or a file or model that
cannot be used; 130 when interrupted, 141 when the reader of the output has gone.
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

_FORMATS = ("MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E3M2", "MXFP6_E2M3", "MXFP4", "MXINT8", "NVFP4")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code = _run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _parser() -> argparse.ArgumentParser:
    name = "jaxquant" if Path(sys.argv[0]).name == "jaxquant" else "python -m jaxquant"
    parser = argparse.ArgumentParser(prog=name, description="Block-quantized numbers in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    json_option = argparse.ArgumentParser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser(
        "info",
        parents=[json_option],
        help="print versions, devices, and which implementation runs where and why",
    )
    commands.add_parser("selftest", help="check every implementation on this machine, bit for bit")
    inspect = commands.add_parser(
        "inspect",
        parents=[json_option],
        help="list the tensors of a GGUF or safetensors file, and what is illegal in it",
        description="List the tensors of a GGUF or safetensors file: types, shapes, bits per weight, totals per "
        "type, and illegal records or blocks. Exit code 1 if there are any.",
    )
    inspect.add_argument("file", type=Path, metavar="FILE")
    inspect.add_argument(
        "--plot",
        type=Path,
        metavar="OUT.png",
        help="measure what each matrix would lose in MXFP8, MXFP6, MXFP4 and NVFP4 (on a sample of its rows), and "
        "draw it with error bars",
    )
    convert = commands.add_parser(
        "convert",
        parents=[json_option],
        help="convert the matrices of a file to MXFP8, MXFP6, MXFP4, MXINT8 or NVFP4",
        description="Convert the matrices of a safetensors or GGUF file, Q4_K and other GGUF types included, to a "
        "block-scaled format, with blocks along the rows, as quantize_blocks does. Other tensors are copied; GGUF "
        "types that safetensors does not have become float32. PATTERN is a name, or has *, ? and [...].",
    )
    convert.add_argument("source", type=Path, metavar="SRC")
    convert.add_argument(
        "target", type=Path, metavar="DST", help="a safetensors file, replaced if it is there"
    )
    convert.add_argument(
        "--to", required=True, type=str.upper, choices=_FORMATS, metavar="FORMAT", help=", ".join(_FORMATS)
    )
    convert.add_argument(
        "--tensor", action="append", default=[], metavar="PATTERN", help="only these tensors"
    )
    convert.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="copy these")
    commands.add_parser("bench", parents=[json_option], help="measure the operations for a few seconds")
    demo = commands.add_parser(
        "demo", help="multiply every Q4_K tensor of a model, checked and timed against ggml"
    )
    demo.add_argument(
        "--model", type=Path, metavar="PATH", help="a GGUF file (default: Gemma 3 270M from PyPI)"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.command == "info":
        return _info(options.json)
    if options.command == "selftest":
        return _selftest()
    if options.command == "demo":
        return _demo(options.model)
    if options.command == "bench":
        from jaxquant import cli_bench

        return cli_bench.run(options.json)
    return _on_file(options)


def _on_file(options: argparse.Namespace) -> int:
    from jaxquant import cli_convert, cli_inspect
    from jaxquant.cli_files import CommandError

    try:
        if options.command == "inspect":
            return cli_inspect.run(options.file, options.json, options.plot)
        return cli_convert.run(
            options.source, options.target, options.to, options.tensor, options.keep, options.json
        )
    except CommandError as error:
        print(f"jaxquant {options.command}: {error}", file=sys.stderr)
        return 2


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
