"""Token files, `NAME.bin` beside its index `NAME.idx`, and their pages: a sample for each sequence.

Law: an index that contradicts its token file is refused by name. A page depends on both files; snapshots have
the hash of the index's ETag and size.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.core.api_errors import BatchError
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.record_index import RecordIndex, write_record_page
from meshwire.formats.token_index import (
    INDEX_SUFFIX,
    MAX_TOKEN_INDEX,
    TOKENS_SUFFIX,
    TokenIndexError,
    parse_token_index,
)
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.paged_snapshot import PageParts

COLUMN: Final = "tokens"
"""The only part of a sample."""


def token_files(listing: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the token files and the indexes of a listing."""
    return [entry for entry in listing if entry[0].endswith((INDEX_SUFFIX, TOKENS_SUFFIX))]


class TokenSources:
    """Indexes token files, for a worker."""

    def __init__(self, objects: RemoteObjects, capacity: SnapshotCapacity) -> None:
        self._objects, self._capacity = objects, capacity

    def find_files(
        self, listing: Sequence[tuple[str, Record]], source: Source, fields: Mapping[str, FieldSpec]
    ) -> list[tuple[str, Record, str]]:
        """Return key and record of each token file, and the hash of its index.

        Raises PlanError, EmptySnapshotError; BatchError BadSample.
        """
        for name, spec in fields.items():
            if spec.column is not None and spec.column != COLUMN:
                raise PlanError(f"fields.{name}", f'a token file has only the column "{COLUMN}"')
        records = dict(listing)
        keys = sorted(key for key in records if key.endswith(INDEX_SUFFIX))
        if not keys:
            raise EmptySnapshotError(
                "source",
                f"there is no {INDEX_SUFFIX} file in {source}; `mesh tokenize` writes token files with them",
            )
        files = []
        for key in keys:
            data = key.removesuffix(INDEX_SUFFIX) + TOKENS_SUFFIX
            if data not in records:
                raise _bad_index(source.bucket, key, f"there is no {data} beside it")
            files.append((data, records[data], _index_hash(records[key])))
        return files

    async def make_page(self, bucket: str, key: str, record: Record, parts: PageParts) -> bytes:
        """Return the page of a token file. Raises BatchError BadSample, TooLarge, and SnapshotChanged if its
        index was replaced."""
        name = key.removesuffix(TOKENS_SUFFIX) + INDEX_SUFFIX
        held = await self._objects.find(bucket, name)
        if held is None or _index_hash(held) != parts.beside:
            raise BatchError("SnapshotChanged", f"s3://{bucket}/{name} was replaced or deleted")
        index = await self._index(bucket, name, held, record.size)
        self._capacity.require_room(index.numbers.size, 1, f"s3://{bucket}/{key}")
        return await asyncio.to_thread(write_record_page, index, parts)

    async def _index(self, bucket: str, key: str, record: Record, token_bytes: int) -> RecordIndex:
        if record.size > MAX_TOKEN_INDEX:
            raise _bad_index(bucket, key, f"it has {record.size} bytes; at most {MAX_TOKEN_INDEX} are read")
        document = await self._objects.read_range(bucket, key, record.etag, 0, record.size)
        try:
            found = await asyncio.to_thread(parse_token_index, document, token_bytes)
        except TokenIndexError as error:
            raise _bad_index(bucket, key, str(error)) from error
        places = {COLUMN: (found.offsets, found.lengths * np.dtype(found.dtype).itemsize)}
        numbers, kinds = np.arange(found.lengths.size, dtype=np.int64), {COLUMN: found.dtype}
        return RecordIndex(numbers, places, kinds, told=kinds)


def _index_hash(index: Record) -> str:
    return hashlib.sha256(f"{index.etag}-{index.size}".encode()).hexdigest()[:32]


def _bad_index(bucket: str, key: str, reason: str) -> BatchError:
    url = f"s3://{bucket}/{key}"
    return BatchError(
        "BadSample",
        f"{url} is not a token index: {reason}",
        help="upload the token file and its index again, the index last",
        detail={"url": url},
    )
