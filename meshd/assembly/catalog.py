"""Snapshots, plans and shard indexes: documents in the reserved bucket, named by their hash.

Law: immutable once written, so caches never go stale. Safe to use from every process; the last ones used stay
in memory. What other nodes need as well (`SHARED`) is kept by every storing node, and fetched on a miss;
anything else in the reserved bucket is this node's own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from meshd.assembly.elsewhere import ALONE
from meshd.assembly.errors import BatchError
from meshd.assembly.plans import Plan
from meshd.kit.singleflight import SingleFlight
from meshd.store.records import Meta
from meshwire.snapshots import Snapshot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from meshd.assembly.elsewhere import Elsewhere
    from meshd.store.interface import ObjectStore

RESERVED_BUCKET = "-mesh-"
SHARED: Final = ("snapshots/", "plans/", "assets/", "packs/")
"""What begins like this is named by its content, and means the same on every node."""
INDEXES: Final = ("lines/", "tfrecords/", "mds/", "parquet/")
"""Where the samples of files lie: this node's own, made again when they are asked for."""
T = TypeVar("T")


class _Kept(Generic[T]):
    """The last `limit` values by name, each loaded once at a time."""

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

    def put(self, name: str, value: T) -> T:
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)
        return value


class Noting(Protocol):
    """Who remembers when a document was used last."""

    def note(self, key: str) -> None:
        """It is used now. Microseconds."""
        ...


class Catalog:
    """The node's documents. One a process. What is used is told to `uses`, so that it is not collected."""

    def __init__(self, store: ObjectStore, elsewhere: Elsewhere = ALONE, uses: Noting | None = None) -> None:
        self._store, self._elsewhere, self._uses = store, elsewhere, uses
        self._snapshots: _Kept[Snapshot] = _Kept(8)
        self._plans: _Kept[Plan] = _Kept(256)

    def __repr__(self) -> str:
        return f"<Catalog over {self._store!r}>"

    async def snapshot(self, digest: str) -> Snapshot:
        """Raises BatchError NoSuchSnapshot."""
        self._note(f"snapshots/{digest}")
        return await self._snapshots.get(digest, lambda: self._load_snapshot(digest))

    async def _load_snapshot(self, digest: str) -> Snapshot:
        return await asyncio.to_thread(Snapshot.from_bytes, await self.snapshot_bytes(digest))

    async def snapshot_bytes(self, digest: str) -> bytes:
        """The document. Raises BatchError NoSuchSnapshot."""
        document = await self.find(f"snapshots/{digest}")
        if document is None:
            raise BatchError(
                "NoSuchSnapshot",
                f"this node has no snapshot {digest[:64]}",
                help="register it with POST /-/snapshots",
            )
        return document

    async def plan(self, digest: str) -> Plan:
        """Raises BatchError NoSuchPlan."""
        self._note(f"plans/{digest}")
        return await self._plans.get(digest, lambda: self._load_plan(digest))

    async def _load_plan(self, digest: str) -> Plan:
        document = await self.find(f"plans/{digest}")
        if document is None:
            raise BatchError(
                "NoSuchPlan",
                f"this node has no plan {digest[:64]}",
                help="register it with POST /-/plans",
            )
        return Plan.from_bytes(digest, document)

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        """Keep it durably. Idempotent."""
        document = await asyncio.to_thread(snapshot.to_bytes)
        await self.share(f"snapshots/{snapshot.hash}", document)
        self._snapshots.put(snapshot.hash, snapshot)

    async def add_plan(self, plan: Plan) -> None:
        """Keep it durably. Idempotent."""
        await self.share(f"plans/{plan.hash}", plan.to_bytes())
        self._plans.put(plan.hash, plan)

    def _note(self, key: str) -> None:
        if self._uses is not None and key.startswith((*SHARED, *INDEXES)):
            self._uses.note(key)

    def read(self, key: str) -> bytes | None:
        """A document of the reserved bucket, or None. Reading an index is using it."""
        if key.startswith(INDEXES):
            self._note(key)
        record = self._store.get(RESERVED_BUCKET, key)
        return None if record is None else self._store.read(record, 0, record.size)

    async def find(self, key: str) -> bytes | None:
        """A document that nodes share, from another node where this one lacks it, and kept here then."""
        document = self.read(key)
        if document is None and not self._elsewhere.alone:
            document = await self._elsewhere.document(key)
            if document is not None:
                await self.write(key, document, once=True)
        return document

    async def share(self, key: str, document: bytes) -> None:
        """Write a document that nodes share, durably, here and on the other storing nodes. Idempotent."""
        if not self._elsewhere.alone:
            await self._elsewhere.spread(key, document)
        await self.write(key, document, once=True)

    async def ensure(self, keys: Iterable[str]) -> None:
        """Have those of these documents here that any node has."""
        for key in keys:
            if not self._elsewhere.alone and self._store.get(RESERVED_BUCKET, key) is None:
                await self.find(key)

    async def write(self, key: str, document: bytes, *, once: bool = False) -> None:
        """Write a document durably; `once`: only if there is none (its name says what is in it)."""
        self._note(key)
        if once and self._store.get(RESERVED_BUCKET, key) is not None:
            return
        writer = self._store.writer(RESERVED_BUCKET, key, size=len(document))
        try:
            await writer.write(document)
            await writer.commit(Meta(etag=hashlib.md5(document, usedforsecurity=False).hexdigest()))
        except BaseException:
            await writer.abort()
            raise
