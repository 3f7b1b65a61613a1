"""The array types over meshes of virtual devices, against the same arrays on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxquant as jq
from devices import layouts
from devices.layouts import collectives
from jaxquant import DType

P = jax.P
FORMATS = [DType.MXFP6_E2M3, DType.MXINT8, DType.NVFP4]  # one of each kind of kernel
NAMES = [str(dtype.name) for dtype in FORMATS]


def values(rng, *shape):
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(np.float32)


def same(got, want):
    """Whether two arrays of a type have equal leaves, bit for bit."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def spread(array, mesh, spec):
    """Leaves that have an axis for the spec are split along it, the others replicated."""

    def place(leaf):
        axes = [axis if axis is not None and extent > 1 else None for axis, extent in zip(spec, leaf.shape)]  # noqa: B905
        return jax.device_put(leaf, jax.NamedSharding(mesh, P(*axes)))

    return jax.tree.map(place, array)


@pytest.fixture(scope="module")
def mesh():
    return layouts.mesh("8")


@pytest.mark.parametrize("format", FORMATS, ids=NAMES)
class TestBlockScaled:
    @pytest.fixture
    def array(self, rng, format):
        return jq.quantize_blocks(jnp.asarray(values(rng, 16, 64)), format)

    def test_decodes_where_it_lies(self, mesh, array):
        placed = spread(array, mesh, P("a"))
        compiled = jax.jit(lambda a: a.dequantize()).lower(placed).compile()
        assert collectives(compiled.as_text()) == []
        got = compiled(placed)
        assert got.sharding.spec[0] == "a"
        same(got, array.dequantize())

    def test_inside_shard_map(self, mesh, array):
        specs = jax.tree.map(lambda leaf: P("a") if leaf.shape[0] > 1 else P(), array)
        f = jax.shard_map(lambda a: a.dequantize(), mesh=mesh, in_specs=(specs,), out_specs=P("a"))
        same(jax.jit(f)(array), array.dequantize())

    def test_product_of_split_weights(self, rng, mesh, array):
        """The contraction is local to a device."""
        x = values(rng, 4, 64)
        weights = jq.quantize_blocks(jnp.asarray(values(rng, 64, 16)), array.format, axis=0)
        placed = spread(weights, mesh, P(None, "a"))
        compiled = jax.jit(lambda w, x: jq.block_dot(x, w)).lower(placed, x).compile()
        assert collectives(compiled.as_text()) == []
        error = np.abs(np.asarray(compiled(placed, x)) - np.asarray(jq.block_dot(x, weights)))
        # XLA's own dot may sum narrower operands in another order.
        assert (error <= 1e-6 * (np.abs(x) @ np.abs(np.asarray(weights.dequantize())))).all()

    def test_made_where_the_values_lie(self, rng, mesh, format):
        x = values(rng, 16, 64)
        placed = jax.device_put(x, jax.NamedSharding(mesh, P("a")))
        compiled = jax.jit(lambda x: jq.quantize_blocks(x, format)).lower(placed).compile()
        # The tensor scale of NVFP4 is the largest magnitude of all devices' values.
        kinds = {kind for kind, _ in collectives(compiled.as_text())}
        assert kinds == ({"all-reduce"} if format is DType.NVFP4 else set())
        same(compiled(placed), jq.quantize_blocks(jnp.asarray(x), format))


def test_scan_over_stacked_block_scaled_layers(rng, mesh):
    array = jq.quantize_blocks(jnp.asarray(values(rng, 3, 16, 64)), DType.MXFP4)
    placed = spread(array, mesh, P(None, "a"))

    def layers(array):
        return lax.scan(lambda carry, layer: (carry, layer.dequantize()), 0, array)[1]

    compiled = jax.jit(layers).lower(placed).compile()
    assert collectives(compiled.as_text()) == []
    same(compiled(placed), array.dequantize())


@pytest.mark.parametrize("dtype", ["E2M1", "E3M2", "Bool"])
class TestNarrow:
    @pytest.fixture
    def array(self, rng, dtype):
        codes = rng.integers(0, 2 if dtype == "Bool" else 16, (16, 64), np.uint8)
        return jq.NarrowArray.from_codes(jnp.asarray(codes), DType.from_name(dtype))

    def test_unpacks_where_it_lies(self, mesh, array):
        placed = spread(array, mesh, P("a"))
        compiled = jax.jit(lambda a: a.codes()).lower(placed).compile()
        assert collectives(compiled.as_text()) == []
        got = compiled(placed)
        assert got.sharding.spec[0] == "a"
        same(got, array.codes())

    def test_packed_axis_over_devices(self, mesh, array):
        """Whole bytes' worth of values per device unpack alone, too."""
        mesh = layouts.mesh("2")
        f = jax.shard_map(lambda a: a.codes(), mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
        same(jax.jit(f)(array), array.codes())

    def test_packs_where_the_codes_lie(self, mesh, array, dtype):
        codes = jax.device_put(array.codes(), jax.NamedSharding(mesh, P("a")))
        pack = lambda codes: jq.NarrowArray.from_codes(codes, DType.from_name(dtype))  # noqa: E731
        compiled = jax.jit(pack).lower(codes).compile()
        assert collectives(compiled.as_text()) == []
        same(compiled(codes), array)


class TestSwizzled:
    @pytest.fixture
    def scales(self, rng):
        return jnp.asarray(rng.integers(0, 256, (8, 256, 8), np.uint8))

    def test_batches_unswizzle_where_they_lie(self, mesh, scales):
        array = jq.f8_4x128(scales)
        placed = spread(array, mesh, P("a"))
        compiled = jax.jit(lambda a: a.unswizzle()).lower(placed).compile()
        assert collectives(compiled.as_text()) == []
        got = compiled(placed)
        assert got.sharding.spec[0] == "a"
        same(got, scales)

    def test_batches_swizzle_where_they_lie(self, mesh, scales):
        placed = jax.device_put(scales, jax.NamedSharding(mesh, P("a")))
        compiled = jax.jit(jq.f8_4x128).lower(placed).compile()
        assert collectives(compiled.as_text()) == []
        same(compiled(placed), jq.f8_4x128(scales))


def test_device_put_takes_whole_arrays(rng, mesh):
    """One sharding for all planes, as for any pytree."""
    array = jq.quantize_blocks(jnp.asarray(values(rng, 16, 64)), DType.MXFP4)
    placed = jax.device_put(array, jax.NamedSharding(mesh, P("a")))
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == [P("a")] * 2
    same(placed.dequantize(), array.dequantize())
