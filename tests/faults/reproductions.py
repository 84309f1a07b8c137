"""Overlapping writes of one name while its other owner cannot take them.

`stopped`: the other owner receives SIGSTOP. `refused`: it refuses connections, and the primary is killed
while it does. In both no write may be acknowledged while the cluster map says that all nodes are up, and no
acknowledged write may be lost. `denied`: the other owner refuses connections while a write waits for it; a
second write, with `If-None-Match: *`, may not be answered 412. See docs/decisions/0038-overtaken-writes.md.

python -m tests.faults.reproductions --runs 100
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPException
from typing import TYPE_CHECKING, Final, Literal, Self

from botocore.exceptions import ClientError

from meshwire.cluster import routes
from tests.support.daemon_cluster import DaemonCluster
from tests.support.relay import Relay

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import TracebackType

BUCKET: Final = "overtaken"
WRITERS: Final = 24
WINDOW: Final = 0.5
"""Seconds for which the other owner takes nothing: less than a lease, so that the map stays as it is."""
_CONNECTIONS = 16
"""So many meet every worker of a node."""
PRIMARY, OTHER, THIRD = "n1", "n3", "n2"
Kind = Literal["stopped", "refused", "denied"]
KINDS: Final[tuple[Kind, ...]] = ("stopped", "refused", "denied")


class Scene:
    """Three daemons with two workers each; the other nodes reach n3 only through `relay`."""

    def __init__(self) -> None:
        self._ends, self._runs, self._version = ExitStack(), 0, 0
        self.relay = Relay()

    def __repr__(self) -> str:
        return f"<Scene after {self._runs} runs>"

    def __enter__(self) -> Self:
        with self._ends:
            self._ends.callback(self.relay.close)
            self.mesh = self._ends.enter_context(DaemonCluster.start(2, workers=2, lease=3.0))
            endpoint = self.mesh.add(OTHER, "--advertise", f"http://{self.relay}").endpoint
            self.relay.target = int(endpoint.rpartition(":")[2])
            self.mesh.await_healthy()
            self.mesh[PRIMARY].client().create_bucket(Bucket=BUCKET)
            self._ends = self._ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def run(self, kind: Kind) -> Counter[str]:
        """One reproduction on a name of its own. Counts `attempted` and `acknowledged` writes, and the
        violations `early` (answered while the map said that every node was up) and `lost`."""
        act = {"stopped": self._stopped, "refused": self._refused, "denied": self._denied}[kind]
        return act(self.new_key())

    def new_key(self) -> str:
        """A free name, whose primary is n1 and whose other owner is n3. All nodes are up, and every worker of
        n1 has decided about the name by this map: none has to ask n3 first (`handover`)."""
        self._runs += 1
        while True:  # on a busy machine a node may miss its lease at any time
            self.mesh.await_healthy()
            cluster = self.mesh.map_of()
            table = routes(cluster, copies=2)
            for number in range(1000):
                key = f"{self._runs}-{number}"
                route = table.route_of_key(BUCKET, key)
                owners = {node.node_id for node in route.write_set}
                if owners == {PRIMARY, OTHER} and route.read_set[0].node_id == PRIMARY:
                    for _ in range(_CONNECTIONS):
                        self.mesh[PRIMARY].request("DELETE", f"/{BUCKET}/{key}")
                    self._version = cluster.version
                    return key

    def _stopped(self, key: str) -> Counter[str]:
        assert self._put(key, "old") == 200
        with ThreadPoolExecutor(WRITERS) as pool:
            self.mesh.pause(OTHER)
            try:
                writes = self._put_all(pool, key)
                early = self._wait(writes)
            finally:
                self.mesh.resume(OTHER)
            statuses = [write.result() for write in writes.values()]
        acknowledged = {value for value, write in writes.items() if write.result() == 200}
        found = {self._get(node, key) for node in (PRIMARY, THIRD, OTHER)}
        lost = len(acknowledged) if len(found) != 1 or not found <= set(writes) else 0
        return Counter(attempted=len(writes), acknowledged=statuses.count(200), early=early, lost=lost)

    def _refused(self, key: str) -> Counter[str]:
        assert self._put(key, "old") == 200
        with ThreadPoolExecutor(WRITERS) as pool:
            self.relay.refuse()
            try:
                writes = self._put_all(pool, key)
                early = self._wait(writes)
                self.mesh.kill(PRIMARY)
                statuses = [write.result() for write in writes.values()]
            finally:
                self.relay.heal()
        found = {self._get(node, key) for node in (OTHER, THIRD)}
        acknowledged = statuses.count(200)
        lost = acknowledged if "old" in found else 0
        self.mesh.up(PRIMARY)
        return Counter(attempted=len(writes), acknowledged=acknowledged, early=early, lost=lost)

    def _denied(self, key: str) -> Counter[str]:
        client = self.mesh[PRIMARY].client()

        def put_if_absent() -> int:
            try:
                client.put_object(Bucket=BUCKET, Key=key, Body=b"second", IfNoneMatch="*")
            except ClientError as error:
                return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
            return 200

        with ThreadPoolExecutor(2) as pool, closing(client):
            self.relay.refuse()
            try:
                first = pool.submit(self._put, key, "first")
                while self._get(PRIMARY, key) != "first":
                    assert not first.done()
                second = pool.submit(put_if_absent)
                early = self._wait({"first": first, "second": second})
            finally:
                self.relay.heal()
        assert (first.result(), second.result()) == (200, 412)
        return Counter(attempted=2, acknowledged=1, early=early, lost=0)

    def _put_all(self, pool: ThreadPoolExecutor, key: str) -> dict[str, Future[int]]:
        return {f"new{n}": pool.submit(self._put, key, f"new{n}") for n in range(WRITERS)}

    def _wait(self, writes: dict[str, Future[int]]) -> int:
        """The number of writes that were answered by now, if the map is still the one by which all are up."""
        threading.Event().wait(WINDOW)
        answered = sum(write.done() and write.result() in (200, 412) for write in writes.values())
        return answered if self.mesh.map_of(PRIMARY).version == self._version else 0

    def _put(self, key: str, value: str) -> int:
        """The status; 0 for a connection that broke."""
        try:
            return self.mesh[PRIMARY].request("PUT", f"/{BUCKET}/{key}", value.encode()).status
        except (OSError, HTTPException):
            return 0

    def _get(self, node: str, key: str) -> str:
        answer = self.mesh[node].request("GET", f"/{BUCKET}/{key}")
        while answer.status == 503:
            answer = self.mesh[node].request("GET", f"/{BUCKET}/{key}")
        return answer.body.decode() if answer.status == 200 else f"status {answer.status}"


def main() -> int:
    """Exit code 1 when a run had a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs of each reproduction")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    violations = 0
    with Scene() as scene:
        for kind in asked.kinds:
            total = Counter[str]()
            for run in range(asked.runs):
                counts = scene.run(kind)
                violated = counts["early"] + counts["lost"]
                total += counts + Counter(violating=int(violated > 0))
                print(f"{kind} {run}: {dict(counts)}", flush=True)
            print(f"{kind}: {asked.runs} runs, {dict(total)}", flush=True)
            violations += total["violating"]
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
