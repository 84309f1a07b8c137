"""The store on disks against the one in memory: the same answers, through reopening and rebuilding."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from meshd.config import StoreSettings
from meshd.store.disks.layout import Disks, find_disks
from meshd.store.errors import StoreError
from meshd.store.index.index import Index
from meshd.store.records import NULL, Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import IndexRebuilder, rebuild_index
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3.bucket_settings import Acl, Grant
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Removed
    from meshwire.s3.bucket_settings import Versioning

_KEYS = ["a", "a/", "a/b", "a/b/c", "a0", "b", "é/ü", "x" * 439, "x" * 440, "x" * 441 + "/", "x" * 900 + "/y"]
KEYS = st.sampled_from(_KEYS)
DATA = st.builds(
    lambda seed, size: bytes([seed]) * size, st.integers(0, 255), st.sampled_from([0, 1, 512, 4000, 9000])
)
CONDITIONS = st.sampled_from(
    [
        None,
        None,
        None,
        Conditions(if_none_match=("*",)),
        Conditions(if_match=("*",)),
        Conditions(if_match=("0-",)),
    ]
)


VERSIONING: st.SearchStrategy[Versioning] = st.sampled_from(["", "Enabled", "Enabled", "Suspended"])
TAGS = st.sampled_from([None, {}, {"a": "1"}, {"ä": "x" * 250}])
ACLS = st.sampled_from([None, Acl("public-read"), Acl("", (Grant("me", "READ"),))])


def _facts(record: Record | None) -> Any:
    if record is None:
        return None
    parts = [(part.size, part.etag) for part in record.parts]
    told = (record.size, record.etag, record.headers, record.tags, record.acl, parts)
    return bool(record.version), record.marker, *told


def _removed(removed: Removed) -> Any:
    return _facts(removed.record), _facts(removed.marker)


def _versions(store: ObjectStore, key: str) -> list[Record]:
    """All versions of a key, the newest first."""
    return [record for name, record in store.list_versions("b", prefix=key).entries if name == key]


def _version(store: ObjectStore, key: str, number: int) -> str:
    """The id of one of the key's versions, or one that no version has."""
    ids = [record.version or NULL for record in _versions(store, key)]
    return [*ids, "0" * 16][number % (len(ids) + 1)]


class Twins(RuleBasedStateMachine):
    uploads = Bundle("uploads")

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp(prefix="twins-"))
        self.settings = StoreSettings.at(
            self.place,
            disks=(self.place / "one", self.place / "two"),
            durability="relaxed",
            small_object_bytes=2000,
            segment_bytes=10_000,
            index_map_bytes=1 << 28,
        )
        self.clock = ManualClock()
        self.loop = asyncio.new_event_loop()
        self.memory = MemoryStore(self.clock)
        self.disk = self.open()

    def open(self) -> Store:
        return Store.open(self.settings, writer="w0", clock=self.clock)

    def teardown(self) -> None:
        self.disk.close()
        self.memory.close()
        self.loop.close()
        report = check_store(self.settings)
        shutil.rmtree(self.place)
        assert report.clean, report.problems

    def both(self, doing: Callable[[ObjectStore, int], Awaitable[Any]]) -> tuple[Any, Any]:
        """Runs a step on both; they return or fail alike. `doing` gets the store and which it is (0, 1)."""
        results: list[Any] = []
        stores: tuple[ObjectStore, ...] = (self.disk, self.memory)
        for number, store in enumerate(stores):
            try:
                results.append(self.loop.run_until_complete(_awaited(doing(store, number))))
            except StoreError as error:
                results.append(error)
        left, right = results
        if isinstance(left, StoreError) or isinstance(right, StoreError):
            assert type(left) is type(right), results
        return left, right

    @rule(key=KEYS, data=DATA, conditions=CONDITIONS, versioning=VERSIONING, tags=TAGS)
    def put(
        self,
        key: str,
        data: bytes,
        conditions: Conditions | None,
        versioning: Versioning,
        tags: dict[str, str] | None,
    ) -> None:
        async def doing(store: ObjectStore, _: int) -> Record:
            writer = store.writer("b", key, size=None)
            await writer.write(data)
            meta = Meta(f"{len(data)}-", {"k": key[:4]}, tags=tags or {})
            return await writer.commit(meta, conditions=conditions, versioning=versioning)

        left, right = self.both(doing)
        if not isinstance(left, StoreError):
            assert _facts(left) == _facts(right)

    @rule(key=KEYS, conditions=CONDITIONS, versioning=VERSIONING)
    def delete(self, key: str, conditions: Conditions | None, versioning: Versioning) -> None:
        left, right = self.both(
            lambda store, _: store.delete("b", key, conditions=conditions, versioning=versioning)
        )
        assert isinstance(left, StoreError) or _removed(left) == _removed(right)

    @rule(keys=st.lists(KEYS, max_size=3), versioning=VERSIONING)
    def delete_many(self, keys: list[str], versioning: Versioning) -> None:
        left, right = self.both(lambda store, _: store.delete_many("b", keys, versioning=versioning))
        assert {key: _removed(one) for key, one in left.items()} == {
            key: _removed(one) for key, one in right.items()
        }

    @rule(key=KEYS, number=st.integers(0, 5), conditions=CONDITIONS)
    def delete_version(self, key: str, number: int, conditions: Conditions | None) -> None:
        left, right = self.both(
            lambda store, _: store.delete_version(
                "b", key, _version(store, key, number), conditions=conditions
            )
        )
        assert isinstance(left, StoreError) or _removed(left) == _removed(right)

    @rule(key=KEYS, number=st.integers(-1, 5), tags=TAGS, acl=ACLS)
    def amend(self, key: str, number: int, tags: dict[str, str] | None, acl: Acl | None) -> None:
        async def doing(store: ObjectStore, _: int) -> Record:
            version = None if number < 0 else _version(store, key, number)
            return await store.amend("b", key, version, tags=tags, acl=acl)

        left, right = self.both(doing)
        assert isinstance(left, StoreError) or _facts(left) == _facts(right)

    @rule(source=KEYS, number=st.integers(0, 3), key=KEYS, conditions=CONDITIONS, versioning=VERSIONING)
    def link(
        self, source: str, number: int, key: str, conditions: Conditions | None, versioning: Versioning
    ) -> None:
        async def doing(store: ObjectStore, _: int) -> Record | None:
            found = store.get_version("b", source, _version(store, source, number))
            if found is None or found.marker:
                return None
            return await store.link("b", key, found, Meta("linked"), conditions, versioning=versioning)

        self.both(doing)

    @rule(target=uploads, key=KEYS)
    def create_upload(self, key: str) -> tuple[Any, Any]:
        return self.both(lambda store, _: store.create_upload(Upload("", "b", key, owner="me")))

    @rule(upload=uploads, number=st.integers(1, 4), data=DATA)
    def put_part(self, upload: tuple[Upload, Upload], number: int, data: bytes) -> None:
        async def doing(store: ObjectStore, which: int) -> Record:
            writer = store.part_writer(upload[which], number, len(data))
            await writer.write(data)
            return await writer.commit(Meta(f"part-{len(data)}"))

        self.both(doing)

    @rule(
        upload=uploads,
        numbers=st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
        conditions=CONDITIONS,
        versioning=VERSIONING,
    )
    def complete(
        self,
        upload: tuple[Upload, Upload],
        numbers: list[int],
        conditions: Conditions | None,
        versioning: Versioning,
    ) -> None:
        self.both(
            lambda store, i: store.complete_upload(
                upload[i], sorted(numbers), Meta("done"), conditions, versioning=versioning
            )
        )

    @rule(upload=uploads)
    def abort(self, upload: tuple[Upload, Upload]) -> None:
        self.both(lambda store, which: store.abort_upload(upload[which]))

    @rule(
        prefix=st.sampled_from(["", "a", "a/", "x" * 440, "é"]),
        delimiter=st.sampled_from(["", "/", "b/"]),
        after=st.sampled_from(["", *_KEYS]),
        limit=st.sampled_from([0, 1, 2, 1000]),
    )
    def list(self, prefix: str, delimiter: str, after: str, limit: int) -> None:
        stores: tuple[ObjectStore, ...] = (self.disk, self.memory)
        pages = [
            store.list("b", prefix=prefix, delimiter=delimiter, after=after, limit=limit) for store in stores
        ]
        left, right = ([(key, _facts(record)) for key, record in page.entries] for page in pages)
        assert left == right
        assert pages[0].prefixes == pages[1].prefixes
        assert (pages[0].truncated, pages[0].next_after) == (pages[1].truncated, pages[1].next_after)
        for store, page in zip(stores, pages, strict=True):
            shown = store.list_entries("b", prefix=prefix, delimiter=delimiter, after=after, limit=limit)
            assert [entry[:4] for entry in shown.entries] == [
                (key, record.size, record.etag, record.modified) for key, record in page.entries
            ]
            assert shown.owners == tuple(record.owner for _, record in page.entries)
            assert (shown.prefixes, shown.truncated, shown.next_after) == (
                page.prefixes,
                page.truncated,
                page.next_after,
            )
        uploads = [
            store.list_uploads("b", prefix=prefix, delimiter=delimiter, key_marker=after, limit=limit)
            for store in (self.disk, self.memory)
        ]
        assert [u.key for u in uploads[0].uploads] == [u.key for u in uploads[1].uploads]
        assert uploads[0].prefixes == uploads[1].prefixes
        assert uploads[0].truncated == uploads[1].truncated

    @rule(
        prefix=st.sampled_from(["", "a", "a/", "x" * 440, "é"]),
        delimiter=st.sampled_from(["", "/", "b/"]),
        marker=st.sampled_from(["", *_KEYS]),
        number=st.integers(-1, 3),
        limit=st.sampled_from([0, 1, 2, 5, 1000]),
    )
    def list_versions(self, prefix: str, delimiter: str, marker: str, number: int, limit: int) -> None:
        left, right = (
            store.list_versions(
                "b",
                prefix=prefix,
                delimiter=delimiter,
                key_marker=marker,
                version_marker="" if number < 0 or not marker else _version(store, marker, number),
                limit=limit,
            )
            for store in (self.disk, self.memory)
        )
        assert [(key, _facts(one)) for key, one in left.entries] == [
            (key, _facts(one)) for key, one in right.entries
        ]
        assert (left.latest, left.prefixes, left.truncated) == (right.latest, right.prefixes, right.truncated)
        assert left.next_key == right.next_key
        assert (len(left.next_version), left.next_version == NULL) == (
            len(right.next_version),
            right.next_version == NULL,
        )

    @rule()
    def reopen(self) -> None:
        self.disk.close()
        Store.recover(self.settings)
        self.disk = self.open()

    @rule(target=uploads)
    def rebuild(self) -> Any:
        self.disk.close()
        backwards = _rebuilt_backwards(self.settings)
        report = rebuild_index(self.settings)
        assert report.problems == []
        with closing(Index.open(self.settings)) as index:
            assert _everything(index) == backwards
        Store.recover(self.settings)
        self.disk = self.open()
        return multiple()

    @rule(share=st.sampled_from([0.0, 0.0, 0.3]))
    def compact(self, share: float) -> None:
        """Seals what is open by filling it, then moves everything that lives."""

        async def doing() -> None:
            filler = self.disk.writer("filler", "x", size=None)
            await filler.write(bytes(1900))
            await filler.commit(Meta("x"))
            for file in self.disk.compactor.candidates(share):
                assert await self.disk.compactor.compact(file)
            self.clock.advance(100)
            await self.disk.compactor.purge()

        self.loop.run_until_complete(doing())

    @rule(seconds=st.sampled_from([1, 60, -30]))
    def time_passes_or_steps_back(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @invariant()
    def same_objects(self) -> None:
        for key in _KEYS:
            left, right = self.disk.get("b", key), self.memory.get("b", key)
            assert _facts(left) == _facts(right)
            if left is not None and right is not None:
                assert self.disk.read_range(left, 0, 99_999) == self.memory.read_range(right, 0, 99_999)
                assert self.disk.read_range(left, 700, 5000) == self.memory.read_range(right, 700, 5000)
            self.same_versions(key)
        assert self.disk.is_empty("b") == self.memory.is_empty("b")
        assert self.disk.stats().versions == self.memory.stats().versions

    def same_versions(self, key: str) -> None:
        pairs = zip(_versions(self.disk, key), _versions(self.memory, key), strict=True)
        for left, right in pairs:
            assert _facts(left) == _facts(right)
            assert self.disk.read_range(left, 0, 99_999) == self.memory.read_range(right, 0, 99_999)


def _everything(index: Index) -> Any:
    with index.read_transaction() as txn:
        tables = [
            index.all_records(txn),
            index.uploads.all_uploads(txn),
            index.uploads.all_parts(txn),
            index.files.all_files(txn),
        ]
        return [list(table) for table in tables]


def _rebuilt_backwards(settings: StoreSettings) -> Any:
    """What the index would be if the files were read in the opposite order."""
    with closing(Index(settings.data_dir / "backwards", map_bytes=1 << 26, sync=False)) as index:
        rebuilder = IndexRebuilder(index)
        store, roots = find_disks(settings)
        for file in reversed(list(Disks(roots).files())):
            rebuilder.scan_file(*file)
        rebuilder.finish(store, roots)
        found = _everything(index)
    shutil.rmtree(settings.data_dir / "backwards")
    return found


async def _awaited(doing: Awaitable[Any]) -> Any:
    return await doing


TestTwins = Twins.TestCase
TestTwins.settings = settings(
    max_examples=20, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
