"""`mesh.warm`: has the nodes decode a loader's samples before its loop begins, as a job on the nodes.

Law: nothing passes through this process. A loader without it reads the same batches, the first epoch slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.admin import jobs
from meshsdk.errors import ConfigurationError
from meshsdk.loader.arguments import checked_cache

if TYPE_CHECKING:
    from meshsdk.admin.jobs import JobInfo
    from meshsdk.loader.loader import Loader


def warm(loader: Loader, *, rate: int = 0, wait: bool = True) -> JobInfo:
    """Fill the nodes' decoded caches with what the loader's epoch reads, within the loader's `cache`.

    The results of the ops before each field's first random op are made while no batch waits, on the nodes
    that will need them. On several ranks, call it on one of them; calls for the same plan share one job.

    Args:
        loader: its plan and its present epoch.
        rate: most bytes of source data per second, over all nodes; 0 for no limit.
        wait: whether to wait until the job has ended. Without it, training may begin at once: batches go
            first.

    Returns:
        The job. `report` has what was kept: `stored` and `there` (samples), `bytes`, `cpu_seconds`, and
        `left_out` and `bad` by reason. If nothing can be kept, `state` is "failed", and `error` says why.

    Raises:
        ConfigurationError: the loader has cache="off", or `rate` is negative.

    Example:
        loader = mesh.Loader(data, 256)
        print(mesh.warm(loader).report)
    """
    cache = checked_cache(loader._arguments.cache)
    if cache == 0:
        raise ConfigurationError('this loader keeps nothing (cache="off"), so there is nothing to warm up')
    if rate < 0:
        raise ConfigurationError(f"rate={rate}: use a number of bytes per second, or 0 for no limit")
    options: dict[str, Any] = {"epoch": loader.epoch}
    if cache is not None:
        options["cache"] = cache
    if rate:
        options["rate"] = rate
    transport = loader.dataset.client.transport
    begun = jobs.start_job(transport, jobs.warm_job(loader.plan.hash, **options))
    return jobs.wait_for_job(transport, begun.id) if wait else begun
