"""How much of etcd's space the documents of a large mesh take, for `docs/simulator.md`.

    python -m bench.control_size [NODES] [JOBS]

Starts an etcd and writes with the nodes' own code and records what it has of such a mesh: the map, with
random names and addresses; the lease, the directory, the machine, the domain and the scrub report of each
node; jobs that run. Then come the map's versions and the reports of a rebalance that concerns all nodes, and
more versions of the map. etcd keeps earlier values for as long as it is told to, which is an hour in our
documentation; at last they are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.data_dir_identity import (
    DIRECTORIES_TOPIC,
    MACHINES_TOPIC,
    NodeIdentity,
    _Generation,
    _Machine,
)
from meshd.cluster.node_lease import NodeLease
from meshd.cluster.peer_checks import DOMAINS_TOPIC, NodeDomains
from meshd.cluster.rebalance.progress import PROGRESS_TOPIC
from meshd.cluster.rebalance.progress import Progress as Moves
from meshd.cluster.repair.scrub_scheduler import STATUS_TOPIC, ScrubStatus
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import Write
from meshd.control.etcd.etcd_control import EtcdControl
from meshd.control.jobs import TOPIC as JOBS
from meshd.control.jobs import Job, Principal, Progress
from meshd.process.local_etcd import EtcdCluster
from meshd.store.disks.health_monitor import DiskState
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node
from meshwire.jobs.job_spec import parse_job

if TYPE_CHECKING:
    from meshd.control.etcd.gateway import Gateway

DISKS, VERSIONS, REPORTS, FURTHER = 12, 9, 4, 100
"""Disks of a node; maps, and reports of a node, in a rebalance; further maps; an hour has 720 at most."""
TTL: Final = 3600.0


def node(number: int) -> Node:
    """Return a node with a name and an address that do not compress well."""
    name = f"node-{secrets.token_hex(6)}"
    return Node(name, f"https://{name}.example.com:9000", zone=f"rack-{number // 40:03}", turned=1)


def documents(node_id: str, now: int) -> list[Write]:
    """Return what a node of a Kubernetes cluster has beside its lease and its place in the map."""
    disks = tuple(DiskState(f"/data/disk-{disk:02}", True, "", 20 << 40, 50) for disk in range(DISKS))
    report = ScrubStatus(False, 1, now, now + 9_000_000, 120 << 40, 240 << 40, disks=disks)
    return [
        Write(f"{DIRECTORIES_TOPIC}/{node_id}", msgspec.json.encode(_Generation(secrets.token_hex(8), 999))),
        Write(f"{MACHINES_TOPIC}/{node_id}", msgspec.json.encode(_Machine(secrets.token_hex(16)))),
        Write(f"{DOMAINS_TOPIC}/{node_id}", msgspec.json.encode(NodeDomains(("s3.example.com",)))),
        Write(f"{STATUS_TOPIC}/{node_id}", msgspec.json.encode(report)),
    ]


def moves(node_id: str, now: int, phase: int) -> Write:
    """Return a report of a node that receives a share of the data."""
    told = Moves(
        ("comparing", "repairing", "waiting", "idle")[phase],
        *(9, 26, 26, 0, 1_200_000, 1_200_000, 300_000 * phase, 80 << 30, 240 << 30, 3600, 250_000_000),
        began=now,
        updated=now + phase,
        earlier=((8, 1 << 40), (7, 1 << 40)),
    )
    return Write(f"{PROGRESS_TOPIC}/{node_id}", msgspec.json.encode(told))


def job(number: int, now: int) -> Job:
    """Return a job that packs objects into shards, while it runs."""
    places = {"source": f"s3://corpus-{number:04}/train/", "target": f"s3://shards-{number:04}/train/"}
    spec = parse_job({"kind": "shard", **places, "size": 1 << 30, "shuffle": 1})
    owner = Principal(secrets.token_hex(8), secrets.token_hex(10), source_ip="10.0.0.1", secure=True)
    so_far = Progress("write", 120, 100_000, 120_000, 10**8, 10**11, 10**14, 120, rate=1e9, copies=2)
    return Job(
        *(spec.job_id(owner.user_id), spec.kind, spec.to_json().decode(), owner, now, "running"),
        started_ms=now,
        progress=so_far,
        node=f"node-{secrets.token_hex(6)}",
    )


def tell(gateway: Gateway, what: str) -> None:
    """Print the size of etcd's file, and how much of it is in use."""
    found = gateway.call("maintenance/status", {}, repeatable=True)
    size, used = (int(found[name]) / 1e6 for name in ("dbSize", "dbSizeInUse"))
    print(f"{what}: {size:,.1f} MB, {used:,.1f} MB of it in use", flush=True)


async def measure(etcd: EtcdCluster, count: int, jobs: int) -> None:
    """Write the documents, and print the size of etcd after each kind."""
    clock, gateway = SystemClock(), etcd.gateway(deadline=60)
    now, nodes = clock.now_ms(), tuple(node(number) for number in range(count))
    names = [each.node_id for each in nodes]
    with closing(gateway), closing(EtcdControl(etcd.gateway(deadline=60))) as control:
        maps = ClusterMapStore(control)
        await control.put("mesh/id", secrets.token_hex(8).encode())
        tell(gateway, "empty")
        await maps.update_map(lambda _: ClusterMap(1, nodes))
        size = len(ClusterMap(1, nodes).to_stored())
        tell(gateway, f"a map of {count:,} nodes, {size:,} bytes")
        for name in names:
            holder = NodeIdentity("", name, secrets.token_hex(8)).lease_holder
            await NodeLease(control, maps, name, holder, clock, TTL).renew()
        tell(gateway, "leases")
        await control.write_many([write for name in names for write in documents(name, now)])
        tell(gateway, "documents of nodes")
        running = [job(number, now) for number in range(jobs)]
        await control.write_many([Write(f"{JOBS}/{one.job_id}", msgspec.json.encode(one)) for one in running])
        tell(gateway, f"{jobs:,} jobs")
        for phase in range(REPORTS):
            await control.write_many([moves(name, now, phase) for name in names])
        await change_map(maps, VERSIONS)
        tell(gateway, f"a rebalance: {VERSIONS} maps, {REPORTS} reports of each node")
        await change_map(maps, FURTHER)
        tell(gateway, f"{FURTHER} more maps")
        newest = gateway.call("maintenance/status", {}, repeatable=True)["header"]["revision"]
        gateway.call("kv/compaction", {"revision": newest, "physical": True}, repeatable=True)
        tell(gateway, "without earlier values")
        gateway.call("maintenance/defragment", {}, repeatable=True)
        tell(gateway, "defragmented")


async def change_map(maps: ClusterMapStore, times: int) -> None:
    """Write new versions of the map, in each of which one node has changed its state."""
    for number in range(times):

        def turn(present: ClusterMap | None, number: int = number) -> ClusterMap:
            assert present is not None
            nodes, place = list(present.nodes), number % len(present.nodes)
            nodes[place] = replace(nodes[place], turned=present.version + 1)
            return replace(present, version=present.version + 1, nodes=tuple(nodes))

        await maps.update_map(turn)


def main() -> None:
    """`python -m bench.control_size [NODES] [JOBS]`."""
    count, jobs = (int(word) for word in (*sys.argv[1:], *("10000", "1000")[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as place, EtcdCluster(Path(place), 1, "--unsafe-no-fsync") as etcd:
        asyncio.run(measure(etcd, count, jobs))


if __name__ == "__main__":
    main()
