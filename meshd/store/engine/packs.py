"""Packs: many small objects in one member of a data file. The member is a zip, whose entries are stored as
they are, so `tar` and `unzip` read them without us.

Law: pure. Each entry carries its own record with a checksum and its own position, in an extra field of its
local header, so that a scan neither needs the pack's header nor its directory, which are for other tools.
"""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

import msgspec
from awscrt.checksums import crc32c
from zlib_ng import zlib_ng

from meshd.store.engine.member_header import (
    MAX_PAX,
    Member,
    safe_name,
    stamp_text,
    too_much_metadata,
)
from meshwire.formats import tar
from meshwire.s3.bucket_settings import Acl  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.engine.member_header import Kind
    from meshd.store.records import DataFile
    from meshd.store.writer_api import Buffer

PACKED: Final = 4 << 10
"""Objects up to this size are packed: the tar headers of larger ones take less than half of their bytes."""
OPENING: Final = b"PK\x03\x04"
DIRECTORY: Final = b"PK\x01\x02"
MAX_BYTES: Final = 4 << 20  # no pack is larger
MAX_HEADER_BYTES: Final = 32 << 10  # of an entry
_FULL_BYTES: Final = 1 << 20
_FULL_ENTRIES: Final = 8192
_ENTRY_BYTES: Final = 400  # at most, as a rule, of what an entry takes beside its data
_WORTHWHILE: Final = 4 << 20
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_END = struct.Struct("<4sHHHHIIH")
_EXTRA = struct.Struct("<HHI")  # id, length and crc32c; the checksum covers all of the header but itself
_FIXED = struct.Struct("<QQQB")  # stamp, file, at, kind: of fixed width, since they are overwritten in place
_EXTRA_ID: Final = 0x6D73
_VERSION: Final = 20  # of the format: 2.0
_UTF8: Final = 0x800
_UNIX: Final = 3 << 8
_MODE: Final = 0o100644 << 16
_KINDS: tuple[Kind, ...] = ("object", "wasted")


class _Described(msgspec.Struct, frozen=True, array_like=True):
    """What a Member says beside its stamp, position and kind. A new field goes to the end and has a default.
    `bucket` and `key` are "" where the entry's name says them."""

    crc32c: int
    etag: str
    modified: int
    headers: dict[str, str]
    metadata: dict[str, str]
    checksums: dict[str, str]
    checksum_type: str
    owner: str
    moves: int
    version: str
    tags: dict[str, str]
    acl: Acl | None
    amended: int
    through: bool
    bucket: str
    key: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Described).decode


def is_packed(member: Member, size: int) -> bool:
    """Returns True if a member with `size` bytes of data is to be an entry of a pack. Others stand alone, for
    earlier releases: what they do not find, they must not need."""
    return size <= PACKED and member.kind == "object"


def is_worth_packing(saving: int, size: int) -> bool:
    """Returns True if a data file of `size` bytes should be written again for this saving, in bytes."""
    return saving >= _WORTHWHILE and saving >= size // 3


def should_be_packed(info: DataFile) -> bool:
    """Returns True if a segment takes much less space when its small objects are written again."""
    saving, members = info.framing, info.refs + info.buried + info.tombs
    if saving < 0 and info.live + info.dead <= members * PACKED // 2:
        # an estimate: an earlier release has given each member headers of its own
        saving = info.end - info.live - info.dead - members * _ENTRY_BYTES
    return is_worth_packing(saving, info.end)


@lru_cache(maxsize=64)
def _dos_time(half_minutes: int) -> tuple[int, int]:
    """Returns time and date as a zip has them, in UTC."""
    try:
        at = datetime.fromtimestamp(half_minutes * 2, UTC)
    except (ValueError, OverflowError, OSError):
        return 0, 0x21
    year = min(max(at.year - 1980, 0), 127)
    return at.hour << 11 | at.minute << 5 | at.second >> 1, year << 9 | at.month << 5 | at.day


def data_crc32(chunks: Sequence[Buffer]) -> int:
    """Returns the checksum that a zip has of the data."""
    crc = 0
    for chunk in chunks:
        crc = zlib_ng.crc32(chunk, crc)
    return crc


def render_entry(member: Member, size: int, crc32: int) -> bytes:
    """Renders the local header of an entry with `size` bytes of data and their CRC-32. Members that differ
    only in stamp, version and kind have headers of equal length. Raises MetadataTooLargeError."""
    name = safe_name(member.bucket, member.key)
    named = name == f"{member.bucket}/{member.key}"
    described = _Described(
        member.crc32c,
        member.etag,
        member.modified,
        member.headers,
        member.metadata,
        member.checksums,
        member.checksum_type,
        member.owner,
        member.moves,
        member.version,
        member.tags,
        member.acl,
        member.amended,
        member.through,
        "" if named else member.bucket,
        "" if named else member.key,
    )
    kind = _KINDS.index(member.kind)
    record = _FIXED.pack(int(member.stamp), member.file, member.at, kind) + _encode(described)
    raw = name.encode()
    if len(record) + 2 * len(raw) > MAX_PAX:
        raise too_much_metadata(member)
    extra = _EXTRA.size + len(record)
    time, date = _dos_time(member.modified // 2000)
    head = _LOCAL.pack(OPENING, _VERSION, _UTF8, 0, time, date, crc32, size, size, len(raw), extra)
    crc = crc32c(record, crc32c(raw, crc32c(head)))
    return b"%b%b%b%b" % (head, raw, _EXTRA.pack(_EXTRA_ID, extra - 4, crc), record)


class Entry(NamedTuple):
    """A parsed entry. `data`: where its data begin in the file; `size`: of the data in bytes."""

    member: Member
    data: int
    size: int


def parse_entry(raw: bytes, at: int, file: int, base: int) -> Entry | None:
    """Parses the entry at `at` of bytes that begin at byte `base` of data file `file`. None: there is no
    entry with a valid record that says that it is exactly there."""
    start = at + _LOCAL.size
    if not raw.startswith(OPENING, at) or start > len(raw):
        return None
    *_, size, _, name_length, extra = _LOCAL.unpack_from(raw, at)
    middle, end = start + name_length, start + name_length + extra
    if end > len(raw) or extra < _EXTRA.size + _FIXED.size:
        return None
    number, length, crc = _EXTRA.unpack_from(raw, middle)
    record = raw[middle + _EXTRA.size : end]
    if (number, length) != (_EXTRA_ID, extra - 4) or crc32c(record, crc32c(raw[at:middle])) != crc:
        return None
    stamp, own_file, own_at, kind = _FIXED.unpack_from(record)
    if (own_file, own_at) != (file, base + at) or kind >= len(_KINDS):
        return None
    try:
        said = _decode(record[_FIXED.size :])
        bucket, _, key = raw[start:middle].decode().partition("/")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    member = Member(
        stamp_text(stamp),
        _KINDS[kind],
        said.bucket or bucket,
        said.key or key,
        said.crc32c,
        said.etag,
        said.modified,
        said.headers,
        said.metadata,
        said.checksums,
        said.checksum_type,
        said.owner,
        file=own_file,
        at=own_at,
        moves=said.moves,
        version=said.version,
        tags=said.tags,
        acl=said.acl,
        amended=said.amended,
        through=said.through,
    )
    return Entry(member, base + end, size)


class Pack:
    """A pack that is being written; its header is filled in when it ends. `start`: its place in the file."""

    def __init__(self, start: int) -> None:
        self.header = bytearray(tar.BLOCK)
        self._start = start
        self._directory: list[bytes] = []
        self._first = b""
        self._mtime = 0

    def __repr__(self) -> str:
        return f"<Pack at {self._start}, {len(self._directory)} entries>"

    def is_full(self, tail: int) -> bool:
        """Returns True if the next entry, which would begin at `tail`, belongs into another pack."""
        return tail - self._start >= _FULL_BYTES or len(self._directory) >= _FULL_ENTRIES

    def add(self, header: bytes, at: int, modified: int) -> None:
        """Adds the entry whose local header is written at `at` to the directory."""
        self._mtime = modified // 1000
        name_length = int.from_bytes(header[26:28], "little")
        name = header[_LOCAL.size : _LOCAL.size + name_length]
        self._first = self._first or name
        offset = at - self._start - tar.BLOCK
        rest = struct.pack("<HHHHII", 0, 0, 0, 0, _MODE, offset)
        self._directory.append(
            b"%b%b%b%b%b" % (DIRECTORY, struct.pack("<H", _UNIX | _VERSION), header[4:28], rest, name)
        )

    def finish(self, tail: int) -> tuple[bytes, int]:
        """Fills in the header. Returns what belongs behind the entries, which end at `tail`, and how many
        bytes a larger pack with the same entries would save."""
        directory, count, begun = b"".join(self._directory), len(self._directory), self._start + tar.BLOCK
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), tail - begun, 0)
        size = tail - begun + len(directory) + len(end)
        self.header[:] = tar.tar_member_header(_name(self._first, count), size, mtime=self._mtime)
        fill = bytes(tar.padding(size))
        return b"%b%b%b" % (directory, end, fill), tar.BLOCK + len(end) + len(fill)


def _name(first: bytes, count: int) -> str:
    """Returns the name of a pack: that of its first object, and how many there are."""
    name = first.decode()
    if not name.isascii():
        name = quote(name, safe="/ !$&'()*+,;=:@~")
    ending = f".@{count}.zip"
    return name[: 100 - len(ending)] + ending


def is_pack(member: tar.TarMember) -> bool:
    """Returns True if a scanned member without a record of ours may be a pack."""
    return not member.pax and member.name.endswith(".zip") and member.size <= MAX_BYTES
