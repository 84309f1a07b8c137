"""Every test can fail by what it finds: it asserts, or calls a helper that does."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.source_statements import statements

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[3]
OWN: Final = ("tests.",)  # modules whose helpers may assert for a test
ASSERTING: Final = frozenset({"raises", "warns", "deprecated_call", "fail"})  # of pytest
WAITING: Final = frozenset(
    {
        "await_at_once",
        "await_map",
        "await_metric",
        "await_state",
        "await_true",
        "eventually",
        "until",
    }
)
"""Methods and functions that raise when what they wait for does not come about."""
RUNNING: Final = frozenset({"TARGETS", "run_machine"})
"""What runs assertions that stand elsewhere: the fuzzers' targets; Hypothesis's state machines."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _nodes(path: Path) -> tuple[list[Function], list[ast.ImportFrom]]:
    """Functions and methods of a module, those inside of others too, and its imports."""
    functions, imports = list[Function](), list[ast.ImportFrom]()
    for node in statements(_tree(path)):
        if isinstance(node, Function):
            functions.append(node)
        elif isinstance(node, ast.ImportFrom):
            imports.append(node)
    return functions, imports


@cache
def _functions(path: Path) -> dict[str, list[Function]]:
    """By name."""
    found: dict[str, list[Function]] = {}
    for node in _nodes(path)[0]:
        found.setdefault(node.name, []).append(node)
    return found


@cache
def _imported(path: Path) -> dict[str, tuple[Path, str]]:
    """Names that a module has from our own test modules: where they are, and what they are called there."""
    found: dict[str, tuple[Path, str]] = {}
    for node in _nodes(path)[1]:
        if (node.module or "").startswith(OWN):
            file = ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py")
            if file.exists():
                found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return found


@cache
def _read(function: Function) -> tuple[set[str], bool]:
    """The names it refers to, and whether it has an `assert` or raises an AssertionError."""
    names, asserts = set[str](), False
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Assert):
            asserts = True
        elif isinstance(node, ast.Raise) and node.exc is not None:
            asserts = asserts or "AssertionError" in ast.dump(node.exc)
    return names, asserts


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Three million objects: a full collection by a later test of this process would take two seconds."""
    yield
    for kept in (_tree, _nodes, _functions, _imported, _read, _asserts_itself):
        kept.cache_clear()


def _names(function: Function) -> set[str]:
    """What it refers to: a helper may be called, or handed to something that calls it."""
    return _read(function)[0]


@cache
def _asserts_itself(function: Function) -> bool:
    if any(isinstance(each, ast.Assert) for each in statements(function)):
        return True  # as almost every test does: its expressions need not be looked at
    names, asserts = _read(function)
    return (
        asserts
        or any(name.startswith("assert_") for name in names)  # numpy's, for one
        or not (ASSERTING | WAITING | RUNNING).isdisjoint(names)
    )


def _asserts(path: Path, function: Function, seen: set[tuple[Path, str]]) -> bool:
    """Itself, or by a helper of its module or of one that this imports."""
    if _asserts_itself(function):
        return True
    for place in {place for name in _names(function) for place in _places(path, name)} - seen:
        seen.add(place)
        helpers = _functions(place[0]).get(place[1], [])
        if any(_asserts(place[0], helper, seen) for helper in helpers if helper is not function):
            return True
    return False


def _places(path: Path, name: str) -> set[tuple[Path, str]]:
    """Where a helper of that name may be: here, or where it is imported from; a method, in any module of ours
    that something is imported from."""
    imported = _imported(path)
    if name in imported:
        return {imported[name]}
    return {(file, name) for file in (path, *(file for file, _ in imported.values()))}


def _test_files() -> Iterator[Path]:
    yield from sorted((ROOT / "tests").rglob("*.py"))
    yield from sorted((ROOT / "meshd" / "testing").glob("*.py"))


def without_assertion(path: Path) -> list[str]:
    """Tests of a file that can fail by an unexpected exception alone."""
    tests = [(name, each) for name, found in _functions(path).items() for each in found]
    return [
        f"{path}:{test.lineno} {name}"
        for name, test in tests
        if name.startswith("test_") and not _asserts(path, test, set())
    ]


def test_every_test_asserts() -> None:
    gc.disable()  # trees of all tests are no garbage, and would be looked through again and again
    try:
        found = [line for path in _test_files() for line in without_assertion(path)]
    finally:
        gc.enable()
    assert not found, "these assert nothing, and call no helper that does:\n" + "\n".join(found)


def test_a_test_without_assertion_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "def _check(x):\n    assert x\n"
        "def _look(x):\n    return x\n"
        "def test_by_a_helper():\n    _check(1)\n"
        "def test_by_waiting(mesh):\n    mesh.await_state('n1', 'up')\n"
        "def test_by_pytest():\n    with pytest.raises(ValueError):\n        int('x')\n"
        "def test_nothing():\n    _look(1)\n"
        "async def test_nothing_either():\n    await _look(1)\n"
    )
    assert without_assertion(file) == [f"{file}:12 test_nothing", f"{file}:14 test_nothing_either"]
