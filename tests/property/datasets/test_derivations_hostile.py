"""Requests for derived snapshots and packed plans: any JSON is a request or a PlanError."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshd.datasets.derived_snapshots import DERIVATIONS, parse_derivation
from meshwire.dataset.derive_snapshot import parse_names, parse_relabels, parse_renames
from meshwire.plan.sequence_packing import parse_pack
from meshwire.strict_json import PlanError

_NAMES = st.sampled_from(["from", "on", *DERIVATIONS, "fields", "length", "value", "long", "a"])
_TEXTS = st.text(max_size=5) | st.sampled_from(["ab" * 32, "size > 1", "split", "truncate"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | _TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(_NAMES, ANYTHING, max_size=4))
def test_a_derivation_is_one_way(document: dict[str, Any]) -> None:
    with contextlib.suppress(PlanError):
        asked = parse_derivation(document)
        assert asked.value is document[asked.way]
        assert len(asked.on) in (0, 2)
        assert sum(way in document for way in DERIVATIONS) == 1


@given(ANYTHING)
def test_values_are_taken_whole_or_refused(value: Any) -> None:
    for parse in (parse_names, parse_renames, parse_relabels, parse_pack):
        with contextlib.suppress(PlanError):
            assert parse(value, "x")
