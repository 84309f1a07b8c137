"""Which order a loader without `shuffle` gets, by what its nodes say of their disks."""

from __future__ import annotations

import pytest

from meshd.batches.read_ahead.default_order import OrderCosts, decide_order

HDD = OrderCosts("n1", 32, 6000, 40.0, 100, 3.3, 2.1, 0.97, 1.02)
SSD = OrderCosts("n2")
SMALLER = OrderCosts("n3", 8, 6000, 40.0, 400, 4.0, 2.1, 0.96, 1.05)
FITS = OrderCosts("n4", 32, 60, 2.3, 60, 2.3, 2.1)
LITTLE = OrderCosts("n5", 32, 600, 4.0, 10, 0.3, 0.2)
COARSE = OrderCosts("n6", 2, 6000, 40.0, 100, 3.3, 2.1, 0.9, 1.9)
SHARDS = OrderCosts("n7", 16, 6000, 40.0, 100, 3.3, 2.1, 0.9, 1.3)
CLASSES = OrderCosts("n8", 16, 6000, 40.0, 100, 3.3, 2.1, 0.9, 1.3, labelled=True)


@pytest.mark.parametrize(
    ("costs", "earlier", "shards", "told"),
    [
        ([], "", 0, "not on rotational disks"),
        ([SSD], "", 0, "not on rotational disks"),
        ([HDD], "", 32, "n1 6,000 seeks and 40 s in a full shuffle, 100 seeks and 3 s in Blocks(shards=32)"),
        ([SSD, HDD], "", 32, "disks of n1 6,000"),
        ([SSD, HDD, SMALLER], "", 8, "disks of n1, n3 12,000 seeks and 80 s"),
        ([SSD, HDD], "n9", 0, "n9 runs a release"),
        ([FITS], "", 0, "60 seeks and 2 s in a full shuffle"),
        ([LITTLE], "", 0, "600 seeks and 4 s in a full shuffle"),
        ([HDD, COARSE], "", 0, "1.90 times as long"),
        ([SHARDS], "", 16, "in Blocks(shards=16)"),
        ([CLASSES], "", 0, "1.30 times as long"),
    ],
)
def test_decisions(costs: list[OrderCosts], earlier: str, shards: int, told: str) -> None:
    for each in (costs, costs[::-1]):
        order = decide_order(each, 17, earlier)
        assert (order.shards, order.kind) == (shards, "blocks" if shards else "global")
        if len(costs) < 3 or each is costs:
            assert told in order.reason
        if shards:
            least = min((cost for cost in costs if cost.shards), key=lambda cost: cost.shards)
            assert (order.distance, order.runs) == (least.distance, least.runs)
