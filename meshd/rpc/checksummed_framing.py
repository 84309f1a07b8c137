"""Framing of bodies between nodes: pieces with length and crc32c, and an explicit end marker.

Wire format: u32 length and u32 crc32c, big-endian, then the piece; length 0 marks the end. This module does
no I/O. A truncated or corrupted body never looks complete.
"""

from __future__ import annotations

import struct

from awscrt import checksums

from meshd.errors import MeshdError

_HEADER = struct.Struct("!II")
MAX_PIECE_BYTES = 4 << 20
END_MARKER = _HEADER.pack(0, 0)


class BodyFramingError(MeshdError):
    """A body from another node was cut, or does not match its checksums."""


def piece_header(piece: bytes | bytearray | memoryview) -> bytes:
    """Return the header of a piece (1 to MAX_PIECE_BYTES bytes); the piece follows it."""
    return _HEADER.pack(len(piece), checksums.crc32c(piece))


def frame_body(body: bytes) -> bytes:
    """Return a whole body, framed."""
    parts = []
    for start in range(0, len(body), MAX_PIECE_BYTES):
        piece = body[start : start + MAX_PIECE_BYTES]
        parts += [piece_header(piece), piece]
    return b"".join([*parts, END_MARKER])


class FrameDecoder:
    """Decodes bytes as they arrive into complete pieces; `done` after the end marker."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._length = self._crc = 0
        self.done = False

    def __repr__(self) -> str:
        return f"<FrameDecoder {len(self._held)} bytes held{', done' if self.done else ''}>"

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces that are complete now. Raises BodyFramingError."""
        self._held += data
        found: list[bytes] = []
        while True:
            if not self._length:
                if len(self._held) < _HEADER.size:
                    return found
                self._begin()
                if self.done:
                    return found
            if len(self._held) < self._length:
                return found
            found.append(self._take())

    def finish(self) -> None:
        """Raise BodyFramingError unless the end marker has arrived."""
        if not self.done:
            raise BodyFramingError("a body between nodes was cut")

    def _begin(self) -> None:
        if self.done:
            raise BodyFramingError("a body between nodes continues after its end marker")
        self._length, self._crc = _HEADER.unpack_from(self._held)
        del self._held[: _HEADER.size]
        if not self._length:
            self.done = True
            if self._held or self._crc:
                raise BodyFramingError("a body between nodes continues after its end marker")
        if self._length > MAX_PIECE_BYTES:
            raise BodyFramingError(
                f"a piece of a body between nodes has {self._length} bytes; the limit is {MAX_PIECE_BYTES}"
            )

    def _take(self) -> bytes:
        with memoryview(self._held) as view:
            piece = bytes(view[: self._length])
        del self._held[: self._length]
        if checksums.crc32c(piece) != self._crc:
            raise BodyFramingError("a piece of a body between nodes does not match its checksum")
        self._length = 0
        return piece
