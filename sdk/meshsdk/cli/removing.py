"""`mesh rm`: deletes objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk.cli.places import Remote, RemoteType
from meshsdk.cli.running import EXIT_FAILED, shared_options
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.cli.running import Session
    from meshsdk.client import Client
    from meshwire.s3.results import DeleteFailure

_AT_ONCE = 1000  # keys a request


@click.command()
@click.argument("urls", type=RemoteType(), nargs=-1, required=True)
@click.option("-r", "--recursive", is_flag=True, help="Every key that begins with URL's.")
@click.option("--dryrun", is_flag=True, help="Say what would be deleted.")
@shared_options
def rm(session: Session, urls: Sequence[Remote], recursive: bool, dryrun: bool) -> int:
    """Deletes objects. There is no way back.

    \b
    mesh rm s3://photos/train/cat/1.jpg
    mesh rm -r --dryrun s3://photos/train/cat/
    """
    failed = 0
    with session.client() as client:
        for url in urls:
            failed += _remove(session, client, url, recursive, dryrun)
    return EXIT_FAILED if failed else 0


def _deleted(session: Session, client: Client, url: Remote, keys: Sequence[str]) -> dict[str, DeleteFailure]:
    """Deletes them; those that could not be, by key."""
    failures: dict[str, DeleteFailure] = {}
    with session.steps(f"deleting below {url}", len(keys)) as done:
        for first in range(0, len(keys), _AT_ONCE):
            some = keys[first : first + _AT_ONCE]
            failures |= {failure.key: failure for failure in client.delete_many(url.bucket, some)}
            done(count=len(some))
    return failures


def _remove(session: Session, client: Client, url: Remote, recursive: bool, dryrun: bool) -> int:
    """The number of keys that could not be deleted."""
    if not recursive:
        if url.is_folder:
            raise ConfigurationError(f"{url} is a folder: add -r to delete all that is in it")
        client.head(url.bucket, url.key)  # S3 deletes what is not there without a word; a person mistypes
    keys = [entry.key for entry in client.list(url.bucket, url.key)] if recursive else [url.key]
    failures = {} if dryrun else _deleted(session, client, url, keys)
    for key in keys:
        name = str(Remote(url.bucket, key))
        if key in failures:
            click.echo(f"mesh: {name}: {failures[key].message}", err=True)
        else:
            verb = "would delete" if dryrun else "deleted"
            session.show(f"{verb} {name}", action="delete", target=name, dryrun=dryrun)
    return len(failures)
