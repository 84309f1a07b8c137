"""Shards as bytes: which pieces make one, in any window of it. Here those of tars; TFRecords beside.

Law: sizes and ETags follow from the members' names, sizes and ETags; of a shard's bytes only those are worked
out that are asked for.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from meshwire.tars import BLOCK, END, member_header, padding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class SourceObject(NamedTuple):
    """A file of the source: an object, or the `size` bytes from `offset` of one whose file `name` they are.
    `modified` in ms since 1970.
    """

    key: str
    etag: str
    size: int
    modified: int = 0
    name: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shard: `length` bytes made here (`data`), from `offset` of an object, from `offset` of what
    a whole file is told as (`told`), or from `offset` of the masked CRC-32C of other pieces (`summed`)."""

    data: bytes = b""
    object: SourceObject | None = None
    offset: int = 0
    length: int = 0
    summed: tuple[Piece, ...] = ()
    told: str = ""


def made(data: bytes) -> Piece:
    return Piece(data, length=len(data))


def taken(item: SourceObject) -> Piece:
    """All of a file."""
    return Piece(object=item, offset=item.offset, length=item.size)


def cut(piece: Piece, at: int, first: int, end: int) -> Iterator[Piece]:
    """What of a piece that begins at `at` lies in [first, end)."""
    start, stop = max(first, at), min(end, at + piece.length)
    if start >= stop:
        return
    skip, length = start - at, stop - start
    if length == piece.length:
        yield piece
    elif piece.object is None and not piece.summed:
        yield Piece(piece.data[skip : skip + length], length=length)
    else:
        yield replace(piece, offset=piece.offset + skip, length=length)


def member_name(member: SourceObject, prefix: str) -> str:
    """A file's name in a shard: its key below the view's folder, or its name in the archive it is from."""
    return member.name or member.key[prefix.rfind("/") + 1 :].lstrip("/") or member.key


@dataclass(frozen=True)
class Shard:
    """One shard: `members` in order, in units (of one or several members) that begin at `starts`; `size` in
    bytes."""

    key: str
    members: tuple[SourceObject, ...]
    prefix: str
    starts: tuple[int, ...] = field(default=(), repr=False)
    size: int = 0

    content_type: ClassVar[str] = "application/octet-stream"

    @property
    def form(self) -> bytes:
        """What besides the members decides the bytes."""
        return b""

    @cached_property
    def etag(self) -> str:
        """Changes with any member; shaped like that of a multipart object, for no MD5 of it is known."""
        hasher = hashlib.sha256(self.form + f"{self.prefix}\0".encode())
        for member in self.members:
            hasher.update(f"{member.key}\0{member.etag}\0{member.size}\0".encode())
            if member.name:
                hasher.update(f"{member.name}\0{member.offset}\0".encode())
        return f"{hasher.hexdigest()[:32]}-{max(1, len(self.members))}"

    @cached_property
    def modified(self) -> int:
        """Of the newest member, in ms since 1970."""
        return max((member.modified for member in self.members), default=0)

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """The bytes [offset, offset + length) of the shard, in order."""
        end = min(offset + length, self.size)
        for number in range(max(0, bisect_right(self.starts, offset) - 1), len(self.starts)):
            at = self.starts[number]
            if at >= end:
                return
            for piece in self.unit(number):
                yield from cut(piece, at, offset, end)
                at += piece.length

    def unit(self, number: int) -> Iterable[Piece]:
        """All bytes from `starts[number]` to the next start."""
        raise NotImplementedError

    def of_others(self, members: Sequence[SourceObject]) -> Shard:
        """The same shard with other members in the places of these."""
        raise NotImplementedError


class TarShard(Shard):
    """A tar, its end mark included. A member is a unit, and so is the end."""

    content_type: ClassVar[str] = "application/x-tar"

    @classmethod
    def of(cls, key: str, members: Sequence[SourceObject], prefix: str) -> TarShard:
        sizes = [_member_size(member_name(member, prefix), member.size) for member in members]
        starts = tuple(itertools.accumulate(sizes, initial=0))
        return cls(key, tuple(members), prefix, starts, starts[-1] + len(END))

    def of_others(self, members: Sequence[SourceObject]) -> TarShard:
        return TarShard.of(self.key, members, self.prefix)

    def unit(self, number: int) -> Iterable[Piece]:
        if number == len(self.members):
            return (made(END),)
        member = self.members[number]
        header = member_header(member_name(member, self.prefix), member.size)
        return made(header), taken(member), made(bytes(padding(member.size)))


def _member_size(name: str, size: int) -> int:
    """Bytes of header, file and padding."""
    if len(name) <= 100 and size < 1 << 32 and name.isascii():
        return BLOCK + size + -size % BLOCK
    return len(member_header(name, size)) + size + padding(size)
