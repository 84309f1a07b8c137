"""The SDK on a mesh: straight to who makes a frame, and a node that dies is no error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import meshsdk
from meshd.peer_reads.peer_frames import PeerFrames
from meshd.telemetry import metrics
from meshsdk import ops
from meshsdk.client.gather import Item
from meshwire.cluster.routes import batch_nodes, frame_address, rendezvous_order
from tests.component.mesh.test_mesh_batches import COUNT, fill
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import Mesh, png

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.core.frame_address import BlockAddress, Frame, FrameAddress
    from meshsdk.client.s3_client import Client

BATCH = 8


def connect(*endpoints: str) -> Client:
    return meshsdk.connect(
        ",".join(endpoints), access_key=ROOT[0], secret_key=ROOT[1], deadline=60.0, timeout=60.0
    )


def loader_of(client: Client, **more: object) -> meshsdk.Loader:
    dataset = meshsdk.open("s3://pictures/train", fields={"image": "png"}, client=client)
    dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", 16))
    return meshsdk.Loader(dataset, BATCH, seed=3, on_bad="mask", max_bad=0.5, output="numpy", **more)  # type: ignore[arg-type]  # passed on


def batches(client: Client, kill: tuple[MeshCrew, int] | None = None) -> list[tuple[bytes, bytes]]:
    found = []
    with loader_of(client, prefetch_bytes=100_000) as loader:
        for number, batch in enumerate(loader):
            found.append((batch["image"].tobytes(), batch.status.tobytes()))
            if kill is not None and number == 1:
                kill[0].kill(kill[1])
    return found


@pytest.fixture
def crew() -> Iterator[MeshCrew]:
    with MeshCrew(3) as crew:
        fill(crew)
        yield crew


@pytest.fixture
def long_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders ask for as many steps at once as if all nodes were quick, also on a busy machine."""
    monkeypatch.setattr("meshsdk.loader.series_planner._LONGEST", 1e6)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_node_killed_in_an_epoch_changes_nothing(crew: MeshCrew, victim: int) -> None:
    with connect(crew.nodes[0].endpoint) as client:
        expected = batches(client)
        assert len(expected) == -(-COUNT // BATCH)
        assert client.transport.router.directory.map is not None
    with connect(crew.nodes[0].endpoint) as client:  # whose own endpoint may be the victim
        assert batches(client, (crew, victim)) == expected


def test_frames_are_asked_of_the_node_they_meet_at(crew: MeshCrew, long_series: None) -> None:
    with connect(crew.nodes[1].endpoint) as client, loader_of(client, rows_from="one") as loader:
        taken = [(batch.epoch, batch.step) for _ in range(2) for batch in loader]
        plan = loader.plan.hash
    assert len(taken) == 2 * -(-COUNT // BATCH)
    cluster = crew.nodes[0].node.mesh.current_map()
    met = [
        rendezvous_order(batch_nodes(cluster), frame_address(plan, epoch, step, 0, 1, BATCH, 0))[0].node_id
        for epoch, step in taken
    ]
    assert set(met) == {"n1", "n2", "n3"}
    for one in crew.nodes:
        assert len(one.assembler._cache) == met.count(one.node.settings.node_id)


@pytest.mark.parametrize("share", [None, "sweep"])
def test_jobs_share_one_pass_whatever_their_memory(
    crew: MeshCrew, long_series: None, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory a loader asks for one step at a time, with more for several."""
    fetched, fetch = [], PeerFrames.assigned_peer_frame

    async def count_fetch(self: PeerFrames, address: FrameAddress | BlockAddress) -> Frame | None:
        fetched.append(await fetch(self, address))
        return fetched[-1]

    monkeypatch.setattr(PeerFrames, "assigned_peer_frame", count_fetch)
    steps = -(-COUNT // BATCH)
    built = [metrics.frames.labels(result) for result in ("miss", "hit", "joined")]
    before = [counter._value.get() for counter in built]
    jobs = []
    for memory in (100_000, None):
        with (
            connect(crew.nodes[0].endpoint) as client,
            loader_of(client, rows_from="one", prefetch_bytes=memory, share=share) as loader,
        ):
            jobs.append([batch["image"].tobytes() for batch in loader])
    assert jobs[0] == jobs[1]
    found = [int(counter._value.get() - then) for counter, then in zip(built, before, strict=True)]
    assert found == [steps, steps, 0]
    assert not any(fetched)  # each request went to the node that makes the frame


def test_any_of_several_endpoints_will_do(crew: MeshCrew) -> None:
    gone = "http://127.0.0.1:9"
    with connect(gone, crew.nodes[2].endpoint) as client:
        assert client.has_bucket("pictures")
        assert client.get("pictures", "train/dog/0000.png") == png(0)
        assert len(batches(client)) == -(-COUNT // BATCH)


def test_gathered_bytes_cross_the_network_once(crew: MeshCrew) -> None:
    """From the node that has them to the client, and between nodes none."""
    names = [f"train/{'cat' if n % 3 else 'dog'}/{n:04d}.png" for n in range(COUNT)]
    items = [Item("pictures", name) for name in names]
    items += [Item("pictures", f"shards/{n:03d}.tar", f"{n * 10 + 3:04d}.png") for n in range(6)]
    items += [Item("pictures", "gone"), *items[:5]]
    with connect(crew.nodes[0].endpoint) as client:
        assert client.has_bucket("pictures")  # an answer that tells of a map
        moved = metrics.remote_bytes._value.get()
        found = [(got.error.code if got.error else bytes(got.data)) for got in client.gather(items)]
        assert metrics.remote_bytes._value.get() == moved
        assert found[7] == png(7)[:70]
        assert [found[n] for n in (3, COUNT + 2, COUNT + 6)] == [png(3), png(23), "NoSuchKey"]
        assert found[COUNT + 7 :] == found[:5]
        assert [bytes(got.data) for got in client.gather(items[:9], credit=1000)] == found[:9]
        crew.kill(1)
        assert [(got.error.code if got.error else bytes(got.data)) for got in client.gather(items)] == found


def test_sources_of_batches_cross_the_network_at_most_once(crew: MeshCrew) -> None:
    sizes = [len(png(n)[:70] if n == 7 else png(n)) for n in range(COUNT)]
    with connect(crew.nodes[0].endpoint) as client, loader_of(client, rows_from="one") as loader:
        moved = metrics.remote_bytes._value.get()
        assert len(list(loader)) == -(-COUNT // BATCH)
        moved = metrics.remote_bytes._value.get() - moved
    overhead = 3 * -(-COUNT // BATCH) * 4096 + 128 * COUNT  # of the frames they came in
    assert 0 < moved < sum(sizes) + overhead


def test_what_is_shared_is_made_once(crew: MeshCrew) -> None:
    with connect(crew.nodes[0].endpoint) as client, loader_of(client) as loader:
        plan = loader.plan.hash
    wires = [Mesh(one.endpoint, *ROOT) for one in crew.nodes]
    try:
        answers = [wire.raw(plan, 5, 0, batch=BATCH, share="sweep") for wire in wires]
    finally:
        for wire in wires:
            wire.close()
    assert len({answer.body for answer in answers}) == 1
    assert sorted(answer.headers["x-mesh-frame"] for answer in answers) == ["hit", "hit", "miss"]
    assert sum(len(one.assembler._cache) for one in crew.nodes) == 1


def test_a_lone_node_is_not_asked_for_a_map() -> None:
    with MeshCrew(1) as crew:
        fill(crew)
        with connect(crew.nodes[0].endpoint) as client:
            assert len(batches(client)) == -(-COUNT // BATCH)
            assert client.transport.router.directory.map is None
        wire = Mesh(crew.nodes[0].endpoint, *ROOT)
        answer = wire.call("GET", "/-/map")
        wire.close()
        assert [node["id"] for node in json.loads(answer.body)["map"]["nodes"]] == ["n1"]
