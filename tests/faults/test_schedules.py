"""Schedules that are run every time: some of all kinds, and those that once found something.

Seeds are kept, not results: what each schedule does is in tests.faults.schedules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.running import Testbed
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.running import Outcome

require_etcd()

pytestmark = pytest.mark.timeout(400)
GENTLE = (30, 31)
HARSH = (40,)
CLOCK = 1
LOSSES = (2, 4)
"""Losses of a node that lost acknowledged writes before overtaken ones waited for what replaced them."""


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    with Testbed() as made:
        yield made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", GENTLE)
def test_one_host_at_a_time_is_noticed_by_nobody(testbed: Testbed, seed: int) -> None:
    outcome = testbed.run(seed, 4)
    assert outcome.faults == [], outcome
    assert outcome.unexpected == [], outcome
    _is_work(outcome)


@pytest.mark.parametrize("seed", HARSH)
def test_what_was_acknowledged_survives_several_at_once(testbed: Testbed, seed: int) -> None:
    outcome = testbed.run(seed, 6, harsh=True)
    assert outcome.faults == [], outcome
    _is_work(outcome)


def test_a_clock_that_jumps_by_minutes_and_hours_costs_no_acknowledged_write(testbed: Testbed) -> None:
    """Clients of that node are refused, as those with a wrong clock have to be; the training job asks the
    others."""
    outcome = testbed.run(CLOCK, 3, kinds=("clock",))
    assert outcome.faults == [], outcome
    assert all("SlowDown" in error for error in outcome.unexpected), outcome
    _is_work(outcome)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", LOSSES)
def test_what_many_wrote_at_once_survives_the_loss_of_the_node_that_acknowledged_it(
    testbed: Testbed, seed: int
) -> None:
    outcome = testbed.run(seed, 0, harsh=True)
    assert outcome.faults == [], outcome
    assert outcome.lost == 1, outcome
    assert outcome.counts["certain"] > 0, outcome
    _is_work(outcome)


def _is_work(outcome: Outcome) -> None:
    counts = outcome.counts
    assert min(counts["done"], counts["reads"], counts["listings"], counts["steps"]) > 0, outcome
    assert counts["concurrent done"] > 0, outcome
