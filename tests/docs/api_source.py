"""What a module says of its public names: read from its source, never imported.

Law: source in, frozen values out; annotations and defaults are quoted as they are written, so the same on
every Python and whatever optional libraries there are. Invariant: a public name without a docstring is an
error that says where.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Function = ast.FunctionDef | ast.AsyncFunctionDef

SPECIAL = {"__len__": "len({})", "__getitem__": "{}[…]", "__iter__": "iter({})", "__call__": "{}(…)"}
_WIDTH = 100


class UndocumentedError(ValueError):
    """A public name has no docstring."""


@dataclass(frozen=True, slots=True)
class Member:
    """A method or property: its `title`, how it is called, and what it does."""

    title: str
    signature: str
    text: str


@dataclass(frozen=True, slots=True)
class Documented:
    """A function or class. `signature` is how it is called; of a class that is not made by users, its
    attributes."""

    title: str
    signature: str
    text: str
    bases: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()


class Module:
    """A source file, parsed once."""

    def __init__(self, path: Path) -> None:
        self.path, source = path, path.read_bytes()
        self._lines = source.splitlines(keepends=True)
        nodes = ast.parse(source).body
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self._named = {node.name: node for node in nodes if isinstance(node, kinds)}

    def names(self) -> tuple[str, ...]:
        """The public functions and classes, as they stand in the file."""
        return tuple(name for name in self._named if not name.startswith("_"))

    def find(self, name: str, title: str, *, made: bool = True, members: bool = True) -> Documented:
        """`made`: users call the class; `members`: its methods, too. Raises KeyError, UndocumentedError."""
        node = self._named[name]
        text = self._text(node, name)
        if not isinstance(node, ast.ClassDef):
            return Documented(title, self._call(title, node), text)
        bases = tuple(self._quote(base) for base in node.bases)
        signature = self._construction(title, node) if made else self._attributes(node)
        found = self.members(name, name) if members else ()
        return Documented(title, signature, text, bases, found)

    def _text(self, node: Function | ast.ClassDef, name: str) -> str:
        text = ast.get_docstring(node)
        if not text:
            raise UndocumentedError(f"{self.path}:{node.lineno}: {name} is public and has no docstring")
        return inspect.cleandoc(text)

    def members(self, name: str, owner: str) -> tuple[Member, ...]:
        """The public methods and properties of a class, as those of `owner`, which may be a subclass."""
        node = self._named[name]
        return tuple(self._members(node, owner)) if isinstance(node, ast.ClassDef) else ()

    def _members(self, node: ast.ClassDef, owner: str) -> Iterator[Member]:
        for item in node.body:
            if not isinstance(item, ast.FunctionDef):
                continue
            if item.name in SPECIAL:
                if ast.get_docstring(item):
                    yield Member(SPECIAL[item.name].format(owner), "", self._text(item, item.name))
            elif not item.name.startswith("_"):
                name = f"{owner}.{item.name}"
                yield Member(name, self._member(item), self._text(item, name))

    def _member(self, node: ast.FunctionDef) -> str:
        if any(self._quote(decorator) == "property" for decorator in node.decorator_list):
            return f"{node.name}: {self._returns(node)}"
        return self._call(node.name, node, bound=True)

    def _construction(self, title: str, node: ast.ClassDef) -> str:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return _laid(title, self._parameters(item, bound=True), "")
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return _laid(title, [self._quote(field) for field in fields], "") if fields else ""

    def _attributes(self, node: ast.ClassDef) -> str:
        """What an instance has, a line each."""
        return "\n".join(self._quote(item) for item in node.body if isinstance(item, ast.AnnAssign))

    def _call(self, title: str, node: Function, *, bound: bool = False) -> str:
        return _laid(title, self._parameters(node, bound=bound), f" -> {self._returns(node)}")

    def _returns(self, node: Function) -> str:
        return self._quote(node.returns) if node.returns is not None else "Any"

    def _parameters(self, node: Function, *, bound: bool) -> list[str]:
        given = node.args
        plain = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        told = [self._parameter(item, default) for item, default in zip(plain, defaults, strict=True)]
        if given.posonlyargs:
            told.insert(len(given.posonlyargs), "/")
        told = told[1:] if bound else told
        if given.vararg:
            told.append("*" + self._parameter(given.vararg, None))
        elif given.kwonlyargs:
            told.append("*")
        told += [self._parameter(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
        return [*told, "**" + self._parameter(given.kwarg, None)] if given.kwarg else told

    def _parameter(self, item: ast.arg, default: ast.expr | None) -> str:
        kind = f": {self._quote(item.annotation)}" if item.annotation else ""
        spaced = " = " if kind else "="
        return item.arg + kind + (f"{spaced}{self._quote(default)}" if default is not None else "")

    def _quote(self, node: ast.expr | ast.stmt) -> str:
        """As `ast.get_source_segment`, which splits the whole source into lines each time."""
        assert node.end_lineno is not None
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b"".join(lines).decode().split())


def _laid(title: str, parameters: Sequence[str], end: str) -> str:
    """On one line, or a line each."""
    line = f"{title}({', '.join(parameters)}){end}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{title}(", *(f"    {item}," for item in parameters), f"){end}"])
