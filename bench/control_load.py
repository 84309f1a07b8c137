"""What the nodes of a mesh cost etcd, in processor time and memory, for `docs/simulator.md`.

    python -m bench.control_load [NODES_OF_THE_MAP] [NODES] [LEASES]

Starts an etcd, puts a map into it, and lets some nodes renew their leases and look for the failure
detector's as coordinators do, without their pauses; then, as many processes watch all keys as those of
nodes do, while the status of a node and the map are written.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.cluster.node_lease import NodeLease
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.etcd.etcd_control import EtcdControl
from meshd.control.etcd.gateway import encoded
from meshd.process.local_etcd import EtcdCluster
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

RENEWALS, LOOKS = 4, 5  # of a node, in each lease
STATUSES, MAPS, STATUS_BYTES = 50, 5, 450
PATIENCE = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(etcd: EtcdCluster, pid: int, mapped: int, count: int, leases: int) -> None:
    clock = SystemClock()
    nodes = tuple(
        Node(f"node-{number:05}", f"http://node-{number:05}:9000", zone=f"rack-{number // 40:03}", turned=1)
        for number in range(mapped)
    )
    with closing(EtcdControl(etcd.gateway())) as control:
        maps = ClusterMapStore(control)
        await control.put("mesh/id", b"1")
        await maps.update_map(lambda _: ClusterMap(1, nodes))
        held = [NodeLease(control, maps, f"node-{number:05}", "h", clock, 60.0) for number in range(count)]
        writer, view = NodeStateWriter(control, maps), ClusterView("node-00000", control, lambda _: 2)
        first, *detectors = [
            FailureDetector(view, control, writer, lambda: 2, clock, ttl=600.0, down_after=900.0)
            for _ in range(count + 1)
        ]
        for number, each in enumerate(detectors):  # as if each were another node's
            if hasattr(each, "_random"):
                each._random.seed(number)
        while not await first._hold_lease():
            pass
        for lease in held:
            await lease.renew()
        await measure_calls("renewals", pid, RENEWALS, leases, [lease.renew for lease in held])
        looks = [each._hold_lease for each in detectors]
        await measure_calls("looks for the failure detector's lease", pid, LOOKS, leases, looks)


async def measure_calls(
    part: str, pid: int, times: int, leases: int, calls: Sequence[Callable[[], Awaitable[bool]]]
) -> None:
    before = cpu_seconds(pid)
    for _ in range(leases * times):
        for each in calls:
            await each()
    spent = 1e3 * (cpu_seconds(pid) - before) / leases / len(calls)
    print(f"{part}: {spent:.2f} ms of etcd in each lease of a node, for {times}")


class Watches:
    """Streams of all keys, as the processes of nodes open them; `await_events` returns when each has had so
    many more."""

    def __init__(self, etcd: EtcdCluster, count: int) -> None:
        self._gateways = [etcd.gateway() for _ in range(count)]
        self._seen, self._changed, self._ready = [0] * count, threading.Condition(), 0
        threads = [threading.Thread(target=self._follow, args=(each,), daemon=True) for each in range(count)]
        for thread in threads:
            thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready == count, PATIENCE):
                raise TimeoutError(f"{self._ready} of {count} watches began")

    def _follow(self, number: int) -> None:
        wanted = {"key": encoded(b"/shardmesh/"), "range_end": encoded(b"/shardmesh0")}
        for message in self._gateways[number].stream("watch", {"create_request": wanted}, PATIENCE):
            with self._changed:
                self._ready += bool(message.get("created"))
                self._seen[number] += len(message.get("events") or ())
                self._changed.notify()

    def await_events(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: min(self._seen) >= count, PATIENCE):
                raise TimeoutError(f"a watch had {min(self._seen)} of {count} events")
            self._seen = [0] * len(self._seen)

    def close(self) -> None:
        for gateway in self._gateways:
            gateway.close()


async def measure_watches(etcd: EtcdCluster, pid: int, mapped: int, count: int) -> None:
    """Print the processor time of etcd for a watch that begins, its memory, and the time of a write by its
    watchers."""
    with closing(EtcdControl(etcd.gateway())) as control:
        cluster = ClusterMapStore(control).current()
        assert cluster is not None
        document = cluster.to_stored()
        status = os.urandom(STATUS_BYTES // 2).hex().encode()
        alone = await _spent(pid, control, "moves/node-00001", status, STATUSES)
        whole = await _spent(pid, control, "other/map", document, MAPS)
        before, size = cpu_seconds(pid), resident_bytes(pid)
        watches = Watches(etcd, count)
        try:
            began, held = cpu_seconds(pid) - before, resident_bytes(pid) - size
            each = await _spent(pid, control, "moves/node-00001", status, STATUSES, watches) - alone
            maps = await _spent(pid, control, "other/map", document, MAPS, watches) - whole
        finally:
            watches.close()
    print(
        f"a watch: {1e3 * began / count:.2f} ms of etcd to begin, {held / count / 1024:.0f} KiB of its memory"
    )
    print(
        f"a status of {len(status)} bytes: {1e3 * alone:.2f} ms of etcd, and {1e6 * each / count:.0f} µs for "
        "each watch"
    )
    print(
        f"a map of {len(document):,} bytes ({mapped:,} nodes): {1e3 * whole:.1f} ms of etcd, and "
        f"{1e6 * maps / count:.0f} µs for each watch"
    )


async def _spent(
    pid: int, control: EtcdControl, key: str, value: bytes, times: int, watches: Watches | None = None
) -> float:
    """Return the processor time of etcd for a write, in seconds."""
    before = cpu_seconds(pid)
    for _ in range(times):
        await control.put(key, value)
    if watches is not None:
        await asyncio.to_thread(watches.await_events, times)
    return (cpu_seconds(pid) - before) / times


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    mapped, count, leases = (
        int(word) for word in (*sys.argv[1:], *("10000", "200", "4")[len(sys.argv) - 1 :])
    )
    with tempfile.TemporaryDirectory() as place, EtcdCluster(Path(place)) as etcd:
        (pid,) = etcd.pids
        asyncio.run(measure(etcd, pid, mapped, count, leases))
        asyncio.run(measure_watches(etcd, pid, mapped, count))


if __name__ == "__main__":
    main()
