"""HttpRoute: which requests a handler answers, and who may send them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply

SignedHandler = Callable[["MeshRequest", "Identity"], Awaitable["Reply"]]
OpenHandler = Callable[["MeshRequest"], Awaitable["Reply"]]


class HttpRoute(msgspec.Struct, frozen=True):
    """A route for requests of `method` whose path is `prefix`, or is under it if `prefix` ends in `/`. HEAD
    matches GET.

    `access` says who may call it. For `signed`, the request's signature and its body's digest are verified
    first, and the handler is called with (request, identity); `request.read()` returns the verified body. For
    `peer` (see `peer_endpoint.peer_route`), another node must have signed it, and the handler is called with
    (request, caller). For `open`, it is called with the request alone. The first matching route is used.
    """

    method: str
    prefix: str
    handler: Callable[..., Awaitable[Reply]]
    access: Literal["signed", "peer", "open"] = "signed"

    def matches(self, method: str, path: str) -> bool:
        if method != self.method and not (method == "HEAD" and self.method == "GET"):
            return False
        return path == self.prefix or (self.prefix.endswith("/") and path.startswith(self.prefix))
