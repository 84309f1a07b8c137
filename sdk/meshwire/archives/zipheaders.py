"""The headers of zip archives whose files are stored as they are (PKWARE's APPNOTE 6.3, zip64 included).

Law: pure; the same files give the same bytes: no time but 1980, no owner, mode 0644. A file's checksum stands
in its local header; of one that is too large to be held until it is known, in a descriptor behind it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOCAL: Final = struct.Struct("<4s5H3L2H")  # §4.3.7
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")  # §4.3.12
_END64: Final = struct.Struct("<4sQ2H2L4Q")  # §4.3.14
_LOCATOR: Final = struct.Struct("<4sLQL")  # §4.3.15
_END: Final = struct.Struct("<4s4H2LH")  # §4.3.16
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIBED = 1 << 11, 1 << 3
_PLAIN, _ZIP64 = 20, 45  # versions needed
_UNIX: Final = 3 << 8
_MODE: Final = 0o100644 << 16
_DATE: Final = 0x21  # 1980-01-01
CRC_AT: Final = 14
"""Where in a local header the checksum stands."""


def local_header(name: str, size: int, *, described: bool) -> bytes:
    """Before a file of `size` bytes; its checksum is put in at CRC_AT unless it is `described` behind."""
    raw, large = name.encode(), size >= _FULL32
    flags = _UTF8 | (_DESCRIBED if described else 0)
    told = _FULL32 if large else 0 if described else size
    extra = struct.pack("<2H2Q", 1, 16, *((0, 0) if described else (size, size))) if large else b""
    version = _ZIP64 if large else _PLAIN
    return (
        _LOCAL.pack(b"PK\3\4", version, flags, 0, 0, _DATE, 0, told, told, len(raw), len(extra)) + raw + extra
    )


def descriptor(size: int, crc: int) -> bytes:
    """Behind a file whose header says nothing of it (§4.3.9)."""
    return struct.pack("<4sL2Q" if size >= _FULL32 else "<4s3L", b"PK\7\10", crc, size, size)


def central_directory(entries: Sequence[tuple[str, int, int, int, bool]], start: int) -> bytes:
    """The end of an archive: (name, size, checksum, offset of its header, described) of each file; `start` is
    where it begins."""
    parts = [_entry(*each) for each in entries]
    size, count = sum(map(len, parts)), len(parts)
    if count >= _FULL16 or start + size >= _FULL32:
        end = _END64.pack(
            b"PK\6\6", _END64.size - 12, _UNIX | _ZIP64, _ZIP64, 0, 0, count, count, size, start
        )
        parts += [end, _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)]
    told = min(count, _FULL16), min(count, _FULL16), min(size, _FULL32), min(start, _FULL32)
    return b"".join([*parts, _END.pack(b"PK\5\6", 0, 0, *told, 0)])


def _entry(name: str, size: int, crc: int, offset: int, described: bool) -> bytes:
    raw = name.encode()
    large = [size, size] if size >= _FULL32 else []
    large += [offset] if offset >= _FULL32 else []
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    flags = _UTF8 | (_DESCRIBED if described else 0)
    version = _ZIP64 if large else _PLAIN
    told = min(size, _FULL32), min(size, _FULL32)
    return (
        _ENTRY.pack(
            *(b"PK\1\2", _UNIX | _ZIP64, version, flags, 0, 0, _DATE, crc, *told),
            *(len(raw), len(extra), 0, 0, 0, _MODE, min(offset, _FULL32)),
        )
        + raw
        + extra
    )
