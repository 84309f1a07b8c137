"""Export of spans over OTLP: a thread per process sends finished spans to a collector, in batches.

Messages are OpenTelemetry's own protobuf classes (the extra `shardmesh[tracing]`), sent with the standard
variables `OTEL_EXPORTER_OTLP_*` for headers, certificates, compression and timeout. A collector that is slow
or down costs the node only the spans that do not fit into the queue, and these are counted: no request waits
for this thread.
"""

from __future__ import annotations

import gzip
import logging
import os
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from meshd.config import ConfigError
from meshd.telemetry import metrics, tracing
from meshd.telemetry.exemplars import write_exemplars
from meshd.util.clock import SystemClock
from meshwire.http_values.mesh_headers import RELEASE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.config import TracingSettings
    from meshd.telemetry.tracing import Recorder, Span, Value

_BATCH: Final = 512  # spans of one request to the collector
_INTERVAL: Final = 2.0  # seconds between batches that are not full
_ATTEMPTS: Final = (0.5, 2.0)  # seconds before a batch is sent again
_RETRYABLE: Final = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP wants a batch sent again."""
_KINDS: Final = {"internal": 1, "server": 2, "client": 3}
_SAMPLED: Final = 1
_FAILED: Final = 2
_REMOTE, _LOCAL = 0x300, 0x100  # flags of a span: whether its parent is in another process is known, and is
_WARN_EVERY: Final = 60.0
_STOP_SECONDS: Final = 2.0  # for the last spans, when the process stops
_log = logging.getLogger("meshd.tracing")


class SpanSink(Protocol):
    """Sends spans somewhere, from one thread."""

    def send(self, spans: Sequence[Span]) -> str:
        """Return "" if they arrived, else why not. May block for a while."""


def require_tracing_library() -> None:
    """Import the messages, so that forked processes share their memory. Raises ConfigError without them."""
    try:
        import opentelemetry.proto.collector.trace.v1.trace_service_pb2  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"trace-endpoint needs OpenTelemetry ({error}): install it with "
            "pip install 'shardmesh[server,tracing]', or remove the setting"
        ) from error


class OtlpSink:
    """Sends spans by OTLP over HTTP, in protobuf. `stopped` ends the wait between two attempts."""

    def __init__(
        self,
        settings: TracingSettings,
        node_id: str,
        process: str,
        stopped: threading.Event | None = None,
    ) -> None:
        def variable(name: str, default: str = "") -> str:
            general = os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or default
            return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or general

        self._url, self._stopped = settings.traces_url, stopped or threading.Event()
        self._timeout = float(variable("TIMEOUT", "10"))
        self._compress = variable("COMPRESSION") == "gzip"
        self._headers = {
            "content-type": "application/x-protobuf",
            "user-agent": f"shardmesh/{RELEASE}",
            **parse_pairs(variable("HEADERS")),
        }
        if self._compress:
            self._headers["content-encoding"] = "gzip"
        context = ssl.create_default_context(cafile=variable("CERTIFICATE") or None)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        self._resource: dict[str, Value] = {
            **parse_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "meshd",
            "service.version": RELEASE,
            "service.instance.id": node_id,
            "shardmesh.process": process,
        }
        self._clock = SystemClock()

    def __repr__(self) -> str:
        return f"<OtlpSink {self._url}>"

    def send(self, spans: Sequence[Span]) -> str:
        offset = self._clock.stamp() - round(self._clock.monotonic() * 1e9)
        body = encode_spans(spans, self._resource, offset)
        request = urllib.request.Request(
            self._url, gzip.compress(body, 1) if self._compress else body, self._headers
        )
        why = ""
        for pause in (*_ATTEMPTS, 0.0):
            try:
                with self._opener.open(request, timeout=self._timeout):
                    return ""
            except urllib.error.HTTPError as error:
                error.close()
                why = f"it answered {error.code}"
                if error.code not in _RETRYABLE:
                    return why
            except OSError as error:
                why = str(error)
            if pause and self._stopped.wait(pause):
                break
        return why


def parse_pairs(text: str) -> dict[str, str]:
    """Parse `key=value,key=value`, percent-encoded, as OpenTelemetry's variables have them."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {unquote(key.strip()): unquote(value.strip()) for key, _, value in pairs}


def encode_spans(spans: Sequence[Span], resource: Mapping[str, Value], offset: int) -> bytes:
    """Return an ExportTraceServiceRequest. `offset`: nanoseconds from monotonic to wall time."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    _add_attributes(group.resource.attributes, resource)
    scope = group.scope_spans.add()
    scope.scope.name, scope.scope.version = "meshd", RELEASE
    for span in spans:
        told = scope.spans.add(
            trace_id=span.trace_id.to_bytes(16, "big"),
            span_id=span.span_id.to_bytes(8, "big"),
            parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
            trace_state=span.state,
            name=span.name,
            kind=_KINDS[span.kind],
            flags=_SAMPLED | (_REMOTE if span.kind == "server" else _LOCAL),
            start_time_unix_nano=round(span.started * 1e9) + offset,
            end_time_unix_nano=round(span.ended * 1e9) + offset,
        )
        if span.attributes:
            _add_attributes(told.attributes, span.attributes)
        if span.failed:
            told.status.code, told.status.message = _FAILED, span.failed
    return bytes(message.SerializeToString())


def _add_attributes(target: Any, attributes: Mapping[str, Value]) -> None:
    for key, value in attributes.items():
        told = target.add(key=key).value
        if isinstance(value, str):
            told.string_value = value
        elif isinstance(value, bool):
            told.bool_value = value
        elif isinstance(value, int):
            told.int_value = value
        else:
            told.double_value = value


class ExportThread:
    """Sends what `recorder` collects, until `stop`."""

    def __init__(self, recorder: Recorder, sink: SpanSink, stopped: threading.Event | None = None) -> None:
        self._recorder, self._sink = recorder, sink
        self._clock = SystemClock()
        self._stopped = stopped or threading.Event()
        self._warned = -_WARN_EVERY
        self._written = 0.0
        self._thread = threading.Thread(target=self._run, name="meshd-tracing", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ExportThread of {self._recorder!r}>"

    def stop(self) -> None:
        """Send what is left, for at most two seconds, and end the thread."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        self._write_exemplars()
        while spans := self._recorder.take(_BATCH):
            try:
                why = self._sink.send(spans)
            except Exception as error:  # a defect here must not end the thread
                why = f"{type(error).__name__}: {error}"
            if why:
                self._warn(why)
            metrics.trace_spans.labels("failed" if why else "exported").inc(len(spans))

    def _write_exemplars(self) -> None:
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        exemplars = dict(self._recorder.exemplars)
        newest = max((found.at for found in exemplars.values()), default=0.0)
        if directory is None or newest <= self._written:
            return
        try:
            write_exemplars(Path(directory), exemplars)
            self._written = newest
        except OSError as error:
            self._warn(f"exemplars: {error}")

    def _warn(self, why: str) -> None:
        now = self._clock.monotonic()
        if now - self._warned >= _WARN_EVERY:
            self._warned = now
            _log.warning("spans could not be sent to the collector", extra={"why": why})


_thread: ExportThread | None = None


def start_tracing(settings: TracingSettings | None, node_id: str, process: str) -> None:
    """Record and export the spans of this process from now on. Call it after the fork; None: do nothing."""
    global _thread
    if settings is None:
        return
    recorder = tracing.Recorder(settings.ratio, keys=settings.keys)
    stopped = threading.Event()
    _thread = ExportThread(recorder, OtlpSink(settings, node_id, process, stopped), stopped)
    tracing.install(recorder)


def stop_tracing() -> None:
    """Send the last spans and stop. Idempotent."""
    global _thread
    tracing.install(None)
    if _thread is not None:
        _thread.stop()
        _thread = None
