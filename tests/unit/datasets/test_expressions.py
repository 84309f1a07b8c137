"""Expressions: what they give for a sample, what is refused and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwire.dataset.expression_evaluation import FUNCTIONS, matches
from meshwire.dataset.expression_parser import format_value, parse_expression, sort_key
from meshwire.strict_json import PlanError

SAMPLE: dict[str, Any] = {
    "key": "train/cats/0001.JPG",
    "stem": "train/cats/0001",
    "ext": "jpg",
    "size": 12_000,
    "cls": b"7\n",
    "raw": b"\xff\xfe",
    "json": b'{"width": 640, "tags": ["a", "b"], "by": {"full name": "Ann"}, "ok": true, "no": null}',
    "meta": {"lang": "en", "score": 0.5},
    "seg.png": "x",
    "huge": 10**400,
    "nan": float("nan"),
}

GIVES: list[tuple[str, Any]] = [
    ("1 + 2 * 3 - 4 / 2", 5.0),
    ("(1 + 2) * 3 % 5", 4.0),
    ("-size + 1", -11_999.0),
    ("--size", 12_000.0),
    ("2 - -1", 3.0),
    ("'a' + \"b\"", "ab"),
    ("'a' + 1", None),
    ("'a' - 'b'", None),
    ("1 / 0", None),
    ("1 % 0", None),
    ("1e300 * 1e300", None),
    ("true + 1", None),
    ("size > 10000 and ext == 'jpg'", True),
    ("size > 10000 and ext != 'jpg' or false", False),
    ("not size", False),
    ("not not size", True),
    ("not missing", True),
    ("missing == none", True),
    ("none != none", False),
    ("missing > 1", False),
    ("not missing > 1", True),
    ("1 == true", False),
    ("'1' == 1", False),
    ("'1' < 2", False),
    ("'a' < 'b'", True),
    ("ext in ('png', 'jpg')", True),
    ("ext not in ('png', 'jpg')", False),
    ("ext in ()", False),
    ("none in (none)", True),
    ("part(key, '/', 1)", "cats"),
    ("part(key, '/', -1)", "0001.JPG"),
    ("part(key, '/', 9)", None),
    ("part(key, '', 0)", None),
    ("part(key, '/', 0.5)", None),
    ("slice(stem, 0, 5)", "train"),
    ("slice(stem, -4)", "0001"),
    ("slice(stem, 99)", ""),
    ("folder(key) + '|' + base(key)", "train/cats|0001.JPG"),
    ("startswith(key, 'train/')", True),
    ("endswith(key, '.jpg')", False),
    ("endswith(lower(key), '.jpg')", True),
    ("contains(key, 'cats')", True),
    ("glob(key, '*/cats/*.JPG')", True),
    ("glob(size, '*')", None),
    ("upper(ext)", "JPG"),
    ("replace(key, '/', '-')", "train-cats-0001.JPG"),
    ("replace(key, '', '-')", None),
    ("length(ext) == 3", True),
    ("length(json.tags)", 2.0),
    ("number(cls) + 1", 8.0),
    ("number('x')", None),
    ("number('1e999')", None),
    ("number(true)", 1.0),
    ("strip(cls)", "7"),
    ("text(12) + text(1.5) + text(true)", "121.5true"),
    ("hash('a') == hash('a') and hash('a') != hash('b')", True),
    ("floor(1.5) + ceil(1.5) + round(2.5) + abs(-1)", 6.0),
    ("min(3, 1, 2) + max(3, 1, 2)", 4.0),
    ("max('b', 'a')", "b"),
    ("max('b', 1)", None),
    ("first(missing, none, 4)", 4.0),
    ("if(size > 1, 'big', 'small')", "big"),
    ("json.width", 640.0),
    ("json['width']", 640.0),
    ("json.tags[1]", "b"),
    ("json.tags[2]", None),
    ("json.tags.x", None),
    ("json.by.`full name`", "Ann"),
    ("json.by['full name']", "Ann"),
    ("json.ok and json.no == none", True),
    ("json.by", None),
    ("meta.lang", "en"),
    ("meta.score * 2", 1.0),
    ("`seg.png`", "x"),
    ("cls.x", None),
    ("raw", None),
    ("raw.x", None),
    ("huge", None),
    ("nan", None),
    ("'\\n\\'\\\\'", "\n'\\"),
]


@pytest.mark.parametrize(("text", "value"), GIVES, ids=[text for text, _ in GIVES])
def test_what_it_gives(text: str, value: Any) -> None:
    found = parse_expression(text).evaluate(SAMPLE)
    assert (type(found), found) == (type(value), value)


REFUSED = [
    ("", 1, "not the end"),
    ("1 +", 4, "expected a name"),
    ("1 2", 3, "an operator or the end"),
    ("a = 1", 3, "compare with =="),
    ("'abc", 1, "never closed"),
    ("1 < 2 < 3", 7, "do not chain"),
    ("a ; b", 3, "is not valid here"),
    ("part(key)", 1, "write part(text, separator, n)"),
    ("prt(key, '/', 1)", 1, "did you mean 'part'"),
    ("glob(key, ext)", 1, "in quotes"),
    ("glob(key, ext + 'x')", 1, "in quotes"),
    ("a in 1", 6, "'('"),
    ("a not 1", 7, "'in'"),
    ("a.1", 2, "an operator"),
    ("a[1.5]", 3, "a position"),
    ("a[1", 4, "']'"),
    ("and", 1, "a value"),
    ("(1", 3, "')'"),
    ("f(1,", 1, "no function f()"),
    ("1" * 41, 1, "40 digits"),
    ("(" * 40 + "1" + ")" * 40, 33, "nested deeper"),
    (" + ".join(["1"] * 200), None, "more than 256 parts"),
    ("not " * 2000 + "x", None, "at most 4096"),
]


ELSEWHERE = [
    ("json.no == null", 12, "there is no 'null'; write none"),
    ("json.no != None", 12, "there is no 'None'; write none"),
    ("json.ok == True", 12, "there is no 'True'; write true"),
    ("json.no is not none", 9, "not 'is'; compare with == or !=, such as X != none"),
    ("ext like 'j%'", 5, "not 'like'; write glob(X, 'a*')"),
    ("size > 1 && size < 3", 10, "'&' is not valid here; write `and`"),
    ("size > 1 || size < 3", 10, "'|' is not valid here; write `or`"),
    ("!json.ok", 1, "'!' is not valid here; write `not`"),
    ("'a' in json.tags", 8, "or contains(text, part) for a text, not 'json'"),
    ("len(json.tags) > 1", 1, "no function len(); write length(value)"),
    ("exists(json.no)", 1, "no function exists(); write X != none"),
    ("str(size)", 1, "no function str(); write text(value)"),
    ("ext.startswith('j')", 15, "not '('; a function stands before its values, such as startswith(key, 'a')"),
]


@pytest.mark.parametrize(("text", "place", "message"), ELSEWHERE)
def test_what_other_languages_write_is_told_how_to_write(text: str, place: int, message: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_expression(text, "filter", known=["ext", "json", "size"])
    assert f"at character {place} " in error.value.message
    assert message in error.value.message


@pytest.mark.parametrize(("text", "place", "message"), REFUSED)
def test_what_is_refused(text: str, place: int | None, message: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_expression(text, "sort")
    assert error.value.path == "sort"
    assert message in error.value.message
    if place is not None:
        assert f"at character {place} " in error.value.message


def test_names() -> None:
    expression = parse_expression("json.width > 1 and startswith(key, `a b`) or part(cls, '/', 0) == 'x'")
    assert expression.names == {"json", "key", "a b", "cls"}
    assert parse_expression("stem", known=["stem", "key"]).names == {"stem"}
    with pytest.raises(PlanError, match="did you mean 'stem'"):
        parse_expression("1 + stm", known=["stem", "key"])


def test_values_in_order() -> None:
    values = ["b", None, 2.0, "a", True, -1.0, ""]
    assert sorted(values, key=sort_key) == [-1.0, True, 2.0, "", "a", "b", None]
    assert [format_value(value) for value in (3.0, 0.5, -0.0, 1e300, True, None, "x")] == [
        "3", "0.5", "0", "1e+300", "true", "none", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "pattern", "fits"),
    [
        ("abc", "abc", True),
        ("abc", "ab", False),
        ("abc", "a?c", True),
        ("abc", "a?", False),
        ("abc", "*", True),
        ("", "*", True),
        ("", "", True),
        ("", "?", False),
        ("abab", "ab*ab", True),
        ("ab", "ab*ab", False),
        ("aXbXc", "a*b*c", True),
        ("abcbd", "a*bc*bd", True),
        ("a/b/c", "a*c", True),
        ("a.b", "a[.]b", False),
        ("xayb", "?a?b", True),
        ("aaxbb", "a*?x*b", True),
    ],
)
def test_patterns(text: str, pattern: str, fits: bool) -> None:
    assert matches(text, pattern) is fits


def test_the_page_lists_every_function() -> None:
    page = (Path(__file__).parents[3] / "docs" / "expressions.md").read_text()
    for function in FUNCTIONS.values():
        assert f"| `{function.usage}` | {function.help} |" in page
