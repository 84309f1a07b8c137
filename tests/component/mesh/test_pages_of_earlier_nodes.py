"""Snapshots in a mesh that is upgraded node by node from the release before pages; real daemons, an etcd."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk
from meshwire.dataset.paged_snapshot import PagedSnapshot
from tests.support.archive_files import tar_of
from tests.support.daemon_cluster import DaemonCluster
from tests.support.earlier_release import BEFORE_PAGES, unpack
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

require_etcd()

KINDS = ("lines", "tar")
FIELDS: dict[str, Any] = {"lines": {"text": "txt"}, "tar": {"text": "txt", "label": {"class": "prefix"}}}
SHARDS, ROWS, BATCH = 6, 20, 10


def shard(kind: str, number: int) -> bytes:
    rows = [b"%d %d" % (number, row) for row in range(ROWS)]
    if kind == "lines":
        return b"\n".join(rows)
    return tar_of({f"{'ab'[row % 2]}/{row:03}.txt": text for row, text in enumerate(rows)})


class Training:
    """Loaders of all kinds at one node."""

    def __init__(self, mesh: DaemonCluster, node_id: str) -> None:
        self.client = meshsdk.connect(
            mesh[node_id].endpoint, access_key=mesh.access_key, secret_key=mesh.secret_key
        )
        self.datasets = {kind: self.open(kind) for kind in KINDS}

    def open(self, kind: Any) -> meshsdk.Dataset:
        return meshsdk.open(f"s3://{kind}", FIELDS[kind], kind=kind, client=self.client)

    def hashes(self) -> list[str]:
        return [found.snapshot.hash for found in self.datasets.values()]

    def loader(self, kind: str) -> meshsdk.Loader:
        return meshsdk.Loader(self.datasets[kind], BATCH, seed=5, shuffle=True, deadline=60.0)

    def close(self) -> None:
        self.client.close()


def rows_of(batches: Iterator[Any]) -> list[list[bytes]]:
    return [[bytes(text) for text in batch["text"]] for batch in batches]


@pytest.mark.sampled(3)
@pytest.mark.timeout(400)
def test_pages_wait_for_the_last_node_and_loops_go_on(tmp_path: Path) -> None:
    checkout = unpack(BEFORE_PAGES, tmp_path / "before", "meshd", "sdk")
    with DaemonCluster.start(3, checkout=checkout) as mesh:
        s3 = mesh["n1"].client()
        for kind in KINDS:
            s3.create_bucket(Bucket=kind)
            for number in range(SHARDS):
                key = f"{number}.{'txt' if kind == 'lines' else 'tar'}"
                s3.put_object(Bucket=kind, Key=key, Body=shard(kind, number))
        states, expected = dict[str, Any](), dict[str, Any]()
        with closing(Training(mesh, "n1")) as before:
            former = before.hashes()
            for kind in KINDS:
                loader = before.loader(kind)
                batches = iter(loader)
                first = [next(batches) for _ in range(3)]
                states[kind] = json.loads(json.dumps(loader.state_dict()))
                assert len(rows_of(iter(first))) == 3
                expected[kind] = rows_of(batches)
                loader.close()

        def resume(node_id: str) -> list[str]:
            """Open all sources at a node, go on where the loops of the earlier release were, and return the
            snapshots."""
            with closing(Training(mesh, node_id)) as now:
                for kind in KINDS:
                    with now.loader(kind) as loader:
                        loader.load_state_dict(states[kind])
                        assert rows_of(iter(loader)) == expected[kind]
                return now.hashes()

        for node_id in ("n2", "n3"):
            upgrade(mesh, node_id)
        for kind, ending in (
            ("lines", "txt"),
            ("tar", "tar"),
        ):  # of new content, which no node has indexed yet
            s3.put_object(Bucket=kind, Key=f"9.{ending}", Body=shard(kind, 9))
        found = [Training(mesh, node_id) for node_id in mesh.nodes]
        for each in found[1:]:
            assert each.hashes() == found[0].hashes()
            assert not any(isinstance(of.manifest(), PagedSnapshot) for of in each.datasets.values())
        for each in found:
            each.close()
        for kind, ending in (("lines", "txt"), ("tar", "tar")):
            s3.delete_object(Bucket=kind, Key=f"9.{ending}")
        assert [resume(node_id) for node_id in mesh.nodes] == [former] * 3
        upgrade(mesh, "n1")
        paged = [resume(node_id) for node_id in mesh.nodes]
        assert paged == [paged[0]] * 3
        assert not set(paged[0]) & set(former)
        with closing(Training(mesh, "n1")) as now:
            assert all(isinstance(of.manifest(), PagedSnapshot) for of in now.datasets.values())
        assert "Traceback" not in mesh.output()


def upgrade(mesh: DaemonCluster, node_id: str) -> None:
    assert mesh[node_id].stop() == 0
    mesh[node_id].checkout = None
    mesh.up(node_id)
    mesh.await_map(lambda found: not found.is_rebalancing and all(each.state == "up" for each in found.nodes))
