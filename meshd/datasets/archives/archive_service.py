"""Archives: the index, the decompressed copy, member lookup and one streaming pass, here and on other nodes.

Law: index and copy are named by the ETag and size of the source, so they hold for that content alone. A
damaged or hostile archive is refused by name, and the refusal is stored. Invariant: while an archive
with compressed members is read, its copy exists; the copy may be evicted at any time and is recreated on
demand.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore, find_intact, unless_intact
from meshd.core.peer_messages import RemoteRecord
from meshd.datasets.archives.reader import (
    SCATTERED,
    DecompressedSizeError,
    decompressed_pieces,
    index_compressed_tar,
    index_tar_archive,
    index_zip_members,
    inflate_members,
    stream_files,
    zip_files,
)
from meshd.store.errors import ConditionFailedError
from meshd.store.integrity.verification import damage_context, verify_extents
from meshd.store.records import Meta
from meshd.telemetry import metrics
from meshd.transform.parquet.client import ParquetInterruptedError, ParquetUnsupportedError
from meshd.util import failpoints
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.archive_index import ArchiveIndex
from meshwire.dataset.archive_paths import (
    TABLE_COPY_UNIT,
    ArchiveError,
    archive_kind,
    copy_kind,
    is_table,
    pinned_table,
    slices_of,
)
from meshwire.formats.tar import TarError
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from meshd.datasets.archives.reader import StreamedFile
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.archive_paths import ArchiveKind, CopyKind

INDEXES_PREFIX: Final = "archives/"
REFUSALS_PREFIX: Final = "archives/bad/"
NOTES_PREFIX: Final = "archives/notes/"
COPIES_PREFIX: Final = "views/archives/"
"""The copies are among the results of views, whose space and eviction they share."""
RATIO: Final = 50
"""The default of `--archive-ratio`: the largest ratio of an archive's decompressed size to its own."""
_MIN_LIMIT: Final = 64 << 20
"""The decompressed size that every archive may have, however small it is."""
_ROWS_RATIO: Final = 200
"""`RATIO` for the rows of a Parquet file, whose values are encoded and often repeat."""
_READ_AS_ARCHIVE: Final = "read as an archive"
_VERB: Final = {"gz": "unpacked", "zst": "unpacked", "parquet": "read as Parquet", "table": "read as a table"}
_CACHED_FILES: Final = 500_000  # member names that a process caches, over all archives
_SLOTS: Final = 2  # archives that one process decompresses or indexes at a time
_MAX_WAITING: Final = 64  # further archives that may wait; above that, callers get Busy


class MemberLocation(NamedTuple):
    """`size` bytes at `offset` of an object."""

    record: Record
    offset: int
    size: int


class LocalArchives:
    """Indexes archives that this node has, and makes decompressed copies. One per process.

    `room`: bytes that results of views may take; a copy takes at most half of that. `ratio`: the largest
    ratio of an archive's decompressed size to its own. `note_use` is called with the key of each copy that is
    read.
    """

    def __init__(
        self, store: ObjectStore, note_use: Callable[[str], None], room: int = 10 << 30, ratio: int = RATIO
    ) -> None:
        self._store, self._note_use, self._max_copy, self._ratio = store, note_use, room // 2, ratio
        self._catalog = DocumentStore(store)
        self._indexing: SingleFlight[str, ArchiveIndex] = SingleFlight()
        self._copying: SingleFlight[str, Record] = SingleFlight()
        self._slots, self._waiting = asyncio.Semaphore(_SLOTS), 0
        self._cached: OrderedDict[str, ArchiveIndex] = OrderedDict()
        self._cached_files = 0

    def __repr__(self) -> str:
        return (
            f"<LocalArchives, {self._cached_files} files of {len(self._cached)} archives cached, "
            f"{len(self._indexing)} being indexed>"
        )

    async def get_index(
        self, bucket: str, key: str, record: Record, *, spare: int | None = None
    ) -> ArchiveIndex:
        """Return the index of an archive. The first call creates it, and a decompressed copy if needed.

        No copy of more than `spare` bytes is made (None: the limit of every copy). Raises BatchError
        BadSample if the key has no archive's extension, or the archive is damaged, hostile, or of an
        unsupported format.
        """
        found = await self.find_index(bucket, key, record)
        if found is None:
            kind = _kind(bucket, key)
            name, url = _name(kind, record), _url(bucket, key)
            limit = self._max_copy if spare is None else min(self._max_copy, spare)
            found, _ = await self._indexing.run(
                name, lambda: self._create_index(kind, name, url, record, limit)
            )
            self._cache_index(name, found)
        return found

    async def find_index(self, bucket: str, key: str, record: Record) -> ArchiveIndex | None:
        """Return the index of an archive if it is stored on this node, even if the archive is not. Raises
        BatchError BadSample."""
        name = _name(_kind(bucket, key), record)
        found = self._cached.get(name)
        if found is not None:
            self._cached.move_to_end(name)
            return found
        found = await self._load_index(name, _url(bucket, key), record)
        if found is not None:
            self._cache_index(name, found)
        return found

    async def add_index(self, bucket: str, key: str, record: Record, document: bytes) -> ArchiveIndex:
        """Store the index that another node made of an archive, and return it. Raises ColumnError."""
        name = _name(_kind(bucket, key), record)
        index = await asyncio.to_thread(_parse_index, document)
        await self._catalog.write_document(INDEXES_PREFIX + name, document)
        self._cache_index(name, index)
        return index

    async def decompressed(self, bucket: str, key: str, record: Record, pinned: int | None = None) -> Record:
        """Return the object that the offsets of the index refer to: the archive or its decompressed copy.

        Creates the copy if needed. `pinned`: the size that a snapshot recorded for it, if known; the size of
        a table's copy encodes its kind (`pinned_table`). Raises BatchError BadSample, TooLarge.
        """
        kind: CopyKind | None = copy_kind(key)
        if pinned is not None and pinned % TABLE_COPY_UNIT == 0 and is_table(key):
            table, size = pinned_table(pinned)
            copy = await self.copy_of(table, bucket, key, record)
            if copy.size == size or kind is None or table != "table":
                return copy
        if kind is not None:
            return await self.copy_of(kind, bucket, key, record)
        index = await self.get_index(bucket, key, record)
        return await self.copy_of(index.kind, bucket, key, record, index.size) if index.inflated else record

    async def copy_of(
        self, kind: CopyKind, bucket: str, key: str, record: Record, size: int | None = None
    ) -> Record:
        """Return the copy of this kind. Creates it if it is missing or its size differs from `size`. Raises
        BatchError BadSample, TooLarge, NotImplemented."""
        place = copy_key(kind, record)
        self._note_use(place)
        found = find_intact(self._store, place)
        if found is not None and size in (None, found.size):
            return found
        url = _url(bucket, key)
        copy, _ = await self._copying.run(place, lambda: self._create_copy(kind, url, record))
        return copy

    def stream_files(self, bucket: str, key: str, record: Record) -> AsyncGenerator[StreamedFile, None]:
        """Stream every file of an archive in stored order: in one pass, without a copy, in bounded memory.

        Use as `async for name, size, pieces in …`; unread `pieces` are skipped. Raises BatchError BadSample
        if the archive turns out to be damaged; StoreError.
        """
        kind = _kind(bucket, key)
        return stream_files(self._store, kind, record, _url(bucket, key), self._max_decompressed(record))

    @asynccontextmanager
    async def _acquire_slot(self) -> AsyncIterator[None]:
        """Wait for one of the few slots to decompress or index. Raises BatchError Busy if too many wait."""
        if self._waiting >= _MAX_WAITING:
            raise busy(f"{self._waiting} archives wait to be indexed or decompressed")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    # --- building ---------------------------------------------------------------------------------------

    async def _load_index(self, name: str, url: str, record: Record) -> ArchiveIndex | None:
        """Return the stored index if there is one. Raises BatchError BadSample for a stored refusal."""
        document = self._catalog.read_intact(INDEXES_PREFIX + name)
        if document is not None:
            with suppress(ColumnError):  # written by another version: rebuilt
                return await asyncio.to_thread(_parse_index, document)
        stored = self._catalog.read_intact(REFUSALS_PREFIX + name)
        if stored is not None:
            refusal = json.loads(stored)
            limit = refusal["most"]
            if limit is None or limit >= self._max_decompressed(record):  # else the limit was raised since
                raise unreadable_archive(url, str(refusal["error"]))
        return None

    def _cache_index(self, name: str, index: ArchiveIndex) -> None:
        self._cached_files += len(index) - len(self._cached.pop(name, ()))
        self._cached[name] = index
        while self._cached_files > _CACHED_FILES and len(self._cached) > 1:
            self._cached_files -= len(self._cached.popitem(last=False)[1])

    async def _create_index(
        self, kind: ArchiveKind, name: str, url: str, record: Record, max_copy: int
    ) -> ArchiveIndex:
        """Build and store the index of an archive, or store its refusal and raise BatchError BadSample."""
        try:
            async with self._acquire_slot():
                with damage_context(url):
                    index = await self._build_index(kind, record, max_copy)
        except (ArchiveError, TarError, ColumnError) as error:
            await self._verify_source(url, record)  # damage on this disk is no reason to refuse the archive
            metrics.archives.labels(kind, "refused").inc()
            message = str(error)[:300]
            limit = error.most if isinstance(error, DecompressedSizeError) else None
            document = json.dumps({"error": message, "url": url, "most": limit}).encode()
            await self._catalog.write_document(REFUSALS_PREFIX + name, document)
            raise unreadable_archive(url, message) from error
        failpoints.hit("archives.index.made")
        metrics.archives.labels(kind, "indexed").inc()
        await self._catalog.write_document(INDEXES_PREFIX + name, await asyncio.to_thread(index.to_bytes))
        await asyncio.to_thread(index.prepare)
        return index

    async def _build_index(self, kind: ArchiveKind, record: Record, max_copy: int) -> ArchiveIndex:
        if kind == "tar":
            return await self._index_tar(kind, record, record.size)
        if kind == "zip":
            return await self._index_zip(record, max_copy)
        # A tar is seldom smaller decompressed than compressed. So if even the compressed one exceeds the
        # limit, it is indexed in one pass, instead of in a copy that would be abandoned halfway.
        copy = await self._write_copy(kind, record, max_copy) if record.size <= max_copy else None
        if copy is not None:
            return await self._index_tar(kind, copy, record.size)
        with self._store.open_spans(record, 0, record.size) as spans:
            return await asyncio.to_thread(
                index_compressed_tar, kind, spans, record.size, self._max_decompressed(record)
            )

    async def _index_tar(self, kind: ArchiveKind, record: Record, packed: int) -> ArchiveIndex:
        with self._store.open_spans(record, 0, record.size) as spans:
            return await asyncio.to_thread(index_tar_archive, kind, spans, record.size, packed)

    async def _index_zip(self, record: Record, max_copy: int) -> ArchiveIndex:
        with self._store.open_spans(record, 0, record.size) as spans:
            members = await asyncio.to_thread(zip_files, spans, record.size, self._max_decompressed(record))
            index = await asyncio.to_thread(index_zip_members, members, record.size)
            # The checksums of all members are verified now, not when a member is first read.
            if index.inflated and index.size > max_copy:
                await asyncio.to_thread(inflate_members, spans, members)
            elif index.inflated:
                await self._write_copy("zip", record, max_copy)
        return index

    async def _create_copy(self, kind: CopyKind, url: str, record: Record) -> Record:
        try:
            async with self._acquire_slot():
                with damage_context(url):
                    made = await self._write_copy(kind, record, self._max_copy)
        except ArchiveError as error:
            await self._verify_source(url, record)
            verb = _VERB.get(slices_of(kind)[0], _READ_AS_ARCHIVE)
            raise unreadable_archive(url, str(error), verb) from error
        except ParquetUnsupportedError as error:
            help_ = "install shardmesh[parquet] on every node that stores, or write the rows as MDS or JSONL"
            message = f"{url}: this node cannot read Parquet: {error}"
            raise BatchError("NotImplemented", message, help=help_) from error
        except ParquetInterruptedError as error:
            raise busy(f"{url} cannot be read now: {error}") from error
        if made is None:
            raise BatchError(
                "TooLarge",
                f"{url} has more than {self._max_copy} bytes decompressed, which is too large for a copy",
                help="raise --view-cache, or unpack it with a job that extracts or reshards it",
            )
        return made

    async def _write_copy(self, kind: CopyKind, record: Record, left: int) -> Record | None:
        """Make and store a copy; None if it would be larger than `left` bytes. Raises ArchiveError."""
        key, (whole, _) = copy_key(kind, record), slices_of(kind)
        writer = self._store.writer(RESERVED_BUCKET, key, size=None)
        try:
            with self._store.open_spans(record, 0, record.size) as spans:
                if whole in SCATTERED:
                    await verify_extents(spans, "")
                if whole in ("parquet", "table"):
                    limit = max(self._max_copy, _ROWS_RATIO * record.size)
                else:
                    limit = self._max_decompressed(record)
                source = decompressed_pieces(kind, spans, record.size, limit)
                while piece := await asyncio.to_thread(next, source, b""):
                    left -= len(piece)
                    if left < 0:
                        return None
                    await writer.write(piece)
            failpoints.hit("archives.copy.written")
            metrics.archives.labels(whole, "inflated").inc()
            meta = Meta(f"{record.etag}-{record.size:x}")
            with suppress(ConditionFailedError):  # another process was faster
                return await writer.commit(meta, conditions=unless_intact(self._store, key))
            return self._store.get(RESERVED_BUCKET, key)
        finally:
            await writer.abort()

    async def _verify_source(self, url: str, record: Record) -> None:
        """Raises CorruptExtentError if the archive is damaged on this node's disk."""
        with self._store.open_spans(record, 0, record.size) as spans:
            await verify_extents(spans, url)

    def _max_decompressed(self, record: Record) -> int:
        return max(_MIN_LIMIT, self._ratio * record.size)


class ArchiveService:
    """Archives on any node. One per process. If an archive is on other nodes (`RemoteRecord`), they make its
    index and its copy, unless its bucket has an origin and this node may fetch the archive from there."""

    def __init__(self, local: LocalArchives, objects: RemoteObjects) -> None:
        self.local, self._objects = local, objects
        self._fetching: SingleFlight[str, ArchiveIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<ArchiveService over {self.local!r}>"

    async def get_index(
        self, bucket: str, key: str, record: Record, *, spare: int | None = None
    ) -> ArchiveIndex:
        """See `LocalArchives.get_index`. Also raises what `RemoteObjects.fetch_index` raises."""
        if not isinstance(record, RemoteRecord):
            return await self.local.get_index(bucket, key, record, spare=spare)
        found = await self.local.find_index(bucket, key, record)
        if found is None:
            here = await self._fetch_here(bucket, key, record)
            if here is not None:
                return await self.local.get_index(bucket, key, here, spare=spare)
            name = _name(_kind(bucket, key), record)
            found, _ = await self._fetching.run(name, lambda: self._fetch_index(bucket, key, record))
        return found

    async def decompressed(self, bucket: str, key: str, record: Record, pinned: int | None = None) -> Record:
        """See `LocalArchives.decompressed`. For an archive that only other nodes have, returns its remote
        record with the size of the copy."""
        if not isinstance(record, RemoteRecord):
            return await self.local.decompressed(bucket, key, record, pinned)
        size = record.size
        if copy_kind(key) is None and not is_table(key):
            index = await self.get_index(bucket, key, record)
            if not index.inflated:
                return record
            size = index.size
        here = await self._fetch_here(bucket, key, record)
        if here is None:
            return msgspec.structs.replace(record, size=size)
        return await self.local.decompressed(bucket, key, here, pinned)

    async def locate_member(self, bucket: str, key: str, record: Record, name: str) -> MemberLocation | None:
        """Return the location of a member, None if there is no such file. Raises as `decompressed` does."""
        place = (await self.get_index(bucket, key, record)).find(name)
        return None if place is None else MemberLocation(await self.decompressed(bucket, key, record), *place)

    async def _fetch_here(self, bucket: str, key: str, record: Record) -> Record | None:
        """Fetch the archive from its origin, if it has one and this node is a reader. Returns its local
        record, None if only other nodes have it."""
        await self._objects.fetch_whole(bucket, key, record)
        return self._objects.local_record(bucket, key, record.etag)

    async def _fetch_index(self, bucket: str, key: str, record: Record) -> ArchiveIndex:
        document = await self._objects.fetch_index(bucket, key, record)
        return await self.local.add_index(bucket, key, record, document)


def copy_key(kind: CopyKind, record: Record) -> str:
    """Return the key of an archive's decompressed copy in the reserved bucket."""
    return f"{COPIES_PREFIX}{_name(kind, record)}"


def index_names(key: str, record: Record) -> tuple[str, ...]:
    """Return the keys in the reserved bucket under which data about an object may be stored.

    Empty if the object is neither an archive nor read through a copy.
    """
    kind, copied = archive_kind(key), copy_kind(key)
    tables = (copy_key("table", record),) if is_table(key) else ()
    if copied is not None or tables:
        return (copy_key(copied, record), *tables) if copied is not None else tables
    if kind is None:
        return ()
    return tuple(prefix + _name(kind, record) for prefix in (INDEXES_PREFIX, REFUSALS_PREFIX, COPIES_PREFIX))


def unreadable_archive(url: str, message: str, how: str = _READ_AS_ARCHIVE) -> BatchError:
    """Return the error for an archive or compressed file that cannot be read."""
    return BatchError(
        "BadSample",
        f"{url} cannot be {how}: {message}",
        help="upload it again; its index is created automatically",
        detail={"url": url},
    )


def _kind(bucket: str, key: str) -> ArchiveKind:
    kind = archive_kind(key)
    if kind is None:
        raise unreadable_archive(
            _url(bucket, key), "its key has no known extension (.tar, .tar.gz, .tgz, .tar.zst, .tzst, .zip)"
        )
    return kind


def _url(bucket: str, key: str) -> str:
    return f"s3://{bucket}/{key}"


def _name(kind: CopyKind, record: Record) -> str:
    return f"{record.etag}-{record.size:x}.{kind}"


def _parse_index(document: bytes) -> ArchiveIndex:
    """Return an index, prepared for lookups (blocking). Raises ColumnError."""
    index = ArchiveIndex.from_bytes(document)
    index.prepare()
    return index
