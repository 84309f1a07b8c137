"""What `mesh cluster status` prints: the most important fact first, then a line for each node.

Law: says what is wrong, where, and what to do; a node of an earlier release may not report everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.byte_sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADVICE = {
    "away": "does not answer; its share waits for it",
    "returning": "back; receives what it missed",
    "joining": "new; receives its share",
    "down": "given up",
}
_FULL, _CLOCK = 97, 60  # per cent, seconds: as in the alerts ShardmeshDiskFull and ShardmeshClockDrifts
_HANGS = (
    "it returns by itself when the disk answers; see the kernel log, then reset or replace the device; a "
    "restart of the node waits for it, too (ShardmeshDiskHangs)"
)
_SET = "set it (chronyc makestep); beyond 5 min nodes reject each other's requests (ShardmeshClocksDiffer)"
_SET_EITHER = "set the one whose `date -u` is wrong (chronyc makestep; ShardmeshClocksDiffer)"


def status_lines(found: dict[str, Any]) -> Iterator[str]:
    nodes, copies = _count(len(found["nodes"]), "node"), _count(found["copies"], "copy", "copies")
    yield f"map {found['version']}, {nodes}, {copies}: {_standing(found)}"
    yield from _away(found)
    kept = found.get("documents") or {}
    if any(each["count"] for each in kept.values()):
        counts = [
            _count(each["count"], kind.removesuffix("s")) for kind, each in kept.items() if each["count"]
        ]
        yield f"stored: {', '.join(counts)} ({format_size(sum(each['bytes'] for each in kept.values()))})"
    if found["control"] != "reached":
        yield f"the control store is unreachable ({_meanwhile(found)}): {found['control']}"
    rows: list[tuple[str, ...]] = [("node", "state", "zone", "roles", "share", "disks", "endpoint", "")]
    now, wanted = (sum(node[name] for node in found["nodes"]) for name in ("slots", "slots_wanted"))
    hurt = any(node["state"] == "away" for node in found["nodes"])
    asked = "" if found.get("clocks_agree", True) else found["node"]
    rows += [
        _row(node, now, wanted, hurt=hurt, asked=asked, lease=found.get("lease_seconds", 0))
        for node in found["nodes"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _standing(found: dict[str, Any]) -> str:
    """Summarize the most important fact."""
    silent = [node for node in found["nodes"] if node["state"] == "away" or _is_dead(node)]
    away = [node["id"] for node in silent if not _left_by_itself(node)]
    wrong = [f"{', '.join(away)} {'does' if len(away) == 1 else 'do'} not answer"] if away else []
    wrong += [
        f"{node['id']} cannot be reached by other nodes" for node in found["nodes"] if node.get("refused")
    ]
    wrong += [f"a disk of {node['id']} hangs" for node in found["nodes"] if _hangs(node)]
    for words, applies in (("is full", _is_full), ("is nearly full", _is_nearly_full)):
        wrong += [f"{node['id']} {words}" for node in found["nodes"] if applies(node)]
    wrong += [f"the index of {node['id']} is full" for node in found["nodes"] if _is_index_full(node)]
    wrong += [
        f"{node['id']} has {_count(out, 'disk')} out of service"
        for node in found["nodes"]
        if (out := sum(not disk["serves"] for disk in _disks(node))) and not _hangs(node)
    ]
    wrong += _clocks(found)
    if found.get("debt"):
        wrong.append(f"{_count(found['debt'], 'object')} with fewer copies than required")
    if not wrong or _moves(found):
        wrong.append(_moving(found))
    return "; ".join(wrong)


def _is_dead(node: dict[str, Any]) -> bool:
    """Whether a node does not answer although it is not marked away: nobody listens there and its lease has
    not ended yet, or no node can be marked away, for the control store cannot be written."""
    return bool(node.get("absent") or (node.get("silent") and not node["lease"]))


def _meanwhile(found: dict[str, Any]) -> str:
    """Describe what works without the control store."""
    dead = [node["id"] for node in found["nodes"] if _is_dead(node)]
    if not dead:
        return "data is still served"
    return f"writes of data that {', '.join(dead)} owns wait until it or the control store is back"


def _clocks(found: dict[str, Any]) -> list[str]:
    """Name the nodes whose clocks are wrong; without an agreeing majority, only the difference is known."""
    off = {node["id"]: node["clock_ahead"] for node in found["nodes"] if _is_off(node)}
    if off and not found["clocks_agree"]:
        names, shown = ", ".join(sorted({found["node"], *off})), (0, *off.values())
        return [f"the clocks of {names} differ by {_time(max(shown) - min(shown))}"]
    return [f"{node}'s clock is {_apart(seconds)}" for node, seconds in off.items()]


def _is_off(node: dict[str, Any]) -> bool:
    ahead: int | None = node.get("clock_ahead")
    return ahead is not None and abs(ahead) >= _CLOCK


def _apart(seconds: int) -> str:
    return f"{_time(abs(seconds))} {'ahead' if seconds > 0 else 'behind'}"


def _away(found: dict[str, Any]) -> Iterator[str]:
    """Explain the effect of nodes that are away, and what to do."""
    away = [node for node in found["nodes"] if node["state"] == "away"]
    needed = [node["id"] for node in away if node["only_copies"]]
    hanging = [node["id"] for node in away if _left_by_itself(node)]
    help_ = [f"{', '.join(hanging)} left because a disk hangs: {_HANGS}"] if hanging else []
    if needed:
        restart = [node for node in needed if node not in hanging]
        if restart:
            help_.append(f"restart {', '.join(restart)}, the last to leave first")
        yield (
            f"some data cannot be read or written: {'; '.join(help_)}; "
            "`mesh cluster lost NODE --anyway` permanently gives up data that only it has"
        )
    elif away:
        after = found.get("down_after_seconds")
        copied = (
            f" (after {_time(round(after))} away, the data of a node is copied to others)" if after else ""
        )
        if len(hanging) < len(away):
            help_.append("restart the nodes that are away" if not hanging else "restart the others")
        yield (
            f"all data can be read and written; {'; '.join(help_)}{copied}; "
            f"if lost for good: mesh cluster lost {away[0]['id']}"
        )


def _moves(found: dict[str, Any]) -> bool:
    return bool(found["moving"] or found["movement"]["takers"])


def _moving(found: dict[str, Any]) -> str:
    moved = found["movement"]
    if not _moves(found):
        if found["control"] == "reached":
            return "all data is where it belongs"
        return "all data was where it belongs when the control store was last reached"
    words = ["data is moving"]
    words += [
        f"{each['copies']}→{each['wanted']} copies of {each['bucket']}" for each in found.get("counts", ())
    ]
    if moved["bytes_total"]:
        words.append(f"{format_size(moved['bytes_moved'])} of {format_size(moved['bytes_total'])}")
    if moved["eta_seconds"]:
        words.append(f"about {_time(moved['eta_seconds'])} left")
    return ", ".join(words)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _time(seconds: int) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{round(seconds / size)} {unit}"
    return f"{seconds} s"


def _row(
    node: dict[str, Any], slots: int, slots_wanted: int, *, hurt: bool, asked: str, lease: int
) -> tuple[str, ...]:
    now, wanted = _share(node["slots"], slots), _share(node["slots_wanted"], slots_wanted)
    return (
        node["id"],
        node["state"] + (" (draining)" if node["leaving"] and node["state"] != "draining" else ""),
        node["zone"] or "-",
        ",".join(node["roles"]),
        now if now == wanted else f"{now}→{wanted}",
        _room(_disks(node)),
        node["endpoint"],
        "; ".join(_notes(node, hurt=hurt, asked=asked, lease=lease)),
    )


def _share(slots: int, of: int) -> str:
    return f"{100 * slots / of:.0f}%" if of else "-"


def _notes(node: dict[str, Any], *, hurt: bool, asked: str, lease: int) -> Iterator[str]:
    """Return notes on a node. `asked`: whose clock is the reference, if it may be wrong; `lease`: seconds."""
    if node["empty"] and (node["drain"] is None or node["drain"]["empty"]):
        stop = "" if node["state"] in ("away", "down") else "stop it, then "
        yield f"empty: {stop}mesh cluster remove {node['id']}"
    elif node["empty"]:
        yield "its share has moved; checking for remaining data"
    elif _left_by_itself(node):
        yield "has left its share to the others until its disk answers"
    elif node["state"] in _ADVICE:
        yield _ADVICE[node["state"]]
    if hurt and node["only_copies"]:
        words = "has data that no other running node has"
        yield words if node["state"] == "away" else f"{words}: do not stop it"
    if node["lease"] is False and node["state"] not in ("away", "down"):
        yield "does not renew its lease"
    if node.get("absent"):
        marked = f"; it is marked away within {lease} s" if lease and node["lease"] is not None else ""
        yield f"no daemon listens there{marked}"
    elif node.get("silent"):
        yield "did not answer within a second"
    if node["work"] and node["state"] not in ("away", "down"):
        yield from _work(node["work"])
    if node.get("refused"):
        yield f"cannot be reached by other nodes: {node['refused']}"
    if _is_full(node):
        yield "full: rejects writes; delete objects, or add a disk or a node (ShardmeshDiskFull)"
    elif _is_nearly_full(node):
        yield "nearly full: delete objects, or add a disk or a node (ShardmeshDiskFull)"
    if _is_off(node):
        words = f"its clock is {_apart(node['clock_ahead'])}"
        yield f"{words} of {asked}'s: {_SET_EITHER}" if asked else f"{words}: {_SET}"
    if node.get("domains"):
        yield node["domains"]
    yield from _load(node.get("load") or {})
    if (scrubbed := node["scrub"]) and scrubbed["running"]:
        yield f"scrub: {scrub_percent(scrubbed)}"
    if scrubbed and scrubbed["quarantined"]:
        damaged = _count(scrubbed["quarantined"], "damaged or lost object")
        yield f"{damaged} to be restored; if some stay, no other running node has them (ShardmeshDamagedData)"
    yield from (f"{disk['path']} {disk['why']}" for disk in _disks(node) if disk["why"] or not disk["serves"])


def _load(load: dict[str, Any]) -> Iterator[str]:
    if load.get("to_come"):
        words = f"{format_size(load['to_come'])} to receive"
        words += f" at {format_size(load['rate'])}/s" if load["rate"] else ""
        yield words + (f", about {_time(load['eta_seconds'])} left" if load["eta_seconds"] else "")
    if load.get("to_go"):
        yield f"about {format_size(load['to_go'])} to hand over"


def _room(disks: list[dict[str, Any]]) -> str:
    """Format how many of a node's disks work, and how full the fullest is."""
    if not disks:
        return "-"
    serving = [disk for disk in disks if disk["serves"]]
    full = f"{max(disk.get('full', 0) for disk in serving)}%" if serving else "none"
    return full if len(serving) == len(disks) == 1 else f"{len(serving)}/{len(disks)} {full}"


def _disks(node: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = list((node["scrub"] or {}).get("disks", ()))
    return found


def _hangs(node: dict[str, Any]) -> bool:
    """Whether a disk, or the device of the index, does not answer."""
    return any("ShardmeshDiskHangs" in disk["why"] for disk in _disks(node))


def _left_by_itself(node: dict[str, Any]) -> bool:
    """Whether a node is away because a disk of it hangs, and not because it does not answer."""
    return bool(node["state"] == "away" and _hangs(node) and node["lease"] is not False)


def _is_full(node: dict[str, Any]) -> bool:
    """Whether none of its working disks takes new data. Nodes of earlier releases do not say it."""
    serving = [disk for disk in _disks(node) if disk["serves"]]
    return bool(serving) and all(disk.get("refuses_writes", _is_above_alert(disk)) for disk in serving)


def _is_nearly_full(node: dict[str, Any]) -> bool:
    serving = [disk for disk in _disks(node) if disk["serves"]]
    return bool(serving) and not _is_full(node) and all(map(_is_above_alert, serving))


def _is_above_alert(disk: dict[str, Any]) -> bool:
    return bool(disk.get("full", 0) > _FULL)


def _is_index_full(node: dict[str, Any]) -> bool:
    return any("ShardmeshIndexFull" in disk["why"] for disk in _disks(node))


def _work(work: dict[str, Any]) -> Iterator[str]:
    if work.get("doing", "idle") == "idle":
        return
    yield f"{work['doing']}: {work.get('names', 0)} names compared, {work.get('entered', 0)} fetched"
    if work.get("why"):
        yield work["why"]


def scrub_percent(progress: dict[str, Any] | None, asked: int = 0) -> str:
    if not progress or progress["asked"] < asked:  # this is the progress of an earlier scrub
        return "waiting"
    if not progress["running"]:
        return "done" if progress["compared"] else "comparing with other owners"
    return f"{min(99, 100 * progress['bytes'] // max(1, progress['total']))}%"
