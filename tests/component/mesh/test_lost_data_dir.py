"""A node loses the device of its data directory, with the index, but none of its disks: real daemons."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.interpreters import program
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from pathlib import Path

require_etcd()

BUCKET = "things"
NODE = "n2"


def test_the_disks_say_whose_they_are(tmp_path: Path) -> None:
    disks = [word for name in ("one", "two") for word in ("--disk", str(tmp_path / "disks" / name))]
    with DaemonCluster.start(3, tmp_path, own={NODE: disks}) as mesh:
        client = mesh["n1"].client()
        client.create_bucket(Bucket=BUCKET)
        keys = [mesh.key_with_primary(NODE, BUCKET, f"k{number}") for number in range(20)]
        for key in keys:
            client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
        mesh.stop(NODE)
        mesh.await_state(NODE, "away")
        deleted, kept = keys[:5], keys[5:]
        for key in deleted:
            client.delete_object(Bucket=BUCKET, Key=key)
        mesh.remove_data(NODE)
        mesh[NODE].data_dir.mkdir()

        with pytest.raises(DaemonFailedError, match="or run meshd fsck --rebuild"):
            mesh.up(NODE)
        line = [program("meshd"), "fsck", "--data-dir", str(mesh[NODE].data_dir), *disks, "--rebuild"]
        subprocess.run(line, check=True, capture_output=True, timeout=60)
        alone = Daemon(mesh[NODE].data_dir, disks, {}, 1)
        try:
            with pytest.raises(DaemonFailedError, match="belongs to node n2 of a mesh"):
                alone.up()
        finally:
            alone.close()
        mesh.kill("n1")
        mesh.await_state("n1", "away")
        with pytest.raises(DaemonFailedError, match=r"the disks: bring the other nodes back first\. If"):
            mesh.up(NODE)
        mesh.up("n1")
        mesh.await_state("n1", "up")

        mesh.up(NODE)
        mesh.await_healthy()
        assert "its index was rebuilt from the disks: comparing it" in mesh[NODE].output()
        for node in mesh.nodes.values():
            s3 = node.client()
            listed = s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])
            assert {entry["Key"] for entry in listed} == set(kept)
            assert [s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in kept] == [
                key.encode() for key in kept
            ]
        mesh.stop(NODE)
        mesh.up(NODE)
        assert mesh[NODE].output().count("rebuilt from the disks") == 2  # refused once, compared once


def test_a_disk_of_another_node_is_not_used(tmp_path: Path) -> None:
    """Also while it is empty: both nodes would write the same files."""
    disks = {node: ["--disk", str(tmp_path / node / "disk")] for node in ("n1", "n2")}
    with DaemonCluster.start(2, own=disks) as mesh:
        mesh.stop("n2")
        before = mesh["n2"].args
        mesh["n2"].args = (*before, *disks["n1"])
        with pytest.raises(DaemonFailedError, match="n1/disk is in use by another meshd"):
            mesh.up("n2")
        mesh.stop("n1")
        with pytest.raises(DaemonFailedError, match="disk is a disk of node n1, and this is n2: mount each"):
            mesh.up("n2")
        mesh.up("n1")
        mesh["n1"].client().create_bucket(Bucket=BUCKET)
        mesh["n2"].args = before
        mesh.up("n2")
        mesh.await_healthy()
