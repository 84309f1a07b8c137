"""What the pool and a transform process say to each other: one request a slice of rows, one reply.

Law: arrays of plain values (msgspec, JSON on the wire); pixels never travel here. A request carries the
frame's memfd and the connection's progress file; a reply carries one scratch memfd when fields are ragged.
Replies come in the order of the requests.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Literal, cast

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.transform.reading import Piece

_PROGRESS = struct.Struct("=qq")
FailureKind = Literal["bad", "op", "read", "damaged"]


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row: its number in the frame, its epoch position, and for each field the pieces of its bytes.

    A piece is (index into the request's `paths`, offset, length), in bytes, and the crc32c if it is known;
    several when extents are split. `partner`: the pieces of the row at position ^ 1, when the plan mixes the
    two.
    """

    row: int
    position: int
    sources: tuple[tuple[tuple[int, ...], ...], ...]
    partner: tuple[tuple[tuple[int, ...], ...], ...] = ()


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    """`program_text` only when this connection has not had `program` yet. `targets`, one a field in order of
    name, then one a column that mixing adds: (offset of its tensor in the frame, its number of rows), or
    None for a ragged field. `assets`: the digest of each asset of the program and the pieces it lies in.
    `last`: a process died on the row already.
    """

    number: int
    program: str
    program_text: str
    epoch: int
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    paths: tuple[str, ...]
    rows: tuple[Row, ...]
    assets: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    last: bool = False

    def places(self, pieces: Iterable[tuple[int, ...]]) -> list[Piece]:
        """Pieces with their paths, as they are read."""
        paths = self.paths
        return [cast("Piece", (paths[path], *place)) for path, *place in pieces]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A row that was not rendered. `bad`: its data; `op`: a defect of the op; `read`: its bytes were not
    there; `damaged`: they are not those that were stored. `partner`: for what the row is that it was to be
    mixed with.
    """

    row: int
    field: int
    kind: FailureKind
    op: str
    message: str
    partner: bool = False


class RaggedColumn(msgspec.Struct, frozen=True, array_like=True):
    """Of one ragged field: `lengths` in bytes and `shapes`, one a rendered row; bytes lie in the scratch
    file.
    """

    field: int
    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


class OpUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one op (or several fused) did for a slice: `calls`, those that failed among them; seconds; bytes
    of the values it took and made.
    """

    op: str
    calls: int
    failures: int
    seconds: float
    bytes_in: int
    bytes_out: int


class RenderReply(msgspec.Struct, frozen=True, array_like=True):
    """`rendered`: the rows that succeeded; `ragged`: their ragged fields, one after the other in the scratch;
    `sums`: for each fixed field in order of name, the crc32c of each of those rows; `ops`: use by op;
    `reading`: of `seconds`, those spent on source bytes.

    A slice may end early: rows neither rendered nor failed are to be asked for again.
    """

    number: int
    rendered: tuple[int, ...]
    failures: tuple[Failure, ...]
    ragged: tuple[RaggedColumn, ...]
    sums: tuple[tuple[int, ...], ...]
    seconds: float
    ops: tuple[OpUse, ...] = ()
    reading: float = 0.0


def write_progress(fd: int, number: int, row: int) -> None:
    """Note in the file that `row` of request `number` is begun: what is blamed if the process dies now."""
    os.pwrite(fd, _PROGRESS.pack(number, row), 0)


def read_progress(fd: int) -> tuple[int, int]:
    """(request number, row) begun last; (-1, -1) when none was."""
    data = os.pread(fd, _PROGRESS.size, 0)
    return _PROGRESS.unpack(data) if len(data) == _PROGRESS.size else (-1, -1)
