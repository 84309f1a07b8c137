"""Patterns: wildcards, variables, and no way to make them slow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.iam import PolicyError
from meshwire.iam.wildcards import Glob

VALUES = {"aws:username": "ann", "star": "a*b", "mark": "?"}


def matches(pattern: str, text: str, *, variables: bool = True) -> bool | None:
    return Glob(pattern, variables=variables).matches(text, VALUES.get)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("", "", True),
        ("", "a", False),
        ("*", "", True),
        ("*", "a/b\nc", True),
        ("a*", "a", True),
        ("a*", "ba", False),
        ("a?c", "abc", True),
        ("a?c", "ac", False),
        ("a?c", "a\nc", True),
        ("*?", "", False),
        ("*a?", "xaab", True),
        ("?*?", "a", False),
        ("a*a", "a", False),
        ("a*b*c", "a-b-b-c", True),
        ("a.c", "abc", False),
        ("home/${aws:username}/*", "home/ann/x", True),
        ("home/${aws:username}/*", "home/annex/x", False),
        ("${AWS:UserName}", "ann", True),
        ("${nothing}", "", None),
        ("x${nothing}", "y", None),
        ("${nothing, 'all'}", "all", True),
        ("${aws:username, 'all'}", "ann", True),
        ("${star}", "a*b", True),
        ("${star}", "axb", False),
        ("${mark}x", "ax", False),
        ("${*}", "*", True),
        ("${*}", "a", False),
        ("${?}${$}", "?$", True),
        ("$a{b}", "$a{b}", True),
    ],
)
def test_matching(pattern: str, text: str, expected: bool | None) -> None:
    assert matches(pattern, text) is expected


def test_the_older_version_knows_no_variables() -> None:
    assert matches("${aws:username}", "${aws:username}", variables=False)
    assert matches("${*}", "${anything}", variables=False)


@pytest.mark.parametrize("pattern", ["${", "${aws:username", "a${}", "${a b}", "${a, b}"])
def test_a_broken_variable_is_refused(pattern: str) -> None:
    with pytest.raises(PolicyError, match="policy variable"):
        Glob(pattern, variables=True)


letters = st.text("ab*?/.", max_size=12)


@given(letters, st.text("ab/.\n", max_size=14))
def test_the_same_as_a_regular_expression(pattern: str, text: str) -> None:
    words = {"*": ".*", "?": "."}
    expected = re.compile("".join(words.get(sign, re.escape(sign)) for sign in pattern), re.DOTALL)
    assert Glob(pattern).matches(text, VALUES.get) is (expected.fullmatch(text) is not None)


def test_many_stars_cost_no_more_than_the_text_is_long() -> None:
    # A backtracking matcher would not end in a lifetime.
    assert Glob("*a" * 4000 + "*b").matches("a" * 1024, VALUES.get) is False
    assert Glob("*?a" * 300 + "b").matches("a" * 1024, VALUES.get) is False
