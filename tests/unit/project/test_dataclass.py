"""`meshwire.dataclass` behaves like the standard library's decorator: each class here is made by both."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import pytest

from meshwire import dataclass as fast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Decorator = Any


def _plain(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class Plain:
        """A value."""

        name: str
        size: int = 0
        tags: list[str] = field(default_factory=list, compare=False)
        secret: str = field(default="", repr=False, hash=False)
        KIND: ClassVar[str] = "plain"

        def larger(self) -> Plain:
            return dataclasses.replace(self, size=self.size + 1)

    return Plain


def _derived(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class Derived:
        name: str
        size: int = field(init=False)
        kind: str = field(default="x", init=False)
        parts: list[str] = field(default_factory=list, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", len(self.name))

    return Derived


def _mutable(dataclass: Decorator) -> type:
    @dataclass(slots=True)
    class Mutable:
        name: str
        size: int = 0

    return Mutable


def _identical(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True, eq=False)
    class Identical:
        name: str

    return Identical


def _own_methods(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class OwnMethods:
        name: str

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 7

        def __eq__(self, other: object) -> bool:
            return isinstance(other, OwnMethods)

    return OwnMethods


def _own_equality(dataclass: Decorator) -> type:
    @dataclass(slots=True)
    class OwnEquality:
        name: str

        def __eq__(self, other: object) -> bool:
            return True

    return OwnEquality


def _generic(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class Box(Generic[T]):
        inside: T

    return Box


def _empty(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class Empty:
        pass

    return Empty


def _inherited(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True)
    class Base:
        name: str

    @dataclass(frozen=True, slots=True)
    class Inherited(Base):
        size: int = 1

    return Inherited


def _keywords(dataclass: Decorator) -> type:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Keywords:
        name: str

    return Keywords


def _without_slots(dataclass: Decorator) -> type:
    @dataclass(frozen=True)
    class WithoutSlots:
        name: str

    return WithoutSlots


_CLASSES = (
    _plain,
    _derived,
    _mutable,
    _identical,
    _own_methods,
    _own_equality,
    _generic,
    _empty,
    _inherited,
    _keywords,
    _without_slots,
)


def _values(make: Any) -> Iterator[Any]:
    for name in ("a", "a", "bb"):
        takes = inspect.signature(make).parameters
        yield make(name=name) if "name" in takes else make(*[name][: len(takes)])
        if "size" in takes:
            yield make(name=name, size=3)


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return type(error), str(error)


def _behaviour(dataclass: Decorator, declare: Callable[[Decorator], type]) -> list[Any]:
    made: Any = declare(dataclass)
    values = list(_values(made))
    some, fields = values[0], [each.name for each in dataclasses.fields(made)]
    seen: list[Any] = [fields, made.__slots__ if "__slots__" in vars(made) else None, made.__match_args__]
    parameters = inspect.signature(made).parameters.values()
    seen.append([(each.name, each.kind, each.annotation, repr(each.default)) for each in parameters])
    seen += [repr(each).rpartition("<locals>.")[2] for each in values]
    seen += [[one == other for other in values] for one in values]
    seen.append([some == "a", some.__eq__("a"), made.__hash__ is None])
    if declare not in (_identical, _empty):
        seen += [_outcome(lambda each=each: hash(each)) for each in values]  # type: ignore[misc]
    seen.append([dataclasses.asdict(each) for each in values])
    if declare is not _derived:
        seen += [dataclasses.replace(each) == each for each in values]
    for name in fields:
        seen.append(_outcome(lambda name=name: setattr(some, name, "z")))  # type: ignore[misc]
        seen.append(getattr(some, name, None))
        seen.append(_outcome(lambda name=name: delattr(copy.copy(some), name)))  # type: ignore[misc]
    # The standard library's methods of frozen classes with slots fail in another way, by a mistake.
    seen.append(isinstance(_outcome(lambda: setattr(some, "unknown", 1)), tuple))
    seen.append(_outcome(lambda: made(1, 2, 3, 4, 5, 6))[0])
    seen += [dataclasses.asdict(copy.deepcopy(each)) for each in values]
    return seen


@pytest.mark.parametrize("declare", _CLASSES)
def test_behaves_like_the_standard_librarys(declare: Callable[[Decorator], type]) -> None:
    assert _behaviour(fast.dataclass, declare) == _behaviour(dataclasses.dataclass, declare)


def test_matches_by_position() -> None:
    match _plain(fast.dataclass)("a", 2):
        case object(name=name, size=size):
            assert (name, size) == ("a", 2)


@fast.dataclass(frozen=True, slots=True)
class Sent:
    name: str
    more: tuple[str, ...] = ()


def test_is_pickled() -> None:
    sent = Sent("a", ("b",))
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_a_value_that_contains_itself_is_shown() -> None:
    @fast.dataclass(slots=True)
    class Node:
        inside: Any = None

    node = Node()
    node.inside = node
    assert repr(node).endswith("Node(inside=...)")


def test_compares_what_is_neither_equal_nor_unequal_by_identity() -> None:
    nan = float("nan")
    assert Sent(nan) == Sent(nan)  # type: ignore[arg-type]  # as tuples do
    assert Sent(nan) != Sent(float("nan"))  # type: ignore[arg-type]


def test_is_made_here_and_not_by_the_standard_library() -> None:
    made: Any = Sent
    assert made.__init__.__code__.co_filename == fast.CODE
    rare: Any = _inherited(fast.dataclass)
    assert rare.__init__.__code__.co_filename != fast.CODE
