"""A new dataset waits until all daemons have the keys of its source: kubelets deliver them one by one."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshoperator.controllers.key_delivery import NO_KEYS, PATIENCE, require_keys
from meshoperator.daemon_client import DaemonClient, DaemonError, MeshAccess
from tests.support.daemon_cluster import DaemonCluster
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from pathlib import Path

require_etcd()


def test_a_daemon_that_lacks_the_keys_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "1.bin").write_bytes(b"one")
    origin: dict[str, Any] = {"url": f"file://{tmp_path}/source", "credentials": "keyed"}
    born = datetime.now(UTC)
    metadata = {"creationTimestamp": born.strftime("%Y-%m-%dT%H:%M:%SZ")}

    async def run(cluster: DaemonCluster) -> None:
        daemons = DaemonClient(cast("Any", None), time.time)
        pair = cluster.access_key, cluster.secret_key
        nodes = [MeshAccess(each, *pair) for each in cluster.endpoints.values()]
        first, second = cluster.nodes.values()

        async def check(later: float = 0) -> None:
            now = born.timestamp() + later
            await require_keys(daemons, nodes, "keyed", origin, metadata, now)

        try:
            with pytest.raises(DaemonError) as refused:
                await check()
            assert refused.value.code == NO_KEYS
            deliver(first.data_dir)
            made = await daemons.request_json(nodes[0], "PUT", "/-/buckets/keyed", origin)
            origin.update(made["origin"])
            await require_keys(daemons, nodes[:1], "keyed", origin, metadata, born.timestamp())
            with pytest.raises(DaemonError) as refused:
                await check()
            assert refused.value.code == NO_KEYS
            await check(PATIENCE + 2)  # its machine is broken: the others can read
            deliver(second.data_dir)
            await check()
            await require_keys(
                daemons,
                [*nodes, MeshAccess("http://127.0.0.1:9", "none", "none")],
                "keyed",
                origin,
                metadata,
                born.timestamp(),
            )
        finally:
            await daemons.aclose()

    with DaemonCluster.start(2) as cluster:
        asyncio.run(run(cluster))


def deliver(data_dir: Path) -> None:
    """As the kubelet does, into the volume of the Secret."""
    (data_dir / "origins").mkdir(exist_ok=True)
    (data_dir / "origins" / "keyed").write_bytes(b"aws_access_key_id=x\n")
