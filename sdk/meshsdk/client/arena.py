"""Receive arena: memory slots that sockets fill and that are reused after their last reference dies.

Law: the arena leases slots. Every array or tensor made from a slot holds its lease, and the death of the
last one returns the slot; nobody calls release.
Invariant: a leased slot is never written for another frame.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_HUGE = 2 << 20
_LOANS = 64  # each is a descriptor of this process


class Memory(Protocol):
    """One kind of arena memory."""

    def capacity(self, size: int) -> int:
        """Bytes that a slot for `size` takes of it."""

    def allocate(self, size: int) -> Bytes:
        """`size` writable bytes, aligned to a page, freed when the array dies."""


class HostMemory:
    """Anonymous private pages: a forked child sees a copy, never the parent's next batch."""

    def capacity(self, size: int) -> int:
        return slot_size(size)

    def allocate(self, size: int) -> Bytes:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)


class PinnedMemory:
    """Page-locked memory that CUDA copies from asynchronously; torch allocates and frees it.

    torch rounds up to a power of two; slots take all of that, so that a budget is what is locked.
    Not run: no GPU was at hand when this was written (`python -m tests.gpu` does).
    """

    def capacity(self, size: int) -> int:
        return 1 << (slot_size(size) - 1).bit_length()

    def allocate(self, size: int) -> Bytes:
        import torch

        pinned: Bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned


class Waker:
    """Wakes a thread that polls `fileno()`, from any thread, a finalizer included; harmless once closed.

    The polling thread takes no lock: whoever closes may be waiting for it to end.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a finalizer may run in the middle of `close` on the same thread.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        """Forgets earlier wake-ups. For the polling thread."""
        with contextlib.suppress(OSError):  # nothing to read, or closed meanwhile
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class _Holder(np.ndarray[Any, np.dtype[np.uint8]]):
    """The array every view of a lease is made from: it can be weakly referenced, and views keep it alive."""


@dataclass(slots=True, eq=False)
class _Slot:
    memory: Bytes
    spare: bool  # beyond the budget: freed, not reused
    watch: weakref.ref[_Holder] | None = None


@dataclass(slots=True, eq=False)
class _Loan:
    """Memory that is not the arena's, under lease: `size` bytes until `watch` tells."""

    size: int
    watch: weakref.ref[_Holder] | None = None


@dataclass(slots=True)
class Lease:
    """`view`: exactly the bytes asked for. It may be dropped once arrays were made of the view."""

    view: memoryview
    capacity: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Arena:
    """Slots of at most `budget` bytes together; not thread-safe but for the slots' return.

    `overflows` counts leases beyond the budget: the consumer holds so many batches that prefetching would
    otherwise stop for good.
    """

    budget: int
    memory: Memory = field(default_factory=HostMemory)
    overflows: int = 0
    leased: int = 0
    allocated: int = 0
    on_return: Callable[[], None] | None = None
    _free: list[_Slot] = field(default_factory=list)
    # Slots under lease: nothing else keeps their weak references, without which none would come back.
    _out: set[_Slot] = field(default_factory=set)
    _loans: set[_Loan] = field(default_factory=set)
    # SimpleQueue.put is reentrant: the only queue a weakref callback may use.
    _returned: SimpleQueue[_Slot | _Loan] = field(default_factory=SimpleQueue)

    def can_adopt(self, size: int) -> bool:
        """Whether a frame may lie in memory of others: not where a device copies from this kind alone, nor
        beyond the budget: what is kept for long is to be memory of this process."""
        within = len(self._loans) < _LOANS and size <= self.free_bytes()
        return within and isinstance(self.memory, HostMemory)

    def adopt_pages(self, pages: Bytes, through: Callable[[], None]) -> Lease:
        """The memory of others as a lease: it counts as such until nothing refers to it, when `through` is
        called, on any thread."""
        self.collect()
        loan, size = _Loan(len(pages)), len(pages)
        holder = pages.view(_Holder)
        loan.watch = weakref.ref(holder, self._watcher(loan, through))
        self._loans.add(loan)
        self.leased += size
        return Lease(holder.data, size)

    def acquire_slot(self, size: int) -> Lease:
        """Memory for `size` bytes: a free slot, a new one within the budget, or one beyond it."""
        self.collect()
        slot = self._fitting(size) or self._grow(size)
        holder = slot.memory.view(_Holder)
        slot.watch = weakref.ref(holder, self._watcher(slot))
        self._out.add(slot)
        self.leased += len(slot.memory)
        return Lease(holder.data[:size], len(slot.memory))

    def _watcher(
        self, slot: _Slot | _Loan, through: Callable[[], None] | None = None
    ) -> Callable[[weakref.ref[_Holder]], None]:
        returned, arena = self._returned, weakref.ref(self)

        def give_back(_: weakref.ref[_Holder]) -> None:
            if through is not None:
                through()
            returned.put(slot)
            owner = arena()
            if owner is not None and owner.on_return is not None:
                owner.on_return()

        return give_back

    def collect(self) -> None:
        """Takes back the slots that nothing refers to any more."""
        while True:
            try:
                slot = self._returned.get_nowait()
            except Empty:
                return
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
        """The smallest free slot that holds `size`; among equals the latest returned, still warm."""
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
        self.overflows += spare
        self.allocated += capacity
        return _Slot(self.memory.allocate(capacity), spare)

    def free_bytes(self) -> int:
        """Bytes of the budget that are not under lease; negative after overflows."""
        self.collect()
        return self.budget - self.leased

    def __repr__(self) -> str:
        return f"Arena({self.leased >> 20} of {self.budget >> 20} MiB leased, {self.overflows} overflows)"


def slot_size(size: int) -> int:
    """Bytes a slot for `size` takes: whole pages, with an eighth of slack so that ragged frames can share
    slots.
    """
    step = max(mmap.PAGESIZE, 1 << max(size.bit_length() - 4, 0))
    return max(-(-size // step) * step, mmap.PAGESIZE)
