"""What an answer says to a page of another origin: the CORS headers of every answer, refusals included.

Law: the bucket is taken from the request's target alone, for what cannot be parsed or is refused is answered
with them, too: a page could not read the error otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.percents import PercentError, decode
from meshwire.s3.cors import answer_headers

if TYPE_CHECKING:
    from meshd.service.buckets.service import BucketService
    from meshd.web.replies import Header
    from meshwire.s3.parsing import RequestHead


def cors_headers(buckets: BucketService, head: RequestHead) -> list[Header]:
    """What goes with the answer to `head`, whatever it is. Preflights are answered by their own rule."""
    if head.method == "OPTIONS":
        return []
    bucket = head.host_bucket or _first(head.raw_path)
    rules = buckets.cors_rules(bucket) if bucket else ()
    # A browser names the method in preflights only; other clients may ask so what a page would be told.
    method = head.headers.get("access-control-request-method") or head.method
    return answer_headers(rules, head.headers.get("origin"), method) if rules else []


def _first(raw_path: str) -> str:
    try:
        return decode(raw_path[1:].partition("/")[0])
    except PercentError:
        return ""
