"""When a shard view's layout is made anew, and when a replaced member only takes its place."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.records import Meta
from meshd.views.shards.reader import ShardReader
from meshwire.errors import S3Error
from meshwire.s3.operations import ListObjects
from meshwire.views.shard_view import ShardsView
from meshwire.views.view_kinds import parse_view
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Record
    from meshd.views.view_kind import AssembledObject


class Counted(MemoryStore):
    """Counts pages listed and records looked up."""

    pages = looks = 0

    def list_entries(self, *args: Any, **options: Any) -> Any:
        self.pages += 1
        return super().list_entries(*args, **options)

    def get(self, bucket: str, key: str) -> Record | None:
        self.looks += 1
        return super().get(bucket, key)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Counted(self.clock)
        objects = single_node_objects(self.store)
        self.reader = ShardReader(
            self.store,
            self.clock,
            ArchiveService(LocalArchives(self.store, lambda _: None), objects),
            objects,
        )

    async def put(self, key: str, body: bytes, bucket: str = "bkt") -> None:
        writer = self.store.writer(bucket, key, size=len(body))
        await writer.write(body)
        await writer.commit(Meta(f"e{len(body)}-{body[:8].hex()}"))

    async def body(self, made: AssembledObject) -> bytes:
        found = b""
        async for spans in made.open_range(0, made.record.size).groups():
            found += b"".join(os.pread(span.fd, span.length, span.offset) for span in spans)
        return found

    async def keys(self, view: ShardsView) -> list[str]:
        return [entry.key for entry in (await self.reader.list_page(view, ListObjects("v", 2))).entries]


def shards(**fields: Any) -> ShardsView:
    view = parse_view({"kind": "shards", **fields}, "bkt")
    assert isinstance(view, ShardsView)
    return view


@pytest.fixture
def world() -> Iterator[World]:
    world = World()

    async def fill() -> None:
        for number in range(6):
            await world.put(f"{number}.txt", b"%d" % number)

    asyncio.run(fill())
    yield world
    world.store.close()


@pytest.mark.parametrize("form", ["tar", "tfrecord"])
def test_a_replaced_member_takes_its_place(world: World, form: str) -> None:
    view = shards(count=2, format=form)

    async def run() -> None:
        first, second = (await world.keys(view))[:2]
        before, pages = await world.reader.find_object(view, first), world.store.pages
        other = await world.reader.find_object(view, second)
        await world.put("1.txt", b"replaced")
        after = await world.reader.find_object(view, first)
        assert world.store.pages == pages  # nothing was listed for that
        assert b"replaced" in await world.body(after)
        assert after.record.etag != before.record.etag
        assert (await world.reader.find_object(view, second)).record.etag == other.record.etag
        assert len(await world.body(after)) == after.record.size
        with pytest.raises(S3Error, match="replaced during the read"):
            await world.body(before)

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields", [{"size": 1024}, {"sort": "size", "count": 6}, {"where": "number(txt) < 10", "count": 6}]
)
def test_where_places_depend_on_members_all_is_laid_out_anew(world: World, fields: dict[str, Any]) -> None:
    view = shards(**fields)

    async def run() -> None:
        (key,) = await world.keys(view)
        pages = world.store.pages
        await world.put("0.txt", b"99")
        body = await world.body(await world.reader.find_object(view, key))
        assert world.store.pages > pages
        names = [body[at : at + 5] for at in range(0, len(body), 512) if body[at + 1 : at + 5] == b".txt"]
        wanted = [b"1.txt", b"2.txt", b"3.txt", b"4.txt", b"5.txt"]
        if fields.get("where"):
            assert names == wanted
        else:
            assert names == ([*wanted, b"0.txt"] if "sort" in fields else [b"0.txt", *wanted])

    asyncio.run(run())


def test_a_member_that_is_gone_moves_the_others(world: World) -> None:
    view = shards(count=2)

    async def run() -> None:
        keys = await world.keys(view)
        assert len(keys) == 3
        await world.store.delete("bkt", "0.txt")
        body = await world.body(await world.reader.find_object(view, keys[0]))
        assert b"2.txt" in body

    asyncio.run(run())


def test_writes_elsewhere_cost_a_scan_and_no_layout(world: World) -> None:
    view = shards(count=6)

    async def run() -> None:
        (key,) = await world.keys(view)
        laid = await world.reader._layouts.get_layout(view)
        await world.put("x", b"x", bucket="elsewhere")
        world.clock.advance(60.0)
        looks = world.store.looks
        await world.reader.find_object(view, key)
        again = await world.reader._layouts.get_layout(view)
        assert again is not laid
        assert again.layout is laid.layout
        assert world.store.looks == looks  # the scan found all as it was
        await world.reader.find_object(view, key)
        assert world.store.looks == looks

    asyncio.run(run())
