"""A receiver of OTLP over HTTP that parses what comes with OpenTelemetry's own protobuf classes.

`hold` makes it answer nothing, as a collector that hangs; `status` is what it answers.
"""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_clock = SystemClock()
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Received:
    """One span. Ids in hex, `parent` empty for a root; times in seconds since 1970."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    started: float
    ended: float
    failed: bool
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: tuple[str, ...]

    @property
    def node(self) -> str:
        return str(self.resource.get("service.instance.id", ""))


@dataclass(slots=True)
class OtlpReceiver:
    """`with OtlpReceiver() as collector: … collector.await_spans(…)`."""

    spans: list[Received] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    hold: threading.Event | None = None
    _server: ThreadingHTTPServer = field(init=False)

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if receiver.hold is not None:
                    receiver.hold.wait(PATIENCE)
                if self.path != "/v1/traces" or receiver.status != 200:
                    self.send_error(404 if receiver.status == 200 else receiver.status)
                    return
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.add(gzip.decompress(body) if self.headers.get("content-encoding") else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.hold is not None:
            self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, body: bytes) -> None:
        self.bodies.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            span.status.code == 2,
                            span.status.message,
                            _values(span.attributes),
                            resource,
                            tuple(link.span_id.hex() for link in span.links),
                        )
                    )

    def await_spans(self, complete: Callable[[list[Received]], bool]) -> list[Received]:
        """Return what was received once `complete` says so of it."""
        ends = _clock.monotonic() + PATIENCE
        while not complete(list(self.spans)):
            assert _clock.monotonic() < ends, f"received: {[span.name for span in self.spans]}"
            threading.Event().wait(0.05)
        return list(self.spans)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
