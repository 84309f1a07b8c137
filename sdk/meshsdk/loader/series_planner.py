"""Frames of several steps in one response: what one loader asks for, and what wakes its prefetch thread.

Law: a series is an optimization. A frame has the same bytes in a series as alone, and a step whose series
failed is requested alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwire.http_values.mesh_headers import MAX_FRAME_SERIES

if TYPE_CHECKING:
    from meshsdk.client.arena import Waker

MAX_SERIES: Final = min(32, MAX_FRAME_SERIES)
MAX_SERIES_BYTES: Final = 8 << 20
_LONGEST: Final = 0.1  # seconds that a node may take for a series; frames that take longer need no series
_BUDGET_SHARE: Final = 8  # a series takes at most this part of the arena, so that several are under way
_GROWTH: Final = 4  # by which a series is longer than the last one, if the node is quick enough


class SeriesPlanner:
    """Decides of how many steps a request asks for frames: one at first, and four times as many after each
    response that had them all."""

    def __init__(self, *, enabled: bool) -> None:
        self._most = MAX_SERIES if enabled else 1
        self._limit = 1

    def __repr__(self) -> str:
        return f"<SeriesPlanner, {self._limit} of {self._most} steps>"

    def wanted(self, step: int, left: int, size: int, budget: int) -> int:
        """Return for how many of `left` steps from `step` on to ask. `size`: of a frame, in bytes of the
        arena, which has `budget` bytes.

        Series begin at multiples of their length, so that jobs on the same plan ask for the same ones.
        """
        fitting = min(MAX_SERIES_BYTES, budget // _BUDGET_SHARE) // max(size, 1)
        most = min(self._limit, self._most, left, fitting)
        length = 1 << (max(most, 1).bit_length() - 1)
        return length - step % length

    def record_response(self, asked: int, got: int, seconds: float) -> None:
        """Record that a response had the frames of `got` of `asked` steps, on which the node spent
        `seconds`."""
        quick = MAX_SERIES if seconds <= 0 else int(_LONGEST * got / seconds)
        grown = _GROWTH * self._limit if got == asked else got
        if got == 1 < asked:  # perhaps a node of an earlier release
            self._most = 1
        self._limit = max(1, min(grown, quick, MAX_SERIES))

    def record_failure(self, asked: int) -> None:
        """Record that a request for a series failed: ask for half as many from now on."""
        if asked > 1:
            self._most = max(1, self._most // 2)
            self._limit = 1


class MemoryWait:
    """Wakes the prefetch thread while it waits for room in the arena, and not for every batch.

    `slots`: how many slots must return to wake it; 0 if only a response can let it go on. It is also woken
    when the loop has taken the last frame that has arrived.
    """

    def __init__(self, waker: Waker) -> None:
        self.slots = 0
        self._waker = waker

    def __repr__(self) -> str:
        return f"<MemoryWait for {self.slots} slots>"

    def slot_returned(self, returned: int) -> None:
        """Note that `returned` slots wait to be collected. Any thread may call this."""
        if 0 < self.slots <= returned:
            self._waker.wake()

    def frame_taken(self, *, last: bool) -> None:
        """Note that the loop took a frame, and whether no other has arrived."""
        if last and self.slots:
            self._waker.wake()
