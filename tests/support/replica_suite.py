"""The contract of a store as a replica, as tests. Provide `open_store`, which keeps tombstones.

Law: the primary is a reference store in memory; its changes, applied in any order and any number of
times, give the primary's own state.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.errors import (
    NoSuchUploadError,
    ReplicaLacksError,
    SizeMismatchError,
    StaleEpochError,
    StoreClosedError,
    StoreError,
)
from meshd.store.records import NO_DEADLINE, NULL, Meta, Record, Upload, WriteContext
from meshd.store.replica.changes import (
    Amended,
    Change,
    CompletedPart,
    Marked,
    PartOf,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    part_without_local_fields,
    upload_without_local_fields,
    without_local_fields,
)
from meshwire.http_values.conditional_requests import Conditions
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.store_calls import LARGE, error_of, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager

    from meshd.store.api import ObjectStore
    from meshd.store.records import Removed, UploadedPart
    from meshwire.s3.bucket_settings import Versioning

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Change)
ChangeAndData = tuple[Any, bytes]
"""A change, or (bucket, key, record) with its bytes, or a PartOf with its bytes."""


def store_state(store: ObjectStore, bucket: str = "b") -> dict[str, Any]:
    """Everything of a bucket that is the same on every node."""
    page = store.list_versions(bucket, limit=100_000)
    uploads = store.list_uploads(bucket, limit=100_000).uploads
    return {
        "versions": [
            (key, without_local_fields(record), store.read_range(record, 0, record.size))
            for key, record in page.entries
        ],
        "latest": page.latest,
        "listed": [(key, record.stamp) for key, record in store.list(bucket, limit=100_000).entries],
        "uploads": {
            upload.upload_id: (
                upload_without_local_fields(upload),
                [part_without_local_fields(p) for p in store.list_parts(upload).parts],
            )
            for upload in uploads
        },
    }


async def _committed_later(store: ObjectStore, key: str, data: bytes, conditions: Conditions | None) -> None:
    """Refused for an old map, and for a decision of old; then as if nothing had been."""
    await put_object(store, "newer", context=WriteContext(epoch=1 << 40))
    writer = store.writer("b", key, size=len(data))
    await writer.write(data)
    for epoch, latest in ((1, NO_DEADLINE), (1 << 40, 1), (1, NO_DEADLINE)):
        fenced = WriteContext(epoch=epoch, deadline=latest)
        await error_of(StaleEpochError, writer.commit(Meta("data"), conditions=conditions, context=fenced))
        assert store.get("b", key) is None
        assert b"".join([piece async for piece in writer.read_back()]) == data
    record = await writer.commit(Meta("data"), conditions=conditions)
    assert store.read_range(record, 0, len(data)) == data
    await writer.abort()
    assert store.get("b", key) == record


async def apply_change(store: ObjectStore, fact: Any, data: bytes = b"") -> bool:
    """Enters a fact; whether it was new. Raises like the store."""
    if isinstance(fact, PartOf):
        writer = store.replica_writer(fact.upload.bucket, fact.upload.key, size=len(data))
        await writer.write(data)
        return (await writer.commit_at_stamp(_as_record(fact.part), fact)).changed
    if isinstance(fact, tuple):
        bucket, key, record = fact
        writer = store.replica_writer(bucket, key, size=len(data))
        await writer.write(data)
        return (await writer.commit_at_stamp(record)).changed
    return (await store.apply_change(_DECODER.decode(_ENCODER.encode(fact)))).changed


def _as_record(part: UploadedPart) -> Record:
    """A part as the record that a writer of parts gives."""
    return Record(part.size, part.etag, part.stamp, part.modified, ())


class ReferencePrimary:
    """A store in memory that writes down what it decided."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.changes: list[ChangeAndData] = []

    def close(self) -> None:
        self.store.close()

    async def put(self, key: str, data: bytes, versioning: Versioning = "", **about: Any) -> Record:
        self.clock.advance(0.001)
        record = await put_object(self.store, key, data, versioning=versioning, **about)
        self.changes.append((("b", key, record), data))
        return record

    async def delete(self, key: str, versioning: Versioning = "") -> Removed:
        return self._removed(key, await self.store.delete("b", key, versioning=versioning))

    async def delete_version(self, key: str, version: str) -> Removed:
        return self._removed(key, await self.store.delete_version("b", key, version))

    def _removed(self, key: str, removed: Removed) -> Removed:
        if removed.marker is not None:
            self.changes.append((Marked("b", key, removed.marker), b""))
        elif removed.record is not None:
            self.changes.append((VersionGone("b", key, removed.record.version, removed.stamp), b""))
        return removed

    async def amend(self, key: str, version: str | None, tags: dict[str, str]) -> Record:
        record = await self.store.amend("b", key, version, tags=tags)
        self.changes.append((Amended("b", key, record), b""))
        return record

    async def begin(self, key: str) -> Upload:
        upload = await self.store.create_upload(Upload("", "b", key, metadata={"a": "ö"}, owner="me"))
        self.changes.append((UploadBegun(upload), b""))
        return upload

    async def part(self, upload: Upload, number: int, data: bytes) -> None:
        await put_part(self.store, upload, number, data)
        page = self.store.list_parts(upload, number - 1, 1)
        self.changes.append((PartOf(upload, page.parts[0]), data))

    async def abort(self, upload: Upload) -> None:
        stamp = await self.store.abort_upload(upload)
        self.changes.append((UploadEnded("b", upload.key, upload.upload_id, stamp), b""))

    async def complete(self, upload: Upload, numbers: list[int], versioning: Versioning = "") -> Record:
        parts = {part.number: part for part in self.store.list_parts(upload).parts}
        record = await self.store.complete_upload(
            upload, numbers, Meta(f"whole-{len(numbers)}"), versioning=versioning
        )
        chosen = tuple(CompletedPart(n, parts[n].stamp, parts[n].etag) for n in numbers)
        self.changes.append((UploadCompleted("b", upload.key, upload.upload_id, chosen, record), b""))
        return record

    async def random_step(self, draw: random.Random, uploads: dict[str, Upload]) -> None:
        """One step of a history."""
        key = draw.choice(["k", "k/1", "ü" * 300])
        settings: list[Versioning] = ["", "", "Enabled", "Suspended"]
        versioning = draw.choice(settings)
        data = bytes([draw.randrange(256)]) * draw.choice([0, 1, 700, 70_000])
        version = draw.choice([r.version or NULL for _, r in self.store.list_versions("b").entries] or [NULL])
        upload = draw.choice(list(uploads.values())) if uploads else None
        match draw.randrange(9):
            case 0 | 1:
                await self.put(key, data, versioning)
            case 2:
                await self.delete(key, versioning)
            case 3:
                await self.delete_version(key, version)
            case 4:
                await self.amend(key, draw.choice([None, version]), {"t": str(draw.random())})
            case 5:
                begun = await self.begin(key)
                uploads[begun.upload_id] = begun
            case 6 | 7 if upload is not None:
                await self.part(upload, draw.randint(1, 3), data)
            case 8 if upload is not None:
                del uploads[upload.upload_id]
                numbers = [part.number for part in self.store.list_parts(upload).parts]
                if numbers and draw.random() < 0.7:
                    await self.complete(upload, numbers, versioning)
                else:
                    await self.abort(upload)


async def random_history(draw: random.Random, steps: int) -> ReferencePrimary:
    """What a decider did."""
    decider, uploads = ReferencePrimary(), dict[str, Any]()
    for _ in range(steps):
        try:
            await decider.random_step(draw, uploads)
        except StoreError:  # what makes no sense now
            continue
    return decider


async def apply_all(store: ObjectStore, decider: ReferencePrimary, draw: random.Random) -> None:
    """Everything the decider did, shuffled, some of it twice; what lacks its base is told again later, or
    sent whole when nothing else is left to tell."""
    left = decider.changes * draw.choice([1, 2])
    draw.shuffle(left)
    while left:
        again: list[ChangeAndData] = []
        for fact, data in left:
            try:
                await apply_change(store, fact, data)
            except ReplicaLacksError:
                again.append((fact, data))
            except NoSuchUploadError:
                continue
        if len(again) == len(left):
            await _send_whole(store, decider, again)
            again = []
        left = again


async def _send_whole(store: ObjectStore, decider: ReferencePrimary, facts: list[ChangeAndData]) -> None:
    """The versions that facts are about, as they are now; those that are gone are of no interest."""
    for fact, _ in facts:
        found = decider.store.get_version(fact.bucket, fact.key, fact.record.version or NULL)
        if found is not None and found.stamp == fact.record.stamp:
            data = decider.store.read_range(found, 0, found.size)
            await apply_change(store, (fact.bucket, fact.key, found), data)
        if isinstance(fact, UploadCompleted):
            await store.apply_change(UploadEnded(fact.bucket, fact.key, fact.upload_id, fact.record.stamp))


class ReplicaSuite:
    """Give it a store; it says whether it keeps its promises as a replica."""

    def open_store(self) -> AbstractContextManager[ObjectStore]:
        """A fresh, empty store as a context manager, which closes it; small objects up to 64 KiB."""
        raise NotImplementedError

    def _run(self, check: Callable[[ObjectStore, ReferencePrimary], Coroutine[Any, Any, None]]) -> None:
        with self.open_store() as store, closing(ReferencePrimary()) as decider:
            asyncio.run(check(store, decider))

    def test_a_version_arrives_as_it_was_decided(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            for size in (0, 1, 65_537, LARGE):
                about: dict[str, Any] = {
                    "headers": {"content-type": "image/jpeg"},
                    "metadata": {"who": "Zoë"},
                    "checksums": {"crc64nvme": "AAAAAAAAAAA="},
                    "checksum_type": "FULL_OBJECT",
                    "owner": "me",
                    "tags": {"a": "1"},
                }
                record = await decider.put(f"k{size}", b"x" * size, **about)
                assert await apply_change(store, *decider.changes[-1])
                assert not await apply_change(store, *decider.changes[-1])
                found = store.get("b", f"k{size}")
                assert found is not None
                assert without_local_fields(found) == without_local_fields(record)
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_an_older_null_version_changes_nothing(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            await decider.put("k", b"old" * 50_000)
            await decider.put("k", b"new")
            revision = store.revision()
            assert await apply_change(store, *decider.changes[1])
            assert store.revision() > revision
            assert not await apply_change(store, *decider.changes[0])
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_a_deletion_ends_what_arrives_after_it(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            await decider.put("k", b"gone")
            version = (await decider.put("v", b"gone", "Enabled")).version
            await decider.delete("k")
            await decider.delete_version("v", version)
            for number in (2, 3, 0, 1):
                await apply_change(store, *decider.changes[number])
            assert store.is_empty("b")
            assert store.tombstone_stamp("b", "k") > 0
            gone = store.tombstone_stamp("b", "v", version)
            assert gone > 0
            assert list(store.removals_since("b", "v", 0)) == [(version, gone)]
            assert not store.removals_since("b", "v", gone)
            assert not store.removals_since("b", "k", 0)  # a null version's is no version's own
            await decider.put("k", b"again")
            assert await apply_change(store, *decider.changes[-1])
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_the_newest_stamp_of_a_name_is_told(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            one = await decider.put("k", b"1")
            two = await decider.put("k", b"2", "Enabled")
            writer = store.replica_writer("b", "k", size=1)
            await writer.write(b"2")
            assert (await writer.commit_at_stamp(two)).newest == two.stamp
            writer = store.replica_writer("b", "k", size=1)
            await writer.write(b"1")
            await writer.make_durable()
            applied = await writer.commit_at_stamp(one)
            assert (applied.newest, applied.changed) == (two.stamp, True)

        self._run(check)

    def test_own_writes_come_after_what_was_told(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            decider.clock.advance(10_000_000_000)  # its clock is ahead by centuries
            record = await decider.put("k", b"ahead")
            await apply_change(store, *decider.changes[0])
            assert (await put_object(store, "k", b"own")).stamp > record.stamp

        self._run(check)

    def test_an_amendment_needs_its_version_and_the_newest_holds(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            await decider.put("k", b"data")
            await decider.amend("k", None, {"a": "1"})
            await decider.amend("k", None, {"a": "2"})
            await error_of(ReplicaLacksError, apply_change(store, *decider.changes[2]))
            assert await apply_change(store, *decider.changes[0])
            assert await apply_change(store, *decider.changes[2])
            assert not await apply_change(store, *decider.changes[1])
            assert not await apply_change(store, *decider.changes[0])
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_a_version_sent_whole_brings_its_newer_tags(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            await decider.put("k", b"data")
            await apply_change(store, *decider.changes[0])
            amended = await decider.amend("k", None, {"a": "1"})
            assert await apply_change(store, ("b", "k", amended), b"data")
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_an_upload_is_filled_in_any_order_and_completed(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            upload = await decider.begin("k")
            await decider.part(upload, 2, b"b" * LARGE)
            await decider.part(upload, 1, b"old")
            await decider.part(upload, 1, b"a" * 70_000)
            record = await decider.complete(upload, [1, 2])
            begun, second, old, first, done = decider.changes
            await error_of(ReplicaLacksError, apply_change(store, *done))
            for fact in (first, old, begun, second):
                await apply_change(store, *fact)
            assert [part.size for part in store.list_parts(upload).parts] == [70_000, LARGE]
            assert await apply_change(store, *done)
            assert not await apply_change(store, *done)
            await error_of(NoSuchUploadError, apply_change(store, *second))
            await apply_change(store, *begun)
            found = store.get("b", "k")
            assert found is not None
            assert without_local_fields(found) == without_local_fields(record)
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_an_object_of_parts_can_be_sent_whole(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            for key, sizes in (("small", (5, 6)), ("large", (LARGE, 7))):
                upload = await decider.begin(key)
                for number, size in enumerate(sizes, start=1):
                    await decider.part(upload, number, bytes([number]) * size)
                record = await decider.complete(upload, [1, 2])
                data = decider.store.read_range(record, 0, record.size)
                assert await apply_change(store, ("b", key, record), data)
                assert not await apply_change(store, ("b", key, record), data)
                await apply_change(store, *decider.changes[-1])
            assert store_state(store) == store_state(decider.store)

        self._run(check)

    def test_an_abort_ends_what_arrives_after_it(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            upload = await decider.begin("k")
            await decider.part(upload, 1, b"x" * LARGE)
            await decider.abort(upload)
            begun, part, ended = decider.changes
            assert await apply_change(store, *ended)
            assert not await apply_change(store, *begun)
            await error_of(NoSuchUploadError, apply_change(store, *part))
            assert store.is_empty("b")
            end = store.tombstone_stamp("b", "k", upload.upload_id)
            assert list(store.ended_uploads("b", "k")) == [(upload.upload_id, end)]
            assert not store.removals_since("b", "k", 0)  # the end of an upload is no version's
            assert not store.ended_uploads("b", "other")

        self._run(check)

    def test_a_wrong_size_is_refused_and_leaves_nothing(self) -> None:
        async def check(store: ObjectStore, decider: ReferencePrimary) -> None:
            record = await decider.put("k", b"four")
            writer = store.replica_writer("b", "k", size=None)
            await writer.write(b"fo")
            await error_of(SizeMismatchError, writer.commit_at_stamp(record))
            await writer.abort()
            assert store.is_empty("b")

        self._run(check)

    def test_what_an_older_map_decided_is_committed_by_the_newer_one(self) -> None:
        async def check(store: ObjectStore, _: ReferencePrimary) -> None:
            upload = await store.create_upload(Upload("", "b", "upload"))
            for size in (0, 10, LARGE):
                for conditions in (None, Conditions(if_none_match=("*",))):
                    await _committed_later(store, f"{size}-{conditions}", b"x" * size, conditions)
                await put_object(store, "newer", context=WriteContext(epoch=1 << 40))
                writer = store.part_writer(upload, 1, size)
                await writer.write(b"p" * size)
                await error_of(StaleEpochError, writer.commit(Meta("part"), context=WriteContext(epoch=1)))
                assert b"".join([piece async for piece in writer.read_back()]) == b"p" * size
                part = await writer.commit(Meta("part"))
                assert store.read_range(part, 0, size) == b"p" * size
                await error_of(StoreClosedError, writer.commit(Meta("part")))

        self._run(check)

    def test_any_order_and_repetition_end_in_the_same_state(self) -> None:
        for seed in range(12):

            async def check(store: ObjectStore, _: ReferencePrimary, seed: int = seed) -> None:
                draw = random.Random(seed)
                with closing(await random_history(draw, 40)) as decider:
                    assert seed == 0 or store.is_empty("b")
                    await apply_all(store, decider, draw)
                    assert store_state(store) == store_state(decider.store), f"seed {seed}"

            self._run(check)
            self.renew()

    def renew(self) -> None:
        """The next `open_store` gives an empty store again."""
        raise NotImplementedError
