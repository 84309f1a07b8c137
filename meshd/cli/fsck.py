"""`meshd fsck`: verifies every stored object, and rebuilds the index from the data files.

The exit status is 0 if the store is clean, 1 for damage or failure, 2 for a usage error. The report goes to
stdout, progress to stderr.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from meshd.cli.inspect_store import store_options
from meshd.cluster.data_dir_identity import belongs_to_mesh
from meshd.store.disks.data_dir_guards import clear_index_unreadable
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.config import StoreSettings
    from meshd.store.tools.fsck import CheckReport


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


@click.command()
@click.option("--rebuild", "rebuild", is_flag=True, help="First rebuild the index from the data files.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@store_options
def fsck(settings: StoreSettings, rebuild: bool, as_json: bool) -> None:
    """Verify every object of a stopped node: index, tar headers and checksums of all bytes.

    Exit status: 0 clean, 1 damaged. --rebuild needs only the data files; the old index is kept next to the
    new one.

    \b
    meshd fsck --data-dir ./data
    meshd fsck --data-dir ./data --rebuild
    """
    rebuilt: dict[str, Any] = {}
    if rebuild:
        with _progress("rebuilding", as_json) as advance:
            done = rebuild_index(settings, advance)
        rebuilt = {
            "objects": done.objects,
            "versions": done.versions,
            "uploads": done.uploads,
            "files": done.files,
            "problems": done.problems,
        }
    with _progress("checking", as_json) as advance:
        report = check_store(settings, advance)
    clear_index_unreadable(settings)
    if as_json:
        click.echo(msgspec.json.encode({"clean": report.clean, "rebuilt": rebuilt, "report": report}))
    else:
        _say(report, rebuilt, in_mesh=belongs_to_mesh(settings))
    if not report.clean or rebuilt.get("problems"):
        raise SystemExit(1)


def _say(report: CheckReport, rebuilt: dict[str, Any], *, in_mesh: bool) -> None:
    if rebuilt:
        what = f"{rebuilt['objects']:,} objects, {rebuilt['versions']:,} versions"
        click.echo(f"rebuilt: {what} from {rebuilt['files']:,} files")
        for problem in rebuilt["problems"]:
            click.echo(f"lost: {problem}")
    what = f"{report.objects:,} objects, {report.versions:,} versions, {report.files:,} files"
    click.echo(f"checked: {what}, {report.bytes:,} bytes")
    for path in report.leftovers:
        click.echo(f"leftover: {path} (removed at the next start)")
    for found in report.problems:
        click.echo(f"{found.kind}: {found.name or found.path}: {found.detail}")
    if count := len(report.problems) + len(rebuilt.get("problems", ())):
        others = "start the node, which restores those that other nodes have, and " if in_mesh else ""
        rest = "the rest" if in_mesh else "these objects"
        click.echo(f"{count} problems: {others}restore {rest} from a backup, or upload them again")
    else:
        click.echo("clean")
