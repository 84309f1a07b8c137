"""Read cost: planned reads become seeks and seconds; an estimate cuts the windows that the scheduler cuts."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from meshd.batches.read_ahead import cost_estimator, shuffle_advice
from meshd.batches.read_ahead.cost_estimator import MAX_ROWS, ReadCostEstimator, parse_cost_request
from meshd.batches.read_ahead.extents import plan_reads
from meshd.batches.read_ahead.read_cost import (
    MEDIA_RATE,
    SEEK_SECONDS,
    SHORT_SEEK_SECONDS,
    ReadCost,
    cost_of_reads,
)
from meshd.batches.read_ahead.shuffle_advice import ShuffleAdvisor
from meshd.batches.read_ahead.window_lookup import DiskReads
from meshd.batches.read_ahead.windows import MIN_WINDOW_BYTES
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.plan.shuffle import ShuffleSpec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshd.auth.identity import Caller
    from meshd.batches.read_ahead.window_lookup import WindowLookup
    from meshd.datasets.service import DatasetService
    from meshwire.dataset.snapshot import Snapshot

GLOBAL, STORED = {"kind": "global"}, {"kind": "none"}


def snapshot_of(samples: int, size: int) -> Snapshot:
    listing = [(f"d/{number:07d}.bin", "0" * 32, size) for number in range(samples)]
    fields = parse_fields({"image": {"ext": "bin"}})
    return build_from_objects(listing, source="s3://b/d/", fields=fields).snapshot


class Datasets:
    """One snapshot that everybody may read."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    async def snapshot(self, caller: Caller, digest: str) -> Snapshot:
        return self._snapshot


class Lookup:
    """Samples lie one after the other in a file; those from `elsewhere` on are on another node."""

    def __init__(self, size: int, elsewhere: int = 1 << 40) -> None:
        self.size, self.elsewhere = size, elsewhere
        self.asked: list[np.ndarray[Any, np.dtype[np.int64]]] = []

    async def cold_reads(self, snapshot: Snapshot, samples: Any) -> list[DiskReads]:
        self.asked.append(samples)
        here = samples[samples < self.elsewhere]
        if not here.size:
            return []
        reads = plan_reads(here * 0, here * self.size, here * 0 + self.size)
        return [DiskReads(1, ["file"], reads, here.size * self.size)]


def estimated(
    snapshot: Snapshot,
    lookup: Lookup | None,
    shuffles: list[dict[str, Any]],
    budget: int = 0,
    batch: int = 256,
) -> dict[str, Any]:
    estimator = ReadCostEstimator(
        cast("DatasetService", Datasets(snapshot)), cast("WindowLookup | None", lookup), "n1", budget
    )
    body = json.dumps({"shuffles": shuffles, "batch": batch}).encode()
    return asyncio.run(estimator.estimate(cast("Caller", None), snapshot.hash, body))


def test_seeks_within_a_file_are_short_and_continued_reads_are_none() -> None:
    offsets = np.array([0, 10 << 20, 0], np.int64)
    reads = plan_reads(np.array([0, 0, 1]), offsets, np.array([3 << 20, 4096, 4096]))
    cost = cost_of_reads(reads, 3, 1000)
    assert (cost.samples, cost.wanted, cost.reads, cost.seeks) == (3, 1000, 5, reads.seeks)
    assert cost.seek_seconds == pytest.approx(2 * SEEK_SECONDS + SHORT_SEEK_SECONDS)
    assert cost.disk_seconds == pytest.approx(cost.seek_seconds + reads.bytes / MEDIA_RATE)
    assert cost.media_seconds == pytest.approx(1000 / MEDIA_RATE)
    assert cost_of_reads(plan_reads([], [], []), 0, 0) == ReadCost()
    assert (cost + cost).scaled(0.5) == cost
    plain = cost.without_read_ahead()
    assert (plain.seeks, plain.read) == (3, 1000)
    assert plain.disk_seconds == pytest.approx(3 * SEEK_SECONDS + 1000 / MEDIA_RATE)


def test_a_small_epoch_is_planned_whole() -> None:
    snapshot, lookup = snapshot_of(3000, 1 << 19), Lookup(1 << 19)
    answer = estimated(snapshot, lookup, [GLOBAL, {"kind": "blocks", "shards": 1}, STORED], 256 << 20)
    assert (answer["node"], answer["rotational"], answer["snapshot"]) == ("n1", True, snapshot.hash)
    full, blocks, stored = answer["orders"]
    seen = np.sort(np.concatenate(lookup.asked))
    assert (np.bincount(seen) == 3).all()  # each sample once in each order
    for order in (full, blocks, stored):
        assert (order["samples"], order["bytes"], order["estimated"]) == (3000, 3000 << 19, False)
        assert order["without_read_ahead"]["seeks"] == 3000
        assert order["media_seconds"] == pytest.approx((3000 << 19) / MEDIA_RATE)
    assert full["window_bytes"] <= 128 << 20
    assert full["seeks"] > 1000 > 100 > stored["seeks"]
    assert full["disk_seconds"] > 1.5 * full["media_seconds"]
    assert stored["disk_seconds"] < 1.1 * stored["media_seconds"]
    assert blocks["window_bytes"] <= 128 << 20  # a shard is larger than a window
    assert full["disk_seconds"] < full["without_read_ahead"]["disk_seconds"]


def test_more_memory_never_costs_more_seeks() -> None:
    snapshot = snapshot_of(20_000, 100_000)
    seeks = [
        estimated(snapshot, Lookup(100_000), [GLOBAL], budget << 20)["orders"][0]["seeks"]
        for budget in (64, 256, 1024, 8192)
    ]
    assert seeks == sorted(seeks, reverse=True)
    assert seeks[0] > 10 * seeks[-1]


@pytest.mark.parametrize("shuffle", [GLOBAL, {"kind": "blocks", "shards": 4}, STORED])
def test_a_large_epoch_is_estimated_from_a_part_near_the_whole(
    shuffle: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, budget = snapshot_of(20_000, 100_000), 512 << 20
    whole = estimated(snapshot, Lookup(100_000), [shuffle], budget)["orders"][0]
    monkeypatch.setattr(cost_estimator, "MAX_ROWS", 4096)
    lookup = Lookup(100_000)
    part = estimated(snapshot, lookup, [shuffle], budget)["orders"][0]
    assert (whole["estimated"], part["estimated"]) == (False, True)
    assert sum(asked.size for asked in lookup.asked) <= 4096
    assert part["samples"] == pytest.approx(20_000, rel=0.01)
    assert part["disk_seconds"] == pytest.approx(whole["disk_seconds"], rel=0.3)


def test_the_work_for_an_epoch_is_bounded() -> None:
    lookup = Lookup(1000)
    snapshot = snapshot_of(3 * MAX_ROWS, 1000)
    answer = estimated(snapshot, lookup, [GLOBAL], 1 << 40)
    assert sum(asked.size for asked in lookup.asked) <= MAX_ROWS
    assert answer["orders"][0]["samples"] == 3 * MAX_ROWS


def test_bytes_of_other_nodes_and_nodes_without_such_disks() -> None:
    snapshot = snapshot_of(1000, 1 << 20)
    half = estimated(snapshot, Lookup(1 << 20, elsewhere=500), [STORED])["orders"][0]
    assert (half["samples"], half["bytes"]) == (500, 500 << 20)
    nothing = {"snapshot": snapshot.hash, "node": "n1", "rotational": False, "orders": []}
    assert estimated(snapshot, Lookup(1 << 20, elsewhere=0), [STORED]) == nothing
    assert estimated(snapshot, None, [STORED]) == nothing


def test_blocks_without_a_number_take_the_shards_that_fit_a_window() -> None:
    snapshot = snapshot_of(16 * 1024, 32 << 10)  # 16 shards of 32 MiB
    for budget, fitting in ((0, 1), (256 << 20, 4), (300 << 20, 4), (1 << 40, 16)):
        order = estimated(snapshot, Lookup(32 << 10), [{"kind": "blocks"}], budget)["orders"][0]
        assert order["shuffle"] == {"kind": "blocks", "shards": fitting}
        assert order["window_bytes"] <= max(budget // 2, MIN_WINDOW_BYTES)


def test_how_near_to_a_full_shuffle_is_told() -> None:
    snapshot = snapshot_of(20 * 1024, 1000)
    full, stored = estimated(snapshot, Lookup(1000), [GLOBAL, STORED])["orders"]
    assert full["randomness"]["distance"] == pytest.approx(1, abs=0.05)
    assert full["randomness"]["shard_runs"] == pytest.approx(1, abs=0.05)
    assert stored["randomness"]["distance"] == 0
    assert stored["randomness"]["shard_runs"] > 100


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({}, "shuffles"),
        ({"shuffles": []}, "shuffles"),
        ({"shuffles": [GLOBAL] * 5}, "shuffles"),
        ({"shuffles": [{"kind": "sorted"}]}, "shuffle.kind"),
        ({"shuffles": [{"kind": "blocks", "shards": 0}]}, "shuffle.shards"),
        ({"shuffles": [GLOBAL], "batch": 0}, "batch"),
        ({"shuffles": [GLOBAL], "seed": 0}, "seed"),
    ],
)
def test_requests_refused(document: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_cost_request(json.dumps(document).encode())
    assert refused.value.path == path


# --- advice -------------------------------------------------------------------------------------------------


def advice(
    snapshot: Snapshot, lookup: Lookup | None, shuffle: ShuffleSpec, budget: int = 0, times: int = 1
) -> list[str]:
    estimator = ReadCostEstimator(
        cast("DatasetService", Datasets(snapshot)), cast("WindowLookup | None", lookup), "n1", budget
    )
    advisor = ShuffleAdvisor(estimator)

    async def ask() -> list[str]:
        return [await advisor.advise(snapshot, shuffle, 256) for _ in range(times)]

    return asyncio.run(ask())


def test_an_expensive_full_shuffle_is_told_what_blocks_cost() -> None:
    snapshot, lookup = snapshot_of(20_000, 100_000), Lookup(100_000)
    first, again = advice(snapshot, lookup, ShuffleSpec(), 64 << 20, times=2)
    asked = sum(samples.size for samples in lookup.asked)
    full, blocks, _ = estimated(snapshot, Lookup(100_000), [GLOBAL, {"kind": "blocks"}, STORED], 64 << 20)[
        "orders"
    ]
    assert first == again
    assert f"{full['seeks']:,} seeks and {full['disk_seconds']:.0f} s for 10 s of bytes" in first
    assert f"mesh.Blocks(shards={blocks['shuffle']['shards']}) {blocks['seeks']:,} seeks" in first
    assert asked <= 40_000  # and it is estimated once


@pytest.mark.parametrize("shuffle", [ShuffleSpec("blocks", 4), ShuffleSpec("none")])
def test_other_orders_are_not_advised_on(shuffle: ShuffleSpec) -> None:
    lookup = Lookup(100_000)
    assert advice(snapshot_of(20_000, 100_000), lookup, shuffle) == [""]
    assert lookup.asked == []


def test_nothing_is_said_where_little_would_be_saved() -> None:
    assert advice(snapshot_of(20_000, 100_000), None, ShuffleSpec()) == [""]  # no rotational disk
    assert advice(snapshot_of(100, 100_000), Lookup(100_000), ShuffleSpec()) == [""]  # less than 5 s
    assert advice(snapshot_of(2_000, 1_000_000), Lookup(1_000_000), ShuffleSpec(), 8 << 30) == [
        ""
    ]  # all in memory


def test_a_plan_does_not_wait_for_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Lookup):
        async def cold_reads(self, snapshot: Snapshot, samples: Any) -> list[DiskReads]:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(shuffle_advice, "_PATIENCE", 0.01)
    assert advice(snapshot_of(20_000, 100_000), Stuck(100_000), ShuffleSpec(), times=2) == ["", ""]
