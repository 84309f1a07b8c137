"""What daemons say of themselves, in statuses."""

from __future__ import annotations

from meshoperator.controllers.usage_status import is_changed, node_usage, total_usage
from meshoperator.resources import MeshClusterSpec, MeshNodeStatus, parse

POOL = {
    "name": "s",
    "replicas": 1,
    "tiers": [
        {"name": "fast", "class": "nvme", "hostPath": "/f"},
        {"name": "batches", "class": "mem", "quota": "1Gi"},
        {"name": "slow", "class": "hdd", "hostPath": "/s"},
    ],
}
TOLD = {
    "node": "mesh-s-0",
    "objects": 3,
    "bytes": 1000,
    "cached_bytes": 50,
    "disks": [{"path": "/a", "free": 60, "total": 100}, {"path": "/b", "free": 900, "total": 1000}],
}


def test_disks_are_tiers_in_their_order() -> None:
    (pool,) = parse(MeshClusterSpec, {"image": "i:1", "nodePools": [POOL]}).node_pools
    found = node_usage(TOLD, pool)
    parse(MeshNodeStatus, found)
    assert [(tier["name"], tier["class"], tier["used"]) for tier in found["tiers"]] == [
        ("fast", "nvme", 40),
        ("slow", "hdd", 100),
    ]
    assert total_usage([*found["tiers"], *found["tiers"]])[0] == {"name": "fast", "capacity": 200, "used": 80}


def test_a_lost_disk_does_not_give_its_name_to_another() -> None:
    (pool,) = parse(MeshClusterSpec, {"image": "i:1", "nodePools": [POOL]}).node_pools
    slow = {"path": "/var/lib/meshd/slow/data", "free": 900, "total": 1000}
    found = node_usage(TOLD | {"disks": [slow]}, pool)
    assert [(tier["name"], tier["capacity"]) for tier in found["tiers"]] == [("slow", 1000)]
    assert node_usage(TOLD | {"disks": []}, pool)["tiers"] == []


def test_only_what_has_changed_by_a_percent_is_written() -> None:
    before = {"bytes": 1000, "tiers": [{"name": "a", "used": 1000}], "state": "up"}
    assert not is_changed(before, {"bytes": 1009, "tiers": [{"name": "a", "used": 995}]})
    assert is_changed(before, {"tiers": [{"name": "a", "used": 900}]})
    assert is_changed(before, {"tiers": [{"name": "b", "used": 1000}]})
    assert is_changed(before, {"bytes": 0})
    assert not is_changed({}, {"tiers": []})
