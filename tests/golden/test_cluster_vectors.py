"""Frozen placements: other numbers mean that nodes of two releases look for an object in different places.

`GOLDEN=rewrite pytest tests/golden/test_cluster_vectors.py` writes the file anew, for a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
import os
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np

from meshwire.cluster import ClusterMap, Node, compute_placement, slot_of
from meshwire.cluster.preferences import fixed_point_logs, slot_costs, slot_hashes

DATA = Path(__file__).parent / "cluster" / "placements.json"
REWRITE = os.environ.get("GOLDEN") == "rewrite"
NAMES = (("photos", "train/0001.jpg"), ("photos", ""), ("büro", "a b/ü"), ("x", "k" * 1024))


def clusters() -> dict[str, ClusterMap]:
    zones = ("a", "b", "c")
    plain = tuple(Node(f"n{i}", f"http://10.0.0.{i}:9000", zone=zones[i % 3]) for i in range(5))
    weighted = tuple(Node(f"w{i}", f"http://10.0.1.{i}:9000", weight=1 + 3 * i) for i in range(4))
    many = tuple(Node(f"m{i:03d}", f"http://m{i}:9000", zone=f"z{i % 7}") for i in range(60))
    return {
        "plain": ClusterMap(7, plain),
        "weighted": ClusterMap(7, weighted),
        "many": ClusterMap(7, many, slots=1 << 10),
    }


def vectors() -> dict[str, Any]:
    slots = np.arange(4, dtype=np.uint64)
    numbers = np.array([1, 2, 3, 1000, 1 << 40, (1 << 53) + 1, (1 << 64) - 1], dtype=np.uint64)
    found: dict[str, Any] = {
        "slots": [slot_of(bucket, key, 1 << 14) for bucket, key in NAMES],
        "hashes": [str(value) for value in slot_hashes("n0", slots).tolist()],
        "logarithms": [str(value) for value in fixed_point_logs(numbers).tolist()],
    }
    for name, cluster in clusters().items():
        table = compute_placement(cluster, 3).table
        found[name] = {
            "document": cluster.to_json().decode(),
            "costs": [[str(cost) for cost in row] for row in slot_costs(cluster.nodes[:3], slots).tolist()],
            "first": table[:8].tolist(),
            "table": hashlib.sha256(table.astype("<i2").tobytes()).hexdigest(),
        }
    return found


def test_placements_are_what_they_were() -> None:
    found = vectors()
    if REWRITE:
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DATA.read_text())


def test_the_table_of_logarithms_is_not_left_to_a_library() -> None:
    """Each value against log2 in 60 decimal digits: none is so near to a half that a library's last bit could
    decide how it is rounded."""
    with localcontext(prec=60):
        two = Decimal(2).ln()
        exact = [(Decimal(4096 + i) / 4096).ln() / two * (1 << 36) for i in range(4097)]
        at = fixed_point_logs((np.arange(4096, dtype=np.uint64) + np.uint64(4096)) << np.uint64(20)).tolist()
        for number, value in zip(exact, at, strict=False):
            assert value - (32 << 36) == int(number.to_integral_value())
            assert abs(number % 1 - Decimal("0.5")) > Decimal(2) ** -15 or number % 1 == 0
