"""Notes of archives that came in: worked off once each, whatever happens between; what is orphaned goes."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest

from meshd.core.document_store import RESERVED_BUCKET
from meshd.datasets.archives.archive_service import (
    COPIES_PREFIX,
    INDEXES_PREFIX,
    NOTES_PREFIX,
    REFUSALS_PREFIX,
    ArchiveService,
    LocalArchives,
)
from meshd.datasets.archives.background_indexer import BackgroundIndexer, IndexQueue
from meshd.store.records import Meta
from tests.support.archive_files import archive_of
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = {"a/1.jpg": bytes(5000), "a/1.cls": b"7"}


class Node:
    """A store, who notes, and who works the notes off."""

    def __init__(self) -> None:
        self.clock = ManualClock(10**18)
        self.store = MemoryStore(self.clock)
        self.ingest = IndexQueue(self.store)
        self.room: int | None = 1 << 20
        self.archives = ArchiveService(
            LocalArchives(self.store, list[str]().append), single_node_objects(self.store)
        )
        self.indexer = self.another()

    def another(self) -> BackgroundIndexer:
        archives = ArchiveService(
            LocalArchives(self.store, list[str]().append), single_node_objects(self.store)
        )
        return BackgroundIndexer(self.store, archives, lambda: ["b"], lambda: self.room, self.clock)

    async def put(self, key: str, data: bytes) -> None:
        writer = self.store.writer("b", key, size=len(data))
        await writer.write(data)
        record = await writer.commit(Meta(hashlib.md5(data).hexdigest()))
        if (note := self.ingest.enqueue("b", key, record)) is not None:
            await note

    def kept(self, prefix: str) -> list[str]:
        return [key for key, _ in self.store.list(RESERVED_BUCKET, prefix=prefix).entries]

    def indexes(self) -> list[str]:
        kinds = [
            key.rsplit(".", 1)[1]
            for key in self.kept(INDEXES_PREFIX)
            if not key.startswith((NOTES_PREFIX, REFUSALS_PREFIX))
        ]
        return sorted(kinds)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.store.close()


def test_archives_are_indexed_once_and_other_objects_left_alone(node: Node) -> None:
    async def look() -> None:
        for kind in ("tar", "tgz", "zip"):
            await node.put(f"x.{kind}", archive_of(kind, FILES))
        await node.put("a.jpg", b"x")
        await node.put("broken.tgz", b"broken")
        assert len(node.kept(NOTES_PREFIX)) == 4
        node.room = None  # not measured yet
        assert await node.indexer.index_queued() == 0
        node.room = 1 << 20
        assert await node.indexer.index_queued() == 4
        assert node.kept(NOTES_PREFIX) == []
        assert node.indexes() == ["tar", "tgz", "zip"]
        assert len(node.kept(REFUSALS_PREFIX)) == 1
        assert len(node.kept(COPIES_PREFIX)) == 2
        assert await node.indexer.index_queued() == 0

    asyncio.run(look())


def test_notes_outlive_the_process(node: Node) -> None:
    async def look() -> None:
        await node.put("x.tar", archive_of("tar", FILES))
        await node.indexer.index_queued()
        await node.put("y.tar", archive_of("tar", FILES | {"more": b""}))
        assert await node.another().index_queued() == 1
        assert node.indexes() == ["tar", "tar"]

    asyncio.run(look())


def test_a_note_left_while_it_is_worked_off_stays(node: Node) -> None:
    async def look() -> None:
        await node.put("x.tar", archive_of("tar", FILES))
        found = node.archives.get_index

        async def index(bucket: str, key: str, *rest: object, **more: object) -> object:
            if len(node.kept(NOTES_PREFIX)) == 1:
                await node.put("x.tar", archive_of("tar", FILES | {"more": b""}))
            return await found(bucket, key, *rest, **more)  # type: ignore[arg-type]

        node.archives.get_index = index  # type: ignore[method-assign, assignment]
        worker = BackgroundIndexer(node.store, node.archives, lambda: ["b"], lambda: 0, node.clock)
        await worker.index_queued()
        await node.another().index_queued()
        assert node.kept(NOTES_PREFIX) == []
        assert node.indexes() == ["tar", "tar"]

    asyncio.run(look())


def test_copies_are_made_ahead_only_where_room_is_free(node: Node) -> None:
    async def look() -> None:
        for number in range(4):
            await node.put(f"{number}.tgz", archive_of("tgz", {"a": bytes([number]) * 200_000}))
        node.room = 450_000
        assert await node.indexer.index_queued() == 4
        assert node.indexes() == ["tgz"] * 4
        assert len(node.kept(COPIES_PREFIX)) == 2

    asyncio.run(look())


def test_what_no_object_has_any_more_goes(node: Node) -> None:
    async def look() -> None:
        for kind in ("tar", "tgz"):
            await node.put(f"x.{kind}", archive_of(kind, FILES))
            await node.put(f"y.{kind}", archive_of(kind, FILES | {"more": b""}))
        await node.put("bad.zip", b"bad")
        await node.indexer.index_queued()
        for key in ("x.tar", "x.tgz", "bad.zip"):
            await node.store.delete("b", key)
        record = node.store.get("b", "y.tgz")
        assert record is not None
        note = node.ingest.enqueue("b", "y.tgz", record)
        assert note is not None
        await note
        assert await node.indexer.remove_orphans() == 0  # too young
        node.clock.advance(2 * 3600)
        assert await node.indexer.remove_orphans() == 4
        assert node.indexes() == ["tar", "tgz"]
        assert (
            len(node.kept(COPIES_PREFIX)),
            len(node.kept(REFUSALS_PREFIX)),
            len(node.kept(NOTES_PREFIX)),
        ) == (1, 0, 1)

    asyncio.run(look())
