"""Files that take long to index: who asks is told how far it is, and finds it done later."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import AsyncMock

import pytest

from meshd.core.api_errors import BatchError
from meshd.core.document_store import DocumentStore
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.datasets.service import DatasetService
from meshd.store.records import Meta
from meshd.util.async_tasks import LongRunningCalls
from meshwire.dataset.fields import Source, parse_fields
from tests.support.archive_files import tar_of
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects
from tests.support.tf_example_writer import Int64List, example, record

if TYPE_CHECKING:
    from meshd.store.records import Record
    from meshwire.dataset.paged_snapshot import PageParts

FIELDS = parse_fields({"x": {"feature": "x"}})


async def put(store: MemoryStore, key: str, data: bytes) -> tuple[str, Record]:
    writer = store.writer("b", key, size=len(data))
    await writer.write(data)
    return key, await writer.commit(Meta(hashlib.md5(data).hexdigest()))


def test_what_takes_long_goes_on_and_is_told() -> None:
    asyncio.run(_told())


async def _told() -> None:
    store = MemoryStore(ManualClock())
    listing = [
        await put(store, f"{part}.tfrecord", record(example({"x": Int64List([part])}))) for part in range(4)
    ]
    archives = ArchiveService(LocalArchives(store, list[str]().append), single_node_objects(store))
    service = DatasetService(
        store,
        DocumentStore(store),
        cast("Any", None),
        archives,
        single_node_objects(store),
        cast("Any", None),
    )
    service._long = LongRunningCalls("test", max_wait=0.05)
    begun, free, waiting = asyncio.Event(), asyncio.Event(), set[str]()
    pages = cast("Any", service.pages.makers["tfrecord"])
    read = pages.read_page

    async def slow(bucket: str, key: str, found: Record, parts: PageParts, *, again: bool) -> Any:
        if key in ("2.tfrecord", "3.tfrecord"):
            waiting.add(key)
            if len(waiting) == 2:  # so that the others are done
                begun.set()
            await free.wait()
        return await read(bucket, key, found, parts, again=again)

    pages.read_page = slow
    source = Source("b", "")
    with pytest.raises(BatchError, match=r"files of s3://b/ are being indexed: \d+% done") as told:
        await service._patiently(listing, source, "tfrecord", FIELDS)
    assert (told.value.code, told.value.retry_after) == ("Busy", 1)
    assert 0 <= told.value.detail["progress"] < 1
    await begun.wait()
    with pytest.raises(BatchError, match="50% done"):
        await service._patiently(listing, source, "tfrecord", FIELDS)
    free.set()
    service._long._max_wait = 30.0
    await service._patiently(listing, source, "tfrecord", FIELDS)
    assert (await service._build_from_objects(listing, source, "tfrecord", FIELDS)).snapshot.samples == 4


def test_archives_take_as_long_as_they_take() -> None:
    asyncio.run(_archives())


async def _archives() -> None:
    store = MemoryStore(ManualClock())
    listing = [await put(store, f"{part}.tar", tar_of({"x.txt": b"%d" % part})) for part in range(4)]
    archives = ArchiveService(LocalArchives(store, list[str]().append), single_node_objects(store))
    readers = cast("Any", SimpleNamespace(require_keys=AsyncMock()))
    service = DatasetService(
        store, DocumentStore(store), readers, archives, single_node_objects(store), cast("Any", None)
    )
    service._long = LongRunningCalls("test", max_wait=0.05)
    begun, free, index, waiting = asyncio.Event(), asyncio.Event(), archives.get_index, set[str]()

    async def slow(bucket: str, key: str, found: Record) -> Any:
        if key in ("2.tar", "3.tar"):
            waiting.add(key)
            if len(waiting) == 2:  # so that the others are done
                begun.set()
            await free.wait()
        return await index(bucket, key, found)

    archives.get_index = slow  # type: ignore[method-assign, assignment]
    source, fields = Source("b", ""), parse_fields({"text": {"ext": ["txt"]}})
    with pytest.raises(BatchError, match=r"files of s3://b/ are being indexed: \d+% done"):
        await service._build(listing, source, "auto", fields)
    await begun.wait()
    with pytest.raises(BatchError, match="50% done") as told:
        await service._build(listing, source, "auto", fields)
    assert told.value.detail == {"progress": 0.5, "shards": {"done": 2, "all": 4}}
    free.set()
    service._long._max_wait = 30.0
    assert (await service._build(listing, source, "auto", fields)).snapshot.samples == len(listing)
