"""Renderer: the protocol between frame assembly and whatever renders rows (the transform pool, or a test).

Law: assembly and transform never import each other; they share only this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

Pieces = tuple[tuple[str, int, int] | tuple[str, int, int, int], ...]
"""(path, offset, length) in bytes for each piece of a field; a fourth number is its crc32c."""


AssetPlace = tuple[str, Pieces]
"""(sha256 in hex, the pieces that hold the bytes)."""

UNREADABLE_KINDS: Final = frozenset({"read", "damaged"})
"""Kinds of failure after which the location of the bytes is looked up once more."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row to render: its number in the frame, its epoch position, and the pieces of each bytes field;
    `partner`: those of the row at position ^ 1, if the plan mixes them and it exists."""

    row: int
    position: int
    sources: tuple[Pieces, ...]
    partner: tuple[Pieces, ...] = ()


class RowFailure(Protocol):
    """A row that could not be rendered. `kind`: "bad" (the data), "op" (a defect of the op), "read" (the
    bytes were missing) or "damaged" (they differ from those stored). `partner`: the fault is in the partner
    row."""

    @property
    def row(self) -> int: ...
    @property
    def field(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def partner(self) -> bool: ...


class RaggedColumn(Protocol):
    """Bytes and shape of each row of one ragged field (by number), consecutive in a scratch file."""

    @property
    def field(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...


class RaggedPart(Protocol):
    """`rows` of ragged data in the scratch file `fd`: all of the first column, then all of the second, …"""

    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> Sequence[RaggedColumn]: ...
    @property
    def fd(self) -> int: ...


class RowChecksums(Protocol):
    """crc32c of rows that are in the frame. `columns`: one per fixed field in order of name, with one value
    per row."""

    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> Sequence[tuple[int, ...]]: ...


class Rendered(Protocol):
    """The result for all requested rows; `close` releases the scratch files. `seconds`: process time in all;
    `reading`: the part of it spent reading source bytes."""

    @property
    def failures(self) -> Sequence[RowFailure]: ...
    @property
    def parts(self) -> Sequence[RaggedPart]: ...
    @property
    def checksums(self) -> Sequence[RowChecksums]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def reading(self) -> float: ...
    def close(self) -> None: ...


class Renderer(Protocol):
    """Renders rows into a frame in shared memory."""

    async def render(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[Any],
        *,
        frame_fd: int,
        frame_bytes: int,
        targets: Sequence[tuple[int, int] | None],
        assets: Sequence[AssetPlace] = (),
        account: str = "",
    ) -> Rendered:
        """Renders rows. `rows` are RowWork, `assets` those that the program's ops are built with. `targets`:
        for each field in order of name, then for each column that mixing adds, (offset of its tensor, number
        of its rows), or None for a ragged field. `account`: the tenant whose share of the processes is used.
        """
        ...
