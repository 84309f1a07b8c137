"""Writes that another write or a deletion replaces at the primary before the other owner has them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import pytest

from meshd.core.api_errors import BatchError
from meshd.jobs.output_store import LocalOutputStore, OutputMetadata, OutputTarget
from meshd.objects.object_reader import VersionLookup
from meshd.rpc.peer_client import PeerRefusedError
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NoSuchUploadError,
    NotReplicatedError,
)
from meshd.store.records import NULL, Meta, Upload
from meshd.telemetry import metrics
from meshwire.http_values.conditional_requests import Conditions
from tests.support.mesh_nodes import accept_map, decider_of, running_nodes, shared_store
from tests.support.replica_suite import store_state
from tests.support.server_shutdown import stop_listening
from tests.support.store_calls import error_of, fake_etag, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from meshd.cluster.replication.replicated_store import ReplicatedStore
    from meshd.store.api import ObjectStore
    from meshd.store.records import Location, Record
    from meshd.store.replica.changes import ReplicaFacts
    from meshwire.cluster import Node
    from tests.support.mesh_nodes import Running

LARGE = 3_000_000
WINDOW = 0.4
"""Seconds in which a write that does not wait for the other owner would have been acknowledged."""
ABSENT = Conditions(if_none_match=("*",))


class Pair:
    """Two nodes that own the key `k`: its primary, and the other, whose connections can be refused."""

    def __init__(self, nodes: list[Running]) -> None:
        self.primary = decider_of(nodes, "b", "k")
        self.other = next(one for one in nodes if one is not self.primary)
        self.port = int(self.other.member.endpoint.rpartition(":")[2])
        self.store = shared_store(self.primary)
        accept_map(nodes)

    @property
    def here(self) -> ObjectStore:
        """What the primary has."""
        return self.primary.node.store

    @property
    def there(self) -> ObjectStore:
        """What the other owner has."""
        return self.other.node.store

    async def refuse(self) -> None:
        """From now on the other owner refuses connections."""
        await stop_listening(self.other.listener)
        await self.primary.node.peers.aclose()

    async def accept(self) -> None:
        """It listens again."""
        loop = asyncio.get_running_loop()
        self.other.listener = await loop.create_server(self.other.server, "127.0.0.1", self.port)

    async def begin(self, doing: Awaitable[Any]) -> asyncio.Future[Any]:
        """Starts a write and returns when it is committed at the primary."""
        before, task = self.here.revision(), asyncio.ensure_future(doing)
        for _ in range(2000):
            if self.here.revision() != before:
                return task
            await asyncio.sleep(0.005)
        raise AssertionError(f"nothing was committed: {task}")

    def same(self) -> None:
        """Both have the same of everything."""
        assert store_state(self.here) == store_state(self.there)


def _pair(test: Callable[[Pair], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), 2, copies=2) as nodes:
            await test(Pair(nodes))

    asyncio.run(run())


def _damage(place: Location) -> None:
    with open(place.path, "r+b") as file:
        file.seek(place.offset)
        file.write(b"M")


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


async def _none_returns(*writes: asyncio.Future[Any]) -> None:
    done, _ = await asyncio.wait(writes, timeout=WINDOW, return_when=asyncio.FIRST_COMPLETED)
    assert not done, "acknowledged, and the other owner has neither the write nor its successor"


OVERTAKERS: dict[str, Callable[[ReplicatedStore], Awaitable[Any]]] = {
    "a small write": lambda store: put_object(store, "k", b"next"),
    "a large write": lambda store: put_object(store, "k", b"n" * LARGE, size=LARGE),
    "a deletion": lambda store: store.delete("b", "k"),
    "a deletion of the null version": lambda store: store.delete_version("b", "k", NULL),
    "a marker": lambda store: store.delete("b", "k", versioning="Suspended"),
}


@pytest.mark.parametrize("how", OVERTAKERS)
@pytest.mark.parametrize("size", [10, LARGE])
def test_an_overtaken_write_waits_until_the_other_owner_has_its_successor(how: str, size: int) -> None:
    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        first = await pair.begin(put_object(pair.store, "k", b"x" * size, size=size))
        stamp = pair.here.get("b", "k").stamp  # type: ignore[union-attr]
        successor = await pair.begin(OVERTAKERS[how](pair.store))
        await _none_returns(first, successor)
        await pair.accept()
        await first
        null, grave = pair.there.get_version("b", "k", NULL), pair.there.tombstone_stamp("b", "k")
        assert (null is not None and null.stamp > stamp) or grave > stamp
        await successor
        pair.same()

    _pair(test)


def test_an_overtaken_copy_waits_until_the_other_owner_has_its_successor() -> None:
    async def test(pair: Pair) -> None:
        source = await put_object(pair.store, "k", b"old")
        await pair.refuse()
        copy = await pair.begin(pair.store.link("b", "k", source, Meta("copied")))
        removal = await pair.begin(pair.store.delete("b", "k"))
        await _none_returns(copy, removal)
        await pair.accept()
        await asyncio.gather(copy, removal)
        assert pair.there.get("b", "k") is None

    _pair(test)


def test_overtaken_tags_of_a_version_that_the_other_owner_lacks_wait_for_its_successor() -> None:
    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        first = await pair.begin(put_object(pair.store, "k", b"first"))
        tags = await pair.begin(pair.store.amend("b", "k", None, tags={"a": "b"}))
        removal = await pair.begin(pair.store.delete("b", "k"))
        await _none_returns(first, tags, removal)
        await pair.accept()
        await asyncio.gather(first, tags, removal)
        assert pair.there.get("b", "k") is None

    _pair(test)


def test_a_version_that_was_removed_before_it_was_sent_waits_for_its_removal() -> None:
    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old", versioning="Enabled")
        await pair.refuse()
        first = await pair.begin(put_object(pair.store, "k", b"first", versioning="Enabled"))
        newest = pair.here.newest_version("b", "k")
        assert newest is not None
        removal = await pair.begin(pair.store.delete_version("b", "k", newest.version))
        await _none_returns(first, removal)
        await pair.accept()
        await first
        assert pair.there.tombstone_stamp("b", "k", newest.version)
        await removal
        pair.same()

    _pair(test)


def test_many_overtaken_writes_share_the_transfer_of_their_successor() -> None:
    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        writes = [await pair.begin(put_object(pair.store, "k", b"%d" % number * 100)) for number in range(24)]
        await _none_returns(*writes)
        before = metrics.replication_facts.labels("Bytes")._value.get()
        await pair.accept()
        await asyncio.gather(*writes)
        assert metrics.replication_facts.labels("Bytes")._value.get() - before <= 2
        pair.same()

    _pair(test)


def test_nobody_joins_the_transfer_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pairs of writes, of which each first one waits for its second: also while that of the other pair is
    on its way."""

    async def test(pair: Pair) -> None:
        delivery, store = pair.store.primary.replicator, pair.store
        data, goes_on = delivery.send_data, dict[int, asyncio.Event]()

        async def held(node: Node, bucket: str, key: str, facts: ReplicaFacts, *more: Any) -> Any:
            await goes_on.setdefault(facts.record.stamp, asyncio.Event()).wait()
            return await data(node, bucket, key, facts, *more)

        monkeypatch.setattr(delivery, "send_data", held)
        settling: list[asyncio.Future[Any]] = []
        records: list[Record] = []
        for first in (b"0", b"2"):
            records += [await put_object(pair.here, "k", first), await put_object(pair.here, "k", first * 2)]
            settling.append(asyncio.ensure_future(store.primary.replicate_and_restamp("b", "k", records[-2])))
            await _none_returns(*settling)
        goes_on[records[1].stamp].set()
        await settling[0]
        found = pair.there.get("b", "k")
        assert found is not None
        assert found.stamp == records[1].stamp
        await _none_returns(settling[1])
        goes_on[records[3].stamp].set()
        await settling[1]
        pair.same()

    _pair(test)


def test_a_version_that_nobody_has_any_more_is_not_acknowledged() -> None:
    """The primary has forgotten what became of it: the answer is up to the other owner."""

    async def test(pair: Pair) -> None:
        kept = await put_object(pair.there, "k", b"kept")
        delivery, member = pair.store.primary.replicator, pair.other.member
        await delivery.send_version(member, "b", "k", kept)
        lost = await put_object(pair.there, "lost", b"lost")
        await error_of(PeerRefusedError, delivery.send_version(member, "b", "nowhere", lost))
        delivery.timeout = 0.1
        await error_of(NotReplicatedError, delivery.replicate_version("b", "nowhere", lost))

    _pair(test)


def test_an_overtaken_write_is_not_written_again_over_its_successor() -> None:
    """The other owner has a version that nobody acknowledged, with a stamp of a clock that was ahead."""

    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        first = await pair.begin(put_object(pair.store, "k", b"first"))
        second = await pair.begin(put_object(pair.store, "k", b"second"))
        record = pair.here.get("b", "k")
        assert record is not None
        ahead = await put_object(pair.there, "k", b"never acknowledged")
        assert ahead.stamp > record.stamp
        await pair.accept()
        await asyncio.gather(first, second)
        found = pair.there.get("b", "k")
        assert found is not None
        assert found.etag == fake_etag(b"second")
        pair.same()

    _pair(test)


def test_a_deletion_is_not_entered_again_over_a_write_that_followed_it() -> None:
    async def test(pair: Pair) -> None:
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        removal = await pair.begin(pair.store.delete("b", "k"))
        await put_object(pair.there, "k", b"never acknowledged")
        write = await pair.begin(put_object(pair.here, "k", b"second"))  # committed here, and not sent yet
        ahead = await put_object(pair.there, "k", b"never acknowledged, too")
        record = await write
        assert ahead.stamp > record.stamp
        await pair.accept()
        await removal
        found = pair.here.get("b", "k")
        assert found is not None
        assert found.etag == fake_etag(b"second")
        await pair.store.primary.replicate_and_restamp("b", "k", record)
        pair.same()

    _pair(test)


# parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("how", ["replaced", "completed", "completed in a version", "aborted"])
def test_an_overtaken_part_waits_until_the_other_owner_has_its_successor(how: str, size: int) -> None:
    async def test(pair: Pair) -> None:
        store = pair.store
        upload = await store.create_upload(Upload("", "b", "k"))
        await put_part(store, upload, 1, b"1" * size)
        await pair.refuse()
        part = await pair.begin(put_part(store, upload, 2, b"2" * size))
        if how == "replaced":
            successor = await pair.begin(put_part(store, upload, 2, b"3" * size))
        elif how == "aborted":
            successor = await pair.begin(store.abort_upload(upload))
        else:
            setting: Any = "Enabled" if how == "completed in a version" else ""
            ending = store.complete_upload(upload, (1,), Meta("whole-1"), versioning=setting)
            successor = await pair.begin(ending)
        await _none_returns(part, successor)
        await pair.accept()
        await part
        if how == "replaced":
            assert [found.number for found in pair.there.list_parts(upload).parts] == [1, 2]
        else:
            assert pair.there.get_upload("b", "k", upload.upload_id) is None
            assert (pair.there.get("b", "k") is not None) == (how != "aborted")
        await successor
        pair.same()

    _pair(test)


def test_a_completed_version_is_there_before_the_end_of_its_upload_is() -> None:
    """Also one that is not the newest, and whose completion nobody tells the other owner: the end takes the
    parts with it."""

    async def test(pair: Pair) -> None:
        store = pair.store
        upload = await store.create_upload(Upload("", "b", "k"))
        await put_part(store, upload, 1, b"1")
        done = await pair.here.complete_upload(upload, (1,), Meta("whole-1"), versioning="Enabled")
        await put_object(pair.here, "k", b"newer", versioning="Enabled")
        await error_of(NoSuchUploadError, store.complete_upload(upload, (1,), Meta("whole-1")))
        assert pair.there.get_upload("b", "k", upload.upload_id) is None
        assert pair.there.get_version("b", "k", done.version) is not None

    _pair(test)


def test_a_completion_that_is_repeated_is_confirmed_though_a_newer_version_was_put() -> None:
    async def test(pair: Pair) -> None:
        done = await put_object(pair.here, "k", b"done", versioning="Enabled")
        await put_object(pair.here, "k", b"newer", versioning="Enabled")
        await pair.store.wait_replicated("b", "k", done)
        pair.same()

    _pair(test)


def test_an_output_that_a_job_finds_is_at_the_other_owner_too() -> None:
    """A power cut may have left it at one node; the job goes on and skips what is there."""

    async def test(pair: Pair) -> None:
        await put_object(pair.here, "k", b"made")
        outputs = LocalOutputStore(
            pair.here, pair.store, VersionLookup(pair.here, pair.primary.node.buckets), AsyncMock()
        )
        assert await outputs.lookup_outputs("b", ["k", "missing"]) == [{}, None]
        pair.same()

    _pair(test)


def test_an_output_that_a_job_finds_damaged_is_missing() -> None:
    """The other owner does not have it: the job writes it again."""

    async def test(pair: Pair) -> None:
        made = await put_object(pair.here, "k", b"made")
        (place,) = pair.here.locate(made)
        _damage(place)
        outputs = LocalOutputStore(
            pair.here, pair.store, VersionLookup(pair.here, pair.primary.node.buckets), AsyncMock()
        )
        assert await outputs.lookup_outputs("b", ["k"]) == [None]
        await put_object(pair.store, "k", b"made")
        assert await outputs.lookup_outputs("b", ["k"]) == [{}]
        pair.same()

    _pair(test)


def test_an_output_that_is_damaged_before_the_other_owner_has_it_is_written_again() -> None:
    """The job waits and tries again, instead of failing for what only this node has."""

    async def test(pair: Pair) -> None:
        outputs = LocalOutputStore(
            pair.here, pair.store, VersionLookup(pair.here, pair.primary.node.buckets), AsyncMock()
        )
        await put_object(pair.store, "k", b"old")
        await pair.refuse()
        target, facts = OutputTarget("b", "k", 4), OutputMetadata(fake_etag(b"made"), {}, {}, {}, "")
        written = await pair.begin(outputs.write_output(target, _pieces(b"made"), lambda: facts))
        (place,) = pair.here.locate(pair.here.get("b", "k"))  # type: ignore[arg-type]
        _damage(place)
        await pair.accept()
        assert (await error_of(BatchError, written)).code == "Busy"
        await put_object(pair.store, "k", b"made")
        pair.same()

    _pair(test)


def test_an_output_whose_commit_is_in_progress_is_everywhere_before_its_job_ends() -> None:
    """The job is cancelled while the other owner does not have it; what is told afterwards is final."""

    async def test(pair: Pair) -> None:
        settings: Any = SimpleNamespace(has_bucket=lambda name: True, versioning_of=lambda name: "")
        outputs = LocalOutputStore(pair.here, pair.store, settings, AsyncMock())
        await pair.refuse()
        target, facts = OutputTarget("b", "k", 4), OutputMetadata(fake_etag(b"made"), {}, {}, {}, "")
        written = await pair.begin(outputs.write_output(target, _pieces(b"made"), lambda: facts))
        written.cancel()
        await _none_returns(written)
        await pair.accept()
        with pytest.raises(asyncio.CancelledError):
            await written
        pair.same()
        assert pair.there.get("b", "k") is not None

    _pair(test)


# refusals -------------------------------------------------------------------------------------------------


def test_a_condition_is_refused_when_the_other_owner_has_what_it_was_checked_against() -> None:
    async def test(pair: Pair) -> None:
        store = pair.store
        await pair.refuse()
        first = await pair.begin(put_object(store, "k", b"first"))
        await store.check_conditions("b", "k", Conditions(if_match=(fake_etag(b"first"),)))
        exists = asyncio.ensure_future(
            error_of(ConditionFailedError, store.check_conditions("b", "k", ABSENT))
        )
        await _none_returns(first, exists)
        await pair.accept()
        await exists
        assert pair.there.get("b", "k") is not None
        await first
        await pair.refuse()
        removal = await pair.begin(store.delete("b", "k"))
        match = Conditions(if_match=(fake_etag(b"first"),))
        missing = asyncio.ensure_future(
            error_of(ConditionMissingError, store.check_conditions("b", "k", match))
        )
        await _none_returns(removal, missing)
        await pair.accept()
        await missing
        assert pair.there.get("b", "k") is None
        await removal

    _pair(test)


def test_conditions_are_checked_against_what_the_primary_has() -> None:
    """A node that decides no more refuses nothing: the primary checks them when the body is there."""

    async def test(pair: Pair) -> None:
        await put_object(pair.there, "k", b"not acknowledged")
        await pair.other.node.replicated_store.check_conditions("b", "k", ABSENT)
        await put_object(pair.store, "k", b"x", conditions=ABSENT)

    _pair(test)
