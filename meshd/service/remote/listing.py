"""Listings for services: all objects under a prefix, of all nodes, or of an origin.

Law: the nodes that decide list, all under one version of the map; where one cannot be asked the listing is an
error, never shorter.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from meshd.assembly.errors import busy
from meshd.errors import MeshdError
from meshd.net.peers import StaleMapError
from meshd.service.remote import wire
from meshd.store.records import Page
from meshwire.cluster import routes, slot_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.cluster.mesh import Mesh
    from meshd.service.remote.asking import Asking
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.cluster import ClusterMap, Node

_T = TypeVar("_T")
_ATTEMPTS: Final = 5
_PATIENCE: Final = 2.0
"""Seconds a newer map is waited for when another node has one."""


class RemoteListings:
    """Of buckets whose objects live in the mesh. One a process."""

    def __init__(self, store: ObjectStore, asking: Asking) -> None:
        self._store, self._asking, self._mesh = store, asking, asking.mesh

    def __repr__(self) -> str:
        return f"<RemoteListings from {self._mesh.node_id}>"

    async def entries(self, bucket: str, prefix: str) -> list[tuple[str, Record]]:
        """See RemoteObjects.entries."""
        pages = await self._all(bucket, lambda node, version: self._listed(node, bucket, prefix, version))
        found = [entry for page in pages for entry in page]
        found.sort(key=lambda entry: entry[0].encode())
        return found

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """See RemoteObjects.page."""

        def ask(node: Node, version: int) -> Awaitable[wire.ListAnswer]:
            return self._one_page(node, wire.ListAsk(bucket, prefix, after, version, limit))

        return _page_of(await self._all(bucket, ask), limit)

    async def _all(self, bucket: str, ask: Callable[[Node, int], Awaitable[_T]]) -> list[_T]:
        """What each node that decides says, under one map. Raises BatchError Busy."""
        for _ in range(_ATTEMPTS):
            cluster = self._mesh.map()
            asked = [ask(node, cluster.version) for node in self._deciders(cluster, bucket)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            wrong = [answer for answer in answers if isinstance(answer, BaseException)]
            if any(isinstance(error, StaleMapError) for error in wrong):
                await self._mesh.newer_than(cluster.version, _PATIENCE)
                continue
            if wrong and isinstance(wrong[0], MeshdError):
                raise busy(f"{bucket} cannot be listed now: {wrong[0]}") from wrong[0]
            if wrong:
                raise wrong[0]
            return [answer for answer in answers if not isinstance(answer, BaseException)]
        raise busy(f"{bucket} cannot be listed now: the nodes do not agree on the map yet")

    async def _one_page(self, node: Node, ask: wire.ListAsk) -> wire.ListAnswer:
        if node.node_id == self._mesh.node_id:
            return decided_page(self._store, self._mesh, ask)
        return wire.decode_listed(await self._asking.post(node, wire.LIST, wire.encode(ask)))

    def _deciders(self, cluster: ClusterMap, bucket: str) -> list[Node]:
        """Raises BatchError Busy while there are names nobody decides about."""
        table = routes(cluster, self._mesh.copies(bucket))  # of this map, whatever comes meanwhile
        masks = {node.node_id: table.decided_by(node.node_id) for node in cluster.nodes}
        if sum(int(mask.sum()) for mask in masks.values()) < cluster.slots:
            raise busy(f"{bucket} cannot be listed now: nodes that hold a part of it are away")
        return [node for node in cluster.nodes if masks[node.node_id].any()]

    async def _listed(self, node: Node, bucket: str, prefix: str, version: int) -> list[tuple[str, Record]]:
        found: list[tuple[str, Record]] = []
        after, here = "", node.node_id == self._mesh.node_id
        while True:
            ask = wire.ListAsk(bucket, prefix, after, version)
            page = await self._one_page(node, ask)
            if here:
                await asyncio.sleep(0)  # other requests get their turn between pages
            found += page.entries
            if not page.after:
                return found
            after = page.after


def decided_page(store: ObjectStore, mesh: Mesh, ask: wire.ListAsk) -> wire.ListAnswer:
    """A page of what this node decides. Raises StaleMapError unless the map is the one that is meant."""
    cluster = mesh.map()
    if cluster.version != ask.version:
        raise StaleMapError(cluster.version)
    decided = routes(cluster, mesh.copies(ask.bucket)).decided_by(mesh.node_id)
    page = store.list(ask.bucket, prefix=ask.prefix, after=ask.after, limit=ask.limit)
    entries = [
        (key, record)
        for key, found in page.entries
        if decided[slot_of(ask.bucket, key, cluster.slots)] and (record := wire.far(found)) is not None
    ]
    return wire.ListAnswer(entries, page.next_after if page.truncated else "")


def _page_of(pages: Sequence[wire.ListAnswer], limit: int) -> Page:
    """One page of those of all deciders: as far as all of them reach."""
    ends = [page.after.encode() for page in pages if page.after]
    found = sorted((entry for page in pages for entry in page.entries), key=lambda entry: entry[0].encode())
    if ends:
        found = [entry for entry in found if entry[0].encode() <= min(ends)]
    kept = tuple(found[:limit])
    if len(found) > limit:
        return Page(kept, (), truncated=True, next_after=kept[-1][0])
    return Page(kept, (), truncated=bool(ends), next_after=min(ends).decode() if ends else "")
