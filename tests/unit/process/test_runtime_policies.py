"""Restart policy and the board: pure parts of the supervisor."""

from __future__ import annotations

from meshd.process.child_process import MAX_DELAY, RESET_AFTER, CrashHistory
from meshd.process.process_status import Phase, ProcessStatus


def test_the_first_death_is_answered_at_once_and_delays_double_to_a_limit() -> None:
    deaths, delays = CrashHistory().after_ready(), []
    for _ in range(12):
        deaths = deaths.after_crash(lived=0.1)
        delays.append(deaths.delay)
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays[-1] == MAX_DELAY
    assert delays == sorted(delays)


def test_a_child_that_lived_is_forgiven() -> None:
    deaths = CrashHistory().after_ready().after_crash(0.1).after_crash(0.1).after_crash(0.1)
    assert deaths.after_crash(RESET_AFTER).delay == 0.0


def test_giving_up_is_for_those_that_never_came_up() -> None:
    assert not CrashHistory().after_crash(0.1).after_crash(0.1).should_give_up
    assert CrashHistory().after_crash(0.1).after_crash(0.1).after_crash(0.1).should_give_up
    assert (
        not CrashHistory()
        .after_ready()
        .after_crash(0.1)
        .after_crash(0.1)
        .after_crash(0.1)
        .after_crash(0.1)
        .should_give_up
    )


def test_the_board_says_why_a_node_is_not_ready() -> None:
    board = ProcessStatus(["worker-0", "worker-1", "coordinator-0", "transform-0"])
    assert board.unready_reason() == "the node is starting: worker-0, worker-1, coordinator-0, transform-0"
    for name in ("worker-0", "worker-1", "coordinator-0", "transform-0"):
        board[name] = Phase.READY
    board.node_phase = Phase.READY
    assert board.unready_reason() == ""
    board["worker-0"] = Phase.DOWN  # the other one answers
    assert board.unready_reason() == ""
    board["coordinator-0"] = Phase.STARTING
    assert board.unready_reason() == "the coordinator is being restarted"
    board["coordinator-0"] = Phase.READY
    board["transform-0"] = Phase.DOWN
    assert board.unready_reason() == "no transform process is up"
    board.node_phase = Phase.DRAINING
    assert board.unready_reason().startswith("the node is draining")


def test_names_of_a_role() -> None:
    board = ProcessStatus(["worker-0", "transform-0", "transform-1"])
    assert board.names_of_role("transform") == ["transform-0", "transform-1"]
    assert board.names_of_role("coordinator") == []
