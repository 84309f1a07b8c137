"""The loader's arguments: which make sense, and how much memory follows from them.

Law: pure; an argument that makes no sense is a ConfigurationError with its name and what it should be.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.native import FieldSchema

DEFAULT_PREFETCH = 256 << 20
_FRAME_OVERHEAD = 16 << 10


def checked_batch(batch: int, world: int) -> int:
    """`global_batch`: a row for each rank at least."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ConfigurationError(
            f"global_batch={batch!r}: the rows of a step over all ranks, a number above 0"
        )
    if batch < world:
        raise ConfigurationError(f"global_batch={batch} is less than {world} ranks: some would get no row")
    return batch


def checked_connections(count: int) -> int:
    """`connections`: requests in flight."""
    if not 1 <= count <= 64:
        raise ConfigurationError(f"connections={count}: 1 to 64; 4 keep a 100 Gb/s link busy")
    return count


def takes_parts(rows_from: str) -> bool:
    """`rows_from`: whether nodes may be asked for their rows each."""
    if rows_from not in ("owners", "one"):
        raise ConfigurationError(f"rows_from={rows_from!r}: 'owners' or 'one'")
    return rows_from == "owners"


def frame_bytes(fields: Mapping[str, FieldSchema], rows: int) -> int:
    """Bytes of a frame of `rows`; 0 when a ragged field leaves them unknown."""
    total = _FRAME_OVERHEAD + 16 * rows
    for field in fields.values():
        if field.shape is None:
            return 0
        width = 2 if field.dtype == "bfloat16" else np.dtype(field.dtype).itemsize
        total += rows * prod(field.shape) * width
    return total


def arena_bytes(prefetch_bytes: int | None, slot: int) -> int:
    """`prefetch_bytes`, or what is taken without: four slots at least."""
    if prefetch_bytes is None:
        return max(DEFAULT_PREFETCH, 4 * slot)
    if prefetch_bytes < 1:
        raise ConfigurationError(f"prefetch_bytes={prefetch_bytes}: the arena's size in bytes, above 0")
    return prefetch_bytes
