"""Pieces that another worker of the node fetches, over its socket: memory, errors, cancellation, loss."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.origins.cache.in_flight import InFlightPiece
from meshd.origins.client.origin_api import (
    ObjectFacts,
    OriginChangedError,
    OriginDownError,
    OriginMissingError,
)
from meshd.origins.worker_shards import FetchWorkerClient, serve_fetches
from meshd.store.records import WriteContext
from tests.support.old_garbage import clear_old_garbage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from meshd.control.buckets import Bucket

FACTS = ObjectFacts(3 << 20, "ab" * 16, 7)
BUCKET = cast("Bucket", SimpleNamespace(name="bucket"))
OTHER = cast("Bucket", SimpleNamespace(name="other"))


class Worker:
    """Hands out `flight`."""

    def __init__(self) -> None:
        self.flight = InFlightPiece()
        self.asked: list[tuple[str, int, str]] = []

    async def fetch_piece(self, bucket: Bucket, key: str, number: int, etag: str) -> InFlightPiece:
        self.asked.append((key, number, etag))
        if key == "refused":
            raise OriginChangedError("changed")
        return self.flight.acquire()

    async def check_origin(self, bucket: Bucket, key: str) -> ObjectFacts:
        return FACTS

    async def forget_object(self, bucket: Bucket, key: str) -> None:
        raise ZeroDivisionError("secret")

    async def write_back(self, bucket: Bucket, key: str) -> str:
        return f"etag of {key}"

    async def delete_at_origin(self, bucket: Bucket, key: str, context: WriteContext) -> None:
        pass

    async def is_finished(self, bucket: Bucket, key: str, version: int) -> bool:
        return version == 7


@pytest.fixture(scope="module", autouse=True)
def _no_old_garbage() -> None:
    clear_old_garbage()


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Any:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Worker]:
    worker = Worker()
    shelf = SimpleNamespace(backed_bucket=lambda name: BUCKET if name == "bucket" else None)
    serving = asyncio.create_task(serve_fetches(path, worker, cast("Any", shelf)))
    try:
        yield worker
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        worker.flight.release()


@asynccontextmanager
async def both(tmp_path: Path) -> AsyncIterator[tuple[Worker, FetchWorkerClient]]:
    client = FetchWorkerClient(tmp_path / "f.sock")
    async with served(tmp_path / "f.sock") as worker:
        try:
            yield worker, client
        finally:
            await client.aclose()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the other side's state has no event to wait for
            await asyncio.sleep(0.001)


def test_bytes_are_shared_as_they_come(tmp_path: Path) -> None:
    async def run() -> None:
        async with both(tmp_path) as (worker, client):
            fetching = asyncio.create_task(client.fetch_piece(BUCKET, "key", 3, "etag"))
            await until(lambda: worker.asked == [("key", 3, "etag")])
            assert not fetching.done()
            worker.flight.set_response(FACTS, 1 << 20)
            worker.flight.append_bytes(b"a" * 1000)
            flight = await fetching
            assert (await flight.wait_for_facts(), flight.length) == (FACTS, 1 << 20)
            assert await flight.wait_for_bytes(1000) == 1000
            worker.flight.append_bytes(b"b" * ((1 << 20) - 1000))
            await flight.wait_until_done()
            assert os.pread(flight.fd, 2 << 20, flight.base) == b"a" * 1000 + b"b" * ((1 << 20) - 1000)
            whole = await client.fetch_piece(BUCKET, "key", 3, "etag")
            assert (whole.done, whole.have) == (True, 1 << 20)
            for each in (flight, whole):
                each.release()

    asyncio.run(run())


def test_the_other_calls(tmp_path: Path) -> None:
    async def run() -> None:
        async with both(tmp_path) as (_, client):
            assert await client.check_origin(BUCKET, "key") == FACTS
            assert await client.write_back(BUCKET, "key") == "etag of key"
            await client.delete_at_origin(BUCKET, "key", WriteContext("n2", 7))
            assert await client.is_finished(BUCKET, "key", 7)
            assert not await client.is_finished(BUCKET, "key", 6)
            with pytest.raises(OriginDownError, match="log has the details"):
                await client.forget_object(BUCKET, "key")
            with pytest.raises(OriginMissingError, match="no bucket other"):
                await client.check_origin(OTHER, "key")

    asyncio.run(run())


def test_errors_come_with_the_flight(tmp_path: Path) -> None:
    async def run() -> None:
        async with both(tmp_path) as (worker, client):
            flight = await client.fetch_piece(BUCKET, "refused", 0, "")
            with pytest.raises(OriginChangedError, match="changed"):
                await flight.wait_for_facts()
            worker.flight.set_response(FACTS, 100)
            worker.flight.append_bytes(b"x")
            late = await client.fetch_piece(BUCKET, "key", 0, "")
            worker.flight.fail(OriginDownError("cut"))
            with pytest.raises(OriginDownError, match="cut"):
                await late.wait_for_bytes(100)
            for each in (flight, late):
                each.release()

    asyncio.run(run())


def test_a_caller_that_gives_up_ends_the_fetch_there(tmp_path: Path) -> None:
    async def run() -> None:
        async with both(tmp_path) as (worker, client):
            for turns in range(30):  # also while the answer is on its way
                worker.flight = InFlightPiece()
                if turns % 2:
                    worker.flight.set_response(FACTS, 3)
                    worker.flight.append_bytes(b"abc")
                fetching = asyncio.create_task(client.fetch_piece(BUCKET, "key", turns, ""))
                for _ in range(turns):
                    await asyncio.sleep(0)
                fetching.cancel()
                done = await asyncio.gather(fetching, return_exceptions=True)
                if isinstance(done[0], InFlightPiece):
                    done[0].release()
                await until(lambda: worker.flight._holders == 1)
                worker.flight.release()
            worker.flight = InFlightPiece()

    asyncio.run(run())


def test_a_worker_that_ends_fails_its_fetches(tmp_path: Path) -> None:
    async def run() -> None:
        client = FetchWorkerClient(tmp_path / "f.sock")
        async with served(tmp_path / "f.sock") as worker:
            worker.flight.set_response(FACTS, 100)
            worker.flight.append_bytes(b"x")
            flight = await client.fetch_piece(BUCKET, "key", 0, "")
        with pytest.raises(OriginDownError, match="being restarted"):
            await flight.wait_for_bytes(100)
        flight.release()
        await client.aclose()

    asyncio.run(run())
