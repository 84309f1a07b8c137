"""Files on their way into a zip: stored, not compressed, so that each can be read where it lies.

Law: groups as a tar's, but checksums stand in headers before the files: they are put in when a group's bytes
are there, before it is sent. Invariant: memory is two groups, each of at most the largest file held whole.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from meshd.service.jobs.archives.packing import Group
from meshd.service.jobs.reading import GROUP
from meshwire.archives.zipheaders import CRC_AT, central_directory, descriptor, local_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshwire.jobplans import SourceFile

_HELD: Final = 8 << 20
"""Bytes of a file up to which its checksum is in its header."""


class ZipPacking:
    """One archive, made once, in order: take a group, fill it, `seal` it, take the next."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._crcs = [0] * len(files)
        self._parts: list[tuple[int, int, int]] = []  # (file, place, bytes) of the present group
        self._marks: list[tuple[int, int]] = []  # (file, place of its checksum)

    def __repr__(self) -> str:
        return f"<ZipPacking {len(self._files)} files>"

    def groups(self) -> Iterator[Group]:
        group, before = Group(), 0
        entries = []
        for number, item in enumerate(self._files):
            described = item.size > _HELD
            if group.full or (group.size and not described and group.size + item.size > _HELD):
                before += group.size
                yield group
                group = Group()
            offset = before + group.size
            if not described:
                self._marks.append((number, group.size + CRC_AT))
            group.put(local_header(item.name, item.size, described=described))
            taken = 0
            while taken < item.size:
                length = item.size - taken if not described else min(item.size - taken, GROUP)
                self._parts.append((number, group.size, length))
                group.take(item.source, item.offset + taken, length)
                taken += length
                if described:
                    before += group.size
                    yield group
                    group = Group()
            if described:
                group.put(descriptor(item.size, self._crcs[number]))
            entries.append((number, offset, described))
        before += group.size
        yield group
        last = Group()
        files = ((self._files[number], number, at, described) for number, at, described in entries)
        told = [(item.name, item.size, self._crcs[n], at, described) for item, n, at, described in files]
        last.put(central_directory(told, before))
        yield last

    def seal(self, buffer: memoryview) -> None:
        """The group that was given last has its bytes (blocking)."""
        for number, at, length in self._parts:
            self._crcs[number] = zlib.crc32(buffer[at : at + length], self._crcs[number])
        for number, at in self._marks:
            buffer[at : at + 4] = self._crcs[number].to_bytes(4, "little")
        self._parts, self._marks = [], []
