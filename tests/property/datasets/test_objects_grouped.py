"""A snapshot of plain objects has the samples that a grouping of all names by their stem has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwire.dataset.build_snapshot import BytesColumn, EmptySnapshotError, LabelColumn, build_from_objects
from meshwire.dataset.fields import class_name, parse_fields, sample_key
from meshwire.frame.columns import StringColumn
from meshwire.frame.string_builder import StringColumnBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

FIELDS = parse_fields(
    {"image": {"ext": ["jpg", "b.jpg", "a"]}, "text": {"ext": ["txt", "a"]}, "label": {"class": "prefix"}}
)
PREFERRED = {"image": ("jpg", "b.jpg", "a"), "text": ("txt", "a")}
# Folders that lie between the objects of a sample, at two levels; and any names, also without a dot.
PARTS = st.lists(st.sampled_from(("a", ".", "/", "-", "b", ".jpg", ".txt", ".a", ".JPG", "é")), max_size=7)
STEMS = st.sampled_from(
    ("c/a", "c/a.b/a", "c/a.b/a.b/a", "c/a.b/a.k/a", "c/a.b/b", "c/a-", "c.b/a", "é/a", "a")
)
EXTENSIONS = st.sampled_from((".jpg", ".JPG", ".b.jpg", ".a", ".txt", ".zz"))
KEYS = st.one_of(st.builds("".join, st.tuples(STEMS, EXTENSIONS)), PARTS.map("".join).filter(bool))
LISTINGS = st.lists(KEYS, unique=True, min_size=5, max_size=50)


def _reference(keys: Sequence[str]) -> tuple[list[tuple[str, dict[str, str], str]], int]:
    """The complete samples (stem, object by field, class) in order, and how many are incomplete."""
    samples: dict[str, dict[str, str]] = {}
    for key in keys:
        stem, ext = sample_key(key)
        for field, wanted in PREFERRED.items():
            if ext in wanted:
                held = samples.setdefault(stem, {})
                if field not in held or wanted.index(ext) <= wanted.index(sample_key(held[field])[1]):
                    held[field] = key
    complete = [
        (stem, held, folder)
        for stem, held in samples.items()
        if len(held) == len(PREFERRED) and (folder := class_name(stem, "")) is not None
    ]
    return complete, len(samples) - len(complete)


@example([f"c{'/a.b' * depth}/a.a" for depth in range(4)] + ["c/a.jpg", "c/a.txt"])
@settings(max_examples=500)  # most listings have no folder between the objects of a complete sample
@given(LISTINGS)
def test_samples_are_those_of_a_grouping_by_stem(keys: list[str]) -> None:
    keys = sorted(keys)
    expected, skipped = _reference(keys)
    listing = [(key, f"etag-{number}", number) for number, key in enumerate(keys)]
    if not expected:
        with pytest.raises(EmptySnapshotError) as raised:
            build_from_objects(listing, source="s3://many", fields=FIELDS)
        assert raised.value.skipped == skipped
        return
    built = build_from_objects(listing, source="s3://many", fields=FIELDS)
    snapshot = built.snapshot
    assert built.skipped == skipped
    found: dict[str, list[str]] = {}
    for field in PREFERRED:
        column = snapshot.fields[field]
        assert isinstance(column, BytesColumn)
        found[field] = [snapshot.objects.keys[number] for number in column.object.tolist()]
        assert column.length.tolist() == [keys.index(key) for key in found[field]]
    label = snapshot.fields["label"]
    assert isinstance(label, LabelColumn)
    assert label.classes == tuple(sorted({folder for *_, folder in expected}))
    classes = [label.classes[number] for number in label.values.tolist()]
    assert [
        (sample_key(image)[0], {"image": image, "text": text}, folder)
        for image, text, folder in zip(found["image"], found["text"], classes, strict=True)
    ] == expected
    assert list(snapshot.objects.keys) == sorted({key for _, held, _ in expected for key in held.values()})
    assert list(snapshot.objects.etags) == [f"etag-{keys.index(key)}" for key in snapshot.objects.keys]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)), st.data())
def test_columns_are_built_string_by_string(texts: list[str], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(texts)))
    builder = StringColumnBuilder()
    for text in texts[:cut]:
        builder.append(text)
    builder.extend(texts[cut:])
    assert (len(builder), list(builder)) == (len(texts), texts)
    assert [builder[number] for number in range(len(texts))] == texts
    assert builder.build() == StringColumn.from_strings(texts)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))), np.bool_)
    kept = [text for text, wanted in zip(texts, chosen.tolist(), strict=True) if wanted]
    assert builder.build(chosen) == StringColumn.from_strings(kept)


def test_strings_are_decoded_in_blocks() -> None:
    builder = StringColumnBuilder()
    texts = [f"name {number}" for number in range(1000)] + ["é", "", "z"] * 200
    builder.extend(texts)
    assert list(builder) == texts
