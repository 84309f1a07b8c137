"""`/-/residence/BUCKET`: what of a bucket lies on this node, without one: of all; `DELETE` lets go what is
only cached.

Law: parse, ask the service, answer JSON; root's alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.web.native import query_of
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from meshd.service.authorization.access import Identity
    from meshd.service.cluster.residence import Residence
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

_PREFIX = "/-/residence/"


def residence_routes(residence: Residence) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The endpoint's routes, once the native protocol is there."""
    return lambda native: ResidenceEndpoint(residence, native).routes()


class ResidenceEndpoint:
    """One a worker."""

    def __init__(self, residence: Residence, native: NativeEndpoint) -> None:
        self._residence, self._native = residence, native

    def __repr__(self) -> str:
        return "<ResidenceEndpoint>"

    def routes(self) -> list[NativeRoute]:
        guarded = self._native.guarded
        return [
            NativeRoute("GET", _PREFIX, guarded(self.count)),
            NativeRoute("DELETE", _PREFIX, guarded(self.evict)),
        ]

    async def count(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        """`?prefix=PREFIX`; without a bucket: of the whole node."""
        if not _name(request):
            return self._native.json(await self._residence.node(identity))
        prefix = query_of(request, ("prefix",)).get("prefix", "")
        return self._native.json(await self._residence.count(identity, _name(request), prefix))

    async def evict(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        prefix = query_of(request, ("prefix",)).get("prefix", "")
        return self._native.json(await self._residence.evict(identity, _name(request), prefix))


def _name(request: MeshRequest) -> str:
    return unquote(request.raw_path.partition("?")[0].removeprefix(_PREFIX))
