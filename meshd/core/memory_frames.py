"""Frames in shared memory: a writable memfd while it is filled, and sealed afterwards.

Invariant: a descriptor is closed exactly once, when its last owner in this process releases it. A sealed
memfd keeps its size and content for good, for every process that holds a descriptor. Frames that are made
together may share one, as a block: its memory is released, and no longer counts, with the last of them.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.core.frame_address import READY, Frame, FrameBlock
from meshd.util.tenant_limits import current_tenant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.api_errors import BatchError
    from meshd.core.frame_address import FrameResult

_BLOCKS: Final = itertools.count(1)
_CONTENT: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


def seal(fd: int) -> bool:
    """Seals a memfd that allows sealing; returns True if it is sealed now."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CONTENT | fcntl.F_SEAL_SEAL)
    except OSError:  # mapped for writing, or its pages are being written: it stays unsealed
        return False
    return True


def is_sealed(fd: int, size: int) -> bool:
    """Returns True if this is sealed memory of exactly this size."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _CONTENT == _CONTENT and os.fstat(fd).st_size == size
    except OSError:  # a file
        return False


class MemoryAccount:
    """Counts the bytes of frames that are being made, cached, or held by a receiver, in all and by tenant."""

    def __init__(self) -> None:
        self.bytes = 0
        self.by_account: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<MemoryAccount of {self.bytes} bytes>"

    def add_bytes(self, owner: str, size: int) -> None:
        """Adds `size` bytes, which may be negative."""
        self.bytes += size
        self.by_account[owner] += size
        if not self.by_account[owner]:
            del self.by_account[owner]


@dataclass(slots=True)
class _Block:
    """The memory that is released with a frame."""

    fd: int
    size: int
    memory: MemoryAccount
    owner: str

    def free(self) -> None:
        self.memory.add_bytes(self.owner, -self.size)
        os.close(self.fd)


class MemoryFrame:
    """`size` bytes of shared memory, written with pwrite, because filling mapped pages would cost a fault
    each.

    They count in `memory` as long as anything refers to them: the maker, the cache, or a handle that is not
    closed. `bad`: rows whose own sample is bad, without padding; `complaint`: the error to raise if they are
    too many; `took`: how long the frame took to make; `offset`: where it begins in the file `fd`.
    """

    offset = 0

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
        """The tenant for which the frame was made."""
        return self._block.owner

    def __repr__(self) -> str:
        return f"<MemoryFrame {self.rows} rows, {self.size} bytes>"

    def grow(self, size: int) -> None:
        """Extends the frame."""
        os.ftruncate(self.fd, size)
        self._block.memory.add_bytes(self.owner, size - self.size)
        self.size = self._block.size = size

    def hand_out(self, result: FrameResult) -> Frame:
        """Returns a handle with its own descriptor. From then on nothing can write the frame."""
        self.finish()
        took = READY if result == "hit" else self.took
        return Frame(os.dup(self.fd), self.size, self.rows, result, self, took=took)

    def finish(self) -> None:
        """Seals the frame; one that cannot be sealed is sent instead of shared."""
        if not self._sealed:
            seal(self.fd)
            self._sealed = True

    def close(self) -> None:
        """Releases the memory now if no other holder has a descriptor. Idempotent."""
        self._finalizer()


class BlockFrame(MemoryFrame):
    """A frame in the memory of a block, which lives as long as one of its frames."""

    def __init__(self, whole: MemoryFrame, block: FrameBlock, offset: int, size: int) -> None:
        self.fd, self.size, self.offset = whole.fd, size, offset
        self.rows = self.bad = 0
        self.complaint, self.took = None, READY
        self._whole, self._number = whole, block

    @property
    def owner(self) -> str:
        return self._whole.owner

    def grow(self, size: int) -> None:
        raise NotImplementedError("the frames of a block keep their sizes")

    def hand_out(self, result: FrameResult) -> Frame:
        self._whole.finish()
        took, at = READY if result == "hit" else self.took, self.offset
        return Frame(
            os.dup(self.fd), self.size, self.rows, result, self, took=took, offset=at, block=self._number
        )

    def close(self) -> None:
        """Do nothing: the memory is released with the last frame of the block."""


def make_block(sizes: Sequence[int], memory: MemoryAccount) -> list[BlockFrame]:
    """Returns frames of these sizes, one after the other in one block of memory, each at a page boundary."""
    pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
    *offsets, end = itertools.accumulate(pages, initial=0)
    whole = MemoryFrame(end, memory)
    block = FrameBlock(next(_BLOCKS), end)
    return [BlockFrame(whole, block, offset, size) for offset, size in zip(offsets, sizes, strict=True)]
