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
_MOST = 1024  # characters of `blocked_by`


class RebalanceStatus(msgspec.Struct, frozen=True):
    """Cluster-wide progress. `bytes_total`: bytes to move in all, as far as known; `eta_seconds`: None if
    unknown or while a node waits; `slots` to compare, `names` compared; `takers`: nodes that are not done;
    `blocked_by`: what they wait for, or ""."""

    bytes_total: int
    bytes_moved: int
    eta_seconds: int | None
    slots: int
    names: int
    takers: tuple[str, ...]
    blocked_by: str = ""


class DrainStatus(msgspec.Struct, frozen=True):
    """Progress of a node that is being drained. `owns`: it still has a share; `names`: how many names it
    holds that their owners are missing, None until it has checked. `empty`: it owns nothing and holds nothing
    that is needed."""

    owns: bool
    names: int | None
    empty: bool
    bytes_total: int
    bytes_moved: int
    eta_seconds: int | None
    blocked_by: str = ""


def decode_progress(raw: Mapping[str, bytes]) -> dict[str, Progress]:
    """Decodes the last progress report of each node; skips reports that another release wrote."""
    return _decode_all(raw, Progress)


def decode_scrub_reports(raw: Mapping[str, bytes]) -> dict[str, ScrubStatus]:
    """Decodes scrub reports like `decode_progress`."""
    return _decode_all(raw, ScrubStatus)


def _decode_all(raw: Mapping[str, bytes], kind: type[T]) -> dict[str, T]:
    found = {}
    for node_id, document in raw.items():
        try:
            found[node_id] = msgspec.json.decode(document, type=kind)
        except msgspec.MsgspecError:
            continue
    return found


def rebalance_status(
    cluster: ClusterMap, reports: Mapping[str, Progress], since: int | None = None
) -> RebalanceStatus:
    """Summarizes what moves under maps from version `since` on (default: the current goal)."""
    since = cluster.goal if since is None else since
    takers = tuple(node.node_id for node in cluster.nodes if cluster.must_sync(node.node_id))
    current = {each: report for each, report in reports.items() if report.version >= since}
    etas = [current[each].eta for each in takers if each in current]
    trouble = _blocked_by(takers, current)
    known = not trouble and len(etas) == len(takers) and None not in etas
    moved = sum(report.bytes_since(since) for report in current.values())
    return RebalanceStatus(
        moved + sum(report.total - report.bytes for report in current.values()),
        moved,
        max((eta for eta in etas if eta is not None), default=0) if known else None,
        sum(current[each].slots for each in takers if each in current),
        sum(report.names for report in current.values()),
        takers,
        trouble,
    )


def _blocked_by(takers: Iterable[str], reports: Mapping[str, Progress]) -> str:
    waits = [f"{each} has not started" for each in takers if each not in reports]
    waits += [f"{each}: {reports[each].why}" for each in takers if each in reports and reports[each].why]
    return "; ".join(waits)[:_MOST]


class NodeLoad(msgspec.Struct, frozen=True):
    """Bytes to be moved to and from a node. `to_come`: what it is known to be missing, damaged and lost bytes
    included; `to_go`: the approximate share of its data that others will own. `rate`: bytes received per
    second; `eta_seconds`: until all have arrived, None if unknown. `debt`: names that it is primary of with
    too few copies."""

    to_come: int = 0
    to_go: int = 0
    rate: int = 0
    eta_seconds: int | None = 0
    debt: int = 0


def node_load(report: Progress | None, scrub: ScrubStatus | None, slots: int, wanted: int) -> NodeLoad:
    """Returns the load of a node that has `slots` of the map and should have `wanted`. While it waits, the
    remaining time is unknown."""
    scrub = ScrubStatus() if scrub is None else scrub
    lacks = 0 if report is None or report.doing == "idle" else max(0, report.total - report.bytes)
    etas = [_eta(report) if report is not None and lacks else 0, scrub.eta if scrub.lacking else 0]
    known = [eta for eta in etas if eta is not None]
    return NodeLoad(
        lacks + scrub.lacking,
        scrub.total * max(0, slots - wanted) // max(1, slots),
        0 if report is None else report.rate,
        max(known) if len(known) == len(etas) else None,
        scrub.debt,
    )


def _eta(report: Progress) -> int | None:
    return None if report.why else report.eta


def drain_status(cluster: ClusterMap, reports: Mapping[str, Progress]) -> dict[str, dict[str, Any]]:
    """Returns the DrainStatus of every node being drained, by id."""
    found = {}
    for node in cluster.nodes:
        if not node.leaving:
            continue
        moved, own = rebalance_status(cluster, reports, node.turned), reports.get(node.node_id)
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
