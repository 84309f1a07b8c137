"""Retry-After of refused requests: what a process knows of leases, in whole seconds."""

from __future__ import annotations

from meshd.cluster.cluster_view import RetryAfter
from meshwire.cluster import ClusterMap, Node
from meshwire.cluster.transitions import mark_node_away
from tests.support.manual_clock import ManualClock

CLUSTER = ClusterMap(3, tuple(Node(f"n{n}", f"http://h:{n}", state="up") for n in (1, 2, 3)))


def test_soon_while_nobody_is_silent() -> None:
    estimate = RetryAfter(10.0, ManualClock())
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 1
    assert estimate.lease_seconds == 10


def test_a_silent_node_is_marked_when_its_lease_has_run_out() -> None:
    clock = ManualClock()
    estimate = RetryAfter(10.0, clock)
    estimate.note_silence("n2")
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 11
    clock.advance(4.5)
    estimate.note_silence("n2")
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 7
    clock.advance(6.6)  # and it is not marked: nobody knows for how long
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 10
    assert estimate.estimate_seconds(mark_node_away(CLUSTER, "n2"), "n1", lease_valid=True) == 1


def test_a_silence_is_forgotten_after_a_lease_in_which_nobody_met_it() -> None:
    clock = ManualClock()
    estimate = RetryAfter(10.0, clock)
    estimate.note_silence("n2")
    clock.advance(10.5)
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 1
    estimate.note_silence("n2")
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=True) == 11


def test_a_node_without_its_lease_asks_for_it_every_quarter_lease() -> None:
    estimate = RetryAfter(10.0, ManualClock())
    estimate.note_silence("n2")
    assert estimate.estimate_seconds(CLUSTER, "n1", lease_valid=False) == 3
    assert estimate.estimate_seconds(mark_node_away(CLUSTER, "n1"), "n1", lease_valid=True) == 3
    assert estimate.estimate_seconds(CLUSTER, "n9", lease_valid=True) == 3
