"""FrameCache: the finished frames of a node, by address."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.core.frame_address import FrameBlock
    from meshd.core.memory_frames import SharedFrame

K = TypeVar("K")


class FrameCache(Generic[K]):
    """Caches finished frames by address: at most `limit` bytes, least recently used evicted first.

    Frames that share a block of memory are evicted together: the last of them would keep all of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: OrderedDict[K, SharedFrame] = OrderedDict()
        self._blocks: dict[FrameBlock, list[K]] = {}
        self.bytes = 0
        self.by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FrameCache {len(self._frames)} frames, {self.bytes} of {self._limit} bytes>"

    def __len__(self) -> int:
        return len(self._frames)

    def get(self, address: K) -> SharedFrame | None:
        frame = self._frames.get(address)
        if frame is not None:
            self._frames.move_to_end(address)
        return frame

    def put(self, address: K, frame: SharedFrame) -> None:
        """Caches a frame unless its memory alone exceeds the limit."""
        self.put_all(((address, frame),))

    def put_all(self, frames: Iterable[tuple[K, SharedFrame]]) -> None:
        """Caches frames as `put` does."""
        before = self.bytes
        for address, frame in frames:
            block = frame.block
            if (frame.size if block is None else block.size) > self._limit or address in self._frames:
                continue
            self._frames[address] = frame
            if block is not None:
                self._blocks.setdefault(block, []).append(address)
            self._add(frame.owner, frame.size)
            while self.bytes > self._limit:
                self._evict(next(iter(self._frames)))
        metrics.frame_cache_bytes.inc(self.bytes - before)

    def clear(self) -> None:
        """Drops all frames."""
        metrics.frame_cache_bytes.dec(self.bytes)
        while self._frames:
            self._evict(next(iter(self._frames)))

    def _evict(self, address: K) -> None:
        block = self._frames[address].block
        for each in (address,) if block is None else self._blocks.pop(block):
            frame = self._frames.pop(each)
            self._add(frame.owner, -frame.size)

    def _add(self, owner: str, size: int) -> None:
        self.bytes += size
        self.by_account[owner] += size
