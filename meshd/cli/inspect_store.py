"""`meshd inspect`: shows records, versions, segments and statistics of a store, running or stopped.

Read-only. It prints tables on stdout, or with `--json` one JSON document per line, as a stream.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from meshd.cluster.data_dir_identity import belongs_to_mesh
from meshd.config import ConfigError, load_settings
from meshd.store.disks.layout import Disks, read_marker
from meshd.store.engine.file_scan import DataFileScan
from meshd.store.engine.member_header import safe_name
from meshd.store.errors import StoreError
from meshd.store.index.index import Index, object_key
from meshd.store.records import NULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.config import StoreSettings
    from meshd.store.engine.file_scan import ScannedMember
    from meshd.store.records import DataFile, Extent, Record

_FIND = [
    click.option(
        "--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the node's settings."
    ),
    click.option(
        "--index-dir",
        type=click.Path(path_type=Path),
        help="Directory of the index, if it is not in the data directory.",
    ),
    click.option(
        "--disk",
        "disks",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Directory of a disk; repeatable.",
    ),
    click.option("--data-dir", type=click.Path(path_type=Path), help="The node's data directory."),
]


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that locate a store; the command gets `settings`. A StoreError becomes one line and
    exit status 1, a ConfigError status 2.
    """

    @functools.wraps(command)
    def wrapped(
        data_dir: Path | None,
        disks: tuple[Path, ...],
        index_dir: Path | None,
        config_file: Path | None,
        **rest: Any,
    ) -> Any:
        flags = {"data-dir": data_dir, "disk": disks, "index-dir": index_dir}
        try:
            node = load_settings(flags, config_file=config_file)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        settings = node.store
        if belongs_to_mesh(settings):  # whether or not its --control is given
            settings = replace(settings, tombstone_seconds=node.tombstone_ttl)
        try:
            return command(settings=settings, **rest)
        except StoreError as error:
            raise click.ClickException(str(error)) from error

    for option in _FIND:
        wrapped = option(wrapped)
    return wrapped


@click.group()
def inspect() -> None:
    """Show a record, a data file, or statistics; the daemon may be running."""


class ReadOnlyStore:
    """A store opened read-only; a context manager."""

    def __init__(self, settings: StoreSettings) -> None:
        if not (settings.index_dir / "data.mdb").exists():
            raise StoreError(f"no index at {settings.index_dir}; give --data-dir or --index-dir")
        self.index = Index.open(settings, readonly=True)
        markers = {root: read_marker(root) for root in settings.disks}
        self.disks = Disks({marker.disk: root for root, marker in markers.items() if marker is not None})

    def __enter__(self) -> ReadOnlyStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.index.close()

    def path_of(self, extent: Extent) -> str:
        known = extent.disk in self.disks.roots
        return (
            self.disks.path(extent.disk, extent.file)
            if known
            else f"disk {extent.disk} (not given with --disk)"
        )


@inspect.command()
@click.argument("bucket")
@click.argument("key")
@click.option("--version", default=None, help="A version id, or null; by default the current version.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@store_options
def record(settings: StoreSettings, bucket: str, key: str, version: str | None, as_json: bool) -> None:
    """Show an object's record, and where its bytes are.

    \b
    meshd inspect record photos train/cat/1.jpg --data-dir ./data
    """
    with ReadOnlyStore(settings) as sight:
        index = sight.index
        found = index.get(bucket, key) if version is None else index.find_version(bucket, key, version)
        if found is None:
            raise click.ClickException(
                f"no object {bucket}/{key}; list the bucket for other keys, or run meshd inspect versions"
            )
        document = _document(sight, found)
    if as_json:
        click.echo(msgspec.json.encode(document))
        return
    table = Table(show_header=False, title=safe_name(bucket, key), title_justify="left")
    for name, value in document.items():
        if name != "extents":
            table.add_row(name, str(value))
    for number, extent in enumerate(document["extents"]):
        text = f"{extent['length']:,} bytes, crc32c {extent['crc32c']:08x}"
        table.add_row("" if number else "extents", f"{extent['path']} +{extent['offset']} ({text})")
    _console().print(table)


@inspect.command()
@click.argument("bucket")
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per version.")
@store_options
def versions(settings: StoreSettings, bucket: str, key: str, as_json: bool) -> None:
    """List versions and delete markers of a key, the newest first.

    \b
    meshd inspect versions photos train/cat/1.jpg --data-dir ./data
    """
    with ReadOnlyStore(settings) as sight, sight.index.read_transaction() as txn:
        found = list(sight.index.versions.all_versions(txn, object_key(bucket, key)))
    if not found:
        raise click.ClickException(f"{bucket}/{key} has no versions; list the bucket to see its keys")
    rows = [_version(record) for record in found]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
        return
    table = Table("version", "modified", "size", "etag", title=safe_name(bucket, key), title_justify="left")
    for row in rows:
        table.add_row(
            row["version"],
            row["modified"],
            "delete marker" if row["marker"] else f"{row['size']:,}",
            row["etag"],
        )
    _console().print(table)


def _version(record: Record) -> dict[str, Any]:
    names = ("size", "etag", "stamp", "marker", "tags", "owner")
    fields = {name: getattr(record, name) for name in names}
    return {"version": record.version or NULL, "modified": _time(record.modified), **fields}


def _time(modified: int) -> str:
    return datetime.fromtimestamp(modified / 1000, UTC).isoformat(timespec="milliseconds")


def _document(sight: ReadOnlyStore, found: Record) -> dict[str, Any]:
    fields = (
        "size",
        "etag",
        "stamp",
        "headers",
        "metadata",
        "checksums",
        "checksum_type",
        "owner",
        "marker",
        "tags",
        "acl",
    )
    document: dict[str, Any] = {name: getattr(found, name) for name in fields}
    document["version"] = found.version or NULL
    document["modified"] = _time(found.modified)
    document["parts"] = len(found.parts)
    document["extents"] = [
        {"path": sight.path_of(e), "offset": e.offset, "length": e.length, "crc32c": e.crc32c}
        for e in found.used_extents
    ]
    return document


@inspect.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per member.")
@store_options
def segment(settings: StoreSettings, file: str, as_json: bool) -> None:
    """List the members of a data file.

    FILE is its number in hexadecimal, or its file name.

    \b
    meshd inspect segment 00000000000a --data-dir ./data
    """
    with ReadOnlyStore(settings) as sight:
        try:
            number = int(Path(file).name.split(".")[0], 16)
        except ValueError as error:
            raise click.ClickException(f"{file!r} is neither a hexadecimal number nor a file name") from error
        with sight.index.read_transaction() as txn:
            info = sight.index.files.get_file(txn, number)
        if info is None:
            raise click.ClickException(f"the index has no data file {number:012x}; see meshd inspect stats")
        with DataFileScan(info.disk, number, sight.disks.path(info.disk, number)) as survey:
            rows = [_member(sight, found) for found in survey.members(info.end)]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
        return
    _console().print(_members_table(survey.path, info, rows))
    if survey.damage:
        raise click.ClickException(f"{survey.damage[0]}; run meshd fsck")


def _member(sight: ReadOnlyStore, found: ScannedMember) -> dict[str, Any]:
    member = found.member
    with sight.index.read_transaction() as txn:
        kept = sight.index.versions.version_using_extent(txn, member, found.extent)
    return {
        "offset": found.extent.offset,
        "size": found.extent.length,
        "kind": member.kind,
        "bucket": member.bucket,
        "key": member.key,
        "stamp": int(member.stamp),
        "etag": member.etag,
        "version": member.version,
        "used": kept is not None,
    }


def _members_table(path: str, info: DataFile, rows: list[dict[str, Any]]) -> Table:
    title = (
        f"{path}: {info.kind}, {info.state}, live {info.live:,}, dead {info.dead:,}, {info.tombs} deletions"
    )
    table = Table("offset", "size", "kind", "name", "used", title=title, title_justify="left")
    for row in rows:
        name = safe_name(row["bucket"], row["key"])
        table.add_row(str(row["offset"]), f"{row['size']:,}", row["kind"], name, "yes" if row["used"] else "")
    return table


@inspect.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@store_options
def stats(settings: StoreSettings, as_json: bool) -> None:
    """Count objects, data files and bytes.

    \b
    meshd inspect stats --data-dir ./data
    """
    with ReadOnlyStore(settings) as sight:
        counts = dict(_counts(sight.index))
    if as_json:
        click.echo(msgspec.json.encode(counts))
        return
    table = Table(show_header=False)
    for name, value in counts.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    _console().print(table)


def _counts(index: Index) -> Iterator[tuple[str, int]]:
    with index.read_transaction() as txn:
        files = [info for _, info in index.files.all_files(txn)]
        yield "objects", index.objects.count(txn)
        yield "versions", index.versions.older.count(txn)
        yield "uploads", index.uploads.table.count(txn)
    yield "segments", sum(info.kind == "segment" for info in files)
    yield "own_files", sum(info.kind == "own" for info in files)
    yield "live_bytes", sum(info.live for info in files)
    yield "dead_bytes", sum(info.dead for info in files)
    yield "remembered_deletions", sum(info.tombs for info in files)
    yield "index_bytes", index.size()


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)
