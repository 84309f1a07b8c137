"""The shuffle orders and length buckets that a loader accepts, as values.

Law: these values only name an order; `meshwire` computes the permutation.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

from meshsdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shuffles the shards, then the samples within windows of `shards` shards.

    Every shard is read once and sequentially. Pass it as `shuffle=mesh.Blocks()` to a Loader.
    """

    shards: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, SupportsIndex) or self.shards < 1:
            raise ConfigurationError(
                f"Blocks(shards={self.shards!r}): expected the shards per window, an integer of at least 1"
            )


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Groups rows of similar length into batches.

    Within each window of batches, rows are sorted by length, and the batches are then put in random order.

    Attributes:
        field: the field whose stored size in bytes is the length of a row.
        window: number of batches that are sorted together.
        rows: rows of a batch. Default: the global batch of the loader.
    """

    field: str
    window: int = 64
    rows: int | None = None

    def document(self, batch: int | None) -> dict[str, Any]:
        """Return the `buckets` value of a plan spec. Raises ConfigurationError without a batch size."""
        rows = batch if self.rows is None else self.rows
        if rows is None:
            raise ConfigurationError("LengthBuckets needs the rows of a batch: pass rows=, or use a Loader")
        return {"field": self.field, "rows": rows, "window": self.window}


def buckets_spec(buckets: LengthBuckets | None, batch: int | None) -> dict[str, Any] | None:
    """Return the `buckets` value of a plan spec. Raises ConfigurationError for another type."""
    if buckets is None:
        return None
    if not isinstance(buckets, LengthBuckets):
        raise ConfigurationError(f"buckets={buckets!r}: pass mesh.LengthBuckets('text')")
    return buckets.document(batch)


Shuffle = bool | Literal["global"] | Blocks


def shuffle_spec(shuffle: Shuffle) -> dict[str, Any]:
    """Return the `shuffle` value of a plan spec; True and "global" are the same.

    Raises ConfigurationError for anything else than a `Shuffle`.
    """
    if isinstance(shuffle, Blocks):
        return {"kind": "blocks", "shards": operator.index(shuffle.shards)}
    if shuffle is True or shuffle == "global":
        return {"kind": "global"}
    if shuffle is False:
        return {"kind": "none"}
    raise ConfigurationError(f"shuffle={shuffle!r}: use True, 'global', mesh.Blocks(shards=64) or False")
