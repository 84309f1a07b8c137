"""Many small objects in one mutation: all of them are committed, or none.

Law: every member is staged before the index changes, and entering a put without conditions raises nothing
that leaves the transaction half changed; so the objects share the fate of their commit group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from awscrt import checksums

from meshd.store.engine.mutations import Mutation, PutObject
from meshd.store.engine.write_batch import Payload
from meshd.store.errors import CorruptExtentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.records import NewObject, Record
    from meshwire.s3.bucket_settings import Versioning


class PutMany(Mutation):
    """Stores new versions of several objects, of all of them or of none."""

    needs_free_space = True

    def __init__(self, bucket: str, objects: Sequence[NewObject], versioning: Versioning) -> None:
        self.bucket = bucket
        self.puts = [_put_of(bucket, new, versioning) for new in objects]
        self.data_bytes = sum(put.data_bytes for put in self.puts)

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        try:
            for put in self.puts:
                put.write_data(batch, txn)
        except (StoreError, OSError):
            self.withdraw(batch)
            raise

    def update_index(self, batch: WriteBatch, txn: Any) -> list[Record]:
        return [put.update_index(batch, txn) for put in self.puts]

    def withdraw(self, batch: WriteBatch) -> None:
        for put in self.puts:
            put.withdraw(batch)


def _put_of(bucket: str, new: NewObject, versioning: Versioning) -> PutObject:
    """Raises CorruptExtentError."""
    if checksums.crc32c(new.data) != new.crc32c:
        raise CorruptExtentError(f"the bytes of {new.key} were corrupted in transit; send them again")
    payload = Payload(len(new.data), new.crc32c, (new.data,))
    return PutObject(bucket, new.key, new.meta, payload, None, versioning)
