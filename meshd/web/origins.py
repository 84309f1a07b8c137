"""`/-/buckets`: buckets with origins, or with a number of copies of their own, made, shown, changed.

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

    from meshd.service.authorization.access import Identity
    from meshd.service.backed.administering import BackedAdmin
    from meshd.service.buckets.copycounts import CopyCounts
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

_PREFIX = "/-/buckets/"


def origin_routes(admin: BackedAdmin, counts: CopyCounts) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The endpoint's routes, once the native protocol is there."""
    return lambda native: OriginEndpoint(admin, counts, native).routes()


class OriginEndpoint:
    """One a worker."""

    def __init__(self, admin: BackedAdmin, counts: CopyCounts, native: NativeEndpoint) -> None:
        self._admin, self._counts, self._native = admin, counts, native

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
        found = [*self._admin.list_all(identity), *self._counts.list_all(identity)]
        return self._native.json({"buckets": sorted(found, key=lambda bucket: bucket["name"])})

    async def show(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        name = _name(request)
        owner = self._admin if self._counts.is_backed(name) else self._counts
        return self._native.json(owner.show(identity, name))

    async def create(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        document = _document(await request.read())
        owner = self._admin if "url" in document else self._counts
        return self._native.json(await owner.create(identity, _name(request), document))

    async def change(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        query_of(request, ())
        document = _document(await request.read())
        owner = self._counts if "copies" in document else self._admin
        return self._native.json(await owner.change(identity, _name(request), document))


def _name(request: MeshRequest) -> str:
    return unquote(request.raw_path.partition("?")[0].removeprefix(_PREFIX))


def _document(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise BatchError("BadRequest", f"the body must be a JSON object: {error}") from None
