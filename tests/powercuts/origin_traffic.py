"""What writers do to buckets that have an origin, which does not lose power: writes that are brought there
later, writes that go through, and what a node has loaded from there.
"""

from __future__ import annotations

import math
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from tests.powercuts.traffic import Objects, Traffic, ask, digest
from tests.support.job_fixtures import ended

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Mapping

    from tests.support.daemons import Daemon
    from tests.support.origin_places import Place

_DELAY: Final = 0.15
"""Seconds that the origin takes while writers write, so that a cut finds much that is not there yet."""
_PATIENCE: Final = 60.0
_LOADED: Final = {f"{number:02}": b"loaded %d" % number * 3000 for number in range(30)}
_QUOTA: Final = 1 << 20


class WriteBack(Objects):
    """Objects of a bucket that are acknowledged before its origin has them. In the end it has what the bucket
    shows."""

    mode = "back"

    def __init__(self, origin: Place) -> None:
        super().__init__()
        self._origin, self._made = origin, False
        self.bucket = f"{self.mode}-{uuid.uuid4().hex[:8]}"

    def prepare(self, daemon: Daemon, client: Any) -> None:
        if not self._made:
            _create(daemon, self._origin, self.bucket, write=self.mode)
            self._made = True
        self._origin.faults.delay = _DELAY

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        key = f"client{number}/{chance.randrange(6)}"
        name = {"Bucket": self.bucket, "Key": key}
        if chance.random() < 0.2:  # so that it is cached
            self.find(daemon, client, key)
            return
        body = None if chance.random() < 0.2 else chance.randbytes(chance.choice((9, 3000, 200_000)))
        with self.changing(key, None if body is None else digest(body)):
            if body is None:
                client.delete_object(**name)
            else:
                client.put_object(**name, Body=body)

    def disagreements(self, daemon: Daemon, client: Any, found: Mapping[str, Hashable]) -> list[str]:
        """The origin comes to have what was found."""
        self._origin.faults.delay = 0.0
        wanted = {key: value for key, value in found.items() if value is not None}
        until = time.monotonic() + _PATIENCE
        while (there := self._at_origin()) != wanted and time.monotonic() < until:
            time.sleep(0.2)
        differing = {key for key in {*there, *wanted} if there.get(key) != wanted.get(key)}
        return [
            *(f"{key}: the origin has {there.get(key)}, not {wanted.get(key)}" for key in sorted(differing)),
            *super().disagreements(daemon, client, found),
        ]

    def _at_origin(self) -> dict[str, Hashable]:
        client, where, prefix = self._origin.client, self._origin.bucket, f"{self.bucket}/"
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=where, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return {
            key.removeprefix(prefix): digest(client.get_object(Bucket=where, Key=key)["Body"].read())
            for key in keys
        }


class WriteThrough(WriteBack):
    """Objects that are acknowledged once the origin has them: a power cut takes none of them, in no mode."""

    mode = "through"

    def allows(self, name: str, value: Hashable, since: float) -> bool:
        return super().allows(name, value, math.inf)


class Loads(Traffic):
    """What the coordinator does with an origin: jobs that load objects of a bucket into the cache, which end;
    and what it counts of them, which stays within the quota of the bucket."""

    def __init__(self, origin: Place) -> None:
        super().__init__()
        self._origin, self._started = origin, 0
        self.bucket = f"loads-{uuid.uuid4().hex[:8]}"

    def prepare(self, daemon: Daemon, client: Any) -> None:
        if not self._started:
            for key, body in _LOADED.items():
                at = f"{self.bucket}/{key}"
                self._origin.client.put_object(Bucket=self._origin.bucket, Key=at, Body=body)
            _create(daemon, self._origin, self.bucket, write="off", quota=_QUOTA)
        self._origin.faults.delay = 0.02

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        with self._counting:
            self._started += 1
            first = self._started
        keys = [f"{(first * 7 + each) % len(_LOADED):02}" for each in range(8)]
        asked = {"kind": "prefetch", "source": f"s3://{self.bucket}/", "keys": keys, "rate": first << 20}
        with self.changing(" ".join(keys), "done"):
            ask(daemon, "POST", "/-/jobs", asked)
        time.sleep(chance.uniform(0.05, 0.3))

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        jobs = [
            job
            for job in ask(daemon, "GET", "/-/jobs")["jobs"]
            if job["spec"]["source"] == f"s3://{self.bucket}/" and job["spec"]["keys"] == name.split()
        ]
        return str(ended(daemon, jobs[0])["state"]) if jobs else None

    def disagreements(self, daemon: Daemon, client: Any, found: Mapping[str, Hashable]) -> list[str]:
        wrong = [
            f"{key}: other bytes than the origin's"
            for key, body in _LOADED.items()
            if client.get_object(Bucket=self.bucket, Key=key)["Body"].read() != body
        ]
        until, used = time.monotonic() + _PATIENCE, _QUOTA + 1
        while used > _QUOTA and time.monotonic() < until:
            time.sleep(0.2)
            used = ask(daemon, "GET", f"/-/residence/{self.bucket}")["bytes"]
        if used > _QUOTA:
            wrong.append(f"{used} bytes are cached, more than the quota")
        total = ask(daemon, "GET", "/-/residence/")["cached_bytes"]
        return [*wrong, *([f"{used} of {total} cached bytes"] if used > total else [])]


def _create(daemon: Daemon, origin: Place, bucket: str, **options: Any) -> None:
    """A bucket that stands for a folder of its name at the origin."""
    where = {"url": f"s3://{origin.bucket}/{bucket}", "endpoint": origin.proxy.endpoint}
    ask(daemon, "PUT", f"/-/buckets/{bucket}", {**where, "credentials": "weed", **options})
