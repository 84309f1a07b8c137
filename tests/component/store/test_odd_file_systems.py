"""A node whose data lies on a file system in user space that tells no size and has no Unix sockets."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from meshd.cli.doctor import doctor
from tests.powercuts.scene import FILE_SYSTEM
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.fuse_mount import mounted, require_fuse

if TYPE_CHECKING:
    from collections.abc import Iterator

require_fuse()
_BODY = os.urandom(3 << 20)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    source, mount = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    mount.mkdir()
    with mounted(source, mount):
        yield mount / "data"


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("subtype=sshfs", "an index on a network file system may be damaged without notice"),
        ("direct_io", "cannot map files into shared memory"),
    ],
)
def test_an_index_that_would_not_be_safe_is_refused(tmp_path: Path, option: str, why: str) -> None:
    """With the way out, which works; the other directories of the node may be there, disks may, too."""
    source, mount, elsewhere = tmp_path / "source", tmp_path / "mount", tmp_path / "elsewhere"
    source.mkdir()
    mount.mkdir()
    with mounted(source, mount, option):
        with pytest.raises(DaemonFailedError) as refused:
            Daemon.start(data_dir=mount / "data")
        assert why in str(refused.value)
        assert "--index-dir" in str(refused.value)
        with Daemon.start(data_dir=elsewhere, args=["--disk", str(mount / "disk")]) as daemon:
            client = daemon.client()
            client.create_bucket(Bucket="bucket")
            client.put_object(Bucket="bucket", Key="a", Body=b"1")
            assert client.get_object(Bucket="bucket", Key="a")["Body"].read() == b"1"


def _diagnosis(data_dir: Path) -> list[str]:
    asked = CliRunner().invoke(doctor, ["--json", "--data-dir", str(data_dir)])
    problems = [problem for line in asked.output.splitlines() for problem in json.loads(line)["problems"]]
    assert asked.exit_code == bool(problems), asked.output
    return problems


def test_the_doctor_says_what_weakens_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, mount = tmp_path / "source", tmp_path / "mount"
    (source / "data").mkdir(parents=True)
    mount.mkdir()
    with mounted(source, mount, "subtype=sshfs"):
        assert "an index on a network file system" in _diagnosis(mount / "data")[0]
    monkeypatch.setenv("MESHD_DISK_TYPE", "rotational")
    with mounted(source, mount, "--seed", "1", "--delay", "0.006", module=FILE_SYSTEM):
        assert _diagnosis(mount / "data") == []
    assert not list((source / "data").iterdir())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # whose syncs are done at once
        assert "less than one turn of the platter" in _diagnosis(Path(place))[0]


def test_one_that_is_full_takes_deletes_and_then_writes(tmp_path: Path) -> None:
    """Its free bytes are unknown, so that only ENOSPC says that it is full."""
    source, mount, kept = tmp_path / "source", tmp_path / "mount", list[str]()
    refused = set[str]()
    source.mkdir()
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", source], check=True, timeout=30)
    try:
        with mounted(source, mount), Daemon.start(data_dir=mount / "data") as daemon:
            client = daemon.client()
            client.create_bucket(Bucket="bucket")

            def put(key: str) -> bool:
                try:
                    client.put_object(Bucket="bucket", Key=key, Body=_BODY)
                except client.exceptions.ClientError as error:
                    refused.add(error.response["Error"]["Code"])
                    return False
                return True

            while put(f"{len(kept)}"):
                kept.append(f"{len(kept)}")
            assert len(kept) > 8
            for key in kept[:8]:
                client.delete_object(Bucket="bucket", Key=key)
            for key in kept[8:]:
                assert client.get_object(Bucket="bucket", Key=key)["Body"].read() == _BODY
            until = time.monotonic() + 120
            while not put("again"):
                assert time.monotonic() < until, daemon.output()
                time.sleep(0.2)
            assert refused == {"InsufficientStorage"}
    finally:
        subprocess.run(["umount", "-l", source], check=True, timeout=30)


def test_it_serves_and_starts_again(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        with Daemon.start(data_dir=data_dir) as daemon:
            client = daemon.client()
            client.create_bucket(Bucket="bucket")
            client.put_object(Bucket="bucket", Key="large", Body=_BODY)
            for number in range(20):
                client.put_object(Bucket="bucket", Key=f"small-{number}", Body=b"%d" % number)
            client.delete_object(Bucket="bucket", Key="small-0")
            assert "cannot hold Unix sockets (Function not implemented): they are in" in daemon.output()
            (moved,) = Path(place).iterdir()
            assert any(moved.glob("*.sock"))
            assert not any((data_dir / "run").iterdir())
        with Daemon.start(data_dir=data_dir) as daemon:
            client = daemon.client()
            names = [each["Key"] for each in client.list_objects_v2(Bucket="bucket")["Contents"]]
            assert names == ["large", *sorted(f"small-{number}" for number in range(1, 20))]
            assert client.get_object(Bucket="bucket", Key="large")["Body"].read() == _BODY
