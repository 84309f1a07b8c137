"""Documents of any size: how they are written."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshd.core import document_store
from meshd.core.document_store import (
    CHECKED_SNAPSHOT,
    MAPPED_BYTES,
    MARK,
    RESERVED_BUCKET,
    DocumentStore,
)
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(("size", "on_loop"), [(MAPPED_BYTES - 1, True), (MAPPED_BYTES, False)])
def test_a_large_document_is_hashed_off_the_event_loop(
    size: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, threads, etag_of = MemoryStore(ManualClock()), list[Any](), document_store._etag_of

    def noted(pieces: Sequence[bytes]) -> str:
        threads.append(threading.current_thread())
        return etag_of(pieces)

    monkeypatch.setattr(document_store, "_etag_of", noted)
    document = bytes(size)
    asyncio.run(DocumentStore(store).write_document("plans/a", document))
    record = store.get(RESERVED_BUCKET, "plans/a")
    assert record is not None
    assert (record.size, record.etag) == (size, hashlib.md5(document, usedforsecurity=False).hexdigest())
    assert [thread is threading.main_thread() for thread in threads] == [on_loop]


def test_a_snapshot_may_be_given_in_pieces_and_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(ManualClock())
    pieces = [bytes([number]) * (MAPPED_BYTES >> 1) for number in range(3)]
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    monkeypatch.delattr(document_store, "_etag_of")
    views = [memoryview(piece) for piece in pieces]
    asyncio.run(DocumentStore(store).put_shared(f"snapshots/{digest}", views, mark=CHECKED_SNAPSHOT))
    record = store.get(RESERVED_BUCKET, f"snapshots/{digest}")
    assert record is not None
    assert (record.etag, record.metadata) == (digest[:32], {MARK: CHECKED_SNAPSHOT})
    assert store.read_range(record, 0, record.size) == b"".join(pieces)
