"""Which node is asked: the one that holds an object, the one where a frame's address meets, else any.

Law: a preference, never a condition: every node answers everything, so that the next one is asked when one
fails. Objects go to their readers by the map; frames to the assembler their address meets at.
"""

from __future__ import annotations

import contextlib
import os
import socket
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwire import percents
from meshwire.cluster import routes
from meshwire.cluster.meeting import assemblers, meeting

if TYPE_CHECKING:
    from meshsdk.maps import Directory
    from meshsdk.settings import Endpoint
    from meshsdk.transport import Request
    from meshwire.cluster import ClusterMap, Node

RACK_VARIABLE = "MESH_RACK"
_SERVING = ("up", "draining")


class Router:
    """One a transport."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Router({self.directory!r})"

    def choose(self, request: Request, tried: set[Endpoint]) -> Endpoint:
        """Whom to ask next; of those `tried` nobody as long as there are others."""
        found = self.candidates(request)
        return next((endpoint for endpoint in found if endpoint not in tried), found[0])

    def others(self, request: Request, tried: set[Endpoint]) -> bool:
        """Whether there is somebody to ask who was not."""
        return any(endpoint not in tried for endpoint in self.candidates(request))

    def candidates(self, request: Request) -> list[Endpoint]:
        """Everybody who may be asked, best first; who failed lately comes last."""
        directory = self.directory
        cluster = directory.current()
        if cluster is None:
            found = list(directory.configured)
        else:
            known = [directory.endpoint(node) for node in _in_order(cluster, request)]
            found = list(dict.fromkeys([*known, *directory.configured]))
        return sorted(found, key=directory.shunned) if len(found) > 1 else found


def _in_order(cluster: ClusterMap, request: Request) -> list[Node]:
    """Nodes that answer, those first that need ask nobody else."""
    serving = [node for node in cluster.nodes if node.state in _SERVING]
    near = near_caches(cluster)
    if request.toward:
        first = [node for node in serving if node.node_id == request.toward]
    elif request.meets:
        first = list(meeting(near or assemblers(cluster), request.meets))
    else:
        first = _holders(cluster, request)
        if (request.method in ("GET", "HEAD") and first) or request.path == "/-/gather":
            first = [*near, *first]
    rest = meeting(tuple(serving), request.path)
    return list(dict.fromkeys([*first, *rest]))


def _holders(cluster: ClusterMap, request: Request) -> list[Node]:
    bucket, _, key = request.path[1:].partition("/")
    if not key or bucket == "-" or "--" in bucket:
        return []
    route = routes(cluster, cluster.copies).of(percents.decode(bucket), percents.decode(key))
    if request.method in ("GET", "HEAD"):
        return list(route.readers)
    return [] if route.decider is None else [route.decider]


def holder(cluster: ClusterMap, bucket: str, key: str) -> Node | None:
    """Who is asked first for an object."""
    readers = routes(cluster, cluster.copies).of(bucket, key).readers
    return readers[0] if readers else None


@lru_cache(maxsize=4)
def near_caches(cluster: ClusterMap) -> tuple[Node, ...]:
    """Nodes that only cache (they own nothing) on this host, else on this rack (MESH_RACK)."""
    caches = [
        node for node in cluster.nodes if "cache" in node.roles and not node.stores and node.state in _SERVING
    ]
    if not caches:
        return ()
    own = _own_names()
    here = tuple(node for node in caches if _host(node) in own)
    rack = os.environ.get(RACK_VARIABLE, "")
    return here or tuple(node for node in caches if rack and node.rack == rack)


def _host(node: Node) -> str:
    return node.endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


@lru_cache(maxsize=1)
def _own_names() -> frozenset[str]:
    name = socket.gethostname()
    names = {name, name.partition(".")[0], "localhost", "127.0.0.1", "::1"}
    with contextlib.suppress(OSError):
        names |= {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    return frozenset(names)
