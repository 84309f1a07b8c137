"""Changed names of a bucket in a mesh: the logs of all primaries, merged, for listings made again.

Law: under one map and one number of copies, a listing has the names that each primary has in its own store,
so whatever changes it is in the log of a primary. Under another map, or where a node does not answer, is of
an earlier release or does not know what changed, nothing is known: too much may be named, never too little.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.peer_messages import READ_CHANGES, ChangesRequest, ChangesResponse
from meshd.errors import MeshdError
from meshd.rpc.peer_client import StaleMapError
from meshd.store.records import StoreChanges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.peer_reads.listing import ObjectListings
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import StoreReader
    from meshwire.cluster import Node

MOST_NAMES: Final = 10_000
"""Names that a node tells; beyond that, listing costs no more."""


class MeshRevision(msgspec.Struct, frozen=True):
    """The state of a bucket's names: the revision of each primary's store under a version of the map, with so
    many copies of each object."""

    version: int
    copies: int
    nodes: dict[str, int]


def merge_changes(answers: Sequence[ChangesResponse]) -> StoreChanges | None:
    """Merge what each primary says; None if one does not know what changed."""
    if not all(answer.known for answer in answers):
        return None
    keys = sorted({key for answer in answers for key in answer.keys}, key=str.encode)
    ranges = sorted({each for answer in answers for each in answer.ranges}, key=lambda each: each[0].encode())
    return StoreChanges(-1, tuple(keys), tuple(ranges))


def primary_changes(store: StoreReader, mesh: ClusterView, request: ChangesRequest) -> ChangesResponse:
    """Return what changed in this node's store. Raises StaleMapError if this node uses another map than the
    caller."""
    cluster = mesh.current_map()
    if cluster.version != request.version:
        raise StaleMapError(cluster.version)
    now = store.revision()
    if request.since < 0 or mesh.replica_count(request.bucket) != request.copies:
        return ChangesResponse(now)
    found = store.changes_since(request.since, request.bucket)
    if found is None:
        return ChangesResponse(now)
    keys = [key for key in found.keys if key.startswith(request.prefix)]
    ranges = [
        (first, last)
        for first, last in found.ranges
        if last >= request.prefix and (first < request.prefix or first.startswith(request.prefix))
    ]
    if len(keys) > MOST_NAMES:
        return ChangesResponse(found.revision)
    return ChangesResponse(found.revision, known=True, keys=keys, ranges=ranges)


class ChangedNames:
    """Asks the primaries of a bucket what changed in it. One instance per process."""

    def __init__(
        self, store: StoreReader, mesh: ClusterView, peers: PeerClient, listings: ObjectListings
    ) -> None:
        self._store, self._mesh, self._peers, self._listings = store, mesh, peers, listings

    def __repr__(self) -> str:
        return f"<ChangedNames of {self._mesh!r}>"

    async def since(
        self, bucket: str, prefix: str, seen: MeshRevision | None
    ) -> tuple[MeshRevision, StoreChanges | None] | None:
        """Return the revision of a bucket's names, and what changed below a prefix since an earlier one, None
        if that is not known; nothing if a primary does not tell its revision."""
        cluster, copies = self._mesh.current_map(), self._mesh.replica_count(bucket)
        before: dict[str, int] = {}
        if seen is not None and (seen.version, seen.copies) == (cluster.version, copies):
            before = seen.nodes

        async def ask(node: Node) -> ChangesResponse:
            since = before.get(node.node_id, -1)
            request = ChangesRequest(bucket, prefix, since, cluster.version, copies)
            if node.node_id == self._mesh.node_id:
                return await asyncio.to_thread(primary_changes, self._store, self._mesh, request)
            return await self._peers.call_typed(node, READ_CHANGES, request)

        try:
            primaries = self._listings.primaries(cluster, bucket)
            answers = await asyncio.gather(*map(ask, primaries))
        except MeshdError:  # the listing says what is wrong
            return None
        nodes = {node.node_id: answer.revision for node, answer in zip(primaries, answers, strict=True)}
        return MeshRevision(cluster.version, copies, nodes), merge_changes(answers)
