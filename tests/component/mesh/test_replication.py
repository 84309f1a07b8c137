"""Writes of a mesh: acknowledged when every node that must have them has them, the same everywhere."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from botocore.exceptions import ClientError

from meshd.cluster.replication import batched_puts, replicator
from meshd.cluster.replication.replicated_store import ReplicatedStore
from meshd.store.errors import NotPrimaryError, NotReplicatedError
from meshd.store.records import Meta, Record, Upload, UploadedPart, WriteContext
from meshd.store.replica.changes import Amended, PartOf, without_local_fields
from meshd.telemetry import metrics
from meshwire.cluster.transitions import drain_node, join_node, mark_node_away, set_node_weight
from tests.support.archives import UNPACK, tar_of
from tests.support.mesh_nodes import among, change_map, decider_of, shared_store, with_clients
from tests.support.replica_suite import store_state
from tests.support.server_shutdown import stop_listening
from tests.support.store_calls import error_of, fake_etag, put_object, put_part

if TYPE_CHECKING:
    from tests.support.mesh_nodes import Running

LARGE = 3_000_000


def _same(nodes: list[Running], bucket: str = "b") -> None:
    """All nodes have the same (there are as many as copies)."""
    one, *others = [store_state(node.node.store, bucket) for node in nodes]
    for other in others:
        assert other == one


@pytest.mark.parametrize("size", [0, 10, 300_000, LARGE])
def test_every_owner_has_what_was_acknowledged(size: int) -> None:
    def test(clients: list[Any], nodes: list[Running]) -> None:
        body = os.urandom(size)
        for number in range(8):
            clients[number % 3].put_object(
                Bucket="bench", Key=f"k{number}", Body=body, Metadata={"a": "b"}, Tagging="t=1"
            )
            route = nodes[0].node.mesh.route_for("bench", f"k{number}")
            assert len(route.write_set) == 2
            found = []
            for node in nodes:
                record = node.node.store.get("bench", f"k{number}")
                must = any(node.node.settings.node_id == writer.node_id for writer in route.write_set)
                assert (record is not None) == must
                if record is not None:
                    assert node.node.store.read_range(record, 0, size) == body
                    found.append((record.stamp, record.etag, record.modified, record.tags, record.metadata))
            assert found[0] == found[1]

    with_clients(3, test)


@pytest.mark.parametrize("release", ["this", "earlier"])
def test_objects_put_together_are_at_every_owner(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of an earlier release know neither of the two calls."""
    if release == "earlier":
        unknown = replace(batched_puts.FORWARD_PUTS, path="/-/peer/replica/none")
        monkeypatch.setattr(batched_puts, "FORWARD_PUTS", unknown)
        monkeypatch.setattr(replicator, "RECEIVE_BATCH", replace(replicator.RECEIVE_BATCH, path=unknown.path))
    bodies = {f"t/{number}": os.urandom(number * 37) for number in range(90)} | {
        "t/large": os.urandom(600_000)
    }

    def test(clients: list[Any], nodes: list[Running]) -> None:
        sent = metrics.replication_facts.labels("Bytes")._value.get()
        clients[1].put_object(Bucket="bench", Key="x", Body=tar_of(bodies), Metadata=UNPACK)
        assert metrics.replication_facts.labels("Bytes")._value.get() - sent == len(bodies)
        for key, body in bodies.items():
            found = []
            for node in nodes:
                record = node.node.store.get("bench", key)
                owners = {owner.node_id for owner in node.node.mesh.route_for("bench", key).write_set}
                assert (record is not None) == (node.node.settings.node_id in owners)
                if record is not None:
                    assert node.node.store.read_range(record, 0, record.size) == body
                    found.append((record.stamp, record.etag, record.modified))
            assert len(found) == 2
            assert found[0] == found[1]

    with_clients(3, test)


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
        assert store_state(nodes[0].node.store, "bench")["versions"]

    with_clients(2, test)


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
        assert len(store_state(nodes[0].node.store, "bench")["uploads"]) == 3
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in zip((1, 3), etags[::2], strict=True)]
        for client in clients:  # a second time, as clients do that had no answer
            client.complete_multipart_upload(
                Bucket="bench", Key="done", UploadId=done, MultipartUpload={"Parts": parts}
            )
        two.abort_multipart_upload(Bucket="bench", Key="gone", UploadId=gone)
        _same(nodes, "bench")
        assert list(store_state(nodes[0].node.store, "bench")["uploads"]) == [kept]

    with_clients(2, test)


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

    among(2, test)


def test_a_writer_that_is_away_is_not_waited_for() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        await change_map(nodes, lambda cluster: mark_node_away(cluster, other.node.settings.node_id))
        await put_object(decider.node.replicated_store, "k", b"data")
        assert other.node.store.get("b", "k") is None

    among(2, test)


def test_a_writer_that_does_not_answer_is_waited_for_until_the_map_says_so() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        await stop_listening(other.listener)
        await decider.node.peers.aclose()
        for size in (4, LARGE):
            writing = asyncio.ensure_future(
                put_object(decider.node.replicated_store, "k", b"d" * size, size=size)
            )
            done, _ = await asyncio.wait([writing], timeout=0.3)
            if not done:
                await change_map(nodes, lambda cluster: mark_node_away(cluster, other.node.settings.node_id))
            assert (await writing).size == size

    among(2, test)


def test_a_write_that_cannot_be_replicated_is_refused_and_mended_by_the_next() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = decider.node.replicated_store
        await put_object(store, "k", b"old")
        port = other.member.endpoint.rpartition(":")[2]
        await stop_listening(other.listener)
        await decider.node.peers.aclose()
        assert isinstance(store, ReplicatedStore)
        patience, store.primary.replicator.timeout = store.primary.replicator.timeout, 0.5
        await error_of(NotReplicatedError, store.delete("b", "k"))
        store.primary.replicator.timeout = patience
        loop = asyncio.get_running_loop()
        other.listener = await loop.create_server(other.server, "127.0.0.1", int(port))
        assert other.node.store.get("b", "k") is not None
        assert (await store.delete("b", "k")).record is None  # it is gone here: and now there, too
        assert other.node.store.get("b", "k") is None

    among(2, test)


def test_of_writes_that_wait_for_a_node_the_log_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    """Many tries, all counted, one line: until the node has been well for a while."""

    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = shared_store(decider)
        await stop_listening(other.listener)
        await decider.node.peers.aclose()
        silent = metrics.replication_retries.labels("silent")
        before, store.primary.replicator.timeout = silent._value.get(), 0.5
        keys = [f"k{n}" for n in range(40) if decider_of(nodes, "b", f"k{n}") is decider][:3]
        while silent._value.get() < before + 2 * len(keys):
            writes = [put_object(store, key, b"data") for key in keys]
            await asyncio.gather(*(error_of(NotReplicatedError, write) for write in writes))

    with caplog.at_level(logging.INFO, "meshd.cluster.replication.replicator"):
        among(2, test)
    told = [each.getMessage() for each in caplog.records if "sending a write to node" in each.getMessage()]
    assert len(told) == 1
    assert "failed and will be retried (silent): " in told[0]


def test_whoever_goes_by_an_older_map_is_refused() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        mesh = decider.node.mesh
        stale = mesh.current_map()
        await change_map(nodes, lambda cluster: drain_node(cluster, "n3"))
        mesh._standalone_map, mesh._routes = None, {}
        record = await put_object(decider.node.store, "k", b"data")
        from meshd.cluster.replication.replicator import APPLY_CHANGE
        from meshd.rpc.peer_client import StaleMapError
        from meshd.store.replica.changes import Amended, ReplicaChange, without_local_fields

        told = ReplicaChange(stale.version, Amended("b", "k", without_local_fields(record)))
        with pytest.raises(StaleMapError):
            await decider.node.peers.call_typed(other.member, APPLY_CHANGE, told)

    among(3, test)


def test_only_the_decider_decides() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store, context = other.node.replicated_store, WriteContext(forwarded=True)
        await error_of(NotPrimaryError, put_object(store, "k", b"x", context=context))
        await error_of(NotPrimaryError, store.delete("b", "k", context=context))
        assert other.node.store.is_empty("b")
        await decider.node.store.raise_fence(
            decider.node.mesh.current_map().version + 1
        )  # whoever decides here waits
        asked = asyncio.ensure_future(put_object(other.node.replicated_store, "k", b"x"))
        done, _ = await asyncio.wait((asked,), timeout=1)
        assert not done
        assert other.node.store.is_empty("b")
        weigh = partial(set_node_weight, node_id=nodes[0].node.settings.node_id, weight=2)
        await change_map(nodes, weigh)
        await asked
        _same(nodes)

    among(2, test)


def test_an_upload_goes_on_with_another_decider() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        store = decider.node.replicated_store
        upload = await store.create_upload(Upload("", "b", "k"))
        await put_part(store, upload, 1, b"a" * LARGE)
        await change_map(nodes, lambda cluster: mark_node_away(cluster, decider.node.settings.node_id))
        heir = decider_of(nodes, "b", "k")
        assert heir is not decider
        found = heir.node.store.get_upload("b", "k", upload.upload_id)
        assert found is not None
        await put_part(heir.node.replicated_store, found, 2, b"b" * 7)
        record = await heir.node.replicated_store.complete_upload(found, [1, 2], Meta("whole"))
        assert heir.node.store.read_range(record, 0, record.size) == b"a" * LARGE + b"b" * 7
        await change_map(nodes, lambda cluster: join_node(cluster, decider.member))

    among(2, test)


def test_a_newer_stamp_at_a_replica_is_overtaken() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        for number in range(3):
            ahead = await put_object(
                other.node.store, "k", b"never acknowledged"
            )  # its decider went before it told
            if number == 0:
                record = await put_object(decider.node.replicated_store, "k", b"acknowledged")
            elif number == 1:
                assert (await decider.node.replicated_store.delete("b", "k")).record is not None
                assert other.node.store.get("b", "k") is None
                continue
            else:
                await put_object(decider.node.replicated_store, "k", b"y" * LARGE, size=LARGE)
            found = other.node.store.get("b", "k")
            assert found is not None
            assert found.stamp > ahead.stamp
            _same(nodes)
        assert record.etag == fake_etag(b"acknowledged")

    among(2, test)


AHEAD = 3600 * 10**9  # nanoseconds by which the clock of an earlier primary was wrong


def test_tags_are_above_those_that_an_earlier_primary_left_at_one_node() -> None:
    async def test(nodes: list[Running]) -> None:
        primary = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not primary)
        store = shared_store(primary)
        record = await put_object(store, "k", b"x")
        lost = msgspec.structs.replace(
            without_local_fields(record), tags={"a": "lost"}, amended=record.stamp + AHEAD
        )
        await other.node.store.apply_change(Amended("b", "k", lost))
        for value in ("first", "second"):
            amended = await store.amend("b", "k", None, tags={"a": value})
            assert amended.tags == {"a": value}
            for node in nodes:
                found = node.node.store.get("b", "k")
                assert found is not None
                assert found.tags == {"a": value}
            _same(nodes)

    among(2, test)


def test_a_part_is_above_the_one_that_an_earlier_primary_left_at_one_node() -> None:
    async def test(nodes: list[Running]) -> None:
        primary = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not primary)
        store = shared_store(primary)
        upload = await store.create_upload(Upload("", "b", "k"))
        lost = UploadedPart(1, 4, "lost", {}, 0, (), upload.stamp + AHEAD)
        writer = other.node.store.replica_writer("b", "k", size=4)
        await writer.write(b"lost")
        await writer.commit_at_stamp(Record(4, "lost", lost.stamp, 0, ()), PartOf(upload, lost))
        for size in (10, LARGE):
            body = os.urandom(size)
            await put_part(store, upload, 1, body)
            for node in nodes:
                (part,) = node.node.store.list_parts(upload).parts
                assert (part.etag, part.size) == (fake_etag(body), size)
        await store.complete_upload(upload, (1,), Meta("whole"), etags=(fake_etag(body),))
        _same(nodes)
        record = other.node.store.get("b", "k")
        assert record is not None
        assert other.node.store.read_range(record, 0, record.size) == body

    among(2, test)


@pytest.mark.parametrize("change", ["a part is replaced", "a part arrives"])
def test_replicas_make_the_object_of_the_parts_that_its_primary_chose(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of those that the primary saw just before: the other owners have no others yet."""

    async def test(nodes: list[Running]) -> None:
        primary = decider_of(nodes, "b", "k").node
        upload = await primary.replicated_store.create_upload(Upload("", "b", "k"))
        numbers = (1, 2) if change == "a part arrives" else (1,)
        await put_part(primary.replicated_store, upload, 1, b"one")
        complete, late = primary.store.complete_upload, b"two"

        async def after_a_part(*args: Any, **more: Any) -> Record:
            await put_part(primary.store, upload, numbers[-1], late)
            return await complete(*args, **more)

        monkeypatch.setattr(primary.store, "complete_upload", after_a_part)
        etags = [fake_etag(b"one"), fake_etag(late)][-len(numbers) :]
        await primary.replicated_store.complete_upload(upload, numbers, Meta("whole"), etags=etags)
        for node in nodes:
            found = node.node.store.get("b", "k")
            assert found is not None
            body = node.node.store.read_range(found, 0, found.size)
            assert body == (b"onetwo" if change == "a part arrives" else late)
            assert node.node.store.get_upload("b", "k", upload.upload_id) is None
        _same(nodes)

    among(3, test, copies=3)


def test_nothing_is_acknowledged_while_nobody_decides() -> None:
    """Both owners were away, and the one that went last is not back: the other has the write, alone."""

    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        store = shared_store(decider)
        record = await put_object(decider.node.store, "k", b"alone")
        for gone in (decider, other):
            await change_map(nodes, partial(mark_node_away, node_id=gone.node.settings.node_id))
        await change_map(nodes, lambda cluster: join_node(cluster, decider.member))
        assert [node.node_id for node in decider.node.mesh.route_for("b", "k").write_set] == [
            decider.node.settings.node_id
        ]
        await error_of(NotReplicatedError, store.primary.replicate_and_restamp("b", "k", record))

    among(2, test, patience=0.5)


def test_what_another_decider_acknowledged_meanwhile_is_not_overtaken() -> None:
    """A write that found nobody to take it, and goes on when its node is back and decides no more."""

    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        store = shared_store(decider)
        late = await put_object(decider.node.store, "k", b"late")
        await change_map(nodes, lambda cluster: mark_node_away(cluster, decider.node.settings.node_id))
        heir = decider_of(nodes, "b", "k")
        await put_object(heir.node.replicated_store, "k", b"acknowledged")
        await change_map(nodes, lambda cluster: join_node(cluster, decider.member))
        assert decider_of(nodes, "b", "k") is heir
        await error_of(NotReplicatedError, store.primary.replicate_and_restamp("b", "k", late))
        found = heir.node.store.get("b", "k")
        assert found is not None
        assert heir.node.store.read_range(found, 0, found.size) == b"acknowledged"

    among(2, test)
