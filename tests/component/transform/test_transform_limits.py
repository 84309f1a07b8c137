"""What one job's samples and ops may cost the others: memory, time, processes, lies about what they make."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from awscrt.checksums import crc32c

from meshd.transform import pool as pool_module
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter
from meshd.transform.pool import TransformPool
from meshd.transform.registry import OPS, operation
from meshd.transform.renderer import RowWork
from meshd.transform.resource_limits import RowLimits
from meshd.util.tenant_limits import tenant_scope
from tests.support.transform_processes import running, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from meshd.transform.renderer import RenderResult

FIXED = FieldType("array", "uint8", (4,))


@contextmanager
def op_that(work: Callable[[bytes], Any], output: FieldType = FIXED) -> Iterator[str]:
    """An op of this test, as every process forked from here on knows it."""

    @operation("test_op", Parameter("mark", lambda value, path: value, ""))
    @dataclass(frozen=True, slots=True)
    class Op:
        """Does what the test wants."""

        mark: str

        def infer(self, field: FieldType) -> FieldType:
            return output

        def apply(self, value: bytes, random: Any) -> Any:
            return work(value)

    try:
        yield text_of([{"op": "test_op", "field": "b", "args": {"mark": os.urandom(4).hex()}}], ["b"])
    finally:
        del OPS["test_op"]


def rows_of(folder: Path, samples: Sequence[bytes]) -> list[RowWork]:
    path = folder / f"data-{os.urandom(4).hex()}"
    path.write_bytes(b"".join(samples))
    rows, at = [], 0
    for number, sample in enumerate(samples):
        rows.append(RowWork(number, number, (((str(path), at, len(sample)),),)))
        at += len(sample)
    return rows


async def render(
    pool: TransformPool, text: str, rows: list[RowWork], *, job: str = "job", account: str = "ann"
) -> tuple[RenderResult, bytes]:
    """What came of it, and the frame: four bytes a row."""
    fd = os.memfd_create("frame")
    try:
        os.ftruncate(fd, 4 * len(rows))
        target = [(0, len(rows))]
        with tenant_scope(account):
            got = await pool.render(
                job, text, 0, rows, frame_fd=fd, frame_bytes=4 * len(rows), targets=target
            )
        return got, os.pread(fd, 4 * len(rows), 0)
    finally:
        os.close(fd)


def four(value: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(value[:4], np.uint8)


def test_a_sample_that_needs_too_much_memory_is_bad_and_the_others_are_not(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        if value == b"huge":
            np.ones(300 << 20, np.uint8)
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2, RowLimits(memory=200 << 20)) as (crew, pool):
            samples = [b"huge" if number == 5 else b"%04d" % number for number in range(20)]
            got, frame = await render(pool, text, rows_of(tmp_path, samples))
            assert [(failure.row, failure.kind, failure.op) for failure in got.failures] == [
                (5, "bad", "test_op")
            ]
            assert "memory" in got.failures[0].message
            assert [frame[4 * row : 4 * row + 4] for row in range(20) if row != 5] == [
                sample for sample in samples if sample != b"huge"
            ]
            assert crew.deaths == 1  # the first time; the second was in a fresh one

    with op_that(work) as text:
        asyncio.run(run(text))


def test_what_leaks_makes_no_sample_bad(tmp_path: Path) -> None:
    kept = []

    def work(value: bytes) -> Any:
        kept.append(mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE))  # counts as taken at once
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2, RowLimits(memory=128 << 20)) as (crew, pool):
            samples = [b"%04d" % number for number in range(200)]
            got, frame = await render(pool, text, rows_of(tmp_path, samples))
            assert got.failures == []
            assert frame == b"".join(samples)
            assert crew.deaths >= 5

    with op_that(work) as text:
        asyncio.run(run(text))


def test_a_row_that_takes_too_long_is_bad_and_costs_one_retry(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        while value == b"spin":
            pass
        if value == b"wait":
            time.sleep(60)
        return four(value)

    async def run(text: str) -> None:
        limits = RowLimits(row_seconds=4.0, row_cpu_seconds=1.0)
        async with running(tmp_path, 2, limits) as (crew, pool):
            samples = [b"fine", b"spin", b"good", b"wait", b"well"]
            got, frame = await render(pool, text, rows_of(tmp_path, samples))
            assert sorted((failure.row, failure.kind) for failure in got.failures) == [(1, "bad"), (3, "bad")]
            assert all("died" in failure.message for failure in got.failures)
            assert (frame[:4], frame[8:12], frame[16:]) == (b"fine", b"good", b"well")
            assert crew.deaths == 4

    with op_that(work) as text:
        asyncio.run(run(text))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (np.zeros(5, np.uint8), "uint8[5]"),
        (np.zeros(1, np.uint8), "uint8[1]"),  # would be spread over the row
        (np.zeros((4, 1), np.uint8), "uint8[4, 1]"),
        (np.zeros(4, np.int8), "int8[4]"),
        (np.array([b"a"] * 4, object), "object[4]"),
        (np.zeros(4 << 20, np.uint8), "uint8[4194304]"),
        (b"abc", "3 bytes"),
        ("text", "a str"),
        (None, "a NoneType"),
    ],
)
def test_an_op_that_lies_about_what_it_makes_is_named(tmp_path: Path, made: Any, said: str) -> None:
    def work(value: bytes) -> Any:
        return made if value == b"lies" else four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 1) as (crew, pool):
            got, frame = await render(pool, text, rows_of(tmp_path, [b"true", b"lies", b"also"]))
            (failure,) = got.failures
            assert (failure.row, failure.kind, failure.op) == (1, "op", "test_op")
            assert f"returned {said}, declared array uint8[4]" in failure.message
            assert ('.astype("uint8")' in failure.message) == (said == "int8[4]")
            assert frame == b"true\0\0\0\0also"
            assert crew.deaths == 0

    with op_that(work) as text:
        asyncio.run(run(text))


def test_ragged_lies_are_named_too(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        return np.zeros((2, 2) if value == b"lies" else 2, np.float32)

    async def run(text: str) -> Any:
        async with running(tmp_path, 1) as (_, pool):
            fd = os.memfd_create("frame")
            try:
                rows = rows_of(tmp_path, [b"true", b"lies"])
                return await pool.render("job", text, 0, rows, frame_fd=fd, frame_bytes=0, targets=[None])
            finally:
                os.close(fd)

    with op_that(work, FieldType("array", "float32", (None,))) as text:
        got = asyncio.run(run(text))
    assert [(failure.row, failure.kind) for failure in got.failures] == [(1, "op")]
    assert [part.rows for part in got.parts] == [(0,)]
    got.close()


def test_bytes_that_are_not_those_that_were_stored_are_never_decoded(tmp_path: Path) -> None:
    async def run(text: str) -> None:
        async with running(tmp_path, 1) as (_, pool):
            rows = rows_of(tmp_path, [b"good", b"evil"])
            checked = [
                RowWork(work.row, 0, (((work.sources[0][0][0], 4 * work.row, 4, crc32c(b"good")),),))
                for work in rows
            ]
            got, frame = await render(pool, text, checked)
            assert [(failure.row, failure.kind) for failure in got.failures] == [(1, "damaged")]
            assert frame == b"good\0\0\0\0"

    with op_that(four) as text:
        asyncio.run(run(text))


def test_results_that_fill_the_scratch_end_a_slice_not_the_rows(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        return np.full(30 << 20, value[0], np.uint8)

    async def run(text: str) -> Any:
        async with running(tmp_path, 1) as (_, pool):
            fd = os.memfd_create("frame")
            try:
                rows = rows_of(tmp_path, [bytes([number]) for number in range(12)])
                return await pool.render("job", text, 0, rows, frame_fd=fd, frame_bytes=0, targets=[None])
            finally:
                os.close(fd)

    with op_that(work, FieldType("array", "uint8", (None,))) as text:
        got = asyncio.run(run(text))
    assert got.failures == []
    assert sorted(row for part in got.parts for row in part.rows) == list(range(12))
    for part in got.parts:
        assert sum(part.columns[0].lengths) <= 160 << 20
        first = [os.pread(part.fd, 1, number * (30 << 20))[0] for number in range(len(part.rows))]
        assert first == [*part.rows]
    got.close()


def test_a_thousand_requests_of_one_key_do_not_starve_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, take_in = Counter[str](), TransformPool.on_reply

    def counted(pool: TransformPool, item: Any, reply: Any, fds: Any) -> None:
        done[item.call.spec.account] += len(reply.rendered)
        take_in(pool, item, reply, fds)

    monkeypatch.setattr(TransformPool, "on_reply", counted)

    def work(value: bytes) -> Any:
        deadline = time.process_time() + 0.002
        while time.process_time() < deadline:
            pass
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2) as (_, pool):
            rows = rows_of(tmp_path, [b"%04d" % number for number in range(32)])
            crowd = [
                asyncio.create_task(render(pool, text, rows, job=f"job-{number}", account="crowd"))
                for number in range(1000)
            ]
            await asyncio.sleep(0)
            assert pool.queued_rows == 32_000
            done.clear()
            for _ in range(5):
                got, frame = await render(pool, text, rows, account="ben")
                assert got.failures == []
                assert frame == b"".join(b"%04d" % number for number in range(32))
            # Half of the processes are the crowd's, and it has a slice under way each time; not 1,000 jobs.
            assert done["crowd"] < 8 * 5 * 32, done
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)

    with op_that(work) as text:
        asyncio.run(run(text))


def test_a_job_that_kills_processes_leaves_half_of_them_to_others(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        if value == b"kill":
            os._exit(9)
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2) as (crew, pool):
            deadly = rows_of(tmp_path, [b"kill"] * 16)
            honest = [b"%04d" % number for number in range(64)]
            rows = rows_of(tmp_path, honest)
            killing = asyncio.create_task(render(pool, text, deadly, job="deadly", account="eve"))
            rounds = 0
            while not killing.done():
                got, frame = await render(pool, text, rows, job="honest", account="ann")
                assert got.failures == []
                assert frame == b"".join(honest)
                rounds += 1
            got, _ = await killing
            assert [failure.kind for failure in got.failures] == ["bad"] * 16
            assert rounds > 5
            assert crew.deaths >= 31  # each twice; the last may not have been buried yet
            assert "2, 0 rows" in repr(pool)

    with op_that(work) as text:
        asyncio.run(run(text))


def test_a_job_that_drags_leaves_half_of_the_processes_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SLOW_SLICE_SECONDS", 0.3)
    slow_row = 6.0

    def work(value: bytes) -> Any:
        if value == b"slow":
            time.sleep(slow_row)
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2) as (_, pool):
            quick = rows_of(tmp_path, [b"fast"] * 16)
            await render(pool, text, quick, job="quick", account="ann")
            slow = rows_of(tmp_path, [b"slow"] * 64)
            dragging = asyncio.create_task(render(pool, text, slow, job="slow", account="eve"))
            loop = asyncio.get_running_loop()
            waits = []
            for _ in range(12):
                began = loop.time()
                await render(pool, text, quick, job="quick", account="ann")
                waits.append(loop.time() - began)
            dragging.cancel()
            await asyncio.gather(dragging, return_exceptions=True)
            assert sorted(waits)[8] < slow_row / 2  # only the first ones may have met both processes at it

    with op_that(work) as text:
        asyncio.run(run(text))


def test_nobody_waits_behind_what_takes_long(tmp_path: Path) -> None:
    def work(value: bytes) -> Any:
        if value == b"slow":
            time.sleep(0.5)
        return four(value)

    async def run(text: str) -> None:
        async with running(tmp_path, 2) as (_, pool):
            slow = rows_of(tmp_path, [b"slow"] * 64)
            await render(pool, text, slow[:4], job="slow", account="eve")  # now it is known to be
            dragging = asyncio.create_task(render(pool, text, slow, job="slow", account="eve"))
            quick = rows_of(tmp_path, [b"fast"] * 16)
            loop = asyncio.get_running_loop()
            waits = []
            for _ in range(8):
                began = loop.time()
                await render(pool, text, quick, job="quick", account="ann")
                waits.append(loop.time() - began)
            dragging.cancel()
            await asyncio.gather(dragging, return_exceptions=True)
            assert sorted(waits)[4] < 4.0  # one slow row may be under way, none lies before

    with op_that(work) as text:
        asyncio.run(run(text))
