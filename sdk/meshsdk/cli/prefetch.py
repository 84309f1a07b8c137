"""`mesh prefetch`: loads objects of a bucket with an origin into the nodes' caches, as a job.

Law: starts and follows the job; no object passes through this process. A restarted job continues where it
stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs
from meshsdk.byte_sizes import parse_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.jobs import detach_option, run_job, show_stopped
from meshsdk.cli.path_arguments import RemoteType
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote


class _Group(click.Group):
    """Treats `mesh prefetch [--rate …] s3://…` as `mesh prefetch start …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].startswith(("s3://", "-")):
            args = ["start", *args]
        return super().resolve_command(ctx, args)


@click.group("prefetch", cls=_Group)
def prefetch() -> None:
    """Load objects of a bucket with an origin into the caches of the responsible nodes before they are
    read. One job covers all nodes; it continues if one of them fails.

    \b
    mesh prefetch s3://photos/train/                    all keys with this prefix
    mesh prefetch s3://photos --keys wanted.txt         these keys, one per line
    mesh prefetch s3://photos --manifest s3://lists/train.txt
    mesh prefetch s3://photos --plan HASH               what a plan reads, in its order
    mesh prefetch s3://photos/train/ --rate 50MiB       at most this much per second
    mesh prefetch pause ID; mesh prefetch resume ID     cached objects stay
    """


@prefetch.command()
@click.argument("source", type=RemoteType())
@click.option("--keys", type=click.Path(exists=True, dir_okay=False), help="A file of keys, one per line.")
@click.option("--manifest", metavar="URL", help="An object of keys, one per line, for more than 1000.")
@click.option("--plan", metavar="HASH", help="The samples of a plan, in the order it reads them.")
@click.option("--epoch", type=click.IntRange(0), metavar="N", help="Epoch of the plan.  [0]")
@click.option("--rate", metavar="SIZE", help="Maximum per second over all nodes, such as 50MiB.  [no limit]")
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
    """Start a job that reads SOURCE into the cache, and follow it.

    If the job is already running, the command joins it, and the job continues with this --rate, or without
    a limit.

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
        raise ConfigurationError(f"{keys} contains no keys")
    return run_job(session, document, detach=detach)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@shared_options
def pause(session: Session, job_id: str) -> None:
    """Pause a prefetch; `resume` continues with what is missing.

    \b
    mesh prefetch pause 3f2a9c0117b4de52
    """
    show_stopped(session, job_id, pause=True)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@shared_options
def cancel(session: Session, job_id: str) -> None:
    """Cancel a prefetch. Cached objects stay until they are evicted.

    \b
    mesh prefetch cancel 3f2a9c0117b4de52
    """
    show_stopped(session, job_id)


@prefetch.command()
@click.argument("job_id", metavar="ID")
@detach_option
@shared_options
def resume(session: Session, job_id: str, detach: bool) -> int:
    """Continue a prefetch that was paused, cancelled or failed.

    \b
    mesh prefetch resume 3f2a9c0117b4de52
    """
    with session.make_client() as client:
        found = jobs.show_job(client.transport, job_id)
    if found.kind != "prefetch":
        raise ConfigurationError(f"{job_id} is a job of kind {found.kind}; see `mesh job --help`")
    return run_job(session, dict(found.spec), detach=detach)
