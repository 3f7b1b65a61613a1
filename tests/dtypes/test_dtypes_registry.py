"""Names, kinds, the frozen namespace, and the way from what a JAX user holds to a descriptor and back."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dtype_samples import BFLOAT16, FLOAT16, Planar, fresh, fresh_block, is_free

from jaxquant.dtypes import (
    BlockScaledDType,
    CompoundDType,
    DType,
    DTypeCategory,
    Level,
    SimpleDType,
    SymbolicBits,
)
from jaxquant.layout import Layout

SIMPLE = {
    "Bool": (8, "Any", np.bool_),
    "Int8": (8, "Integer", np.int8),
    "Int32": (32, "Integer", np.int32),
    "Float32": (32, "Floating", np.float32),
    "Float64": (64, "Floating", np.float64),
    "E8M0": (8, "Floating", ml_dtypes.float8_e8m0fnu),
    "E5M2": (8, "Floating", ml_dtypes.float8_e5m2),
    "E4M3": (8, "Floating", ml_dtypes.float8_e4m3fn),
    "E3M2": (6, "Floating", ml_dtypes.float6_e3m2fn),
    "E2M3": (6, "Floating", ml_dtypes.float6_e2m3fn),
    "E2M1": (4, "Floating", ml_dtypes.float4_e2m1fn),
}


class TestBuiltIns:
    @pytest.mark.parametrize("name", SIMPLE)
    def test_simple(self, name):
        dtype, (bits, supertype, scalar_type) = getattr(DType, name), SIMPLE[name]
        assert type(dtype) is SimpleDType
        assert (dtype.name, dtype.value, dtype.bits) == (name, name, bits)
        assert dtype.supertype is getattr(DType, supertype)
        assert dtype.scalar_type is scalar_type
        assert dtype.numpy_dtype == np.dtype(scalar_type)
        assert repr(dtype) == f"SimpleDType('{name}')"
        assert (dtype.is_simple(), dtype.is_compound(), dtype.is_category()) == (True, False, False)
        assert dtype.is_opaque_storage() is False

    @pytest.mark.parametrize(
        ("name", "supertype", "opaque"),
        [("Any", None, True), ("Floating", "Any", True), ("Integer", "Any", False)],
    )
    def test_categories(self, name, supertype, opaque):
        dtype = getattr(DType, name)
        assert type(dtype) is DTypeCategory
        assert dtype.supertype is (supertype and getattr(DType, supertype))
        assert dtype.is_opaque_storage() is opaque
        assert (dtype.is_simple(), dtype.is_compound(), dtype.is_category()) == (False, False, True)

    def test_nothing_else_is_built_in(self):
        command = "from jaxquant.dtypes import DType; print(*(d.name for d in DType.registered()))"
        names = subprocess.run(
            [sys.executable, "-c", command], check=True, capture_output=True, text=True
        ).stdout.split()
        categories = ["Any", "Floating", "Integer"]
        blocks = ["MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E3M2", "MXFP6_E2M3", "MXFP4", "MXINT8", "NVFP4"]
        assert names == categories + list(SIMPLE) + blocks

    def test_supertypes(self):
        assert DType.E4M3.supertypes() == (DType.Floating, DType.Any)
        assert DType.Any.supertypes() == ()
        assert DType.E4M3.is_subtype_of(DType.Floating)
        assert DType.E4M3.is_subtype_of(DType.Any)
        assert DType.E4M3.is_subtype_of(DType.E4M3)
        assert not DType.E4M3.is_subtype_of(DType.Integer)
        assert not DType.Floating.is_subtype_of(DType.E4M3)
        for other in ("Any", None, SimpleDType, np.float32):
            with pytest.raises(TypeError, match="other"):
                DType.E4M3.is_subtype_of(other)

    @pytest.mark.parametrize("cls", [DType, DTypeCategory, SimpleDType, CompoundDType, BlockScaledDType])
    @pytest.mark.parametrize("name", ["Float32", "MXFP4", "from_name", "name", "anything", "__doc__"])
    def test_the_namespace_is_frozen(self, cls, name):
        before = getattr(cls, name, None)
        with pytest.raises(AttributeError, match="frozen"):
            setattr(cls, name, None)
        with pytest.raises(AttributeError, match="frozen"):
            delattr(cls, name)
        assert getattr(cls, name, None) is before or name == "from_name"

    def test_an_extension_adds_no_member(self):
        before = set(vars(DType))
        name = f"Extension{fresh_block()}"
        SimpleDType(name, bits=5, supertype=DType.Any)
        assert set(vars(DType)) == before
        assert not hasattr(DType, name)


class TestNames:
    @pytest.mark.parametrize("name", ["", None, 3, b"name", ("name",), np.array("name")], ids=repr)
    @pytest.mark.parametrize("kind", ["category", "simple", "compound", "block-scaled"])
    def test_bad_names_are_value_errors(self, name, kind):
        with pytest.raises(ValueError, match="name"):
            _construct(kind, name)

    @pytest.mark.parametrize("kind", ["category", "simple", "compound", "block-scaled"])
    def test_one_registry_for_all_kinds(self, kind):
        name = fresh()
        first = _construct(kind, name)
        for other in ("category", "simple", "compound", "block-scaled"):
            with pytest.raises(ValueError, match=name):
                _construct(other, name)
        assert DType.from_name(name) is first
        with pytest.raises(ValueError, match="Float32"):
            _construct(kind, "Float32")

    def test_a_taken_name_claims_no_chain(self):
        levels = [Level(DType.E8M0, fresh_block())]
        with pytest.raises(ValueError, match="Float32"):
            BlockScaledDType("Float32", element=DType.E2M1, levels=levels)
        BlockScaledDType(fresh(), element=DType.E2M1, levels=levels)

    def test_string_subclasses_are_stored_as_exact_strings(self):
        class Odd(str):
            def __eq__(self, other):
                return True

            def __hash__(self):
                return 0

        name = fresh()
        dtype = DTypeCategory(Odd(name))
        assert type(dtype.name) is str
        assert DType.from_name(name) is DType.from_name(Odd(name)) is dtype

    def test_from_name(self):
        assert DType.from_name("Float32") is SimpleDType.from_name("Float32") is DType.Float32
        for bad in (None, 3, b"Float32", DType.Float32, np.float32):
            with pytest.raises(TypeError, match="string"):
                DType.from_name(bad)
        for unknown in ("", "float32", "Float33"):
            with pytest.raises(LookupError, match="registered"):
                DType.from_name(unknown)
        with pytest.raises(LookupError, match="CompoundDType"):
            CompoundDType.from_name("Float32")
        with pytest.raises(LookupError, match="BlockScaledDType"):
            BlockScaledDType.from_name(Planar(fresh(), simple_types=[DType.Int8]).name)

    def test_registered_is_a_snapshot_narrowed_by_class(self):
        before = DType.registered()
        dtype = Planar(fresh(), simple_types=[DType.Int8])
        assert type(before) is tuple
        assert dtype not in before
        assert DType.registered() == (*before, dtype)
        assert Planar.registered()[-1] is dtype
        assert {type(d) for d in Planar.registered()} == {Planar}
        assert DType.Float32 in SimpleDType.registered()
        assert all(d.is_compound() for d in CompoundDType.registered())
        assert DType.MXFP4 in CompoundDType.registered()


def _construct(kind, name):
    if kind == "category":
        return DTypeCategory(name)
    if kind == "simple":
        return SimpleDType(name, bits=3, supertype=DType.Any)
    if kind == "compound":
        return Planar(name, simple_types=[DType.Int8])
    return BlockScaledDType(name, element=DType.Int8, levels=[Level(DType.E8M0, fresh_block())])


class TestKinds:
    def test_abstract_unless_the_class_says_otherwise(self):
        class Simple(SimpleDType):
            pass

        class Concrete(Simple, abstract=False):
            pass

        class Below(Concrete):
            pass

        for cls in (DType, CompoundDType, Simple, Below):
            with pytest.raises(TypeError, match="abstract"):
                cls(fresh(), bits=3, supertype=DType.Any)
        assert Concrete(fresh(), bits=3, supertype=DType.Any).is_simple()

    @pytest.mark.parametrize("abstract", [0, 1, None, "no"])
    def test_abstract_must_be_a_bool(self, abstract):
        with pytest.raises(TypeError, match="abstract"):
            type(DType)("Kind", (SimpleDType,), {}, abstract=abstract)

    def test_a_concrete_dtype_is_one_of_the_kinds(self):
        class Family(DType):
            pass

        for base in (DType, Family):
            with pytest.raises(TypeError, match="DTypeCategory"):
                type(DType)("Loose", (base,), {}, abstract=False)
        with pytest.raises(TypeError):
            type(DType)("Both", (SimpleDType, CompoundDType), {}, abstract=False)

    @pytest.mark.parametrize(
        "bits", [True, False, 0, -8, 8.0, "8", None, np.int64(8), (8,), np.True_], ids=repr
    )
    def test_bad_bits_are_value_errors(self, bits):
        name = fresh()
        with pytest.raises(ValueError, match="bits"):
            SimpleDType(name, bits=bits, supertype=DType.Any)
        assert is_free(name)

    @pytest.mark.parametrize(
        "supertype", [None, "Any", DType.Float32, DType.MXFP4, DTypeCategory, 3], ids=repr
    )
    def test_bad_supertypes_are_type_errors(self, supertype):
        name = fresh()
        with pytest.raises(TypeError, match="supertype"):
            SimpleDType(name, bits=8, supertype=supertype)
        if supertype is not None:
            with pytest.raises(TypeError, match="supertype"):
                DTypeCategory(name, supertype=supertype)
        assert is_free(name)

    @pytest.mark.parametrize("opaque", [1, 0, None, "yes"])
    def test_opaque_storage_must_be_a_bool(self, opaque):
        with pytest.raises(TypeError, match="opaque_storage"):
            DTypeCategory(fresh(), opaque_storage=opaque)

    def test_extension_category(self):
        category = DTypeCategory(fresh(), supertype=DType.Floating)
        dtype = SimpleDType(fresh(), bits=16, supertype=category)
        assert dtype.supertypes() == (category, DType.Floating, DType.Any)
        assert category.is_opaque_storage() is False

    def test_a_long_chain_of_categories_needs_no_recursion(self):
        chain = [DType.Any]
        for _ in range(300):
            chain.append(DTypeCategory(fresh(), supertype=chain[-1]))
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + 100)
        try:
            found, below = chain[-1].supertypes(), chain[-1].is_subtype_of(DType.Any)
        finally:
            sys.setrecursionlimit(limit)
        assert found == tuple(reversed(chain[:-1]))
        assert below is True

    def test_a_type_error_of_a_user_s_iterator_passes_unchanged(self):
        class Failing:
            def __iter__(self):
                raise TypeError("the user's own")

        with pytest.raises(TypeError, match="the user's own"):
            Planar(fresh(), simple_types=Failing())

    @pytest.mark.parametrize("how", ["scale", "element", "levels", "simple_types", "supertype", "from_any"])
    def test_a_failing_repr_does_not_replace_the_error(self, how):
        class Mute:
            def __repr__(self):
                raise RuntimeError("no repr")

        attempts = {
            "scale": lambda: Level(Mute(), 1),
            "element": lambda: BlockScaledDType(fresh(), element=Mute(), levels=[Level(DType.E8M0, 1)]),
            "levels": lambda: BlockScaledDType(fresh(), element=DType.Int8, levels=[Mute()]),
            "simple_types": lambda: Planar(fresh(), simple_types=[Mute()]),
            "supertype": lambda: DTypeCategory(fresh(), supertype=Mute()),
            "from_any": lambda: DType.from_any(Mute()),
        }
        with pytest.raises(TypeError, match="got a Mute without a repr"):
            attempts[how]()

    def test_ints_too_long_to_print_are_refused_for_what_they_are(self):
        with pytest.raises(ValueError, match="block must be at least 1"):
            Level(DType.E8M0, -(10**5000))
        with pytest.raises(ValueError, match="extents must be at least 1"):
            Layout((-(10**5000),), (1,))
        with pytest.raises(ValueError, match="element_count"):
            SymbolicBits(4.5, 32.0).evaluate(10**400)

    @pytest.mark.parametrize(
        ("scalar_type", "bits", "error"),
        [
            (float, 64, TypeError),
            (np.floating, 16, TypeError),
            (np.dtype("float16"), 16, TypeError),
            ("float16", 16, TypeError),
            (jnp.float16, 16, TypeError),
            (np.float16(1), 16, TypeError),
            (object, 64, TypeError),
            (np.float16, 8, ValueError),
            (np.float16, 32, ValueError),
            (ml_dtypes.float4_e2m1fn, 3, ValueError),
            (ml_dtypes.int4, 9, ValueError),
        ],
        ids=str,
    )
    def test_bad_scalar_types(self, scalar_type, bits, error):
        name = fresh()
        with pytest.raises(error):
            SimpleDType(name, bits=bits, supertype=DType.Any, scalar_type=scalar_type)
        assert is_free(name)

    @pytest.mark.parametrize(
        ("scalar_type", "bits"),
        [(ml_dtypes.int4, 4), (ml_dtypes.int4, 8), (np.bool_, 1), (np.uint8, 8), (np.complex64, 64)],
        ids=str,
    )
    def test_scalar_types_that_fit(self, scalar_type, bits):
        dtype = SimpleDType(fresh(), bits=bits, supertype=DType.Any, scalar_type=scalar_type)
        assert (dtype.scalar_type, dtype.numpy_dtype) == (scalar_type, np.dtype(scalar_type))

    def test_an_extension_has_no_scalar_type_unless_it_names_one(self):
        dtype = SimpleDType(fresh(), bits=5, supertype=DType.Any)
        assert (dtype.scalar_type, dtype.numpy_dtype) == (None, None)


class TestFromAny:
    @pytest.mark.parametrize("name", SIMPLE)
    def test_every_spelling_of_a_built_in(self, name):
        dtype, scalar_type = getattr(DType, name), SIMPLE[name][2]
        for spelling in (dtype, name, scalar_type, np.dtype(scalar_type)):
            assert DType.from_any(spelling) is dtype
        assert DType.from_any(dtype.numpy_dtype) is dtype
        assert DType.from_any(np.zeros(1, scalar_type).dtype) is dtype

    @pytest.mark.parametrize(
        "name",
        ["bool_", "int8", "int32", "float32", "float64", "float8_e8m0fnu", "float8_e5m2", "float8_e4m3fn"],
    )
    def test_jax_scalar_types(self, name):
        scalar_type = getattr(jnp, name)
        dtype = DType.from_any(scalar_type)
        assert dtype.numpy_dtype == np.dtype(scalar_type)
        if name != "float64":
            assert DType.from_any(jnp.zeros(1, scalar_type).dtype) is dtype

    def test_extensions(self):
        assert DType.from_any(np.float16).scalar_type is np.float16
        assert DType.from_any(jnp.bfloat16).scalar_type is ml_dtypes.bfloat16
        assert DType.from_any(FLOAT16) is FLOAT16
        assert DType.from_any(BFLOAT16.name) is BFLOAT16

    def test_the_first_holder_of_a_scalar_type_answers(self):
        second = SimpleDType(fresh(), bits=32, supertype=DType.Floating, scalar_type=np.float32)
        assert DType.from_any(np.float32) is DType.Float32
        assert DType.from_any(second) is second

    @pytest.mark.parametrize(
        "value",
        [
            None,
            3,
            1.5,
            float,
            int,
            bool,
            str,
            object,
            np.floating,
            np.generic,
            np.float32(1),
            b"Float32",
            np.zeros(3),
            SimpleDType,
            DType,
            ("Float32",),
            type("Sub", (np.float32,), {}),
            type("Carrier", (), {"dtype": np.dtype("f4")}),
            type("JaxSub", (jnp.float32,), {}),
        ],
        ids=repr,
    )
    def test_anything_else_is_a_type_error(self, value):
        with pytest.raises(TypeError):
            DType.from_any(value)

    @pytest.mark.parametrize(
        "value",
        [
            "float32",
            "",
            np.dtype(">f4"),
            np.dtype("M8[s]"),
            np.complex128,
            np.dtype([("a", "f4")]),
            np.uint64,
            jnp.uint16,
            np.dtype(object),
            np.dtype(("f4", (2,))),
        ],
        ids=repr,
    )
    def test_unregistered_is_a_lookup_error(self, value):
        with pytest.raises(LookupError):
            DType.from_any(value)

    def test_jax_arrays_are_no_dtypes(self):
        with pytest.raises(TypeError):
            DType.from_any(jnp.zeros(3))
        with pytest.raises(TypeError):
            DType.from_any(jax.random.key(0).dtype)

    def test_narrowed_by_class(self):
        assert SimpleDType.from_any("Float32") is DType.Float32
        for value in (DType.MXFP4, "MXFP4"):
            with pytest.raises(LookupError, match="SimpleDType"):
                SimpleDType.from_any(value)
        with pytest.raises(LookupError, match="CompoundDType"):
            CompoundDType.from_any(np.float32)

    def test_a_false_class_is_no_descriptor(self):
        class Impostor:
            __class__ = SimpleDType
            name = "Float32"

        assert isinstance(Impostor(), SimpleDType)
        with pytest.raises(TypeError):
            DType.from_any(Impostor())
        with pytest.raises(TypeError):
            Planar(fresh(), simple_types=[Impostor()])


class TestThreads:
    ROUNDS, THREADS = 200, 8

    @pytest.mark.parametrize("race", ["name", "chain", "both"])
    def test_exactly_one_wins(self, race):
        barrier = threading.Barrier(self.THREADS, timeout=60)
        names = [fresh("race") for _ in range(self.ROUNDS)]
        blocks = [fresh_block() for _ in range(self.ROUNDS)]
        results = [[None] * self.THREADS for _ in range(self.ROUNDS)]

        def run(thread):
            for i in range(self.ROUNDS):
                name = names[i] if race != "chain" else f"{names[i]}.{thread}"
                levels = [Level(DType.E8M0, blocks[i] if race != "name" else blocks[i] + thread * 10**9)]
                barrier.wait()
                try:
                    results[i][thread] = BlockScaledDType(name, element=DType.E2M1, levels=levels)
                except ValueError as error:
                    results[i][thread] = error
                found = [d for d in BlockScaledDType.registered() if d.name.startswith(names[i])]
                # Whatever another thread can see is complete.
                assert all(d.levels and d.structure() and DType.from_name(d.name) is d for d in found)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(self.THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, outcome in enumerate(results):
            winners = [d for d in outcome if isinstance(d, BlockScaledDType)]
            assert len(winners) == 1
            assert sum(isinstance(error, ValueError) for error in outcome) == self.THREADS - 1
            assert [d for d in DType.registered() if d.name.startswith(f"{names[i]}")] == winners
            chain = winners[0].levels
            assert [d for d in BlockScaledDType.registered() if d.levels == chain] == winners


class TestConstruction:
    def test_a_constructor_that_raises_at_any_depth_claims_nothing(self):
        class Middle(SimpleDType, abstract=False):
            def __init__(self, name, fail):
                super().__init__(name, bits=8, supertype=DType.Any)
                if fail == "middle":
                    raise RuntimeError(fail)

        class Outer(Middle, abstract=False):
            def __init__(self, name, fail):
                super().__init__(name, fail)
                if fail == "outer":
                    raise RuntimeError(fail)

            def structure_extension(self):
                return ([],) if self.name.endswith("extension") else ()

        for fail in ("middle", "outer"):
            name = fresh()
            with pytest.raises(RuntimeError, match=fail):
                Outer(name, fail)
            assert is_free(name)
            Outer(name, "never")
        name = fresh("extension") + "extension"
        with pytest.raises(TypeError, match="structure"):
            Outer(name, "never")
        assert is_free(name)

    def test_nothing_is_registered_before_the_outermost_constructor_returns(self):
        seen = []

        class Peek(SimpleDType, abstract=False):
            def __init__(self, name):
                super().__init__(name, bits=8, supertype=DType.Any)
                seen.append(is_free(name))
                with pytest.raises(TypeError, match="registered"):
                    Planar(fresh(), simple_types=[self])

        dtype = Peek(fresh())
        assert seen == [True]
        assert Planar(fresh(), simple_types=[dtype]).simple_types == (dtype,)

    def test_a_name_taken_during_construction_is_lost(self):
        class Slow(SimpleDType, abstract=False):
            def __init__(self, name):
                super().__init__(name, bits=8, supertype=DType.Any)
                DTypeCategory(name)

        name = fresh()
        with pytest.raises(ValueError, match="taken"):
            Slow(name)
        assert DType.from_name(name).is_category()

    def test_a_constructor_must_reach_the_model_once(self):
        class Never(SimpleDType, abstract=False):
            def __init__(self, name):
                pass

        class Twice(SimpleDType, abstract=False):
            def __init__(self, name):
                super().__init__(name, bits=8, supertype=DType.Any)
                super().__init__(fresh(), bits=8, supertype=DType.Any)

        class Around(BlockScaledDType, abstract=False):
            def __init__(self, name):
                CompoundDType.__init__(self, name, simple_types=[DType.Int8])

        class Other(SimpleDType, abstract=False):
            def __init__(self, name):
                DTypeCategory.__init__(self, name)

        for cls in (Never, Twice, Around, Other):
            name = fresh()
            with pytest.raises(TypeError):
                cls(name)
            assert is_free(name)

    def test_own_state_before_and_after(self):
        class Own(SimpleDType, abstract=False):
            def __init__(self, name):
                self.before = 1
                super().__init__(name, bits=8, supertype=DType.Any)
                self.after = 2

            def structure_extension(self):
                return (self.before, self.after)

            def total(self):
                return self.before + self.after

        dtype = Own(fresh())
        assert dtype.total() == 3
        assert dtype.structure()[-1] == ("extension", ("tuple", 1, 2))
        for name in ("before", "new", "name", "bits"):
            with pytest.raises(AttributeError, match="immutable"):
                setattr(dtype, name, 9)
        with pytest.raises(AttributeError, match="immutable"):
            del dtype.before

    def test_own_state_may_not_be_the_models_even_during_construction(self):
        class Grab(SimpleDType, abstract=False):
            def __init__(self, name):
                self.bits = 3
                super().__init__(name, bits=8, supertype=DType.Any)

        name = fresh()
        with pytest.raises(AttributeError, match="belongs to the model"):
            Grab(name)
        assert is_free(name)
