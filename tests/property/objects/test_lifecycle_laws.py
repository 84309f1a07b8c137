"""Laws of lifecycle decisions, against a plain reading of S3's rules over a key's whole history."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from meshd.objects import lifecycle_rules
from meshd.objects.lifecycle_rules import DAY_MS, ExpiryPlanner, ListedVersion
from meshwire.s3.bucket_settings import LifecycleRule

if TYPE_CHECKING:
    from meshd.objects.lifecycle_rules import ExpiryAction

NOW = 400 * DAY_MS
days = st.none() | st.integers(1, 6)
tags = st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"), max_size=2)
rules = st.lists(
    st.builds(
        LifecycleRule,
        st.just("r"),
        st.booleans(),
        st.sampled_from(["", "a", "ab", "b"]),
        tags,
        st.none() | st.integers(0, 3),
        st.none() | st.integers(1, 4),
        days,
        st.none() | st.integers(396, 404).map((86_400).__mul__),
        st.booleans(),
        days,
        st.none() | st.integers(1, 2),
        days,
    ),
    max_size=3,
).map(tuple)


@st.composite
def listings(draw: st.DrawFn) -> list[ListedVersion]:
    """Versions of some keys as the store lists them: by key, the newest first."""
    listed: list[ListedVersion] = []
    for key in sorted(draw(st.sets(st.sampled_from(["a", "ab", "abc", "b", "c"])))):
        times = sorted(
            draw(st.lists(st.integers(NOW - 9 * DAY_MS, NOW), min_size=1, max_size=4)), reverse=True
        )
        for number, modified in enumerate(times):
            marker = draw(st.booleans())
            size, found = (0, {}) if marker else (draw(st.integers(0, 4)), draw(tags))
            listed.append(
                ListedVersion(
                    key, modified, 9 - number, size, found, f"v{number}", "e", marker, latest=number == 0
                )
            )
    return listed


def plan(rules: tuple[LifecycleRule, ...], listed: list[ListedVersion]) -> list[ExpiryAction]:
    planner = ExpiryPlanner(rules, NOW)
    found = [entry for version in listed for entry in planner.add_version(version)]
    return [*found, *planner.finish()]


def matches(rule: LifecycleRule, version: ListedVersion) -> bool:
    if not rule.enabled or not version.key.startswith(rule.prefix):
        return False
    if version.marker:
        return not rule.tags and rule.larger_than is None and rule.smaller_than is None
    low = -1 if rule.larger_than is None else rule.larger_than
    high = 1 << 60 if rule.smaller_than is None else rule.smaller_than
    return low < version.size < high and rule.tags.items() <= version.tags.items()


def old(since: int, limit: int | None) -> bool:
    """Whether `limit` whole days and the rest of the last one are over."""
    return limit is not None and (since // DAY_MS) * DAY_MS + (limit + 1) * DAY_MS <= NOW


def expected(rules: tuple[LifecycleRule, ...], history: list[ListedVersion]) -> list[tuple[str, str]]:
    """Of one key, its versions newest first."""
    newest, *noncurrent = history
    gone = []
    by_age = any(
        matches(rule, newest)
        and (old(newest.modified, rule.expire_days) or (rule.expire_date or 1 << 60) * 1000 <= NOW)
        for rule in rules
    )
    if not newest.marker and by_age:
        gone.append(("expire", newest.version))
    asked = any(matches(rule, newest) and rule.expire_markers for rule in rules)
    if newest.marker and not noncurrent and (by_age or asked):
        gone.append(("marker", newest.version))
    for number, version in enumerate(noncurrent):
        since = history[number].modified
        if any(
            matches(rule, version)
            and old(since, rule.noncurrent_days)
            and number >= (rule.noncurrent_keep or 0)
            for rule in rules
        ):
            gone.append(("noncurrent", version.version))
    return gone


@given(rules, listings())
def test_decisions_are_those_of_a_plain_reading(
    rules: tuple[LifecycleRule, ...], listed: list[ListedVersion]
) -> None:
    found = {(e.version.key, e.action, e.version.version) for e in plan(rules, listed)}
    wanted = {
        (key, action, version)
        for key, history in groupby(listed, key=lambda v: v.key)
        for action, version in expected(rules, list(history))
    }
    assert found == wanted


@given(rules, listings())
def test_everything_that_goes_lies_under_the_prefixes(
    rules: tuple[LifecycleRule, ...], listed: list[ListedVersion]
) -> None:
    """What is not under them need not be read, and leaving it out changes nothing."""
    under = tuple(lifecycle_rules.prefixes(rules))
    some = [version for version in listed if under and version.key.startswith(under)]
    assert plan(rules, some) == plan(rules, listed)
    assert not any(a != b and b.startswith(a) for a in under for b in under)


@given(rules, listings())
def test_the_header_tells_when_an_object_goes(
    rules: tuple[LifecycleRule, ...], listed: list[ListedVersion]
) -> None:
    going = {e.version.key for e in plan(rules, listed) if e.action == "expire"}
    for version in listed:
        if version.latest and not version.marker:
            moment = lifecycle_rules.expiration(
                rules, version.key, version.size, version.tags, version.modified
            )
            assert (moment is not None and moment[0] <= NOW) == (version.key in going)
            header = lifecycle_rules.expiration_header(
                rules, version.key, version.size, version.tags, version.modified
            )
            assert bool(header) == (moment is not None)
