"""Length buckets: an order in which the rows of a batch are about equally long, so that little is padding.

Law: a pure function of (order, lengths, seed, epoch), any position directly. It moves samples within a pool
of positions only, so an epoch holds what it held. Invariant: no row of a run is longer than any of the next
longer run of its pool; runs stand in random order, and so do the rows in each.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.documents import PlanError, checked_integer, checked_object, checked_text, required
from meshwire.permutations import Feistel, checked_positions
from meshwire.randomness import derive_key, mix64_many

if TYPE_CHECKING:
    from meshwire.permutations import Indices, Order

MAX_POOL = 1 << 18
_RUNS, _ROWS = 0x72756E73, 0x726F7773  # what a key is used for, as in `permutations`
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Buckets:
    """Runs of `rows` positions, the rows of a global batch; a pool has `window` of them. `field`: whose
    stored bytes are the length.
    """

    field: str
    rows: int
    window: int

    @property
    def pool(self) -> int:
        return self.rows * self.window


def parse_buckets(value: Any, path: str = "buckets") -> Buckets:
    """Raises PlanError with the path of the bad field."""
    document = checked_object(value, path, ("field", "rows", "window"))
    found = Buckets(
        checked_text(required(document, "field", path), f"{path}.field", at_most=100),
        checked_integer(required(document, "rows", path), f"{path}.rows", 1, MAX_POOL),
        checked_integer(required(document, "window", path), f"{path}.window", 2, MAX_POOL),
    )
    if found.pool > MAX_POOL:
        raise PlanError(f"{path}.window", f"{found.pool} positions a pool; at most {MAX_POOL} are sorted")
    return found


def buckets_document(buckets: Buckets) -> dict[str, Any]:
    """As plain JSON values; `parse_buckets` gives it back."""
    return {"field": buckets.field, "rows": buckets.rows, "window": buckets.window}


class BucketOrder:
    """The epoch of `order`, its pools sorted. `lengths`: of every sample, int64."""

    __slots__ = ("_buckets", "_key", "_lengths", "_order", "_pools", "n")

    def __init__(self, order: Order, lengths: Indices, buckets: Buckets, seed: int, epoch: int) -> None:
        self.n = order.n
        self._order, self._lengths, self._buckets = order, lengths, buckets
        self._key = derive_key(_RUNS, seed, epoch)
        self._pools: OrderedDict[int, Indices] = OrderedDict()

    def one(self, position: int) -> int:
        """The sample at a position. Raises IndexError outside 0…n−1."""
        return int(self.many(np.array([position], dtype=np.int64))[0])

    def many(self, positions: Indices) -> Indices:
        """The samples at positions (int64[k] → int64[k]). Raises IndexError if any lies outside 0…n−1."""
        positions = checked_positions(positions, self.n)
        pools, places = np.divmod(positions, self._buckets.pool)
        samples = np.empty_like(positions)
        for number in np.unique(pools).tolist():
            rows = pools == number
            samples[rows] = self._pool(number)[places[rows]]
        return samples

    def _pool(self, number: int) -> Indices:
        found = self._pools.get(number)
        if found is None:
            found = self._pools[number] = self._sorted(number)
            if len(self._pools) > _KEPT:
                self._pools.popitem(last=False)
        return found

    def _sorted(self, number: int) -> Indices:
        """A pool's samples: by length, cut into runs; whole runs in random order, what is over stays last."""
        first, width = number * self._buckets.pool, self._buckets.rows
        samples = self._order.many(np.arange(first, min(first + self._buckets.pool, self.n)))
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        places = np.arange(samples.size)
        key, whole = derive_key(self._key, number), samples.size // width
        turns = np.append(Feistel(whole, key).many(np.arange(whole)), whole)
        drawn = mix64_many(places.astype(np.uint64) + np.uint64(derive_key(_ROWS, key)))
        laid: Indices = samples[np.lexsort((drawn, turns[places // width]))]
        return laid

    def __repr__(self) -> str:
        return f"BucketOrder({self._order!r}, {self._buckets!r})"
