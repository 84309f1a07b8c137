"""Origins that lie, each answer written byte by byte: refused with the cause, or cut; never other bytes than
the origin gave, and other clients are served meanwhile. `pytest -s` prints what each costs."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from http.client import IncompleteRead
from typing import TYPE_CHECKING, Any

import pytest

from meshd.origins.client import obstore_origin
from meshd.origins.client.origin_api import OriginDownError
from meshd.origins.client.origin_pool import open_origin
from meshwire.origin import ANONYMOUS, parse_origin
from tests.support.attack_costs import costs
from tests.support.daemons import Daemon
from tests.support.hostile_origin import DATE, HostileOrigin, head, honest, listing, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.hostile_origin import Asked

MIB = 1 << 20
SMALL, LARGE = b"hello world", bytes(range(256)) * 4096 * 9
FACTS = ('etag: "e1"', f"last-modified: {DATE}")
PACKED = gzip.compress(bytes(20 * MIB))
_numbers = itertools.count()


@pytest.fixture(scope="module")
def origin() -> Iterator[HostileOrigin]:
    with HostileOrigin() as found:
        yield found


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start(args=("--cache", "200MiB")) as running:
        yield running
        assert "Traceback" not in running.output()


def backed(node: Daemon, origin: HostileOrigin, name: str) -> None:
    """A bucket with this origin, which is honest until the bucket is there."""
    origin.answer = honest(SMALL)
    document = {"url": f"s3://far/{name}", "endpoint": origin.endpoint, "credentials": ANONYMOUS}
    answer = node.request("PUT", f"/-/buckets/{name}", json.dumps(document).encode())
    assert answer.status == 200, answer


def moved(to: str) -> Callable[[Asked], bytes]:
    return lambda _: head("302 Found", f"location: {to}", "content-length: 0")


def answered(status: str, *headers: str, body: bytes = b"") -> Callable[[Asked], bytes]:
    return lambda asked: head(status, *headers) + (b"" if asked.method == "HEAD" else body)


def changed(old: bytes, new: bytes, data: bytes = SMALL) -> Callable[[Asked], bytes]:
    return lambda asked: whole(data, asked).replace(old, new)


REFUSED: dict[str, Callable[[Asked], bytes]] = {
    "redirect-to-itself": lambda asked: head("302 Found", f"location: {asked.target}", "content-length: 0"),
    "redirect-to-a-file": moved("file:///etc/passwd"),
    "redirect-to-nowhere": moved("http://127.0.0.1:1/"),
    "redirect-to-nothing": answered("302 Found"),
    "whole-for-a-range": answered("200 OK", f"content-length: {len(LARGE)}", *FACTS, body=LARGE),
    "another-range": changed(b"bytes 0-", b"bytes 5-", LARGE),
    "another-total": changed(b"/11\r", b"/99999999999999\r"),
    "range-below-zero": changed(b"bytes 0-10/11", b"bytes 10-0/-5"),
    "etag-of-control-characters": changed(b'"e1"', b'"a\x01b"'),
    "metadata-of-two-lines": changed(b"etag", b"x-amz-meta-a: b\rc\r\netag"),
    "headers-of-10-mb": answered("200 OK", *[f"x-{number}: {'y' * 1000}" for number in range(10_000)]),
    "no-length": answered("206 Partial Content", "content-range: bytes 0-10/11", *FACTS, body=SMALL),
    "no-http": lambda _: b"HTTP/9.9 abc\r\n\r\n",
    "a-page-for-an-error": answered(
        "403 Forbidden", f"content-length: {32 * MIB}", body=b"<p>\n" * (8 * MIB)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lies_are_refused_with_the_cause(node: Daemon, origin: HostileOrigin, name: str) -> None:
    backed(node, origin, name)
    origin.answer = lambda asked: iter((REFUSED[name](asked),))
    with costs(node, name) as cost:
        answer = node.request("GET", f"/{name}/k")
    assert answer.status in (403, 503), answer
    assert b"the origin of " + name.encode() in answer.body
    assert len(answer.body) < 1000
    assert cost.cpu < 3
    assert cost.memory < 250


def test_bytes_beyond_the_length_are_not_read(node: Daemon, origin: HostileOrigin) -> None:
    backed(node, origin, "longer")
    origin.answer = lambda asked: iter((whole(SMALL, asked), b"MORE" * 1000))
    assert node.request("GET", "/longer/k").body == SMALL


@pytest.mark.parametrize("name", ["shorter", "changing"])
def test_no_answer_is_of_two_versions_or_padded(node: Daemon, origin: HostileOrigin, name: str) -> None:
    """It is cut: its client sees that bytes are missing."""
    backed(node, origin, name)

    def answer(asked: Asked) -> Iterator[bytes]:
        etag = f"e{next(_numbers)}" if name == "changing" else "e1"
        given = whole(LARGE, asked, etag=etag)
        yield given[:-5000] if name == "shorter" and asked.method == "GET" else given

    origin.answer = answer
    with costs(node, name), pytest.raises(IncompleteRead) as caught:
        node.request("GET", f"/{name}/k")
    assert LARGE.startswith(caught.value.partial)


def test_packed_content_is_passed_on_as_it_is(node: Daemon, origin: HostileOrigin) -> None:
    """Nothing is unpacked: 20 KB that would be 20 MiB stay 20 KB."""
    backed(node, origin, "packed")
    origin.answer = lambda asked: iter((whole(PACKED, asked, "content-encoding: gzip"),))
    answer = node.request("GET", "/packed/k")
    assert (answer.body, answer.headers.get("content-encoding")) == (PACKED, "gzip")


@pytest.mark.parametrize("delimiter", ["", "/"])
def test_listings_without_end_are_given_up(
    origin: HostileOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str
) -> None:
    """Every page says that there is another one, with the same token, and has no key that was asked for."""
    monkeypatch.setattr(obstore_origin, "LISTING_SECONDS", 1.0)
    origin.answer = lambda _: iter((listing("a/k", token="same"),))
    described = parse_origin(
        {"url": "s3://far/endless", "endpoint": origin.endpoint, "credentials": ANONYMOUS}
    )
    opened = open_origin("endless", described, tmp_path)
    with pytest.raises(OriginDownError, match="did not finish a listing within 1 s"):
        asyncio.run(opened.list("z", delimiter, "", 10))


LISTINGS: dict[str, tuple[bytes, Any]] = {
    "entities": (b'<!DOCTYPE l [<!ENTITY a "x">]><a>&a;</a>', (200, 503)),
    "deep": (b"<a>" * 200_000, (200, 503)),
    "cut": (b"<Contents><Key>k", (200, 503)),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_listings_that_are_none(node: Daemon, origin: HostileOrigin, name: str) -> None:
    more, statuses = LISTINGS[name]
    backed(node, origin, f"list-{name}")
    origin.answer = lambda _: iter((listing("k", more=more),))
    with costs(node, f"list-{name}") as cost:
        answer = node.request("GET", f"/list-{name}?list-type=2&prefix=a")
    assert answer.status in statuses, answer
    assert cost.cpu < 3
