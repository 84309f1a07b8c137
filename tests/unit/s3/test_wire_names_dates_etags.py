"""Names, dates and ETags: the small grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshwire import names
from meshwire.http_values import conditional_requests, dates, percent_encoding

if TYPE_CHECKING:
    from collections.abc import Callable


def _is_refused(check: Callable[[str], None], text: str) -> bool:
    try:
        check(text)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("name", ["abc", "a-b.c9", "photos--tensors", "a" * 63, "0a0"])
def test_good_buckets(name: str) -> None:
    assert not _is_refused(names.check_bucket_name, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ab",
        "a" * 64,
        "Abc",
        "a_b",
        "-abc",
        "abc-",
        ".abc",
        "a..b",
        "a.-b",
        "1.2.3.4",
        "xn--abc",
        "abc--x-s3",
        "é" * 3,
        "abc\n",
        "-mesh-",
    ],
)
def test_bad_buckets(name: str) -> None:
    with pytest.raises(names.BucketNameError):
        names.check_bucket_name(name)


@pytest.mark.parametrize("key", ["a", "/", "..", "a" * 1024, "é" * 512, "\x01\n", "\U0001f600"])
def test_good_keys(key: str) -> None:
    assert not _is_refused(names.check_key, key)


@pytest.mark.parametrize("key", ["", "a" * 1025, "é" * 513, "\0", "\ud800"])
def test_bad_keys(key: str) -> None:
    with pytest.raises(names.KeyNameError):
        names.check_key(key)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Sun, 06 Nov 1994 08:49:37 GMT", 784111777),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 784111777),
        ("Sun Nov  6 08:49:37 1994", 784111777),
        ("Sun, 06 Nov 1994 08:49:37 +0000", 784111777),
        ("1994-11-06T08:49:37Z", 784111777),
        ("Sun, 31 Feb 1994 08:49:37 GMT", None),
        ("Sun, 06 Nix 1994 08:49:37 GMT", None),
        ("tomorrow", None),
        ("", None),
    ],
)
def test_http_dates(text: str, seconds: int | None) -> None:
    assert dates.parse_http(text) == seconds


def test_dates_written() -> None:
    assert dates.format_http(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"
    assert dates.format_iso(784111777007) == "1994-11-06T08:49:37.007Z"
    times = [784111777007, 784111777999, 0, 784111777000, 1]
    assert dates.format_iso_many(times) == [dates.format_iso(each) for each in times]
    assert dates.format_amz(784111777) == "19941106T084937Z"
    assert dates.parse_amz("19941306T084937Z") is None
    assert dates.parse_iso("1994-11-06T08:49:37.1234567Z") == 784111777123


@pytest.mark.parametrize(
    ("header", "tags"),
    [
        ('"a"', ("a",)),
        ("a", ("a",)),
        ("*", ("*",)),
        ('W/"a" , "b,c", d', ("a", "b,c", "d")),
        ('"a" "b"', ('"a" "b"',)),
        ('""', ("",)),
        ("", ()),
    ],
)
def test_etag_lists(header: str, tags: tuple[str, ...]) -> None:
    assert conditional_requests.parse_etag_list(header) == tags


def test_etags_lose_and_gain_quotes() -> None:
    assert conditional_requests.unquote_etag(' W/"a-2" ') == "a-2"
    assert conditional_requests.quote_etag("a-2") == '"a-2"'


def test_percents() -> None:
    assert percent_encoding.decode("a%2Fb+%C3%A9") == "a/b+é"
    assert percent_encoding.split_query("a=b+c&d&e=%3D%2B&=f&&") == [
        ("a", "b c"),
        ("d", ""),
        ("e", "=+"),
        ("", "f"),
    ]
    assert percent_encoding.encode_path("/a b+%7e%2f") == "/a%20b%2B~/"
    for broken in ("%", "%2", "%zz", "%ff", "é%", "\ud800"):
        with pytest.raises(percent_encoding.PercentError):
            percent_encoding.decode(broken)
