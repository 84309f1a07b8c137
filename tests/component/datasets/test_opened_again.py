"""A source is opened again: listings are known over restarts and in every worker, and each change of the
bucket is seen by the next `open`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshd.config import StoreSettings
from meshd.core.document_store import DocumentStore
from meshd.datasets.snapshot_build_cache import BuildResults
from meshd.store.store import Store
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from tests.support.daemons import Daemon
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OPEN = json.dumps({"source": "s3://many", "kind": "objects", "fields": {"text": {"ext": ["txt"]}}}).encode()
KEYS = 12
FIELDS = parse_fields({"text": {"ext": ["txt"]}, "label": {"class": "prefix"}})
LABELLED = json.dumps(
    {
        "source": "s3://loose/",
        "fields": {"text": {"ext": ["txt"]}, "label": {"class": "prefix"}},
    }
).encode()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as found:
        client = found.client()
        client.create_bucket(Bucket="many")
        for number in range(KEYS):
            client.put_object(Bucket="many", Key=f"{number:03}.txt", Body=b"%03d" % number)
        yield found


def opened(daemon: Daemon) -> tuple[str, int]:
    """Name and samples; several connections, so that both workers are asked."""
    answers = list[Any]()
    for _ in range(6):
        answer = daemon.request("POST", "/-/snapshots", OPEN)
        assert answer.status == 200, answer.body
        answers.append(json.loads(answer.body))
    found = {(each["snapshot"], each["samples"]) for each in answers}
    assert len(found) == 1
    return found.pop()


def test_each_change_is_seen_also_after_a_restart(daemon: Daemon) -> None:
    client = daemon.client()
    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: client.put_object(Bucket="many", Key="003.txt", Body=b"new"), 0),
        (lambda: client.put_object(Bucket="many", Key="900.txt", Body=b"more"), 1),
        (lambda: client.delete_object(Bucket="many", Key="900.txt"), -1),
        (lambda: client.delete_object(Bucket="many", Key="000.txt"), -1),
    ]
    name, samples = opened(daemon)
    assert samples == KEYS
    for change, more in changes:
        daemon.restart()
        assert opened(daemon) == (name, samples)
        change()
        before = name
        name, samples = opened(daemon)[0], samples + more
        assert name != before
        assert opened(daemon) == (name, samples)
    daemon.restart()
    change, _ = changes[0]
    client.put_object(Bucket="many", Key="003.txt", Body=b"newer")
    assert opened(daemon)[0] != name


def opened_so(daemon: Daemon, how: str) -> float:
    """How many sources were opened in this way, in both workers."""
    with urllib.request.urlopen(f"{daemon.endpoint}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(rf'^meshd_sources_opened_total{{result="{how}"}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def reopened(daemon: Daemon, how: str) -> dict[str, Any]:
    """The answer to `open`, which finds out in this way, and has the snapshot that is built of a listing."""
    before = opened_so(daemon, how)
    answer = daemon.request("POST", "/-/snapshots", LABELLED)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    assert opened_so(daemon, how) == before + 1
    client, listing = daemon.client(), list[tuple[str, str, int]]()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="loose"):
        listing += [(each["Key"], each["ETag"].strip('"'), each["Size"]) for each in page["Contents"]]
    built = build_from_objects(sorted(listing), source="s3://loose/", fields=FIELDS)
    assert (found["snapshot"], found["samples"]) == (built.snapshot.hash, built.snapshot.samples)
    assert (found["skipped"], found["examples"]) == (built.skipped, list(built.examples))
    client.close()
    return found


def test_a_snapshot_of_objects_is_updated_by_what_changed(daemon: Daemon) -> None:
    client = daemon.client()
    client.create_bucket(Bucket="loose")
    sdk = mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)
    sdk.put_many("loose", [(f"{n % 3}/{n:05}.txt", b"%d" % n) for n in range(3000)])
    reopened(daemon, "listed")
    reopened(daemon, "known")
    client.put_object(Bucket="many", Key="elsewhere", Body=b"x")
    reopened(daemon, "known")
    client.put_object(Bucket="loose", Key="1/00001.txt", Body=b"another")
    reopened(daemon, "updated")
    client.put_object(Bucket="loose", Key="1/00001.d/0.txt", Body=b"soon gone")
    for key in ("1/00001.d/0.txt", "1/00001.txt"):
        client.delete_object(Bucket="loose", Key=key)
    reopened(daemon, "listed")  # the one would be within the objects of the other
    client.put_object(Bucket="loose", Key="1/00001.txt", Body=b"again")
    reopened(daemon, "updated")
    client.delete_object(Bucket="loose", Key="2/00002.txt")
    client.put_object(Bucket="loose", Key="é.d/0.txt", Body=b"a class more")
    daemon.kill()
    daemon.up()
    assert reopened(daemon, "updated")["fields"]["label"]["classes"] == ["0", "1", "2", "é.d"]
    client = daemon.client()
    client.put_object(Bucket="loose", Key="1/note.md", Body=b"no sample")
    reopened(daemon, "known")
    sdk.put_many("loose", [(f"1/{n:05}-more.txt", b"%d" % n) for n in range(2000)])  # a range of names
    assert reopened(daemon, "updated")["samples"] == 5000
    client.put_object(Bucket="loose", Key="é.txt", Body=b"without a class")
    assert reopened(daemon, "listed")["skipped"] == 1  # for it lies around the objects of é.d/0
    client.delete_object(Bucket="loose", Key="é.txt")
    assert reopened(daemon, "listed")["skipped"] == 0
    client.put_object(Bucket="loose", Key="0/00000.txt", Body=b"once more")
    reopened(daemon, "updated")
    client.put_object(Bucket="loose", Key="9.tar", Body=b"")
    assert daemon.request("POST", "/-/snapshots", LABELLED).status != 200  # no tar, but asked for
    sdk.close()
    client.close()


def snapshot_of(keys: set[str]) -> str:
    """The snapshot that a listing of these objects of the bucket `full` gives."""
    text = {key: key.encode() for key in keys}
    listing = [(key, hashlib.md5(data).hexdigest(), len(data)) for key, data in sorted(text.items())]
    return build_from_objects(
        listing, source="s3://full/", fields=parse_fields({"text": "txt"})
    ).snapshot.hash


def test_a_disk_that_fills_up_between_two_opens() -> None:
    """What was acknowledged is in the next snapshot, and what was refused is not; without room, `open` says
    so or gives the right answer."""
    wanted = {"source": "s3://full/", "kind": "objects", "fields": {"text": {"ext": ["txt"]}}}
    body, kept = json.dumps(wanted).encode(), set[str]()
    with Daemon.start(env={"MESHD_FAILPOINTS": "store.index.before_commit=error(28):after 80"}) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="full")
        for number in range(200):
            key = f"{number:03}.txt"
            if daemon.request("PUT", f"/full/{key}", key.encode()).status != 200:
                break
            kept.add(key)
            if number in (20, 30):
                assert json.loads(daemon.request("POST", "/-/snapshots", body).body)["samples"] == len(kept)
        assert 30 < len(kept) < 100
        answer = daemon.request("POST", "/-/snapshots", body)
        assert answer.status in (503, 507) or json.loads(answer.body)["snapshot"] == snapshot_of(kept)
        daemon.kill()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        for more in (set[str](), {"more.txt"}):
            for key in more:
                daemon.client().put_object(Bucket="full", Key=key, Body=key.encode())
            kept |= more
            answer = daemon.request("POST", "/-/snapshots", body)
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["snapshot"] == snapshot_of(kept)
        client.close()


def test_a_result_of_an_earlier_release_is_made_again_for_what_it_leaves_out(tmp_path: Path) -> None:
    """Which told less of that; the snapshot stays the same."""
    snapshot, told = "5" * 64, {"skipped": 0, "examples": []}

    async def run() -> None:
        store = Store.open(StoreSettings.at(tmp_path / "store"), writer="w0", clock=ManualClock())
        catalog = DocumentStore(store)
        results = BuildResults(catalog)
        await catalog.write_document(f"snapshots/{snapshot}", b"document")
        await results.add("request", "opened/name", {"snapshot": snapshot, **told})
        assert results.find("opened/name") == {"snapshot": snapshot, **told}
        await results.record_listing("request", 7, "opened/name")
        assert results.find_unchanged("request", 7) is not None
        earlier = json.dumps({"snapshot": snapshot, **told}).encode()
        await catalog.write_document("opened/name", earlier)
        assert results.find("opened/name") is None
        assert results.find_unchanged("request", 7) is None
        store.close()

    asyncio.run(run())
