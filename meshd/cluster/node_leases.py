"""Node leases: the names of the leases that prove that nodes are alive, and who holds one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshd.control.control_api import ControlStore


def node_lease_name(node_id: str) -> str:
    """Returns the name of the lease that proves that a node is alive."""
    return f"node/{node_id}"


async def live_nodes(control: ControlStore) -> set[str]:
    """Returns the ids of the nodes that hold their leases. Raises ControlError."""
    prefix = node_lease_name("")
    return {name[len(prefix) :] for name in await control.lease_holders(prefix)}
