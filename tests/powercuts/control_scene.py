"""A control store on an etcd with one member whose syncs take long, and which loses power.

What a node has acknowledged is there afterwards, and so is what the copy of another node has shown: an object
may have been written to a bucket that it saw there.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import defaultdict
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from meshd.control.control_api import ControlError
from meshd.control.etcd import EtcdControl
from meshd.process.local_etcd import EtcdCluster
from tests.powercuts.history import Attempt, History
from tests.powercuts.mesh_scene import ManyNodesScene
from tests.powercuts.scene import FILE_SYSTEM
from tests.support.fuse_mount import mounted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from pathlib import Path

    from meshd.control.control_api import ControlStore

_TOPIC: Final = "topic/"
_WRITERS: Final = 3
_SYNC_SECONDS: Final = 0.1
_LEASE_SECONDS: Final = 600.0
_IDLE_CHANCE: Final = 0.7
_IDLE_SECONDS: Final = 0.5
"""An etcd that has had nothing to do answers a change most early."""
_DEADLINE: Final = 2.0
"""Seconds after which a call to an etcd that has lost power ends."""


class ControlScene(ManyNodesScene):
    """An etcd through any number of cuts, with writers of keys and of leases, and somebody who watches."""

    def __init__(self, place: Path, seed: int, *, options: Sequence[str] = ()) -> None:
        super().__init__(place, seed, [], relaxed=False)
        self._options = ("--journal", "--delay", str(_SYNC_SECONDS), *options)
        self._source, self._mount, self._off = place / "source", place / "mount", place / "off"
        for each in (self._source, self._mount):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)
        self._etcd = EtcdCluster(self._mount, 1)
        self._histories: defaultdict[str, History] = defaultdict(History)
        self._lives, self._busy = 0, False

    def close(self) -> None:
        self._etcd.__exit__()

    def cut(self, seconds: float) -> None:
        self._off.unlink(missing_ok=True)
        seed = str(self._chance.randrange(1 << 31))
        options = ("--seed", seed, "--off", str(self._off), *self._options)
        with mounted(self._source, self._mount, *options, module=FILE_SYSTEM):
            try:
                with self._etcd:
                    asyncio.run(self._live(seconds))
            except ControlError as error:
                self.report.add(str(error))
            self._logs["etcd"] = (self._mount / "m0.log").read_text(errors="replace")
        self.report.cuts += 1

    def finish(self) -> None:
        self.cut(0.0)

    async def _live(self, seconds: float) -> None:
        with (
            closing(EtcdControl(self._etcd.gateway(deadline=_DEADLINE))) as control,
            closing(EtcdControl(self._etcd.gateway(deadline=_DEADLINE))) as other,
        ):
            self._lives, self._busy = self._lives + 1, True
            await self._compare_control(control)
            if not seconds:
                return
            tasks = [
                asyncio.ensure_future(self._write_keys(control, number, random.Random(self._chance.random())))
                for number in range(_WRITERS)
            ]
            tasks += [asyncio.ensure_future(self._acquire(control)), asyncio.ensure_future(self._look(other))]
            await asyncio.sleep(seconds * self._chance.uniform(0.5, 1.0))
            if self._chance.random() < _IDLE_CHANCE:
                self._busy = False
                await asyncio.wait(tasks[:-1])
                await asyncio.sleep(_IDLE_SECONDS)
                await self._change(
                    f"{_TOPIC}last", self._lives, control.put(f"{_TOPIC}last", str(self._lives).encode())
                )
            self._power_off()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _power_off(self) -> None:
        """From here on no sync succeeds, not even one that is under way."""
        self._off.touch()
        self._cut_at = time.monotonic()
        self._etcd.__exit__()

    async def _write_keys(self, control: ControlStore, number: int, chance: random.Random) -> None:
        """One name by one writer, each value higher than the last."""
        name, value = f"{_TOPIC}{number}", self._lives * 100_000
        while self._busy:
            value += 1
            if chance.random() < 0.2:
                await self._change(name, None, control.delete(name))
            else:
                await self._change(name, value, control.put(name, str(value).encode()))

    async def _acquire(self, control: ControlStore) -> None:
        """Leases, each once."""
        number = 0
        while self._busy:
            number += 1
            name = f"{self._lives}-{number}"
            await self._change(name, "me", control.acquire_lease(name, "me", _LEASE_SECONDS))

    async def _change(self, name: str, value: int | str | None, changing: Awaitable[object]) -> None:
        attempt = Attempt(value, time.monotonic())
        self._histories[name].attempts.append(attempt)
        with suppress(ControlError):  # in doubt
            await changing
            self._acknowledge(attempt)

    def _acknowledge(self, attempt: Attempt) -> None:
        now = time.monotonic()
        if not attempt.acknowledged and not self._cut_at > attempt.begun:
            attempt.acknowledged = now
            self.report.acknowledged += 1

    async def _look(self, other: ControlStore) -> None:
        """What another node shows counts as acknowledged."""
        while True:
            for name, entry in other.cached_entries(_TOPIC[:-1]).items():
                for attempt in self._histories[name].attempts:
                    if str(attempt.value).encode() == entry.value:
                        self._acknowledge(attempt)
            await asyncio.sleep(0.001)

    async def _compare_control(self, control: ControlStore) -> None:
        entries, leases = await control.list_all(_TOPIC), await control.lease_holders("")
        for name, history in sorted(self._histories.items()):
            entry = entries.get(name)
            found: int | str | None = None if entry is None else int(entry.value)
            if not name.startswith(_TOPIC):
                found = leases.get(name)
            if found not in history.allowed(self._cut_at):
                told = "; ".join(each.told(self._cut_at) for each in history.attempts[-3:])
                self.report.add(f"{name}: found {found}, after {told}")
            history.settle(found)
