"""The dtype-representations contract: one class per requirement, a test for each statement and scenario."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from dtype_samples import (
    BFLOAT16,
    E4M3_PER_16,
    E4M3_PER_TILE,
    FLOAT16,
    Planar,
    SizeLimit,
    block_scaled,
    context,
    fresh,
    fresh_block,
    is_free,
)

from jaxquant.dtypes import (
    BlockScaledDType,
    CompoundDType,
    DType,
    DTypeCategory,
    Level,
    LevelExtent,
    RepresentationRule,
    RepresentationValidationContext,
    SimpleDType,
    SymbolicBits,
    Whole,
    WholeExtent,
)
from jaxquant.layout import Layout
from jaxquant.representation import Plane, Representation


def rejected(cls=SimpleDType, **arguments):
    """A descriptor whose constructor failed after the model's own part."""
    leaked = []

    class Failing(cls, abstract=False):
        def __init__(self, name):
            super().__init__(name, **arguments)
            leaked.append(self)
            raise RuntimeError("fails late")

    with pytest.raises(RuntimeError, match="fails late"):
        Failing(fresh())
    return leaked[0]


class TestCompoundDTypesOwnAnOrderedStorageSchema:
    def test_scenario_construct_a_planar_extension(self):
        name = fresh()
        dtype = Planar(name, simple_types=[DType.Float32, DType.Int8])
        assert DType.from_name(name) is dtype
        assert dtype.simple_types == (DType.Float32, DType.Int8)
        assert dtype.num_carriers == 2
        assert dtype.representation_rules == ()

    def test_scenario_isolate_descriptor_state_from_caller_mutation(self):
        planes, rules = [DType.Float32, DType.Int8], [SizeLimit(4)]
        dtype = Planar(fresh(), simple_types=planes, representation_rules=rules)
        structure, kept = dtype.structure(), tuple(rules)
        planes.append(DType.Bool)
        rules.clear()
        assert dtype.simple_types == (DType.Float32, DType.Int8)
        assert dtype.representation_rules == kept
        assert dtype.structure() == structure
        assert dtype.num_carriers == 2

    def test_a_subclass_must_declare_that_it_is_concrete(self):
        class Undeclared(CompoundDType):
            pass

        for cls in (CompoundDType, Undeclared):
            with pytest.raises(TypeError, match="abstract"):
                cls(fresh(), simple_types=[DType.Int8])

    def test_supertype_is_optional_and_is_recorded(self):
        assert Planar(fresh(), simple_types=[DType.Int8]).supertype is None
        assert Planar(fresh(), simple_types=[DType.Int8], supertype=DType.Any).supertype is DType.Any

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            pytest.param({"supertype": DType.Float32}, TypeError, id="simple-supertype"),
            pytest.param({"supertype": "Any"}, TypeError, id="name-as-supertype"),
            pytest.param({"supertype": DTypeCategory}, TypeError, id="class-as-supertype"),
            pytest.param({"simple_types": 3}, TypeError, id="planes-not-iterable"),
            pytest.param({"simple_types": None}, TypeError, id="no-planes-given"),
            pytest.param({"simple_types": [DType.Int8, None]}, TypeError, id="plane-none"),
            pytest.param({"simple_types": [DType.MXFP4]}, TypeError, id="plane-compound"),
            pytest.param({"simple_types": [DType.Any]}, TypeError, id="plane-category"),
            pytest.param({"simple_types": ["Int8"]}, TypeError, id="plane-name"),
            pytest.param({"simple_types": "Int8"}, TypeError, id="planes-string"),
            pytest.param({"simple_types": [np.int8]}, TypeError, id="plane-scalar-type"),
            pytest.param({"simple_types": []}, ValueError, id="planes-empty"),
            pytest.param({"simple_types": iter(())}, ValueError, id="planes-empty-iterator"),
            pytest.param({"representation_rules": 3}, TypeError, id="rules-not-iterable"),
            pytest.param({"representation_rules": None}, TypeError, id="rules-none"),
            pytest.param({"representation_rules": [SizeLimit]}, TypeError, id="rule-class"),
            pytest.param({"representation_rules": [lambda context: None]}, TypeError, id="rule-function"),
        ],
    )
    def test_failures_leave_the_name_free(self, arguments, error):
        name = fresh()
        with pytest.raises(error):
            Planar(name, **{"simple_types": [DType.Int8], **arguments})
        assert is_free(name)
        Planar(name, simple_types=[DType.Int8])

    def test_unregistered_and_rejected_descriptors_are_refused(self):
        bare = SimpleDType.__new__(SimpleDType)
        late = rejected(bits=8, supertype=DType.Any)
        category = rejected(DTypeCategory)
        name = fresh()
        for arguments in (
            {"simple_types": [bare]},
            {"simple_types": [late]},
            {"simple_types": [DType.Int8], "supertype": category},
        ):
            with pytest.raises(TypeError, match="registered"):
                Planar(name, **arguments)
        with pytest.raises(TypeError, match="registered"):
            SimpleDType(name, bits=8, supertype=category)
        assert is_free(name)

    def test_compound_dtypes_are_compound(self):
        dtype = Planar(fresh(), simple_types=[DType.Int8])
        assert (dtype.is_compound(), dtype.is_simple(), dtype.is_category()) == (True, False, False)
        assert DType.Int8.is_compound() is False

    def test_any_iterable_of_planes_and_rules_is_copied_into_tuples(self):
        rule = SizeLimit(8)
        dtype = Planar(
            fresh(), simple_types=iter([DType.Int8, DType.Int8]), representation_rules=(r for r in [rule])
        )
        assert (type(dtype.simple_types), type(dtype.representation_rules)) == (tuple, tuple)
        assert (dtype.simple_types, dtype.representation_rules) == ((DType.Int8, DType.Int8), (rule,))


class TestCompoundDTypesDescribeLogicalValuesRatherThanHomogeneousStorage:
    def test_scenario_interpret_plane_position(self):
        dtype = Planar(fresh(), simple_types=[DType.Float32, DType.Int8])
        layout = Layout.row_major((4,))
        floats, ints = Plane(np.zeros(4, np.float32), layout), Plane(np.zeros(4, np.int8), layout)
        Representation(dtype, [floats, ints], [layout])
        with pytest.raises(ValueError, match=r"plane 0 .*Float32.*Int8"):
            Representation(dtype, [ints, floats], [layout])

    def test_a_compound_dtype_is_no_storage_dtype(self):
        with pytest.raises(TypeError):
            Planar(fresh(), simple_types=[Planar(fresh(), simple_types=[DType.Int8])])
        assert not hasattr(DType.MXFP4, "numpy_dtype")
        assert not hasattr(DType.MXFP4, "bits")

        class Held:
            dtype, shape = DType.MXFP4, (4,)

        with pytest.raises(ValueError, match="needs several planes"):
            Representation(DType.Float32, [Plane(Held(), Layout(4, 1))])


class TestRepresentationRulesHaveImmutableStructuralIdentity:
    def test_scenario_construct_a_reusable_rule(self):
        rule = SizeLimit(16)
        first = Planar(fresh(), simple_types=[DType.Int8], representation_rules=[rule])
        second = Planar(fresh(), simple_types=[DType.Bool], representation_rules=[rule])
        assert first.representation_rules[0] is second.representation_rules[0] is rule
        assert rule.structure() == rule.structure() == SizeLimit(16).structure()
        assert rule == SizeLimit(16)
        assert hash(rule) == hash(SizeLimit(16))
        assert rule != SizeLimit(17)

    def test_scenario_refuse_mutation_after_rule_construction(self):
        rule = SizeLimit(4)
        for change in (
            lambda: setattr(rule, "limit", 5),
            lambda: setattr(rule, "other", 5),
            lambda: delattr(rule, "limit"),
            lambda: delattr(rule, "validate"),
            lambda: setattr(rule, "__class__", LevelExtent),
        ):
            with pytest.raises(AttributeError):
                change()
        assert rule.limit == 4

    def test_class_identity_and_extension_determine_the_structure(self):
        class Other(SizeLimit):
            pass

        assert Other(4).structure() != SizeLimit(4).structure()
        assert Other(4) != SizeLimit(4)
        assert hash(SizeLimit(4).structure()) == hash(SizeLimit(4).structure())

    def test_extension_defaults_to_empty(self):
        class Plain(RepresentationRule):
            def validate(self, context):
                pass

        assert Plain().structure_extension() == ()

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (True, 1),
            (1, 1.0),
            (True, 1.0),
            (0.0, -0.0),
            (None, False),
            ("1", 1),
            ((1,), 1),
            ((True,), (1,)),
            ((), None),
            (("bool", "True"), True),
            (("tuple", 1), (1,)),
            (Whole, "Whole"),
        ],
        ids=repr,
    )
    def test_structures_compare_type_exactly(self, a, b):
        assert SizeLimit(a).structure() != SizeLimit(b).structure()
        assert SizeLimit(a).structure() == SizeLimit(a).structure()

    def test_nan_equals_itself_in_a_structure(self):
        nans = SizeLimit(float("nan")), SizeLimit(-float("nan"))
        assert nans[0].structure() == nans[1].structure()
        assert hash(nans[0]) == hash(nans[1])

    @pytest.mark.parametrize(
        "extension",
        [
            [1],
            None,
            "ab",
            1,
            {"a": 1},
            ([1],),
            (b"x",),
            (1j,),
            (...,),
            (np.float32(1),),
            (np.int64(1),),
            (DType.Int8,),
            ((), (set(),)),
            (type("Text", (str,), {})("x"),),
            (type("Tuple", (tuple,), {})(),),
            type("Tuple", (tuple,), {})((1,)),
        ],
        ids=lambda extension: type(extension).__name__ + repr(extension)[:24],
    )
    def test_other_extensions_fail_during_construction(self, extension):
        class Rule(RepresentationRule):
            def structure_extension(self):
                return extension

            def validate(self, context):
                pass

        with pytest.raises(TypeError, match="structure"):
            Rule()

    def test_a_subclass_must_implement_validate(self):
        class Silent(RepresentationRule):
            pass

        for cls in (RepresentationRule, Silent):
            with pytest.raises(TypeError, match="validate"):
                cls()

    def test_copies_are_the_same_object(self):
        rule = SizeLimit(4)
        assert copy.copy(rule) is copy.deepcopy(rule) is copy.deepcopy([rule])[0] is rule

    def test_validate_must_return_none(self):
        class Yes(RepresentationRule):
            def validate(self, context):
                return True

        dtype = Planar(fresh(), simple_types=[DType.Int8], representation_rules=[Yes()])
        with pytest.raises(TypeError, match="None"):
            Representation(dtype, [Plane(np.zeros(4, np.int8), Layout(4, 1))])

    @pytest.mark.parametrize(
        "member",
        [
            "structure",
            "__setattr__",
            "__delattr__",
            "__getattribute__",
            "__eq__",
            "__hash__",
            "__new__",
            "__copy__",
            "__deepcopy__",
            "__reduce__",
            "__reduce_ex__",
            "__setstate__",
            "__class__",
            "_RepresentationRule__structure",
        ],
    )
    @pytest.mark.parametrize("where", ["body", "mixin", "slot", "later"])
    def test_shadowing_owned_members_is_refused(self, member, where):
        body = {"validate": lambda self, context: None}
        if where == "later":
            cls = type(RepresentationRule)("Later", (RepresentationRule,), body)
            with pytest.raises(AttributeError, match="belongs to the model"):
                setattr(cls, member, None)
            with pytest.raises(AttributeError, match="belongs to the model"):
                delattr(cls, member)
            return
        bases: tuple[type, ...] = (RepresentationRule,)
        if where == "body":
            body[member] = lambda self, *args: None
        elif where == "slot":
            body["__slots__"] = (member,)
        else:
            bases = (type("Mixin", (), {member: lambda self, *args: None}), RepresentationRule)
        with pytest.raises(TypeError, match="shadows"):
            type(RepresentationRule)("Hostile", bases, body)

    def test_own_state_may_be_set_before_and_after_the_base_constructor(self):
        class Both(RepresentationRule):
            def __init__(self):
                self.before = 1
                super().__init__()
                self.after = 2

            def structure_extension(self):
                return (self.before, self.after)

            def validate(self, context):
                pass

        assert (Both().before, Both().after) == (1, 2)

    def test_a_rule_is_sealed_by_the_outermost_constructor_only(self):
        class Inner(SizeLimit):
            def __init__(self):
                super().__init__(4)
                self.limit = 5

        class Outer(Inner):
            def __init__(self):
                super().__init__()
                self.limit = 6

        rule = Outer()
        assert rule.structure() != SizeLimit(6).structure()
        assert rule.limit == 6
        with pytest.raises(AttributeError):
            rule.limit = 7

    def test_pickled_rules_come_back_sealed_and_checked(self):
        rule = SizeLimit(4)
        back = pickle.loads(pickle.dumps(rule))
        assert back == rule
        with pytest.raises(AttributeError):
            back.limit = 5
        assert pickle.loads(pickle.dumps(LevelExtent(1, Whole))) == LevelExtent(1, Whole)


class TestRulesConsumeAReadOnlyValidatedContext:
    def test_scenario_inspect_validated_representation_facts(self):
        seen = []

        class Look(RepresentationRule):
            def validate(self, context):
                seen.append(context)

        dtype = Planar(fresh(), simple_types=[DType.Float32, DType.Int8], representation_rules=[Look()])
        source, target, edge = Layout((2, 3), (3, 1)), Layout((3,), (1,)), Layout((2, 3), (0, 1))
        floats, ints = np.zeros((2, 3), np.float32), np.zeros(3, np.int8)
        Representation(dtype, [Plane(floats, source), Plane(ints, target)], [edge])
        (facts,) = seen
        assert facts.logical_dtype is dtype
        assert facts.storage_dtypes == (DType.Float32, DType.Int8)
        assert facts.placement_layouts == (source, target)
        assert facts.adjacent_layouts == (edge,)
        assert facts.level_shapes == ((2, 3), (3,))

    def test_every_sequence_is_a_tuple_copied_from_the_caller(self):
        layouts = [Layout(4, 1)]
        facts = RepresentationValidationContext(
            logical_dtype=DType.Int8,
            storage_dtypes=[DType.Int8],
            placement_layouts=layouts,
            adjacent_layouts=[],
            level_shapes=(shapes := [[2, [3, 4]], 4]),
        )
        layouts.clear()
        shapes[0][1].append(5)
        assert facts.storage_dtypes == (DType.Int8,)
        assert facts.placement_layouts == (Layout(4, 1),)
        assert facts.adjacent_layouts == ()
        assert facts.level_shapes == ((2, (3, 4)), 4)

    def test_the_context_is_read_only(self):
        facts = context(Layout(32, 0), 1)
        with pytest.raises(AttributeError):
            facts.logical_dtype = DType.Int8
        with pytest.raises(AttributeError):
            del facts.level_shapes

    def test_rules_run_in_order_and_their_exceptions_pass_unchanged(self):
        ran = []

        class Note(RepresentationRule):
            def __init__(self, error=None):
                self.error = error

            def validate(self, context):
                ran.append(self)
                if self.error:
                    raise self.error

        class RefusalError(Exception):
            pass

        error = RefusalError("no")
        rules = [Note(), Note(error), Note()]
        dtype = Planar(fresh(), simple_types=[DType.Int8], representation_rules=rules)
        with pytest.raises(RefusalError) as caught:
            Representation(dtype, [Plane(np.zeros(4, np.int8), Layout(4, 1))])
        assert caught.value is error
        assert [id(rule) for rule in ran] == [id(rule) for rule in rules[:2]]

    def test_rules_run_only_after_universal_validation(self):
        class Never(RepresentationRule):
            def validate(self, context):
                raise AssertionError("ran before universal validation accepted")

        dtype = Planar(fresh(), simple_types=[DType.Int8], representation_rules=[Never()])
        with pytest.raises(ValueError, match="reached up to 4"):
            Representation(dtype, [Plane(np.zeros(4, np.int8), Layout(5, 1))])


class TestWholeIsOnePersistentSymbolicExtent:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_scenario_reconstruct_whole(self, protocol):
        assert pickle.loads(pickle.dumps(Whole, protocol)) is Whole
        assert pickle.loads(pickle.dumps([Whole, Whole], protocol)) == [Whole, Whole]

    def test_pickle_protocols_0_to_5_are_all_there(self):
        assert pickle.HIGHEST_PROTOCOL >= 5

    def test_constructing_and_copying_return_the_same_identity(self):
        assert WholeExtent() is Whole
        assert copy.copy(Whole) is copy.deepcopy(Whole) is copy.deepcopy({"a": Whole})["a"] is Whole

    def test_repr(self):
        assert repr(Whole) == "Whole"

    def test_whole_holds_no_state_and_has_no_subclasses(self):
        with pytest.raises(AttributeError):
            Whole.mark = 1
        with pytest.raises(TypeError):
            type("Half", (WholeExtent,), {})


class TestALevelDefinesOneScaleDTypeAndGroupingExtent:
    def test_scenario_construct_a_fixed_block_level(self):
        level = Level(DType.E8M0, 32)
        assert level.scale is DType.E8M0
        assert level.block == 32
        assert level.is_whole() is False

    def test_scenario_construct_a_whole_level(self):
        level = Level(DType.Float32, Whole)
        assert level.block is Whole
        assert level.is_whole() is True

    @pytest.mark.parametrize("scale", [None, "E8M0", np.float32, DType.Any, DType.MXFP4, SimpleDType, 8])
    def test_other_scales_fail(self, scale):
        with pytest.raises(TypeError, match="scale"):
            Level(scale, 32)

    def test_rejected_scales_fail(self):
        with pytest.raises(TypeError, match="scale"):
            Level(rejected(bits=8, supertype=DType.Any), 32)

    @pytest.mark.parametrize(
        ("block", "error"),
        [
            (True, TypeError),
            (False, TypeError),
            (32.0, TypeError),
            ("32", TypeError),
            (None, TypeError),
            (WholeExtent, TypeError),
            ((32,), TypeError),
            (np.int64(32), TypeError),
            (0, ValueError),
            (-1, ValueError),
        ],
        ids=repr,
    )
    def test_other_blocks_fail(self, block, error):
        with pytest.raises(error, match="block"):
            Level(DType.E8M0, block)

    def test_int_subclasses_are_stored_as_exact_ints(self):
        class Odd(int):
            def __index__(self):
                return 7

            __int__ = __index__

        level = Level(DType.E8M0, Odd(32))
        assert level.block == 32
        assert type(level.block) is int

    def test_levels_are_immutable_hashable_values(self):
        a, b = Level(DType.E8M0, 32), Level(DType.E8M0, 32)
        assert a == b
        assert hash(a) == hash(b)
        assert len({a, b, Level(DType.E8M0, 16), Level(DType.E4M3, 32), Level(DType.E8M0, Whole)}) == 4
        with pytest.raises(AttributeError):
            a.block = 16
        with pytest.raises(AttributeError):
            del a.scale

    def test_repr(self):
        assert repr(Level(DType.E8M0, 32)) == "Level(scale=SimpleDType('E8M0'), block=32)"

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_levels_pickle_by_value(self, protocol):
        for level in (Level(DType.E8M0, 32), Level(DType.Float32, Whole)):
            back = pickle.loads(pickle.dumps(level, protocol))
            assert back == level
            assert back.scale is level.scale


class TestLevelExtentValidatesUniformLogicalGrouping:
    @pytest.mark.parametrize(
        ("adjacent", "target"),
        [
            pytest.param(Layout(32, 0), 1, id="one-block"),
            pytest.param(Layout((32, 4), (0, 1)), 4, id="blocks-in-a-row"),
            pytest.param(Layout((2, (32, 2)), (1, (0, 2))), (2, 2), id="mxfp4-2x64"),
            pytest.param(Layout(((4, 2), (8, 3)), ((0, 1), (0, 2))), (2, 3), id="tiles-4x8"),
        ],
    )
    def test_scenario_accept_fixed_uniform_grouping(self, adjacent, target):
        assert LevelExtent(0, 32).validate(context(adjacent, target)) is None

    @pytest.mark.parametrize("shape", [1, 7, (2, 3), (2, (3, 4))], ids=str)
    def test_scenario_accept_whole_level_grouping(self, shape):
        def zeros(tree):
            return tuple(map(zeros, tree)) if isinstance(tree, tuple) else 0

        assert LevelExtent(0, Whole).validate(context(Layout(shape, zeros(shape)), 1)) is None

    def test_level_selects_the_edge(self):
        facts = RepresentationValidationContext(
            logical_dtype=DType.NVFP4,
            storage_dtypes=DType.NVFP4.simple_types,
            placement_layouts=[Layout((16, 2), (1, 16)), Layout(2, 1), Layout(1, 1)],
            adjacent_layouts=[Layout((16, 2), (0, 1)), Layout(2, 0)],
            level_shapes=[(16, 2), 2, 1],
        )
        for rule in DType.NVFP4.representation_rules:
            assert rule.validate(facts) is None
        with pytest.raises(ValueError, match="32 source"):
            LevelExtent(0, 2).validate(facts)
        with pytest.raises(ValueError, match="one target"):
            LevelExtent(0, Whole).validate(facts)
        with pytest.raises(ValueError, match="no adjacent layout 2"):
            LevelExtent(2, 1).validate(facts)

    @pytest.mark.parametrize(
        ("adjacent", "target", "extent"),
        [
            pytest.param(Layout(64, 0), 1, 32, id="cardinality"),
            pytest.param(Layout((2, 2), (1, 1)), 2, 2, id="non-uniform"),
            pytest.param(Layout((2, 2), (0, 2)), 2, 2, id="gap"),
            pytest.param(Layout((2, 2), (0, 0)), 2, 2, id="misses-a-target"),
            pytest.param(Layout(4, 1), 1, Whole, id="whole-onto-several"),
            pytest.param(Layout((2, 2), (0, 1)), 2, Whole, id="whole-with-two-targets"),
        ],
    )
    def test_other_groupings_fail(self, adjacent, target, extent):
        with pytest.raises(ValueError, match="LevelExtent"):
            LevelExtent(0, extent).validate(context(adjacent, target))

    @pytest.mark.parametrize(
        ("level", "extent", "error"),
        [
            (True, 32, TypeError),
            (0.0, 32, TypeError),
            ("0", 32, TypeError),
            (np.int64(0), 32, TypeError),
            (type("Int", (int,), {})(0), 32, TypeError),
            (None, 32, TypeError),
            (-1, 32, ValueError),
            (0, True, TypeError),
            (0, 32.0, TypeError),
            (0, None, TypeError),
            (0, np.int64(1), TypeError),
            (0, type("Int", (int,), {})(1), TypeError),
            (0, WholeExtent, TypeError),
            (0, 0, ValueError),
            (0, -32, ValueError),
        ],
        ids=str,
    )
    def test_other_arguments_fail(self, level, extent, error):
        with pytest.raises(error):
            LevelExtent(level, extent)

    def test_properties_return_the_arguments(self):
        assert (LevelExtent(2, 32).level, LevelExtent(2, 32).extent) == (2, 32)
        assert LevelExtent(0, Whole).extent is Whole

    def test_a_level_extent_is_an_immutable_rule(self):
        rule = LevelExtent(0, 32)
        assert isinstance(rule, RepresentationRule)
        assert rule == LevelExtent(0, 32) != LevelExtent(1, 32)
        with pytest.raises(AttributeError):
            rule.extent = 16
        with pytest.raises(AttributeError):
            rule.__init__(0, 16)
        assert rule.extent == 32

    def test_huge_levels_are_answered_without_enumeration(self):
        adjacent = Layout((10**9, 10**9), (0, 1))
        assert LevelExtent(0, 10**9).validate(context(adjacent, 10**9)) is None
        with pytest.raises(ValueError, match="LevelExtent"):
            LevelExtent(0, 10**9).validate(context(Layout((10**9, 10**9), (1, 1)), 10**9))


class TestBlockScaledDTypeDerivesItsCompletePlaneChain:
    def test_scenario_derive_planes_and_rules(self):
        block = fresh_block()
        dtype = BlockScaledDType(
            fresh(), element=DType.E2M1, levels=[Level(DType.E4M3, block), Level(DType.Float32, 8)]
        )
        assert dtype.simple_types == (DType.E2M1, DType.E4M3, DType.Float32)
        assert dtype.representation_rules == (LevelExtent(0, block), LevelExtent(1, 8))

    @pytest.mark.parametrize("how", ["name", "subclass", "extension", "iterator"])
    def test_scenario_reject_a_structurally_duplicate_format(self, how):
        class Extended(BlockScaledDType, abstract=False):
            def structure_extension(self):
                return (how,)

        name, levels = fresh(), [Level(DType.E8M0, 32)]
        with pytest.raises(ValueError, match="MXFP4"):
            (BlockScaledDType if how in ("name", "iterator") else Extended)(
                name, element=DType.E2M1, levels=iter(levels) if how == "iterator" else levels
            )
        assert is_free(name)
        assert DType.from_name("MXFP4") is DType.MXFP4
        assert [d for d in BlockScaledDType.registered() if d.levels == tuple(levels)].count(DType.MXFP4) == 1

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            pytest.param({"element": DType.MXFP4}, TypeError, id="element-compound"),
            pytest.param({"element": DType.Floating}, TypeError, id="element-category"),
            pytest.param({"element": "E2M1"}, TypeError, id="element-name"),
            pytest.param({"levels": 3}, TypeError, id="levels-not-iterable"),
            pytest.param({"levels": [(DType.E8M0, 32)]}, TypeError, id="level-tuple"),
            pytest.param({"levels": [Level]}, TypeError, id="level-class"),
            pytest.param({"levels": Level(DType.E8M0, 32)}, TypeError, id="levels-one-level"),
            pytest.param({"levels": []}, ValueError, id="levels-empty"),
            pytest.param(
                {"levels": [Level(DType.E8M0, Whole), Level(DType.Float32, 2)]}, ValueError, id="inner-whole"
            ),
            pytest.param(
                {"levels": [Level(DType.E8M0, Whole), Level(DType.Float32, Whole)]},
                ValueError,
                id="two-whole",
            ),
        ],
    )
    def test_failures_leave_the_name_free(self, arguments, error):
        name = fresh()
        with pytest.raises(error):
            BlockScaledDType(
                name, **{"element": DType.E2M1, "levels": [Level(DType.E8M0, fresh_block())], **arguments}
            )
        assert is_free(name)

    def test_a_rejected_element_fails(self):
        with pytest.raises(TypeError, match="element"):
            BlockScaledDType(
                fresh(), element=rejected(bits=4, supertype=DType.Any), levels=[Level(DType.E8M0, 4)]
            )

    def test_properties_return_normalized_immutable_values(self):
        levels = [Level(DType.E8M0, fresh_block())]
        dtype = BlockScaledDType(fresh(), element=DType.E2M1, levels=levels)
        kept = tuple(levels)
        levels.clear()
        assert dtype.element is DType.E2M1
        assert dtype.levels == kept
        assert type(dtype.levels) is tuple

    def test_supertype_is_any(self):
        assert {dtype.supertype for dtype in BlockScaledDType.registered()} == {DType.Any}

    def test_a_late_failure_claims_neither_name_nor_chain(self):
        levels = [Level(DType.E8M0, fresh_block())]
        rejected(BlockScaledDType, element=DType.E2M1, levels=levels)
        BlockScaledDType(fresh(), element=DType.E2M1, levels=levels)

    def test_extension_formats(self):
        assert E4M3_PER_16.simple_types == (DType.E4M3, DType.E8M0)
        assert E4M3_PER_TILE.levels == (Level(DType.Float32, 16384),)
        half = BlockScaledDType(fresh(), element=FLOAT16, levels=[Level(BFLOAT16, fresh_block())])
        assert half.simple_types == (FLOAT16, BFLOAT16)

    def test_a_2d_adjacent_layout_groups_128x128_tiles(self):
        shape = ((128, 2), (128, 3))
        weights, scales = np.zeros((256, 384), DType.E4M3.numpy_dtype), np.zeros((2, 3), np.float32)
        placement = Layout(shape, ((384, 128 * 384), (1, 128)))
        shown = Representation(
            E4M3_PER_TILE,
            [Plane(weights, placement), Plane(scales, Layout((2, 3), (3, 1)))],
            [Layout(shape, ((0, 1), (0, 2)))],
        )
        assert shown.level_shapes == (shape, (2, 3))
        assert shown.adjacent_layouts[0].index(((5, 1), (7, 2))) == 1 + 2 * 2
        with pytest.raises(ValueError, match="LevelExtent"):
            Representation(
                E4M3_PER_TILE,
                [Plane(weights, placement), Plane(scales, Layout((2, 3), (3, 1)))],
                [Layout(shape, ((0, 1), (0, 1)))],
            )


class TestBlockScaledPropertiesReportAxesAndStorageCost:
    def test_scenario_evaluate_a_whole_scale_cost(self):
        assert DType.NVFP4.bits_per_element.evaluate(1024) == 4.53125

    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [
            (DType.MXFP8_E4M3, 8.25),
            (DType.MXFP8_E5M2, 8.25),
            (DType.MXFP6_E3M2, 6.25),
            (DType.MXFP6_E2M3, 6.25),
            (DType.MXFP4, 4.25),
            (DType.MXINT8, 8.25),
            (DType.NVFP4, SymbolicBits(4.5, 32)),
            (E4M3_PER_16, 8.5),
            (E4M3_PER_TILE, 8 + 2**-9),
            (
                block_scaled(fresh("two"), DType.E2M1, [Level(DType.E4M3, 16), Level(DType.E8M0, 8)]),
                4.5625,
            ),
            (block_scaled(fresh("whole"), DType.E2M1, [Level(DType.Float32, Whole)]), SymbolicBits(4.0, 32)),
        ],
        ids=repr,
    )
    def test_bits_per_element(self, dtype, bits):
        assert dtype.bits_per_element == bits
        assert type(dtype.bits_per_element) is type(bits)

    @pytest.mark.parametrize("count", [1, 7, 32, 10**18])
    def test_bits_per_element_equals_stored_bits_of_whole_arrays(self, count):
        stored = count * 16 * 4 + count * 8 + 32
        assert DType.NVFP4.bits_per_element.evaluate(count * 16) == pytest.approx(stored / (count * 16))

    def test_num_axes_excludes_a_whole_level(self):
        assert (DType.MXFP4.num_axes, DType.NVFP4.num_axes) == (1, 1)
        two = block_scaled(fresh("two"), DType.E2M1, [Level(DType.E4M3, 16), Level(DType.E8M0, 8)])
        assert two.num_axes == 2
        assert block_scaled(fresh("whole"), DType.E2M1, [Level(DType.Float32, Whole)]).num_axes == 0

    def test_symbolic_bits_are_immutable_values(self):
        bits = SymbolicBits(4.5, 32)
        assert (bits.constant, bits.whole_scale_bits) == (4.5, 32)
        assert bits == SymbolicBits(4.5, 32) != SymbolicBits(4.5, 16)
        assert hash(bits) == hash(SymbolicBits(4.5, 32))
        with pytest.raises(AttributeError):
            bits.constant = 4.0
        assert pickle.loads(pickle.dumps(bits)) == bits

    @pytest.mark.parametrize(("count", "bits"), [(1, 36.5), (32, 5.5), (np.int64(32), 5.5), (10**18, 4.5)])
    def test_evaluate(self, count, bits):
        assert SymbolicBits(4.5, 32).evaluate(count) == bits

    @pytest.mark.parametrize(
        ("count", "error"),
        [
            (True, TypeError),
            (1.0, TypeError),
            ("1", TypeError),
            (None, TypeError),
            (np.True_, TypeError),
            (np.float32(1), TypeError),
            (0, ValueError),
            (-1, ValueError),
        ],
        ids=repr,
    )
    def test_evaluate_refuses(self, count, error):
        with pytest.raises(error, match="element_count"):
            SymbolicBits(4.5, 32).evaluate(count)


class TestBuiltInBlockScaledFormatsHaveFixedStructures:
    def test_scenario_inspect_an_mx_representation(self):
        assert DType.MXFP4.element is DType.E2M1
        assert DType.MXFP4.levels == (Level(DType.E8M0, 32),)

    def test_scenario_inspect_nvfp4(self):
        assert DType.NVFP4.levels == (Level(DType.E4M3, 16), Level(DType.Float32, Whole))
        assert DType.NVFP4.element is DType.E2M1

    @pytest.mark.parametrize(
        ("name", "element"),
        [
            ("MXFP8_E4M3", DType.E4M3),
            ("MXFP8_E5M2", DType.E5M2),
            ("MXFP6_E3M2", DType.E3M2),
            ("MXFP6_E2M3", DType.E2M3),
            ("MXFP4", DType.E2M1),
            ("MXINT8", DType.Int8),
        ],
    )
    def test_mx_formats(self, name, element):
        dtype = getattr(DType, name)
        assert dtype is BlockScaledDType.from_name(name)
        assert dtype.element is element
        assert dtype.levels == (Level(DType.E8M0, 32),)

    def test_the_seven_come_first(self):
        names = [dtype.name for dtype in BlockScaledDType.registered()][:7]
        assert names == [
            *("MXFP8_E4M3", "MXFP8_E5M2", "MXFP6_E3M2", "MXFP6_E2M3", "MXFP4", "MXINT8", "NVFP4"),
        ]
