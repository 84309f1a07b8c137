"""Writes that another node decides by the time they come: by its map, once, and by nobody else."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.read_barrier import ANSWER_VALID_SECONDS
from meshd.store.errors import (
    ConditionFailedError,
    NoSuchUploadError,
    NoSuchVersionError,
    StaleEpochError,
)
from meshd.store.records import INTERNAL_WRITE, Meta, Upload, WriteContext
from meshwire.cluster.transitions import mark_node_away, set_node_weight
from meshwire.http_values.conditional_requests import Conditions
from tests.support.mesh_nodes import among, change_map, decider_of, owners_alike, shared_store
from tests.support.store_calls import error_of, fake_etag, put_object, put_part

if TYPE_CHECKING:
    from meshd.store.records import Record
    from meshd.util.clock import Clock
    from tests.support.mesh_nodes import Running

LARGE = 3_000_000


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_write_that_meets_a_newer_map_is_decided_by_that(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        mesh, waits = decider.node.mesh, asyncio.Event()
        newer_than = mesh.wait_for_newer_map

        async def waiting(version: int, patience: float) -> bool:
            waits.set()
            return await newer_than(version, patience)

        monkeypatch.setattr(mesh, "wait_for_newer_map", waiting)
        await decider.node.store.raise_fence(
            mesh.current_map().version + 1
        )  # another process of this node is quicker
        writing = asyncio.ensure_future(
            put_object(decider.node.replicated_store, "k", b"x" * size, size=size)
        )
        async with asyncio.timeout(60):
            await waits.wait()
        weigh = partial(set_node_weight, node_id=nodes[0].node.settings.node_id, weight=2)
        await change_map(nodes, weigh)
        await writing
        for node in nodes:
            found = node.node.store.get("b", "k")
            assert found is not None
            assert node.node.store.read_range(found, 0, size) == b"x" * size

    among(2, test)


async def _turned(nodes: list[Running], key: str) -> Running:
    """Who decided about a name, which another node does now."""
    former = decider_of(nodes, "b", key)
    await change_map(nodes, lambda cluster: mark_node_away(cluster, former.node.settings.node_id))
    assert decider_of(nodes, "b", key) is not former
    return former


@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_bytes_that_came_while_another_node_became_the_decider_are_decided_by_that(size: int) -> None:
    async def test(nodes: list[Running]) -> None:
        body = os.urandom(size)
        former = decider_of(nodes, "b", "k")
        one, two = (former.node.replicated_store.writer("b", "k", size=size) for _ in range(2))
        upload = await former.node.replicated_store.create_upload(Upload("", "b", "k"))
        part = former.node.replicated_store.part_writer(upload, 1, size)
        for writer in (one, two, part):
            await writer.write(body)
        assert await _turned(nodes, "k") is former
        new = Conditions(if_none_match=("*",))
        record = await one.commit(Meta(fake_etag(body)), conditions=new, versioning="Enabled")
        assert record.version
        assert record.etag == fake_etag(body)
        await error_of(ConditionFailedError, two.commit(Meta("two"), conditions=new))
        await part.commit(Meta(fake_etag(body)))
        owners_alike(nodes, "k", body)
        assert former.node.store.get("b", "k") is None
        done = await former.node.replicated_store.complete_upload(
            upload, (1,), Meta("whole"), etags=(fake_etag(body),)
        )
        assert (done.size, done.etag) == (size, "whole")
        owners_alike(nodes, "k", body)
        await error_of(NoSuchUploadError, former.node.replicated_store.abort_upload(upload))
        heir = decider_of(nodes, "b", "k").node.store
        assert len(heir.list_versions("b").entries) == 2  # the version, and the null one above it

    among(3, test, copies=3)


def test_what_needs_no_bytes_is_decided_by_the_new_decider() -> None:
    async def test(nodes: list[Running]) -> None:
        store = decider_of(nodes, "b", "k").node.replicated_store
        first = await put_object(store, "k", b"first", versioning="Enabled")
        await put_object(store, "k", b"second", versioning="Enabled")
        source = await put_object(store, "source", b"source")
        assert (await _turned(nodes, "k")).node.replicated_store is store
        tagged = await store.amend("b", "k", first.version, tags={"a": "b"})
        assert (tagged.version, tagged.tags) == (first.version, {"a": "b"})
        await error_of(NoSuchVersionError, store.amend("b", "k", "null", tags={}))
        assert (await store.delete_version("b", "k", first.version)).record is not None
        owners_alike(nodes, "k", b"second")
        removed = await store.delete_many("b", ["k"], versioning="Enabled")
        assert removed["k"].marker is not None
        owners_alike(nodes, "k", None)
        await store.link("b", "k", source, Meta("copied"))
        owners_alike(nodes, "k", b"source")
        upload = await store.create_upload(Upload("", "b", "k", tags={"c": "d"}))
        heir = decider_of(nodes, "b", "k").node.store
        assert heir.get_upload("b", "k", upload.upload_id) is not None
        assert await store.abort_upload(upload)
        assert heir.get_upload("b", "k", upload.upload_id) is None
        kept = [entry[1].marker for entry in heir.list_versions("b", prefix="k").entries]
        assert sorted(kept) == [False, False, True]

    among(3, test, copies=3)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_copy_of_what_was_uploaded_in_parts_is_of_these_parts_at_the_new_decider(size: int) -> None:
    async def test(nodes: list[Running]) -> None:
        store, body = decider_of(nodes, "b", "k").node.replicated_store, os.urandom(size)
        upload = await store.create_upload(Upload("", "b", "source"))
        for number, data in ((1, body), (2, b"last")):
            await put_part(store, upload, number, data)
        etags = (fake_etag(body), fake_etag(b"last"))
        source = await store.complete_upload(upload, (1, 2), Meta("whole-2"), etags=etags)
        assert [part.size for part in source.parts] == [size, 4]
        former = await _turned(nodes, "k")
        assert former.node.replicated_store is store
        copied = await store.link("b", "k", source, Meta("whole-2", tags={"a": "b"}), versioning="Enabled")
        assert (copied.parts, copied.etag, copied.size) == (source.parts, "whole-2", size + 4)
        owners_alike(nodes, "k", body + b"last")
        for node in (each for each in nodes if each is not former):
            record = node.node.store.get("b", "k")
            assert record is not None
            assert (record.parts, record.tags, record.version) == (source.parts, {"a": "b"}, copied.version)
        with pytest.raises(ConditionFailedError) as failed:
            await store.link("b", "k", source, Meta("again-2"), Conditions(if_none_match=("*",)))
        assert failed.value.condition == "If-None-Match"

    among(3, test, copies=3)


def test_an_earlier_map_decides_nothing_after_a_later_one() -> None:
    async def test(nodes: list[Running]) -> None:
        store = nodes[0].node.store
        await put_object(store, "k", b"seven", context=WriteContext(epoch=7))
        six = WriteContext(epoch=6)
        await error_of(StaleEpochError, put_object(store, "k", b"six", context=six))
        await error_of(StaleEpochError, put_object(store, "large", b"six" * LARGE, context=six))
        await error_of(StaleEpochError, store.delete("b", "k", context=six))
        late, absent = (
            WriteContext(epoch=7, deadline=nodes[0].node.clock.stamp()),
            Conditions(if_none_match=("*",)),
        )
        await error_of(StaleEpochError, put_object(store, "k", b"late", context=late))
        await error_of(StaleEpochError, put_object(store, "large", b"late" * LARGE, context=late))
        await error_of(StaleEpochError, put_object(store, "other", b"late", conditions=absent, context=late))
        await error_of(StaleEpochError, store.delete("b", "k", context=late))
        await error_of(StaleEpochError, store.amend("b", "k", None, tags={"a": "b"}, context=late))
        await error_of(StaleEpochError, store.create_upload(Upload("", "b", "k"), context=late))
        await put_object(store, "own", b"without")
        record = store.get("b", "k")
        assert record is not None
        assert store.read_range(record, 0, 5) == b"seven"
        assert store.get("b", "large") is None
        assert store.get("b", "other") is None

    among(1, test)


def _left(clock: Clock, until: float) -> tuple[int, float]:
    return 0, until - clock.monotonic()


def test_a_process_that_stands_still_before_it_commits_asks_again_whether_it_may() -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        mesh, store, clock = decider.node.mesh, shared_store(decider), decider.node.clock
        held, acts = 0.0, 0

        async def act(context: WriteContext) -> Record:
            nonlocal acts
            acts += 1
            if acts < 3:
                await asyncio.sleep(held)  # as if stopped
            return await put_object(decider.node.store, "k", b"x", context=context)

        for held in (0.5, ANSWER_VALID_SECONDS):  # with a lease, and with the word of the others
            until = clock.monotonic() + (0.0 if held == ANSWER_VALID_SECONDS else held)
            mesh._lease_state = partial(_left, clock, until)
            acts, before = 0, clock.stamp()
            writing = asyncio.ensure_future(store.primary.run_as_primary("b", "k", act, INTERNAL_WRITE))
            await asyncio.sleep(held)
            record = await writing
            assert acts > 1
            assert record.stamp > before + int(held * 1e9)
            assert len(decider.node.store.list_versions("b", prefix="k").entries) == 1

    among(3, test)
