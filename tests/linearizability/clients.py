"""Clients that work on few names at once, each request sent once, and write down what they were told.

Law: plain HTTP with the SDK's signatures; nothing is retried. What never left (a connection that was refused)
is not noted. A name is retired after some operations, or when the fate of some writes is unknown: the search
for an order of a name's operations stays short that way.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Final

from meshd.util.clock import SystemClock
from tests.linearizability.model import ANY, Operation
from tests.linearizability.requests import Endpoint, etag_of
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.linearizability.model import Action, Versioning

BUCKETS: Final[Mapping[str, Versioning]] = {"plain": "", "versioned": "Enabled", "suspended": "Suspended"}
PATIENCE: Final = (0.7, 0.7, 1.5, 3.0, 8.0, 20.0)
"""Seconds until clients give up, client by client."""
LONGEST: Final = 120.0
_MOST: Final = 70  # operations of a name
_UNKNOWN: Final = 5  # writes of a name whose fate is unknown
_LARGE: Final = 300_000  # bytes: replicas get them while they arrive
_clock = SystemClock()


@dataclass(slots=True)
class Name:
    """One key, what was done to it, and what clients remember of it."""

    bucket: str
    key: str
    operations: list[Operation] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    begun: int = 0

    @property
    def full(self) -> bool:
        """Whether another name should take its place."""
        unknown = sum(one.outcome == "unknown" and not one.is_read for one in self.operations)
        return self.begun >= _MOST or unknown >= _UNKNOWN


class Names:
    """The names that are worked on now, and those that were. Used by all clients at once."""

    def __init__(self, active: int = 4) -> None:
        self._lock, self._serial, self._count = threading.Lock(), count(1), count()
        self.retired = list[Name]()
        self.active = [self._new() for _ in range(active)]

    def _new(self) -> Name:
        number = next(self._count)
        bucket = list(BUCKETS)[(0, 1, 0, 2)[number % 4]]
        return Name(bucket, f"name-{number:06}")

    def pick(self, chance: random.Random) -> Name:
        """A name to work on; every other time the first, so that many clients meet there."""
        with self._lock:
            for number, name in enumerate(self.active):
                if name.full:
                    self.retired.append(name)
                    self.active[number] = self._new()
            name = self.active[0] if chance.random() < 0.5 else chance.choice(self.active)
            name.begun += 1
            return name

    def number(self) -> int:
        """Of the next operation."""
        with self._lock:
            return next(self._serial)

    def note(self, name: Name, operation: Operation) -> None:
        """An operation has ended."""
        with self._lock:
            name.operations.append(operation)
            if operation.value and operation.status == 200:
                name.values.append(operation.value)
            name.values += [version.value for version in operation.seen[:1]]
            if operation.made:
                name.versions.append(operation.made)

    def all(self) -> list[Name]:
        """Every name that was ever worked on."""
        return [name for name in (*self.retired, *self.active) if name.operations]


class Client:
    """One at a time."""

    def __init__(self, name: str, endpoints: Mapping[str, Endpoint], names: Names, seed: str) -> None:
        self._name, self._endpoints, self._names = name, endpoints, names
        self._chance, self._nodes = random.Random(seed), sorted(endpoints)
        self._node = ""

    def __repr__(self) -> str:
        return f"<Client {self._name}>"

    def work(self, stop: threading.Event) -> None:
        """One operation after the other until told to stop."""
        while not stop.is_set():
            self._node = self._chance.choice(self._nodes)
            name = self._names.pick(self._chance)
            weights = _ON_VERSIONS if BUCKETS[name.bucket] else _ON_NAMES
            act = self._chance.choices([act for act, _ in weights], [weight for _, weight in weights])[0]
            operation = act(self, name)
            if operation is None:
                stop.wait(0.02)  # it was refused a connection
            else:
                self._names.note(name, operation)
        for endpoint in self._endpoints.values():
            endpoint.close()

    # operations

    def put(self, name: Name, if_match: str = "", if_none_match: str = "") -> Operation | None:
        body = self._body(name)
        asked = self._asked("put", etag_of(body), if_match, if_none_match)
        return self._endpoints[self._node].put(asked, name.bucket, name.key, body)

    def put_packed(self, name: Name) -> Operation | None:
        """In a tar with names of other primaries. Its answer tells no version."""
        if BUCKETS[name.bucket]:
            return self.put(name)
        body = self._body(name)
        others = [f"beside-{self._chance.randrange(50)}" for _ in range(3)]
        asked = self._asked("put", etag_of(body))
        return self._endpoints[self._node].put_packed(asked, name.bucket, name.key, body, others)

    def put_if_match(self, name: Name) -> Operation | None:
        return self.put(name, if_match=self._known(name))

    def put_first(self, name: Name) -> Operation | None:
        return self.put(name, if_none_match=ANY)

    def complete(self, name: Name) -> Operation | None:
        body = self._body(name)
        condition = self._chance.choice(["", "", "match", "first"])
        if_match = self._known(name) if condition == "match" else ""
        asked = self._asked("complete", etag_of(body, parts=1), if_match, ANY if condition == "first" else "")
        return self._endpoints[self._node].complete(asked, name.bucket, name.key, body)

    def delete(self, name: Name) -> Operation | None:
        return self._endpoints[self._node].delete(self._asked("delete"), name.bucket, name.key)

    def delete_if_match(self, name: Name) -> Operation | None:
        asked = self._asked("delete", if_match=self._known(name))
        return self._endpoints[self._node].delete(asked, name.bucket, name.key)

    def delete_version(self, name: Name) -> Operation | None:
        asked = self._asked("delete", version=self._version(name))
        return self._endpoints[self._node].delete(asked, name.bucket, name.key)

    def get(self, name: Name) -> Operation | None:
        return self._endpoints[self._node].get(self._asked("get"), name.bucket, name.key)

    def get_version(self, name: Name) -> Operation | None:
        asked = self._asked("get", version=self._version(name))
        return self._endpoints[self._node].get(asked, name.bucket, name.key)

    def get_if_match(self, name: Name) -> Operation | None:
        asked = self._asked("get", if_match=self._known(name))
        return self._endpoints[self._node].get(asked, name.bucket, name.key)

    def get_if_changed(self, name: Name) -> Operation | None:
        asked = self._asked("get", if_none_match=self._known(name))
        return self._endpoints[self._node].get(asked, name.bucket, name.key)

    def head(self, name: Name) -> Operation | None:
        return self._endpoints[self._node].get(self._asked("head"), name.bucket, name.key)

    def list(self, name: Name) -> Operation | None:
        return self._endpoints[self._node].list(self._asked("list"), name.bucket, name.key)

    def list_versions(self, name: Name) -> Operation | None:
        return self._endpoints[self._node].versions(self._asked("versions"), name.bucket, name.key)

    # what they are made of

    def _asked(
        self,
        action: Action,
        value: str = "",
        if_match: str = "",
        if_none_match: str = "",
        version: str = "",
    ) -> Operation:
        begin = now()
        return Operation(
            self._names.number(),
            self._name,
            self._node,
            action,
            begin,
            begin,
            0,
            value,
            if_match,
            if_none_match,
            version,
        )

    def _body(self, name: Name) -> bytes:
        text = f"{name.key} {self._name} {self._chance.random()} ".encode()
        return text + bytes(_LARGE if self._chance.random() < 0.05 else self._chance.randrange(20))

    def _known(self, name: Name) -> str:
        """A value that this name had lately; of a new one, one that it never had."""
        known = [value for value in name.values[-3:] if value.startswith('"')]
        return self._chance.choice(known) if known else etag_of(b"never written")

    def _version(self, name: Name) -> str:
        return self._chance.choice(name.versions[-6:] or ["null"])


_ON_NAMES: Final[Sequence[tuple[Callable[[Client, Name], Operation | None], int]]] = (
    (Client.put, 18),
    (Client.put_packed, 8),
    (Client.put_if_match, 10),
    (Client.put_first, 6),
    (Client.complete, 3),
    (Client.delete, 7),
    (Client.delete_if_match, 3),
    (Client.get, 20),
    (Client.head, 10),
    (Client.list, 6),
    (Client.get_if_match, 4),
    (Client.get_if_changed, 4),
)
_ON_VERSIONS: Final = (
    *_ON_NAMES,
    (Client.get_version, 8),
    (Client.delete_version, 4),
    (Client.list_versions, 6),
)


class Clients:
    """Many of them in threads, between `start` and `stop`."""

    def __init__(self, endpoints: Mapping[str, str], keys: tuple[str, str], seed: int, size: int) -> None:
        self.names, self._stop = Names(), threading.Event()
        self._endpoints, self._keys = endpoints, keys
        self._clients = [
            Client(f"c{n}", self._open(PATIENCE[n % len(PATIENCE)]), self.names, f"{seed} {n}")
            for n in range(size)
        ]
        self._threads = [threading.Thread(target=c.work, args=(self._stop,)) for c in self._clients]

    def _open(self, patience: float) -> dict[str, Endpoint]:
        return {node: Endpoint(url, self._keys, patience, now) for node, url in self._endpoints.items()}

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Name]:
        """Every name, once everybody's last operation has ended."""
        self._stop.set()
        for thread in self._threads:
            await_end(thread, patience=LONGEST)
        return self.names.all()

    def read_all(self, names: Sequence[Name], patience: float = 60.0) -> None:
        """Adds what every name is in the end, at every node."""
        for node, endpoint in self._open(20.0).items():
            for name in names:
                self._read_last(node, endpoint, name, patience)
            endpoint.close()

    def _read_last(self, node: str, endpoint: Endpoint, name: Name, patience: float) -> None:
        asked = Operation(self.names.number(), "end", node, "head", 0.0, 0.0, 0)
        reads = [(asked, endpoint.get)]
        if BUCKETS[name.bucket]:
            reads.append((replace(asked, number=self.names.number(), action="versions"), endpoint.versions))
        for read, call in reads:
            until, found = now() + patience, None
            while (found is None or found.outcome == "void") and now() < until:
                begin = now()
                found = call(replace(read, begin=begin, end=begin), name.bucket, name.key)
            if found is None or found.outcome == "void":
                raise AssertionError(f"{node} does not answer for {name.bucket}/{name.key}: {found}")
            self.names.note(name, found)


def now() -> float:
    """Seconds that only rise, alike in all threads."""
    return _clock.monotonic()
