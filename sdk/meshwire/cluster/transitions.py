"""Transitions of the cluster map: one node, or several that change alike; one step, the next version.

Law: pure; a change that does not fit the node's state raises TransitionError and names one that would. Two
changes of one version give two maps with the same number, and the control store accepts only one of them.
Invariant: the target shares become current in one step, once every target node has reported itself complete
under one goal (`mark_complete`). Until then the target owners get every write and only the current owners
are read, so no node is read for data it was never given.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.cluster.cluster_map import (
    DEFAULT_COPIES,
    DEFAULT_SLOTS,
    MAX_COPIES,
    MAX_COUNTS,
    MAX_SLOTS,
    REACHABLE_STATES,
    BucketCopies,
    ClusterMap,
    checked_nodes,
    read_and_write_copies,
    shares_by_state,
)
from meshwire.cluster.placement import compute_placement
from meshwire.cluster.routes import COMPLETE_STATES
from meshwire.strict_json import suggestion

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from meshwire.cluster.cluster_map import Node, Share, State


_FEW: Final = 32
_MANY: Final = 1000
_NODES_PER_SECOND: Final = 200
_LONGEST: Final = 5.0


class TransitionError(ValueError):
    """The change does not fit the map."""


def batch_seconds(nodes: int) -> float:
    """Return the seconds for which a change waits for those of other nodes, to be one version with them, in a
    mesh of so many nodes: none in a small one."""
    return 0.0 if nodes < _FEW else min(_LONGEST, nodes / _NODES_PER_SECOND)


def renewals_per_lease(nodes: int) -> int:
    """Return how many times a node renews its lease in the time of one, in a mesh of so many nodes."""
    return 4 if nodes <= _MANY else 2


def bootstrap_map(node: Node, slots: int = DEFAULT_SLOTS, copies: int = DEFAULT_COPIES) -> ClusterMap:
    """Create the first map: one node that owns all data."""
    return ClusterMap(1, (_fresh(node, "up", 1),), slots, copies)


def join_node(cluster: ClusterMap, node: Node) -> ClusterMap:
    """Add or update `node` as it describes itself. A new node is `joining` (its share moves to it); a known
    node that was `away` is `returning`. A node that was `down` joins as if it were new, because its data
    may be stale.

    Raises TransitionError if the node stops storing while it still has a share.
    """
    known, version = cluster.node(node.node_id), cluster.version + 1
    if known is None:
        return join_new_nodes(cluster, [node])
    if known.state == "down" or (node.stores and not known.stores):
        new = _fresh(node, "joining" if node.stores and cluster.current_shares else "up", version)
        return _next(cluster, replace(new, since=version) if known.state == "down" else new)
    if not node.stores and _holds(cluster, node.node_id):
        raise TransitionError(f"{node.node_id} still has data; drain it before you remove its role store")
    said = replace(
        known,
        endpoint=node.endpoint,
        zone=node.zone,
        rack=node.rack,
        weight=node.weight,
        roles=node.roles,
    )
    if known.state == "away":
        said = replace(said, state=_back(cluster, said), turned=version)
        return _change_nodes(cluster, _as_the_last(cluster, said))
    return _next(cluster, said)


def _as_the_last(cluster: ClusterMap, back: Node) -> dict[str, Node]:
    """Return a node that is back, as the last to leave of those with which it left (`mark_nodes_away`), and
    the others of them that are still away, by their ids.

    The others keep their order. None passes a node that did not leave with them: that one may have accepted
    writes alone since.
    """
    turned = _known(cluster, back.node_id).turned
    together = [node for node in cluster.nodes if node.state == "away" and node.turned == turned]
    apart = [node.since for node in cluster.nodes if node not in together and node.since > back.since]
    bound = min(apart, default=cluster.version + 1)
    others = sorted(
        (node for node in together if back.since < node.since < bound), key=lambda node: node.since
    )
    versions = [back.since, *(node.since for node in others)]
    found = {node.node_id: replace(node, since=since) for node, since in zip(others, versions, strict=False)}
    return found | {back.node_id: replace(back, since=versions[-1])}


def join_new_nodes(cluster: ClusterMap, nodes: Iterable[Node]) -> ClusterMap:
    """Add those of the nodes that the map does not have, in one step."""
    version, known = cluster.version + 1, {node.node_id for node in cluster.nodes}
    having = bool(cluster.current_shares)
    new = {
        node.node_id: _fresh(node, "joining" if node.stores and having else "up", version)
        for node in nodes
        if node.node_id not in known
    }
    return _change_nodes(cluster, new)


def mark_complete(cluster: ClusterMap, node_id: str, version: int | None = None) -> ClusterMap:
    """Record that a node has, for every slot that it owns by the current or target shares of map `version`
    (default: this one), all data that the slot's other owners have, and that it has received every write
    since. A returning node becomes `up`; when all target nodes have reported, the target shares become
    current, and joining nodes become `up`.

    Raises TransitionError if the report is based on too old a map; the node then has to sync again.
    """
    node, said = _known(cluster, node_id), cluster.version if version is None else version
    if node.state not in REACHABLE_STATES:
        raise TransitionError(f"{node_id} is {node.state}; it must come back first")
    if said < node.turned:
        raise TransitionError(f"{node_id} has been {node.state} since map {node.turned}; sync again")
    return mark_all_complete(cluster, {node_id: said})


def mark_all_complete(cluster: ClusterMap, reports: Mapping[str, int]) -> ClusterMap:
    """Record that nodes are complete, as `mark_complete` does, in one step: the map version of each by its
    id. Reports that do not fit a node's state are left out."""
    new = {
        node.node_id: _complete_node(node, reports[node.node_id], cluster.version + 1)
        for node in cluster.nodes
        if node.node_id in reports
        and node.state in REACHABLE_STATES
        and reports[node.node_id] >= node.turned
        and (reports[node.node_id] > node.complete or node.state in ("joining", "returning"))
    }
    return _change_nodes(cluster, new)


def _complete_node(node: Node, said: int, version: int) -> Node:
    new = replace(node, complete=max(said, node.complete))
    if node.state != "returning":
        return new
    state: State = "draining" if node.leaving else "up"
    return replace(new, state=state, since=max(node.since, node.turned), turned=version)


def drain_node(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Start to drain a node. Raises TransitionError for the last node that stores."""
    node = _known(cluster, node_id)
    if node.state == "down":
        raise TransitionError(f"{node_id} is down; there is nothing to drain")
    if node.leaving:
        return cluster
    if not [share for share in cluster.target_shares if share.node_id != node_id]:
        raise TransitionError(f"{node_id} is the last node that stores; no other node can take its share")
    state: State = "draining" if node.state == "up" else node.state
    return _next(cluster, replace(node, state=state, leaving=True, turned=cluster.version + 1))


def cancel_drain(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Cancel a drain: the node keeps what it still has, and the rest moves back."""
    node, version = _known(cluster, node_id), cluster.version + 1
    if not node.leaving:
        raise TransitionError(f"{node_id} is {node.state}, not draining")
    state = node.state
    if state == "draining":
        state = "up" if _holds(cluster, node_id) or not node.stores else "joining"
    return _next(cluster, replace(node, state=state, leaving=False, turned=version, complete=0))


def mark_node_away(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Mark a node that does not answer; its share stays assigned to it. A node that was joining becomes
    `down`, because no data depended on it yet."""
    node, version = _known(cluster, node_id), cluster.version + 1
    if node.state in ("away", "down"):
        return cluster
    if node.state == "joining":
        return mark_node_down(cluster, node_id)
    since = node.since if node.state == "returning" else version
    return _next(cluster, replace(node, state="away", since=since, turned=version, complete=0))


def mark_nodes_away(cluster: ClusterMap, node_ids: Iterable[str]) -> ClusterMap:
    """Mark nodes that do not answer, in one write of the map, of whose versions only the last is seen.

    Those that were complete get the same `turned`: none of them accepted a write without the others, since
    no map said that another one was away. Each of them may therefore be the first to answer again
    (`join_node`).
    """
    first, complete = cluster, list[str]()
    for node_id in node_ids:
        if _known(first, node_id).state in COMPLETE_STATES:
            complete.append(node_id)
        else:
            cluster = mark_node_away(cluster, node_id)
    for node_id in complete:
        cluster = mark_node_away(cluster, node_id)
    nodes = [
        replace(node, turned=cluster.version) if node.node_id in complete else node for node in cluster.nodes
    ]
    return replace(cluster, nodes=checked_nodes(nodes))


def mark_node_down(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Give up a node; its share is rebuilt from the other copies."""
    node, version = _known(cluster, node_id), cluster.version + 1
    if node.state == "down":
        return cluster
    new = replace(node, state="down", turned=version, complete=0, leaving=False)
    return _next(cluster, new)


def mark_nodes_down(cluster: ClusterMap, node_ids: Iterable[str]) -> ClusterMap:
    """Give up several nodes in one write of the map."""
    for node_id in node_ids:
        cluster = mark_node_down(cluster, node_id)
    return cluster


def can_lose_node(cluster: ClusterMap, node_id: str, copies: int) -> bool:
    """Whether a node can be given up without loss at this number of copies: every slot it owns also has
    another complete owner."""
    present = compute_placement(cluster, copies, "present")
    places = [number for number, node in enumerate(present.nodes) if node.node_id == node_id]
    if not places:
        return True
    sound = [
        n for n, node in enumerate(present.nodes) if node.state in COMPLETE_STATES and node.node_id != node_id
    ]
    has = (present.table == places[0]).any(axis=1)
    return bool(np.isin(present.table[has], sound).any(axis=1).all())


def remove_node(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Remove a node that stores nothing or whose share has moved to other nodes."""
    node = _known(cluster, node_id)
    if node.stores and not (node.leaving or node.state == "down"):
        first = "start it, or run `mesh cluster lost` first" if node.state == "away" else "drain it first"
        raise TransitionError(f"{node_id} is {node.state} and has data; {first}")
    if _holds(cluster, node_id):
        raise TransitionError(
            f"some data of {node_id} has not moved yet; wait until `mesh cluster status` shows it as empty"
        )
    return _next(cluster, None, without=node_id)


def set_node_weight(cluster: ClusterMap, node_id: str, weight: int) -> ClusterMap:
    """Change the weight of a node."""
    node = _known(cluster, node_id)
    if node.stores and weight < 1:
        raise TransitionError(f"a weight of {weight} would leave {node_id} without data; drain it instead")
    return _next(cluster, replace(node, weight=weight))


def set_bucket_copies(cluster: ClusterMap, bucket: str, born: int, present: int, wanted: int) -> ClusterMap:
    """Change the number of copies of a bucket, currently `present` (as `routes` takes it), to `wanted`. If
    the number rises, the new copies are written at once and read when all nodes have synced. If it falls,
    writes go to the old number of copies until all nodes have synced; reads use the lower number at once if
    every current owner is complete, and otherwise only after the sync: an owner that is away might become
    the only one in the read set and lack writes that the others accepted meanwhile. Raises TransitionError
    if there are fewer nodes than copies."""
    most = min(len(cluster.target_shares), MAX_COPIES)
    if not 1 <= wanted <= most:
        nodes = f"{len(cluster.target_shares)} node{'s' * (len(cluster.target_shares) != 1)}"
        raise TransitionError(
            f"{wanted} copies are not possible: this mesh has {nodes} to store them; choose 1 to {most}, or "
            "add nodes first"
        )
    relied, given = read_and_write_copies(present)
    complete = {node.node_id for node in cluster.nodes if node.state in COMPLETE_STATES}
    all_complete = all(share.node_id in complete for share in cluster.current_shares)
    read = min(relied, wanted) if all_complete else relied
    count = BucketCopies(bucket, born, read, max(given, wanted), wanted)
    others = [each for each in cluster.counts if each.bucket != bucket]
    if count in cluster.counts or (relied == given == wanted):
        return cluster
    if len(others) >= MAX_COUNTS:
        raise TransitionError(
            f"{MAX_COUNTS} buckets already have their own number of copies, the maximum; delete buckets first"
        )
    version = cluster.version + 1
    counts = tuple(sorted([*others, count]))
    return _finish_arrivals(
        replace(cluster, version=version, goal=version, base=cluster.current_shares, counts=counts)
    )


def split_slots(cluster: ClusterMap, slots: int) -> ClusterMap:
    """Split every slot into equal parts, so that there are `slots`. No data moves with this step: the parts
    stay where they are, and prefer the same nodes. Then those that a node has too many of move, as after any
    change of the target shares. Raises TransitionError."""
    if slots & (slots - 1) or not cluster.slots < slots <= MAX_SLOTS:
        raise TransitionError(
            f"the mesh has {cluster.slots} slots; the new number must be a greater power of two, at most "
            f"{MAX_SLOTS}"
        )
    if cluster.is_rebalancing:
        raise TransitionError(
            "data is moving; split the slots when `mesh cluster status` shows that it has arrived"
        )
    version = cluster.version + 1
    return _finish_arrivals(
        replace(cluster, version=version, goal=version, slots=slots, base_slots=cluster.slots)
    )


def forget_bucket_copies(cluster: ClusterMap, gone: Container[str]) -> ClusterMap:
    """Drop the copy counts of deleted buckets."""
    counts = tuple(count for count in cluster.counts if count.bucket not in gone)
    if counts == cluster.counts:
        return cluster
    return _finish_arrivals(
        replace(cluster, version=cluster.version + 1, base=cluster.current_shares, counts=counts)
    )


def _fresh(node: Node, state: State, version: int) -> Node:
    complete = version if state == "up" else 0
    return replace(node, state=state, since=0, turned=version, complete=complete, leaving=False)


def _back(cluster: ClusterMap, node: Node) -> State:
    """Return the new state of a node that was away and answers again."""
    if not node.stores:
        return "up"
    if node.leaving and not _holds(cluster, node.node_id):
        return "draining"
    return "returning"


def _holds(cluster: ClusterMap, node_id: str) -> bool:
    return any(share.node_id == node_id for share in cluster.current_shares)


def _known(cluster: ClusterMap, node_id: str) -> Node:
    node = cluster.node(node_id)
    if node is None:
        known = [node.node_id for node in cluster.nodes]
        raise TransitionError(f"there is no node {node_id[:80]!r}{suggestion(node_id, known)}")
    return node


def _next(cluster: ClusterMap, node: Node | None, without: str = "") -> ClusterMap:
    """Replace the node with the same id (or remove `without`), and apply what follows from that."""
    return _change_nodes(cluster, {} if node is None else {node.node_id: node}, without)


def _change_nodes(cluster: ClusterMap, new: Mapping[str, Node], without: str = "") -> ClusterMap:
    """Replace or add nodes by their ids (and remove `without`), and apply what follows from that."""
    others = [node for node in cluster.nodes if node.node_id not in new and node.node_id != without]
    nodes = checked_nodes([*others, *new.values()])
    if nodes == cluster.nodes:
        return cluster
    changed = replace(cluster, version=cluster.version + 1, nodes=nodes, base=cluster.current_shares)
    if changed.target_shares != cluster.target_shares:
        changed = replace(changed, goal=changed.version)
    return _finish_arrivals(changed)


def _finish_arrivals(cluster: ClusterMap) -> ClusterMap:
    """Make the target shares current if every target node is complete; joining nodes that are complete
    become `up`."""
    complete = {node.node_id for node in cluster.nodes if node.complete >= cluster.goal > 0}
    present: tuple[Share, ...] = cluster.current_shares
    future = cluster.target_shares
    counts, base_slots = cluster.counts, cluster.base_slots
    if not present or (future and all(share.node_id in complete for share in future)):
        present, base_slots = future, None
        counts = tuple(each._replace(relied=each.wanted, given=each.wanted) for each in counts)
    nodes = cluster.nodes
    if present == cluster.target_shares and base_slots is None:
        nodes = tuple(
            replace(node, state="up", turned=cluster.version)
            if node.state == "joining" and node.node_id in complete
            else node
            for node in nodes
        )
    base = None if shares_by_state(nodes) == present else present
    return replace(cluster, nodes=nodes, base=base, counts=counts, base_slots=base_slots)
