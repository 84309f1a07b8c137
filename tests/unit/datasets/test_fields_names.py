"""Fields and names: WebDataset's rule, classes by folder, sources."""

from __future__ import annotations

from typing import Any

import pytest

from meshwire.dataset.fields import (
    FieldSpec,
    Source,
    class_name,
    fields_document,
    parse_fields,
    parse_source,
    sample_key,
)
from meshwire.strict_json import PlanError


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a/b/0001.seg.png", ("a/b/0001", "seg.png")),
        ("0001.JPG", ("0001", "jpg")),
        ("a.b/0001", ("a.b/0001", "")),
        ("a.b/0001.jpg", ("a.b/0001", "jpg")),
        ("./a.jpg", ("./a", "jpg")),
        (".hidden", (".hidden", "")),
        ("a/.hidden.jpg", ("a/.hidden.jpg", "")),
        ("a/b/", ("a/b/", "")),
        ("name.", ("name", "")),
        ("", ("", "")),
        ("grün.ÄÖ", ("grün", "äö")),
    ],
)
def test_a_name_is_cut_at_the_first_dot_of_its_last_component(key: str, expected: tuple[str, str]) -> None:
    assert sample_key(key) == expected


@pytest.mark.parametrize(
    ("key", "prefix", "expected"),
    [
        ("train/cat/1.jpg", "train/", "cat"),
        ("train/cat/deep/1.jpg", "train/", "cat"),
        ("cat/1.jpg", "", "cat"),
        ("train/1.jpg", "train/", None),
        ("test/cat/1.jpg", "train/", None),
        ("train//cat/1.jpg", "train/", "cat"),
    ],
)
def test_the_class_is_the_first_folder_below_the_source(key: str, prefix: str, expected: str | None) -> None:
    assert class_name(key, prefix) == expected


def test_sources_are_folders_with_or_without_the_last_slash() -> None:
    assert (
        parse_source("s3://photos/train") == parse_source("s3://photos/train/") == Source("photos", "train/")
    )
    assert parse_source("s3://photos") == parse_source("s3://photos/") == Source("photos", "")
    assert parse_source("s3://photos/a.tar") == Source("photos", "a.tar")
    assert str(parse_source("s3://photos/train")) == "s3://photos/train/"


@pytest.mark.parametrize("text", ["photos/train", "s3://", "s3:///x", "gs://a/b", 7, None])
def test_other_sources_are_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="source"):
        parse_source(text)


def test_fields_come_in_order_of_name_and_extensions_in_lower_case() -> None:
    fields = parse_fields(
        {"label": {"class": "prefix"}, "image": {"ext": [".JPG", "jpeg", "jpg"]}, "seg": "seg.png"}
    )
    assert list(fields) == ["image", "label", "seg"]
    assert fields["image"] == FieldSpec("image", "bytes", ext=("jpg", "jpeg"))
    assert fields["label"] == FieldSpec("label", "label", label_of="prefix")
    assert fields["seg"].ext == ("seg.png",)
    assert parse_fields(fields_document(fields)) == fields


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({}, "fields"),
        ({"label": {"class": "prefix"}}, "fields"),
        ({"a b": "jpg"}, "fields.a b"),
        ({"__pos": "jpg"}, "fields.__pos"),
        ({"image.data": "jpg"}, "fields.image.data"),
        ({"image": {}}, "fields.image"),
        ({"image": {"ext": "jpg", "class": "prefix"}}, "fields.image"),
        ({"image": {"exts": ["jpg"]}}, "fields.image.exts"),
        ({"image": {"ext": []}}, "fields.image.ext"),
        ({"image": {"ext": ["a/b"]}}, "fields.image.ext[0]"),
        ({"image": {"ext": ["."]}}, "fields.image.ext[0]"),
        ({"image": 7}, "fields.image"),
        ({"image": "jpg", "label": {"class": "suffix"}}, "fields.label.class"),
        ({f"f{i}": "jpg" for i in range(65)}, "fields"),
    ],
)
def test_what_is_wrong_with_fields_is_named(document: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_fields(document)
    assert caught.value.path == path


def test_a_list_is_no_field_document() -> None:
    with pytest.raises(PlanError):
        parse_fields("[1]")
