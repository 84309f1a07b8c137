"""A name passes to another decider: what the former one committed is there before the new one decides."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.replication import primary_handover, unconfirmed_writes
from meshd.cluster.replication.primary_handover import HAND_OVER, HandoverHandler
from meshd.cluster.replication.primary_writes import PrimaryHandover
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NoSuchUploadError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import Meta, Upload, WriteContext
from meshwire.cluster.transitions import join_node, mark_complete, mark_node_away
from meshwire.http_values.conditional_requests import Conditions
from tests.support.mesh_nodes import accept_map, change_map, decider_of, running_nodes, shared_store
from tests.support.server_shutdown import stop_listening
from tests.support.store_calls import error_of, fake_etag, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshwire.cluster import Node
    from meshwire.s3.bucket_settings import Versioning
    from tests.support.mesh_nodes import Running


def _among(test: Callable[[Running, Running], Awaitable[None]]) -> None:
    """Runs `test` with two nodes that have every name: the one that decides about `k` is back from an
    absence and is not up yet, so the other one, given second, decides."""

    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            back = decider_of(nodes, "b", "k")
            name = back.node.settings.node_id
            other = next(node for node in nodes if node is not back)
            accept_map(nodes)
            for node in nodes:
                shared_store(node).primary.replicator.timeout = 1.0
            await change_map(nodes, lambda cluster: mark_node_away(cluster, name))
            await change_map(nodes, lambda cluster: join_node(cluster, back.member))
            for node in nodes:
                shared_store(node).primary.handover.observe_map()
            await test(back, other)

    asyncio.run(run())


async def _up(back: Running, other: Running) -> None:
    await change_map([back, other], lambda cluster: mark_complete(cluster, back.node.settings.node_id))


async def _commit(node: Running, data: bytes) -> None:
    """A write that is committed at this node by its map, and told to nobody yet."""
    fenced = WriteContext(epoch=node.node.mesh.current_map().version)
    await put_object(node.node.store, "k", data, context=fenced)


def _read(node: Running) -> bytes | None:
    record = node.node.store.get("b", "k")
    return None if record is None else node.node.store.read_range(record, 0, record.size)


def test_a_condition_is_judged_by_what_the_former_decider_committed() -> None:
    async def test(back: Running, other: Running) -> None:
        await put_object(shared_store(other), "k", b"first")
        await _commit(other, b"second")  # reads of that node show it
        await _up(back, other)
        await error_of(
            ConditionFailedError,
            put_object(
                shared_store(back), "k", b"third", conditions=Conditions(if_match=(fake_etag(b"first"),))
            ),
        )
        assert _read(back) == _read(other) == b"second"
        await put_object(
            shared_store(back), "k", b"third", conditions=Conditions(if_match=(fake_etag(b"second"),))
        )
        assert _read(back) == _read(other) == b"third"

    _among(test)


def test_a_removal_of_the_former_decider_is_known() -> None:
    async def test(back: Running, other: Running) -> None:
        await put_object(shared_store(other), "k", b"first")
        fenced = WriteContext(epoch=other.node.mesh.current_map().version)
        await other.node.store.delete("b", "k", context=fenced)
        await _up(back, other)
        conditions = Conditions(if_match=(fake_etag(b"first"),))
        await error_of(ConditionMissingError, shared_store(back).delete("b", "k", conditions=conditions))

    _among(test)


def test_a_refusal_before_the_body_is_judged_by_it_too() -> None:
    async def test(back: Running, other: Running) -> None:
        fenced = WriteContext(epoch=other.node.mesh.current_map().version)
        await put_object(other.node.store, "k", b"first", context=fenced)
        await _up(back, other)
        conditions = Conditions(if_match=(fake_etag(b"first"),))
        await shared_store(back).check_conditions("b", "k", conditions)  # which raises nothing
        assert _read(back) == b"first"

    _among(test)


def test_the_former_decider_commits_nothing_more_by_an_older_map() -> None:
    async def test(back: Running, other: Running) -> None:
        older = other.node.mesh.current_map().version
        await _up(back, other)
        await put_object(shared_store(back), "k", b"new")

        async def late() -> None:
            await put_object(other.node.store, "k", b"late", context=WriteContext(epoch=older))

        await error_of(StaleEpochError, late())
        assert _read(back) == _read(other) == b"new"

    _among(test)


def test_nobody_is_asked_twice_about_a_name_by_one_map(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(back: Running, other: Running) -> None:
        asked: list[tuple[str, str]] = []
        send_name = HandoverHandler.send_name

        async def counted(self: HandoverHandler, bucket: str, key: str, version: int, to: Node) -> None:
            asked.append((bucket, key))
            await send_name(self, bucket, key, version, to)

        monkeypatch.setattr(HandoverHandler, "send_name", counted)
        await _up(back, other)
        for data in (b"1", b"2", b"3"):
            await put_object(shared_store(back), "k", data)
        assert asked == [("b", "k")]
        shared_store(back).primary.handover.window = 0.0
        for until in range(2):
            await change_map([back, other], lambda cluster: join_node(cluster, other.member))
            await put_object(shared_store(back), "k", b"%d" % until)
        assert asked == [("b", "k")]

    _among(test)


def test_a_former_decider_that_does_not_hand_over_has_the_write_refused() -> None:
    async def test(back: Running, other: Running) -> None:
        await put_object(shared_store(other), "k", b"first")
        await _up(back, other)
        await stop_listening(other.listener)
        await back.node.peers.aclose()
        error = await error_of(NotReplicatedError, put_object(shared_store(back), "k", b"second"))
        assert f"{other.node.settings.node_id} was recently the primary of this name" in str(error)
        assert _read(back) == b"first"  # nothing was changed
        await change_map([back, other], lambda cluster: mark_node_away(cluster, other.node.settings.node_id))
        await put_object(shared_store(back), "k", b"second")  # a map without it needs no answer
        assert _read(back) == b"second"

    _among(test)


def test_who_saw_no_former_map_asks_all_other_owners() -> None:
    async def test(back: Running, other: Running) -> None:
        await put_object(shared_store(other), "k", b"first")
        await _commit(other, b"second")
        await _up(back, other)
        primary, node = shared_store(back).primary, back.node
        primary.handover = PrimaryHandover(node.mesh, node.peers, node.clock)  # a process that has just begun
        version = node.mesh.current_map().version
        assert not primary.handover.is_complete("b", "k", version)
        await primary.handover.wait_until_received("b", "k", 1.0)
        assert _read(back) == b"second"
        assert primary.handover.is_complete("b", "k", version)
        assert not primary.handover.is_complete("b", "k", version + 1)

    _among(test)


def test_a_former_decider_of_an_earlier_release_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(back: Running, other: Running) -> None:
        unknown = replace(HAND_OVER, path="/-/peer/replica/what-it-does-not-know")
        monkeypatch.setattr(primary_handover, "HAND_OVER", unknown)
        await _up(back, other)
        await put_object(shared_store(back), "k", b"data")
        assert _read(back) == _read(other) == b"data"

    _among(test)


# uploads ----------------------------------------------------------------------------------------------


async def _upload(node: Running) -> Upload:
    """An upload with one part, which all owners have."""
    upload = await shared_store(node).create_upload(Upload("", "b", "k"))
    await put_part(shared_store(node), upload, 1, b"part")
    return upload


async def _complete(node: Running, upload: Upload) -> None:
    etags = (fake_etag(b"part"),)
    await shared_store(node).complete_upload(upload, (1,), Meta("whole"), etags=etags)


async def _end_unseen(node: Running, upload: Upload, end: str, *, versioned: bool = False) -> None:
    """The end of an upload that is committed at this node by its map, and told to nobody yet."""
    fenced, store = WriteContext(epoch=node.node.mesh.current_map().version), node.node.store
    if end == "abort":
        await store.abort_upload(upload, context=fenced)
    else:
        setting: Versioning = "Enabled" if versioned else ""
        await store.complete_upload(upload, (1,), Meta("whole"), versioning=setting, context=fenced)


@pytest.mark.parametrize("recent", [True, False])
@pytest.mark.parametrize("request_", ["abort", "complete", "part"])
@pytest.mark.parametrize("end", ["abort", "complete"])
def test_an_upload_that_the_former_decider_has_ended_has_ended(
    end: str, request_: str, recent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not recent:
        monkeypatch.setattr(unconfirmed_writes, "_UNSETTLED_NS", -(10**12))

    async def test(back: Running, other: Running) -> None:
        upload = await _upload(other)
        await _end_unseen(other, upload, end)
        await _up(back, other)
        assert back.node.store.get_upload("b", "k", upload.upload_id) is not None
        asked: Awaitable[object]
        if request_ == "abort":
            asked = shared_store(back).abort_upload(upload)
        elif request_ == "complete":
            asked = _complete(back, upload)
        else:
            asked = put_part(shared_store(back), upload, 1, b"other")
        await error_of(NoSuchUploadError, asked)
        for node in (back, other):
            assert node.node.store.get_upload("b", "k", upload.upload_id) is None
            assert _read(node) == (b"part" if end == "complete" else None)

    _among(test)


def test_the_version_that_an_upload_became_is_handed_over_before_its_end() -> None:
    """It is not the newest: that one was put after it."""

    async def test(back: Running, other: Running) -> None:
        upload = await _upload(other)
        await _end_unseen(other, upload, "complete", versioned=True)
        fenced = WriteContext(epoch=other.node.mesh.current_map().version)
        await put_object(other.node.store, "k", b"newest", versioning="Enabled", context=fenced)
        await _up(back, other)
        await error_of(NoSuchUploadError, shared_store(back).abort_upload(upload))
        found = [
            [record.etag for _, record in node.node.store.list_versions("b").entries]
            for node in (back, other)
        ]
        assert found[0] == found[1] == [fake_etag(b"newest"), "whole"]

    _among(test)


def test_an_upload_that_only_the_former_decider_lists_is_known_to_the_new_one() -> None:
    async def test(back: Running, other: Running) -> None:
        fenced = WriteContext(epoch=other.node.mesh.current_map().version)
        upload = await other.node.store.create_upload(Upload("", "b", "k"), context=fenced)
        longer = await other.node.store.create_upload(Upload("", "b", "k/longer"), context=fenced)
        await _up(back, other)
        await shared_store(back).abort_upload(upload)
        for node in (back, other):
            assert node.node.store.get_upload("b", "k", upload.upload_id) is None
        assert back.node.store.get_upload("b", "k/longer", longer.upload_id) is None  # another name

    _among(test)


def test_a_part_of_the_former_decider_that_the_new_one_did_not_have_is_not_acknowledged() -> None:
    """The new one completes the upload with the part before."""

    async def test(back: Running, other: Running) -> None:
        upload, store = await _upload(other), shared_store(other)
        fenced = WriteContext(epoch=other.node.mesh.current_map().version)
        writer = other.node.store.part_writer(upload, 1, 5)
        await writer.write(b"other")
        await writer.commit(Meta(fake_etag(b"other")), context=fenced)
        await _up(back, other)
        await _complete(back, upload)
        await error_of(NotReplicatedError, store.replicate_part(upload, 1, fenced.epoch))
        assert _read(back) == _read(other) == b"part"

    _among(test)
