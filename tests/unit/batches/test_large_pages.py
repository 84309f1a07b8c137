"""Memory of batches in large pages: the same bytes, and nothing asks for them where they do not pay."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from meshd.core import large_pages
from meshd.core.large_pages import EXTENT, LargePages, use_large_pages
from meshd.core.memory_frames import MemoryAccount, MemoryFrame, is_sealed

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 3 * EXTENT + 12_345


def test_memory_with_large_pages_is_zeros_of_its_size_until_it_is_written_and_sealed() -> None:
    memory = MemoryAccount()
    frame = MemoryFrame(SIZE, memory)
    asyncio.run(LargePages().prepare(frame.fd, frame.size))
    assert os.fstat(frame.fd).st_size == memory.bytes == SIZE
    assert os.pread(frame.fd, SIZE, 0) == bytes(SIZE)
    data = os.urandom(SIZE)
    assert os.pwrite(frame.fd, data, 0) == SIZE
    handed = frame.hand_out("miss")
    assert is_sealed(handed.fd, SIZE)
    assert os.pread(handed.fd, SIZE, 0) == data
    handed.close()
    frame.close()


@pytest.mark.parametrize(("calls", "most"), [(1, EXTENT), (2, 5 * EXTENT), (9, 6 * EXTENT)])
def test_whole_extents_get_them_while_the_kernel_can_and_it_goes_on(calls: int, most: int) -> None:
    told = list[int]()

    def goes_on(made: int) -> bool:
        told.append(made)
        return len(told) < calls

    frame = MemoryFrame(6 * EXTENT + 1, MemoryAccount())
    made = use_large_pages(frame.fd, frame.size, goes_on)
    assert made == max(told, default=0) <= most
    assert told == [EXTENT, 5 * EXTENT, 6 * EXTENT][: len(told)]
    assert os.fstat(frame.fd).st_blocks * 512 >= made
    frame.close()


def test_a_frame_that_is_closed_meanwhile_does_no_harm() -> None:
    def closing(fd: int, size: int, goes_on: Callable[[int], bool]) -> int:
        frame.close()
        return use_large_pages(fd, size, goes_on)

    frame = MemoryFrame(SIZE, MemoryAccount())
    asyncio.run(LargePages(closing).prepare(frame.fd, SIZE))


def tried(outcome: int | OSError, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> int:
    """How often large pages are asked for in ten frames that follow each other. `outcome`: bytes that the
    kernel has for each; `seconds`: processor time for an extent."""
    calls, spent = list[int](), [0.0]

    def use(fd: int, size: int, goes_on: Callable[[int], bool]) -> int:
        calls.append(size)
        os.fstat(fd)
        if isinstance(outcome, OSError):
            raise outcome
        for made in range(EXTENT, outcome + 1, EXTENT):
            spent[0] += seconds
            if not goes_on(made):
                return made
        return outcome

    async def run() -> None:
        pages, fd = LargePages(use), os.memfd_create("frame")
        for _ in range(10):
            await pages.prepare(fd, SIZE)
        os.close(fd)

    monkeypatch.setattr(large_pages, "thread_cpu_seconds", lambda: spent[0])
    asyncio.run(run())
    return len(calls)


def test_they_are_asked_for_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 3 * EXTENT
    assert tried(whole, monkeypatch) == 10
    assert tried(whole, monkeypatch, large_pages.SLOW * 0.9) == 10
    assert tried(whole, monkeypatch, large_pages.SLOW * 1.1) == 1
    assert tried(whole - EXTENT, monkeypatch) == 1, "memory is fragmented"
    assert tried(0, monkeypatch) == 1
    assert tried(OSError(22, "not on this kernel"), monkeypatch) == 1


def test_after_a_pause_they_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "PAUSE_SECONDS", 0.0)
    assert tried(0, monkeypatch) == 10


def test_small_memory_is_left_as_it_is() -> None:
    def use(fd: int, size: int, goes_on: Callable[[int], bool]) -> int:
        raise AssertionError("too small")

    frame = MemoryFrame(EXTENT, MemoryAccount())
    asyncio.run(LargePages(use).prepare(frame.fd, EXTENT))
    frame.close()
