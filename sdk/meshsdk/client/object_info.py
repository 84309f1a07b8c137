"""What responses say of an object: ObjectInfo of a HEAD or GET, the ETag of a write, the facts of a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshsdk.client.error_responses import parsed
from meshwire.http_values import conditional_requests, dates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.client.http_connection import Response
    from meshwire.s3.result_types import CopyResult

_METADATA: Final = "x-amz-meta-"
WRITE_TOKEN_HEADER: Final = f"{_METADATA}mesh-write"
"""Metadata by which a conditional write knows the object that it has stored; see `conditional_put`."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size, ETag and metadata of an object, from the headers of a HEAD or GET.

    Attributes:
        size: in bytes.
        etag: without quotes.
        modified_ms: time of the last modification, in milliseconds since 1970, UTC.
        content_type: the media type; "" if the object has none.
        metadata: user metadata; names in lower case, without `x-amz-meta-`. The token of a conditional write
            (`mesh-write`) is among the headers alone.
        headers: all headers of the response; names in lower case.
    """

    size: int
    etag: str
    modified_ms: int
    content_type: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def read_etag(response: Response) -> str:
    """Return the ETag of a stored object or part."""
    response.read()
    return conditional_requests.unquote_etag(response.headers.get("etag", ""))


def read_copied(response: Response) -> CopyResult:
    """Return the facts of a copy. Raises ServerError, as the body may report a failure despite status 200."""
    from meshwire.s3 import xml_documents

    return parsed(xml_documents.parse_copy_result, response.read())


def read_head(response: Response) -> ObjectInfo:
    """Return the ObjectInfo of a HEAD."""
    text = response.headers.get("content-length", "0")
    return read_info(response, int(text) if text.isascii() and text.isdigit() else 0)


def read_info(response: Response, size: int) -> ObjectInfo:
    """Return the ObjectInfo from the headers of a HEAD or GET."""
    headers = response.headers
    modified = dates.parse_http(headers.get("last-modified", "")) or 0
    metadata = {
        name.removeprefix(_METADATA): value
        for name, value in headers.items()
        if name.startswith(_METADATA) and name != WRITE_TOKEN_HEADER
    }
    etag = conditional_requests.unquote_etag(headers.get("etag", ""))
    return ObjectInfo(size, etag, modified * 1000, headers.get("content-type", ""), metadata, headers)
