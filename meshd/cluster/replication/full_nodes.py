"""Full nodes: replicas that have recently rejected a write because their disks are full.

Law: a write to such a node that has at least as many bytes is rejected before its primary commits it, so
that it changes nothing. Smaller writes are attempted, and so are all writes after PAUSE, because there may be
room again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.rpc.peer_client import PeerRefusedError
from meshd.store.errors import NodeFullError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.util.clock import Clock
    from meshwire.cluster import Node

PAUSE: Final = 1.0
"""Seconds for which a rejection is remembered."""


class FullNodes:
    """The nodes that rejected a write within PAUSE, with the size of the smallest rejected write."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[str, tuple[float, int]] = {}

    def __repr__(self) -> str:
        return f"<FullNodes {sorted(self._refused)}>"

    def __bool__(self) -> bool:
        return bool(self._refused)

    def record(self, node_id: str, size: int) -> None:
        """Remember that a node has no room for `size` bytes."""
        self._refused[node_id] = (self._clock.monotonic() + PAUSE, min(size, self._smallest(node_id, size)))

    def reject(self, nodes: Iterable[Node], size: int) -> None:
        """Raise NodeFullError if one of the nodes has recently rejected a write of `size` bytes or fewer."""
        for node in nodes:
            if self._smallest(node.node_id, size + 1) <= size:
                raise nothing_changed(node.node_id)

    def _smallest(self, node_id: str, otherwise: int) -> int:
        until, size = self._refused.get(node_id, (0.0, 0))
        if until > self._clock.monotonic():
            return size
        self._refused.pop(node_id, None)
        return otherwise


def is_full(error: BaseException | None) -> bool:
    """Return whether the error says that a node's disks are full."""
    return isinstance(error, PeerRefusedError) and error.code == "InsufficientStorage"


def nothing_changed(node_id: str) -> NodeFullError:
    """Return the error of a write that was rejected before it was committed."""
    return NodeFullError(f"{_full(node_id)}. Nothing was changed.")


def outcome_unknown(node_id: str) -> NodeFullError:
    """Return the error of a write that its primary has committed and a replica has not."""
    return NodeFullError(f"{_full(node_id)}. The write may or may not have taken effect.")


def _full(node_id: str) -> str:
    return (
        f"There is no space left on the disks of node {node_id}, which this write needs: "
        "delete objects, or add a disk there"
    )
