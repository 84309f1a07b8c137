"""What all nodes of a mesh have to be told alike: `--domain`. Compared when a node starts.

Law: every node says its own (`told/NODE` of the control store); whoever differs from most is named, in its
log and in the status. Nobody is refused for it: a change goes from node to node.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.interface import ControlStore
    from meshwire.cluster import ClusterMap

TOPIC: Final = "told"


class ToldNode(msgspec.Struct, frozen=True):
    """What a node was told when it started."""

    domains: tuple[str, ...] = ()


async def tell_domains(control: ControlStore, node_id: str, domains: tuple[str, ...]) -> None:
    """Say what this node was told. Raises ControlError."""
    await control.put(f"{TOPIC}/{node_id}", msgspec.json.encode(ToldNode(tuple(sorted(domains)))))


def other_domains(control: ControlStore, cluster: ClusterMap) -> Mapping[str, str]:
    """By id, nodes of the map with other domains than most of them, and what to do about it."""
    told = {}
    for key, entry in control.peek(TOPIC).items():
        node_id = key.partition("/")[2]
        node = cluster.node(node_id)
        if node is not None and node.state != "down":
            told[node_id] = msgspec.json.decode(entry.value, type=ToldNode).domains
    if len(set(told.values())) < 2:
        return {}
    most = max(Counter(told.values()).items(), key=lambda found: (found[1], found[0]))[0]
    said = f"--domain {' --domain '.join(most)}" if most else "no --domain"
    return {
        node_id: f"was started with other domains than most nodes, which have {said}: give all nodes the same"
        for node_id, domains in told.items()
        if domains != most
    }
