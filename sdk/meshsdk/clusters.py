"""The cluster as an operator sees and changes it, over the native protocol.

Law: asks and tells; what a change may be is the server's to judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshsdk.transport import Request, json_request

if TYPE_CHECKING:
    from meshsdk.transport import Transport


def cluster_status(transport: Transport) -> dict[str, Any]:
    """The document of `GET /-/cluster`. Raises ServerError (AccessDenied: root alone)."""
    answer: dict[str, Any] = transport.json(Request("GET", "/-/cluster"))
    return answer


def change_node(transport: Transport, node_id: str, action: str, **rest: Any) -> dict[str, Any]:
    """Have a node drained, and so on; its state afterwards. Raises ServerError, which says why not."""
    place = f"/-/cluster/nodes/{quote(node_id, safe='')}"
    answer: dict[str, Any] = transport.json(json_request("POST", place, {"action": action, **rest}))
    return answer
