"""Receive arena: memory slots that sockets fill, reused once nothing refers to them.

Law: the arena leases slots. Every array or tensor made from a slot keeps its lease alive, and the slot
returns to the arena when the last of them is garbage-collected; there is no explicit release.
Invariant: a leased slot is never overwritten with another frame.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshsdk.client.fork_safe_lock import ForkSafeLock
from meshsdk.errors import ConfigurationError, CorruptFrameError
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_HUGE = 2 << 20
_LOANS = 64  # each adopted frame holds a file descriptor of this process


class Memory(Protocol):
    """A kind of memory that an arena allocates its slots from."""

    def capacity(self, size: int) -> int:
        """Return the bytes of memory that a slot for `size` bytes occupies."""

    def allocate(self, size: int) -> Bytes:
        """Return `size` writable bytes, page-aligned, freed together with the array."""


class HostMemory:
    """Anonymous private pages: a forked child sees a copy and never the parent's later batches."""

    def capacity(self, size: int) -> int:
        return slot_size(size)

    def allocate(self, size: int) -> Bytes:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)


class PinnedMemory:
    """Page-locked memory that CUDA copies from asynchronously; torch allocates and frees it.

    torch rounds allocations up to a power of two. A slot uses the whole allocation, so the arena's budget
    equals the memory that is locked. The test suite does not cover this class without a GPU; run
    `python -m tests.gpu` for that.
    """

    def capacity(self, size: int) -> int:
        return 1 << (slot_size(size) - 1).bit_length()

    def allocate(self, size: int) -> Bytes:
        import torch

        pinned: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned


def open_descriptor(opener: Callable[[], int]) -> int:
    """Return what `opener` opens. Raises ConfigurationError if the process may have no more descriptors."""
    try:
        return opener()
    except OSError as error:
        if why := open_files_message(error):
            raise ConfigurationError(f"a loader cannot start: {why}") from error
        raise


class Waker:
    """Wakes a thread that polls `fileno()`.

    Any thread may call it, also from a finalizer; after `close` it does nothing. The polling thread takes no
    lock, because the thread that calls `close` may be waiting for it to end.
    """

    def __init__(self) -> None:
        """Raises ConfigurationError if the process may have no more descriptors."""
        self._descriptor = open_descriptor(lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        # Reentrant: a finalizer may run in the middle of `close` on the same thread.
        self._lock = ForkSafeLock(reentrant=True)

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        """Discard earlier wake-ups. Only the polling thread calls this."""
        with contextlib.suppress(OSError):  # nothing to read, or closed meanwhile
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class _Holder(np.ndarray[Any, np.dtype[np.uint8]]):
    """The base array of all views of a lease: weakly referenceable, and kept alive by the views."""


@dataclass(slots=True, eq=False)
class _Slot:
    memory: Bytes
    spare: bool  # allocated beyond the budget: freed on return, not reused
    watch: weakref.ref[_Holder] | None = None


@dataclass(slots=True, eq=False)
class _Loan:
    """A lease of `size` bytes that the arena did not allocate; it ends when `watch` fires."""

    size: int
    watch: weakref.ref[_Holder] | None = None


@dataclass(slots=True)
class Lease:
    """Memory on lease.

    `view` has exactly the requested size, `capacity` is the size of its slot in bytes. The object itself may
    be dropped once arrays were made from `view`.
    """

    view: memoryview
    capacity: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Arena:
    """Leases memory slots of at most `budget` bytes in total.

    Not thread-safe, except that slots may return on any thread. `overflows` counts leases beyond the budget:
    they are granted when the consumer holds so many batches that prefetching would otherwise stop for good.
    `on_return` is called with the number of slots that have returned and wait for `collect`; each frame of
    adopted pages counts as one.
    """

    budget: int
    memory: Memory = field(default_factory=HostMemory)
    overflows: int = 0
    leased: int = 0
    allocated: int = 0
    on_return: Callable[[int], None] | None = None
    _free: list[_Slot] = field(default_factory=list)
    # Slots on lease. Nothing else keeps their weak references alive, without which no slot would return.
    _out: set[_Slot] = field(default_factory=set)
    _loans: set[_Loan] = field(default_factory=set)
    # SimpleQueue.put is reentrant, so a weakref callback may use it; no other queue is.
    _returned: SimpleQueue[_Slot | _Loan | None] = field(default_factory=SimpleQueue)

    def can_adopt(self, size: int) -> bool:
        """Return whether a frame of `size` bytes may stay in memory that another process allocated.

        False if a device copies only from the arena's kind of memory, and beyond the budget: frames that are
        kept for long should be in memory of this process.
        """
        within = len(self._loans) < _LOANS and size <= self.free_bytes()
        return within and isinstance(self.memory, HostMemory)

    def adopt_pages(self, pages: Bytes, through: Callable[[], None], frames: int = 1) -> Lease:
        """Lease pages that another process allocated, with this many frames.

        The lease ends when nothing refers to the pages any more; `through` is then called, on any thread.
        """
        self.collect()
        loan, size = _Loan(len(pages)), len(pages)
        holder = pages.view(_Holder)
        loan.watch = weakref.ref(holder, self._watcher(loan, through, frames))
        self._loans.add(loan)
        self.leased += size
        return Lease(holder.data, size)

    def acquire_slot(self, size: int) -> Lease:
        """Lease memory for `size` bytes: a free slot, else a new one, if need be beyond the budget. Raises
        CorruptFrameError if there is none."""
        self.collect()
        slot = self._fitting(size) or self._grow(size)
        holder = slot.memory.view(_Holder)
        slot.watch = weakref.ref(holder, self._watcher(slot))
        self._out.add(slot)
        self.leased += len(slot.memory)
        return Lease(holder.data[:size], len(slot.memory))

    def _watcher(
        self, slot: _Slot | _Loan, through: Callable[[], None] | None = None, frames: int = 1
    ) -> Callable[[weakref.ref[_Holder]], None]:
        returned, arena = self._returned, weakref.ref(self)

        def give_back(_: weakref.ref[_Holder]) -> None:
            if through is not None:
                through()
            for each in (slot, *(None,) * (frames - 1)):  # None: a further frame of the same pages
                returned.put(each)
            owner = arena()
            if owner is not None and owner.on_return is not None:
                owner.on_return(returned.qsize())

        return give_back

    def collect(self) -> None:
        """Take back the slots that nothing refers to any more."""
        while True:
            try:
                slot = self._returned.get_nowait()
            except Empty:
                return
            if slot is None:
                continue
            slot.watch = None
            if isinstance(slot, _Loan):
                self.leased -= slot.size
                self._loans.discard(slot)
                continue
            self._out.discard(slot)
            self.leased -= len(slot.memory)
            if slot.spare:
                self.allocated -= len(slot.memory)
            else:
                self._free.append(slot)

    def _fitting(self, size: int) -> _Slot | None:
        """Remove and return the smallest free slot of at least `size` bytes, or None.

        Among equals it is the last one returned, whose memory is most likely still in the CPU cache.
        """
        fitting = [slot for slot in self._free if len(slot.memory) >= size]
        if not fitting:
            return None
        best = min(reversed(fitting), key=lambda slot: len(slot.memory))
        self._free.remove(best)
        return best

    def _grow(self, size: int) -> _Slot:
        capacity = self.memory.capacity(size)
        while self._free and self.allocated + capacity > self.budget:
            self.allocated -= len(self._free.pop(0).memory)
        spare = self.allocated + capacity > self.budget
        try:
            slot = _Slot(self.memory.allocate(capacity), spare)
        except (OSError, MemoryError, OverflowError) as error:
            raise no_memory(size) from error
        self.overflows += spare
        self.allocated += capacity
        return slot

    def free_bytes(self) -> int:
        """Return the bytes of the budget that are not on lease; negative after overflows."""
        self.collect()
        return self.budget - self.leased

    def __repr__(self) -> str:
        return f"Arena({self.leased >> 20} of {self.budget >> 20} MiB leased, {self.overflows} overflows)"


def no_memory(size: int) -> CorruptFrameError:
    """Return the error for a frame for which there is no memory: the size that a node announces may be
    wrong."""
    return CorruptFrameError(f"there is no memory for a frame of {size} bytes, as a node announces it")


def slot_size(size: int) -> int:
    """Return the bytes a slot for `size` bytes occupies.

    The size is rounded up to whole pages and by up to an eighth, so that frames of similar size (ragged
    fields) can reuse each other's slots.
    """
    step = max(mmap.PAGESIZE, 1 << max(size.bit_length() - 4, 0))
    return max(-(-size // step) * step, mmap.PAGESIZE)
