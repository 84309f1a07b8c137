"""Workers killed with -9 under mixed load: what was acknowledged is served byte for byte afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from meshd.config import load_settings
from meshd.store.tools.fsck import check_store
from tests.support.bounded_wait import await_end, await_true
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLIENTS = 4
KEYS = 6
KILLS = 8
MIB = 1 << 20


class Load:
    """One client with keys of its own. `allowed` is what each key may hold: more than one value only after a
    request that was not answered."""

    def __init__(self, daemon: Daemon, number: int, seed: int) -> None:
        self._rng = random.Random(seed * 1000 + number)
        # One attempt: a retry after a lost answer would blur what was acknowledged.
        config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, read_timeout=60)
        self._client = daemon.client(config=config)
        self.number = number
        self.allowed: dict[str, set[bytes | None]] = {}
        self.acknowledged = self.unanswered = 0
        self.wrong: list[str] = []

    def run(self, stop: threading.Event) -> None:
        steps = (self._put, self._put, self._multipart, self._copy, self._delete, self._get)
        while not stop.wait(0.02):
            key = f"{self.number}/{self._rng.randrange(KEYS)}"
            self._rng.choice(steps)(key)

    def _write(self, key: str, value: bytes | None, request: Callable[[], Any]) -> None:
        """Do it; when it is not answered the old and the new value may both be there."""
        before = self.allowed.get(key, {None})
        try:
            request()
        except (BotoCoreError, ClientError):
            self.unanswered += 1
            self.allowed[key] = before | {value}
        else:
            self.acknowledged += 1
            self.allowed[key] = {value}

    def _value(self) -> bytes:
        size = self._rng.choice((0, 100, 10_000, 300_000, 3 * MIB))
        return self._rng.randbytes(size)

    def _put(self, key: str) -> None:
        value = self._value()
        self._write(key, value, lambda: self._client.put_object(Bucket="load", Key=key, Body=value))

    def _delete(self, key: str) -> None:
        self._write(key, None, lambda: self._client.delete_object(Bucket="load", Key=key))

    def _copy(self, key: str) -> None:
        source = f"{self.number}/{self._rng.randrange(KEYS)}"
        held = self.allowed.get(source, {None})
        if source == key or len(held) != 1 or held == {None}:
            return
        (value,) = held
        copied = {"Bucket": "load", "Key": source}
        self._write(key, value, lambda: self._client.copy_object(Bucket="load", Key=key, CopySource=copied))

    def _multipart(self, key: str) -> None:
        parts = [self._rng.randbytes(5 * MIB), self._rng.randbytes(1000)]
        place = {"Bucket": "load", "Key": key}

        def upload() -> None:
            place["UploadId"] = self._client.create_multipart_upload(**place)["UploadId"]
            sent = [
                {
                    "PartNumber": at,
                    "ETag": self._client.upload_part(**place, PartNumber=at, Body=part)["ETag"],
                }
                for at, part in enumerate(parts, 1)
            ]
            self._client.complete_multipart_upload(**place, MultipartUpload={"Parts": sent})

        self._write(key, b"".join(parts), upload)

    def _get(self, key: str) -> None:
        try:
            self.look(key)
        except (BotoCoreError, ClientError):
            self.unanswered += 1

    def look(self, key: str) -> None:
        """Compare what is served with what may be there."""
        try:
            found: bytes | None = self._client.get_object(Bucket="load", Key=key)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            found = None
        if found not in self.allowed.get(key, {None}):
            self.wrong.append(f"{key}: {None if found is None else len(found)} bytes")
        else:
            self.allowed[key] = {found}  # an unanswered write is decided by the first look


def kill_one(daemon: Daemon, rng: random.Random) -> int:
    """The process id of a worker, killed. All may be on their way just now."""
    found: list[int] = []

    def there() -> list[int]:
        found[:] = [pid for name, pid in daemon.children().items() if name.startswith("worker-")]
        return found

    await_true(there)
    pid = rng.choice(found)
    with suppress(ProcessLookupError):  # it was dead and is replaced by now
        os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.timeout(480)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_workers_killed_under_mixed_load(tmp_path: Path, seed: int) -> None:
    rng, stop = random.Random(seed), threading.Event()
    with Daemon.start(tmp_path / "data", workers=2) as daemon:
        daemon.client().create_bucket(Bucket="load")
        loads = [Load(daemon, number, seed) for number in range(CLIENTS)]
        threads = [threading.Thread(target=load.run, args=(stop,)) for load in loads]
        for thread in threads:
            thread.start()
        try:
            for _ in range(KILLS):
                stop.wait(rng.uniform(0.1, 0.9))
                killed = kill_one(daemon, rng)
        finally:
            stop.set()
            for thread in threads:
                await_end(thread)
        await_true(lambda: killed not in daemon.children().values())  # what it does not answer is over
        for load in loads:
            for key in load.allowed:
                load.look(key)
        assert [wrong for load in loads for wrong in load.wrong] == []
        assert sum(load.acknowledged for load in loads) > KILLS
        assert sum(load.unanswered for load in loads) > 0  # the kills were felt
        listed = {
            entry["Key"]: entry["Size"]
            for entry in daemon.client().list_objects_v2(Bucket="load").get("Contents", [])
        }
        for load in loads:
            for key, (value,) in load.allowed.items():
                assert listed.get(key) == (None if value is None else len(value))
    report = check_store(load_settings({"data_dir": str(tmp_path / "data")}, env={}).store)
    assert report.clean, report.problems
