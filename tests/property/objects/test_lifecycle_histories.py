"""A sweep removes from a store what a plain reading of the rules says, wherever its pages end."""

from __future__ import annotations

import asyncio
import tempfile
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from meshd.config import StoreSettings
from meshd.control.buckets import Bucket, BucketTable
from meshd.objects.buckets import lifecycle_runner
from meshd.objects.buckets.lifecycle_runner import LifecycleRunner
from meshd.objects.lifecycle_rules import DAY_MS, ListedVersion
from meshd.store.records import NULL, Meta
from meshd.store.store import Store
from meshwire.s3.bucket_settings import LifecycleRule
from tests.property.objects.test_lifecycle_laws import expected
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "photos"
START_NS = 20_000 * 86_400 * 10**9
settings_of_versioning = st.sampled_from(["", "Enabled", "Enabled", "Suspended"])
steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "delete", "versioning", "wait", "wait"]),
        st.sampled_from(["a", "ab", "b", "c"]),
        st.integers(0, 4),
        st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=2),
        settings_of_versioning,
    ),
    min_size=3,
    max_size=25,
)
few_days = st.sampled_from([None, 1, 1, 2, 3])
rules = st.lists(
    st.builds(
        LifecycleRule,
        st.just("r"),
        st.sampled_from([True, True, True, False]),
        st.sampled_from(["", "", "a", "b"]),
        st.sampled_from([{}, {}, {}, {"x": "1"}]),
        st.sampled_from([None, None, None, 1]),
        st.none(),
        few_days,
        st.none(),
        st.booleans(),
        few_days,
        st.sampled_from([None, None, 1, 2]),
    ),
    min_size=1,
    max_size=3,
).map(tuple)

HIDDEN_TWICE: list[Any] = [
    ("versioning", "c", 0, {}, "Suspended"),
    ("delete", "c", 0, {}, ""),
    ("versioning", "c", 0, {}, "Enabled"),
    ("put", "c", 0, {}, ""),
    ("versioning", "c", 0, {}, "Suspended"),
    ("wait", "c", 4, {}, ""),
]
"""A null version that is a marker, whose place another marker takes."""
AFTER_A_DAY = (LifecycleRule("r", True, "", {}, None, None, 1, None, False, None, None),)


async def live(store: Any, table: BucketTable, clock: ManualClock, history: list[Any]) -> None:
    """Let the history happen."""
    for verb, key, size, tags, versioning in history:
        bucket = table.get(NAME)
        assert bucket is not None
        if verb == "put":
            writer = store.writer(NAME, key, size=size)
            await writer.write(b"x" * size)
            meta = Meta(etag=f"{clock.stamp():x}", tags=tags)
            await writer.commit(meta, versioning=bucket.versioning)
        elif verb == "delete":
            await store.delete(NAME, key, versioning=bucket.versioning)
        elif verb == "wait":
            clock.advance(size * 43_200.0)
        elif versioning or not bucket.versioning:  # it cannot be taken back
            await table.update(NAME, lambda found, to=versioning: replace(found, versioning=to))  # type: ignore[misc]
        clock.advance(1)


def listed(store: Any) -> list[ListedVersion]:
    page = store.list_versions(NAME)
    return [
        ListedVersion(key, r.modified, r.stamp, r.size, r.tags, r.version or NULL, r.etag, r.marker, latest)
        for (key, r), latest in zip(page.entries, page.latest, strict=True)
    ]


def names(versions: list[ListedVersion]) -> set[tuple[str, str, int]]:
    """What tells versions apart, null ones that replaced each other too. Markers have no ETag."""
    return {(version.key, version.version, version.stamp) for version in versions}


def check(
    make: Callable[[ManualClock], Any], history: list[Any], rest: int, found: tuple[LifecycleRule, ...]
) -> None:
    async def act() -> None:
        clock = ManualClock(START_NS)
        store, control = make(clock), MemoryControl(clock)
        try:
            table = BucketTable(control)
            await table.create(Bucket(NAME, "ann", 0, lifecycle=found))
            await live(store, table, clock, history)
            clock.advance(rest * 43_200.0)
            before = listed(store)
            # The plain reading judges at one fixed moment: it is told each age as if that were now.
            shift = 400 * DAY_MS - clock.now_ms() // DAY_MS * DAY_MS
            wanted = {
                (action, key, version)
                for key, group in groupby(before, key=lambda entry: entry.key)
                for action, version in expected(found, [shifted(entry, shift) for entry in group])
            }
            removed = await LifecycleRunner(store, store, table, control, clock, 0).sweep()
            after, bucket = listed(store), table.get(NAME)
            assert bucket is not None
            # Where versioning is suspended, the marker that hides an object takes the null version's place.
            replaced = {
                (entry.key, entry.version)
                for entry in before
                if bucket.versioning == "Suspended"
                and entry.version == NULL
                and any(("expire", entry.key) == (action, key) for action, key, _ in wanted)
            }
            for_good = {
                (key, version)
                for action, key, version in wanted
                if action != "expire" or not bucket.versioning or version == NULL
            }
            if bucket.versioning == "Enabled":
                for_good -= {(key, version) for action, key, version in wanted if action == "expire"}
            gone = {(key, version) for key, version, _ in names(before) - names(after)}
            assert gone == for_good | replaced
            assert len(wanted) - len(replaced) <= sum(removed.values()) <= len(wanted)
            current = {entry.key for entry in after if entry.latest and not entry.marker}
            assert current.isdisjoint(key for action, key, _ in wanted if action == "expire")
        finally:
            store.close()

    asyncio.run(act())


def shifted(version: ListedVersion, by: int) -> ListedVersion:
    return replace(version, modified=version.modified + by)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle_runner, "PAGE_ENTRIES", 2)
        yield


@settings(deadline=None)
@given(steps, st.integers(0, 9), rules)
@example(HIDDEN_TWICE, 0, AFTER_A_DAY)
def test_in_memory(history: list[Any], rest: int, found: tuple[LifecycleRule, ...]) -> None:
    check(MemoryStore, history, rest, found)


@settings(deadline=None, max_examples=25)
@given(steps, st.integers(0, 9), rules)
@example(HIDDEN_TWICE, 0, AFTER_A_DAY)
def test_on_disk(history: list[Any], rest: int, found: tuple[LifecycleRule, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        where = StoreSettings.at(Path(folder))
        check(lambda clock: Store.open(where, writer="s", clock=clock), history, rest, found)
