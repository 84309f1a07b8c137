"""Origins that are down, slow, flaky or lie: what is cached is served, the rest is right or clearly fails."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.origin_fixtures import (
    bucket,
    code,
    eventually,
    metric,
    put,
    read,
    small_daemon,
    until_kept,
)

if TYPE_CHECKING:
    from tests.support.daemons import Daemon
    from tests.support.origin_places import Place

MIB = 1 << 20


@pytest.mark.parametrize("fault", ["cut", "short", "reset", "fail"])
def test_what_breaks_now_and_then_is_asked_for_again(backed: Daemon, origin: Place, fault: str) -> None:
    data = os.urandom(11 * MIB)
    put(origin, f"flaky-{fault}", "big", data)
    put(origin, f"flaky-{fault}", "small", data[:1000])
    client = bucket(backed, origin, f"flaky-{fault}")
    setattr(origin.faults, fault, 2)
    assert read(client, f"flaky-{fault}", "big") == data
    setattr(origin.faults, fault, 1)
    assert read(client, f"flaky-{fault}", "small") == data[:1000]


def test_a_connection_that_stands_still_is_given_up(backed: Daemon, origin: Place) -> None:
    data = os.urandom(3 * MIB)
    put(origin, "still", "k", data)
    client = bucket(backed, origin, "still")
    origin.faults.stall, failed = 1, metric(backed, "meshd_origin_errors_total")
    assert read(client, "still", "k") == data
    assert metric(backed, "meshd_origin_errors_total") == failed + 1
    gets = origin.faults.gets("still/k")
    assert len(gets) == 2
    assert (
        int(gets[1].rpartition("=")[2].partition("-")[0]) >= MIB // 2
    )  # what had come is not asked for again


def test_a_slow_origin_holds_up_nobody_else(backed: Daemon, origin: Place) -> None:
    data = os.urandom(2 * MIB)
    put(origin, "slow", "trickles", data)
    put(origin, "slow", "kept", b"kept")
    client = bucket(backed, origin, "slow", immutable=True)
    until_kept(client, "slow", "kept", origin)
    origin.faults.rate = MIB / 16
    with ThreadPoolExecutor(1) as pool:
        trickling = pool.submit(read, backed.client(), "slow", "trickles")
        for _ in range(20):
            assert read(client, "slow", "kept") == b"kept"
        assert not trickling.done()
        origin.faults.rate = 0
        assert trickling.result(60) == data


def test_an_origin_that_lies_about_its_etag_gives_no_mixture(backed: Daemon, origin: Place) -> None:
    data = os.urandom(20 * MIB)
    put(origin, "lies", "big", data)
    client = bucket(backed, origin, "lies")
    origin.faults.lie = 2
    try:
        found = read(client, "lies", "big")
    except (ClientError, BotoCoreError):
        pass  # refused, or cut in the middle: never bytes of two versions
    else:
        assert found == data
    origin.faults.lie = 0
    eventually(lambda: _or_nothing(client, "lies", "big") == data)


def _or_nothing(client: object, name: str, key: str) -> bytes:
    try:
        return read(client, name, key)
    except (ClientError, BotoCoreError):
        return b""


def test_an_object_that_changes_under_readers_is_old_or_new(backed: Daemon, origin: Place) -> None:
    """Versions of several chunks, replaced while they are read: what comes whole is of one version."""
    versions = [bytes([number]) * (17 * MIB + number) for number in range(4)]
    put(origin, "moving", "k", versions[0])
    bucket(backed, origin, "moving", ttl=0.0)
    stop, wrong, whole = threading.Event(), list[int](), list[int]()

    def reading() -> None:
        client = backed.client()
        while not stop.is_set():
            found = _or_nothing(client, "moving", "k")
            if found:
                whole.append(found[0])
            if found and found != versions[found[0]]:
                wrong.append(found[0])

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(reading) for _ in range(2)]
        for number in (1, 2, 3):
            put(origin, "moving", "k", versions[number])
            eventually(lambda number=number: whole[-1:] == [number])
        stop.set()
        for reader in readers:
            reader.result(60)
    assert not wrong


def test_down_is_told_at_once_and_passes(backed: Daemon, origin: Place) -> None:
    put(origin, "gone", "a", b"a")
    put(origin, "gone", "b", b"b")
    client = bucket(backed, origin, "gone", ttl=0.0)
    until_kept(client, "gone", "a", origin)
    origin.faults.refuse = True
    assert code(client.get_object, Bucket="gone", Key="b") == "ServiceUnavailable"
    asked = len(origin.faults.heads)
    for _ in range(10):  # nobody waits for it while it is known to be down
        assert code(client.get_object, Bucket="gone", Key="b") == "ServiceUnavailable"
        assert code(client.list_objects_v2, Bucket="gone") == "ServiceUnavailable"
        assert read(client, "gone", "a") == b"a"
    assert len(origin.faults.heads) == asked
    origin.faults.refuse = False
    eventually(lambda: _or_nothing(client, "gone", "b") == b"b")
    origin.faults.fail = 1000
    assert code(backed.client().get_object, Bucket="gone", Key="never") == "ServiceUnavailable"
    origin.faults.fail = 0
    eventually(lambda: code(client.get_object, Bucket="gone", Key="never") == "NoSuchKey")


def _torn(daemon: Daemon, least: int) -> Path:
    """The largest file of the cache's, of `least` bytes or more, ends in its middle from now on."""
    extents = daemon.data_dir / "cache" / "extents"
    eventually(lambda: not list((extents / "drafts").iterdir()))  # what is read twice at first is kept twice
    path = max(filter(Path.is_file, extents.rglob("*")), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    assert size > least, path
    os.truncate(path, size // 2)
    return path


@pytest.mark.parametrize(("size", "first"), [(21 * MIB + 5, 0), (21 * MIB + 5, 3 * MIB + 7), (3 * MIB, 0)])
def test_what_the_cache_cannot_give_in_the_middle_of_an_answer_comes_from_the_origin(
    origin: Place, tmp_path: Path, size: int, first: int
) -> None:
    data, how = os.urandom(size), {"Range": f"bytes={first}-"} if first else {}
    put(origin, "torn", "k", data)
    with small_daemon(origin, tmp_path, cache="200MiB", workers=1) as daemon:
        client = bucket(daemon, origin, "torn", ttl=300.0)
        until_kept(client, "torn", "k", origin)
        _torn(daemon, min(size, 8 * MIB) // 2)
        asked = len(origin.faults.gets("torn/k"))
        assert read(client, "torn", "k", **how) == data[first:]
        assert len(origin.faults.gets("torn/k")) == asked + 1
        assert metric(daemon, "meshd_reads_continued_total") == 1
        assert read(client, "torn", "k") == data  # what came is kept in place of what was damaged
        assert len(origin.faults.gets("torn/k")) == asked + 1


def test_an_answer_goes_on_when_the_cache_cannot_take_any_more_of_it(origin: Place, tmp_path: Path) -> None:
    data = os.urandom(21 * MIB + 5)
    put(origin, "untaken", "k", data)
    broken = "store.own.before_write=error(5):after 4"
    with small_daemon(origin, tmp_path, cache="200MiB", workers=1, fail=broken) as daemon:
        client = bucket(daemon, origin, "untaken", ttl=300.0)
        assert read(client, "untaken", "k") == data
        assert read(client, "untaken", "k", Range="bytes=9000000-20000000") == data[9_000_000:20_000_001]
        assert metric(daemon, "meshd_reads_continued_total") >= 1


@pytest.mark.parametrize("size", [21 * MIB, 3 * MIB])
def test_an_answer_is_cut_that_the_cache_cannot_give_any_more_of_what_the_origin_has_replaced(
    origin: Place, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    put(origin, "torn-old", "k", data)
    with small_daemon(origin, tmp_path, cache="200MiB", workers=1) as daemon:
        client = bucket(daemon, origin, "torn-old", ttl=300.0)
        until_kept(client, "torn-old", "k", origin)
        _torn(daemon, min(size, 8 * MIB) // 2)
        put(origin, "torn-old", "k", data[::-1])
        with pytest.raises(BotoCoreError):
            read(client, "torn-old", "k")
        eventually(lambda: _or_nothing(client, "torn-old", "k") == data[::-1])


def test_a_silent_origin_is_waited_for_once_by_who_reads_what_is_cached(
    origin: Place, tmp_path: Path
) -> None:
    for key in ("a", "b", "never"):
        put(origin, "silent", key, b"old " + key.encode())
    with small_daemon(origin, tmp_path, workers=1) as daemon:
        client = bucket(daemon, origin, "silent", ttl=0.0)
        for key in ("a", "b"):
            until_kept(client, "silent", key, origin)
            put(origin, "silent", key, b"new " + key.encode())
        origin.faults.delay = 15.0
        with ThreadPoolExecutor(1) as pool:
            cold = pool.submit(read, daemon.client(), "silent", "never")
            assert read(client, "silent", "a") == b"old a"
            for _ in range(5):
                assert [read(client, "silent", key) for key in ("a", "b")] == [b"old a", b"old b"]
            assert not cold.done()  # eleven reads took less time than one answer
            assert metric(daemon, "meshd_origin_unanswered_total") == 11
            origin.faults.delay = 0.0
            assert cold.result(60) == b"old never"
        eventually(lambda: [read(client, "silent", key) for key in ("a", "b")] == [b"new a", b"new b"])


def test_listings_and_what_is_not_there_are_remembered(backed: Daemon, origin: Place) -> None:
    put(origin, "remembered", "a", b"a")
    client = bucket(backed, origin, "remembered", ttl=300.0)
    other = [backed.client() for _ in range(6)]
    assert code(client.get_object, Bucket="remembered", Key="no") == "NoSuchKey"
    asked = len(origin.faults.heads)
    assert {code(each.get_object, Bucket="remembered", Key="no") for each in other} == {"NoSuchKey"}
    assert {code(each.head_object, Bucket="remembered", Key="no") for each in other} == {"404"}
    assert len(origin.faults.heads) == asked
    for each in other:
        assert [found["Key"] for found in each.list_objects_v2(Bucket="remembered")["Contents"]] == ["a"]
    assert len(origin.faults.heads) - asked <= 2  # a page is asked for once by each worker
    client.put_object(Bucket="remembered", Key="no", Body=b"now")
    for each in other:
        assert read(each, "remembered", "no") == b"now"
        found = each.list_objects_v2(Bucket="remembered")["Contents"]
        assert [entry["Key"] for entry in found] == ["a", "no"]
