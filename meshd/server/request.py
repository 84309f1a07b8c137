"""A request: its head, its body as it arrives, and the trace that counts and audits it. It is plain data.

It knows its connection through a narrow protocol and no endpoint. Every request is counted exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import unquote

import msgspec

from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.server.body_stream import NO_BODY
from meshd.telemetry import logs, metrics, tracing
from meshd.telemetry.audit_log import AuditEntry, format_audit_time
from meshd.util import shared_counters
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR
from meshwire.errors import S3Error
from meshwire.s3.operations import CopySource
from meshwire.s3.parse_request import RequestHead
from meshwire.s3.result_types import DeleteResult

if TYPE_CHECKING:
    import prometheus_client

    from meshd.auth.identity import RequestContext
    from meshd.server.body_stream import BodyStream
    from meshd.server.client_transport import ClientTransport
    from meshd.server.http_parser import ParsedHead
    from meshd.telemetry.audit_log import AuditLog
    from meshd.telemetry.metric_registry import SecondsHistogram
    from meshd.telemetry.tracing import Span
    from meshd.util.clock import Clock
    from meshwire.s3.operations import Operation
    from meshwire.s3.result_types import Result
    from meshwire.sigv4 import Claim
    from meshwire.sigv4.sigv2 import SigV2Claim


class RequestOrigin(Protocol):
    """Where a request came from: the client's connection, or what the node that forwarded it reports."""

    @property
    def remote(self) -> str:
        """The client's address."""

    @property
    def secure(self) -> bool:
        """Whether the client speaks TLS."""

    @property
    def tls(self) -> str:
        """The client's version of TLS, as `1.3`; empty without TLS."""


class MeshRequest:
    """A request: its parsed head (`headers` by lower-case name), its body as it arrives (`content`), and what
    handlers add to it.

    `continued`: `100 Continue` was sent. `verified_body`: a small body that was read and compared with its
    signed digest before the handler was called. `held_body`: the whole body, not verified, read in order to
    forward it. `trace`, `claim` (the verified signature) and `context` (the facts for policies) are set for
    native requests. `response_started`: bytes of the response may have been sent.
    """

    __slots__ = (
        "claim",
        "connection",
        "content",
        "content_length",
        "context",
        "continued",
        "head_size",
        "headers",
        "held_body",
        "http_version",
        "keep_alive",
        "method",
        "raw_headers",
        "raw_path",
        "response_started",
        "trace",
        "verified_body",
    )

    trace: RequestTrace

    def __init__(
        self, connection: ClientTransport, head: ParsedHead, content: BodyStream, *, continued: bool = False
    ) -> None:
        self.connection, self.content = connection, content
        (
            self.method,
            self.raw_path,
            self.http_version,
            self.headers,
            self.raw_headers,
            self.head_size,
            self.keep_alive,
            self.content_length,
            _,
        ) = head
        self.continued, self.response_started = continued, False
        self.verified_body: bytes | None = None
        self.held_body: bytes | None = None
        self.claim: Claim | SigV2Claim | None = None
        self.context: RequestContext | None = None

    def __repr__(self) -> str:
        return f"<MeshRequest {self.method} {self.raw_path[:100]}>"

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection's transport; None once it is closed."""
        return self.connection.transport

    @property
    def remote(self) -> str:
        """The client's address."""
        return self.connection.remote

    @property
    def secure(self) -> bool:
        """Whether the client speaks TLS."""
        return self.connection.secure

    @property
    def tls(self) -> str:
        """The client's version of TLS, as `1.3`; empty without TLS."""
        return self.connection.tls

    @property
    def path(self) -> str:
        """The target's path, decoded."""
        return unquote(self.raw_path.partition("?")[0])

    @property
    def body_exists(self) -> bool:
        """Whether the head announces a body."""
        return self.content is not NO_BODY

    @property
    def is_last(self) -> bool:
        """Whether the client sends nothing after this request."""
        return self.connection.is_last_request

    @property
    def pressed(self) -> bool:
        """Whether responses should not be buffered in memory at present."""
        return self.connection.pressed

    async def read(self) -> bytes:
        """Return the whole body; the verified one if there is one."""
        if self.verified_body is not None:
            return self.verified_body
        pieces: list[bytes] = []
        while not self.content.exhausted:
            pieces.append(await self.content.read_available())
        return b"".join(pieces)

    async def drain(self) -> None:
        """Wait until the client has read most of what is queued. Raises ConnectionResetError."""
        await self.connection.drain()


def request_head(request: MeshRequest, max_bytes: int, host_bucket: str = "") -> RequestHead:
    """Return the head in the form of `meshwire`; `host_bucket` is the bucket that its host names. Raises
    S3Error RequestHeaderSectionTooLarge above `max_bytes`."""
    raw_path, _, raw_query = _origin_form(request.raw_path).partition("?")
    if request.head_size + len(raw_path) + len(raw_query) > max_bytes:
        raise S3Error("RequestHeaderSectionTooLarge")
    return RequestHead(request.method, raw_path, raw_query, request.headers, host_bucket)


def _origin_form(target: str) -> str:
    """Return the target in origin form. RFC 9112 §3.2.2: a server must also accept the absolute form."""
    if target.startswith("/"):
        return target
    _, scheme, rest = target.partition("://")
    return "/" + rest.partition("/")[2] if scheme else target


# --- the trace ----------------------------------------------------------------------------------------------

CLIENT_GONE = 499
_LATER = 0.05  # seconds
# Not counted as client activity.
_BACKGROUND = ("/-/peer/moves/", "/-/healthy", "/-/ready", "/-/map", "/metrics")

_log = logging.getLogger("meshd.requests")
_received = metrics.http_bytes.labels("in")
_sent = metrics.http_bytes.labels("out")


def new_request_id() -> str:
    """Return 16 random hexadecimal digits."""
    return f"{random.getrandbits(64):016X}"


@lru_cache(maxsize=1024)
def _count(operation: str, status: int) -> prometheus_client.Counter:
    return metrics.http_requests.labels(operation, str(status))


@lru_cache(maxsize=256)
def _seconds(operation: str) -> SecondsHistogram:
    return cast("SecondsHistogram", metrics.http_seconds.labels(operation))


class _DeferredCounters:
    """Counts requests of the fast path and writes the counts in batches: the counters are in memory shared by
    all processes, and cost more than the head of such a response."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], list[float]] = {}
        self._received = self._sent = 0

    def add(self, operation: str, status: int, seconds: float, received: int, sent: int) -> None:
        if not self._seconds:
            asyncio.get_running_loop().call_later(_LATER, self.flush)
        self._seconds.setdefault((operation, status), []).append(seconds)
        self._received += received
        self._sent += sent

    def flush(self) -> None:
        seconds, received, sent = self._seconds, self._received, self._sent
        self._seconds, self._received, self._sent = {}, 0, 0
        for (operation, status), took in seconds.items():
            _count(operation, status).inc(len(took))
            _seconds(operation).observe_all(took)
        if received:
            _received.inc(received)
        if sent:
            _sent.inc(sent)


_later = _DeferredCounters()


def flush_request_counters() -> None:
    """Write deferred counts. Call it before metrics are read, and at shutdown."""
    _later.flush()


class RequestTrace:
    """Collects what is known about one request for its metrics, its audit line and its log lines.

    Code that learns something stores it here: the operation's name, `target` (the operation itself, or a
    native request's path), the claimed `access_key`, the `role` that is to be assumed, the `identity` once it
    is verified, the `keys` that a body names, the `result` or the error `code`; and `extra_headers`, which
    are added to every response. `span`: what is recorded of the request, if it is traced.
    """

    __slots__ = (
        "_audit",
        "_clock",
        "_started",
        "access_key",
        "code",
        "extra_headers",
        "identity",
        "keys",
        "operation",
        "received",
        "remote",
        "request_id",
        "result",
        "role",
        "sent",
        "span",
        "target",
    )

    def __init__(
        self,
        clock: Clock,
        audit: AuditLog | None,
        remote: str | None,
        span: Span | None = None,
        started: float | None = None,
    ) -> None:
        """`started`: when the head was parsed, if that is known (monotonic)."""
        self._clock, self._audit, self.remote = clock, audit, remote or ""
        self._started = clock.monotonic() if started is None else started
        self.request_id = new_request_id()
        self.operation = "Unknown"
        self.target: Operation | str | None = None
        self.result: Result | None = None
        self.keys: tuple[str, ...] = ()
        self.identity = ANONYMOUS_IDENTITY
        self.access_key = self.code = self.role = ""
        self.received = self.sent = 0
        self.extra_headers: list[tuple[str, str]] = []
        self.span = span
        logs.request_id.set(self.request_id)

    def __repr__(self) -> str:
        return f"<RequestTrace {self.request_id} {self.operation}>"

    def elapsed(self) -> float:
        """Return the seconds since the request's head was parsed."""
        return self._clock.monotonic() - self._started

    def mark_forwarded(self) -> None:
        """Note that another node executed the request and writes the audit line."""
        self._audit = None

    def suspend(self) -> None:
        """Leave the request to other code, which may count it; log lines do not name it any longer."""
        logs.request_id.set("")

    def finish(self, status: int, *, later: bool = False) -> None:
        """Count the request (`later`: within some milliseconds, on a running loop) and write its audit line,
        once. CLIENT_GONE if the client disconnected."""
        now = self._clock.monotonic()
        seconds = now - self._started
        if type(self.target) is not str or not self.target.startswith(_BACKGROUND):
            shared_counters.mark_client_activity(now)
        if later:
            _later.add(self.operation, status, seconds, self.received, self.sent)
        else:
            _count(self.operation, status).inc()
            _seconds(self.operation).observe(seconds)
            if self.received:
                _received.inc(self.received)
            if self.sent:
                _sent.inc(self.sent)
        if self.span is not None:
            self._end_span(self.span, status, seconds)
        if self._audit is not None:
            self._audit.write_entry(self._entry(status, seconds))
        if _log.isEnabledFor(logging.DEBUG):
            self._log(self._entry(status, seconds))
        logs.request_id.set("")

    def _end_span(self, span: Span, status: int, seconds: float) -> None:
        """Export the request's span. It says nothing about the client: the audit log does."""
        span.name = self.operation
        span.failed = self.code if status >= 500 else ""
        attributes = span.attributes
        attributes["http.response.status_code"] = status
        attributes["shardmesh.request_id"] = self.request_id
        if self.code:
            attributes["error.type"] = self.code
        if self.received:
            attributes["http.request.body.size"] = self.received
        if self.sent:
            attributes["http.response.body.size"] = self.sent
        if self.target is not None and not isinstance(self.target, str):
            attributes["aws.s3.bucket"] = getattr(self.target, "bucket", "")
            if tracing.names_keys():
                attributes["aws.s3.key"] = getattr(self.target, "key", "")
        tracing.note_exemplar("meshd_http_request_seconds", (self.operation,), seconds, span)
        span.end()

    def _log(self, entry: AuditEntry) -> None:
        fields = msgspec.to_builtins(entry)
        del fields["time"]  # the log line has its own
        _log.debug("answered", extra=fields)

    def _entry(self, status: int, seconds: float) -> AuditEntry:
        entry = AuditEntry(
            time=format_audit_time(self._clock.now_ms()),
            request_id=self.request_id,
            remote=self.remote,
            operation=self.operation,
            status=status,
            ms=round(seconds * 1000, 3),
            user=self.identity.principal,
            access_key=self.access_key,
            role=self.role,
            code="ClientGone" if status == CLIENT_GONE else self.code,
            bytes_in=self.received,
            bytes_out=self.sent,
            keys=self.keys,
        )
        if self.identity.session is not None:
            session = self.identity.session
            entry.session, entry.made_with, entry.subject = session.name, session.parent, session.subject
        if isinstance(self.target, str):
            entry.path = self.target
        elif self.target is not None:
            _describe(entry, self.target)
        if isinstance(self.result, DeleteResult):
            entry.failed = {failure.key: failure.code for failure in self.result.failures}
        else:
            entry.version = getattr(self.result, "version", "") or entry.version
        return entry


def _describe(entry: AuditEntry, operation: Operation) -> None:
    """Add the names that an S3 operation concerns."""
    entry.bucket = getattr(operation, "bucket", "")
    entry.key = getattr(operation, "key", "")
    version = getattr(operation, "version", None)
    if isinstance(version, str):
        entry.version = version
    entry.member = getattr(operation, "member", None) or ""
    source = getattr(operation, "source", None)
    if isinstance(source, CopySource):
        inside = "" if source.member is None else f"{MEMBER_SEPARATOR}{source.member}"
        entry.source = f"{source.bucket}/{source.key}{inside}"
