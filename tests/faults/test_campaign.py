"""What a campaign counts, and when it says that something is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.faults.campaign import Campaign
from tests.faults.running import Outcome

if TYPE_CHECKING:
    from pathlib import Path

COUNTS = {"done": 10, "hasty done": 20, "concurrent done": 30, "concurrent": 33}


def campaign(*outcomes: Outcome, report: Path | None = None) -> Campaign:
    found = Campaign(4, hosts=3, harsh=3, kinds=None, report=report)
    for outcome in outcomes:
        found.note(outcome)
    return found


def outcome(seed: int, **more: object) -> Outcome:
    return Outcome(seed, injected=6, lost=1, counts=COUNTS, **more)  # type: ignore[arg-type]


def test_faults_and_acknowledged_writes_are_counted() -> None:
    found = campaign(outcome(1), outcome(2))
    assert found.injected == 12
    assert found.wrong == []
    assert found.summary().startswith(
        "12 faults in 2 schedules, 120 acknowledged writes, 0 lost or wrong, 0.0 minutes"
    )


def test_a_seed_that_found_something_is_named() -> None:
    found = campaign(outcome(1), outcome(2, faults=["k gave x"]))
    assert found.wrong == [2]
    assert "1 lost or wrong" in found.summary()
    assert found.summary().endswith("seeds with findings: [2]")


def test_an_error_that_a_client_saw_counts_in_gentle_schedules_alone() -> None:
    assert campaign(outcome(1, errors=["SlowDown"])).wrong == [1]
    assert campaign(outcome(1, errors=["InsufficientStorage"])).wrong == []
    assert campaign(outcome(1, errors=["SlowDown"], harsh=True)).wrong == []


def test_the_report_has_every_schedule(tmp_path: Path) -> None:
    place = tmp_path / "report.json"
    campaign(outcome(1), outcome(2, faults=["k gave x"]), report=place)
    report = json.loads(place.read_text())
    assert report["faults"] == 12
    assert report["nodes_lost"] == 2
    assert report["wrong"] == 1
    assert report["failing_seeds"] == [2]
    assert report["counts"]["concurrent done"] == 60
    assert [each["seed"] for each in report["outcomes"]] == [1, 2]
