"""Dtype descriptors: the abstract `DType`, and its kinds: categories, simple dtypes and compound dtypes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeGuard, TypeVar, cast
from weakref import WeakSet

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxquant.dtypes import registry
from jaxquant.dtypes.extents import exact_int, exact_str
from jaxquant.dtypes.facts import FLOAT_FACTS, FloatFacts, HasFloatFacts
from jaxquant.dtypes.model import ModelMeta, has_slot, is_accepted, is_model_class, owned_members, read_slot
from jaxquant.dtypes.rules import RepresentationRule, is_complete_rule
from jaxquant.dtypes.structure import (
    Structure,
    class_identity,
    first_difference,
    freeze,
    freeze_extension,
    sequence,
)
from jaxquant.layout import shown

if TYPE_CHECKING:
    from jaxquant.dtypes.block_scaled import BlockScaledDType

# Slots of DType that the functions below write: their names are mangled, so that a subclass may use its own.
_FIELDS = "_DType__fields"
_NAME = "_DType__name"
_REPRESENTATION = "_DType__representation"
# Inside DType the name Any is the built-in category.
NumpyDType: TypeAlias = np.dtype[Any]
_concrete: WeakSet[type] = WeakSet()

_T = TypeVar("_T")
_D = TypeVar("_D", bound="DType")


class DTypeMeta(ModelMeta):
    """Reads `abstract=` in a class statement, and makes construction one transaction."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        abstract: bool = True,
        **kwargs: Any,
    ) -> DTypeMeta:
        if type(abstract) is not bool:
            raise TypeError(f"class {name}: abstract must be a bool, got {type(abstract).__name__}")
        cls = cast(DTypeMeta, super().__new__(mcls, name, bases, namespace, **kwargs))
        if not (
            abstract or is_model_class(cls) or issubclass(cls, DTypeCategory | SimpleDType | CompoundDType)
        ):
            raise TypeError(
                f"class {name}: a concrete dtype is a DTypeCategory, a SimpleDType or a CompoundDType"
            )
        if not abstract:
            _concrete.add(cls)
        return cls

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:  # noqa: N805
        if cls not in _concrete:
            raise TypeError(
                f"{cls.__qualname__} is abstract: its class statement does not say abstract=False"
            )
        dtype = cast(_T, super().__call__(*args, **kwargs))  # type: ignore[misc]
        _finish(cast(DType, dtype))
        return dtype


class DType(metaclass=DTypeMeta):
    """An immutable, registered description of a dtype; `DType.Float32`, `DType.MXFP4` and so on are the
    built-ins.

    Descriptors compare and hash by identity, so they serve as static arguments of `jax.jit`; copying gives
    the same object, and pickling goes by name and structure. A class is abstract unless its class statement
    says `abstract=False` (contract: "Kinds", "Immutability, structure, pickling").

    >>> DType.MXFP4.bits_per_element
    4.25
    >>> DType.from_name("E4M3") is DType.E4M3
    True
    """

    __slots__ = (
        "__fields",
        "__name",
        "__representation",
        "__sealed",
        "__structure",
        "__supertype",
        "__weakref__",
    )
    __fields: tuple[tuple[str, object], ...]
    __name: str
    __representation: Hashable | None
    __sealed: bool
    __structure: Structure
    __supertype: DTypeCategory | None

    Any: ClassVar[DTypeCategory]
    Floating: ClassVar[DTypeCategory]
    Integer: ClassVar[DTypeCategory]
    Bool: ClassVar[SimpleDType]
    Int8: ClassVar[SimpleDType]
    Int32: ClassVar[SimpleDType]
    Float32: ClassVar[SimpleDType]
    Float64: ClassVar[SimpleDType]
    E8M0: ClassVar[SimpleDType]
    E5M2: ClassVar[SimpleDType]
    E4M3: ClassVar[SimpleDType]
    E3M2: ClassVar[SimpleDType]
    E2M3: ClassVar[SimpleDType]
    E2M1: ClassVar[SimpleDType]
    MXFP8_E4M3: ClassVar[BlockScaledDType]
    MXFP8_E5M2: ClassVar[BlockScaledDType]
    MXFP6_E3M2: ClassVar[BlockScaledDType]
    MXFP6_E2M3: ClassVar[BlockScaledDType]
    MXFP4: ClassVar[BlockScaledDType]
    MXINT8: ClassVar[BlockScaledDType]
    NVFP4: ClassVar[BlockScaledDType]

    @property
    def name(self) -> str:
        """The registered name."""
        return self.__name

    @property
    def value(self) -> str:
        """The registered name, as an enumeration member would give it."""
        return self.__name

    @property
    def supertype(self) -> DTypeCategory | None:
        """The category that directly encloses this dtype."""
        return self.__supertype

    def supertypes(self) -> tuple[DTypeCategory, ...]:
        """All enclosing categories, nearest first.

        >>> DType.E4M3.supertypes()
        (DTypeCategory('Floating'), DTypeCategory('Any'))
        """
        found: list[DTypeCategory] = []
        nearest = self.__supertype
        while nearest is not None:
            found.append(nearest)
            nearest = nearest.supertype
        return tuple(found)

    def is_subtype_of(self, other: DType) -> bool:
        """Whether this is `other`, or lies under it. Raises TypeError where `other` is no descriptor.

        >>> DType.E4M3.is_subtype_of(DType.Floating), DType.Int8.is_subtype_of(DType.Floating)
        (True, False)
        """
        if not is_kind(other, DType):
            raise TypeError(f"other must be a DType, got {type(other).__name__}")
        return other is self or other in self.supertypes()

    def is_category(self) -> bool:
        """Whether this is a DTypeCategory."""
        return is_kind(self, DTypeCategory)

    def is_simple(self) -> bool:
        """Whether this is a SimpleDType."""
        return is_kind(self, SimpleDType)

    def is_compound(self) -> bool:
        """Whether this is a CompoundDType."""
        return is_kind(self, CompoundDType)

    def is_opaque_storage(self) -> bool:
        """Whether this is a category declared with `opaque_storage=True`."""
        return False

    def structure(self) -> Structure:
        """What this dtype is, as nested plain tuples recorded at construction, its references included.

        Structures compare type-exactly under `==`. Raises TypeError during construction.
        """
        if not is_sealed(self):
            raise TypeError(f"this {type(self).__name__} is not constructed yet")
        return self.__structure

    def structure_extension(self) -> tuple[object, ...]:
        """What a subclass adds to the structure: a tuple of str, int, bool, float, None, Whole and such
        tuples."""
        return ()

    def describe(self) -> str:
        """A drawing of the dtype as text: planes, widths, blocks, bits per element."""
        raise NotImplementedError

    @classmethod
    def registered(cls) -> tuple[Self, ...]:
        """All registered descriptors of this class so far, in order of registration.

        >>> [category.name for category in DTypeCategory.registered()][:3]
        ['Any', 'Floating', 'Integer']
        """
        return tuple(dtype for dtype in registry.holders() if is_kind(dtype, cls))

    @classmethod
    def from_name(cls, name: str) -> Self:
        """The descriptor of this class with a registered name.

        Raises TypeError where `name` is no string, LookupError where it is unknown or names another kind.
        """
        exact = exact_str(name)
        if exact is None:
            raise TypeError(f"name must be a string, got {type(name).__name__}")
        found = registry.holder(exact)
        if found is None:
            raise LookupError(f"no dtype is registered as {name!r}")
        return cls.__narrowed(found)

    @classmethod
    def from_any(cls, value: object) -> Self:
        """The descriptor of this class for a descriptor, a registered name, a numpy dtype or a scalar type.

        Scalar types are those of numpy, ml_dtypes and `jax.numpy`; `.numpy_dtype` is the way back. Where
        several descriptors name one scalar type, the first registered answers.

        Raises LookupError where nothing of this class is registered for the value, TypeError for any other
        value.

        >>> import jax.numpy as jnp
        >>> DType.from_any(jnp.float8_e4m3fn), DType.from_any(np.dtype("int8")), DType.from_any("MXFP4")
        (SimpleDType('E4M3'), SimpleDType('Int8'), BlockScaledDType('MXFP4'))
        """
        if is_kind(value, DType):
            if not is_registered(value, DType):
                raise TypeError(f"{value!r} is not registered")
            return cls.__narrowed(value)
        name = exact_str(value)
        if name is not None:
            return cls.from_name(name)
        numpy_dtype = _numpy_dtype_of(value)
        if numpy_dtype is None:
            raise TypeError(
                "wanted a descriptor, a registered name, a numpy dtype or a scalar type, "
                f"got {shown(value)} of type {type(value).__name__}"
            )
        found = registry.holder(numpy_dtype)
        if found is None:
            raise LookupError(f"no dtype is registered for {numpy_dtype}")
        return cls.__narrowed(found)

    @classmethod
    def __narrowed(cls, found: DType) -> Self:
        if not is_kind(found, cls):
            raise LookupError(f"{found!r} is no {cls.__name__}")
        return found

    def __setattr__(self, name: str, value: object) -> None:
        self.__check_change(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__check_change(name)
        object.__delattr__(self, name)

    def __check_change(self, name: str) -> None:
        if is_sealed(self):
            raise AttributeError(f"{self!r} is immutable: cannot set or delete {name!r}")
        if name in owned_members(type(self)):
            raise AttributeError(
                f"{name!r} of {type(self).__name__} belongs to the model: cannot set or delete it"
            )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[object, tuple[str, Structure]]:
        if not is_registered(self, DType):
            raise TypeError(f"{self!r} is not registered: a dtype is pickled by its registered name")
        return _restore, (self.__name, self.__structure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({read_slot(self, _NAME, '<not constructed>')!r})"


class DTypeCategory(DType, abstract=False):
    """A named group of dtypes, such as `DType.Floating`; it describes no storage of its own.

    `supertype` is the enclosing registered category or None; `opaque_storage` is a bool. Raises ValueError
    for a bad or taken name and TypeError for the rest.

    >>> DType.Floating.supertype, DType.Floating.is_opaque_storage()
    (DTypeCategory('Any'), True)
    """

    __slots__ = ("__opaque_storage",)
    __opaque_storage: bool

    def __init__(
        self, name: str, *, supertype: DTypeCategory | None = None, opaque_storage: bool = False
    ) -> None:
        if type(opaque_storage) is not bool:
            raise TypeError(f"opaque_storage must be a bool, got {type(opaque_storage).__name__}")
        if supertype is not None:
            _check_supertype(supertype)
        begin(self, DTypeCategory, name, supertype, [("opaque_storage", freeze(opaque_storage))])
        object.__setattr__(self, "_DTypeCategory__opaque_storage", opaque_storage)

    def is_opaque_storage(self) -> bool:
        """Whether this category was declared with `opaque_storage=True`."""
        return self.__opaque_storage

    def describe(self) -> str:
        """The category's place and its members, one per line.

        >>> print(DType.Integer.describe().splitlines()[0])
        Integer: a category under Any
        """
        place = "".join(f" under {category.name}" for category in self.supertypes())
        opaque = ", opaque storage" if self.__opaque_storage else ""
        members = [dtype.name for dtype in DType.registered() if dtype.supertype is self]
        return "\n".join([f"{self.name}: a category{place}{opaque}", *(f"  {member}" for member in members)])


class SimpleDType(HasFloatFacts, DType, abstract=False):
    """One homogeneous storage dtype of a fixed width, such as `DType.E4M3`.

    `bits` is the storage width of one value (a positive int), `supertype` the enclosing registered category,
    and `scalar_type` the numpy or ml_dtypes scalar class that computes with it, if there is one. The built-in
    floats also answer what `jnp.finfo` would.

    Raises ValueError for a bad or taken name, bad bits, and bits that cannot be the scalar type's; TypeError
    for a bad supertype or scalar type.

    >>> DType.E4M3.bits, DType.E4M3.max_normal, DType.E4M3.has_inf
    (8, 448.0, False)
    >>> DType.E4M3.numpy_dtype
    dtype(float8_e4m3fn)
    """

    __slots__ = ("__bits", "__numpy_dtype", "__scalar_type")
    __bits: int
    __numpy_dtype: NumpyDType | None
    __scalar_type: type[np.generic] | None

    def __init__(
        self, name: str, *, bits: int, supertype: DTypeCategory, scalar_type: type[np.generic] | None = None
    ) -> None:
        width = exact_int(bits)
        if width is None or width < 1:
            raise ValueError(f"bits must be a positive int, got {shown(bits)}")
        _check_supertype(supertype)
        numpy_dtype = None if scalar_type is None else _dtype_of_scalar_type(scalar_type, width)
        begin(
            self,
            SimpleDType,
            name,
            supertype,
            [("bits", width), ("scalar_type", None if numpy_dtype is None else numpy_dtype.name)],
        )
        object.__setattr__(self, "_SimpleDType__bits", width)
        object.__setattr__(self, "_SimpleDType__numpy_dtype", numpy_dtype)
        object.__setattr__(self, "_SimpleDType__scalar_type", scalar_type)

    @property
    def bits(self) -> int:
        """The storage width of one value in bits."""
        return self.__bits

    @property
    def scalar_type(self) -> type[np.generic] | None:
        """The numpy or ml_dtypes scalar class, or None where none was named."""
        return self.__scalar_type

    @property
    def numpy_dtype(self) -> NumpyDType | None:
        """The numpy dtype of the scalar class, or None where none was named."""
        return self.__numpy_dtype

    @property
    def float_facts(self) -> FloatFacts:
        """All float facts in one record. Raises AttributeError where this is no built-in float."""
        try:
            return FLOAT_FACTS[self.name]
        except KeyError:
            raise AttributeError(f"float facts are known for the built-in floats, not for {self!r}") from None

    @property
    def dtype(self) -> NumpyDType:
        """`numpy_dtype`, by its `finfo` name. Raises AttributeError where this is no built-in float."""
        _ = self.float_facts
        return cast(NumpyDType, self.__numpy_dtype)

    def describe(self) -> str:
        """The width, place, bit fields and range of the dtype.

        >>> print(DType.E2M1.describe())
        E2M1: 4 bits, under Floating, scalar type float4_e2m1fn
          s ee m
          normal 1.0 to 6.0, subnormal 0.5 to 0.5, no infinity, no NaN, out of range: saturate
        """
        numpy_dtype = self.numpy_dtype
        scalar = "" if numpy_dtype is None else f", scalar type {numpy_dtype.name}"
        supertype = cast(DTypeCategory, self.supertype)
        lines = [f"{self.name}: {self.__bits} bits, under {supertype.name}{scalar}"]
        facts = FLOAT_FACTS.get(self.name)
        if facts is not None:
            subnormal = f"{facts.min_subnormal} to {facts.max_subnormal}" if facts.min_subnormal else "none"
            lines += [
                f"  {bit_fields(self)}",
                f"  normal {facts.min_normal} to {facts.max_normal}, subnormal {subnormal}, "
                f"{'infinity' if facts.has_inf else 'no infinity'}, {'NaN' if facts.has_nan else 'no NaN'}, "
                f"out of range: {facts.overflow_policy}",
            ]
        return "\n".join(lines)


class CompoundDType(DType):
    """A logical value assembled from one plane per entry of `simple_types`, in order.

    A concrete subclass says `abstract=False` and calls this constructor. `supertype` is the enclosing
    registered category or None, `simple_types` a non-empty iterable of registered simple dtypes, and
    `representation_rules` an iterable of rules that run after universal validation. Both are copied into
    tuples. The compound dtype itself is no storage dtype of an array (contract: "Compound dtypes own an
    ordered storage schema").

    Raises TypeError for a bad supertype, plane or rule, ValueError for no planes and for a bad or taken name;
    in each case nothing is registered.

    >>> class Complex(CompoundDType, abstract=False):
    ...     pass
    >>> pair = Complex("doctest.Complex", simple_types=[DType.Float32, DType.Float32])
    >>> pair.num_carriers, pair.representation_rules
    (2, ())
    """

    __slots__ = ("__representation_rules", "__simple_types")
    __representation_rules: tuple[RepresentationRule, ...]
    __simple_types: tuple[SimpleDType, ...]

    def __init__(
        self,
        name: str,
        *,
        supertype: DTypeCategory | None = None,
        simple_types: Iterable[SimpleDType],
        representation_rules: Iterable[RepresentationRule] = (),
    ) -> None:
        if supertype is not None:
            _check_supertype(supertype)
        planes = items(simple_types, "simple_types")
        for i, plane in enumerate(planes):
            if not is_registered(plane, SimpleDType):
                raise TypeError(f"simple_types[{i}] must be a registered SimpleDType, got {shown(plane)}")
        rules = items(representation_rules, "representation_rules")
        for i, rule in enumerate(rules):
            if not is_complete_rule(rule):
                raise TypeError(f"representation_rules[{i}] must be a RepresentationRule, got {shown(rule)}")
        if not planes:
            raise ValueError("simple_types is empty: a compound dtype has at least one plane")
        begin(
            self,
            CompoundDType,
            name,
            supertype,
            [
                ("simple_types", sequence(plane.structure() for plane in planes)),
                ("representation_rules", sequence(rule.structure() for rule in rules)),
            ],
        )
        object.__setattr__(self, "_CompoundDType__simple_types", planes)
        object.__setattr__(self, "_CompoundDType__representation_rules", rules)

    @property
    def simple_types(self) -> tuple[SimpleDType, ...]:
        """The storage schema: the dtype of each plane, in order."""
        return self.__simple_types

    @property
    def num_carriers(self) -> int:
        """The number of planes."""
        return len(self.__simple_types)

    @property
    def representation_rules(self) -> tuple[RepresentationRule, ...]:
        """The rules that a representation must satisfy beyond universal validation, in order."""
        return self.__representation_rules

    def describe(self) -> str:
        """The planes and rules, one per line."""
        lines = [f"{self.name}: {self.num_carriers} planes"]
        for i, plane in enumerate(self.__simple_types):
            lines.append(f"  plane {i}  {plane.name}  {plane.bits} bits  {bit_fields(plane)}".rstrip())
        lines += [f"  rule {i}   {rule!r}" for i, rule in enumerate(self.__representation_rules)]
        return "\n".join(lines)


def is_kind(value: object, kind: type[_D]) -> TypeGuard[_D]:
    """isinstance by the real class: a false `__class__` does not pass."""
    return issubclass(type(value), kind) and is_accepted(type(value))


def is_registered(value: object, kind: type[_D]) -> TypeGuard[_D]:
    """Whether a value is the registered holder of its name and of this kind."""
    return is_kind(value, kind) and registry.holder(read_slot(value, _NAME)) is value


def is_sealed(dtype: DType) -> bool:
    return has_slot(dtype, "_DType__sealed")


def items(values: Iterable[_T], what: str) -> tuple[_T, ...]:
    # Asked of the type, so that a TypeError raised inside an __iter__ passes unchanged.
    kind = type(cast(object, values))
    if not issubclass(kind, Iterable) and not hasattr(kind, "__getitem__"):
        raise TypeError(f"{what} must be iterable, got {kind.__name__}")
    return tuple(values)


def bit_fields(dtype: SimpleDType) -> str:
    """The bits of a built-in float drawn as fields, `s eeee mmm`; empty for another dtype."""
    facts = FLOAT_FACTS.get(dtype.name)
    if facts is None:
        return ""
    fields = "s" * facts.sign_bits, "e" * facts.exponent_bits, "m" * facts.significand_bits
    return " ".join(field for field in fields if field)


def _check_supertype(supertype: object) -> None:
    if not is_registered(supertype, DTypeCategory):
        raise TypeError(f"supertype must be a registered DTypeCategory, got {shown(supertype)}")


# numpy refuses or deprecates a dtype for these.
_ABSTRACT_SCALARS = (
    np.generic,
    np.number,
    np.integer,
    np.signedinteger,
    np.unsignedinteger,
    np.inexact,
    np.floating,
    np.complexfloating,
    np.flexible,
    np.character,
)


_JAX_SCALAR: type = type(cast(object, jnp.float32))


def _numpy_dtype_of(value: object) -> NumpyDType | None:
    if issubclass(type(value), np.dtype):
        return cast(NumpyDType, value)
    if not isinstance(value, type):
        return None
    scalar_type = cast("type[Any]", value)
    if np.generic in scalar_type.__mro__:
        if scalar_type in _ABSTRACT_SCALARS:
            return None
        found: NumpyDType = np.dtype(scalar_type)
        return found if found.type is scalar_type else None
    # jax.numpy's scalar types are classes that carry a numpy dtype; so may any class, which means nothing.
    return vars(scalar_type).get("dtype") if type(scalar_type) is _JAX_SCALAR else None


def _dtype_of_scalar_type(scalar_type: object, bits: int) -> NumpyDType:
    found = _numpy_dtype_of(scalar_type) if isinstance(scalar_type, type) else None
    if found is None or found.type is not scalar_type:
        raise TypeError(f"scalar_type must be a numpy or ml_dtypes scalar class, got {shown(scalar_type)}")
    value_bits = _value_bits(found)
    if not value_bits <= bits <= 8 * found.itemsize:
        raise ValueError(
            f"bits is {bits}, but a {found.name} takes {value_bits} to {8 * found.itemsize} bits"
        )
    return found


def _value_bits(numpy_dtype: NumpyDType) -> int:
    if numpy_dtype == np.bool_:
        return 1
    for info in (ml_dtypes.finfo, ml_dtypes.iinfo):
        try:
            found = cast(Any, info(numpy_dtype))
        except (TypeError, ValueError):
            continue
        return int(found.bits)
    return 8 * numpy_dtype.itemsize


def begin(
    dtype: DType,
    kind: type[DType],
    name: str,
    supertype: DTypeCategory | None,
    fields: list[tuple[str, object]],
) -> None:
    """Record what every descriptor has; each kind's constructor calls it once, after its own checks."""
    if not is_kind(dtype, kind):
        raise TypeError(f"{type(dtype).__qualname__} is no {kind.__name__}")
    if is_sealed(dtype):
        raise AttributeError(f"{dtype!r} is immutable: cannot construct it again")
    if has_slot(dtype, _NAME):
        raise TypeError(f"the constructor of {dtype!r} calls the model's constructor twice")
    exact = exact_str(name)
    if not exact:
        raise ValueError(f"name must be a non-empty string, got {shown(name)}")
    registry.check_free(exact, None)
    common = [("kind", kind.__name__), ("class", class_identity(type(dtype))), ("name", exact)]
    enclosing = ("supertype", None if supertype is None else supertype.structure())
    object.__setattr__(dtype, _FIELDS, (*common, enclosing, *fields))
    object.__setattr__(dtype, _NAME, exact)
    object.__setattr__(dtype, "_DType__supertype", supertype)
    object.__setattr__(dtype, _REPRESENTATION, None)


def add_field(dtype: DType, label: str, value: object) -> None:
    """Extend the structure of a descriptor whose construction has begun."""
    fields: tuple[tuple[str, object], ...] = read_slot(dtype, _FIELDS)
    object.__setattr__(dtype, _FIELDS, (*fields, (label, value)))


def claim_representation(dtype: DType, representation: Hashable) -> None:
    """Ask that no other descriptor may have this representation."""
    registry.check_free(read_slot(dtype, _NAME), representation)
    object.__setattr__(dtype, _REPRESENTATION, representation)


def _finish(dtype: DType) -> None:
    """Complete, seal and register what the outermost constructor leaves."""
    for base in type(dtype).__mro__:
        # DType's own two last slots are written below.
        if base is DType or not is_model_class(base):
            continue
        for member in vars(base).values():
            if isinstance(member, MemberDescriptorType) and not has_slot(dtype, member.__name__):
                raise TypeError(
                    f"the constructor of {type(dtype).__qualname__} never calls that of {base.__qualname__}"
                )
    fields: tuple[tuple[str, object], ...] = read_slot(dtype, _FIELDS)
    structure = (*fields, ("extension", freeze_extension(dtype.structure_extension())))
    object.__setattr__(dtype, "_DType__structure", structure)
    object.__setattr__(dtype, "_DType__sealed", True)
    numpy_dtype = dtype.numpy_dtype if is_kind(dtype, SimpleDType) else None
    registry.publish(dtype, read_slot(dtype, _NAME), read_slot(dtype, _REPRESENTATION), numpy_dtype)


def _class_hint(structure: Any) -> str:
    """Where to look for the class of a pickled structure, which may be anything."""
    try:
        identity: Any = dict(dict(structure)["class"])
        return f"; its class: {identity['module']}.{identity['qualname']}"
    except (TypeError, ValueError, KeyError):
        return ""


def _restore(name: str, structure: Structure) -> DType:
    """Unpickle a descriptor: the one registered here under the name, if it is the same thing."""
    try:
        found = DType.from_name(name)
    except LookupError:
        raise LookupError(
            f"the pickled dtype {name!r} is not registered here{_class_hint(structure)}"
        ) from None
    difference = first_difference(structure, found.structure())
    if difference is not None:
        raise ValueError(f"the pickled dtype {name!r} is not the one registered here: {difference}")
    return found
