"""All nodes of a mesh are killed at once, and one of them does not come back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from pathlib import Path

require_etcd()
OBJECTS = 24
LEASE = 2.0


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_the_others_have_all_of_it(tmp_path: Path, lost: str) -> None:
    """None of them had accepted anything without the others, whichever the map names last."""
    back = "n2" if lost == "n1" else "n1"
    with DaemonCluster.start(3, tmp_path, lease=LEASE) as mesh:
        client = mesh["n3"].client()
        client.create_bucket(Bucket="bucket")
        for number in range(OBJECTS):
            client.put_object(Bucket="bucket", Key=f"{number}", Body=b"%d" % number)
        for node_id in ("n1", "n2", "n3"):
            mesh.kill(node_id)
        threading.Event().wait(2 * LEASE)  # a machine takes longer to start than that
        mesh.up("n3")
        cluster = mesh.await_map(lambda found: [node.state for node in found.nodes] == ["away", "away", "up"])
        assert len({node.turned for node in cluster.nodes if node.state == "away"}) == 1, cluster.nodes
        mesh.up(back)
        mesh.await_state(back, "up", "returning")

        def refused() -> list[int]:
            found = []
            for number in range(OBJECTS):
                try:
                    answer = mesh["n3"].client().get_object(Bucket="bucket", Key=f"{number}")
                    assert answer["Body"].read() == b"%d" % number
                except ClientError:
                    found.append(number)
            return found

        await_true(lambda: not refused(), told=lambda: f"refused: {refused()}")
        client.put_object(Bucket="bucket", Key="0", Body=b"after")
        mesh.up(lost)
        mesh.await_map(lambda found: all(node.state == "up" for node in found.nodes))
        for node in mesh.nodes.values():
            assert node.client().get_object(Bucket="bucket", Key="0")["Body"].read() == b"after"
