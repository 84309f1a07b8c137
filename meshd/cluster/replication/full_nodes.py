"""Full nodes: replicas that have recently rejected a write because their disks, or their index, are full.

Law: a write to such a node that has at least as many bytes is rejected before its primary commits it, so
that it changes nothing. Smaller writes are attempted, and so are all writes after PAUSE, because there may be
room again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.rpc.peer_client import PeerRefusedError
from meshd.store.errors import INDEX_FULL, INDEX_MAP_FULL, IndexFullError, NodeFullError
from meshwire.errors import CODES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.util.clock import Clock
    from meshwire.cluster import Node

PAUSE: Final = 1.0
"""Seconds for which a rejection is remembered."""
OWN_TEXTS: Final = frozenset({CODES["InsufficientStorage"].message, INDEX_FULL, INDEX_MAP_FULL})
"""What a node that is full says of itself, and not of a replica."""
_NOTHING_CHANGED: Final = "Nothing was changed."


class _Refusal(NamedTuple):
    until: float  # monotonic
    size: int  # of the smallest write that was rejected
    text: str


class FullNodes:
    """The nodes that rejected a write within PAUSE, with the size of the smallest rejected write."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[str, _Refusal] = {}

    def __repr__(self) -> str:
        return f"<FullNodes {sorted(self._refused)}>"

    def __bool__(self) -> bool:
        return bool(self._refused)

    def record(self, node_id: str, size: int, why: BaseException | None) -> None:
        """Remember that a node has no room for `size` bytes. `why`: what it answered."""
        if (known := self._refusal_of(node_id)) is not None:
            size = min(size, known.size)
        self._refused[node_id] = _Refusal(self._clock.monotonic() + PAUSE, size, _full(node_id, why))

    def reject(self, nodes: Iterable[Node], size: int) -> None:
        """Raise NodeFullError if one of the nodes has recently rejected a write of `size` bytes or fewer."""
        for node in nodes:
            known = self._refusal_of(node.node_id)
            if known is not None and known.size <= size:
                raise NodeFullError(f"{known.text}. {_NOTHING_CHANGED}")

    def _refusal_of(self, node_id: str) -> _Refusal | None:
        known = self._refused.get(node_id)
        if known is not None and known.until <= self._clock.monotonic():
            del self._refused[node_id]
            return None
        return known


def is_full(error: BaseException | None) -> bool:
    """Return whether the error says that a node's disks, or the file system of its index, are full."""
    return isinstance(error, PeerRefusedError) and error.code == "InsufficientStorage"


def nothing_changed(node_id: str, why: BaseException | None) -> NodeFullError:
    """Return the error of a write that was rejected before it was committed. `why`: what the node raised, or
    answered."""
    return NodeFullError(f"{_full(node_id, why)}. {_NOTHING_CHANGED}")


def outcome_unknown(node_id: str, why: BaseException | None) -> NodeFullError:
    """Return the error of a write that its primary has committed and a replica has not."""
    return NodeFullError(f"{_full(node_id, why)}. The write may or may not have taken effect.")


def _full(node_id: str, why: BaseException | None) -> str:
    told = why.told if isinstance(why, IndexFullError) else getattr(why, "message", "")
    if told == INDEX_MAP_FULL:
        return (
            f"The index of node {node_id}, which this write needs, has reached its limit, the setting "
            "`index-map`: set a higher one there and restart that node, or delete objects"
        )
    if told == INDEX_FULL:
        return (
            f"There is no space left on the file system of the index (`--index-dir`) of node {node_id}, "
            "which this write needs: free space there, or enlarge it; deleting objects does not help"
        )
    return (
        f"There is no space left on the disks of node {node_id}, which this write needs: "
        "delete objects, or add a disk there"
    )
