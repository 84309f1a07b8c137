"""Buckets backed by an origin, read: a real daemon before a real S3 server, through a proxy with faults."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from meshsdk.admin import cluster_admin
from tests.support.origin_fixtures import bucket, code, put, read, sdk, until_kept

if TYPE_CHECKING:
    from tests.support.daemons import Daemon
    from tests.support.origin_places import Place

MIB = 1 << 20


def test_small_objects_are_fetched_once(backed: Daemon, origin: Place) -> None:
    put(origin, "small", "a/x.txt", b"hello", ContentType="text/plain", Metadata={"who": "me"})
    client = bucket(backed, origin, "small")
    first = client.get_object(Bucket="small", Key="a/x.txt")
    assert first["Body"].read() == b"hello"
    assert first["ContentType"] == "text/plain"
    assert first["Metadata"] == {"who": "me"}
    assert first["ETag"].strip('"') == hashlib.md5(b"hello").hexdigest()
    until_kept(client, "small", "a/x.txt", origin)
    before = len(origin.faults.gets("x.txt"))
    for _ in range(10):
        assert read(client, "small", "a/x.txt") == b"hello"
    assert len(origin.faults.gets("x.txt")) == before


def test_large_objects_come_whole_and_in_ranges(backed: Daemon, origin: Place) -> None:
    data = os.urandom(20 * MIB + 123)
    put(origin, "large", "big.bin", data)
    client = bucket(backed, origin, "large")
    assert read(client, "large", "big.bin", Range="bytes=9000000-9000009") == data[9000000:9000010]
    assert len(origin.faults.gets("big.bin")) == 1
    assert "bytes=8388608-16777215" in origin.faults.gets("big.bin")[0]
    assert read(client, "large", "big.bin") == data
    assert read(client, "large", "big.bin", Range="bytes=-77") == data[-77:]
    assert read(client, "large", "big.bin", Range="bytes=8388600-") == data[8388600:]
    assert code(client.get_object, Bucket="large", Key="big.bin", Range="bytes=99999999-") == "InvalidRange"
    until_kept(client, "large", "big.bin", origin)
    assert read(client, "large", "big.bin") == data
    assert client.head_object(Bucket="large", Key="big.bin")["ContentLength"] == len(data)


def test_eight_readers_cost_one_fetch(backed: Daemon, origin: Place) -> None:
    data = os.urandom(5 * MIB)
    put(origin, "eight", "one", data)
    client = bucket(backed, origin, "eight")
    origin.faults.delay = 0.3
    with ThreadPoolExecutor(8) as pool:
        clients = [backed.client() for _ in range(8)]
        found = list(pool.map(lambda each: read(each, "eight", "one"), clients))
    assert all(each == data for each in found)
    assert len(origin.faults.gets("/one")) == 1
    assert read(client, "eight", "one") == data


def test_what_is_not_there(backed: Daemon, origin: Place) -> None:
    client = bucket(backed, origin, "absent")
    assert code(client.get_object, Bucket="absent", Key="no") == "NoSuchKey"
    asked = len(origin.faults.gets("/no"))
    assert code(client.get_object, Bucket="absent", Key="no") == "NoSuchKey"
    assert len(origin.faults.gets("/no")) == asked
    assert code(client.get_object, Bucket="absent", Key="a//b") == "NotImplemented"
    assert code(client.list_object_versions, Bucket="absent") == "NotImplemented"


def test_empty_objects(backed: Daemon, origin: Place) -> None:
    put(origin, "empty", "nothing", b"")
    client = bucket(backed, origin, "empty")
    for _ in range(3):
        assert read(client, "empty", "nothing") == b""


def test_changes_are_seen_after_the_ttl_and_never_where_immutable(backed: Daemon, origin: Place) -> None:
    for name in ("mutable", "constant"):
        put(origin, name, "k", b"old")
    client = bucket(backed, origin, "mutable", ttl=0.0)
    bucket(backed, origin, "constant", immutable=True)
    assert read(client, "mutable", "k") == read(client, "constant", "k") == b"old"
    until_kept(client, "constant", "k", origin)
    for name in ("mutable", "constant"):
        put(origin, name, "k", b"newer")
    assert read(client, "mutable", "k") == b"newer"
    assert read(client, "constant", "k") == b"old"


def test_listings(backed: Daemon, origin: Place) -> None:
    keys = [f"d{index % 3}/{index:04d}.bin" for index in range(60)] + ["top", "ü/1"]
    for key in keys:
        put(origin, "listed", key, b"x" * (len(key)))
    client = bucket(backed, origin, "listed")
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket="listed", PaginationConfig={"PageSize": 7}
    )
    found = [(entry["Key"], entry["Size"]) for page in pages for entry in page.get("Contents", [])]
    assert found == [(key, len(key)) for key in sorted(keys, key=str.encode)]
    level = client.list_objects_v2(Bucket="listed", Delimiter="/")
    assert [each["Prefix"] for each in level["CommonPrefixes"]] == ["d0/", "d1/", "d2/", "ü/"]
    assert [each["Key"] for each in level["Contents"]] == ["top"]
    part = client.list_objects_v2(Bucket="listed", Prefix="d1/00")
    assert [each["Key"] for each in part["Contents"]] == sorted(
        key for key in keys if key.startswith("d1/00")
    )
    other = client.list_objects_v2(Bucket="listed", Delimiter="0", Prefix="d")
    assert [each["Prefix"] for each in other["CommonPrefixes"]] == ["d0", "d1/0", "d2/0"]


def test_listings_begin_at_their_prefix_whatever_its_last_sign(backed: Daemon, origin: Place) -> None:
    there = sorted(["0", "00", "1", "d/.hidden", "d/0", "d/00", "d/1", "d0"])
    for key in there:
        put(origin, "begin", key, key.encode())
    client = bucket(backed, origin, "begin", ttl=0.0)

    def listed(**more: Any) -> list[str]:
        return [each["Key"] for each in client.list_objects_v2(Bucket="begin", **more).get("Contents", [])]

    for prefix in ("0", "d/0", "d/0/", "d/.", "d", "e/0"):
        assert listed(Prefix=prefix) == [key for key in there if key.startswith(prefix)], prefix
    assert code(client.list_objects_v2, Bucket="begin", Prefix="d//0") == "NotImplemented"
    assert read(client, "begin", "1") == b"1"  # and it does not count as down


def test_origin_down_serves_what_is_cached(backed: Daemon, origin: Place) -> None:
    put(origin, "down", "kept", b"kept")
    put(origin, "down", "other", b"other")
    client = bucket(backed, origin, "down", ttl=0.0)
    until_kept(client, "down", "kept", origin)
    origin.faults.refuse = True
    assert read(client, "down", "kept") == b"kept"
    assert code(client.get_object, Bucket="down", Key="other") == "ServiceUnavailable"
    origin.faults.refuse = False


def test_broken_connections_and_errors_are_no_matter(backed: Daemon, origin: Place) -> None:
    data = os.urandom(12 * MIB)
    put(origin, "broken", "big", data)
    client = bucket(backed, origin, "broken")
    origin.faults.cut = 2
    origin.faults.fail = 1
    assert read(client, "broken", "big") == data


def test_plain_buckets_beside(backed: Daemon) -> None:
    client = backed.client()
    client.create_bucket(Bucket="plain")
    client.put_object(Bucket="plain", Key="k", Body=b"1")
    assert read(client, "plain", "k") == b"1"
    assert code(client.get_object, Bucket="plain", Key="no") == "NoSuchKey"
    with sdk(backed) as mesh:
        assert "plain" not in [each.name for each in cluster_admin.list_buckets(mesh.transport)]
