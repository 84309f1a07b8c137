"""`mesh warm`: fills the nodes' decoded caches with what a plan reads, before training begins, as a job.

Law: starts and follows the job; no sample passes through this process. A job that is started again continues
with what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshsdk.admin import jobs
from meshsdk.byte_sizes import parse_size
from meshsdk.cli.command_base import shared_options
from meshsdk.cli.documents import whole_hash
from meshsdk.cli.jobs import detach_option, run_job_with
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.cli.command_base import Session

_SCHEME = "s3://"


@click.command()
@click.argument("target", metavar="PLAN|URL")
@click.option("--plan", metavar="HASH", help="The plan, if the argument is a URL.")
@click.option("--epoch", type=click.IntRange(0), metavar="N", help="The first epoch to prepare.  [0]")
@click.option(
    "--cache", metavar="SIZE", help="Keep at most this much per node, as Loader(cache=).  [node decides]"
)
@click.option("--rate", metavar="SIZE", help="Maximum per second over all nodes, such as 50MiB.  [no limit]")
@detach_option
@shared_options
def warm(
    session: Session,
    target: str,
    plan: str | None,
    epoch: int | None,
    cache: str | None,
    rate: str | None,
    detach: bool,
) -> int:
    """Decode a plan's samples once, before training. The results of all ops before a field's first random op
    go to the decoded caches of the nodes that will need them, so that the first epoch is as fast as later
    ones.

    `mesh plans ls` lists plans, and `loader.plan` has the hash of a loader's own plan; its first digits
    suffice. Nodes work on it only while no batch is waiting. One job covers all nodes: `mesh job ls`, `show`
    and `cancel` apply to it. Started again, it continues with what is missing. At the end it reports what was
    kept, what was not, and why.

    \b
    mesh warm 3f9c01d2                                     all samples of a plan
    mesh warm s3://photos/train/cats/ --plan 3f9c01d2      only those below a URL
    mesh warm 3f9c01d2 --rate 50MiB --detach               slowly, in the background
    mesh warm 3f9c01d2 --cache 200GiB                      for a Loader(cache=200 << 30)
    """
    url = target if target.startswith(_SCHEME) else None
    if url is None and plan is not None:
        raise ConfigurationError(f"{target!r}: with --plan, write an s3:// URL, or leave out one of the two")
    name = target if url is None else plan
    if name is None:
        raise ConfigurationError(
            f"give the plan too: mesh warm {target} --plan HASH (`mesh plans ls` lists plans)"
        )
    options: dict[str, Any] = {}
    if url is not None:
        options["source"] = url
    if epoch is not None:
        options["epoch"] = epoch
    if cache is not None:
        options["cache"] = parse_size(cache, "--cache")
    if rate is not None:
        options["rate"] = parse_size(rate, "--rate")
    with session.make_client() as client:
        document = jobs.warm_job(whole_hash(client, "plans", name), **options)
        return run_job_with(session, client, document, detach=detach)
