"""Scenes of a mesh one of whose daemons has a disk that becomes slow, hangs, decays and fails, and one for
the index, which fills, in a namespace of its own, until the alerts about them fire, and until they end."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from lightkube.resources.core_v1 import Node

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import cluster_admin
from meshsdk.cli.cluster_status import status_lines
from meshsdk.errors import MeshError, ServerError
from tests.e2e.alert_watch import until_fire, until_fire_for_long, until_silent
from tests.e2e.cluster_client import EndToEndError, RealCluster, host_port
from tests.e2e.stage import MESH_PODS, Stage
from tests.e2e.storage_scenes import on_node
from tests.kubernetes.scenes import MeshCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPECTED = {"IndexFull", "SlowDisk", "DiskHangs", "DiskDecays", "DiskErrors", "DiskLost", "DisksSeek"}
"""What these scenes bring about, without `Shardmesh`."""
STORES = 2
OBJECTS = 240
PAUSE = 65.0  # seconds between two damages: the alert wants three different minutes
FOLDER = "/mnt/mesh-e2e-sick"
DISKS = {"good": "500M", "sick": "500M", "index": "200M"}
"""Two small disks of one size, so that half of the data is on each, and one for the index."""
MAKE = "".join(
    f"mkdir -p {FOLDER}/{name}; truncate -s {size} {FOLDER}/{name}.img; mkfs.ext4 -q -F {FOLDER}/{name}.img;"
    f"mount -o loop {FOLDER}/{name}.img {FOLDER}/{name};"
    for name, size in DISKS.items()
)
FILL = f"head -c 1G /dev/zero > {FOLDER}/index/another-program; sync"  # ends when the file system is full
ROOM = f"rm {FOLDER}/index/another-program"
REFUSAL, SAID = (
    "file system of the index",
    "the index of mesh-b-0 is full",
)  # the 507, and `mesh cluster status`
# What the processes of a container may do with a device, by the kernel: the device is then slow for them.
THROTTLE = """device=$(mountpoint -d {disk})
for folder in $(find /sys/fs/cgroup/blkio -type d -name '*{container}*'); do
  echo "$device {value}" > $folder/blkio.throttle.{what}_device; done"""
# From then on the device ends at its first MiB: every read and write behind that is an error.
SHRINK = f"truncate -s 1M {FOLDER}/sick.img; losetup -c $(findmnt -n -o SOURCE {FOLDER}/sick)"
REPLACE = (
    f"umount -l {FOLDER}/sick; rm {FOLDER}/sick.img; truncate -s 500M {FOLDER}/sick.img;"
    f"mkfs.ext4 -q -F {FOLDER}/sick.img; mount -o loop {FOLDER}/sick.img {FOLDER}/sick"
)
FLIP = f"""export LC_ALL=C
for f in $(grep -rlaF '{{mark}}' {FOLDER}/sick --include=*.tar | head -n 1); do
  at=$(grep -obUaF '{{mark}}' $f | head -n 1 | cut -d: -f1)
  printf '\\0' | dd of=$f bs=1 seek=$((at + 3)) conv=notrunc 2>/dev/null && echo $f
done; sync"""
NOCACHE = "oflag=nocache conv=notrunc,fdatasync count=0 status=none"
DROP = f"find {FOLDER}/sick -name '*.tar' -exec dd of={{}} {NOCACHE} ';'"


def sick_disk(stage: Stage) -> None:
    """A third mesh, one of whose daemons has a disk of its own that fails in every way."""
    first = stage.cluster
    node = next(each.metadata.name for each in first.kube.list(Node))
    cluster = RealCluster(first.kubeconfig, f"{first.namespace}-disk", first.image)
    sick = Stage(stage.options, cluster, stage.place / "disk", stage.timeline)
    sick.prometheus = stage.prometheus
    with stage.step(
        "a mesh of two copies, a store of which has two small disks and one for the index, until it settles"
    ):
        _forget(sick, node)
        on_node(sick, node, MAKE)
        cluster.create_namespace()
        cluster.kube.create(_mesh(sick, node))
        sick.until_settled(STORES + 1)
    (pod,) = cluster.pods(MESH_PODS | {"shardmesh.io/pool": "b"})
    keys = tuple(sick.root_keys().values())
    with mesh.connect(
        f"http://{host_port(pod.status.podIP, 9000)}", access_key=keys[0], secret_key=keys[1]
    ) as client:
        client.create_bucket("disk")
        for number in range(OBJECTS):
            client.put("disk", f"{number:03}.bin", _body(number))
        _fill_index(sick, client, node)
        _slow_writes(sick, client)
        _decay(sick, client, node)
        _seek(sick, client, node)
        _hang(sick, client)
        _fail(sick, node)
    with stage.step("that mesh is deleted, and its namespace"):
        cluster.kube.delete(MeshCluster, "mesh")
        cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
        cluster.delete_namespace()
        _forget(sick, node)
    stage.figures += sick.figures


def _forget(sick: Stage, node: str) -> None:
    for each in sick.cluster.kube.list(Node):
        on_node(sick, each.metadata.name, f"rm -rf {sick.options.host_path}-disk")
    mounts = " ".join(f"{FOLDER}/{name}" for name in DISKS)
    on_node(sick, node, f"umount -l {mounts} 2>/dev/null; rm -rf {FOLDER}")


def _mesh(sick: Stage, node: str) -> MeshCluster:
    stores = sick.pool(STORES) | {"weight": 10}
    stores["tiers"] = [tier | {"hostPath": f"{sick.options.host_path}-disk"} for tier in stores["tiers"]]
    tiers = [("good", "nvme", "Data"), ("sick", "ssd", "Data"), ("index", "ssd", "Index")]
    bad = sick.pool(1) | {
        "name": "b",
        "weight": 10,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "tiers": [
            {"name": name, "class": kind, "content": content, "hostPath": f"{FOLDER}/{name}"}
            for name, kind, content in tiers
        ],
    }
    spec = {"image": sick.image, "nodePools": [stores, bad], "copies": 2, "deletionPolicy": "Delete"}
    return MeshCluster(metadata={"name": "mesh", "namespace": sick.cluster.namespace}, spec=spec)


def _mark(number: int) -> str:
    return f"object {number:03} "


def _body(number: int) -> bytes:
    return _mark(number).encode() * 4000


def _throttle(sick: Stage, what: str, value: int) -> None:
    """Limit what the daemon does with its sick disk; 0 ends that."""
    (pod,) = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "b"})
    container = pod.status.containerStatuses[0].containerID.rpartition("/")[2]
    words = {"disk": f"{FOLDER}/sick", "container": container, "what": what, "value": str(value)}
    on_node(sick, pod.spec.nodeName, THROTTLE.format(**words))


def _write(client: mesh.Client, numbers: Iterator[int]) -> None:
    with suppress(MeshError):
        client.put("disk", f"more/{next(numbers)}", bytes(1000))


def _fill_index(sick: Stage, client: mesh.Client, node: str) -> None:
    """Another program fills the file system of the index: writes are refused, reads are not."""
    numbers = iter(range(10**6))

    def refusal() -> str:
        try:
            client.put("disk", f"index/{next(numbers)}", bytes(1000))
        except ServerError as error:
            if error.status == 507 and REFUSAL in str(error):
                return str(error)
            raise EndToEndError(f"a write was refused otherwise: {error!r}") from error
        return ""

    def status() -> str:
        first, *rest = status_lines(cluster_admin.cluster_status(client.transport))
        return " | ".join([first, *(line for line in rest if "index" in line)])

    with sick.step("another program fills the disk of its index, until an alert fires") as told:
        on_node(sick, node, FILL)
        until_fire(sick, {"IndexFull"}, told)
        sick.cluster.until(lambda: told.update(refusal=refusal()) or told["refusal"], "a write is refused")
        sick.cluster.until(lambda: SAID in status(), "the status names it")
        told["status"] = status()
        _read_all(client)
        until_fire_for_long(sick, "IndexFull", told)
    with sick.step("it has room again, until a hundred writes are taken and the alert has ended") as told:
        on_node(sick, node, ROOM)
        sick.cluster.until(lambda: not any(refusal() for _ in range(100)), "writes are taken")
        until_silent(sick, {"IndexFull"}, told)
        _read_all(client)
        told["status"] = status()


def _disk_trouble(sick: Stage) -> str:
    """Return reason and message of the MeshCluster's condition DisksHealthy if it is false."""
    conditions = (sick.cluster.mesh().get("status") or {}).get("conditions", ())
    found = [each for each in conditions if each["type"] == "DisksHealthy" and each["status"] == "False"]
    return f"{found[0]['reason']}: {found[0]['message']}" if found else ""


def _read_all(client: mesh.Client) -> None:
    for number in range(OBJECTS):
        if client.get("disk", f"{number:03}.bin") != _body(number):
            raise EndToEndError(f"object {number} is another one")


def _slow_writes(sick: Stage, client: mesh.Client) -> None:
    numbers = iter(range(10**6))
    with sick.step("its disk takes one write a second, until an alert fires") as told:
        _throttle(sick, "write_iops", 1)
        until_fire(sick, {"SlowDisk"}, told, lambda: _write(client, numbers))
        _throttle(sick, "write_iops", 0)


def _decay(sick: Stage, client: mesh.Client, node: str) -> None:
    """Damage an object a minute; each is read, and repaired from its other copy."""
    numbers, last = iter(range(OBJECTS)), 0.0

    def damage() -> None:
        nonlocal last
        if time.monotonic() - last < PAUSE:
            return
        last = time.monotonic()
        for number in numbers:
            if on_node(sick, node, FLIP.format(mark=_mark(number))).strip():
                if client.get("disk", f"{number:03}.bin") != _body(number):
                    raise EndToEndError("a damaged object was served")
                return

    with sick.step("a byte of an object is changed on it once a minute, until an alert fires") as told:
        until_fire(sick, {"DiskDecays"}, told, damage, 400)


def _seek(sick: Stage, client: mesh.Client, node: str) -> None:
    """A job reads samples in an order of its own from a disk that finds one of them a second."""
    seeds = itertools.count()
    ds = mesh.open("s3://disk/", fields={"x": "bin"}, client=client)
    ds = ds.map(ops.frombuffer("x", "uint8", shape=[len(_body(0))]))

    def train() -> None:
        on_node(sick, node, DROP)
        with mesh.Loader(ds, 4, output="numpy", seed=next(seeds)) as loader:
            if sum(batch.rows for batch in loader) != OBJECTS:
                raise EndToEndError("an epoch lacks samples")

    with sick.step("a job reads from it at one seek a second, until an alert fires, and ends") as told:
        _throttle(sick, "read_iops", 1)
        until_fire(sick, {"DisksSeek"}, told, train)
        _throttle(sick, "read_iops", 0)
        until_silent(sick, {"DisksSeek", "DiskDecays", "SlowDisk"}, told)


def _hang(sick: Stage, client: mesh.Client) -> None:
    with sick.step("it takes one byte a second, so that every write hangs, until an alert fires") as told:
        _throttle(sick, "write_bps", 1)
        until_fire(sick, {"DiskHangs"}, told)
        _throttle(sick, "write_bps", 0)
    with sick.step("it answers again, until the mesh is settled and the alert has ended") as told:
        sick.until_settled(STORES + 1)
        until_silent(sick, {"DiskHangs"}, told)
        _read_all(client)


def _fail(sick: Stage, node: str) -> None:
    """The device becomes shorter than its file system; then an empty one takes its place."""
    with sick.step("it gives errors, until two alerts fire") as told:
        on_node(sick, node, SHRINK)
        until_fire(sick, {"DiskErrors", "DiskLost"}, told)
        sick.cluster.until(
            lambda: _disk_trouble(sick).startswith("Failed: "), "the MeshCluster names the disk"
        )
        told["condition"] = _disk_trouble(sick)
    with sick.step(
        "an empty one takes its place, and the pod is replaced, until the alerts have ended"
    ) as told:
        on_node(sick, node, REPLACE)
        (pod,) = sick.cluster.pods(MESH_PODS | {"shardmesh.io/pool": "b"})
        sick.cluster.delete_pod_at_once(pod.metadata.name)
        sick.until_settled(STORES + 1)
        sick.cluster.until(lambda: not _disk_trouble(sick), "its disks are healthy for the MeshCluster")
        until_silent(sick, {"DiskErrors", "DiskLost", "DamagedData"}, told)
