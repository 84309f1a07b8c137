"""The contract of an ObjectStore as tests. Subclass it and provide `open_store`.

Law: a store that passes is an ObjectStore; an engine's own tests add only what is specific to it.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    CorruptExtentError,
    InvalidPartError,
    NoSuchUploadError,
    SizeMismatchError,
    StaleEpochError,
    StoreClosedError,
)
from meshd.store.records import RESERVED_BUCKET, Meta, Part, Removed, Upload, WriteContext
from meshwire.cluster import slot_of
from meshwire.http_values.conditional_requests import Conditions
from tests.support.store_calls import (
    LARGE,
    error_of,
    fake_etag,
    new_object,
    put_object,
    put_part,
    read_location,
    read_spans,
)
from tests.support.version_suite import VersionSuite

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractContextManager
    from pathlib import Path

    from meshd.store.api import ObjectStore


class StoreSuite(VersionSuite):
    """Give it a store; it says whether it keeps its promises."""

    place: Path
    """A directory of the test's own; set by the binding before each test."""

    def open_store(self) -> AbstractContextManager[ObjectStore]:
        """A fresh, empty store as a context manager, which closes it; small objects up to 64 KiB."""
        raise NotImplementedError

    def _run(self, check: Callable[[ObjectStore], Coroutine[Any, Any, None]]) -> None:
        with self.open_store() as store:
            asyncio.run(check(store))

    # objects --------------------------------------------------------------------------------------------

    def test_a_missing_object_is_none(self) -> None:
        async def check(store: ObjectStore) -> None:
            assert store.get("b", "none") is None
            assert await store.delete("b", "none") == Removed()
            assert store.is_empty("b")
            assert store.list("b").entries == ()

        self._run(check)

    def test_objects_put_together(self) -> None:
        async def check(store: ObjectStore) -> None:
            await put_object(store, "c", b"earlier")
            bodies = {"a": b"1", "b": b"", "c": os.urandom(LARGE), "ä/d": b"4" * 600}
            records = await store.put_many(
                "b", [new_object(key, bodies[key], tags={"t": key}) for key in bodies]
            )
            assert [record.stamp for record in records] == sorted({record.stamp for record in records})
            for (key, body), record in zip(bodies.items(), records, strict=True):
                assert store.get("b", key) == record
                assert store.read_range(record, 0, record.size) == body
                assert (record.etag, record.tags) == (fake_etag(body), {"t": key})
            assert len(store.list_versions("b").entries) == len(bodies)
            versions = await store.put_many("b", [new_object("a", b"2")], versioning="Enabled")
            assert versions[0].version
            assert [r.version for _, r in store.list_versions("b", prefix="a").entries] == [
                versions[0].version,
                "",
            ]
            assert await store.put_many("b", []) in ([], ())

        self._run(check)

    def test_of_objects_put_together_all_are_refused_or_none(self) -> None:
        async def check(store: ObjectStore) -> None:
            await store.raise_fence(7)
            fine, changed = new_object("a", b"1"), new_object("b", b"2")
            fenced = store.put_many("b", [fine, changed], context=WriteContext(epoch=6))
            await error_of(StaleEpochError, fenced)
            assert store.is_empty("b")
            changed = msgspec.structs.replace(changed, data=b"3")
            await error_of(CorruptExtentError, store.put_many("b", [fine, changed]))
            assert store.is_empty("b")
            await store.put_many("b", [fine], context=WriteContext(epoch=7))
            assert [key for key, _ in store.list("b").entries] == ["a"]

        self._run(check)

    def test_lent_buffers_are_used_again(self) -> None:
        async def check(store: ObjectStore) -> None:
            for total in (0, 100, LARGE, 40 * LARGE + 7):
                data = os.urandom(total)
                buffers = [bytearray(LARGE), bytearray(LARGE)]
                writer = store.writer("b", "lent", size=total)
                for number, at in enumerate(range(0, total, LARGE)):
                    piece = data[at : at + LARGE]
                    buffer = buffers[number % 2]
                    buffer[: len(piece)] = piece
                    await writer.write_borrowed(memoryview(buffer)[: len(piece)])
                record = await writer.commit(Meta(fake_etag(data)))
                assert store.read_range(record, 0, total) == data

        self._run(check)

    def test_objects_of_all_sizes_are_read_back(self) -> None:
        async def check(store: ObjectStore) -> None:
            for size in (0, 1, 511, 512, 65_536, 65_537, LARGE):
                data = os.urandom(size)
                for declared in (None, size):
                    record = await put_object(store, f"k{size}", data, size=declared)
                    assert record == store.get("b", f"k{size}")
                    assert record.size == size
                    assert store.read_range(record, 0, size) == data
                    assert read_spans(store, record, 0, size) == data
                    assert store.read_range(record, size // 3, size // 2) == data[size // 3 :][: size // 2]

        self._run(check)

    def test_everything_said_at_commit_is_kept(self) -> None:
        async def check(store: ObjectStore) -> None:
            about: dict[str, Any] = {
                "headers": {"content-type": "image/jpeg", "cache-control": "a\tb"},
                "metadata": {"who": "Zoë", "empty": ""},
                "checksums": {"crc64nvme": "AAAAAAAAAAA="},
                "checksum_type": "FULL_OBJECT",
                "owner": "user-1",
            }
            record = await put_object(store, "k", b"x", **about)
            for name, value in about.items():
                assert getattr(record, name) == value

        self._run(check)

    def test_the_revision_tells_that_something_changed(self) -> None:
        async def check(store: ObjectStore) -> None:
            seen = [store.revision()]
            await put_object(store, "k", b"one")
            seen.append(store.revision())
            store.get("b", "k")
            store.list("b")
            assert store.revision() == seen[-1]
            await put_object(store, "k", b"two")
            seen.append(store.revision())
            await store.delete("b", "k")
            seen.append(store.revision())
            assert seen == sorted(set(seen))

        self._run(check)

    def test_the_revision_ignores_documents_of_the_node(self) -> None:
        async def check(store: ObjectStore) -> None:
            seen = store.revision()
            for number in range(3):
                for document in range(3):
                    await put_object(store, f"document-{document}", b"x" * number, bucket=RESERVED_BUCKET)
                await store.delete(RESERVED_BUCKET, "document-0")
                assert store.revision() == seen
                await put_object(store, "k", b"%d" % number)
                assert store.revision() > seen
                seen = store.revision()
            await asyncio.gather(
                put_object(store, "document-1", b"y", bucket=RESERVED_BUCKET), put_object(store, "k", b"y")
            )
            assert store.revision() > seen

        self._run(check)

    def test_changes_since_a_revision_are_named(self) -> None:
        async def check(store: ObjectStore) -> None:
            await put_object(store, "k", b"one")
            before = store.revision()
            assert _changed(store, before) == (before, ())
            await put_object(store, "document", b"x", bucket=RESERVED_BUCKET)
            assert _changed(store, before) == (before, ())
            await put_object(store, "z/é", b"two")
            await put_object(store, "other", b"two", bucket="c")
            between = store.revision()
            await store.delete("b", "k")
            await put_object(store, "a", b"three")
            await put_object(store, "a", b"four")
            await put_object(store, "document", b"y", bucket=RESERVED_BUCKET)
            assert _changed(store, before) == (store.revision(), ("a", "k", "z/é"))
            assert _changed(store, between) == (store.revision(), ("a", "k"))
            assert _changed(store, store.revision()) == (store.revision(), ())

        self._run(check)

    def test_an_overwrite_replaces_and_its_stamp_rises(self) -> None:
        async def check(store: ObjectStore) -> None:
            first = await put_object(store, "k", b"old")
            second = await put_object(store, "k", b"new!" * 50_000)
            third = await put_object(store, "k", b"newest")
            assert first.stamp < second.stamp < third.stamp
            found = store.get("b", "k")
            assert found is not None
            assert store.read_range(found, 0, 100) == b"newest"

        self._run(check)

    def test_a_reader_keeps_what_it_opened(self) -> None:
        async def check(store: ObjectStore) -> None:
            data = os.urandom(LARGE)
            record = await put_object(store, "k", data)
            with store.open_spans(record, 0, LARGE) as found:
                await store.delete("b", "k")
                assert b"".join(os.pread(span.fd, span.length, span.offset) for span in found) == data

        self._run(check)

    def test_locations_hold_the_bytes(self) -> None:
        async def check(store: ObjectStore) -> None:
            for data in (b"small", os.urandom(LARGE)):
                record = await put_object(store, "k", data)
                assert b"".join(map(read_location, store.locate(record))) == data

        self._run(check)

    def test_a_wrong_size_is_refused(self) -> None:
        async def check(store: ObjectStore) -> None:
            for size in (3, LARGE):
                writer = store.writer("b", "k", size=size)
                await error_of(SizeMismatchError, writer.write(bytes(size + 1)))
                await writer.abort()
                writer = store.writer("b", "k", size=size)
                await writer.write(bytes(size - 1))
                await error_of(SizeMismatchError, writer.commit(Meta("e")))
                await writer.abort()
            assert store.get("b", "k") is None

        self._run(check)

    def test_an_aborted_writer_leaves_nothing(self) -> None:
        async def check(store: ObjectStore) -> None:
            for size in (3, LARGE):
                writer = store.writer("b", "k", size=None)
                await writer.write(bytes(size))
                await writer.abort()
                await writer.abort()
                await error_of(StoreClosedError, writer.write(b"x"))
            assert store.get("b", "k") is None
            assert store.is_empty("b")

        self._run(check)

    def test_the_writer_takes_buffers_and_leaves_them_to_the_caller(self) -> None:
        async def check(store: ObjectStore) -> None:
            writer = store.writer("b", "k", size=None)
            buffer = bytearray(b"abc")
            await writer.write(memoryview(buffer))
            buffer[:] = b"xyz"
            await writer.write(buffer)
            buffer[:] = b"..."
            record = await writer.commit(Meta("e"))
            assert store.read_range(record, 0, 6) == b"abcxyz"

        self._run(check)

    def test_unusual_keys_are_told_apart(self) -> None:
        async def check(store: ObjectStore) -> None:
            keys = [
                "a",
                "a/",
                "a//",
                "/a",
                "../a",
                ".",
                "..",
                "a b+c%20",
                "ä",
                "日本/語",
                "\x01\n",
                "x" * 1024,
            ]
            keys += ["x" * 1023, "x" * 439, "x" * 440, "x" * 441, "é" * 512, "~", "a\x7f"]
            for key in keys:
                await put_object(store, key, key.encode())
            assert [key for key, _ in store.list("b").entries] == sorted(keys, key=str.encode)
            for key in keys:
                record = store.get("b", key)
                assert record is not None
                assert store.read_range(record, 0, 2000) == key.encode()
            await store.delete_many("b", keys[::2])
            assert {key for key, _ in store.list("b").entries} == set(keys[1::2])

        self._run(check)

    # conditions -----------------------------------------------------------------------------------------

    def test_conditions_are_judged(self) -> None:
        async def check(store: ObjectStore) -> None:
            fresh = Conditions(if_none_match=("*",))
            await error_of(
                ConditionMissingError, put_object(store, "k", b"x", conditions=Conditions(if_match=("e",)))
            )
            for data in (b"small", bytes(LARGE)):
                await put_object(store, "k", data, conditions=fresh)
                same = Conditions(if_match=(fake_etag(data),))
                await error_of(ConditionFailedError, put_object(store, "k", data + b"2", conditions=fresh))
                await put_object(store, "k", data + b"3", conditions=same)
                await error_of(ConditionFailedError, put_object(store, "k", data + b"4", conditions=same))
                await error_of(ConditionFailedError, store.delete("b", "k", conditions=same))
                found = store.get("b", "k")
                assert found is not None
                assert store.read_range(found, 0, LARGE * 2) == data + b"3"
                assert (await store.delete("b", "k", conditions=Conditions(if_match=("*",)))).record == found

        self._run(check)

    def test_of_many_conditional_creations_one_wins(self) -> None:
        async def check(store: ObjectStore) -> None:
            fresh = Conditions(if_none_match=("*",))
            doing = [put_object(store, "k", b"%d" % number, conditions=fresh) for number in range(20)]
            results = await asyncio.gather(*doing, return_exceptions=True)
            winners = [result for result in results if not isinstance(result, ConditionFailedError)]
            assert winners == [store.get("b", "k")]

        self._run(check)

    def test_compare_and_swap_counts_right(self) -> None:
        async def check(store: ObjectStore) -> None:
            await put_object(store, "n", b"0")

            async def increment() -> None:
                while True:
                    found = store.get("b", "n")
                    assert found is not None
                    number = int(store.read_range(found, 0, 10)) + 1
                    try:
                        text = b"%d" % number
                        await put_object(store, "n", text, conditions=Conditions(if_match=(found.etag,)))
                    except ConditionFailedError:
                        continue
                    return

            await asyncio.gather(*[increment() for _ in range(12)])
            found = store.get("b", "n")
            assert found is not None
            assert store.read_range(found, 0, 10) == b"12"

        self._run(check)

    # listings -------------------------------------------------------------------------------------------

    def test_listings_roll_up_and_page(self) -> None:
        async def check(store: ObjectStore) -> None:
            keys = ["a", "a/1", "a/2", "a0", "b/x/1", "b/x/2", "b/y", "c", "d/", "d/e"]
            for key in keys:
                await put_object(store, key)
            await put_object(store, "elsewhere", bucket="b2")
            page = store.list("b", delimiter="/")
            assert [key for key, _ in page.entries] == ["a", "a0", "c"]
            assert page.prefixes == ("a/", "b/", "d/")
            assert [key for key, _ in store.list("b", prefix="a").entries] == ["a", "a/1", "a/2", "a0"]
            assert store.list("b", prefix="b/", delimiter="/").prefixes == ("b/x/",)
            assert [key for key, _ in store.list("b", prefix="d/", delimiter="/").entries] == ["d/", "d/e"]
            assert store.list("b", limit=0) == store.list("b", prefix="nothing")
            for limit in (1, 2, 3):
                names, after = [], ""
                while True:
                    page = store.list("b", delimiter="/", after=after, limit=limit)
                    assert len(page.entries) + len(page.prefixes) <= limit
                    names += sorted([*(key for key, _ in page.entries), *page.prefixes], key=str.encode)
                    if not page.truncated:
                        break
                    after = page.next_after
                assert names == ["a", "a/", "a0", "b/", "c", "d/"]

        self._run(check)

    def test_listings_of_some_slots_are_of_their_names_alone(self) -> None:
        async def check(store: ObjectStore) -> None:
            keys = [f"{a}/{b}" for a in "abcd" for b in range(12)] + [f"k{i}" for i in range(40)]
            for key in keys:
                await put_object(store, key, versioning="Enabled")
            for key in keys[::3]:
                await store.delete("b", key, versioning="Enabled")
            for key in keys[::5]:
                await store.create_upload(Upload("", "b", key))
            for seed in range(4):
                slots = bytes((n * 7 + seed) % 4 == 0 for n in range(16))
                inside = [key for key in sorted(keys) if slots[slot_of("b", key, 16)]]
                live = [key for key in inside if key not in keys[::3]]
                assert [entry.key for entry in store.list_entries("b", slots=slots).entries] == live
                assert [key for key, _ in store.list("b", slots=slots, prefix="k").entries] == [
                    key for key in live if key.startswith("k")
                ]
                rolled = store.list_entries("b", slots=slots, delimiter="/", limit=1000)
                assert rolled.prefixes == tuple(sorted({key[:2] for key in live if "/" in key}))
                assert [e.key for e in rolled.entries] == [key for key in live if "/" not in key]
                versions = store.list_versions("b", slots=slots)
                assert [key for key, _ in versions.entries] == [
                    key for key in inside for _ in range(1 if key in live else 2)
                ]
                uploads = store.list_uploads("b", slots=slots)
                assert [upload.key for upload in uploads.uploads] == [k for k in inside if k in keys[::5]]
                page = store.list_entries("b", slots=slots, delimiter="/", limit=3)
                whole = sorted([*(e.key for e in rolled.entries), *rolled.prefixes])
                assert sorted([*(e.key for e in page.entries), *page.prefixes]) == whole[:3]
                assert page.truncated == (len(whole) > 3)

        self._run(check)

    # copies ---------------------------------------------------------------------------------------------

    def test_a_copy_lives_on_without_its_source(self) -> None:
        async def check(store: ObjectStore) -> None:
            for data in (b"", b"small", os.urandom(LARGE)):
                source = await put_object(store, "source", data)
                copy = await store.link("b", "copy", source, Meta("other", {"content-type": "x"}))
                await store.delete("b", "source")
                await put_object(store, "source", b"other")
                assert store.get("b", "copy") == copy
                assert (copy.etag, copy.headers) == ("other", {"content-type": "x"})
                assert store.read_range(copy, 0, LARGE) == data
                again = await store.link("b", "copy", copy, Meta("third"))  # onto itself
                assert store.read_range(again, 0, LARGE) == data
                await error_of(
                    ConditionFailedError,
                    store.link("b", "copy", again, Meta("x"), Conditions(if_none_match=("*",))),
                )

        self._run(check)

    def test_what_was_uploaded_in_parts_elsewhere_is_written_with_them(self) -> None:
        async def check(store: ObjectStore) -> None:
            for size in (10, LARGE):
                data, parts = os.urandom(size), (Part(4, "one", {}), Part(size - 4, "two", {"crc32": "x"}))
                first = await put_object(store, "k", b"first")
                writer = store.writer("b", "k", size=size)
                await writer.write(data)
                made = await writer.commit(
                    Meta("whole-2", parts=parts), conditions=Conditions(if_match=(first.etag,))
                )
                assert store.get("b", "k") == made
                assert (made.parts, made.etag, made.stamp > first.stamp) == (parts, "whole-2", True)
                assert store.read_range(made, 0, size) == data
                writer = store.writer("b", "k", size=1)
                await writer.write(b"x")
                await error_of(
                    ConditionFailedError,
                    writer.commit(Meta("other-2", parts=parts), conditions=Conditions(if_none_match=("*",))),
                )
                await writer.abort()

        self._run(check)

    # uploads --------------------------------------------------------------------------------------------

    def test_an_upload_becomes_an_object(self) -> None:
        async def check(store: ObjectStore) -> None:
            upload = await store.create_upload(
                Upload("", "b", "k", headers={"content-type": "x"}, owner="me")
            )
            assert store.get_upload("b", "k", upload.upload_id) == upload
            assert store.get_upload("b", "other", upload.upload_id) is None
            assert not store.is_empty("b")
            pieces = {1: os.urandom(LARGE), 2: b"replaced", 3: os.urandom(70_000), 7: b"tail", 9: b"unused"}
            for number, data in pieces.items():
                await put_part(store, upload, number, data)
            pieces[2] = os.urandom(100)
            await put_part(store, upload, 2, pieces[2])
            assert store.get("b", "k") is None
            assert [part.number for part in store.list_parts(upload).parts] == [1, 2, 3, 7, 9]
            page = store.list_parts(upload, after=2, limit=2)
            assert ([part.number for part in page.parts], page.truncated, page.next_after) == (
                [3, 7],
                True,
                7,
            )
            chosen = [1, 2, 3, 7]
            record = await store.complete_upload(upload, chosen, Meta("e-4", {"content-type": "x"}))
            whole = b"".join(pieces[number] for number in chosen)
            assert record == store.get("b", "k")
            assert [part.size for part in record.parts] == [len(pieces[number]) for number in chosen]
            assert store.read_range(record, 0, record.size) == whole
            assert read_spans(store, record, LARGE - 5, 200) == whole[LARGE - 5 : LARGE + 195]
            assert store.get_upload("b", "k", upload.upload_id) is None
            await error_of(NoSuchUploadError, put_part(store, upload, 1, b"late"))
            await error_of(NoSuchUploadError, store.complete_upload(upload, [1], Meta("e")))

        self._run(check)

    def test_a_refused_completion_leaves_the_upload(self) -> None:
        async def check(store: ObjectStore) -> None:
            upload = await store.create_upload(Upload("", "b", "k"))
            part = await put_part(store, upload, 1, b"one")
            error = await error_of(InvalidPartError, store.complete_upload(upload, [1, 2], Meta("e")))
            assert error.number == 2
            await error_of(InvalidPartError, store.complete_upload(upload, [1], Meta("e"), etags=["another"]))
            await put_object(store, "k", b"there")
            fresh = Conditions(if_none_match=("*",))
            await error_of(ConditionFailedError, store.complete_upload(upload, [1], Meta("e"), fresh))
            record = await store.complete_upload(upload, [1], Meta("e"), etags=[part.etag])
            assert store.read_range(record, 0, 10) == b"one"

        self._run(check)

    def test_an_aborted_upload_is_gone(self) -> None:
        async def check(store: ObjectStore) -> None:
            upload = await store.create_upload(Upload("", "b", "k"))
            await put_part(store, upload, 1, bytes(LARGE))
            await store.abort_upload(upload)
            await error_of(NoSuchUploadError, store.abort_upload(upload))
            assert store.list_uploads("b").uploads == ()
            assert store.is_empty("b")

        self._run(check)

    def test_uploads_are_listed_in_order(self) -> None:
        async def check(store: ObjectStore) -> None:
            keys = ["a", "a", "b/1", "b/2", "b/2", "c", "x" * 1000]
            made = [await store.create_upload(Upload("", "b", key)) for key in reversed(keys)]
            made.sort(key=lambda upload: (upload.key.encode(), upload.upload_id))
            assert list(store.list_uploads("b").uploads) == made
            rolled = store.list_uploads("b", delimiter="/")
            assert ([u.key for u in rolled.uploads], rolled.prefixes) == (["a", "a", "c", keys[-1]], ("b/",))
            assert [u.key for u in store.list_uploads("b", key_marker="a").uploads] == keys[2:]
            assert [u.key for u in store.list_uploads("b", prefix="b/").uploads] == keys[2:5]
            found: list[Upload] = []
            key = upload_id = ""
            while True:
                page = store.list_uploads("b", key_marker=key, id_marker=upload_id, limit=2)
                found += page.uploads
                if not page.truncated:
                    break
                key, upload_id = page.next_key, page.next_id
            assert found == made

        self._run(check)


def _changed(store: ObjectStore, revision: int) -> tuple[int, tuple[str, ...]]:
    """The revision and the keys in the bucket "b" that changed."""
    changes = store.changes_since(revision, "b")
    assert changes is not None
    assert not changes.ranges
    return changes.revision, changes.keys
