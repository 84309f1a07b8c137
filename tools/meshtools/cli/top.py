"""`mesh top`: this machine, its training jobs and the nodes behind them, on one screen."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from meshsdk.cli.command_base import shared_options

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshtools.top.nodes import Nodes
    from meshtools.top.snapshot_diff import Screen

_SOON: Final = 0.5  # seconds until the first screen


@click.command()
@click.option("--once", is_flag=True, help="Print one screen and exit; the default without a terminal.")
@click.option(
    "-i", "--interval", type=click.FloatRange(0.1, 3600), default=2.0, help="Seconds per screen [2]."
)
@shared_options
def top(session: Session, once: bool, interval: float) -> None:
    """Show GPUs (MIG instances separately), CPU, memory, disks and network of this machine, its training jobs
    with their rate, stall and accelerator utilization, and the activity of the nodes at MESH_ENDPOINT.

    Your own jobs always appear; jobs of other users appear if their pages are readable, and jobs on other
    machines if they report (mesh.Loader(…, report=NAME)).

    \b
    mesh top                      until Ctrl-C
    mesh top --once -i 10         what happened in ten seconds
    mesh top --json               one object, once
    """
    from meshtools.top.nodes import find_nodes

    whom = find_nodes(session.endpoint, session.ca_cert)
    if once or session.as_json or not sys.stdout.isatty():
        screen = _take_screen(whom, interval)
        if session.as_json:
            session.show("", **screen.to_dict())
        else:
            _print(screen)
        return
    _live(whom, interval)


def _take_screen(whom: Nodes, interval: float) -> Screen:
    from meshtools.top.snapshot_diff import diff_snapshots, take_snapshot

    before = take_snapshot(whom)
    threading.Event().wait(interval)
    return diff_snapshots(before, take_snapshot(whom), _notes(whom))


def _notes(whom: Nodes) -> tuple[str, ...]:
    return (whom.why,) if whom.why else ()


def _print(screen: Screen) -> None:
    from rich.console import Console

    from meshtools.cli.top_tables import render_screen

    # A pipe has no width: a program that reads the tables needs whole lines.
    Console(width=None if sys.stdout.isatty() else 200).print(render_screen(screen))


def _live(whom: Nodes, interval: float) -> None:
    """Shows a screen per interval until Ctrl-C, which is the normal end."""
    from rich.console import Console
    from rich.live import Live

    from meshtools.cli.top_tables import render_screen
    from meshtools.top.snapshot_diff import diff_snapshots, take_snapshot

    before, wait = take_snapshot(whom), min(interval, _SOON)
    with suppress(KeyboardInterrupt), Live(console=Console(), screen=True, auto_refresh=False) as live:
        live.update("measuring …", refresh=True)
        while True:
            threading.Event().wait(wait)
            after = take_snapshot(whom)
            live.update(render_screen(diff_snapshots(before, after, _notes(whom))), refresh=True)
            before, wait = after, interval
