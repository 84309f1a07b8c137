"""Law: nobody in tests, their tools or the demo waits without an end: what hangs fails and says where.

What signals do not interrupt, threads and what is done at the end of a failed test, is beyond pytest-timeout.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
WAITING = frozenset({"wait", "join", "communicate"})
RUNNING = frozenset({"run", "call", "check_call", "check_output"})
# Without one of these no call waits for ever, and the source need not be parsed.
_MAY_WAIT = re.compile(
    rf"\.({'|'.join(WAITING)})\(\s*(\)|#|\*|[a-z_]+\s*=)|subprocess\.({'|'.join(RUNNING)})\("
)
# Programs of their own, run by hand or by tests that wait for them with patience.
FREE = (
    "tests/compat/__main__.py",
    "tests/compat/conformance/",
    "tests/compat/drivers/",
    "tests/fuzz/__main__.py",
    "tests/gpu/",  # its `wait` is a device's
)


def endless(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each call that may wait for ever."""
    if not _MAY_WAIT.search(source):
        return
    nodes = list(ast.walk(ast.parse(source)))
    # What is awaited is a task's: the test's timeout cancels it.
    awaited = {id(node) for each in nodes if isinstance(each, ast.Await) for node in ast.walk(each)}
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or id(node) in awaited:
            continue
        if node.func.attr not in WAITING | RUNNING:
            continue
        bounded = any(keyword.arg in (None, "timeout") for keyword in node.keywords)
        called = node.func.attr
        blind = called in WAITING and not node.args
        if called == "wait" and ast.unparse(node.func.value) == "asyncio.Event()":
            continue
        runs = called in RUNNING and ast.unparse(node.func.value) == "subprocess"
        if (blind or runs) and not bounded:
            yield node.lineno, ast.unparse(node)


def files() -> list[Path]:
    found = [path for part in ("tests", "sdk/meshdemo") for path in (ROOT / part).rglob("*.py")]
    return [path for path in found if not str(path.relative_to(ROOT)).startswith(FREE)]


def test_every_wait_ends() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files()
        for line, text in endless(path.read_text())
    ]
    assert not found, "give it a timeout, or use tests.support.bounded_wait:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ["process.wait()", "thread.join()", "p.communicate(data=b'')", "subprocess.run(['x'], check=True)"],
)
def test_what_waits_for_ever_is_found(source: str) -> None:
    assert [line for line, _ in endless(source)] == [1]


@pytest.mark.parametrize(
    "source",
    [
        "process.wait(60)",
        "', '.join(names)",
        "p.communicate(timeout=9)",
        "subprocess.run(['x'], timeout=100)",
        "subprocess.run(['x'], **options)",
        "async def f(): await event.wait()",
        "async def f(): await wait_for(event.wait(), 5)",
        "run(['x'])",
    ],
)
def test_what_ends_is_left_alone(source: str) -> None:
    assert not list(endless(source))
