"""What an order costs the nodes of a mesh: each answers for the samples on its own disks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from meshd.store.disks import disk_type
from meshwire.dataset.snapshot import Snapshot
from tests.component.mesh.test_mesh_batches import COUNT, fill
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

COPIES = 2
FIELDS: dict[str, Any] = {"image": {"ext": ["png"]}}


@pytest.fixture(scope="module")
def wires() -> Iterator[list[Mesh]]:
    """Of three nodes, which take their disks for rotational."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_type, "is_rotational", lambda device: True)
        with MeshCrew(3, COPIES) as crew:
            fill(crew)
            wires = [Mesh(one.endpoint, *ROOT) for one in crew.nodes]
            yield wires
            for wire in wires:
                wire.close()


@pytest.mark.parametrize("source", ["train", "shards"])
def test_the_nodes_together_have_every_copy(wires: list[Mesh], source: str) -> None:
    snapshot = wires[0].snapshot(f"s3://pictures/{source}", fields=FIELDS)["snapshot"]
    shuffles = [{"kind": "global"}, {"kind": "none"}]
    answers = [
        wire.ok(wire.post(f"/-/snapshots/{snapshot}/read-cost", {"shuffles": shuffles})) for wire in wires
    ]
    assert [answer["node"] for answer in answers] == ["n1", "n2", "n3"]
    orders = [order for answer in answers for order in answer["orders"]]
    assert sum(order["bytes"] for order in orders) == 2 * COPIES * size_of(wires[0], snapshot)
    # A node's samples are told by the bytes that it has of them.
    assert sum(order["samples"] for order in orders) == pytest.approx(2 * COPIES * COUNT, abs=12)
    assert all(order["bytes"] < size_of(wires[0], snapshot) for order in orders)


def size_of(wire: Mesh, snapshot: str) -> int:
    return Snapshot.from_bytes(wire.call("GET", f"/-/snapshots/{snapshot}").body).total_bytes
