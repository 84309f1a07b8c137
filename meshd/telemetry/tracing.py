"""Tracing: spans of sampled requests, recorded by each process and handed to the exporter's thread.

Law: only the process that a client asked decides whether a trace is recorded: by the caller's `traceparent`
if there is one, else by a share of the requests. A request that is not recorded costs one comparison, and
nothing while tracing is off. Span times are monotonic seconds, which all processes of a host share; the
exporter turns them into wall time. Attributes are what `docs/tracing.md` lists: never a credential, a query
or a header; keys of objects only if the setting `trace-keys` is on.
Invariant: the current span is set only within a task that belongs to one request, or to a part of one. A
task that outlives them inherits it and does not record: a span that has ended is nobody's parent.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_left
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from meshd.telemetry import metrics
from meshd.telemetry.exemplars import LATENCY_BOUNDS, Exemplar
from meshd.util.clock import SystemClock
from meshwire.http_values.mesh_headers import FORWARDED_TRACE_HEADER
from meshwire.http_values.trace_context import (
    TRACEPARENT_HEADER,
    TRACESTATE_HEADER,
    parse_trace_context,
)

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from meshd.telemetry.exemplars import SeriesKey
    from meshwire.http_values.trace_context import TraceContext

Kind = Literal["internal", "server", "client"]
Value: TypeAlias = "str | int | float | bool"
MAX_QUEUED: Final = 4096
"""Finished spans that wait for the exporter; further ones are dropped and counted."""
MAX_CALLER_TRACES: Final = 100
"""Traces per second and process that clients may have recorded with `traceparent`."""

_clock = SystemClock()
now = _clock.monotonic
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


class Span:
    """One operation of a trace. `parent_id`: 0 for the root. `failed`: the error's code, "" if there is
    none. `open`: whether it has not ended."""

    __slots__ = (
        "attributes",
        "ended",
        "failed",
        "kind",
        "name",
        "open",
        "parent_id",
        "span_id",
        "started",
        "state",
        "trace_id",
    )

    def __init__(
        self, name: str, parent: Span | TraceContext | None, started: float, kind: Kind = "internal"
    ) -> None:
        self.trace_id: int = _random.getrandbits(128) or 1 if parent is None else parent.trace_id
        self.parent_id: int = 0 if parent is None else parent.span_id
        self.state: str = "" if parent is None else parent.state
        self.span_id: int = _random.getrandbits(64) or 1
        self.name, self.kind, self.started, self.ended = name, kind, started, started
        self.failed, self.open = "", True
        self.attributes: dict[str, Value] = {}

    def __repr__(self) -> str:
        return f"<Span {self.name} {self.trace_id:032x}>"

    def to_header(self) -> str:
        """Return the value of `traceparent` for what this span causes elsewhere."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    def end(self, ended: float | None = None) -> None:
        """Hand the span over for export. It must not be changed afterwards."""
        self.ended, self.open = now() if ended is None else ended, False
        if _recorder is not None:
            _recorder.add(self)


_current: ContextVar[Span | None] = ContextVar("span", default=None)


class Recorder:
    """Samples requests and collects the finished spans of this process. `ratio`: the share of requests
    without `traceparent` that are recorded; `keys`: whether spans name keys of objects."""

    def __init__(self, ratio: float, *, keys: bool = False) -> None:
        self.ratio, self.keys = ratio, keys
        self.finished: deque[Span] = deque()
        self.exemplars: dict[SeriesKey, Exemplar] = {}
        self._second, self._caller_traces = 0.0, 0

    def __repr__(self) -> str:
        return f"<Recorder of {self.ratio:g}, {len(self.finished)} spans>"

    def start_request(
        self, headers: Mapping[str, str], started: float, *, forwarded: bool, root: bool
    ) -> Span | None:
        """Return the span of a request if it is to be recorded. `forwarded`: another node has received it
        from the client; `root`: whether a trace may begin with it."""
        value = headers.get(FORWARDED_TRACE_HEADER if forwarded else TRACEPARENT_HEADER)
        if value is not None:
            caller = parse_trace_context(value, headers.get(TRACESTATE_HEADER))
            if caller is not None:
                wanted = caller.sampled and (forwarded or not root or self._admit_caller(started))
                return Span("", caller, started, "server") if wanted else None
        if forwarded or not root or _random.random() >= self.ratio:
            return None
        return Span("", None, started, "server")

    def _admit_caller(self, at: float) -> bool:
        """Bound the traces that clients demand, whatever they send."""
        if at - self._second >= 1.0:
            self._second, self._caller_traces = at, 0
        self._caller_traces += 1
        return self._caller_traces <= MAX_CALLER_TRACES

    def add(self, span: Span) -> None:
        """Queue a finished span; drop it if the exporter is too far behind."""
        if len(self.finished) >= MAX_QUEUED:
            metrics.trace_spans.labels("dropped").inc()
        else:
            self.finished.append(span)

    def take(self, most: int) -> list[Span]:
        """Remove and return up to `most` finished spans. For the exporter's thread."""
        taken: list[Span] = []
        while len(taken) < most:
            try:
                taken.append(self.finished.popleft())
            except IndexError:
                break
        return taken

    def note_exemplar(self, metric: str, labels: tuple[str, ...], seconds: float, span: Span) -> None:
        """Remember the trace as an example of a histogram's bucket."""
        bucket = bisect_left(LATENCY_BOUNDS, seconds)
        at = _clock.now_ms() / 1000
        self.exemplars[metric, labels, bucket] = Exemplar(span.trace_id, span.span_id, seconds, at)


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Make this process record to `recorder`; None: record nothing."""
    global _recorder
    _recorder = recorder


def start_request(
    headers: Mapping[str, str], started: float, *, forwarded: bool = False, root: bool = True
) -> Span | None:
    """Return the span of a request if it is to be recorded; see `Recorder.start_request`."""
    if _recorder is None:
        return None
    return _recorder.start_request(headers, started, forwarded=forwarded, root=root)


def names_keys() -> bool:
    """Whether spans may name keys of objects."""
    return _recorder is not None and _recorder.keys


def current() -> Span | None:
    """Return the span that further ones belong to; None if nothing is recorded here."""
    span = _current.get()
    return span if span is not None and span.open else None


def enter(span: Span | None) -> None:
    """Make `span` the current one of this task, which is that of one request; None: change nothing."""
    if span is not None:
        _current.set(span)


def note_exemplar(name: str, labels: tuple[str, ...], seconds: float, span: Span) -> None:
    """Give a span as an example of a time that was observed in the histogram `name`."""
    if _recorder is not None:
        _recorder.note_exemplar(name, labels, seconds, span)


class _Stage:
    """A part of the current span, which is the current one within the block. An exception marks it failed."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        self._token = _current.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        if kind is not None:
            self._span.failed = str(getattr(error, "code", "")) or kind.__name__
        self._span.end()


class _NoStage:
    """Stands for a part of a request that is not recorded."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_STAGE: Final = _NoStage()


def stage(
    name: str, kind: Kind = "internal", attributes: Mapping[str, Value] | None = None
) -> _Stage | _NoStage:
    """Record a part of the current span: `with stage("commit") as span`. `span` is None if nothing is
    recorded. The block must run in one task."""
    parent = _current.get()
    if parent is None or not parent.open:
        return _NO_STAGE
    span = Span(name, parent, now(), kind)
    if attributes:
        span.attributes.update(attributes)
    return _Stage(span)


def record(parent: Span, name: str, started: float, ended: float) -> None:
    """Record a part of `parent` after the fact; times are monotonic seconds (`now`)."""
    Span(name, parent, started).end(ended)


def record_until_done(parent: Span, name: str, started: float, done: Future[Any]) -> None:
    """Record a part of `parent` that ends now; a callback of `done`."""
    part = Span(name, parent, started)
    if done.cancelled() or done.exception() is not None:
        part.failed = "cancelled" if done.cancelled() else type(done.exception()).__name__
    part.end()


def add_attributes(attributes: Mapping[str, Value]) -> None:
    """Add attributes to the current span, if one is recorded here."""
    span = current()
    if span is not None:
        span.attributes.update(attributes)


def outgoing_headers() -> dict[str, str]:
    """Return the headers that make another node's work part of the current span; none if nothing is
    recorded."""
    span = current()
    if span is None:
        return {}
    headers = {TRACEPARENT_HEADER: span.to_header()}
    return headers | {TRACESTATE_HEADER: span.state} if span.state else headers


def context_text() -> str:
    """Return the current span for a message to another process of the node; "" if there is none."""
    span = current()
    return "" if span is None else span.to_header()


def enter_remote(text: str) -> Span | None:
    """Make the span of a message of another process the current one of this task; see `context_text`. The
    caller sets it back with `leave_remote`."""
    caller = parse_trace_context(text) if text and _recorder is not None else None
    if caller is None:
        return None
    span = Span("", caller, 0.0)
    span.span_id = caller.span_id
    _current.set(span)
    return span


def leave_remote(span: Span | None) -> None:
    """Set nothing as the current span, after `enter_remote`; tasks that go on record nothing more."""
    if span is not None:
        span.open = False
        _current.set(None)


Timed: TypeAlias = tuple[str, float, float, int]
"""What another process did for a span: name, start and end in monotonic seconds, and bytes, 0 if unknown."""


def record_timed(parent: Span, parts: Iterable[Timed]) -> None:
    """Record what another process of the node reports, as parts of `parent`."""
    for name, started, ended, size in parts:
        part = Span(name, parent, started)
        if size:
            part.attributes = {"shardmesh.bytes": size}
        part.end(ended)
