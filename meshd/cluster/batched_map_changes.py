"""Batched changes: nodes that join or become complete at the same time share few versions of the map.

Each version costs every node the whole map and a new placement; if 500 nodes joined 1,000 others one by one,
there would be 2,000 versions. Law: a node announces its change in the control store, waits
(`transitions.batch_seconds`), and then makes it by compare-and-swap, together with the changes that others
have announced; most nodes find their change already made. No node depends on another. Invariant: an
announcement is valid until the node's state changes, which `transitions` compares, so it does not matter when
or by which node it is carried out.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from meshd.cluster.node_lease import live_nodes
from meshd.cluster.rebalance.progress import PROGRESS_TOPIC
from meshd.cluster.rebalance_status import decode_progress
from meshwire.cluster import ClusterMap, parse_map, transitions
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshwire.cluster import Node

_JOINS: Final = "joins"


async def settle_node(control: ControlStore, maps: ClusterMapStore, node_id: str, version: int) -> ClusterMap:
    """Record in the map that a node is complete as of map `version`, with all that have published it. Raises
    TransitionError, ControlError."""
    await _wait_for_others(maps)

    def has_to(present: ClusterMap) -> bool:
        node = present.node(node_id)
        entered = node is not None and (node.complete >= version or not present.must_sync(node_id))
        if entered and node is not None and node.state in (*COMPLETE_STATES, "joining"):
            return False  # another node has recorded it
        return transitions.mark_complete(present, node_id, version) is not present

    reports: dict[str, int] = {}

    def settle(present: ClusterMap | None) -> ClusterMap:
        assert present is not None
        return (
            transitions.mark_all_complete(present, {**reports, node_id: version})
            if has_to(present)
            else present
        )

    cluster = maps.current()
    if cluster is None or has_to(cluster):
        cut, told = len(PROGRESS_TOPIC) + 1, await control.list_all(f"{PROGRESS_TOPIC}/")
        published = decode_progress({key[cut:]: entry.value for key, entry in told.items()})
        reports = {each: progress.complete for each, progress in published.items()}
    return await maps.update_map(settle)


async def enter_node(
    control: ControlStore,
    maps: ClusterMapStore,
    me: Node,
    alone: Callable[[ClusterMap | None], ClusterMap],
) -> ClusterMap:
    """Enter a node into the map, with all new ones that are about to; `alone` enters the node by itself.
    Raises TransitionError, ControlError."""
    cluster = maps.current()
    few = cluster is None or not transitions.batch_seconds(len(cluster.nodes))
    if cluster is None or few or cluster.node(me.node_id) is not None:
        return await maps.update_map(alone)
    key = f"{_JOINS}/{me.node_id}"
    await control.put(key, ClusterMap(0, (me,)).to_json())
    await _wait_for_others(maps)
    alive = await live_nodes(control)  # what a node told that has ended is no longer so
    joining = [parse_map(entry.value).nodes[0] for entry in control.cached_entries(_JOINS).values()]
    others = [node for node in joining if node.node_id in alive]

    def enter(present: ClusterMap | None) -> ClusterMap:
        if present is None or present.node(me.node_id) is not None:
            return alone(present)
        return transitions.join_new_nodes(present, {node.node_id: node for node in (*others, me)}.values())

    entered = await maps.update_map(enter)
    await control.delete(key)
    return entered


async def _wait_for_others(maps: ClusterMapStore) -> None:
    cluster = maps.current()
    seconds = transitions.batch_seconds(len(cluster.nodes)) if cluster is not None else 0.0
    if seconds:
        await asyncio.sleep(seconds * random.uniform(0.9, 1.0))  # two at once would be in each other's way
