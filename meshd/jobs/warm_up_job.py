"""The warm-up job: the nodes that will render a plan's samples fill their decoded caches before training.

The nodes do the work, each at its own pace; this job asks them every second how far they are, and adds up. A
sample that is kept counts as there, so a job that is started again continues. A node that loses its cache,
because it restarts, begins again; with a new cluster map, all nodes look at their new samples.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.batches.assembly.frame_rows import require_parts
from meshd.batches.warm_up.messages import MAX_FAILURES, WarmUpRequest, WarmUpStatus
from meshd.control.jobs import Failure
from meshd.core.api_errors import BatchError, busy
from meshd.errors import MeshdError
from meshd.rpc.peer_client import PeerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.core.document_store import DocumentStore
    from meshd.core.plan_record import Plan
    from meshd.datasets.bucket_incarnations import SnapshotIncarnations
    from meshd.jobs.job_kind import JobRun, ProgressCounter
    from meshd.jobs.warm_up_nodes import NodeChoice, WarmUpNodes
    from meshwire.cluster import Node


class WarmUpReport(msgspec.Struct, frozen=True):
    """What a warm-up has done, over all nodes: samples `stored` and `there` before, `bytes` of results
    stored, the processor time that they took, and samples that were left out, or are bad, by reason.
    `refused`: by node, why it keeps nothing of the plan."""

    stored: int
    there: int
    bytes: int
    cpu_seconds: float
    left_out: dict[str, int]
    bad: dict[str, int]
    refused: dict[str, str]


_TRIES: Final = 8
"""Rounds in a row in which some node cannot do its part, and no sample is done."""
_WAITED_FOR: Final = frozenset({"Busy", "NotOwner"})


class _NodeFailedError(Exception):
    """A node could not do its part: it did not answer, or has another map. `silent`: its name, or ""."""

    def __init__(self, node: str, why: str, silent: str = "") -> None:
        super().__init__(f"{node}: {why}")
        self.silent = silent


class WarmUpJob:
    """Runs warm-up jobs. One instance per node, in the coordinator."""

    def __init__(
        self,
        readers: DatasetAccess,
        catalog: DocumentStore,
        births: SnapshotIncarnations,
        nodes: WarmUpNodes,
    ) -> None:
        self._readers, self._catalog, self._births, self._nodes = readers, catalog, births, nodes

    async def run_job(self, running: JobRun) -> None:
        """Run a job; see JobKind.run_job."""
        plan = await self._allowed_plan(running)
        tries, samples = 0, 0
        while True:
            choice = self._nodes.choose(in_parts=_in_parts(plan))
            try:
                statuses = await self._run_on(choice, running)
                break
            except _NodeFailedError as error:
                tries = tries + 1 if running.tally.samples <= samples else 0
                samples = running.tally.samples
                if tries > _TRIES:
                    raise busy(f"the samples cannot be warmed up now: {error}") from error
                await self._nodes.wait_for_change(choice.version, error.silent)
        refused = {status.refused for status in statuses.values()}
        if "" not in refused:
            raise BatchError("BadRequest", "; ".join(sorted(refused)))

    async def _allowed_plan(self, running: JobRun) -> Plan:
        """Return the plan, if the job's creator may read its samples. Raises BatchError."""
        spec, caller = running.spec, running.caller
        plan = await self._catalog.plan(spec.plan)
        if not all(self._readers.reads_whole_bucket(caller, bucket) for bucket in plan.buckets):
            await self._readers.require_snapshot(caller, await self._catalog.snapshot(plan.snapshot))
        await self._births.require_valid(caller, plan.snapshot, plan.buckets, f"plans/{spec.plan}")
        if spec.source.bucket and spec.source.bucket not in plan.buckets:
            raise BatchError(
                "BadRequest", f"the plan {spec.plan[:12]} reads nothing from bucket {spec.source.bucket}"
            )
        return plan

    async def _run_on(self, choice: NodeChoice, running: JobRun) -> Mapping[str, WarmUpStatus]:
        """Warm up on these nodes to the end. Raises _NodeFailedError if another choice must be made."""
        statuses = {node.node_id: WarmUpStatus() for node in choice.nodes}
        try:
            while True:
                await _all(self._follow(node, choice, running, statuses) for node in choice.nodes)
                # A node that restarted after it was done has begun again, with an empty cache.
                runs = {name: status.run for name, status in statuses.items()}
                for node in choice.nodes:
                    await self._ask(node, choice, running, statuses)
                if runs == {name: status.run for name, status in statuses.items()}:
                    return statuses
        finally:
            await self._nodes.stop(choice.nodes, _request(choice, running))

    async def _follow(
        self, node: Node, choice: NodeChoice, running: JobRun, statuses: dict[str, WarmUpStatus]
    ) -> None:
        """Ask a node until it has done its part."""
        while not await self._ask(node, choice, running, statuses):
            if self._nodes.version != choice.version:
                raise _NodeFailedError(node.node_id, "the cluster map has changed")

    async def _ask(
        self, node: Node, choice: NodeChoice, running: JobRun, statuses: dict[str, WarmUpStatus]
    ) -> bool:
        """Ask a node once, and count. Returns whether it is done. Raises _NodeFailedError, BatchError."""
        name = node.node_id
        try:
            status = await self._nodes.ask(node, _request(choice, running))
        except BatchError as error:
            status = WarmUpStatus(code=error.code, error=error.message)
        except MeshdError as error:
            silent = name if isinstance(error, PeerUnreachableError) else ""
            raise _NodeFailedError(name, str(error), silent) from error
        if status.code in _WAITED_FOR:
            raise _NodeFailedError(name, status.error)
        if status.code:
            raise BatchError(status.code, status.error)
        statuses[name] = status
        _count(running.tally, statuses)
        return status.done


def _in_parts(plan: Plan) -> bool:
    """Return whether loaders may request frames of a plan in parts."""
    try:
        require_parts(plan)
    except BatchError:
        return False
    return True


def _request(choice: NodeChoice, running: JobRun) -> WarmUpRequest:
    spec = running.spec
    return WarmUpRequest(
        running.name,
        running.caller.identity.account,
        spec.plan,
        spec.epoch,
        choice.version,
        choice.own,
        spec.source.bucket,
        spec.source.prefix,
        spec.cache,
        -(-int(running.rate()) // len(choice.nodes)),
    )


def _count(tally: ProgressCounter, statuses: Mapping[str, WarmUpStatus]) -> None:
    """Set the progress of a job to the sum of what its nodes have done."""
    each = statuses.values()
    tally.phase = "warming up"
    tally.outputs_total = tally.samples_total = sum(status.samples_total for status in each)
    tally.bytes_total = sum(status.bytes_total for status in each)
    tally.written = sum(status.stored for status in each)
    tally.existing = sum(status.there for status in each)
    tally.samples = sum(status.samples for status in each)
    before, tally.bytes = tally.bytes, sum(status.bytes for status in each)
    tally.moved += max(0, tally.bytes - before)
    left, bad = Counter[str](), Counter[str]()
    for status in each:
        left.update(status.left)
        bad.update(status.bad)
    tally.failed = bad.total()
    named = [Failure(*failure) for status in each for failure in status.failures]
    tally.failures = named[:MAX_FAILURES]
    tally.report = WarmUpReport(
        stored=tally.written,
        there=tally.existing,
        bytes=sum(status.kept_bytes for status in each),
        cpu_seconds=round(sum(status.seconds for status in each), 3),
        left_out=dict(left),
        bad=dict(bad),
        refused={name: status.refused for name, status in statuses.items() if status.refused},
    )


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends; if one fails, cancel the others. Raises what it raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
