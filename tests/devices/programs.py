"""A process of test_sharding.py: python programs.py FOLDER; prints JSON.

Compiles a sharded GEMM with the persistent cache in FOLDER, and exports it there, or runs what is there already.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import exact
import hlo
import jax
import numpy as np
from jax import export
from jax.sharding import AxisType

import jaxquant as jq
from devices import layouts
from devices.layouts import call_shapes, collectives, put

P = jax.P
CHECKS = [export.DisabledSafetyCheck.custom_call(target) for target in jq.FFI_TARGETS]


def layer(w, values):
    gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))
    return gemm(w, jax.vmap(jq.quantize)(values))


def main(folder: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    hits = []
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if "cache_hits" in name else None
    )
    rng = np.random.default_rng(1)
    w = exact.random_q4k(rng, (16, 2))
    values = exact.blocks(rng, "gaussian", 16).reshape(8, 2, 256)
    want = exact.gemm(w, exact.quantize(values)).T

    report = {}
    for kind in ("auto", "explicit"):
        mesh = layouts.mesh("4x2", AxisType.Explicit if kind == "explicit" else AxisType.Auto)
        placed = put(w, mesh, P("a")), put(values, mesh, P("b"))
        hits.clear()
        same = exact.same_bits(np.asarray(jax.jit(layer)(*placed)), want)
        report[kind] = {"hits": len(hits), "same": same}

        file = folder / kind
        exported = file.exists()
        if not exported:
            file.write_bytes(export.export(jax.jit(layer), disabled_checks=CHECKS)(*placed).serialize())
        program = export.deserialize(bytearray(file.read_bytes()))
        compiled = jax.jit(program.call).lower(*placed).compile()
        result = compiled(*placed)
        report[kind] |= {
            "exported before": exported,
            "devices": program.nr_devices,
            "collectives": collectives(compiled.as_text()),
            "calls": call_shapes(compiled.as_text(), hlo.DOT),
            "exported same": exact.same_bits(np.asarray(result), want),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
