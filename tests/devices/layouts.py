"""Meshes of virtual devices, and what a compiled program does on each."""

from __future__ import annotations

import re

import hlo
import jax
from jax.sharding import AxisType

MESHES = {
    "1": ((1,), ("a",)),
    "2": ((2,), ("a",)),
    "8": ((8,), ("a",)),
    "4x2": ((4, 2), ("a", "b")),
    "2x4": ((2, 4), ("a", "b")),
}


def mesh(name: str, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    shape, axes = MESHES[name]
    count = 1
    for extent in shape:
        count *= extent
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=jax.devices()[:count])


def put(value, mesh: jax.sharding.Mesh, spec: jax.P):
    return jax.device_put(value, jax.NamedSharding(mesh, spec))


_COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"


def collectives(text: str) -> list[tuple[str, str]]:
    """Kind and result type of every operation between devices, asynchronous ones once."""
    found = re.findall(rf"= (.*?) ({_COLLECTIVES})(?:-start)?\(", text)
    return [(kind, made) for made, kind in found]


def call_shapes(text: str, target: str) -> list[tuple[int, ...]]:
    """The result shapes of the calls of a target, on one device."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* custom-call\([^\n]*custom_call_target=\"(\w+)\"", text)
    return [tuple(map(int, shape.split(","))) if shape else () for shape, name in found if name == target]


def parameters(text: str) -> list[tuple[int, ...]]:
    """The shapes of the program's arguments, on one device."""
    entry = text[text.index("ENTRY") :]
    found = re.findall(r"= \w+\[([\d,]*)\]\S* parameter\((\d+)\)", entry)
    ordered = sorted(found, key=lambda parameter: int(parameter[1]))
    return [tuple(map(int, shape.split(","))) if shape else () for shape, _ in ordered]


def local(shape, spec: jax.P, mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The shape of one device's part."""
    return jax.NamedSharding(mesh, spec).shard_shape(tuple(shape))


__all__ = ["MESHES", "call_shapes", "collectives", "hlo", "local", "mesh", "parameters", "put"]
