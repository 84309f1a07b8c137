"""`mesh view materialize`: writes a view out as ordinary objects.

Law: a job of the node does it; nothing passes through here. What is there already, of the same content, is
left alone, so that the command can be interrupted and run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meshsdk import jobs
from meshsdk.cli.jobs import detach_option, followed, told_started
from meshsdk.cli.places import RemoteType
from meshsdk.cli.running import EXIT_FAILED, shared_options
from meshsdk.sizes import human

if TYPE_CHECKING:
    from meshsdk.cli.places import Remote
    from meshsdk.cli.running import Session


@click.command()
@click.argument("name", metavar="BUCKET--NAME")
@click.argument("target", type=RemoteType())
@click.option("--prefix", default="", help="Only the view's keys that begin so.")
@detach_option
@shared_options
def materialize(session: Session, name: str, target: Remote, prefix: str, detach: bool) -> int:
    """Writes a view's objects under TARGET. Run again, it does what is left or has changed.

    The node does it, whether or not this command waits for it: see `mesh job`.

    \b
    mesh view materialize photos--shards s3://photos-shards/v1/
    """
    with session.client() as client:
        begun = jobs.start_job(client.transport, jobs.materialize_job(name, str(target), prefix))
        if detach:
            return told_started(session, begun)
        found = followed(session, client, begun)
    if found.state != "done":
        click.echo(f"mesh: {found.state}: {found.error}", err=True)
    progress = found.progress
    session.show(
        f"{progress.written} written, {progress.there} were there, {found.failed} failed; "
        f"{human(progress.bytes)} in all",
        view=name,
        target=str(target),
        made=progress.written,
        there=progress.there,
        failed=found.failed,
        bytes=progress.bytes,
        job=found.id,
        state=found.state,
    )
    return 0 if found.state == "done" and not found.failed else EXIT_FAILED
