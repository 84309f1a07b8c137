"""Listings over all nodes: every node lists the names that it decides about, by one map, and they are merged.

Law: a node that cannot be asked makes a listing fail, never shorter. Invariant: all pages of one answer are
of one version of the map, under which every slot has exactly one decider.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.net.peers import PREFIX, PeerRefusedError, StaleMapError
from meshd.net.wires import PeerUnreachableError
from meshd.service.remote import pages
from meshd.service.semantics.translation import store_errors
from meshd.store.records import EntryPage, UploadPage, VersionPage
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshd.service.remote.pages import Item, Marker, Source
    from meshd.store.interface import ObjectStore
    from meshwire.cluster import Node, Routes

LISTING: Final = f"{PREFIX}listings"
_PATIENCE: Final = 15.0
_SILENCE: Final = 20.0
_LIMIT: Final = 1000

P = TypeVar("P", EntryPage, VersionPage, UploadPage)
OwnEntries = Callable[[str, str, str, int, bytes | None], EntryPage]
"""`Store.own_entries`."""


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """What a node is asked for: a page of `kind` (`entries`, `versions`, `uploads`; `own`: of a bucket
    with an origin, what is not there yet) of the names that it decides about."""

    kind: str
    bucket: str
    prefix: str
    delimiter: str
    marker: tuple[str, str]
    limit: int


class LocalLister:
    """What this node has of a listing: its own part."""

    def __init__(self, store: ObjectStore, mesh: Mesh, own: OwnEntries) -> None:
        self._store, self._mesh, self._own = store, mesh, own
        self._masks: dict[tuple[int, int], bytes] = {}

    def __repr__(self) -> str:
        return f"<LocalLister of {self._mesh.node_id}>"

    def page(self, asked: Listing, version: int) -> EntryPage | VersionPage | UploadPage:
        """The page by map `version`. Raises StaleMapError when this node goes by another, StoreError."""
        cluster = self._mesh.map()
        if cluster.version != version:
            raise StaleMapError(cluster.version)
        slots = self._mask(self._mesh.routes(asked.bucket), self._mesh.copies(asked.bucket))
        store, (key, mark) = self._store, asked.marker
        if asked.kind == "own":
            return self._own(asked.bucket, asked.prefix, key, asked.limit, slots)
        if asked.kind == "entries":
            return store.list_entries(
                asked.bucket,
                prefix=asked.prefix,
                delimiter=asked.delimiter,
                after=key,
                limit=asked.limit,
                slots=slots,
            )
        if asked.kind == "versions":
            return store.list_versions(
                asked.bucket,
                prefix=asked.prefix,
                delimiter=asked.delimiter,
                key_marker=key,
                version_marker=mark,
                limit=asked.limit,
                slots=slots,
            )
        return store.list_uploads(
            asked.bucket,
            prefix=asked.prefix,
            delimiter=asked.delimiter,
            key_marker=key,
            id_marker=mark,
            limit=asked.limit,
            slots=slots,
        )

    def _mask(self, routes: Routes, copies: int) -> bytes:
        found = self._masks.get((routes.version, copies))
        if found is None:
            if len(self._masks) > 8:
                self._masks.clear()
            found = routes.decided_by(self._mesh.node_id).tobytes()
            self._masks[routes.version, copies] = found
        return found


class MergedListings:
    """Pages of the whole mesh. One a process."""

    def __init__(self, local: LocalLister, mesh: Mesh, peers: Peers, clock: Clock) -> None:
        self._local, self._mesh, self._peers, self._clock = local, mesh, peers, clock

    def __repr__(self) -> str:
        return f"<MergedListings of {self._mesh!r}>"

    async def entries(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = _LIMIT
    ) -> EntryPage:
        """As `ObjectStore.list_entries`, of all nodes. Raises S3Error SlowDown."""
        asked = Listing("entries", bucket, prefix, delimiter, (after, ""), limit)
        items, truncated = await self._merged(asked, EntryPage, pages.read_entries)
        return pages.entry_page(items, truncated=truncated)

    async def own(self, bucket: str, prefix: str, after: str, limit: int = _LIMIT) -> EntryPage:
        """As `Store.own_entries`, of all nodes. Raises S3Error SlowDown."""
        asked = Listing("own", bucket, prefix, "", (after, ""), limit)
        items, truncated = await self._merged(asked, EntryPage, pages.read_entries)
        return pages.entry_page(items, truncated=truncated)

    async def versions(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        version_marker: str = "",
        limit: int = _LIMIT,
    ) -> VersionPage:
        """As `ObjectStore.list_versions`, of all nodes. Raises S3Error SlowDown."""
        asked = Listing("versions", bucket, prefix, delimiter, (key_marker, version_marker), limit)
        items, truncated = await self._merged(asked, VersionPage, pages.read_versions)
        return pages.version_page(items, truncated=truncated)

    async def uploads(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        id_marker: str = "",
        limit: int = _LIMIT,
    ) -> UploadPage:
        """As `ObjectStore.list_uploads`, of all nodes. Raises S3Error SlowDown."""
        asked = Listing("uploads", bucket, prefix, delimiter, (key_marker, id_marker), limit)
        items, truncated = await self._merged(asked, UploadPage, pages.read_uploads)
        return pages.upload_page(items, truncated=truncated)

    async def _merged(
        self, asked: Listing, kind: type[P], read: Callable[[P], tuple[list[Item], bool, Marker]]
    ) -> tuple[list[Item], bool]:
        if asked.limit <= 0:
            return [], False
        deadline = self._clock.monotonic() + _PATIENCE
        while True:
            version = self._mesh.map().version
            try:
                return await self._attempt(asked, version, kind, read)
            except StaleMapError as error:
                wanted, what = max(error.version, version), "the nodes do not agree on a map"
                await self._mesh.newer_than(wanted - 1, min(2.0, _PATIENCE))
                await asyncio.sleep(0.02)
            except _NoAnswerError as error:
                what = str(error)
                if error.node_id:
                    await self._mesh.suspect(error.node_id, version)
                await self._mesh.newer_than(version, 0.5)
            if self._clock.monotonic() > deadline:
                raise S3Error("SlowDown", f"Not all nodes can be asked at present: {what}. Try again.")

    async def _attempt(
        self,
        asked: Listing,
        version: int,
        kind: type[P],
        read: Callable[[P], tuple[list[Item], bool, Marker]],
    ) -> tuple[list[Item], bool]:
        nodes = self._deciders(asked.bucket)
        sources = [self._source(node, asked, version, kind) for node in nodes]
        share = pages.first_share(asked.limit + 1, len(sources))
        await asyncio.gather(*(source.fill(share, read) for source in sources))
        found = await pages.merged(sources, asked.limit, read)
        if self._mesh.map().version != version:  # pages asked for later went by another map
            raise StaleMapError(version)
        return found

    def _deciders(self, bucket: str) -> Sequence[Node]:
        """Whoever decides about names of the bucket. Raises _NoAnswerError while nobody does about some."""
        routes, cluster = self._mesh.routes(bucket), self._mesh.map()
        found = [node for node in cluster.nodes if routes.decided_by(node.node_id).any()]
        if sum(int(routes.decided_by(node.node_id).sum()) for node in found) != routes.slots:
            raise _NoAnswerError("", "nodes that hold a part of the names are away")
        return found

    def _source(self, node: Node, asked: Listing, version: int, kind: type[P]) -> Source[P]:
        async def fetch(marker: Marker, limit: int) -> P:
            wanted = msgspec.structs.replace(asked, marker=marker, limit=limit)
            if node.node_id == self._mesh.node_id:
                with store_errors():
                    page = self._local.page(wanted, version)
                assert isinstance(page, kind)
                return page
            return await self._ask(node, wanted, kind)

        return pages.Source(fetch, asked.marker)

    async def _ask(self, node: Node, asked: Listing, kind: type[P]) -> P:
        try:
            body = msgspec.msgpack.encode(asked)
            async with self._peers.call(node, "POST", LISTING, body=body, timeout=_SILENCE) as answer:
                return msgspec.msgpack.decode(await answer.read(), type=kind)
        except (PeerUnreachableError, PeerRefusedError) as error:
            raise _NoAnswerError(node.node_id, f"node {node.node_id}: {error}") from error


class _NoAnswerError(Exception):
    """A part of the listing cannot be had; `node_id` of whom it was asked (empty: of nobody)."""

    def __init__(self, node_id: str, message: str) -> None:
        super().__init__(message)
        self.node_id = node_id
