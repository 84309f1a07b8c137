"""Zip headers: what Python's reader and ours make of them, small, large and beyond 4 GiB."""

from __future__ import annotations

import io
import zipfile
import zlib

from hypothesis import given
from hypothesis import strategies as st

from meshd.jobs.archives import shard
from meshd.jobs.archives.shard import ZipLayout
from meshwire.formats.zip_archive import central_directory, data_descriptor, scan_zip, zip_local_header
from meshwire.jobs.job_plan import SourceFile

names = st.text(st.characters(codec="utf-8", exclude_characters="\0/\\"), min_size=1, max_size=20)


@given(st.dictionaries(names.map(lambda name: "d/" + name), st.binary(max_size=3000), max_size=8))
def test_packed_files_are_read_back(files: dict[str, bytes]) -> None:
    data, wanted = b"".join(files.values()), []
    at = 0
    for name, body in files.items():
        wanted.append(SourceFile(name, 0, at, len(body)))
        at += len(body)
    made = _packed(wanted, data)
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        assert archive.testzip() is None
        assert {info.filename: archive.read(info) for info in archive.infolist()} == files
    members = scan_zip(lambda offset, length: made[offset : offset + length], len(made))
    assert {m.name: made[m.data_offset : m.data_offset + m.size] for m in members} == files


def _packed(files: list[SourceFile], data: bytes) -> bytes:
    packing, made = ZipLayout(files), []
    for group in packing.groups():
        buffer = bytearray(group.size)
        for at, text in group.made:
            buffer[at : at + len(text)] = text
        for piece in group.pieces:
            buffer[piece.at : piece.at + piece.length] = data[piece.offset : piece.offset + piece.length]
        packing.fill_checksums(memoryview(buffer))
        made.append(bytes(buffer))
    return b"".join(made)


def test_large_files_are_described_behind(monkeypatch: object) -> None:
    size = shard._HELD + 100
    data = bytes(range(256)) * (size // 256 + 1)
    made = _packed([SourceFile("a", 0, 0, 10), SourceFile("big", 0, 0, size), SourceFile("z", 0, 5, 5)], data)
    assert data_descriptor(size, zlib.crc32(data[:size])) in made
    with zipfile.ZipFile(io.BytesIO(made)) as archive:
        assert archive.testzip() is None
        assert archive.read("big") == data[:size]
    members = scan_zip(lambda offset, length: made[offset : offset + length], len(made))
    assert [member.name for member in members] == ["a", "big", "z"]


def test_sizes_and_places_beyond_4_gib_are_told() -> None:
    huge = 5 << 30
    assert len(zip_local_header("a", huge, described=True)) == 30 + 1 + 20
    assert len(data_descriptor(huge, 1)) == 24
    end = central_directory([("a", huge, 1, 0, True), ("b", 3, 2, huge + 100, False)], huge + 200)
    assert b"PK\6\6" in end
    assert huge.to_bytes(8, "little") in end
    assert (huge + 100).to_bytes(8, "little") in end
