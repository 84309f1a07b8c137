"""Requests: the value that a transport signs and sends, and how those for objects and JSON are made.

Law: pure; a request may say which node should answer it, but not where that node is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError
from meshwire.checksums.body_checksums import new_hasher as new_checksum
from meshwire.http_values import conditional_requests, percent_encoding
from meshwire.names import check_bucket_name, check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.client.http_connection import Buffer

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a node. `path` and `query` are already percent-encoded, header names lower-case.

    Attributes:
        sha256: hex digest of the body; None leaves the payload unsigned (large bodies carry a checksum header
            instead).
        toward: the id of the node to try first, if the mesh has it.
        meets: the frame address whose hash chooses the node that assembles the frame.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Buffer = b""
    sha256: str | None = EMPTY_SHA256
    idempotent: bool = True
    toward: str = ""
    meets: str = ""


def json_request(method: str, path: str, document: Any, query: str = "") -> Request:
    """Return a request with a small JSON body."""
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    return Request(method, path, query, {"content-type": "application/json"}, body, digest)


# --- requests for objects -------------------------------------------------------------------------


def object_path(bucket: str, key: str | None = None) -> str:
    """Return the encoded path of an object, or of the bucket without a key. Raises ConfigurationError for an
    invalid S3 name; an empty key is one, as the path would be the bucket's."""
    try:
        check_bucket_name(bucket)
        if key is not None:
            check_key(key)
    except ValueError as error:
        hint = "; pass the bucket's name and the key as separate arguments" if "://" in bucket else ""
        place = bucket[:80] if hint else f"s3://{bucket[:80]}/{(key or '')[:80]}"
        raise ConfigurationError(f"{place}: {error}{hint}") from error
    return f"/{bucket}/{percent_encoding.encode(key, safe='/')}" if key else f"/{bucket}"


def query_string(**parameters: str | int) -> str:
    """Return an encoded query; underscores in names become hyphens, and an empty value gives `name=`."""
    return "&".join(
        f"{name.replace('_', '-')}={percent_encoding.encode(str(value))}"
        for name, value in sorted(parameters.items())
    )


def get_request(bucket: str, key: str, offset: int, length: int | None, etag: str | None) -> Request:
    """Return a GET for `length` bytes (None: to the end) from `offset`, of the version `etag` if given.

    Raises ConfigurationError for a negative number: S3 would ignore such a range, and send the whole object.
    """
    if offset < 0 or (length is not None and length < 0):
        raise ConfigurationError(
            f"offset={offset}, length={length}: a range begins at byte 0 or later; that of the last n bytes "
            "at client.head(bucket, key).size - n"
        )
    headers = {}
    if offset or length is not None:
        last = "" if length is None else str(offset + length - 1)
        headers["range"] = f"bytes={offset}-{last}"
    if etag is not None:
        headers["if-match"] = conditional_requests.quote_etag(etag)
    return Request("GET", object_path(bucket, key), "", headers)


def crc64(data: Buffer) -> str:
    """Return the crc64nvme of `data` in base64: the checksum that S3 recommends and the store keeps."""
    hasher = new_checksum("crc64nvme")
    hasher.update(data)
    return hasher.base64()


def object_headers(metadata: Mapping[str, str] | None, content_type: str | None) -> dict[str, str]:
    """Return the headers with an object's metadata and type.

    Raises ConfigurationError for text that a header cannot carry.
    """
    headers = {f"x-amz-meta-{name.lower()}": value for name, value in (metadata or {}).items()}
    if content_type is not None:
        headers["content-type"] = content_type
    for name, value in headers.items():
        if not (name + value).isprintable():
            raise ConfigurationError(f"{name!r}: metadata must be one line of printable text")
    return headers


def write_conditions(etag: str | None, *, if_absent: bool) -> dict[str, str]:
    """Return the headers of a conditional write: create only, or replace only the version `etag`."""
    found = {"if-none-match": "*"} if if_absent else {}
    return found if etag is None else found | {"if-match": f'"{etag}"'}
