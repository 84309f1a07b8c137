"""`/-/kept/plans` and `/-/kept/snapshots`: what the mesh keeps, who needs it, when it goes; removed by hand.

Law: parse, ask the service, answer JSON; the native protocol's errors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshd.service.documents.kept import KINDS, MAX_PAGE
from meshd.web.native import caller_of, query_of
from meshd.web.server import NativeRoute

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from meshd.service.authorization.access import Identity
    from meshd.service.documents.kept import KeptDocuments, Kind
    from meshd.web.incoming import MeshRequest
    from meshd.web.native import NativeEndpoint

PREFIX = "/-/kept/"
_LIMIT = 100
_HASH = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,5}")


def kept_routes(documents: KeptDocuments) -> Callable[[NativeEndpoint], list[NativeRoute]]:
    """The endpoint's routes, once the native protocol is there."""
    return lambda native: KeptEndpoint(documents, native).routes()


class KeptEndpoint:
    """One a worker; holds no state."""

    def __init__(self, documents: KeptDocuments, native: NativeEndpoint) -> None:
        self._documents, self._native = documents, native

    def __repr__(self) -> str:
        return "<KeptEndpoint>"

    def routes(self) -> list[NativeRoute]:
        guarded, bounded = self._native.guarded, self._native.bounded
        return [
            NativeRoute("GET", PREFIX, guarded(bounded(self.get))),
            NativeRoute("DELETE", PREFIX, guarded(bounded(self.remove))),
        ]

    async def get(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        """A page of a kind, or one document."""
        kind, digest = _place(request)
        caller = caller_of(request, identity)
        if digest:
            query_of(request, ())
            return self._native.json(await self._documents.show(caller, kind, digest))
        query = query_of(request, ("after", "limit"))
        after, limit = query.get("after", ""), query.get("limit", str(_LIMIT))
        if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MAX_PAGE:
            raise BatchError("BadRequest", f"limit is a number from 1 to {MAX_PAGE}, not {limit[:40]!r}")
        if after and not _HASH.fullmatch(after):
            raise BatchError("BadRequest", "after is the hash that `next` of the page before says")
        return self._native.json(await self._documents.list_all(caller, kind, after, int(limit)))

    async def remove(self, request: MeshRequest, identity: Identity) -> web.StreamResponse:
        """`?force=1`: also one that was used lately."""
        kind, digest = _place(request)
        if not digest:
            raise BatchError("BadRequest", f"say which: DELETE {PREFIX}{kind}/HASH")
        force = query_of(request, ("force",)).get("force", "0")
        if force not in {"0", "1"}:
            raise BatchError("BadRequest", f"force is 0 or 1, not {force[:40]!r}")
        caller = caller_of(request, identity)
        return self._native.json(await self._documents.remove(caller, kind, digest, force=force == "1"))


def _place(request: MeshRequest) -> tuple[Kind, str]:
    """The kind, and the hash or "". Raises BatchError NoSuchKey, BadRequest."""
    path = request.raw_path.partition("?")[0]
    kind, _, digest = path.removeprefix(PREFIX).partition("/")
    if kind not in KINDS:
        raise BatchError("NoSuchKey", f"there is nothing at {path[:200]}; kept are: {', '.join(KINDS)}")
    if digest and not _HASH.fullmatch(digest):
        raise BatchError("BadRequest", f"{digest[:80]!r} is no hash of 64 lower-case hex digits")
    return kind, digest
