"""Advice for a live mesh, from documents of its activity: what is proposed, and what it gains."""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.telemetry.activity import GAUGES, TOTALS
from meshsdk.admin.cluster_admin import BucketInfo
from meshsdk.cli import run
from meshsdk.client.read_costs import DiskCost, OrderCost
from meshtools.cli.tune import KINDS
from meshtools.sizing.assumptions import shipped_assumptions
from meshtools.tune import changes
from meshtools.tune.changes import advise
from meshtools.tune.live_mesh import Outcome, Rate, rate_of
from meshtools.tune.observation import PlanFacts, observe

if TYPE_CHECKING:
    from meshtools.tune.changes import Advice
    from meshtools.tune.observation import Observation

ASSUMED = shipped_assumptions()
GIB = 1 << 30
SECONDS, PLAN = 10.0, "0123456789ab"
FACTS = PlanFacts(
    PLAN + 52 * "0", "s1", "photos", "global", ("decode", "random_resized_crop"), 100_000, 7 * GIB, 70
)
PHOTOS = BucketInfo("photos", 0, None, 2, 2)


def node(**figures: float) -> dict[str, Any]:
    """A node's document: eight cores with as many transform processes, a solid-state disk of 1 TiB."""
    gauges = {
        "cores": 8.0,
        "disk_bytes": 1024.0 * GIB,
        "disk_free_bytes": 512.0 * GIB,
        "memory_free_bytes": 64.0 * GIB,
    }
    known = {name: value for name, value in figures.items() if name in GAUGES}
    counted = {name: value for name, value in figures.items() if name in TOTALS}
    assert len(known) + len(counted) == len(figures)
    return {
        "time": 0,
        "totals": dict.fromkeys(TOTALS, 0.0) | {"transform_processes": 8.0} | counted,
        "gauges": dict.fromkeys(GAUGES, 0.0) | gauges | known,
        "loaders": {},
        "plans": {},
        "disks": {"solid-state": {"bytes": 1e12, "free": 5e11, "disks": 1}, "rotational": {"disks": 0}},
    }


def mesh(*nodes: dict[str, Any], silent: list[str] | None = None) -> dict[str, Any]:
    named = {f"n{number}": document for number, document in enumerate(nodes, 1)}
    return {"node": "n1", "nodes": copy.deepcopy(named), "silent": silent or []}


def after(
    before: dict[str, Any],
    *,
    loops: int = 1,
    samples: float = 10_000,
    epochs: float = 3.0,
    cpu: float = 0.002,
    plans: tuple[str, ...] = (PLAN,),
    **stalls: float,
) -> dict[str, Any]:
    """The same mesh 10 s later: each loop has received `samples` and waited shares of its time, and all nodes
    together rendered the rows, at `cpu` seconds each."""
    now = copy.deepcopy(before)
    for document in now["nodes"].values():
        document["time"] += int(SECONDS * 1000)
        share = 1 / len(now["nodes"])
        document["totals"]["rows"] += loops * samples * share
        document["totals"]["bytes_out"] += loops * samples * share * 150_528
        for number in range(loops):
            own = document["plans"].setdefault(plans[number % len(plans)], dict.fromkeys(COSTS, 0.0))
            own["rows"] += samples * share
            own["cpu"] += samples * share * cpu
            own["made"] += 10
    for number in range(loops):
        now["nodes"]["n1"]["loaders"][f"loop{number}"] = {
            "samples": samples,
            "seconds": SECONDS,
            "waited": SECONDS * sum(stalls.values()),
            "epochs": epochs,
            "epochs_requested": epochs,
            "epoch_samples": 100_000.0,
            "stalls": {stage: SECONDS * share for stage, share in stalls.items()},
            "plan": plans[number % len(plans)],
        }
    return now


def hits(rows: float, share: float, spared: float) -> dict[str, float]:
    """Totals of the decoded cache: a share of the rows were hits, each of which spared `spared` s."""
    found = {"decoded_hit": share * rows, "decoded_miss": (1 - share) * rows}
    return found | {"decoded_seconds_saved": spared * share * rows}


COSTS = ("rows", "cpu", "reading", "seeks", "read_ahead", "made", "shared")


def seen(
    before: dict[str, Any], now: dict[str, Any], bucket: BucketInfo = PHOTOS, **facts: Any
) -> Observation:
    about = {PLAN: replace(FACTS, **facts)}
    return replace(observe(before, now), facts=about, buckets={"photos": bucket})


def kinds(advice: Advice) -> list[str]:
    return [change.kind for change in advice.changes]


def test_a_loop_that_its_quota_slows_down_by_hand() -> None:
    # Three nodes keep 1 GiB each, a fifth of the samples. A hit spares 1.5 ms, so a sample costs 2.0 ms
    # now, 2.3 without the cache, and 0.8 if all are kept.
    before = mesh(
        *[node(decoded_cache_bytes=GIB, decoded_cache_limit=100 * GIB, decoded_at_quota=1) for _ in range(3)]
    )
    now = after(before, preprocessing=0.7)
    for document in now["nodes"].values():
        document["totals"] |= hits(10_000 / 3, 0.2, 0.0015)
    found = advise(seen(before, now, replace(PHOTOS, decoded_quota=GIB)), ASSUMED)
    change = found.changes[0]
    assert (change.kind, change.target, change.rate) == ("decoded quota", "photos", 1000.0)
    # Delivery of 150,528 bytes takes 0.27 ms, which nothing spares: (2 + 0.27) / (0.8 + 0.27).
    assert change.gain == pytest.approx((2 + 0.269) / (0.8 + 0.269), rel=0.02)
    assert change.setting is not None
    assert 5 * GIB <= change.setting.value <= 13 * GIB  # 5 GiB on each node, and open segments
    assert str(change.setting.value) in change.command
    assert str(GIB) in change.undo
    # The same in the first epoch says nothing yet, and without root's key the quota is unknown.
    early = advise(seen(before, after(before, preprocessing=0.7, epochs=0.4)), ASSUMED)
    assert "decoded quota" not in kinds(early)
    without = advise(replace(seen(before, now), buckets=None), ASSUMED)
    assert "decoded quota" not in kinds(without)
    assert any("root's access key" in note for note in without.notes)


def test_no_gain_is_above_the_wait_that_it_removes() -> None:
    before = mesh(node(decoded_cache_bytes=GIB, decoded_cache_limit=100 * GIB, decoded_at_quota=1))
    now = after(before, preprocessing=0.2)
    now["nodes"]["n1"]["totals"] |= hits(10_000, 0.1, 0.0019)
    [change] = advise(seen(before, now, replace(PHOTOS, decoded_quota=GIB)), ASSUMED).changes
    assert change.gain == pytest.approx(1 / 0.8)


def test_fewer_processes_than_cores_and_all_cores_busy() -> None:
    before = mesh(*[node(transform_processes=2) for _ in range(2)])
    found = advise(seen(before, after(before, preprocessing=0.8, cpu=0.0035), ops=("parse",)), ASSUMED)
    [change] = found.changes
    assert (change.kind, change.setting) == ("transform processes", None)
    assert change.gain == pytest.approx(4.0, rel=0.01)
    busy = mesh(node(), node())
    found = advise(seen(busy, after(busy, preprocessing=0.8, cpu=0.014), ops=("parse",)), ASSUMED)
    assert not found.changes
    assert any("one more node with the role compute gains 1.50×" in note for note in found.notes)
    # Where the processes hardly compute, more of them gain nothing.
    found = advise(seen(before, after(before, preprocessing=0.8, cpu=0.0005), ops=("parse",)), ASSUMED)
    assert not found.changes
    assert any("compute for 12% of the time only" in note for note in found.notes)


def test_loops_of_their_own_seeds_that_could_share() -> None:
    before, other = mesh(node(), node()), "ba9876543210"
    now = after(before, loops=2, plans=(PLAN, other), preprocessing=0.8)
    observed = seen(before, now, ops=("parse",))
    observed = replace(observed, facts={**observed.facts, other: observed.facts[PLAN]})
    [change] = advise(observed, ASSUMED).changes
    assert (change.kind, change.target) == ("sharing", "loop0, loop1")
    assert [change.rate, change.gain] == pytest.approx([2000.0, 2.0])


def rotational(**figures: float) -> dict[str, Any]:
    document = node(**figures)
    document["disks"] = {"rotational": {"bytes": 1e12, "free": 5e11, "disks": 4}, "solid-state": {"disks": 0}}
    return document


def order(shuffle: str, seconds: float) -> OrderCost:
    return OrderCost(shuffle, 1, 1, 1, 1, seconds, 1.0, 1, 1.0, 1, 0.3, 1.0, None, False)


def test_order_and_read_ahead_on_rotational_disks_alone() -> None:
    cost = DiskCost("n1", (order("True", 900.0), order("Blocks(shards=16)", 300.0), order("False", 250.0)))
    before = mesh(rotational(read_ahead_bytes=64e6))
    now = after(before, fetch=0.6)
    now["nodes"]["n1"]["plans"][PLAN] |= {"seeks": 9_000.0, "read_ahead": 10_000.0}
    found = advise(seen(before, now, disk_cost=cost), ASSUMED)
    by_kind = {change.kind: change for change in found.changes}
    assert by_kind["order"].gain == pytest.approx(1 / (1 - 0.6))  # three times, but it waits for 60 % only
    assert "Blocks(shards=16)" in by_kind["order"].command
    # Windows of the whole data do not seek: 5.37 ms of seek and media against 0.37, bounded by the wait.
    assert by_kind["read-ahead"].gain == pytest.approx(1 / (1 - 0.6))
    assert not any(change.setting for change in found.changes)
    # Rows that are queued behind others count as preprocessing, but the disks are busy.
    queued = after(before, preprocessing=0.6)
    queued["nodes"]["n1"]["totals"]["read_ahead_seconds"] = 0.9 * 4 * SECONDS
    assert "order" in kinds(advise(seen(before, queued, disk_cost=cost), ASSUMED))
    # The same on solid-state disks: nothing to change.
    before = mesh(node())
    found = advise(seen(before, after(before, fetch=0.6), disk_cost=cost), ASSUMED)
    assert not found.changes
    assert any("memory or faster disks" in note for note in found.notes)


def test_the_cache_of_an_origin_holds_more_or_is_filled_before() -> None:
    # 7 GiB on two nodes. A quota of 1 GiB a node keeps a quarter; with room for 2.5 GiB each, 4.75 GiB stay.
    before = mesh(*[node(cache_capacity=2.5 * GIB) for _ in range(2)])
    now = after(before, fetch=0.6)
    for document in now["nodes"].values():
        document["totals"] |= {"cache_hit": 250.0, "cache_miss": 750.0}
    backed = BucketInfo("photos", 0, {"url": "s3://far", "quota": GIB})
    [change] = advise(seen(before, now, backed), ASSUMED).changes
    assert (change.kind, change.live) == ("cache quota", True)
    assert change.gain == pytest.approx(0.75 / (1 - 4.75 / 7), rel=0.01)
    # In the first epoch of a cache with room for all, without a quota.
    before = mesh(*[node(cache_capacity=8 * GIB) for _ in range(2)])
    now = after(before, fetch=0.6, epochs=0.3)
    now["nodes"]["n1"]["totals"] |= {"cache_miss": 750.0}
    [change] = advise(
        seen(before, now, BucketInfo("photos", 0, {"url": "s3://far", "quota": 0})), ASSUMED
    ).changes
    assert (change.kind, change.live) == ("prefetch", False)


def test_nodes_without_a_decoded_cache() -> None:
    before = mesh(node())
    [change] = advise(seen(before, after(before, preprocessing=0.9)), ASSUMED).changes
    assert (change.kind, change.live) == ("decoded cache", False)
    assert 2 < change.gain < 4  # 0.3 of 1.11 ms are left by the assumptions, and delivery


def test_a_loop_that_waits_for_nothing_leaves_room_for_others() -> None:
    # 1,000 samples a second of 2 ms, and 0.27 ms of delivery, are 2.27 of 24 cores: eight at 80 %.
    before = mesh(node(), node(), node())
    [change] = advise(seen(before, after(before)), ASSUMED).changes
    assert change.kind == "parallel runs"
    assert change.gain == pytest.approx(8)
    two = advise(seen(before, after(before, loops=2)), ASSUMED)
    assert not two.changes  # nobody can say of which kind the next one would be


def test_one_copy_is_a_question_of_safety_and_of_more_than_one_node() -> None:
    before = mesh(node(), node())
    single = replace(PHOTOS, copies=1, wanted=1)
    found = advise(seen(before, after(before, loops=2), single), ASSUMED)
    [change] = found.changes
    assert (change.kind, change.rate, change.gain) == ("copies", 0.0, 1.0)
    assert "(1.5%)" in change.why
    alone = mesh(node())
    assert not advise(seen(alone, after(alone, loops=2), single), ASSUMED).changes


def test_an_idle_mesh_and_loops_that_do_not_report() -> None:
    before = mesh(node(), node())
    idle = copy.deepcopy(before)
    for document in idle["nodes"].values():
        document["time"] = 10_000
    found = advise(observe(before, idle), ASSUMED)
    assert not found.changes
    assert any("no loop has read anything in 10 s" in note for note in found.notes)
    now = after(before, preprocessing=0.5)
    for document in now["nodes"].values():
        document["loaders"] = {}
    found = advise(seen(before, now), ASSUMED)
    assert not found.changes
    assert any("MESH_REPORT" in note for note in found.notes)


def test_nodes_that_restarted_or_are_silent_do_not_count() -> None:
    before = mesh(node(requests=1000), node(requests=1000), node(requests=1000), silent=["n9"])
    now = after(before, preprocessing=0.5)
    now["nodes"]["n2"]["totals"]["requests"] = 3.0
    del now["nodes"]["n3"]
    observed = observe(before, now)
    assert sorted(observed.nodes) == ["n1"]
    assert observed.silent == ("n2", "n9")


def test_what_was_gained_is_told_with_its_noise() -> None:
    before = mesh(node())
    parts = [observe(before, after(before, samples=samples)) for samples in (900, 1000, 1100)]
    rate = rate_of(parts, ["loop0"])
    assert rate.mean == pytest.approx(100)
    assert rate.error == pytest.approx(10 / 3**0.5)
    change = advise(seen(before, after(before)), ASSUMED).changes[0]
    assert not Outcome(change, rate, Rate(110, 6), True).certain
    assert Outcome(change, rate, Rate(190, 6), True).certain
    assert Outcome(change, rate, Rate(50, 1), True).gain == pytest.approx(0.5)
    assert rate_of([], ["loop0"]) == Rate(0, 0)


def test_kinds_that_the_command_knows_are_those_that_rules_make(capsys: pytest.CaptureFixture[str]) -> None:
    made = re.findall(r'(?:_change\(\s*model,\s*|Change\(\s*)"([a-z -]+)"', inspect.getsource(changes))
    assert set(made) == set(KINDS)
    assert run(["tune", "--only", "copy"]) == 2
    assert "'decoded quota'" in capsys.readouterr().err
