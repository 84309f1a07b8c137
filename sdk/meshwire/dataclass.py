"""`dataclass`, as the standard library's, for classes with slots in a fifth of the time.

A node loads four hundred and fifty of them before it is ready. The standard library compiles the source of
six methods for each; here one is compiled, `__init__`, and the others are closures over the fields' names.
Law: no other difference that a caller could see. Fields, defaults, `__post_init__`, `replace`, `asdict`,
patterns, copies and pickles are the standard library's, and type checkers see its decorator. What is rare
(keyword-only fields, `InitVar`, ordering, a dataclass as a base, no slots) is left to it altogether.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from dataclasses import dataclass as dataclass  # what type checkers know

    Values = Callable[[Any], tuple[Any, ...]]
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        repr: bool = True,
        **others: bool,
    ) -> Any:
        """Make a class a dataclass; the arguments are those of `dataclasses.dataclass`."""

        def decorate(cls: type) -> type:
            if slots and not others and not _is_rare(cls):
                return _make(cls, frozen, eq, repr)
            return dataclasses.dataclass(frozen=frozen, slots=slots, eq=eq, repr=repr, **others)(cls)

        return decorate if cls is None else decorate(cls)


CODE = "<meshwire.dataclass>"
"""The file that tracebacks name for compiled methods."""
_MISSING = dataclasses.MISSING
_set = object.__setattr__


class _Factory:
    """The default of an argument whose value a factory makes for each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _is_rare(cls: type) -> bool:
    """Whether the class needs more of the standard library than `_make` does."""
    if any(hasattr(base, "__dataclass_fields__") for base in cls.__mro__[1:]):
        return True
    if any(isinstance(value, dataclasses.Field) and value.kw_only is True for value in vars(cls).values()):
        return True
    return any("InitVar" in str(each) or "KW_ONLY" in str(each) for each in cls.__annotations__.values())


def _make(cls: type, frozen: bool, eq: bool, show: bool) -> type:
    own = set(vars(cls))
    hashes = vars(cls).get("__hash__")
    if cls.__doc__ is None:  # the standard library would write the signature here, in the time of two methods
        cls.__doc__ = cls.__name__
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    made.__dataclass_params__.init = True
    made.__dataclass_params__.repr, made.__dataclass_params__.eq = show, eq
    made.__dataclass_params__.frozen = frozen
    fields = dataclasses.fields(made)

    def add(name: str, method: Any) -> None:
        if name not in own:
            method.__qualname__, method.__module__ = f"{made.__qualname__}.{name}", made.__module__
            setattr(made, name, method)

    add("__init__", _init(fields, frozen, hasattr(made, "__post_init__")))
    if show:
        add("__repr__", _representation([field.name for field in fields if field.repr]))
    if eq:
        add("__eq__", _equality(_values([field.name for field in fields if field.compare])))
        hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
        if (
            hashes is None
        ):  # as in the standard library, also where a class with __eq__ of its own has no hash
            own.discard("__hash__")
            if frozen:
                add("__hash__", _hash(_values(hashed)))
            else:
                made.__hash__ = None
    if frozen:
        _freeze(made, add, [field.name for field in fields])
    return made  # type: ignore[no-any-return]


def _values(names: Sequence[str]) -> Values:
    if not names:
        return lambda _: ()
    if len(names) > 1:
        return attrgetter(*names)
    only = attrgetter(*names)
    return lambda value: (only(value),)


def _init(fields: Sequence[dataclasses.Field[Any]], frozen: bool, finishes: bool) -> Any:
    """Compile `__init__`: it is called most, and only source has names of arguments."""
    known: dict[str, Any] = {"_set": _set, "_factory": _FACTORY}
    arguments, lines = ["self"], []
    for number, field in enumerate(fields):
        name = value = field.name
        if field.default_factory is not _MISSING:
            known[f"_made{number}"] = field.default_factory
            value = f"_made{number}()" + (f" if {name} is _factory else {name}" if field.init else "")
            default = "=_factory"
        elif field.default is not _MISSING:
            known[f"_default{number}"] = field.default
            value = name if field.init else f"_default{number}"
            default = f"=_default{number}"
        elif field.init:
            default = ""
        else:
            continue  # `__post_init__` sets it
        if field.init:
            arguments.append(name + default)
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    lines += ["self.__post_init__()"] if finishes else []
    source = f"def __init__({', '.join(arguments)}):\n " + "\n ".join(lines or ["pass"])
    exec(compile(source, CODE, "exec"), known)
    init: Any = known["__init__"]
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    return init


def _representation(names: Sequence[str]) -> Any:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _equality(values: Values) -> Any:
    def __eq__(self: Any, other: object) -> bool:
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    return __eq__


def _hash(values: Values) -> Any:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _freeze(cls: Any, add: Callable[[str, Any], None], names: Sequence[str]) -> None:
    """Refuse changes as the standard library does, and copy and pickle what refuses them."""
    known = frozenset(names)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in known:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in known:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    def __getstate__(self: Any) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def __setstate__(self: Any, state: Sequence[Any]) -> None:
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            _set(self, field.name, value)

    for method in (__setattr__, __delattr__, __getstate__, __setstate__):
        add(method.__name__, method)
