"""What rebalancers report of their work, added up; which map all processes of a node go by."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from meshd.cluster.rebalance.progress import Progress, ProgressReporter
from meshd.cluster.rebalance_status import decode_progress, drain_status, node_load, rebalance_status
from meshd.cluster.repair.scrub_scheduler import ScrubStatus
from meshd.cluster.replica_counts import under_replicated_slots
from meshd.util import shared_counters
from meshd.util.shared_counters import VersionTimes
from meshwire.cluster import Node, transitions
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    import pytest

    from meshwire.cluster import ClusterMap


def mesh(number: int = 3) -> ClusterMap:
    cluster = transitions.bootstrap_map(Node("n1", "http://h:1"))
    for each in range(2, number + 1):
        cluster = transitions.join_node(cluster, Node(f"n{each}", f"http://h:{each}"))
        for node in cluster.nodes:
            cluster = transitions.mark_complete(cluster, node.node_id)
    return cluster


def test_nothing_moves_in_a_mesh_at_rest() -> None:
    found = rebalance_status(mesh(), {})
    assert (found.takers, found.blocked_by, found.eta_seconds) == ((), "", 0)


def test_a_drain_is_what_the_others_take_over() -> None:
    cluster = transitions.drain_node(mesh(), "n2")
    began = cluster.version
    works = {
        "n1": Progress("comparing", began, 100, bytes=10, total=40, eta=3),
        "n3": Progress("comparing", began, 50, bytes=5, total=20, eta=7),
        "n2": Progress("idle", began - 1, total=1000),
    }
    found = rebalance_status(cluster, works)
    assert (found.bytes_total, found.bytes_moved, found.eta_seconds, found.slots) == (60, 15, 7, 150)
    assert found.takers == ("n1", "n3")
    drain = drain_status(cluster, works)["n2"]
    assert (drain["owns"], drain["empty"], drain["bytes_total"]) == (True, False, 60)


def test_whoever_waits_or_has_not_begun_is_named() -> None:
    cluster = transitions.drain_node(mesh(), "n2")
    works = {"n1": Progress("waiting", cluster.version, why="a holder does not answer", total=5)}
    found = rebalance_status(cluster, works)
    assert found.blocked_by == "n3 has not started; n1: a holder does not answer"
    assert found.eta_seconds is None


def test_a_drained_node_is_empty_when_it_has_let_go_of_all() -> None:
    cluster = transitions.drain_node(mesh(), "n2")
    for node_id in ("n1", "n3"):
        cluster = transitions.mark_complete(cluster, node_id)
    assert not cluster.is_rebalancing

    def state(own: Progress) -> tuple[object, object]:
        found = drain_status(cluster, {"n2": own})["n2"]
        return found["names"], found["empty"]

    assert state(Progress("idle", 1, clear=1)) == (None, False)
    assert state(Progress("dropping", cluster.version, kept=3)) == (3, False)
    assert state(Progress("idle", cluster.version, clear=cluster.version)) == (0, True)


def test_what_another_version_says_is_left_out() -> None:
    works = {"n1": msgspec.json.encode(Progress("idle", 4)), "n2": b'{"doing": "dancing"}', "n3": b"x"}
    assert set(decode_progress(works)) == {"n1"}


def test_a_reporter_says_how_long_the_rest_takes() -> None:
    async def doing() -> None:
        clock = ManualClock()
        control = MemoryControl(clock)
        reporter = ProgressReporter("n1", control, clock)
        await reporter.begin_phase("comparing", 7, 12)
        reporter.stats.total, reporter.stats.bytes = 400, 100
        clock.advance(10)
        await reporter.publish_if_due()
        told = decode_progress({"n1": control.cached_entries("moves")["moves/n1"].value})["n1"]
        assert (told.doing, told.version, told.slots, told.total, told.bytes) == (
            "comparing",
            7,
            12,
            400,
            100,
        )
        assert told.eta == 30
        await reporter.report_blocked("nobody answers", 3)
        await reporter.begin_phase("comparing", 7, 12)
        assert (reporter.progress.bytes, reporter.progress.why) == (100, "")
        await reporter.mark_clear(8)
        await reporter.begin_phase("comparing", 9)
        assert (reporter.progress.bytes, reporter.progress.clear) == (0, 8)

    asyncio.run(doing())


def test_a_node_goes_by_the_map_of_its_slowest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_counters, "_map_versions", VersionTimes(8))
    assert shared_counters.oldest_map_version(100.0, 2.0) > 1 << 60
    shared_counters.set_map_version(0, 5, 90.0)
    shared_counters.set_map_version(3, 4, 80.0)
    assert shared_counters.oldest_map_version(100.0, 2.0) == 4
    shared_counters.set_map_version(3, 5, 99.0)
    assert shared_counters.oldest_map_version(100.0, 2.0) == 4
    assert shared_counters.oldest_map_version(101.5, 2.0) == 5


def test_a_joining_node_is_waited_for() -> None:
    cluster = transitions.join_node(mesh(), Node("n4", "http://h:4"))
    assert "n4" in rebalance_status(cluster, {}).takers
    assert rebalance_status(cluster, {}).blocked_by.startswith("n1 has not started")


def test_background_work_pauses_while_there_are_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(shared_counters, "_client_activity", [0.0])
    monkeypatch.setattr("asyncio.sleep", sleep)
    clock = ManualClock()
    clock.advance(100)
    courtesy = shared_counters.InLoopThrottle(clock)

    async def work(pieces: int, size: int) -> int:
        paused.clear()
        for _ in range(pieces):
            await courtesy.yield_to_clients(size)
        return sum(seconds > 0 for seconds in paused)

    assert asyncio.run(work(10, shared_counters.PIECE_BYTES)) == 0
    shared_counters.mark_client_activity(clock.monotonic())
    assert asyncio.run(work(10, shared_counters.PIECE_BYTES)) == 10
    assert asyncio.run(work(100, 1000)) <= 3
    clock.advance(1)
    assert asyncio.run(work(10, shared_counters.PIECE_BYTES)) == 0


def test_what_is_to_come_and_to_go_at_a_node() -> None:
    assert node_load(None, None, 0, 0) == node_load(Progress(), ScrubStatus(), 10, 10)
    coming = node_load(
        Progress("comparing", total=100, bytes=40, eta=6, rate=10), ScrubStatus(total=1000), 100, 200
    )
    assert (coming.to_come, coming.to_go, coming.rate, coming.eta_seconds) == (60, 0, 10, 6)
    leaving = node_load(Progress("idle", total=100, bytes=40), ScrubStatus(total=1000, debt=3), 100, 25)
    assert (leaving.to_come, leaving.to_go, leaving.eta_seconds, leaving.debt) == (0, 750, 0, 3)
    restoring = node_load(Progress(), ScrubStatus(lacking=500, eta=9, quarantined=2), 10, 10)
    assert (restoring.to_come, restoring.eta_seconds) == (500, 9)
    unknown = node_load(Progress("comparing", total=100), ScrubStatus(lacking=500, eta=9), 10, 10)
    assert (unknown.to_come, unknown.eta_seconds) == (600, None)


def test_a_node_that_waits_has_no_remaining_time() -> None:
    waiting = Progress("waiting", total=100, bytes=40, eta=6, why="its disk is full")
    assert (node_load(waiting, None, 10, 10).to_come, node_load(waiting, None, 10, 10).eta_seconds) == (
        60,
        None,
    )


def _waits_for(reporter: ProgressReporter) -> tuple[str, int | None]:
    return reporter.progress.why, reporter.progress.eta


def test_a_retry_keeps_the_reason_until_something_was_stored() -> None:
    async def run() -> None:
        clock = ManualClock()
        reporter = ProgressReporter("n1", MemoryControl(clock), clock)
        await reporter.begin_phase("comparing", 3)
        reporter.stats.total, reporter.stats.bytes = 400, 100
        clock.advance(10)
        await reporter.publish()
        assert _waits_for(reporter) == ("", 30)
        await reporter.report_unstorable("its disk is full")
        for _ in range(2):
            assert _waits_for(reporter) == ("its disk is full", None)
            await reporter.begin_phase("comparing", 3)
        reporter.stats.bytes += 1
        await reporter.publish()
        assert _waits_for(reporter) == ("", 30)
        await reporter.report_blocked("nobody answers")
        assert _waits_for(reporter) == ("nobody answers", None)
        await reporter.begin_phase("comparing", 3)
        assert _waits_for(reporter)[0] == ""

    asyncio.run(run())


def test_a_rate_is_of_the_last_seconds() -> None:
    async def run() -> None:
        clock = ManualClock()
        reporter = ProgressReporter("n1", MemoryControl(clock), clock)
        await reporter.begin_phase("comparing", 3)
        for _ in range(30):
            clock.advance(1)
            reporter.stats.bytes += 100
            await reporter.publish()
        assert reporter.progress.rate == 100
        for _ in range(11):
            clock.advance(1)
            await reporter.publish()
        assert reporter.progress.rate == 0
        reporter.stats.bytes += 100
        await reporter.end_phase()
        assert reporter.progress.rate == 0

    asyncio.run(run())


def test_slots_are_short_while_an_owner_is_away() -> None:
    cluster = mesh()
    assert not under_replicated_slots(cluster, 2).any()
    gone = transitions.mark_node_away(cluster, "n2")
    assert 0.5 < under_replicated_slots(gone, 2).mean() < 0.8
    assert under_replicated_slots(gone, 3).all()
    assert under_replicated_slots(gone, 1).mean() < 0.5
    assert (under_replicated_slots(gone, 2 + 16 * 3) == under_replicated_slots(gone, 2)).all()


def test_what_was_carried_for_a_drain_stays_told_when_the_map_asks_for_more() -> None:
    drained = transitions.drain_node(mesh(), "n2")
    cluster = transitions.set_node_weight(drained, "n1", 3)
    clock = ManualClock()
    control = MemoryControl(clock)

    async def carry() -> None:
        reporter = ProgressReporter("n3", control, clock)
        await reporter.begin_phase("comparing", drained.version - 1)
        reporter.stats.bytes = reporter.stats.total = 1000  # before the drain
        for under in (drained, cluster):
            await reporter.begin_phase("comparing", under.version)
            reporter.stats.bytes, reporter.stats.total = 7, 10
            await reporter.publish()

    asyncio.run(carry())
    works = decode_progress({"n3": control.cached_entries("moves")["moves/n3"].value})
    drain = drain_status(cluster, works)["n2"]
    assert (drain["bytes_moved"], drain["bytes_total"]) == (14, 17)
    assert rebalance_status(cluster, works).bytes_moved == 7


def test_what_was_written_anew_meanwhile_does_not_stay_to_come() -> None:
    async def told(*, waits: bool) -> Progress:
        clock = ManualClock()
        control = MemoryControl(clock)
        reporter = ProgressReporter("n1", control, clock)
        await reporter.begin_phase("comparing", 4)
        reporter.stats.bytes, reporter.stats.total = 7, 10
        if waits:
            await reporter.report_blocked("n1 is up since map 5; compare again")
            await reporter.end_phase()
        else:
            await reporter.mark_complete(1)
        return decode_progress({"n1": control.cached_entries("moves")["moves/n1"].value})["n1"]

    for waits in (True, False):
        found = asyncio.run(told(waits=waits))
        assert (found.bytes, found.total) == (7, 7)
