"""Strict JSON: every refusal is a PlanError."""

from __future__ import annotations

import math

import pytest

from meshwire.strict_json import (
    PlanError,
    canonical_json,
    checked_choice,
    checked_integer,
    checked_json,
    checked_number,
    checked_text,
    suggestion,
)


def test_canonical_json_has_one_spelling_for_one_value() -> None:
    assert (
        canonical_json({"b": 1.0, "a": [0.5, -0.0, 1e300, 2**53]})
        == b'{"a":[0.5,0,1e+300,9007199254740992],"b":1}'
    )
    assert canonical_json({"é": "ü"}) == '{"é":"ü"}'.encode()


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {2}}, math.inf, b"bytes", 2**63, "\udc80"])
def test_values_that_json_cannot_carry_are_refused(value: object) -> None:
    with pytest.raises(PlanError):
        checked_json(value, "x")


def test_tuples_are_lists() -> None:
    assert checked_json({"size": (1, 2)}, "") == {"size": [1, 2]}


def test_types_are_not_converted() -> None:
    with pytest.raises(PlanError, match="integer"):
        checked_integer(1.0, "x", 0, 9)
    with pytest.raises(PlanError, match="number"):
        checked_number(True, "x")
    with pytest.raises(PlanError, match="outside"):
        checked_number(10**400, "x")
    with pytest.raises(PlanError, match="text"):
        checked_text(7, "x")
    with pytest.raises(PlanError, match="at most 3"):
        checked_text("four", "x", at_most=3)
    with pytest.raises(PlanError, match="one of"):
        checked_choice([], "x", ("a", "b"))


def test_suggestions_say_what_is_near_or_what_there_is() -> None:
    assert suggestion("decod", ["decode", "resize"]) == "; did you mean 'decode'?"
    crops = ["center_crop", "random_crop", "random_resized_crop", "resize"]
    assert (
        suggestion("cropp", crops)
        == "; did you mean 'center_crop' or 'random_crop' or 'random_resized_crop'?"
    )
    assert suggestion("zzz", ["b", "a"]) == "; known: a, b"
