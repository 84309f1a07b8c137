"""What a lifecycle rule means for one object at one moment."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from meshd.objects import lifecycle_rules
from meshd.objects.lifecycle_rules import ExpiryPlanner, ListedVersion
from meshwire.s3.bucket_settings import LifecycleRule


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def rule(**fields: Any) -> LifecycleRule:
    return LifecycleRule(fields.pop("id", "r"), fields.pop("enabled", True), **fields)


def doomed(rules: list[LifecycleRule], versions: list[ListedVersion], now: str) -> list[tuple[str, str, str]]:
    planner = ExpiryPlanner(tuple(rules), at(now))
    found = [entry for version in versions for entry in planner.add_version(version)]
    return [(e.action, e.version.key, e.version.version) for e in (*found, *planner.finish())]


@pytest.mark.parametrize(
    ("since", "days", "moment"),
    [
        ("2014-01-15T10:30:00", 3, "2014-01-19T00:00:00"),  # the example of S3's guide
        ("2014-01-15T00:00:00", 1, "2014-01-17T00:00:00"),
        ("2014-01-15T23:59:59.999", 1, "2014-01-17T00:00:00"),
        ("2024-02-28T12:00:00", 1, "2024-03-01T00:00:00"),
    ],
)
def test_days_end_at_midnight(since: str, days: int, moment: str) -> None:
    assert lifecycle_rules.due_time(at(since), days) == at(moment)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"prefix": "logs/"}, True),
        ({"prefix": "log"}, True),
        ({"prefix": "Logs/"}, False),
        ({"larger_than": 99}, True),
        ({"larger_than": 100}, False),
        ({"smaller_than": 101}, True),
        ({"smaller_than": 100}, False),
        ({"tags": {"a": "1"}}, True),
        ({"tags": {"a": "1", "b": "2"}}, True),
        ({"tags": {"a": "2"}}, False),
        ({"tags": {"c": ""}}, False),
        ({"prefix": "logs/", "tags": {"a": "1"}, "larger_than": 100}, False),
    ],
)
def test_what_a_rule_is_about(fields: dict[str, Any], fits: bool) -> None:
    assert lifecycle_rules.applies(rule(**fields), "logs/1", 100, {"a": "1", "b": "2"}) is fits


def test_an_object_expires_by_its_age() -> None:
    versions = [ListedVersion("k", at("2024-01-01T06:00:00"))]
    rules = [rule(expire_days=2)]
    assert doomed(rules, versions, "2024-01-03T23:59:59") == []
    assert doomed(rules, versions, "2024-01-04T00:00:00") == [("expire", "k", "null")]


def test_an_object_expires_on_a_date() -> None:
    versions = [ListedVersion("k", at("2024-01-01T06:00:00"))]
    rules = [rule(expire_date=at("2024-05-01T00:00:00") // 1000)]
    assert doomed(rules, versions, "2024-04-30T23:59:59") == []
    assert doomed(rules, versions, "2024-05-01T00:00:00") == [("expire", "k", "null")]


def test_the_earliest_rule_decides_and_names_itself() -> None:
    rules = (rule(id="late", expire_days=9), rule(id="soon é", expire_days=1), rule(id="off", enabled=False))
    header = lifecycle_rules.expiration_header(rules, "k", 1, {}, at("2012-12-21T08:00:00"))
    assert header == 'expiry-date="Sun, 23 Dec 2012 00:00:00 GMT", rule-id="soon%20%C3%A9"'
    assert lifecycle_rules.expiration_header((rule(noncurrent_days=1),), "k", 1, {}, 0) == ""
    assert lifecycle_rules.expiration_header((rule(expire_days=2_147_483_647),), "k", 1, {}, 0) == ""


NEW = ListedVersion("k", at("2024-01-10T00:00:00"), 3, version="v3")
MIDDLE = ListedVersion("k", at("2024-01-05T00:00:00"), 2, version="v2", latest=False)
OLD = ListedVersion("k", at("2024-01-01T00:00:00"), 1, version="null", latest=False)


def test_a_version_is_noncurrent_since_the_next_one_was_made() -> None:
    rules = [rule(noncurrent_days=3)]
    assert doomed(rules, [NEW, MIDDLE, OLD], "2024-01-08T00:00:00") == []
    assert doomed(rules, [NEW, MIDDLE, OLD], "2024-01-09T00:00:00") == [("noncurrent", "k", "null")]
    both = [("noncurrent", "k", "v2"), ("noncurrent", "k", "null")]
    assert doomed(rules, [NEW, MIDDLE, OLD], "2024-01-14T00:00:00") == both


def test_some_noncurrent_versions_are_kept() -> None:
    late = "2025-01-01T00:00:00"
    assert doomed([rule(noncurrent_days=1, noncurrent_keep=1)], [NEW, MIDDLE, OLD], late) == [
        ("noncurrent", "k", "null")
    ]
    assert doomed([rule(noncurrent_days=1, noncurrent_keep=2)], [NEW, MIDDLE, OLD], late) == []
    again = [
        NEW,
        MIDDLE,
        OLD,
        ListedVersion("l", 0, 2, version="v"),
        ListedVersion("l", 0, 1, version="u", latest=False),
    ]
    assert ("noncurrent", "l", "u") not in doomed([rule(noncurrent_days=1, noncurrent_keep=1)], again, late)


MARKER = ListedVersion("k", at("2024-01-10T00:00:00"), 3, version="m", marker=True)


def test_a_lone_marker() -> None:
    now = "2024-01-13T00:00:00"
    assert doomed([rule(expire_markers=True)], [MARKER], "2024-01-10T00:00:01") == [("marker", "k", "m")]
    assert doomed([rule(expire_markers=True)], [MARKER, OLD], now) == []
    assert doomed([rule(expire_days=2)], [MARKER], now) == [("marker", "k", "m")]
    assert doomed([rule(expire_days=3)], [MARKER], now) == []
    assert doomed([rule(expire_days=2, tags={"a": "b"})], [MARKER], now) == []
    assert doomed([rule(expire_markers=True, prefix="l")], [MARKER], now) == []
    assert doomed([rule(expire_markers=True)], [MARKER, ListedVersion("l", 0)], now) == [("marker", "k", "m")]


def test_a_covered_object_does_not_expire_again() -> None:
    assert doomed([rule(expire_days=1)], [MARKER, OLD], "2025-01-01T00:00:00") == []


def test_a_marker_that_is_noncurrent_goes_like_a_version() -> None:
    covered = ListedVersion("k", at("2024-01-02T00:00:00"), 2, version="m", marker=True, latest=False)
    rules = [rule(noncurrent_days=1, larger_than=0)]
    assert doomed(rules, [NEW, covered], "2025-01-01T00:00:00") == []
    assert doomed([rule(noncurrent_days=1)], [NEW, covered], "2025-01-01T00:00:00") == [
        ("noncurrent", "k", "m")
    ]


def test_a_key_that_begins_anew() -> None:
    """Its place was lost between two pages: it is listed from its newest version again."""
    again = [MARKER, OLD, MARKER]
    assert doomed([rule(expire_markers=True, noncurrent_days=400)], again, "2024-02-01T00:00:00") == []
    twice = [NEW, MIDDLE, NEW, MIDDLE, OLD]
    assert doomed([rule(noncurrent_days=1, noncurrent_keep=1)], twice, "2025-01-01T00:00:00") == [
        ("noncurrent", "k", "null")
    ]
    # A null marker was put on top between the pages, in the place of the null version they were cut at.
    covered = ListedVersion("k", NEW.modified, 3, version="v3", latest=False)
    assert doomed([rule(noncurrent_days=9)], [NEW, OLD, covered], "2024-01-12T00:00:00") == []


def test_uploads() -> None:
    began, rules = at("2024-01-01T12:00:00"), (rule(prefix="a/", abort_uploads_days=2),)
    assert not lifecycle_rules.upload_is_due(rules, "a/k", began, 7, at("2024-01-03T23:00:00"))
    assert lifecycle_rules.upload_is_due(rules, "a/k", began, 7, at("2024-01-04T00:00:00"))
    assert not lifecycle_rules.upload_is_due(rules, "b/k", began, 7, at("2024-01-08T23:00:00"))
    assert lifecycle_rules.upload_is_due(rules, "b/k", began, 7, at("2024-01-09T00:00:00"))
    assert not lifecycle_rules.upload_is_due(rules, "b/k", began, 0, at("2034-01-01T00:00:00"))
    longer = (rule(abort_uploads_days=30),)
    assert not lifecycle_rules.upload_is_due(longer, "k", began, 7, at("2024-01-20T00:00:00"))
    off = (rule(abort_uploads_days=1, enabled=False),)
    assert not lifecycle_rules.upload_is_due(off, "k", began, 7, at("2024-01-05T00:00:00"))


def test_the_prefixes_to_go_through() -> None:
    def of(*rules: LifecycleRule) -> tuple[str, ...]:
        return lifecycle_rules.prefixes(rules)

    assert of() == ()
    assert of(rule(abort_uploads_days=1), rule(prefix="x", enabled=False, expire_days=1)) == ()
    assert of(rule(prefix="b", expire_days=1), rule(prefix="a/b", expire_markers=True)) == ("a/b", "b")
    assert of(rule(prefix="a", expire_days=1), rule(prefix="a/b", noncurrent_days=1)) == ("a",)
    assert of(rule(prefix="a", expire_days=1), rule(expire_date=0)) == ("",)
