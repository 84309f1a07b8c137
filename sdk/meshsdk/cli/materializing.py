"""`mesh view materialize`: writes a view out as ordinary objects.

Law: the node makes and writes them; nothing passes through here. What is there already, of the same content,
is left alone, so that the command can be interrupted and run again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from meshsdk.cli.places import RemoteType
from meshsdk.cli.running import EXIT_FAILED, human, shared_options
from meshsdk.errors import MeshError, NotFoundError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.cli.places import Remote
    from meshsdk.cli.running import Session
    from meshsdk.client import Client, ObjectInfo
    from meshwire.s3.results import ObjectEntry

MARK = "mesh-view-etag"
_TRIES = 3


@click.command()
@click.argument("name", metavar="BUCKET--NAME")
@click.argument("target", type=RemoteType())
@click.option("-j", "--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="At a time.")
@click.option("--prefix", default="", help="Only the view's keys that begin so.")
@shared_options
def materialize(session: Session, name: str, target: Remote, jobs: int, prefix: str) -> int:
    """Writes a view's objects under TARGET. Run again, it does what is left or has changed.

    \b
    mesh view materialize photos--shards s3://photos-shards/v1/
    """
    with session.client() as client:
        entries = list(client.list(name, prefix))
        total = sum(entry.size for entry in entries)
        with session.progress(f"materialize {name}", total) as advance, ThreadPoolExecutor(jobs) as pool:
            written = _Written(session, client, name, target, advance)
            outcomes = list(pool.map(written.one, entries))
    made, failed = outcomes.count("made"), outcomes.count("failed")
    there = len(outcomes) - made - failed
    session.show(
        f"{made} written, {there} were there, {failed} failed; {human(total)} in all",
        view=name,
        target=str(target),
        made=made,
        there=there,
        failed=failed,
        bytes=total,
    )
    return EXIT_FAILED if failed else 0


class _Written:
    """One object after the other, from any thread."""

    def __init__(
        self, session: Session, client: Client, name: str, target: Remote, advance: Callable[[int], None]
    ) -> None:
        self._session, self._client, self._name, self._target = session, client, name, target
        self._advance = advance

    def one(self, entry: ObjectEntry) -> str:
        """`made`, `there` or `failed`."""
        try:
            outcome = self._settled(entry.key)
        except MeshError as error:
            click.echo(f"mesh: {self._name}/{entry.key}: {error}", err=True)
            outcome = "failed"
        self._advance(entry.size)
        return outcome

    def _settled(self, key: str) -> str:
        """A view whose source changes at that very moment is asked again."""
        for _ in range(_TRIES - 1):
            with suppress(PreconditionError):
                return self._attempt(key)
        return self._attempt(key)

    def _attempt(self, key: str) -> str:
        source = self._client.head(self._name, key)
        target = self._target.key + key
        if self._is_there(target, source):
            return "there"
        self._client.copy(
            self._name,
            key,
            self._target.bucket,
            target,
            metadata={MARK: source.etag},
            content_type=source.content_type,
            etag=source.etag,
        )
        return "made"

    def _is_there(self, key: str, source: ObjectInfo) -> bool:
        try:
            found = self._client.head(self._target.bucket, key)
        except NotFoundError:
            return False
        return found.metadata.get(MARK) == source.etag and found.size == source.size
