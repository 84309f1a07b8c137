"""`mesh prefetch`: loads objects of a bucket with an origin into the nodes' caches, as a job.

Law: starts and follows the job; no object passes through this process. A restarted job continues where
it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs
from meshsdk.byte_sizes import parse_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.jobs import detach_option, run_job, show_stopped
from meshsdk.cli.locations import RemoteType
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.locations import Remote


class _Group(click.Group):
    """`mesh prefetch [--rate …] s3://…` is `mesh prefetch start …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].startswith(("s3://", "-")):
            args = ["start", *args]
        return super().resolve_command(ctx, args)


@click.group("prefetch", cls=_Group)
def prefetch() -> None:
    """Brings objects of a bucket with an origin into the caches of the nodes that answer for them, before
    they are read. One job counts what all nodes do; it goes on when one of them dies.

    \b
    mesh prefetch s3://photos/train/                    all that begins so
    mesh prefetch s3://photos --keys wanted.txt         these keys, one a line
    mesh prefetch s3://photos --manifest s3://lists/train.txt
    mesh prefetch s3://photos --plan HASH               what a plan reads, in its order
    mesh prefetch s3://photos/train/ --rate 50MiB       no faster than this, a second
    mesh prefetch pause ID; mesh prefetch resume ID     what is cached stays
    """


@prefetch.command()
@click.argument("source", type=RemoteType())
@click.option("--keys", type=click.Path(exists=True, dir_okay=False), help="A file of keys, one a line.")
@click.option("--manifest", metavar="URL", help="An object of keys, one a line; for more than 1000.")
@click.option("--plan", metavar="HASH", help="The samples of a plan, in the order it reads them.")
@click.option("--epoch", type=click.IntRange(0), metavar="N", help="Of the plan.  [0]")
@click.option("--rate", metavar="SIZE", help="A second at most, all nodes together, as 50MiB.  [no limit]")
@detach_option
@shared_options
def start(
    session: Session,
    source: Remote,
    keys: str | None,
    manifest: str | None,
    plan: str | None,
    epoch: int | None,
    rate: str | None,
    detach: bool,
) -> int:
    """Starts a job that reads SOURCE into the cache, and follows it.

    One that runs is joined: from then on with this --rate, or with no limit.

    \b
    mesh prefetch start s3://photos/train/ --rate 50MiB
    """
    document: dict[str, Any] = {"kind": "prefetch", "source": str(source)}
    if keys is not None:
        document["keys"] = [line.strip() for line in Path(keys).read_text().splitlines() if line.strip()]
    if manifest is not None:
        document["manifest"] = manifest
    if plan is not None:
        document["plan"] = plan
    if epoch is not None:
        document["epoch"] = epoch
    if rate is not None:
        document["rate"] = parse_size(rate, "--rate")
    if keys is not None and not document["keys"]:
        raise ConfigurationError(f"{keys} names no key")
    return run_job(session, document, detach=detach)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@shared_options
def pause(session: Session, job_id: str) -> None:
    """Stops a prefetch; `resume` goes on with what is missing.

    \b
    mesh prefetch pause 3f2a9c0117b4de52
    """
    show_stopped(session, job_id, pause=True)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@shared_options
def cancel(session: Session, job_id: str) -> None:
    """Stops a prefetch. What is cached stays, until something is worth more.

    \b
    mesh prefetch cancel 3f2a9c0117b4de52
    """
    show_stopped(session, job_id)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@detach_option
@shared_options
def resume(session: Session, job_id: str, detach: bool) -> int:
    """Goes on with a prefetch that was paused, cancelled or failed.

    \b
    mesh prefetch resume 3f2a9c0117b4de52
    """
    with session.make_client() as client:
        found = jobs.show_job(client.transport, job_id)
    if found.kind != "prefetch":
        raise ConfigurationError(f"{job_id} is a job of kind {found.kind}; see `mesh job --help`")
    return run_job(session, dict(found.spec), detach=detach)
