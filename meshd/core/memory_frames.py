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
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.frame_address import READY, Frame, FrameBlock
from meshd.util.tenant_limits import current_tenant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class _Holding(msgspec.Struct):
    """What is released with shared memory."""

    fd: int
    size: int
    account: MemoryAccount
    owner: str

    def free(self) -> None:
        self.account.add_bytes(self.owner, -self.size)
        os.close(self.fd)


class _SharedMemory:
    """A memfd, which counts in an account as long as anything refers to it."""

    def __init__(self, size: int, account: MemoryAccount) -> None:
        fd = os.memfd_create("mesh-frame", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.holding = _Holding(fd, 0, account, current_tenant())
        self.free = weakref.finalize(self, self.holding.free)
        self._sealed = False
        self.grow(size)

    def __repr__(self) -> str:
        return f"<_SharedMemory of {self.holding.size} bytes>"

    def grow(self, size: int) -> None:
        held = self.holding
        os.ftruncate(held.fd, size)
        held.account.add_bytes(held.owner, size - held.size)
        held.size = size

    def seal(self) -> None:
        """Seals it, once; what cannot be sealed is sent instead of shared."""
        if not self._sealed:
            seal(self.holding.fd)
            self._sealed = True


class SharedFrame:
    """A frame in shared memory: `size` bytes from `offset` on in the file `fd`, written with pwrite, because
    filling mapped pages would cost a fault each.

    The memory counts as long as anything refers to one of its frames: the maker, the cache, or a handle that
    is not closed. `bad`: rows whose own sample is bad, without padding; `complaint`: the error to raise if
    they are too many; `took`: how long the frame took to make; `block`: the memory that it shares with other
    frames, if it does.
    """

    def __init__(
        self, memory: _SharedMemory, size: int, offset: int = 0, block: FrameBlock | None = None
    ) -> None:
        self._memory, self.block = memory, block
        self.fd, self.size, self.offset = memory.holding.fd, size, offset
        self.rows = self.bad = 0
        self.complaint: BatchError | None = None
        self.took = READY

    @property
    def owner(self) -> str:
        """The tenant for which the frame was made."""
        return self._memory.holding.owner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rows} rows, {self.size} bytes>"

    def hand_out(self, result: FrameResult) -> Frame:
        """Returns a handle with its own descriptor. From then on nothing can write the frame."""
        self.finish()
        took, at = READY if result == "hit" else self.took, self.offset
        fd = os.dup(self.fd)
        return Frame(fd, self.size, self.rows, result, self, took=took, offset=at, block=self.block)

    def finish(self) -> None:
        """Seals the frame, and with it the others of its block."""
        self._memory.seal()


class MemoryFrame(SharedFrame):
    """A frame with memory of its own, which counts in `account`."""

    def __init__(self, size: int, account: MemoryAccount) -> None:
        super().__init__(_SharedMemory(size, account), size)

    def grow(self, size: int) -> None:
        """Extends the frame."""
        self._memory.grow(size)
        self.size = size

    def close(self) -> None:
        """Releases the memory now if no other holder has a descriptor. Idempotent."""
        self._memory.free()


def make_block(sizes: Sequence[int], account: MemoryAccount) -> list[SharedFrame]:
    """Returns frames of these sizes, one after the other in one block of memory, each at a page boundary."""
    pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes)
    *offsets, end = itertools.accumulate(pages, initial=0)
    memory, block = _SharedMemory(end, account), FrameBlock(next(_BLOCKS), end)
    return [SharedFrame(memory, size, at, block) for at, size in zip(offsets, sizes, strict=True)]


def hand_out_all(frames: Iterable[SharedFrame], result: FrameResult) -> list[Frame]:
    """Return a handle of each frame. Raises OSError, and returns none, without a descriptor for each."""
    with ExitStack() as made:
        handles = [made.enter_context(closing(frame.hand_out(result))) for frame in frames]
        made.pop_all()
    return handles
