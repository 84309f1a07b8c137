"""First rows of one table, Parquet or Arrow IPC, for a person who looks at the object.

Law: a restricted process reads the file, and its answer is checked; the caller must be allowed to read the
object. Nothing is stored.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.peer_reads.remote_objects import BlockingObjects
from meshd.transform.parquet.client import (
    ParquetError,
    ParquetInterruptedError,
    ParquetUnsupportedError,
    parquet_rows,
)

if TYPE_CHECKING:
    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record

_MOST_PIECES: Final = 4  # of 1 MiB: more would not be a preview
_MEMORY: Final = 1 << 30
_SECONDS: Final = 20.0


class _Preview(msgspec.Struct, frozen=True):
    columns: list[tuple[str, str]]
    hidden: int
    rows: list[list[str | None]]


class TablePreviews:
    """Reads the beginning of tables, for a worker."""

    def __init__(self, access: DatasetAccess, objects: RemoteObjects) -> None:
        self._access, self._objects = access, objects

    async def preview(self, caller: Caller, bucket: str, key: str) -> dict[str, Any]:
        """Return `columns` ([name, type] each), `hidden` (columns beyond these) and `rows` (at most 50 lists
        of short texts, null for a null).

        Raises BatchError AccessDenied, NoSuchBucket, NoSuchKey, BadSample, NotImplemented, Busy.
        """
        url = f"s3://{bucket}/{key}"[:300]
        rights = self._access.bulk_access(caller, bucket)
        if not rights.allows_key(key):
            raise BatchError("AccessDenied", f"this key may not read {url}")
        record = await self._objects.find(bucket, key)
        if record is None:
            code = self._access.missing_key_code(caller, bucket, key)
            raise BatchError(code, f"no object {url}")
        blocking = BlockingObjects(self._objects)
        found = await asyncio.to_thread(_read, blocking, bucket, key, record)
        answer: dict[str, Any] = msgspec.to_builtins(found)
        return answer


def _read(objects: BlockingObjects, bucket: str, key: str, record: Record) -> _Preview:
    def read(offset: int, length: int) -> bytes:
        return objects.read_range(bucket, key, record, offset, length)

    url = f"s3://{bucket}/{key}"[:300]
    try:
        pieces = parquet_rows(read, record.size, kind="preview", memory=_MEMORY, silent=_SECONDS)
        document = b"".join(islice(pieces, _MOST_PIECES))
        return msgspec.json.decode(document, type=_Preview)
    except ParquetUnsupportedError as error:
        raise BatchError("NotImplemented", str(error)) from error
    except ParquetInterruptedError as error:
        raise busy(f"{url} cannot be read now: {error}") from error
    except (ParquetError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatchError("BadSample", f"{url} cannot be read: {error}") from error
