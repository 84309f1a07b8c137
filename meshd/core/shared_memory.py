"""Frames in shared memory: a writable memfd while it is filled, sealed afterwards, and a bounded cache.

Invariant: a descriptor is closed exactly once, when its last owner in this process releases it.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from meshd.core.frame_address import READY, Frame
from meshd.telemetry import metrics
from meshd.util.admission import current_tenant
from meshd.util.sealed_memfd import seal

if TYPE_CHECKING:
    from meshd.core.api_errors import BatchError
    from meshd.core.frame_address import FrameResult

K = TypeVar("K")


class MemoryAccount:
    """Counts the bytes of frames that are being made, kept, or in a receiver's hands, and whose they are."""

    def __init__(self) -> None:
        self.bytes = 0
        self.by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Memory of {self.bytes} bytes>"

    def add_bytes(self, owner: str, size: int) -> None:
        """Count so many bytes more, or less."""
        self.bytes += size
        self.by_account[owner] += size
        if not self.by_account[owner]:
            del self.by_account[owner]


@dataclass(slots=True)
class _Block:
    """What is given back with a frame."""

    fd: int
    size: int
    memory: MemoryAccount
    owner: str

    def free(self) -> None:
        self.memory.add_bytes(self.owner, -self.size)
        os.close(self.fd)


class MemoryFrame:
    """`size` bytes of shared memory, written with pwrite: filling mapped pages costs a fault each.

    Counted in `memory` until nothing refers to it: not its maker, nor the cache, nor a handle not yet closed.
    `bad`: rows whose own sample is bad, pads left out; `complaint`: what is said if they are too many;
    `took`: how long it was made.
    """

    def __init__(self, size: int, memory: MemoryAccount) -> None:
        self.fd = os.memfd_create("mesh-frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._block = _Block(self.fd, 0, memory, current_tenant())
        self._finalizer = weakref.finalize(self, self._block.free)
        self.size = self.rows = self.bad = 0
        self.complaint: BatchError | None = None
        self.took = READY
        self._sealed = False
        self.grow(size)

    @property
    def owner(self) -> str:
        """The account it was made for."""
        return self._block.owner

    def __repr__(self) -> str:
        return f"<MemoryFrame {self.rows} rows, {self.size} bytes>"

    def grow(self, size: int) -> None:
        """Make room behind what is there."""
        os.ftruncate(self.fd, size)
        self._block.memory.add_bytes(self.owner, size - self.size)
        self.size = self._block.size = size

    def hand_out(self, result: FrameResult) -> Frame:
        """A handle with a descriptor of its own. Nothing can write the frame from then on."""
        if not self._sealed:
            seal(self.fd)  # where that fails the frame is sent, not shared
            self._sealed = True
        took = READY if result == "hit" else self.took
        return Frame(os.dup(self.fd), self.size, self.rows, result, self, took=took)

    def close(self) -> None:
        """Give the memory back now, if nobody else holds a descriptor. Idempotent."""
        self._finalizer()


class FrameCache(Generic[K]):
    """Finished frames by address, at most `limit` bytes, least recently used out first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frames: OrderedDict[K, MemoryFrame] = OrderedDict()
        self.bytes = 0
        self.by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<FrameCache {len(self._frames)} frames, {self.bytes} of {self._limit} bytes>"

    def __len__(self) -> int:
        return len(self._frames)

    def get(self, address: K) -> MemoryFrame | None:
        frame = self._frames.get(address)
        if frame is not None:
            self._frames.move_to_end(address)
        return frame

    def put(self, address: K, frame: MemoryFrame) -> None:
        """Keep it, unless it alone exceeds the limit."""
        if frame.size > self._limit or address in self._frames:
            return
        self._frames[address] = frame
        self._add(frame.owner, frame.size)
        while self.bytes > self._limit:
            _, oldest = self._frames.popitem(last=False)
            self._add(oldest.owner, -oldest.size)

    def clear(self) -> None:
        """Forget all."""
        while self._frames:
            _, frame = self._frames.popitem()
            self._add(frame.owner, -frame.size)

    def _add(self, owner: str, size: int) -> None:
        self.bytes += size
        self.by_account[owner] += size
        metrics.frame_cache_bytes.inc(size)
