"""Taking out of the index what this store need not hold: other nodes own it, or it is known to be old.

Law: no removal of an object: nothing is remembered of it, and nobody is told to remove theirs. A rebuild
from the data files may bring it back until compaction has been there; comparing finds it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.store.intents import Intent, used_extents
from meshd.store.quarantine import discharge
from meshd.store.uploadintents import release_upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.inventory import Held
    from meshd.store.works import Work


class DropHeld(Intent):
    """Exactly these versions and uploads; how many were there."""

    exclusive = True

    def __init__(self, names: Sequence[Held]) -> None:
        self.names = names

    def apply(self, work: Work, txn: Any) -> int:
        return sum(self._drop(work, txn, held) for held in self.names)

    @staticmethod
    def _drop(work: Work, txn: Any, held: Held) -> int:
        versions, dropped = work.index.versions, 0
        for told in held.versions:
            record = versions.at(txn, held.name, told.stamp)
            if record is not None and record.version == told.version:
                work.release(used_extents(record))
                versions.remove(txn, held.name, record)
                discharge(work.index, txn, held.name, record.stamp)
                dropped += 1
        for each in held.uploads:
            upload = work.index.get_upload(txn, held.bucket, held.key, each.upload_id)
            if upload is not None:
                release_upload(work, txn, upload)
                dropped += 1
        return dropped


class Fence(Intent):
    """Nothing but its epoch: from now on no process of the node decides by an earlier map (`epochs`)."""

    exclusive = True


class Stand(Intent):
    """Remembers up to which stamp this store has learnt of everything. A rebuilt index knows of none."""

    exclusive = True

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp

    def apply(self, work: Work, txn: Any) -> None:
        work.index.put_meta(txn, "standing", self.stamp)
