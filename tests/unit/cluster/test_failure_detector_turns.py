"""How many nodes look for the failure detector's lease at a time."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.failure_detector import FailureDetector, NodeStateWriter
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.embedded import EmbeddedControl
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, Node

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("nodes", "least", "most"), [(32, 32, 32), (1000, 10, 60)])
def test_a_few_dozen_nodes_look_each_time_and_others_the_next(
    tmp_path: Path, nodes: int, least: int, most: int
) -> None:
    clock = SystemClock()
    cluster = ClusterMap(3, tuple(Node(f"n{number:04}", f"http://n{number}:1") for number in range(nodes)))
    with closing(EmbeddedControl(tmp_path, clock)) as control:
        writer = NodeStateWriter(control, ClusterMapStore(control))
        detectors = [
            FailureDetector(
                ClusterView(node.node_id, control, lambda _: 2, standalone_map=cluster),
                control,
                writer,
                lambda: 2,
                clock,
                ttl=5.0,
                down_after=900.0,
            )
            for node in cluster.nodes
        ]
    rounds = [{n for n, each in enumerate(detectors) if each._is_turn()} for _ in range(50)]
    assert all(least <= len(turn) <= most for turn in rounds)
    assert len(set().union(*rounds)) > 0.7 * nodes
