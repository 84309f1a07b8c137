"""`mesh relayout`: puts the objects of a bucket or prefix in order on the nodes' rotational disks, as a job.

Law: starts and follows the job; no object passes through this process, and none changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs
from meshsdk.byte_sizes import parse_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.jobs import detach_option, run_job
from meshsdk.cli.path_arguments import RemoteType

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session
    from meshsdk.cli.path_arguments import Remote


@click.command()
@click.argument("source", type=RemoteType(), metavar="URL")
@click.option("-n", "--dry-run", is_flag=True, help="Only estimate the gain and the cost.")
@click.option("--rate", metavar="SIZE", help="Maximum per second over all nodes, such as 50MiB.  [no limit]")
@detach_option
@shared_options
def relayout(session: Session, source: Remote, dry_run: bool, rate: str | None, detach: bool) -> int:
    """Sort the objects below URL by key on the nodes' rotational disks, so that an epoch seeks less.

    Objects that were written over many connections in random order are scattered over a disk, and reading
    them in order of key seeks for each. Objects that are in order already are not moved. Versions, ETags and
    times do not change. The command starts a job that uses at most half of the disks' time; `mesh job ls`,
    `show` and `cancel` apply to it. Started again, it continues where it stopped.

    \b
    mesh relayout s3://photos/train/ --dry-run      estimate the gain and the cost
    mesh relayout s3://photos/train/
    mesh relayout s3://photos/ --rate 50MiB -d      slowly, in the background
    """
    options: dict[str, Any] = {"dry_run": True} if dry_run else {}
    if rate is not None:
        options["rate"] = parse_size(rate, "--rate")
    return run_job(session, jobs.relayout_job(str(source), **options), detach=detach)
