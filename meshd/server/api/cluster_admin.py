"""Cluster administration: status of the nodes, and drain, replace, reweigh, remove and scrub commands.

Only root reaches this module; the endpoint checks that. A change that would lose data is refused with an
error that says what to do; `anyway` is for data that is known to be lost already.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from meshd.auth.identities.admin_errors import AdminError
from meshd.cluster.clock_skew import compare_clocks
from meshd.cluster.data_dir_identity import DIRECTORIES_TOPIC as DIRECTORIES
from meshd.cluster.data_dir_identity import MACHINES_TOPIC as MACHINES
from meshd.cluster.node_lease import node_lease_name
from meshd.cluster.peer_checks import DOMAINS_TOPIC as DOMAINS
from meshd.cluster.peer_checks import (
    MAP_FORMAT,
    domain_mismatches,
    probe_map_format,
    probe_map_version,
    survey_peers,
)
from meshd.cluster.rebalance.progress import PROGRESS_TOPIC
from meshd.cluster.rebalance_status import (
    decode_progress,
    decode_scrub_reports,
    drain_status,
    node_load,
    rebalance_status,
)
from meshd.cluster.repair.scrub_scheduler import REQUEST_TOPIC, STATUS_TOPIC, ScrubRequest
from meshd.control.control_api import ControlError
from meshd.core.document_store import INCARNATIONS_PREFIX
from meshwire.cluster import compute_placement
from meshwire.cluster import transitions as turn
from meshwire.phrases import word_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshd.documents.inventory import DocumentInventory
    from meshd.rpc.peer_client import PeerClient
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node

_PATIENCE: Final = 1.0
Action = Literal["drain", "undrain", "replace", "lost", "remove", "reweigh", "scrub"]


class NodeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/cluster/nodes/ID`. `weight` belongs to `reweigh`. `anyway` belongs to `lost`: it gives
    up data that only this node has."""

    action: Action
    weight: int = 0
    anyway: bool = False


class SlotCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /-/cluster/slots`: how many there are to be."""

    slots: int


class ClusterAdmin:
    """Executes cluster administration. One instance per worker; all state is in the control store."""

    def __init__(
        self,
        mesh: ClusterView,
        maps: ClusterMapStore,
        control: ControlStore,
        buckets: BucketTable,
        peers: PeerClient,
        census: DocumentInventory,
        clock: Clock,
        *,
        down_after: float,
    ) -> None:
        """`down_after`: the setting, in seconds."""
        self._mesh, self._maps, self._control, self._buckets = mesh, maps, control, buckets
        self._peers, self._census, self._clock = peers, census, clock
        self._down_after = down_after

    def __repr__(self) -> str:
        return f"<ClusterAdmin of {self._mesh!r}>"

    async def status(self) -> dict[str, Any]:
        """Return the cluster map in words and numbers, and the reports of the rebalancers."""
        cluster, alive, trouble = self._mesh.current_map(), None, ""
        if not self._mesh.standalone:
            try:
                alive = set(await self._control.lease_holders(node_lease_name("")))
            except ControlError as error:
                trouble = str(error)
        copies = self._fewest(cluster)
        present, future = (
            compute_placement(cluster, copies, "present").slots_per_node(),
            compute_placement(cluster, copies).slots_per_node(),
        )
        scrubs, moves = [await self._reports(topic, trouble) for topic in (STATUS_TOPIC, PROGRESS_TOPIC)]
        works, tolds = decode_progress(moves), decode_scrub_reports(scrubs)
        loads = {
            node.node_id: node_load(
                works.get(node.node_id),
                tolds.get(node.node_id),
                present.get(node.node_id, 0),
                future.get(node.node_id, 0),
            )
            for node in cluster.nodes
        }
        under_replicated = sum(
            loads[node.node_id].debt for node in cluster.nodes if node.state not in ("away", "down")
        )
        rebalance = msgspec.to_builtins(rebalance_status(cluster, works))
        seen = await survey_peers(self._mesh, self._peers, self._clock, _PATIENCE)
        clocks = compare_clocks(seen.ahead)
        leaving, domains = drain_status(cluster, works), domain_mismatches(self._control, cluster)
        return {
            "node": self._mesh.node_id,
            "version": cluster.version,
            "copies": cluster.copies,
            "slots": cluster.slots,
            "rebalancing": cluster.is_rebalancing,
            "moving": cluster.is_rebalancing,  # the earlier name; so are `movement`, `debt` and `work`
            "counts": [
                {"bucket": count.bucket, "copies": count.relied, "wanted": count.wanted}
                for count in cluster.counts
                if count.is_rebalancing
            ],
            "rebalance": rebalance,
            "movement": rebalance,
            "under_replicated": under_replicated,
            "debt": under_replicated,
            "control": trouble or "reached",
            "clocks_agree": clocks.agree,
            "lease_seconds": self._mesh.retry_after_absence,
            "down_after_seconds": self._down_after,
            "documents": {
                kind: {"count": count, "bytes": size}
                for kind, (count, size) in (await asyncio.to_thread(self._census.local_sizes)).items()
                if kind != INCARNATIONS_PREFIX.rstrip("/")  # each belongs to a snapshot, which is counted
            },
            "nodes": [
                _node(node, alive, moves.get(node.node_id))
                | {"slots": present.get(node.node_id, 0), "slots_wanted": future.get(node.node_id, 0)}
                | {"scrub": _scrub_report(scrubs.get(node.node_id))}
                | {
                    "empty": _empty(cluster, node),
                    "drain": leaving.get(node.node_id),
                    "load": msgspec.to_builtins(loads[node.node_id])
                    | {"under_replicated": loads[node.node_id].debt},
                    "domains": domains.get(node.node_id, ""),
                    "refused": seen.refused.get(node.node_id, ""),
                    "clock_ahead": clocks.ahead.get(node.node_id),
                    "silent": node.node_id in seen.silent,
                    "absent": node.node_id in seen.absent,
                    "only_copies": not turn.can_lose_node(cluster, node.node_id, copies),
                }
                for node in cluster.nodes
            ],
        }

    async def change(self, node_id: str, wanted: NodeChange) -> dict[str, Any]:
        """Execute a change. Raises AdminError NoSuchNode, NotNow; ControlError."""
        if wanted.action == "scrub":
            return await self._scrub(node_id)
        self._require_cluster()
        node = self._node(node_id)
        if wanted.action in ("lost", "replace", "remove") and await probe_map_version(node) is not None:
            raise AdminError(
                "NotNow",
                f"{node_id} is still running",
                help="stop it first, or drain it to move its data away without loss",
            )
        cluster = await self._maps.update_map(lambda present: self._changed_map(present, node_id, wanted))
        found = cluster.node(node_id)
        if found is None:
            await self._forget(node_id)
        return {
            "version": cluster.version,
            "node": node_id,
            "state": "gone" if found is None else found.state,
        }

    async def split_slots(self, wanted: SlotCount) -> dict[str, Any]:
        """Split the slots. Every node has to read the map while that goes on, so one that is away, or of a
        release that cannot, prevents it. Raises AdminError NotNow; ControlError."""
        self._require_cluster()
        nodes = [node for node in self._mesh.current_map().nodes if node.state != "down"]
        read = await asyncio.gather(*[probe_map_format(node) for node in nodes])
        found = [(node.node_id, newest) for node, newest in zip(nodes, read, strict=True)]
        silent = [node_id for node_id, newest in found if newest is None]
        old = [node_id for node_id, newest in found if newest is not None and newest < MAP_FORMAT]
        if silent or old:
            raise split_refused(old, silent)

        def split(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            return turn.split_slots(present, wanted.slots)

        try:
            cluster = await self._maps.update_map(split)
        except turn.TransitionError as error:
            raise AdminError("NotNow", str(error)) from None
        return {"version": cluster.version, "slots": cluster.slots, "before": cluster.current_slots}

    async def _reports(self, topic: str, trouble: str) -> dict[str, bytes]:
        """Return the nodes' reports of a topic, by id; while the control store cannot be read, those that are
        known here."""
        found = self._control.cached_entries(topic)
        if not trouble and not self._mesh.standalone:
            with suppress(ControlError):
                found = await self._control.list_all(f"{topic}/")
        return {key.partition("/")[2]: entry.value for key, entry in found.items()}

    def _require_cluster(self) -> None:
        if self._mesh.standalone:
            raise AdminError(
                "NotNow",
                "this node is the only one of its mesh",
                help="start nodes with --control etcd://… to form a mesh of several; "
                "try it with `meshd dev --nodes 3`",
            )

    async def _forget(self, node_id: str) -> None:
        """Remove the requests to, and the reports of, a node that has left the cluster."""
        for topic in (PROGRESS_TOPIC, REQUEST_TOPIC, STATUS_TOPIC, DOMAINS, DIRECTORIES, MACHINES):
            await self._control.delete(f"{topic}/{node_id}")

    def _node(self, node_id: str) -> Node:
        node = self._mesh.current_map().node(node_id)
        if node is None:
            raise AdminError(
                "NoSuchNode",
                f"there is no node {node_id[:80]!r}",
                help="list the nodes with `mesh cluster status`",
            )
        return node

    async def _scrub(self, node_id: str) -> dict[str, Any]:
        """Have a node scrub all its bytes now; `asked` is the number of the request."""
        node, place = self._node(node_id), f"{REQUEST_TOPIC}/{node_id}"
        if node.state == "down":
            raise AdminError("NotNow", f"{node_id} is down", help="list the nodes with `mesh cluster status`")
        entry = await self._control.get(place)
        asked = ScrubRequest(1 if entry is None else json.loads(entry.value)["number"] + 1)
        await self._control.put(place, msgspec.json.encode(asked))
        return {
            "version": self._mesh.current_map().version,
            "node": node_id,
            "state": node.state,
            "asked": asked.number,
        }

    def _changed_map(self, present: ClusterMap | None, node_id: str, wanted: NodeChange) -> ClusterMap:
        assert present is not None
        steps: Mapping[str, Callable[[ClusterMap, str], ClusterMap]] = {
            "drain": turn.drain_node,
            "undrain": turn.cancel_drain,
            "lost": turn.mark_node_down,
            "replace": turn.mark_node_down,
            "remove": turn.remove_node,
        }
        try:
            if wanted.action == "reweigh":
                return turn.set_node_weight(present, node_id, wanted.weight)
            if wanted.action in ("lost", "replace") and not wanted.anyway:
                self._check_covered(present, node_id)
            return steps[wanted.action](present, node_id)
        except turn.TransitionError as error:
            raise AdminError("NotNow", str(error)) from None

    def _check_covered(self, present: ClusterMap, node_id: str) -> None:
        if turn.can_lose_node(present, node_id, self._fewest(present)):
            return
        raise AdminError(
            "NotNow",
            f"{node_id} may have objects of which no other available node has a copy",
            help="start it, or the other nodes that are away, again; `mesh cluster lost NODE --anyway` gives "
            "those objects up",
        )

    def _fewest(self, cluster: ClusterMap) -> int:
        return self._buckets.min_replica_count(cluster.copies, cluster.counts)


def split_refused(old: Collection[str], silent: Collection[str]) -> AdminError:
    """Return the error of a split of the slots while some nodes run an earlier release or do not answer."""
    runs = f"{word_list(old)} run{'s' * (len(old) == 1)} an earlier release" if old else ""
    answers = f"{word_list(silent)} do{'es' * (len(silent) == 1)} not answer" if silent else ""
    start = f"start {word_list(silent)}, or give up what does not start with `mesh cluster lost NODE`"
    return AdminError(
        "NotNow",
        "the slots cannot be split before every node can read the new map: "
        + "; ".join(filter(None, (runs, answers))),
        help="; ".join(filter(None, (f"upgrade {word_list(old)}" if old else "", start if silent else ""))),
    )


def _scrub_report(report: bytes | None) -> dict[str, Any] | None:
    """A node's last scrub report, with the earlier keys next to the present ones."""
    if report is None:
        return None
    document: dict[str, Any] = json.loads(report)
    names = {"mended": "repaired", "lacking": "missing_bytes", "debt": "under_replicated"}
    return document | {new: document[old] for old, new in names.items() if old in document}


def _node(node: Node, alive: set[str] | None, moves: bytes | None) -> dict[str, Any]:
    work = json.loads(moves) if moves else None
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
        "lease": None if alive is None else node_lease_name(node.node_id) in alive,
        "rebalancer": work,
        "work": work,
    }


def _empty(cluster: ClusterMap, node: Node) -> bool:
    """Whether a node has no data that is needed, so that it may be stopped and removed."""
    return (node.leaving or node.state == "down") and not any(
        share.node_id == node.node_id for share in cluster.current_shares
    )
