"""`/-/modules`: users' ops pushed, listed, tried, removed.

Law: parse, call the service, answer JSON; the native protocol's errors. A module's body is the file as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.assembly.errors import BatchError
from meshd.web.native import caller_of, query_of
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from meshd.service.authorization.access import Identity
    from meshd.service.batches.optests import OpTests
    from meshd.service.batches.userops import UserOps
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

PREFIX = "/-/modules"


def module_routes(user_ops: UserOps, tests: OpTests) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The endpoint's routes, once the native protocol is there."""
    return lambda native: ModuleEndpoint(user_ops, tests, native).routes()


class ModuleEndpoint:
    """One a worker."""

    def __init__(self, user_ops: UserOps, tests: OpTests, native: NativeEndpoint) -> None:
        self._user_ops, self._tests, self._native = user_ops, tests, native

    def __repr__(self) -> str:
        return "<ModuleEndpoint>"

    def routes(self) -> list[NativeRoute]:
        guarded = self._native.guarded
        return [
            NativeRoute("POST", f"{PREFIX}/test", guarded(self._native.bounded(self.test))),
            NativeRoute("POST", PREFIX, guarded(self._native.bounded(self.push))),
            NativeRoute("GET", PREFIX, guarded(self.list_all)),
            NativeRoute("DELETE", f"{PREFIX}/", guarded(self.remove)),
        ]

    async def push(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        """`?name=NAME`, `draft=1`: to be taken by its version alone."""
        query = query_of(request, ("name", "draft"))
        if query.get("draft", "0") not in ("0", "1"):
            raise BatchError("BadRequest", "draft is 0 or 1")
        draft = query.get("draft") == "1"
        caller, source = caller_of(request, identity), await request.read()
        return self._native.json(
            await self._user_ops.push(caller, query.get("name", ""), source, draft=draft)
        )

    async def list_all(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        return self._native.json({"modules": self._user_ops.list_all(caller_of(request, identity))})

    async def remove(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        """`?version=sha256:HEX`: that build alone."""
        version = query_of(request, ("version",)).get("version", "")
        name = unquote(request.raw_path.partition("?")[0].removeprefix(f"{PREFIX}/"))
        return self._native.json(await self._user_ops.remove(caller_of(request, identity), name, version))

    async def test(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        return self._native.json(await self._tests.run(caller_of(request, identity), await request.read()))
