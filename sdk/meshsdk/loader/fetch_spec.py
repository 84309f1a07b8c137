"""What a prefetcher fetches: the requests, steps and limits of one iteration, and the tag of a request."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.request import Request
    from meshsdk.loader.split_frame_requests import SplitFrame, SplitRequest


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """What to fetch.

    Attributes:
        ask: returns the request for a step.
        steps: an ascending range of any stride.
        expected: bytes of a frame if known, else 0.
        verify: whether to verify the checksums of received frames; "all" includes those in shared memory.
        connections: maximum number of frames in flight.
        deadline: seconds for which a step is retried.
        named: returns the step number that the frame of a step carries.
        parts: how to request frames in parts; None to request whole frames.
        report: returns a request that only reports, if that is due; for when no frame is left to request,
            and for the end of the loop, at which it is due (True).
        series: returns the request for a step without a report, which shows the node that it goes to; None if
            each response has the frame of one step. For ranges with stride 1.
    """

    ask: Callable[[int], Request]
    steps: range
    expected: int = 0
    verify: Literal[True, False, "all"] = True
    connections: int = 4
    deadline: float = 600.0
    named: Callable[[int], int] = operator.index
    parts: SplitRequest | None = None
    report: Callable[[bool], Request | None] | None = None
    series: Callable[[int], Request] | None = None


class WantedFrame(NamedTuple):
    """What a request in flight is for: the frame of a step, or a part of it if the frame is split, or the
    frames of `steps` steps."""

    step: int
    joint: SplitFrame | None = None
    steps: int = 1
