"""Whatever the text: an expression or a PlanError. Whatever the sample: a value of an expression, in bounded
time."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.dataset.expression_evaluation import FUNCTIONS, MAX_RESULT, matches
from meshwire.dataset.expression_parser import parse_expression, sort_key
from meshwire.strict_json import PlanError

names = st.sampled_from(["key", "size", "json", "missing"])
constants = st.sampled_from(["1", "0", "-2.5", "1e300", "''", "'a/b'", "none", "true"])
operands = names | constants | st.sampled_from(["json.a", "json[0]", "json.a[1].b"])
signs = st.sampled_from(["+", "-", "*", "/", "%", "==", "!=", "<", ">=", "and", "or"])


def calls(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def call(name: str) -> st.SearchStrategy[str]:
        function = FUNCTIONS[name]
        arguments = st.lists(inner, min_size=function.least, max_size=min(function.most, 4))
        if name == "glob":
            arguments = st.tuples(inner, st.just("'a*'")).map(list)
        return arguments.map(lambda found: f"{name}({', '.join(found)})")

    return st.sampled_from(sorted(FUNCTIONS)).flatmap(call)


expressions = st.recursive(
    operands,
    lambda inner: (
        st.tuples(inner, signs, inner).map(lambda parts: f"({' '.join(parts)})")
        | inner.map(lambda text: f"(not {text})")
        | inner.map(lambda text: f"-({text})")
        | st.lists(inner, max_size=3).map(lambda found: f"(1 in ({', '.join(found)}))")
        | calls(inner)
    ),
    max_leaves=8,
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
samples = st.dictionaries(names, json_values | st.just(b'{"a": [1, {"b": "x"}]}'))


@given(expressions, samples)
@settings(max_examples=150)
def test_any_sample_has_a_value(text: str, sample: dict[str, Any]) -> None:
    try:
        expression = parse_expression(text)
    except PlanError as error:
        assert "nested deeper" in error.message or "parts" in error.message  # noqa: PT017
        return
    value = expression.evaluate(sample)
    assert value is None or type(value) in (str, float, bool)
    assert not isinstance(value, float) or math.isfinite(value)
    assert value == expression.evaluate(sample)
    sort_key(value)


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from([*"()[].,'`\\+-*/%<>= ", "a", "1", "not ", "in "])).map("".join)
)
def test_any_text(text: str) -> None:
    try:
        expression = parse_expression(text)
    except PlanError:
        return
    value = expression.evaluate({})
    assert value is None or type(value) in (str, float, bool)


@given(st.text("ab/", max_size=12), st.text("ab*?/", max_size=8))
def test_patterns_agree_with_the_standard_library(text: str, pattern: str) -> None:
    assert matches(text, pattern) == fnmatch.fnmatchcase(text, pattern)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "glob(x, '" + "a*" * 500 + "b')",
        "glob(x, '" + "?a*" * 300 + "b')",
        "contains(x, slice(x, 1) + 'b')",
        " + ".join(["replace(x, 'a', x)"] * 40),
        " or ".join([f"part(x, 'a', {n}) == 'b'" for n in range(32)]),
    ],
)
def test_long_texts_take_bounded_time(text: str) -> None:
    value = parse_expression(text).evaluate({"x": "a" * MAX_RESULT})
    assert value is None or value is False
