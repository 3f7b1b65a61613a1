"""One of the processes of test_distributed.py: python worker.py PROCESS PORT MODEL TENSOR BIG; prints JSON.

Each process has four virtual CPU devices of eight in all. MODEL is a GGUF file with a Q4_K tensor TENSOR, whose
rows are spread over all devices; BIG is a large one with a tensor ``w``, or empty.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import exact
import hlo
import jax
import numpy as np

import jaxquant as jq
from devices.layouts import call_shapes, collectives

P = jax.P
gemm = jax.vmap(jax.vmap(jq.quantized_dot, (0, None)), (None, 0))


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def product(path: str, tensor: str, mesh: jax.sharding.Mesh, rows: str, columns: str | None) -> dict:
    """The GEMM of a tensor whose rows lie over a mesh axis, and how this process's part of it came about."""
    rng = np.random.default_rng(3)
    with jq.gguf.open(path) as file:
        weights = file.device_records(tensor, jax.NamedSharding(mesh, P(rows)))
        every_row = np.array(file.records(tensor))
    values = rng.standard_normal((8, weights.shape[1], 256), np.float32)
    placed = jax.make_array_from_callback(
        values.shape, jax.NamedSharding(mesh, P(columns)), lambda index: values[index]
    )
    f = jax.jit(lambda w, x: gemm(w, jax.vmap(jq.quantize)(x)))
    compiled = f.lower(weights, placed).compile()
    result = compiled(weights, placed)
    want = exact.gemm(every_row, exact.quantize(values)).T
    return {
        "collectives": collectives(compiled.as_text()),
        "calls": call_shapes(compiled.as_text(), hlo.DOT),
        "spec": list(result.sharding.spec),
        "shards": len(result.addressable_shards),
        "same": all(exact.same_bits(np.asarray(s.data), want[s.index]) for s in result.addressable_shards),
        "finite": bool(np.isfinite(want).any()),
    }


def load(path: str, mesh: jax.sharding.Mesh) -> dict:
    """Peak memory that loading this process's rows adds, over the bytes of these rows."""
    with jq.gguf.open(path) as file:
        before = peak_bytes()
        weights = file.device_records("w", jax.NamedSharding(mesh, P("rows")))
        jax.block_until_ready(weights)
        added = peak_bytes() - before
        held = sum(shard.data.nbytes for shard in weights.addressable_shards)
        view = file.records("w")
        same = all(
            np.array_equal(np.asarray(s.data)[-1], view[s.index][-1]) for s in weights.addressable_shards
        )
    return {"held": held, "added": added, "same": same}


def main(process: str, port: str, model: str, tensor: str, big: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=40)
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    report = {
        "rows": product(model, tensor, jax.make_mesh((8,), ("rows",)), "rows", None),
        "rows and columns": product(
            model, tensor, jax.make_mesh((4, 2), ("rows", "columns")), "rows", "columns"
        ),
    }
    if big:
        report["load"] = load(big, jax.make_mesh((8,), ("rows",)))
    print(json.dumps(report))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
