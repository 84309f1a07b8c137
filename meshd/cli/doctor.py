"""`meshd doctor`: says what a node's directories lie on, and what of that weakens its promises.

It writes nothing but one page, to see how long a sync takes on a rotational disk. It exits with 0 if nothing
weakens them, with 1 otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from meshd.cli.inspect_store import store_options
from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.disks.file_systems import file_system_of, require_index_file_system, sync_seconds
from meshd.store.errors import FormatError
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.config import StoreSettings

_TURN_SECONDS: Final = 0.002
"""Less than half a turn at 15,000 a minute: to write a page again, a platter turns once."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per directory.")
@store_options
def doctor(settings: StoreSettings, as_json: bool) -> None:
    """Show the file systems and devices of a node's directories, and what weakens durability: network file
    systems below the index, mount options, write caches.

    Exit status: 0 if nothing does, 1 otherwise.

    \b
    meshd doctor --data-dir ./data
    """
    rotational = RotationalDisks(settings.disk_type)
    found = [_examine("data directory", settings.data_dir, rotational, holds_index=True)]
    found.append(_examine("index", settings.index_dir, rotational, holds_index=True))
    found += [_examine("disk", disk, rotational, holds_index=False) for disk in settings.disks]
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode(each))
    else:
        _say(found)
    if any(each["problems"] for each in found):
        raise SystemExit(1)


def _examine(what: str, directory: Path, rotational: RotationalDisks, *, holds_index: bool) -> dict[str, Any]:
    found = file_system_of(directory)
    problems = [] if found is None else found.weaknesses
    if directory.is_dir() and rotational.any_of([directory]):
        problems = [*problems, *_too_fast(directory)]
    if holds_index and directory.is_dir():
        try:
            require_index_file_system(directory)
        except FormatError as error:
            problems = [*problems, str(error)]
    report = {"directory": str(directory), "is": what, "problems": problems}
    if found is None:
        return report | {"file_system": "", "source": "", "mount_point": "", "write_cache": ""}
    return report | {
        "file_system": found.kind,
        "source": found.source,
        "mount_point": found.mount_point,
        "write_cache": found.write_cache,
    }


def _too_fast(directory: Path) -> Iterator[str]:
    try:
        took = sync_seconds(directory, SystemClock())
    except OSError as error:
        yield f"{directory}: cannot measure a sync: {error.strerror}"
        return
    if took < _TURN_SECONDS:
        yield (
            f"{directory}: a sync takes {1e3 * took:.2f} ms, less than one turn of the platter: it is "
            "acknowledged by a write cache, of the drive or of its controller. Unless that cache has a "
            "battery, a power cut loses synced data (turn a drive's cache off with hdparm -W 0)"
        )


_CACHES = {
    "write back": "volatile, emptied by syncs",
    "write through": "none that a power cut empties",
    "": "unknown",
}


def _say(found: list[dict[str, Any]]) -> None:
    table = Table("directory", "is", "file system", "source", "write cache")
    for each in found:
        cache = _CACHES.get(each["write_cache"], each["write_cache"])
        table.add_row(each["directory"], each["is"], each["file_system"] or "unknown", each["source"], cache)
    Console().print(table)
    problems = list(dict.fromkeys(problem for each in found for problem in each["problems"]))
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo("nothing weakens durability")
