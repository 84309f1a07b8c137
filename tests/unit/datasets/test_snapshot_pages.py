"""Pages of a node: one page a shard, opened when used, and made again when it is damaged."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from meshd.config import StoreSettings
from meshd.core import document_store
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.datasets import mds, open_pages, record_files, shard_pages, snapshot_pages, token_files
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.datasets.service import DatasetService
from meshd.datasets.snapshot_build_cache import _FORM
from meshd.store.errors import DiskFullError
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.util import failpoints
from meshd.util.page_cache import map_file
from meshwire.dataset import page_document
from meshwire.dataset import snapshot as snapshots
from meshwire.dataset.fields import Source, parse_fields
from meshwire.dataset.paged_snapshot import PagedSnapshot, read_snapshot
from meshwire.dataset.sample_columns import BytesColumn
from meshwire.formats.json_lines import earlier_line_index, index_lines
from meshwire.formats.token_index import encode_token_index
from meshwire.frame.columns import ColumnWriter
from tests.support.archive_files import tar_of
from tests.support.manual_clock import ManualClock
from tests.support.mds_writer import mds_files
from tests.support.page_samples import PAGES, records_of
from tests.support.single_node_objects import single_node_objects
from tests.support.tf_example_writer import Int64List, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from meshwire.dataset.snapshot import Snapshot

FIELDS = parse_fields({"text": "txt", "kind": {"class": "prefix"}})
RECORD_PARTS = {"tfrecord": {"feature": "x"}, "mds": {"column": "x"}, "tokens": {"column": "tokens"}}
SOURCE = Source("b", "d/")


class Node:
    """A store, and the datasets of a worker."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(
            StoreSettings.at(folder / "store", durability="relaxed"), writer="w0", clock=ManualClock()
        )
        self.indexed, self.entries = 0, list[Any]()
        self.restart()

    def restart(self) -> None:
        """Forget everything in memory."""
        objects = single_node_objects(self.store)
        archives = ArchiveService(LocalArchives(self.store, list[str]().append), objects)
        self.catalog, nobody = DocumentStore(self.store), cast("Any", None)
        self.datasets = DatasetService(self.store, self.catalog, nobody, archives, objects, nobody)

    async def put(self, key: str, data: bytes) -> None:
        writer = self.store.writer("b", key, size=len(data))
        await writer.write(data)
        await writer.commit(Meta(hashlib.md5(data).hexdigest()))

    async def put_shard(self, kind: str, name: str, rows: Sequence[bytes]) -> None:
        """Store a shard with these samples."""
        if kind == "lines":
            await self.put(f"d/k/{name}.txt", b"\n".join(rows))
        elif kind == "tfrecord":
            await self.put(f"d/k/{name}.tfrecord", records_of(rows))
        elif kind == "tokens":
            await self.put(f"d/k/{name}.bin", b"".join(rows))
            lengths = np.array([len(row) for row in rows])
            await self.put(f"d/k/{name}.idx", encode_token_index(lengths, "uint8"))
        elif kind == "mds":
            files = mds_files({"x": "bytes"}, [{"x": row} for row in rows], shard=len(rows))
            [entry] = json.loads(files["index.json"])["shards"]
            entry["raw_data"]["basename"] = f"k/{name}.mds"
            self.entries.append(entry)
            await self.put(f"d/k/{name}.mds", files["shard.00000.mds"])
            await self.put("d/index.json", json.dumps({"version": 2, "shards": self.entries}).encode())
        else:
            await self.put(f"d/k/{name}.tar", tar_of({f"{at:06}.txt": row for at, row in enumerate(rows)}))

    async def scan(self, kind: Any = "lines") -> PagedSnapshot:
        part = RECORD_PARTS.get(kind)
        fields = FIELDS if part is None else parse_fields({"text": part, "kind": {"class": "prefix"}})
        snapshot = (await self.datasets.scan_source(SOURCE, kind, fields))[0].snapshot
        assert isinstance(snapshot, PagedSnapshot)
        await self.catalog.add_snapshot(snapshot)
        return snapshot

    def page_of(self, snapshot: PagedSnapshot, number: int) -> str:
        return self.datasets.pages._page_name(snapshot, number)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path)

    def count(module: ModuleType, name: str) -> None:
        index: Any = vars(module)[name]

        def counting(*arguments: Any) -> Any:
            made.indexed += 1
            return index(*arguments)

        monkeypatch.setattr(module, name, counting)

    count(record_files, "index_lines")
    count(shard_pages, "write_member_page")
    for module in (shard_pages, mds, token_files):
        count(module, "write_record_page")
    yield made
    made.store.close()


KINDS = pytest.mark.parametrize("kind", [*PAGES, "mds", "tokens"])


def put_zeros(path: str, offset: int, length: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes(length))


def lengths(snapshot: Snapshot) -> list[int]:
    column = snapshot.fields["text"]
    assert isinstance(column, BytesColumn)
    found: list[int] = column.lengths_at(np.arange(snapshot.samples)).tolist()
    return found


@KINDS
def test_a_page_is_made_once_for_all_snapshots_and_again_if_it_is_lost(node: Node, kind: str) -> None:
    async def run() -> None:
        for number in range(4):
            await node.put_shard(kind, str(number), [b"%d" % n for n in range(number, number + 2000)])
        first = await node.scan(kind)
        await node.put_shard(kind, "9", [b"new"])
        second = await node.scan(kind)
        assert (node.indexed, first.samples, second.samples) == (5, 8000, 8001)
        assert second.table.hashes.startswith(first.table.hashes)
        expected = lengths(second)
        name = node.page_of(second, 1)
        own = node.catalog.read_document(name) or b""
        later = re.sub(rb'"version":"\d"', b'"version":"9"', own)  # of a release that is no longer here
        assert later != own
        for lost in (None, b"damaged", later, *(document for document, _, _ in PAGES.values())):
            if lost is None:
                await node.store.delete(RESERVED_BUCKET, name)
            else:
                await node.catalog.write_document(name, lost)
            node.restart()
            before = node.indexed
            assert lengths(await node.catalog.snapshot(second.hash)) == expected
            assert node.indexed == before + 1
        for number in (0, 4):  # what became of an object matters only to those that use its samples
            await node.store.delete(RESERVED_BUCKET, node.page_of(second, number))
        await node.store.delete("b", second.objects.keys[0])
        await node.put(second.objects.keys[4], b"other")
        node.restart()
        found = await node.catalog.snapshot(second.hash)
        column = found.fields["text"]
        assert isinstance(column, BytesColumn)
        assert column.lengths_at([2000, 7999]).tolist() == [expected[2000], expected[7999]]
        for sample, what in ((0, r"0\.\w+ was deleted"), (8000, r"9\.\w+ was replaced")):
            with pytest.raises(BatchError, match=what) as caught:
                column.lengths_at([sample])
            assert caught.value.code == "SnapshotChanged"

    asyncio.run(run())


@KINDS
def test_a_page_is_checked_when_it_is_written_and_its_bytes_when_it_is_opened(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    checks = list[bytes]()
    check: Any = page_document._checked_page

    def counted(document: bytes, *rest: Any) -> Any:
        checks.append(document)
        return check(document, *rest)

    monkeypatch.setattr(page_document, "_checked_page", counted)

    async def run() -> None:
        for number in range(3):
            await node.put_shard(kind, str(number), [b"line"] * (number + 1))
        made = await node.scan(kind)
        assert len(checks) == 3
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert len(checks) == 3
        held = node.store.get(RESERVED_BUCKET, node.page_of(made, 1))
        assert held is not None
        [place] = node.store.locate(held)
        file = os.open(place.path, os.O_RDWR)  # as if the disk had changed a bit of it
        [last] = os.pread(file, 1, place.offset + place.length - 1)
        os.pwrite(file, bytes([last ^ 1]), place.offset + place.length - 1)
        os.close(file)
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert node.indexed == len(checks) == 4  # it was made again

    asyncio.run(run())


@KINDS
def test_a_full_disk_leaves_no_page_that_is_not_whole(node: Node, kind: str) -> None:
    async def run() -> None:
        for number in range(3):
            await node.put_shard(kind, str(number), [b"line"] * (number + 1))
        failpoints.configure("store.data.before_write=error(28)")
        try:
            with pytest.raises(DiskFullError):
                await node.scan(kind)
        finally:
            failpoints.configure("")
        node.restart()
        made = await node.scan(kind)
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6  # of pages with the right hashes

    asyncio.run(run())


@KINDS
def test_a_page_that_turns_out_to_be_damaged_later_is_made_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(snapshot_pages, "_CHECKED", 1)

    async def run() -> None:
        for number in range(3):
            await node.put_shard(kind, str(number), [b"line"] * (number + 1))
        made = await node.scan(kind)
        await node.catalog.write_document(node.page_of(made, 2), b"damaged")
        node.restart()
        found = await node.catalog.snapshot(made.hash)
        with pytest.raises(BatchError, match=r"the page of s3://b/d/k/2\.\w+ .* is made again") as caught:
            lengths(found)
        assert caught.value.code == "Busy"
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert node.indexed == 4

    asyncio.run(run())


@KINDS
def test_an_open_page_whose_bytes_became_zeros_is_made_again(node: Node, kind: str) -> None:
    """Its file was cut off and has grown again: what was cut off reads as zeros."""

    async def run() -> None:
        for number in range(3):
            await node.put_shard(kind, str(number), [b"line"] * (number + 1))
        made = await node.scan(kind)
        found = await node.catalog.snapshot(made.hash)
        column = found.fields["text"]
        assert isinstance(column, BytesColumn)
        assert column.lengths_at([5]).tolist() == [4]
        held = node.store.get(RESERVED_BUCKET, node.page_of(made, 2))
        assert held is not None
        [place] = node.store.locate(held)
        put_zeros(place.path, place.offset + place.length // 2, place.length - place.length // 2)
        with pytest.raises(BatchError, match=r"the page of s3://b/d/k/2\.\w+ .* is made again") as caught:
            column.lengths_at([3])
        assert caught.value.code == "Busy"
        assert column.lengths_at([0, 1, 2]).tolist() == [4, 4, 4]
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert node.indexed == 4

    asyncio.run(run())


def test_a_damaged_snapshot_is_named_with_what_to_do(node: Node) -> None:
    async def run() -> None:
        await node.put_shard("lines", "0", [b"one", b"two"])
        made = await node.scan("lines")
        held = node.store.get(RESERVED_BUCKET, f"snapshots/{made.hash}")
        assert held is not None
        [place] = node.store.locate(held)
        put_zeros(place.path, place.offset, place.length)
        node.restart()
        with pytest.raises(BatchError, match=f"the snapshot {made.hash} is damaged on this node") as caught:
            await node.catalog.snapshot(made.hash)
        assert (caught.value.code, caught.value.retry_after) == ("NoSuchSnapshot", None)
        assert "mesh.open as before" in caught.value.help

    asyncio.run(run())


@KINDS
def test_a_page_of_a_later_release_is_made_again(node: Node, kind: str) -> None:
    async def run() -> None:
        for number in range(3):
            await node.put_shard(kind, str(number), [b"line"] * (number + 1))
        made = await node.scan(kind)
        name = node.page_of(made, 1)
        document = node.catalog.read_document(name)
        later = re.sub(rb'"version":"\d+"', b'"version":"9"', document or b"")
        assert later != document
        await node.catalog.write_document(name, later)
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert node.indexed == 4
        assert node.catalog.read_document(name) == document

    asyncio.run(run())


@KINDS
def test_a_snapshot_whose_page_is_not_the_index_of_its_object_names_it(node: Node, kind: str) -> None:
    async def run() -> None:
        await node.put_shard(kind, "0", [b"one", b"two"])
        snapshot = await node.scan(kind)
        digest = snapshot.table.hashes
        document = snapshot.to_bytes().replace(digest, hashlib.sha256(digest).digest())
        lying = read_snapshot(document, lambda snapshot, number: pytest.fail("unused"))
        await node.catalog.write_document(f"snapshots/{lying.hash}", document)
        with pytest.raises(BatchError, match=r"a page for s3://b/d/k/0\.\w+ that is not the index") as caught:
            await node.catalog.snapshot(lying.hash)
        assert caught.value.code == "BadSample"

    asyncio.run(run())


@pytest.mark.parametrize(("kind", "beside"), [("mds", "d/index.json"), ("tokens", "d/k/1.idx")])
def test_a_page_that_is_lost_with_what_described_its_shard(node: Node, kind: str, beside: str) -> None:
    async def run() -> None:
        for number in range(2):
            await node.put_shard(kind, str(number), [b"line"] * (number + 2))
        made = await node.scan(kind)
        await node.put_shard(kind, "2", [b"more"])  # which changes the index of MDS, but not this entry
        await node.store.delete(RESERVED_BUCKET, node.page_of(made, 0))
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 5
        held = node.store.get("b", beside)
        assert held is not None
        index = node.store.read_range(held, 0, held.size)
        await node.put(beside, b"{}")
        await node.store.delete(RESERVED_BUCKET, node.page_of(made, 1))
        node.restart()
        column: Any = (await node.catalog.snapshot(made.hash)).fields["text"]
        assert column.lengths_at([0, 1]).tolist() == [4, 4]
        with pytest.raises(BatchError, match=r"s3://b/d/k/1\.\w+ .*has no page here any more") as caught:
            column.lengths_at([2])
        assert caught.value.code == "SnapshotChanged"
        await node.put(beside, index)
        node.restart()
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 5

    asyncio.run(run())


def test_a_snapshot_of_a_later_release_is_refused_by_name(node: Node) -> None:
    async def run() -> None:
        await node.put("d/k/0.txt", b"one")
        document = (await node.scan()).to_bytes().replace(b'"version":"2"', b'"version":"3"')
        digest = hashlib.sha256(document).hexdigest()
        await node.catalog.write_document(f"snapshots/{digest}", document)
        with pytest.raises(BatchError, match=rf"cannot read the snapshot {digest}: .* another release"):
            await node.catalog.snapshot(digest)

    asyncio.run(run())


def test_open_pages_are_bounded_by_their_columns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_pages, "_MAX_COLUMNS", 8)  # two for each page of lines

    async def run() -> None:
        for number in range(9):
            await node.put_shard("lines", str(number), [b"line"] * (number + 1))
        made = await node.scan("lines")
        node.restart()
        found = await node.catalog.snapshot(made.hash)
        pages = node.datasets.pages
        for _ in range(2):
            assert lengths(found) == [4] * 45
            assert len(pages._open_pages) == 4
            assert pages._open_pages._columns == 8

    asyncio.run(run())


def test_large_documents_are_mapped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (document_store, "MAPPED_BYTES"),
        (snapshot_pages, "MAPPED_BYTES"),
        (snapshots, "_VIEWED"),
    ):
        monkeypatch.setattr(module, name, 0)

    async def run() -> None:
        for number in range(200):
            await node.put(f"d/{number % 2}/{number:03}.txt", b"x" * number)
        made = (await node.datasets.scan_source(SOURCE, "objects", FIELDS))[0].snapshot
        await node.catalog.add_snapshot(made)
        for damaged in (False, True):  # then the document is read
            wrong = (b"d/1/001.txt", b"d/1/002.txt") if damaged else (b"", b"")
            mapping = Mock(side_effect=lambda *place: bytes(map_file(*place)).replace(*wrong))  # noqa: B023
            monkeypatch.setattr(snapshot_pages, "map_file", mapping)
            node.restart()
            found = await node.catalog.snapshot(made.hash)
            assert lengths(found) == lengths(made)
            assert list(found.objects.keys) == list(made.objects.keys)
            assert mapping.call_count == (2 if damaged else 1)  # what was fetched would be mapped, too

    asyncio.run(run())


def test_an_index_of_an_earlier_release_becomes_a_page(node: Node) -> None:
    async def run() -> None:
        await node.put("d/k/0.txt", b"one\n\ntwo")
        index = index_lines([b"one\n\ntwo"])
        assert index.numbers is not None
        writer = ColumnWriter("shardmesh.lines", 1, {"size": "8"})
        writer.add_integers("gaps", np.diff(index.offsets, prepend=0))
        writer.add_integers("lengths", index.lengths)
        writer.add_integers("steps", np.diff(index.numbers, prepend=0))
        name = f"lines/{hashlib.md5(b'one' + bytes([10, 10]) + b'two').hexdigest()}-8"
        await node.catalog.write_document(name, writer.to_bytes())
        snapshot = await node.scan()
        assert list(snapshot.names) == ["000000001", "000000003"]
        assert node.indexed == 0
        page = node.catalog.read_document(name)
        assert page == replace(index, size=8).to_bytes()
        assert earlier_line_index(page) == writer.to_bytes()  # what nodes send to each other

    asyncio.run(run())


SNAPSHOTS_OF_FORM = {
    1: "58ffec55281d6eab87cfc75377eae0ddaff91eff3d8d2ad41194eec424c014fc",
    6: "0bec030fed227a7209686e44848b1080801db34dc4a1d2910de162fae8d07506",
}
"""SHA-256 of the hashes of the snapshots below, by `_FORM`: of the present form and of that without pages."""


def test_equal_listings_give_equal_snapshots_as_long_as_the_form_is_the_same(node: Node) -> None:
    keys = [f"{kind}/{number}.{ext}" for kind in "pq" for number in (1, 2) for ext in ("jpg", "png", "txt")]
    pictures = {key: key.encode() for key in keys}
    numbers = [{"x": bytes([n, 0]), "y": b"%d" % n} for n in range(5)]
    sources: dict[str, tuple[dict[str, bytes], Any, dict[str, Any]]] = {
        "objects": (pictures, "objects", {"image": {"ext": ["jpg", "png"]}, "label": {"class": "prefix"}}),
        "labels": ({"p/1.tar": tar_of(pictures)}, "auto", {"image": "png", "label": {"class": "prefix"}}),
        "tar": ({f"{n}.tar": tar_of(pictures) for n in (1, 2)}, "tar", {"image": "jpg", "text": "txt"}),
        "lines": (
            {"p/1.txt": b"one\n\ntwo\r\n", "q/2.txt": b"x" * 70_000, "q/3.txt": b"", "4.txt": b"no class"},
            "lines",
            {"text": "txt", "label": {"class": "prefix"}},
        ),
        "packed": (
            {"1.txt.gz": gzip.compress(b"one\ntwo\n" * 50, compresslevel=0, mtime=0)},
            "lines",
            {"text": "txt"},
        ),
        "tfrecord": (
            {"1.tfrecord": b"".join(record(example({"x": Int64List([n])})) for n in range(3))},
            "tfrecord",
            {"x": {"feature": "x"}},
        ),
        "mds": (mds_files({"x": "uint16", "y": "str"}, numbers, shard=2), "mds", {"y": {"column": "y"}}),
    }

    async def run() -> dict[int, list[str]]:
        found: dict[int, list[str]] = {1: [], _FORM: []}
        for name, (files, kind, fields) in sources.items():
            for key, data in files.items():
                await node.put(f"{name}/{key}", data)
            built, _ = await node.datasets.scan_source(Source("b", f"{name}/"), kind, parse_fields(fields))
            made = built.snapshot
            earlier = made.without_pages() if isinstance(made, PagedSnapshot) else made
            for form, snapshot in ((1, earlier), (_FORM, made)):
                found[form].append(f"{name} {snapshot.hash} {built.skipped} {built.examples}")
        return found

    digests = {
        form: hashlib.sha256("\n".join(found).encode()).hexdigest()
        for form, found in asyncio.run(run()).items()
    }
    assert digests == SNAPSHOTS_OF_FORM, (
        "equal listings give other snapshots than before: raise _FORM in "
        "meshd/datasets/snapshot_build_cache.py, so that kept results are not used, and write the new form "
        "and digest here"
    )
