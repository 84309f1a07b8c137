"""Damaged documents of a real store: which of them leave quarantine, by what other nodes have."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.config import StoreSettings
from meshd.core.api_errors import busy
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.documents.document_repairer import DocumentRepairer
from meshd.store.integrity.verification import report_damage
from meshd.store.store import Store
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

KEYS = ("plans/a", "snapshots/b", "assets/c", "lines/d", "elsewhere/e")


class Others:
    """The other nodes: `documents` that they have; `silent`: whether one of them does not answer."""

    def __init__(self, documents: dict[str, bytes], *, single: bool = False, silent: bool = False) -> None:
        self.documents, self.single_node, self.silent = documents, single, silent

    async def fetch_document(self, key: str) -> bytes | None:
        if key in self.documents or not self.silent:
            return self.documents.get(key)
        raise busy("another node may have it")

    async def replicate_document(self, key: str, document: bytes, *, again: bool = False) -> None:
        return


def damage(store: Store, key: str) -> None:
    record = store.get(RESERVED_BUCKET, key)
    assert record is not None
    extent = record.extents[0]
    with open(store._disks.path(extent.disk, extent.file), "r+b") as file:
        file.seek(extent.offset)
        file.write(b"?")
    report_damage(extent)


def body(key: str) -> bytes:
    return key.encode() * 500


async def left_in_quarantine(store: Store, others: Others) -> tuple[set[str], list[int]]:
    """Damage all documents and repair them; returns what is left, and what was counted."""
    documents, counts = DocumentStore(store, cast("Any", others)), list[int]()
    for key in KEYS:
        await documents.write_document(key, body(key))
    for key in KEYS:
        damage(store, key)
    await store.quarantine.process_damage_reports()
    assert len(store.quarantine.entries()) == len(KEYS)
    await DocumentRepairer(store, documents, cast("Any", others)).repair_quarantined(counts.append)
    for key, document in others.documents.items():
        assert documents.read_document(key) == document
    return {name.decode().partition("\0")[2] for name, *_ in store.quarantine.entries()}, counts


@pytest.mark.parametrize(
    ("others", "left"),
    [
        (Others({key: body(key) for key in ("plans/a", "snapshots/b", "assets/c")}), {"elsewhere/e"}),
        (Others({"plans/a": body("plans/a")}), {"assets/c", "elsewhere/e"}),
        (Others({}, silent=True), {"plans/a", "snapshots/b", "assets/c", "elsewhere/e"}),
        (Others({}, single=True), {"plans/a", "snapshots/b", "assets/c", "elsewhere/e"}),
    ],
    ids=["everywhere", "a-plan", "silent", "alone"],
)
def test_documents_leave_quarantine(tmp_path: Path, others: Others, left: set[str]) -> None:
    """Those that other nodes have, and those that are made again where none has them."""
    with closing(Store.open(StoreSettings.at(tmp_path), writer="w0", clock=ManualClock())) as store:
        found, counts = asyncio.run(left_in_quarantine(store, others))
        assert found == left
        assert counts == [len(KEYS) - len(left)]
        for key in set(KEYS) - left - set(others.documents):
            assert store.get(RESERVED_BUCKET, key) is None
