"""The check of names and words finds what it is for, and nothing in this checkout."""

from __future__ import annotations

import pytest

from tests import vocabulary


@pytest.mark.parametrize(
    "line",
    ["the steward tells", "def find_graves():", "class SparePorter:", "node.homing = 1", "MOVER"],
)
def test_retired_words_are_found_also_in_names(line: str) -> None:
    found = list(vocabulary.retired_words("a.py", f"x = 1\n{line}\n"))
    assert [each.place for each in found] == ["a.py:2"]


@pytest.mark.parametrize("line", ["removers", "a reporter", "engraved", "bookkeeper", "screw"])
def test_words_that_only_contain_them_are_not(line: str) -> None:
    assert list(vocabulary.retired_words("a.py", line)) == []


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        ("meshd/ceding.py", True),
        ("meshd/write_ceding.py", True),
        ("meshd/listing.py", False),
        ("a/ceding.md", False),
    ],
)
def test_gerunds_as_names_of_modules(path: str, bad: bool) -> None:
    assert (vocabulary.gerund_module(path) is not None) is bad


def test_an_object_that_shows_itself_under_another_name_is_found() -> None:
    text = """class _Desk:
    def __repr__(self) -> str:
        return f"<{name} {self.place}>"

class Fetcher:
    def __repr__(self) -> str:
        return "<no fetches>"
"""
    assert list(vocabulary.other_class_names("a.py", text.replace("{name}", "Desk"))) == []
    found = list(vocabulary.other_class_names("a.py", text.replace("{name}", "Porter")))
    assert [(each.place, each.word) for each in found] == [("a.py:2", "Porter")]


def test_this_checkout_has_none() -> None:
    assert vocabulary.findings() == []
