"""Shuffle orders and length buckets a loader accepts, as values.

Law: names only; `meshwire` computes the permutation.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

from meshsdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shuffle shards, then inside windows of `shards` shards: every shard is read once and sequentially."""

    shards: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, SupportsIndex) or self.shards < 1:
            raise ConfigurationError(f"Blocks(shards={self.shards!r}): at least one shard a window")


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Batches of rows of like lengths: of `window` batches at a time the rows are sorted by the stored bytes
    of `field`, and the batches put in random order. `rows`: of a batch; left out, the loader's global batch.
    """

    field: str
    window: int = 64
    rows: int | None = None

    def document(self, batch: int | None) -> dict[str, Any]:
        """The spec's `buckets`."""
        rows = batch if self.rows is None else self.rows
        if rows is None:
            raise ConfigurationError("LengthBuckets: how many rows is a batch? Give rows=, or use a Loader")
        return {"field": self.field, "rows": rows, "window": self.window}


def buckets_spec(buckets: LengthBuckets | None, batch: int | None) -> dict[str, Any] | None:
    """The spec's `buckets`."""
    if buckets is None:
        return None
    if not isinstance(buckets, LengthBuckets):
        raise ConfigurationError(f"buckets={buckets!r}: give mesh.LengthBuckets('text')")
    return buckets.document(batch)


Shuffle = bool | Literal["global"] | Blocks


def shuffle_spec(shuffle: Shuffle) -> dict[str, Any]:
    """The spec's `shuffle` object; True and "global" are the same."""
    if isinstance(shuffle, Blocks):
        return {"kind": "blocks", "shards": operator.index(shuffle.shards)}
    if shuffle is True or shuffle == "global":
        return {"kind": "global"}
    if shuffle is False:
        return {"kind": "none"}
    raise ConfigurationError(f"shuffle={shuffle!r}: use True, 'global', mesh.Blocks(shards=64) or False")
