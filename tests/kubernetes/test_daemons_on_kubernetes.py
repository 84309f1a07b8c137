"""Real daemons whose control store is a real Kubernetes API."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from pathlib import Path


def test_daemons_meet_and_are_one_store(kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "MESHD_ROOT_ACCESS_KEY": "MESHROOTKUBE",
        "MESHD_ROOT_SECRET_KEY": "a-secret-of-many-letters",
    }
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(
                Daemon.start(
                    tmp_path / name,
                    args=["--control", f"kubernetes://{namespace}/mesh", "--node-id", name, "--lease", "10"],
                    env=environment,
                )
            )
            for name in ("n1", "n2")
        ]
        one, other = (daemon.client() for daemon in daemons)
        one.create_bucket(Bucket="photos")
        for number in range(8):
            one.put_object(Bucket="photos", Key=f"{number}.txt", Body=b"%d" % number)
        assert [bucket["Name"] for bucket in other.list_buckets()["Buckets"]] == ["photos"]
        for number in range(8):
            assert other.get_object(Bucket="photos", Key=f"{number}.txt")["Body"].read() == b"%d" % number
