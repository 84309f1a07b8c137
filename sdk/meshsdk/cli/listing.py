"""`mesh ls`, `stat`, `mb`, `rb`: what there is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from meshsdk.cli.places import RemoteType
from meshsdk.cli.running import EXIT_MISSING, shared_options
from meshsdk.errors import ConfigurationError
from meshsdk.sizes import human

if TYPE_CHECKING:
    from meshsdk.cli.places import Remote
    from meshsdk.cli.running import Session
    from meshsdk.client import Client
    from meshwire.s3.results import ObjectEntry


def show_time(milliseconds: int) -> str:
    """Local time to the second."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


@click.command()
@click.argument("url", type=RemoteType(), required=False)
@click.option("-r", "--recursive", is_flag=True, help="All keys below, not one level.")
@shared_options
def ls(session: Session, url: Remote | None, recursive: bool) -> int:
    """Lists buckets, or the keys that begin with URL.

    \b
    mesh ls                      the buckets
    mesh ls s3://photos/train/   one level: folders, then objects
    mesh ls -r s3://photos       every object; ends with a count
    """
    with session.client() as client:
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
        session.tell(f"nothing in {url} yet: mesh cp -r ./FOLDER {url}")
    if recursive and not session.as_json:
        click.echo(f"{count} objects, {human(size)}")
    return 0


def _show_entry(session: Session, bucket: str, entry: ObjectEntry) -> None:
    session.show(
        f"{show_time(entry.modified_ms)}  {human(entry.size):>10}  {entry.key}",
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
    """Tells what is known of an object; of a folder or bucket, how much is in it.

    \b
    mesh stat s3://photos/train/cat/1.jpg
    mesh stat s3://photos/train/
    """
    with session.client() as client:
        if url.is_folder:
            count = size = 0
            for entry in client.list(url.bucket, url.key):
                count += 1
                size += entry.size
            session.show(
                f"{url}: {count} objects, {human(size)}",
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
    lines = [f"{url}", f"  size      {info.size} ({human(info.size)})", f"  etag      {info.etag}"]
    lines += [f"  modified  {show_time(info.modified_ms)}", f"  type      {info.content_type}"]
    lines += [f"  metadata  {name} = {value}" for name, value in info.metadata.items()]
    session.show("\n".join(lines), type="object", bucket=url.bucket, key=url.key, **record)


@click.command()
@click.argument("url", type=RemoteType())
@shared_options
def mb(session: Session, url: Remote) -> None:
    """Makes a bucket.

    \b
    mesh mb s3://photos
    """
    with session.client() as client:
        client.create_bucket(_only_bucket(url))
    session.show(f"made s3://{url.bucket}", action="make-bucket", bucket=url.bucket)


@click.command()
@click.argument("url", type=RemoteType())
@shared_options
def rb(session: Session, url: Remote) -> None:
    """Removes an empty bucket.

    \b
    mesh rb s3://photos
    """
    with session.client() as client:
        client.delete_bucket(_only_bucket(url))
    session.show(f"removed s3://{url.bucket}", action="remove-bucket", bucket=url.bucket)


def _only_bucket(url: Remote) -> str:
    if url.key:
        raise ConfigurationError(f"{url} names a key: write s3://{url.bucket}")
    return url.bucket
