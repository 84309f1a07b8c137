"""Tar files: the headers we write, and a scanner for untrusted tars (POSIX.1-2001 pax, ustar, GNU).

Law: pure; `scan_tar` reads only through the function it is given.
Invariant: work and memory are bounded by the real size of the headers; an inconsistent header raises
TarError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_PAX = 8 << 20  # a pax header or long name larger than this is corrupt or an attack
_OCTAL_SIZE_LIMIT = 8**11
_NAME_LIMIT = 100


class TarError(ValueError):
    """A tar that is corrupt, truncated or inconsistent. `offset`: start of the bad header."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(f"{message} (tar header at byte {offset})")
        self.offset = offset


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of a tar. Offsets in bytes from the start of the file; `start` is its first header block."""

    name: str
    size: int
    data_offset: int
    next_offset: int
    mtime: int
    type: str
    pax: Mapping[str, str] = field(default_factory=dict)
    start: int = 0


def padding(size: int) -> int:
    """Return the number of zero bytes needed after `size` bytes of data."""
    return -size % BLOCK


def pax_record(key: str, value: str) -> bytes:
    """Encode one pax extended record, `LENGTH KEY=VALUE\\n`, whose length includes itself."""
    body = f" {key}={value}\n".encode()
    length = len(body) + len(str(len(body)))
    if len(str(length)) != len(str(len(body))):
        length += 1
    return b"%d%b" % (length, body)


@lru_cache(maxsize=4096)
def _ustar_rest(size: int, mtime: int, typeflag: bytes) -> tuple[bytes, bytes, int]:
    """Return a header's bytes between name and checksum, the bytes after the checksum, and the sum of
    both."""
    octal = b"%011o\0" % size if size < _OCTAL_SIZE_LIMIT else b"\x80" + size.to_bytes(11, "big")
    middle = b"0000644\x000000000\x000000000\x00%b%011o\x00" % (
        octal,
        min(max(mtime, 0), _OCTAL_SIZE_LIMIT - 1),
    )
    end = (typeflag + bytes(100) + b"ustar\x0000").ljust(BLOCK - _NAME_LIMIT - len(middle) - 8, b"\0")
    return middle, end, sum(middle) + sum(end) + 8 * 32


def _ustar(name: bytes, size: int, mtime: int, typeflag: bytes) -> bytes:
    middle, end, total = _ustar_rest(size, mtime, typeflag)
    name = name[:_NAME_LIMIT]
    return b"%b%b%06o\0 %b" % (name.ljust(_NAME_LIMIT, b"\0"), middle, total + sum(name), end)


def _fill(room: int) -> bytes:
    """Return a comment record of exactly `room` bytes (0, or at least 12)."""
    if room == 0:
        return b""
    digits = len(str(room))
    return b"%d comment=%b\n" % (room, b" " * (room - digits - len(" comment=\n")))


def tar_member_header(
    name: str, size: int, *, mtime: int = 0, pax: Mapping[str, str] = {}, reserve: int | None = None
) -> bytes:
    """Return the header blocks of a member: an optional pax header, then ustar. The caller adds data and
    `padding`.

    `reserve`: the exact size of the result in bytes (a multiple of 512, at least 1536), filled up with a
    pax comment. Raises ValueError if the header does not fit into `reserve`.
    """
    raw = name.encode()
    records = b"".join([pax_record(key, value) for key, value in pax.items()])
    if len(raw) > _NAME_LIMIT or not name.isascii():
        records += pax_record("path", name)
    if size >= _OCTAL_SIZE_LIMIT:
        records += pax_record("size", str(size))
    if reserve is not None:
        room = reserve - 2 * BLOCK - len(records)
        if room < 0 or 0 < room < len("12 comment=\n"):
            raise ValueError(
                f"a tar header of {len(records)} pax bytes does not fit into {reserve} reserved bytes"
            )
        records += _fill(room)
    own = _ustar(raw, size, mtime, b"0")
    if not records:
        return own
    return b"%b%b%b%b" % (
        _ustar(b"PaxHeaders/" + raw[:80], len(records), mtime, b"x"),
        records,
        bytes(padding(len(records))),
        own,
    )


Reader = Callable[[int, int], bytes]

# Links, devices, directories: POSIX allows no data after them, whatever `size` says.
_DATALESS = frozenset("123456")
_MAX_GLOBAL_PAX = 64 << 10


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _cstring(raw: bytes) -> str:
    return _text(raw.split(b"\0", 1)[0])


def _number(raw: bytes, offset: int) -> int:
    """Decode octal text, or GNU's base-256 if the first byte has its high bit set.

    Negative numbers are rejected.
    """
    if raw[0] == 0x80:
        return int.from_bytes(raw[1:], "big")
    text = raw.strip(b" \0")
    if not text:
        return 0
    if text.strip(b"01234567"):
        raise TarError("a number field is neither octal nor base-256", offset)
    return int(text, 8)


def parse_pax(body: bytes, offset: int = 0) -> dict[str, str]:
    """Parse the records of a pax header's body. Raises TarError if a length is wrong."""
    records: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at] != 0:
        space = body.find(b" ", at, at + 9)
        digits = body[at:space]
        if space < 0 or not digits.isdigit():
            raise TarError("a pax record has no length", offset)
        stop = at + int(digits)
        equals = body.find(b"=", space, stop)
        if equals < 0 or stop > len(body) or body[stop - 1] != 0x0A:
            raise TarError("a pax record has a wrong length", offset)
        records[_text(body[space + 1 : equals])] = _text(body[equals + 1 : stop - 1])
        at = stop
    return records


def _check_block(block: bytes, offset: int) -> bytes:
    if len(block) != BLOCK:
        raise TarError("the file ends inside a header", offset)
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if _number(block[148:156], offset) != total:
        raise TarError("the header's checksum does not match", offset)
    return block


def _pax_integer(pax: Mapping[str, str], key: str, otherwise: int, offset: int) -> int:
    text = pax.get(key)
    if text is None:
        return otherwise
    whole = text.split(".", 1)[0].removeprefix("-")
    if not (whole.isascii() and whole.isdigit() and len(whole) < 20):
        raise TarError(f"pax {key} is not a number", offset)
    return -int(whole) if text.startswith("-") else int(whole)


def _name(block: bytes, pax: Mapping[str, str], long_name: str | None) -> str:
    if "path" in pax:
        return pax["path"]
    if long_name is not None:
        return long_name
    name = _cstring(block[:100])
    prefix = _cstring(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


class _Scanner:
    """Walks the headers of one tar; its state is what extended headers said about the next member."""

    def __init__(self, read: Reader, start: int, end: int) -> None:
        self.read, self.at, self.end = read, start, end
        self.shared: dict[str, str] = {}
        self.forget(start)

    def forget(self, start: int) -> None:
        self.start = start
        self.pax: dict[str, str] = {}
        self.long_name: str | None = None

    def body(self, size: int, limit: int) -> bytes:
        if size > limit:
            raise TarError(f"an extended header of {size} bytes is too large", self.at)
        if self.at + BLOCK + size > self.end:
            raise TarError("an extended header extends beyond the end of the file", self.at)
        raw = self.read(self.at + BLOCK, size)
        if len(raw) != size:
            raise TarError("the file ends inside an extended header", self.at)
        return raw

    def extended(self, kind: str, size: int) -> bool:
        """Process an extended header; return False if the header is a member's own."""
        if kind == "x":
            self.pax = parse_pax(self.body(size, MAX_PAX), self.at)
        elif kind == "g":
            self.shared = parse_pax(self.body(size, _MAX_GLOBAL_PAX), self.at)
        elif kind == "L":
            self.long_name = _cstring(self.body(size, MAX_PAX))
        elif kind == "K":
            self.body(size, MAX_PAX)
        else:
            return False
        self.at += BLOCK + size + padding(size)
        return True

    def member(self, block: bytes, kind: str, size: int) -> TarMember:
        pax = {**self.shared, **self.pax} if self.shared else self.pax
        if kind == "S" or any(key.startswith("GNU.sparse.") for key in pax):
            raise TarError("sparse members are not supported; write the tar without --sparse", self.at)
        size = 0 if kind in _DATALESS else _pax_integer(pax, "size", size, self.at)
        if size < 0:
            raise TarError("pax size is negative", self.at)
        data = self.at + BLOCK
        if data + size > self.end:
            raise TarError(f"a member of {size} bytes extends beyond the end of the file", self.at)
        mtime = _pax_integer(pax, "mtime", _number(block[136:148], self.at), self.at)
        after = data + size + padding(size)
        return TarMember(_name(block, pax, self.long_name), size, data, after, mtime, kind, pax, self.start)

    def __iter__(self) -> Iterator[TarMember]:
        while self.at < self.end:
            block = self.read(self.at, min(BLOCK, self.end - self.at))
            if not block.strip(b"\0"):
                return
            _check_block(block, self.at)
            kind = _cstring(block[156:157]) or "0"
            if self.extended(kind, _number(block[124:136], self.at)):
                continue
            member = self.member(block, kind, _number(block[124:136], self.at))
            yield member
            self.at = member.next_offset
            self.forget(self.at)


def scan_tar(read: Reader, start: int, end: int) -> Iterator[TarMember]:
    """Yield the members between byte `start` and byte `end` of a file, headers only; stops at the first
    zero block.

    `read(offset, length)` returns at most `length` bytes, fewer only at the end of the file. `type` is the
    type flag ("0" a file, "5" a directory, …). Raises TarError at the first header that is corrupt or
    inconsistent.
    """
    return iter(_Scanner(read, start, end))
