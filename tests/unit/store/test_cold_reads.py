"""Turns of large responses at a disk: what is read ahead of a client, in which order, and when it ends."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from meshd.store.disks.cold_reads import TURN_BYTES, ColdReader
from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.records import Span
from meshd.util.page_cache import is_absent
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from meshd.store.disks.cold_reads import ColdRead

MIB = 1 << 20
SIZE = 40 * MIB
BUDGET = 1 << 30


@pytest.fixture
def body(tmp_path: Path) -> Iterator[list[Span]]:
    """In two files."""
    spans = []
    for number in range(2):
        path = tmp_path / str(number)
        path.write_bytes(b"")
        os.truncate(path, SIZE)
        spans.append(Span(os.open(path, os.O_RDONLY), 4096, SIZE // 2))
    yield spans
    for span in spans:
        os.close(span.fd)


def run(check: Callable[[ColdReader], Awaitable[None]], budget: int = BUDGET) -> None:
    """Check with a reader, for which every disk is rotational; it leaves no descriptor open."""

    async def whole() -> None:
        reader = ColdReader(RotationalDisks("rotational"), budget)
        try:
            async with asyncio.timeout(WAIT_TIMEOUT):
                await check(reader)
        finally:
            await reader.aclose()

    before = os.listdir("/proc/self/fd")
    asyncio.run(whole())
    assert len(os.listdir("/proc/self/fd")) == len(before)


def begun(reader: ColdReader, spans: list[Span], position: int = 0) -> ColdRead:
    read = reader.begin(spans, position)
    assert read is not None
    return read


async def reached(read: ColdRead, position: int) -> None:
    for _ in range(round(1000 * WAIT_TIMEOUT)):
        if read.fetched >= position:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"{read} does not reach {position}")


async def fetched(read: ColdRead, position: int) -> OSError | None:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    read.fetch(position, done.set_result)
    return await done


def test_a_body_is_read_to_its_end(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        read = begun(reader, body)
        await read.until(SIZE)
        assert read.fetched == SIZE
        read.close()

    run(check)


def test_a_turn_is_as_far_as_it_reads_ahead_of_a_client(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        read = begun(reader, body)
        assert await fetched(read, 0) is None
        await reached(read, TURN_BYTES)
        read.advance(TURN_BYTES // 2 - 1)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert read.fetched == TURN_BYTES
        read.advance(TURN_BYTES // 2)
        await reached(read, 2 * TURN_BYTES)
        read.close()

    run(check)


def test_with_little_memory_turns_are_short(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        reads = [begun(reader, body) for _ in range(4)]
        for read in reads:
            assert await fetched(read, 0) is None
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert [read.fetched for read in reads] == [MIB] * 4
        for read in reads:
            read.close()

    run(check, budget=4 * MIB)


def test_what_the_kernel_took_away_is_read_again(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        read = begun(reader, body)
        await read.until(4 * MIB)
        assert await fetched(read, MIB) is None
        assert MIB < read.fetched <= MIB + TURN_BYTES
        read.close()

    run(check)


def test_an_error_comes_after_the_bytes_before_it(body: list[Span], tmp_path: Path) -> None:
    unreadable = os.open(tmp_path / "0", os.O_WRONLY)
    spans = [body[0].sub_span(0, 2 * MIB), Span(unreadable, 4096, 4 * MIB)]

    async def check(reader: ColdReader) -> None:
        read = begun(reader, spans)
        await read.until(2 * MIB)
        assert isinstance(await fetched(read, 2 * MIB), OSError)
        with pytest.raises(OSError, match="Bad file descriptor"):
            await read.until(3 * MIB)
        read.close()

    try:
        run(check)
    finally:
        os.close(unreadable)


def test_a_read_that_is_ended_reads_no_more_and_says_so(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        read = begun(reader, body)
        waiting = asyncio.ensure_future(fetched(read, 0))
        await asyncio.sleep(0)
        read.close()
        await waiting
        at = read.fetched
        await begun(reader, body).until(MIB)  # a turn after it
        assert read.fetched == at
        with pytest.raises(OSError, match="ended"):
            await read.until(SIZE)

    run(check)


def test_little_is_not_read_in_turns(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        assert reader.begin([body[0].sub_span(0, MIB)]) is None
        assert reader.begin(body, SIZE - MIB) is None
        assert reader.begin(body, SIZE) is None
        solid = ColdReader(RotationalDisks("solid-state"), BUDGET)
        assert solid.begin(body) is None

    run(check)


def test_many_bodies_at_once_are_all_read(body: list[Span]) -> None:
    async def check(reader: ColdReader) -> None:
        reads = [begun(reader, [body[number % 2]]) for number in range(20)]
        await asyncio.gather(*(read.until(SIZE // 2) for read in reads))
        for read in reads:
            read.close()

    run(check)


def test_a_page_that_is_there_is_not_absent(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.pread(fd, 1, 4096)
        assert not is_absent(fd, 4096)
        assert not is_absent(-1, 0)  # cannot tell
    finally:
        os.close(fd)
