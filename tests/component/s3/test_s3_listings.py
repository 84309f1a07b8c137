"""Listings through boto3 and over many keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

import meshsdk as mesh

if TYPE_CHECKING:
    from tests.support.daemons import Daemon
    from tests.support.s3_raw import Wire

KEYS = [
    "a",
    "a/",
    "a/1",
    "a/2/x",
    "a/2/y",
    "a0",
    "b&<é>/1",
    "b+ c",
    "c//d",
    "z/ü",
    "z/😀",
    "\x01ctl",
]


@pytest.fixture(scope="module")
def filled(s3: Any) -> str:
    name = "listings-of-few"
    s3.create_bucket(Bucket=name)
    for key in KEYS:
        s3.put_object(Bucket=name, Key=key, Body=key.encode())
    return name


def model(
    keys: list[str], prefix: str, delimiter: str, after: str
) -> tuple[list[str], list[str], list[tuple[str, bool]]]:
    """Keys, common prefixes and both in order, as S3 documents a listing."""
    entries: list[tuple[str, bool]] = []
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        rolled = bool(delimiter) and delimiter in rest
        shown = prefix + rest.partition(delimiter)[0] + delimiter if rolled else key
        if shown.encode() > after.encode() and (shown, rolled) not in entries:
            entries.append((shown, rolled))
    return [k for k, rolled in entries if not rolled], [k for k, rolled in entries if rolled], entries


@settings(max_examples=30, deadline=None)
@given(
    prefix=st.sampled_from(["", "a", "a/", "a/2/", "b", "z/", "none", "c/"]),
    delimiter=st.sampled_from(["", "/", "2", "//", "é"]),
    page=st.integers(1, 5),
    version=st.sampled_from([1, 2]),
)
def test_pages_are_the_model(
    s3: Any, filled: str, prefix: str, delimiter: str, page: int, version: int
) -> None:
    name = "list_objects_v2" if version == 2 else "list_objects"
    options = {"Delimiter": delimiter} if delimiter else {}
    pages = list(
        s3.get_paginator(name).paginate(
            Bucket=filled, Prefix=prefix, PaginationConfig={"PageSize": page}, **options
        )
    )
    keys = [o["Key"] for answer in pages for o in answer.get("Contents", [])]
    prefixes = [p["Prefix"] for answer in pages for p in answer.get("CommonPrefixes", [])]
    expected_keys, expected_prefixes, entries = model(KEYS, prefix, delimiter, "")
    assert (keys, prefixes) == (expected_keys, expected_prefixes)
    assert len(pages) == max(1, -(-len(entries) // page))


@pytest.mark.parametrize("start", ["", "a", "a/2", "a0", "zzz", "b&<é>/1"])
def test_start_after(s3: Any, filled: str, start: str) -> None:
    answer = s3.list_objects_v2(Bucket=filled, StartAfter=start)
    assert [o["Key"] for o in answer.get("Contents", [])] == model(KEYS, "", "", start)[0]
    assert answer["KeyCount"] == len(answer.get("Contents", []))


def test_what_an_entry_says(s3: Any, filled: str) -> None:
    entry = s3.list_objects_v2(Bucket=filled, Prefix="a/1", FetchOwner=True)["Contents"][0]
    head = s3.head_object(Bucket=filled, Key="a/1")
    assert entry["Size"] == 3
    assert entry["ETag"] == head["ETag"]
    assert entry["StorageClass"] == "STANDARD"
    assert entry["Owner"]["ID"]
    assert entry["LastModified"].replace(microsecond=0) == head["LastModified"]
    assert "Owner" not in s3.list_objects_v2(Bucket=filled, Prefix="a/1")["Contents"][0]
    assert s3.list_objects(Bucket=filled, Prefix="a/1")["Contents"][0]["Owner"]["ID"]


def test_none_asked_for(s3: Any, filled: str) -> None:
    answer = s3.list_objects_v2(Bucket=filled, MaxKeys=0)
    assert (answer["KeyCount"], answer["IsTruncated"]) == (0, False)
    with pytest.raises(ClientError) as excinfo:
        s3.list_objects_v2(Bucket=filled, MaxKeys=-1)
    assert excinfo.value.response["Error"]["Code"] == "InvalidArgument"


def test_next_marker_only_with_a_delimiter(s3: Any, filled: str) -> None:
    assert "NextMarker" not in s3.list_objects(Bucket=filled, MaxKeys=2)
    answer = s3.list_objects(Bucket=filled, MaxKeys=2, Delimiter="/")
    assert answer["NextMarker"] == "a"


def test_a_nonsense_token_is_refused(s3: Any, filled: str) -> None:
    with pytest.raises(ClientError) as excinfo:
        s3.list_objects_v2(Bucket=filled, ContinuationToken="nonsense")
    assert excinfo.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_at_most_a_thousand_a_page(s3: Any, bucket: str, daemon: Daemon) -> None:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        assert client.put_many(bucket, [(f"k{i:05}", b"") for i in range(1005)]) == 1005
    first = s3.list_objects_v2(Bucket=bucket, MaxKeys=5000)
    assert (first["KeyCount"], first["IsTruncated"], first["MaxKeys"]) == (1000, True, 1000)
    rest = s3.list_objects_v2(Bucket=bucket, ContinuationToken=first["NextContinuationToken"])
    assert [o["Key"] for o in rest["Contents"]] == [f"k{i:05}" for i in range(1000, 1005)]


ODD = ("a\x01b", "plain ü")


@pytest.mark.parametrize("query", ["list-type=2", "max-keys=9", "versions="])
def test_a_key_with_a_control_character_leaves_the_others_alone(
    wire: Wire, s3: Any, bucket: str, query: str
) -> None:
    """As on S3: a reference that XML 1.0 does not have, which a client hears of; names are percent-encoded
    for who asks for it."""
    for key in ODD:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    text = wire.call("GET", f"/{bucket}?{query}").body.decode()
    assert re.findall("<Key>(.*?)</Key>", text) == ["a&#x1;b", "plain ü"]
    assert "EncodingType" not in text
    with pytest.raises(ElementTree.ParseError, match="invalid character"):
        ElementTree.fromstring(text)
    asked = wire.call("GET", f"/{bucket}?{query}&encoding-type=url").body.decode()
    assert re.findall("<Key>(.*?)</Key>", asked) == ["a%01b", "plain%20%C3%BC"]
    assert "<EncodingType>url</EncodingType>" in asked
    s3.delete_object(Bucket=bucket, Key=ODD[0])  # what boto3 makes of it for DeleteObjects is no XML


def test_an_upload_of_such_a_key(wire: Wire, s3: Any, bucket: str) -> None:
    begun = [s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"] for key in ODD]
    text = wire.call("GET", f"/{bucket}?uploads=").body.decode()
    assert re.findall("<Key>(.*?)</Key>", text) == ["a&#x1;b", "plain ü"]
    assert "EncodingType" not in text
    s3.abort_multipart_upload(Bucket=bucket, Key=ODD[0], UploadId=begun[0])
