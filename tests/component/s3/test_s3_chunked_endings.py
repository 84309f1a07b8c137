"""How clients end an aws-chunked body, as bytes: minio-go's way among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.component.s3.test_s3_wire import UNSIGNED, crc32_of, stored, streaming_head

if TYPE_CHECKING:
    from tests.support.s3_raw import Wire

CHECKSUM = b"x-amz-checksum-crc32:" + crc32_of(b"hello").encode()


def put(wire: Wire, target: str, ending: bytes) -> tuple[int, str]:
    """Status and code of an upload of `hello` whose trailer is followed by `ending`."""
    body = b"5\r\nhello\r\n0\r\n" + CHECKSUM + ending
    head = streaming_head(wire, target, UNSIGNED, body, 5, x_amz_trailer="x-amz-checksum-crc32")
    answer = wire.exchange(head + body)
    return answer.status, answer.code if answer.body else ""


ENDINGS = [b"\r\n\r\n", b"\n\r\n", b"\n\n", b"\n\r\n\r\n", b"\r\n\r\n\r\n", b"\n\n\n"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_line_more_is_forgiven(wire: Wire, s3: Any, bucket: str, ending: bytes) -> None:
    """minio-go ends the trailer with LF and adds CRLF twice, and counts it all in Content-Length."""
    assert put(wire, f"/{bucket}/k", ending) == (200, "")
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (got["Body"].read(), got["ChecksumCRC32"]) == (b"hello", crc32_of(b"hello"))


def test_a_part_that_ends_so(wire: Wire, s3: Any, bucket: str) -> None:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm="CRC32")["UploadId"]
    assert put(wire, f"/{bucket}/k?partNumber=1&uploadId={upload}", b"\n\r\n\r\n") == (200, "")
    [part] = s3.list_parts(Bucket=bucket, Key="k", UploadId=upload)["Parts"]
    assert (part["Size"], part["ChecksumCRC32"]) == (5, crc32_of(b"hello"))


@pytest.mark.parametrize("surplus", [b"x", b"\r\nx", b"\r\n\r", b"\r\n\r\n", b"0\r\n\r\n", b" \n"])
def test_nothing_else_follows_the_end(wire: Wire, s3: Any, bucket: str, surplus: bytes) -> None:
    assert put(wire, f"/{bucket}/k", b"\r\n\r\n" + surplus) == (400, "InvalidRequest")
    assert stored(s3, bucket) == []
