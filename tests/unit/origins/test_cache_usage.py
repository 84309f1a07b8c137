"""How much a bucket is read, by the minute."""

from __future__ import annotations

from meshd.origins.cache.cache_manager import HitStats, Usage


def test_the_last_ten_minutes_count_and_the_last_read_is_remembered() -> None:
    uses = HitStats()
    uses.retain_only(("a", "b"), 1000.0)
    assert uses.usage_of("a", 1030.0) == Usage(0, 0, 30.0)
    uses.count_reads("a", 3, 0, 1040.0)
    uses.count_reads("a", 1, 2, 1041.0)
    uses.count_reads("a", 5, 0, 1500.0)
    assert uses.usage_of("a", 1501.0) == Usage(9, 2, 1.0)
    assert uses.usage_of("a", 1700.0) == Usage(5, 0, 200.0)
    assert uses.usage_of("a", 9000.0) == Usage(0, 0, 7500.0)
    assert uses.usage_of("b", 1060.0).idle == 60.0


def test_what_is_gone_is_forgotten() -> None:
    uses = HitStats()
    uses.retain_only(("a",), 0.0)
    uses.count_reads("a", 1, 0, 10.0)
    uses.retain_only((), 20.0)
    assert uses.usage_of("a", 20.0) == Usage(0, 0, 20.0)
