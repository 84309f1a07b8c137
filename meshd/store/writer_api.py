"""Interfaces of writers: ObjectWriter and ReplicaWriter receive the bytes of one object or part.

Law: a write becomes visible exactly when it is durable, at the commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from meshd.store.records import INTERNAL_WRITE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.store.records import Meta, Record, WriteContext
    from meshd.store.replica.changes import Applied, PartOf
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning

Buffer = bytes | bytearray | memoryview


class ObjectWriter(Protocol):
    """Receives the bytes of one object or part, then commits or aborts.

    A writer is used by one task at a time. A writer that is dropped without commit or abort leaks nothing.
    """

    async def write(self, data: Buffer) -> None:
        """Appends bytes. The caller may reuse `data` once this returns.

        Raises DiskFullError, DiskFailedError, SizeMismatchError.
        """
        ...

    async def write_borrowed(self, data: memoryview) -> None:
        """Appends bytes without copying them: the store may read `data` until the next `write_borrowed` or
        `commit` returns, so two alternating buffers need no copy."""
        ...

    async def commit(
        self,
        meta: Meta,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        """Makes the object visible and durable. A cancelled commit may still take effect.

        `versioning`, here and below, is the bucket's present setting: a write replaces the null version,
        except with "Enabled", where it replaces nothing. Conditions apply to the current object; a delete
        marker counts as no object. Raises ConditionFailedError, ConditionMissingError, NoSuchUploadError
        (parts), DiskFullError, DiskFailedError, SizeMismatchError, MetadataTooLargeError. After a
        StaleEpochError the caller may commit again.
        """
        ...

    def read_back(self) -> AsyncGenerator[bytes, None]:
        """Reads everything written so far from the beginning, before the commit. Nothing may be written
        afterwards. Raises DiskFailedError, CorruptExtentError."""
        ...

    async def abort(self) -> None:
        """Discards the bytes. Idempotent; does nothing after a commit."""
        ...


class ReplicaWriter(Protocol):
    """Receives the bytes of a version or part that already has its stamp. Otherwise as ObjectWriter."""

    async def write(self, data: Buffer) -> None: ...

    async def write_borrowed(self, data: memoryview) -> None: ...

    async def make_durable(self) -> None:
        """Returns when the bytes of a large object are durable. Optional; call it after the last write."""
        ...

    async def commit_at_stamp(
        self, record: Record, part: PartOf | None = None, *, context: WriteContext = INTERNAL_WRITE
    ) -> Applied:
        """Enters the version, or the part, at exactly its stamp.

        A version that is already known, an upload that has ended and a null version under a newer one are
        left out. The store decides where the bytes are stored: it ignores extents, `moves` and manifest of
        `record`. Raises SizeMismatchError, NoSuchUploadError (for a part whose upload has ended),
        DiskFullError, DiskFailedError, MetadataTooLargeError.
        """
        ...

    async def abort(self) -> None: ...
