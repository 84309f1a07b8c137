"""Batches whose rows come from the nodes that hold them: the same bytes, and none of them between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import meshsdk
from meshd.telemetry import metrics
from meshsdk import ops
from tests.component.mesh.test_mesh_batches import COUNT, fill
from tests.component.mesh.test_mesh_sdk import connect
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import Mesh, error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.loader_stats import LoaderStats

BATCH = 16
STEPS = -(-COUNT // BATCH)


@pytest.fixture(scope="module")
def crew() -> Iterator[MeshCrew]:
    with MeshCrew(3) as crew:
        fill(crew)
        yield crew


@pytest.fixture
def client(crew: MeshCrew) -> Iterator[Client]:
    with connect(crew.nodes[0].endpoint) as client:
        assert client.has_bucket("pictures")  # an answer that tells of a map
        yield client


def loader_of(client: Client, source: str, side: int, **more: Any) -> meshsdk.Loader:
    dataset = meshsdk.open(f"s3://pictures/{source}", fields={"image": "png"}, client=client)
    dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", side))
    return meshsdk.Loader(dataset, **{"global_batch": BATCH, "seed": 3, "output": "numpy", **more})


def epoch(loader: meshsdk.Loader) -> tuple[list[tuple[bytes, ...]], LoaderStats]:
    found: list[tuple[bytes, ...]] = []
    with loader:
        for batch in loader:
            found.append((batch["image"].tobytes(), batch.positions.tobytes(), batch.status.tobytes()))
        return found, loader.stats()


@pytest.mark.parametrize("source", ["shards", "train"])
@pytest.mark.parametrize("side", [16, 96])  # rows that are copied, rows that are received in place
def test_rows_of_their_owners_make_the_same_batches(client: Client, source: str, side: int) -> None:
    expected, one = epoch(loader_of(client, source, side, rows_from="one", on_bad="mask"))
    loader = loader_of(client, source, side, on_bad="mask")
    # Now, for to register a plan the first sample is looked at.
    moved = metrics.remote_bytes._value.get()
    found, stats = epoch(loader)
    moved = metrics.remote_bytes._value.get() - moved
    assert found == expected
    assert one.parted == 0
    if source == "shards":
        assert (stats.parted, stats.batches, stats.retries, moved) == (STEPS, STEPS, 0, 0)
    else:  # a sample of these is bad: its batch is made by one node, and perhaps the next one
        assert stats.retries == 1
        assert stats.parted in (STEPS - 2, STEPS - 1)


def test_ranks_and_checks_and_small_arenas_change_nothing(client: Client) -> None:
    expected, _ = epoch(loader_of(client, "shards", 16, rows_from="one"))
    parts = [
        epoch(loader_of(client, "shards", 16, rank=rank, world=2, verify=False, prefetch_bytes=10_000))
        for rank in (0, 1)
    ]
    assert all(stats.parted == STEPS for _, stats in parts)
    steps = zip(*(found for found, _ in parts), strict=True)
    assert [tuple(map(b"".join, zip(*ranks, strict=True))) for ranks in steps] == expected


@pytest.mark.parametrize("what", [{"global_batch": 5}, {"share": "sweep"}, {"rows_from": "one"}])
def test_one_node_is_asked_where_parts_are_of_no_use(client: Client, what: dict[str, Any]) -> None:
    _, stats = epoch(loader_of(client, "shards", 16, **what))
    assert stats.parted == 0
    assert stats.retries == 0


def test_a_node_of_another_map_gives_no_part(crew: MeshCrew, client: Client) -> None:
    with loader_of(client, "shards", 16) as loader:
        plan = loader.plan.hash
    wire = Mesh(crew.nodes[0].endpoint, *ROOT)
    try:
        refused = wire.call("GET", f"/-/plans/{plan}/0/0?batch=16&part=0")
        assert (refused.status, error(refused)["code"]) == (421, "NotOwner")
        assert wire.call("GET", f"/-/plans/{plan}/0/0?batch=16&part=x").status == 400
    finally:
        wire.close()


def test_ragged_rows_come_from_one_node(crew: MeshCrew, client: Client) -> None:
    dataset = meshsdk.open("s3://pictures/shards", fields={"image": "png"}, client=client)
    with meshsdk.Loader(dataset, BATCH, output="numpy") as loader:
        assert len(list(loader)) == STEPS
        assert loader.stats().parted == 0
        plan = loader.plan.hash
    wire = Mesh(crew.nodes[0].endpoint, *ROOT)
    try:
        assert error(wire.call("GET", f"/-/plans/{plan}/0/0?batch=16&part=1"))["code"] == "BadRequest"
    finally:
        wire.close()
