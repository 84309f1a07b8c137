"""botocore's model of S3, read as the names that a request and a response may have on the wire.

Law: every name comes from the model; botocore's own serializer writes the requests. Nothing here knows what
Shardmesh supports.
"""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import botocore
from botocore.awsrequest import HeadersDict
from botocore.model import ServiceModel
from botocore.parsers import create_parser
from botocore.serialize import create_serializer

from meshwire.s3.request_head import RequestHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshwire.s3.responses import RenderedResponse
    from meshwire.s3.xml_io import Element

_FOLDER = Path(botocore.__file__).parent / "data" / "s3" / "2006-03-01"
Params = dict[str, Any]
_NOTHING: tuple[Any, ...] = (None, [], {})
Step = str | int
"""A member of a structure, or the index of a list."""


@dataclass(frozen=True, slots=True)
class Member:
    """A leaf of an operation's input or output. `name` is what the wire has: `x-amz-acl`, `?versionId`, or
    elements without the root, `Rule/Filter/Prefix`. `path` leads to its value in a call's arguments."""

    name: str
    path: tuple[Step, ...]
    kind: str
    enum: tuple[str, ...]
    required: bool

    @property
    def in_body(self) -> bool:
        return len(self.path) > 1


@cache
def model_document() -> dict[str, Any]:
    """Return the model as botocore's data files have it; copy it before a change."""
    packed = _FOLDER / "service-2.json.gz"
    raw = (
        gzip.decompress(packed.read_bytes()) if packed.exists() else (_FOLDER / "service-2.json").read_bytes()
    )
    found: dict[str, Any] = json.loads(raw)
    return found


def service_model(document: Mapping[str, Any] | None = None) -> Any:
    """Return botocore's reader of the model, or of a changed copy."""
    return ServiceModel(model_document() if document is None else document, "s3")


def changed_model(*path: str, **changes: Any) -> Any:
    """Return the model with the mapping at `path` updated."""
    document = copy.deepcopy(model_document())
    place = document
    for name in path:
        place = place[name]
    place.update(changes)
    return service_model(document)


def members(shape: Any) -> list[Member]:
    """Return the leaves of an input or output: headers, query parameters, and elements of the body."""
    if shape is None:
        return []
    payload = shape.serialization.get("payload")
    found: list[Member] = []
    for member, inner in shape.members.items():
        place, required = inner.serialization.get("location"), member in shape.required_members
        name = str(inner.serialization.get("name", member))
        if place == "uri" or inner.type_name == "blob":
            continue
        if place is not None:
            name = f"?{name}" if place == "querystring" else name.lower()
            found.append(Member(name, (member,), inner.type_name, _enum(inner), required))
        elif inner.type_name == "string" and member == payload:
            continue  # a policy, which is not XML
        else:
            prefix = "" if member == payload else name
            found += _elements(inner, (member,), prefix, required=required)
    return found


def _elements(shape: Any, path: tuple[Step, ...], name: str, *, required: bool) -> Iterator[Member]:
    """Yield the leaves below an element; an element is required if everything around it is."""
    if shape.type_name == "structure":
        for member, inner in shape.members.items():
            wire = str(inner.serialization.get("name", member))
            below = required and member in shape.required_members
            yield from _elements(inner, (*path, member), f"{name}/{wire}" if name else wire, required=below)
    elif shape.type_name == "list":
        inner = shape.member
        wire = name if shape.serialization.get("flattened") else _join(name, inner)
        yield from _elements(inner, (*path, 0), wire, required=required)
    else:
        yield Member(name, path if len(path) > 1 else (*path, ""), shape.type_name, _enum(shape), required)


def _join(name: str, inner: Any) -> str:
    wire = inner.serialization.get("name", "member")
    return f"{name}/{wire}" if name else str(wire)


def _enum(shape: Any) -> tuple[str, ...]:
    inner = shape.member if shape.type_name == "list" else shape
    return tuple(getattr(inner, "enum", None) or ())


def required_members(shape: Any) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Yield what an input requires besides bucket and key: wire name, and path to the member."""
    for member in shape.required_members:
        inner = shape.members[member]
        name = str(inner.serialization.get("name", member))
        place = inner.serialization.get("location")
        if place != "uri":
            yield (f"?{name}" if place == "querystring" else name.lower() if place else name), (member,)
    for member, inner in shape.members.items():
        if inner.serialization.get("location") is None:
            yield from _required_inside(inner, (member,), "")


def _required_inside(shape: Any, path: tuple[Step, ...], name: str) -> Iterator[tuple[str, tuple[Step, ...]]]:
    if shape.type_name == "list":
        wire = name if shape.serialization.get("flattened") else _join(name, shape.member)
        yield from _required_inside(shape.member, (*path, 0), wire)
    elif shape.type_name == "structure":
        for member, inner in shape.members.items():
            wire = str(inner.serialization.get("name", member))
            below = f"{name}/{wire}" if name else wire
            if member in shape.required_members:
                yield below, (*path, member)
            yield from _required_inside(inner, (*path, member), below)


# --- arguments of a call ------------------------------------------------------------------------------------


def with_value(params: Params, path: tuple[Step, ...], value: Any) -> Params:
    """Return a copy of a call's arguments with one value set; missing structures and lists are created."""
    changed = copy.deepcopy(params)
    place: Any = changed
    steps = [step for step in path if step != ""]
    for step, following in pairwise(steps):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            if len(place) <= step:
                place.append(empty)
            place = place[step]
        else:
            place = place.setdefault(step, empty)
    last = steps[-1]
    if isinstance(last, int):
        place[last:] = [value]
    else:
        place[last] = value
    return changed


def without_value(params: Params, path: tuple[Step, ...]) -> Params | None:
    """Return a copy of the arguments without one value, or None if what would have it is absent, too."""
    changed = copy.deepcopy(params)
    place: Any = changed
    for step in path[:-1]:
        if (place := place.get(step) if isinstance(step, str) else place[step]) is None:
            return None
    place.pop(path[-1], None)
    return changed


# --- the wire -----------------------------------------------------------------------------------------------


def write_request(operation: Any, params: Params) -> tuple[RequestHead, bytes]:
    """Write the request that botocore makes of a call's arguments, without signature and digests."""
    made = create_serializer("rest-xml", include_validation=False).serialize_to_request(params, operation)
    path, _, fixed = made["url_path"].partition("?")
    query = "&".join(
        part
        for part in (fixed, *(f"{name}={quote(str(value))}" for name, value in made["query_string"].items()))
        if part
    )
    headers = {name.lower(): str(value) for name, value in made["headers"].items()}
    body = made["body"]
    return RequestHead(made["method"], path, query, headers), body if isinstance(
        body, bytes
    ) else body.encode()


def read_response(operation: Any, response: RenderedResponse) -> set[str]:
    """Return the names of `members` for which botocore's parser finds a value in a response."""
    parsed = create_parser("rest-xml").parse(
        {
            "status_code": response.status,
            "headers": HeadersDict(dict(response.headers)),
            "body": response.body,
        },
        operation.output_shape,
    )
    return {m.name for m in members(operation.output_shape) if _find(parsed, m.path) not in _NOTHING}


def _find(value: Any, path: tuple[Step, ...]) -> Any:
    if value is None or not path or path[0] == "":
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, str):
        return _find(value.get(step), rest)
    return next((found for each in value if (found := _find(each, rest)) not in _NOTHING), None)


def element_names(root: Element, prefix: str = "") -> set[str]:
    """Return the paths of all elements without children below a root."""
    found: set[str] = set()
    for child in root.children:
        path = f"{prefix}/{child.name}" if prefix else child.name
        found |= element_names(child, path) if child.children else {path}
    return found
