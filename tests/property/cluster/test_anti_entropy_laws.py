"""Comparing two stores: whatever happened on either, pulling makes the one that pulls lack nothing."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshd.cluster.rebalance.anti_entropy import AntiEntropySync, SyncStats
from meshd.cluster.rebalance.sync_plan import missing_items, scope_of
from meshd.cluster.rebalance.sync_source import (
    DigestsRequest,
    InventoryRequest,
    SyncPeerLostError,
    SyncSource,
)
from meshd.config import StoreSettings
from meshd.store.errors import StoreError
from meshd.store.records import Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from meshd.cluster.rebalance.sync_source import FetchRequest
    from meshd.store.records import Location
    from meshd.store.replica.inventory import HeldName

SLOTS = 16
ALL = scope_of({2: np.ones(SLOTS, np.bool_)}, SLOTS)
KEYS = ("a", "a/b", "k", "x" * 500)
Step = tuple[str, str, int]
KINDS = ("put", "version", "large", "delete", "mark", "remove", "tag", "begin", "part", "complete", "abort")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(KEYS), st.integers(1, 9)), max_size=12)
# Every example opens two stores: on a busy machine that takes as long as it takes.
patient = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


async def rest(size: int) -> None:
    await asyncio.sleep(0)


@contextmanager
def stores(number: int, clock: ManualClock, **changes: Any) -> Iterator[list[Store]]:
    memory = Path("/dev/shm")  # so many small files cost a busy disk minutes
    place = Path(tempfile.mkdtemp(prefix="pulling-", dir=memory if memory.is_dir() else None))
    told = {"small_object_bytes": 64 << 10, "index_map_bytes": 1 << 26, "tombstone_seconds": 3600.0} | changes
    every = [
        StoreSettings.at(place / str(n), durability="relaxed", segment_bytes=20_000, **told)
        for n in range(number)
    ]
    opened = [Store.open(each, writer="s", clock=clock) for each in every]
    try:
        yield opened
        for store in opened:
            store.close()
        for each in every:
            report = check_store(each)
            assert report.clean, report.problems
    finally:
        for store in opened:
            store.close()
        shutil.rmtree(place)


async def act(store: Store, step: Step) -> None:
    kind, key, number = step
    uploads = [upload for upload in store.list_uploads("b").uploads if upload.key == key]
    try:
        if kind in ("put", "version", "large"):
            data = bytes([number]) * (LARGE if kind == "large" else number)
            await put_object(store, key, data, versioning="Enabled" if kind == "version" else "")
        elif kind == "delete":
            await store.delete("b", key)
        elif kind == "mark":
            await store.delete("b", key, versioning="Enabled")
        elif kind == "remove":
            versions = [entry for name, entry in store.list_versions("b").entries if name == key]
            if versions:
                one = versions[number % len(versions)]
                await store.delete_version("b", key, one.version or "null")
        elif kind == "tag":
            await store.amend("b", key, None, tags={"n": str(number)})
        elif kind == "begin":
            await store.create_upload(Upload("", "b", key))
        elif uploads and kind == "part":
            await put_part(store, uploads[0], number, bytes([number]) * 9)
        elif uploads and kind == "complete":
            parts = [part.number for part in store.list_parts(uploads[0]).parts]
            if parts:
                await store.complete_upload(uploads[0], parts, Meta("whole"))
        elif uploads and kind == "abort":
            await store.abort_upload(uploads[0])
    except StoreError:
        pass  # nothing there to do it to


def offers(store: Store) -> SyncSource:
    return SyncSource(store, lambda bucket: 2)


async def pull(to: Store, source: Any, **also: Any) -> SyncStats:
    return await AntiEntropySync(to, offers(to), source, ALL, rest=rest, tally=SyncStats(), **also).run_sync()


async def held(store: Store) -> list[HeldName]:
    return list((await offers(store).read_inventory(InventoryRequest(ALL, limit=10_000))).names)


async def sums(store: Store) -> list[int]:
    given = await offers(store).read_digests(DigestsRequest(ALL, 0))
    found: list[int] = given.sum_array().tolist()
    return found


def contents(store: Store) -> dict[tuple[str, str], tuple[bytes, Any]]:
    found = {}
    for key, record in store.list_versions("b").entries:
        data = b"" if record.marker else store.read_range(record, 0, record.size)
        found[key, record.version] = (data, (record.stamp, record.etag, record.tags, record.parts))
    return found


@patient
@given(before=STEPS, mine=STEPS, theirs=STEPS)
def test_whoever_pulled_lacks_nothing(before: list[Step], mine: list[Step], theirs: list[Step]) -> None:
    async def doing() -> None:
        clock = ManualClock()
        with stores(2, clock) as (one, other):
            for step in before:
                await act(other, step)
            await pull(one, offers(other))
            for store, steps in ((one, mine), (other, theirs)):
                for step in steps:
                    clock.advance(1)
                    await act(store, step)
            first = await pull(one, offers(other))
            assert first.failed == 0
            own = {each.name: each for each in await held(one)}
            assert not any(missing_items(own.get(each.name), each) for each in await held(other))
            await pull(other, offers(one))
            assert await sums(one) == await sums(other)
            assert contents(one) == contents(other)
            assert (await pull(one, offers(other))).clean

    asyncio.run(doing())


@patient
@given(before=STEPS, mine=STEPS, theirs=STEPS)
def test_a_store_whose_word_counts_for_nothing_becomes_as_the_other(
    before: list[Step], mine: list[Step], theirs: list[Step]
) -> None:
    async def doing() -> None:
        clock = ManualClock()
        with stores(2, clock) as (one, other):
            for step in before:
                await act(other, step)
            await pull(one, offers(other))
            own = [step for step in mine if step[0] != "tag"]  # of tags the last holds, whoever's they are
            for store, steps in ((one, own), (other, theirs)):
                for step in steps:
                    clock.advance(1)
                    await act(store, step)
            clock.advance(4000)  # all removals are forgotten
            await other.compactor.prune_tombstones()
            dropped: list[Any] = []

            async def drop(names: list[HeldName]) -> None:
                dropped.append(await one.inventory.drop_unowned(names))

            await pull(one, offers(other), drop=drop, standing=0)
            await one.compactor.prune_tombstones()
            await pull(one, offers(other), drop=drop, standing=0)
            theirs_now = contents(other)
            assert {name: found for name, found in contents(one).items() if name in theirs_now} == theirs_now
            # what it removed itself and the other kept comes back only once its own graves are forgotten
            assert set(contents(one)) == set(theirs_now)

    asyncio.run(doing())


class BreakingOff(SyncSource):
    """A holder whose answers end after so many bytes."""

    def __init__(self, store: Store, after: int) -> None:
        super().__init__(store, lambda bucket: 2)
        self._after = after

    async def fetch_frames(self, wanted: FetchRequest) -> AsyncGenerator[bytes, None]:
        async for piece in super().fetch_frames(wanted):
            if len(piece) > self._after:
                yield piece[: self._after]
                raise SyncPeerLostError("cut")
            self._after -= len(piece)
            yield piece


@pytest.mark.parametrize("after", [0, 3, 100, 5_000, 200_000, 300_000])
def test_a_holder_that_breaks_off_costs_only_another_comparison(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("anti_entropy", "fetch_windows"):
        monkeypatch.setattr(f"meshd.cluster.rebalance.{module}.LARGE", 100_000)
    monkeypatch.setattr("meshd.cluster.rebalance.sync_source._SMALL", 100_000)

    async def doing() -> None:
        clock = ManualClock()
        with stores(2, clock) as (one, other):
            for number in range(20):
                await put_object(other, f"k{number}", bytes(number * 100))
            await put_object(other, "large", b"l" * LARGE)
            tally = await pull(one, BreakingOff(other, after))
            assert tally.failed > 0
            assert (await pull(one, offers(other))).failed == 0
            assert contents(one) == contents(other)

    asyncio.run(doing())


def spoil(place: Location, byte: bytes) -> None:
    with Path(place.path).open("r+b") as file:
        file.seek(place.offset)
        file.write(byte)


class Crumbling(SyncSource):
    """Every answer ends in the first object's bytes."""

    async def fetch_frames(self, wanted: FetchRequest) -> AsyncGenerator[bytes, None]:
        whole = b"".join([piece async for piece in super().fetch_frames(wanted)])
        yield whole[:-1]


def test_a_holder_that_breaks_off_again_and_again_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set aside for bytes that did not come is given back: or all that is fetched later waits."""
    monkeypatch.setattr("meshd.cluster.rebalance.fetch_windows.WINDOW_ITEMS", 1)
    monkeypatch.setattr("meshd.cluster.rebalance.anti_entropy._IN_FLIGHT_BYTES", 200_000)

    async def doing() -> None:
        clock = ManualClock()
        with stores(2, clock) as (one, other):
            for number in range(12):
                await put_object(other, str(number), bytes(10_000))
            async with asyncio.timeout(WAIT_TIMEOUT):
                tally = await pull(one, Crumbling(other, lambda bucket: 2))
            assert (tally.failed, tally.entered) == (12, 0)
            assert (await pull(one, offers(other))).entered == 12

    asyncio.run(doing())


def test_damaged_bytes_are_not_passed_on() -> None:
    async def doing() -> None:
        told: list[bytes] = []
        with stores(2, ManualClock()) as (one, other):
            sound = await put_object(other, "sound", b"s" * 1000)
            record = await put_object(other, "bad", b"b" * 1000)
            place = other.locate(record)[0]
            spoil(place, b"x")
            source = SyncSource(other, lambda bucket: 2, lambda name, stamp: told.append(name))
            tally = await pull(one, source)
            assert (tally.lost, tally.entered) == (1, 1)
            assert [key for key, _ in contents(one)] == ["sound"]
            assert one.get("b", "sound") is not None
            assert sound.etag
            assert told == [b"b\0bad"]
            spoil(place, b"b")  # for the check at the end

    asyncio.run(doing())
