"""Tagging documents, attributes and versions as text."""

from __future__ import annotations

from typing import Any

import pytest

from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3 import result_types as res
from meshwire.s3.responses import object_response_headers, render
from meshwire.s3.settings_xml import BUCKET_TAGS, parse_tagging

MD5 = "d41d8cd98f00b204e9800998ecf8427e"


def document(*pairs: tuple[str, str]) -> bytes:
    tags = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in pairs)
    return f"<Tagging><TagSet>{tags}</TagSet></Tagging>".encode()


def body_of(op: Any, result: Any) -> str:
    return render(op, result, "r").body.decode().partition("?>\n")[2]


def test_tags_keep_their_order() -> None:
    tags = parse_tagging(document(("b", "1"), ("a", ""), ("ключ-_./=@:+ ", "é")))
    assert list(tags.items()) == [("b", "1"), ("a", ""), ("ключ-_./=@:+ ", "é")]
    assert parse_tagging(document()) == {}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "MalformedXML"),
        (b"<Tagging/>", "MalformedXML"),
        (b"<Tagging><TagSet/><TagSet/></Tagging>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Key>k</Key></Tag></TagSet></Tagging>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Value>k</Value></Tag></TagSet></Tagging>", "MalformedXML"),
        (document(("k", "1"), ("k", "2")), "InvalidTag"),
        (document(("", "1")), "InvalidTag"),
        (document(("k" * 129, "1")), "InvalidTag"),
        (document(("k", "v" * 257)), "InvalidTag"),
        (document(("k#", "")), "InvalidTag"),
        (document(("aws:k", "")), "InvalidTag"),
        (document(*[(f"k{i}", "") for i in range(11)]), "BadRequest"),
    ],
)
def test_refused_tags(body: bytes, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_tagging(body)
    assert caught.value.code == code


def test_limits_are_in_characters_and_by_kind() -> None:
    assert parse_tagging(document(("é" * 128, "ü" * 256))) == {"é" * 128: "ü" * 256}
    assert len(parse_tagging(document(*[(f"k{i}", "") for i in range(50)]), BUCKET_TAGS)) == 50


def test_tagging_answers() -> None:
    answer = render(ops.GetObjectTagging("b", "k"), res.ObjectTags({"a": "<"}, "v"), "r")
    assert b"<TagSet><Tag><Key>a</Key><Value>&lt;</Value></Tag></TagSet></Tagging>" in answer.body
    assert ("x-amz-version-id", "v") in answer.headers
    for op, status in (
        (ops.PutObjectTagging("b", "k", BodyDigests()), 200),
        (ops.DeleteObjectTagging("b", "k"), 204),
    ):
        assert render(op, res.ObjectTagged("v"), "r").status == status


def test_versions_and_counts_go_with_objects() -> None:
    head = res.ObjectHead(1, MD5, 0, version="null", tag_count=2, extra={"x-amz-expiration": "soon"})
    told = dict(object_response_headers(head))
    assert told["x-amz-version-id"] == "null"
    assert told["x-amz-tagging-count"] == "2"
    assert told["x-amz-expiration"] == "soon"
    marker = render(ops.DeleteObject("b", "k"), res.ObjectDeleted("v", marker=True), "r")
    assert ("x-amz-delete-marker", "true") in marker.headers
    assert ("x-amz-version-id", "v") in marker.headers
    copy = ops.CopyObject("b", "k", ops.CopySource("b", "k"), False, ops.ObjectHeaders())
    copied = dict(render(copy, res.CopyResult(MD5, 0, version="v2", source_version="v1"), "r").headers)
    assert (copied["x-amz-version-id"], copied["x-amz-copy-source-version-id"]) == ("v2", "v1")


def test_attributes_tell_what_was_asked() -> None:
    part = res.PartEntry(2, 5, "", 0, {"crc32": "AAAAAA=="})
    result = res.ObjectAttributes(
        7, "e-3", 0, {"crc32": "x"}, "COMPOSITE", "v", 3, (part,), parts_truncated=True, next_part=2
    )
    names = frozenset({"ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"})
    op = ops.GetObjectAttributes("b", "k", names, None, 1, 1)
    assert body_of(op, result) == (
        '<GetObjectAttributesResponse xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><ETag>e-3</ETag>'
        "<Checksum><ChecksumCRC32>x</ChecksumCRC32><ChecksumType>COMPOSITE</ChecksumType></Checksum>"
        "<ObjectParts><PartsCount>3</PartsCount><PartNumberMarker>1</PartNumberMarker>"
        "<NextPartNumberMarker>2</NextPartNumberMarker><MaxParts>1</MaxParts><IsTruncated>true</IsTruncated>"
        "<Part><PartNumber>2</PartNumber><Size>5</Size><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part>"
        "</ObjectParts><StorageClass>STANDARD</StorageClass><ObjectSize>7</ObjectSize>"
        "</GetObjectAttributesResponse>"
    )
    few = ops.GetObjectAttributes("b", "k", frozenset({"ObjectSize"}))
    assert "<ObjectSize>7</ObjectSize></GetObj" in body_of(few, result)
    assert "ETag" not in body_of(few, result)


def test_versions_listed() -> None:
    version = res.VersionEntry("a b", "v1", True, 0, res.Owner("o", "n"), False, 3, MD5)
    marker = res.VersionEntry("c", "null", True, 0, res.Owner("o"), marker=True)
    page = res.VersionListing((version, marker), ("d/",), True, "d/", "")
    text = body_of(ops.ListObjectVersions("b", delimiter="/", encode_url=True), page)
    assert (
        "<Version><Key>a%20b</Key><VersionId>v1</VersionId><IsLatest>true</IsLatest>"
        f"<LastModified>1970-01-01T00:00:00.000Z</LastModified><ETag>&quot;{MD5}&quot;</ETag><Size>3</Size>"
        "<Owner><ID>o</ID><DisplayName>n</DisplayName></Owner><StorageClass>STANDARD</StorageClass></Version>"
        "<DeleteMarker><Key>c</Key><VersionId>null</VersionId>" in text
    )
    assert "<NextKeyMarker>d/</NextKeyMarker><MaxKeys>" in text
    assert "NextVersionIdMarker" not in text
