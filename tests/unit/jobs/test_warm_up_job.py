"""The warm-up job: which nodes it asks, how it adds up, and what happens to nodes that fail or forget."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.batches.warm_up.messages import WarmUpStatus
from meshd.core.api_errors import BatchError
from meshd.core.plan_record import FieldOutput, Plan
from meshd.jobs.job_kind import JobRun
from meshd.jobs.warm_up_job import WarmUpJob, WarmUpReport
from meshd.jobs.warm_up_nodes import NodeChoice, WarmUpNodes
from meshd.rpc.peer_client import PeerUnreachableError
from meshwire.cluster import Node
from meshwire.cluster.transitions import bootstrap_map
from meshwire.jobs.job_spec import parse_job
from meshwire.plan.plan_spec import parse_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshd.batches.warm_up.messages import WarmUpRequest

PLAN = "3f" * 32
FIXED = {"image": FieldOutput("uint8", (4,))}
RAGGED = {"image": FieldOutput("uint8", None)}
NODES = tuple(Node(f"n{number}", f"http://n{number}", weight=1) for number in (1, 2))


def told(run: str, samples: int, *, done: bool = True, **fields: Any) -> WarmUpStatus:
    found = {"samples_total": 10, "bytes_total": 1000, "samples": samples, "bytes": 100 * samples}
    return WarmUpStatus(run=run, done=done, **{**found, "stored": samples, **fields})


class Nodes:
    """Nodes that answer as the test says: each call takes the next of a node's answers, the last for ever."""

    def __init__(self, **answers: list[WarmUpStatus | Exception]) -> None:
        self.answers, self.version = answers, 7
        self.asked: list[WarmUpRequest] = []
        self.stopped: list[str] = []
        self.silent: list[str] = []
        self.in_parts: list[bool] = []

    def choose(self, *, in_parts: bool) -> NodeChoice:
        self.in_parts.append(in_parts)
        return NodeChoice(self.version, in_parts, NODES)

    async def ask(self, node: Node, request: WarmUpRequest) -> WarmUpStatus:
        self.asked.append(request)
        await asyncio.sleep(0)
        answers = self.answers[node.node_id]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def stop(self, nodes: Iterable[Node], request: WarmUpRequest) -> None:
        self.stopped += [node.node_id for node in nodes]

    async def wait_for_change(self, version: int, silent: str = "") -> None:
        self.silent.append(silent)
        self.version += 1


def run(nodes: Nodes, outputs: dict[str, FieldOutput] = FIXED, **fields: Any) -> JobRun:
    plan = Plan(PLAN, "5" * 64, "photos", 20, parse_spec({"seed": 3}), outputs)

    async def found(digest: str) -> Plan:
        return plan

    async def valid(*words: Any) -> None:
        """The buckets are those of the snapshot."""

    readers: Any = SimpleNamespace(reads_whole_bucket=lambda caller, bucket: True)
    catalog: Any = SimpleNamespace(plan=found)
    births: Any = SimpleNamespace(require_valid=valid)
    caller: Any = SimpleNamespace(identity=SimpleNamespace(account="ann"))
    spec = parse_job({"kind": "warm", "plan": PLAN, **fields})
    running = JobRun("job", 1, spec, caller, rate=lambda: float(spec.rate))
    kind: Any = WarmUpJob(readers, catalog, births, nodes)  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(kind.run_job(running), 30))
    return running


def test_the_totals_of_all_nodes_are_added_up() -> None:
    nodes = Nodes(
        n1=[told("a", 4, done=False), told("a", 10, left={"no room": 1}, kept_bytes=50, seconds=0.25)],
        n2=[told("b", 9, there=1, kept_bytes=70, bad={"cut": 2}, failures=[("x", "cut")])],
    )
    running = run(nodes, rate=1001, cache=1 << 30, epoch=2)
    report = running.tally.report
    assert isinstance(report, WarmUpReport)
    assert (report.stored, report.there, report.bytes, report.cpu_seconds) == (19, 1, 120, 0.25)
    assert (report.left_out, report.bad, report.refused) == ({"no room": 1}, {"cut": 2}, {})
    progress = running.tally.progress(0.0)
    assert (progress.samples, progress.samples_total, progress.bytes) == (19, 20, 1900)
    assert (running.tally.failed, [each.name for each in running.tally.failures]) == (2, ["x"])
    [request] = set(nodes.asked)
    assert (request.plan, request.epoch, request.limit, request.account) == (PLAN, 2, 1 << 30, "ann")
    assert (request.own, request.version, request.rate) == (True, 7, 501)
    assert nodes.stopped == ["n1", "n2"]


def test_a_node_that_restarts_after_its_end_is_followed_again() -> None:
    nodes = Nodes(n1=[told("a", 10), told("c", 2, done=False), told("c", 10)], n2=[told("b", 10)])
    report = run(nodes).tally.report
    assert isinstance(report, WarmUpReport)
    assert report.stored == 20
    assert len([request for request in nodes.asked]) >= 5


@pytest.mark.parametrize(
    ("answer", "silent"),
    [
        (PeerUnreachableError("refused"), "n2"),
        (WarmUpStatus(done=True, code="NotOwner", error="another map"), ""),
        (BatchError("Busy", "restarting"), ""),
    ],
)
def test_after_a_failure_all_nodes_begin_again_under_the_next_map(
    answer: WarmUpStatus | Exception, silent: str
) -> None:
    nodes = Nodes(n1=[told("a", 1, done=False), told("a", 10)], n2=[answer, told("b", 10)])
    assert run(nodes).tally.samples == 20
    assert nodes.silent == [silent]
    assert {request.version for request in nodes.asked} == {7, 8}


def test_a_node_that_never_answers_ends_the_job_with_its_name() -> None:
    nodes = Nodes(n1=[told("a", 0, done=False)], n2=[PeerUnreachableError("refused")])
    with pytest.raises(BatchError, match="n2: ") as caught:
        run(nodes)
    assert caught.value.code == "Busy"


def test_it_fails_if_every_node_refuses_and_tells_if_some_do() -> None:
    off = told("a", 0, refused="the cache is off")
    with pytest.raises(BatchError, match="the cache is off"):
        run(Nodes(n1=[off], n2=[replace_status(off, "b")]))
    report = run(Nodes(n1=[off], n2=[told("b", 10)])).tally.report
    assert isinstance(report, WarmUpReport)
    assert report.refused == {"n1": "the cache is off"}


def replace_status(status: WarmUpStatus, name: str) -> WarmUpStatus:
    return WarmUpStatus(run=name, done=status.done, refused=status.refused)


def test_what_a_node_cannot_do_at_all_fails_the_job() -> None:
    changed = WarmUpStatus(done=True, code="SnapshotChanged", error="s3://photos/1 was replaced")
    with pytest.raises(BatchError, match="was replaced") as caught:
        run(Nodes(n1=[told("a", 0, done=False)], n2=[changed]))
    assert caught.value.code == "SnapshotChanged"
    with pytest.raises(BatchError, match="reads nothing from bucket other"):
        run(Nodes(n1=[told("a", 10)], n2=[told("b", 10)]), source="s3://other/")


@pytest.mark.parametrize("outputs", [FIXED, RAGGED])
def test_frames_of_ragged_fields_are_not_built_in_parts(outputs: dict[str, FieldOutput]) -> None:
    nodes = Nodes(n1=[told("a", 10)], n2=[told("b", 10)])
    run(nodes, outputs)
    assert nodes.in_parts == [outputs is FIXED]


def mesh(change: Callable[[Node], Node] = lambda node: node) -> Any:
    members = tuple(change(node) for node in NODES)
    cluster = replace(bootstrap_map(NODES[0], copies=1), nodes=members)
    return SimpleNamespace(single_node=False, current_map=lambda: cluster, own_node=members[0])


def test_nodes_take_their_own_samples_or_all_of_them() -> None:
    nothing: Any = None
    split = WarmUpNodes(mesh(), nothing, nothing).choose(in_parts=True)
    assert (split.own, [node.node_id for node in split.nodes]) == (True, ["n1", "n2"])
    whole = WarmUpNodes(mesh(), nothing, nothing).choose(in_parts=False)
    assert (whole.own, [node.node_id for node in whole.nodes]) == (False, ["n1", "n2"])

    def compute(node: Node) -> Node:
        return replace(node, roles=("store", "compute") if node.node_id == "n2" else ("store",))

    apart = WarmUpNodes(mesh(compute), nothing, nothing).choose(in_parts=True)
    assert (apart.own, [node.node_id for node in apart.nodes]) == (False, ["n2"])
