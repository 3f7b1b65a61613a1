"""Random walks over the array types beside a plain NumPy model of codes and scales."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxquant as jq
from jaxquant.dtypes import DType

WIDTHS = {1: DType.Bool, 4: DType.E2M1, 6: DType.E2M3, 8: DType.Int8}
# Values per chunk of whole bytes.
CHUNK = {1: 8, 4: 2, 6: 4, 8: 1}
SETTINGS = hypothesis.settings(max_examples=15, stateful_step_count=8, deadline=None, derandomize=True)


def bits_of(codes: np.ndarray, width: int) -> np.ndarray:
    """The bit stream along the last axis, element 0 in the lowest bits: written bit by bit."""
    stream = (codes[..., None] >> np.arange(width, dtype=np.uint8)) & 1
    return stream.reshape(*codes.shape[:-1], -1)


def codes_of(bits: np.ndarray, width: int) -> np.ndarray:
    grouped = bits.reshape(*bits.shape[:-1], -1, width).astype(np.int64)
    return (grouped << np.arange(width)).sum(axis=-1).astype(np.uint8)


class NarrowMachine(RuleBasedStateMachine):
    """A NarrowArray, and the codes that it holds with its packed axis moved to the end."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        width=st.sampled_from(sorted(WIDTHS)),
        rows=st.integers(1, 3),
        chunks=st.integers(1, 2),
        axis=st.sampled_from([-1, -2]),
        on_jax=st.booleans(),
    )
    def make(self, seed, width, rows, chunks, axis, on_jax):
        self.rng = np.random.default_rng(seed)
        self.width, self.axis, self.xp = width, axis, jnp if on_jax else np
        self.model = self.rng.integers(0, 1 << width, (rows, 24 * chunks), np.uint8)
        # Bits above the width are no part of a code.
        stray = self.rng.integers(0, 256, self.model.shape, np.uint8) << width if width < 8 else np.uint8(0)
        self.array = jq.NarrowArray.from_codes(
            self.placed((self.model | stray).astype(np.uint8)), WIDTHS[width], axis
        )

    def placed(self, codes):
        return self.xp.asarray(np.moveaxis(codes, -1, self.axis))

    @rule()
    def other_library(self):
        self.xp = np if self.xp is jnp else jnp
        self.array = jax.tree.map(lambda leaf: self.xp.asarray(np.asarray(leaf)), self.array)

    @rule(width=st.sampled_from(sorted(WIDTHS)))
    def bitcast(self, width):
        bits = bits_of(self.model, self.width)
        if bits.shape[-1] % (width * CHUNK[width]):
            try:
                self.array.bitcast(WIDTHS[width])
            except ValueError:
                return
            raise AssertionError(f"{self.array!r} has no whole number of {WIDTHS[width]}")
        self.array, self.model, self.width = self.array.bitcast(WIDTHS[width]), codes_of(bits, width), width

    @rule(data=st.data())
    def slice_rows(self, data):
        start = data.draw(st.integers(0, self.model.shape[0] - 1))
        stop = data.draw(st.integers(start + 1, self.model.shape[0]))
        self.model = self.model[start:stop]
        bytes_ = self.array.data[start:stop] if self.axis == -1 else self.array.data[:, start:stop]
        self.array = jq.NarrowArray(bytes_, WIDTHS[self.width], self.axis)

    @precondition(lambda self: self.model.size < 400)
    @rule()
    def append(self):
        """More values along the packed axis: bytes joined are values joined."""
        more = self.rng.integers(0, 1 << self.width, self.model.shape, np.uint8)
        other = jq.NarrowArray.from_codes(self.placed(more), WIDTHS[self.width], self.axis)
        data = self.xp.concatenate([self.array.data, other.data], axis=self.axis)
        self.array = jq.NarrowArray(data, WIDTHS[self.width], self.axis)
        self.model = np.concatenate([self.model, more], axis=-1)

    @rule()
    def repack_along_the_other_axis(self):
        rows = self.model.shape[0]
        if rows % CHUNK[self.width]:
            return
        self.array = jq.NarrowArray.from_codes(self.array.codes(), WIDTHS[self.width], -3 - self.axis)
        self.axis, self.model = -3 - self.axis, np.moveaxis(self.model, -1, 0)

    @rule(data=st.data())
    def index(self, data):
        dense = np.asarray(self.array.unpack())
        row = data.draw(st.integers(-dense.shape[0], dense.shape[0] - 1))
        start = data.draw(st.integers(0, dense.shape[1]))
        np.testing.assert_array_equal(np.asarray(self.array[row, start:]), dense[row, start:])

    @invariant()
    def holds_the_codes(self):
        if not hasattr(self, "array"):
            return
        dense = np.moveaxis(self.model, -1, self.axis)
        assert self.array.shape == dense.shape
        np.testing.assert_array_equal(np.asarray(self.array.codes()), dense)
        packed = np.packbits(bits_of(self.model, self.width), axis=-1, bitorder="little")
        np.testing.assert_array_equal(np.asarray(self.array.data), np.moveaxis(packed, -1, self.axis))
        assert self.array.nbytes == packed.size


class BlockScaledMachine(RuleBasedStateMachine):
    """An MXFP4 array in blocks of 32 along its last axis, and its codes and scale bytes."""

    @initialize(
        seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), blocks=st.integers(1, 3), on_jax=st.booleans()
    )
    def make(self, seed, rows, blocks, on_jax):
        self.rng = np.random.default_rng(seed)
        self.xp = jnp if on_jax else np
        self.transposed = False
        self.array, self.codes, self.scales = self.quantized(rows, blocks)

    def quantized(self, rows, blocks):
        """An array made from values that E2M1 under these scales holds exactly, and what it must hold."""
        scales = self.rng.integers(100, 150, (rows, blocks)).astype(np.uint8)
        codes = self.rng.integers(0, 16, (rows, 32 * blocks)).astype(np.uint8)
        codes[:, ::32] = 7  # 6: the largest element is there, so that the scale is what it was made with
        values = VALUES[codes] * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)
        assert (values == values.astype(np.float32)).all()
        return jq.quantize_blocks(self.xp.asarray(values.astype(np.float32)), DType.MXFP4), codes, scales

    @precondition(lambda self: not self.transposed)
    @rule(data=st.data())
    def slice(self, data):
        start = data.draw(st.integers(0, self.codes.shape[0] - 1))
        first = data.draw(st.integers(0, self.scales.shape[1] - 1))
        self.array = self.array.block_slice(slice(start, None), slice(32 * first, None))
        self.codes, self.scales = self.codes[start:, 32 * first :], self.scales[start:, first:]

    @precondition(lambda self: not self.transposed and self.codes.size < 600)
    @rule(axis=st.sampled_from([0, 1]))
    def concatenate(self, axis):
        rows, blocks = self.scales.shape
        other, codes, scales = self.quantized(rows, blocks)
        self.array = jq.BlockScaledArray.concatenate([self.array, other], axis)
        self.codes = np.concatenate([self.codes, codes], axis)
        self.scales = np.concatenate([self.scales, scales], axis)

    @rule()
    def transpose(self):
        self.array, self.transposed = self.array.T, not self.transposed

    @precondition(lambda self: not self.transposed)
    @rule()
    def swizzle_scales_and_back(self):
        swizzled = jq.f8_4x128(self.array.scales)
        rows, blocks = self.scales.shape
        assert swizzled.shape == (rows, blocks)
        stored = np.asarray(swizzled.storage).view(np.uint8).reshape(-1)
        assert stored.size % 512 == 0
        tiles = -(-blocks // 4)
        for m in range(rows):
            for k in range(blocks):
                tile = m // 128 * tiles + k // 4
                assert stored[512 * tile + m % 32 * 16 + m // 32 % 4 * 4 + k % 4] == self.scales[m, k]
        assert np.count_nonzero(stored) <= self.scales.size  # padding is zero bytes
        self.array = jq.BlockScaledArray(swizzled.unswizzle(), self.array.elements, format=DType.MXFP4)

    @rule()
    def through_a_pytree(self):
        leaves, tree = jax.tree.flatten(self.array)
        self.array = jax.tree.unflatten(tree, leaves)

    @invariant()
    def holds_the_values(self):
        if not hasattr(self, "array"):
            return
        scales = np.asarray(self.array.scales).view(np.uint8)
        elements = np.asarray(self.array.elements.codes())
        values = np.asarray(self.array.dequantize())
        if self.transposed:
            scales, elements, values = scales.T, elements.T, values.T
        np.testing.assert_array_equal(scales, self.scales)
        np.testing.assert_array_equal(elements, self.codes)
        want = VALUES[self.codes] * np.repeat(2.0 ** (self.scales.astype(np.float64) - 127), 32, axis=1)
        np.testing.assert_array_equal(values.view(np.uint32), want.astype(np.float32).view(np.uint32))


_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])

TestNarrow = NarrowMachine.TestCase
TestNarrow.settings = SETTINGS
TestBlockScaled = BlockScaledMachine.TestCase
TestBlockScaled.settings = SETTINGS
