"""Archives of any files and of every kind: what the standard library packed is found again, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.store.records import Meta
from meshwire.formats.zip_archive import scan_zip
from tests.support.archive_files import KINDS, archive_of
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from meshd.store.records import Record

names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", categories=("L", "N", "P")),
    min_size=1,
    max_size=12,
)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)
contents = st.binary(max_size=2000) | st.integers(0, 5000).map(bytes)
files = st.dictionaries(paths, contents, max_size=8)


@given(files, st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_members_and_one_pass_give_what_was_packed(packed: dict[str, bytes], kind: str) -> None:
    asyncio.run(_check(packed, f"x.{kind}", archive_of(kind, packed)))


async def _check(packed: dict[str, bytes], key: str, data: bytes) -> None:
    store = MemoryStore(ManualClock())
    archives = ArchiveService(LocalArchives(store, list[str]().append), single_node_objects(store))
    record = await _put(store, key, data)
    assert list((await archives.get_index("b", key, record)).names) == list(packed)
    for name, expected in packed.items():
        place = await archives.locate_member("b", key, record, name)
        assert place is not None
        assert store.read_range(*place) == expected
    seen = {}
    async for name, size, pieces in archives.local.stream_files("b", key, record):
        seen[name] = b"".join([piece async for piece in pieces])
        assert len(seen[name]) == size
    assert seen == packed
    store.close()


async def _put(store: MemoryStore, key: str, data: bytes) -> Record:
    writer = store.writer("b", key, size=len(data))
    await writer.write(data)
    return await writer.commit(Meta(hashlib.md5(data).hexdigest()))


# `zipfile` itself cannot read an archive whose comment has the signature of the end of one.
comments = st.binary(max_size=60).filter(lambda comment: b"PK\x05\x06" not in comment)


@given(files, st.lists(st.booleans(), min_size=8, max_size=8), comments, st.binary(max_size=99))
@settings(max_examples=40, deadline=None)
def test_zips_are_read_as_zipfile_reads_them(
    packed: dict[str, bytes], wide: list[bool], comment: bytes, before: bytes
) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for (name, data), zip64 in zip(packed.items(), wide, strict=False):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if len(data) % 2 else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=zip64) as member:
                member.write(data)
        archive.comment = comment
    data = before + file.getvalue()
    found = scan_zip(lambda offset, length: data[offset : offset + length], len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as again:
        expected = [
            (each.filename, each.file_size, each.compress_size, each.CRC) for each in again.infolist()
        ]
    assert [(each.name, each.size, each.packed, each.crc32) for each in found] == expected
    for each in found:
        if each.method == zipfile.ZIP_STORED:
            assert data[each.data_offset :][: each.packed] == packed[each.name]
