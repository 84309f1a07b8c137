"""The short way answers as the ordinary one does, byte for byte but for request id and date, and counts
alike."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwire.http_values import dates
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.hot_servers import BODY, NOW, OTHER, ROOT, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ETAG = hashlib.md5(BODY).hexdigest()
HOST = "127.0.0.1:9000"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def request(
    target: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    unsigned: Mapping[str, str] | None = None,
    credential: tuple[str, str] | None = ROOT,
    when: int = NOW,
) -> bytes:
    """A head as a client sends it; `unsigned` headers are added after signing, as they are written."""
    path, _, query = target.partition("?")
    fields = {"host": HOST, **(headers or {})}
    if credential is not None:
        signed = RequestHead(method, path, query, fields)
        payload = "UNSIGNED-PAYLOAD"
        fields |= sign(
            signed, Credential(*credential), region="us-east-1", timestamp=when, payload_hash=payload
        )
    lines = [f"{name}: {value}" for name, value in (fields | dict(unsigned or {})).items()]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode("utf-8", "surrogateescape")


TARGETS = st.sampled_from(
    [
        *["/bench/plain"] * 8,
        "/bench/empty",
        "/bench/large",
        "/bench/parts",
        "/bench/a%20b/%C3%BC%2B%25~",
        "/bench/a b/ü+%~",
        "/bench/a%20b/%c3%bc+%25%7e",
        "/bench/missing",
        "/bench/pl%61in",
        "/bench/plain/",
        "//bench/plain",
        "/bench//plain",
        "/bench/%zz",
        "/bench/%ff",
        "/bench/%00",
        "/bench",
        "/bench/",
        "/",
        "/nowhere/plain",
        "/Bad_Bucket/plain",
        "/theirs/plain",
        "/pages/plain",
        "/kept/plain",
        "/kept/gone",
        "/-/nothing",
        "/metrics",
        "/bench/" + "k" * 1025,
        "/bench/plain?x-id=GetObject",
        "/bench/plain?versionId=null",
        "/bench/plain?versionId=nonsense",
        "/bench/parts?partNumber=2",
        "/bench/plain?response-content-type=text/plain",
        "/bench/plain?tagging",
        "/bench/plain?",
        "http://127.0.0.1/bench/plain",
        "*",
    ]
)
DATES = [dates.format_http(NOW + delta) for delta in (-100_000, 0, 100_000)]
HEADERS: dict[str, list[str]] = {
    "range": [
        "bytes=0-9",
        "bytes=5-",
        "bytes=-7",
        "bytes=9-5",
        "bytes=99999-",
        "bytes=0-1,3-4",
        "lines=1",
        "",
    ],
    "if-match": [f'"{ETAG}"', ETAG, '"other"', "*", f'"x", "{ETAG}"'],
    "if-none-match": [f'"{ETAG}"', '"other"', "*"],
    "if-modified-since": [*DATES, "yesterday"],
    "if-unmodified-since": DATES,
    "x-amz-checksum-mode": ["ENABLED", "enabled", "no"],
    "user-agent": ["aws-cli/2 (one; two)", ""],
    "accept-encoding": ["identity", "gzip"],
    "connection": ["keep-alive", "Keep-Alive", "close", "upgrade"],
    "origin": ["https://page.example", "https://elsewhere.example"],
    "x-amz-expected-bucket-owner": ["root"],
    "x-amz-request-payer": ["requester"],
    "x-amz-security-token": ["nonsense"],
    "x-custom": ["a", "b\tc", "  two  blanks  "],
    "content-length": ["0"],
    "content-type": ["text/plain"],
    "expect": ["100-continue"],
    "te": ["trailers"],
    "cache-control": ["no-cache"],
    "date": DATES,
}
NAMES = sorted(HEADERS)
FIELDS = st.lists(st.sampled_from(NAMES), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(HEADERS[name]) for name in names})
)
CREDENTIALS = st.sampled_from(
    [ROOT, ROOT, ROOT, ROOT, OTHER, None, (ROOT[0], "wrong-secret"), ("nobody", ROOT[1])]
)
SKEWS = st.sampled_from([0, 0, 0, 0, 899, 900, 901, -900, -901, 86_400])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    target=TARGETS,
    method=st.sampled_from(["GET", "GET", "GET", "HEAD", "OPTIONS"]),
    headers=FIELDS,
    unsigned=FIELDS,
    credential=CREDENTIALS,
    skew=SKEWS,
    shout=st.booleans(),
)
def test_both_ways_answer_alike(
    pair: Pair,
    target: str,
    method: str,
    headers: dict[str, str],
    unsigned: dict[str, str],
    credential: tuple[str, str] | None,
    skew: int,
    shout: bool,
) -> None:
    if shout:
        unsigned = {name.title(): value for name, value in unsigned.items()}
    data = request(
        target, method=method, headers=headers, unsigned=unsigned, credential=credential, when=NOW + skew
    )
    pair.compare([data], head=method == "HEAD")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(min_size=1, max_size=3), st.integers(0, 500))
def test_a_damaged_head_is_refused_alike(pair: Pair, noise: bytes, at: int) -> None:
    data = request("/bench/plain", unsigned={"connection": "close"})
    at %= len(data) - 4
    damaged = data[:at] + noise + data[at + len(noise) : -4] + b"\r\n\r\n"
    pair.reconnect()
    pair.compare([damaged])
    pair.reconnect()


def test_plain_reads_take_the_short_way(pair: Pair) -> None:
    pair.compare([request("/bench/plain")])
    before = pair.answered
    for headers in ({}, {"range": "bytes=5-"}, {"x-amz-checksum-mode": "ENABLED"}, {"if-match": ETAG}):
        assert pair.compare([request("/bench/plain", headers=headers)]).startswith(b"HTTP/1.1 20")
    for target in ("/bench/empty", "/kept/plain", "/bench/a%20b/%C3%BC%2B%25~"):
        pair.compare([request(target)])
    pair.compare([request("/bench/plain", method="HEAD")], head=True)
    for headers in ({}, {"range": "bytes=5-180000"}):
        pair.compare([request("/bench/large", headers=headers)])
    assert pair.answered == before + 10
    for target in ("/bench/parts", "/bench/missing", "/pages/plain?x-id=GetObject"):
        pair.compare([request(target)])
    assert pair.answered == before + 10


def test_requests_in_pieces_and_in_a_row(pair: Pair) -> None:
    pair.reconnect()
    one, two = request("/bench/plain"), request("/bench/plain", headers={"range": "bytes=1-2"})
    pair.compare([one[:50], one[50:]])
    pair.compare([one + two], answers=2)
    pair.compare([one, two, one], answers=3)
    pair.compare([one + two[:30], two[30:]], answers=2)
    pair.compare([two])


def test_a_body_before_it_is_no_request(pair: Pair) -> None:
    """Bytes that look like a request are a body when the head before them said so."""
    inner = request("/bench/plain")
    put = request("/bench/written", method="PUT", headers={"content-length": str(len(inner))})
    pair.reconnect()
    pair.compare([request("/bench/plain")])
    before = pair.answered
    assert pair.compare([put, inner]).startswith(b"HTTP/1.1 200")
    assert pair.answered == before + 1
    assert pair.compare([request("/bench/written")]).endswith(inner)
    assert pair.answered == before + 2
