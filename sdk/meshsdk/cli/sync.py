"""`mesh sync`: makes one folder like another by copying only the differences.

Law: `compare_listings` is a pure function of two listings. A file differs if it is missing, has another
size, or is newer at the source without equal content (by ETag, where that is an MD5).
Invariant: nothing is deleted without --delete, and nothing at all when the source is empty, when a part of
it cannot be read, or when a file could not be copied.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshsdk.cli.command_base import EXIT_FAILED, report_error, shared_options
from meshsdk.cli.copy_task import Copy
from meshsdk.cli.cp import is_folder_marker, report_left_out, run_copies, walk
from meshsdk.cli.path_arguments import Local, LocationType, Remote, relative_name
from meshsdk.errors import ConfigurationError, MeshError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Location
    from meshsdk.client.s3_client import Client

_MD5 = re.compile(r"[0-9a-f]{32}")
_CLOCK_SLACK_MS = 1000  # S3's times are whole seconds in HTTP headers


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a listing; `etag` is empty for local files."""

    size: int
    modified_ms: int
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative names to copy, and to delete at the target, in order."""

    copy: tuple[str, ...]
    delete: tuple[str, ...]


def compare_listings(
    source: Mapping[str, Entry],
    target: Mapping[str, Entry],
    *,
    delete: bool,
    same_content: Callable[[str], bool] = lambda _: False,
) -> Difference:
    """Return the difference that makes `target` like `source`. Calls `same_content(name)` only for files
    whose size, ETag and time do not decide.
    """

    def differs(name: str) -> bool:
        ours, theirs = source[name], target.get(name)
        if theirs is None or ours.size != theirs.size:
            return True
        if ours.etag and ours.etag == theirs.etag:
            return False
        if ours.etag and theirs.etag and _MD5.fullmatch(ours.etag) and _MD5.fullmatch(theirs.etag):
            return True
        return ours.modified_ms > theirs.modified_ms + _CLOCK_SLACK_MS and not same_content(name)

    extra = sorted(target.keys() - source.keys()) if delete else []
    return Difference(tuple(name for name in sorted(source) if differs(name)), tuple(extra))


@click.command()
@click.argument("source", type=LocationType())
@click.argument("target", type=LocationType())
@click.option("--delete", is_flag=True, help="Delete files from the target that the source lacks.")
@click.option(
    "--exclude", "excluded", multiple=True, help="Leave out names that match, such as '*.tmp'; repeatable."
)
@click.option("-j", "--jobs", type=click.IntRange(1, 64), default=8, help="Concurrent copies [8].")
@click.option("--dryrun", is_flag=True, help="Only show what would be done.")
@click.option("--only-show-errors", "only_errors", is_flag=True, help="Print errors, and nothing else.")
@shared_options
def sync(
    session: Session,
    source: Location,
    target: Location,
    delete: bool,
    excluded: Sequence[str],
    jobs: int,
    dryrun: bool,
    only_errors: bool,
) -> int:
    """Make the folder TARGET like the folder SOURCE: copy files that are missing, differ in size, or are
    newer with different content. Either may be local; both may be in the store.

    \b
    mesh sync ./photos s3://photos/train
    mesh sync --delete --dryrun ./photos s3://photos/train
    mesh sync s3://photos/train ./photos
    """
    source, target = _folder(source), _folder(target)
    if isinstance(source, Local) and isinstance(target, Local):
        raise ConfigurationError("both sides are local; use rsync, or give an s3:// address")
    with session.make_client() as client:
        if isinstance(source, Local) and _is_missing(source):
            raise NotFoundError(f"there is no folder {source.path}", status=404)
        local, unreadable = isinstance(source, Local) or isinstance(target, Local), list[OSError]()
        ours = _entries(client, source, excluded, local, unreadable.append)
        theirs = _entries(client, target, excluded, local, lambda _: None)
        left_out = [error for error in unreadable if not _is_excluded(error, source, excluded)]
        code = report_left_out(session, left_out)
        if not ours and (delete or isinstance(source, Remote)):
            raise NotFoundError(f"{source} is empty; check the address", status=404)
        same = _content_check(source, target, theirs)
        difference = compare_listings(ours, theirs, delete=delete, same_content=same)
        copies = [
            Copy(source.below(name), target.below(name), ours[name].size, ours[name].modified_ms)
            for name in difference.copy
        ]
        if not copies and not difference.delete and not session.as_json and not only_errors:
            click.echo(f"nothing to do: {len(ours)} files are the same", err=True)
        failed = run_copies(session, client, copies, jobs=jobs, dryrun=dryrun, only_errors=only_errors)
        if difference.delete and (code or failed):  # a file may seem missing that is renamed or unreadable
            why = "not all files were copied" if failed else f"not all of {source} could be read"
            report_error(MeshError(f"nothing is deleted, because {why}"), as_json=session.as_json)
            return EXIT_FAILED
        return _delete(session, client, target, difference.delete, dryrun) or failed or code


def _is_missing(place: Local) -> bool:
    try:
        place.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the folder exists; its error is reported when it is read
        return False
    return False


def _folder(place: Location) -> Local | Remote:
    match place:
        case Remote(bucket, key):
            return place if place.is_folder else Remote(bucket, f"{key}/")
        case Local(path) if path.is_file():
            raise ConfigurationError(f"{path} is a file, and sync works on folders; copy it with `mesh cp`")
        case Local():
            return place
        case _:
            raise ConfigurationError("sync works on folders; copy a stream with `mesh cp - s3://BUCKET/KEY`")


def _entries(
    client: Client,
    place: Local | Remote,
    excluded: Sequence[str],
    local: bool,
    unreadable: Callable[[OSError], None],
) -> dict[str, Entry]:
    """Return the files of a folder. `local`: one side is local, so objects that stand for folders are left
    out."""
    if isinstance(place, Remote):
        listed = (
            (item.key[len(place.key) :], Entry(item.size, item.modified_ms, item.etag))
            for item in client.list(place.bucket, place.key)
            if not (local and is_folder_marker(item))
        )
    else:
        listed = (
            (relative_name(file, place.path), Entry(status.st_size, status.st_mtime_ns // 1_000_000))
            for file, status in walk(place.path, unreadable)
        )
    return {
        name: entry
        for name, entry in listed
        if name and not any(fnmatch.fnmatch(name, pattern) for pattern in excluded)
    }


def _is_excluded(error: OSError, source: Local | Remote, excluded: Sequence[str]) -> bool:
    """Return whether the patterns exclude the file of an error, or everything in it if it is a folder."""
    if not isinstance(source, Local):
        return False
    path = Path(error.filename)
    name = relative_name(path, source.path)
    # For a folder, a name in it that no pattern mentions. (Path.is_dir raises if only a folder's names are
    # readable.)
    inside = f"{name}/\0" if os.path.isdir(path) else name
    return any(fnmatch.fnmatch(inside, pattern) for pattern in excluded)


def _content_check(
    source: Local | Remote, target: Local | Remote, theirs: Mapping[str, Entry]
) -> Callable[[str], bool]:
    """Return a check whether a local file that is newer has the MD5 of the stored object: it was touched but
    not changed."""
    if not isinstance(source, Local) or not isinstance(target, Remote):
        return lambda _: False

    def same(name: str) -> bool:
        etag = theirs[name].etag
        if not _MD5.fullmatch(etag):
            return False
        with source.path.joinpath(name).open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == etag

    return same


def _delete(
    session: Session, client: Client, target: Local | Remote, names: Sequence[str], dryrun: bool
) -> int:
    places = [target.below(name) for name in names]
    failed: set[str] = set()
    if not dryrun:
        if isinstance(target, Remote):
            keys = [place.key for place in places if isinstance(place, Remote)]
            failed = {failure.key for failure in client.delete_many(target.bucket, keys)}
        else:
            for place in places:
                if isinstance(place, Local):
                    place.path.unlink(missing_ok=True)
    for place in places:
        if isinstance(place, Remote) and place.key in failed:
            click.echo(f"mesh: {place} could not be deleted", err=True)
        else:
            verb = "would delete" if dryrun else "deleted"
            session.show(f"{verb} {place}", action="delete", target=str(place), dryrun=dryrun)
    return EXIT_FAILED if failed else 0
