"""What a program's tracer provider gets of the SDK, and that nothing is done or imported without one."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from meshsdk.client.request import Request
from meshsdk.client.tracing import BatchTraces, start_batch_traces, traced_request
from meshsdk.errors import ConnectError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

NODE = "http://10.0.0.1:9000"


def provider(
    monkeypatch: pytest.MonkeyPatch, sampler: Sampler
) -> tuple[TracerProvider, InMemorySpanExporter]:
    """One that the SDK finds as if it were the program's."""
    found, exporter = TracerProvider(sampler=sampler, shutdown_on_exit=False), InMemorySpanExporter()
    found.add_span_processor(SimpleSpanProcessor(exporter))
    api = SimpleNamespace(**{**vars(trace), "get_tracer": found.get_tracer})
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    return found, exporter


def test_a_batch_is_a_trace_of_its_requests_and_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    program, exporter = provider(monkeypatch, ALWAYS_ON)
    traces = BatchTraces()
    with program.get_tracer("program").start_as_current_span("loop") as loop:
        first = traces.begin_request(3, Request("GET", "/-/plans/p"), NODE)
        traces.end_request(3, NODE, ConnectError("away"))
        again = traces.begin_request(3, Request("GET", "/-/plans/p"), NODE)
        traces.end_request(3, NODE)
        since = time.monotonic()
        traces.end_batch(3, since, since + 0.5)
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    root, wait, request = spans["batch"], spans["wait"], spans["request batch"]
    assert root.parent is None
    assert root.attributes == {"shardmesh.step": 3}
    assert wait.parent == request.parent == root.context
    assert [link.context for link in wait.links] == [loop.get_span_context()]
    assert wait.end_time - wait.start_time == pytest.approx(5e8, abs=1e4)
    assert root.end_time == wait.end_time
    trace_id, span_id = root.context.trace_id, request.context.span_id
    assert again.headers["traceparent"] == f"00-{trace_id:032x}-{span_id:016x}-01"
    assert first.headers["traceparent"] != again.headers["traceparent"]
    failed = [
        span for span in exporter.get_finished_spans() if not span.status.is_ok and span.status.description
    ]
    assert [span.status.description for span in failed] == ["ConnectError"]


def test_a_batch_that_is_not_sampled_tells_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, exporter = provider(monkeypatch, ALWAYS_OFF)
    traces = BatchTraces()
    asked = traces.begin_request(0, Request("GET", "/"), NODE)
    assert asked.headers["traceparent"].endswith("-00")
    traces.end_request(0, NODE)
    traces.end_batch(0, 1.0, 2.0)
    assert not exporter.get_finished_spans()


def test_what_the_loop_did_not_take_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    _, exporter = provider(monkeypatch, ALWAYS_ON)
    traces = BatchTraces()
    traces.begin_request(0, Request("GET", "/"), NODE)
    traces.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["request batch", "batch"]


def test_other_requests_carry_the_current_span(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = provider(monkeypatch, ALWAYS_ON)
    assert traced_request(Request("GET", "/")).headers == {}
    with program.get_tracer("program").start_as_current_span("step") as span:
        asked = traced_request(Request("GET", "/", headers={"range": "bytes=0-1"}))
    context = span.get_span_context()
    assert asked.headers == {
        "range": "bytes=0-1",
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01",
    }


def test_nothing_is_done_where_the_program_does_not_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    request = Request("GET", "/")
    assert traced_request(request) is request
    assert start_batch_traces() is None


def test_the_sdk_does_not_import_opentelemetry() -> None:
    code = "import meshsdk, meshsdk.client.transport, meshsdk.loader.loader, sys; "
    code += "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
