"""Reports of loaders: what is sent is what is read; nonsense is no report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.telemetry import metric_registry, metrics, training_metrics
from meshsdk.errors import ConfigurationError
from meshsdk.loader_stats import LoaderReporter, Meter
from meshwire.http_values.mesh_headers import (
    LOADER_POSITION_HEADER,
    LOADER_REPORT_HEADER,
    LoaderPosition,
    LoaderReport,
    parse_position,
    parse_report,
)


@given(
    st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z"),
    st.integers(0, 10**12 - 1),
    st.lists(st.integers(0, 10**9), min_size=4, max_size=4),
)
def test_what_is_sent_is_read(name: str, samples: int, stages: list[int]) -> None:
    working, network, preprocessing, fetch = stages
    waited = network + preprocessing + fetch
    report = LoaderReport(
        name, samples, waited / 1000, (waited + working) / 1000, preprocessing / 1000, fetch / 1000
    )
    assert parse_report(report.to_header()) == report
    assert sum(report.stalls.values()) == pytest.approx(waited / 1000)


def test_an_older_loader_does_not_say_what_it_waited_for() -> None:
    found = parse_report("name=a;samples=1;waited=0.500;seconds=1.000")
    assert found == LoaderReport("a", 1, 0.5, 1.0)
    assert found.stalls == {"network": 0.5, "preprocessing": 0.0, "fetch": 0.0}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "resnet",
        "name=a b;samples=1;waited=0.000;seconds=1.000",
        "name=a;samples=-1;waited=0.000;seconds=1.000",
        "name=a;samples=1;waited=2.000;seconds=1.000",
        "name=a;samples=1;waited=nan;seconds=1.000",
        "name=a;samples=1;waited=0.500;seconds=1.000;preprocessing=0.400;fetch=0.200",
        "name=" + "a" * 64 + ";samples=1;waited=0.000;seconds=1.000",
    ],
)
def test_nonsense_is_no_report(header: str | None) -> None:
    assert parse_report(header) is None
    assert parse_position(header) is None


def test_a_reporter_tells_what_is_new_and_not_too_often() -> None:
    stats = Meter(samples=10, seconds=4.0, waited=1.0, fetch=0.25).snapshot(None, 0)
    reporter = LoaderReporter("resnet", lambda: stats, lambda: (3, 5))
    headers = reporter.headers(3, 4, 100)
    assert parse_report(headers[LOADER_REPORT_HEADER]) == LoaderReport("resnet", 10, 1.0, 4.0, fetch=0.25)
    assert parse_position(headers[LOADER_POSITION_HEADER]) == LoaderPosition(3, 504)
    stats = replace(stats, samples=30, seconds=5.0)
    assert reporter.headers(3, 4, 100) == {}
    reporter._due = 0.0
    headers = reporter.headers(4, 4, 100)  # of whose batches the loop has none yet
    assert parse_report(headers[LOADER_REPORT_HEADER]) == LoaderReport("resnet", 20, 0.0, 1.0)
    assert parse_position(headers[LOADER_POSITION_HEADER]) == LoaderPosition(4, 4)


def test_names_are_checked_where_they_are_given() -> None:
    with pytest.raises(ConfigurationError, match="report='my job'"):
        LoaderReporter("my job", lambda: Meter().snapshot(None, 0), lambda: (0, 0))


def test_labels_are_bounded() -> None:
    names = {metric_registry.bounded_label("loader", f"loader-{number}") for number in range(300)}
    assert len(names) == 201
    assert metric_registry.OTHER in names


@pytest.mark.parametrize("metric", [metrics.transform_failures, training_metrics.loader_seconds])
def test_no_counter_takes_more_names_than_there_may_be(metric: Any) -> None:
    """Whoever counts forgot to bound them: `labels` does."""
    for number in range(300):
        metric.labels(f"a name of a user's, {number}").inc()
    (told,) = metric.collect()
    label = metric._labelnames[0]
    names = {sample.labels[label] for sample in told.samples}
    assert len(names) <= 201
    assert "other" in names
