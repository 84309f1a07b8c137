"""The document of the native API is made of the routes; the console's types are made of the same types."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from openapi_spec_validator import validate

from meshd.server.api.openapi import PATH, openapi_document, openapi_route
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import describe_as, operation, operations_of
from meshd.util.clock import SystemClock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from console_types import PAGE, page

if TYPE_CHECKING:
    from collections.abc import Callable


async def plain(*_: Any) -> Any:
    """A handler without a description."""


@operation("/-/things/{thing}", "A thing", query=("wait",), reply=dict[str, int])
@operation("/-/things/{thing}/parts", "Its parts", accepts="json", content="bytes")
async def things(*_: Any) -> Any:
    """A handler with two operations."""


def route(method: str, prefix: str, handler: Callable[..., Any], **more: Any) -> HttpRoute:
    return HttpRoute(method, prefix, handler, **more)


def test_every_route_for_clients_is_in_the_document() -> None:
    routes = [
        route("GET", "/-/things/", things),
        route("DELETE", "/-/plain/", plain),
        route("GET", "/-/open", plain, access="open"),
        route("POST", "/-/peer/call", plain, access="peer"),
    ]
    routes.append(openapi_route(routes, SystemClock()))
    document = openapi_document(routes)
    validate(document)
    assert sorted(document["paths"]) == [
        "/-/open",
        PATH,
        "/-/plain/{rest}",
        "/-/things/{thing}",
        "/-/things/{thing}/parts",
    ]
    thing = document["paths"]["/-/things/{thing}"]["get"]
    assert [(each["name"], each["in"]) for each in thing["parameters"]] == [
        ("thing", "path"),
        ("wait", "query"),
    ]
    assert thing["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "object"
    parts = document["paths"]["/-/things/{thing}/parts"]["get"]
    assert list(parts["requestBody"]["content"]) == ["application/json"]
    assert list(parts["responses"]["200"]["content"]) == ["application/octet-stream"]
    assert document["paths"]["/-/open"]["get"]["security"] == []


def test_a_wrapper_keeps_or_replaces_descriptions() -> None:
    assert [each.path for each in operations_of(things)] == ["/-/things/{thing}", "/-/things/{thing}/parts"]

    async def other(*_: Any) -> Any: ...

    assert operations_of(describe_as(other, operations_of(things)[:1]))[0].summary == "A thing"


def test_the_types_of_the_console_are_up_to_date() -> None:
    if PAGE.read_text() != page():
        pytest.fail("console/src/schema.ts is not what the types of replies say: make reference")
