"""Zarr views without a daemon: metadata and shards as zarr-python reads them, parts of snapshots, scans."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from meshd.store.records import Meta
from meshd.views.source_scan_cache import SourceScanCache
from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.build_snapshot import BytesColumn, build_from_objects
from meshwire.dataset.derive_snapshot import content_digest, referenced_objects, slice_field
from meshwire.dataset.fields import parse_fields
from meshwire.formats.tar import TarMember
from meshwire.strict_json import PlanError
from meshwire.views.view_kinds import parse_view
from meshwire.views.zarr_view import ZarrArray, ZarrView, is_zarr_dtype, metadata_objects
from tests.support.manual_clock import ManualClock
from tests.support.paged_snapshots import build_from_tars
from tests.support.reference_store import MemoryStore as ObjectsInMemory

if TYPE_CHECKING:
    from meshwire.dataset.build_snapshot import Snapshot


def stored(array: ZarrArray, data: np.ndarray[Any, Any]) -> dict[str, bytes]:
    """The array's objects, written as the view sends them."""
    found = {}
    for key, (number,) in array.keys.iter_keys():
        parts = []
        for chunk in array.held(number):
            rows = array.rows(chunk)
            parts.append(data[rows.start : rows.stop].tobytes().ljust(array.chunk_bytes, b"\0"))
        found[key] = b"".join(parts) + array.index(number)
        assert len(found[key]) == array.object_bytes(number)
    return found


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32"])
@pytest.mark.parametrize(
    ("samples", "chunk", "shard"), [(1, 1, 0), (10, 5, 0), (11, 5, 0), (3, 7, 2), (29, 3, 4), (24, 3, 4)]
)
@pytest.mark.parametrize("row", [(), (2, 3)])
def test_zarr_reads_what_is_laid_out(
    dtype: str, samples: int, chunk: int, shard: int, row: tuple[int, ...]
) -> None:
    data = np.random.default_rng(samples).integers(0, 2, (samples, *row)).astype(dtype)
    names = tuple(f"d{axis}" for axis in range(len(row)))
    array = ZarrArray("x", dtype, row, samples, chunk, shard, names, {"classes": ["a"]})
    files = {**stored(array, data), **metadata_objects([array], {"source": "s3://b/"})}
    assert is_zarr_dtype(dtype)

    async def fill() -> MemoryStore:
        from zarr.core.buffer import default_buffer_prototype

        store = MemoryStore()
        for key, body in files.items():
            await store.set(key, default_buffer_prototype().buffer.from_bytes(body))
        return store

    group = zarr.open_group(asyncio.run(fill()), mode="r", zarr_format=3)
    found: Any = group["x"]
    np.testing.assert_array_equal(found[:], data)
    assert (found.chunks, found.shards) == ((chunk, *row), (chunk * shard, *row) if shard else None)
    assert found.attrs.asdict() == {"classes": ["a"]}
    assert found.metadata.dimension_names == ("sample", *names)
    assert group.attrs.asdict() == {"source": "s3://b/"}


FIELDS = parse_fields({"image": ["jpg"], "text": ["txt"]})


def of_objects() -> Snapshot:
    listing = [(f"t/{n:02}.{ext}", f"{ext}{n}", 5 + n) for n in range(12) for ext in ("jpg", "txt")]
    return build_from_objects(listing, source="s3://b/t", fields=FIELDS).snapshot


def of_tars() -> Snapshot:
    shards = []
    for shard in range(3):
        names = [f"{n}.{ext}" for n in range(4) for ext in ("jpg", "txt")]
        members = [TarMember(name, 7, 512 + 1024 * at, 0, 0, "0") for at, name in enumerate(names)]
        shards.append((f"t/{shard}.tar", f"e{shard}", 10**5, index_tar(members)))
    return build_from_tars(shards, source="s3://b/t", fields=FIELDS).snapshot


@pytest.mark.parametrize("snapshot", [of_objects(), of_tars()], ids=["objects", "tars"])
@given(first=st.integers(0, 11), count=st.integers(1, 12))
def test_a_part_is_those_samples_with_one_field(snapshot: Snapshot, first: int, count: int) -> None:
    samples = range(first, min(first + count, snapshot.samples))
    part = slice_field(snapshot, "text", samples)
    assert type(part).from_bytes(part.to_bytes()).hash == part.hash
    assert (part.samples, list(part.fields)) == (len(samples), ["text"])
    whole, piece = snapshot.fields["text"], part.fields["text"]
    assert isinstance(whole, BytesColumn)
    assert isinstance(piece, BytesColumn)
    for at, sample in enumerate(samples):
        assert part.sample_name(at) == snapshot.sample_name(sample)
        there, here = int(whole.object[sample]), int(piece.object[at])
        assert part.objects.etags[here] == snapshot.objects.etags[there]
        assert (piece.offset[at], piece.length[at]) == (whole.offset[sample], whole.length[sample])
    numbers = referenced_objects(snapshot, ["text"], samples)
    assert [snapshot.objects.keys[number] for number in numbers] == list(part.objects.keys)
    assert content_digest(part, "text", range(len(samples))) == content_digest(snapshot, "text", samples)


def test_a_digest_is_of_content_and_not_of_names() -> None:
    def digest(key: str, etag: str) -> bytes:
        found = build_from_objects([(key, etag, 5)], source="s3://b/t", fields=parse_fields({"x": "jpg"}))
        return content_digest(found.snapshot, "x", range(1))

    assert digest("t/a.jpg", "e") == digest("t/b.jpg", "e")
    assert digest("t/a.jpg", "e") != digest("t/a.jpg", "f")


def test_documents() -> None:
    given = {"kind": "zarr", "prefix": "t/", "fields": {"x": "npy"}, "chunk": 7}
    view = parse_view(given, "b")
    assert isinstance(view, ZarrView)
    assert parse_view(view.to_json(), "b") == view
    assert json.loads(view.to_json())["fields"] == {"x": {"ext": ["npy"]}}
    with pytest.raises(PlanError, match="fields"):
        parse_view({"kind": "zarr"}, "b")
    assert parse_view({"kind": "zarr", "snapshot": "0" * 64}, "b").source == "b"


def test_scans_are_repeated_when_it_is_time_and_something_changed() -> None:
    clock = ManualClock()
    store, made = ObjectsInMemory(clock), []

    async def scan(view: str) -> int:
        made.append(view)
        clock.advance(0.1)
        return len(made)

    async def write(key: str) -> None:
        writer = store.writer("b", key, size=0)
        await writer.commit(Meta("e"))

    async def run() -> None:
        scans: SourceScanCache[str, int] = SourceScanCache(lambda _: store.revision(), clock, scan)
        assert await scans.get_scan("v") == 1
        clock.advance(100)
        assert await scans.get_scan("v") == 1  # nothing was written
        assert not scans.invalidate_scan("v")
        await write("a")
        assert await scans.get_scan("v") == 2
        await write("b")
        clock.advance(0.5)
        assert await scans.get_scan("v") == 2  # it was made less than ten times its time ago
        assert scans.invalidate_scan("v")
        assert await scans.get_scan("v") == 3
        for other in range(20):
            await scans.get_scan(f"w{other}")
        assert "8 views" in repr(scans)

    asyncio.run(run())


def test_a_scan_of_a_deleted_bucket_is_not_its_successors() -> None:
    clock, born = ManualClock(), [1]

    async def scan(view: str) -> int:
        clock.advance(60)  # for ten minutes it would count as recent
        return born[0]

    async def run() -> None:
        scans: SourceScanCache[str, int] = SourceScanCache(lambda _: object(), clock, scan, lambda _: born[0])
        assert await scans.get_scan("v") == 1
        born[0] = 2
        assert await scans.get_scan("v") == 2
        born[0] = 1
        assert await scans.get_scan("v") == 1

    asyncio.run(run())
