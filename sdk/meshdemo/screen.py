"""What the demonstration shows: stages with one line of explanation, facts, checked claims, progress bars.

Invariant: `check` is the only way a claim reaches the screen, and a false one raises ClaimError.
"""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.rule import Rule

console = Console(highlight=False)


class ClaimError(Exception):
    """Something the demonstration says turned out false."""


def stage(number: int, title: str, shows: str) -> None:
    """Print the heading of a stage and, in one line, what it shows."""
    console.print()
    console.print(Rule(f"[bold cyan]{number} · {title}", align="left", style="cyan"))
    console.print(f"[dim]{shows}")


def fact(text: str) -> None:
    """Something that was done or measured."""
    console.print(f"  [cyan]•[/] {text}")


def check(holds: bool, claim: str, otherwise: str = "") -> None:
    """Show the claim as kept, or raise ClaimError with what was seen instead."""
    if not holds:
        raise ClaimError(f"{claim}{': ' if otherwise else ''}{otherwise}")
    console.print(f"  [green]✓[/] {claim}")


def progress() -> Progress:
    """Show progress; each task may have a `note` field."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
    )


def welcome(text: str) -> None:
    """Print the welcome."""
    console.print(Panel(text, border_style="cyan", expand=False))
