"""Per-request trace: metrics, audit line and log fields of one request, and the end of its response.

A response that leaves request body bytes unread either drops a few of them or closes the connection; it never
waits for many. Every request is counted exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.server.response import new_request_id
from meshd.telemetry import logs, metrics
from meshd.telemetry.audit_log import AuditEntry, format_audit_time
from meshd.util import shared_counters
from meshwire.dataset.archive_keys import MEMBER_SEPARATOR
from meshwire.s3.operations import CopySource
from meshwire.s3.results import DeleteResult

if TYPE_CHECKING:
    import prometheus_client

    from meshd.server.request import MeshRequest
    from meshd.server.response import Header, Reply
    from meshd.telemetry.audit_log import AuditLog
    from meshd.util.clock import Clock
    from meshwire.s3.operations import Operation
    from meshwire.s3.results import Result

CLIENT_GONE = 499
# A smaller unread body is read and dropped to keep the connection; a larger one closes it.
_DRAINABLE = 64 << 10
_LATER = 0.01  # seconds
# Not counted as client activity.
_BACKGROUND = ("/-/peer/moves/", "/-/healthy", "/-/ready", "/-/map", "/metrics")

_log = logging.getLogger("meshd.requests")
_received = metrics.http_bytes.labels("in")
_sent = metrics.http_bytes.labels("out")


@lru_cache(maxsize=1024)
def _count(operation: str, status: int) -> prometheus_client.Counter:
    return metrics.http_requests.labels(operation, str(status))


@lru_cache(maxsize=256)
def _seconds(operation: str) -> prometheus_client.Histogram:
    return metrics.http_seconds.labels(operation)


class _DeferredCounters:
    """Counts requests of the fast path and writes the counts in batches: the counters are in memory shared by
    all processes, and cost more than the head of such a response."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._seconds: list[tuple[str, float]] = []
        self._sent = 0

    def add(self, operation: str, status: int, seconds: float, sent: int) -> None:
        if not self._seconds:
            asyncio.get_running_loop().call_later(_LATER, self.flush)
        self._counts[operation, status] += 1
        self._seconds.append((operation, seconds))
        self._sent += sent

    def flush(self) -> None:
        counts, seconds, sent = self._counts, self._seconds, self._sent
        self._counts, self._seconds, self._sent = Counter(), [], 0
        for (operation, status), number in counts.items():
            _count(operation, status).inc(number)
        for operation, took in seconds:
            _seconds(operation).observe(took)
        if sent:
            _sent.inc(sent)


_later = _DeferredCounters()


def flush_request_counters() -> None:
    """Write deferred counts. Call it before metrics are read, and at shutdown."""
    _later.flush()


class RequestTrace:
    """Collects what is known about one request for its metrics, its audit line and its log lines.

    Code that learns something stores it here: the operation's name, `target` (the operation itself, or a
    native request's path), the claimed `access_key`, the `identity` once it is verified, the `keys` that a
    body names, the `result` or the error `code`; and `extra_headers`, which are added to every response.
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
        "sent",
        "target",
    )

    def __init__(self, clock: Clock, audit: AuditLog | None, remote: str | None) -> None:
        self._clock, self._audit, self.remote = clock, audit, remote or ""
        self._started = clock.monotonic()
        self.request_id = new_request_id()
        self.operation = "Unknown"
        self.target: Operation | str | None = None
        self.result: Result | None = None
        self.keys: tuple[str, ...] = ()
        self.identity = ANONYMOUS_IDENTITY
        self.access_key = self.code = ""
        self.received = self.sent = 0
        self.extra_headers: list[Header] = []
        logs.request_id.set(self.request_id)

    def __repr__(self) -> str:
        return f"<Trace {self.request_id} {self.operation}>"

    def elapsed(self) -> float:
        """Return the seconds since the request's head was parsed."""
        return self._clock.monotonic() - self._started

    def mark_forwarded(self) -> None:
        """Note that another node executed the request and writes the audit line."""
        self._audit = None

    def discard(self) -> None:
        """Drop the trace without counting: the request is answered elsewhere."""
        logs.request_id.set("")

    def finish(self, status: int, *, later: bool = False) -> None:
        """Count the request (`later`: within some milliseconds, on a running loop) and write its audit line,
        once. CLIENT_GONE if the client disconnected."""
        now = self._clock.monotonic()
        seconds = now - self._started
        if type(self.target) is not str or not self.target.startswith(_BACKGROUND):
            shared_counters.mark_client_activity(now)
        if later:
            _later.add(self.operation, status, seconds, self.sent)
        else:
            _count(self.operation, status).inc()
            _seconds(self.operation).observe(seconds)
            if self.sent:
                _sent.inc(self.sent)
        if self.received:
            _received.inc(self.received)
        if self._audit is not None:
            self._audit.write_entry(self._entry(status, seconds))
        if _log.isEnabledFor(logging.DEBUG):
            self._log(self._entry(status, seconds))
        logs.request_id.set("")

    def _log(self, entry: AuditEntry) -> None:
        told = msgspec.to_builtins(entry)
        del told["time"]  # the log line has its own
        _log.debug("answered", extra=told)

    def _entry(self, status: int, seconds: float) -> AuditEntry:
        entry = AuditEntry(
            time=format_audit_time(self._clock.now_ms()),
            request_id=self.request_id,
            remote=self.remote,
            operation=self.operation,
            status=status,
            ms=round(seconds * 1000, 3),
            user=self.identity.user_id,
            access_key=self.access_key,
            code="ClientGone" if status == CLIENT_GONE else self.code,
            bytes_in=self.received,
            bytes_out=self.sent,
            keys=self.keys,
        )
        if self.identity.session is not None:
            entry.session, entry.made_with = self.identity.session.name, self.identity.session.parent
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


async def finish_response(request: MeshRequest, reply: Reply) -> None:
    """Write `reply`, and close the connection after it if further input could not be parsed.

    A client that still waits for `100 Continue` may or may not send its body (RFC 9110 §10.1.1), so it is
    unknown where its next request would begin. That connection is closed, as is one with much of a body
    unread.
    """
    if must_close_connection(request):
        reply.force_close()
    await reply.prepare(request)


def must_close_connection(request: MeshRequest) -> bool:
    """Whether the connection must be closed after the response; see `finish_response`."""
    waiting = "expect" in request.headers and not request.continued
    return waiting or request.is_last or _unread(request)


def _unread(request: MeshRequest) -> bool:
    """Whether more of the body is unread than is worth reading."""
    if request.content.complete:
        return False
    length = request.content_length
    return length is None or length - request.content.received > _DRAINABLE
