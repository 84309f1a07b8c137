"""The assembler behind its Unix socket: frames, errors, cancellation, a coordinator that goes away."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from meshd.batches.assembly.assembler_client import AssemblerClient, serve_assembler
from meshd.core.api_errors import BatchError
from meshd.core.frame_address import FrameAddress, RowsAddress, consecutive_steps, leading_frames
from meshd.core.memory_frames import MemoryAccount, MemoryFrame, hand_out_all, make_block
from meshd.rpc.unix_messages import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from meshd.core.frame_address import AnyFrameAddress, Frame

PLAN = "ab" * 32


class Source:
    """Answers with frames that hold their address; `gate`: wait for it first; `in_block`: those of several
    steps are in one block of memory."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.asked: list[AnyFrameAddress] = []
        self.cancelled = 0
        self.in_block = False
        self.memory = MemoryAccount()

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        self.asked.append(address)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if not isinstance(address, FrameAddress):
            raise BatchError("BadSample", "no good", help="look", detail={"key": "k"})
        if address.step == 99:
            raise ZeroDivisionError("secret detail")
        frame = MemoryFrame(64, self.memory)
        os.pwrite(frame.fd, repr(address).encode()[:64], 0)
        frame.rows = address.batch
        return frame.hand_out("joined")

    async def get_frames(self, first: FrameAddress, count: int, kept_bytes: int | None = None) -> list[Frame]:
        if self.in_block:
            return hand_out_all(make_block([64] * count, self.memory), "miss")
        steps = consecutive_steps(first, count)
        return await leading_frames(self.get_frame(step, kept_bytes) for step in steps)


@asynccontextmanager
async def door(path: Path) -> AsyncIterator[tuple[Source, AssemblerClient]]:
    source, listener = Source(), listen(path)
    serving = asyncio.create_task(serve_assembler(source, listener))
    remote = AssemblerClient(path)
    try:
        yield source, remote
    finally:
        await remote.aclose()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def test_frames_and_errors_come_through(tmp_path: Path) -> None:
    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with door(tmp_path / "s.sock") as (source, remote):
            addresses = [FrameAddress(PLAN, 1, step, 0, 1, 8, 3) for step in range(20)]
            frames = await asyncio.gather(*(remote.get_frame(address) for address in addresses))
            assert source.memory.bytes == 20 * 64
            for address, frame in zip(addresses, frames, strict=True):
                assert (frame.rows, frame.size, frame.result) == (8, 64, "joined")
                assert os.pread(frame.fd, 64, 0).rstrip(b"\0") == repr(address).encode()[:64]
                frame.close()
                frame.close()
            await until(lambda: source.memory.bytes == 0)  # the other side knows that they were sent
            with pytest.raises(BatchError, match="no good") as caught:
                await remote.get_frame(RowsAddress(PLAN, 0, (1, 2)))
            assert (caught.value.code, caught.value.detail, caught.value.help) == (
                "BadSample",
                {"key": "k"},
                "look",
            )
            assert source.asked[-1] == RowsAddress(PLAN, 0, (1, 2))
            with pytest.raises(BatchError, match="log says why") as caught:
                await remote.get_frame(FrameAddress(PLAN, 0, 99))
            assert caught.value.code == "InternalError"
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(run())


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the other side's state has no event to wait for
            await asyncio.sleep(0.001)


def test_a_cancelled_request_is_forgotten_on_the_other_side(tmp_path: Path) -> None:
    async def run() -> None:
        async with door(tmp_path / "s.sock") as (source, remote):
            source.gate = asyncio.Event()
            asking = asyncio.create_task(remote.get_frame(FrameAddress(PLAN, 0, 0)))
            await until(lambda: source.asked)
            asking.cancel()
            await until(lambda: source.cancelled)
            source.gate.set()
            (await remote.get_frame(FrameAddress(PLAN, 0, 1))).close()

    asyncio.run(run())


def test_a_coordinator_that_goes_away_means_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "s.sock"
        remote = AssemblerClient(path)
        with pytest.raises(BatchError) as caught:
            await remote.get_frame(FrameAddress(PLAN, 0, 0))
        assert (caught.value.code, caught.value.retry_after) == ("Busy", 1)
        source, listener = Source(), listen(path)
        source.gate = asyncio.Event()
        serving = asyncio.create_task(serve_assembler(source, listener))
        asking = asyncio.create_task(remote.get_frame(FrameAddress(PLAN, 0, 0)))
        await until(lambda: source.asked)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        with pytest.raises(BatchError, match="restarting"):
            await asking
        source.gate = None
        serving = asyncio.create_task(serve_assembler(source, listener))
        (await remote.get_frame(FrameAddress(PLAN, 0, 1))).close()
        await remote.aclose()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()

    asyncio.run(run())


def test_frames_of_several_steps_come_in_one_call(tmp_path: Path) -> None:
    async def run() -> None:
        before = len(os.listdir("/proc/self/fd"))
        async with door(tmp_path / "s.sock") as (source, remote):
            first = FrameAddress("p", 1, 95)
            frames = await remote.get_frames(first, 3)
            assert [os.pread(frame.fd, 64, 0).split(b",")[2] for frame in frames] == [
                b" step=95", b" step=96", b" step=97",
            ]  # fmt: skip
            assert source.memory.bytes == 3 * 64
            for frame in frames[1:]:
                frame.close()
                frame.close()
            await asyncio.sleep(0.05)
            assert source.memory.bytes == 3 * 64  # an answer is released when all its frames are closed
            frames[0].close()
            await until(lambda: source.memory.bytes == 0)
            leading = await remote.get_frames(first, 10)  # step 99 fails
            assert len(leading) == 4
            for frame in leading:
                frame.close()
            await until(lambda: source.memory.bytes == 0)
            with pytest.raises(BatchError, match="log says why"):
                await remote.get_frames(FrameAddress(PLAN, 0, 99), 3)
            await until(lambda: source.memory.bytes == 0)
            source.gate = asyncio.Event()
            asking = asyncio.create_task(remote.get_frames(first, 3))
            await until(lambda: len(source.asked) >= 3 and source.asked[-1] == FrameAddress("p", 1, 97))
            asking.cancel()
            await until(lambda: source.cancelled == 3)
        assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(run())


def limit_copies(patched: pytest.MonkeyPatch, left: int) -> None:
    """From then on only so many descriptors of frames can be copied."""
    copy, counted = os.dup, itertools.count()

    def dup(fd: int) -> int:
        if "memfd" in os.readlink(f"/proc/self/fd/{fd}") and next(counted) >= left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return copy(fd)

    patched.setattr(os, "dup", dup)


def test_an_answer_without_a_descriptor_for_each_of_its_frames_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with door(tmp_path / "s.sock") as (source, remote):
            (await remote.get_frame(FrameAddress(PLAN, 0, 0))).close()
            await until(lambda: source.memory.bytes == 0)
            source.in_block, before = True, len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patched:
                limit_copies(patched, 4)  # three of them for the answer
                with pytest.raises(OSError, match="Too many open files"):
                    await remote.get_frames(FrameAddress(PLAN, 0, 0), 3)
            await until(lambda: source.memory.bytes == 0)
            assert len(os.listdir("/proc/self/fd")) == before
            frames = await remote.get_frames(FrameAddress(PLAN, 0, 0), 3)
            assert len({frame.offset for frame in frames}) == 3
            for frame in frames:
                frame.close()
            await until(lambda: source.memory.bytes == 0)

    asyncio.run(run())


def test_all_frames_are_handed_out_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, made = len(os.listdir("/proc/self/fd")), make_block([64] * 3, MemoryAccount())
    limit_copies(monkeypatch, 2)
    with pytest.raises(OSError, match="Too many open files"):
        hand_out_all(made, "miss")
    assert len(os.listdir("/proc/self/fd")) == before + 1  # that of the block


def test_frames_that_are_made_when_the_caller_gives_up_are_closed() -> None:
    async def run() -> None:
        source = Source()
        gate = asyncio.Event()

        async def late() -> Frame:
            await gate.wait()
            return await source.get_frame(FrameAddress(PLAN, 0, 1))

        asking = asyncio.create_task(leading_frames([source.get_frame(FrameAddress(PLAN, 0, 0)), late()]))
        await until(lambda: source.memory.bytes == 64)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: source.memory.bytes == 0)

    asyncio.run(run())
