"""Archives of every kind over the store in memory: the same members whatever the kind; damage is refused."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import random
import zipfile
from typing import TYPE_CHECKING

import pytest

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET
from meshd.datasets.archives import decompression, reader
from meshd.datasets.archives.archive_service import (
    COPIES_PREFIX,
    INDEXES_PREFIX,
    RATIO,
    REFUSALS_PREFIX,
    ArchiveService,
    LocalArchives,
)
from meshd.datasets.archives.reader import MemberStart
from meshd.store.records import Meta
from meshwire.formats import zip_archive
from tests.support.archive_files import KINDS, archive_of, tar_of, zip_of, zstd
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.store.records import Record

_source = random.Random(3)
FILES = {
    "a/0001.jpg": _source.randbytes(70_000),
    "a/0001.cls": b"7",
    "empty": b"",
    "large.bin": _source.randbytes(1_300_000) + bytes(2_000_000),
    "ünï/ñ.txt": b"text " * 999,
}


class Shelf:
    """A store with archives in it."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.store, self.used = MemoryStore(ManualClock()), list[str]()
        self.archives = self.another(room)

    def another(self, room: int = 10 << 30, ratio: int = RATIO) -> ArchiveService:
        return ArchiveService(
            LocalArchives(self.store, self.used.append, room, ratio), single_node_objects(self.store)
        )

    async def put(self, key: str, data: bytes) -> Record:
        writer = self.store.writer("b", key, size=len(data))
        await writer.write(data)
        return await writer.commit(Meta(hashlib.md5(data).hexdigest()))

    async def read(self, key: str, record: Record, name: str) -> bytes | None:
        place = await self.archives.locate_member("b", key, record, name)
        return None if place is None else self.store.read_range(*place)

    def kept(self, prefix: str) -> list[str]:
        return [key for key, _ in self.store.list(RESERVED_BUCKET, prefix=prefix).entries]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_members_are_the_same_whatever_the_kind(shelf: Shelf, kind: str) -> None:
    async def look() -> None:
        key = f"shards/x.{kind}"
        record = await shelf.put(key, archive_of(kind, FILES))
        index = await shelf.archives.get_index("b", key, record)
        assert dict(zip(index.names, index.sizes.tolist(), strict=True)) == {
            name: len(data) for name, data in FILES.items()
        }
        assert index.files.samples == 3
        for name, data in FILES.items():
            assert await shelf.read(key, record, name) == data
        assert await shelf.read(key, record, "a") is None
        assert index.inflated == (kind not in ("tar", "stored.zip"))
        assert len(shelf.kept(COPIES_PREFIX)) == int(index.inflated)
        assert set(shelf.used) == set(shelf.kept(COPIES_PREFIX))
        again = await ArchiveService(
            LocalArchives(shelf.store, shelf.used.append), single_node_objects(shelf.store)
        ).get_index("b", key, record)
        assert again.to_bytes() == index.to_bytes()

    asyncio.run(look())


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_gives_every_file_in_order(shelf: Shelf, kind: str) -> None:
    async def look() -> None:
        key = f"x.{kind}"
        record = await shelf.put(key, archive_of(kind, FILES))
        found = {}
        async for name, size, pieces in shelf.archives.local.stream_files("b", key, record):
            found[name] = b"".join([piece async for piece in pieces])
            assert len(found[name]) == size
        assert found == FILES
        assert list(found) == list(FILES)
        names = [
            name async for name, _, _ in shelf.archives.local.stream_files("b", key, record)
        ]  # nothing is read
        assert names == list(FILES)
        assert shelf.kept("") == []

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["tgz", "tar.zst", "zip"])
def test_a_copy_that_was_evicted_is_made_again(shelf: Shelf, kind: str) -> None:
    async def look() -> None:
        key = f"x.{kind}"
        record = await shelf.put(key, archive_of(kind, FILES))
        assert await shelf.read(key, record, "a/0001.cls") == b"7"
        (copy,) = shelf.kept(COPIES_PREFIX)
        await shelf.store.delete(RESERVED_BUCKET, copy)
        reads = [shelf.read(key, record, name) for name in FILES]
        assert await asyncio.gather(*reads) == list(FILES.values())
        assert shelf.kept(COPIES_PREFIX) == [copy]

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["tgz", "tar.zst"])
def test_what_is_too_large_for_a_copy_is_still_indexed_and_walked(kind: str) -> None:
    shelf = Shelf(room=1 << 20)

    async def look() -> None:
        key = f"x.{kind}"
        record = await shelf.put(key, archive_of(kind, FILES))
        index = await shelf.archives.get_index("b", key, record)
        assert list(index.names) == list(FILES)
        with pytest.raises(BatchError, match="too large for a copy") as caught:
            await shelf.read(key, record, "empty")
        assert caught.value.code == "TooLarge"
        assert [name async for name, _, _ in shelf.archives.local.stream_files("b", key, record)] == list(
            FILES
        )

    asyncio.run(look())
    shelf.store.close()


async def run_through(shelf: Shelf, key: str, record: Record) -> None:
    async for _, _, pieces in shelf.archives.local.stream_files("b", key, record):
        async for _ in pieces:
            pass


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


GOOD_ZIP, GOOD_TGZ = archive_of("zip", FILES), archive_of("tgz", FILES)
GOOD_ZST = archive_of("tar.zst", FILES)
DAMAGED = {
    "cut.tgz": GOOD_TGZ[:-9],
    "crc.tgz": _flipped(GOOD_TGZ, len(GOOD_TGZ) - 6),
    "middle.tgz": _flipped(GOOD_TGZ, 5000),
    "plain.tgz": tar_of(FILES),
    "empty.tgz": b"",
    "junk.tgz": GOOD_TGZ + b"junk",
    "notar.tgz": gzip.compress(b"\x01" * 5000),
    "cut.tar.zst": GOOD_ZST[:-3],
    "middle.tar.zst": _flipped(GOOD_ZST, 600),
    "cut.zip": GOOD_ZIP[:-1],
    "data.zip": _flipped(GOOD_ZIP, 5000),
    "torn.tar": tar_of(FILES)[:60_000],
    "none.zip": b"PK",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused_by_name_and_the_refusal_kept(shelf: Shelf, name: str) -> None:
    async def look() -> None:
        record = await shelf.put(name, DAMAGED[name])
        for archives in (
            shelf.archives,
            shelf.archives,
            ArchiveService(LocalArchives(shelf.store, shelf.used.append), single_node_objects(shelf.store)),
        ):
            with pytest.raises(BatchError) as caught:
                await archives.get_index("b", name, record)
            assert caught.value.code == "BadSample"
            assert f"s3://b/{name}" in caught.value.message
        assert len(shelf.kept(REFUSALS_PREFIX)) == 1
        assert len(shelf.kept(INDEXES_PREFIX)) == 1  # the refusal
        with pytest.raises(BatchError):
            await run_through(shelf, name, record)

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["tgz", "tar.zst", "zip"])
def test_bombs_are_refused_before_they_fill_anything(kind: str) -> None:
    shelf = Shelf(room=1 << 20)

    async def look() -> None:
        key = f"x.{kind}"
        record = await shelf.put(key, archive_of(kind, {"zeros": bytes(80 << 20)}))
        assert record.size * 200 < 60 << 20
        with pytest.raises(BatchError, match=f"more than {64 << 20} bytes.*--archive-ratio"):
            await shelf.archives.get_index("b", key, record)
        assert shelf.kept(COPIES_PREFIX) == []
        roomier = ArchiveService(
            LocalArchives(shelf.store, shelf.used.append, 200 << 20, ratio=40_000),
            single_node_objects(shelf.store),
        )
        assert len(await roomier.get_index("b", key, record)) == 1  # more is believed: it is looked at again

    asyncio.run(look())
    shelf.store.close()


def test_a_zip_whose_members_share_bytes_is_refused(shelf: Shelf) -> None:
    data = bytearray(zip_of({"a": b"x" * 50, "b": b"x" * 50}, zipfile.ZIP_STORED))
    second = data.rfind(b"PK\1\2")
    name_at = second + 46
    data[second + 42 : second + 46] = bytes(4)  # b's header is a's
    data[name_at : name_at + 1] = b"a"

    async def look() -> None:
        record = await shelf.put("x.zip", bytes(data))
        with pytest.raises(BatchError, match="overlap"):
            await shelf.archives.get_index("b", "x.zip", record)

    asyncio.run(look())


def test_other_objects_are_no_archives(shelf: Shelf) -> None:
    async def look() -> None:
        record = await shelf.put("a.jpg", b"x")
        with pytest.raises(BatchError, match=r"\.tar\.zst"):
            await shelf.archives.get_index("b", "a.jpg", record)

    asyncio.run(look())


def test_what_is_asked_beyond_the_queue_is_told_to_come_again(shelf: Shelf) -> None:
    async def look() -> None:
        made = [archive_of("tgz", {"a": b"%d" % number}) for number in range(80)]
        records = [await shelf.put(f"{number}.tgz", data) for number, data in enumerate(made)]
        asked = [shelf.read(f"{number}.tgz", record, "a") for number, record in enumerate(records)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told = [answer for answer in answers if isinstance(answer, BatchError)]
        assert 0 < len(told) < 20
        assert {(answer.code, answer.retry_after) for answer in told} == {("Busy", 1)}
        assert [await shelf.read(f"{n}.tgz", record, "a") for n, record in enumerate(records)] == [
            b"%d" % number for number in range(80)
        ]

    asyncio.run(look())


@pytest.mark.parametrize("kind", ["tgz", "tar.zst"])
def test_streams_of_a_few_bytes_cost_what_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile file has thousands in a piece: what is behind one must not be copied for it."""
    fed: list[int] = []
    for name in ("_fed_zlib", "_fed_zstd"):
        feed = getattr(decompression, name)

        def counted(codec: object, data: bytes, feed: Callable[..., tuple[bytes, bytes]] = feed) -> object:
            fed.append(len(data))
            return feed(codec, data)

        monkeypatch.setattr(decompression, name, counted)
    tar = tar_of(FILES)
    nothing, whole = archive_of(kind, {}), archive_of(kind, FILES)
    pack = gzip.compress if kind == "tgz" else zstd.compress
    tiny = [pack(tar[at : at + 7]) for at in range(0, 7 * 5_000, 7)] + [pack(b"")] * 5_000
    packed = b"\0".join(tiny) + pack(tar[7 * 5_000 :]) + bytes(100)
    pieces = [packed[at : at + decompression.PIECE] for at in range(0, len(packed), decompression.PIECE)]
    assert b"".join(decompression.decompress(kind, iter(pieces))) == tar  # type: ignore[arg-type]  # one of its kinds
    assert sum(fed) < 5_000 * len(tiny) + 2 * len(packed)
    assert b"".join(decompression.decompress(kind, [whole, nothing])) == tar + tar_of({})  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("kind", ["tgz", "tar.zst"])
def test_names_are_believed_by_the_size_of_the_archive(
    shelf: Shelf, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in memory, and deflate to next to nothing."""
    files = {f"{number}/{'n' * 5_000}": b"" for number in range(100)} | {"noise": _source.randbytes(9_000)}
    shelf_of_few = Shelf(room=200_000)  # no copy: it is run through

    async def look(shelf: Shelf, match: str) -> None:
        record = await shelf.put(f"x.{kind}", archive_of(kind, files))
        with pytest.raises(BatchError, match=match):
            await shelf.archives.get_index("b", f"x.{kind}", record)

    monkeypatch.setattr(reader, "_FEW_NAMES", 100_000)
    for each in (shelf, shelf_of_few):
        asyncio.run(look(each, "longer names"))
    shelf_of_few.store.close()


def test_members_are_believed_by_the_size_of_the_archive(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(key: str, files: dict[str, bytes]) -> int:
        record = await shelf.put(key, archive_of(key.partition(".")[2], files))
        return len(await shelf.archives.get_index("b", key, record))

    monkeypatch.setattr(reader, "_FEW", 50)
    assert asyncio.run(look("plain.tar", {f"{number}": b"" for number in range(1000)})) == 1000
    noise = {f"{number}": _source.randbytes(100) for number in range(1000)}
    assert asyncio.run(look("noise.tgz", noise)) == 1000
    with pytest.raises(BatchError, match="more members"):
        asyncio.run(look("same.tar.zst", {f"{number}": b"" for number in range(30_000)}))


def test_a_walk_is_ahead_by_no_more_than_about_a_megabyte_of_names() -> None:
    """A name has up to 8 MiB, and there may be nothing between two."""
    heads = [MemberStart(f"{number}/{'n' * 400_000}", 0) for number in range(100)]
    source = reader._Source(iter(heads), "s3://b/x.tgz", ())
    assert len(source._fetch()) == 3
    assert len(reader._Source(iter([MemberStart("n", 0)] * 3000), "s3://b/x.tgz", ())._fetch()) == 1000


def test_a_zip_of_too_many_entries_is_refused_before_they_are_read(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zip_archive, "MAX_ENTRIES", len(FILES) - 1)

    async def look() -> None:
        record = await shelf.put("x.zip", archive_of("zip", FILES))
        with pytest.raises(BatchError, match="for 5 entries is not plausible"):
            await shelf.archives.get_index("b", "x.zip", record)

    asyncio.run(look())
