"""FramesAhead: builds frames before they are requested, while a disk reads the window that they lie in.

With `Blocks`, the rows of the first batches come from all parts of a block. Until the disk has read it, the
frames that a loader has requested have fewer rows than the processors could render meanwhile. The frames
after them are requested next.

Law: a frame has the same bytes however early it is built. Rows of earlier positions are rendered first. The
bytes and rows of frames that are not requested yet are bounded. A frame that cannot be built ahead is left to
its request, which reports why.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from meshd.batches.assembly.frame_buffer import planned_size
from meshd.batches.assembly.frame_rows import count_rows
from meshd.batches.read_ahead.page_prefetcher import frames_ahead
from meshd.core.frame_address import PartAddress
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.batches.read_ahead.arrivals import Arrivals
    from meshd.batches.read_ahead.read_hints import PlannedFrame, ReadHints
    from meshd.core.frame_address import AnyFrameAddress, FrameAddress
    from meshd.transform.renderer import Renderer, RenderResult, RowWork

_log = logging.getLogger("meshd.frames_ahead")
_UNCLAIMED_SECONDS: Final = 60.0
"""Time after which a frame that nobody has requested does not count any more: its reader has ended."""


class EarlyRenderer:
    """Renders rows behind those of earlier positions of the same plan that come soon after."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __repr__(self) -> str:
        return f"<EarlyRenderer {self._renderer!r}>"

    async def render(
        self, job: str, program_text: str, epoch: int, rows: Sequence[RowWork], **options: Any
    ) -> RenderResult:
        """See `Renderer`."""
        return await self._renderer.render(job, program_text, epoch, rows, **options, early=True)


class _Unclaimed(NamedTuple):
    """A frame that is not requested yet: its bytes and rows, when it was begun, and the frame."""

    bytes: int
    rows: int
    begun: float
    frame: PlannedFrame


class FramesAhead:
    """The frames that are built ahead. Use on one event loop only; `aclose` at the end.

    `limit`, `max_rows`: bytes and rows of those that are not requested yet; `build`: builds a frame into the
    cache, with the bytes that may be kept of decoded samples; `exists`: whether a frame is cached or being
    built; `hints`: receive the requests for those that were built ahead.
    """

    def __init__(
        self,
        limit: int,
        max_rows: int,
        build: Callable[[AnyFrameAddress, int | None], Awaitable[object]],
        exists: Callable[[AnyFrameAddress], bool],
        hints: Sequence[ReadHints],
    ) -> None:
        self._limit, self._max_rows, self._build, self._exists = limit, max_rows, build, exists
        self._hints = hints
        self._unclaimed: dict[AnyFrameAddress, _Unclaimed] = {}
        self._bytes = self._rows = 0
        self._tasks = BackgroundTasks("frames-ahead")

    def __repr__(self) -> str:
        return f"<FramesAhead {len(self._unclaimed)} frames, {self._bytes} of {self._limit} bytes>"

    def begin(self, frame: PlannedFrame, address: FrameAddress | PartAddress, arrivals: Arrivals) -> None:
        """Begin the frames that the reader of `address`, which is `frame` or this node's rows of it, requests
        next, up to the end of the window that a disk reads for it. Returns at once. Raises BatchError as
        `planned_size` does."""
        self._forget_old()
        plan, snapshot, whole, end = frame.plan, frame.snapshot, frame.address, arrivals.end
        size = planned_size(plan, snapshot, whole) if end else None
        if size is None:  # all of it has been read, or the size depends on the data
            return
        rows = count_rows(whole, plan)
        for coming in frames_ahead(plan, whole):
            last = coming.first_position + coming.batch
            full = self._bytes + size > self._limit or self._rows + rows > self._max_rows
            if coming.epoch != whole.epoch or last > end or full:
                return
            wanted: AnyFrameAddress = coming
            if isinstance(address, PartAddress):
                wanted = msgspec.structs.replace(address, whole=coming)
            if wanted not in self._unclaimed and not self._exists(wanted):
                later, now = replace(frame, address=coming), asyncio.get_running_loop().time()
                self._unclaimed[wanted] = _Unclaimed(size, rows, now, later)
                self._bytes += size
                self._rows += rows
                self._tasks.spawn(self._build_early(wanted, frame.kept_bytes), "build")

    def claim(self, address: AnyFrameAddress) -> bool:
        """Note that a frame is requested. Returns whether it was begun before, for this request."""
        found = self._forget(address)
        if found is not None:
            for each in self._hints:
                each.frame_requested(found.frame)
        return found is not None

    def _forget(self, address: AnyFrameAddress) -> _Unclaimed | None:
        found = self._unclaimed.pop(address, None)
        if found is not None:
            self._bytes -= found.bytes
            self._rows -= found.rows
        return found

    async def aclose(self) -> None:
        """Build no more of them."""
        await self._tasks.aclose()
        self._unclaimed.clear()

    async def _build_early(self, address: AnyFrameAddress, kept_bytes: int | None) -> None:
        try:
            await self._build(address, kept_bytes)
        except Exception:
            _log.debug("a frame could not be built before its request", exc_info=True)

    def _forget_old(self) -> None:
        since = asyncio.get_running_loop().time() - _UNCLAIMED_SECONDS
        for address in [each for each, ahead in self._unclaimed.items() if ahead.begun < since]:
            self._forget(address)
