"""The pool with real processes: same bytes as inline, deaths, poison, cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.transform.compiler import load_program
from meshd.transform.messages import RowBlock
from meshd.transform.op_types import BYTES
from meshd.transform.pool import SLICE_ROWS
from meshd.transform.registry import OPS, operation
from meshd.transform.render_queue import RowSlice
from meshd.transform.renderer import RowWork
from meshd.transform.row_blocks import BlockCopier
from tests.support.transform_processes import jpeg, running, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.transform.pool import TransformPool

SIDE = 16
OPS_USED: list[dict[str, Any]] = [
    {"op": "decode", "field": "image"},
    {"op": "random_resized_crop", "field": "image", "args": {"size": SIDE}},
    {"op": "hflip", "field": "image"},
    {"op": "to_chw", "field": "image"},
]


def works(folder: Path, count: int) -> list[RowWork]:
    """`count` rows in one file, each split into two pieces."""
    path, at, rows = folder / "data", 0, []
    with path.open("wb") as file:
        for number in range(count):
            data = jpeg(number)
            file.write(data)
            half = len(data) // 2
            pieces = ((str(path), at, half), (str(path), at + half, len(data) - half))
            rows.append(RowWork(number, number, (pieces,)))
            at += len(data)
    return rows


async def frame_of(pool: TransformPool, text: str, rows: list[RowWork]) -> np.ndarray[Any, Any]:
    row_bytes = 3 * SIDE * SIDE
    fd = os.memfd_create("frame")
    try:
        os.ftruncate(fd, len(rows) * row_bytes)
        size = len(rows) * row_bytes
        target = [(0, len(rows))]
        got = await pool.render("job", text, 2, rows, frame_fd=fd, frame_bytes=size, targets=target)
        assert got.failures == []
        return np.frombuffer(os.pread(fd, size, 0), np.uint8).reshape(len(rows), 3, SIDE, SIDE)
    finally:
        os.close(fd)


def test_processes_give_what_one_inline_gives(tmp_path: Path) -> None:
    text = text_of(OPS_USED, ["image"])
    program = load_program(text)
    rows = works(tmp_path, 40)
    inline = np.zeros((40, 3, SIDE, SIDE), np.uint8)
    for number in range(40):
        program.chains["image"].render_into(jpeg(number), program.draw(2, number), inline[number])

    async def run(count: int) -> np.ndarray[Any, Any]:
        async with running(tmp_path, count) as (_, pool):
            return await frame_of(pool, text, rows)

    for count in (1, 3):
        np.testing.assert_array_equal(asyncio.run(run(count)), inline)


def test_killed_processes_lose_no_row(tmp_path: Path) -> None:
    text = text_of(OPS_USED, ["image"])
    rows = works(tmp_path, 40)

    async def run() -> None:
        async with running(tmp_path) as (crew, pool):
            wanted = await frame_of(pool, text, rows)
            for _ in range(5):
                asking = asyncio.create_task(frame_of(pool, text, rows))
                await asyncio.sleep(0.005)
                for child in list(crew.processes):
                    if child.pid is not None and child.is_alive():
                        os.kill(child.pid, signal.SIGKILL)
                np.testing.assert_array_equal(await asking, wanted)

    asyncio.run(run())


def test_rows_that_end_a_process_as_they_are_copied_are_not_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are mapped, and those that a disk cannot read end the process: the rows are to be rendered
    one by one, by reads that tell."""

    def copy(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGBUS)

    monkeypatch.setattr(BlockCopier, "copy", copy)
    row = RowWork(0, 0, (), block=RowBlock(4, (1,), b"", (), ()))
    text = text_of([{"op": "frombuffer", "field": "b", "args": {"dtype": "uint8", "shape": [1]}}], ["b"])

    async def run() -> None:
        async with running(tmp_path, 1) as (crew, pool):
            fd = os.memfd_create("frame")
            try:
                got = await pool.render("job", text, 0, [row], frame_fd=fd, frame_bytes=4, targets=[(0, 4)])
            finally:
                os.close(fd)
            assert [(failure.row, failure.kind) for failure in got.failures] == [(0, "read")]
            await asyncio.sleep(0.1)
            assert crew.deaths <= 1

    asyncio.run(run())


def test_few_rows_are_shared_out_among_all_processes(tmp_path: Path) -> None:
    """One batch of a slice's rows does not wait for one process while the others have nothing to do."""

    @operation("test_whose")
    class Whose:
        """The number of the process, after a while."""

        def infer(self, field: Any) -> Any:
            return BYTES

        def apply(self, value: bytes, random: Any) -> bytes:
            time.sleep(0.002)  # all of them in less than the time after which a slice ends by itself
            return str(os.getpid()).encode()

    (tmp_path / "data").write_bytes(b"row")
    rows = [RowWork(number, number, (((str(tmp_path / "data"), 0, 3),),)) for number in range(SLICE_ROWS)]

    async def run() -> None:
        async with running(tmp_path, 3) as (crew, pool):
            text = text_of([{"op": "test_whose", "field": "b"}], ["b"])
            fd = os.memfd_create("frame")
            try:
                got = await pool.render("job", text, 0, rows, frame_fd=fd, frame_bytes=0, targets=[None])
                told = [os.pread(part.fd, 4096, 0) for part in got.parts]
                lengths = [part.columns[0].lengths for part in got.parts]
                got.close()
            finally:
                os.close(fd)
            busy = {data[: length[0]] for data, length in zip(told, lengths, strict=True)}
            assert busy == {str(child.pid).encode() for child in crew.processes}
            assert sum(len(part) for part in lengths) == len(rows)

    try:
        asyncio.run(run())
    finally:
        del OPS["test_whose"]


def test_a_sample_that_kills_twice_is_bad_and_named(tmp_path: Path) -> None:
    @operation("test_poison")
    class Poison:
        """Kills its process on one sample."""

        def infer(self, field: Any) -> Any:
            return field

        def apply(self, value: bytes, random: Any) -> bytes:
            if value == b"poison":
                os.kill(os.getpid(), signal.SIGKILL)
            return value

    (tmp_path / "data").write_bytes(b"poisonhealthy")
    healthy, poison = ((str(tmp_path / "data"), 6, 7),), ((str(tmp_path / "data"), 0, 6),)
    rows = [RowWork(number, number, (poison if number == 21 else healthy,)) for number in range(48)]

    async def run() -> Any:
        async with running(tmp_path) as (_, pool):
            text = text_of([{"op": "test_poison", "field": "b"}], ["b"])
            fd = os.memfd_create("frame")
            try:
                return await pool.render("job", text, 0, rows, frame_fd=fd, frame_bytes=0, targets=[None])
            finally:
                os.close(fd)

    try:
        got = asyncio.run(run())
    finally:
        del OPS["test_poison"]
    assert [(failure.row, failure.kind) for failure in got.failures] == [(21, "bad")]
    assert "died" in got.failures[0].message
    assert sorted(row for part in got.parts for row in part.rows) == [row for row in range(48) if row != 21]
    for part in got.parts:
        assert os.pread(part.fd, 7, 0) == b"healthy"
        assert part.columns[0].lengths == (7,) * len(part.rows)
    got.close()


def test_a_cancelled_call_leaves_the_pool_in_order(tmp_path: Path) -> None:
    text = text_of(OPS_USED, ["image"])
    rows = works(tmp_path, 40)

    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with running(tmp_path, 1) as (_, pool):
            asking = [asyncio.create_task(frame_of(pool, text, rows)) for _ in range(5)]
            await asyncio.sleep(0.01)
            for task in asking[1:]:
                task.cancel()
            await asyncio.gather(*asking[1:], return_exceptions=True)
            wanted = await asking[0]
            np.testing.assert_array_equal(await frame_of(pool, text, rows), wanted)
            assert pool.queued_rows == 0
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(run())


def test_a_file_that_is_gone_is_no_bad_sample(tmp_path: Path) -> None:
    rows = [RowWork(0, 0, (((str(tmp_path / "nothing"), 0, 5),),))]

    async def run() -> Any:
        async with running(tmp_path, 1) as (_, pool):
            text = text_of([], ["b"])
            fd = os.memfd_create("frame")
            try:
                return await pool.render("job", text, 0, rows, frame_fd=fd, frame_bytes=0, targets=[None])
            finally:
                os.close(fd)

    got = asyncio.run(run())
    assert [failure.kind for failure in got.failures] == ["read"]
    got.close()
    assert BYTES.fixed is None


def test_the_pool_goes_on_after_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a disk error of the decoded cache: a process to which nothing more is sent would be missing
    until the node is started again."""
    rows, text, failures = works(tmp_path, 8), text_of(OPS_USED, ["image"]), [OSError(5, "broken")] * 2

    async def check() -> None:
        async with running(tmp_path) as (_, pool), asyncio.timeout(60):
            order = pool.order_prefixes

            def fail(*about: Any) -> None:
                if failures:
                    raise failures.pop()
                order(*about)

            monkeypatch.setattr(pool, "order_prefixes", fail)
            frame = await frame_of(pool, text, rows)
            assert frame.any()
            assert not failures

    asyncio.run(check())


def test_a_reply_that_cannot_be_used_fails_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a disk error of the decoded cache, again: its caller would wait for ever."""
    rows, text, failures = works(tmp_path, 8), text_of(OPS_USED, ["image"]), [OSError(5, "broken")]

    def fail(*about: Any) -> None:
        if failures:
            raise failures.pop()

    async def check() -> None:
        async with running(tmp_path, 1) as (_, pool), asyncio.timeout(60):
            monkeypatch.setattr(RowSlice, "record_spans", fail)
            with pytest.raises(OSError, match="broken"):
                await frame_of(pool, text, rows)
            assert (await frame_of(pool, text, rows)).any()

    asyncio.run(check())
