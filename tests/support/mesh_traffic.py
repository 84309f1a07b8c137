"""Clients that write and read all the time while a mesh changes, and know what may be read.

Law: a key is written by one thread at a time and not read meanwhile, so what must be there is known: what
was acknowledged last, or any of what was answered with an error since. Every answer that says otherwise is
kept as an error.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from contextlib import contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from tests.support.daemon_cluster import DaemonCluster
    from tests.support.daemons import Answer

Value = bytes | None
_KEY = re.compile(rb"<Key>([^<]*)</Key>")
_SIZES = (0, 10, 3000, 60_000, 400_000)
_PACE = 0.08  # seconds between two requests of a client: the nodes need the cores, too


class Traffic:
    """`keys` under a prefix of a bucket. `asked`: the nodes that clients ask, which a test changes.
    `refused`: of every request without an answer, or with 5xx, what it was and what came."""

    def __init__(self, mesh: DaemonCluster, bucket: str, keys: int = 40, seed: int = 1) -> None:
        self._mesh, self._bucket, self._random = mesh, bucket, random.Random(seed)
        self.asked = list(mesh.nodes)
        self.keys = [f"traffic/{number}" for number in range(keys)]
        self._may: dict[str, list[Value]] = {key: [None] for key in self.keys}
        self._locks = {key: threading.Lock() for key in self.keys}
        self._writes = dict.fromkeys(self.keys, 0)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work) for work in (self._run_writer, self._run_reader, self._run_lister)
        ]
        self.errors: list[str] = []
        self.refused: list[str] = []
        self.done = 0

    def __enter__(self) -> Self:
        for key in self.keys:
            self._write_one(key, os.urandom(self._random.choice(_SIZES)))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            await_end(thread)

    @contextmanager
    def unrefused(self) -> Iterator[None]:
        """While nothing breaks, nobody is refused. A node that is taken for gone is as one that broke."""
        before, marked = len(self.refused), self._mesh.away_count()
        yield
        refused = self.refused[before:]
        assert not refused or self._mesh.away_count() > marked, refused
        self.check_errors()

    def check_errors(self) -> None:
        assert self.errors == []

    def check(self, *node_ids: str) -> None:
        """Everything is as it must be, as each of these nodes says."""
        self.check_errors()
        for node_id in node_ids or [name for name, node in self._mesh.nodes.items() if node.running]:
            for key in self.keys:
                with self._locks[key]:
                    self._read_one(key, node_id, patience=True)
        self.check_errors()

    def present(self) -> set[str]:
        """Keys that must be in a listing; only while nobody writes."""
        return {key for key in self.keys if None not in self._may[key]}

    def pause(self) -> None:
        """No more clients."""
        self.__exit__(None, None, None)

    def _run_writer(self) -> None:
        while not self._stop.wait(_PACE):
            self._locked(self._write)

    def _run_reader(self) -> None:
        while not self._stop.wait(_PACE):
            self._locked(self._read)

    def _run_lister(self) -> None:
        while not self._stop.wait(20 * _PACE):
            self._list()

    def _locked(self, work: Callable[[str], None]) -> None:
        key = self._random.choice(self.keys)
        with self._locks[key]:
            work(key)
        self.done += 1

    def _write(self, key: str) -> None:
        self._write_one(key, None if self._random.random() < 0.2 else os.urandom(self._random.choice(_SIZES)))

    def _write_one(self, key: str, value: Value) -> None:
        self._writes[key] += 1  # odd while it is being written
        answer = self._ask("DELETE" if value is None else "PUT", key, value or b"")
        if answer is not None and answer.status in (200, 204):
            self._may[key] = [value]
        else:
            self._may[key].append(value)
            self._refuse(answer, key)
        self._writes[key] += 1

    def _read(self, key: str) -> None:
        self._read_one(key, self._random.choice(self.asked))

    def _read_one(self, key: str, node_id: str, *, patience: bool = False) -> None:
        answer = self._ask("GET", key, node_id=node_id)
        for _ in range(40 if patience else 0):
            if answer is not None and answer.status in (200, 404):
                break
            threading.Event().wait(0.25)
            answer = self._ask("GET", key, node_id=node_id)
        if answer is None or answer.status not in (200, 404):
            self._refuse(answer, key)
            if patience:
                self.errors.append(f"{node_id} does not give {key}: {answer and answer.status}")
            return
        found = answer.body if answer.status == 200 else None
        if found not in self._may[key]:
            may = [value if value is None else f"{len(value)} bytes" for value in self._may[key]]
            self.errors.append(f"{node_id} gives {answer.status}, {len(answer.body)} bytes for {key}: {may}")

    def _list(self) -> None:
        """What nobody wrote meanwhile is in it, or is not, as it must."""
        before, may = dict(self._writes), {key: list(values) for key, values in self._may.items()}
        answer = self._ask("GET", "", query="list-type=2&prefix=traffic/")
        if answer is None or answer.status != 200:
            self._refuse(answer, "a listing")
            return
        listed = {name.decode() for name in _KEY.findall(answer.body)}
        for key in [key for key in self.keys if before[key] % 2 == 0 and before[key] == self._writes[key]]:
            if (key in listed and set(may[key]) == {None}) or (key not in listed and None not in may[key]):
                self.errors.append(f"{key} is {'' if key in listed else 'not '}listed")

    def _ask(
        self, method: str, key: str, body: bytes = b"", node_id: str = "", query: str = ""
    ) -> Answer | None:
        node = self._mesh[node_id or self._random.choice(self.asked)]
        target = f"/{self._bucket}/{quote(key)}" if key else f"/{self._bucket}"
        try:
            return node.request(method, f"{target}?{query}" if query else target, body)
        except (OSError, HTTPException):
            return None

    def _refuse(self, answer: Answer | None, key: str) -> None:
        came = "no answer" if answer is None else f"{answer.status} {answer.body[:300]!r}"
        self.refused.append(f"{time.strftime('%H:%M:%S')} {key}: {came}")
        if answer is not None and answer.status < 500:
            self.errors.append(f"{answer.status} for {key}: {answer.body[:300]!r}")
