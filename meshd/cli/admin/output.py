"""Output of `meshd admin`: tables for people or JSON, prompts, hints, and options shared by its commands.

Tables go only to stdout and hints only to stderr, so that either can be piped.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


def show_json(document: object) -> None:
    """Print a document as indented JSON."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def show_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], empty: str) -> None:
    """Print a table of these columns; `empty` is the hint for an empty list."""
    from rich.table import Table

    rows = list(rows)
    if not rows:
        click.echo(empty, err=True)
        return
    table = Table(*(column.replace("_", " ") for column in columns))
    for row in rows:
        table.add_row(*(_text(row[column]) for column in columns))
    _print(table)


def show_one(document: Mapping[str, Any]) -> None:
    """Print a table of names and values."""
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in document.items():
        table.add_row(name.replace("_", " "), _text(value))
    _print(table)


def confirm(question: str, yes: bool) -> None:
    """Ask before an irreversible action. Raises UsageError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Add --yes to confirm.")
    click.confirm(question, abort=True)


def print_hint(text: str) -> None:
    """Print a hint to stderr."""
    click.echo(text, err=True)


def answer(document: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Print `document` as JSON, or call `show`."""
    if as_json:
        show_json(document)
    else:
        show()


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "–"
    if isinstance(value, dict):
        return str(value.get("access_key") or json.dumps(value))
    return str(value) or "–"


def _print(table: object) -> None:
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table, markup=False)
