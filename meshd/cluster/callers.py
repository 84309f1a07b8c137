"""Whether whoever asked for a write may still wait for it.

A node that stands still, or is cut off, is marked away, and what was asked of it or through it is given up:
the caller was told that nobody knows, has asked again elsewhere, and has written more since. When the node
goes on it finds the old request as it left it, in a handler or unread in a socket. Carried out now it would
replace what was acknowledged in the meantime.

Law: a write is refused when its node, or the one that passed it on, was marked away after the version of the
map by which it was asked for. What is not asked for by anybody (`asked_by` was not said) is never refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from meshd.store.errors import NotReplicatedError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.cluster.mesh import Mesh

_caller: Final[ContextVar[tuple[str, int] | None]] = ContextVar("caller", default=None)


@contextmanager
def asked_by(node_id: str, version: int) -> Iterator[None]:
    """What is written within it was asked for through this node, while it went by this version of the map."""
    token = _caller.set((node_id, version))
    try:
        yield
    finally:
        _caller.reset(token)


def require_caller(mesh: Mesh) -> None:
    """Raises NotReplicatedError when the caller has given up by now, and nothing is to be done for it."""
    caller = _caller.get()
    if caller is None:
        return
    sender, version = caller
    for node_id in {mesh.node_id, sender}:
        if mesh.left_at(node_id) > version:
            metrics.replication_given_up.inc()
            raise NotReplicatedError(
                f"node {node_id} was marked away since this was asked for, and nobody may wait for it any "
                "more; nothing was changed; try again"
            )
