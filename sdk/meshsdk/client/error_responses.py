"""Error responses: the exception for a refused request, from the body and the headers of its response.

Law: a body is S3's XML or our JSON, of limited size, and never trusted to be either. An S3 document may
report a failure despite a success status.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from meshsdk.errors import NotFoundError, server_error
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.http_connection import Response
    from meshsdk.client.request import Request
    from meshsdk.errors import MeshError, ServerError

T = TypeVar("T")
_MAX_ERROR_BODY = 1 << 20
_TAG = re.compile("<[^>]*>?")
_BARE_CODES = {404: "NotFound", 403: "Forbidden", 304: "NotModified", 412: "PreconditionFailed"}
"""Error codes of responses without a body, such as the refusal of a HEAD."""
_BARE_REFUSAL = "Check what the keys may do: looking at an object needs s3:GetObject. A HEAD gives no reason."
_REFUSALS = frozenset({400, 403, 404, 405, 501})
_UNKNOWN = frozenset({400, 404, 405, 410, 501})
_UNEQUAL = (
    "The node is of release {theirs}, this SDK of {ours}: if the older one lacks this feature, upgrade it."
)
_STRANGER = (
    "The endpoint does not seem to be a meshd: its Server header says {name}. Datasets and loaders need a "
    "meshd: set MESH_ENDPOINT, which takes precedence over AWS_ENDPOINT_URL."
)
_NO_STORE = "The endpoint does not seem to be an S3 store: check MESH_ENDPOINT."


def read_error(response: Response, request: Request) -> MeshError:
    """Return the error for a response of status ≥ 300, whose body (S3's XML or our JSON) it reads.

    If a request that only a meshd can serve was refused by a server that does not call itself meshd, the
    message says so.
    """
    body = response.read(_MAX_ERROR_BODY)
    after = _retry_after(response.headers.get("retry-after"))
    if body[:1] == b"{":
        error = _json_error(response.status, body, after)
        return error.saying(told) if (told := _other_release(response)) else error
    name = response.headers.get("server", "")
    strange = request.path.startswith("/-/") and response.status in _REFUSALS and not name.startswith("meshd")
    advice = _STRANGER.format(name=name or "no name") if strange else ""
    if not body and response.status == 403:
        what = f"s3:/{unquote(request.path)}: access denied"
        request_id = response.headers.get("x-amz-request-id", "")
        return server_error(403, _BARE_CODES[403], what, request_id=request_id, advice=_BARE_REFUSAL)
    request_id = response.headers.get("x-amz-request-id", "")
    return _xml_error(response.status, body, after, request_id, advice, damaged=_is_final_damage(response))


def _is_final_damage(response: Response) -> bool:
    """Return whether the bytes of an object are damaged on all nodes, so that trying again cannot help."""
    if response.status != 500:
        return False
    from meshwire.http_values.mesh_headers import DAMAGED_HEADER, FINAL_DAMAGE  # needed for refusals only

    return response.headers.get(DAMAGED_HEADER, "") == FINAL_DAMAGE


def _other_release(response: Response) -> str:
    """Return a hint for a refusal by a node of another release; "" if that cannot be the reason."""
    if response.status not in _UNKNOWN:
        return ""
    from meshwire.http_values.mesh_headers import RELEASE, RELEASE_HEADER  # needed for refusals only

    theirs = response.headers.get(RELEASE_HEADER, RELEASE)[:40]
    return "" if theirs == RELEASE else _UNEQUAL.format(theirs=theirs, ours=RELEASE)


def _json_error(status: int, body: bytes, after: float | None) -> ServerError:
    try:
        error = json.loads(body)["error"]
        detail = error.get("detail") or {}
        return server_error(
            status,
            str(error.get("code", "")),
            str(error.get("message", "")),
            request_id=str(error.get("request_id", "")),
            detail=detail if isinstance(detail, dict) else {},
            advice=str(error.get("help") or ""),
            retry_after=after,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return server_error(status, "", body[:200].decode("utf-8", "replace"), retry_after=after)


def _xml_error(
    status: int, body: bytes, after: float | None, request_id: str, advice: str, *, damaged: bool
) -> MeshError:
    from meshwire.s3.xml_documents import parse_error  # only refused requests pay for the XML parsers

    try:
        error = parse_error(body)
    except (S3Error, ValueError):
        text = body[:200].decode("utf-8", "replace").strip()
        if text[:5].lower() in ("<!doc", "<html"):
            text = f"the server answered with an HTML page: {' '.join(_TAG.sub(' ', text).split())}"
        code = _BARE_CODES.get(status, "")
        return server_error(status, code, text, request_id=request_id, advice=advice, retry_after=after)
    bucket = error.extra.get("BucketName")
    return server_error(
        status,
        error.code,
        error.message,
        request_id=request_id,
        detail=({"bucket": bucket} if bucket else {}) | ({"damaged": True} if damaged else {}),
        advice=advice,
        retry_after=after,
    )


def _retry_after(text: str | None) -> float | None:
    """Parse a Retry-After header in either form (RFC 9110 §10.2.3) into seconds, capped at one hour."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), 3600.0)


def parsed(reader: Callable[[bytes], T], body: bytes) -> T:
    """Parse an S3 document. Raises ServerError if it is invalid, or an error despite a success status."""
    try:
        return reader(body)
    except S3Error as error:
        if error.code == "MalformedXML" and not _is_error_document(body):
            raise server_error(200, "InvalidResponse", _excerpt(body), advice=_NO_STORE) from error
        raise server_error(error.status, error.code, error.message) from error


def _is_error_document(body: bytes) -> bool:
    from meshwire.s3.xml_documents import parse_error

    try:
        parse_error(body)
    except (S3Error, ValueError):
        return False
    return True


def _excerpt(body: bytes) -> str:
    """Describe a response that is not an S3 document."""
    told = body[:400].decode("utf-8", "replace")
    words = _TAG.sub(" ", told).split() or told.split() or ["it is empty"]  # a page may begin with tags alone
    return f"the server's answer is not an S3 document ({' '.join(words)[:80]})"


def missing(bucket: str, key: str) -> NotFoundError:
    """Return the error for an object that does not exist."""
    folder = key[: key.rfind("/") + 1]
    return NotFoundError(
        f"no object s3://{bucket}/{key}; list the objects with `mesh ls s3://{bucket}/{folder}`",
        status=404,
        code="NoSuchKey",
    )


def explained(error: NotFoundError, bucket: str, key: str) -> NotFoundError:
    """Return the 404 of a GET with a message that names the key and says what to do."""
    return error if error.code == "NoSuchBucket" else missing(bucket, key)


def explained_range(error: ServerError, bucket: str, key: str, offset: int) -> ServerError:
    """Return the error of a GET; that of a range beyond the end names the object and the byte."""
    if error.code != "InvalidRange":
        return error
    return error.saying(f"s3://{bucket}/{key} ends before byte {offset}")
