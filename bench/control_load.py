"""Processor time that the nodes of a mesh cost etcd while nothing happens, for `docs/simulator.md`.

    python -m bench.control_load [NODES_OF_THE_MAP] [NODES] [LEASES]

Starts an etcd, puts a map into it, and lets some nodes renew their leases and look for the failure
detector's as coordinators do, without their pauses.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.cluster.node_lease import NodeLease
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.etcd.etcd_control import EtcdControl
from meshd.process.local_etcd import EtcdCluster
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

RENEWALS, LOOKS = 4, 5  # of a node, in each lease
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


def main() -> None:
    mapped, count, leases = (
        int(word) for word in (*sys.argv[1:], *("10000", "200", "4")[len(sys.argv) - 1 :])
    )
    with tempfile.TemporaryDirectory() as place, EtcdCluster(Path(place)) as etcd:
        (pid,) = etcd.pids
        asyncio.run(measure(etcd, pid, mapped, count, leases))


if __name__ == "__main__":
    main()
