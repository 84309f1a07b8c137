"""The end of a request: what happens to the connection, and what is counted.

Law: an answer that leaves body bytes unread either drops a few of them or gives up the connection; it never
waits for many. Invariant: every request is counted once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from meshd.telemetry import metrics
from meshd.web.replies import new_request_id

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

    from meshd.web.incoming import MeshRequest
    from meshd.web.replies import Reply

# An unread body up to here is read and dropped to keep the connection; a larger one costs the connection.
_DRAINABLE = 64 << 10

_received = metrics.http_bytes.labels("in")
_sent = metrics.http_bytes.labels("out")


@lru_cache(maxsize=1024)
def _count(operation: str, status: int) -> Counter:
    return metrics.http_requests.labels(operation, str(status))


@lru_cache(maxsize=256)
def _seconds(operation: str) -> Histogram:
    return metrics.http_seconds.labels(operation)


class Trace:
    """What is known of one request for its metrics and logs. `started` in seconds of a steady clock."""

    __slots__ = ("operation", "received", "request_id", "sent", "started")

    def __init__(self, started: float) -> None:
        self.started = started
        self.request_id = new_request_id()
        self.operation = "Unknown"
        self.received = self.sent = 0

    def __repr__(self) -> str:
        return f"<Trace {self.request_id} {self.operation}>"

    def finish(self, status: int, now: float) -> None:
        """Count the request; 499 stands for a client that went away."""
        _count(self.operation, status).inc()
        _seconds(self.operation).observe(now - self.started)
        if self.received:
            _received.inc(self.received)
        if self.sent:
            _sent.inc(self.sent)


async def settle(request: MeshRequest, reply: Reply) -> None:
    """Write `reply`, closing the connection after it if what the client sends next could not be understood.

    A client that still waits for `100 Continue` may send its body or not (RFC 9110 §10.1.1): nobody can
    tell where its next request would begin, so that connection ends, as does one with much of a body
    unread.
    """
    waiting = "Expect" in request.headers and not request.continued
    if waiting or request.is_last or _unread(request):
        reply.force_close()
    await reply.prepare(request)


def _unread(request: MeshRequest) -> bool:
    """Whether more of the body is left than is worth reading for nothing."""
    if request.content.is_eof():
        return False
    length = request.content_length
    return length is None or length - request.content.total_bytes > _DRAINABLE
