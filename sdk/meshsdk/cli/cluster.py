"""`mesh cluster`: the nodes of a mesh, seen and changed.

Law: shows what the map and the movers say; what would lose data is refused by the mesh, with what to do.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from meshsdk import clusters
from meshsdk.cli.running import human, shared_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.cli.running import Session

_ADVICE = {
    "away": "does not answer; its share waits for it",
    "returning": "back; gets what it missed",
    "joining": "new; gets its share",
    "down": "given up",
}


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
    """


@cluster.command()
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option(
    "--every", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds, with --watch."
)
@shared_options
def status(session: Session, watch: bool, every: float) -> None:
    """Shows every node: its state, its share, and what its mover does."""
    with session.client() as client:
        while True:
            found = clusters.cluster_status(client.transport)
            if watch and not session.as_json:
                click.clear()
            session.show("\n".join(_lines(found)), **found)
            if not watch:
                return
            threading.Event().wait(every)


def _changing(action: str, doc: str) -> None:
    @cluster.command(action, help=doc)
    @click.argument("node")
    @shared_options
    def change(session: Session, node: str) -> None:
        _change(session, node, action)


_changing("drain", "NODE gives its share away; it is empty when `mesh cluster status` says so.")
_changing("undrain", "NODE is not to be drained after all; what it still has stays its own.")
_changing(
    "replace",
    "NODE has lost its data and comes back empty: the others' copies are made again, and it joins anew when "
    "it is started on an empty directory with the same --node-id. Refused where only NODE has something.",
)
_changing("remove", "Takes a NODE that is empty out of the map.")


@cluster.command()
@click.argument("node")
@click.option("--anyway", is_flag=True, help="Give up what only NODE has, too. It cannot be undone.")
@shared_options
def lost(session: Session, node: str, anyway: bool) -> None:
    """NODE will not come back: its share is made again from the other copies at once.

    Without this a mesh does so by itself after --down-after (15 minutes), where nothing is lost by it.
    """
    _change(session, node, "lost", anyway=anyway)


@cluster.command()
@click.argument("node")
@click.argument("weight", type=click.IntRange(0, 1 << 20))
@shared_options
def reweigh(session: Session, node: str, weight: int) -> None:
    """Gives NODE another share of the data: its WEIGHT by that of all."""
    _change(session, node, "reweigh", weight=weight)


def _change(session: Session, node: str, action: str, **rest: Any) -> None:
    with session.client() as client:
        done = clusters.change_node(client.transport, node, action, **rest)
    session.show(
        f"{node} is {done['state']} (map {done['version']}); follow it: mesh cluster status --watch", **done
    )


def _lines(found: dict[str, Any]) -> Iterator[str]:
    nodes, copies = _count(len(found["nodes"]), "node"), _count(found["copies"], "copy", "copies")
    yield f"map {found['version']}, {nodes}, {copies}: {_moving(found)}"
    if found["control"] != "reached":
        yield f"the control store is out of reach (data is served all the same): {found['control']}"
    rows: list[tuple[str, ...]] = [("node", "state", "zone", "roles", "share", "endpoint", "")]
    now, wanted = (sum(node[name] for node in found["nodes"]) for name in ("slots", "slots_wanted"))
    hurt = any(node["state"] == "away" for node in found["nodes"])
    rows += [_row(node, now, wanted, hurt=hurt) for node in found["nodes"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _moving(found: dict[str, Any]) -> str:
    moved = found["movement"]
    if not found["moving"] and not moved["takers"]:
        return "all data is where it belongs"
    words = ["data is on the move"]
    if moved["bytes_total"]:
        words.append(f"{human(moved['bytes_moved'])} of {human(moved['bytes_total'])}")
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


def _row(node: dict[str, Any], slots: int, slots_wanted: int, *, hurt: bool) -> tuple[str, ...]:
    now, wanted = _share(node["slots"], slots), _share(node["slots_wanted"], slots_wanted)
    return (
        node["id"],
        node["state"] + (" (drains)" if node["leaving"] and node["state"] != "draining" else ""),
        node["zone"] or "-",
        ",".join(node["roles"]),
        now if now == wanted else f"{now}→{wanted}",
        node["endpoint"],
        "; ".join(_notes(node, hurt=hurt)),
    )


def _share(slots: int, of: int) -> str:
    return f"{100 * slots / of:.0f}%" if of else "-"


def _notes(node: dict[str, Any], *, hurt: bool) -> Iterator[str]:
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
    if node["work"] and node["state"] not in ("away", "down"):
        yield from _work(node["work"])


def _work(work: dict[str, Any]) -> Iterator[str]:
    if work.get("doing", "idle") == "idle":
        return
    words = f"{work['doing']}: {work.get('names', 0)} names looked at, {work.get('entered', 0)} fetched"
    if work.get("total"):
        words += f", {human(work['bytes'])} of {human(work['total'])}"
    yield words
    if work.get("why"):
        yield work["why"]
