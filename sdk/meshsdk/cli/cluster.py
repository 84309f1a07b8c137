"""`mesh cluster`: shows and changes the nodes of a mesh.

Law: shows what the cluster map and the rebalancer report; the mesh refuses a change that would lose
data, and says what to do.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import cluster_admin
from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import shared_options
from meshsdk.errors import ConnectError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshsdk.client.transport import Transport

_ADVICE = {
    "away": "does not answer; its share waits for it",
    "returning": "back; gets what it missed",
    "joining": "new; gets its share",
    "down": "given up",
}
_FULL = 97  # per cent: the alert ShardmeshDiskFull's
_CLOCK = 60  # seconds: the alert ShardmeshClockDrifts'
_FOLLOW = "Follow it: mesh cluster status --watch"
_NEXT = {
    "drain": "When `mesh cluster status --watch` calls it empty, stop it, then: mesh cluster remove {}",
    "undrain": _FOLLOW,
    "replace": "Start it on an empty directory with --node-id {}; it gets its share anew",
    "lost": "Its share is made again of the other copies. When that is done: mesh cluster remove {}",
    "remove": "What is left in its directory nobody needs",
    "reweigh": _FOLLOW,
}
"""What to do after a change, with the node's id."""
_SET = "set it (chronyc makestep); from 5 min on nodes refuse each other's requests (ShardmeshClocksDiffer)"
_SET_EITHER = "set the one whose `date -u` is wrong (chronyc makestep; ShardmeshClocksDiffer)"


@click.group()
def cluster() -> None:
    """Shows the nodes of a mesh, and has them drained, replaced, given up. Root's keys are needed.

    \b
    mesh cluster status --watch         who is there, and how far data has moved
    mesh cluster drain n2               n2 gives its share to the others; then: mesh cluster remove n2
    mesh cluster undrain n2             it stays after all
    mesh cluster replace n2             n2 has lost its disk: start it again on an empty directory
    mesh cluster lost n2                n2 will not come back: its share is copied anew
    mesh cluster reweigh n2 2000        another share of the data, in the unit of the others
    mesh cluster scrub --wait           every node reads all its bytes; what is damaged is restored
    """


@cluster.command()
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option(
    "--every", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds, with --watch."
)
@shared_options
def status(session: Session, watch: bool, every: float) -> None:
    """Shows every node: its state, its share, and its rebalancing.

    \b
    mesh cluster status --watch
    """
    with session.make_client() as client:
        while watch:
            try:
                text, found = _status(client)
            except (ConnectError, DeadlineError) as error:  # the mesh's troubles are what is watched
                text, found = f"nobody answers: {error}", {"error": str(error)}
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


_changing("drain", "NODE gives its share away.\n\nIt is empty when `mesh cluster status` says so.")
_changing("undrain", "NODE is not to be drained after all.\n\nWhat it still has stays its own.")
_changing(
    "replace",
    "NODE has lost its data and comes back empty. The others' copies are made again, and it joins anew when "
    "it is started on an empty directory with the same --node-id. Refused where only NODE has something.",
)
_changing("remove", "Takes a NODE that is empty out of the map.")


@cluster.command()
@click.argument("node")
@click.option("--anyway", is_flag=True, help="Give up what only NODE has, too. It cannot be undone.")
@shared_options
def lost(session: Session, node: str, anyway: bool) -> None:
    """NODE will not come back: its share is made again at once.

    The other copies are what it is made of.

    Without this a mesh does so by itself after --down-after (15 minutes), where nothing is lost by it.

    \b
    mesh cluster lost n2
    """
    _change(session, node, "lost", anyway=anyway)


@cluster.command()
@click.argument("node")
@click.argument("weight", type=click.IntRange(0, 1 << 20))
@shared_options
def reweigh(session: Session, node: str, weight: int) -> None:
    """Gives NODE another share of the data: its WEIGHT by that of all.

    \b
    mesh cluster reweigh n2 2000
    """
    _change(session, node, "reweigh", weight=weight)


@cluster.command()
@click.argument("node", required=False)
@click.option(
    "--wait", is_flag=True, help="Until it is done, with progress; exit status 1 if damage is left."
)
@shared_options
def scrub(session: Session, node: str | None, wait: bool) -> None:
    """Has NODE, or every node, verify all bytes in use.

    It reads them, compares them with their checksums, and itself with the other owners, now rather than in
    its time (--scrub-interval).

    What is damaged goes into quarantine: it is never given out, and restored from another node that has it.

    \b
    mesh cluster scrub n2 --wait
    """
    with session.make_client() as client:
        nodes = [
            found["id"] for found in cluster_admin.cluster_status(client.transport)["nodes"] if _scrubs(found)
        ]
        asked = {
            each: cluster_admin.change_node(client.transport, each, "scrub")["asked"]
            for each in ([node] if node else nodes)
        }
        if not wait:
            session.show(f"asked {', '.join(asked)}; follow it: mesh cluster status --watch", asked=asked)
            return
        found = _await_scrubs(session, client.transport, asked)
    left = sum(each["quarantined"] for each in found.values())
    session.show("\n".join(_scrubbed(name, each) for name, each in found.items()), nodes=found)
    if left:
        raise SystemExit(1)


def _scrubs(node: dict[str, Any]) -> bool:
    return node["state"] not in ("away", "down")


def _await_scrubs(session: Session, transport: Transport, asked: dict[str, int]) -> dict[str, dict[str, Any]]:
    """What each says of the pass that it was asked for, when all are done."""
    shown = ""
    while True:
        status = {found["id"]: found for found in cluster_admin.cluster_status(transport)["nodes"]}
        gone = [name for name in asked if name not in status or not _scrubs(status[name])]
        if gone:
            raise click.ClickException(f"{', '.join(gone)} went away; its scrub goes on when it is back")
        found = {name: status[name]["scrub"] for name in asked}
        if all(
            each and each["asked"] >= asked[name] and not each["running"] and each["compared"]
            for name, each in found.items()
        ):
            return found
        line = ", ".join(f"{name} {_percent(each)}" for name, each in found.items())
        if line != shown and not session.as_json:
            click.echo(line, err=True)
            shown = line
        threading.Event().wait(0.5)


def _percent(told: dict[str, Any] | None) -> str:
    if not told:
        return "waits"
    if not told["running"]:
        return "done" if told["compared"] else "compares itself with the others"
    return f"{min(99, 100 * told['bytes'] // max(1, told['total']))}%"


def _scrubbed(name: str, told: dict[str, Any]) -> str:
    damage = "nothing is damaged" if not told["damaged"] else f"{told['damaged']} damaged"
    if told["mended"]:
        damage += f", {told['mended']} restored from other nodes"
    if told["quarantined"]:
        damage += f"; {told['quarantined']} in quarantine: no other node has them; put those objects again"
    return f"{name}: {format_size(told['bytes'])} read, {damage}"


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
        yield f"kept: {', '.join(counts)} ({format_size(sum(each['bytes'] for each in kept.values()))})"
    if found["control"] != "reached":
        yield f"the control store is out of reach ({_meanwhile(found)}): {found['control']}"
    rows: list[tuple[str, ...]] = [("node", "state", "zone", "roles", "share", "disks", "endpoint", "")]
    now, wanted = (sum(node[name] for node in found["nodes"]) for name in ("slots", "slots_wanted"))
    hurt = any(node["state"] == "away" for node in found["nodes"])
    asked = "" if found.get("clocks_agree", True) else found["node"]
    rows += [_row(node, now, wanted, hurt=hurt, asked=asked) for node in found["nodes"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _standing(found: dict[str, Any]) -> str:
    """The one thing to know."""
    away = [node["id"] for node in found["nodes"] if node["state"] == "away" or _is_dead(node)]
    wrong = [f"{', '.join(away)} {'does' if len(away) == 1 else 'do'} not answer"] if away else []
    wrong += [f"{node['id']} cannot be asked by others" for node in found["nodes"] if node.get("refused")]
    wrong += [f"{node['id']} has no room" for node in found["nodes"] if _is_full(node)]
    wrong += _clocks(found)
    if found.get("debt"):
        wrong.append(f"{_count(found['debt'], 'object')} with fewer copies than asked")
    if not wrong or _moves(found):
        wrong.append(_moving(found))
    return "; ".join(wrong)


def _is_dead(node: dict[str, Any]) -> bool:
    """Whether a node does not answer, and nobody is known to hear of it: while the control store is lost or
    takes no writes, none is marked away."""
    return bool(node.get("silent")) and not node["lease"]


def _meanwhile(found: dict[str, Any]) -> str:
    """What goes on without the control store."""
    dead = [node["id"] for node in found["nodes"] if _is_dead(node)]
    if not dead:
        return "data is served all the same"
    return f"writes of what {', '.join(dead)} should have wait until either is back"


def _clocks(found: dict[str, Any]) -> list[str]:
    """Whose clock is wrong; of clocks of which no majority agrees nobody knows."""
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
    """What nodes that do not answer mean, and what to do."""
    away = [node for node in found["nodes"] if node["state"] == "away"]
    needed = [node["id"] for node in away if node["only_copies"]]
    if needed:
        yield (
            f"some data cannot be read or written: bring back {', '.join(needed)}, the newest first; "
            "`mesh cluster lost NODE --anyway` gives up for good what only it had"
        )
    elif away:
        yield (
            "all data can be read and written; start what is away again; "
            f"lost for good: mesh cluster lost {away[0]['id']}"
        )


def _moves(found: dict[str, Any]) -> bool:
    return bool(found["moving"] or found["movement"]["takers"])


def _moving(found: dict[str, Any]) -> str:
    moved = found["movement"]
    if not _moves(found):
        if found["control"] == "reached":
            return "all data is where it belongs"
        return "all data was where it belongs when the control store was last reached"
    words = ["data is on the move"]
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


def _row(node: dict[str, Any], slots: int, slots_wanted: int, *, hurt: bool, asked: str) -> tuple[str, ...]:
    now, wanted = _share(node["slots"], slots), _share(node["slots_wanted"], slots_wanted)
    return (
        node["id"],
        node["state"] + (" (drains)" if node["leaving"] and node["state"] != "draining" else ""),
        node["zone"] or "-",
        ",".join(node["roles"]),
        now if now == wanted else f"{now}→{wanted}",
        _room(_disks(node["scrub"])),
        node["endpoint"],
        "; ".join(_notes(node, hurt=hurt, asked=asked)),
    )


def _share(slots: int, of: int) -> str:
    return f"{100 * slots / of:.0f}%" if of else "-"


def _notes(node: dict[str, Any], *, hurt: bool, asked: str) -> Iterator[str]:
    """`asked`: the node whose clock the others' are compared with, where it may be the wrong one."""
    if node["empty"] and (node["drain"] is None or node["drain"]["empty"]):
        stop = "" if node["state"] in ("away", "down") else "stop it, then "
        yield f"empty: {stop}mesh cluster remove {node['id']}"
    elif node["empty"]:
        yield "its share is elsewhere; looks whether something else is left"
    elif node["state"] in _ADVICE:
        yield _ADVICE[node["state"]]
    if hurt and node["only_copies"]:
        words = "has what no other node that is up has"
        yield words if node["state"] == "away" else f"{words}: do not stop it"
    if node["lease"] is False and node["state"] not in ("away", "down"):
        yield "does not renew its lease"
    if node.get("silent"):
        yield "did not answer within a second"
    if node["work"] and node["state"] not in ("away", "down"):
        yield from _work(node["work"])
    if node.get("refused"):
        yield f"cannot be asked by others: {node['refused']}"
    if _is_full(node):
        yield "full: writes of names it has are refused; delete, or add a disk or a node (ShardmeshDiskFull)"
    if _is_off(node):
        words = f"its clock is {_apart(node['clock_ahead'])}"
        yield f"{words} of {asked}'s: {_SET_EITHER}" if asked else f"{words}: {_SET}"
    if node.get("domains"):
        yield node["domains"]
    yield from _load(node.get("load") or {})
    told = node["scrub"]
    if told and told["running"]:
        yield f"scrubs: {_percent(told)}"
    if told and told["quarantined"]:
        yield _lacks(told)
    yield from (f"{disk['path']} {disk['why']}" for disk in _disks(told) if not disk["serves"])


def _load(load: dict[str, Any]) -> Iterator[str]:
    if load.get("to_come"):
        words = f"{format_size(load['to_come'])} to come"
        words += f" at {format_size(load['rate'])}/s" if load["rate"] else ""
        yield words + (f", about {_time(load['eta_seconds'])} left" if load["eta_seconds"] else "")
    if load.get("to_go"):
        yield f"about {format_size(load['to_go'])} to go"


def _room(disks: list[dict[str, Any]]) -> str:
    """How many of a node's disks serve, and how full the fullest of them is."""
    if not disks:
        return "-"
    serving = [disk for disk in disks if disk["serves"]]
    full = f"{max(disk.get('full', 0) for disk in serving)}%" if serving else "none"
    return full if len(serving) == len(disks) == 1 else f"{len(serving)}/{len(disks)} {full}"


def _is_full(node: dict[str, Any]) -> bool:
    """Whether none of its disks that serve has the room at which the alert fires."""
    serving = [disk for disk in _disks(node["scrub"]) if disk["serves"]]
    return bool(serving) and all(disk.get("full", 0) > _FULL for disk in serving)


def _disks(told: dict[str, Any] | None) -> list[dict[str, Any]]:
    return list(told.get("disks", ())) if told else []


def _lacks(told: dict[str, Any]) -> str:
    return f"{_count(told['quarantined'], 'damaged or lost object')} to be restored"


def _work(work: dict[str, Any]) -> Iterator[str]:
    if work.get("doing", "idle") == "idle":
        return
    words = f"{work['doing']}: {work.get('names', 0)} names looked at, {work.get('entered', 0)} fetched"
    yield words
    if work.get("why"):
        yield work["why"]
