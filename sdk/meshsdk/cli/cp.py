"""`mesh cp`: copies files and folders up, down and across.

Law: `plan_copies` decides every copy before `run_copies` moves a byte, several in parallel.
Invariant: one failed file does not stop the others, unless they would fail alike; the exit code reports it,
and files and folders that cannot be read.
"""

from __future__ import annotations

import errno
import mimetypes
import os
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import click

from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import EXIT_FAILED, error_code, report_error, shared_options
from meshsdk.cli.copy_task import Copy
from meshsdk.cli.copy_windows import loaded_windows
from meshsdk.cli.path_arguments import Local, LocationType, Remote, Standard, relative_name
from meshsdk.errors import (
    ConfigurationError,
    ConnectError,
    DeadlineError,
    MeshError,
    NotFoundError,
    ServerError,
)
from meshsdk.transfers import Tuning, download, stream, upload
from meshsdk.transfers import copy as copy_within

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Location
    from meshsdk.client.s3_client import Client
    from meshwire.s3.result_types import ObjectEntry


@click.command()
@click.argument("sources", type=LocationType(), nargs=-1, required=True)
@click.argument("target", type=LocationType())
@click.option("-r", "--recursive", is_flag=True, help="Copy folders with everything below them.")
@click.option("-j", "--jobs", type=click.IntRange(1, 64), default=8, help="Concurrent copies [8].")
@click.option("--dryrun", is_flag=True, help="Only show what would be copied.")
@click.option("--only-show-errors", "only_errors", is_flag=True, help="Print errors, and nothing else.")
@shared_options
def cp(
    session: Session,
    sources: Sequence[Location],
    target: Location,
    recursive: bool,
    jobs: int,
    dryrun: bool,
    only_errors: bool,
) -> int:
    """Copy files to the store, objects to files, or objects within the store; - is standard input or
    output. With -q, a summary instead of a line for each file.

    \b
    mesh cp cat.jpg s3://photos/train/cat/1.jpg
    mesh cp -r ./photos s3://photos/train        ./photos/a.jpg becomes train/a.jpg
    mesh cp s3://photos/train/cat/1.jpg .
    tar c ./photos | mesh cp - s3://backup/photos.tar
    """
    if not isinstance(target, Remote) and not all(isinstance(source, Remote) for source in sources):
        raise ConfigurationError("neither side is in the store; use cp(1), or give an s3:// address")
    with session.make_client() as client:
        unreadable = list[OSError]()
        copies = [
            copy
            for source in sources
            for copy in plan_copies(client, source, target, recursive, unreadable.append)
        ]
        _check_targets(copies)
        code = report_left_out(session, unreadable)
        return run_copies(session, client, copies, jobs=jobs, dryrun=dryrun, only_errors=only_errors) or code


def plan_copies(
    client: Client,
    source: Location,
    target: Location,
    recursive: bool,
    unreadable: Callable[[OSError], None],
) -> Iterator[Copy]:
    """Yield the individual copies for `source` and `target`, and pass to `unreadable` what stops only a part
    of a folder. Raises MeshError if the copy is not possible."""
    match source:
        case Standard():
            yield Copy(source, _location_of(target, "stdin"), None)
        case Local(path) if path.is_dir():
            if not recursive:
                raise ConfigurationError(f"{path} is a folder; add -r to copy everything below it")
            for file, status in walk(path, unreadable):
                yield _local_copy(file, status, _below(target, relative_name(file, path)))
        case Local(path):
            if not path.exists():
                raise NotFoundError(f"no file {path}", status=404)
            yield _local_copy(path, path.stat(), _location_of(target, path.name))
        case Remote() if recursive:
            yield from _copies_below(client, source, target)
        case Remote(bucket, key):
            if source.is_folder:
                raise ConfigurationError(f"{source} is a folder; add -r to copy everything in it")
            info = client.head(bucket, key)
            yield Copy(source, _location_of(target, key.rpartition("/")[2]), info.size, info.modified_ms)
        case _:
            assert_never(source)


def _copies_below(client: Client, source: Remote, target: Location) -> Iterator[Copy]:
    """Yield the copies of the objects of a folder, or of the one object of that name."""
    found = False
    for entry in client.list(source.bucket, source.key):
        if not source.holds(entry.key):
            continue
        found = True
        name = entry.key[len(source.folder) :].lstrip("/") or entry.key.rpartition("/")[2]
        if name and not (isinstance(target, Local) and is_folder_marker(entry)):
            place = Remote(source.bucket, entry.key)
            yield Copy(place, _below(target, name), entry.size, entry.modified_ms)
    if not found:
        raise NotFoundError(f"{source} is empty; check the address", status=404)


def is_folder_marker(entry: ObjectEntry) -> bool:
    """Return whether an object stands for a folder, as some tools make them: it cannot be a file."""
    return entry.key.endswith("/") and not entry.size


def walk(folder: Path, unreadable: Callable[[OSError], None]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files below a folder in order of name. `unreadable` is called with the errors of folders and
    files that are left out; so are links to folders, which may lead in a circle."""
    for base, folders, names in os.walk(folder, onerror=unreadable):
        folders.sort()
        for path in (Path(base, name) for name in folders):
            if os.path.islink(path):  # Path.is_symlink raises where the folder's names alone can be read
                unreadable(OSError(errno.ELOOP, "links to folders are not followed", str(path)))
        for name in sorted(names):
            file = Path(base, name)
            try:
                status = file.stat()
            except OSError as error:
                unreadable(error)
                continue
            if stat.S_ISREG(status.st_mode):
                yield file, status
            else:  # reading a pipe would wait for ever
                unreadable(OSError(errno.EINVAL, "not a regular file", str(file)))


def report_left_out(session: Session, unreadable: Sequence[OSError]) -> int:
    """Report what is not copied because it cannot be read, and return the exit code."""
    for error in unreadable:
        message = f"{error.filename} is left out: {error.strerror}"
        report_error(MeshError(message), as_json=session.as_json)
    return EXIT_FAILED if unreadable else 0


def _local_copy(file: Path, status: os.stat_result, target: Location) -> Copy:
    return Copy(Local(file), target, status.st_size, status.st_mtime_ns // 1_000_000)


def _location_of(target: Location, name: str) -> Location:
    """Return the target itself or, if it is a folder, the location of that name in it."""
    match target:
        case Remote() if target.is_folder:
            return target.below(name)
        case Local(path) if path.is_dir() or target.is_folder:
            return target.below(name)
        case _:
            return target


def _below(target: Location, relative: str) -> Location:
    if isinstance(target, Standard):
        raise ConfigurationError(
            "a folder cannot be copied to standard output; give a folder or an s3:// address"
        )
    return target.below(relative)


class _CopyReport:
    """What is printed of copies that run at the same time, and whether the rest is worth trying."""

    def __init__(self, session: Session, *, only_errors: bool) -> None:
        self._session, self._only_errors = session, only_errors
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._copied = self._bytes = self._failed = 0
        self._alike, self._last = 0, ""
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether an error was reported that all other copies would have, too."""
        return self._stopped

    def add_copied(self, copy: Copy) -> None:
        with self._lock:
            self._copied += 1
            self._bytes += copy.size or 0
            self._alike = 0
            if not self._only_errors and (self._session.as_json or not self._session.quiet):
                _tell(self._session, copy, dryrun=False)

    def add_failed(self, copy: Copy, error: MeshError | OSError) -> None:
        with self._lock:
            self._failed += 1
            if self._stopped:  # it ran when the error was reported
                return
            code = error_code(error)
            self._alike = self._alike + 1 if code == self._last else 1
            self._last = code
            report_error(error, as_json=self._session.as_json, about=str(copy.source))
            never = not self._copied and self._alike >= _ALIKE
            self._stopped = never or _concerns_all(error)

    def tell_interrupted(self, count: int) -> None:
        """Say how many of `count` copies are done, and how to go on."""
        if count > 1 and not self._session.as_json:
            click.echo(
                f"{self._copied} of {count} files copied; `mesh sync` copies what is missing in a folder",
                err=True,
            )

    def finish(self, count: int) -> int:
        """Print the summary of `count` copies and return the exit code."""
        session, left = self._session, count - self._copied - self._failed
        if self._stopped and left:
            report_error(
                MeshError(f"stopped: {left} files were not tried, because all would fail alike"),
                as_json=session.as_json,
            )
        if count > 1 and not session.as_json and not self._only_errors:
            failed = f", {self._failed + left} not copied" if self._copied < count else ""
            done = f"{self._copied} files{failed}, {format_size(self._bytes)}"
            click.echo(f"{done} in {time.monotonic() - self._began:.1f} s")
        return EXIT_FAILED if self._copied < count else 0


_ALIKE = 20
"""Errors of one kind, without a success before, after which the rest is not tried."""
_OF_ALL_CODES = frozenset({"NoSuchBucket", "InsufficientStorage", "ServiceUnavailable"})
_OF_ALL_NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def _concerns_all(error: MeshError | OSError) -> bool:
    """Return whether any other copy would fail, too: server, keys, bucket or disk are the reason."""
    if isinstance(error, ServerError):
        return error.blames_keys or error.code in _OF_ALL_CODES or error.status == _DISK_FULL
    if isinstance(error, (ConnectError, DeadlineError)):
        return True
    return isinstance(error, OSError) and error.errno in _OF_ALL_NUMBERS


_DISK_FULL = 507


def _check_targets(copies: Sequence[Copy]) -> None:
    """Raises ConfigurationError for two copies to one place, with both."""
    seen: dict[Location, Copy] = {}
    for copy in copies:
        other = seen.setdefault(copy.target, copy)
        if other is not copy:
            raise ConfigurationError(
                f"several sources would have the same name: {other.source} and {copy.source} would both be "
                f"{copy.target}. A folder's files are copied without its name: give each a target of its own"
            )


def run_copies(
    session: Session,
    client: Client,
    copies: Sequence[Copy],
    *,
    jobs: int,
    dryrun: bool,
    only_errors: bool = False,
) -> int:
    """Run the copies, reporting each and a summary, and return the exit code.

    An error that all others would have, too, ends the run.
    """
    if dryrun:
        for copy in copies:
            _tell(session, copy, dryrun=True)
        return 0
    report = _CopyReport(session, only_errors=only_errors)
    sizes = [copy.size for copy in copies]
    total = None if None in sizes or only_errors else sum(size or 0 for size in sizes)
    try:
        with (
            session.progress(f"{len(copies)} to copy", total) as advance,
            ThreadPoolExecutor(jobs, thread_name_prefix="mesh-copy") as pool,
        ):

            def run(some: Sequence[Copy]) -> None:
                tried = not report.is_stopped and len(some) > 1
                stored = set(_put_together(client, some, advance) if tried else ())
                for copy in some:
                    if report.is_stopped:
                        return
                    try:
                        if copy not in stored:
                            copy_one(client, copy, advance)
                    except (MeshError, OSError) as error:
                        report.add_failed(copy, error)
                    else:
                        report.add_copied(copy)

            try:
                for window in loaded_windows(client, copies):
                    list(pool.map(run, _tasks(window)))
                    if report.is_stopped:
                        break
            except BaseException:  # interrupted: running copies finish, the others do not start
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except KeyboardInterrupt:
        report.tell_interrupted(len(copies))
        raise
    return report.finish(len(copies))


def _tasks(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Yield copies one by one, and small files for one bucket together: a request for each of them costs more
    than its bytes."""
    task, size, place = list[Copy](), 0, ""
    for copy in copies:
        match copy:
            case Copy(Local(), Remote(bucket), length) if length is not None and length <= _SMALL_BYTES:
                full = len(task) == _TOGETHER_FILES or size + length > _TOGETHER_BYTES
                if task and (full or bucket != place):
                    yield task
                    task, size = [], 0
                task.append(copy)
                size, place = size + length, bucket
            case _:
                yield [copy]
    if task:
        yield task


def _put_together(client: Client, copies: Sequence[Copy], advance: Callable[[int], None]) -> Collection[Copy]:
    """Put small files of one bucket in few requests, and return those that are stored. What could not be read
    or stored is left to be tried, and reported, file by file."""
    found, objects, bucket = list[Copy](), list[tuple[str, bytes]](), ""
    for copy in copies:
        match copy.source, copy.target:
            case Local(path), Remote(bucket, key):
                with suppress(OSError):
                    objects.append((key, path.read_bytes()))
                    found.append(copy)
    try:
        client.put_many(bucket, objects)
    except MeshError:
        return ()
    advance(sum(len(data) for _, data in objects))
    return found


_SMALL_BYTES = 256 << 10
_TOGETHER_FILES = 1000
_TOGETHER_BYTES = 4 << 20


def _tell(session: Session, copy: Copy, *, dryrun: bool) -> None:
    if isinstance(copy.target, Standard):
        return
    verb = "would copy" if dryrun else "copied"
    size = "" if copy.size is None else f" ({format_size(copy.size)})"
    session.show(
        f"{verb} {copy.source} to {copy.target}{size}",
        action="copy",
        source=str(copy.source),
        target=str(copy.target),
        bytes=copy.size,
        dryrun=dryrun,
    )


def copy_one(client: Client, copy: Copy, advance: Callable[[int], None]) -> None:
    """Transfer one copy. Raises MeshError or OSError."""
    match copy.source, copy.target:
        case (Standard() | Local()) as source, Remote(bucket, key):
            origin = source.path if isinstance(source, Local) else sys.stdin.buffer
            kind = mimetypes.guess_type(key)[0]
            upload(client, origin, bucket, key, content_type=kind, progress=advance)
        case Remote(bucket, key), Local(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            info = download(client, bucket, key, path, tuning=Tuning(), progress=advance)
            if path.is_file():  # neither a device nor a pipe
                os.utime(path, ns=(info.modified_ms * 1_000_000, info.modified_ms * 1_000_000))
        case Remote(bucket, key), Standard():
            output = sys.stdout.buffer
            for piece in stream(client, bucket, key):
                output.write(piece)
                advance(len(piece))
            output.flush()
        case Remote(bucket, key), Remote(to_bucket, to_key):
            copy_within(client, (bucket, key), (to_bucket, to_key), copy.size, progress=advance)
        case _:
            raise ConfigurationError(f"{copy.source} to {copy.target}: one side must be in the store")
