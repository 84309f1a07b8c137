"""Headers of S3 responses: those of every response, errors included, and those of an object.

The bucket whose CORS rules apply comes from the request target alone, because a request that cannot be parsed
or is refused needs the headers too: without them a browser hides the error from the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.server.response import map_headers
from meshwire.http_values.percent_encoding import PercentError, decode
from meshwire.s3.cors import cors_response_headers
from meshwire.s3.responses import object_response_headers

if TYPE_CHECKING:
    from meshd.control.buckets import BucketTable
    from meshd.core.object_io import LookupResult
    from meshd.server.request import RequestTrace
    from meshd.server.response import Header
    from meshd.server.services import ServerServices
    from meshwire.s3.operations import GetObject
    from meshwire.s3.parse_request import RequestHead


_SANDBOX: Final = (
    "Content-Security-Policy",
    "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts",
)
"""An origin of its own for a document: it cannot use the console's session, which browsers would otherwise
send with its requests. A bucket of a virtual host has an origin of its own already."""


def common_headers(services: ServerServices, head: RequestHead, bucket: str | None = None) -> list[Header]:
    """Return the headers of every response to `head`: CORS, the version of the cluster map, and on a node
    with a console what keeps documents that are stored here out of its origin. `bucket`: the one that `head`
    names, if that is known."""
    common = _cors_headers(services.bucket_table, head, bucket) + map_headers(services.mesh)
    # A browser cannot open an address with a header; what it opens without one could be a page with scripts.
    if services.console_sessions is not None and "authorization" not in head.headers and not head.host_bucket:
        common.append(_SANDBOX)
    return common


def _cors_headers(buckets: BucketTable, head: RequestHead, name: str | None) -> list[Header]:
    """Return the headers for any response to `head`. Preflights are answered by their own rule."""
    if head.method == "OPTIONS":
        return []
    bucket = buckets.get((head.host_bucket or _first(head.raw_path)) if name is None else name)
    rules = () if bucket is None else bucket.cors
    if not rules:
        return []
    # A browser names the method only in preflights; other clients may ask with it what a page would get.
    method = head.headers.get("access-control-request-method") or head.method
    return cors_response_headers(rules, head.headers.get("origin"), method)


def _first(raw_path: str) -> str:
    try:
        return decode(raw_path[1:].partition("/")[0])
    except PercentError:
        return ""


def object_response_head(
    operation: GetObject, found: LookupResult, trace: RequestTrace
) -> tuple[int, list[Header]]:
    """Return status and headers of GET and HEAD."""
    headers = object_response_headers(
        found.head,
        window=(found.offset, found.length) if found.partial else None,
        checksum_mode=operation.checksum_mode,
        overrides=operation.overrides,
    )
    headers.append(("x-amz-request-id", trace.request_id))
    headers.extend(trace.extra_headers)
    return 206 if found.partial else 200, headers
