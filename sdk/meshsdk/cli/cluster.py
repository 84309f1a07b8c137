"""`mesh cluster`: shows and changes the nodes of a mesh.

Law: shows what the cluster map and the rebalancer report; the mesh refuses a change that would lose data,
and says what to do.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import cluster_admin
from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.slots import slots
from meshsdk.errors import ConnectError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshsdk.client.transport import Transport

_ADVICE = {
    "away": "does not answer; its share waits for it",
    "returning": "back; receives what it missed",
    "joining": "new; receives its share",
    "down": "given up",
}
_FULL, _CLOCK = 97, 60  # per cent, seconds: as in the alerts ShardmeshDiskFull and ShardmeshClockDrifts
_FOLLOW = "Follow it: mesh cluster status --watch"
_NEXT = {
    "drain": "When `mesh cluster status --watch` shows it as empty, stop it, then: mesh cluster remove {}",
    "undrain": _FOLLOW,
    "replace": "Start it on an empty directory with --node-id {}; it then receives its share again",
    "lost": "Its share is rebuilt from the other copies. When that is done: mesh cluster remove {}",
    "remove": "Keep its directory if it was given up with --anyway; otherwise it is no longer needed",
    "reweigh": _FOLLOW,
}
"""The next step after a change; {} is the node's id."""
_SET = "set it (chronyc makestep); beyond 5 min nodes reject each other's requests (ShardmeshClocksDiffer)"
_SET_EITHER = "set the one whose `date -u` is wrong (chronyc makestep; ShardmeshClocksDiffer)"


@click.group()
def cluster() -> None:
    """Show the nodes of a mesh; drain, replace or give up nodes. Requires root's keys.

    \b
    mesh cluster status --watch         show nodes, and the progress of rebalancing
    mesh cluster drain n2               move the share of n2 to other nodes; then: mesh cluster remove n2
    mesh cluster undrain n2             cancel the drain
    mesh cluster replace n2             n2 has lost its disk: start it again on an empty directory
    mesh cluster lost n2                n2 will not come back: rebuild its share on other nodes
    mesh cluster reweigh n2 2000        change its share of the data, in the unit of the other weights
    mesh cluster slots 131072           split the slots, for 1,000 nodes and more
    mesh cluster scrub --wait           verify all bytes on every node and repair damage
    """


cluster.add_command(slots)


@cluster.command()
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option(
    "--every",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0.2),
    help="Seconds between updates with --watch.",
)
@shared_options
def status(session: Session, watch: bool, every: float) -> None:
    """Show the nodes, their states and shares, and what moves.

    \b
    mesh cluster status --watch
    """
    with session.make_client() as client:
        while watch:
            try:
                text, found = _status(client)
            except (ConnectError, DeadlineError) as error:  # --watch must survive an outage of the mesh
                text, found = f"no node answers: {error}", {"error": str(error)}
            if not session.as_json:
                click.clear()
            session.show(text, **found)
            threading.Event().wait(every)
        text, found = _status(client)
        session.show(text, **found)


def _status(client: Client) -> tuple[str, dict[str, Any]]:
    found = cluster_admin.cluster_status(client.transport)
    return "\n".join(_lines(found)), found


def _changing(action: str, doc: str) -> None:
    @cluster.command(action, help=f"{doc}\n\n\b\nmesh cluster {action} n2")
    @click.argument("node")
    @shared_options
    def change(session: Session, node: str) -> None:
        _change(session, node, action)


_changing("drain", "Move the share of NODE to other nodes.\n\n`mesh cluster status` shows when it is empty.")
_changing("undrain", "Cancel the drain of NODE.\n\nThe node keeps the data that it still has.")
_changing(
    "replace",
    "Replace NODE, which has lost its data.\n\nIts share is rebuilt from the other copies. It joins again "
    "when it is started on an empty directory with the same --node-id. Refused if only NODE has the data.",
)
_changing("remove", "Remove an empty NODE from the cluster map.")


@cluster.command()
@click.argument("node")
@click.option("--anyway", is_flag=True, help="Also give up data that only NODE has. Cannot be undone.")
@shared_options
def lost(session: Session, node: str, anyway: bool) -> None:
    """Give up NODE and rebuild its share at once.

    The share is rebuilt from the other copies.

    A mesh does this on its own after --down-after (15 minutes) if no data would be lost.

    \b
    mesh cluster lost n2
    """
    _change(session, node, "lost", anyway=anyway)


@cluster.command()
@click.argument("node")
@click.argument("weight", type=click.IntRange(0, 1 << 20))
@shared_options
def reweigh(session: Session, node: str, weight: int) -> None:
    """Change the share of NODE: its WEIGHT relative to the total.

    \b
    mesh cluster reweigh n2 2000
    """
    _change(session, node, "reweigh", weight=weight)


@cluster.command()
@click.argument("node", required=False)
@click.option(
    "--wait", is_flag=True, help="Wait until it is done, with progress; exit code 1 if damage is left."
)
@shared_options
def scrub(session: Session, node: str | None, wait: bool) -> None:
    """Verify all bytes in use on NODE, or on every node.

    A node reads its bytes, compares them with their checksums, and compares itself with the other owners,
    now instead of at the next interval (--scrub-interval).

    Damaged data goes into quarantine: it is never served, and is restored from another node that has it.

    \b
    mesh cluster scrub n2 --wait
    """
    with session.make_client() as client:
        nodes = [] if node else cluster_admin.cluster_status(client.transport)["nodes"]
        skipped = [found["id"] for found in nodes if not _scrubs(found)]
        if skipped:
            click.echo(f"not scrubbed, because they do not answer: {', '.join(skipped)}", err=True)
        asked = {
            each: cluster_admin.change_node(client.transport, each, "scrub")["asked"]
            for each in ([node] if node else [found["id"] for found in nodes if _scrubs(found)])
        }
        if not wait:
            session.show(
                f"scrub started on {', '.join(asked)}; follow it: mesh cluster status --watch", asked=asked
            )
            return
        found = _await_scrubs(session, client.transport, asked)
    left = sum(each["quarantined"] for each in found.values())
    session.show("\n".join(_scrubbed(name, each) for name, each in found.items()), nodes=found)
    if left:
        raise SystemExit(1)


def _scrubs(node: dict[str, Any]) -> bool:
    return node["state"] not in ("away", "down")


def _await_scrubs(session: Session, transport: Transport, asked: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Wait until all requested scrubs are done, and return their results by node."""
    shown = ""
    while True:
        status = {found["id"]: found for found in cluster_admin.cluster_status(transport)["nodes"]}
        gone = [name for name in asked if name not in status or not _scrubs(status[name])]
        if gone:
            raise click.ClickException(f"{', '.join(gone)} went away; the scrub continues when it returns")
        found = {name: status[name]["scrub"] for name in asked}
        if all(
            each and each["asked"] >= asked[name] and not each["running"] and each["compared"]
            for name, each in found.items()
        ):
            return found
        line = ", ".join(f"{name} {_percent(each, asked[name])}" for name, each in found.items())
        if line != shown and not session.as_json:
            click.echo(line, err=True)
            shown = line
        threading.Event().wait(0.5)


def _percent(progress: dict[str, Any] | None, asked: int = 0) -> str:
    if not progress or progress["asked"] < asked:  # this is the progress of an earlier scrub
        return "waiting"
    if not progress["running"]:
        return "done" if progress["compared"] else "comparing with other owners"
    return f"{min(99, 100 * progress['bytes'] // max(1, progress['total']))}%"


def _scrubbed(name: str, result: dict[str, Any]) -> str:
    damage = "no damage" if not result["damaged"] else f"{result['damaged']} damaged"
    if result["mended"]:
        damage += f", {result['mended']} restored from other nodes"
    if result["quarantined"]:
        damage += (
            f"; {result['quarantined']} in quarantine: no other node has them; upload those objects again"
        )
    return f"{name}: {format_size(result['bytes'])} read, {damage}"


def _change(session: Session, node: str, action: str, **rest: Any) -> None:
    with session.make_client() as client:
        done = cluster_admin.change_node(client.transport, node, action, **rest)
    session.show(f"{node} is {done['state']} (map {done['version']}). {_NEXT[action].format(node)}", **done)


def _lines(found: dict[str, Any]) -> Iterator[str]:
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
    away = [node["id"] for node in found["nodes"] if node["state"] == "away" or _is_dead(node)]
    wrong = [f"{', '.join(away)} {'does' if len(away) == 1 else 'do'} not answer"] if away else []
    wrong += [
        f"{node['id']} cannot be reached by other nodes" for node in found["nodes"] if node.get("refused")
    ]
    wrong += [f"{node['id']} is full" for node in found["nodes"] if _is_full(node)]
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
    if needed:
        yield (
            f"some data cannot be read or written: restart {', '.join(needed)}, the last to leave first; "
            "`mesh cluster lost NODE --anyway` permanently gives up data that only it has"
        )
    elif away:
        after = found.get("down_after_seconds")
        copied = f" (who is away for {_time(round(after))} has its data copied to others)" if after else ""
        yield (
            f"all data can be read and written; restart the nodes that are away{copied}; "
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
        _room((node["scrub"] or {}).get("disks", ())),
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
    if _is_off(node):
        words = f"its clock is {_apart(node['clock_ahead'])}"
        yield f"{words} of {asked}'s: {_SET_EITHER}" if asked else f"{words}: {_SET}"
    if node.get("domains"):
        yield node["domains"]
    yield from _load(node.get("load") or {})
    if (scrubbed := node["scrub"]) and scrubbed["running"]:
        yield f"scrub: {_percent(scrubbed)}"
    if scrubbed and scrubbed["quarantined"]:
        damaged = _count(scrubbed["quarantined"], "damaged or lost object")
        yield f"{damaged} to be restored; if some stay, no other running node has them (ShardmeshDamagedData)"
    disks = (scrubbed or {}).get("disks", ())
    yield from (f"{disk['path']} {disk['why']}" for disk in disks if disk["why"] or not disk["serves"])


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


def _is_full(node: dict[str, Any]) -> bool:
    """Whether all of its working disks are above the threshold of the alert."""
    serving = [disk for disk in (node["scrub"] or {}).get("disks", ()) if disk["serves"]]
    return bool(serving) and all(disk.get("full", 0) > _FULL for disk in serving)


def _work(work: dict[str, Any]) -> Iterator[str]:
    if work.get("doing", "idle") == "idle":
        return
    yield f"{work['doing']}: {work.get('names', 0)} names compared, {work.get('entered', 0)} fetched"
    if work.get("why"):
        yield work["why"]
