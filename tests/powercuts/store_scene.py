"""A store without a daemon through power cuts: versions, delete markers, uploads in parts, conditions, copies
and compaction; recovery, fsck and rebuilds that are cut themselves.

Without a daemon a cut takes a second, so there can be many.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshd.store.errors import FormatError, StoreError
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.crash.store_load import expected
from tests.crash.version_load import BUCKET, history, versions
from tests.powercuts.history import Attempt, History, Report, as_after_a_boot, copied, oldest_kept
from tests.powercuts.power_cut import Record
from tests.powercuts.readiness import is_late, waited
from tests.powercuts.store_child import store_settings
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.fuse_mount import mounted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.config import StoreSettings

_ROOT: Final = Path(__file__).parents[2]
_KILLED: Final = -9


class StoreScene:
    """One directory through any number of cuts. `options` are of the file system; `failing_syncs`: in each
    life one sync fails."""

    def __init__(
        self,
        place: Path,
        seed: int,
        worker: Worker,
        *,
        relaxed: bool = False,
        options: Sequence[str] = (),
        failing_syncs: bool = False,
    ) -> None:
        self.source, self.mount, self._log = place / "source", place / "mount", place / "log"
        self.report, self._worker, self.record = Report(), worker, Record(place / "cuts")
        self._before: list[dict[str, History]] = []
        self._at = self.mount
        self._chance, self._relaxed, self._options = random.Random(seed), relaxed, options
        self._failing_syncs = failing_syncs
        self._objects: dict[str, History] = {}
        self._versions: dict[str, History] = {}
        self._cut_at = 0.0
        self._rebuilding = False
        self.acts: dict[str, int] = {}
        """How often each act was cut."""
        for each in (self.source, self.mount):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)

    @property
    def _settings(self) -> StoreSettings:
        return store_settings(self._at / "data", relaxed=self._relaxed)

    def cut(self, seconds: float) -> None:
        """Start, compare what is there, work for a part of so long, and cut the power."""
        options = ["--seed", str(self._chance.randrange(1 << 31)), *self._options, *self.record.options()]
        if self._failing_syncs and seconds:
            options += ["--fail-sync", str(self._chance.randrange(1, 200))]
        with mounted(self.source, self.mount, *options, module="tests.powercuts.forgetful_file_system"):
            act = self._chance.choice(("write", "write", "write", "recover", "fsck", "rebuild"))
            if act == "recover" and seconds:
                self._work(act, seconds / 4)
            else:
                self._start_and_compare()
                if seconds and not self.report.wrong:
                    self._work(act, seconds if act == "write" else seconds / 4)
        self.report.cuts += 1
        as_after_a_boot(self.source)

    def finish(self) -> None:
        """Start once more and compare."""
        self._options, self._failing_syncs = (), False
        self.cut(0.0)

    def fails(self, image: Path) -> bool:
        """Whether something is wrong with this directory, which the last cut may have left."""
        as_after_a_boot(image)
        self._objects, self._versions = copied(self._before)
        self.report, self._at, self._failing_syncs = Report(), image, False
        try:
            self._start_and_compare()
        except (StoreError, OSError) as error:
            self.report.add(str(error))
        return bool(self.report.wrong)

    def _work(self, act: str, seconds: float) -> None:
        command = {
            "act": act,
            "place": str(self.mount / "data"),
            "log": str(self._log),
            "relaxed": self._relaxed,
            "seed": self._chance.randrange(1 << 20),
            "kill_after": self._chance.uniform(0.0, seconds) if act != "write" else seconds,
        }
        code, ended = self._worker.run(command)
        self.acts[act] = self.acts.get(act, 0) + (code == _KILLED)
        if act == "write":
            self._cut_at = ended
            self._learn()
        self._rebuilding = act == "rebuild"

    def _learn(self) -> None:
        if not self._log.exists():
            return
        for line in self._log.read_bytes().splitlines():
            event, key, value, when = json.loads(line)
            table = self._versions if key.startswith("v") else self._objects
            attempts = table.setdefault(key, History()).attempts
            if event == "begin":
                attempts.append(Attempt(value, when))
            else:
                attempts[-1].acknowledged = when
                self.report.acknowledged += 1
        self._log.unlink()

    # --- what is found

    def _start_and_compare(self) -> None:
        began, waiting = time.monotonic(), waited(os.getpid())
        self._before = copied((self._objects, self._versions))
        try:
            self._recover()
        except FormatError as error:
            if not self._rebuilding:
                self.report.add(f"it does not start: {error}")
                return
            self.report.add(f"it does not start after a rebuild that was cut: {error}")
            rebuild_index(self._settings)
            Store.recover(self._settings)
        took = time.monotonic() - began - (waited(os.getpid()) - waiting)
        self.report.slowest = max(self.report.slowest, took)
        if is_late(took, 0):
            self.report.add(f"ready after {took:.1f} s")
        report = check_store(self._settings)
        for problem in report.problems:
            self.report.add(f"fsck: {problem}")
        with closing(self._opened()) as store:
            since = oldest_kept(self._cut_at, relaxed=self._relaxed)
            self._compare_objects(store, since)
            self._compare_versions(store, since)

    def _opened(self) -> Store:
        """The store; once more after a start where a sync may fail that opening it asks for."""
        try:
            return Store.open(self._settings, writer="w0", clock=SystemClock())
        except StoreError:
            if not self._failing_syncs:
                raise
        gc.collect()  # nothing of the first one stays open
        Store.recover(self._settings)
        return Store.open(self._settings, writer="w0", clock=SystemClock())

    def _recover(self) -> None:
        """Start; once more where a sync may fail that the start asks for."""
        try:
            Store.recover(self._settings)
        except (OSError, StoreError) as error:
            said = f"{error} {error.__cause__}"
            if not self._failing_syncs or ("sync" not in said and "Input/output error" not in said):
                raise
            Store.recover(self._settings)

    def _compare_objects(self, store: Store, since: float) -> None:
        found = dict(store.list("b").entries)
        for key in set(found) - set(self._objects):
            self.report.add(f"{key}: nobody has written it")
        for key, past in self._objects.items():
            record = found.get(key)
            etag = record.etag if record else None
            self._judge(key, past, etag, since)
            if record is not None:
                self._compare_bytes(store, key, record)

    def _compare_versions(self, store: Store, since: float) -> None:
        for key, past in self._versions.items():
            records = versions(store, key)
            text = history(records)
            self._judge(key, past, None if text == "[]" else text, since)
            newest = records[0] if records and not records[0].marker else None
            if store.get(BUCKET, key) != newest:
                self.report.add(f"{key}: its newest version is not its current one")
            for record in records:
                if not record.marker:
                    self._compare_bytes(store, key, record)

    def _judge(self, key: str, past: History, found: str | None, since: float) -> None:
        allowed = {None if value == "[]" else value for value in past.allowed(since)}
        if found not in allowed:
            last = past.attempts[-1]
            age = f"{self._cut_at - last.acknowledged:.2f} s before" if last.acknowledged else "never"
            self.report.add(f"{key}: found {found}, the last was {last.value}, acknowledged {age}")
        past.settle(found)

    def _compare_bytes(self, store: Store, key: str, record: Any) -> None:
        try:
            sound = store.read_range(record, 0, record.size) == expected(record.etag)
        except StoreError as error:
            self.report.add(f"{key}: {error}")
        else:
            if not sound:
                self.report.add(f"{key}: other bytes than those of {record.etag}")


class Worker:
    """A process that forks for each command, so that it has imported everything. Use it as a context
    manager."""

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.powercuts.store_child"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=WAIT_TIMEOUT)

    def run(self, command: dict[str, Any]) -> tuple[int, float]:
        """Have a command of `store_child` carried out; return its exit code, and when it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        code, ended = json.loads(self._process.stdout.readline())
        return int(code), float(ended)
