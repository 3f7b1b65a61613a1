"""Narrow arrays against the golden streams, an oracle of Python integers, and ml_dtypes' own values."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import cast_oracle
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxquant.arrays.narrow import Narrow, NarrowArray, bit_width, narrow
from jaxquant.casts import decode
from jaxquant.dtypes import DType, SimpleDType
from jaxquant.layout import Layout
from jaxquant.representation import Plane, Representation

PACK = np.load(Path(__file__).parent / "data" / "golden_pack.npz")
# One dtype of every width; those without a scalar type are extensions that only have codes.
WIDTHS = {
    1: DType.Bool,
    2: np.dtype(ml_dtypes.uint2),
    3: SimpleDType("test_narrow.Three", bits=3, supertype=DType.Any),
    4: DType.E2M1,
    5: SimpleDType("test_narrow.Five", bits=5, supertype=DType.Any),
    6: DType.E2M3,
    7: SimpleDType("test_narrow.Seven", bits=7, supertype=DType.Any),
    8: DType.E4M3,
}
CHUNK = {1: 8, 2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 7: 8, 8: 1}
LIBRARIES = {"numpy": np.asarray, "jax": jnp.asarray}

widths = pytest.mark.parametrize("width", WIDTHS)
libraries = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


def stream(codes, width):
    """One row of codes as bytes, by one big integer."""
    number = sum(int(code) << (width * i) for i, code in enumerate(codes))
    return number.to_bytes(len(codes) * width // 8, "little")


def random_codes(rng, width, shape):
    return rng.integers(0, 1 << width, shape).astype(np.uint8)


def kind(array):
    return np.ndarray if isinstance(array, np.ndarray) else jax.Array


class TestStream:
    @libraries
    @widths
    def test_is_little_endian(self, rng, library, width):
        codes = random_codes(rng, width, (3, 5 * CHUNK[width]))
        packed = NarrowArray.from_codes(library(codes), WIDTHS[width])
        assert [row.tobytes() for row in np.asarray(packed.data)] == [stream(row, width) for row in codes]
        assert packed.data.dtype == np.uint8
        assert kind(packed.data) is kind(library(codes))
        np.testing.assert_array_equal(packed.codes(), codes)
        assert kind(packed.codes()) is kind(packed.data)

    @libraries
    @pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
    @widths
    def test_any_axis(self, rng, library, width, axis):
        shape = [2, 3, 5]
        shape[axis] = 3 * CHUNK[width]
        codes = random_codes(rng, width, shape)
        packed = NarrowArray.from_codes(library(codes), WIDTHS[width], axis=axis)
        assert packed.axis == (axis if axis < 0 else axis - 3)
        last = NarrowArray.from_codes(np.moveaxis(codes, axis, -1), WIDTHS[width])
        np.testing.assert_array_equal(np.moveaxis(np.asarray(packed.data), axis, -1), last.data)
        np.testing.assert_array_equal(packed.codes(), codes)
        assert packed.shape == codes.shape

    @libraries
    @widths
    def test_upper_bits_are_dropped(self, rng, library, width):
        codes = rng.integers(0, 256, (4, CHUNK[width]), np.uint8)
        packed = NarrowArray.from_codes(library(codes), WIDTHS[width])
        np.testing.assert_array_equal(packed.codes(), codes & np.uint8((1 << width) - 1))

    @libraries
    @pytest.mark.parametrize(
        ("name", "golden", "dtype"),
        [
            ("c1", "c1_pack_le", np.bool_),
            ("c2", "c2_pack_le", ml_dtypes.uint2),
            ("c4", "c4_pack_low_first", DType.E2M1),
            ("c4", "c4_pack_compressed_tensors", DType.E2M1),
            ("c5", "c5_pack_le", WIDTHS[5]),
        ],
        ids=["c1", "c2", "c4", "c4-compressed-tensors", "c5"],
    )
    def test_golden(self, library, name, golden, dtype):
        packed = NarrowArray.from_codes(library(PACK[name]), dtype)
        np.testing.assert_array_equal(packed.data, PACK[golden])
        np.testing.assert_array_equal(NarrowArray(library(PACK[golden]), dtype).codes(), PACK[name])

    def test_the_contract_s_examples(self):
        four = np.uint8([1, 2, 3, 4])
        assert NarrowArray.from_codes(four, "E2M1").data.tobytes().hex(" ") == "21 43"
        assert NarrowArray.from_codes(four, "E3M2").data.tobytes().hex(" ") == "81 30 10"
        assert NarrowArray.pack(np.arange(8) % 2 == 0, np.bool_).data.tobytes().hex(" ") == "55"

    @pytest.mark.parametrize("width", [4, 6])
    def test_constants_fold_to_the_same_bytes(self, rng, width):
        codes = random_codes(rng, width, (2, 64))
        data = np.asarray(NarrowArray.from_codes(codes, WIDTHS[width]).data)
        folded = jax.jit(lambda: NarrowArray.from_codes(jnp.asarray(codes), WIDTHS[width]).data)()
        np.testing.assert_array_equal(folded, data)
        unpacked = jax.jit(lambda: NarrowArray(jnp.asarray(data), WIDTHS[width]).unpack())()
        np.testing.assert_array_equal(unpacked, decode(codes, WIDTHS[width]))


class TestMemory:
    @libraries
    @widths
    def test_bytes_per_value(self, library, width):
        packed = NarrowArray.from_codes(library(np.zeros((3, 64), np.uint8)), WIDTHS[width])
        assert packed.nbytes == packed.data.nbytes == 3 * 64 * width // 8
        assert (packed.shape, packed.ndim, packed.size, len(packed)) == ((3, 64), 2, 192, 3)

    def test_viewing_copies_nothing(self):
        data = np.zeros((2, 16), np.uint8)
        packed = NarrowArray(data, "E2M1")
        assert packed.data is data
        assert packed.bitcast("E4M3").data is data

    def test_a_7b_weight(self):
        spec = jax.eval_shape(lambda x: narrow("E2M1")(x), jax.ShapeDtypeStruct((14336, 4096), np.float32))
        assert (spec.shape, spec.nbytes) == ((14336, 4096), 14336 * 4096 // 2)

    @libraries
    def test_empty(self, library):
        for shape in ((0,), (0, 8), (3, 0), (2, 0, 8)):
            packed = NarrowArray.pack(library(np.zeros(shape, np.float32)), "E2M3")
            assert (packed.shape, packed.nbytes, packed.unpack().shape) == (shape, 0, shape)
            assert packed.codes().shape == shape


class TestValues:
    NAMES = ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "E8M0")

    @libraries
    @pytest.mark.parametrize("name", NAMES)
    def test_floats_round_as_encode_does(self, library, name):
        fmt = cast_oracle.BY_NAME[name]
        x = np.resize(cast_oracle.edges(fmt), (8, 64))
        packed = NarrowArray.pack(library(x), name)
        want = cast_oracle.encode(x, fmt)
        np.testing.assert_array_equal(packed.codes(), want)
        values = packed.unpack()
        assert values.dtype == np.float32
        assert kind(values) is kind(library(x))
        np.testing.assert_array_equal(np.asarray(values).view(np.uint32), decode(want, name).view(np.uint32))

    @libraries
    @pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
    def test_halves(self, library, source):
        x = np.arange(-8, 8).astype(source)
        want = np.clip(np.arange(-8, 8), -6, 6)
        want[[3, 13]] = [-4, 4]  # 5 lies between 4 and 6, and 4 is even
        assert NarrowArray.pack(library(x), "E2M1").unpack().tolist() == want.tolist()

    @libraries
    @pytest.mark.parametrize("format", cast_oracle.INTEGERS, ids=[f.name for f in cast_oracle.INTEGERS])
    @pytest.mark.parametrize("source", ["int8", "uint8", "int16", "int32", "uint32", "int4", "uint4"])
    def test_integers_saturate(self, library, format, source):
        dtype = np.dtype(getattr(ml_dtypes, source, source))
        info = ml_dtypes.iinfo(dtype)
        every = [v for v in range(-300, 300, 1) if info.min <= v <= info.max] + [int(info.min), int(info.max)]
        every += [0] * (-len(every) % 8)
        packed = NarrowArray.pack(library(np.array(every).astype(dtype)), format.dtype)
        least = -format.largest - 1 if format.signed else 0
        values = packed.unpack()
        assert values.tolist() == [min(max(v, least), format.largest) for v in every]
        assert values.dtype == (np.int8 if format.signed else np.uint8)

    @libraries
    def test_floats_to_integers(self, library):
        packed = NarrowArray.pack(library(np.float32([2.5, 3.5, np.nan, -np.inf])), ml_dtypes.int4)
        assert packed.unpack().tolist() == [2, 4, 0, -8]

    @libraries
    @pytest.mark.parametrize("name", NAMES)
    def test_arrays_of_the_dtype_go_as_they_are(self, library, name):
        dtype = DType.from_name(name)
        if library is jnp.asarray and dtype.bits == 6:
            pytest.skip("JAX has no six-bit floats")
        codes = np.arange(1 << dtype.bits, dtype=np.uint8)
        packed = NarrowArray.pack(library(codes.view(dtype.numpy_dtype)), dtype)
        np.testing.assert_array_equal(packed.codes(), codes)

    @libraries
    def test_bool(self, library, rng):
        x = rng.random((3, 16)) < 0.5
        packed = narrow(np.bool_)(library(x))
        assert packed.nbytes == 6
        assert packed.unpack().dtype == np.bool_
        np.testing.assert_array_equal(packed.unpack(), x)

    def test_astype_dense(self):
        for library in LIBRARIES.values():
            packed = NarrowArray.pack(library(np.float32([0.5, -1, 3, 6])), "E2M1")
            for dtype in (
                np.float32,
                np.float16,
                ml_dtypes.bfloat16,
                np.int32,
                "Float32",
                ml_dtypes.float8_e4m3fn,
            ):
                got = packed.astype(dtype)
                assert kind(got) is kind(packed.data)
                wanted = DType.from_name(dtype).numpy_dtype if isinstance(dtype, str) else np.dtype(dtype)
                assert got.dtype == wanted
                np.testing.assert_array_equal(
                    np.asarray(got).astype(np.float32),
                    np.float32([0.5, -1, 3, 6]).astype(wanted).astype(np.float32),
                )
            assert packed.astype("E2M1").dtype == ml_dtypes.float4_e2m1fn
            integers = NarrowArray.pack(library(np.int32([7, -8, 3, 0])), ml_dtypes.int4)
            assert integers.astype(np.float32).tolist() == [7, -8, 3, 0]
            assert integers.astype(ml_dtypes.int2).astype(np.int32).tolist() == [1, -2, 1, 0]
            assert integers.astype(np.int8).tolist() == [7, -8, 3, 0]

    @libraries
    def test_astype_packed(self, library):
        packed = NarrowArray.pack(
            library(np.float32([[0.5, -1], [3, 6], [4, 1.5], [0, -0.0]])), "E2M1", axis=0
        )
        six = packed.astype(narrow("E2M3"))
        assert (six.dtype, six.axis, six.data.shape) == (DType.E2M3, -2, (3, 2))
        np.testing.assert_array_equal(np.signbit(six.unpack()), np.signbit(packed.unpack()))
        np.testing.assert_array_equal(six.unpack(), packed.unpack())
        assert packed.astype(narrow(ml_dtypes.int2)).unpack().tolist() == [[0, -1], [1, 1], [1, 1], [0, 0]]
        integers = NarrowArray.pack(library(np.int32([7, -8, 3, 0])), ml_dtypes.int4)
        assert integers.astype(narrow("E2M1")).unpack().tolist() == [6, -6, 3, 0]
        assert integers.astype(narrow(ml_dtypes.uint4)).unpack().tolist() == [7, 0, 3, 0]
        flags = NarrowArray(library(np.uint8([0x0F])), np.bool_)
        assert flags.astype(narrow("E2M1")).unpack().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        assert flags.astype(narrow(ml_dtypes.int4)).unpack().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
        assert flags.astype(narrow(np.bool_)).data.tolist() == [0x0F]

    def test_narrow_tag(self):
        tag = narrow(ml_dtypes.float4_e2m1fn)
        assert tag == narrow("E2M1") == Narrow(DType.E2M1) != narrow("E2M3")
        assert hash(tag) == hash(narrow("E2M1"))
        assert repr(tag) == "narrow(E2M1)"
        assert tag(np.float32([[1, 2], [3, 4]]), axis=0).data.tolist() == [[0x52, 0x64]]
        zeros = tag.zeros((3, 8))
        assert (zeros.shape, zeros.nbytes, zeros.unpack().any()) == ((3, 8), 12, False)
        assert isinstance(zeros.data, jax.Array)
        assert tag.zeros(6).shape == (6,)
        assert tag.zeros((6, 3), axis=0).axis == -2

    def test_numpy_array_protocol(self):
        packed = NarrowArray.pack(jnp.float32([[1, 2], [3, 4]]), "E2M1")
        assert np.asarray(packed).tolist() == [[1, 2], [3, 4]]
        assert np.asarray(packed, np.float64).dtype == np.float64
        assert [row.tolist() for row in packed] == [[1, 2], [3, 4]]
        with pytest.raises(ValueError, match="copy=False"):
            np.array(packed, copy=False)


class TestBitcast:
    @libraries
    @pytest.mark.parametrize(("source", "target"), list(itertools.product(WIDTHS, WIDTHS)))
    def test_every_pair_of_widths(self, rng, library, source, target):
        data = rng.integers(0, 256, (2, 105 * 8), np.uint8)
        got = NarrowArray(library(data), WIDTHS[source]).bitcast(WIDTHS[target])
        assert got.shape == (2, data.shape[1] * 8 // target)
        assert got.dtype == NarrowArray(data, WIDTHS[target]).dtype
        assert [stream(row, target) for row in np.asarray(got.codes())] == [row.tobytes() for row in data]

    def test_the_axis_is_kept(self):
        packed = NarrowArray(np.zeros((6, 5), np.uint8), "E2M1", axis=0)
        assert packed.shape == (12, 5)
        six = packed.bitcast(narrow("E2M3"))
        assert (six.shape, six.axis) == ((8, 5), -2)

    def test_what_does_not_divide_is_refused(self):
        packed = NarrowArray(np.zeros((2, 4), np.uint8), "E2M1")
        with pytest.raises(
            ValueError, match=r"shape \(2, 4\), but axis -1 must hold a multiple of 3 bytes for E2M3"
        ):
            packed.bitcast("E2M3")
        with pytest.raises(ValueError, match=r"1 to 8 bits, Float32 has 32"):
            packed.bitcast(np.float32)


# fmt: off
INDICES = [
    0, -1, np.int64(1), (1, 2), (1, 2, 5), (0, 1, -1), slice(1, None), (slice(None), 1), (..., 3),
    (..., slice(1, 7, 2)), (1, ..., slice(3, 0, -1)), (), ..., (slice(None), slice(None, None, -1)), None,
    (0, None, 2), [0, 1], ([1, 0], [2, 1]), (np.array([True, False]),), (slice(None), [0, 2], slice(2, 4)),
]
# fmt: on


class TestIndexing:
    @libraries
    @pytest.mark.parametrize("axis", [0, 1, 2])
    @pytest.mark.parametrize("index", INDICES, ids=str)
    def test_values_at_an_index(self, rng, library, axis, index):
        shape = [2, 3, 8]
        shape[axis] = 8
        packed = NarrowArray.from_codes(library(random_codes(rng, 6, shape)), "E2M3", axis=axis)
        if isinstance(index, tuple) and any(isinstance(i, np.ndarray) for i in index):
            index = (np.arange(shape[0]) % 2 == 0,)
        if library is jnp.asarray:
            lists = index if isinstance(index, tuple) else (index,)
            index = tuple(jnp.asarray(i) if isinstance(i, list) else i for i in lists)
        got = packed[index]
        want = np.asarray(packed.unpack())[index]
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)

    def test_only_the_chosen_rows_are_unpacked(self):
        packed = NarrowArray(jnp.zeros((1024, 512), jnp.uint8), "E2M1")
        text = jax.jit(lambda a: a[7, 3:5]).lower(packed).as_text()
        assert "1024x1024" not in text

    def test_numpy_refuses_what_is_out_of_range(self):
        packed = NarrowArray(np.zeros((2, 4), np.uint8), "E2M1")
        for index in (2, (0, 8), (0, 0, 0)):
            with pytest.raises(IndexError):
                packed[index]


def example(library=jnp.asarray, shape=(4, 3, 16), axis=-1):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32) * 3
    return NarrowArray.pack(library(x), "E2M3", axis)


def assert_same(got, want):
    assert isinstance(got, NarrowArray)
    assert (got.dtype, got.axis, got.shape) == (want.dtype, want.axis, want.shape)
    np.testing.assert_array_equal(got.data, want.data)


class TestPytree:
    def test_one_leaf_and_static_rest(self):
        packed = example()
        ((path, leaf),) = jax.tree_util.tree_flatten_with_path(packed)[0]
        assert leaf is packed.data
        assert jax.tree_util.keystr(path) == ".data"
        assert_same(jax.tree.map(lambda leaf: leaf, packed), packed)
        assert hash(jax.tree.structure(packed)) == hash(jax.tree.structure(example(np.asarray)))
        assert jax.tree.structure(packed) == jax.tree.structure(example(shape=(8,)))
        assert jax.tree.structure(packed) != jax.tree.structure(packed.bitcast("E2M1"))
        assert jax.tree.structure(packed) != jax.tree.structure(example(axis=0))

    @pytest.mark.parametrize("leaf", [None, ..., 3, jax.ShapeDtypeStruct((2,), np.float32)], ids=repr)
    def test_unflatten_checks_nothing(self, leaf):
        rebuilt = jax.tree.unflatten(jax.tree.structure(example()), [leaf])
        assert rebuilt.data is leaf
        assert repr(rebuilt).startswith("NarrowArray(")

    def test_one_trace_for_equal_static_data(self):
        traces = []

        @jax.jit
        def f(packed):
            traces.append(packed.dtype)
            return packed.unpack()

        data = jnp.zeros((2, 12), jnp.uint8)
        for dtype in (DType.E2M3, "E2M3", ml_dtypes.float6_e2m3fn, np.dtype(ml_dtypes.float6_e2m3fn)):
            f(NarrowArray(data, dtype, axis=-1))
            f(NarrowArray(data, dtype, axis=1))
        assert traces == [DType.E2M3]
        f(NarrowArray(data, DType.E3M2))
        assert len(traces) == 2

    def test_jit_takes_and_gives_it(self):
        packed = example()
        assert_same(jax.jit(lambda p: p)(packed), packed)
        assert_same(jax.jit(lambda x: narrow("E2M3")(x))(packed.unpack()), packed)
        np.testing.assert_array_equal(jax.jit(lambda p: p.unpack())(packed), packed.unpack())

    @pytest.mark.parametrize("axis", [0, 1])
    def test_vmap_over_an_axis_that_is_not_packed(self, axis):
        packed = example()
        values = np.asarray(packed.unpack())
        got = jax.vmap(lambda p: p.unpack(), in_axes=axis)(packed)
        np.testing.assert_array_equal(got, np.moveaxis(values, axis, 0))
        shapes = []
        jax.vmap(lambda p: shapes.append((p.shape, p.axis)) or p.codes(), in_axes=axis)(packed)
        assert shapes == [((3, 16) if axis == 0 else (4, 16), -1)]

    @pytest.mark.parametrize("out_axes", [0, 1])
    def test_vmap_that_packs(self, out_axes):
        packed = example()
        got = jax.vmap(lambda x: narrow("E2M3")(x), out_axes=out_axes)(packed.unpack())
        np.testing.assert_array_equal(got.unpack(), np.moveaxis(np.asarray(packed.unpack()), 0, out_axes))

    def test_scan_strips_and_stacks(self):
        packed = example()

        def step(total, row):
            assert row.shape == (3, 16)
            return total + row.unpack().sum(), row.astype(narrow("E2M1"))

        total, rows = jax.lax.scan(step, jnp.float32(0), packed)
        assert float(total) == float(np.asarray(packed.unpack(), np.float64).sum())
        assert_same(rows, packed.astype(narrow("E2M1")))

    def test_grad_treats_it_as_a_constant(self):
        packed = example()
        gradient = jax.grad(lambda x: (x * packed.unpack()).sum())(jnp.ones(packed.shape))
        np.testing.assert_array_equal(gradient, packed.unpack())
        allowed = jax.grad(lambda p: p.unpack().sum(), allow_int=True)(packed)
        assert allowed.data.dtype == jax.dtypes.float0

    def test_eval_shape(self):
        spec = jax.eval_shape(lambda p: p.astype(narrow("E2M1")), example())
        assert (spec.shape, spec.dtype, spec.nbytes) == ((4, 3, 16), DType.E2M1, 96)
        assert spec.data == jax.ShapeDtypeStruct((4, 3, 8), np.uint8)

    @libraries
    @pytest.mark.parametrize(
        "dtype", ["E2M1", ml_dtypes.int4, WIDTHS[5]], ids=["descriptor", "scalar", "codes only"]
    )
    def test_pickle(self, library, dtype):
        packed = NarrowArray(library(np.arange(30, dtype=np.uint8).reshape(2, 15)), dtype)
        again = pickle.loads(pickle.dumps(packed))
        assert_same(again, packed)
        assert again.dtype is packed.dtype or again.dtype == np.dtype(dtype)
        assert kind(again.data) is kind(packed.data)

    def test_device_put(self):
        put = jax.device_put(example(np.asarray), jax.devices()[0])
        assert_same(put, example(np.asarray))
        assert isinstance(put.data, jax.Array)
        assert_same(jax.device_get(put), example(np.asarray))

    def test_stacked_layers(self):
        layers = [example(), example()]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        assert stacked.shape == (2, 4, 3, 16)
        np.testing.assert_array_equal(stacked.unpack()[1], layers[1].unpack())

    def test_shard_map_on_eight_devices(self):
        script = """
            import jax, jax.numpy as jnp, numpy as np
            from jax.sharding import PartitionSpec as P
            from jaxquant.arrays.narrow import narrow
            mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
            assert mesh.size == 8
            x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32)), jnp.float32)
            pack = jax.jit(jax.shard_map(lambda x: narrow("E2M3")(x), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
            packed = pack(x)
            assert len(packed.data.sharding.device_set) == 8
            np.testing.assert_array_equal(packed.data, narrow("E2M3")(np.asarray(x)).data)
            unpack = jax.jit(jax.shard_map(lambda p: p.unpack(), mesh=mesh, in_specs=P("d"), out_specs=P("d")))
            np.testing.assert_array_equal(unpack(packed), narrow("E2M3")(np.asarray(x)).unpack())
            print("equal")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ
            | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == "equal", done.stderr


class TestStatic:
    def test_is_immutable_and_final(self):
        packed = example()
        with pytest.raises(AttributeError):
            packed.axis = -2
        with pytest.raises(TypeError, match="final"):

            class Mine(NarrowArray):
                pass

    def test_dtype_is_the_descriptor_where_there_is_one(self):
        data = np.zeros(12, np.uint8)
        assert NarrowArray(data, ml_dtypes.float4_e2m1fn).dtype is DType.E2M1
        assert NarrowArray(data, jnp.float8_e4m3fn).dtype is DType.E4M3
        assert NarrowArray(data, np.int8).dtype is DType.Int8
        assert NarrowArray(data, jnp.uint2).dtype == np.dtype(ml_dtypes.uint2)
        assert NarrowArray(data, WIDTHS[3]).dtype is WIDTHS[3]

    def test_representation_accepts_it(self):
        packed = example(shape=(2, 16))
        shown = Representation(DType.E2M3, [Plane(packed, Layout.row_major((2, 16)))])
        assert shown.planes[0].array is packed
        with pytest.raises(ValueError, match="plane 0 must store"):
            Representation(DType.E3M2, [Plane(packed, Layout.row_major((2, 16)))])

    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [
            (np.bool_, 1), (DType.Bool, 1), ("E2M1", 4), (ml_dtypes.float6_e3m2fn, 6), (DType.E8M0, 8), (jnp.int4, 4),
            (np.dtype(ml_dtypes.uint2), 2), (np.float32, 32), (ml_dtypes.bfloat16, 16), (np.int64, 64), ("Float64", 64),
            (np.complex64, 64), (WIDTHS[7], 7), (np.zeros(3, np.float16), 16), (jnp.zeros(3, bool), 1),
            (NarrowArray(np.zeros(3, np.uint8), "E2M3"), 6), (NarrowArray(np.zeros(3, np.uint8), jnp.int4), 4),
        ],
        ids=str,
    )  # fmt: skip
    def test_bit_width(self, dtype, bits):
        assert bit_width(dtype) == bits

    @pytest.mark.parametrize(
        "dtype", [DType.MXFP4, DType.Floating, None, 4, np.dtype("O"), np.dtype("S3"), [1]], ids=repr
    )
    def test_bit_width_of_nothing_numeric(self, dtype):
        with pytest.raises(TypeError, match="wanted a"):
            bit_width(dtype)

    def test_repr(self):
        packed = NarrowArray.pack(np.float32([[0.5, 1], [1.5, 2]]), "E2M1")
        assert repr(packed) == "NarrowArray(E2M1, shape=(2, 2), axis=-1, numpy)\n[[0.5 1. ]\n [1.5 2. ]]"
        on_device = jax.tree.map(jnp.asarray, packed)
        assert repr(on_device) == "NarrowArray(E2M1, shape=(2, 2), axis=-1, jax)\n[[0.5 1. ]\n [1.5 2. ]]"
        assert repr(narrow("E2M3").zeros((512, 512))) == "NarrowArray(E2M3, shape=(512, 512), axis=-1, jax)"
        coded = NarrowArray.from_codes(np.arange(8, dtype=np.uint8), WIDTHS[5])
        assert repr(coded) == "NarrowArray(test_narrow.Five, shape=(8,), axis=-1, numpy)\n[0 1 2 3 4 5 6 7]"
        shown = []
        jax.jit(lambda p: shown.append(repr(p)) or p.data)(on_device)
        assert shown == ["NarrowArray(E2M1, shape=(2, 2), axis=-1, jax)"]
        on_device.data.delete()
        assert repr(on_device) == "NarrowArray(E2M1, shape=(2, 2), axis=-1, jax)"


class TestBadInput:
    @libraries
    @pytest.mark.parametrize(
        ("width", "count"), [(1, 4), (1, 12), (2, 6), (3, 4), (4, 3), (5, 12), (6, 6), (7, 9)]
    )
    def test_no_whole_bytes(self, library, width, count):
        codes = library(np.zeros((2, count), np.uint8))
        message = rf"shape \(2, {count}\), but axis -1 must be a multiple of {CHUNK[width]} to pack"
        with pytest.raises(ValueError, match=message):
            NarrowArray.from_codes(codes, WIDTHS[width])
        with pytest.raises(ValueError, match=r"axis -1 must be a multiple"):
            narrow(WIDTHS[width]).zeros((2, count))

    @pytest.mark.parametrize("count", [1, 2, 4, 5])
    def test_no_whole_chunks(self, count):
        with pytest.raises(ValueError, match=r"must hold a multiple of 3 bytes for E3M2"):
            NarrowArray(np.zeros(count, np.uint8), "E3M2")

    @libraries
    def test_axis(self, library):
        data = library(np.zeros((2, 4), np.uint8))
        for axis in (2, -3):
            for make in (NarrowArray, NarrowArray.from_codes):
                with pytest.raises(ValueError, match=rf"axis {axis} is none of shape \(2, 4\)"):
                    make(data, "E2M1", axis)
        with pytest.raises(ValueError, match=r"axis -1 is none of shape \(\)"):
            NarrowArray(library(np.uint8(3)), "E2M1")
        for axis in (None, 1.0, True, "0"):
            with pytest.raises(TypeError, match="axis must be an int, got"):
                NarrowArray(data, "E2M1", axis)

    @pytest.mark.parametrize("data", [[1, 2], 3, None, "ab", b"ab"], ids=repr)
    def test_data_that_is_no_array(self, data):
        for make in (NarrowArray, NarrowArray.from_codes, NarrowArray.pack):
            with pytest.raises(TypeError, match=r"must be a jax.Array or numpy.ndarray, got"):
                make(data, "E2M1")

    @libraries
    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32, ml_dtypes.float8_e4m3fn])
    def test_bytes_of_another_dtype(self, library, dtype):
        for make, name in ((NarrowArray, "data"), (NarrowArray.from_codes, "codes")):
            with pytest.raises(TypeError, match=rf"{name} has dtype {np.dtype(dtype)}, wanted uint8"):
                make(library(np.zeros(4, dtype)), "E2M1")

    @pytest.mark.parametrize("dtype", [np.float32, "Int32", ml_dtypes.bfloat16, np.int16], ids=str)
    def test_a_wide_dtype(self, dtype):
        for make in (NarrowArray, NarrowArray.from_codes, NarrowArray.pack):
            with pytest.raises(ValueError, match=r"dtype must have 1 to 8 bits"):
                make(np.zeros(4, np.uint8), dtype)
        with pytest.raises(ValueError, match=r"narrow: dtype must have 1 to 8 bits"):
            narrow(dtype)

    @pytest.mark.parametrize("dtype", [DType.MXFP4, DType.Any, None, 4, bool], ids=repr)
    def test_no_simple_dtype(self, dtype):
        with pytest.raises(TypeError, match="wanted a"):
            NarrowArray(np.zeros(4, np.uint8), dtype)

    def test_an_unknown_name(self):
        with pytest.raises(LookupError, match="fp4"):
            narrow("fp4")

    @libraries
    @pytest.mark.parametrize(
        ("source", "dtype", "wanted"),
        [
            (np.int32, "E2M1", "float16, bfloat16, float32 or float4_e2m1fn"),
            (np.bool_, "E2M1", "float16, bfloat16, float32 or float4_e2m1fn"),
            (np.bool_, ml_dtypes.int4, "float16, bfloat16, float32 or an integer"),
            (np.float32, np.bool_, "bool"),
            (np.int32, np.bool_, "bool"),
        ],
        ids=["int-float", "bool-float", "bool-int", "float-bool", "int-bool"],
    )
    def test_values_that_do_not_convert(self, library, source, dtype, wanted):
        with pytest.raises(TypeError, match=rf"x has dtype {np.dtype(source)}, wanted {wanted} to pack"):
            NarrowArray.pack(library(np.zeros(8, source)), dtype)

    def test_float64(self):
        with pytest.raises(TypeError, match="x has dtype float64, wanted float16, bfloat16 or float32"):
            NarrowArray.pack(np.zeros(8), "E2M1")

    @libraries
    def test_codes_without_values(self, library):
        coded = NarrowArray.from_codes(library(np.arange(8, dtype=np.uint8)), WIDTHS[5])
        for use in (
            coded.unpack,
            lambda: coded.astype(np.float32),
            lambda: coded[0],
            lambda: np.asarray(coded),
        ):
            with pytest.raises(TypeError, match=r"test_narrow.Five has no scalar type"):
                use()
        with pytest.raises(TypeError, match=r"test_narrow.Five has no scalar type"):
            NarrowArray.pack(library(np.zeros(8, np.float32)), WIDTHS[5])
        with pytest.raises(TypeError, match="no scalar type"):
            narrow("E2M1").zeros(8).astype(WIDTHS[5])

    def test_astype_that_no_array_holds(self):
        with pytest.raises(TypeError, match="JAX has no arrays of float6_e2m3fn"):
            narrow("E2M1").zeros(8).astype("E2M3")
        with pytest.raises(TypeError, match="does not convert to Bool"):
            narrow("E2M1").zeros(8).astype(np.bool_)


@libraries
class TestCases:
    """Public bug reports of peers, by their number."""

    def test_p01_nibble_order(self, library):
        packed = NarrowArray.from_codes(library(np.uint8([1, 2, 3, 4])), "E2M1")
        assert packed.data.tolist() == [0x21, 0x43]

    def test_p05_upper_bits(self, library):
        byte = library(np.uint8([0xF3]))
        assert decode(byte, "E2M1").tolist() == [1.5]
        assert NarrowArray.from_codes(library(np.uint8([0xF3, 0])), "E2M1").codes().tolist() == [3, 0]

    def test_p06_two_bit_order(self, library):
        packed = NarrowArray.from_codes(library(np.uint8([0, 1, 2, 1])), ml_dtypes.uint2)
        assert packed.data.tolist() == [0x64]

    def test_p08_gguf_mxfp4_is_not_the_consecutive_order(self, library):
        records = PACK["gguf_mxfp4_rec"]
        codes = np.asarray(NarrowArray(library(records[:, 1:]), "E2M1").codes())
        halves = np.concatenate([codes[:, ::2], codes[:, 1::2]], axis=1)
        with np.errstate(over="ignore"):
            got = decode(halves, "E2M1") * decode(records[:, :1], "E8M0")
        # gguf decodes to integers first, which lose the sign of zero.
        np.testing.assert_array_equal(np.where(halves == 8, np.float32(0), got), PACK["gguf_mxfp4_deq"])
        assert np.signbit(got[halves == 8]).all()
        np.testing.assert_array_equal(PACK["c4_pack_ggml_half_split"], half_split(library(PACK["c4"])))

    def test_p09_the_shape_counts_values(self, library):
        packed = NarrowArray.pack(library(np.zeros((2, 32), np.float32)), "E2M1")
        assert (packed.shape, packed.data.shape, packed.data.dtype, packed.nbytes) == (
            (2, 32),
            (2, 16),
            np.uint8,
            32,
        )

    def test_e13_int4_saturates(self, library):
        packed = narrow(ml_dtypes.int4)(library(np.int32([8, -9, 300, 7])))
        assert packed.unpack().tolist() == [7, -8, 7, 7]


def half_split(codes):
    """ggml's order: byte j holds values j and j + 16."""
    consecutive = np.stack([np.asarray(codes)[:, :16], np.asarray(codes)[:, 16:]], -1).reshape(codes.shape)
    return NarrowArray.from_codes(consecutive, "E2M1").data
