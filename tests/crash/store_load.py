"""A process that writes to a store until it is killed, and a parent that starts many of them quickly.

Run as a program it reads one JSON command a line, forks a child that does the work, and answers with how it
ended. Each child notes what it begins and what was acknowledged in a log that outlives it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from awscrt import checksums

from meshd.config import StoreSettings
from meshd.store.errors import ConditionFailedError
from meshd.store.records import Meta, NewObject, Upload
from meshd.store.store import Store
from meshd.util import failpoints
from meshd.util.clock import SystemClock
from meshwire.http_values.conditional_requests import Conditions
from tests.crash.version_load import BUCKET, VersionLoad
from tests.support.bounded_wait import await_end

SMALL = 8 << 10
TASKS = 8
TOGETHER = ("x", "y", "z")
"""Ends of the names that are always written together."""
VERSION_TASKS = 4


def store_settings(place: Path) -> StoreSettings:
    return StoreSettings.at(place, small_object_bytes=SMALL, segment_bytes=100_000, index_map_bytes=1 << 28)


def content(version: str) -> bytes:
    """The bytes of a version: small, large or empty, told by the version alone."""
    chance = random.Random(version)
    size = chance.choice([0, 10, 1000, SMALL, SMALL + 1, 30_000, 60_000])
    return chance.randbytes(size)


class Load:
    """Tasks that each own some keys and change them one after the other."""

    def __init__(self, store: Store, log: int, seed: int, operations: int) -> None:
        self.store, self.log, self.seed, self.operations = store, log, seed, operations

    def note(self, *words: Any) -> None:
        os.write(self.log, json.dumps(words).encode() + b"\n")

    async def run(self) -> None:
        compacting = asyncio.create_task(self.compact())
        await asyncio.gather(
            *[self.task(number) for number in range(TASKS)],
            *[self.versions(number) for number in range(VERSION_TASKS)],
        )
        compacting.cancel()

    async def compact(self) -> None:
        while True:
            for file in self.store.compactor.candidates(0.3):
                await self.store.compactor.compact(file)
            await asyncio.sleep(0.005)
            for bucket in ("b", BUCKET):
                placed = self.store.rewriter.page(bucket, "", "", 1000)
                await self.store.rewriter.move(bucket, [each for each in placed if not each.fixed][:10])

    async def task(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        for step in range(self.operations):
            key, version = f"t{number}/k{chance.randrange(3)}", f"{self.seed}.{number}.{step}"
            act = chance.choice(
                [self.put, self.put, self.put_if_same, self.delete, self.upload, self.copy, self.put_together]
            )
            await act(key, version)

    async def versions(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + 500 + number)
        load = VersionLoad(self.store, self.note, content)
        for step in range(self.operations):
            key = f"v{number}/k{chance.randrange(3)}"
            await load.act(chance, key, f"{self.seed}.v{number}.{step}")

    async def put(self, key: str, version: str, conditions: Conditions | None = None) -> None:
        data = content(version)
        self.note("begin", key, version)
        writer = self.store.writer("b", key, size=len(data))
        await writer.write(data)
        await writer.commit(Meta(version), conditions=conditions)
        self.note("done", key, version)

    async def put_together(self, key: str, version: str) -> None:
        """Three names of which no other call knows; see `together`."""
        keys, data = [f"g{key}/{part}" for part in TOGETHER], content(version)
        for each in keys:
            self.note("begin", each, version)
        crc = checksums.crc32c(data)
        await self.store.put_many("b", [NewObject(each, Meta(version), data, crc) for each in keys])
        for each in keys:
            self.note("done", each, version)

    async def put_if_same(self, key: str, version: str) -> None:
        found = self.store.get("b", key)
        wrong = Conditions(if_match=("never",)) if found else Conditions(if_match=("*",))
        right = Conditions(if_match=(found.etag,)) if found else Conditions(if_none_match=("*",))
        await self.put(key, version, right)
        try:  # a failing condition between: it must never be seen
            writer = self.store.writer("b", key, size=None)
            await writer.write(b"never")
            await writer.commit(
                Meta("never"), conditions=wrong if found else Conditions(if_none_match=("*",))
            )
        except ConditionFailedError:
            return
        raise AssertionError("a condition that does not hold was let through")

    async def delete(self, key: str, version: str) -> None:
        self.note("begin", key, None)
        await self.store.delete("b", key)
        self.note("done", key, None)

    async def upload(self, key: str, version: str) -> None:
        data = content(version) + content(f"{version}+")
        upload = await self.store.create_upload(Upload("", "b", key))
        cut = len(data) // 3
        for number, piece in enumerate((data[:cut], data[cut:]), start=1):
            writer = self.store.part_writer(upload, number, len(piece))
            await writer.write(piece)
            await writer.commit(Meta(f"part{number}"))
        self.note("begin", key, f"{version}*")
        await self.store.complete_upload(upload, [1, 2], Meta(f"{version}*"))
        self.note("done", key, f"{version}*")

    async def copy(self, key: str, version: str) -> None:
        source = self.store.get("b", key)
        if source is None:
            return
        other = f"{key}-copy"
        self.note("begin", other, source.etag)
        await self.store.link("b", other, source, Meta(source.etag))
        self.note("done", other, source.etag)


def expected(version: str) -> bytes:
    """The bytes an object with this ETag must have."""
    if version.endswith("*"):
        return content(version[:-1]) + content(f"{version[:-1]}+")
    return content(version)


def child(command: dict[str, Any]) -> None:
    failpoints.configure(command.get("failpoints", ""))
    settings = store_settings(Path(command["place"]))
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = Store.open(settings, writer=command["writer"], clock=SystemClock())
    asyncio.run(Load(store, log, command["seed"], command["operations"]).run())
    store.close()


def fork_and_wait(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child(command)
            code = 0
        finally:
            os._exit(code)
    timer = threading.Timer(command["kill_after"], os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    await_end(timer)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    for line in sys.stdin:
        print(fork_and_wait(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
