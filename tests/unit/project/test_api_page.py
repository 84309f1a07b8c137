"""docs/api.md says what the docstrings say, and leaves no public name out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import meshsdk

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from api_page import PAGE, SECTIONS, markdown, page
from api_source import Module, UndocumentedError


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), (
        "docs/api.md is stale: run `make reference` (python tests/docs/api_page.py)"
    )


def test_every_public_name_is_in_it() -> None:
    told = {entry.title for section in SECTIONS for entry in section.entries} | {
        "mesh.MeshError",
        "mesh.errors",
        "mesh.ops",
        "mesh.packed_rows",
    }
    assert {f"mesh.{name}" for name in meshsdk.__all__} <= told


def test_a_docstring_becomes_paragraphs_and_lists() -> None:
    arguments = "Arguments:\n    size: in bytes,\n        not more.\n    low, high: an angle."
    told = "Arguments:\n\n- `size`: in bytes, not more.\n- `low`, `high`: an angle.\n"
    assert markdown(f"What it\nis.\n\n{arguments}\n\nThe end.") == f"What it\nis.\n\n{told}\nThe end.\n"


def test_an_example_becomes_a_block_of_code() -> None:
    example = "Example:\n    for row in rows:\n        print(row)"
    assert markdown(f"What.\n\n{example}") == (
        "What.\n\nExample:\n\n```\nfor row in rows:\n    print(row)\n```\n"
    )


SOURCE = '''
class Thing(Base):
    """A thing."""

    def __init__(self, name: str, *, size: int = 1 << 4) -> None: ...

    def __len__(self) -> int:
        """Its length."""

    def __iter__(self): ...

    @property
    def half(self) -> int | None:
        """Half of it."""

    def grow(self, by=1, *more: int, **named: str) -> Thing:
        """More of it."""

class Value:
    """A value."""

    low: int
    high: float = 1.5

def made(first, /, second: "str" = 'x') -> None:
    """Makes."""

def silent() -> None: ...
'''


@pytest.fixture
def module(tmp_path: Path) -> Module:
    path = tmp_path / "things.py"
    path.write_text(SOURCE)
    return Module(path)


def test_signatures_are_quoted_as_they_are_written(module: Module) -> None:
    assert module.names() == ("Thing", "Value", "made", "silent")
    thing = module.find("Thing", "lib.Thing")
    assert (thing.signature, thing.bases) == ("lib.Thing(name: str, *, size: int = 1 << 4)", ("Base",))
    assert [(item.title, item.signature) for item in thing.members] == [
        ("len(Thing)", ""),
        ("Thing.half", "half: int | None"),
        ("Thing.grow", "grow(by=1, *more: int, **named: str) -> Thing"),
    ]
    assert module.find("Value", "Value").signature == "Value(low: int, high: float = 1.5)"
    assert module.find("Value", "Value", made=False).signature == "low: int\nhigh: float = 1.5"
    assert module.find("made", "made").signature == "made(first, /, second: \"str\" = 'x') -> None"


def test_a_public_name_without_a_docstring_is_refused(module: Module) -> None:
    with pytest.raises(UndocumentedError, match="silent"):
        module.find("silent", "silent")
