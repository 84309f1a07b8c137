"""Snapshots of token files: `NAME.bin` beside its index `NAME.idx`, a sample for each sequence.

Law: an index that contradicts its token file is refused by name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.core.api_errors import BatchError
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.record_index import RecordIndex
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
    from meshd.util.async_tasks import CallProgress
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.formats.record_index import IndexedFile

COLUMN: Final = "tokens"
"""The only part of a sample."""


def token_files(listing: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the token files and the indexes of a listing."""
    return [entry for entry in listing if entry[0].endswith((INDEX_SUFFIX, TOKENS_SUFFIX))]


class TokenSources:
    """Indexes token files, for a worker."""

    def __init__(self, objects: RemoteObjects, capacity: SnapshotCapacity) -> None:
        self._objects, self._capacity = objects, capacity

    def __repr__(self) -> str:
        return "<TokenSources>"

    async def index_files(
        self,
        listing: Sequence[tuple[str, Record]],
        source: Source,
        fields: Mapping[str, FieldSpec],
        progress: CallProgress,
    ) -> list[IndexedFile]:
        """Return the token files and the positions of their sequences.

        Raises PlanError, EmptySnapshotError; BatchError BadSample, TooLarge.
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
        files, samples = [], 0
        for number, key in enumerate(keys):
            data = key.removesuffix(INDEX_SUFFIX) + TOKENS_SUFFIX
            if data not in records:
                raise _refused(source, key, f"there is no {data} beside it")
            index = await self._index(source, key, records[key], records[data].size)
            files.append((data, records[data].etag, records[data].size, index))
            samples += index.numbers.size
            self._capacity.require_room(samples, len(fields), source)
            progress.done = (number + 1) / len(keys)
        return files

    async def _index(self, source: Source, key: str, record: Record, token_bytes: int) -> RecordIndex:
        if record.size > MAX_TOKEN_INDEX:
            raise _refused(source, key, f"it has {record.size} bytes; at most {MAX_TOKEN_INDEX} are read")
        document = await self._objects.read_range(source.bucket, key, record.etag, 0, record.size)
        try:
            found = await asyncio.to_thread(parse_token_index, document, token_bytes)
        except TokenIndexError as error:
            raise _refused(source, key, str(error)) from error
        places = {COLUMN: (found.offsets, found.lengths * np.dtype(found.dtype).itemsize)}
        numbers, kinds = np.arange(found.lengths.size, dtype=np.int64), {COLUMN: found.dtype}
        return RecordIndex(numbers, places, kinds, told=kinds)


def _refused(source: Source, key: str, reason: str) -> BatchError:
    url = f"s3://{source.bucket}/{key}"
    return BatchError(
        "BadSample",
        f"{url} is no index of tokens: {reason}",
        help="upload the token file and its index again, the index last",
        detail={"url": url},
    )
