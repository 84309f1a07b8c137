"""Snapshots of pages: one page a shard, opened when used, and made again when it is damaged."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.config import StoreSettings
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.datasets import record_files, snapshot_pages
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.datasets.build_results import _FORM
from meshd.datasets.service import DatasetService
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.util.clock import ManualClock
from meshwire.dataset.fields import Source, parse_fields
from meshwire.dataset.paged_snapshot import PagedSnapshot, PageTable, read_snapshot
from meshwire.dataset.sample_columns import BytesColumn, LabelColumn
from meshwire.formats.json_lines import LineIndex, index_lines, line_page_facts, open_line_page
from meshwire.frame.columns import ColumnError, ColumnWriter
from tests.support.archive_files import tar_of
from tests.support.line_snapshots import LinePages
from tests.support.mds_writer import mds_files
from tests.support.single_node_objects import single_node_objects
from tests.support.tf_example_writer import Int64List, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshwire.dataset.build_snapshot import Snapshot

FIELDS = parse_fields({"text": "txt", "kind": {"class": "prefix"}})
SOURCE = Source("b", "d/")


def paged(*texts: bytes, pages: LinePages | None = None) -> PagedSnapshot:
    files = [(f"d/{number % 2}/{number:03}.txt", f"{number:032x}", text) for number, text in enumerate(texts)]
    files.sort()
    found = (pages or LinePages()).build(files, "s3://b/d/", FIELDS).snapshot
    assert isinstance(found, PagedSnapshot)
    return found


@given(
    st.lists(st.lists(st.sampled_from([b"a", b"bc", b"", b"d" * 300]), min_size=1), min_size=1, max_size=6),
    st.data(),
)
def test_columns_of_pages_are_those_of_all_samples(files: list[list[bytes]], data: st.DataObject) -> None:
    snapshot = paged(*(b"\n".join([b"x", *rows]) for rows in files))
    count = snapshot.samples
    column, label, names = snapshot.fields["text"], snapshot.fields["kind"], snapshot.names
    assert isinstance(column, BytesColumn)
    assert isinstance(label, LabelColumn)
    wanted = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=30)), np.int64)
    for whole, some in (
        (column.object, column.objects_at),
        (column.offset, column.offsets_at),
        (column.length, column.lengths_at),
        (label.values, label.values_at),
    ):
        assert whole.size == count
        assert some(wanted).tolist() == whole[wanted].tolist()
        assert int(some(count - 1)) == int(whole[-1])
    assert snapshot.names_at(wanted) == type(names).from_strings(names.take_rows(wanted))
    assert snapshot.sample_name(count - 1).endswith(names[count - 1])
    assert label.counts().tolist() == np.bincount(label.values, minlength=len(label.classes)).tolist()
    assert column.total_bytes() == int(column.length.sum())
    for outside in (count, -1):
        with pytest.raises(IndexError):
            column.lengths_at([outside])


def test_a_foreign_document_is_refused() -> None:
    snapshot, pages = paged(b"a\nb", b"c"), LinePages()
    document = snapshot.to_bytes()
    for table in (
        replace(snapshot.table, samples=np.array([2**31 - 1, 1])),
        replace(snapshot.table, samples=np.array([2**62, 1])),
        replace(snapshot.table, samples=np.array([0, 1])),
        replace(snapshot.table, totals=np.array([2**40, 1])),
        replace(snapshot.table, hashes=snapshot.table.hashes[:-1]),
        PageTable.from_facts([snapshot.facts(0)]),
    ):
        lying: Any = object.__new__(PagedSnapshot)
        for name in ("source", "kind", "objects", "specs", "fields"):
            object.__setattr__(lying, name, getattr(snapshot, name))
        object.__setattr__(lying, "table", table)
        with pytest.raises(ColumnError):
            pages.read(lying.to_bytes())
    for wrong in (b"", document[:-1], document + b"\0", document.replace(b'"version":"2"', b'"version":"9"')):
        with pytest.raises(ColumnError):
            pages.read(wrong)


@pytest.mark.parametrize("change", ["hash", "samples", "total", "size"])
def test_a_lying_page_is_refused(change: str) -> None:
    document = index_lines([b"one\ntwo\n\nthree"]).to_bytes()
    facts = line_page_facts(document, 14)
    assert open_line_page(document, facts).offsets.tolist() == [0, 4, 9]
    lies = {
        "hash": replace(facts, digest=bytes(32)),
        "samples": replace(facts, samples=2**62),
        "total": replace(facts, total=10),
        "size": replace(facts, size=13),
    }
    with pytest.raises(ColumnError):
        open_line_page(document, lies[change])


@pytest.mark.parametrize(
    "columns", [{"offsets": [0, 1], "lengths": [2, 1]}, {"offsets": [3, 0], "lengths": [1, 1]}]
)
def test_a_page_whose_samples_overlap_is_refused(columns: dict[str, list[int]]) -> None:
    writer = ColumnWriter("shardmesh.lines", 2, {})
    for name, values in columns.items():
        writer.add_integers(name, np.array(values))
    document = writer.to_bytes()
    with pytest.raises(ColumnError, match="overlap"):
        open_line_page(document, line_page_facts(document, 100))


class Node:
    """A store, and the datasets of a worker."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(
            StoreSettings.at(folder / "store", durability="relaxed"), writer="w0", clock=ManualClock()
        )
        self.indexed = 0
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

    async def scan(self) -> Snapshot:
        snapshot = (await self.datasets.scan_source(SOURCE, "lines", FIELDS))[0].snapshot
        await self.catalog.add_snapshot(snapshot)
        return snapshot

    def page_of(self, snapshot: Snapshot, number: int) -> str:
        objects = snapshot.objects
        return f"lines/{objects.etags[number]}-{objects.sizes[number]}"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path)
    index: Any = vars(record_files)["index_lines"]

    def count(*arguments: Any) -> LineIndex:
        made.indexed += 1
        found: LineIndex = index(*arguments)
        return found

    monkeypatch.setattr(record_files, "index_lines", count)
    yield made
    made.store.close()


def lengths(snapshot: Snapshot) -> list[int]:
    column = snapshot.fields["text"]
    assert isinstance(column, BytesColumn)
    found: list[int] = column.lengths_at(np.arange(snapshot.samples)).tolist()
    return found


def test_a_page_is_made_once_for_all_snapshots_and_again_if_it_is_lost(node: Node) -> None:
    async def run() -> None:
        for number in range(4):
            await node.put(f"d/k/{number}.txt", b"".join(b"%d\n" % n for n in range(number, number + 2000)))
        first = await node.scan()
        await node.put("d/k/9.txt", b"new")
        second = await node.scan()
        assert (node.indexed, first.samples, second.samples) == (5, 8000, 8001)
        assert isinstance(first, PagedSnapshot)
        assert isinstance(second, PagedSnapshot)
        assert second.table.hashes.startswith(first.table.hashes)
        expected = lengths(second)
        for lost in (None, b"damaged", LineIndex.from_bytes(index_lines([b"another"]).to_bytes()).to_bytes()):
            name = node.page_of(second, 1)
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
        await node.store.delete("b", "d/k/0.txt")
        await node.put("d/k/9.txt", b"other")
        node.restart()
        found = await node.catalog.snapshot(second.hash)
        column = found.fields["text"]
        assert isinstance(column, BytesColumn)
        assert column.lengths_at([2000, 7999]).tolist() == [expected[2000], expected[7999]]
        for sample, what in ((0, "0.txt was deleted"), (8000, "9.txt was replaced")):
            with pytest.raises(BatchError, match=what) as caught:
                column.lengths_at([sample])
            assert caught.value.code == "SnapshotChanged"

    asyncio.run(run())


def test_a_page_that_turns_out_to_be_damaged_later_is_made_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_pages, "_CHECKED", 1)

    async def run() -> None:
        for number in range(3):
            await node.put(f"d/k/{number}.txt", b"line\n" * (number + 1))
        made = await node.scan()
        await node.catalog.write_document(node.page_of(made, 2), b"damaged")
        node.restart()
        found = await node.catalog.snapshot(made.hash)
        with pytest.raises(BatchError, match=r"the page of s3://b/d/k/2.txt .* is made again") as caught:
            lengths(found)
        assert caught.value.code == "Busy"
        assert lengths(await node.catalog.snapshot(made.hash)) == [4] * 6
        assert node.indexed == 4

    asyncio.run(run())


def test_a_snapshot_whose_page_is_not_the_index_of_its_object_names_it(node: Node) -> None:
    async def run() -> None:
        await node.put("d/k/0.txt", b"one\ntwo")
        snapshot = await node.scan()
        assert isinstance(snapshot, PagedSnapshot)
        digest = snapshot.table.hashes
        document = snapshot.to_bytes().replace(digest, hashlib.sha256(digest).digest())
        lying = read_snapshot(document, lambda snapshot, number: pytest.fail("unused"))
        await node.catalog.write_document(f"snapshots/{lying.hash}", document)
        with pytest.raises(BatchError, match=r"a page for s3://b/d/k/0.txt that is not the index") as caught:
            await node.catalog.snapshot(lying.hash)
        assert caught.value.code == "BadSample"

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
        assert snapshot.names is not None
        assert list(snapshot.names) == ["000000001", "000000003"]
        assert node.indexed == 0

    asyncio.run(run())


SNAPSHOTS_OF_FORM = {2: "002efe786a6e7c3d6ff7250727c5ef74d25bf8bbd10419ab75fe5537f2afe700"}
"""SHA-256 of the hashes of the snapshots below, by `_FORM`; of the present form alone."""


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

    async def run() -> list[str]:
        found = []
        for name, (files, kind, fields) in sources.items():
            for key, data in files.items():
                await node.put(f"{name}/{key}", data)
            built = await node.datasets.scan_source(Source("b", f"{name}/"), kind, parse_fields(fields))
            found.append(f"{name} {built[0].snapshot.hash} {built[0].skipped} {built[0].examples}")
        return found

    digest = hashlib.sha256("\n".join(asyncio.run(run())).encode()).hexdigest()
    assert {_FORM: digest} == SNAPSHOTS_OF_FORM, (
        "equal listings give other snapshots than before: raise _FORM in meshd/datasets/build_results.py, so "
        "that kept results are not used, and write the new form and digest here"
    )
