"""Snapshots that the SDK prepared, as a node takes them over."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import numpy as np

from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.datasets.prepared_snapshots import read_prepared
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields, parse_source
from meshwire.dataset.snapshot import PREPARED_NAME
from meshwire.frame import columns
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    import pytest

LISTING = [(f"a/{number:03}.jpg", f"etag-{number}", 100 + number) for number in range(300)]


def document() -> bytes:
    fields = parse_fields({"image": "jpg"})
    return build_from_objects(LISTING, source="s3://b/a/", fields=fields).snapshot.to_bytes()


def test_a_document_in_another_encoding_is_named_by_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name would be the hash of other bytes, and nodes would trust the mark of what they stored."""
    canonical = document()
    with monkeypatch.context() as patched:
        patched.setattr(columns, "narrow_integers", lambda values: values.astype(np.int64))
        foreign = document()
    assert foreign != canonical
    source, store = parse_source("s3://b/p/"), MemoryStore(ManualClock())
    listing: Any = [(f"p/{PREPARED_NAME}", Mock(size=len(foreign), etag="e"))]
    objects: Any = Mock(read_range=AsyncMock(return_value=foreign))
    made = asyncio.run(read_prepared(listing, source, objects, Mock())).snapshot
    asyncio.run(DocumentStore(store).add_snapshot(made))
    record = store.get(RESERVED_BUCKET, f"snapshots/{made.hash}")
    assert record is not None
    stored = store.read_range(record, 0, record.size)
    assert hashlib.sha256(stored).hexdigest() == made.hash
    assert stored == canonical
