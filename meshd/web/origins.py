"""`/-/buckets`: buckets with origins, made, shown, changed.

Law: parse, ask the service, answer JSON. For root alone: an origin is a place that this node reaches, or a
folder that it reads, with its own credentials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from meshd.assembly.errors import BatchError
from meshd.web.native import query_of
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from meshd.service.access import Identity
    from meshd.service.backed.administering import BackedAdmin
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

_PREFIX = "/-/buckets/"


def origin_routes(admin: BackedAdmin) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The endpoint's routes, once the native protocol is there."""
    return lambda native: OriginEndpoint(admin, native).routes()


class OriginEndpoint:
    """One a worker."""

    def __init__(self, admin: BackedAdmin, native: NativeEndpoint) -> None:
        self._admin, self._native = admin, native

    def __repr__(self) -> str:
        return "<OriginEndpoint>"

    def routes(self) -> list[NativeRoute]:
        guarded = self._native.guarded
        return [
            NativeRoute("GET", "/-/buckets", guarded(self.list_all)),
            NativeRoute("GET", _PREFIX, guarded(self.show)),
            NativeRoute("PUT", _PREFIX, guarded(self.create)),
            NativeRoute("PATCH", _PREFIX, guarded(self.change)),
        ]

    async def list_all(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        return self._native.json({"buckets": self._admin.list_all(identity)})

    async def show(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        return self._native.json(self._admin.show(identity, _name(request)))

    async def create(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        document = _document(await request.read())
        return self._native.json(await self._admin.create(identity, _name(request), document))

    async def change(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        document = _document(await request.read())
        return self._native.json(await self._admin.change(identity, _name(request), document))


def _name(request: MeshRequest) -> str:
    return unquote(request.raw_path.partition("?")[0].removeprefix(_PREFIX))


def _document(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BatchError("BadRequest", f"the body must be a JSON object: {error}") from None
