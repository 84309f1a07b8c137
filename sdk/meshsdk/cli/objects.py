"""`mesh ls`, `stat`, `mb`, `rb`, `rm` and `archive`: list, inspect and remove objects and buckets.

Law: one object, one line; nothing is downloaded.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from meshsdk.byte_sizes import format_size
from meshsdk.cli.command_base import EXIT_FAILED, EXIT_MISSING, shared_options
from meshsdk.cli.path_arguments import Remote, RemoteType
from meshsdk.errors import AccessError, ConfigurationError, ServerError
from meshwire.dataset.archive_paths import ARCHIVE_EXTENSIONS, MEMBER_SEPARATOR, archive_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.command_base import Session
    from meshsdk.client.s3_client import Client
    from meshwire.s3.result_types import DeleteFailure, ObjectEntry


def show_time(milliseconds: int) -> str:
    """Format a time as local time to the second."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@click.command()
@click.argument("url", type=RemoteType(), required=False)
@click.option("-r", "--recursive", is_flag=True, help="List all keys below, not just one level.")
@shared_options
def ls(session: Session, url: Remote | None, recursive: bool) -> int:
    """List buckets, or the keys that begin with URL.

    \b
    mesh ls                      the buckets
    mesh ls s3://photos/train/   one level: folders, then objects
    mesh ls -r s3://photos       every object; ends with a count
    """
    with session.make_client() as client:
        if url is None:
            buckets = client.buckets()
            if not buckets:
                session.tell("no buckets yet: mesh mb s3://NAME")
            for bucket in buckets:
                line = f"{show_time(bucket.created_ms)}  s3://{bucket.name}"
                session.show(line, type="bucket", bucket=bucket.name, created_ms=bucket.created_ms)
            return 0
        return _list_keys(session, client, url, recursive)


def _list_keys(session: Session, client: Client, url: Remote, recursive: bool) -> int:
    count = size = prefixes = 0
    for page in client.pages(url.bucket, url.key, delimiter="" if recursive else "/"):
        for prefix in page.common_prefixes:
            session.show(f"{'':19}  {'':>10}  {prefix}", type="prefix", bucket=url.bucket, key=prefix)
        for entry in page.entries:
            _show_entry(session, url.bucket, entry)
            size += entry.size
        count += len(page.entries)
        prefixes += len(page.common_prefixes)
    if not count and not prefixes and url.key:
        click.echo(f"mesh: no key begins with {url}", err=True)
        return EXIT_MISSING
    if not count and not prefixes and not recursive:
        session.tell(f"{url} is empty: mesh cp -r ./FOLDER {url}")
    if recursive and not session.as_json:
        click.echo(f"{count} objects, {format_size(size)}")
    return 0


def _show_entry(session: Session, bucket: str, entry: ObjectEntry) -> None:
    session.show(
        f"{show_time(entry.modified_ms)}  {format_size(entry.size):>10}  {entry.key}",
        type="object",
        bucket=bucket,
        key=entry.key,
        size=entry.size,
        etag=entry.etag,
        modified_ms=entry.modified_ms,
    )


@click.command()
@click.argument("url", type=RemoteType())
@shared_options
def stat(session: Session, url: Remote) -> None:
    """Show the metadata of an object, or the total size of a folder or bucket.

    \b
    mesh stat s3://photos/train/cat/1.jpg
    mesh stat s3://photos/train/
    """
    with session.make_client() as client:
        if url.is_folder:
            count = size = 0
            for entry in client.list(url.bucket, url.key):
                count += 1
                size += entry.size
            session.show(
                f"{url}: {count} objects, {format_size(size)}",
                type="folder",
                url=str(url),
                objects=count,
                bytes=size,
            )
            return
        info = client.head(url.bucket, url.key)
    record = {
        "size": info.size,
        "etag": info.etag,
        "modified_ms": info.modified_ms,
        "content_type": info.content_type,
        "metadata": dict(info.metadata),
    }
    lines = [f"{url}", f"  size      {info.size} ({format_size(info.size)})", f"  etag      {info.etag}"]
    lines += [f"  modified  {show_time(info.modified_ms)}", f"  type      {info.content_type}"]
    lines += [f"  metadata  {name} = {value}" for name, value in info.metadata.items()]
    session.show("\n".join(lines), type="object", bucket=url.bucket, key=url.key, **record)


@click.command()
@click.argument("url", type=RemoteType())
@shared_options
def mb(session: Session, url: Remote) -> None:
    """Create a bucket. A bucket of yours that exists already is left as it is, with exit code 0.

    \b
    mesh mb s3://photos
    """
    bucket = _only_bucket(url)
    with session.make_client() as client:
        existed = _exists(client, bucket)
        try:
            client.create_bucket(bucket)
        except ServerError as error:  # AWS answers so outside us-east-1
            if error.code != "BucketAlreadyOwnedByYou":
                raise
            existed = True
    message = f"s3://{bucket} exists already" if existed else f"created s3://{bucket}"
    session.show(message, action="make-bucket", bucket=bucket, created=not existed)


def _exists(client: Client, bucket: str) -> bool:
    """Return whether the bucket is there; False if the key may not know, or it belongs to another user, whose
    bucket cannot be created."""
    try:
        return client.has_bucket(bucket)
    except AccessError:
        return False


@click.command()
@click.argument("url", type=RemoteType())
@shared_options
def rb(session: Session, url: Remote) -> None:
    """Remove an empty bucket.

    \b
    mesh rb s3://photos
    """
    with session.make_client() as client:
        client.delete_bucket(_only_bucket(url))
    session.show(f"removed s3://{url.bucket}", action="remove-bucket", bucket=url.bucket)


def _only_bucket(url: Remote) -> str:
    if url.key:
        raise ConfigurationError(f"{url} names a key; write s3://{url.bucket}")
    return url.bucket


_AT_ONCE = 1000  # keys per request


@click.command()
@click.argument("urls", type=RemoteType(), nargs=-1, required=True)
@click.option("-r", "--recursive", is_flag=True, help="Delete folders with everything below them.")
@click.option(
    "--prefix", is_flag=True, help="Delete every key that begins with URL, also train-2/ for train."
)
@click.option("--dryrun", is_flag=True, help="Only show what would be deleted.")
@shared_options
def rm(session: Session, urls: Sequence[Remote], recursive: bool, prefix: bool, dryrun: bool) -> int:
    """Delete objects. This cannot be undone. With -q, a summary instead of a line for each object.

    \b
    mesh rm s3://photos/train/cat/1.jpg
    mesh rm -r --dryrun s3://photos/train/cat/
    """
    failed = 0
    with session.make_client() as client:
        for url in urls:
            failed += _remove(session, client, url, recursive, prefix, dryrun)
    return EXIT_FAILED if failed else 0


def _delete_keys(
    session: Session, client: Client, url: Remote, keys: Sequence[str]
) -> dict[str, DeleteFailure]:
    """Delete keys, and return the failures by key."""
    failures: dict[str, DeleteFailure] = {}
    with session.steps(f"deleting below {url}", len(keys)) as done:
        for first in range(0, len(keys), _AT_ONCE):
            some = keys[first : first + _AT_ONCE]
            failures |= {failure.key: failure for failure in client.delete_many(url.bucket, some)}
            done(count=len(some))
    return failures


def _remove(
    session: Session, client: Client, url: Remote, recursive: bool, prefix: bool, dryrun: bool
) -> int:
    """Delete one URL, and return the number of keys that could not be deleted."""
    keys = [url.key]
    if recursive or prefix:
        found = [entry.key for entry in client.list(url.bucket, url.key)]
        keys = [key for key in found if prefix or url.holds(key)]
        if not keys:
            session.tell(f"nothing to delete: there is neither {url} nor a key below it")
        if others := len(found) - len(keys):
            session.tell(f"{others} other keys begin with {url}; --prefix deletes them, too")
    else:
        if url.is_folder:
            raise ConfigurationError(f"{url} is a folder; add -r to delete everything in it")
        client.head(
            url.bucket, url.key
        )  # S3 silently accepts deletes of missing keys, but a person may have mistyped
    failures = {} if dryrun else _delete_keys(session, client, url, keys)
    for key in keys:
        name = str(Remote(url.bucket, key))
        if key in failures:
            click.echo(f"mesh: {name}: {failures[key].message}", err=True)
        else:
            verb = "would delete" if dryrun else "deleted"
            if session.as_json or not session.quiet:
                session.show(f"{verb} {name}", action="delete", target=name, dryrun=dryrun)
    if keys and not session.as_json and (session.quiet or recursive or prefix):
        done = len(keys) - len(failures)
        counted = f"{done} object{'' if done == 1 else 's'}"
        click.echo(f"would delete {counted}" if dryrun else f"{counted} deleted", err=not session.quiet)
    return len(failures)


@click.group("archive")
def archive() -> None:
    """List and inspect archives without downloading them (.tar, .tar.gz, .tgz, .tar.zst, .tzst, .zip).

    The node indexes an archive when it is uploaded. Its files are also keys below ARCHIVE/-/, for every
    command and every other S3 client:

    \b
    mesh ls s3://shards/0001.tar/-/train/
    mesh cat s3://shards/0001.tar/-/train/cat.jpg > cat.jpg
    mesh cp -r s3://shards/0001.tgz/-/ ./unpacked
    aws s3 cp s3://shards/0001.zip/-/labels.json .
    """


@archive.command("ls")
@click.argument("url", type=RemoteType())
@click.option("--prefix", default="", help="Only files whose names begin with this.")
@shared_options
def list_files(session: Session, url: Remote, prefix: str) -> int:
    """List the files of an archive.

    Columns: size, offset in the archive (- if compressed), name.

    \b
    mesh archive ls s3://shards/0001.tar
    mesh archive ls s3://shards/0001.zip --prefix train/ --json
    """
    _check(url)
    count = size = 0
    with session.make_client() as client:
        for entry in client.members(url.bucket, url.key, prefix):
            offset = "-" if entry.offset is None else str(entry.offset)
            session.show(
                f"{format_size(entry.size):>10}  {offset:>12}  {entry.name}",
                url=f"{url}{MEMBER_SEPARATOR}{entry.name}",
                name=entry.name,
                size=entry.size,
                offset=entry.offset,
                etag=entry.etag,
            )
            count += 1
            size += entry.size
    if not count and prefix:
        click.echo(f"mesh: no file of {url} begins with {prefix!r}", err=True)
        return EXIT_MISSING
    if not session.as_json:
        click.echo(f"{count} files, {format_size(size)}")
    return 0


@archive.command()
@click.argument("url", type=RemoteType())
@shared_options
def show(session: Session, url: Remote) -> None:
    """Show kind and number of files, or why it cannot be read.

    \b
    mesh archive show s3://shards/0001.tgz
    """
    _check(url)
    with session.make_client() as client:
        found = client.member_page(url.bucket, url.key, page=1)
    record = {"kind": found.kind, "files": found.count, "size": found.size, "etag": found.etag}
    plain = bool(found.entries) and found.entries[0].offset is not None
    reads = "in place" if plain else "from a decompressed copy, created when a file is first read"
    lines = [
        f"{url}",
        f"  kind   {found.kind}",
        f"  files  {found.count}",
        f"  size   {format_size(found.size)}",
    ]
    if found.entries:
        lines.append(f"  read   {reads}")
    session.show("\n".join(lines), url=str(url), **record)


def _check(url: Remote) -> None:
    if archive_kind(url.key) is None:
        raise ConfigurationError(
            f"{url} does not have the extension of an archive: {', '.join(ARCHIVE_EXTENSIONS)}"
        )
