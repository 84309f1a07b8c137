"""Documents of any size: how they are written."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from typing import Any

import pytest

from meshd.core import document_store
from meshd.core.document_store import MAPPED_BYTES, RESERVED_BUCKET, DocumentStore
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore


@pytest.mark.parametrize(("size", "on_loop"), [(MAPPED_BYTES - 1, True), (MAPPED_BYTES, False)])
def test_a_large_document_is_hashed_off_the_event_loop(
    size: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, threads, etag_of = MemoryStore(ManualClock()), list[Any](), document_store._etag_of

    def noted(document: bytes) -> str:
        threads.append(threading.current_thread())
        return etag_of(document)

    monkeypatch.setattr(document_store, "_etag_of", noted)
    document = bytes(size)
    asyncio.run(DocumentStore(store).write_document("plans/a", document))
    record = store.get(RESERVED_BUCKET, "plans/a")
    assert record is not None
    assert (record.size, record.etag) == (size, hashlib.md5(document, usedforsecurity=False).hexdigest())
    assert [thread is threading.main_thread() for thread in threads] == [on_loop]
