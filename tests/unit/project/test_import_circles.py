"""Modules that import each other in a circle: none but those listed here, and the list only shrinks. It is
empty.

Every import counts, also one for type checking or inside a function: to understand a module of a circle one
has to read all of them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.source_statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("meshd", "sdk/meshwire", "sdk/meshsdk", "operator/meshoperator", "tools/meshtools")

KNOWN: tuple[str, ...] = ()
"""Circles that are still there, each the names of its modules with blanks between. Whoever dissolves one, or
takes a module out of one, changes its line."""


def sources() -> dict[str, str]:
    """Every module's name, and its text."""
    found = {}
    for package in PACKAGES:
        base = (ROOT / package).parent
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of these modules each of them imports, anywhere in its text."""
    return {name: {*_imported(text, texts)} - {name} for name, text in texts.items()}


def _imported(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for node in statements(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports are not used here"
            assert not node.level, "relative imports are not used here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """The sets of modules that reach each other, by Tarjan's algorithm."""
    numbers: dict[str, int] = {}
    lows: dict[str, int] = {}
    path: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        numbers[name] = lows[name] = len(numbers)
        path.append(name)
        for other in graph[name]:
            if other not in graph:
                continue
            if other not in numbers:
                visit(other)
                lows[name] = min(lows[name], lows[other])
            elif other in path:
                lows[name] = min(lows[name], numbers[other])
        if lows[name] == numbers[name]:
            members = path[path.index(name) :]
            del path[path.index(name) :]
            if len(members) > 1:
                found.add(frozenset(members))

    for name in graph:
        if name not in numbers:
            visit(name)
    return found


def test_there_are_no_circles_but_the_known_ones() -> None:
    known = {frozenset(line.split()) for line in KNOWN}
    found = circles(imports(sources()))
    new = [" ".join(sorted(members)) for members in found - known]
    assert new == [], "these modules import each other in a circle"
    gone = [" ".join(sorted(members)) for members in known - found]
    assert gone == [], "these circles are dissolved: take them off the list"


def test_every_way_to_import_counts() -> None:
    texts = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "def f():\n    import p.c",
        "p.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import A",
        "p.d": "from p.a import A\nimport os",
    }
    assert imports(texts)["p.d"] == {"p.a", "os"}
    assert circles(imports(texts)) == {frozenset({"p.a", "p.b", "p.c"})}


def test_circles_of_one_package_that_touch_are_one() -> None:
    graph = {"a": "b", "b": "ac", "c": "b", "d": "a", "e": "f", "f": "e"}
    assert circles(graph) == {frozenset("abc"), frozenset("ef")}
