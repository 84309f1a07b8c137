"""Alerts that failures of disks bring about: full, filling, slow, broken. As test_alerts_fire.py."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.monitoring.alert_watch import netloc, watched
from tests.support.daemons import Daemon
from tests.support.fuse_mount import mounted, require_fuse
from tests.support.required import required_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.monitoring.alert_watch import Watch

require_fuse()
pytestmark = [required_program("prometheus", "apt install prometheus"), pytest.mark.timeout(300)]
MIB = 1 << 20
SIZE = 200 * MIB
OF_DISKS = {"DiskFull", "IndexFull", "DiskFills", "SlowDisk", "DiskErrors"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def nodes(place: Path) -> Iterator[dict[str, Daemon]]:
    """By the disk of each: a small file system of its own, one that is slow, one that breaks; and `index`,
    whose index is on a small one."""
    with ExitStack() as stack:
        for name in ("small", "index"):
            (place / name).mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place / name)]
            subprocess.run(command, check=True, timeout=30)
            stack.callback(subprocess.run, ["umount", "-l", str(place / name)], check=True, timeout=30)
        disks = {"small": place / "small"}
        for name in ("slow", "broken"):
            source, disk = place / f"{name}-source", place / name
            source.mkdir()
            disk.mkdir()
            stack.enter_context(mounted(source, disk, module="tests.monitoring.sick_disk"))
            disks[name] = disk
        found = {name: stack.enter_context(Daemon.start(disk / "data")) for name, disk in disks.items()}
        index = ["--index-dir", str(place / "index")]
        found["index"] = stack.enter_context(Daemon.start(place / "indexed", args=index))
        yield found


@pytest.fixture(scope="module")
def watch(place: Path, nodes: dict[str, Daemon]) -> Iterator[Watch]:
    prometheus = place / "prometheus"
    prometheus.mkdir()
    with watched(prometheus, list(nodes.values())) as found:
        yield found


def _write(daemon: Daemon, key: str, size: int = 1000) -> None:
    with suppress(ClientError, BotoCoreError):
        daemon.client().put_object(Bucket="disk", Key=key, Body=bytes(size))


def test_all_is_silent_before(watch: Watch, nodes: dict[str, Daemon]) -> None:
    for daemon in nodes.values():
        daemon.client().create_bucket(Bucket="disk")
        _write(daemon, "before")
        assert not watch.firing(netloc(daemon)) & OF_DISKS


def test_a_disk_that_fills_and_is_full(watch: Watch, nodes: dict[str, Daemon], place: Path) -> None:
    """Another program writes to it, a little at a time."""
    small, another = nodes["small"], (place / "small" / "another-program").open("wb", buffering=0)

    def more() -> None:
        with suppress(OSError):
            another.write(bytes(4 * MIB))

    with another:
        watch.expect("DiskFills", "DiskFull", node=small, again=more)


def test_a_file_system_of_the_index_that_is_full(watch: Watch, nodes: dict[str, Daemon], place: Path) -> None:
    with (place / "index" / "another-program").open("wb", buffering=0) as another, suppress(OSError):
        while True:
            another.write(bytes(4 * MIB))
    watch.expect("IndexFull", node=nodes["index"])


def test_a_disk_whose_syncs_take_long(watch: Watch, nodes: dict[str, Daemon], place: Path) -> None:
    (place / "slow-source" / "slow").touch()
    watch.expect("SlowDisk", node=nodes["slow"], again=lambda: _write(nodes["slow"], "slow"))
    (place / "slow-source" / "slow").unlink()
    assert "DiskErrors" not in watch.firing(netloc(nodes["slow"]))


def test_a_disk_with_errors(watch: Watch, nodes: dict[str, Daemon], place: Path) -> None:
    (place / "broken-source" / "broken").touch()
    watch.expect("DiskErrors", node=nodes["broken"], again=lambda: _write(nodes["broken"], "broken"))
    (place / "broken-source" / "broken").unlink()
