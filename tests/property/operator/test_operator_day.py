"""A simulated day: 1,000 nodes, 200 datasets, 8,000 GPUs whose demand shifts from hour to hour."""

from __future__ import annotations

from tests.support.operator_day import Cluster


def test_a_day_of_a_thousand_nodes() -> None:
    cluster = Cluster(seed=8)
    day = cluster.run()
    size = sum(each.size for each in cluster.datasets)
    print(  # what `-s` shows
        f"near {day.locality:.3f}, moved {day.moved / size:.1f} times the data, made {day.made / size:.1f} "
        f"times, a plan {max(day.planned):.2f} s at most, unplaced {day.unplaced}"
    )
    assert day.unplaced == 0
    assert day.locality >= 0.95
    assert max(day.planned) < 1.0  # seconds of CPU, so that a busy machine says nothing
    assert day.moved <= 12 * size  # copies follow the demand, and do not wander
    assert not {name for held in cluster.held.values() for name in held} & cluster.drained
    assert all(node.used <= node.capacity * 0.85 for node in cluster.nodes.values())
    for dataset in cluster.datasets:
        racks = {(cluster.nodes[name].zone, cluster.nodes[name].rack) for name in cluster.held[dataset.name]}
        assert len(racks) >= 2
