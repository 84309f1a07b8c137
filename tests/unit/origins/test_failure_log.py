"""An origin that fails: how often it is asked, counted and told of in the log."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import pytest

from meshd.control.buckets import Bucket
from meshd.origins.client.origin_api import OriginDownError, OriginMissingError, OriginRefusedError
from meshd.origins.client.origin_pool import FailureLog, GuardedOrigin, OriginPool
from meshd.telemetry import metrics
from meshwire.origin import Origin as Description
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.origins.client.origin_api import ObjectFacts, Origin, OriginError


class Failing:
    """Fails as it is told."""

    def __init__(self) -> None:
        self.error: OriginError | None = None
        self.asked = 0

    async def head(self, key: str) -> ObjectFacts | None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return None


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.message, getattr(record, "why", "")) for record in caplog.records]


def counted() -> float:
    (metric,) = metrics.origin_errors.collect()
    return float(next(sample.value for sample in metric.samples if sample.name.endswith("_total")))


def ask(origin: GuardedOrigin) -> None:
    asyncio.run(origin.head("k"))


def test_it_is_told_once_a_minute_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshd.origins")
    clock, behind = ManualClock(), Failing()
    origin = GuardedOrigin("b", cast("Origin", behind), clock, FailureLog("b", clock))
    ask(origin)
    assert not lines(caplog)
    behind.error = OriginDownError("503")
    for _ in range(25):  # 75 seconds
        with pytest.raises(OriginDownError):
            ask(origin)
        clock.advance(3)
    assert lines(caplog) == [("requests to an origin fail", "503")] * 2
    behind.error = OriginMissingError("it answers, but has no such key")
    with pytest.raises(OriginMissingError):
        ask(origin)
    behind.error = None
    ask(origin)
    assert lines(caplog)[2:] == [("the origin answers again", "")]
    behind.error = OriginRefusedError("check its credentials")
    with pytest.raises(OriginRefusedError):
        ask(origin)
    assert lines(caplog)[3:] == [("requests to an origin fail", "check its credentials")]


def test_who_is_told_at_once_counts_as_one_who_asked() -> None:
    clock, behind = ManualClock(), Failing()
    origin = GuardedOrigin("b", cast("Origin", behind), clock, FailureLog("b", clock))
    behind.error = OriginDownError("503")
    before = counted()
    for _ in range(100):
        with pytest.raises(OriginDownError):
            ask(origin)
    assert behind.asked == 1
    assert counted() - before == 99  # the origin itself counts what it was asked


def test_credentials_that_are_not_there_are_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origins = OriginPool(tmp_path, ManualClock())
    bucket = Bucket("b", "o", 1, origin=Description("s3://there/", credentials="lost"))
    before = counted()
    with pytest.raises(OriginRefusedError):
        origins.origin_for(bucket)
    assert counted() - before == 1
    assert [message for message, why in lines(caplog) if "lost" in why] == ["requests to an origin fail"]
