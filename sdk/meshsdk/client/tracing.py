"""Traces of a training program: its requests carry the current span, and each batch of a loader is a trace.

Law: the SDK neither imports nor needs OpenTelemetry. A program that traces has imported `opentelemetry.trace`
and set a provider; where it has not, nothing here does anything. Sampling and export are the provider's.
Invariant: a batch's root span begins when the loader requests the batch and ends when the loop has it, so its
parts are the requests and the wait of the loop; nodes add what they do for the requests.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from meshwire.http_values.trace_context import TRACEPARENT_HEADER, TRACESTATE_HEADER

if TYPE_CHECKING:
    from meshsdk.client.request import Request

_API: Final = "opentelemetry.trace"
_SCOPE: Final = "meshsdk"


def traced_request(request: Request) -> Request:
    """Return the request as part of the program's current span, if there is one."""
    api = sys.modules.get(_API)
    if api is None or TRACEPARENT_HEADER in request.headers:
        return request
    return _with_context(request, api.get_current_span().get_span_context())


def _with_context(request: Request, context: Any) -> Request:
    """Return the request with the headers of a span's context, also of one that is not sampled: then the
    nodes do not record the request either."""
    if not context.is_valid:
        return request
    flags = int(context.trace_flags) & 1
    headers = {TRACEPARENT_HEADER: f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}
    if context.trace_state:
        headers[TRACESTATE_HEADER] = context.trace_state.to_header()
    return replace(request, headers={**request.headers, **headers})


class BatchTraces:
    """The traces of the batches of one epoch iterator. The prefetch thread begins them, the loop ends them;
    a batch is one trace, whatever span is current in the loop, because it was requested long before. The
    wait links to that span."""

    def __init__(self) -> None:
        self._api: Any = sys.modules[_API]
        self._tracer: Any = self._api.get_tracer(_SCOPE)
        self._roots: dict[int, Any] = {}  # by step; written by the prefetch thread, removed by the loop
        self._requests: dict[tuple[int, str], Any] = {}

    def __repr__(self) -> str:
        return f"<BatchTraces {len(self._roots)} batches>"

    def begin_request(self, step: int, request: Request, endpoint: str) -> Request:
        """Return the request for a step with the headers of a span of its own. Not for the loop's thread."""
        root = self._roots.get(step)
        if root is None:
            attributes = {"shardmesh.step": step}
            root = self._roots[step] = self._tracer.start_span(
                "batch", _empty_context(), attributes=attributes
            )
        if not root.get_span_context().is_valid:
            return request
        span = self._tracer.start_span(
            "request batch",
            self._api.set_span_in_context(root, _empty_context()),
            self._api.SpanKind.CLIENT,
            {"server.address": endpoint},
        )
        self._requests[step, endpoint] = span
        return _with_context(request, span.get_span_context())

    def end_request(self, step: int, endpoint: str, error: BaseException | None = None) -> None:
        """End the span of a request whose response was received, or that failed."""
        span = self._requests.pop((step, endpoint), None)
        if span is None:
            return
        if error is not None:
            code = getattr(error, "code", "") or type(error).__name__
            span.set_status(self._api.StatusCode.ERROR, str(code))
        span.end()

    def end_batch(self, step: int, since: float, until: float) -> None:
        """End the trace of a batch that the loop waited for from `since` to `until` (monotonic seconds)."""
        root = self._roots.pop(step, None)
        if root is None:
            return
        offset = time.time_ns() - time.monotonic_ns()
        around = self._api.get_current_span().get_span_context()
        wait = self._tracer.start_span(
            "wait",
            self._api.set_span_in_context(root, _empty_context()),
            links=[self._api.Link(around)] if around.is_valid else [],
            start_time=round(since * 1e9) + offset,
        )
        ended = round(until * 1e9) + offset
        wait.end(ended)
        root.end(ended)

    def close(self) -> None:
        """End what the loop did not take."""
        for spans in (self._requests, self._roots):
            while spans:
                spans.popitem()[1].end()


def start_batch_traces() -> BatchTraces | None:
    """Return the traces of an epoch iterator; None if the program does not trace."""
    return BatchTraces() if _API in sys.modules else None


def _empty_context() -> Any:
    """Return a context without a span, because that of the thread does not count."""
    return sys.modules["opentelemetry.context"].Context()
