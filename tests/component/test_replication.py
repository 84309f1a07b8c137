"""Writes of a mesh: acknowledged when every node that must have them has them, the same everywhere."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from meshd.cluster.callers import asked_by
from meshd.cluster.ceding import asked_by_another
from meshd.cluster.doubting import BELIEVED
from meshd.cluster.replicating import ReplicatedStore
from meshd.cluster.replicawriting import ReplicatedWriter
from meshd.control.clustermaps import ClusterMaps
from meshd.store.errors import (
    ConditionFailedError,
    NoSuchUploadError,
    NoSuchVersionError,
    NotDeciderError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import Meta
from meshd.telemetry import metrics
from meshd.testing.replica_suite import state
from meshd.testing.store_writing import etag_of, put, put_part, refused
from meshwire.cluster.transitions import drained, joined, lost, missed, reweighed, settled, stayed
from meshwire.conditions import Conditions
from tests.component.mesh_nodes import running_nodes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.kit.clock import Clock
    from meshd.store.records import Record
    from meshwire.cluster import ClusterMap
    from tests.component.mesh_nodes import Running

LARGE = 3_000_000


def _among(
    number: int, test: Callable[[list[Running]], Awaitable[None]], *, copies: int = 2, patience: float = 15.0
) -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), number, copies=copies) as nodes:
            for node in nodes:
                store = node.node.shared
                assert isinstance(store, ReplicatedStore)
                store.delivery.patience = patience
                past, store.handover.window = store.handover.window, 0.0
                store.handover.note()  # so that nobody is asked what was before
                store.handover.window = past
            await test(nodes)

    asyncio.run(run())


def _clients(number: int, test: Callable[[list[Any], list[Running]], None], copies: int = 2) -> None:
    """Runs `test` in a thread, with a client of each node; they share a bucket `b`."""

    async def run(nodes: list[Running]) -> None:
        clients = [node.client() for node in nodes]
        await asyncio.to_thread(clients[0].create_bucket, Bucket="bench")
        try:
            await asyncio.to_thread(test, clients, nodes)
        finally:
            for client in clients:
                client.close()

    _among(number, run, copies=copies)


def _same(nodes: list[Running], bucket: str = "b") -> None:
    """All nodes have the same (there are as many as copies)."""
    one, *others = [state(node.node.store, bucket) for node in nodes]
    for other in others:
        assert other == one


def _decider(nodes: list[Running], bucket: str, key: str) -> Running:
    decider = nodes[0].node.mesh.route(bucket, key).decider
    return next(node for node in nodes if decider and node.node.settings.node_id == decider.node_id)


async def _change(nodes: list[Running], change: Any) -> None:
    await ClusterMaps(nodes[0].node.control).change(lambda cluster: change(cluster))


@pytest.mark.parametrize("size", [0, 10, 300_000, LARGE])
def test_every_owner_has_what_was_acknowledged(size: int) -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        body = os.urandom(size)
        for number in range(8):
            clients[number % 3].put_object(
                Bucket="bench", Key=f"k{number}", Body=body, Metadata={"a": "b"}, Tagging="t=1"
            )
            route = nodes[0].node.mesh.route("bench", f"k{number}")
            assert len(route.writers) == 2
            found = []
            for node in nodes:
                record = node.node.store.get("bench", f"k{number}")
                must = any(node.node.settings.node_id == writer.node_id for writer in route.writers)
                assert (record is not None) == must
                if record is not None:
                    assert node.node.store.read(record, 0, size) == body
                    found.append((record.stamp, record.etag, record.modified, record.tags, record.metadata))
            assert found[0] == found[1]

    _clients(3, test)


def test_all_kinds_of_writes_end_the_same_everywhere() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        one, two = clients
        one.put_object(Bucket="bench", Key="plain", Body=b"1")
        two.put_object(Bucket="bench", Key="plain", Body=b"2")
        two.delete_object(Bucket="bench", Key="plain")
        one.put_object(Bucket="bench", Key="kept", Body=b"x" * LARGE)
        one.put_object_tagging(Bucket="bench", Key="kept", Tagging={"TagSet": [{"Key": "a", "Value": "1"}]})
        two.copy_object(Bucket="bench", Key="copy", CopySource={"Bucket": "bench", "Key": "kept"})
        one.put_bucket_versioning(Bucket="bench", VersioningConfiguration={"Status": "Enabled"})
        first = one.put_object(Bucket="bench", Key="v", Body=b"first")["VersionId"]
        two.put_object(Bucket="bench", Key="v", Body=b"second")
        one.delete_object(Bucket="bench", Key="v")
        two.delete_object(Bucket="bench", Key="v", VersionId=first)
        one.delete_object(Bucket="bench", Key="copy")
        one.delete_object(Bucket="bench", Key="none")
        _same(nodes, "bench")
        assert state(nodes[0].node.store, "bench")["versions"]

    _clients(2, test)


def test_uploads_are_everywhere_and_complete_everywhere() -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        one, two = clients
        kept = one.create_multipart_upload(Bucket="bench", Key="kept")["UploadId"]
        gone = two.create_multipart_upload(Bucket="bench", Key="gone")["UploadId"]
        done = two.create_multipart_upload(Bucket="bench", Key="done")["UploadId"]
        part = {"Bucket": "bench", "Body": b"x" * (5 << 20), "PartNumber": 1}
        one.upload_part(Key="kept", UploadId=kept, **part)
        two.upload_part(Key="gone", UploadId=gone, **part)
        etags = [
            clients[n % 2].upload_part(Key="done", UploadId=done, **(part | {"PartNumber": n}))["ETag"]
            for n in (1, 2, 3)
        ]
        _same(nodes, "bench")
        assert len(state(nodes[0].node.store, "bench")["uploads"]) == 3
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in zip((1, 3), etags[::2], strict=True)]
        for client in clients:  # a second time, as clients do that had no answer
            client.complete_multipart_upload(
                Bucket="bench", Key="done", UploadId=done, MultipartUpload={"Parts": parts}
            )
        two.abort_multipart_upload(Bucket="bench", Key="gone", UploadId=gone)
        _same(nodes, "bench")
        assert list(state(nodes[0].node.store, "bench")["uploads"]) == [kept]

    _clients(2, test)


def test_conditional_writes_are_atomic_whoever_is_asked() -> None:
    async def test(nodes: list[Running]) -> None:
        clients = [node.client() for node in nodes for _ in range(4)]
        await asyncio.to_thread(clients[0].create_bucket, Bucket="bench")

        codes: set[str] = set()

        def create(client: Any, name: str) -> bool:
            try:
                client.put_object(Bucket="bench", Key="k", Body=name.encode(), IfNoneMatch="*")
            except ClientError as error:
                codes.add(error.response["Error"]["Code"])
                return False
            return True

        made = await asyncio.gather(
            *[asyncio.to_thread(create, client, str(n)) for n, client in enumerate(clients)]
        )
        # who was answered SlowDown may have made it, too: nobody is to be told of a second one
        assert sum(made) == 1 or (sum(made) == 0 and "SlowDown" in codes)
        assert codes <= {"PreconditionFailed", "ConditionalRequestConflict", "SlowDown"}
        _same(nodes, "bench")

    _among(2, test)


def test_a_writer_that_is_away_is_not_waited_for() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        await _change(nodes, lambda cluster: missed(cluster, other.node.settings.node_id))
        await put(decider.node.shared, "k", b"data")
        assert other.node.store.get("b", "k") is None

    _among(2, test)


def test_a_writer_that_does_not_answer_is_waited_for_until_the_map_says_so() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        other.listener.close()
        await decider.node.peers.aclose()
        for size in (4, LARGE):
            writing = asyncio.ensure_future(put(decider.node.shared, "k", b"d" * size, size=size))
            done, _ = await asyncio.wait([writing], timeout=0.3)
            if not done:
                await _change(nodes, lambda cluster: missed(cluster, other.node.settings.node_id))
            assert (await writing).size == size

    _among(2, test)


def test_a_write_that_cannot_be_replicated_is_refused_and_mended_by_the_next() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = decider.node.shared
        await put(store, "k", b"old")
        port = other.member.endpoint.rpartition(":")[2]
        other.listener.close()
        await decider.node.peers.aclose()
        assert isinstance(store, ReplicatedStore)
        patience, store.delivery.patience = store.delivery.patience, 0.5
        await refused(NotReplicatedError, store.delete("b", "k"))
        store.delivery.patience = patience
        loop = asyncio.get_running_loop()
        other.listener = await loop.create_server(other.server, "127.0.0.1", int(port))
        assert other.node.store.get("b", "k") is not None
        assert (await store.delete("b", "k")).record is None  # it is gone here: and now there, too
        assert other.node.store.get("b", "k") is None

    _among(2, test)


def test_of_writes_that_wait_for_a_node_the_log_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    """Many tries, all counted, one line: until the node has been well for a while."""

    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = decider.node.shared
        assert isinstance(store, ReplicatedStore)
        other.listener.close()
        await decider.node.peers.aclose()
        silent = metrics.replication_retries.labels("silent")
        before, store.delivery.patience = silent._value.get(), 0.5
        keys = [f"k{n}" for n in range(40) if _decider(nodes, "b", f"k{n}") is decider][:3]
        await asyncio.gather(*(refused(NotReplicatedError, put(store, key, b"data")) for key in keys))
        assert silent._value.get() >= before + 2 * len(keys)

    with caplog.at_level(logging.INFO, "meshd.cluster.delivering"):
        _among(2, test)
    told = [each.getMessage() for each in caplog.records if "did not take a write" in each.getMessage()]
    assert len(told) == 1
    assert ", and is told again (silent): " in told[0]


def test_whoever_goes_by_an_older_map_is_refused() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        mesh = decider.node.mesh
        stale = mesh.map()
        await _change(nodes, lambda cluster: drained(cluster, "n3"))
        mesh._lone, mesh._routes = None, {}
        record = await put(decider.node.store, "k", b"data")
        from meshd.cluster.delivering import CHANGE, encode
        from meshd.net.peers import StaleMapError
        from meshd.store.changes import Amended, Told, bare

        told = encode(Told(stale.version, Amended("b", "k", bare(record))))
        with pytest.raises(StaleMapError):
            async with decider.node.peers.call(other.member, "POST", CHANGE, body=told):
                pass

    _among(3, test)


def test_only_the_decider_decides() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        with asked_by_another():
            await refused(NotDeciderError, put(other.node.shared, "k", b"x"))
            await refused(NotDeciderError, other.node.shared.delete("b", "k"))
        assert other.node.store.is_empty("b")
        await decider.node.store.fence(decider.node.mesh.map().version + 1)  # whoever decides here waits
        asked = asyncio.ensure_future(put(other.node.shared, "k", b"x"))
        done, _ = await asyncio.wait((asked,), timeout=1)
        assert not done
        assert other.node.store.is_empty("b")
        weigh = partial(reweighed, node_id=nodes[0].node.settings.node_id, weight=2)
        await _change(nodes, weigh)
        await asked
        _same(nodes)

    _among(2, test)


def test_an_upload_goes_on_with_another_decider() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        store = decider.node.shared
        upload = await store.create_upload("b", "k")
        await put_part(store, upload, 1, b"a" * LARGE)
        await _change(nodes, lambda cluster: missed(cluster, decider.node.settings.node_id))
        heir = _decider(nodes, "b", "k")
        assert heir is not decider
        found = heir.node.shared.get_upload("b", "k", upload.upload_id)
        assert found is not None
        await put_part(heir.node.shared, found, 2, b"b" * 7)
        record = await heir.node.shared.complete_upload(found, [1, 2], Meta("whole"))
        assert heir.node.store.read(record, 0, record.size) == b"a" * LARGE + b"b" * 7
        await _change(nodes, lambda cluster: joined(cluster, decider.member))

    _among(2, test)


def test_a_newer_stamp_at_a_replica_is_overtaken() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        for number in range(3):
            ahead = await put(other.node.store, "k", b"never acknowledged")  # its decider went before it told
            if number == 0:
                record = await put(decider.node.shared, "k", b"acknowledged")
            elif number == 1:
                assert (await decider.node.shared.delete("b", "k")).record is not None
                assert other.node.store.get("b", "k") is None
                continue
            else:
                await put(decider.node.shared, "k", b"y" * LARGE, size=LARGE)
            found = other.node.store.get("b", "k")
            assert found is not None
            assert found.stamp > ahead.stamp
            _same(nodes)
        assert record.etag == etag_of(b"acknowledged")

    _among(2, test)


def test_nothing_is_acknowledged_while_nobody_decides() -> None:
    """Both owners were away, and the one that went last is not back: the other has the write, alone."""

    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = decider.node.shared
        assert isinstance(store, ReplicatedStore)
        record = await put(decider.node.store, "k", b"alone")
        for gone in (decider, other):
            await _change(nodes, lambda cluster, gone=gone: missed(cluster, gone.node.settings.node_id))
        await _change(nodes, lambda cluster: joined(cluster, decider.member))
        assert [node.node_id for node in decider.node.mesh.route("b", "k").writers] == [
            decider.node.settings.node_id
        ]
        await refused(NotReplicatedError, store.settle_version("b", "k", record))

    _among(2, test, patience=0.5)


def test_what_another_decider_acknowledged_meanwhile_is_not_overtaken() -> None:
    """A write that found nobody to take it, and goes on when its node is back and decides no more."""

    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        store = decider.node.shared
        assert isinstance(store, ReplicatedStore)
        late = await put(decider.node.store, "k", b"late")
        await _change(nodes, lambda cluster: missed(cluster, decider.node.settings.node_id))
        heir = _decider(nodes, "b", "k")
        await put(heir.node.shared, "k", b"acknowledged")
        await _change(nodes, lambda cluster: joined(cluster, decider.member))
        assert _decider(nodes, "b", "k") is heir
        await refused(NotReplicatedError, store.settle_version("b", "k", late))
        found = heir.node.store.get("b", "k")
        assert found is not None
        assert heir.node.store.read(found, 0, found.size) == b"acknowledged"

    _among(2, test)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_write_that_meets_a_newer_map_is_decided_by_that(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        mesh, waits = decider.node.mesh, asyncio.Event()
        newer_than = mesh.newer_than

        async def waiting(version: int, patience: float) -> bool:
            waits.set()
            return await newer_than(version, patience)

        monkeypatch.setattr(mesh, "newer_than", waiting)
        await decider.node.store.fence(mesh.map().version + 1)  # another process of this node is quicker
        writing = asyncio.ensure_future(put(decider.node.shared, "k", b"x" * size, size=size))
        async with asyncio.timeout(10):
            await waits.wait()
        weigh = partial(reweighed, node_id=nodes[0].node.settings.node_id, weight=2)
        await _change(nodes, weigh)
        await writing
        for node in nodes:
            found = node.node.store.get("b", "k")
            assert found is not None
            assert node.node.store.read(found, 0, size) == b"x" * size

    _among(2, test)


async def _turned(nodes: list[Running], key: str) -> Running:
    """Who decided about a name, which another node does now."""
    former = _decider(nodes, "b", key)
    await _change(nodes, lambda cluster: missed(cluster, former.node.settings.node_id))
    assert _decider(nodes, "b", key) is not former
    return former


def _owners_alike(nodes: list[Running], key: str, body: bytes | None) -> None:
    for owner in nodes[0].node.mesh.route("b", key).writers:
        store = next(node.node.store for node in nodes if node.node.settings.node_id == owner.node_id)
        found = store.get("b", key)
        assert (None if found is None else store.read(found, 0, found.size)) == body, owner


@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_bytes_that_came_while_another_node_became_the_decider_are_decided_by_that(size: int) -> None:
    async def test(nodes: list[Running]) -> None:
        body = os.urandom(size)
        former = _decider(nodes, "b", "k")
        one, two = (former.node.shared.writer("b", "k", size=size) for _ in range(2))
        upload = await former.node.shared.create_upload("b", "k")
        part = former.node.shared.part_writer(upload, 1, size)
        for writer in (one, two, part):
            await writer.write(body)
        assert await _turned(nodes, "k") is former
        new = Conditions(if_none_match=("*",))
        record = await one.commit(Meta(etag_of(body)), conditions=new, versioning="Enabled")
        assert record.version
        assert record.etag == etag_of(body)
        await refused(ConditionFailedError, two.commit(Meta("two"), conditions=new))
        await part.commit(Meta(etag_of(body)))
        _owners_alike(nodes, "k", body)
        assert former.node.store.get("b", "k") is None
        done = await former.node.shared.complete_upload(upload, (1,), Meta("whole"), etags=(etag_of(body),))
        assert (done.size, done.etag) == (size, "whole")
        _owners_alike(nodes, "k", body)
        await refused(NoSuchUploadError, former.node.shared.abort_upload(upload))
        heir = _decider(nodes, "b", "k").node.store
        assert len(heir.list_versions("b").entries) == 2  # the version, and the null one above it

    _among(3, test, copies=3)


def test_what_needs_no_bytes_is_decided_by_the_new_decider() -> None:
    async def test(nodes: list[Running]) -> None:
        store = _decider(nodes, "b", "k").node.shared
        first = await put(store, "k", b"first", versioning="Enabled")
        await put(store, "k", b"second", versioning="Enabled")
        source = await put(store, "source", b"source")
        assert (await _turned(nodes, "k")).node.shared is store
        tagged = await store.amend("b", "k", first.version, tags={"a": "b"})
        assert (tagged.version, tagged.tags) == (first.version, {"a": "b"})
        await refused(NoSuchVersionError, store.amend("b", "k", "null", tags={}))
        assert (await store.delete_version("b", "k", first.version)).record is not None
        _owners_alike(nodes, "k", b"second")
        removed = await store.delete_many("b", ["k"], versioning="Enabled")
        assert removed["k"].marker is not None
        _owners_alike(nodes, "k", None)
        await store.link("b", "k", source, Meta("copied"))
        _owners_alike(nodes, "k", b"source")
        upload = await store.create_upload("b", "k", tags={"c": "d"})
        heir = _decider(nodes, "b", "k").node.store
        assert heir.get_upload("b", "k", upload.upload_id) is not None
        assert await store.abort_upload(upload)
        assert heir.get_upload("b", "k", upload.upload_id) is None
        kept = [entry[1].marker for entry in heir.list_versions("b", prefix="k").entries]
        assert sorted(kept) == [False, False, True]

    _among(3, test, copies=3)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_copy_of_what_was_uploaded_in_parts_is_of_these_parts_at_the_new_decider(size: int) -> None:
    async def test(nodes: list[Running]) -> None:
        store, body = _decider(nodes, "b", "k").node.shared, os.urandom(size)
        upload = await store.create_upload("b", "source")
        for number, data in ((1, body), (2, b"last")):
            await put_part(store, upload, number, data)
        etags = (etag_of(body), etag_of(b"last"))
        source = await store.complete_upload(upload, (1, 2), Meta("whole-2"), etags=etags)
        assert [part.size for part in source.parts] == [size, 4]
        former = await _turned(nodes, "k")
        assert former.node.shared is store
        copied = await store.link("b", "k", source, Meta("whole-2", tags={"a": "b"}), versioning="Enabled")
        assert (copied.parts, copied.etag, copied.size) == (source.parts, "whole-2", size + 4)
        _owners_alike(nodes, "k", body + b"last")
        for node in (each for each in nodes if each is not former):
            record = node.node.store.get("b", "k")
            assert record is not None
            assert (record.parts, record.tags, record.version) == (source.parts, {"a": "b"}, copied.version)
        with pytest.raises(ConditionFailedError) as failed:
            await store.link("b", "k", source, Meta("again-2"), Conditions(if_none_match=("*",)))
        assert failed.value.condition == "If-None-Match"

    _among(3, test, copies=3)


def test_an_earlier_map_decides_nothing_after_a_later_one() -> None:
    async def test(nodes: list[Running]) -> None:
        from meshd.store.epochs import decided_by

        store = nodes[0].node.store
        with decided_by(7):
            await put(store, "k", b"seven")
        with decided_by(6):
            await refused(StaleEpochError, put(store, "k", b"six"))
            await refused(StaleEpochError, put(store, "large", b"six" * LARGE))
            await refused(StaleEpochError, store.delete("b", "k"))
        with decided_by(7, nodes[0].node.clock.stamp()):
            await refused(StaleEpochError, put(store, "k", b"late"))
            await refused(StaleEpochError, put(store, "large", b"late" * LARGE))
            absent = Conditions(if_none_match=("*",))
            await refused(StaleEpochError, put(store, "other", b"late", conditions=absent))
            await refused(StaleEpochError, store.delete("b", "k"))
            await refused(StaleEpochError, store.amend("b", "k", None, tags={"a": "b"}))
            await refused(StaleEpochError, store.create_upload("b", "k"))
        await put(store, "own", b"without")
        record = store.get("b", "k")
        assert record is not None
        assert store.read(record, 0, 5) == b"seven"
        assert store.get("b", "large") is None
        assert store.get("b", "other") is None

    _among(1, test)


def _left(clock: Clock, until: float) -> tuple[int, float]:
    return 0, until - clock.monotonic()


def test_a_process_that_stands_still_before_it_commits_asks_again_whether_it_may() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        mesh, store, clock = decider.node.mesh, decider.node.shared, decider.node.clock
        held, acts = 0.0, 0
        assert isinstance(store, ReplicatedStore)

        async def act() -> Record:
            nonlocal acts
            acts += 1
            if acts < 3:
                await asyncio.sleep(held)  # as if stopped
            return await put(decider.node.store, "k", b"x")

        for held in (0.05, BELIEVED):  # with a lease, and with the word of the others
            until = clock.monotonic() + (0.0 if held == BELIEVED else held)
            mesh._held = partial(_left, clock, until)
            acts, before = 0, clock.stamp()
            writing = asyncio.ensure_future(store.decide("b", "k", act))
            await asyncio.sleep(held)
            record = await writing
            assert acts > 1
            assert record.stamp > before + int(held * 1e9)
            assert len(decider.node.store.list_versions("b", prefix="k").entries) == 1

    _among(3, test)


@pytest.mark.parametrize("gone", ["who decided", "who passed it on"])
def test_nothing_is_done_for_a_caller_that_was_marked_away(gone: str) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        store, name = decider.node.shared, decider.node.settings.node_id
        other = next(node for node in nodes if node is not decider).node.settings.node_id
        upload = await store.create_upload("b", "k")
        await put(store, "k", b"kept")
        version = decider.node.mesh.map().version
        await _change(nodes, lambda cluster: missed(cluster, name if gone == "who decided" else other))

        async def nothing_is_done() -> None:
            with asked_by(other, version):
                for size in (10, LARGE):
                    await refused(NotReplicatedError, put(store, "k", b"x" * size, size=size))
                await refused(NotReplicatedError, store.delete("b", "k"))
                await refused(NotReplicatedError, store.amend("b", "k", None, tags={"a": "b"}))
                await refused(NotReplicatedError, store.create_upload("b", "k"))
                await refused(NotReplicatedError, store.abort_upload(upload))
            _owners_alike(nodes, "k", b"kept")

        await nothing_is_done()
        if gone == "who decided":
            await _change(nodes, lambda cluster: joined(cluster, decider.member))
            await nothing_is_done()
            await _change(nodes, lambda cluster: settled(cluster, name))
            assert _decider(nodes, "b", "k") is decider
            await nothing_is_done()
        with asked_by(other, decider.node.mesh.map().version):
            await put(store, "k", b"done")
        _owners_alike(nodes, "k", b"done")

    _among(3, test, copies=3)


@pytest.mark.parametrize("gone", ["who decided", "who passed it on"])
def test_nothing_is_done_for_a_caller_that_was_given_up_and_came_back(gone: str) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = _decider(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        back, names = decider if gone == "who decided" else other, [n.node.settings.node_id for n in nodes]
        await put(decider.node.shared, "k", b"kept")
        version, name = decider.node.mesh.map().version, back.node.settings.node_id
        await _change(nodes, lambda cluster: lost(cluster, name))
        for change in (None, lambda cluster: joined(cluster, back.member), *map(_settles, names)):
            if change is not None:
                await _change(nodes, change)
            with asked_by(other.node.settings.node_id, version):
                await refused(NotReplicatedError, put(decider.node.shared, "k", b"old"))
        assert all(node.state == "up" for node in decider.node.mesh.map().nodes)
        assert _decider(nodes, "b", "k") is decider
        _owners_alike(nodes, "k", b"kept")

    _among(3, test, copies=3)


def _state(node: Running) -> str:
    me = node.node.mesh.me
    assert me is not None
    return me.state


def _settles(name: str) -> Callable[[ClusterMap], ClusterMap]:
    return lambda cluster: settled(cluster, name)


def test_a_write_through_a_node_that_is_drained_and_stays_after_all_is_taken() -> None:
    async def test(nodes: list[Running]) -> None:
        changing, *others = nodes
        states: list[str] = []
        name = changing.node.settings.node_id
        settling = [_settles(node.node.settings.node_id) for node in (*others, changing)]
        changes = [partial(drained, node_id=name), *settling, partial(stayed, node_id=name), *settling]
        for number, change in enumerate(changes):
            version = changing.node.mesh.map().version
            await _change(nodes, change)
            with asked_by(name, version):
                await put(_decider(nodes, "b", f"k{number}").node.shared, f"k{number}", b"x")
            states.append(_state(changing))
        assert states == ["draining"] * 4 + ["joining"] * 3 + ["up"]

    _among(3, test)


@pytest.mark.parametrize("what", ["one", "large", "many"])
def test_a_node_that_stands_still_while_it_passes_a_write_on_passes_it_on_no_more(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the newest map, and with a request that was begun by an older one."""

    def test(clients: list[Any], nodes: list[Running]) -> None:
        asked = nodes[0]
        name, peers = asked.node.settings.node_id, asked.node.peers
        key = next(f"k{n}" for n in range(100) if not asked.node.mesh.is_decider("bench", f"k{n}"))
        clients[1].put_object(Bucket="bench", Key=key, Body=b"kept")
        wire, stood = peers.wire, list[str]()

        async def stands_still(*args: Any, **more: Any) -> Any:
            if not stood:
                stood.append(name)
                for change in (partial(missed, node_id=name), _joins(asked), _settles(name)):
                    await _change(nodes, change)
            return await wire(*args, **more)

        monkeypatch.setattr(peers, "wire", stands_still)
        ask = partial(clients[0].put_object, Key=key, Body=b"o" * (10 if what == "one" else LARGE))
        if what == "many":
            ask = partial(clients[0].delete_objects, Delete={"Objects": [{"Key": key}]})
        with pytest.raises(ClientError, match="SlowDown"):
            ask(Bucket="bench")
        assert stood
        assert clients[1].get_object(Bucket="bench", Key=key)["Body"].read() == b"kept"
        clients[0].put_object(Bucket="bench", Key=key, Body=b"new")

    _clients(3, test)


def _joins(node: Running) -> Callable[[ClusterMap], ClusterMap]:
    return lambda cluster: joined(cluster, node.member)


def test_a_node_that_stands_still_before_it_gives_a_write_to_who_decides_gives_it_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(nodes: list[Running]) -> None:
        former = _decider(nodes, "b", "k")
        others = [node.node.settings.node_id for node in nodes if node is not former]
        name = former.node.settings.node_id
        for change in (partial(drained, node_id=name), *map(_settles, others)):
            await _change(nodes, change)
        writer = former.node.shared.writer("b", "k", size=1)
        await writer.write(b"x")
        assert isinstance(writer, ReplicatedWriter)
        drop, stood = writer._drop, list[str]()

        async def stands_still() -> None:
            if not stood:
                stood.append(name)
                await _change(nodes, partial(missed, node_id=name))
                await _change(nodes, _joins(former))
            await drop()

        monkeypatch.setattr(writer, "_drop", stands_still)
        with asked_by(name, former.node.mesh.map().version):
            await refused(NotReplicatedError, writer.commit(Meta("x")))
        assert stood
        _owners_alike(nodes, "k", None)

    _among(3, test)
