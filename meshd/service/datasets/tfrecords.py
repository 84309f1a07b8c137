"""Indexes of files of TFRecords: made once a content and choice of features, kept in the reserved bucket.

Law: a file is read in pieces, whatever its size; one that cannot be followed is refused by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshd.kit.singleflight import SingleFlight
from meshd.service.datasets.lines import pieces_of
from meshd.service.datasets.unpacking import content_name, unpacked
from meshd.service.remote.wire import FarRecord
from meshwire.columns import ColumnError
from meshwire.recordindexes import RecordIndex
from meshwire.tfrecordsources import TfrecordError, index_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.assembly.catalog import Catalog
    from meshd.assembly.sources import PlainArchives
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record


class Tfrecords:
    """One a worker."""

    def __init__(
        self, store: ObjectStore, catalog: Catalog, archives: PlainArchives, objects: RemoteObjects
    ) -> None:
        self._store, self._catalog, self._archives, self._objects = store, catalog, archives, objects
        self._indexing: SingleFlight[str, RecordIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<Tfrecords, {len(self._indexing)} files being indexed>"

    async def index(self, bucket: str, key: str, record: Record, features: Sequence[str]) -> RecordIndex:
        """Where these features of a file's records lie. Raises BatchError BadSample."""
        wanted = sorted(set(features))
        digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:32]
        name = f"tfrecords/{content_name(key, record)}-{digest}"
        document = self._catalog.read(name)
        if document is not None:
            try:
                return RecordIndex.from_bytes(document)
            except ColumnError:  # written by another version: made anew below
                pass
        index, _ = await self._indexing.run(name, lambda: self._made(name, bucket, key, record, wanted))
        return index

    async def _made(
        self, name: str, bucket: str, key: str, record: Record, wanted: Sequence[str]
    ) -> RecordIndex:
        here: Record | None = record
        if isinstance(record, FarRecord):
            await self._objects.bring(bucket, key, record)
            here = self._objects.here(bucket, key, record.etag)
        if here is not None:
            return await self._index(name, bucket, key, here, wanted)
        document = await self._objects.archive_index(bucket, key, record, features=wanted)
        await self._catalog.write(name, document)
        return RecordIndex.from_bytes(document)

    async def _index(
        self, name: str, bucket: str, key: str, record: Record, wanted: Sequence[str]
    ) -> RecordIndex:
        plain, url = await unpacked(self._archives, bucket, key, record), f"s3://{bucket}/{key}"
        try:
            with self._store.reading(plain, 0, plain.size) as spans:
                index = await asyncio.to_thread(lambda: index_records(pieces_of(spans), wanted))
        except TfrecordError as error:
            raise BatchError(
                "BadSample",
                f"{url} is no file of TFRecords: {error}",
                help="write it again, or leave it out of the source's folder",
                detail={"url": url},
            ) from error
        index = replace(index, size=plain.size)
        await self._catalog.write(name, index.to_bytes())
        return index
