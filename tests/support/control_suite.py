"""The contract of a ControlStore as tests. Subclass it and provide `open_control`.

Law: a store that passes is a control store; an engine's own tests add only what is specific to it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from meshd.control.buckets import Bucket, BucketExistsError, BucketTable
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.control_api import ABSENT, ControlError, LeaseLostError, VersionConflictError, Write
from meshd.control.identities import Account, IdentityTable, Key, NamedPolicy, Signer, User
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from meshd.control.control_api import Change, ControlStore
    from meshd.util.clock import Clock

E = TypeVar("E", bound=BaseException)


class ControlSuite:
    """Give it a control store; it says whether it keeps its promises."""

    place: Path
    """A directory of the test's own; set by the binding before each test."""

    ttl = 10.0
    """Seconds of a lease whose end a test waits for."""

    async def elapse(self, clock: ManualClock, seconds: float) -> None:
        """Time passes for the engine. One whose servers have the clock waits for it."""
        clock.advance(seconds)

    def open_control(self, clock: Clock) -> AbstractAsyncContextManager[ControlStore]:
        """A fresh, empty store as an asynchronous context manager, which closes it."""
        raise NotImplementedError

    def test_a_missing_key_is_none(self) -> None:
        async def check(control: ControlStore) -> None:
            assert await control.get("topic/none") is None
            assert await control.list_all("topic/") == {}
            assert control.revision("topic") == 0
            assert control.cached_entries("topic") == {}
            assert not await control.delete("topic/none")

        self._run(check)

    def test_a_put_is_read_back(self) -> None:
        async def check(control: ControlStore) -> None:
            version = await control.put("topic/a", b"\x00\xff")
            found = await control.get("topic/a")
            assert found is not None
            assert (found.value, found.version) == (b"\x00\xff", version)
            assert await control.get_version("topic/a") == version > ABSENT
            assert await control.get_version("topic/none") == ABSENT

        self._run(check)

    def test_versions_grow_and_are_never_used_twice(self) -> None:
        async def check(control: ControlStore) -> None:
            versions = [await control.put(f"topic/{number % 2}", b"x") for number in range(4)]
            await control.delete("topic/0")
            versions.append(await control.put("topic/0", b"x"))
            assert versions == sorted(set(versions))

        self._run(check)

    def test_absent_creates_once(self) -> None:
        async def check(control: ControlStore) -> None:
            version = await control.put("topic/a", b"first", expect=ABSENT)
            conflict = await _conflict(control.put("topic/a", b"second", expect=ABSENT))
            assert (conflict.expected, conflict.found) == (ABSENT, version)

        self._run(check)

    def test_a_put_with_a_version_replaces_exactly_that_one(self) -> None:
        async def check(control: ControlStore) -> None:
            old = await control.put("topic/a", b"1")
            new = await control.put("topic/a", b"2", expect=old)
            await _conflict(control.put("topic/a", b"3", expect=old))
            await _conflict(control.put("topic/none", b"3", expect=new))
            found = await control.get("topic/a")
            assert found is not None
            assert found.value == b"2"

        self._run(check)

    def test_a_delete_with_a_version(self) -> None:
        async def check(control: ControlStore) -> None:
            old = await control.put("topic/a", b"1")
            new = await control.put("topic/a", b"2")
            await _conflict(control.delete("topic/a", expect=old))
            assert await control.delete("topic/a", expect=new)
            await _conflict(control.delete("topic/a", expect=new))

        self._run(check)

    def test_one_of_many_racing_creators_wins(self) -> None:
        async def check(control: ControlStore) -> None:
            racers = [control.put("topic/a", b"%d" % n, expect=ABSENT) for n in range(8)]
            results = await asyncio.gather(*racers, return_exceptions=True)
            assert sum(isinstance(result, int) for result in results) == 1
            assert sum(isinstance(result, VersionConflictError) for result in results) == 7

        self._run(check)

    def test_lists_are_ordered_and_bounded_by_the_prefix(self) -> None:
        async def check(control: ControlStore) -> None:
            for key in ("b/2", "a/9", "b/10", "bb/1", "b/1", "b/é"):
                await control.put(key, key.encode())
            assert list(await control.list_all("b/")) == ["b/1", "b/10", "b/2", "b/é"]
            assert list(await control.list_all("b/1")) == ["b/1", "b/10"]
            assert list(control.cached_entries("b")) == ["b/1", "b/10", "b/2", "b/é"]

        self._run(check)

    def test_complete_revision_is_not_behind_a_deletion(self) -> None:
        async def check(control: ControlStore) -> None:
            assert control.complete_revision("a") >= control.revision("a")
            await control.put("a/1", b"")
            await control.delete("a/1")
            assert control.complete_revision("a") >= control.revision("a") > 0

        self._run(check)

    def test_revision_moves_with_its_topic_only(self) -> None:
        async def check(control: ControlStore) -> None:
            first = await control.put("a/1", b"")
            assert control.revision("a") == first
            await control.put("b/1", b"")
            assert control.revision("a") == first
            await control.delete("a/1")
            assert control.revision("a") > first

        self._run(check)

    def test_a_still_moment_ends(self) -> None:
        async def check(control: ControlStore) -> None:
            for _ in range(2):
                version = await control.put("a/1", b"")
                with control.pin_revisions():
                    assert [control.revision("a"), control.revision("a")] == [version, version]
                    assert control.cached_entries("a")["a/1"].version == version
                    assert control.revision("b") == 0
                assert control.revision("a") == version

        self._run(check)

    def test_impossible_keys_are_refused(self) -> None:
        async def check(control: ControlStore) -> None:
            for key in ("", "topic", "topic/", "/name", "a/b\0c", "a/" + "x" * 480):
                await _fails(ControlError, control.put(key, b""))

        self._run(check)

    def test_a_watch_begins_with_what_is_there_and_ends_up_to_date(self) -> None:
        async def check(control: ControlStore) -> None:
            await control.put("topic/a", b"1")
            await control.put("other/a", b"1")
            async with aclosing(control.watch("topic")) as changes:
                assert await _until(changes, "topic/a", b"1") == ["topic/a"]
                await control.put("topic/b", b"2")
                await control.put("topic/b", b"3")
                assert set(await _until(changes, "topic/b", b"3")) == {"topic/b"}
                await control.delete("topic/a")
                assert await _until(changes, "topic/a", None) == ["topic/a"]

        self._run(check)

    def test_two_watches_see_the_same(self) -> None:
        async def check(control: ControlStore) -> None:
            async with aclosing(control.watch("topic")) as one, aclosing(control.watch("topic")) as two:
                waiting = [asyncio.ensure_future(_until(changes, "topic/a", b"1")) for changes in (one, two)]
                await asyncio.sleep(0)
                await control.put("topic/a", b"1")
                assert await asyncio.gather(*waiting) == [["topic/a"], ["topic/a"]]

        self._run(check)

    def test_a_lease_excludes_until_it_runs_out(self) -> None:
        async def check(control: ControlStore, clock: ManualClock) -> None:
            ttl = self.ttl
            lease = await control.acquire_lease("rebalancer", "n1", ttl)
            assert lease is not None
            assert await control.acquire_lease("rebalancer", "n2", ttl) is None
            await self.elapse(clock, 0.5 * ttl)
            lease = await control.renew_lease(lease)
            await self.elapse(clock, 0.7 * ttl)
            assert await control.acquire_lease("rebalancer", "n2", ttl) is None
            await self.elapse(clock, 0.8 * ttl)
            assert await control.acquire_lease("rebalancer", "n2", ttl) is not None
            await _fails(LeaseLostError, control.renew_lease(lease))

        self._run_with_clock(check)

    def test_a_released_lease_is_free_and_only_its_holder_releases_it(self) -> None:
        async def check(control: ControlStore) -> None:
            first = await control.acquire_lease("rebalancer", "n1", 10)
            assert first is not None
            await control.release_lease(first)
            second = await control.acquire_lease("rebalancer", "n2", 10)
            assert second is not None
            await control.release_lease(first)  # void by now
            assert await control.acquire_lease("rebalancer", "n1", 10) is None

        self._run(check)

    def test_a_holder_takes_its_own_lease_again(self) -> None:
        async def check(control: ControlStore) -> None:
            before = await control.acquire_lease("rebalancer", "n1", 10)
            assert before is not None
            assert await control.acquire_lease("rebalancer", "n1", 10) is not None
            await _fails(LeaseLostError, control.renew_lease(before))

        self._run(check)

    def test_who_holds_leases_is_known(self) -> None:
        async def check(control: ControlStore, clock: ManualClock) -> None:
            first = await control.acquire_lease("node/a", "n1", self.ttl)
            assert first is not None
            assert await control.acquire_lease("node/b", "n2", 60) is not None
            assert await control.acquire_lease("other", "n3", 60) is not None
            assert await control.lease_holders("node/") == {"node/a": "n1", "node/b": "n2"}
            await self.elapse(clock, 1.6 * self.ttl)
            assert await control.lease_holders("node/") == {"node/b": "n2"}
            assert set(await control.lease_holders("")) == {"node/b", "other"}

        self._run_with_clock(check)

    def test_one_of_many_racing_holders_gets_the_lease(self) -> None:
        async def check(control: ControlStore) -> None:
            leases = await asyncio.gather(*(control.acquire_lease("fetcher", f"n{n}", 10) for n in range(8)))
            assert sum(lease is not None for lease in leases) == 1

        self._run(check)

    def test_closing_is_idempotent_and_final(self) -> None:
        async def check(control: ControlStore) -> None:
            control.close()
            control.close()
            await _fails(ControlError, control.put("topic/a", b""))

        self._run(check)

    def test_many_keys_are_written_at_once(self) -> None:
        async def check(control: ControlStore) -> None:
            await control.put("topic/gone", b"1")
            kept = await control.put("topic/kept", b"1")
            before = control.revision("topic")
            writes = [
                Write("topic/new", b"2", ABSENT),
                Write("other/new", b"3"),
                Write("topic/kept", b"4", kept),
                Write("topic/gone", None),
                Write("topic/never", None),
            ]
            await control.write_many(writes)
            assert {key: entry.value for key, entry in control.cached_entries("topic").items()} == {
                "topic/kept": b"4",
                "topic/new": b"2",
            }
            assert control.revision("topic") > before
            assert control.revision("other") > 0
            new = control.cached_entries("topic")["topic/new"].version
            assert await control.put("topic/new", b"5", expect=new) > new
            await control.write_many([])

        self._run(check)

    def test_writes_of_many_that_conflict_can_be_repeated(self) -> None:
        async def check(control: ControlStore) -> None:
            version = await control.put("topic/a", b"1")
            writes = [Write("topic/b", b"2", ABSENT), Write("topic/a", b"2", version + 1)]
            await _conflict(control.write_many(writes))
            assert control.cached_entries("topic")["topic/a"].value == b"1"
            await control.write_many([Write("topic/b", b"2"), Write("topic/a", b"2", version)])
            assert {entry.value for entry in control.cached_entries("topic").values()} == {b"2"}
            await _fails(ControlError, control.write_many([Write("no-name", b"")]))

        self._run(check)

    def test_the_bucket_table(self) -> None:
        async def check(control: ControlStore) -> None:
            here, elsewhere = BucketTable(control), BucketTable(control)
            photos = await here.create(Bucket("photos", "ann", 17))
            await here.create(Bucket("audio", "bob", 18))
            assert elsewhere.get("photos") == photos
            assert [bucket.name for bucket in elsewhere.list_all()] == ["audio", "photos"]
            assert [bucket.name for bucket in elsewhere.list_all("ann")] == ["photos"]
            taken = await _fails(BucketExistsError, elsewhere.create(Bucket("photos", "bob", 19)))
            assert taken.bucket == photos
            assert await elsewhere.delete("photos")
            assert not await here.delete("photos")
            assert here.get("photos") is None

        self._run(check)

    def test_the_identity_table(self) -> None:
        async def check(control: ControlStore) -> None:
            table, other = IdentityTable(control), IdentityTable(control)
            ann, bob = _account("ann"), _account("bob")
            assert await table.replace_accounts(frozenset({"file"}), [ann, bob], 0) == 4
            assert other.find_signer("AKann") == Signer(ann.user, ann.key)
            assert await table.replace_accounts(frozenset({"file"}), [bob], 0) == 2
            assert other.find_signer("AKann") is None
            assert other.list_all() == (bob.user,)
            assert other.find_user("bob") == bob.user
            assert "s3cret" not in repr((ann, other.find_signer("AKbob"), table, other))

        self._run(check)

    def test_an_identity_changes_at_once_and_for_all(self) -> None:
        async def check(control: ControlStore) -> None:
            table, other = IdentityTable(control), IdentityTable(control)
            user, key = _account("ann")
            policy = NamedPolicy(name="readers", text="{}")
            assert await table.update_entry(User, "ann", lambda _: user)
            assert await other.update_entry(Key, key.access_key, lambda _: key)
            assert await table.update_entry(NamedPolicy, "readers", lambda _: policy)
            assert not await other.update_entry(NamedPolicy, "readers", lambda old: old)
            assert dict(other.policies()) == {"readers": policy}
            assert await table.update_entry(Key, key.access_key, _disabled)
            assert other.find_signer(key.access_key) is None
            assert other.keys()[key.access_key] == _disabled(key)
            assert await table.update_entry(User, "ann", lambda _: None)
            assert not await other.update_entry(User, "ann", lambda _: None)
            assert list(other.users()) == []

        self._run(check)

    def test_a_secret_is_made_once_whoever_comes_first(self) -> None:
        async def check(control: ControlStore) -> None:
            secrets = [ClusterSecret(control) for _ in range(6)]
            await _fails(ControlError, _derive(secrets[0]))
            await asyncio.gather(*(secret.create_if_missing() for secret in secrets))
            derived = {secret.derive_key("tokens") for secret in secrets}
            assert len(derived) == 1
            await secrets[0].create_if_missing()
            assert ClusterSecret(control).derive_key("tokens") in derived
            assert secrets[0].derive_key("other") not in derived

        self._run(check)

    def test_nothing_is_lost_between_changes_of_one_identity(self) -> None:
        async def check(control: ControlStore) -> None:
            tables = [IdentityTable(control) for _ in range(6)]
            await tables[0].update_entry(User, "ann", lambda _: _account("ann").user)

            async def attach(number: int, table: IdentityTable) -> None:
                def decide(old: User | None) -> User | None:
                    assert old is not None
                    return replace(old, policies=(*old.policies, f"p{number}"))

                await table.update_entry(User, "ann", decide)

            await asyncio.gather(*(attach(number, table) for number, table in enumerate(tables)))
            user = tables[0].find_user("ann")
            assert user is not None
            assert sorted(user.policies) == [f"p{number}" for number in range(6)]

        self._run(check)

    def _run(self, check: Any) -> None:
        self._run_with_clock(lambda control, _: check(control))

    def _run_with_clock(self, check: Any) -> None:
        async def main() -> None:
            clock = ManualClock()
            async with asyncio.timeout(20), self.open_control(clock) as control:
                await check(control, clock)

        asyncio.run(main())


@asynccontextmanager
async def closing(control: ControlStore) -> AsyncIterator[ControlStore]:
    """`control` as a context manager that closes it: what most bindings of the suite return."""
    try:
        yield control
    finally:
        control.close()


def _account(name: str) -> Account:
    user = User(user_id=name, display_name=name.title(), email=f"{name}@example.org", origin="file")
    return Account(user, Key(access_key=f"AK{name}", user_id=name, secret_key="s3cret" + name, origin="file"))


def _disabled(key: Key | None) -> Key:
    assert key is not None
    return replace(key, enabled=False)


async def _derive(secret: ClusterSecret) -> bytes:
    return secret.derive_key("tokens")


async def _conflict(attempt: Coroutine[Any, Any, object]) -> VersionConflictError:
    return await _fails(VersionConflictError, attempt)


async def _fails(kind: type[E], attempt: Coroutine[Any, Any, object]) -> E:
    try:
        await attempt
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


async def _until(changes: AsyncGenerator[Change, None], key: str, value: bytes | None) -> list[str]:
    """The keys of the changes up to the one that brings `key` to `value`."""
    seen: list[str] = []
    async for change in changes:
        seen.append(change.key)
        if change.key == key and (change.entry.value if change.entry else None) == value:
            return seen
    raise AssertionError(f"the watch ended before {key} changed")
