"""One read over several sources: the bytes of the range, each once and in order, or an error."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from meshd.core.read_source import FailoverRead, GeneratedSource, ReadLostError, ReadSource, memory_spans
from meshd.store.errors import CorruptExtentError, DiskFailedError
from meshd.store.integrity.verification import drain_damage_reports
from meshd.store.records import Extent, Span
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

DATA = bytes(range(256)) * 40


class _Source(ReadSource):
    """Gives DATA in groups of `step` bytes up to `last`, then raises `error` or ends."""

    failures = (DiskFailedError,)

    def __init__(self, last: int = len(DATA), error: Exception | None = None, step: int = 1000) -> None:
        self._last, self._error, self._step = last, error, step
        self.opened, self.failed, self.closed = list[int](), list[int](), 0

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        self.opened.append(offset)
        end = min(offset + length, self._last)
        for at in range(offset, end, self._step):
            with memory_spans(DATA[at : min(at + self._step, end)]) as spans:
                yield spans
        if self._error is not None and end < offset + length:
            raise self._error

    def mark_failed(self, offset: int) -> None:
        self.failed.append(offset)

    def close(self) -> None:
        self.closed += 1


class _Torn(_Source):
    """Its file ends at `last`, and it does not know."""

    def __init__(self, path: Path, last: int) -> None:
        super().__init__(last)
        self._path = path
        path.write_bytes(DATA[:last])

    async def open_range(self, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        self.opened.append(offset)
        with self._path.open("rb") as file:
            extent = Extent(0, 7, 0, len(DATA), 0)
            yield [Span(file.fileno(), offset, length, extent)]


def _read(*sources: ReadSource, offset: int = 0, length: int = len(DATA), resumed: bool = False) -> bytes:
    async def run() -> bytes:
        read = FailoverRead(sources, offset, length, "s3://b/k", resumed=resumed)
        return b"".join([piece async for piece in read.pieces()])

    return asyncio.run(run())


def _counted(result: str) -> float:
    return float(metrics.reads_continued.labels(result)._value.get())


def test_the_first_source_is_enough() -> None:
    first, second = _Source(), _Source()
    counted = _counted("whole")
    assert _read(first, second, offset=100, length=5000) == DATA[100:5100]
    assert (first.opened, second.opened) == ([100], [])
    assert (first.closed, second.closed) == (1, 1)
    assert _counted("whole") == counted


def test_a_source_that_fails_is_followed_by_the_next_at_the_missing_byte() -> None:
    first, second = _Source(2500, DiskFailedError("no")), _Source()
    counted = _counted("whole")
    assert _read(first, second) == DATA
    assert first.failed == second.opened == [2500]
    assert _counted("whole") == counted + 1


def test_a_source_that_ends_early_is_followed_by_the_first_one() -> None:
    """A chunk from an origin, say: the next one may be cached."""
    cached, origin = _Source(), _Source()

    async def one_chunk(offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        origin.opened.append(offset)
        with memory_spans(DATA[offset:][: min(length, 4000)]) as spans:
            yield spans

    async def only_the_end(offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        cached.opened.append(offset)
        if offset >= 8000:
            with memory_spans(DATA[offset:][:length]) as spans:
                yield spans

    assert _read(GeneratedSource(only_the_end), GeneratedSource(one_chunk)) == DATA
    assert cached.opened == [0, 4000, 8000]
    assert origin.opened == [0, 4000]


def test_a_file_that_ends_early_is_reported(tmp_path: Path) -> None:
    drain_damage_reports(lambda extent: True)
    torn, second = _Torn(tmp_path / "torn", 3333), _Source()
    assert _read(torn, second) == DATA
    assert second.opened == torn.failed == [3333]
    assert len(drain_damage_reports(lambda extent: True)) == 1


def test_other_errors_end_the_read() -> None:
    second = _Source()
    with pytest.raises(CorruptExtentError):
        _read(_Source(1000, CorruptExtentError("damaged")), second)
    assert second.opened == []
    assert second.closed == 1


def test_when_all_fail_the_last_error_is_raised() -> None:
    with pytest.raises(DiskFailedError, match="second"):
        _read(_Source(10, DiskFailedError("first")), _Source(20, DiskFailedError("second")))
    with pytest.raises(ReadLostError, match="from byte 0 on: no other source has it"):
        _read(_Source(0), _Source(0))


def test_a_resumed_read_has_one_error() -> None:
    counted = _counted("cut")
    for error in (DiskFailedError("no"), S3Error("SlowDown")):
        with pytest.raises(ReadLostError, match="s3://b/k from byte 20 on"):
            _read(_Source(20, error), resumed=True)
    assert _counted("cut") == counted + 2


def test_a_reader_that_leaves_closes_the_sources(tmp_path: Path) -> None:
    first, second = _Torn(tmp_path / "torn", 100), _Source()

    async def run() -> None:
        read = FailoverRead([first, second], 0, len(DATA))
        async with aclosing(read.groups()) as groups:
            async for spans in groups:
                assert os.fstat(spans[0].fd).st_size == 100
                break

    asyncio.run(run())
    assert (first.closed, second.closed) == (1, 1)


@pytest.mark.parametrize("seed", range(50))
def test_any_failures_give_the_same_bytes(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    sources: list[ReadSource] = []
    for number in range(chance.randrange(5)):
        last = chance.randrange(len(DATA))
        torn = _Torn(tmp_path / f"{number}", last)
        sources.append(chance.choice([torn, _Source(last, DiskFailedError("no")), _Source(0)]))
    sources.append(_Source(step=chance.choice([1000, 77, 5000])))
    offset = chance.randrange(len(DATA))
    length = chance.randrange(len(DATA) - offset)
    assert _read(*sources, offset=offset, length=length) == DATA[offset : offset + length]
