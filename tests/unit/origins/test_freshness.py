"""What the processes of a node know together of origins."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from meshd.origins.cache.cache_store import FreshnessTable
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path


def test_a_mark_changes_with_every_write_for_all_processes(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        closing(FreshnessTable(tmp_path / "t", clock)) as one,
        closing(FreshnessTable(tmp_path / "t", clock)) as two,
    ):
        seen = [one.write_mark("b")]
        for table in (one, two, one):
            assert one.write_mark("b") == two.write_mark("b") == seen[-1]
            table.bump_write_mark("b")
            seen.append(two.write_mark("b"))
        assert len(set(seen)) == 4
        two.mark_fresh("b", "k", "etag")
        assert one.is_fresh(60, "b", "k", "etag")


def test_a_start_changes_all_marks(tmp_path: Path) -> None:
    with closing(FreshnessTable(tmp_path / "before", ManualClock())) as table:
        before = table.write_mark("b")
    with closing(FreshnessTable(tmp_path / "after", ManualClock())) as table:
        assert table.write_mark("b") != before
