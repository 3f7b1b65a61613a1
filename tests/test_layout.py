"""Layouts against enumeration of every coordinate."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxquant.layout import Layout


def leaves(tree):
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, tuple) else [tree]


def coordinates(shape):
    """Every coordinate of a shape as a full tree, first mode fastest."""
    if not isinstance(shape, tuple):
        return list(range(shape))
    return [tuple(reversed(c)) for c in itertools.product(*map(coordinates, reversed(shape)))]


def dot(coordinate, stride):
    return sum(c * s for c, s in zip(leaves(coordinate), leaves(stride), strict=True))


trees = st.recursive(st.integers(1, 4), lambda kids: st.lists(kids, max_size=3).map(tuple), max_leaves=5)


anything = st.integers(0, 12)
telling = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12])


@st.composite
def layouts(draw, strides):
    def like(tree):
        return tuple(map(like, tree)) if isinstance(tree, tuple) else draw(strides)

    shape = draw(trees)
    return Layout(shape, like(shape))


class Lying(int):
    """An int that claims to be -5 and above every minimum."""

    __int__ = __index__ = lambda self: -5

    def __lt__(self, other):
        return False


class FalseInt:
    __class__ = int

    def __repr__(self):
        return "FalseInt"

    __int__ = __index__ = lambda self: -5

    def __lt__(self, other):
        return False


class FalseTuple:
    __class__ = tuple

    def __repr__(self):
        return "FalseTuple"

    def __iter__(self):
        return iter((2, 3))


class TestValues:
    @settings(max_examples=200, deadline=None)
    @given(layouts(anything))
    def test_size_cosize_and_index_by_enumeration(self, layout):
        every = coordinates(layout.shape)
        indices = [dot(coordinate, layout.stride) for coordinate in every]
        assert layout.size == len(every) == math.prod(leaves(layout.shape))
        assert layout.cosize == 1 + max(indices)
        assert [layout.index(coordinate) for coordinate in every] == indices
        # An integer coordinate counts the same coordinates, first mode fastest.
        assert [layout.index(i) for i in range(len(every))] == indices

    @settings(max_examples=300, deadline=None)
    @given(layouts(telling), st.integers(1, 40))
    def test_uniform_preimage_extent_by_enumeration(self, layout, target):
        counts = Counter(layout.index(i) for i in range(layout.size))
        uniform = set(counts) == set(range(target)) and len(set(counts.values())) == 1
        assert layout.uniform_preimage_extent(target) == (counts[0] if uniform else None)

    @pytest.mark.parametrize(
        ("layout", "target", "extent"),
        [
            (Layout(32, 0), 1, 32),
            (Layout(32, 1), 32, 1),
            (Layout((2, 3), (3, 1)), 6, 1),
            (Layout((2, (32, 2)), (1, (0, 2))), 4, 32),
            (Layout(((128, 2), (128, 3)), ((0, 1), (0, 2))), 6, 128 * 128),
            (Layout((2, 2), (1, 1)), 2, None),
            (Layout((2, 2), (1, 1)), 3, None),
            (Layout((2, 2), (0, 2)), 2, None),
            (Layout((2, 2), (0, 1)), 3, None),
            (Layout((1, 4), (5, 1)), 4, 1),
            (Layout((), ()), 1, 1),
            (Layout(10**18, 0), 1, 10**18),
            (Layout((10**9, 10**9), (0, 1)), 10**9, 10**9),
            (Layout((10**9, 10**9), (1, 10**9)), 10**18, 1),
            (Layout((10**9, 10**9), (1, 10**9 - 1)), 10**18, None),
        ],
        ids=str,
    )
    def test_uniform_preimage_extent(self, layout, target, extent):
        assert layout.uniform_preimage_extent(target) == extent

    def test_first_mode_fastest_at_every_nesting_level(self):
        layout = Layout((2, (32, 2)), (64, (1, 32)))
        assert [layout.index(i) for i in (0, 1, 2, 3, 63, 64, 127)] == [0, 64, 1, 65, 95, 32, 127]
        assert layout.index((1, 33)) == layout.index((1, (1, 1))) == 64 + 1 + 32

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (1, 1, 7)], ids=str)
    def test_row_major_is_the_order_of_numpy_and_jax(self, shape):
        layout = Layout.row_major(shape)
        host = np.arange(math.prod(shape)).reshape(shape)
        assert host.strides == tuple(stride * host.itemsize for stride in layout.stride) or 1 in shape
        for array in (host, jnp.asarray(host)):
            for coordinate in np.ndindex(shape):
                assert layout.index(coordinate) == int(array[coordinate])
        assert layout.cosize == layout.size == host.size

    def test_values(self):
        a, b = Layout((2, (3, 4)), (12, (4, 1))), Layout([2, [3, 4]], [12, [4, 1]])
        assert a == b
        assert hash(a) == hash(b)
        assert a != Layout((2, (3, 4)), (12, (4, 0)))
        assert Layout(4, 1) != Layout((4,), (1,))
        assert a == copy.deepcopy(a) == pickle.loads(pickle.dumps(a))
        assert repr(a) == "Layout(shape=(2, (3, 4)), stride=(12, (4, 1)))"
        with pytest.raises(AttributeError):
            a.shape = 3

    def test_int_subclasses_are_stored_as_exact_ints(self):
        layout = Layout((Lying(3), [Lying(2)]), (Lying(1), [Lying(0)]))
        assert layout == Layout((3, (2,)), (1, (0,)))
        assert [type(leaf) for leaf in leaves((layout.shape, layout.stride))] == [int] * 4
        assert layout.index((Lying(2), (1,))) == 2
        assert Layout.row_major((Lying(3), 2)).stride == (2, 1)

    def test_static_under_jit(self):
        traces = []

        def first(x, layout):
            traces.append(layout)
            return x[layout.index(1)]

        jitted = jax.jit(first, static_argnums=1)
        assert [int(jitted(jnp.arange(8), Layout((2, 4), (4, 1)))) for _ in range(2)] == [4, 4]
        assert len(traces) == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("shape", "stride", "error"),
        [
            (True, 1, TypeError),
            (2.0, 1, TypeError),
            ("2", 1, TypeError),
            (None, None, TypeError),
            ((2, None), (1, 1), TypeError),
            (2, True, TypeError),
            (np.array([2, 3]), (1, 1), TypeError),
            (np.int64(2), 1, TypeError),
            ({2}, (1,), TypeError),
            (FalseInt(), 1, TypeError),
            (2, FalseInt(), TypeError),
            (FalseTuple(), (1, 1), TypeError),
            (Lying(0), 1, ValueError),
            (2, Lying(-1), ValueError),
            (0, 1, ValueError),
            (-2, 1, ValueError),
            ((2, (3, 0)), (1, (1, 1)), ValueError),
            (2, -1, ValueError),
            ((2, 3), (1,), ValueError),
            ((2, 3), 1, ValueError),
            (2, (1,), ValueError),
            ((2, (3, 4)), (1, 2), ValueError),
            ((2, 3), (1, (2,)), ValueError),
        ],
        ids=str,
    )
    def test_construction(self, shape, stride, error):
        with pytest.raises(error):
            Layout(shape, stride)

    @pytest.mark.parametrize(
        ("coordinate", "error"),
        [
            (-1, IndexError),
            (24, IndexError),
            ((2, 0), IndexError),
            ((0, -1), IndexError),
            ((0, 12), IndexError),
            ((0, (3, 0)), IndexError),
            ((0,), ValueError),
            ((0, 0, 0), ValueError),
            (((0,), 0), ValueError),
            (1.0, TypeError),
            (True, TypeError),
            ((0, "1"), TypeError),
            (None, TypeError),
        ],
        ids=str,
    )
    def test_index(self, coordinate, error):
        with pytest.raises(error):
            Layout((2, (3, 4)), (12, (4, 1))).index(coordinate)

    @pytest.mark.parametrize(
        ("target", "error"),
        [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)],
    )
    def test_target_size(self, target, error):
        with pytest.raises(error, match="target_size"):
            Layout(4, 1).uniform_preimage_extent(target)

    @pytest.mark.parametrize(
        ("shape", "error"), [(4, TypeError), ((2, (3,)), TypeError), ((2, 0), ValueError), ("23", TypeError)]
    )
    def test_row_major(self, shape, error):
        with pytest.raises(error):
            Layout.row_major(shape)

    def test_layout_is_final(self):
        with pytest.raises(TypeError, match="final"):
            type("Lying", (Layout,), {"cosize": 1})
