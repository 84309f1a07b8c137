"""Document API: stored plans and snapshots, their users and expiry, and removal (`/-/documents/`).

A handler parses, calls the service and answers JSON with the batch API's errors. The earlier path `/-/kept/`
answers the same, with a `Deprecation` header (RFC 9745), for one release.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.documents.admin import KINDS, MAX_PAGE
from meshd.server.api import reply_types
from meshd.server.api.json_api import caller_of, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import describe_as, operation, operations_of
from meshd.server.response import Reply

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.documents.admin import DocumentAdmin, Kind
    from meshd.server.api.json_api import Handler, JsonApi
    from meshd.server.request import MeshRequest

PREFIX: Final = "/-/documents/"
EARLIER_PREFIX: Final = "/-/kept/"
_DEPRECATION: Final = ("Deprecation", "@1795651200")  # since 26 November 2026
_LIMIT = 100
_HASH = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,5}")


class DocumentEndpoint:
    """The document API. One instance per worker; stateless."""

    def __init__(self, documents: DocumentAdmin, api: JsonApi) -> None:
        self._documents, self._api = documents, api

    def routes(self) -> list[HttpRoute]:
        guarded, bounded = self._api.handle_errors, self._api.limit_concurrency
        handlers = {"GET": guarded(bounded(self.get)), "DELETE": guarded(bounded(self.remove))}
        routes = [HttpRoute(method, PREFIX, handler) for method, handler in handlers.items()]
        return routes + [
            HttpRoute(method, EARLIER_PREFIX, _deprecate(handler)) for method, handler in handlers.items()
        ]

    @operation(
        f"{PREFIX}plans",
        "The plans that the caller may see",
        query=("after", "limit"),
        reply=reply_types.Plans,
    )
    @operation(
        f"{PREFIX}snapshots",
        "The snapshots that the caller may see",
        query=("after", "limit"),
        reply=reply_types.Snapshots,
    )
    @operation(f"{PREFIX}plans/{{plan}}", "A plan as a document")
    @operation(f"{PREFIX}snapshots/{{snapshot}}", "A snapshot as a document")
    async def get(self, request: MeshRequest, identity: Identity) -> Reply:
        """Answer a page of a kind, or one document."""
        kind, digest = _document_path(request)
        caller = caller_of(request, identity)
        if digest:
            parse_query(request, ())
            return self._api.reply_json(await self._documents.get_document(caller, kind, digest))
        query = parse_query(request, ("after", "limit"))
        after, limit = query.get("after", ""), query.get("limit", str(_LIMIT))
        if not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MAX_PAGE:
            raise BatchError("BadRequest", f"limit must be a number from 1 to {MAX_PAGE}, not {limit[:40]!r}")
        if after and not _HASH.fullmatch(after):
            raise BatchError("BadRequest", "after must be the hash in `next` of the preceding page")
        return self._api.reply_json(await self._documents.list_documents(caller, kind, after, int(limit)))

    @operation(f"{PREFIX}plans/{{plan}}", "Remove a plan", query=("force",))
    @operation(f"{PREFIX}snapshots/{{snapshot}}", "Remove a snapshot", query=("force",))
    async def remove(self, request: MeshRequest, identity: Identity) -> Reply:
        """Remove a document; with `?force=1` also one that was used recently."""
        kind, digest = _document_path(request)
        if not digest:
            raise BatchError("BadRequest", f"the hash is missing: use DELETE {PREFIX}{kind}/HASH")
        force = parse_query(request, ("force",)).get("force", "0")
        if force not in {"0", "1"}:
            raise BatchError("BadRequest", f"force must be 0 or 1, not {force[:40]!r}")
        caller = caller_of(request, identity)
        return self._api.reply_json(
            await self._documents.remove_document(caller, kind, digest, force=force == "1")
        )


def _deprecate(handler: Handler) -> Handler:
    """Serve `handler` under the earlier path: its replies are marked deprecated and name the new path."""

    async def answer(request: MeshRequest, identity: Identity) -> Reply:
        reply = await handler(request, identity)
        if isinstance(reply, Reply):
            path = request.raw_path.partition("?")[0].removeprefix(EARLIER_PREFIX)
            reply.add_headers(_DEPRECATION, ("Link", f'<{PREFIX}{path}>; rel="successor-version"'))
        return reply

    earlier = [
        replace(each, path=each.path.replace(PREFIX, EARLIER_PREFIX), deprecated=True)
        for each in operations_of(handler)
    ]
    return describe_as(answer, tuple(earlier))


def _document_path(request: MeshRequest) -> tuple[Kind, str]:
    """Return the kind, and the hash or "". Raises BatchError NoSuchKey, BadRequest."""
    path = request.raw_path.partition("?")[0]
    kind, _, digest = path.removeprefix(EARLIER_PREFIX).removeprefix(PREFIX).partition("/")
    if kind not in KINDS:
        raise BatchError(
            "NoSuchKey", f"there is nothing at {path[:200]}; use {PREFIX} with one of {', '.join(KINDS)}"
        )
    if digest and not _HASH.fullmatch(digest):
        raise BatchError("BadRequest", f"{digest[:80]!r} is not a hash of 64 lower-case hex digits")
    return kind, digest
