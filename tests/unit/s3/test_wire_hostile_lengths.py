"""Text from strangers costs time in proportion to its length, however it is made up."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from meshwire.errors import S3Error
from meshwire.http_values import conditional_requests, multipart_form_data
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.sigv4 import read_claim
from meshwire.sigv4.aws_chunked import ChunkedDecoder

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST = 16_000  # of one header, as the server takes it
SECONDS = 0.4  # of the processor; each takes less than a hundredth of that
HEADERS = (
    "authorization",
    "content-disposition",
    "content-encoding",
    "content-md5",
    "content-type",
    "if-match",
    "if-modified-since",
    "range",
    "x-amz-checksum-crc32",
    "x-amz-copy-source",
    "x-amz-copy-source-range",
    "x-amz-date",
    "x-amz-grant-read",
    "x-amz-meta-a",
    "x-amz-tagging",
    "x-amz-trailer",
)
BEGINNINGS = ("", "id=", 'id="', "bytes=", "AWS4-HMAC-SHA256 Credential=", "multipart/form-data;boundary=")
FILLINGS = (" ", "\t ", '"', ",", ";", "=", "a", '"a" ', "a=b,", "%41", "W/", "0", "-")


def took(work: Callable[[], object]) -> float:
    """Seconds of the processor that the work took, and nobody else in this process: neither other threads nor
    the collector, which goes through all that other tests left. What is refused was read, too."""
    collected = gc.isenabled()
    gc.disable()
    try:
        began = time.thread_time()
        with suppress(S3Error, ValueError):
            work()
        return time.thread_time() - began
    finally:
        if collected:
            gc.enable()


def test_trailers() -> None:
    for value in (" " * 8000 + "\x01", "\t" * 8000 + "\x01", "a " * 4000 + "\x01"):
        decoder = ChunkedDecoder("STREAMING-UNSIGNED-PAYLOAD-TRAILER", None, ("x-amz-checksum-crc32",))
        body = f"0\r\nx-amz-checksum-crc32:{value}\r\n\r\n".encode()
        assert took(lambda decoder=decoder, body=body: decoder.feed(body)) < SECONDS  # type: ignore[misc]  # bound at once


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str) -> None:
    for beginning in BEGINNINGS:
        for filling in FILLINGS:
            value = beginning + filling * (LONGEST // len(filling)) + "\x01x x"
            head = RequestHead("PUT", "/bucket/key", "", {"host": "h", name: value})
            assert took(lambda head=head: (read_claim(head), parse_request(head))) < SECONDS, (  # type: ignore[misc]  # bound at once
                beginning,
                filling,
            )


@pytest.mark.parametrize("filling", FILLINGS)
def test_values_by_themselves(filling: str) -> None:
    text = filling * (LONGEST // len(filling)) + "\x01x"
    for read in (
        conditional_requests.parse_etag_list,
        conditional_requests.parse_range,
        multipart_form_data.read_boundary,
    ):
        for beginning in BEGINNINGS:
            assert took(lambda read=read, text=beginning + text: read(text)) < SECONDS  # type: ignore[misc]  # bound at once
