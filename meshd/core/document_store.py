"""Snapshots, plans, indexes and assets: immutable documents in the reserved bucket, named by their hash.

Law: a document never changes once it is written, so caches of it never go stale. Every storage node
keeps the shared documents (`SHARED_PREFIXES`) and fetches a missing one from its peers; all other
documents are local; those of `REBUILT_PREFIXES` are made again when their bytes are damaged. A plan that
names an asset this node lacks is refused. Safe to use from every process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from meshd.control.control_api import ControlError
from meshd.core.api_errors import BatchError, busy
from meshd.core.peer_source import SINGLE_NODE
from meshd.core.plan_record import Plan
from meshd.errors import missing_asset_message
from meshd.store.errors import CorruptExtentError, DiskFailedError
from meshd.store.records import RESERVED_BUCKET as RESERVED_BUCKET  # users of documents want it here
from meshd.store.records import Meta
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.paged_snapshot import PagedSnapshot, read_snapshot
from meshwire.frame.columns import ColumnError
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from meshd.core.api_errors import Code
    from meshd.core.peer_source import PeerDocumentSource
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.store.writer_api import ObjectWriter
    from meshd.transform.source_files import AssetPlace
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.dataset.paged_columns import Page
    from meshwire.frame.tensor_frame import Buffer


_log = logging.getLogger("meshd.documents")
INCARNATIONS_PREFIX: Final = "births/"
"""Prefix of records of the buckets with which a snapshot was registered; see
`meshd.datasets.bucket_incarnations`."""
SHARED_PREFIXES: Final = ("snapshots/", "plans/", "assets/", "packs/", INCARNATIONS_PREFIX)
"""Prefixes of documents that are named by their content, so a name means the same on every node."""
RESULTS_PREFIX: Final = "opened/"
"""Prefix of results of snapshot builds; see `meshd.datasets.snapshot_build_cache`."""
PAGES_PREFIX: Final = "pages/"
"""Prefix of pages of snapshots, but for those of files of lines, which are their indexes."""
INDEX_PREFIXES: Final = (
    "lines/", "tfrecords/", "mds/", "parquet/", "tables/", PAGES_PREFIX, RESULTS_PREFIX
)  # fmt: skip
"""Prefixes of sample indexes of files, and of builds: local to the node and rebuilt on demand."""
REBUILT_PREFIXES: Final = (*INDEX_PREFIXES, "archives/", "views/", "bad/")
"""Prefixes of documents that this node can do without: they are made again, or begin again."""
MAPPED_BYTES: Final = 1 << 20
"""Bytes from which on the document of a snapshot is mapped from the store, so that all processes share it."""
MARK: Final = "checked"
"""Name of the metadata of a document that says what it was found to be before it was written."""
CHECKED_SNAPSHOT: Final = "snapshot"
"""The mark of a snapshot that this node encoded itself: its name is the hash of what was written."""
_SNAPSHOT_NAME: Final = re.compile("snapshots/([0-9a-f]{32})[0-9a-f]{32}")
_CREATED_AGAIN: Final = ("snapshots/", "plans/")
T = TypeVar("T")


class _LoadingCache(Generic[T]):
    """The last `limit` values by name; concurrent loads of one name are shared."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[str, T] = OrderedDict()
        self._loading: SingleFlight[str, T] = SingleFlight()

    async def get(self, name: str, load: Callable[[], Awaitable[T]]) -> T:
        if name in self._values:
            self._values.move_to_end(name)
            return self._values[name]
        value, _ = await self._loading.run(name, load)
        return self.put(name, value)

    def drop(self, name: str) -> None:
        self._values.pop(name, None)

    def put(self, name: str, value: T) -> T:
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)
        return value


class PageSource(Protocol):
    """Finds the pages of snapshots that consist of pages."""

    async def read_snapshot(self, digest: str, read_document: Callable[[], Awaitable[bytes]]) -> Snapshot:
        """Decodes the snapshot `digest` of any version, whose pages can be opened; from the map of its
        document, or else from what `read_document` returns. Raises ColumnError, BatchError."""
        ...

    def closed_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        """Returns those of some pages that this process has not opened, and can."""
        ...


class LastUsedRecorder(Protocol):
    """Records when a document was last used."""

    def note(self, key: str) -> None:
        """Records a use now. Takes microseconds."""
        ...


class DeletedDocuments(Protocol):
    """Knows which documents were deleted, on any node."""

    def deletion_notice(self, key: str) -> str:
        """Returns what happened to a document, as the end of a sentence; "" if it was not deleted. Takes a
        microsecond."""
        ...

    async def restore(self, key: str) -> bool:
        """Removes a document from the deleted ones because it is being created again; returns True if it was
        deleted. Raises ControlError."""
        ...


class _NothingDeleted:
    def deletion_notice(self, key: str) -> str:
        return ""

    async def restore(self, key: str) -> bool:
        return False


_NO_REMOVALS: Final[DeletedDocuments] = _NothingDeleted()
_AGAIN: Final = {
    "snapshots": "create it again: the same objects and fields give the same snapshot (POST /-/snapshots, or "
    "mesh.open as before)",
    "plans": "create it again: the same snapshot and spec give the same plan, and its addresses are valid "
    "again (POST /-/plans, or a Loader as before)",
}


class DocumentStore:
    """The node's documents. One per process. `uses` records every use, so that used documents are not
    collected; documents in `removals` do not exist until they are created again."""

    def __init__(
        self,
        store: ObjectStore,
        remote: PeerDocumentSource = SINGLE_NODE,
        uses: LastUsedRecorder | None = None,
        removals: DeletedDocuments = _NO_REMOVALS,
    ) -> None:
        self._store, self._remote, self._uses = store, remote, uses
        self._removals = removals
        self._pages: PageSource | None = None
        self._snapshots: _LoadingCache[Snapshot] = _LoadingCache(8)
        self._plans: _LoadingCache[Plan] = _LoadingCache(256)

    def __repr__(self) -> str:
        return f"<DocumentStore over {self._store!r}>"

    def use_pages(self, pages: PageSource) -> None:
        """Sets where the pages of snapshots are found; without it, only their documents can be read."""
        self._pages = pages

    def closed_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        """Returns those of some pages that this process has not opened, and can."""
        return [] if self._pages is None else self._pages.closed_pages(snapshot, numbers)

    def forget_snapshot(self, digest: str) -> None:
        """Reads a snapshot again the next time."""
        self._snapshots.drop(digest)

    async def snapshot(self, digest: str) -> Snapshot:
        """Returns a snapshot. Raises BatchError NoSuchSnapshot, Gone."""
        self._require(f"snapshots/{digest}")
        self._note(f"snapshots/{digest}")
        return await self._snapshots.get(digest, lambda: self._load_snapshot(digest))

    async def _load_snapshot(self, digest: str) -> Snapshot:
        try:
            if self._pages is not None:
                return await self._pages.read_snapshot(digest, lambda: self.snapshot_bytes(digest))
            return await asyncio.to_thread(read_snapshot, await self.snapshot_bytes(digest), _no_pages)
        except ColumnError as error:
            raise BatchError(
                "BadSample",
                f"this node cannot read the snapshot {digest}: {error}",
                help="update this node if a later release wrote the snapshot; else open its source again",
                detail={"snapshot": digest},
            ) from error

    async def snapshot_bytes(self, digest: str) -> bytes:
        """Returns a snapshot's document. Raises BatchError NoSuchSnapshot, Gone."""
        self._require(f"snapshots/{digest}")
        document = await self.find_shared(f"snapshots/{digest}")
        if document is None:
            raise unknown_document(f"snapshots/{digest}")
        return document

    async def plan(self, digest: str) -> Plan:
        """Returns a plan. Raises BatchError NoSuchPlan, Gone."""
        self._require(f"plans/{digest}")
        self._note(f"plans/{digest}")
        return await self._plans.get(digest, lambda: self._load_plan(digest))

    async def _load_plan(self, digest: str) -> Plan:
        document = await self.find_shared(f"plans/{digest}")
        if document is None:
            raise unknown_document(f"plans/{digest}")
        return Plan.from_bytes(digest, document)

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        """Stores a snapshot durably. Idempotent."""
        pieces = await asyncio.to_thread(snapshot.document_pieces)
        size = sum(map(len, pieces))
        await self.put_shared(f"snapshots/{snapshot.hash}", pieces, mark=CHECKED_SNAPSHOT)
        if size < MAPPED_BYTES or isinstance(snapshot, PagedSnapshot):
            # Any other is mapped when it is next used.
            self._snapshots.put(snapshot.hash, snapshot)

    async def add_plan(self, plan: Plan) -> None:
        """Stores a plan durably. Idempotent."""
        await self.put_shared(f"plans/{plan.hash}", plan.to_bytes())
        self._plans.put(plan.hash, plan)

    def _require(self, key: str) -> None:
        """Raises BatchError Gone if the document was deleted."""
        notice = self._removals.deletion_notice(key)
        if notice:
            kind, _, digest = key.partition("/")
            raise BatchError(
                "Gone",
                f"the {kind.removesuffix('s')} {digest} {notice}",
                help=_AGAIN[kind],
                detail={kind.removesuffix("s"): digest},
            )

    async def ensure_local(self, key: str) -> None:
        """Fetches a plan or snapshot to this node without recording a use. Raises BatchError NoSuchPlan,
        NoSuchSnapshot, Gone, Busy."""
        self._require(key)
        await self.ensure_local_copies([key])
        if self._store.get(RESERVED_BUCKET, key) is None:
            raise unknown_document(key)

    def is_gone(self, key: str) -> bool:
        """Returns True if a shared document was deleted and not created again."""
        return key.startswith(SHARED_PREFIXES) and bool(self._removals.deletion_notice(key))

    def has_document(self, key: str) -> bool:
        """Returns True if a document is on this node; counts as a use."""
        self._note(key)
        return not self.is_gone(key) and self._store.get(RESERVED_BUCKET, key) is not None

    def _note(self, key: str) -> None:
        if self._uses is not None and key.startswith((*SHARED_PREFIXES, *INDEX_PREFIXES)):
            self._uses.note(key)

    def read_document(self, key: str) -> bytes | None:
        """Reads a document of the reserved bucket, or None. Reading an index counts as a use."""
        if key.startswith(INDEX_PREFIXES):
            self._note(key)
        if self.is_gone(key):
            return None
        record = self._store.get(RESERVED_BUCKET, key)
        return None if record is None else self._store.read_range(record, 0, record.size)

    def read_intact(self, key: str) -> bytes | None:
        """Reads a document as `read_document`; None also if its bytes cannot be read. For documents that can
        be made again."""
        try:
            return self.read_document(key)
        except (CorruptExtentError, DiskFailedError) as error:
            _log.warning("a document is damaged and is rebuilt", extra={"key": key, "why": str(error)})
            return None

    async def find_shared(self, key: str) -> bytes | None:
        """Reads a shared document; fetches and stores it if this node lacks it, or has it damaged. Raises
        BatchError NoSuchSnapshot, NoSuchPlan if it is damaged and no other node has it."""
        try:
            document = self.read_document(key)
        except CorruptExtentError as error:
            document = await self.fetch_again(key)
            if document is None and key.startswith(_CREATED_AGAIN):
                raise _damaged_document(key) from error
            if document is None and self._remote.single_node:
                raise
            return document
        except DiskFailedError:
            if self._remote.single_node:
                raise
            document = None
        return await self.fetch_again(key) if document is None else document

    async def fetch_again(self, key: str) -> bytes | None:
        """Fetches a shared document that is missing or damaged from another node and stores it; None if no
        other has it, or it was deleted. Raises BatchError Busy if a node that may have it is silent."""
        if self._remote.single_node or self.is_gone(key):
            return None
        document = await self._remote.fetch_document(key)
        if document is not None:
            await self.write_document(key, document, once=True)
        return document

    async def put_shared(self, key: str, document: bytes | Sequence[Buffer], *, mark: str = "") -> None:
        """Writes a shared document durably, here and on the other storing nodes. Idempotent; a deleted
        document exists again afterwards. `mark`: as for `write_document`. Raises BatchError Busy."""
        again = self.is_gone(key) and await self._restore(key)
        if not self._remote.single_node:
            if not isinstance(document, bytes):
                document = await asyncio.to_thread(b"".join, document)
            await self._remote.replicate_document(key, document, again=again)
        await self.write_document(key, document, once=not again, mark=mark)

    async def _restore(self, key: str) -> bool:
        try:
            return await self._removals.restore(key)
        except ControlError as error:
            raise busy(f"{key} was deleted and cannot be restored now: {error}") from error

    async def ensure_local_copies(self, keys: Iterable[str]) -> None:
        """Fetches to this node those of these documents that any node has."""
        for key in keys:
            if not self._remote.single_node and self._store.get(RESERVED_BUCKET, key) is None:
                await self.find_shared(key)  # does nothing if it was deleted

    async def write_document(
        self, key: str, document: bytes | Sequence[Buffer], *, once: bool = False, mark: str = ""
    ) -> None:
        """Writes a document durably. `document`: may be given in consecutive pieces; `once`: only if there is
        none that is whole, because its name determines its content; `mark`: is kept with it, as `MARK` of
        its record's metadata."""
        self._note(key)
        if once and await self._is_readable(key):
            return
        pieces = (document,) if isinstance(document, bytes) else document
        size = sum(map(len, pieces))
        writer = self._store.writer(RESERVED_BUCKET, key, size=size)
        try:
            # Of a snapshot, the hash in its name is as good: an MD5 takes 60 ms for 1,000,000 objects.
            named = _SNAPSHOT_NAME.fullmatch(key)
            if named or size < MAPPED_BYTES:
                await _write(writer, pieces)
                etag = named[1] if named else _etag_of(pieces)
            else:
                hashing = asyncio.to_thread(_etag_of, pieces)
                _, etag = await asyncio.gather(_write(writer, pieces), hashing)
            await writer.commit(Meta(etag, metadata={MARK: mark} if mark else {}))
        except BaseException:
            await writer.abort()
            raise

    async def _is_readable(self, key: str) -> bool:
        record = find_intact(self._store, key)
        if record is None:
            return False
        with suppress(CorruptExtentError, DiskFailedError):
            await asyncio.to_thread(self._store.read_range, record, 0, record.size)
            return True
        return False


async def _write(writer: ObjectWriter, pieces: Sequence[Buffer]) -> None:
    for piece in pieces:
        await (writer.write(piece) if isinstance(piece, bytes) else writer.write_borrowed(memoryview(piece)))


def _etag_of(pieces: Sequence[Buffer]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def find_intact(store: ObjectStore, key: str) -> Record | None:
    """Returns a document's record, None if there is none or its bytes are in quarantine."""
    record = store.get(RESERVED_BUCKET, key)
    return None if record is None or record.broken else record


def unless_intact(store: ObjectStore, key: str) -> Conditions:
    """Returns the conditions for writing a document: there is none, or its bytes are in quarantine."""
    record = store.get(RESERVED_BUCKET, key)
    return Conditions(if_none_match=("*",)) if record is None or not record.broken else Conditions()


def _no_pages(snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
    raise busy(f"this process has no pages of the snapshot {snapshot.hash}")


def _damaged_document(key: str) -> BatchError:
    """Returns the error for a snapshot or plan whose bytes are damaged, and are nowhere else."""
    kind, _, digest = key.partition("/")
    what = kind.removesuffix("s")
    message = f"the {what} {digest[:64]} is damaged on this node's disk, and no other node has it"
    _log.error("%s", message)
    code: Code = "NoSuchPlan" if kind == "plans" else "NoSuchSnapshot"
    return BatchError(code, message, help=_AGAIN[kind], detail={what: digest})


def unknown_document(key: str) -> BatchError:
    """Returns the error for a plan or snapshot that is unknown, or that was made from former buckets of the
    same names."""
    kind, _, digest = key.partition("/")
    return BatchError(
        "NoSuchPlan" if kind == "plans" else "NoSuchSnapshot",
        f"this node has no {kind.removesuffix('s')} {digest[:64]}",
        help="it was never created here, or its deletion is no longer recorded, or its bucket was deleted "
        f"and the bucket that now has the name holds other objects; {_AGAIN[kind]}",
    )


ASSETS_PREFIX = "assets/"


def asset_key(digest: str) -> str:
    """Returns the key of an asset in the reserved bucket."""
    return f"{ASSETS_PREFIX}{digest}"


def no_such_asset(digest: str) -> BatchError:
    """Returns the error for a plan or view that names a missing asset."""
    return BatchError(
        "NoSuchAsset",
        missing_asset_message(digest),
        help="create the plan or view again with the object's address (s3://BUCKET/KEY) in place of the hash",
        detail={"asset": f"sha256:{digest}"},
    )


def asset_places(store: ObjectStore, digests: Sequence[str]) -> tuple[AssetPlace, ...]:
    """Returns the files that now hold each asset. Raises BatchError NoSuchAsset."""
    return tuple(_place(store, digest) for digest in digests)


def _place(store: ObjectStore, digest: str) -> AssetPlace:
    record = store.get(RESERVED_BUCKET, asset_key(digest))
    if record is None:
        raise no_such_asset(digest)
    return digest, tuple((place.path, place.offset, place.length) for place in store.locate(record))
