"""kill −9 under a write load, at failpoints and at random times: what was acknowledged is there, whole."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshd.store.disks.layout import Disks
from meshd.store.index.index import Index
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.crash.store_load import TOGETHER, expected, store_settings
from tests.crash.version_load import BUCKET, history, versions
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.config import StoreSettings

ROOT = Path(__file__).parents[2]
FAILPOINTS = [
    "store.data.before_write",
    "store.data.after_write",
    "store.data.before_sync",
    "store.data.after_sync",
    "store.index.before_commit",
    "store.index.after_commit",
    "store.own.before_write",
    "store.own.before_sync",
    "store.own.before_rename",
    "store.own.after_rename",
    "store.own.after_close",
    "store.complete.placed",
    "store.complete.applied",
    "store.delete.placed",
    "store.marker.placed",
    "store.amend.placed",
    "store.compact.placed",
    "store.compact.retired",
]
KILLED = -9


class Crashes:
    """A store that is killed again and again; remembers what it may hold."""

    def __init__(self, place: Path, starter: subprocess.Popen[bytes]) -> None:
        self.settings = store_settings(place / "data")
        self.log = place / "log"
        self._starter, self._place = starter, place
        self._seeds = itertools.count(1)
        self.allowed: dict[str, set[str | None]] = {}
        self.histories: dict[str, set[str]] = {}
        Store.recover(self.settings)

    def crash(self, *, failpoints: str = "", kill_after: float = 30.0, operations: int = 5000) -> int:
        command = {
            "place": str(self._place / "data"),
            "log": str(self.log),
            "writer": "w0",
            "seed": next(self._seeds),
            "failpoints": failpoints,
            "kill_after": kill_after,
            "operations": operations,
        }
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        self._starter.stdin.write(json.dumps(command).encode() + b"\n")
        self._starter.stdin.flush()
        code = int(self._starter.stdout.readline())
        self._learn()
        return code

    def _learn(self) -> None:
        """After a crash a key holds what was acknowledged last, or what was on its way."""
        if not self.log.exists():
            return
        for line in self.log.read_bytes().splitlines():
            event, key, version = json.loads(line)
            if key.startswith("v"):
                known = self.histories.setdefault(key, {"[]"})
                self.histories[key] = {version} if event == "done" else known | {version}
            elif event == "begin":
                self.allowed.setdefault(key, {None}).add(version)
            else:
                self.allowed[key] = {version}
        self.log.unlink()

    def verify(self) -> None:
        """Recovers, then compares every object and lets fsck look at everything."""
        Store.recover(self.settings)
        report = check_store(self.settings)
        assert report.clean, report.problems
        assert report.leftovers == []
        with closing(Store.open(self.settings, writer="w0", clock=SystemClock())) as store:
            found = dict(store.list("b").entries)
            assert set(found) <= set(self.allowed)
            for key, allowed in self.allowed.items():
                record = found.get(key)
                version = record.etag if record else None
                assert version in allowed, (key, version, allowed)
                self.allowed[key] = {version}
                if record is not None and version is not None:
                    assert store.read_range(record, 0, record.size) == expected(version)
            whole: dict[str, set[str]] = {}
            for key, record in found.items():
                if key.startswith("g"):
                    whole.setdefault(key[:-1], set()).add(record.etag)
            assert all(len(etags) == 1 for etags in whole.values()), whole
            assert sum(key.startswith("g") for key in found) == len(whole) * len(TOGETHER)
            self._verify_versions(store)

    def _verify_versions(self, store: Store) -> None:
        assert {key for key, _ in store.list_versions(BUCKET).entries} <= set(self.histories)
        for key, allowed in self.histories.items():
            found = versions(store, key)
            assert history(found) in allowed, (key, history(found), allowed)
            self.histories[key] = {history(found)}
            newest = found[0] if found and not found[0].marker else None
            assert store.get(BUCKET, key) == newest
            for record in found:
                if not record.marker:
                    assert store.read_range(record, 0, record.size) == expected(record.etag)

    def contents(self) -> set[str]:
        """The index as facts that can be compared one by one."""
        with closing(Index.open(self.settings)) as index, index.read_transaction() as txn:
            facts: list[Any] = [
                (file, info.live, info.refs) for file, info in index.files.all_files(txn) if info.refs
            ]
            facts += [*index.all_records(txn), *index.uploads.all_uploads(txn), *index.uploads.all_parts(txn)]
            return {repr(fact) for fact in facts}


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.store_load"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield process
    process.communicate(timeout=WAIT_TIMEOUT)
    assert process.returncode == 0


@pytest.mark.parametrize("name", FAILPOINTS)
def test_killed_at_a_failpoint(name: str, tmp_path: Path, starter: subprocess.Popen[bytes]) -> None:
    crashes = Crashes(tmp_path, starter)
    for skip in (0, 5, 23):
        assert crashes.crash(failpoints=f"{name}=kill:after {skip}") == KILLED
        crashes.verify()
    before = crashes.contents()
    assert rebuild_index(crashes.settings).problems == []
    assert crashes.contents() ^ before == set()
    crashes.verify()


def test_killed_at_random_times(tmp_path: Path, starter: subprocess.Popen[bytes]) -> None:
    crashes, chance = Crashes(tmp_path, starter), random.Random(7)
    for _ in range(24):
        assert crashes.crash(kill_after=chance.uniform(0.02, 0.25)) == KILLED
        if chance.random() < 0.5:
            scribble(crashes.settings)
        crashes.verify()
    before = crashes.contents()
    rebuild_index(crashes.settings)
    assert crashes.contents() ^ before == set()


def scribble(settings: StoreSettings) -> None:
    """What a power cut may leave behind the committed end of an open segment."""
    with closing(Index.open(settings)) as index, index.read_transaction() as txn:
        disks = Disks({0: settings.disks[0]})
        ends = [
            (disks.path(0, f), info.end) for f, info in index.files.all_files(txn) if info.state == "open"
        ]
    for path, end in ends:
        with open(path, "r+b") as file:
            file.seek(end)
            file.write(os.urandom(3000))


def test_the_index_comes_back_when_it_is_lost_in_a_crash(
    tmp_path: Path, starter: subprocess.Popen[bytes]
) -> None:
    """A store without its index still gives back all that was acknowledged."""
    crashes = Crashes(tmp_path, starter)
    for _ in range(3):
        assert crashes.crash(kill_after=0.2) == KILLED
        (crashes.settings.index_dir / "data.mdb").unlink()
        rebuild_index(crashes.settings)
        crashes.verify()
