"""A process that works on a store until it is killed: writers with compaction, recovery, fsck or a rebuild.

Run as a program it reads one JSON command a line, forks a child that does the work, and answers with its exit
code and the time when it ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from meshd.config import StoreSettings
from meshd.store.engine import compaction
from meshd.store.errors import StoreError
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util import shared_counters
from meshd.util.clock import SystemClock
from tests.crash.store_load import SMALL, TASKS, VERSION_TASKS, Load, content
from tests.crash.version_load import VersionLoad
from tests.powercuts.history import SYNC_SECONDS
from tests.support.bounded_wait import await_end

LOST: Final = 3
"""Exit code of writers whose store has to start again because a sync of a checkpoint failed."""


def store_settings(place: Path, *, relaxed: bool) -> StoreSettings:
    """A store whose segments are so short that there is always something to compact."""
    return StoreSettings.at(
        place,
        durability="relaxed" if relaxed else "commit",
        sync_seconds=SYNC_SECONDS,
        small_object_bytes=SMALL,
        segment_bytes=100_000,
        index_map_bytes=1 << 28,
    )


class TimedLoad(Load):
    """Writers that note when, and go on after an error."""

    def note(self, *words: Any) -> None:
        super().note(*words, time.monotonic())

    async def task(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        acts = [self.put, self.put, self.put_if_same, self.delete, self.upload, self.copy]
        for step in range(self.operations):
            key, version = f"t{number}/k{chance.randrange(3)}", f"{self.seed}.{number}.{step}"
            try:
                await chance.choice(acts)(key, version)
            except StoreError:
                await asyncio.sleep(0.002)

    async def versions(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + 500 + number)
        load = VersionLoad(self.store, self.note, content)
        for step in range(self.operations):
            try:
                await load.act(chance, f"v{number}/k{chance.randrange(3)}", f"{self.seed}.v{number}.{step}")
            except StoreError:
                await asyncio.sleep(0.002)

    async def compact(self) -> None:
        compactor, synced = self.store.compactor, self.store.checkpointer
        while True:
            for file in compactor.candidates(0.3):
                try:
                    await compactor.compact(file)
                    await compactor.purge(synced.synced_before)
                except StoreError:
                    continue
            await asyncio.sleep(0.005)


def write(settings: StoreSettings, command: dict[str, Any]) -> None:
    """Writers, compaction, and with `relaxed` checkpoints as a node takes them."""
    compaction.GRACE = 0.0  # one process: nobody else holds a path
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = Store.open(settings, writer="w0", clock=SystemClock())
    if store.checkpointer.needed:
        threading.Thread(target=_take_checkpoints, args=(store,), daemon=True).start()
    asyncio.run(TimedLoad(store, log, command["seed"], 100_000).run())


def _take_checkpoints(store: Store) -> None:
    while True:
        try:
            store.checkpointer.take()
        except OSError:
            os._exit(LOST)
        shared_counters.record_checkpoint(0, store.checkpointer.synced_before)
        threading.Event().wait(SYNC_SECONDS / 2)


def work(command: dict[str, Any]) -> None:
    settings = store_settings(Path(command["place"]), relaxed=command["relaxed"])
    match command["act"]:
        case "write":
            write(settings, command)
        case "recover":
            Store.recover(settings)
        case "fsck":
            check_store(settings)
        case "rebuild":
            rebuild_index(settings)


def fork_and_wait(command: dict[str, Any]) -> tuple[int, float]:
    assert TASKS
    assert VERSION_TASKS
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(command)
            code = 0
        finally:
            os._exit(code)
    timer = threading.Timer(command["kill_after"], os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    ended = time.monotonic()
    timer.cancel()
    await_end(timer)
    return os.waitstatus_to_exitcode(status), ended


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(fork_and_wait(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
