"""The metaclass that keeps the model's own members out of its subclasses' reach."""

from __future__ import annotations

from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakSet

_T = TypeVar("_T")

# Special methods that identity, immutability and pickling stand on; a subclass has no say in them.
_OWNED_SPECIAL = frozenset(
    [
        "__class__",
        "__new__",
        "__getattribute__",
        "__setattr__",
        "__delattr__",
        "__eq__",
        "__ne__",
        "__hash__",
        "__copy__",
        "__deepcopy__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__getnewargs__",
        "__getnewargs_ex__",
    ]
)
# What a subclass is asked to supply.
_HOOKS = frozenset({"structure_extension", "validate"})
# A structure names its class by module and qualified name; the bases decide what the members mean.
_CLASS_IDENTITY = frozenset({"__module__", "__qualname__", "__name__", "__bases__"})

_model_classes: set[type] = set()
_metaclasses: set[type] = set()
# Every class that has passed the checks below: one made behind the metaclass's back is missing.
_accepted: WeakSet[type] = WeakSet()
_open = True
_EMPTY = object()


class _Owned:
    """A method of the model as a data descriptor, which an instance's `__dict__` cannot replace."""

    def __init__(self, member: Any) -> None:
        self.__member = member
        self.__doc__ = member.__doc__
        self.__wrapped__ = getattr(member, "__func__", member)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.__member.__get__(instance, owner)

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(f"{self.__wrapped__.__name__!r} belongs to the model: cannot set it")


class ModelMeta(type):
    """Classes made while `jaxquant.dtypes` is imported are the model's; those made later extend it."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> ModelMeta:
        if not _open and not _is_metaclass(mcls):
            raise TypeError(f"class {name}: the metaclass {mcls.__name__} is not the model's")
        if _open:
            namespace = {key: _owned(key, member) for key, member in namespace.items()}
        cls = super().__new__(mcls, name, bases, namespace, **kwargs)
        if _open:
            _metaclasses.add(mcls)
            _model_classes.add(cls)
        else:
            _check_extension(cls)
        _accepted.add(cls)
        return cls

    def __call__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        if not is_accepted(cls):
            raise TypeError(f"{cls.__qualname__} was made without the model's checks")
        # A mixin may have changed since the class was made.
        _check_extension(cls)
        return cast(_T, super().__call__(*args, **kwargs))  # type: ignore[misc]

    def __setattr__(cls, name: str, value: object) -> None:
        _check_class_change(cls, name)
        super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        _check_class_change(cls, name)
        super().__delattr__(name)


def close_model() -> None:
    """Freeze the model's classes; called once, when all of them and the built-ins exist."""
    global _open
    _open = False


def owned_members(cls: type) -> frozenset[str]:
    """The names that belong to the model in a class and its subclasses."""
    own = {
        name
        for base in cls.__mro__
        if base in _model_classes
        for name in vars(base)
        if not (name.startswith("__") and name.endswith("__")) or name == "__repr__"
    }
    return frozenset(own - _HOOKS) | _OWNED_SPECIAL


def read_slot(instance: object, name: str, default: Any = None) -> Any:
    """A private slot of the model, or the default where it is empty; never asks a subclass's __getattr__."""
    try:
        return object.__getattribute__(instance, name)
    except AttributeError:
        return default


def has_slot(instance: object, name: str) -> bool:
    return read_slot(instance, name, _EMPTY) is not _EMPTY


def is_model_class(cls: type) -> bool:
    return cls in _model_classes


def is_accepted(cls: type) -> bool:
    """Whether a class was made by the model's own metaclass and passed its checks."""
    return _is_metaclass(type(cls)) and cls in _accepted


def _is_metaclass(mcls: type) -> bool:
    # By identity: a metaclass of the metaclass may define == and hash.
    return any(mcls is known for known in _metaclasses)


def _owned(name: str, member: object) -> object:
    hook = name in _HOOKS or (name.startswith("__") and name.endswith("__"))
    return member if hook or not isinstance(member, FunctionType | classmethod) else _Owned(member)


def _check_extension(cls: type) -> None:
    if type(cls.__module__) is not str or type(cls.__qualname__) is not str:
        raise TypeError(f"class {cls.__name__}: __module__ and __qualname__ must be strings")
    owned = set(owned_members(cls))
    shadowed: set[str] = set()
    for base in cls.__mro__:
        if base in _model_classes:
            owned -= vars(base).keys()
        elif base is not object:
            shadowed |= owned & vars(base).keys()
        if base is not cls and vars(base).get("__final__"):
            raise TypeError(f"class {cls.__qualname__}: {base.__qualname__} is final")
    if shadowed:
        names = ", ".join(sorted(shadowed))
        raise TypeError(f"class {cls.__qualname__} shadows what belongs to the model: {names}")


def _check_class_change(cls: type, name: str) -> None:
    if _open:
        return
    if cls in _model_classes:
        raise AttributeError(f"{cls.__qualname__} is frozen: cannot set or delete {name!r}")
    if name in _CLASS_IDENTITY or name in owned_members(cls):
        raise AttributeError(f"{name!r} of {cls.__qualname__} belongs to the model: cannot set or delete it")
