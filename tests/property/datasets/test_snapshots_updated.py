"""A snapshot of plain objects that is updated equals the one that is built from the whole listing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from meshwire.dataset.build_snapshot import EmptySnapshotError, build_from_objects
from meshwire.dataset.fields import parse_fields, sample_key
from meshwire.dataset.snapshot import Snapshot
from meshwire.dataset.update_snapshot import folders_like_samples, update_from_objects

if TYPE_CHECKING:
    from meshwire.dataset.build_snapshot import SnapshotBuild

FIELDS = parse_fields(
    {"image": {"ext": ["jpg", "jpeg"]}, "text": {"ext": ["txt"]}, "label": {"class": "prefix"}}
)
ONE = parse_fields({"image": {"ext": ["jpg", "jpeg"]}})
FOLDERS = ("a", "b", "v1.0", "é", "b/c.d")
NAMES = ("0", "1", "1-2", "2", "ü")
KEYS = st.builds(
    lambda folder, name, ext: f"{folder}/{name}.{ext}",
    st.sampled_from(FOLDERS),
    st.sampled_from(NAMES),
    st.sampled_from(("jpg", "jpeg", "txt", "md")),
)
CONTENT = st.dictionaries(KEYS, st.tuples(st.sampled_from(("e1", "e2", "longer")), st.integers(0, 70_000)))


def _listing(content: dict[str, tuple[str, int]]) -> list[tuple[str, str, int]]:
    return [(key, *content[key]) for key in sorted(content)]


def _whole(content: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """The content without the objects of samples that lack a field."""
    stems: dict[str, set[str]] = {}
    for key in content:
        stem, ext = sample_key(key)
        stems.setdefault(stem, set()).add("image" if ext in ("jpg", "jpeg") else ext)
    return {key: what for key, what in content.items() if {"image", "txt"} <= stems[sample_key(key)[0]]}


def _build(content: dict[str, tuple[str, int]]) -> SnapshotBuild | None:
    try:
        return build_from_objects(_listing(content), source="s3://many/", fields=FIELDS)
    except EmptySnapshotError:
        return None


@given(CONTENT, CONTENT, st.sets(KEYS))
def test_an_update_equals_a_build(
    content: dict[str, tuple[str, int]], put: dict[str, tuple[str, int]], deleted: set[str]
) -> None:
    content = _whole(content)
    before = _build(content)
    if before is None:
        return
    after = {key: what for key, what in (content | put).items() if key not in deleted}
    stems = {sample_key(key)[0] for key in (*put, *deleted)}
    changed = {stem: [row for row in _listing(after) if sample_key(row[0])[0] == stem] for stem in stems}
    expected = _build(after)
    found = update_from_objects(before.snapshot, changed)
    assert (found is None) == (expected is None or not stems)
    if found is None or expected is None:
        return
    assert found.snapshot.to_bytes() == expected.snapshot.to_bytes()
    assert (found.snapshot.hash, found.skipped, found.examples) == (
        expected.snapshot.hash, expected.skipped, expected.examples
    )  # fmt: skip
    assert found.snapshot.summary() == expected.snapshot.summary()
    assert Snapshot.from_bytes(found.snapshot.to_bytes()).to_bytes() == expected.snapshot.to_bytes()


def test_a_sample_of_a_folder_of_its_name_is_not_updated() -> None:
    """The objects of `v1` lie on both sides of those of `v1.x/0`."""
    content = {"v1.a": ("e", 1), "v1.jpg": ("e", 1), "v1.x/0.jpg": ("e", 1), "v2.jpg": ("e", 1)}
    built = build_from_objects(_listing(content), source="s3://many/", fields=ONE)
    assert folders_like_samples("v1.x/0") == ["v1"]
    assert folders_like_samples("a/v1.x/.y/b.c/0") == ["a/v1", "a/v1.x/.y/b"]
    assert update_from_objects(built.snapshot, {"v1": []}) is None
    assert update_from_objects(built.snapshot, {"v2": [("v2.jpg", "f", 2)]}) is not None


def test_a_sample_that_came_and_went_in_a_folder_of_the_name_of_another_is_not_updated() -> None:
    """`v1` was removed, too: nothing is left by which the present names would tell."""
    listing = [("v1.jpg", "e", 1), ("v2.jpg", "e", 1)]
    built = build_from_objects(listing, source="s3://many/", fields=ONE)
    assert update_from_objects(built.snapshot, {"v1": [], "v1.d/0": []}) is None
    assert update_from_objects(built.snapshot, {"v1": []}) is not None


def test_a_snapshot_that_would_be_empty_is_not_updated() -> None:
    built = build_from_objects([("a.jpg", "e", 1)], source="s3://many/", fields=ONE)
    assert update_from_objects(built.snapshot, {"a": []}) is None
    assert update_from_objects(built.snapshot, {}) is None
