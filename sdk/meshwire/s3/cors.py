"""CORS: which rule of a bucket matches a browser's request, and the headers of the response.

Law: origins and methods are compared exactly, header names without case; a pattern has at most one `*`.
Invariant: a response that depends on the origin carries `Vary`, whether the request was allowed or not.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/cors.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.errors import S3Error
from meshwire.s3.operations import Preflight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwire.s3.bucket_settings import CorsRule

    Headers = list[tuple[str, str]]

METHODS = frozenset({"GET", "PUT", "HEAD", "POST", "DELETE"})
_VARY = ("vary", "Origin, Access-Control-Request-Headers, Access-Control-Request-Method")
_REFUSED = (
    "CORSResponse: This CORS request is not allowed: no rule of the bucket matches its Origin, "
    "Access-Control-Request-Method and all of its Access-Control-Request-Headers."
)


def read_preflight(bucket: str, key: str, headers: Mapping[str, str]) -> Preflight:
    """Parse a preflight request. Raises S3Error BadRequest."""
    origin = headers.get("origin")
    if not origin:
        raise S3Error("BadRequest", "Insufficient information. Origin request header needed.")
    method = headers.get("access-control-request-method", "")
    if method not in METHODS:
        raise S3Error("BadRequest", f"Invalid Access-Control-Request-Method: {method[:32] or 'null'}")
    asked = headers.get("access-control-request-headers", "").split(",")
    return Preflight(
        bucket, key, origin, method, tuple(name.strip().lower() for name in asked if name.strip())
    )


def find_cors_rule(
    rules: Iterable[CorsRule], origin: str, method: str, headers: tuple[str, ...] = ()
) -> CorsRule | None:
    """Return the first rule that allows a page from `origin` to send `method` with these headers
    (lower-case)."""
    for rule in rules:
        if (
            method in rule.methods
            and any(_fits(pattern, origin) for pattern in rule.origins)
            and all(any(_fits(pattern, name) for pattern in rule.headers) for name in headers)
        ):
            return rule
    return None


def cors_forbidden() -> S3Error:
    """Return the error for a preflight that no rule allows."""
    return S3Error("AccessForbidden", _REFUSED, headers=dict([_VARY]))


def cors_response_headers(rules: tuple[CorsRule, ...], origin: str | None, method: str) -> Headers:
    """Return the CORS headers for the response to an actual request, including a disallowed one. Empty for
    a bucket without rules."""
    if not rules:
        return []
    rule = None if origin is None else find_cors_rule(rules, origin, method)
    return [_VARY] if origin is None or rule is None else cors_allow_headers(rule, origin)


def cors_allow_headers(rule: CorsRule, origin: str, asked: tuple[str, ...] = ()) -> Headers:
    """Return the headers that allow a page to read the response; `asked` are the headers of its preflight."""
    anyone = "*" in rule.origins
    headers = [
        ("access-control-allow-origin", "*" if anyone else origin),
        ("access-control-allow-methods", ", ".join(rule.methods)),
    ]
    if asked:
        headers.append(("access-control-allow-headers", ", ".join(asked)))
    if rule.exposed:
        headers.append(("access-control-expose-headers", ", ".join(rule.exposed)))
    if rule.max_age is not None:
        headers.append(("access-control-max-age", str(rule.max_age)))
    if not anyone:
        headers.append(("access-control-allow-credentials", "true"))
    return [*headers, _VARY]


def _fits(pattern: str, text: str) -> bool:
    before, star, after = pattern.partition("*")
    if not star:
        return pattern == text
    return len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after)
