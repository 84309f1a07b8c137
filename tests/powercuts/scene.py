"""A daemon under writers, the power cut, and what is found after it.

Law: each name has one writer, so its history is a sequence. What is found must be the last acknowledged value
or that of a request that was still running; with `durability: relaxed`, also what it was at any time within
the bound before the cut.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fuse_mount import mounted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BUCKET: Final = "power"
_NAMES: Final = 8
_PART: Final = 5 << 20
SYNC_SECONDS: Final = 1.0
SLACK: Final = 1.0
"""Seconds that a checkpoint may take on a busy machine, besides the bound."""


@dataclass
class Attempt:
    """A change of a name: a value, or None for its removal. Times of the monotonic clock; `acknowledged` is 0
    while it is not."""

    value: bytes | None
    begun: float
    acknowledged: float = 0.0


@dataclass
class History:
    """What one name went through."""

    attempts: list[Attempt] = field(default_factory=list)

    def allowed(self, since: float) -> set[bytes | None]:
        """What may be found after a cut that takes nothing back that was acknowledged before `since`."""
        settled = [at for at, each in enumerate(self.attempts) if 0 < each.acknowledged <= since]
        first = settled[-1] if settled else -1
        found: set[bytes | None] = {each.value for each in self.attempts[max(0, first) :]}
        return found if settled else found | {None}

    def settle(self, value: bytes | None) -> None:
        """Goes on from what was found."""
        self.attempts = [Attempt(value, 0.0, acknowledged=1e-9)]


@dataclass
class Report:
    """Of all cuts: acknowledged changes, and what was wrong."""

    cuts: int = 0
    acknowledged: int = 0
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = (
            f"{self.cuts} cuts, {self.acknowledged} acknowledged, {len(self.wrong)} lost or wrong, "
            f"slowest start {self.slowest:.1f} s"
        )
        return "\n".join([head, *self.wrong])


class Scene:
    """One directory through any number of cuts. `options` are of the file system."""

    def __init__(
        self, place: Path, seed: int, *, relaxed: bool = False, options: Sequence[str] = (), clients: int = 4
    ) -> None:
        self.source, self.mount = place / "source", place / "mount"
        self.report = Report()
        self._chance, self._relaxed, self._options, self._clients = (
            random.Random(seed),
            relaxed,
            options,
            clients,
        )
        self._histories: dict[str, History] = {}
        self._env: dict[str, str] = {}
        for each in (self.source, self.mount):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)

    def cut(self, seconds: float) -> None:
        """Start, compare what is there, write for so long, and cut the power."""
        options = ["--seed", str(self._chance.randrange(1 << 31)), *self._options]
        with mounted(self.source, self.mount, *options, module="tests.powercuts.forgetful_file_system"):
            daemon = self._daemon()
            began = time.monotonic()
            with ExitStack() as ending:
                ending.callback(_end, daemon)
                try:
                    daemon.up()
                except DaemonFailedError:
                    self.report.wrong.append(f"cut {self.report.cuts}: {_last_line(daemon.output())}")
                    return
                self.report.slowest = max(self.report.slowest, time.monotonic() - began)
                client = daemon.client()
                with suppress(client.exceptions.BucketAlreadyOwnedByYou):
                    client.create_bucket(Bucket=BUCKET)
                self._compare(client)
                self._write(daemon, seconds)
        self.report.cuts += 1
        self._as_after_a_boot()

    def finish(self) -> None:
        """Start once more and compare."""
        seconds, self._options = 0.0, ()
        self.cut(seconds)

    def _daemon(self) -> Daemon:
        args = ["--durability", "relaxed", "--sync-interval", str(SYNC_SECONDS)] if self._relaxed else []
        daemon = Daemon(self.mount / "data", args, self._env, 1)
        self._env = {name: daemon.env[name] for name in ("MESHD_ROOT_ACCESS_KEY", "MESHD_ROOT_SECRET_KEY")}
        return daemon

    def _as_after_a_boot(self) -> None:
        """The boot id differs after a power cut. Here it does not, so its record does."""
        for mark in self.source.glob("data/**/boot"):
            mark.write_text(mark.read_text().partition(" ")[0] + " before")

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
        daemon.pause()
        self._cut_at = time.monotonic()
        daemon.kill()
        ended.set()
        for writer in writers:
            writer.join(120)

    def _writer(self, daemon: Daemon, number: int, seed: int, ended: threading.Event) -> None:
        chance = random.Random(seed)
        with closing(daemon.client()) as client:
            while not ended.is_set():
                key = f"client{number}/{chance.randrange(_NAMES)}"
                history = self._histories.setdefault(key, History())
                value = None if chance.random() < 0.2 else chance.randbytes(chance.choice((9, 3000, 200_000)))
                attempt = Attempt(value, time.monotonic())
                history.attempts.append(attempt)
                try:
                    self._change(client, key, value, in_parts=chance.random() < 0.05)
                except (ClientError, BotoCoreError):
                    if not ended.is_set():
                        time.sleep(0.01)
                    continue
                attempt.acknowledged = time.monotonic()
                self.report.acknowledged += 1

    @staticmethod
    def _change(client: Any, key: str, value: bytes | None, *, in_parts: bool) -> None:
        if value is None:
            client.delete_object(Bucket=BUCKET, Key=key)
        elif in_parts:
            upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
            name = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
            tag = client.upload_part(**name, PartNumber=1, Body=value)["ETag"]
            parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
            client.complete_multipart_upload(**name, MultipartUpload=parts)
        else:
            client.put_object(Bucket=BUCKET, Key=key, Body=value)

    # --- what is found

    def _compare(self, client: Any) -> None:
        since = getattr(self, "_cut_at", 0.0) - (SYNC_SECONDS + SLACK if self._relaxed else 0.0)
        listed = {each["Key"]: each["Size"] for each in _listing(client)}
        for key, history in sorted(self._histories.items()):
            found = _value(client, key)
            if isinstance(found, str):
                self.report.wrong.append(f"cut {self.report.cuts}: {key}: {found}")
                found = None
            elif found not in history.allowed(since):
                last = history.attempts[-1]
                self.report.wrong.append(
                    f"cut {self.report.cuts}: {key}: found {_short(found)}, the last of "
                    f"{len(history.attempts)} was {_short(last.value)}, acknowledged {self._age(last)}"
                )
            if (listed.get(key) is None) != (found is None):
                self.report.wrong.append(f"cut {self.report.cuts}: {key}: the listing disagrees")
            history.settle(found)

    def _age(self, attempt: Attempt) -> str:
        return f"{self._cut_at - attempt.acknowledged:.2f} s before" if attempt.acknowledged else "never"


def _listing(client: Any) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        yield from page.get("Contents", ())


def _value(client: Any, key: str) -> bytes | str | None:
    """Return an object's bytes, None if there is none, or the error of a damaged one."""
    try:
        return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    except ClientError as error:
        code = error.response["Error"]["Code"]
        return None if code == "NoSuchKey" else f"{code}: {error}"
    except BotoCoreError as error:
        return str(error)


def _short(value: bytes | None) -> str:
    return "nothing" if value is None else f"{len(value)} bytes {value[:4].hex()}"


def _last_line(output: str) -> str:
    return output.rstrip().rpartition("\n")[2]


def _end(daemon: Daemon) -> None:
    daemon.kill()
    daemon.close()
