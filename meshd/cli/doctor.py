"""`meshd doctor`: says what a node's directories lie on, and what of that weakens its promises.

Read-only. It exits with 0 if nothing does, with 1 otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from meshd.cli.inspect_store import store_options
from meshd.store.disks.file_systems import file_system_of, require_index_file_system
from meshd.store.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import StoreSettings


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per directory.")
@store_options
def doctor(settings: StoreSettings, as_json: bool) -> None:
    """Say which file systems and devices a node's directories are on, and what weakens its promises: network
    file systems below the index, mount options, write caches.

    Exit status: 0 if nothing does, 1 otherwise.

    \b
    meshd doctor --data-dir ./data
    """
    found = [_examined("data directory", settings.data_dir, holds_index=True)]
    found.append(_examined("index", settings.index_dir, holds_index=True))
    found += [_examined("disk", disk, holds_index=False) for disk in settings.disks]
    if as_json:
        for each in found:
            click.echo(msgspec.json.encode(each))
    else:
        _say(found)
    if any(each["problems"] for each in found):
        raise SystemExit(1)


def _examined(what: str, directory: Path, *, holds_index: bool) -> dict[str, Any]:
    found = file_system_of(directory)
    problems = [] if found is None else found.weaknesses
    if holds_index and directory.is_dir():
        try:
            require_index_file_system(directory)
        except FormatError as error:
            problems = [*problems, str(error)]
    told = {"directory": str(directory), "is": what, "problems": problems}
    if found is None:
        return told | {"file_system": "", "source": "", "mount_point": "", "write_cache": ""}
    return told | {
        "file_system": found.kind,
        "source": found.source,
        "mount_point": found.mount_point,
        "write_cache": found.write_cache,
    }


_CACHES = {
    "write back": "volatile, emptied by syncs",
    "write through": "none that a power cut empties",
    "": "not told",
}


def _say(found: list[dict[str, Any]]) -> None:
    table = Table("directory", "is", "file system", "source", "write cache")
    for each in found:
        cache = _CACHES.get(each["write_cache"], each["write_cache"])
        table.add_row(each["directory"], each["is"], each["file_system"] or "not told", each["source"], cache)
    Console().print(table)
    problems = list(dict.fromkeys(problem for each in found for problem in each["problems"]))
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo("nothing that weakens the promises")
