"""Bits that flip on the disks of a mesh of real daemons: right bytes from every node, sound copies again."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from meshd.config import StoreSettings
from meshd.store.disks.layout import Disks, read_marker
from meshd.store.index.index import Index
from meshd.store.tools.fsck import check_store
from meshd.util.clock import SystemClock
from tests.support import native_fixtures as native
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.interpreters import program
from tests.support.job_fixtures import done, members, objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from meshd.store.records import Record

NODES = ("n1", "n2", "n3")
_clock = SystemClock()


class Disk:
    """What a daemon has on its disk, seen from outside."""

    def __init__(self, daemon: Daemon) -> None:
        self.settings = StoreSettings.at(daemon.data_dir)
        marker = read_marker(daemon.data_dir)
        assert marker is not None
        self._disks = Disks({marker.disk: daemon.data_dir})

    def get(self, key: str) -> Record | None:
        index = Index(self.settings.index_dir, map_bytes=1 << 36, readonly=True)
        try:
            return index.get("rot", key)
        finally:
            index.close()

    def read(self, record: Record) -> bytes:
        found = b""
        for extent in record.extents:
            with open(self._disks.path(extent.disk, extent.file), "rb") as file:
                found += os.pread(file.fileno(), extent.length, extent.offset)
        return found

    def flip(self, key: str, at: int = 0) -> None:
        record = self.get(key)
        assert record is not None
        extent = record.extents[0]
        with open(self._disks.path(extent.disk, extent.file), "r+b") as file:
            byte = os.pread(file.fileno(), 1, extent.offset + at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 0x10]), extent.offset + at)
            os.fsync(file.fileno())


@pytest.fixture(scope="module")
def started() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(3, workers=2) as found:
        for bucket in ("rot", "made"):
            found["n1"].client().create_bucket(Bucket=bucket)
        yield found


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


def _command(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    return _mesh(daemon, "cluster", *words)


def _mesh(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    line = [program("mesh"), *words]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=110)


def _fill(mesh: DaemonCluster, sizes: Mapping[str, int]) -> dict[str, bytes]:
    client, bodies = mesh["n1"].client(), {}
    for key, size in sizes.items():
        bodies[key] = os.urandom(size)
        client.put_object(Bucket="rot", Key=key, Body=bodies[key])
    return bodies


def _damage(mesh: DaemonCluster, bodies: Mapping[str, bytes]) -> None:
    """One copy of each, now of this node, now of that one."""
    mesh.await_map(lambda found: not found.is_rebalancing and all(node.state == "up" for node in found.nodes))
    for number, (key, body) in enumerate(bodies.items()):
        holders = _await_two(mesh, key)
        holders[number % 2].flip(key, number * 997 % len(body))


def _await_two(mesh: DaemonCluster, key: str) -> list[Disk]:
    """Who has it. A third one, from when a node was slow to answer and taken for gone, is let go of."""
    deadline = _clock.monotonic() + 60
    while True:
        found = [disk for name in NODES if (disk := Disk(mesh[name])).get(key) is not None]
        if len(found) == 2:
            return found
        assert _clock.monotonic() < deadline, (key, len(found), mesh.output())
        threading.Event().wait(0.2)


def _sound(mesh: DaemonCluster, bodies: Mapping[str, bytes]) -> list[str]:
    """Copies that are not as they were written."""
    bad = []
    for name in NODES:
        disk = Disk(mesh[name])
        for key, body in bodies.items():
            record = disk.get(key)
            if record is not None and (record.broken or disk.read(record) != body):
                bad.append(f"{key} of {name}")
    return bad


def _await_sound(mesh: DaemonCluster, bodies: Mapping[str, bytes]) -> None:
    deadline = _clock.monotonic() + 60
    while bad := _sound(mesh, bodies):
        assert _clock.monotonic() < deadline, (bad, mesh.output())
        threading.Event().wait(0.1)


def _read_everywhere(mesh: DaemonCluster, bodies: Mapping[str, bytes]) -> None:
    for name in NODES:
        client = mesh[name].client()
        for key, body in bodies.items():
            assert client.get_object(Bucket="rot", Key=key)["Body"].read() == body, (name, key)


def test_small_objects_are_right_from_every_node_at_once_and_restored(mesh: DaemonCluster) -> None:
    bodies = _fill(mesh, {f"small-{number}": 1000 + 700 * number for number in range(24)})
    _damage(mesh, bodies)
    assert _sound(mesh, bodies)
    _read_everywhere(mesh, bodies)
    _await_sound(mesh, bodies)
    _read_everywhere(mesh, bodies)


def test_a_scrub_finds_what_nobody_read_and_restores_it(mesh: DaemonCluster) -> None:
    sizes = {"large": 5 << 20, "middle": 700_000, "tiny": 10, "range": 300_000}
    bodies = _fill(mesh, sizes)
    _damage(mesh, bodies)
    done = _command(mesh["n2"], "scrub", "--wait", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["nodes"]
    assert set(told) == set(NODES)
    assert sum(node["damaged"] for node in told.values()) == len(sizes)
    assert sum(node["mended"] for node in told.values()) == len(sizes)
    assert not any(node["quarantined"] for node in told.values())
    assert _sound(mesh, bodies) == []
    _read_everywhere(mesh, bodies)


def test_batches_and_samples_take_another_owners_bytes(mesh: DaemonCluster) -> None:
    bodies = {f"samples/{number:02}.png": native.png(number) for number in range(16)}
    client = mesh["n1"].client()
    for key, body in bodies.items():
        client.put_object(Bucket="rot", Key=key, Body=body)
    wires = [native.Mesh(mesh[name].endpoint, mesh.access_key, mesh.secret_key) for name in NODES]
    snapshot = wires[0].snapshot("s3://rot/samples/", {"image": {"ext": ["png"]}})["snapshot"]
    first = secrets.randbelow(1 << 20)  # of epochs that nobody has asked for
    plain, cropped = (wires[0].plan(snapshot, ops)["plan"] for ops in ([], native.CROP))
    for plan, form in ((plain, "samples"), (cropped, "tensors")):
        _damage(mesh, bodies)
        for epoch, wire in enumerate(wires, first):
            deadline = _clock.monotonic() + 60
            while True:  # what is damaged is refused, or an item that failed, and is looked at
                answer = wire.raw(plan, epoch, 0, batch=16, format=form)
                assert answer.status in (200, 503), answer.body
                whole = form == "tensors" or all(body in answer.body for body in bodies.values())
                if answer.status == 200 and whole:
                    break
                assert _clock.monotonic() < deadline, answer.body
                threading.Event().wait(0.2)
        _await_sound(mesh, bodies)
    for wire in wires:
        wire.close()


def test_a_row_takes_another_owners_bytes_of_what_it_is_mixed_with(mesh: DaemonCluster) -> None:
    """Of each pair the second one is damaged, somewhere: the first one's row is the first to miss it."""
    bodies = {f"pairs/{number:02}.png": native.png(number) for number in range(8)}
    client = mesh["n1"].client()
    for key, body in bodies.items():
        client.put_object(Bucket="rot", Key=key, Body=body)
    wires = [native.Mesh(mesh[name].endpoint, mesh.access_key, mesh.secret_key) for name in NODES]
    snapshot = wires[0].snapshot("s3://rot/pairs/", {"image": {"ext": ["png"]}})["snapshot"]
    done = [*native.CROP[:2], {"op": "mixup", "field": "image"}]
    plan = wires[0].plan(snapshot, done, shuffle={"kind": "none"})["plan"]
    _damage(mesh, dict(list(bodies.items())[1::2]))
    deadline = _clock.monotonic() + 60
    for epoch, wire in enumerate(wires, secrets.randbelow(1 << 20)):
        while (answer := wire.raw(plan, epoch, 0, batch=8)).status != 200:
            assert answer.status == 503, answer.body
            assert _clock.monotonic() < deadline, answer.body
            threading.Event().wait(0.2)
        wire.close()
    _await_sound(mesh, bodies)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("runner", NODES)
def test_jobs_take_another_owners_bytes(mesh: DaemonCluster, runner: str) -> None:
    """One copy of each source is damaged, here that of the node that runs them, there another's: of small
    objects, of large ones, and of such as are read a piece at a time."""
    sizes = {f"jobs-{runner}/{number:02}": 1000 + 70_000 * (number % 4) for number in range(12)}
    bodies = _fill(mesh, sizes | {f"jobs-{runner}/large-{number}": (5 << 19) + number for number in range(4)})
    _damage(mesh, bodies)
    target = f"{secrets.token_hex(4)}/"
    done(mesh[runner], kind="shard", source=f"s3://rot/jobs-{runner}", target=f"s3://made/{target}", count=2)
    made = members(*objects(mesh["n1"].client(), "made", target).values())
    assert made == {key.partition("/")[2]: body for key, body in bodies.items()}
    assert _command(mesh[runner], "scrub", "--wait").returncode == 0  # copies that were not asked for, too
    assert _sound(mesh, bodies) == []


def test_what_is_damaged_everywhere_is_refused_by_every_node(mesh: DaemonCluster) -> None:
    bodies = _fill(mesh, {"both": 4000})
    for name in NODES:
        if Disk(mesh[name]).get("both") is not None:
            Disk(mesh[name]).flip("both")
    for name in NODES:
        with pytest.raises(ClientError, match="InternalError"):
            mesh[name].client().get_object(Bucket="rot", Key="both")
        refused = _mesh(mesh[name], "cat", "s3://rot/both")
        assert "damaged" in refused.stderr
        assert "gave up" not in refused.stderr, "nothing is gained by more attempts"
    mesh["n1"].client().put_object(Bucket="rot", Key="both", Body=bodies["both"])
    _read_everywhere(mesh, bodies)
    assert _sound(mesh, bodies) == []


def _batch_of(mesh: DaemonCluster, folder: str) -> tuple[Callable[[str, int], Any], list[str]]:
    """What reads a batch of three pictures at a node in an epoch, and the nodes that store the last one."""
    client, last = mesh["n1"].client(), f"{folder}/2.png"
    for number in range(3):
        client.put_object(Bucket="rot", Key=f"{folder}/{number}.png", Body=native.png(number))
    _await_two(mesh, last)
    holders = [name for name in NODES if Disk(mesh[name]).get(last) is not None]
    with closing(native.Mesh(mesh["n1"].endpoint, mesh.access_key, mesh.secret_key)) as wire:
        snapshot = wire.snapshot(f"s3://rot/{folder}/", {"image": {"ext": ["png"]}})["snapshot"]
        plan = wire.plan(snapshot, native.CROP)["plan"]

    def read(name: str, epoch: int) -> Any:
        with closing(native.Mesh(mesh[name].endpoint, mesh.access_key, mesh.secret_key)) as wire:
            return wire.raw(plan, epoch, 0, batch=3)

    return read, holders


def _is_read_at(read: Callable[[str, int], Any], name: str) -> bool:
    return bool(read(name, 0).status == 200)


def _is_busy_at(read: Callable[[str, int], Any], name: str) -> bool:
    return bool(read(name, 0).status == 503)


def _is_final_at(read: Callable[[str, int], Any], name: str) -> bool:
    answer = read(name, 0)
    return answer.status == 500 and "damaged" in native.error(answer)["detail"]


def test_a_batch_of_what_is_damaged_everywhere_is_refused_for_good(mesh: DaemonCluster) -> None:
    read, holders = _batch_of(mesh, "lost")
    for name in holders:
        Disk(mesh[name]).flip("lost/2.png", 20)
    for name in NODES:
        await_true(partial(_is_final_at, read, name), told=partial(read, name, 0))
    mesh["n1"].client().put_object(Bucket="rot", Key="lost/2.png", Body=native.png(2))
    for name in NODES:
        await_true(partial(_is_read_at, read, name))


def test_a_batch_is_tried_again_while_a_node_that_is_away_may_have_a_copy(mesh: DaemonCluster) -> None:
    read, holders = _batch_of(mesh, "held")
    mesh.stop(holders[1])
    mesh.await_state(holders[1], "away")
    Disk(mesh[holders[0]]).flip("held/2.png", 20)
    running = [name for name in NODES if name != holders[1]]
    for name in running:  # until the damage is in quarantine
        await_true(partial(_is_busy_at, read, name), told=partial(read, name, 0))
    for epoch in range(5):
        assert [read(name, epoch).status for name in running] == [503, 503]
    mesh.up(holders[1])
    for name in NODES:
        await_true(partial(_is_read_at, read, name))
    assert _command(mesh[holders[0]], "scrub", "--wait").returncode == 0


def test_a_node_whose_only_disk_fails_ends_and_the_others_go_on(mesh: DaemonCluster) -> None:
    bodies = _fill(mesh, {f"kept-{number}": 5000 for number in range(20)})
    try:
        mesh.add("n4", env={"MESHD_FAILPOINTS": "store.probe.0=error:after 1"})
        deadline = _clock.monotonic() + 60
        while mesh["n4"].running:
            assert _clock.monotonic() < deadline, mesh["n4"].output()
            threading.Event().wait(0.1)
        mesh.kill("n4")  # it is over: its pipes are closed
        mesh.await_state("n4", "away")
        client = mesh["n2"].client()
        for key, body in bodies.items():
            assert client.get_object(Bucket="rot", Key=key)["Body"].read() == body
            client.put_object(Bucket="rot", Key=key, Body=body)
        with pytest.raises(DaemonFailedError, match="every disk of this node has failed"):
            mesh.up("n4")
    finally:
        mesh.remove_lost("n4")


def test_fsck_agrees_when_all_is_over(mesh: DaemonCluster) -> None:
    for name in NODES:
        mesh.stop(name)
    for name in NODES:
        assert check_store(Disk(mesh[name]).settings).problems == []


def test_the_only_copy_is_refused_until_it_is_put_again() -> None:
    with Daemon.start() as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="rot")
        client.put_object(Bucket="rot", Key="k", Body=b"k" * 2000)
        client.put_object(Bucket="rot", Key="other", Body=b"o" * 2000)
        Disk(daemon).flip("k")
        with pytest.raises(ClientError, match=r"InternalError.*rot/k is damaged on disk; put"):
            client.get_object(Bucket="rot", Key="k")
        done = _command(daemon, "scrub", "--wait")
        assert (done.returncode, "1 in quarantine" in done.stdout) == (1, True), done
        found: dict[str, Any] = client.head_object(Bucket="rot", Key="k")
        assert found["ContentLength"] == 2000
        with pytest.raises(ClientError, match=r"InternalError.*rot/k is damaged on disk; put"):
            client.get_object(Bucket="rot", Key="k", Range="bytes=0-9")
        refused = _mesh(daemon, "cat", "s3://rot/k")
        assert "rot/k is damaged on disk" in refused.stderr
        assert "gave up" not in refused.stderr, "nothing is gained by more attempts"
        assert client.get_object(Bucket="rot", Key="other")["Body"].read() == b"o" * 2000
        client.put_object(Bucket="rot", Key="k", Body=b"again")
        assert client.get_object(Bucket="rot", Key="k")["Body"].read() == b"again"
        assert _command(daemon, "scrub", "--wait").returncode == 0


def test_batches_name_an_object_in_quarantine_and_the_log_is_not_filled() -> None:
    with Daemon.start() as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="rot")
        for number in range(4):
            client.put_object(Bucket="rot", Key=f"s/{number}.png", Body=native.png(number))
        wire = native.Mesh(daemon.endpoint, daemon.access_key, daemon.secret_key)
        snapshot = wire.snapshot("s3://rot/s/", {"image": {"ext": ["png"]}})["snapshot"]
        plans = [wire.plan(snapshot, ops)["plan"] for ops in ([], native.CROP)]
        Disk(daemon).flip("s/3.png", 20)
        assert "1 in quarantine" in _command(daemon, "scrub", "--wait").stdout
        said = daemon.output()
        for epoch in range(3):
            assert wire.raw(plans[0], epoch, 0, batch=4, format="samples").status == 200
            error = native.error(wire.raw(plans[1], epoch, 0, batch=4))
            assert (error["code"], error["detail"]["damaged"]) == ("CorruptData", True)
            assert "s3://rot/s/3.png is damaged on disk" in error["message"]
            with pytest.raises(ClientError, match="InternalError"):
                client.get_object(Bucket="rot", Key="s/3.png")
        assert daemon.output() == said
        wire.close()
