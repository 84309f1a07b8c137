"""The short way of small PUTs answers, stores, counts and audits as the ordinary one does."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.support.hot_servers import NOW, OTHER, ROOT, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOST = "127.0.0.1:9000"
SIZES = (0, 1, 300, 10_000, 65_536, 65_537)
BODIES = {size: bytes(range(256)) * (size // 256) + bytes(size % 256) for size in SIZES}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(embedded=True)
    yield pair
    pair.close()


def put(
    target: str,
    body: bytes = b"small",
    *,
    headers: Mapping[str, str] | None = None,
    unsigned: Mapping[str, str] | None = None,
    credential: tuple[str, str] | None = ROOT,
    payload: str | None = None,
    when: int = NOW,
    title: bool = False,
) -> bytes:
    """The head of a PUT, its names in `title` case. `payload`: the payload hash, if not that of the body."""
    path, _, query = target.partition("?")
    fields = {"host": HOST, **(headers or {})}
    if credential is not None:
        digest = hashlib.sha256(body).hexdigest() if payload is None else payload
        head = RequestHead("PUT", path, query, fields)
        fields |= sign(head, Credential(*credential), region="us-east-1", timestamp=when, payload_hash=digest)
    fields = {"content-length": str(len(body)), **fields, **(unsigned or {})}
    lines = [f"{name.title() if title else name}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"PUT {target} HTTP/1.1", *lines, "", ""]).encode()


async def taken(pair: Pair) -> list[object]:
    """What is stored of the objects that these tests write, but for where and when; removes them."""
    told = list[object]()
    for bucket in ("bench", "pages", "theirs"):
        for key in ("new", "c d/ü+%~", "/new", "x.tar"):
            record = pair.store.get(bucket, key)
            if record is None:
                continue
            facts = {name: getattr(record, name) for name in record.__struct_fields__}
            for name in ("extents", "manifest", "stamp", "modified"):
                facts.pop(name)
            data = pair.store.read_range(record, 0, record.size)
            told.append((bucket, key, facts, hashlib.md5(data).hexdigest()))
            await pair.store.delete(bucket, key)
    return told


TARGETS = st.sampled_from(
    [
        *["/bench/new"] * 8,
        "/bench/c%20d/%C3%BC%2B%25~",
        "/bench/x.tar",
        "/bench/x.tar!/member",
        "/bench/%zz",
        "/bench/" + "k" * 1025,
        "/bench//new",
        "/bench",
        "/nowhere/new",
        "/theirs/new",
        "/pages/new",
        "/bench/new?tagging",
        "/bench/new?partNumber=1&uploadId=none",
        "/-/nothing",
    ]
)
BODY_HEADERS: dict[str, list[str]] = {
    "content-md5": ["right", "AAAAAAAAAAAAAAAAAAAAAA==", "nonsense", ""],
    "x-amz-checksum-crc32": ["right", "AAAAAA==", "nonsense"],
    "x-amz-checksum-sha256": ["right", "nonsense"],
    "x-amz-sdk-checksum-algorithm": ["CRC32", "SHA1", "NONE"],
}
HEADERS: dict[str, list[str]] = BODY_HEADERS | {
    "x-amz-meta-color": ["blue", "", "  two  blanks  ", "b\tc"],
    "x-amz-meta-mesh-unpack": ["true"],
    "content-type": ["image/jpeg", ""],
    "cache-control": ["no-store"],
    "content-disposition": ["attachment"],
    "content-encoding": ["gzip", "aws-chunked"],
    "expires": ["Thu, 01 Jan 2026 00:00:00 GMT"],
    "expect": ["100-continue", "100-Continue", "something"],
    "if-none-match": ["*", '"x"'],
    "if-match": ['"other"', "*"],
    "x-amz-acl": ["private", "public-read", "nonsense"],
    "x-amz-tagging": ["a=b", "a=b&a=c"],
    "x-amz-storage-class": ["STANDARD", "GLACIER"],
    "x-amz-copy-source": ["/bench/plain"],
    "x-amz-security-token": ["nonsense"],
    "origin": ["https://page.example"],
    "connection": ["keep-alive", "close"],
    "content-length": ["5", "05", "+5", "five"],
    "transfer-encoding": ["identity"],
    "x-custom": ["a"],
}
FIELDS = st.lists(st.sampled_from(sorted(HEADERS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(HEADERS[name]) for name in names})
)


def _right(fields: Mapping[str, str], body: bytes) -> dict[str, str]:
    digests = {
        "content-md5": hashlib.md5(body).digest(),
        "x-amz-checksum-crc32": zlib.crc32(body).to_bytes(4, "big"),
        "x-amz-checksum-sha256": hashlib.sha256(body).digest(),
    }
    return {
        name: base64.b64encode(digests[name]).decode() if value == "right" else value
        for name, value in fields.items()
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    target=TARGETS,
    size=st.sampled_from(SIZES),
    headers=FIELDS,
    unsigned=FIELDS,
    credential=st.sampled_from([ROOT] * 6 + [OTHER, None, (ROOT[0], "wrong-secret"), ("nobody", ROOT[1])]),
    payload=st.sampled_from(
        [None] * 4 + ["UNSIGNED-PAYLOAD", "0" * 64, "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "nonsense"]
    ),
    skew=st.sampled_from([0] * 6 + [901, -901]),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    head_alone=st.booleans(),
    title=st.booleans(),
)
def test_both_ways_store_alike(
    pair: Pair,
    target: str,
    size: int,
    headers: dict[str, str],
    unsigned: dict[str, str],
    credential: tuple[str, str] | None,
    payload: str | None,
    skew: int,
    cuts: list[float],
    head_alone: bool,
    title: bool,
) -> None:
    """A body that is not as long as declared is in the tests below, since its client must end it."""
    body = BODIES[size]
    declared = unsigned.get("content-length", headers.get("content-length"))
    if declared is not None:
        unsigned = {**unsigned, "connection": "close"}
        body = b"small" if declared in {"5", "05"} else b""
    head = put(
        target,
        body,
        headers=_right(headers, body),
        unsigned=_right(unsigned, body),
        credential=credential,
        payload=payload,
        when=NOW + skew,
        title=title,
    )
    pieces = [head, body] if head_alone and body else [head + body]
    whole = b"".join(pieces)
    for cut in sorted(cuts):
        at, data = int(cut * len(whole)), whole
        pieces = [data[:at], data[at:]] if at else pieces
    pair.compare(pieces, state=lambda: taken(pair))


def test_plain_puts_take_the_short_way(pair: Pair) -> None:
    body = BODIES[10_000]
    before = pair.answered
    for pieces in (
        [put("/bench/new", body) + body],
        [put("/bench/new", body), body],
        [put("/bench/new", body), body[:5], body[5:]],
        [put("/bench/new", b"") + b""],
        [put("/bench/new", body, unsigned={"expect": "100-continue"}), body],
        [put("/bench/new", body, headers={"x-amz-meta-color": "blue"}, title=True) + body],
        [put("/bench/new", body, payload="UNSIGNED-PAYLOAD") + body],
        [put("/bench/x.tar", body) + body],
        [put("/bench/new", body, headers={"if-none-match": "*"}) + body],
    ):
        assert b"HTTP/1.1 200" in pair.compare(pieces, state=lambda: taken(pair))
    assert pair.answered == before + 9
    refused = put("/bench/plain", body, headers={"if-none-match": "*"}) + body
    assert b"412" in pair.compare([refused])  # begun here, and refused by the regular path
    before += 1
    for head in (
        put("/bench/new", body, headers={"x-amz-tagging": "a=b"}),
        put("/bench/new", body, credential=(ROOT[0], "wrong-secret")),
    ):
        pair.compare([head + body], state=lambda: taken(pair))
    assert pair.answered == before + 9


def test_versions_are_made(pair: Pair) -> None:
    before = pair.answered
    head, body = put("/kept/new", b"small"), b"small"
    for _ in range(2):
        said = pair.loop.run_until_complete(pair.hot.ask([head + body]))
        assert said.startswith(b"HTTP/1.1 200")
        newest = pair.store.newest_version("kept", "new")
        assert newest is not None
        assert f"x-amz-version-id: {newest.version}".encode() in said
    assert pair.answered == before + 2
    assert len(pair.store.list_versions("kept", prefix="new").entries) == 2


def test_further_requests_wait_for_the_commit(pair: Pair) -> None:
    body = BODIES[10_000]
    one, two = put("/bench/new", body) + body, put("/bench/new", b"second") + b"second"
    said = pair.compare([one + two], answers=2, state=lambda: taken(pair))
    assert said.count(b"HTTP/1.1 200") == 2
    said = pair.compare([one[:-3], one[-3:] + two], answers=2, state=lambda: taken(pair))
    assert said.count(b"HTTP/1.1 200") == 2
