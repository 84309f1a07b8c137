"""A daemon under writers, the power cut, and what is found after it."""

from __future__ import annotations

import random
import shutil
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

from botocore.exceptions import BotoCoreError, ClientError

from tests.powercuts.history import (
    SYNC_SECONDS,
    Report,
    as_after_a_boot,
    copied,
    oldest_kept,
)
from tests.powercuts.power_cut import Record, recorded, replay
from tests.powercuts.readiness import is_late, start_seconds
from tests.powercuts.traffic import DAMAGED, Objects, ask
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fuse_mount import mounted

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from tests.powercuts.history import History
    from tests.powercuts.traffic import Traffic

_TRIES: Final = 3
FILE_SYSTEM: Final = "tests.powercuts.forgetful_file_system"


class Scene:
    """One directory through any number of cuts. `traffic`: what is written; `options` are of the file
    system, `args` more flags of the daemon. `damages`: the disk damages data, so reads may be refused;
    `failing_syncs`: one sync of each life fails."""

    def __init__(
        self,
        place: Path,
        seed: int,
        *,
        traffic: Sequence[Traffic] = (),
        relaxed: bool = False,
        options: Sequence[str] = (),
        args: Sequence[str] = (),
        clients: int = 4,
        damages: bool = False,
        failing_syncs: bool = False,
    ) -> None:
        self._damages, self._failing_syncs, self._args = damages, failing_syncs, args
        self.source, self.mount = place / "source", place / "mount"
        self.report, self.record = Report(), Record(place / "cuts")
        self._before: list[dict[str, History]] = []
        self._traffic = traffic or [Objects()]
        self._chance, self._relaxed, self._options, self._clients = (
            random.Random(seed),
            relaxed,
            options,
            clients,
        )
        self._cut_at, self._off = 0.0, place / "off"
        self._env = {"MESHD_SEGMENT_SIZE": "1MiB"}
        for each in (self.source, self.mount):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)

    def cut(self, seconds: float) -> None:
        """Start, compare what is there, write for so long, and cut the power."""
        options = ["--seed", str(self._chance.randrange(1 << 31)), *self._options]
        options += [*self.record.options(), "--off", str(self._off)]
        self._off.unlink(missing_ok=True)
        if self._failing_syncs and seconds:
            options += ["--fail-sync", str(self._chance.randrange(1, 200))]
        with mounted(self.source, self.mount, *options, module=FILE_SYSTEM) as disk:
            self._live(self._daemon(self.mount), seconds, disk)
        self.report.cuts += 1
        self.report.acknowledged = sum(traffic.acknowledged for traffic in self._traffic)
        self.report.interrupted = sum(traffic.interrupted for traffic in self._traffic)
        as_after_a_boot(self.source)

    def _live(self, daemon: Daemon, seconds: float, disk: int = 0) -> None:
        began = time.monotonic()
        with ExitStack() as ending:
            ending.callback(_end, daemon)
            try:
                self._up(daemon)
            except DaemonFailedError:
                self.report.add(_last_line(daemon.output()))
                return
            wall = time.monotonic() - began
            with closing(daemon.client()) as client:
                if disk and self._cut_at and not self._failing_syncs:
                    self._judge_start(daemon, start_seconds(wall, [disk], [daemon]))
                self._before = copied(traffic.histories for traffic in self._traffic)
                try:
                    self._compare(daemon, client)
                except ClientError as error:  # a bucket that is gone, say
                    self.report.add(str(error))
                if self.report.wrong:
                    return
                for traffic in self._traffic:
                    traffic.prepare(daemon, client)
            self._write(daemon, seconds)

    def _judge_start(self, daemon: Daemon, took: float) -> None:
        """A start that is late is tried again on the same bytes: the machine has other work, too."""
        objects = ask(daemon, "GET", "/-/residence/")["objects"]
        for _ in range(_TRIES):
            if not is_late(took, objects):
                break
            took = min(took, self._start_again())
        self.report.slowest = max(self.report.slowest, took)
        if is_late(took, objects):
            self.report.add(f"ready after {took:.1f} s")

    def _start_again(self) -> float:
        """Seconds that a start takes after the last cut, made again beside this one."""
        image = self.source.parent / "again"
        replay(self.record.last, recorded(self.record.last), image)
        as_after_a_boot(image / "source")
        daemon, began = self._daemon(image / "source"), time.monotonic()
        with ExitStack() as ending:
            ending.callback(_end, daemon)
            daemon.up()
            return start_seconds(time.monotonic() - began, [], [daemon])

    def fails(self, image: Path) -> bool:
        """Whether something is wrong with this directory, which the last cut may have left."""
        as_after_a_boot(image)
        for traffic, before in zip(self._traffic, copied(self._before), strict=True):
            traffic.histories = before
        self.report = Report()
        self._live(self._daemon(image), 0.0)
        return bool(self.report.wrong)

    def finish(self) -> None:
        """Start once more and compare."""
        self._options, self._failing_syncs = (), False
        self.cut(0.0)

    def _daemon(self, place: Path) -> Daemon:
        args = ["--durability", "relaxed", "--sync-interval", str(SYNC_SECONDS)] if self._relaxed else []
        daemon = Daemon(place / "data", [*args, *self._args], self._env, 1)
        self._env |= {name: daemon.env[name] for name in ("MESHD_ROOT_ACCESS_KEY", "MESHD_ROOT_SECRET_KEY")}
        return daemon

    def _up(self, daemon: Daemon) -> None:
        """Start; once more where a sync may fail that the start asks for."""
        try:
            daemon.up()
        except DaemonFailedError:
            if not self._failing_syncs:
                raise
            daemon.up()

    # --- writers

    def _write(self, daemon: Daemon, seconds: float) -> None:
        if not seconds:
            return
        ended = threading.Event()
        writers = [
            threading.Thread(
                target=self._writer, args=(daemon, number, self._chance.randrange(1 << 31), ended)
            )
            for number in range(self._clients)
        ]
        for writer in writers:
            writer.start()
        time.sleep(seconds)
        self._cut_at = time.monotonic()
        self._off.touch()
        daemon.pause()
        for traffic in self._traffic:
            traffic.cut_off()
        daemon.kill()
        ended.set()
        for writer in writers:
            writer.join(120)

    def _writer(self, daemon: Daemon, number: int, seed: int, ended: threading.Event) -> None:
        chance = random.Random(seed)
        with closing(daemon.client()) as client:
            while not ended.is_set():
                try:
                    chance.choice(self._traffic).change(daemon, client, number, chance)
                except (ClientError, BotoCoreError, OSError):
                    if not ended.is_set():
                        time.sleep(0.01)

    # --- what is found

    def _compare(self, daemon: Daemon, client: object) -> None:
        since = oldest_kept(self._cut_at, relaxed=self._relaxed)
        for traffic in self._traffic:
            found = self._find(traffic, daemon, client)
            for name, value in found.items():
                history = traffic.histories[name]
                if self._damages and DAMAGED in str(value):
                    self.report.damaged += 1
                    continue
                if not traffic.allows(name, value, since):
                    last = history.attempts[-1]
                    age = f"{self._cut_at - last.acknowledged:.2f} s before" if last.acknowledged else "never"
                    self.report.add(
                        f"{name}: found {value}, the last of {len(history.attempts)} was {last.value}, "
                        f"acknowledged {age}"
                    )
                history.settle(value)
            if self._cut_at:
                for problem in traffic.disagreements(daemon, client, found):
                    self.report.add(problem)

    def _find(self, traffic: Traffic, daemon: Daemon, client: object) -> dict[str, Hashable]:
        """What is there; asked again after a start where the daemon may have ended for a sync that failed."""
        names = sorted(traffic.histories)
        if self._failing_syncs:
            try:
                found = {name: traffic.find(daemon, client, name) for name in names}
            except (ClientError, BotoCoreError, OSError):
                found = dict.fromkeys(names, DAMAGED)
            if not any(DAMAGED in str(value) for value in found.values()):
                return found
            daemon.kill()
            daemon.up()
        return {name: traffic.find(daemon, client, name) for name in names}


def _last_line(output: str) -> str:
    return output.rstrip().rpartition("\n")[2]


def _end(daemon: Daemon) -> None:
    daemon.kill()
    daemon.close()
