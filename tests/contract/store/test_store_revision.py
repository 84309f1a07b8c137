"""The number by which a listing is known to hold still: over restarts, and after an earlier release wrote."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

from meshd.config import StoreSettings
from meshd.store.records import RESERVED_BUCKET
from meshd.store.store import Store
from meshd.util.clock import ManualClock
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from pathlib import Path


def test_the_revision_survives_a_restart_with_documents(tmp_path: Path) -> None:
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        seen = store.revision()
        asyncio.run(put_object(store, "snapshot", b"two", bucket=RESERVED_BUCKET))
        assert store.revision() == seen
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        assert store.revision() == seen
        asyncio.run(put_object(store, "snapshot", b"three", bucket=RESERVED_BUCKET))
        assert store.revision() == seen
        asyncio.run(put_object(store, "k", b"one"))
        assert store.revision() > seen


def test_what_an_earlier_release_wrote_counts(tmp_path: Path) -> None:
    """It knows `last_stamp` alone, so the note of documents must not hide its writes."""
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        asyncio.run(put_object(store, "snapshot", b"two", bucket=RESERVED_BUCKET))
        seen, index = store.revision(), store._index
        last = index.get_meta("last_stamp")
        with index.write_transaction() as txn:
            index.put_meta(txn, "last_stamp", last + 7)
        assert store.revision() == last + 7 > seen
        asyncio.run(put_object(store, "snapshot", b"three", bucket=RESERVED_BUCKET))
        assert store.revision() == last + 7
