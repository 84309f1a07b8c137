"""The relayout job: what nodes say is added up; absent nodes and those of an earlier release are named."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.core.api_errors import BatchError
from meshd.jobs.job_kind import JobRun
from meshd.jobs.relayout.messages import LayoutCost, RelayoutRequest, RelayoutStatus
from meshd.jobs.relayout.relayout_job import RelayoutJob, RelayoutReport
from meshd.rpc.peer_client import PeerRefusedError
from meshwire.cluster import Node
from meshwire.jobs.job_spec import parse_job

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView


class Cluster:
    """Three nodes; this is n1. `answers`: of each node, the last one repeated; an error is raised."""

    single_node, node_id = False, "n1"

    def __init__(self, states: str = "up up up", **answers: list[RelayoutStatus | Exception]) -> None:
        self.nodes = [Node(f"n{n}", f"http://n{n}", state=state) for n, state in enumerate(states.split(), 1)]  # type: ignore[arg-type]
        self.answers, self.requests = answers, list[RelayoutRequest]()

    def current_map(self) -> Any:
        return SimpleNamespace(nodes=self.nodes)

    async def answer(self, request: RelayoutRequest, node: str = "n1") -> RelayoutStatus:
        self.requests.append(request)
        left = self.answers[node]
        found = left[0] if len(left) == 1 else left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def call_typed(self, node: Node, call: Any, request: RelayoutRequest) -> RelayoutStatus:
        return await self.answer(request, node.node_id)


def run(cluster: Cluster, **fields: Any) -> RelayoutReport:
    caller: Any = SimpleNamespace(identity=SimpleNamespace(account="ann"))
    spec = parse_job({"kind": "relayout", "source": "s3://photos/train/", **fields})
    running = JobRun("job", 1, spec, caller, rate=lambda: float(spec.rate))
    job = RelayoutJob(cast("ClusterView", cluster), cast("Any", cluster), cast("Any", cluster))
    try:
        asyncio.run(asyncio.wait_for(job.run_job(running), 30))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    progress = running.tally.progress(0.0)
    assert (progress.phase, progress.outputs, progress.outputs_total) == ("moving", 15, 15)
    assert isinstance(running.tally.report, RelayoutReport)
    return running.tally.report


def told(*, moved: int = 10, done: bool = True, after: float | None = 1.0) -> RelayoutStatus:
    return RelayoutStatus(
        done=done,
        measured=True,
        objects=20,
        before=LayoutCost(10, seeks=9.0),
        after=None if after is None else LayoutCost(10, seeks=after),
        to_move=moved,
        moved=moved if done else 1,
        left_out={"damaged": 1},
    )


def test_what_all_nodes_did_is_added_up() -> None:
    idle = RelayoutStatus(done=True, refused="no disk")
    cluster = Cluster(n1=[told(done=False), told()], n2=[told(moved=5, after=None)], n3=[idle])
    report = run(cluster, rate=1000)
    assert (report.nodes, report.objects, report.moved, report.to_move) == (["n1", "n2"], 40, 15, 15)
    assert report.before == LayoutCost(20, seeks=18.0)
    assert report.after == LayoutCost(20, seeks=10.0)  # n2 moved nothing
    assert (report.left_out, report.refused) == ({"damaged": 2}, {"n3": "no disk"})
    asked = {request for request in cluster.requests if not request.stop}
    assert asked == {RelayoutRequest("job-1", "ann", "photos", "train/", rate=334)}
    assert sum(request.stop for request in cluster.requests) == 3


@pytest.mark.parametrize(
    ("cluster", "code", "message"),
    [
        (Cluster("up away up"), "Busy", "n2 is away: start the job again"),
        (
            Cluster(n1=[told()], n2=[told()], n3=[PeerRefusedError(404, "NotFound", "")]),
            "NotImplemented",
            "n3 runs an earlier release",
        ),
        (
            Cluster(
                n1=[RelayoutStatus(done=True, code="TooLarge", error="no space")], n2=[told()], n3=[told()]
            ),
            "TooLarge",
            "n1: no space",
        ),
    ],
)
def test_why_it_cannot_be_done(cluster: Cluster, code: str, message: str) -> None:
    with pytest.raises(BatchError, match=message) as refused:
        run(cluster)
    assert refused.value.code == code
