"""When a request that was refused with 503 is worth repeating: the `Retry-After` of one process.

Law: an estimate from what this process knows of leases, never a promise; at least a second. A node that stays
silent is marked `away` when its lease has run out, at the latest a lease and `Looking`'s last second after it
fell silent; then the others answer for it. A node without a lease of its own asks for it every quarter lease.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from meshd.kit.clock import Clock
    from meshwire.cluster import ClusterMap

_SOON: Final = 1  # second: a change of the map that is under way, or room for a request
_LAST_LOOK: Final = 1.0
_GONE: Final = ("away", "down")


class RetryAfter:
    """`lease`: seconds for which a node's lease holds without renewal."""

    def __init__(self, lease: float, clock: Clock) -> None:
        self._lease, self._clock = lease, clock
        self._silent: dict[
            str, tuple[float, float]
        ] = {}  # of each node: the first and the last time in a row

    def __repr__(self) -> str:
        return f"<RetryAfter, silent: {sorted(self._silent)}>"

    @property
    def lease(self) -> int:
        """A whole lease in seconds."""
        return max(_SOON, ceil(self._lease))

    def note_silence(self, node_id: str) -> None:
        """A node did not answer. Silences less than a lease apart are one."""
        now = self._clock.monotonic()
        first, last = self._silent.get(node_id, (now, now))
        self._silent[node_id] = (first if now - last <= self._lease else now, now)

    def seconds(self, cluster: ClusterMap, node_id: str, *, sure: bool) -> int:
        """For requests to node `node_id`; `sure`: it holds its lease."""
        me = cluster.node(node_id)
        if not sure or me is None or me.state in _GONE:
            return max(_SOON, ceil(self._lease / 4))
        now = self._clock.monotonic()
        present = {node.node_id for node in cluster.nodes if node.state not in _GONE}
        self._silent = {
            name: (first, last)
            for name, (first, last) in self._silent.items()
            if name in present and now - last <= self._lease
        }
        return max([_SOON, *(self._until_marked(first, now) for first, _ in self._silent.values())])

    def _until_marked(self, silent_since: float, now: float) -> int:
        """A whole lease again once that time is over: the control store does not answer, or the node renews
        its lease and cannot be reached from here."""
        left = silent_since + self._lease + _LAST_LOOK - now
        return ceil(left) if left > 0 else self.lease
