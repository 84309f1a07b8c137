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
@click.option("-n", "--dry-run", is_flag=True, help="Only measure what it would gain and cost.")
@click.option("--rate", metavar="SIZE", help="Maximum per second over all nodes, such as 50MiB.  [no limit]")
@detach_option
@shared_options
def relayout(session: Session, source: Remote, dry_run: bool, rate: str | None, detach: bool) -> int:
    """Put the objects below URL next to each other on the rotational disks of the nodes, in order of key.

    Objects that many connections wrote in random order lie scattered, and an epoch over them seeks. Objects
    that lie well are not touched; versions, ETags and times stay. It is a job that leaves half of the disks'
    time to others: `mesh job ls`, `show` and `cancel` know it; started again, it goes on where it stopped.

    \b
    mesh relayout s3://photos/train/ --dry-run      what it would gain and cost
    mesh relayout s3://photos/train/
    mesh relayout s3://photos/ --rate 50MiB -d      slowly, in the background
    """
    options: dict[str, Any] = {"dry_run": True} if dry_run else {}
    if rate is not None:
        options["rate"] = parse_size(rate, "--rate")
    return run_job(session, jobs.relayout_job(str(source), **options), detach=detach)
