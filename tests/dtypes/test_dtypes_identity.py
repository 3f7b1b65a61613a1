"""Immutability, structure, copying, pickling across processes, hostile subclasses, and use under jit."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dtype_samples import E4M3_PER_16, Planar, SizeLimit, context, fresh, is_free

import jaxquant
from jaxquant.dtypes import (
    BlockScaledDType,
    DType,
    DTypeCategory,
    Level,
    LevelExtent,
    RepresentationRule,
    SimpleDType,
    SymbolicBits,
)
from jaxquant.layout import Layout
from jaxquant.representation import Plane, Representation

VALUES = [
    Layout(4, 1),
    Level(DType.E8M0, 32),
    SymbolicBits(4.5, 32),
    DType.E4M3.float_facts,
    context(Layout(4, 1), 1),
    Plane(np.zeros(4), Layout(4, 1)),
    Representation(DType.Float32, [Plane(np.zeros(4, np.float32), Layout(4, 1))]),
]
ALL_KINDS = [DType.Floating, DType.E4M3, DType.NVFP4, E4M3_PER_16]


class TestImmutability:
    @pytest.mark.parametrize("dtype", ALL_KINDS, ids=repr)
    @pytest.mark.parametrize(
        "name", ["name", "value", "supertype", "bits", "MXFP4", "new", "__class__", "_DType__name"]
    )
    def test_set_and_delete_are_refused(self, dtype, name):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(dtype, name, DTypeCategory)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(dtype, name)

    @pytest.mark.parametrize("dtype", ALL_KINDS, ids=repr)
    def test_construct_again_is_refused(self, dtype):
        before = dtype.structure()
        if dtype.is_category():
            arguments = {}
        elif dtype.is_simple():
            arguments = {"bits": 3, "supertype": DType.Any}
        else:
            arguments = {"element": DType.Int8, "levels": [Level(DType.E8M0, 3)]}
        with pytest.raises(AttributeError, match="immutable"):
            dtype.__init__(fresh(), **arguments)
        assert dtype.structure() is before

    @pytest.mark.parametrize("dtype", ALL_KINDS, ids=repr)
    def test_copies_are_the_same_object(self, dtype):
        assert copy.copy(dtype) is copy.deepcopy(dtype) is copy.deepcopy({"d": [dtype]})["d"][0] is dtype

    @pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
    def test_values_refuse_any_attribute(self, value):
        for name in (dataclasses.fields(value)[0].name, "new", "__class__"):
            with pytest.raises(AttributeError, match=f"immutable.*{name}"):
                setattr(value, name, type(value))
            with pytest.raises(AttributeError, match=f"immutable.*{name}"):
                delattr(value, name)
        assert not hasattr(value, "new")

    def test_equality_and_hash_are_identity(self):
        assert DType.E4M3 == DType.E4M3 != DType.E5M2
        assert DType.E4M3 != "E4M3"
        assert hash(DType.E4M3) == object.__hash__(DType.E4M3)


class TestStructure:
    def test_it_is_recorded_once(self):
        class Drifting(SimpleDType, abstract=False):
            asked = 0

            def structure_extension(self):
                type(self).asked += 1
                return (type(self).asked,)

        dtype = Drifting(fresh(), bits=8, supertype=DType.Any)
        assert dtype.structure() is dtype.structure()
        assert Drifting.asked == 1

    def test_it_contains_the_structures_of_everything_referenced(self):
        rule = SizeLimit(4)
        dtype = Planar(
            fresh(), simple_types=[DType.E4M3], representation_rules=[rule], supertype=DType.Floating
        )
        fields = dict(dtype.structure())
        assert fields["supertype"] == DType.Floating.structure()
        assert fields["simple_types"] == ("tuple", DType.E4M3.structure())
        assert fields["representation_rules"] == ("tuple", rule.structure())
        assert dict(DType.NVFP4.structure())["element"] == DType.E2M1.structure()
        assert fields["class"] == (("module", "dtype_samples"), ("qualname", "Planar"))

    @pytest.mark.parametrize("where", ["rule", "dtype"])
    def test_module_and_qualified_name_are_told_apart(self, where):
        def identity(module, qualname):
            body = {"__module__": module, "__qualname__": qualname}
            if where == "rule":
                body["validate"] = lambda self, context: None
                made = type(RepresentationRule)("C", (RepresentationRule,), body)()
            else:
                cls = type(DType)("C", (SimpleDType,), body, abstract=False)
                made = cls(fresh(), bits=8, supertype=DType.Any)
            return dict(made.structure())["class"]

        assert identity("a.b", "C") == identity("a.b", "C") != identity("a", "b.C")

    def test_descriptors_differ(self):
        structures = [dtype.structure() for dtype in DType.registered()]
        assert len(set(structures)) == len(structures)

    @pytest.mark.parametrize("extension", [[], None, "a", (1j,), ([],), (b"",)], ids=repr)
    def test_bad_extensions_register_nothing(self, extension):
        class Extended(SimpleDType, abstract=False):
            def structure_extension(self):
                return extension

        name = fresh()
        with pytest.raises(TypeError, match="structure"):
            Extended(name, bits=8, supertype=DType.Any)
        assert is_free(name)


# Names that the model owns, by the class a hostile subclass would derive from.
OWNED = {
    DTypeCategory: ["is_opaque_storage", "name", "describe"],
    SimpleDType: [
        "bits",
        "scalar_type",
        "numpy_dtype",
        "max",
        "float_facts",
        "Float32",
        "value",
        "registered",
        "structure",
        "supertypes",
        "is_simple",
        "is_subtype_of",
        "from_any",
        "_SimpleDType__bits",
        "_DType__sealed",
        "__eq__",
        "__hash__",
        "__new__",
        "__setattr__",
        "__delattr__",
        "__getattribute__",
        "__class__",
        "__repr__",
        "__copy__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__ne__",
    ],
    BlockScaledDType: [
        "simple_types",
        "num_carriers",
        "representation_rules",
        "element",
        "levels",
        "bits_per_element",
        "num_axes",
        "MXFP4",
        "is_compound",
    ],
}
CASES = [(cls, member) for cls, members in OWNED.items() for member in members]


class Text(str):
    """A string that is not exact, so that it may compare as it likes."""


class TestHostileSubclasses:
    @pytest.mark.parametrize(("cls", "member"), CASES, ids=lambda part: getattr(part, "__name__", part))
    @pytest.mark.parametrize("where", ["body", "property", "mixin", "deep-mixin", "slot"])
    def test_shadowing_is_a_type_error_at_class_creation(self, cls, member, where):
        hostile = property(lambda self: 1) if where == "property" else (lambda self, *args: 1)
        bases, body = (cls,), {}
        if where == "slot":
            body["__slots__"] = (member,)
        elif where.endswith("mixin"):
            mixin = type("Mixin", (), {member: hostile})
            bases = ((mixin if where == "mixin" else type("Deeper", (mixin,), {})), cls)
        else:
            body[member] = hostile
        with pytest.raises(TypeError, match="shadows"):
            type(DType)("Hostile", bases, body, abstract=False)

    @pytest.mark.parametrize(("cls", "member"), CASES, ids=lambda part: getattr(part, "__name__", part))
    def test_assigning_or_deleting_one_later_is_an_attribute_error(self, cls, member):
        extension = type(DType)("Extension", (cls,), {})
        with pytest.raises(AttributeError, match="belongs to the model"):
            setattr(extension, member, None)
        with pytest.raises(AttributeError, match="belongs to the model"):
            delattr(extension, member)

    @pytest.mark.parametrize("member", ["__bases__", "__qualname__", "__module__", "__name__"])
    def test_the_identity_of_a_class_stays(self, member):
        extension = type(DType)("Extension", (SimpleDType,), {})
        with pytest.raises(AttributeError, match="belongs to the model"):
            setattr(extension, member, getattr(DTypeCategory, member))

    def test_own_members_are_free(self):
        class Extension(SimpleDType, abstract=False):
            field = 1
            _name = _bits = _structure = 2

            def method(self):
                return self.field

        Extension.field = 3
        Extension.later = 4
        del Extension.later
        assert Extension(fresh(), bits=8, supertype=DType.Any).method() == 3

    def test_getattr_cannot_stand_for_the_model_s_constructor(self):
        name = fresh()
        private = {"_DType__fields": (), "_DType__name": name, "_DType__representation": None}

        class Ghost(SimpleDType, abstract=False):
            def __init__(self):
                pass

            def __getattr__(self, asked):
                return private.get(asked)

        with pytest.raises(TypeError, match="never calls"):
            Ghost()
        assert is_free(name)
        with pytest.raises(TypeError, match="not constructed"):
            Ghost.__new__(Ghost).structure()

    def test_getattr_cannot_complete_a_rule(self):
        class Ghost(RepresentationRule):
            def validate(self, context):
                pass

            def __getattr__(self, asked):
                return ()

        with pytest.raises(TypeError, match="representation_rules"):
            Planar(fresh(), simple_types=[DType.Int8], representation_rules=[object.__new__(Ghost)])
        with pytest.raises(TypeError, match="not constructed"):
            object.__new__(Ghost).structure()

    def test_a_getattr_that_answers_everything_is_free(self):
        class Open(SimpleDType, abstract=False):
            def __init__(self, name):
                self.own = 1
                super().__init__(name, bits=8, supertype=DType.Any)

            def __getattr__(self, asked):
                return None

        class OpenRule(RepresentationRule):
            __slots__ = ("own", "unset")

            def __init__(self):
                self.own = 1

            def validate(self, context):
                pass

            def __getattr__(self, asked):
                return None

        name = fresh()
        dtype = Open(name)
        assert DType.from_name(name) is dtype
        assert (dtype.own, dtype.other, dtype.bits) == (1, None, 8)
        rule = OpenRule()
        assert (rule.own, rule.unset, rule.other) == (1, None, None)
        with pytest.raises(AttributeError, match="immutable"):
            rule.own = 2
        _, (_, state, structure) = rule.__reduce__()
        assert state["own"] == 1
        assert "unset" not in state
        assert structure == rule.structure()

    @pytest.mark.parametrize("how", ["in the constructor", "replaced", "afterwards"])
    def test_the_instance_dict_does_not_reach_the_model(self, how):
        hostile = {
            name: lambda *args: "hostile" for name in ("structure", "supertypes", "is_simple", "describe")
        }

        class Dtype(SimpleDType, abstract=False):
            def __init__(self, name):
                if how == "in the constructor":
                    vars(self).update(hostile)
                elif how == "replaced":
                    self.__dict__ = dict(hostile)
                super().__init__(name, bits=8, supertype=DType.Integer)

        class Rule(RepresentationRule):
            def __init__(self):
                vars(self).update(hostile)

            def validate(self, context):
                pass

        dtype, rule = Dtype(fresh()), Rule()
        if how == "afterwards":
            vars(dtype).update(hostile)
        assert dict(dtype.structure())["bits"] == 8
        assert dtype.supertypes() == (DType.Integer, DType.Any)
        assert dtype.is_simple() is True
        assert dtype.describe().startswith(f"{dtype.name}: 8 bits")
        assert dict(rule.structure())["extension"] == ("tuple",)
        planar = Planar(fresh(), simple_types=[dtype], representation_rules=[rule])
        assert dict(planar.structure())["simple_types"] == ("tuple", dtype.structure())
        with pytest.raises(AttributeError, match="belongs to the model"):
            object.__setattr__(dtype, "structure", None)

    def test_a_mixin_with_other_members_is_welcome(self):
        class Mixin:
            def greet(self):
                return self.name.upper()

        class Extension(Mixin, SimpleDType, abstract=False):
            pass

        name = fresh()
        assert Extension(name, bits=8, supertype=DType.Any).greet() == name.upper()

    def test_a_mixin_that_changes_later_is_refused_at_construction(self):
        class Mixin:
            pass

        class Extension(Mixin, SimpleDType, abstract=False):
            pass

        Mixin.bits = 3
        name = fresh()
        with pytest.raises(TypeError, match="shadows"):
            Extension(name, bits=8, supertype=DType.Any)
        assert is_free(name)

    def test_a_dataclass_may_be_a_rule(self):
        @dataclasses.dataclass(eq=False)
        class Rule(RepresentationRule):
            limit: int

            def structure_extension(self):
                return (self.limit,)

            def validate(self, context):
                pass

        assert Rule(3) == Rule(3) != Rule(4)
        with pytest.raises(AttributeError, match="immutable"):
            Rule(3).limit = 4

    def test_a_metaclass_cannot_skip_the_checks(self):
        class Evil(type(DType)):
            def __call__(cls, *args, **kwargs):
                return type.__call__(cls, *args, **kwargs)

        with pytest.raises(TypeError, match="metaclass"):
            Evil("Hostile", (SimpleDType,), {}, abstract=False)
        smuggled = type.__new__(Evil, "Hostile", (SimpleDType,), {"bits": 3})
        with pytest.raises(TypeError):
            smuggled(fresh(), bits=8, supertype=DType.Any)
        bare = object.__new__(smuggled)
        with pytest.raises(TypeError):
            Planar(fresh(), simple_types=[bare])
        with pytest.raises(TypeError):
            Level(bare, 32)

    def test_a_metaclass_cannot_pass_for_the_model_s_by_equality(self):
        class Equal(type):
            def __hash__(cls):
                return hash(type(DType))

            def __eq__(cls, other):
                return True

        evil = Equal("Evil", (type(DType),), {})
        with pytest.raises(TypeError, match="metaclass"):
            evil("Hostile", (SimpleDType,), {}, abstract=False)

    def test_the_same_metaclass_cannot_be_bypassed_by_type_new(self):
        smuggled = type.__new__(type(DType), "Hostile", (SimpleDType,), {"name": "Float32", "bits": 3})
        with pytest.raises(TypeError):
            smuggled(fresh(), bits=8, supertype=DType.Any)
        body = {"__eq__": lambda self, other: True, "validate": lambda self, context: None}
        rule = type.__new__(type(RepresentationRule), "Hostile", (RepresentationRule,), body)
        with pytest.raises(TypeError, match="model"):
            rule()

    def test_final_classes_have_no_subclasses(self):
        for final in (LevelExtent,):
            with pytest.raises(TypeError, match="final"):
                type(RepresentationRule)("Hostile", (final,), {})
        with pytest.raises(TypeError, match="final"):
            type("Hostile", (Level,), {})

    @pytest.mark.parametrize(
        "body", [{"__module__": 3}, {"__module__": Text("m")}, {"__qualname__": Text("q")}], ids=str
    )
    @pytest.mark.parametrize("model", [SimpleDType, RepresentationRule])
    def test_a_class_identity_other_than_exact_strings_is_refused(self, model, body):
        with pytest.raises(TypeError, match="__module__ and __qualname__ must be strings"):
            type(model)("Hostile", (model,), body)


EXTENSION = """
from jaxquant.dtypes import BlockScaledDType, CompoundDType, DType, Level, RepresentationRule, SimpleDType

class Limit(RepresentationRule):
    def __init__(self, limit):
        self.limit = limit

    def structure_extension(self):
        return (self.limit,)

    def validate(self, context):
        pass

class Half(SimpleDType, abstract=False):
    pass

class Pair(CompoundDType, abstract=False):
    def structure_extension(self):
        return ("pair", {extension})

half = Half("ext.Half", bits={bits}, supertype=DType.{supertype})
pair = Pair("ext.Pair", simple_types=[half, DType.{plane}], representation_rules=[Limit({limit})])
block = BlockScaledDType("ext.Block", element=half, levels=[Level(DType.{scale}, {block})])
"""
DEFINITION = {
    "bits": 16,
    "supertype": "Floating",
    "extension": 1,
    "plane": "Int8",
    "limit": 4,
    "scale": "E8M0",
    "block": 24,
}


def python(code, folder, stdin=b""):
    paths = [str(folder), str(Path(jaxquant.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        capture_output=True,
    ).stdout


class TestPickling:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    @pytest.mark.parametrize("dtype", ALL_KINDS, ids=repr)
    def test_same_process(self, dtype, protocol):
        assert pickle.loads(pickle.dumps(dtype, protocol)) is dtype

    def test_an_unregistered_descriptor_is_not_pickled(self):
        with pytest.raises(TypeError, match="registered"):
            pickle.dumps(SimpleDType.__new__(SimpleDType))

    def test_across_processes(self, tmp_path):
        built_in = python(
            "import pickle, sys; from jaxquant.dtypes import *;"
            "sys.stdout.buffer.write(pickle.dumps([DType.NVFP4, DType.E4M3, Level(DType.E8M0, 5), Whole]))",
            tmp_path,
        )
        nvfp4, e4m3, level, whole = pickle.loads(built_in)
        assert nvfp4 is DType.NVFP4
        assert e4m3 is DType.E4M3
        assert level == Level(DType.E8M0, 5)
        assert repr(whole) == "Whole"

    def test_with_this_and_other_definitions(self, tmp_path):
        """One process pickles; another reads it under the same and, in turn, under changed definitions."""
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        for folder, changes in ((ours, {}), (theirs, {})):
            folder.mkdir()
            (folder / "extension.py").write_text(EXTENSION.format(**{**DEFINITION, **changes}))
        dump = (
            "import pickle, sys, extension as e;"
            "sys.stdout.buffer.write(pickle.dumps([pickle.dumps(d) for d in (e.half, e.pair, e.block)]))"
        )
        pickles = python(dump, ours)
        read = """
import pickle, sys
if {import_}: import extension
for data in pickle.loads(sys.stdin.buffer.read()):
    try:
        print(pickle.loads(data) is not None and "same")
    except (LookupError, ValueError) as error:
        print(type(error).__name__, error)
"""
        same = python(read.format(import_=True), theirs, pickles).decode().splitlines()
        assert same == ["same"] * 3
        # The class comes along only by name: without the import nothing is registered.
        missing = python(read.format(import_=False), theirs, pickles).decode().splitlines()
        assert [line.split()[0] for line in missing] == ["LookupError"] * 3
        assert "extension.Half" in missing[0]
        changes = [
            ({"bits": 17}, [(0, "bits: 16 there, 17 here")]),
            ({"supertype": "Any"}, [(0, "supertype.")]),
            ({"extension": True}, [(1, "extension[1]: 1 there, True here")]),
            ({"plane": "Bool"}, [(1, "simple_types[1].name: 'Int8' there, 'Bool' here")]),
            ({"limit": 5}, [(1, "representation_rules[0].extension[0]: 4 there, 5 here")]),
            ({"block": 25}, [(2, "extension[1]: 24 there, 25 here")]),
            ({"scale": "E4M3"}, [(2, "simple_types[1].name: 'E8M0' there, 'E4M3' here")]),
        ]
        for change, expected in changes:
            (theirs / "extension.py").write_text(EXTENSION.format(**{**DEFINITION, **change}))
            lines = python(read.format(import_=True), theirs, pickles).decode().splitlines()
            for i, text in expected:
                assert lines[i].startswith("ValueError")
                assert text in lines[i]

    def test_a_subclass_of_the_same_name_is_another_definition(self):
        name = fresh()
        dtype = SimpleDType(name, bits=8, supertype=DType.Any)
        restore, (_, structure) = dtype.__reduce__()
        forged = tuple(("bits", True) if field == ("bits", 8) else field for field in structure)
        with pytest.raises(ValueError, match="bits: True there, 8 here"):
            restore(name, forged)
        with pytest.raises(ValueError, match="entries"):
            restore(name, (*structure, ("more", 1)))
        with pytest.raises(ValueError, match="structure"):
            restore(name, None)
        with pytest.raises(LookupError, match=r"its class: jaxquant\.dtypes\.kinds\.SimpleDType$"):
            restore(fresh(), structure)

    @pytest.mark.parametrize("structure", [5, None, (5,), (("class", 5),), (("class", ("module", "m")),), ()])
    def test_a_missing_name_is_a_lookup_error_whatever_the_structure(self, structure):
        restore, _ = DType.E4M3.__reduce__()
        with pytest.raises(LookupError, match=r"not registered here$"):
            restore(fresh(), structure)


class TestUnderJax:
    def test_static_arguments_trace_once(self):
        traces = []

        def scale(x, dtype):
            traces.append(dtype)
            return x * dtype.bits_per_element

        jitted = jax.jit(scale, static_argnums=1)
        x = jnp.ones(3)
        same = [DType.MXFP4, DType.from_name("MXFP4"), pickle.loads(pickle.dumps(DType.MXFP4))]
        same += [copy.deepcopy(DType.MXFP4), DType.from_any(DType.MXFP4)]
        assert [float(jitted(x, dtype)[0]) for dtype in same] == [4.25] * 5
        assert traces == [DType.MXFP4]
        assert float(jitted(x, DType.MXINT8)[0]) == 8.25
        assert traces == [DType.MXFP4, DType.MXINT8]

    def test_levels_and_rules_are_static_by_value(self):
        traces = []

        def count(x, *static):
            traces.append(static)
            return x

        jitted = jax.jit(count, static_argnums=(1, 2))
        for _ in range(2):
            jitted(jnp.ones(1), Level(DType.E8M0, 32), LevelExtent(0, 32))
        assert len(traces) == 1
