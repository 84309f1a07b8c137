"""Which requests are recorded, and what a span says, without a disk or a socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from meshd.telemetry import metrics, tracing
from meshd.telemetry.tracing import MAX_CALLER_TRACES, MAX_QUEUED, Recorder
from meshwire.http_values.trace_context import TraceContext, parse_trace_context

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found = Recorder(0.0)
    tracing.install(found)
    yield found
    tracing.install(None)


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f" 00-{TRACE}-{SPAN}-ff\t", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_context_is_parsed_and_rendered(header: str, sampled: bool) -> None:
    found = parse_trace_context(header, "vendor=1")
    assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled, "vendor=1")
    assert found.to_header() == f"00-{TRACE}-{SPAN}-0{int(sampled)}"


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{'٤' * 32}-{SPAN}-01",
    ],
)
def test_an_invalid_context_counts_as_absent(header: str) -> None:
    assert parse_trace_context(header) is None


def test_a_state_that_is_too_long_is_dropped() -> None:
    found = parse_trace_context(SAMPLED["traceparent"], "k=" + "v" * 511)
    assert found is not None
    assert not found.state


def test_the_caller_decides_and_else_the_ratio(recorder: Recorder) -> None:
    assert tracing.start_request({}, 1.0) is None
    assert tracing.start_request(NOT_SAMPLED, 1.0) is None
    span = tracing.start_request(SAMPLED, 1.0)
    assert span is not None
    assert (span.trace_id, span.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    recorder.ratio = 1.0
    root = tracing.start_request({}, 1.0)
    assert root is not None
    assert root.parent_id == 0
    assert tracing.start_request(NOT_SAMPLED, 1.0) is None
    assert tracing.start_request({"traceparent": "nonsense"}, 1.0) is not None


def test_nodes_begin_no_trace_with_the_work_of_others(recorder: Recorder) -> None:
    recorder.ratio = 1.0
    assert tracing.start_request({}, 1.0, root=False) is None
    assert tracing.start_request({}, 1.0, forwarded=True) is None
    # The client's own header stays, because the client may have signed it: the forwarding node's counts.
    assert tracing.start_request(SAMPLED, 1.0, forwarded=True) is None
    span = tracing.start_request({"x-mesh-trace": SAMPLED["traceparent"]}, 1.0, forwarded=True)
    assert span is not None
    assert tracing.start_request({"x-mesh-trace": SAMPLED["traceparent"]}, 1.0, root=False) is None


def test_clients_cannot_have_everything_recorded(recorder: Recorder) -> None:
    wanted = [tracing.start_request(SAMPLED, 5.0) for _ in range(MAX_CALLER_TRACES + 50)]
    assert sum(span is not None for span in wanted) == MAX_CALLER_TRACES
    assert tracing.start_request(SAMPLED, 6.0) is not None
    assert (
        tracing.start_request(SAMPLED, 6.0, root=False) is not None
    )  # of another node: its client was counted


def test_a_share_of_the_requests_is_recorded(recorder: Recorder) -> None:
    recorder.ratio = 0.25
    taken = sum(tracing.start_request({}, 1.0) is not None for _ in range(4000))
    assert 800 < taken < 1200


def test_stages_are_parts_of_each_other_and_of_other_tasks(recorder: Recorder) -> None:
    span = tracing.start_request(SAMPLED | {"tracestate": "vendor=1"}, 1.0)

    async def request() -> None:
        tracing.enter(span)
        with tracing.stage("outer") as outer:
            assert outer is not None
            with suppress(KeyError), tracing.stage("inner", "client", {"rows": 3}):
                assert tracing.outgoing_headers()["tracestate"] == "vendor=1"
                raise KeyError("x")
            await asyncio.gather(other())

    async def other() -> None:
        with tracing.stage("task"):
            pass

    asyncio.run(request())
    with tracing.stage("of nothing") as nothing:
        assert nothing is None
    assert tracing.outgoing_headers() == {}
    assert tracing.context_text() == ""
    found = {each.name: each for each in recorder.take(10)}
    assert list(found) == ["inner", "task", "outer"]
    assert found["inner"].parent_id == found["task"].parent_id == found["outer"].span_id
    assert (found["inner"].failed, found["inner"].attributes) == ("KeyError", {"rows": 3})
    assert {each.trace_id for each in found.values()} == {int(TRACE, 16)}


def test_a_task_that_outlives_the_request_records_nothing(recorder: Recorder) -> None:
    async def background(go: asyncio.Event) -> None:
        await go.wait()
        with tracing.stage("later") as span:
            assert span is None
        assert tracing.outgoing_headers() == {}

    async def request() -> None:
        go, ended = asyncio.Event(), tracing.start_request(SAMPLED, 1.0)
        assert ended is not None
        tracing.enter(ended)
        tasks = [asyncio.create_task(background(go))]
        ended.end()
        remote = tracing.enter_remote(SAMPLED["traceparent"])  # as for a message of another process
        with tracing.stage("handler") as span:
            assert span is not None
            assert span.parent_id == int(SPAN, 16)
        tasks.append(asyncio.create_task(background(go)))
        tracing.leave_remote(remote)
        go.set()
        await asyncio.gather(*tasks)

    asyncio.run(request())
    assert [span.name for span in recorder.take(9)] == ["", "handler"]


def test_what_the_exporter_cannot_take_is_dropped_and_counted(recorder: Recorder) -> None:
    def dropped() -> float:
        return float(metrics.trace_spans.labels("dropped")._value.get())

    span, before = tracing.start_request(SAMPLED, 1.0), dropped()
    assert span is not None
    for _ in range(MAX_QUEUED + 7):
        tracing.record(span, "part", 1.0, 2.0)
    assert len(recorder.finished) == MAX_QUEUED
    assert dropped() - before == 7


def test_nothing_is_recorded_while_tracing_is_off() -> None:
    assert tracing.start_request(SAMPLED, 1.0) is None
    assert tracing.enter_remote(SAMPLED["traceparent"]) is None
    assert tracing.current() is None
