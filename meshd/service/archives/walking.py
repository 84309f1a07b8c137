"""One sequential pass over an archive: its files in stored order, with their bytes (blocking).

Law: memory is bounded by a piece and the codec, whatever the archive says. Invariant: a file is given in
whole, or ArchiveError or TarError ends the walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.service.archives.inflating import PIECE, inflated, inflated_member
from meshd.service.archives.spans import Ahead, Forward, pieces
from meshwire.archives.kinds import ArchiveError
from meshwire.archives.zips import STORED, scan_zip
from meshwire.shardindex import FILE_TYPES
from meshwire.tars import TarError, scan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.store.records import Span
    from meshwire.archives.kinds import ArchiveKind
    from meshwire.archives.zips import ZipMember
    from meshwire.tars import TarMember

MAX_MEMBERS: Final = 10_000_000
_MAX_NAMES: Final = 1 << 30
_FEW, _FEW_NAMES = 500_000, 64 << 20
_PACKED: Final = 8
"""Beyond the first few: bytes that a member takes at least, compressed; bytes of a name for each of them."""
SCATTERED: Final = ("tar", "zip", "parquet")
"""Read here and there, not from the first byte to the last."""
ENDLESS: Final = 1 << 60  # the end of a stream whose end is not known


class TooMuchError(ArchiveError):
    """Inflated, an archive has more than `most` bytes, the limit for one of its size."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"inflated it has more than {most} bytes, this node's limit for an archive of its size; store it "
            "less compressed or as a plain tar, or have --archive-ratio raised"
        )
        self.most = most


class Head(NamedTuple):
    """A file begins: `size` bytes follow, as pieces."""

    name: str
    size: int


Event = Head | bytes


def walk(kind: ArchiveKind, spans: Sequence[Span], size: int, most: int) -> Iterator[Event]:
    """The files of an archive of `size` bytes; inflated it may have `most`. Raises ArchiveError, TarError."""
    if kind == "zip":
        yield from _walk_zip(spans, size, most)
    elif kind == "tar":
        yield from walk_tar(Ahead(spans), size)
    else:
        source = Forward(bounded(inflated(kind, pieces(spans, 0, size)), most))
        yield from walk_tar(source, ENDLESS)
        source.drain()


def walk_tar(source: Ahead | Forward, end: int) -> Iterator[Event]:
    """The files of a tar that is read by offset."""
    for member in counted(scan(source.read, 0, end)):
        if member.type not in FILE_TYPES:
            continue
        yield Head(member.name, member.size)
        for at in range(0, member.size, PIECE):
            length = min(PIECE, member.size - at)
            data = source.read(member.data_offset + at, length)
            if len(data) != length:
                raise TarError("the file ends inside a member", member.start)
            yield data


def _walk_zip(spans: Sequence[Span], size: int, most: int) -> Iterator[Event]:
    for member in zip_files(spans, size, most):
        yield Head(member.name, member.size)
        yield from member_pieces(spans, member)


def zip_files(spans: Sequence[Span], size: int, most: int) -> list[ZipMember]:
    """The files of a zip, in order of place. Raises ArchiveError, also for more than `most` bytes of them."""
    members = [each for each in scan_zip(Ahead(spans).read, size) if each.type == "0"]
    if len(members) > MAX_MEMBERS:
        raise ArchiveError(f"more than {MAX_MEMBERS} members")
    total = sum(member.size for member in members)
    if total > most:
        raise TooMuchError(most)
    return members


def member_pieces(spans: Sequence[Span], member: ZipMember) -> Iterator[bytes]:
    """A zip member's bytes. Raises ArchiveError."""
    packed = pieces(spans, member.data_offset, member.packed)
    if member.method == STORED:
        return packed
    return inflated_member(packed, member.size, member.crc32, member.name)


def bounded(stream: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The stream, as long as it has at most `most` bytes. Raises ArchiveError."""
    left = most
    for piece in stream:
        left -= len(piece)
        if left < 0:
            raise TooMuchError(most)
        yield piece


def believed(members: Iterable[TarMember], packed: int) -> Iterator[TarMember]:
    """The members of a tar that is stored in `packed` bytes, compressed or not: as many, and names as long,
    as may be kept in memory for an archive of this size. Raises TarError."""
    names = min(_MAX_NAMES, _FEW_NAMES + _PACKED * packed)
    for number, member in enumerate(counted(members)):
        names -= len(member.name)
        if names < 0 or number >= _FEW + packed // _PACKED:
            raise TarError(
                f"more members, or longer names, than are believed of {packed} bytes", member.start
            )
        yield member


def counted(members: Iterable[TarMember]) -> Iterator[TarMember]:
    """The members, as long as there are not too many. Raises TarError."""
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise TarError(f"more than {MAX_MEMBERS} members", member.start)
        yield member
