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
    moving = "data is on the move" if found["moving"] else "all data is where it belongs"
    nodes, copies = _count(len(found["nodes"]), "node"), _count(found["copies"], "copy", "copies")
    yield f"map {found['version']}, {nodes}, {copies}: {moving}"
    if found["control"] != "reached":
        yield f"the control store is out of reach: {found['control']}"
    rows: list[tuple[str, ...]] = [("node", "state", "zone", "roles", "share", "endpoint", "")]
    rows += [_row(node, found["slots"]) for node in found["nodes"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _row(node: dict[str, Any], slots: int) -> tuple[str, ...]:
    now, wanted = (f"{100 * node[name] / slots:.0f}%" for name in ("slots", "slots_wanted"))
    return (
        node["id"],
        node["state"] + (" (drains)" if node["leaving"] and node["state"] != "draining" else ""),
        node["zone"] or "-",
        ",".join(node["roles"]),
        now if now == wanted else f"{now}→{wanted}",
        node["endpoint"],
        _note(node),
    )


def _note(node: dict[str, Any]) -> str:
    notes = []
    if node["empty"]:
        notes.append(f"empty: mesh cluster remove {node['id']}")
    elif node["state"] in _ADVICE:
        notes.append(_ADVICE[node["state"]])
    if node["state"] == "away" and node["only_copies"]:
        notes.append("has what no other node that is up has")
    if node["lease"] is False and node["state"] not in ("away", "down"):
        notes.append("does not renew its lease")
    work = node["work"]
    if work and work.get("doing", "idle") != "idle":
        notes.append(f"{work['doing']}: {work.get('entered', 0)} objects, {human(work.get('bytes', 0))}")
        if work.get("why"):
            notes.append(work["why"])
    return "; ".join(notes)
