"""Rebalance status: cluster-wide progress, drain status and node load from all nodes' reports. Pure.

A node that has not reported under the current goal counts as not started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from meshd.cluster.rebalance.progress import Progress
from meshd.cluster.repair.scrub_scheduler import ScrubStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwire.cluster import ClusterMap

T = TypeVar("T")
_MOST = 1024  # characters of what is waited for


class RebalanceStatus(msgspec.Struct, frozen=True):
    """`bytes_total`: to be carried in all, as far as is known; `eta_seconds`: None when nobody knows, or when
    something waits; `slots` to be compared, `names` that were; `takers`: nodes that are not done;
    `blocked_by`: what they wait for, or nothing."""

    bytes_total: int
    bytes_moved: int
    eta_seconds: int | None
    slots: int
    names: int
    takers: tuple[str, ...]
    blocked_by: str = ""


class DrainStatus(msgspec.Struct, frozen=True):
    """Of a node that is to be empty. `owns`: it still has a share; `names`: what it holds that its owners do
    not have, None until it has looked. `empty`: it owns nothing, and holds nothing that is needed."""

    owns: bool
    names: int | None
    empty: bool
    bytes_total: int
    bytes_moved: int
    eta_seconds: int | None
    blocked_by: str = ""


def decode_progress(raw: Mapping[str, bytes]) -> dict[str, Progress]:
    """By node, what movers last said; what another version of them says is left out."""
    return _read(raw, Progress)


def decode_scrub_reports(raw: Mapping[str, bytes]) -> dict[str, ScrubStatus]:
    """As `read_works`, of scrubbers."""
    return _read(raw, ScrubStatus)


def _read(raw: Mapping[str, bytes], kind: type[T]) -> dict[str, T]:
    found = {}
    for node_id, document in raw.items():
        try:
            found[node_id] = msgspec.json.decode(document, type=kind)
        except msgspec.MsgspecError:
            continue
    return found


def rebalance_status(
    cluster: ClusterMap, works: Mapping[str, Progress], since: int | None = None
) -> RebalanceStatus:
    """Of all that is carried under maps not older than `since` (default: the present goal)."""
    since = cluster.goal if since is None else since
    takers = tuple(node.node_id for node in cluster.nodes if cluster.must_sync(node.node_id))
    current = {each: work for each, work in works.items() if work.version >= since}
    etas = [current[each].eta for each in takers if each in current]
    trouble = _blocked_by(takers, current)
    known = not trouble and len(etas) == len(takers) and None not in etas
    moved = sum(work.bytes_since(since) for work in current.values())
    return RebalanceStatus(
        moved + sum(work.total - work.bytes for work in current.values()),
        moved,
        max((eta for eta in etas if eta is not None), default=0) if known else None,
        sum(current[each].slots for each in takers if each in current),
        sum(work.names for work in current.values()),
        takers,
        trouble,
    )


def _blocked_by(takers: Iterable[str], works: Mapping[str, Progress]) -> str:
    waits = [f"{each} has not begun" for each in takers if each not in works]
    waits += [f"{each}: {works[each].why}" for each in takers if each in works and works[each].why]
    return "; ".join(waits)[:_MOST]


class NodeLoad(msgspec.Struct, frozen=True):
    """What is to be carried to and from a node, in bytes. `to_come`: what it lacks, as far as it knows,
    damaged and lost bytes too; `to_go`: about what of its data others are to own. `rate`: come a second;
    `eta_seconds`: until all has come, None when nobody knows. `debt`: names of which it decides, and fewer
    copies are there than asked."""

    to_come: int = 0
    to_go: int = 0
    rate: int = 0
    eta_seconds: int | None = 0
    debt: int = 0


def node_load(work: Progress | None, told: ScrubStatus | None, slots: int, wanted: int) -> NodeLoad:
    """Of a node that has `slots` of the map, and is to have `wanted`."""
    told = ScrubStatus() if told is None else told
    lacks = 0 if work is None or work.doing == "idle" else max(0, work.total - work.bytes)
    etas = [work.eta if work is not None and lacks else 0, told.eta if told.lacking else 0]
    known = [eta for eta in etas if eta is not None]
    return NodeLoad(
        lacks + told.lacking,
        told.total * max(0, slots - wanted) // max(1, slots),
        0 if work is None else work.rate,
        max(known) if len(known) == len(etas) else None,
        told.debt,
    )


def drain_status(cluster: ClusterMap, works: Mapping[str, Progress]) -> dict[str, dict[str, Any]]:
    """By id, every node that is to be empty."""
    found = {}
    for node in cluster.nodes:
        if not node.leaving:
            continue
        moved, own = rebalance_status(cluster, works, node.turned), works.get(node.node_id)
        owns = any(share.node_id == node.node_id for share in cluster.current_shares)
        clear = own is not None and not owns and own.clear >= node.turned
        names = 0 if clear else (own.kept or None) if own is not None else None
        found[node.node_id] = msgspec.to_builtins(
            DrainStatus(
                owns,
                names,
                clear,
                moved.bytes_total,
                moved.bytes_moved,
                moved.eta_seconds,
                moved.blocked_by,
            )
        )
    return found
