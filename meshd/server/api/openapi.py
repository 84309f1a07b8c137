"""OpenAPI document of the native API (`GET /-/openapi.json`), generated from the route table.

It contains every route that clients may call; a route whose handler has no description appears with its path
alone. It is public: it describes the API of this release, and reveals nothing about the mesh.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import Operation, operation, operations_of
from meshd.server.response import Reply
from meshwire.http_values.mesh_headers import RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.server.request import MeshRequest
    from meshd.util.clock import Clock

PATH: Final = "/-/openapi.json"
_MEDIA: Final = {"json": "application/json", "bytes": "application/octet-stream", "text": "text/plain"}
_REFERENCE: Final = "#/components/schemas/{name}"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "request_id": {"type": "string"},
                "detail": {"type": "object"},
                "help": {"type": "string"},
            },
        }
    },
}


def openapi_route(routes: Sequence[HttpRoute], clock: Clock) -> HttpRoute:
    """Return the route that answers the document of `routes` and of itself."""
    made = b""

    @operation(PATH, "This document", reply=dict[str, Any])
    async def answer(_: MeshRequest) -> Reply:
        nonlocal made
        made = made or msgspec.json.encode(openapi_document([*routes, own]))
        headers = [("Content-Type", _MEDIA["json"]), ("Content-Length", str(len(made)))]
        return Reply(200, headers, made, clock.now_ms() // 1000)

    own = HttpRoute("GET", PATH, answer, access="open")
    return own


def described_operations(routes: Iterable[HttpRoute]) -> Iterator[tuple[HttpRoute, Operation]]:
    """Yield each operation of the routes that clients may call."""
    for route in routes:
        if route.access == "peer":
            continue
        found = [each for each in operations_of(route.handler) if each.method in ("", route.method)]
        if not found:
            path = route.prefix + ("{rest}" if route.prefix.endswith("/") else "")
            found = [Operation(path, path)]
        for each in found:
            yield route, each


def openapi_document(routes: Sequence[HttpRoute]) -> dict[str, Any]:
    """Return the document, as JSON values, in the form of OpenAPI 3.1."""
    operations = list(described_operations(routes))
    types = [kind for _, each in operations for kind in (each.body, each.reply) if kind is not None]
    unique = list({repr(kind): kind for kind in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REFERENCE)
    shapes = dict(zip(map(repr, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route, each in operations:
        paths.setdefault(each.path, {})[route.method.lower()] = _operation(route, each, shapes)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shardmesh native API",
            "version": RELEASE,
            "description": "Requests are signed with AWS Signature Version 4 for the service s3, unless an "
            "operation says otherwise. S3 itself is at all other paths.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**dict(sorted(components.items())), "Error": _ERROR},
            "securitySchemes": {
                "sigv4": {"type": "apiKey", "in": "header", "name": "Authorization", "description": "AWS4"}
            },
        },
        "security": [{"sigv4": []}],
    }


def _operation(route: HttpRoute, each: Operation, shapes: dict[str, Any]) -> dict[str, Any]:
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", each.path)
    ]
    named += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query]
    reply = {"schema": {} if each.reply is None else shapes[repr(each.reply)]}
    said: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', each.path.lower()).strip('_')}",
        "summary": each.summary,
        "parameters": named,
        "responses": {
            str(each.status): {"description": "Done", "content": {_MEDIA[each.content]: reply}},
            "default": {
                "description": "Refused, with the reason",
                "content": {_MEDIA["json"]: {"schema": {"$ref": _REFERENCE.format(name="Error")}}},
            },
        },
    }
    if each.accepts is not None:
        shape = {} if each.body is None else shapes[repr(each.body)]
        said["requestBody"] = {"required": True, "content": {_MEDIA[each.accepts]: {"schema": shape}}}
    if each.deprecated:
        said["deprecated"] = True
    if route.access == "open":
        said["security"] = []
    return said
