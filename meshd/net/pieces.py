"""Bodies between nodes: pieces, each with its length and its crc32c, and an end that says so.

On the wire: length u32 and crc32c u32, big-endian, then the piece; a length of 0 is the end.
Law: no I/O. Invariant: a body that was cut, or changed on the way, never looks whole.
"""

from __future__ import annotations

import struct

from awscrt import checksums

from meshd.errors import MeshdError

_HEADER = struct.Struct("!II")
LARGEST = 4 << 20
END = _HEADER.pack(0, 0)


class PieceError(MeshdError):
    """A body between nodes came broken: cut, or with bytes that are not those that were sent."""


def framed(piece: bytes | bytearray | memoryview) -> bytes:
    """What announces a piece (not empty, at most LARGEST bytes); the piece follows it."""
    return _HEADER.pack(len(piece), checksums.crc32c(piece))


def whole(body: bytes) -> bytes:
    """A whole body, framed."""
    parts = []
    for start in range(0, len(body), LARGEST):
        piece = body[start : start + LARGEST]
        parts += [framed(piece), piece]
    return b"".join([*parts, END])


class Unframer:
    """Takes what arrives, gives the pieces that are whole; `done` after the end."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._length = self._crc = 0
        self.done = False

    def __repr__(self) -> str:
        return f"<Unframer {len(self._held)} bytes held{', done' if self.done else ''}>"

    def feed(self, data: bytes) -> list[bytes]:
        """Raises PieceError."""
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
        """Raises PieceError unless the end came."""
        if not self.done:
            raise PieceError("a body between nodes was cut")

    def _begin(self) -> None:
        if self.done:
            raise PieceError("a body between nodes goes on behind its end")
        self._length, self._crc = _HEADER.unpack_from(self._held)
        del self._held[: _HEADER.size]
        if not self._length:
            self.done = True
            if self._held or self._crc:
                raise PieceError("a body between nodes goes on behind its end")
        if self._length > LARGEST:
            raise PieceError(f"a piece of {self._length} bytes; {LARGEST} are possible")

    def _take(self) -> bytes:
        with memoryview(self._held) as view:
            piece = bytes(view[: self._length])
        del self._held[: self._length]
        if checksums.crc32c(piece) != self._crc:
            raise PieceError("a piece between nodes does not have the checksum it was sent with")
        self._length = 0
        return piece
