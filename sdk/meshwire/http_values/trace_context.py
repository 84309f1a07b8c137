"""Trace context of a request: the W3C headers `traceparent` and `tracestate`, parsed and rendered.

https://www.w3.org/TR/trace-context/ §3.2, §3.3. A header that does not follow the grammar counts as absent,
as §3.2.3 demands; a version above 00 is read by the fields that version 00 has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

TRACEPARENT_HEADER: Final = "traceparent"
TRACESTATE_HEADER: Final = "tracestate"
_SAMPLED: Final = 1
_MAX_STATE: Final = 512  # characters that must be passed on (§3.3.1.5); longer ones are dropped
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.A | re.S)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's span: the ids of its trace (128 bits) and of itself (64 bits), neither 0.

    `sampled`: whether the caller records the trace; `state`: the value of `tracestate`, passed on as it is.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    def to_header(self) -> str:
        """Return the value of `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_trace_context(parent: str | None, state: str | None = None) -> TraceContext | None:
    """Return the context that the values of the two headers give; None if there is none, or it is invalid."""
    if parent is None or (found := _FORM.fullmatch(parent.strip(" \t"))) is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    trace, span = int(trace_id, 16), int(span_id, 16)
    if not trace or not span:
        return None
    kept = state if state and len(state) <= _MAX_STATE and state.isprintable() and state.isascii() else ""
    return TraceContext(trace, span, bool(int(flags, 16) & _SAMPLED), kept)
