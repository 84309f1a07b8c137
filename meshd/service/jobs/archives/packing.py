"""Files on their way into an archive: which bytes are made here, and where those that are read go.

Law: pure; the same files give the same bytes. Members have plain headers: no owner, no time, mode 0644.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshd.service.jobs.reading import GROUP, Piece
from meshwire.tars import BLOCK, END, member_header, padding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshwire.jobplans import SourceFile

_FILES: Final = 2000
_ZEROS: Final = bytes(BLOCK)


@dataclass(slots=True)
class Group:
    """A part of an archive, `size` bytes: `made` are put at their places, `pieces` read to theirs."""

    size: int = 0
    made: list[tuple[int, bytes]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def put(self, data: bytes) -> None:
        if data:
            self.made.append((self.size, data))
            self.size += len(data)

    def take(self, source: int, offset: int, length: int) -> None:
        if length:
            self.pieces.append(Piece(self.size, source, offset, length))
            self.size += length

    @property
    def full(self) -> bool:
        return self.size >= GROUP or len(self.pieces) >= _FILES


def tar_size(files: Iterable[SourceFile]) -> int:
    """Bytes of the tar of these files."""
    return len(END) + sum(_header_size(item) + item.size + padding(item.size) for item in files)


def tar_groups(files: Iterable[SourceFile]) -> Iterator[Group]:
    """The tar of these files, a few megabytes at a time."""
    group = Group()
    for item in files:
        group.put(member_header(item.name, item.size))
        taken = 0
        while taken < item.size:
            if group.full:
                yield group
                group = Group()
            length = min(item.size - taken, max(GROUP - group.size, BLOCK))
            group.take(item.source, item.offset + taken, length)
            taken += length
        group.put(_ZEROS[: padding(item.size)])
        if group.full:
            yield group
            group = Group()
    group.put(END)
    yield group


def _header_size(item: SourceFile) -> int:
    if len(item.name) <= 100 and item.size < 1 << 32 and item.name.isascii():
        return BLOCK
    return len(member_header(item.name, item.size))
