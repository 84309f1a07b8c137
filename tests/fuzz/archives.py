"""Archives, fuzzed: what reads zips and what inflates.

Law: see `targets`. What is taken of an archive lies inside it, and inflates to no more than was allowed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from meshd.datasets.archives.decompression import PIECE, decompress, decompress_member
from meshd.datasets.archives.reader import UNLIMITED, ForwardReader, limit_bytes, walk_tar
from meshwire.dataset.archive_index import ArchiveIndex, index_tar
from meshwire.dataset.archive_paths import ArchiveError
from meshwire.formats.tar import TarError
from meshwire.formats.zip_archive import DEFLATED, scan_zip
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwire.dataset.archive_paths import ArchiveKind

_MOST = 4 << 20
_KINDS: tuple[ArchiveKind, ...] = ("tgz", "tar.zst")


def zipped(data: bytes) -> None:
    """The zip reader: files lie inside the archive and apart; an index can be made of them; they inflate to
    their sizes or not at all."""

    def read(offset: int, length: int) -> bytes:
        assert 0 <= offset <= len(data)
        assert 0 <= length <= len(data)
        return data[offset : offset + length]

    try:
        members = scan_zip(read, len(data))
    except ArchiveError:
        return
    end = 0
    for member in members:
        assert end <= member.data_offset
        end = member.data_offset + member.packed
        assert end <= len(data)
        assert member.size <= max(member.packed * 1032, 0)
    files = [member for member in members if member.type == "0"]
    plain = [member for member in files if member.method != DEFLATED]
    index = ArchiveIndex("zip", index_tar(plain), len(data), inflated=False)
    assert ArchiveIndex.from_bytes(index.to_bytes()).to_bytes() == index.to_bytes()
    for member in files:
        if member.method == DEFLATED and member.size <= _MOST:
            packed = data[member.data_offset :][: member.packed]
            with contextlib.suppress(ArchiveError):
                pieces = list(decompress_member([packed], member.size, member.crc32, member.name))
                assert sum(map(len, pieces)) == member.size


def packed(data: bytes) -> None:
    """Gzip and zstd, cut in two ways: the same bytes or a refusal both times, never more than is allowed; the
    tar in them is walked. The first byte chooses the format, the second where to cut."""
    if len(data) < 2:
        return
    kind, step, body = _KINDS[data[0] % 2], data[1] + 1, data[2:]
    whole = _inflated(kind, [body])
    split = _inflated(kind, [body[at : at + step] for at in range(0, len(body), step)])
    assert whole == split
    if whole is not None:
        with contextlib.suppress(TarError):
            for _ in walk_tar(ForwardReader(iter([whole])), UNLIMITED):
                pass


def _inflated(kind: ArchiveKind, pieces: list[bytes]) -> bytes | None:
    try:
        return b"".join(_checked(limit_bytes(decompress(kind, pieces), _MOST)))
    except ArchiveError:
        return None


def _checked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        assert 0 < len(piece) <= PIECE
        yield piece


def index(data: bytes) -> None:
    """The index's own document: any bytes are an index or a ColumnError."""
    with contextlib.suppress(ColumnError):
        read = ArchiveIndex.from_bytes(data)
        assert ArchiveIndex.from_bytes(read.to_bytes()).to_bytes() == read.to_bytes()
        for name in list(read.names)[:3]:
            assert read.find(name) is not None
