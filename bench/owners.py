"""The row of a mesh that a loader reads: each node sends the rows whose bytes it has, or one node sends all.

Law: one mesh of three nodes, two copies of every object; the same loader, the same epochs, which no node has
prepared before; both in turn (`bench.interleave`). Frames come over TCP, as from another host. Invariant:
both give the same bytes, or neither figure counts.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from awscrt.checksums import crc64nvme

import meshsdk as mesh
from bench.interleave import order
from bench.limits import SIDE
from bench.processes import cpu_seconds
from bench.results import Figure
from bench.tables import number, table
from meshd.errors import MeshdError
from meshd.process import local_etcd
from meshsdk import ops
from meshsdk.client.local_handover import LOCAL_VARIABLE
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bench.photo_dataset import Album
    from bench.results import RowResult
    from bench.rows import Scale

NAME: Final = "owners"
PHOTOGRAPHS, TENSORS = "photographs", "tensors"
WAYS: Final = {"from their owners": "owners", "from one node": "one"}
CONTENDERS: Final = tuple(f"{kind}, {way}" for kind in (PHOTOGRAPHS, TENSORS) for way in WAYS)
TEXT: Final = f"""\
Three nodes on loopback, two copies of every object, one transform process per node; a loader takes epochs
that no node has prepared. *{PHOTOGRAPHS}* are decoded, cropped to {SIDE} and flipped; *{TENSORS}* are
objects of {3 * SIDE * SIDE:,} bytes, sent unchanged. *From their owners* (the default), each node is asked
for the rows whose bytes it has. *From one node* (`rows_from="one"`), the assigned node of a step's address
fetches the bytes it lacks from the others: with two copies on three nodes, one object in three. *Crossing*
is what nodes fetched from each other. In every round, the batches of both ways are compared by their
checksums. Here all nodes and the loader share the cores, so *CPU* is the figure that also applies to
separate machines."""
_BUCKET: Final = "owners"
_CLIENTS: Final = 8


@dataclass(frozen=True, slots=True)
class _Read:
    """An epoch: how long it took, what it cost, and the checksum of all its batches."""

    batches: int
    samples: int
    seconds: float
    nodes_cpu: float
    client_cpu: float
    crossed: float
    parted: int
    digest: int

    def metrics(self) -> dict[str, float]:
        return {
            "batches": self.batches / self.seconds,
            "rate": self.samples / self.seconds,
            "nodes_ms": 1000 * self.nodes_cpu / self.batches,
            "client_ms": 1000 * self.client_cpu / self.batches,
            "crossed": self.crossed / self.samples,
            "parted": self.parted / self.batches,
        }


def missing() -> str:
    """Why it cannot be measured here; empty when it can."""
    try:
        local_etcd.find_etcd()
    except MeshdError as error:
        return str(error)
    return ""


def title(scale: Scale) -> str:
    """What is loaded."""
    return f"Rows from their owners: {scale.photographs:,} objects on three nodes, batches of {scale.batch}"


def measure(album: Album, scale: Scale, say: Callable[[str], None]) -> Iterator[Figure]:
    """Epochs of both kinds, each both ways, in turn."""
    say(f"{NAME}: starting a mesh")
    with (
        DaemonCluster.start(3, args=("--copies", "2", "--transform-workers", "1")) as nodes,
        _over_tcp(),
        mesh.connect(
            ",".join(nodes.endpoints.values()), access_key=nodes.access_key, secret_key=nodes.secret_key
        ) as client,
    ):
        datasets = _filled(client, album, say)
        for kind, ds in datasets.items():
            say(f"{NAME}: {kind}, warming up")
            for way in WAYS.values():
                _epoch(nodes, ds, scale.batch, way, 0)
        for count in range(scale.rounds):
            for kind, ds in order(datasets.items(), count):
                say(f"{NAME}: {kind}, round {count + 1} of {scale.rounds}")
                yield from _round(nodes, kind, ds, scale.batch, count)


def _round(nodes: DaemonCluster, kind: str, ds: mesh.Dataset, batch: int, count: int) -> Iterator[Figure]:
    """Both ways; the epoch is the same, and new."""
    ways = order(WAYS.items(), count)
    found = {way: _epoch(nodes, ds, batch, how, count + 1) for way, how in ways}
    problem = "" if len({read.digest for read in found.values()}) == 1 else "batches differ between the ways"
    for way, read in found.items():
        yield Figure(f"{kind}, {way}", count, read.metrics(), problem)


def _epoch(nodes: DaemonCluster, ds: mesh.Dataset, batch: int, way: Any, epoch: int) -> _Read:
    pids = [node.pid for node in nodes.nodes.values()]
    digest = 0
    crossed, cpu = _crossed(nodes), sum(map(cpu_seconds, pids))
    with mesh.Loader(ds, batch, seed=7, rows_from=way, output="numpy") as loader:
        loader.set_epoch(epoch)
        began = time.perf_counter()
        for rows in loader:
            digest = crc64nvme(rows["x"].data, crc64nvme(rows.positions.tobytes(), digest))
        seconds, stats = time.perf_counter() - began, loader.stats()
    used = sum(map(cpu_seconds, pids)) - cpu
    return _Read(
        stats.batches,
        stats.samples,
        seconds,
        used,
        stats.cpu,
        _crossed(nodes) - crossed,
        stats.parted,
        digest,
    )


def _crossed(nodes: DaemonCluster) -> float:
    """Bytes that nodes have fetched of each other so far."""
    return sum(nodes.metric(node_id, "meshd_remote_bytes_total") for node_id in nodes.nodes)


def _filled(client: mesh.Client, album: Album, say: Callable[[str], None]) -> dict[str, mesh.Dataset]:
    """The objects of both kinds, and datasets of them."""
    say(f"{NAME}: uploading {2 * album.count} objects")
    client.create_bucket(_BUCKET)

    def put(pair: tuple[int, Any]) -> None:
        index, file = pair
        client.put(_BUCKET, f"{PHOTOGRAPHS}/{file.parent.name}/{file.name}", file.read_bytes())
        client.put(_BUCKET, f"{TENSORS}/{index:06}.bin", np.random.default_rng(index).bytes(3 * SIDE * SIDE))

    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(put, enumerate(album.files())))
    pictures = mesh.open(f"s3://{_BUCKET}/{PHOTOGRAPHS}", fields={"x": "jpg"}, client=client)
    tensors = mesh.open(f"s3://{_BUCKET}/{TENSORS}", fields={"x": "bin"}, client=client)
    return {
        PHOTOGRAPHS: pictures.map(ops.decode("x"), ops.random_resized_crop("x", SIDE), ops.hflip("x")),
        TENSORS: tensors.map(ops.frombuffer("x", "uint8", shape=[3, SIDE, SIDE])),
    }


@contextmanager
def _over_tcp() -> Iterator[None]:
    """No frame is taken over as shared memory."""
    before = os.environ.get(LOCAL_VARIABLE)
    os.environ[LOCAL_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOCAL_VARIABLE]
        else:
            os.environ[LOCAL_VARIABLE] = before


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The part of the report."""
    result = rows.get(NAME)
    if result is None:
        return []
    columns = {"batches": 2, "rate": 0, "nodes_ms": 0, "client_ms": 1, "crossed": 0, "parted": 2}
    lines = [
        [name, *(number(result.value(name, metric), places) for metric, places in columns.items())]
        for name in CONTENDERS
    ]
    head = [
        "",
        "batches/s",
        "samples/s",
        "CPU ms of the nodes a batch",
        "of the loader",
        "bytes crossing a sample",
        "in parts",
    ]
    ratios = []
    for kind in (PHOTOGRAPHS, TENSORS):
        owners, one = (f"{kind}, {way}" for way in WAYS)
        ratios.append(
            [
                f"{kind}: owners ÷ one",
                number(result.ratio(owners, one, "batches"), 2, "×"),
                number(result.ratio(owners, one, "nodes_ms"), 2, "×"),
            ]
        )
    return [
        f"## {result.title}",
        TEXT,
        table(head, lines),
        table(["", "batches/s", "CPU of the nodes"], ratios),
    ]
