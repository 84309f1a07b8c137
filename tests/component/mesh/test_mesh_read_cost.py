"""What an order costs the nodes of a mesh: each answers for the samples that it reads from its own disks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshd.batches.read_ahead import default_order
from meshd.store.disks import disk_type
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
def test_the_nodes_together_read_every_sample_once(wires: list[Mesh], source: str) -> None:
    found = wires[0].snapshot(f"s3://pictures/{source}", fields=FIELDS)
    snapshot, size = found["snapshot"], found["bytes"]
    shuffles = [{"kind": "global"}, {"kind": "none"}]
    answers = [
        wire.ok(wire.post(f"/-/snapshots/{snapshot}/read-cost", {"shuffles": shuffles})) for wire in wires
    ]
    assert [answer["node"] for answer in answers] == ["n1", "n2", "n3"]
    orders = [order for answer in answers for order in answer["orders"]]
    assert sum(order["bytes"] for order in orders) == 2 * size
    # A node's samples are told by the bytes that it has of them.
    assert sum(order["samples"] for order in orders) == pytest.approx(2 * COUNT, abs=12)
    assert all(order["bytes"] < size for order in orders)


def test_a_mesh_of_mixed_disks_has_one_default_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """n2 alone is rotational; the toy's costs are taken for worthwhile. Every node tells the same order, also
    to those that ask at once, and after n2 has gone."""
    monkeypatch.setattr(disk_type, "is_rotational", lambda device: True)
    monkeypatch.setattr(
        disk_type.RotationalDisks,
        "any_of",
        lambda disks, roots: any("n2" in Path(root).parts for root in roots),
    )
    monkeypatch.setattr(default_order, "blocks_save_enough", lambda *_: True)
    monkeypatch.setattr(default_order, "_MAX_RUNS", 100)
    with MeshCrew(3, COPIES) as crew, ThreadPoolExecutor(6) as pool, ExitStack() as stack:
        fill(crew)
        wires = [
            stack.enter_context(closing(Mesh(one.endpoint, *ROOT))) for one in crew.nodes for _ in range(2)
        ]
        snapshot = wires[0].snapshot("s3://pictures/shards", fields=FIELDS)["snapshot"]

        def ask(wire: Mesh) -> dict[str, Any]:
            return dict(wire.ok(wire.post(f"/-/snapshots/{snapshot}/order", {"batch": 8})))

        elsewhere = wires[0].snapshot("s3://pictures/train", fields=FIELDS)["snapshot"]
        first, *others = list(pool.map(ask, wires))
        assert first["shuffle"] == {"kind": "blocks", "shards": 6}
        assert "rotational disks of n2 " in first["reason"]
        assert others == [first] * 5
        crew.kill(1)
        assert ask(wires[0]) == ask(wires[-1]) == first
        answer = wires[0].ok(wires[0].post(f"/-/snapshots/{elsewhere}/order", {}))
        assert (answer["shuffle"], answer["distance"]) == ({"kind": "global"}, 1)
        assert answer["reason"].endswith("; n2 did not answer")
