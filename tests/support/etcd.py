"""An etcd cluster that tests operate: find its leader, save and restore its data."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from pathlib import Path

from meshd.process.local_etcd import EtcdCluster, find_etcd


class OperatedEtcd(EtcdCluster):
    """An `EtcdCluster`, and what an operator does with one."""

    def __enter__(self) -> OperatedEtcd:
        super().__enter__()
        return self

    def leader(self) -> int:
        """Return the number of the leading member."""
        for number in self._running:
            with closing(self.gateway(members=(self.members[number],))) as gateway:
                status = gateway.call("maintenance/status", {}, repeatable=True)
            if status["leader"] == status["header"]["member_id"]:
                return number
        raise AssertionError("no etcd member is the leader")

    def save_snapshot(self, backup: Path) -> None:
        """Save a snapshot of the cluster's data to a file."""
        _tool("etcdctl", f"--endpoints={self._scheme}://{self.members[0]}", "snapshot", "save", str(backup))

    def restore_snapshot(self, backup: Path) -> None:
        """Restore the only member, which must not run, from a file."""
        directory, peer = self._place / "m0", f"http://127.0.0.1:{self._peers[0]}"
        shutil.rmtree(directory)
        about = ("--name=m0", f"--initial-cluster=m0={peer}", f"--initial-advertise-peer-urls={peer}")
        _tool("etcdutl", "snapshot", "restore", str(backup), *about, f"--data-dir={directory}")

    def remove_data(self) -> None:
        """Remove the data of the only member, which must not run."""
        shutil.rmtree(self._place / "m0")


def _tool(name: str, *args: str) -> None:
    subprocess.run([Path(find_etcd()).with_name(name), *args], check=True, capture_output=True, timeout=60)
