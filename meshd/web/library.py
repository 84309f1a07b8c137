"""`GET /-/ops` and `GET /-/ops/NAME`: what the node can do to a field.

Law: any signed caller may ask; nothing of the node's data is in an answer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.assembly.errors import BatchError
from meshd.transform import describing, registry
from meshd.transform.errors import UnknownOpError
from meshd.web.replies import Reply
from meshd.web.server import NativeRoute
from meshwire.declarations import is_user_op

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from aiohttp import web

    from meshd.kit.clock import Clock
    from meshd.service.authorization.access import Identity
    from meshd.service.batches.userops import UserOps
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

PREFIX = "/-/ops"


def library_routes(user_ops: UserOps, clock: Clock) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The routes of the op library, once the native protocol is there: refusals are its."""
    endpoint = LibraryEndpoint(clock, user_ops)
    return lambda native: [
        NativeRoute("GET", PREFIX, native.guarded(endpoint.list_all)),
        NativeRoute("GET", f"{PREFIX}/", native.guarded(endpoint.show)),
    ]


class LibraryEndpoint:
    """One a worker; holds no state."""

    def __init__(self, clock: Clock, user_ops: UserOps) -> None:
        self._clock, self._user_ops = clock, user_ops

    def __repr__(self) -> str:
        return "<LibraryEndpoint>"

    async def list_all(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        return self._json({"ops": describing.library(self._user_ops.definitions())})

    async def show(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        name = unquote(request.raw_path.partition("?")[0].removeprefix(f"{PREFIX}/"))
        try:
            version = self._user_ops.latest(name) if is_user_op(name) else ""
            return self._json(describing.describe(registry.find(name, version, "")))
        except UnknownOpError as error:
            raise BatchError("NoSuchKey", error.message, help="see them all with: mesh op ls") from error

    def _json(self, document: Any) -> Reply:
        body = json.dumps(document).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        return Reply(200, headers, body, self._clock.now_ms() // 1000)
