"""What of a process answers for the whole mesh: passing on, listing, copying and deleting across nodes.

Law: made of a `Node` like everything else; nothing here knows a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.control.nodesecret import NodeSecret
from meshd.runtime.moving import movement_routes
from meshd.service.backed.warming import Warmer
from meshd.service.buckets.news import News
from meshd.service.buckets.service import BucketService, Everywhere
from meshd.service.caching.lending import Lender
from meshd.service.objects.sources import FarSources, LocalSources
from meshd.service.remote.continuing import Rests
from meshd.service.remote.merged import LocalLister, MergedListings
from meshd.web.bringing import BringingDoors
from meshd.web.bucketdoors import bucket_routes
from meshd.web.continuing import rest_routes
from meshd.web.deciding import DecisionDoors
from meshd.web.forwarding import Forwarder
from meshd.web.handover import handover_routes
from meshd.web.hops import Hops
from meshd.web.listingdoors import listing_routes
from meshd.web.marking import marking_routes
from meshd.web.replicas import ReplicaDoors
from meshd.web.scattering import Scatterer
from meshd.web.sourcedoors import SourceDoors
from meshd.web.warming import WarmingDoors

if TYPE_CHECKING:
    from meshd.runtime.node import Node
    from meshd.service.backed.service import BackedService
    from meshd.service.objects.members import MemberService
    from meshd.service.semantics.versions import Versions
    from meshd.web.server import NativeRoute


class Meshing:
    """The parts, each one a process."""

    def __init__(
        self, node: Node, versions: Versions, members: MemberService, backed: BackedService | None
    ) -> None:
        self._node, self._backed = node, backed
        self.lister = LocalLister(node.store, node.mesh, node.store.own_entries)
        self.merged = MergedListings(self.lister, node.mesh, node.peers, node.clock)
        self.news = News(node.control, node.mesh, node.peers, node.settings.workers)
        everywhere = Everywhere(node.mesh, node.peers, self.merged, self.news)
        self.buckets = BucketService(node.buckets, node.store, node.clock, node.settings.region, everywhere)
        self.sources = LocalSources(node.store, versions, members, backed)
        self.far = FarSources(node.mesh, node.peers, versions, self.sources)
        self.forwarder = Forwarder(
            node.mesh,
            node.peers,
            Hops(NodeSecret(node.control).derive, node.clock),
            node.clock,
            lambda: node.control.revision("buckets"),
            node.settings.http.body_timeout,
        )
        self.scatterer = Scatterer(self.forwarder, self.far, self.merged, node.mesh, node.clock)

    def __repr__(self) -> str:
        return f"<Meshing of {self._node.settings.node_id}>"

    def routes(self) -> list[NativeRoute]:
        """What other nodes may ask for."""
        node, backed = self._node, self._backed
        warming: list[NativeRoute] = []
        if backed is not None:
            warmer, lender = Warmer(backed, node.mesh), Lender(backed.shelf)
            warming = WarmingDoors(warmer, lender, node.mesh, node.clock).routes()
            warming += marking_routes(backed.listings.marker, node.clock)
            warming += BringingDoors(backed.bringer, node.mesh, node.clock).routes()
        return [
            *listing_routes(self.lister, node.mesh, node.clock),
            *bucket_routes(self.buckets, self.news, node.clock),
            *SourceDoors(self.sources, node.mesh, node.clock).routes(),
            *ReplicaDoors(node.store, node.mesh, node.clock).routes(),
            *DecisionDoors(node.shared, node.mesh, node.clock).routes(),
            *handover_routes(node.shared, node.mesh, node.clock),
            *movement_routes(node),
            *rest_routes(Rests(node.store, node.settings.node_id), node.clock),
            *warming,
        ]
