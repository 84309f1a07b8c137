"""The row of redundancy: a node of three is lost, and the others make its copies again, beside what the
machine allows; and what a client notices of it.

Law: nodes are real daemons on one disk over loopback, so all that they carry is written to that disk: the
limit is the slower of the two, taken in the same round. A round loses a node and takes it back, empty.
Invariant: the bytes that count were fetched by rebalance processes in that time, and no copy is
missing afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from bench import limits
from bench.interleave import order
from bench.results import Figure
from bench.rows import KIB, MIB
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench.rows import Scale
    from meshwire.cluster import ClusterMap

NAME: Final = "restore"
LOOPBACK, DISK, COPY, QUIET, BUSY = (
    "loopback, sockets alone",
    "disk, written and synced",
    "a plain copy of niceness 19, at half of it",
    "nobody reads",
    "clients read",
)
LIMIT: Final = "the slower of both"
BARS: Final = ((QUIET, LIMIT, 0.5), (BUSY, LIMIT, 0.5))
P99: Final = 2.0
_LARGE, _SMALL, _READ = 64 * MIB, 100 * KIB, 10 * KIB
_BUCKET: Final = "restored"
_LEFT: Final = ("n1", "n2")
_DROPPED: Final = "meshd_rebalance_dropped_total"
_PACE: Final = 0.005
_ROUND: Final = 3.0  # seconds of reading before a node is lost
_COPYING: Final = """
import os, sys, time
os.nice(19)
path, rate, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
data, written, began = os.urandom(1 << 20), 0, time.perf_counter()
with open(path, "wb") as file:
    while (passed := time.perf_counter() - began) < seconds:
        if written > rate * passed:
            time.sleep(0.001)
            continue
        file.write(data)
        written += len(data)
    file.flush()
    os.fdatasync(file.fileno())
print(written / (time.perf_counter() - began))
"""


def title(scale: Scale) -> str:
    return f"A node of three lost, {scale.restored / MIB:,.0f} MiB in two copies"


def measure(scale: Scale, scratch: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """Fill three nodes, lose one and take it back again and again."""
    place = scratch / "mesh"
    with DaemonCluster.start(3, place, args=("--down-after", "3600"), workers=2) as mesh:
        say(f"{NAME}: filling")
        _fill(mesh, scale.restored)
        for number in range(scale.rounds):
            loopback = limits.socket_rate(1.0) / 1e9
            disk = _disk_rate(scratch, min(scale.restored, 256 * MIB)) / 1e9
            yield Figure(LOOPBACK, number, {"gigabytes": loopback})
            yield Figure(DISK, number, {"gigabytes": disk})
            yield Figure(LIMIT, number, {"gigabytes": min(loopback, disk)})
            seconds = min(_ROUND, scale.restored / (256 * MIB))
            for contender in order((COPY, QUIET, BUSY), number):
                say(f"{NAME}: {contender}, round {number + 1} of {scale.rounds}")
                if contender == COPY:
                    yield _copy(mesh, scratch / "copied", min(loopback, disk) * 1e9 / 2, seconds, number)
                else:
                    yield _lose(mesh, contender, number)


def _fill(mesh: DaemonCluster, wanted: int) -> None:
    client = mesh["n1"].client()
    client.create_bucket(Bucket=_BUCKET)
    large, small = os.urandom(min(_LARGE, wanted // 2)), os.urandom(_SMALL)
    for number in range(wanted // 2 // len(large)):
        client.put_object(Bucket=_BUCKET, Key=f"large/{number}", Body=large)
    for number in range(wanted // 2 // _SMALL):
        client.put_object(Bucket=_BUCKET, Key=f"small/{number}", Body=small)
    for number in range(100):
        client.put_object(Bucket=_BUCKET, Key=f"read/{number}", Body=small[:_READ])


def _disk_rate(scratch: Path, size: int) -> float:
    path, data = scratch / "written", os.urandom(4 * MIB)
    os.sync()
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, size // len(data))):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = file.tell()
    taken = time.perf_counter() - began
    path.unlink()
    return written / taken


def _copy(mesh: DaemonCluster, path: Path, rate: float, seconds: float, number: int) -> Figure:
    """What the machine alone does to the same reader: another process writes and syncs at `rate`, in the
    background, and sends nothing and compares nothing."""
    with _Reading(mesh, True) as reading:
        reading.rest(seconds)
        quiet = reading.taken()
        command = [sys.executable, "-c", _COPYING, str(path), str(rate), str(seconds)]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        busy = reading.taken()
    path.unlink()
    return Figure(COPY, number, {"gigabytes": float(done.stdout) / 1e9} | _slower(quiet, busy))


def _slower(quiet: list[float], busy: list[float]) -> dict[str, float]:
    if not (quiet and busy):
        return {}
    return {"p99_quiet_ms": _p99(quiet), "p99_ms": _p99(busy), "p99_ratio": _p99(busy) / _p99(quiet)}


def _lose(mesh: DaemonCluster, contender: str, number: int) -> Figure:
    """n3 is lost and its copies are made again; then it comes back empty."""
    mesh.kill("n3")
    mesh.await_state("n3", "away")
    os.sync()
    with _Reading(mesh, contender == BUSY) as reading:
        reading.rest(_ROUND)
        quiet, before = reading.taken(), _carried(mesh)
        began = time.perf_counter()
        _change(mesh, "lost")
        mesh.await_map(lambda found: not found.is_rebalancing, patience=600)
        taken = time.perf_counter() - began
        busy = reading.taken()
        carried = (_carried(mesh) - before) / 1e9
    left = _status(mesh)["movement"]["takers"]
    metrics = {"gigabytes": carried / taken, "carried": carried} | _slower(quiet, busy)
    spare = {name: mesh.metric(name, _DROPPED) for name in _LEFT}
    mesh.remove_data("n3")
    mesh.up("n3")
    mesh.await_map(_whole, patience=600)
    for name, before in spare.items():  # what is not dropped yet need not be fetched in the next round
        mesh.await_metric(name, _DROPPED, before + 1)
    problem = f"{', '.join(left)} lack something still" if left else "" if carried else "nothing was carried"
    return Figure(contender, number, metrics, problem)


def _whole(cluster: ClusterMap) -> bool:
    """Whether every node is there and has its share: one that comes back is up before it is given any."""
    owners = {share.node_id for share in cluster.current_shares}
    return not cluster.is_rebalancing and all(n.state == "up" and n.node_id in owners for n in cluster.nodes)


def _carried(mesh: DaemonCluster) -> float:
    """Bytes that the nodes that are left have fetched from each other."""
    return sum(mesh.metric(name, "meshd_rebalance_bytes_total") for name in _LEFT)


def _p99(taken: list[float]) -> float:
    return 1e3 * sorted(taken)[int(0.99 * (len(taken) - 1))]


def _change(mesh: DaemonCluster, action: str) -> None:
    body = json.dumps({"action": action, "anyway": True}).encode()
    answer = mesh["n1"].request("POST", "/-/cluster/nodes/n3", body)
    if answer.status != 200:
        raise RuntimeError(f"{action}: {answer.body!r}")


def _status(mesh: DaemonCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mesh["n1"].request("GET", "/-/cluster").body)
    return found


class _Reading:
    """A client that reads small objects from n1, one after the other at a pace, while the block runs."""

    def __init__(self, mesh: DaemonCluster, wanted: bool) -> None:
        self._mesh, self._wanted = mesh, wanted
        self._taken: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Reading:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._wanted:
            self._thread.join()

    def rest(self, seconds: float) -> None:
        if self._wanted:
            self._stop.wait(seconds)

    def taken(self) -> list[float]:
        """Seconds of each request since the last look."""
        taken, self._taken = self._taken, []
        return taken

    def _run(self) -> None:
        client = self._mesh["n1"].client()
        keys = [f"read/{number}" for number in range(100)]
        urls = [
            client.generate_presigned_url(
                "get_object", Params={"Bucket": _BUCKET, "Key": key}, ExpiresIn=86400
            )
            for key in keys
        ]
        with closing(self._mesh["n1"].connect()) as connection:
            number = 0
            while not self._stop.wait(_PACE):
                began = time.perf_counter()
                connection.request("GET", urls[number % len(urls)])
                assert len(connection.getresponse().read()) == _READ
                self._taken.append(time.perf_counter() - began)
                number += 1
