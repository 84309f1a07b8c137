"""Renderer: the protocol between frame assembly and whatever renders rows (the transform pool, or a test).

Law: assembly and transform never import each other; they share only this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

Pieces = tuple[tuple[str, int, int] | tuple[str, int, int, int], ...]
"""(path, offset, length), in bytes: where the bytes of one field lie; a fourth number is their crc32c."""


AssetPlace = tuple[str, Pieces]
"""(sha256 in hex, where the bytes lie)."""

UNREADABLE_KINDS: Final = frozenset({"read", "damaged"})
"""Kinds of failure after which the index is asked once more where the bytes lie."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row to render: its number in the frame, its epoch position, and the pieces of each bytes field;
    `partner`: those of the row at position ^ 1, when the plan mixes the two and there is one.
    """

    row: int
    position: int
    sources: tuple[Pieces, ...]
    partner: tuple[Pieces, ...] = ()


class RowFailure(Protocol):
    """`kind`: "bad" (the data), "op" (a defect of the op), "read" (the bytes were not there) or "damaged"
    (they are not those that were stored). `partner`: for what the row's partner is.
    """

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
    """Of one ragged field (its number): bytes and shape of each row, one after the other in a scratch
    file.
    """

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
    """crc32c of rows that are in the frame: `columns`, one a fixed field in order of name, one value a
    row.
    """

    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def columns(self) -> Sequence[tuple[int, ...]]: ...


class Rendered(Protocol):
    """The outcome of all rows asked for; `close` releases the scratch files. `seconds` of the processes, of
    these `reading` source bytes."""

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
        """`rows` are RowWork, `assets` what the program's ops are built with. `targets`: for each field in
        order of name, then each column that mixing adds, (offset of its tensor, number of rows in it), or
        None for a ragged one. `account`: with whose share of the processes.
        """
        ...
