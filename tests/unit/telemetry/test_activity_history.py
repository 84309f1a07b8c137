"""The last hour of a node's activity: a ring of fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.telemetry.activity import TOTALS, ActivityHistory

if TYPE_CHECKING:
    from pathlib import Path


def totals(requests: float) -> dict[str, float]:
    return dict.fromkeys(TOTALS, 0.0) | {"requests": requests}


def test_a_history_without_a_file_is_empty(tmp_path: Path) -> None:
    assert ActivityHistory(tmp_path / "none").read()["time"] == []


def test_samples_are_read_in_order_and_the_oldest_make_room(tmp_path: Path) -> None:
    history = ActivityHistory(tmp_path / "ring")
    history.append(1000, totals(1))
    size = (tmp_path / "ring").stat().st_size
    for number in range(2, 500):
        history.append(1000 * number, totals(number))
    found = ActivityHistory(tmp_path / "ring").read()
    assert found["requests"] == [float(number) for number in range(141, 500)]
    assert found["time"] == [1000 * number for number in range(141, 500)]
    assert (tmp_path / "ring").stat().st_size == size
