"""Fast path for GET and HEAD of small objects: the callback that received the request writes the response.
`small_put` has that of PUT.

It skips only work whose result is known (a body that cannot come, a task that would not wait, a cold page
that is in memory) and calls the same functions for the rest. Anything unusual, and every error, is declined
before it has any effect and takes the regular path.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING

from meshd.server.proxy.hops import HOP_HEADER, forwarded_trace
from meshd.server.proxy.response_relay import ProxiedResponse
from meshd.server.request import RequestTrace
from meshd.server.response import head_bytes
from meshd.server.response_body import ResumedResponse
from meshd.server.s3.body_resumer import body_resumer
from meshd.server.s3.endpoint import SMALL_BYTES
from meshd.server.s3.request_auth import VirtualHosts
from meshd.server.s3.response_headers import common_headers, object_response_head
from meshd.server.s3.small_put import SmallPutPath
from meshd.store.errors import StoreError
from meshd.telemetry import tracing
from meshwire.checksums.body_checksums import ALGORITHMS
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR
from meshwire.errors import S3Error
from meshwire.s3.operations import GetObject, operation_name
from meshwire.s3.parse_request import RequestHead, parse_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshd.core.object_io import LookupResult
    from meshd.server.connection import Connection
    from meshd.server.proxy.hops import Hop
    from meshd.server.response_body import BodyResumer
    from meshd.server.s3.request_auth import RequestAdmission
    from meshd.server.services import ServerServices
    from meshd.store.records import Span

log = logging.getLogger(__name__)

_MAX_HEAD = 8 << 10
_AT_ONCE = 1 << 20  # larger responses are sent in several turns
_END = b"\r\n\r\n"
_PRINTABLE = bytes(range(0x20, 0x7F))
# No query, and nothing that parsers could read in two ways. Native routes begin with `/-/`.
_REQUEST = re.compile(
    r"(GET|HEAD|PUT) (/(?!-/|metrics )(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})+) HTTP/1\.1\Z", re.A
)
# Headers that have no effect beyond the functions called here. No Origin (CORS), no Expect, nothing about a
# body; Connection only with its default value.
_HEADERS = (
    "accept",
    "accept-encoding",
    "amz-sdk-invocation-id",
    "amz-sdk-request",
    "authorization",
    "cache-control",
    "connection",
    "content-type",
    "date",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-unmodified-since",
    "range",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-mesh-hop",
    "x-mesh-trace",
    "x-amz-checksum-mode",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-user-agent",
)
_PUT_HEADERS = (
    *(name for name in _HEADERS if name not in {"range", "x-mesh-hop", "x-mesh-trace"}),
    "content-disposition",
    "content-language",
    "content-length",
    "content-md5",
    "expect",
    "expires",
    "x-amz-sdk-checksum-algorithm",
    *(f"x-amz-checksum-{algorithm}" for algorithm in ALGORITHMS),
)
_METADATA = re.compile(r"x-amz-meta-[\w-]+", re.A)


def _spellings(names: Iterable[str]) -> dict[str, str]:
    known = {spelling: name for name in names for spelling in (name, name.title())}
    return known | {"X-Amz-Content-SHA256": "x-amz-content-sha256"}  # as botocore writes it


_KNOWN, _KNOWN_OF_PUT = _spellings(_HEADERS), _spellings(_PUT_HEADERS)


class FastPath:
    """Answers the requests it can. One per process; `answered` and `passed_on` are counters."""

    def __init__(self, deps: ServerServices, admission: RequestAdmission) -> None:
        self._deps, self._admission = deps, admission
        self._hosts = VirtualHosts(deps.http.domains) if deps.http.domains else None
        self._longest = min(_MAX_HEAD, deps.http.max_header_bytes)
        self._puts = SmallPutPath(deps, admission) if deps.objects.small_bytes >= 0 else None
        self.answered = self.passed_on = 0

    def __repr__(self) -> str:
        return f"<FastPath {self.answered} answered>"

    def try_respond(self, connection: Connection, data: bytes) -> bytes | None:
        """Return the whole response to the only request in `data`, already counted (empty if it is sent in
        another way); None to decline it."""
        if data[:4] == b"PUT ":
            return self._begin_put(self._puts, connection, data) if self._puts is not None else None
        if len(data) > self._longest:
            return None
        head = parse_simple_head(data)
        if head is None or self._names_bucket(head):
            return None
        headers, started = head.headers, self._deps.clock.monotonic()
        span = tracing.start_request(headers, started, forwarded=HOP_HEADER in headers)
        trace = RequestTrace(self._deps.clock, self._deps.audit, connection.remote, span, started)
        try:
            with self._deps.control_snapshot():
                answer = self._answer(connection, data, head, trace)
        except (S3Error, StoreError):
            answer = None
        except Exception:
            log.exception("the fast path failed; the request takes the regular path")
            answer = None
        if answer is None:
            trace.suspend()
        return answer

    def _begin_put(self, puts: SmallPutPath, connection: Connection, data: bytes) -> bytes | None:
        body_at = data.find(_END, 0, self._longest) + len(_END)
        if body_at < len(_END):
            return None
        head = parse_simple_head(data[:body_at])
        if head is None or self._names_bucket(head) or not puts.try_begin(connection, data, head, body_at):
            return None
        self.answered += 1
        return b""

    def _names_bucket(self, head: RequestHead) -> bool:
        return self._hosts is not None and bool(self._hosts.bucket_of(head.headers["host"]))

    def _pass_on(
        self,
        connection: Connection,
        data: bytes,
        head: RequestHead,
        operation: GetObject,
        trace: RequestTrace,
    ) -> bool:
        """Whether the request was sent to another node, whose response is relayed. If none comes, the
        connection parses `data`, the client's input, the ordinary way."""
        forwarder = self._deps.forwarder
        if forwarder is None or MEMBER_SEPARATOR in operation.key:
            return False
        asked = forwarder.idle_upstream(connection, operation.bucket, operation.key, head)
        if asked is None:
            return False
        wire, hop, node = asked
        trace.operation, trace.target = operation_name(operation), operation
        trace.mark_forwarded()
        unanswered = partial(forwarder.suspect, node)
        proxied = ProxiedResponse(connection, wire, data, trace, connection.pending_ended, unanswered)
        connection.leave_to(proxied, proxied.relay.cancel)
        proxied.start(data[:-2] + forwarded_trace(trace.span) + hop, head_only=operation.head)
        self.passed_on += 1
        return True

    def _answer(
        self, connection: Connection, data: bytes, head: RequestHead, trace: RequestTrace
    ) -> bytes | None:
        deps = self._deps
        operation = parse_request(head)
        if type(operation) is not GetObject:
            return None
        trace.extra_headers = common_headers(deps, head, operation.bucket)
        plain = deps.bucket_table.is_plain(operation.bucket)
        if not plain and deps.views.is_view(operation.bucket):
            return None
        hop: Hop | None = None
        if not deps.mesh.single_node and deps.forwarder is not None:
            receiver = deps.forwarder.receiver
            hop = receiver.hop_of_head(head)
            if not deps.mesh.is_reader(operation.bucket, operation.key):
                if deps.nearby_reader is not None and deps.nearby_reader.handles(operation):
                    return None  # a copy on this node may serve it
                return (
                    b"" if hop is None and self._pass_on(connection, data, head, operation, trace) else None
                )
            if not deps.mesh.lease_valid or (
                hop is not None and not deps.forwarder.receiver.is_current_with(hop)
            ):
                return None
        counted: Callable[[], None] | None = None
        if not plain and deps.backed is not None:
            counted = deps.backed.hit_recorder(operation)
            if counted is None:
                return None
        trace.operation, trace.target = operation_name(operation), operation
        asking = connection if hop is None else hop
        trace.remote = asking.remote
        self._admission.admit(head, operation, asking, trace)
        if counted is not None:
            counted()
        found = deps.reader.find_object(operation)
        if SMALL_BYTES < found.length <= _AT_ONCE and not operation.head and not found.head.tag_count:
            return self._send(connection, operation, found, trace)
        began = 0.0 if trace.span is None else tracing.now()
        body = self._body(operation, found)
        if body is None:
            return None
        if trace.span is not None:
            tracing.record(trace.span, "disk read", began, tracing.now())
        status, headers = object_response_head(operation, found, trace)
        answer = head_bytes(status, headers, deps.clock.now_ms() // 1000) + body
        self.answered += 1
        trace.sent = len(body)
        trace.finish(status, later=True)
        return answer

    def _send(
        self, connection: Connection, operation: GetObject, found: LookupResult, trace: RequestTrace
    ) -> bytes | None:
        """Send a larger response at once from the page cache, if the connection accepts it."""
        span = self._deps.reader.span_now(found)
        if span is None:
            return None
        status, headers = object_response_head(operation, found, trace)
        head = head_bytes(status, headers, self._deps.clock.now_ms() // 1000)
        rest = body_resumer(self._deps, operation, found, [span])
        if not _send_direct(connection, head, span, rest):
            return None
        self.answered += 1
        trace.sent = found.length
        trace.finish(status, later=True)
        return b""

    def _body(self, operation: GetObject, found: LookupResult) -> bytes | None:
        if found.head.tag_count:  # the regular path checks who may learn the count
            return None
        if operation.head or not found.length:
            return b""
        return None if found.length > SMALL_BYTES else self._deps.reader.read_range_now(found)


def _send_direct(connection: Connection, head: bytes, span: Span, rest: BodyResumer) -> bool:
    """Send a head and a range of a file at once, past the transport; False if nothing was sent. What the
    kernel did not accept is queued; what cannot be read is sent later from `rest`."""
    at_once = connection.past_the_queue()
    sent = None if at_once is None else at_once.send_now(head, span)
    if sent is None:
        return False
    left, torn = sent
    if left:
        connection.queue_response(left)
    if torn is not None:
        resumed = ResumedResponse(connection, rest, torn, connection.pending_ended)
        connection.leave_to(resumed, resumed.cancel)
    return True


def parse_simple_head(data: bytes) -> RequestHead | None:
    """Return the head if `data` is exactly one head that could not be read in two ways."""
    if data.find(_END) != len(data) - 4 or not data.isascii():
        return None
    request, *lines = data[:-4].decode().split("\r\n")
    if len(data.translate(None, _PRINTABLE)) != 2 * len(lines) + 4:  # more than the ends of lines
        return None
    asked = _REQUEST.match(request)
    if asked is None:
        return None
    put = asked[1] == "PUT"
    known = _KNOWN_OF_PUT if put else _KNOWN
    headers: dict[str, str] = {}
    for line in lines:
        written, colon, value = line.partition(":")
        name = known.get(written)
        if name is None:
            name = written.lower()
            if name not in known and not (put and _METADATA.fullmatch(name)):
                return None
        if not colon or name in headers:
            return None
        headers[name] = value.strip(" ")
    if "host" not in headers or headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    return RequestHead(asked[1], asked[2], "", headers)
