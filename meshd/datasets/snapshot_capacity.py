"""Limits the number of samples of a snapshot to what fits into free memory.

Law: the limit is checked while files are indexed, before samples are assembled. A small packed file can
hold very many samples, and server-side copies of it cost its owner nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_BYTES: Final = 96
"""Bytes of memory per sample while its snapshot is created, without its fields."""
FIELD_BYTES: Final = 64
"""Bytes of memory per field of a sample."""
LISTED_BYTES: Final = 300
"""Bytes of memory per object of a source while it is listed and its snapshot created."""
_SHARE: Final = 2  # a snapshot may take one of so many parts of the free memory


class SnapshotCapacity:
    """Limits snapshots, for a worker. `free` returns the bytes of free memory, None if unknown."""

    def __init__(self, free: Callable[[], int | None] = lambda: None) -> None:
        self._free = free

    def __repr__(self) -> str:
        return f"<SnapshotCapacity {self.max_samples(1)}>"

    def max_samples(self, fields: int) -> int | None:
        """Return how many samples of so many fields fit into memory; None if unknown."""
        free = self._free()
        return None if free is None else free // _SHARE // (SAMPLE_BYTES + FIELD_BYTES * fields)

    def require_room(self, samples: int, fields: int, source: object) -> None:
        """Raises BatchError TooLarge if the samples do not fit."""
        most = self.max_samples(fields)
        if most is not None and samples > most:
            raise BatchError(
                "TooLarge",
                f"{source} has at least {samples} samples; the free memory of this node is enough for {most}",
                help="split the source into several folders, or use a node with more memory",
            )

    def require_room_to_list(self, objects: int, source: object) -> None:
        """Raises BatchError TooLarge if the objects of a source do not fit."""
        free = self._free()
        if free is not None and objects * LISTED_BYTES > free // _SHARE:
            raise BatchError(
                "TooLarge",
                f"{source} has at least {objects} objects; the free memory of this node is enough for "
                f"{free // _SHARE // LISTED_BYTES}",
                help="split the source into several folders, pack its objects into shards (mesh shard), or "
                "use a node with more memory",
            )
