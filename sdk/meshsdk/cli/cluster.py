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
from meshsdk.cli.cluster_status import scrub_percent, status_lines
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.slots import slots
from meshsdk.errors import ConnectError, DeadlineError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshsdk.client.transport import Transport

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
    return "\n".join(status_lines(found)), found


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
    session.show("\n".join(_scrub_line(name, each) for name, each in found.items()), nodes=found)
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
        line = ", ".join(f"{name} {scrub_percent(each, asked[name])}" for name, each in found.items())
        if line != shown and not session.as_json:
            click.echo(line, err=True)
            shown = line
        threading.Event().wait(0.5)


def _scrub_line(name: str, result: dict[str, Any]) -> str:
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
