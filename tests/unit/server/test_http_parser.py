"""The request parser: what it reports, however its input is cut, and what it refuses."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.server.http_parser import MalformedRequestError, RequestParser

if TYPE_CHECKING:
    from meshd.server.http_parser import ParsedHead

LIMIT = 32 << 10


class Receiver:
    """Keeps what it is told; takes `most` requests."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.heads: list[ParsedHead] = []
        self.bodies: list[bytes] = []
        self.ended = 0

    @property
    def takes_requests(self) -> bool:
        return len(self.heads) < self.most

    def on_request(self, head: ParsedHead) -> None:
        assert self.ended == len(self.heads)
        self.heads.append(head)
        self.bodies.append(b"")

    def on_body(self, data: bytes) -> None:
        self.bodies[-1] += data

    def on_body_end(self) -> None:
        self.ended += 1
        assert self.ended == len(self.heads)


def parsed(*pieces: bytes) -> Receiver:
    receiver = Receiver()
    parser = RequestParser(receiver, LIMIT)
    for piece in pieces:
        assert parser.feed(piece) == b""
    return receiver


PUT = b"PUT /b/k?x HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nx-a:\t2 \r\n"
CHUNKED = PUT + b"Transfer-Encoding: chunked\r\n\r\n5;e=1\r\nhello\r\n1\r\n!\r\n0\r\nX-Trailer: t\r\n\r\n"
SIZED = PUT + b"Content-Length: 6\r\n\r\nhello!"
UPGRADE = b"Connection: upgrade\r\nUpgrade: h2c\r\n"
REQUESTS = {
    "sized": SIZED,
    "chunked": CHUNKED,
    "sized, for an upgrade": SIZED.replace(b"X-A: 1\r\n", b"X-A: 1\r\n" + UPGRADE),
    "chunked, for an upgrade": CHUNKED.replace(b"X-A: 1\r\n", b"X-A: 1\r\n" + UPGRADE),
}


@pytest.mark.parametrize("raw", REQUESTS.values(), ids=REQUESTS)
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_any_cutting_gives_the_same_requests(raw: bytes, cuts: list[int]) -> None:
    stream = raw + b"GET /next HTTP/1.1\r\nhost: h\r\n\r\n" + raw
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    told = parsed(*[stream[a:b] for a, b in itertools.pairwise(places)])
    assert told.bodies == [b"hello!", b"", b"hello!"]
    assert told.ended == 3
    assert told.heads[0] == told.heads[2]
    head = told.heads[0]
    assert (head.method, head.target, head.http_version) == ("PUT", "/b/k?x", "1.1")
    assert (head.headers["x-a"], head.headers["host"], head.keep_alive) == ("1,2", "h", True)
    assert (b"X-A", b"1") in head.raw_headers
    assert "x-trailer" not in head.headers


GET = b"GET / HTTP/1.1\r\nhost: h\r\n"
MALFORMED = {
    "a folded header": GET + b"a: b\r\n c\r\n\r\n",
    "bare line feeds": GET.replace(b"\r\n", b"\n") + b"\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nhost : h\r\n\r\n",
    "a control character": GET + b"a: \x01\r\n\r\n",
    "two hosts": GET + b"Host: h\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two lengths": GET + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx",
    "a length and chunks": GET + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "chunks and a length": GET + b"transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n",
    "another coding": GET + b"transfer-encoding: gzip\r\n\r\n",
    "a coding before chunks": GET + b"transfer-encoding: gzip, chunked\r\n\r\n",
    "a target of another host": b"GET http://g/k HTTP/1.1\r\nhost: h\r\n\r\n",
    "a target of another port": b"GET http://h:1/k HTTP/1.1\r\nhost: h\r\n\r\n",
    "a target with a user": b"GET http://h@h/k HTTP/1.1\r\nhost: h\r\n\r\n",
    "chunks that are not the last coding": GET + b"transfer-encoding: chunked, gzip\r\n\r\n",
    "a length that is none": GET + b"content-length: +1\r\n\r\nx",
    "a length beyond 64 bits": GET + b"content-length: 99999999999999999999\r\n\r\n",
    "a tunnel": b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n",
    "a target without a path": b"GET h HTTP/1.1\r\nhost: h\r\n\r\n",
    "an asterisk": b"GET * HTTP/1.1\r\nhost: h\r\n\r\n",
    "what follows a last request": GET + b"connection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "a chunk's size that is none": GET + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a chunk that is longer than it says": GET + b"transfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
}
TOO_LARGE = {
    "a request line": b"GET /" + b"a" * (17 << 10) + b" HTTP/1.1\r\nhost: h\r\n\r\n",
    "a header": GET + b"a: " + b"b" * (17 << 10) + b"\r\n\r\n",
    "a header without end": GET + b"a: " + b"b" * (17 << 10) + bytes(1 << 20),
    "a head without end": GET + b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(60)),
    "trailers": GET + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000,
    "a chunk's extension": GET + b"transfer-encoding: chunked\r\n\r\n5;" + b"e" * (200 << 10),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_is_refused(raw: bytes, size: int) -> None:
    with pytest.raises(MalformedRequestError) as refused:
        parsed(*[raw[start : start + size] for start in range(0, len(raw), size)])
    assert not refused.value.too_large


@pytest.mark.parametrize("raw", TOO_LARGE.values(), ids=TOO_LARGE)
@pytest.mark.parametrize("size", [999, 1 << 21])
def test_what_is_too_large(raw: bytes, size: int) -> None:
    with pytest.raises(MalformedRequestError) as refused:
        parsed(*[raw[start : start + size] for start in range(0, len(raw), size)])
    assert refused.value.too_large


def test_too_many_headers() -> None:
    with pytest.raises(MalformedRequestError):
        parsed(GET + b"".join(b"x-%d: y\r\n" % i for i in range(128)) + b"\r\n")


@pytest.mark.parametrize("target", [b"/", b"http://h/k", b"/a/../b?c#d"])
def test_targets_are_taken_as_sent(target: bytes) -> None:
    assert parsed(b"GET %b HTTP/1.1\r\nhost: h\r\n\r\n" % target).heads[0].target == target.decode()


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (GET, True),
        (GET + b"Connection: close\r\n", False),
        (b"GET / HTTP/1.0\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_who_keeps_a_connection(head: bytes, keep: bool) -> None:
    assert parsed(head + b"\r\n").heads[0].keep_alive is keep


def test_it_stops_when_no_more_requests_are_taken() -> None:
    receiver = Receiver(2)
    parser, one = RequestParser(receiver, LIMIT), GET + b"\r\n"
    between = []
    left = parser.feed(one * 5)
    assert left == one * 3
    between.append(parser.at_boundary)
    receiver.most = 5
    assert parser.feed(left + one[:5]) == one[:5]
    receiver.most = 6
    assert parser.feed(one[:5]) == b""
    between.append(parser.at_boundary)
    assert parser.feed(one[5:]) == b""
    between.append(parser.at_boundary)
    assert receiver.ended == 6
    assert between == [True, False, True]
