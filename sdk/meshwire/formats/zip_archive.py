"""Zip archives (PKWARE APPNOTE 6.3 with zip64): headers of stored files, and a verified central directory.

Law: pure; reads only through the function it is given. Stored and deflated members are supported. The same
files give the same bytes: fixed date, no owner, mode 0644. For a file too large to be held in memory, the
checksum follows it in a data descriptor.
Invariant: members lie inside the archive and do not overlap, so together they inflate to no more than the
archive's own size allows; an inconsistent archive raises ArchiveError.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshwire.dataset.archive_paths import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshwire.formats.tar import Reader


_LOCAL: Final = struct.Struct("<4s5H3L2H")  # §4.3.7
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")  # §4.3.12
_END64: Final = struct.Struct("<4sQ2H2L4Q")  # §4.3.14
_LOCATOR: Final = struct.Struct("<4sLQL")  # §4.3.15
_END: Final = struct.Struct("<4s4H2LH")  # §4.3.16
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_FLAG_UTF8, _FLAG_DESCRIPTOR = 1 << 11, 1 << 3
_VERSION_PLAIN, _VERSION_ZIP64 = 20, 45  # versions needed
_MADE_BY_UNIX: Final = 3 << 8
_MODE: Final = 0o100644 << 16
_DATE: Final = 0x21  # 1980-01-01
CRC_AT: Final = 14
"""Offset of the checksum in a local header."""


def zip_local_header(name: str, size: int, *, described: bool) -> bytes:
    """Return the local header of a file of `size` bytes; the caller writes the checksum at CRC_AT unless
    the file is `described` by a data descriptor."""
    raw, large = name.encode(), size >= _FULL32
    flags = _FLAG_UTF8 | (_FLAG_DESCRIPTOR if described else 0)
    told = _FULL32 if large else 0 if described else size
    extra = struct.pack("<2H2Q", 1, 16, *((0, 0) if described else (size, size))) if large else b""
    version = _VERSION_ZIP64 if large else _VERSION_PLAIN
    return (
        _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, _DATE, 0, told, told, len(raw), len(extra)) + raw + extra
    )


def data_descriptor(size: int, crc: int) -> bytes:
    """Return the data descriptor after a file whose header has no checksum (§4.3.9)."""
    return struct.pack("<4sL2Q" if size >= _FULL32 else "<4s3L", b"PK\7\10", crc, size, size)


def central_directory(entries: Sequence[tuple[str, int, int, int, bool]], start: int) -> bytes:
    """Return the end of an archive, given (name, size, checksum, offset of its header, described) of each
    file; `start` is the offset of the directory."""
    parts = [_entry(*each) for each in entries]
    size, count = sum(map(len, parts)), len(parts)
    if count >= _FULL16 or start + size >= _FULL32:
        end = _END64.pack(
            b"PK\6\6",
            _END64.size - 12,
            _MADE_BY_UNIX | _VERSION_ZIP64,
            _VERSION_ZIP64,
            0,
            0,
            count,
            count,
            size,
            start,
        )
        parts += [end, _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)]
    told = min(count, _FULL16), min(count, _FULL16), min(size, _FULL32), min(start, _FULL32)
    return b"".join([*parts, _END.pack(b"PK\5\6", 0, 0, *told, 0)])


def _entry(name: str, size: int, crc: int, offset: int, described: bool) -> bytes:
    raw = name.encode()
    large = [size, size] if size >= _FULL32 else []
    large += [offset] if offset >= _FULL32 else []
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    flags = _FLAG_UTF8 | (_FLAG_DESCRIPTOR if described else 0)
    version = _VERSION_ZIP64 if large else _VERSION_PLAIN
    told = min(size, _FULL32), min(size, _FULL32)
    return (
        _ENTRY.pack(
            *(b"PK\1\2", _MADE_BY_UNIX | _VERSION_ZIP64, version, flags, 0, 0, _DATE, crc, *told),
            *(len(raw), len(extra), 0, 0, 0, _MODE, min(offset, _FULL32)),
        )
        + raw
        + extra
    )


STORED, DEFLATED = 0, 8
_MAX_RATIO: Final = 1032
"""Deflate's maximum ratio: 258 bytes from two bits."""
_MAX_COMMENT: Final = 0xFFFF
_MAX_DIRECTORY: Final = 1 << 30
MAX_ENTRIES: Final = 10_000_000
_ENCRYPTED, _UTF8 = 1, 1 << 11
_ZIP64: Final = 1
_UNIX: Final = 3
_LINK: Final = 0o12


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of a zip. `data_offset` and `packed`: its bytes in the archive; `size`: inflated size;
    `type` as in a tar: "0" a file, "5" a folder, "2" a link.
    """

    name: str
    size: int
    data_offset: int
    packed: int
    method: int
    crc32: int
    type: str = "0"


def scan_zip(read: Reader, size: int) -> list[ZipMember]:
    """Return the members of an archive of `size` bytes, in order of their position.

    `read(offset, length)` returns at most `length` bytes, fewer only at the end. Raises ArchiveError.
    """
    directory, count, shift, limit = _directory(read, size)
    entries = sorted(_entries(directory, count, shift), key=lambda entry: entry.header)
    members = [_locate_member(read, entry, limit) for entry in entries]
    for earlier, later in itertools.pairwise(members):
        if earlier.data_offset + earlier.packed > later.data_offset:
            raise ArchiveError(f"the members {_show_name(earlier.name)} and {_show_name(later.name)} overlap")
    return members


@dataclass(frozen=True, slots=True)
class _Entry:
    raw: bytes
    name: str
    size: int
    packed: int
    method: int
    crc32: int
    header: int
    type: str


def _directory(read: Reader, size: int) -> tuple[bytes, int, int, int]:
    """Return the central directory, its number of entries, the base of its offsets, and its start."""
    tail_at = max(0, size - _END.size - _MAX_COMMENT)
    tail = read(tail_at, size - tail_at)
    at = _find_end(tail)
    end = tail_at + at
    _, disk, start_disk, here, count, length, offset, _ = _END.unpack_from(tail, at)
    if _FULL16 in (here, count) or _FULL32 in (length, offset):
        found = _zip64(read, end)
        if found is not None:
            disk, start_disk, here, count, length, offset, end = found
    if disk or start_disk or here != count:
        raise ArchiveError("multi-volume zips are not supported; join the volumes first")
    begin = end - length
    if begin < offset:
        raise ArchiveError("the zip's directory is not at its stated offset")
    if length > _MAX_DIRECTORY or count > MAX_ENTRIES or count * _ENTRY.size > length:
        raise ArchiveError(f"a directory of {length} bytes for {count} entries is not plausible")
    return read(begin, length), count, begin - offset, begin


def _find_end(tail: bytes) -> int:
    """Find the end record: the last one whose comment extends exactly to the end of the file."""
    at = len(tail)
    while (at := tail.rfind(b"PK\5\6", 0, at)) >= 0:
        if at + _END.size <= len(tail):
            comment = int.from_bytes(tail[at + _END.size - 2 : at + _END.size], "little")
            if at + _END.size + comment == len(tail):
                return at
    raise ArchiveError("not a zip, or it is truncated: there is no end record")


def _zip64(read: Reader, end: int) -> tuple[int, int, int, int, int, int, int] | None:
    if end < _LOCATOR.size:
        return None
    locator = read(end - _LOCATOR.size, _LOCATOR.size)
    mark, disk, _, volumes = _LOCATOR.unpack(locator)
    if mark != b"PK\6\7":
        return None  # the maximum values are real, not markers for zip64
    if disk or volumes > 1:
        raise ArchiveError("multi-volume zips are not supported; join the volumes first")
    # Data before the zip may shift the record's stated offset, but the record always directly precedes the
    # locator.
    at = end - _LOCATOR.size - _END64.size
    record = read(at, _END64.size) if at >= 0 else b""
    if len(record) != _END64.size or record[:4] != b"PK\6\6":
        raise ArchiveError("the zip64 end record is missing")
    _, _, _, _, own, start, here, count, length, offset = _END64.unpack(record)
    return own, start, here, count, length, offset, at


def _entries(directory: bytes, count: int, shift: int) -> Iterator[_Entry]:
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(directory):
            raise ArchiveError("the zip's directory is too short for its number of entries")
        fields = _ENTRY.unpack_from(directory, at)
        mark, made, _, flags, method, _, _, crc32, packed, size = fields[:10]
        name_length, extra_length, comment_length, disk, _, mode, header = fields[10:]
        after = at + _ENTRY.size + name_length + extra_length + comment_length
        if mark != b"PK\1\2" or after > len(directory):
            raise ArchiveError("an entry of the zip's directory is corrupt")
        raw = directory[at + _ENTRY.size : at + _ENTRY.size + name_length]
        extra = directory[at + _ENTRY.size + name_length :][:extra_length]
        name = _name(raw, utf8=bool(flags & _UTF8))
        size, packed, header, disk = _wide(extra, size, packed, header, disk)
        if disk:
            raise ArchiveError("multi-volume zips are not supported; join the volumes first")
        kind = _type(raw, made, mode)
        if kind == "0":
            _check_entry(name, flags, method, size, packed)
        bytes_of_it = size if kind == "0" else 0
        yield _Entry(raw, name, bytes_of_it, packed, method, crc32, header + shift, kind)
        at = after


def _name(raw: bytes, *, utf8: bool) -> str:
    """Decode a name: code page 437 unless flagged as UTF-8 (APPNOTE D.1); many writers omit the flag, so
    UTF-8 is tried first."""
    if utf8 or raw.isascii():
        return raw.decode("utf-8", "backslashreplace")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp437")


def _type(raw: bytes, made: int, mode: int) -> str:
    if raw.endswith(b"/"):
        return "5"
    return "2" if made >> 8 == _UNIX and mode >> 28 == _LINK else "0"


def _check_entry(name: str, flags: int, method: int, size: int, packed: int) -> None:
    if flags & _ENCRYPTED:
        raise ArchiveError(f"the member {_show_name(name)} is encrypted, which is not supported")
    if method not in (STORED, DEFLATED):
        raise ArchiveError(
            f"the member {_show_name(name)} uses compression method {method}; "
            "stored and deflate are supported"
        )
    if method == STORED and size != packed:
        raise ArchiveError(f"the stored member {_show_name(name)} has two sizes: {size} and {packed}")
    if size > packed * _MAX_RATIO:
        raise ArchiveError(
            f"the member {_show_name(name)} claims {size} bytes from {packed} compressed bytes"
        )


def _wide(extra: bytes, size: int, packed: int, header: int, disk: int) -> tuple[int, int, int, int]:
    """Return the numbers, taking those too large for their fields from the zip64 extra field (§4.5.3)."""
    if _FULL32 not in (size, packed, header) and disk != _FULL16:
        return size, packed, header, disk
    body, at = _zip64_field(extra), 0
    found = []
    for value, full, width in (
        (size, _FULL32, 8),
        (packed, _FULL32, 8),
        (header, _FULL32, 8),
        (disk, _FULL16, 4),
    ):
        if value == full and at + width <= len(body):
            found.append(int.from_bytes(body[at : at + width], "little"))
            at += width
        else:
            found.append(value)
    return found[0], found[1], found[2], found[3]


def _zip64_field(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            return extra[at + 4 : at + 4 + length]
        at += 4 + length
    return b""


def _locate_member(read: Reader, entry: _Entry, limit: int) -> ZipMember:
    """Return the member with the position of its data, which the local header gives."""
    head = read(entry.header, _LOCAL.size + len(entry.raw)) if entry.header < limit else b""
    if len(head) != _LOCAL.size + len(entry.raw) or head[:4] != b"PK\3\4":
        raise ArchiveError(f"the member {_show_name(entry.name)} has no local header")
    name_length, extra_length = struct.unpack_from("<2H", head, _LOCAL.size - 4)
    if head[_LOCAL.size :] != entry.raw or name_length != len(entry.raw):
        raise ArchiveError(f"the member {_show_name(entry.name)} has another name in its local header")
    data = entry.header + _LOCAL.size + name_length + extra_length
    if data + entry.packed > limit:
        raise ArchiveError(f"the member {_show_name(entry.name)} extends into the zip's directory")
    return ZipMember(entry.name, entry.size, data, entry.packed, entry.method, entry.crc32, entry.type)


def _show_name(name: str) -> str:
    return repr(name[:80])
