"""Which indexes of files go: those whose file no snapshot pins, after nobody read them for long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.documents.garbage_collector import SAFE_DAYS, IndexCollector, etag_of
from meshd.documents.inventory import UsageFile
from meshd.telemetry import metrics
from meshwire.dataset.fields import parse_fields
from tests.support.manual_clock import ManualClock
from tests.support.paged_snapshots import MemoryPages
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86_400.0
CHOICE = "0" * 31 + "a"


def snapshot(etag: str) -> bytes:
    text = b"one\ntwo\n"
    return (
        MemoryPages()
        .build([("v1/a.txt", etag, text)], "s3://b/v1", parse_fields({"t": "txt"}))
        .snapshot.to_bytes()
    )


@pytest.mark.parametrize(
    ("key", "etag"),
    [
        (f"lines/{'a' * 32}-17", "a" * 32),
        (f"lines/{'a' * 32}-17.gz", "a" * 32),
        (f"lines/{'a' * 32}-3-17", f"{'a' * 32}-3"),  # of an upload in parts
        (f"tfrecords/{'a' * 32}-17.zst-{CHOICE}", "a" * 32),
        (f"pages/{'a' * 32}-17.gz-{CHOICE}", "a" * 32),
        (f"mds/{'a' * 32}-17-{CHOICE}", "a" * 32),
    ],
)
def test_the_file_of_an_index(key: str, etag: str) -> None:
    assert etag_of(key) == etag


def test_what_no_snapshot_pins_and_nobody_reads_goes(tmp_path: Path) -> None:
    clock = ManualClock()
    store, uses = MemoryStore(clock), UsageFile(tmp_path / "uses", clock)
    catalog, keeper = DocumentStore(store, uses=uses), IndexCollector(store, uses, clock)
    names = [f"lines/pinned-8-{CHOICE}", "lines/read-8", f"tfrecords/old-9-{CHOICE}", f"mds/old-9-{CHOICE}"]
    collected = metrics.documents_collected.labels("mds")
    before = collected._value.get()

    def kept() -> set[str]:
        return {key for key, _ in store.list(RESERVED_BUCKET).entries if not key.startswith("snapshots/")}

    async def run() -> None:
        for name in names:
            await catalog.write_document(name, b"index")
        await catalog.write_document("archives/x", b"another's")
        await catalog.write_document("snapshots/1", snapshot("pinned"))
        clock.advance((SAFE_DAYS - 1) * DAY)
        assert await keeper.sweep() == 0
        assert catalog.read_document("lines/read-8") == b"index"
        clock.advance(2 * DAY)
        assert await keeper.sweep() == 2
        assert kept() == {*names[:2], "archives/x"}
        await store.delete(RESERVED_BUCKET, "snapshots/1")
        assert await keeper.sweep() == 1
        clock.advance(SAFE_DAYS * DAY)
        await catalog.write_document("snapshots/2", b"damaged")
        assert await keeper.sweep() == 0  # in doubt
        await store.delete(RESERVED_BUCKET, "snapshots/2")
        assert await keeper.sweep() == 1
        assert kept() == {"archives/x"}

    asyncio.run(run())
    uses.close()
    assert collected._value.get() - before == 1
