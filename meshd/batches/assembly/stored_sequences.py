"""Stored sequences: the rendered samples of packed plans, kept on the node and read by slices.

Law: a frame has the same bytes with and without them; what is missing or damaged is rendered instead, and
stored again in the background. They are kept and evicted with the results of views. Use on one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from meshd.batches.assembly.stored_sequence_format import (
    END_BYTES,
    ChunkError,
    SequenceSet,
    chunk_starts,
    decode_index,
    encode_chunk,
    index_span,
)
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.core.sample_locations import bytes_columns
from meshd.store.errors import ExtentGoneError, StoreError
from meshd.store.records import Meta
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.sequence_renderer import SequenceRenderer
    from meshd.batches.assembly.stored_sequence_format import ChunkIndex
    from meshd.core.plan_record import Plan
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.columns import Integers

_log = logging.getLogger("meshd.batches")
SEQUENCES_PREFIX: Final = "views/sequences/"
"""Prefix of the chunks in the reserved bucket; below the results of views, with which they are evicted."""
_SHARE_OF_RESULTS: Final = 0.5
"""Share of the space for results of views that the sequences of one plan take, at most."""
_ELEMENTS_A_BYTE: Final = 1 / 3
"""Estimated tokens a byte of text."""
_LAYOUTS: Final = 8
_OPEN: Final = 1024


class UnreadableChunkError(Exception):
    """A stored chunk cannot be read now; `gone`: its bytes have only moved."""

    def __init__(self, chunk: int, error: Exception) -> None:
        super().__init__(str(error))
        self.chunk, self.gone = chunk, isinstance(error, ExtentGoneError)


class OpenChunk(msgspec.Struct, frozen=True, eq=False):
    """A stored chunk. Reading blocks; any thread may read."""

    store: ObjectStore
    record: Record
    number: int
    first: int
    index: ChunkIndex

    def read_piece(self, field: int, sample: int, begin: int, length: int) -> npt.NDArray[Any] | None:
        """Return elements of a sample; None if it has fewer. Raises UnreadableChunkError."""
        read = partial(self.store.read_range, self.record)
        try:
            return self.index.read_piece(field, sample - self.first, begin, length, read)
        except (ChunkError, StoreError) as error:
            raise UnreadableChunkError(self.number, error) from error


class StoredSequences:
    """The stored sequences of a node, for one process.

    `note_use` records that a chunk was read; `limit`: bytes for results of views.
    """

    def __init__(self, store: ObjectStore, note_use: Callable[[str], None], limit: int) -> None:
        self._store, self._note_use, self._limit = store, note_use, limit
        self._sets: OrderedDict[tuple[str, tuple[str, ...]], SequenceSet] = OrderedDict()
        self._open: OrderedDict[str, OpenChunk] = OrderedDict()
        self._tasks = BackgroundTasks("sequences")
        self._wanted: OrderedDict[str, tuple[SequenceSet, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<StoredSequences, {len(self._open)} chunks open, {len(self._wanted)} to be stored>"

    async def describe(self, within: Plan, snapshot: Snapshot, fields: tuple[str, ...]) -> SequenceSet:
        """Return the sequences of an inner plan, whether or not any are stored."""
        key = within.hash, fields
        found = self._sets.get(key)
        if found is None:
            found = await asyncio.to_thread(self._describe_set, within, snapshot, fields)
            self._sets[key] = found
            if len(self._sets) > _LAYOUTS:
                self._sets.popitem(last=False)
        self._sets.move_to_end(key)
        return found

    def _describe_set(self, within: Plan, snapshot: Snapshot, fields: tuple[str, ...]) -> SequenceSet:
        columns = bytes_columns(snapshot)
        sizes = np.stack([columns[name].length for name in fields]).sum(axis=0, dtype=np.int64)
        named = hashlib.sha256(",".join(fields).encode()).hexdigest()[:8]
        width = max(np.dtype(within.outputs[name].dtype).itemsize for name in fields)
        estimate = int(sizes.sum()) * min(1.0, width * _ELEMENTS_A_BYTE)
        share = min(1.0, _SHARE_OF_RESULTS * self._limit / estimate) if estimate else 1.0
        return SequenceSet(
            within, fields, chunk_starts(sizes), f"{SEQUENCES_PREFIX}{within.hash}-{named}/", share
        )

    async def find(self, sequences: SequenceSet, chunks: Sequence[int]) -> dict[int, OpenChunk]:
        """Return those of these chunks that are stored intact."""
        found = {}
        for chunk in chunks:
            opened = await self._open_chunk(sequences, chunk)
            if opened is not None:
                found[chunk] = opened
        return found

    async def _open_chunk(self, sequences: SequenceSet, chunk: int) -> OpenChunk | None:
        key = sequences.key(chunk)
        record = self._store.get(RESERVED_BUCKET, key)
        if record is None or record.broken:
            self._open.pop(key, None)
            return None
        known = self._open.get(key)
        if known is None or known.record != record:
            try:
                known = await asyncio.to_thread(self._read_index, sequences, chunk, record)
            except (ChunkError, StoreError) as error:
                await self.forget(sequences, UnreadableChunkError(chunk, error))
                return None
            self._open[key] = known
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(key)
        self._note_use(key)
        return known

    def _read_index(self, sequences: SequenceSet, chunk: int, record: Record) -> OpenChunk:
        end = self._store.read_range(record, max(0, record.size - END_BYTES), min(record.size, END_BYTES))
        offset, length = index_span(end, record.size)
        document = self._store.read_range(record, offset, length)
        samples = sequences.samples_in(chunk)
        index = decode_index(document, offset, len(samples), sequences.fields)
        return OpenChunk(self._store, record, chunk, samples.start, index)

    async def forget(self, sequences: SequenceSet, error: UnreadableChunkError) -> None:
        """Close a chunk that cannot be read; a damaged one is removed, so that it is stored again."""
        key = sequences.key(error.chunk)
        self._open.pop(key, None)
        if error.gone:
            return
        _log.warning("cannot read stored sequences", extra={"key": key, "why": str(error)})
        try:
            await self._store.delete_many(RESERVED_BUCKET, [key])
        except StoreError as failure:
            _log.warning("cannot remove stored sequences", extra={"key": key, "why": str(failure)})

    async def store(
        self, sequences: SequenceSet, chunk: int, lengths: Integers, columns: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Store a chunk, if it belongs to the stored share. A disk without room leaves it out."""
        key = sequences.key(chunk)
        if not sequences.is_stored(chunk) or self._store.get(RESERVED_BUCKET, key) is not None:
            return
        data, etag = await asyncio.to_thread(_encode_chunk, lengths, columns)
        writer = self._store.writer(RESERVED_BUCKET, key, size=len(data))
        try:
            await writer.write(data)
            await writer.commit(Meta(etag))
        except StoreError as error:
            _log.warning("cannot store sequences", extra={"key": key, "why": str(error)})
        finally:
            await writer.abort()

    def store_later(self, renderer: SequenceRenderer, sequences: SequenceSet, chunks: Sequence[int]) -> None:
        """Render and store these chunks in the background, one after the other."""
        for chunk in chunks:
            if sequences.is_stored(chunk):
                self._wanted.setdefault(sequences.key(chunk), (sequences, chunk))
        if self._wanted and not len(self._tasks):
            self._tasks.spawn(self._store_wanted(renderer), "store")

    async def _store_wanted(self, renderer: SequenceRenderer) -> None:
        while self._wanted:
            key, (sequences, chunk) = next(iter(self._wanted.items()))
            try:
                lengths, columns = await renderer.render(sequences, sequences.samples_in(chunk))
                await self.store(sequences, chunk, lengths, columns)
            except BatchError as error:  # the next frame that needs the chunk asks for it again
                _log.info("cannot store sequences now", extra={"key": key, "why": str(error)})
            finally:
                self._wanted.pop(key, None)

    async def aclose(self) -> None:
        """End the background work."""
        await self._tasks.aclose()


def no_stored_sequences(store: ObjectStore) -> StoredSequences:
    """Return stored sequences that store nothing."""
    return StoredSequences(store, lambda key: None, 0)


def _encode_chunk(lengths: Integers, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[bytes, str]:
    data = encode_chunk(lengths, columns)
    return data, hashlib.md5(data, usedforsecurity=False).hexdigest()
