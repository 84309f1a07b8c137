"""What movers say of their work, added up; which map all processes of a node go by."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from meshd.cluster.progress import Progress, Reporter
from meshd.cluster.redundancy import short_slots
from meshd.cluster.scrubbing import Told
from meshd.control.memory import MemoryControl
from meshd.kit import pulse
from meshd.kit.clock import ManualClock
from meshd.kit.shared_words import VersionTimes
from meshd.service.cluster.movements import drains, load, movement, read_works
from meshwire.cluster import Node, transitions

if TYPE_CHECKING:
    import pytest

    from meshwire.cluster import ClusterMap


def mesh(number: int = 3) -> ClusterMap:
    cluster = transitions.founded(Node("n1", "http://h:1"))
    for each in range(2, number + 1):
        cluster = transitions.joined(cluster, Node(f"n{each}", f"http://h:{each}"))
        for node in cluster.nodes:
            cluster = transitions.settled(cluster, node.node_id)
    return cluster


def test_nothing_moves_in_a_mesh_at_rest() -> None:
    found = movement(mesh(), {})
    assert (found.takers, found.blocked_by, found.eta_seconds) == ((), "", 0)


def test_a_drain_is_what_the_others_take_over() -> None:
    cluster = transitions.drained(mesh(), "n2")
    began = cluster.version
    works = {
        "n1": Progress("comparing", began, 100, bytes=10, total=40, eta=3),
        "n3": Progress("comparing", began, 50, bytes=5, total=20, eta=7),
        "n2": Progress("idle", began - 1, total=1000),
    }
    found = movement(cluster, works)
    assert (found.bytes_total, found.bytes_moved, found.eta_seconds, found.slots) == (60, 15, 7, 150)
    assert found.takers == ("n1", "n3")
    drain = drains(cluster, works)["n2"]
    assert (drain["owns"], drain["empty"], drain["bytes_total"]) == (True, False, 60)


def test_whoever_waits_or_has_not_begun_is_named() -> None:
    cluster = transitions.drained(mesh(), "n2")
    works = {"n1": Progress("waiting", cluster.version, why="a holder does not answer", total=5)}
    found = movement(cluster, works)
    assert found.blocked_by == "n3 has not begun; n1: a holder does not answer"
    assert found.eta_seconds is None


def test_a_drained_node_is_empty_when_it_has_let_go_of_all() -> None:
    cluster = transitions.drained(mesh(), "n2")
    for node_id in ("n1", "n3"):
        cluster = transitions.settled(cluster, node_id)
    assert not cluster.moving

    def state(own: Progress) -> tuple[object, object]:
        found = drains(cluster, {"n2": own})["n2"]
        return found["names"], found["empty"]

    assert state(Progress("idle", 1, clear=1)) == (None, False)
    assert state(Progress("dropping", cluster.version, kept=3)) == (3, False)
    assert state(Progress("idle", cluster.version, clear=cluster.version)) == (0, True)


def test_what_another_version_says_is_left_out() -> None:
    works = {"n1": msgspec.json.encode(Progress("idle", 4)), "n2": b'{"doing": "dancing"}', "n3": b"x"}
    assert set(read_works(works)) == {"n1"}


def test_a_reporter_says_how_long_the_rest_takes() -> None:
    async def doing() -> None:
        clock = ManualClock()
        control = MemoryControl(clock)
        reporter = Reporter("n1", control, clock)
        await reporter.begin("comparing", 7, 12)
        reporter.tally.total, reporter.tally.bytes = 400, 100
        clock.advance(10)
        await reporter.refresh()
        told = read_works({"n1": control.peek("moves")["moves/n1"].value})["n1"]
        assert (told.doing, told.version, told.slots, told.total, told.bytes) == (
            "comparing",
            7,
            12,
            400,
            100,
        )
        assert told.eta == 30
        await reporter.wait("nobody answers", 3)
        await reporter.begin("comparing", 7, 12)
        assert (reporter.now.bytes, reporter.now.why) == (100, "")
        await reporter.clear(8)
        await reporter.begin("comparing", 9)
        assert (reporter.now.bytes, reporter.now.clear) == (0, 8)

    asyncio.run(doing())


def test_a_node_goes_by_the_map_of_its_slowest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_maps", VersionTimes(8))
    assert pulse.gone_by(100.0, 2.0) > 1 << 60
    pulse.goes_by(0, 5, 90.0)
    pulse.goes_by(3, 4, 80.0)
    assert pulse.gone_by(100.0, 2.0) == 4
    pulse.goes_by(3, 5, 99.0)
    assert pulse.gone_by(100.0, 2.0) == 4
    assert pulse.gone_by(101.5, 2.0) == 5


def test_a_joining_node_is_waited_for() -> None:
    cluster = transitions.joined(mesh(), Node("n4", "http://h:4"))
    assert "n4" in movement(cluster, {}).takers
    assert movement(cluster, {}).blocked_by.startswith("n1 has not begun")


def test_background_work_pauses_while_there_are_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(pulse, "_cell", [0.0])
    monkeypatch.setattr("asyncio.sleep", sleep)
    clock = ManualClock()
    clock.advance(100)
    courtesy = pulse.Courtesy(clock)

    async def work(pieces: int, size: int) -> int:
        paused.clear()
        for _ in range(pieces):
            await courtesy.rest(size)
        return sum(seconds > 0 for seconds in paused)

    assert asyncio.run(work(10, pulse.PIECE)) == 0
    pulse.heard(clock.monotonic())
    assert asyncio.run(work(10, pulse.PIECE)) == 10
    assert asyncio.run(work(100, 1000)) <= 3
    clock.advance(1)
    assert asyncio.run(work(10, pulse.PIECE)) == 0


def test_what_is_to_come_and_to_go_at_a_node() -> None:
    assert load(None, None, 0, 0) == load(Progress(), Told(), 10, 10)
    coming = load(Progress("comparing", total=100, bytes=40, eta=6, rate=10), Told(total=1000), 100, 200)
    assert (coming.to_come, coming.to_go, coming.rate, coming.eta_seconds) == (60, 0, 10, 6)
    leaving = load(Progress("idle", total=100, bytes=40), Told(total=1000, debt=3), 100, 25)
    assert (leaving.to_come, leaving.to_go, leaving.eta_seconds, leaving.debt) == (0, 750, 0, 3)
    restoring = load(Progress(), Told(lacking=500, eta=9, quarantined=2), 10, 10)
    assert (restoring.to_come, restoring.eta_seconds) == (500, 9)
    unknown = load(Progress("comparing", total=100), Told(lacking=500, eta=9), 10, 10)
    assert (unknown.to_come, unknown.eta_seconds) == (600, None)


def test_a_rate_is_of_the_last_seconds() -> None:
    async def run() -> None:
        clock = ManualClock()
        reporter = Reporter("n1", MemoryControl(clock), clock)
        await reporter.begin("comparing", 3)
        for _ in range(30):
            clock.advance(1)
            reporter.tally.bytes += 100
            await reporter.tell()
        assert reporter.now.rate == 100
        for _ in range(11):
            clock.advance(1)
            await reporter.tell()
        assert reporter.now.rate == 0
        reporter.tally.bytes += 100
        await reporter.end()
        assert reporter.now.rate == 0

    asyncio.run(run())


def test_slots_are_short_while_an_owner_is_away() -> None:
    cluster = mesh()
    assert not short_slots(cluster, 2).any()
    gone = transitions.missed(cluster, "n2")
    assert 0.5 < short_slots(gone, 2).mean() < 0.8
    assert short_slots(gone, 3).all()
    assert short_slots(gone, 1).mean() < 0.5
    assert (short_slots(gone, 2 + 16 * 3) == short_slots(gone, 2)).all()


def test_what_was_carried_for_a_drain_stays_told_when_the_map_asks_for_more() -> None:
    drained = transitions.drained(mesh(), "n2")
    cluster = transitions.reweighed(drained, "n1", 3)
    clock = ManualClock()
    control = MemoryControl(clock)

    async def carry() -> None:
        reporter = Reporter("n3", control, clock)
        await reporter.begin("comparing", drained.version - 1)
        reporter.tally.bytes = reporter.tally.total = 1000  # before the drain
        for under in (drained, cluster):
            await reporter.begin("comparing", under.version)
            reporter.tally.bytes, reporter.tally.total = 7, 10
            await reporter.tell()

    asyncio.run(carry())
    works = read_works({"n3": control.peek("moves")["moves/n3"].value})
    drain = drains(cluster, works)["n2"]
    assert (drain["bytes_moved"], drain["bytes_total"]) == (14, 17)
    assert movement(cluster, works).bytes_moved == 7


def test_what_was_written_anew_meanwhile_does_not_stay_to_come() -> None:
    async def told(*, waits: bool) -> Progress:
        clock = ManualClock()
        control = MemoryControl(clock)
        reporter = Reporter("n1", control, clock)
        await reporter.begin("comparing", 4)
        reporter.tally.bytes, reporter.tally.total = 7, 10
        if waits:
            await reporter.wait("n1 is up since map 5; compare again")
            await reporter.end()
        else:
            await reporter.arrived()
        return read_works({"n1": control.peek("moves")["moves/n1"].value})["n1"]

    for waits in (True, False):
        found = asyncio.run(told(waits=waits))
        assert (found.bytes, found.total) == (7, 7)
