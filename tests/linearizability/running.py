"""One mesh, many clients on few names, one plan of faults; then every name's history is judged."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.faults.hosts import Hosts
from tests.linearizability.checker import ALLOWED
from tests.linearizability.clients import BUCKETS, Clients, now
from tests.linearizability.faults import PAIRS, Hands, plan, possible
from tests.linearizability.history import Event, History

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.linearizability.clients import Name
    from tests.linearizability.faults import Kind

SIZE = 12
_OFTEN = 0.1  # seconds between two looks at the map
_BESIDE = 1.0  # seconds until a node has heard on a busy machine that it was taken out
_WHOLE = 180.0


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    seconds: float = 0.0
    histories: list[History] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[History]:
        """What docs/promises.md does not allow, or what could not be decided."""
        pairs = zip(self.histories, self.verdicts, strict=True)
        return [history for history, verdict in pairs if verdict not in ALLOWED]

    @property
    def operations(self) -> int:
        """Of all names together."""
        return sum(len(history.operations) for history in self.histories)

    def __str__(self) -> str:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(self.verdicts).most_common())
        answers = Counter(one.outcome for history in self.histories for one in history.operations)
        return (
            f"seed {self.seed}: {self.seconds:.0f} s, {self.operations} operations "
            f"({answers['unknown']} of unknown fate), {len(self.histories)} names: {verdicts}"
        )


def run(
    seed: int,
    seconds: float,
    *,
    hosts: int = 3,
    clients: int = SIZE,
    kinds: Sequence[Kind] | None = None,
    keep: Path | None = None,
) -> Outcome:
    """A schedule of about so many seconds. What is wrong is kept under `keep`, with the nodes' logs."""
    outcome = Outcome(seed)
    with Hosts(hosts, workers=2) as world:
        world.start()
        _make_buckets(world)
        mesh = world.mesh
        crowd = Clients(mesh.endpoints, (mesh.access_key, mesh.secret_key), seed, clients)
        watch, began = _Watch(world), now()
        watch.start()
        crowd.start()
        try:
            _befall(world, seed, seconds, kinds, watch)
        finally:
            names = crowd.stop()
        outcome.seconds = now() - began
        world.mesh.await_map(lambda found: all(node.state == "up" for node in found.nodes), _WHOLE)
        watch.stop()
        crowd.read_all(names)
        outcome.histories = [_history(name, watch.events()) for name in names]
        outcome.verdicts = [history.verdict for history in outcome.histories]
        if outcome.wrong and keep is not None:
            _keep(world, outcome, keep)
    return outcome


def _make_buckets(world: Hosts) -> None:
    s3 = world.mesh["n1"].client()
    for bucket, versioning in BUCKETS.items():
        s3.create_bucket(Bucket=bucket)
        if versioning:
            s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": versioning})


def _befall(world: Hosts, seed: int, seconds: float, kinds: Sequence[Kind] | None, watch: _Watch) -> None:
    hands, idle = Hands(world, seed), threading.Event()
    allowed = possible(world) if kinds is None else [kind for kind in kinds if kind in possible(world)]
    try:
        for step in plan(seed, len(world.names), seconds, allowed):
            idle.wait(step.pause)
            begin = now()
            hands.begin(step)
            idle.wait(step.seconds)
            hands.end(step)
            watch.faults.append(Event(str(step), begin, now()))
            if any(fault.kind in PAIRS for fault in step.faults):
                watch.parted.append((begin, now()))
        if not allowed:
            idle.wait(seconds)
    except Exception:
        print(world.mesh.output())
        raise


def _history(name: Name, events: Sequence[Event]) -> History:
    operations = tuple(sorted(name.operations, key=lambda one: one.begin))
    begin, end = operations[0].begin, max(one.end for one in operations)
    beside = tuple(event for event in events if event.begin <= end and begin <= event.end)
    return History(name.bucket, name.key, BUCKETS[name.bucket], operations, beside)


def _keep(world: Hosts, outcome: Outcome, keep: Path) -> None:
    """A folder for a seed: each wrong name's history, the same shrunk, and as text; logs and maps."""
    place = keep / f"seed-{outcome.seed}"
    for history in outcome.wrong:
        stem = f"{history.bucket}-{history.key}"
        history.save(place / f"{stem}.jsonl")
        small = history.shrink()
        small.save(place / f"{stem}.shrunk.jsonl")
        (place / f"{stem}.txt").write_text(f"{history.why()}\n\n{small.timeline()}\n{history.timeline()}")
    (place / "nodes.log").write_text(world.mesh.output())
    (place / "maps.txt").write_text("\n".join(world.maps()))


class _Watch:
    """Looks at the cluster map all the time: who is marked away or down, and when."""

    def __init__(self, world: Hosts) -> None:
        self.faults, self.parted = list[Event](), list[tuple[float, float]]()
        self._marks = list[Event]()
        self._world, self._stop = world, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)  # a failed schedule leaves it

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def events(self) -> list[Event]:
        """Faults and marks, in order of time."""
        return sorted([*self.faults, *map(self._judged, self._marks)], key=lambda event: event.begin)

    def _judged(self, mark: Event) -> Event:
        """Reads beside a mark of a node that does not reach another one may be stale."""
        begin, end = mark.begin, mark.end + _BESIDE
        parted = any(begin <= until + _BESIDE and since <= end for since, until in self.parted)
        return Event(mark.what, begin, end, stale=True) if parted else mark

    def _look(self) -> None:
        with closing(self._world.mesh.etcd.gateway()) as gateway:
            known, after = self._away(gateway), now()
            while not self._stop.wait(_OFTEN):
                began, found = now(), self._away(gateway)
                if found is None:
                    continue  # etcd is stopped: nobody is marked meanwhile, or it is seen afterwards
                new = sorted(found - (known or frozenset()))
                self._marks += [Event(f"{node} is marked away or down", after, now()) for node, _ in new]
                known, after = found, began

    def _away(self, gateway: Any) -> frozenset[tuple[str, int]] | None:
        try:
            return self._world.away(gateway)
        except Exception:
            return None
