"""Clients in a hurry: they write a few names again and again, wait a second, give up, and go elsewhere.

Law: nothing is retried. Each has a node of its own that it asks first; what that does not answer is written
anew through the others, all names of this client's, so that whatever comes of it later comes late. Each write
follows a read of the same name, so that it hides nothing.
"""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from tests.faults.clients import BUCKET, LONGEST, attempted, connect, content, now, read_value
from tests.faults.givenup import Attempt, Haste, Mark
from tests.faults.history import Read
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.faults.history import Outcome
    from tests.faults.hosts import Hosts

_EACH: Final = 4  # clients that have the same node
_NAMES: Final = 2
_PATIENCE: Final = 1.0
_PAUSE: Final = 0.3
_OFTEN: Final = 0.1  # seconds between two looks at the map


class Hasty:
    """One client; `own` is the node that it asks first."""

    def __init__(self, name: str, own: str, s3: Mapping[str, Any], seed: int) -> None:
        self.haste, self._name, self._own, self._s3 = Haste(), name, own, s3
        self._keys = [f"hasty/{name}-{number}" for number in range(_NAMES)]
        self._chance, self._serial = random.Random(seed), 0
        self._others = [node for node in s3 if node != own]

    def __repr__(self) -> str:
        return f"<Hasty {self._name} {self.haste.counts()}>"

    def work(self, stop: threading.Event) -> None:
        """One operation after the other until told to stop."""
        while not stop.wait(_PAUSE):
            if self._write(self._chance.choice(self._keys), self._own) == "unknown":
                for key in self._keys:
                    self._write(key, self._chance.choice(self._others))

    def _write(self, key: str, via: str) -> Outcome:
        self._read(key, self._chance.choice(self._others))
        self._serial += 1
        value, began = f"{self._name}-{self._serial}", now()
        outcome = attempted(
            self._s3[via], lambda s3: s3.put_object(Bucket=BUCKET, Key=key, Body=content(value))
        )
        self.haste.attempts.append(Attempt(key, value, began, now(), outcome, via))
        return outcome

    def _read(self, key: str, via: str) -> None:
        began = now()
        try:
            value = read_value(self._s3[via], key)
        except (BotoCoreError, ClientError):
            return
        self.haste.reads.append(Read(key, value, began, now()))


class HastyCrowd:
    """Some of them for each node, and somebody who looks at the map, between `start` and `stop`."""

    def __init__(self, world: Hosts, keys: tuple[str, str], seed: int) -> None:
        s3 = {
            node: connect(endpoint, keys, attempts=1, patience=_PATIENCE)
            for node, endpoint in world.mesh.endpoints.items()
        }
        self.marks, self._world, self._stop = list[Mark](), world, threading.Event()
        self._clients = [
            Hasty(f"{seed}.{node}-{number}", node, s3, seed * 1000 + number)
            for node in s3
            for number in range(_EACH)
        ]
        self._threads = [threading.Thread(target=c.work, args=(self._stop,)) for c in self._clients]
        self._threads.append(threading.Thread(target=self._look))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> Haste:
        """What all of them did, once their last operations have ended."""
        self._stop.set()
        for thread in self._threads:
            await_end(thread, patience=LONGEST)
        haste = Haste()
        for client in self._clients:
            haste.merge(client.haste)
        return haste

    def _look(self) -> None:
        with closing(self._world.mesh.etcd.gateway()) as gateway:
            known, after = self._world.away(gateway), now()
            while not self._stop.wait(_OFTEN):
                began = now()
                found = self._world.away(gateway)
                seen = now()
                self.marks += [Mark(node, after, seen) for node, _ in sorted(found - known)]
                known, after = found, began


def final_haste(endpoint: str, keys: tuple[str, str], haste: Haste) -> dict[str, str]:
    """What every name is, by this endpoint."""
    s3: Any = connect(endpoint, keys, attempts=8)
    return {key: read_value(s3, key) for key in sorted({attempt.key for attempt in haste.attempts})}
