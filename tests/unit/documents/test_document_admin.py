"""Documents that an operator removes, in a mesh whose nodes hear of it at different times."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

from meshd.auth.identity import Caller, Identity
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.documents.admin import DocumentAdmin
from meshd.documents.inventory import DocumentInventory, UsageFile
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.documents.inventory import PeerInventories

_PLAN = f"plans/{1:064x}"
_TEXT = json.dumps({"bucket": "photos", "snapshot": f"{2:064x}", "samples": 1, "spec": {}}).encode()


class _Anything:
    def require_prefix(self, *_: object) -> None:
        return


async def _nobody(_: str) -> PeerInventories:
    return [], []


def test_a_plan_made_at_another_node_after_its_removal_stays(tmp_path: Path) -> None:
    async def run() -> None:
        clock = ManualClock()
        control = LaggingControl(clock)  # that of the other node, which hears late of what this one writes
        store, uses = MemoryStore(clock), UsageFile(tmp_path / "uses", clock)
        deleted, elsewhere = DeletedDocumentTable(control.engine), DeletedDocumentTable(control)
        documents = DocumentStore(store, uses=uses, removals=deleted)
        other = DocumentStore(MemoryStore(clock), removals=elsewhere)

        async def announce() -> None:
            control.catch_up()

        async def recorded(*_: object) -> bool:
            return True

        inventory = DocumentInventory(store, uses, _nobody)
        access = cast("Any", _Anything())
        admin = DocumentAdmin(
            store, documents, inventory, deleted, access, list, clock, 30, recorded, announce
        )
        for node in (documents, other):
            await node.put_shared(_PLAN, _TEXT)
        root = Caller(Identity("root", "root", "key", root=True))
        await admin.remove_document(root, "plans", f"{1:064x}", force=True)
        assert documents.is_gone(_PLAN)
        await other.put_shared(_PLAN, _TEXT)
        control.catch_up()
        assert not other.is_gone(_PLAN)
        assert not documents.is_gone(_PLAN)
        assert store.get(RESERVED_BUCKET, _PLAN) is not None
        uses.close()

    asyncio.run(run())
