"""Pages of other origins: preflights, and what they may read of answers."""

from __future__ import annotations

import contextlib
import http.client
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.daemons import Daemon
    from tests.support.s3_raw import Answer, Wire

PAGE = "https://page.example"
RULES = {
    "CORSRules": [
        {
            "AllowedOrigins": [PAGE, "https://*.trusted.example"],
            "AllowedMethods": ["GET", "PUT"],
            "AllowedHeaders": ["x-amz-*", "Content-Type"],
            "ExposeHeaders": ["ETag"],
            "MaxAgeSeconds": 60,
        },
        {"AllowedOrigins": ["*"], "AllowedMethods": ["HEAD"]},
    ]
}
ASK = "access-control-request-method"


@pytest.fixture
def shared(s3: Any, bucket: str) -> str:
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration=RULES)
    s3.put_object(Bucket=bucket, Key="k", Body=b"x" * 300_000)
    return bucket


def options(daemon: Daemon, target: str, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    where = urlsplit(daemon.endpoint)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("OPTIONS", target, headers=named)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


def test_a_preflight_that_is_allowed(daemon: Daemon, shared: str) -> None:
    status, headers, body = options(
        daemon,
        f"/{shared}/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=of-the-put",
        Origin=PAGE,
        Access_Control_Request_Method="PUT",
        Access_Control_Request_Headers="X-Amz-Date, content-type",
    )
    assert (status, body) == (200, b"")
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-methods"] == "GET, PUT"
    assert headers["access-control-allow-headers"] == "x-amz-date, content-type"
    assert headers["access-control-expose-headers"] == "ETag"
    assert headers["access-control-max-age"] == "60"
    assert headers["access-control-allow-credentials"] == "true"
    assert headers["vary"].startswith("Origin")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"Origin": PAGE}, 400),
        ({"Origin": PAGE, ASK: "PATCH"}, 400),
        ({"Origin": PAGE, ASK: "DELETE"}, 403),
        ({"Origin": "https://evil.example", ASK: "GET"}, 403),
        ({"Origin": PAGE, ASK: "GET", "access-control-request-headers": "x-other"}, 403),
        ({"Origin": "https://a.trusted.example", ASK: "GET"}, 200),
        ({"Origin": "https://evil.example", ASK: "HEAD"}, 200),
    ],
)
def test_preflights(daemon: Daemon, shared: str, headers: dict[str, str], status: int) -> None:
    found, answered, _ = options(daemon, f"/{shared}/k", **headers)
    assert found == status
    assert ("access-control-allow-origin" in answered) is (status == 200)


def test_preflights_where_nothing_is_shared(daemon: Daemon, bucket: str) -> None:
    asked = {"Origin": PAGE, ASK: "GET"}
    for target in (f"/{bucket}/k", f"/{bucket}", "/no-such-bucket/k", "/"):
        status, headers, body = options(daemon, target, **asked)
        assert (status, b"<Code>AccessForbidden</Code>" in body) == (403, True), body
        assert "access-control-allow-origin" not in headers


def ask(wire: Wire, method: str, target: str, origin: str | None = PAGE, **more: Any) -> Answer:
    return wire.call(method, target, unsigned={} if origin is None else {"origin": origin}, **more)


def test_answers_can_be_read(wire: Wire, shared: str) -> None:
    """Small and large bodies, listings, writes."""
    for method, target in (
        ("GET", f"/{shared}/k"),
        ("GET", f"/{shared}?list-type=2"),
        ("PUT", f"/{shared}/other"),
    ):
        answer = ask(wire, method, target)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "ETag"
        assert answer.headers["vary"].startswith("Origin")
    assert ask(wire, "HEAD", f"/{shared}/k", "https://any").headers["access-control-allow-origin"] == "*"


def test_refusals_can_be_read(wire: Wire, shared: str) -> None:
    missing = ask(wire, "GET", f"/{shared}/missing")
    assert (missing.status, missing.headers["access-control-allow-origin"]) == (404, PAGE)
    unknown = ask(wire, "GET", f"/{shared}?no-such-thing")
    assert (unknown.status, unknown.headers["access-control-allow-origin"]) == (501, PAGE)
    stale = ask(wire, "GET", f"/{shared}/k", when=1_000_000_000)
    assert (stale.status, stale.headers["access-control-allow-origin"]) == (403, PAGE)


def test_other_pages_and_no_pages(wire: Wire, shared: str, s3: Any) -> None:
    for origin in ("https://evil.example", None):
        answer = ask(wire, "GET", f"/{shared}/k", origin)
        assert answer.status == 200  # it is the browser that keeps it from the page
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"].startswith("Origin")
    s3.delete_bucket_cors(Bucket=shared)
    answer = ask(wire, "GET", f"/{shared}/k")
    assert "vary" not in answer.headers
    assert "access-control-allow-origin" not in answer.headers
