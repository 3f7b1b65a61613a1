"""Universal validation: one test per row of its table, and one for the order of the rows."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.dtypes import CompoundDType, DType, DTypeCategory, RepresentationRule, SimpleDType
from jaxquant.layout import Layout
from jaxquant.representation import Plane, Representation

_numbers = itertools.count()
SHAPE = (2, (32, 2))
ELEMENTS = Layout(SHAPE, (64, (1, 32)))
SCALES = Layout((2, 2), (2, 1))
EDGE = Layout(SHAPE, (1, (0, 2)))


def fresh():
    return f"tests.representation.{next(_numbers)}"


class Planar(CompoundDType, abstract=False):
    """An extension compound dtype with nothing of its own."""


@jax.tree_util.register_pytree_node_class
class Packed:
    """Stands for an array that packs several values into a byte: it says its own dtype and shape."""

    def __init__(self, data, dtype, shape):
        self.data, self.dtype, self.shape = data, dtype, shape

    def tree_flatten(self):
        return (self.data,), (self.dtype, self.shape)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)


def zeros(shape, dtype, kind=np):
    return kind.zeros(shape, dtype.numpy_dtype)


def mxfp4(kind=np):
    return [Plane(zeros((2, 64), DType.E2M1, kind), ELEMENTS), Plane(zeros((2, 2), DType.E8M0, kind), SCALES)]


class TestAccepted:
    @pytest.mark.parametrize("kind", [np, jnp], ids=["numpy", "jax"])
    def test_mxfp4(self, kind):
        planes = mxfp4(kind)
        shown = Representation(DType.MXFP4, planes, [EDGE])
        assert shown.dtype is DType.MXFP4
        assert shown.planes == tuple(planes)
        assert shown.adjacent_layouts == (EDGE,)
        assert shown.level_shapes == (SHAPE, (2, 2))

    def test_the_element_of_a_coordinate_and_its_scale(self):
        shown = Representation(DType.MXFP4, mxfp4(), [EDGE])
        for row, column in np.ndindex(2, 64):
            coordinate = (row, (column % 32, column // 32))
            target = shown.adjacent_layouts[0].index(coordinate)
            assert shown.planes[0].layout.index(coordinate) == row * 64 + column
            assert shown.planes[1].layout.index(target) == row * 2 + column // 32

    def test_nvfp4(self):
        planes = [
            Plane(zeros((2, 16), DType.E2M1), Layout((16, 2), (1, 16))),
            Plane(zeros(2, DType.E4M3), Layout(2, 1)),
            Plane(zeros((), DType.Float32), Layout(1, 1)),
        ]
        edges = [Layout((16, 2), (0, 1)), Layout(2, 0)]
        assert Representation(DType.NVFP4, planes, edges).level_shapes == ((16, 2), 2, 1)

    def test_a_simple_dtype_has_one_plane(self):
        plane = Plane(np.zeros((2, 3), np.float32), Layout.row_major((2, 3)))
        assert Representation(DType.Float32, [plane]).level_shapes == ((2, 3),)

    def test_an_offset_into_a_larger_plane(self):
        Representation(DType.Int8, [Plane(np.zeros(10, np.int8), Layout(4, 2), 3)])
        with pytest.raises(ValueError, match="reached up to 10"):
            Representation(DType.Int8, [Plane(np.zeros(10, np.int8), Layout(4, 2), 4)])

    def test_iterators_are_accepted_and_copied(self):
        planes, edges = mxfp4(), [EDGE]
        shown = Representation(DType.MXFP4, iter(planes), iter(edges))
        planes.clear()
        edges.clear()
        assert (len(shown.planes), len(shown.adjacent_layouts)) == (2, 1)

    @pytest.mark.parametrize("kind", [np, jnp], ids=["numpy", "jax"])
    @pytest.mark.parametrize("dtype", [DType.E2M1, DType.E2M1.numpy_dtype], ids=["descriptor", "numpy-dtype"])
    def test_a_packed_array_says_its_own_dtype(self, kind, dtype):
        packed = Packed(kind.zeros((2, 32), kind.uint8), dtype, (2, 64))
        Representation(DType.MXFP4, [Plane(packed, ELEMENTS), mxfp4(kind)[1]], [EDGE])

    def test_a_packed_array_of_a_dtype_without_a_scalar_type(self):
        nibble = SimpleDType(fresh(), bits=4, supertype=DType.Any)
        packed = Packed(np.zeros(2, np.uint8), nibble, (4,))
        Representation(nibble, [Plane(packed, Layout(4, 1))])
        with pytest.raises(ValueError, match=r"E2M1.*got"):
            Representation(DType.E2M1, [Plane(packed, Layout(4, 1))])

    def test_a_second_descriptor_of_one_scalar_type(self):
        second = SimpleDType(fresh(), bits=32, supertype=DType.Floating, scalar_type=np.float32)
        Representation(second, [Plane(np.zeros(4, np.float32), Layout(4, 1))])

    def test_tracers_count_as_jax(self):
        def build(x):
            scales = jnp.zeros((2, 2), DType.E8M0.numpy_dtype)
            Representation(DType.MXFP4, [Plane(x, ELEMENTS), Plane(scales, SCALES)], [EDGE])
            with pytest.raises(TypeError, match="NumPy"):
                Representation(DType.MXFP4, [Plane(x, ELEMENTS), mxfp4(np)[1]], [EDGE])
            return x.shape[0]

        assert jax.jit(build)(zeros((2, 64), DType.E2M1, jnp)) == 2


MIXED = Packed([np.zeros(1, np.uint8), jnp.zeros(1, jnp.uint8)], DType.E2M1, (2, 64))


class Half(int):
    """An int subclass: no exact int."""


E4M3_PLANE = zeros((2, 64), DType.E4M3)
HALVES = np.zeros((2, 64), np.float16)
# Row of the table, what breaks it, error, message.
ROWS = [
    pytest.param(1, {"dtype": "MXFP4"}, TypeError, "registered DType", id="1-dtype-name"),
    pytest.param(
        1, {"dtype": SimpleDType.__new__(SimpleDType)}, TypeError, "registered", id="1-unregistered"
    ),
    pytest.param(1, {"planes": 3}, TypeError, "planes", id="1-planes-not-iterable"),
    pytest.param(1, {"planes": [np.zeros(4), np.zeros(4)]}, TypeError, "Plane", id="1-arrays-as-planes"),
    pytest.param(1, {"edges": 3}, TypeError, "adjacent_layouts", id="1-edges-not-iterable"),
    pytest.param(2, {"planes": mxfp4()[:1]}, ValueError, "2 planes, got 1", id="2-too-few-planes"),
    pytest.param(2, {"planes": mxfp4() * 2}, ValueError, "2 planes, got 4", id="2-too-many-planes"),
    pytest.param(2, {"planes": []}, ValueError, "2 planes, got 0", id="2-no-planes"),
    pytest.param(2, {"dtype": DType.Floating}, ValueError, "category", id="2-category"),
    pytest.param(3, {"edges": []}, ValueError, "1 adjacent layouts, got 0", id="3-no-edge"),
    pytest.param(3, {"edges": [EDGE, EDGE]}, ValueError, "1 adjacent layouts, got 2", id="3-two-edges"),
    pytest.param(4, {"plane": {"array": E4M3_PLANE}}, ValueError, "plane 0.*E2M1.*E4M3", id="4-other"),
    pytest.param(4, {"planes": mxfp4()[::-1]}, ValueError, "plane 0.*E2M1.*E8M0", id="4-swapped"),
    pytest.param(
        4,
        {"plane": {"array": Packed([], DType.MXFP4, (2, 64))}},
        ValueError,
        "several planes",
        id="4-compound",
    ),
    pytest.param(5, {"plane": {"array": [0] * 128}}, TypeError, "array, got list", id="5-list"),
    pytest.param(5, {"plane": {"array": None}}, TypeError, "array, got NoneType", id="5-none"),
    pytest.param(
        5,
        {"plane": {"array": jax.ShapeDtypeStruct((2, 64), ml_dtypes.float4_e2m1fn)}},
        TypeError,
        "array, got ShapeDtypeStruct",
        id="5-placeholder",
    ),
    pytest.param(
        5,
        {"plane": {"array": ml_dtypes.float4_e2m1fn(1)}},
        TypeError,
        "array, got",
        id="5-numpy-scalar",
    ),
    pytest.param(
        5, {"plane": {"array": Packed([], DType.E2M1, (2, 64))}}, TypeError, "array", id="5-no-leaf"
    ),
    pytest.param(
        6,
        {"plane": {"array": np.zeros((2, 64), "M8[s]")}},
        ValueError,
        "elements of.*E2M1",
        id="6-foreign",
    ),
    pytest.param(
        6,
        {"plane": {"array": np.zeros((2, 64), ">f8")}},
        ValueError,
        "elements of.*E2M1",
        id="6-swapped-bytes",
    ),
    pytest.param(
        6,
        {"plane": {"array": jax.random.split(jax.random.key(0), 128)}},
        ValueError,
        "elements of.*E2M1",
        id="6-jax-keys",
    ),
    pytest.param(7, {"plane": {"offset": 0.0}}, TypeError, "offset of plane 0", id="7-float"),
    pytest.param(7, {"plane": {"offset": True}}, TypeError, "offset of plane 0", id="7-bool"),
    pytest.param(7, {"plane": {"offset": np.int64(0)}}, TypeError, "offset of plane 0", id="7-numpy"),
    pytest.param(7, {"plane": {"offset": Half(0)}}, TypeError, "offset of plane 0", id="7-int-subclass"),
    pytest.param(7, {"plane": {"offset": -1}}, ValueError, "offset of plane 0", id="7-negative"),
    pytest.param(8, {"plane": {"layout": (2, 64)}}, TypeError, "placement layout 0", id="8-tuple"),
    pytest.param(8, {"plane": {"layout": None}}, TypeError, "placement layout 0", id="8-none"),
    pytest.param(9, {"plane": {"offset": 1}}, ValueError, "up to 128", id="9-offset"),
    pytest.param(
        9, {"plane": {"layout": Layout(SHAPE, (65, (1, 32)))}}, ValueError, "up to 128", id="9-stride"
    ),
    pytest.param(
        9,
        {"plane": {"array": zeros((0, 64), DType.E2M1)}},
        ValueError,
        "plane 0 of 0 elements",
        id="9-empty",
    ),
    pytest.param(
        10,
        {"plane": {"array": zeros((2, 64), DType.E2M1, jnp)}},
        TypeError,
        "all NumPy or all JAX",
        id="10-both",
    ),
    pytest.param(10, {"plane": {"array": MIXED}}, TypeError, "mixed", id="10-mixed-leaves"),
    pytest.param(11, {"edges": [(1, (0, 2))]}, TypeError, "adjacent layout 0", id="11-tuple"),
    pytest.param(11, {"edges": [None]}, TypeError, "adjacent layout 0", id="11-none"),
    pytest.param(12, {"edges": [Layout((2, 64), (1, 0))]}, ValueError, "must have shape", id="12-flat-shape"),
    pytest.param(
        12, {"edges": [Layout((2, 2), (1, 2))]}, ValueError, "must have shape", id="12-target-shape"
    ),
    pytest.param(13, {"edges": [Layout(SHAPE, (1, (0, 3)))]}, ValueError, "reaches index 4", id="13-beyond"),
    pytest.param(14, {"edges": [Layout(SHAPE, (0, (0, 2)))]}, ValueError, "LevelExtent", id="14-rule"),
]


def build(changes):
    """The MXFP4 representation with some arguments replaced, or with some fields of its first plane replaced."""
    elements, scales = mxfp4()
    fields = {"array": elements.array, "layout": elements.layout, "offset": 0, **changes.get("plane", {})}
    arguments = {"dtype": DType.MXFP4, "planes": [Plane(**fields), scales], "edges": [EDGE], **changes}
    return Representation(arguments["dtype"], arguments["planes"], arguments["edges"])


@pytest.mark.parametrize(("row", "changes", "error", "message"), ROWS)
def test_row(row, changes, error, message):
    with pytest.raises(error, match=message):
        build(changes)


def _merged(a, b):
    """Both breaks at once, or None where one argument would have to hold both."""
    plane = {**a.get("plane", {}), **b.get("plane", {})}
    overlap = a.keys() & b.keys() - {"plane"} or a.get("plane", {}).keys() & b.get("plane", {}).keys()
    if overlap or ("plane" in a | b and "planes" in a | b):
        return None
    return {**a, **b, **({"plane": plane} if plane else {})}


PAIRS = [
    pytest.param(changes, a.values[2], a.values[3], id=f"{a.id}-before-{b.id}")
    for a in ROWS
    for b in ROWS
    if a.values[0] < b.values[0] and (changes := _merged(a.values[1], b.values[1])) is not None
]


@pytest.mark.parametrize(("changes", "error", "message"), PAIRS)
def test_the_earlier_row_speaks_first(changes, error, message):
    with pytest.raises(error, match=message):
        build(changes)


def test_enough_pairs_are_tried():
    assert len(PAIRS) > 200


def test_a_row_is_checked_for_all_planes_before_the_next_row():
    elements, scales = mxfp4()
    planes = [Plane(elements.array, (2, 64), -1), Plane([0] * 4, scales.layout)]
    with pytest.raises(TypeError, match="plane 1 must hold"):
        Representation(DType.MXFP4, planes, [EDGE])


def test_nothing_is_mutated():
    planes, edges = mxfp4(), [EDGE]
    before = [plane.array.tobytes() for plane in planes]
    Representation(DType.MXFP4, planes, edges)
    with pytest.raises(ValueError, match="LevelExtent"):
        Representation(DType.MXFP4, planes, [Layout(SHAPE, (0, (0, 2)))])
    assert [plane.array.tobytes() for plane in planes] == before
    assert (len(planes), edges) == (2, [EDGE])


def test_a_representation_is_immutable():
    shown = Representation(DType.MXFP4, mxfp4(), [EDGE])
    for target, name in ((shown, "planes"), (shown, "dtype"), (shown.planes[0], "offset")):
        with pytest.raises(AttributeError):
            setattr(target, name, None)
        with pytest.raises(AttributeError):
            delattr(target, name)


class TestPytree:
    def test_round_trip(self):
        shown = Representation(DType.MXFP4, mxfp4(jnp), [EDGE])
        leaves, tree = jax.tree_util.tree_flatten(shown)
        assert [leaf is plane.array for leaf, plane in zip(leaves, shown.planes, strict=True)] == [True, True]
        back = jax.tree_util.tree_unflatten(tree, leaves)
        assert (back.dtype, back.adjacent_layouts, back.level_shapes) == (
            DType.MXFP4,
            (EDGE,),
            shown.level_shapes,
        )
        assert type(back.planes) is tuple

    @pytest.mark.parametrize("leaf", [None, jax.ShapeDtypeStruct((1,), np.float32), ..., "text"], ids=repr)
    def test_unflatten_checks_nothing(self, leaf):
        ran = []

        class Count(RepresentationRule):
            def validate(self, context):
                ran.append(context)

        dtype = Planar(fresh(), simple_types=[DType.Int8], representation_rules=[Count()])
        shown = Representation(dtype, [Plane(np.zeros(4, np.int8), Layout(4, 1))])
        assert len(ran) == 1
        _, tree = jax.tree_util.tree_flatten(shown)
        assert jax.tree_util.tree_unflatten(tree, [leaf]).planes[0].array is leaf
        assert jax.tree_util.tree_map(lambda array: array, shown).planes[0].array is shown.planes[0].array
        assert len(ran) == 1

    def test_through_jit_and_vmap(self):
        shown = Representation(DType.Int32, [Plane(jnp.arange(4, dtype=jnp.int32), Layout(4, 1))])
        doubled = jax.jit(lambda r: jax.tree_util.tree_map(lambda x: 2 * x, r))(shown)
        assert doubled.planes[0].array.tolist() == [0, 2, 4, 6]
        assert doubled.dtype is DType.Int32
        stacked = jax.vmap(lambda n: jax.tree_util.tree_map(lambda x: x + n, shown))(jnp.arange(3))
        assert stacked.planes[0].array.shape == (3, 4)


def test_a_rejected_category_is_no_dtype():
    leaked = []

    class Late(DTypeCategory, abstract=False):
        def __init__(self, name):
            super().__init__(name)
            leaked.append(self)
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        Late(fresh())
    with pytest.raises(TypeError, match="registered"):
        Representation(leaked[0], [])


def test_a_rule_is_validated_by_its_class():
    class Lax(RepresentationRule):
        def __init__(self):
            self.validate = lambda context: None

        def validate(self, context):
            raise ValueError("the class refuses")

    dtype = Planar(fresh(), simple_types=[DType.Int8], representation_rules=[Lax()])
    with pytest.raises(ValueError, match="the class refuses"):
        Representation(dtype, [Plane(np.zeros(4, np.int8), Layout(4, 1))])
