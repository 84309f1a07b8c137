"""`meshd admin log-level`: temporary log level of running nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, print_hint, show_rows
from meshd.cli.admin.sts import parse_duration
from meshd.config.options import LOG_LEVELS

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_COLUMNS = ("node", "level", "configured", "seconds_left")


@click.command("log-level")
@click.argument("level", required=False, type=click.Choice(LOG_LEVELS))
@click.option(
    "--for", "duration", metavar="TIME", help="Duration, up to 24h; a plain number is seconds.  [15m]"
)
@click.option("--reset", is_flag=True, help="Return to the configured level now.")
@click.option("--node", "ids", multiple=True, metavar="ID", help="Another node of the mesh; repeatable.")
@click.option("--all", "everywhere", is_flag=True, help="Every node of the mesh.")
@as_json
@admin_client_options()
def log_level(
    node: AdminClient,
    level: str | None,
    duration: str | None,
    reset: bool,
    ids: tuple[str, ...],
    everywhere: bool,
    as_json: bool,
) -> None:
    """Show or change the log level of a node.

    A change needs no restart, applies to all processes of the node at once, and ends by itself. For a
    permanent level use --log-level of `meshd serve`.

    \b
    meshd admin log-level
    meshd admin log-level debug --for 30m
    meshd admin log-level debug --node n2
    meshd admin log-level --reset --all
    """
    if (level and reset) or (duration and not level):
        raise click.UsageError("give a LEVEL (optionally with --for), or --reset, or neither")
    body = {"seconds": parse_duration(duration)} if duration else {}
    shown, silent = [], []
    for each in _nodes(node, ids, everywhere):
        try:
            shown.append(_ask(each, level, reset, body))
        except click.ClickException as error:
            if not everywhere:
                raise
            silent.append(error.message)
    answer({"nodes": shown}, as_json, lambda: show_rows(shown, _COLUMNS, "no node answers"))
    for why in silent:
        print_hint(why)
    if silent:
        raise SystemExit(1)


def _ask(node: AdminClient, level: str | None, reset: bool, body: dict[str, int]) -> dict[str, Any]:
    if level:
        found = node.request("PUT", "admin", "log-level", level, body=body)
    else:
        found = node.request("DELETE" if reset else "GET", "admin", "log-level")
    return dict(found)


def _nodes(node: AdminClient, ids: tuple[str, ...], everywhere: bool) -> list[AdminClient]:
    """Return the chosen nodes. Raises UsageError for one that is not in the cluster map."""
    if not ids and not everywhere:
        return [node]
    known = {each["id"]: each["endpoint"] for each in node.request("GET", "map")["map"]["nodes"]}
    for each in ids:
        if each not in known:
            raise click.UsageError(f"there is no node {each!r}; the map has {', '.join(sorted(known))}")
    return [replace(node, endpoint=known[each]) for each in (sorted(known) if everywhere else ids)]
