"""CORS response headers, on every S3 response, errors included.

The bucket comes from the request target alone, because a request that cannot be parsed or is refused needs
the headers too: without them a browser hides the error from the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.http_values.percent_encoding import PercentError, decode
from meshwire.s3.cors import cors_response_headers

if TYPE_CHECKING:
    from meshd.objects.buckets.service import BucketService
    from meshd.server.response import Header
    from meshwire.s3.parse_request import RequestHead


def cors_headers(buckets: BucketService, head: RequestHead) -> list[Header]:
    """Return the headers for any response to `head`. Preflights are answered by their own rule."""
    if head.method == "OPTIONS":
        return []
    bucket = head.host_bucket or _first(head.raw_path)
    rules = buckets.cors_rules(bucket) if bucket else ()
    # A browser names the method only in preflights; other clients may ask with it what a page would get.
    method = head.headers.get("access-control-request-method") or head.method
    return cors_response_headers(rules, head.headers.get("origin"), method) if rules else []


def _first(raw_path: str) -> str:
    try:
        return decode(raw_path[1:].partition("/")[0])
    except PercentError:
        return ""
