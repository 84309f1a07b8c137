"""A view's keys come out sorted, once each, wherever a walk begins; the oracle maps everything and sorts."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from meshwire.views.transform_view import TransformView, iter_view

ENDINGS = (".a", ".jpg", ".m.n", ".webp", ".z")
names = st.text("ab.-/jpgmz", min_size=1, max_size=8)
keys = st.one_of(names, st.tuples(names, st.sampled_from(ENDINGS)).map("".join))
views = st.builds(
    lambda match, suffix, prefix: TransformView(
        "b", (), prefix, tuple(sorted(match)), suffix if match else ""
    ),
    st.sets(st.sampled_from(ENDINGS), max_size=3),
    st.sampled_from(("", *ENDINGS)),
    st.sampled_from(("", "a", "a/", "b.")),
)


def expected(view: TransformView, source: set[str], prefix: str, after: str) -> list[tuple[str, str]]:
    chosen: dict[str, str] = {}
    for origin in sorted(source):
        key = view.view_key(origin)
        if key is not None:
            chosen.setdefault(key, origin)
    return sorted((key, origin) for key, origin in chosen.items() if key.startswith(prefix) and key > after)


@given(views, st.sets(keys, max_size=24), st.one_of(st.just(""), names), st.one_of(st.just(""), keys))
@example(TransformView("b", (), "", (".a", ".jpg"), ".a"), {"a.a", "a.jpg"}, "", "")
def test_walks(view: TransformView, source: set[str], prefix: str, after: str) -> None:
    walked = [(key, key) for key in sorted(source) if key.startswith(prefix) and key > after]
    found = iter_view(view, walked, lambda key: key if key in source else None, prefix=prefix, after=after)
    assert [(pair.key, pair.origin) for pair in found] == expected(view, source, prefix, after)


@given(views, st.sets(keys, max_size=24))
def test_origins_invert_the_mapping(view: TransformView, source: set[str]) -> None:
    for origin in source:
        key = view.view_key(origin)
        if key is not None:
            assert origin in set(view.source_keys(key))
            assert all(view.view_key(candidate) == key for candidate in view.source_keys(key))
