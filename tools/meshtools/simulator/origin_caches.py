"""OriginCaches: shards that come from an origin, and what nodes keep of them.

Law: every admission and eviction is decided by `SegmentPolicy`, which knows the order of this epoch and the
next, as nodes do. The origin is one queue that all nodes share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.origins.eviction.policy_api import SEGMENT_BYTES, EvictionSettings
from meshd.origins.eviction.segment_policy import SegmentPolicy

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy import int64

    from meshtools.simulator.scenario import Origin

_SEGMENTS = 64
_BUCKET = "data"


class OriginCaches:
    """The caches of `nodes` nodes. `size`: bytes of a shard. Times in seconds."""

    def __init__(self, origin: Origin, size: int, nodes: int) -> None:
        self._origin, self._size = origin, size
        capacity = max(1, int(origin.cache_bytes))
        segment = max(1, min(SEGMENT_BYTES, capacity // _SEGMENTS))
        settings = EvictionSettings(capacity, segment)
        self._policies = [SegmentPolicy(settings) for _ in range(nodes)]
        self._places: dict[str, dict[int, int]] = {}
        self._free = 0.0
        self.fetched_bytes = 0

    def __repr__(self) -> str:
        return f"<OriginCaches of {len(self._policies)} nodes>"

    def plan(self, name: str, shards: npt.NDArray[int64], owners: npt.NDArray[int64]) -> None:
        """Set what is read in this epoch and the next: shards in order, and the node that reads each."""
        places: dict[int, int] = {}
        for node in range(len(self._policies)):
            own = shards[owners == node].tolist()
            self._policies[node].plan(name, map(_item, own))
            for place, shard in enumerate(own, 1):
                places.setdefault(shard, place)  # of the epoch that comes first
        self._places[name] = places

    def fetch(self, name: str, node: int, shard: int, now: float) -> float:
        """Read a shard on a node for a plan; return when its bytes are there, which is `now` if they were
        cached."""
        policy = self._policies[node]
        policy.advance(name, self._places[name][shard])  # the policy decides by the use after this one
        if policy.decide(_item(shard), self._size).hit:
            return now
        self._free = max(now, self._free) + self._size / self._origin.bytes_per_second
        self.fetched_bytes += self._size
        return self._free + self._origin.request_seconds


def _item(shard: int) -> tuple[str, str]:
    return _BUCKET, f"shard-{shard:07}.tar"
