"""The coordinator's sweep on real stores: what goes, what stays, and how it goes on where it was."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from meshd.config import StoreSettings
from meshd.control.buckets import Bucket, BucketTable
from meshd.control.control_api import ControlError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.objects.buckets import lifecycle_runner
from meshd.objects.buckets.lifecycle_runner import LifecycleRunner
from meshd.store.errors import DiskFullError
from meshd.store.records import Meta, Upload
from meshd.store.store import Store
from meshd.util.clock_jumps import ClockWatch
from meshwire.s3.bucket_settings import LifecycleRule
from tests.support.lagging_control import LaggingControl
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from meshd.store.records import Record, Removed
    from meshwire.s3.bucket_settings import Versioning

DAY = 86_400.0
NAME = "photos"


class World:
    """A store, a table with one bucket, and the clock they share."""

    def __init__(self, store: Any, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.control = MemoryControl(clock)
        self.buckets = BucketTable(self.control)
        self.lifecycle = self.restarted()

    def restarted(self, stale_upload_days: int = 0) -> LifecycleRunner:
        """The periodic task of a new process."""
        self.lifecycle = LifecycleRunner(
            self.store, self.store, self.buckets, self.control, self.clock, stale_upload_days
        )
        return self.lifecycle

    async def bucket(self, *rules: LifecycleRule, versioning: Versioning = "") -> None:
        await self.buckets.create(Bucket(NAME, "ann", 0, versioning=versioning, lifecycle=rules))

    async def rule(self, *rules: LifecycleRule) -> None:
        await self.buckets.update(NAME, lambda bucket: replace(bucket, lifecycle=rules))

    async def put(self, key: str, *, size: int = 10, tags: dict[str, str] | None = None) -> Record:
        bucket = self.buckets.get(NAME)
        writer = self.store.writer(NAME, key, size=size)
        await writer.write(b"x" * size)
        versioning = bucket.versioning if bucket else ""
        found: Record = await writer.commit(Meta(etag=key, tags=tags or {}), versioning=versioning)
        return found

    def names(self) -> list[str]:
        return [key for key, _ in self.store.list(NAME).entries]

    def versions(self) -> list[tuple[str, bool]]:
        return [(key, record.marker) for key, record in self.store.list_versions(NAME).entries]


@pytest.fixture(params=["memory", "disk"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = ManualClock()
    if request.param == "memory":
        store: Any = MemoryStore(clock)
    else:
        store = Store.open(StoreSettings.at(tmp_path), writer="s", clock=clock)
    yield World(store, clock)
    store.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def cautious(world: World) -> LifecycleRunner:
    """The periodic task of a new process, as a node has it."""
    about = world.store, world.store, world.buckets, world.control, world.clock
    return LifecycleRunner(*about, 7, settle_seconds=3600.0)


def test_a_clock_that_jumps_ahead_removes_nothing_unless_it_stays_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    world = World(MemoryStore(clock), clock)

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=30))
        await world.put("k")
        lifecycle = cautious(world)
        assert not await lifecycle.sweep()
        clock.jump(400 * DAY)
        for _ in range(2):
            clock.advance(900)
            assert not await lifecycle.sweep()
            assert world.names() == ["k"]
        (told,) = [each for each in caplog.records if "clock" in each.getMessage()]
        assert vars(told)["days"] == 400
        clock.jump(-400 * DAY)  # somebody has set it
        clock.advance(3600)
        assert not await lifecycle.sweep()
        assert world.names() == ["k"]
        clock.jump(400 * DAY)
        assert not await lifecycle.sweep()
        clock.advance(3600)
        assert await lifecycle.sweep() == Counter(expire=1), "it is the time, after all"

    run(check)


def test_a_clock_that_jumps_during_a_sweep_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    world = World(MemoryStore(clock), clock)

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=30))
        await world.put("k")
        lifecycle, list_all = cautious(world), world.buckets.list_all

        def jumping() -> list[Bucket]:
            clock.jump(400 * DAY)
            return list(list_all())

        with monkeypatch.context() as patched:
            patched.setattr(world.buckets, "list_all", jumping)
            assert not await lifecycle.sweep()
        clock.advance(900)
        assert not await lifecycle.sweep()
        assert world.names() == ["k"]
        clock.advance(3600)
        assert await lifecycle.sweep() == Counter(expire=1)

    run(check)


def test_a_start_with_a_clock_days_ahead_of_the_last_sweep_removes_nothing_at_once() -> None:
    clock = ManualClock()
    world = World(MemoryStore(clock), clock)

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=30))
        await world.put("k")
        assert not await cautious(world).sweep()
        clock.advance(1.5 * DAY)
        assert not await cautious(world).sweep()
        clock.jump(400 * DAY)
        lifecycle = cautious(world)
        assert not await lifecycle.sweep()
        assert world.names() == ["k"]
        clock.advance(3600)
        assert await lifecycle.sweep() == Counter(expire=1)
        await world.put("k")
        for _ in range(40):
            clock.advance(DAY)
            await lifecycle.sweep()
        assert world.names() == [], "days that pass while it runs are no jump"

    run(check)


def test_a_start_with_a_clock_days_ahead_aborts_no_upload_where_no_bucket_has_rules(tmp_path: Path) -> None:
    clock = ManualClock()
    world = World(MemoryStore(clock), clock)

    def restarted() -> LifecycleRunner:
        about = world.store, world.store, world.buckets, world.control, clock
        watch = ClockWatch(clock, tmp_path / "clock")
        return LifecycleRunner(*about, 7, settle_seconds=3600.0, watch=watch)

    async def check() -> None:
        await world.bucket()
        await world.store.create_upload(Upload("", NAME, "k"))
        assert not await restarted().sweep()
        clock.jump(400 * DAY)
        for _ in range(2):
            assert not await restarted().sweep()
            clock.advance(1700)
        clock.advance(300)
        assert await restarted().sweep() == Counter(upload=1)

    run(check)


def test_objects_expire_by_prefix_tag_and_size(world: World) -> None:
    async def check() -> None:
        await world.bucket(
            LifecycleRule("a", True, "tmp/", expire_days=2),
            LifecycleRule("b", True, tags={"keep": "no"}, expire_days=2),
            LifecycleRule("c", True, "big/", larger_than=100, expire_days=2),
            LifecycleRule("d", False, "kept/", expire_days=2),
        )
        for key in ("tmp/a", "tmpfile", "big/small", "kept/a"):
            await world.put(key)
        await world.put("big/large", size=101)
        await world.put("tagged", tags={"keep": "no"})
        assert not await world.lifecycle.sweep()
        world.clock.advance(3 * DAY)
        await world.put("tmp/young")
        assert await world.lifecycle.sweep() == Counter(expire=3)
        assert world.names() == ["big/small", "kept/a", "tmp/young", "tmpfile"]
        assert world.versions() == [(key, False) for key in world.names()]

    run(check)


def test_versions_and_markers(world: World) -> None:
    async def check() -> None:
        await world.bucket(
            LifecycleRule("a", True, expire_days=1, noncurrent_days=1, noncurrent_keep=1),
            LifecycleRule("b", True, expire_markers=True),
            versioning="Enabled",
        )
        for _ in range(3):
            await world.put("k")
        world.clock.advance(2 * DAY)
        assert await world.lifecycle.sweep() == Counter(expire=1, noncurrent=1)
        assert world.versions() == [("k", True), ("k", False), ("k", False)]
        assert world.names() == []
        world.clock.advance(2 * DAY)
        assert await world.lifecycle.sweep() == Counter(noncurrent=1)
        await world.rule(
            LifecycleRule("a", True, noncurrent_days=1), LifecycleRule("b", True, expire_markers=True)
        )
        assert await world.lifecycle.sweep() == Counter(noncurrent=1)
        world.clock.advance(DAY)
        assert await world.lifecycle.sweep() == Counter(marker=1)
        assert world.versions() == []

    run(check)


def test_suspended_versioning_puts_one_null_marker(world: World) -> None:
    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=1), versioning="Suspended")
        await world.put("k")
        world.clock.advance(3 * DAY)
        assert await world.lifecycle.sweep() == Counter(expire=1)
        assert world.versions() == [("k", True)]
        world.clock.advance(3 * DAY)
        assert await world.lifecycle.sweep() == Counter(marker=1)
        assert world.versions() == []

    run(check)


def test_uploads_by_rule_and_by_the_nodes_setting(world: World) -> None:
    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, "soon/", abort_uploads_days=1))
        for bucket, key in ((NAME, "soon/k"), (NAME, "later/k"), (RESERVED_BUCKET, "plans/k")):
            await world.store.create_upload(Upload("", bucket, key))
        world.clock.advance(3 * DAY)
        assert await world.lifecycle.sweep() == Counter(upload=1)
        world.clock.advance(30 * DAY)
        assert not await world.lifecycle.sweep()
        assert await world.restarted(stale_upload_days=7).sweep() == Counter(upload=1)
        assert not world.store.list_uploads(NAME).uploads
        assert world.store.list_uploads(RESERVED_BUCKET).uploads

    run(check)


def test_the_reserved_bucket_is_left_alone_even_if_it_were_listed(world: World) -> None:
    async def check() -> None:
        await world.buckets.create(
            Bucket(RESERVED_BUCKET, "ann", 0, lifecycle=(LifecycleRule("a", True, expire_days=1),))
        )
        await world.store.create_upload(Upload("", RESERVED_BUCKET, "plans/k"))
        world.clock.advance(99 * DAY)
        assert not await world.restarted(stale_upload_days=1).sweep()

    run(check)


def test_many_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_runner, "PAGE_ENTRIES", 7)

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=1), versioning="Enabled")
        for number in range(30):
            for _ in range(1 + number % 3):
                await world.put(f"{number:02}")
        for number in range(50):
            await world.store.create_upload(Upload("", NAME, f"{number:02}"))
        world.clock.advance(3 * DAY)
        assert await world.restarted(1).sweep() == Counter(expire=30, upload=50)
        await world.rule(
            LifecycleRule("a", True, noncurrent_days=1), LifecycleRule("b", True, expire_markers=True)
        )
        world.clock.advance(3 * DAY)
        assert await world.lifecycle.sweep() == Counter(noncurrent=60)
        world.clock.advance(DAY)
        assert await world.lifecycle.sweep() == Counter(marker=30)

    run(check)


def test_once_a_day_and_when_rules_change(world: World) -> None:
    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, "a", expire_days=1))
        looks = 0
        listed = world.store.list_versions

        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return listed(*arguments, **options)

        world.store.list_versions = counting
        for _ in range(3):
            await world.lifecycle.sweep()
        assert looks == 1
        await world.restarted().sweep()
        assert looks == 1, "what was done today is known to the next process"
        await world.rule(LifecycleRule("a", True, "b", expire_days=1))
        await world.lifecycle.sweep()
        assert looks == 2
        world.clock.advance(DAY)
        await world.lifecycle.sweep()
        assert looks == 3

    run(check)


def test_a_sweep_that_was_broken_off_goes_on_where_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control store is told now and then; the next process begins there, and misses nothing."""
    monkeypatch.setattr(lifecycle_runner, "PAGE_ENTRIES", 5)

    async def check() -> None:
        rules = LifecycleRule("a", True, "a/", expire_days=1), LifecycleRule("b", True, "b/", expire_days=1)
        await world.bucket(*rules)
        for number in range(20):
            await world.put(f"a/{number:02}")
            await world.put(f"b/{number:02}")
        world.clock.advance(3 * DAY)
        listed, deleted = world.store.list_versions, world.store.delete
        seen: list[str] = []

        def slow(*arguments: Any, **options: Any) -> Any:
            world.clock.advance(60)
            page = listed(*arguments, **options)
            seen.extend(key for key, _ in page.entries)
            return page

        async def failing(bucket: str, key: str, **options: Any) -> Removed:
            if key == "b/07":
                raise DiskFullError("/disk")
            removed: Removed = await deleted(bucket, key, **options)
            return removed

        async def at_once(seconds: float) -> None:
            return None

        monkeypatch.setattr(asyncio, "sleep", at_once)
        world.store.list_versions, world.store.delete = slow, failing
        first = await world.lifecycle.sweep()
        assert first["expire"] < 40
        seen.clear()
        world.store.delete = deleted
        second = await world.restarted().sweep()
        assert min(seen) > "a/19", "what was done is not done again"
        assert first["expire"] + second["expire"] == 40
        assert world.names() == []

    run(check)


def test_what_changed_since_it_was_listed_stays(world: World) -> None:
    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=1, noncurrent_days=1))
        await world.put("rewritten")
        await world.put("tagged")
        await world.put("same")
        world.clock.advance(3 * DAY)
        listed = world.store.list_versions

        def late(*arguments: Any, **options: Any) -> Any:
            return page

        page = listed(NAME)
        await world.put("rewritten")
        await world.store.amend(NAME, "tagged", None, tags={"keep": "yes"})
        world.store.list_versions = late
        assert await world.lifecycle.sweep() == Counter(expire=1)
        assert world.names() == ["rewritten", "tagged"]

    run(check)


def test_a_version_that_came_back_stays(world: World) -> None:
    """It was noncurrent when it was listed; then the marker over it was removed."""

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, noncurrent_days=1), versioning="Enabled")
        await world.put("k")
        removed = await world.store.delete(NAME, "k", versioning="Enabled")
        world.clock.advance(3 * DAY)
        page = world.store.list_versions(NAME)
        await world.store.delete_version(NAME, "k", removed.marker.version)
        world.store.list_versions = lambda *arguments, **options: page
        assert not await world.lifecycle.sweep()
        assert world.names() == ["k"]

    run(check)


def test_rules_taken_away_stop_a_sweep(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_runner, "PAGE_ENTRIES", 5)

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=1))
        for number in range(20):
            await world.put(f"{number:02}")
        world.clock.advance(3 * DAY)
        rest = world.lifecycle._throttle
        rests = 0

        async def meanwhile(began: float) -> None:
            nonlocal rests
            rests += 1
            if rests == 2:  # after the uploads and one page
                await world.rule()
            await rest(began)

        monkeypatch.setattr(world.lifecycle, "_throttle", meanwhile)
        assert await world.lifecycle.sweep() == Counter(expire=5)
        assert len(world.names()) == 15
        assert rests == 2
        await world.rule(LifecycleRule("a", True, expire_days=1))
        assert await world.lifecycle.sweep() == Counter(expire=15), "it was not done"

    run(check)


def test_what_is_kept_of_a_bucket_that_is_gone_is_forgotten(world: World) -> None:
    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=1))
        await world.lifecycle.sweep()
        assert await world.control.list_all("lifecycle/")
        await world.buckets.delete(NAME)
        await world.lifecycle.sweep()
        assert not await world.control.list_all("lifecycle/")

    run(check)


def test_rules_that_another_node_has_removed_remove_nothing() -> None:
    """This node has not heard of it: it is cut off from the control store, or only behind."""
    clock = ManualClock()
    world = World(MemoryStore(clock), clock)
    control = world.control = LaggingControl(clock)
    world.buckets = BucketTable(control)
    lifecycle = world.restarted()

    async def lost(_: str) -> int:
        raise ControlError("no etcd member answers")

    async def check() -> None:
        await world.bucket(LifecycleRule("a", True, expire_days=30))
        await world.put("k")
        clock.advance(31 * DAY)
        await BucketTable(control.engine).update(NAME, lambda bucket: replace(bucket, lifecycle=()))
        with pytest.MonkeyPatch.context() as cut_off:
            cut_off.setattr(control, "get_version", lost)
            with pytest.raises(ControlError):
                await lifecycle.sweep()
        sweeping = asyncio.ensure_future(lifecycle.sweep())
        for _ in range(10):
            await asyncio.sleep(0)
        control.catch_up()
        assert not await sweeping
        assert world.names() == ["k"]

    run(check)
