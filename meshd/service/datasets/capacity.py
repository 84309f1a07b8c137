"""How many samples a snapshot may have on this node: as many as fit in the memory that is free.

Law: decided while files are indexed, before their samples are put together. A small file, above all a packed
one, can hold very many samples, and a server-side copy of it costs its owner nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.assembly.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_BYTES: Final = 96
"""Bytes of memory that a sample takes while its snapshot is made, without its fields."""
FIELD_BYTES: Final = 64
"""Bytes of memory for each of its fields."""
_SHARE: Final = 2  # of the free memory that one snapshot may take: a half


class SnapshotCapacity:
    """One a worker. `free` gives the bytes of memory that may still be taken, None where nobody knows."""

    def __init__(self, free: Callable[[], int | None] = lambda: None) -> None:
        self._free = free

    def __repr__(self) -> str:
        return f"<SnapshotCapacity {self.most(1)}>"

    def most(self, fields: int) -> int | None:
        """Samples of so many fields that fit; None where nobody knows."""
        free = self._free()
        return None if free is None else free // _SHARE // (SAMPLE_BYTES + FIELD_BYTES * fields)

    def require(self, samples: int, fields: int, source: object) -> None:
        """Raises BatchError TooLarge for more than fit."""
        most = self.most(fields)
        if most is not None and samples > most:
            raise BatchError(
                "TooLarge",
                f"{source} has at least {samples} samples; the free memory of this node suffices for {most}",
                help="split the source into several folders, or use a node with more memory",
            )
