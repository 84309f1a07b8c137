"""The cluster as an operator sees and changes it.

Law: root alone comes here (the caller sees to it). Whatever a change would lose is refused with a sentence
that says what to do; `anyway` is for those who know that it is lost already.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from meshd.assembly.catalog import BIRTHS
from meshd.cluster.agreeing import TOPIC as DOMAINS
from meshd.cluster.agreeing import other_domains
from meshd.cluster.belonging import TOPIC as DIRECTORIES
from meshd.cluster.clocks import compared
from meshd.cluster.membership import lease_name
from meshd.cluster.probing import answers
from meshd.cluster.progress import TOPIC
from meshd.cluster.scrubbing import ASKED, TOLD, Asked
from meshd.cluster.surveying import survey
from meshd.control.interface import ControlError
from meshd.service.cluster.movements import drains, load, movement, read_scrubs, read_works
from meshd.service.identities.errors import AdminError
from meshwire.cluster import place
from meshwire.cluster import transitions as turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import BucketTable
    from meshd.control.clustermaps import ClusterMaps
    from meshd.control.interface import ControlStore
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshd.service.documents.census import Census
    from meshwire.cluster import ClusterMap, Node

_PATIENCE: Final = 1.0
Action = Literal["drain", "undrain", "replace", "lost", "remove", "reweigh", "scrub"]


class NodeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/cluster/nodes/ID`. `weight` goes with `reweigh`; `anyway` with `lost`: what only this
    node has is given up."""

    action: Action
    weight: int = 0
    anyway: bool = False


class ClusterAdmin:
    """One a worker; all state is the control store's."""

    def __init__(
        self,
        mesh: Mesh,
        maps: ClusterMaps,
        control: ControlStore,
        buckets: BucketTable,
        peers: Peers,
        census: Census,
        clock: Clock,
    ) -> None:
        self._mesh, self._maps, self._control, self._buckets = mesh, maps, control, buckets
        self._peers, self._census, self._clock = peers, census, clock

    def __repr__(self) -> str:
        return f"<ClusterAdmin of {self._mesh!r}>"

    async def status(self) -> dict[str, Any]:
        """The map in words and numbers, and what movers say of their work."""
        cluster, alive, trouble = self._mesh.map(), None, ""
        if not self._mesh.lone:
            try:
                alive = set(await self._control.leases(lease_name("")))
            except ControlError as error:
                trouble = str(error)
        copies = self._fewest(cluster)
        present, future = place(cluster, copies, "present").loads(), place(cluster, copies).loads()
        scrubs = {key.partition("/")[2]: entry.value for key, entry in self._control.peek(TOLD).items()}
        moves = {key.partition("/")[2]: entry.value for key, entry in self._control.peek(TOPIC).items()}
        works, tolds = read_works(moves), read_scrubs(scrubs)
        loads = {
            node.node_id: load(
                works.get(node.node_id),
                tolds.get(node.node_id),
                present.get(node.node_id, 0),
                future.get(node.node_id, 0),
            )
            for node in cluster.nodes
        }
        seen = await survey(self._mesh, self._peers, self._clock, _PATIENCE)
        clocks = compared(seen.ahead)
        leaving, domains = drains(cluster, works), other_domains(self._control, cluster)
        return {
            "node": self._mesh.node_id,
            "version": cluster.version,
            "copies": cluster.copies,
            "slots": cluster.slots,
            "moving": cluster.moving,
            "counts": [
                {"bucket": count.bucket, "copies": count.relied, "wanted": count.wanted}
                for count in cluster.counts
                if count.moving
            ],
            "movement": msgspec.to_builtins(movement(cluster, works)),
            "debt": sum(
                loads[node.node_id].debt for node in cluster.nodes if node.state not in ("away", "down")
            ),
            "control": trouble or "reached",
            "clocks_agree": clocks.agree,
            "documents": {
                kind: {"count": count, "bytes": size}
                for kind, (count, size) in (await asyncio.to_thread(self._census.sizes)).items()
                if kind != BIRTHS.rstrip("/")  # each belongs to a snapshot, which is counted
            },
            "nodes": [
                _node(node, alive, moves.get(node.node_id))
                | {"slots": present.get(node.node_id, 0), "slots_wanted": future.get(node.node_id, 0)}
                | {"scrub": json.loads(scrubs.get(node.node_id, b"null"))}
                | {
                    "empty": _empty(cluster, node),
                    "drain": leaving.get(node.node_id),
                    "load": msgspec.to_builtins(loads[node.node_id]),
                    "domains": domains.get(node.node_id, ""),
                    "refused": seen.refused.get(node.node_id, ""),
                    "clock_ahead": clocks.ahead.get(node.node_id),
                    "silent": node.node_id in seen.silent,
                    "only_copies": not turn.covered(cluster, node.node_id, copies),
                }
                for node in cluster.nodes
            ],
        }

    async def change(self, node_id: str, wanted: NodeChange) -> dict[str, Any]:
        """Raises AdminError NoSuchNode, NotNow; ControlError."""
        if wanted.action == "scrub":
            return await self._scrub(node_id)
        if self._mesh.lone:
            raise AdminError(
                "NotNow",
                "this node is the only one of its mesh",
                help="start nodes with --control etcd://… to have several; `meshd dev --nodes 3` tries it",
            )
        node = self._node(node_id)
        if wanted.action in ("lost", "replace", "remove") and await answers(node) is not None:
            raise AdminError(
                "NotNow",
                f"{node_id} still answers",
                help="stop it first; to take its share from it without loss, drain it",
            )
        cluster = await self._maps.change(lambda present: self._changed(present, node_id, wanted))
        found = cluster.node(node_id)
        if found is None:
            await self._forget(node_id)
        return {
            "version": cluster.version,
            "node": node_id,
            "state": "gone" if found is None else found.state,
        }

    async def _forget(self, node_id: str) -> None:
        """What a node that is none of the mesh any more was asked and told."""
        for topic in (TOPIC, ASKED, TOLD, DOMAINS, DIRECTORIES):
            await self._control.delete(f"{topic}/{node_id}")

    def _node(self, node_id: str) -> Node:
        node = self._mesh.map().node(node_id)
        if node is None:
            raise AdminError(
                "NoSuchNode", f"there is no node {node_id[:80]!r}", help="see `mesh cluster status`"
            )
        return node

    async def _scrub(self, node_id: str) -> dict[str, Any]:
        """Have a node look at all its bytes now; `asked` is the number of the request."""
        node, place = self._node(node_id), f"{ASKED}/{node_id}"
        if node.state == "down":
            raise AdminError("NotNow", f"{node_id} is down", help="see `mesh cluster status`")
        entry = await self._control.get(place)
        asked = Asked(1 if entry is None else json.loads(entry.value)["number"] + 1)
        await self._control.put(place, msgspec.json.encode(asked))
        return {
            "version": self._mesh.map().version,
            "node": node_id,
            "state": node.state,
            "asked": asked.number,
        }

    def _changed(self, present: ClusterMap | None, node_id: str, wanted: NodeChange) -> ClusterMap:
        assert present is not None
        steps: Mapping[str, Callable[[ClusterMap, str], ClusterMap]] = {
            "drain": turn.drained,
            "undrain": turn.stayed,
            "lost": turn.lost,
            "replace": turn.lost,
            "remove": turn.left,
        }
        try:
            if wanted.action == "reweigh":
                return turn.reweighed(present, node_id, wanted.weight)
            if wanted.action in ("lost", "replace") and not wanted.anyway:
                self._check_covered(present, node_id)
            return steps[wanted.action](present, node_id)
        except turn.TransitionError as error:
            raise AdminError("NotNow", str(error)) from None

    def _check_covered(self, present: ClusterMap, node_id: str) -> None:
        if turn.covered(present, node_id, self._fewest(present)):
            return
        raise AdminError(
            "NotNow",
            f"{node_id} may have objects of which no other node that is up has a copy",
            help="bring it, or the other nodes that are away, back; `mesh cluster lost NODE --anyway` gives "
            "those objects up",
        )

    def _fewest(self, cluster: ClusterMap) -> int:
        return self._buckets.fewest_copies(cluster.copies, cluster.counts)


def _node(node: Node, alive: set[str] | None, moves: bytes | None) -> dict[str, Any]:
    return {
        "id": node.node_id,
        "state": node.state,
        "leaving": node.leaving,
        "endpoint": node.endpoint,
        "zone": node.zone,
        "rack": node.rack,
        "roles": list(node.roles),
        "weight": node.weight,
        "since": node.since,
        "lease": None if alive is None else lease_name(node.node_id) in alive,
        "work": json.loads(moves) if moves else None,
    }


def _empty(cluster: ClusterMap, node: Node) -> bool:
    """Whether nothing that is needed is on a node: it may be stopped and removed."""
    return (node.leaving or node.state == "down") and not any(
        share.node_id == node.node_id for share in cluster.present
    )
