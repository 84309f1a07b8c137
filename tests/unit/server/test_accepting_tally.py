"""Which worker may take the next connection."""

from __future__ import annotations

from meshd.server.accept_balancer import ConnectionCounts


def test_a_worker_takes_while_no_other_has_fewer() -> None:
    tally = ConnectionCounts(3)
    assert [tally.is_fewest(worker) for worker in range(3)] == [True, True, True]
    tally.set_count(0, 1)
    assert [tally.is_fewest(worker) for worker in range(3)] == [False, True, True]
    tally.set_count(1, 1)
    tally.set_count(2, 2)
    assert [tally.is_fewest(worker) for worker in range(3)] == [True, True, False]


def test_a_worker_that_left_is_not_waited_for() -> None:
    tally = ConnectionCounts(2)
    tally.set_count(0, 500)
    tally.withdraw(1)
    assert tally.is_fewest(0)
    tally.set_count(1, 0)
    assert not tally.is_fewest(0)


def test_a_lone_worker_takes_all() -> None:
    tally = ConnectionCounts(1)
    tally.set_count(0, 10_000)
    assert tally.is_fewest(0)
