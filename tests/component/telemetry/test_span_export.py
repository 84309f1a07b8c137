"""Spans that a collector gets, one that hangs, and one that is not there; exemplars that lead to traces."""

from __future__ import annotations

import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from meshd.config import TracingSettings
from meshd.telemetry import metrics, span_export, tracing
from meshd.telemetry.span_export import ExportThread, OtlpSink
from meshd.telemetry.tracing import Recorder
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.otlp_receiver import OtlpReceiver

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "_INTERVAL", 0.05)
    monkeypatch.setattr(span_export, "_STOP_SECONDS", 0.2)
    monkeypatch.setattr(span_export, "_ATTEMPTS", (0.05,))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as found:
        yield found


def counted(result: str) -> float:
    return float(metrics.trace_spans.labels(result)._value.get())


def test_a_span_arrives_as_it_was(collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    recorder = Recorder(1.0)
    tracing.install(recorder)
    exporter = ExportThread(recorder, OtlpSink(settings(collector), "n1", "worker-0"))
    try:
        began = tracing.now()
        request = tracing.start_request(SAMPLED | {"tracestate": "vendor=1"}, began)
        assert request is not None
        request.name, request.failed, request.attributes = "GetObject", "InternalError", {"size": 3}
        tracing.record(request, "part", began, began + 0.25)
        request.end(began + 0.5)
        found = {span.name: span for span in collector.await_spans(lambda spans: len(spans) == 2)}
    finally:
        tracing.install(None)
        exporter.stop()
    outer, part = found["GetObject"], found["part"]
    assert (outer.trace, outer.parent) == (SAMPLED["traceparent"][3:35], SAMPLED["traceparent"][36:52])
    assert (part.trace, part.parent) == (outer.trace, outer.span)
    assert (outer.kind, part.kind) == (2, 1)  # server, internal
    assert (outer.failed, outer.message, outer.attributes) == (True, "InternalError", {"size": 3})
    assert outer.ended - outer.started == pytest.approx(0.5, abs=1e-3)
    assert part.ended - part.started == pytest.approx(0.25, abs=1e-3)
    assert outer.resource["service.name"] == "meshd"
    assert (outer.resource["service.instance.id"], outer.resource["shardmesh.process"]) == ("n1", "worker-0")
    assert outer.resource["deployment.environment"] == "test"
    assert collector.headers[0]["authorization"] == "Bearer abc"


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "away"])
def test_a_collector_in_trouble_costs_spans_alone(collector: OtlpReceiver, trouble: str) -> None:
    if trouble == "refuses":
        collector.status = 400
    if trouble == "hangs":
        collector.hold = threading.Event()
    endpoint = "http://127.0.0.1:9/v1/traces" if trouble == "away" else f"{collector.endpoint}/v1/traces"
    recorder = Recorder(1.0)
    tracing.install(recorder)
    exporter = ExportThread(recorder, OtlpSink(TracingSettings(endpoint), "n1", "worker-0"))
    failed = counted("failed")
    try:
        request = tracing.start_request({}, tracing.now())
        assert request is not None
        for _ in range(20):
            tracing.record(request, "part", 1.0, 2.0)  # returns whatever the collector does
        await_true(lambda: counted("failed") - failed == 20, 100)
    finally:
        tracing.install(None)
        exporter.stop()
    assert not collector.spans


def settings(collector: OtlpReceiver) -> TracingSettings:
    return TracingSettings(f"{collector.endpoint}/v1/traces")


def test_exemplars_of_all_processes_lead_to_traces(collector: OtlpReceiver) -> None:
    flags = ["--trace-endpoint", collector.endpoint, "--trace-ratio", "1", "--trace-keys", "on"]
    with Daemon.start(workers=2, args=flags) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="traced")
        client.put_object(Bucket="traced", Key="a", Body=b"data")
        client.get_object(Bucket="traced", Key="a")["Body"].read()
        found = collector.await_spans(lambda spans: {"PutObject", "GetObject"} <= {s.name for s in spans})
        traces = {span.trace: span for span in found if not span.parent}
        (put,) = [span for span in traces.values() if span.name == "PutObject"]
        assert (put.attributes["aws.s3.bucket"], put.attributes["aws.s3.key"]) == ("traced", "a")
        assert [span.name for span in found if span.parent == put.span] == ["commit"]

        plain = scrape(daemon, "*/*")
        assert b"# {" not in plain
        text = scrape(daemon, "application/openmetrics-text;version=1.0.0").decode()
        buckets = [
            sample
            for family in text_string_to_metric_families(text)
            if family.name == "meshd_http_request_seconds"
            for sample in family.samples
            if sample.exemplar is not None
        ]
        assert {sample.labels["operation"] for sample in buckets} >= {"PutObject", "GetObject"}
        told = {sample.exemplar.labels["trace_id"] for sample in buckets}
        found = collector.await_spans(lambda spans: told <= {s.trace for s in spans})
        traces = {span.trace: span for span in found if not span.parent}
        for sample in buckets:
            assert sample.exemplar.value <= float(sample.labels["le"])
            span = traces[sample.exemplar.labels["trace_id"]]
            assert span.name == sample.labels["operation"]
        assert daemon.stop() == 0


def scrape(daemon: Daemon, accept: str) -> bytes:
    request = urllib.request.Request(f"{daemon.endpoint}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body
