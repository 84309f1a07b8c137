"""Merge patches of the console's stream: applied to what was sent before, they give the new document."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshd.server.console.event_stream import merge_patch

LEAVES = st.one_of(st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
DOCUMENTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(LEAVES, inner), max_size=3),
    max_leaves=8,
)


def apply_patch(document: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_patch(result.get(name), value)
    return result


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_leads_from_one_document_to_the_next(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply_patch(before, merge_patch(before, after)) == after


@given(DOCUMENTS)
def test_equal_documents_have_an_empty_patch(document: dict[str, Any]) -> None:
    assert merge_patch(document, document) == {}


def test_a_null_is_a_missing_member() -> None:
    assert merge_patch({"a": 1, "b": None}, {"a": None, "b": None}) == {"a": None}
    assert merge_patch({}, {"a": None}) == {}
