"""Where a loader goes: what counts as skipped, and who is asked again after everybody failed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.client.request import Request
from meshsdk.client.retry import RetryQueue
from meshsdk.client.settings import Endpoint, RenewableKeys
from meshsdk.errors import ConnectError
from meshsdk.loader.epoch_iterator import Position
from meshwire.plan.loader_state import LoaderState
from meshwire.sigv4 import Credential

if TYPE_CHECKING:
    from meshwire.plan.rank_slices import Tail

START = Position(LoaderState("a" * 64, "b" * 64, 7), positions=100, batch=10, tail="pad")


def where(place: Position) -> tuple[int, int, int]:
    return place.state.epoch, place.state.position, place.state.skips


def test_what_is_passed_over_counts_as_skipped_and_going_back_does_not() -> None:
    ahead = START.after_seek(0, 4)
    assert where(ahead) == (0, 40, 40)
    assert where(ahead.after_seek(0, 1)) == (0, 10, 40)
    assert where(ahead.after_seek(1, 5)) == (1, 50, 40)
    assert where(START.after_seek(3, 0)) == (3, 0, 0)
    assert where(ahead.after_skip(2)) == (0, 60, 60)
    assert where(ahead.after_skip(7)) == (1, 10, 40 + 60 + 10)
    assert where(ahead.after_skip(0)) == where(ahead)


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1), (0, 10)])
def test_where_no_batch_is(epoch: int, step: int) -> None:
    with pytest.raises(IndexError, match=r"steps 0 to 9|epochs are counted from 0"):
        START.after_seek(epoch, step)
    with pytest.raises(IndexError, match="to go back, use seek"):
        START.after_skip(-1)


@pytest.mark.parametrize("tail", ["pad", "drop", "ragged"])
def test_skipping_at_once_is_skipping_one_by_one(tail: Tail) -> None:
    """Where it leads to, and what it counts, over several epochs, from a place with an origin of its own."""
    begin = replace(START, positions=103, tail=tail, state=replace(START.state, position=37))
    place = begin
    for count in range(40):
        assert begin.after_skip(count) == place
        place = place.after_skip(1)
    assert place.state.epoch == 4
    assert place.state.skips == 4 * 103 + place.state.position - 37


class Crew:
    """A router of two nodes."""

    def __init__(self) -> None:
        self.directory = SimpleNamespace(mark_failed=lambda _: None, refresh=lambda: None, has_several=True)

    def has_untried(self, request: Request, tried: set[Endpoint]) -> bool:
        return len(tried) < 2


def test_when_all_failed_all_may_be_asked_again() -> None:
    router: Any = Crew()
    keys = RenewableKeys("", Credential("a", "s"), lambda: 0.0)
    attempts, request = RetryQueue(router, keys, 60.0), Request("GET", "/")
    first, second = (Endpoint("http", "127.0.0.1", port, "") for port in (1, 2))
    attempts.record_failure(3, ConnectError("refused"), request, first, 100.0)
    assert (attempts.next_due, attempts.tried_endpoints(3)) == (100.0, {first})  # the other one, at once
    assert attempts.pop() == 3
    attempts.record_failure(3, ConnectError("refused"), request, second, 100.0)
    assert attempts.tried_endpoints(3) == set()  # or the one that is back would never be asked
    assert (attempts.next_due or 0) >= 100
    attempts.record_success(3)
    assert len(attempts) == 1
