"""Descriptions of the native API's operations, written next to their handlers.

`@operation(…)` attaches a description to a handler; wrappers preserve it if they use `functools.wraps`. The
OpenAPI document (`meshd.server.api.openapi`) is generated from the routes and these descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

Content = Literal["json", "bytes", "text"]
_ATTRIBUTE: Final = "described_operations"
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation at a `path` with its parameters in braces; the method is the route's. `query`: names of
    parameters; `body`, `reply`: the type of a JSON document, None if it has none or one of any form;
    `content` and `accepts`: what the reply and the body are."""

    path: str
    summary: str
    query: tuple[str, ...] = ()
    body: Any = None
    accepts: Content | None = None
    reply: Any = None
    content: Content = "json"
    status: int = 200
    deprecated: bool = False
    method: str = ""


def operation(
    path: str,
    summary: str,
    *,
    query: tuple[str, ...] = (),
    body: Any = None,
    accepts: Content | None = None,
    reply: Any = None,
    content: Content = "json",
) -> Callable[[_Handler], _Handler]:
    """Describe an operation of a handler, which may have several. `accepts`: the form of its body if that has
    no type."""
    kind: Content | None = "json" if body is not None else accepts
    found = Operation(path, summary, query, body, kind, reply, content)

    def describe(handler: _Handler) -> _Handler:
        setattr(handler, _ATTRIBUTE, (found, *operations_of(handler)))
        return handler

    return describe


def describe_as(handler: _Handler, operations: tuple[Operation, ...]) -> _Handler:
    """Replace the descriptions of a handler."""
    setattr(handler, _ATTRIBUTE, operations)
    return handler


def operations_of(handler: Callable[..., Any]) -> tuple[Operation, ...]:
    """Return the operations that a handler answers."""
    found: tuple[Operation, ...] = getattr(handler, _ATTRIBUTE, ())
    return found
