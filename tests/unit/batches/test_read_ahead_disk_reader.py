"""DiskReader: every read of a window, in order; urgent windows first; cached bytes are left alone."""

from __future__ import annotations

import itertools
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshd.batches.read_ahead import disk_reader
from meshd.batches.read_ahead.disk_reader import DiskReader, DiskWork
from meshd.batches.read_ahead.extents import READ_BYTES, plan_reads
from meshd.util.clock import SystemClock
from meshd.util.page_cache import is_cached
from tests.support.manual_clock import ManualClock
from tests.support.virtual_drive import Client, VirtualDrive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def reader() -> Iterator[DiskReader]:
    made = DiskReader(0, SystemClock())
    yield made
    made.close()


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached(path: Path, offset: int, length: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_cached(fd, offset, length)
    finally:
        os.close(fd)


def work_on(path: Path, *extents: tuple[int, int]) -> tuple[DiskWork, threading.Event]:
    table, done = np.array(extents, np.int64), threading.Event()
    reads = plan_reads(np.zeros(len(extents)), table[:, 0], table[:, 1])
    return DiskWork(0, [str(path)], reads, done.set), done


def test_a_window_is_in_the_page_cache_when_it_is_done(reader: DiskReader, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(16 * MIB))
    drop_from_cache(path)
    if cached(path, 0, MIB):
        pytest.skip("this file system keeps its files in memory")
    work, done = work_on(path, (8 * MIB, 3 * MIB), (0, 70_000))
    reader.submit(work)
    assert done.wait(30)
    assert cached(path, 8 * MIB, 3 * MIB)
    assert cached(path, 0, 70_000)
    assert not cached(path, 4 * MIB, MIB)


class Ticks(ManualClock):
    """A millisecond goes by whenever somebody looks."""

    def monotonic(self) -> float:
        self.advance(0.001)
        return super().monotonic()


def test_reads_of_others_go_first_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the reader is queued while it waits for them; a disk that is always busy does not end it."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(60 * MIB))
    begun, finished, looks = list[int](), list[int](), list[tuple[int, int]]()
    reader, own = DiskReader(0, Ticks()), 8
    in_flight = iter([own, own, own + 2, 2, 1, 0])  # two other reads while the fourth read is queued

    def look(device: int) -> int:
        looks.append((sum(begun), sum(begun) - sum(finished)))
        return next(in_flight, own + 1)

    def finish(read: disk_reader._Read, buffer: object) -> int:
        finished.append(read.length)
        return read.length

    monkeypatch.setattr(disk_reader, "is_cached", lambda *_: False)
    monkeypatch.setattr(disk_reader, "NEXT_SECONDS", 0.0)
    monkeypatch.setattr(disk_reader, "reads_in_flight", look)
    monkeypatch.setattr(disk_reader._Read, "requests_left", lambda *_: own)
    monkeypatch.setattr(disk_reader._Read, "begin", lambda read, _: begun.append(read.length))
    monkeypatch.setattr(disk_reader._Read, "finish", finish)
    work, done = work_on(path, (0, 60 * MIB))
    reader.submit(work)
    assert done.wait(30)
    reader.close()
    assert sum(finished) == 60 * MIB
    assert looks[:7] == [(n * MIB, MIB) for n in (1, 2, 3)] + [(3 * MIB, 0)] * 3 + [(4 * MIB, MIB)]
    assert set(begun[5:]) == {disk_reader.SHORT_BYTES}
    # Of a disk that is always busy with others, two fifths are the reader's: 4 MiB for each wait of 30 ms.
    turns = sorted({at for at, left in looks[7:] if not left})
    assert len(turns) > 10
    between = [later - earlier for earlier, later in itertools.pairwise(turns[3:])]
    assert min(between) >= 3.5 * MIB
    assert max(between) <= 4.5 * MIB


@pytest.mark.parametrize(("chain", "limit"), [(1, 0.035), (2, 0.05)])
def test_another_client_waits_for_no_more_than_50_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chain: int, limit: float
) -> None:
    """In virtual time: 99 of 100 reads at random places beside a window of 100 runs."""
    client, rng = Client(chain, pause=0.05), random.Random(5)
    drive = VirtualDrive([client])
    reader, path = DiskReader(0, drive), tmp_path / "segment"
    path.touch()
    drive.attach(reader, monkeypatch)
    runs = [(place * 24 * MIB, 17 * MIB) for place in sorted(rng.sample(range(250), 100))]
    work, _ = work_on(path, *runs)
    reader._read_window(work)
    reader.close()
    waits, stats = sorted(client.waits), drive.drive.arm.stats
    assert len(waits) > 100
    assert waits[int(0.99 * len(waits))] <= limit, waits[-5:]
    assert stats.bytes >= 1700 * MIB
    # While it waits, the drive takes what was queued already: the read in progress and the next one.
    assert max(client.passed) <= 2 * READ_BYTES
    # Each of them costs the arm the way there and back, as it would without a window.
    assert stats.seeks <= 100 + 2.2 * chain * len(waits)


def test_a_read_of_others_that_follows_another_does_not_wait_for_the_next_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun = tmp_path / "segment", list[int]()
    path.write_bytes(bytes(20 * MIB))
    reader = DiskReader(0, Ticks())
    own, looks = 8, list[int]()
    # An inode, 1 ms later the map of its extents, and 1 ms later its bytes; then nothing.
    in_flight = iter([own + 1, 1, 0, 1, 0, 1])

    def look(device: int) -> int:
        looks.append(sum(begun) // MIB)
        return next(in_flight, 0)

    monkeypatch.setattr(disk_reader, "is_cached", lambda *_: False)
    monkeypatch.setattr(disk_reader, "reads_in_flight", look)
    monkeypatch.setattr(disk_reader._Read, "requests_left", lambda *_: own)
    monkeypatch.setattr(disk_reader._Read, "begin", lambda read, _: begun.append(read.length))
    monkeypatch.setattr(disk_reader._Read, "finish", lambda read, _: read.length)
    work, done = work_on(path, (0, 20 * MIB))
    reader.submit(work)
    assert done.wait(30)
    reader.close()
    assert looks[:9] == [1] * 9
    assert looks[9:] == sorted(looks[9:])
    assert set(looks[9:]) == set(range(2, 20))


@pytest.mark.parametrize("cold", [False, True])
def test_from_the_first_cold_inode_on_several_are_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch, *, cold: bool
) -> None:
    clock, threads = ManualClock(), dict[str, int]()
    together = threading.Barrier(disk_reader._INODES_AT_A_TIME)
    reader = DiskReader(0, clock)

    def look_up(path: str) -> None:
        threads[path] = threading.get_ident()
        if path == "2" and cold:
            clock.advance(0.012)
        if cold and int(path) > 2:
            together.wait(30)  # so many threads, or it never ends

    monkeypatch.setattr(disk_reader, "_read_inode", look_up)
    paths = [str(number) for number in range(3 + 2 * disk_reader._INODES_AT_A_TIME)]
    reader._read_inodes(DiskWork(0, paths, plan_reads([], [], []), lambda: None))
    reader.close()
    assert list(threads) == paths if not cold else sorted(threads) == sorted(paths)
    alone = [path for path in paths if threads[path] == threading.get_ident()]
    assert alone == (paths[:3] if cold else paths)


def test_a_window_tells_how_far_it_has_been_read_and_never_too_much(
    reader: DiskReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(20 * MIB))
    finished, told = list[int](), list[tuple[int, int]]()

    def finish(read: disk_reader._Read, buffer: object) -> int:
        finished.append(read.number)
        return read.length

    # The first and the sixth read are cached already.
    monkeypatch.setattr(disk_reader, "is_cached", lambda _, offset, __: offset in (0, 5 * MIB))
    monkeypatch.setattr(disk_reader, "_TELL_SECONDS", -1.0)
    monkeypatch.setattr(disk_reader._Read, "finish", finish)
    work, done = work_on(path, (0, 20 * MIB))
    work.on_progress = lambda: told.append((work.finished, finished[-1] + 1))
    reader.submit(work)
    assert done.wait(30)
    assert finished == [number for number in range(20) if number not in (0, 5)]
    assert told == [(number + 1, number + 1) for number in finished[:-1]]


def test_missing_files_and_short_files_are_left_to_the_reader_of_the_bytes(
    reader: DiskReader, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 5000)
    for path in (tmp_path / "absent", short):
        work, done = work_on(path, (0, 4 * MIB))
        reader.submit(work)
        assert done.wait(30)


def test_a_window_that_a_batch_waits_for_is_read_before_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    held, begun = threading.Event(), threading.Event()

    def read_window(self: DiskReader, work: DiskWork) -> None:
        begun.set()
        held.wait(30)
        order.append(work.paths[0])

    monkeypatch.setattr(disk_reader.DiskReader, "_read_window", read_window)
    reader = DiskReader(0, SystemClock())
    works = [work_on(tmp_path / name, (0, 1)) for name in "abcd"]
    reader.submit(works[0][0])
    assert begun.wait(30)
    for work, _ in works[1:]:
        reader.submit(work)
    reader.prioritize(works[3][0])
    held.set()
    assert all(done.wait(30) for _, done in works)
    reader.close()
    assert [os.path.basename(path) for path in order] == ["a", "d", "b", "c"]


def test_a_reader_that_is_closed_ends_every_window(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(8 * MIB))
    reader = DiskReader(0, SystemClock())
    works = [work_on(path, (0, 8 * MIB)) for _ in range(20)]
    for work, _ in works:
        reader.submit(work)
    reader.close()
    assert all(done.is_set() for _, done in works)


@pytest.mark.parametrize("missing", [True, False])
def test_a_window_over_many_files_has_few_of_them_open(
    reader: DiskReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    open_files: list[int] = []

    def is_cached_counted(fd: int, offset: int, length: int) -> bool:
        open_files.append(len(os.listdir("/proc/self/fd")))
        return is_cached(fd, offset, length) and not missing

    monkeypatch.setattr(disk_reader, "is_cached", is_cached_counted)
    paths = [str(tmp_path / f"{number:03}") for number in range(200)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(bytes(8192))
    before, done = len(os.listdir("/proc/self/fd")), threading.Event()
    numbers = np.arange(200)
    reads = plan_reads(numbers, numbers * 0, numbers * 0 + 8192)
    reader.submit(DiskWork(0, paths, reads, done.set))
    assert done.wait(30)
    assert len(open_files) == 200
    assert max(open_files) <= before + 8
    assert len(os.listdir("/proc/self/fd")) <= before
