"""Backed buckets in one process: who fetches, who reads, who keeps.

Law: made once a process, in its running loop; a worker also does what belongs to it for the others.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from meshd.kit.tasks import Tasks
from meshd.runtime.node import node_shelf
from meshd.service.backed.asking import Questions
from meshd.service.backed.bringing import Bringer
from meshd.service.backed.listing import BackedListings
from meshd.service.backed.reading import BackedReader
from meshd.service.backed.samples import OriginSamples
from meshd.service.backed.service import BackedService
from meshd.service.backed.sharing import Crew, OwnDoer, serve_fetches
from meshd.service.backed.succeeding import Succession
from meshd.service.backed.writing import OriginWriter
from meshd.service.caching.fetching import Fetcher
from meshd.service.caching.keeping import RemoteKeeper
from meshd.service.caching.lending import Borrower
from meshd.service.caching.marks import Marker
from meshd.service.caching.nearby import Nearby
from meshd.service.caching.origins import Origins
from meshd.service.remote.merged import LocalLister, MergedListings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.runtime.node import Node


@asynccontextmanager
async def backing(node: Node, index: int | None) -> AsyncIterator[BackedService]:
    """Backed buckets as worker `index` has them, or (None) as the steward."""
    settings, shelf = node.settings, node_shelf(node)
    keeper = RemoteKeeper(settings.keeper_socket)
    origins = Origins(settings.origin_credentials, node.clock)
    fetcher = Fetcher(origins, shelf, keeper, Borrower(node.mesh, node.peers, shelf))
    succession = Succession(node.mesh, node.peers, node.clock)
    writer = OriginWriter(origins, node.store, node.shared, node.mesh, fetcher, succession)
    own = OwnDoer(fetcher, writer)
    crew = Crew([settings.fetch_socket(each) for each in range(settings.workers)], index, own)
    questions = Questions(crew, settings.origin_patience)
    tasks = Tasks("backing")
    if index is not None:
        tasks.spawn(serve_fetches(settings.fetch_socket(index), own, shelf), "fetches")
    tasks.spawn(keeper.run(), "notes")
    lister = LocalLister(node.store, node.mesh, node.store.own_entries)
    marker = Marker(shelf, node.mesh, node.peers)
    merged = MergedListings(lister, node.mesh, node.peers, node.clock)
    service = BackedService(
        node.store,
        node.shared,
        shelf,
        crew,
        Bringer(crew, shelf, node.mesh, node.peers, node.clock),
        BackedReader(node.store, shelf, crew, keeper, questions),
        BackedListings(origins, node.store, shelf, node.clock, node.mesh, merged, marker),
        node.mesh,
    )
    node.objects.origins = OriginSamples(node.store, service, node.archives)
    near = node.objects.near = Nearby(shelf.cache, keeper) if _keeps_copies(node) else None
    try:
        yield service
    finally:
        node.objects.origins = node.objects.near = None
        if near is not None:
            await near.aclose()
        await tasks.aclose()
        await service.aclose()
        await questions.aclose()
        await crew.aclose()
        await fetcher.aclose()


def _keeps_copies(node: Node) -> bool:
    """Whether this node is there to be near those who read: it caches, and stores nothing."""
    roles = node.settings.cluster.roles
    return not node.mesh.lone and "cache" in roles and "store" not in roles
