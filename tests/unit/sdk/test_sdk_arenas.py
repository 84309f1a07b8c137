"""The arena's one law: a slot is never written again while anything refers to its bytes."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshsdk.client.arena import Arena, HostMemory, slot_size
from meshsdk.datasets.batch import read_frame
from meshsdk.errors import CorruptFrameError

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = mmap.PAGESIZE


def array(arena: Arena, size: int, fill: int) -> np.ndarray:
    lease = arena.acquire_slot(size)
    lease.view[:] = bytes([fill]) * size
    return np.frombuffer(lease.view, np.uint8)


def test_a_dropped_slot_is_used_again() -> None:
    arena = Arena(4 * PAGE)
    first = array(arena, PAGE, 1)
    address = first.ctypes.data
    del first
    assert array(arena, PAGE, 2).ctypes.data == address
    assert arena.allocated == PAGE


KEEPERS: dict[str, Callable[[np.ndarray], Any]] = {
    "slice": lambda whole: whole[100:200],
    "reshaped": lambda whole: whole.reshape(64, -1).T,
    "tensor": torch.from_numpy,
    "tensor slice": lambda whole: torch.from_numpy(whole)[5:6].view(1, 1),
    "memoryview": lambda whole: whole.data,
}


@pytest.mark.parametrize("keep", KEEPERS)
def test_whatever_refers_to_a_slot_keeps_it(keep: str) -> None:
    arena = Arena(2 * PAGE)
    whole = array(arena, PAGE, 7)
    held = KEEPERS[keep](whole)
    del whole
    gc.collect()
    for fill in (8, 9):
        array(arena, PAGE, fill)
    assert bytes(np.asarray(held).reshape(-1)[:1]) == b"\7"
    assert arena.allocated == 2 * PAGE
    del held
    assert arena.free_bytes() == 2 * PAGE


def test_beyond_the_budget_a_lease_overflows_and_is_freed_after() -> None:
    arena = Arena(2 * PAGE)
    held = [array(arena, PAGE, fill) for fill in range(5)]
    assert arena.overflows == 3
    assert arena.free_bytes() == -3 * PAGE
    assert [int(one[0]) for one in held] == [0, 1, 2, 3, 4]
    held.clear()
    assert arena.free_bytes() == 2 * PAGE
    assert arena.allocated == 2 * PAGE


def test_a_larger_frame_takes_the_place_of_smaller_free_slots() -> None:
    arena = Arena(8 * PAGE)
    small = [array(arena, PAGE, 0) for _ in range(8)]
    small.clear()
    large = array(arena, 6 * PAGE, 1)
    assert arena.overflows == 0
    assert arena.allocated <= 8 * PAGE
    assert large.size == 6 * PAGE


def test_the_return_of_a_slot_is_announced() -> None:
    told = []
    arena = Arena(PAGE)
    arena.on_return = lambda _: told.append(True)
    held = array(arena, PAGE, 0)
    assert not told
    del held
    assert told == [True]


def test_every_frame_of_pages_that_returned_is_counted() -> None:
    """Else the thread that waits for so many would sleep until the loop has run out of batches."""
    told: list[int] = []
    arena = Arena(64 * PAGE)
    held = [
        np.frombuffer(
            arena.adopt_pages(HostMemory().allocate(PAGE), lambda: None, frames=frames).view, np.uint8
        )
        for frames in (16, 1, 16)
    ]
    arena.on_return = told.append
    while held:
        held.pop()
    assert told == [16, 17, 33]
    assert arena.free_bytes() == 64 * PAGE
    assert array(arena, PAGE, 1).size == PAGE


def test_a_batch_may_outlive_its_arena() -> None:
    arena = Arena(PAGE)
    held = array(arena, PAGE, 3)
    del arena
    gc.collect()
    assert int(held.sum()) == 3 * PAGE


@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1, 150_528 * 256, (1 << 30) + 7])
def test_slots_are_whole_pages_with_little_slack(size: int) -> None:
    assert slot_size(size) >= size
    assert slot_size(size) % PAGE == 0
    assert slot_size(size) <= max(size * 9 // 8, PAGE) + PAGE


def test_a_frame_of_an_absurd_size_is_a_failed_attempt() -> None:
    """A node announces it: another one may send the frame."""
    arena, size = Arena(4 * PAGE), 10**17
    with pytest.raises(CorruptFrameError, match=f"no memory for a frame of {size} bytes"):
        arena.acquire_slot(size)
    assert (arena.leased, arena.allocated, arena.overflows) == (0, 0, 0)
    response: Any = SimpleNamespace(length=size)
    with pytest.raises(CorruptFrameError, match=f"no memory for a frame of {size} bytes"):
        read_frame(response)


def test_host_memory_is_aligned_and_writable() -> None:
    memory = HostMemory().allocate(4 << 20)
    assert memory.ctypes.data % PAGE == 0
    assert memory.flags.writeable


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE), st.integers(0, 50)), max_size=60),
    st.integers(1, 12),
)
def test_any_order_of_taking_and_dropping_keeps_what_is_held(
    steps: list[tuple[bool, int, int]], budget: int
) -> None:
    arena = Arena(budget * PAGE)
    held: list[np.ndarray] = []
    for number, (take, size, which) in enumerate(steps):
        if take:
            held.append(array(arena, size, number % 256))
        elif held:
            held.pop(which % len(held))
        arena.collect()
        assert all((one == one[0]).all() for one in held)
        assert len({one.ctypes.data for one in held}) == len(held)
        assert arena.leased >= sum(one.size for one in held)
        assert len(arena._out) == len(held)
    overflow = sum(len(slot.memory) for slot in arena._out if slot.spare)
    assert arena.allocated - overflow <= max(arena.budget, 0)
    held.clear()
    arena.collect()
    assert (arena.leased, len(arena._out)) == (0, 0)
