"""Devices that really fail, under a mesh of real daemons: a loop device that gives EIO, file systems that are
frozen, unmounted or read-only while they are in use, an index that cannot be read any more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from meshsdk.cli.cluster import cluster
from tests.component.mesh.test_mesh_disks import _await, _env, _fill, _read_everywhere, _scrub
from tests.support.attack_costs import timed
from tests.support.bounded_wait import await_end
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import DaemonFailedError
from tests.support.fork_server import outcome_of
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

require_etcd()
_SIZE = 96 << 20
_TOOLS = ("losetup", "mkfs.ext4", "fsck.ext4", "filefrag", "fsfreeze", "umount")


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@cache
def _available() -> bool:
    """Whether file systems can be made and mounted here."""
    if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        return False
    with suppress(subprocess.CalledProcessError):
        return bool(_run("losetup", "-f"))
    return False


pytestmark = pytest.mark.skipif(not _available(), reason="not run here: takes root, loop devices and mounts")


def _mount(place: Path) -> None:
    _run("mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """n2 has a disk on a loop device, n3 its index on a file system of its own."""
    place = tmp_path_factory.mktemp("devices")
    for name in ("one", "two", "index"):
        (place / name).mkdir()
    with ExitStack() as ends:
        for name in ("two", "index"):
            image = place / f"{name}.image"
            image.touch()
            os.truncate(image, _SIZE)
            _run("mkfs.ext4", "-q", "-m", "0", str(image))
            device = _run("losetup", "-f", "--show", str(image))
            ends.callback(subprocess.run, ["losetup", "-d", device], check=False, timeout=60)
            _run("mount", "-o", "errors=remount-ro", device, str(place / name))
            ends.callback(subprocess.run, ["umount", "-l", str(place / name)], check=False, timeout=60)
        yield place


def _device(place: Path) -> str:
    """Which is mounted there."""
    return next(
        line.split()[0]
        for line in Path("/proc/mounts").read_text().splitlines()
        if line.split()[1] == str(place)
    )


@pytest.fixture(scope="module")
def mesh(place: Path) -> Iterator[DaemonCluster]:
    own = {
        "n2": ["--disk", str(place / "one"), "--disk", str(place / "two")],
        "n3": ["--index-dir", str(place / "index" / "n3"), "--disk", str(place / "mesh" / "n3" / "data")],
    }
    (place / "mesh" / "n3" / "data").mkdir(parents=True)
    sooner = {"MESHD_HANG_TIMEOUT": "30"}
    with DaemonCluster.start(3, place / "mesh", workers=2, own=own, env=sooner) as found:
        found["n1"].client().create_bucket(Bucket="disks")
        yield found


def _middle_of_largest(place: Path, prefix: str) -> int:
    """Where on its device the second half of the largest object with a prefix begins."""
    found = list[tuple[int, int, Path]]()
    for file in place.glob("extents/*/*.tar"):
        with tarfile.open(file) as members:
            found += [(each.size, each.offset_data, file) for each in members if each.name.startswith(prefix)]
    size, offset, file = max(found)
    return _place_on_device(file, offset + size // 2)


def _place_on_device(file: Path, offset: int) -> int:
    """The offset on its device, in bytes, of the block of a file with this offset."""
    block = offset // 4096
    for line in _run("filefrag", "-v", "-b4096", str(file)).splitlines():
        extent = re.match(r" *\d+: +(\d+)\.\. *(\d+): +(\d+)\.\.", line)
        if extent is not None and int(extent[1]) <= block <= int(extent[2]):
            return (int(extent[3]) + block - int(extent[1])) * 4096
    raise AssertionError(f"{file} has no block {block}")


def _end_device(place: Path, size: int) -> None:
    """What lies behind gives EIO, no zeros."""
    os.truncate(place / "two.image", size)
    _run("losetup", "--set-capacity", _device(place / "two"))
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")


def _status(mesh: DaemonCluster) -> str:
    return CliRunner().invoke(cluster, ["status"], env=_env(mesh)).output


def _restored(mesh: DaemonCluster, why: str) -> bool:
    """n2 goes on with one disk, says why, and lacks nothing."""
    told = _scrub(mesh)
    out = [disk["why"] for disk in told["disks"] if not disk["serves"]]
    return len(out) == 1 and why in out[0] and not told["quarantined"] and told["compared"]


def _serves(mesh: DaemonCluster) -> bool:
    return all(disk["serves"] for disk in _scrub(mesh)["disks"])


@contextmanager
def _frozen(place: Path) -> Iterator[None]:
    """What writes there waits in the kernel, and cannot be killed."""
    _run("fsfreeze", "--freeze", str(place))
    try:
        yield
    finally:
        _run("fsfreeze", "--unfreeze", str(place))


def test_a_device_that_hangs(mesh: DaemonCluster, place: Path) -> None:
    bodies = _fill(mesh, 8, "before")
    with _frozen(place / "two"):
        with timed("a disk hangs: until the node is away"):
            _await(mesh, lambda: _state(mesh, "n2") == "away")
        bodies |= _fill(mesh, 8, "hanging")
        _await(mesh, lambda: f"{place / 'two'} has not answered since" in _status(mesh))
        # The map may know it before the next probe sets the metric.
        _await(mesh, lambda: mesh.metric("n2", "meshd_store_disk_silent_seconds") >= 15)
    mesh.await_state("n2", "up")
    _read_everywhere(mesh, bodies)
    _await(mesh, lambda: "has not answered" not in _status(mesh))
    assert not mesh.metric("n2", "meshd_store_disks_lost")


def _state(mesh: DaemonCluster, node_id: str) -> str:
    node = mesh.map_of("n1").node(node_id)
    return "" if node is None else node.state


def test_a_device_that_gives_errors_and_one_that_is_unmounted(mesh: DaemonCluster, place: Path) -> None:
    bodies = _fill(mesh, 16, "real")
    os.sync()
    _end_device(place, _middle_of_largest(place / "two", "disks/real"))
    with timed("EIO under data: every object read at every node"):
        _read_everywhere(mesh, bodies)  # also what begins on sound sectors: it goes on from another node
    assert mesh.metric("n2", "meshd_reads_continued_total") or not _serves(mesh)
    mesh.kill("n2")
    _end_device(place, 1 << 20)
    (mesh["n2"].data_dir / "cache" / "boot").write_text("another")  # as if the machine had gone down
    mesh.up("n2")
    _read_everywhere(mesh, bodies)
    with timed("EIO under data: until the disk is out of service and its copies are restored"):
        _await(mesh, lambda: _restored(mesh, "failed"))
    _read_everywhere(mesh, bodies)
    assert "put an empty disk in its place" in _status(mesh)
    _run("umount", "-l", str(place / "two"))
    _mount(place / "two")
    _await(mesh, lambda: _serves(mesh))
    bodies |= _fill(mesh, 4, "after")
    over, wrong = threading.Event(), list[str]()

    def read() -> None:
        client = mesh["n2"].client()
        while not over.is_set():
            for key, body in bodies.items():
                if client.get_object(Bucket="disks", Key=key)["Body"].read() != body:
                    wrong.append(key)
                over.wait(0.02)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        _run("umount", "-l", str(place / "two"))
        _await(mesh, lambda: _restored(mesh, "not mounted: mount an empty file system there"))
    finally:
        over.set()
        await_end(reader)
    assert wrong == []
    _mount(place / "two")
    _await(mesh, lambda: _serves(mesh))
    _read_everywhere(mesh, bodies)


def _repaired(device: str) -> bool:
    """Whether the file system is whole; not while a mount namespace of another test still has it mounted."""
    done = subprocess.run(["fsck.ext4", "-fy", device], check=False, capture_output=True, timeout=60)
    return done.returncode <= 1


def test_an_index_on_a_file_system_that_becomes_read_only(mesh: DaemonCluster, place: Path) -> None:
    bodies = _fill(mesh, 8, "index")
    device = _device(place / "index")
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("damage")
    with timed("read-only index: until the node has ended and is away"):
        _await(mesh, lambda: not mesh["n3"].running)  # the others wait for nothing then
        mesh.await_state("n3", "away")
    _await(mesh, lambda: "holds the index and has failed: Read-only file system" in _status(mesh))
    bodies |= _fill(mesh, 4, "meanwhile")
    mesh.stop("n3")
    assert "the device of this node's index has failed" in mesh["n3"].output()
    _run("umount", str(place / "index"))
    _await(mesh, lambda: _repaired(device))
    _run("mount", "-o", "errors=remount-ro", device, str(place / "index"))
    mesh.up("n3")
    mesh.await_state("n3", "up")
    _read_everywhere(mesh, bodies)
    _await(mesh, lambda: "holds the index" not in _status(mesh))


def test_an_index_that_cannot_be_read(mesh: DaemonCluster, place: Path) -> None:
    """Each read of what is mapped is a SIGBUS, as of a device that gives EIO."""
    bodies = _fill(mesh, 8, "torn")
    os.truncate(place / "index" / "n3" / "data.mdb", 8192)
    with timed("SIGBUS of the index: until the node has ended and is away"):
        _await(mesh, lambda: not mesh["n3"].running)
        mesh.await_state("n3", "away")
    _read_everywhere_but(mesh, bodies)
    mesh.stop("n3")
    assert "killed by SIGBUS" in mesh["n3"].output()
    _await(mesh, lambda: "holds the index and cannot be read; the node has stopped" in _status(mesh))
    said = r"cannot be read from its device .* meshd fsck --rebuild"
    with pytest.raises(DaemonFailedError, match=said):
        mesh.up("n3")  # it does not go round
    words = ["--data-dir", str(mesh["n3"].data_dir), "--index-dir", str(place / "index" / "n3")]
    words += ["--disk", str(mesh["n3"].data_dir / "data")]
    done = outcome_of("fsck", "--rebuild", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    mesh.up("n3")
    mesh.await_state("n3", "up")
    _read_everywhere(mesh, bodies)


def _read_everywhere_but(mesh: DaemonCluster, bodies: dict[str, bytes]) -> None:
    client = mesh["n1"].client()
    for key, body in bodies.items():
        assert client.get_object(Bucket="disks", Key=key)["Body"].read() == body
