"""The worked examples of AWS's documentation: what they publish verifies, and our presigned URL is theirs.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html, sigv4-query-string-auth.html,
sigv4-streaming.html and sigv4-streaming-trailers.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshwire.errors import S3Error
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, presign, read_claim, verify
from meshwire.sigv4.aws_chunked import ChunkedDecoder

if TYPE_CHECKING:
    from meshwire.sigv4 import Verified

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NOW = 1369353600  # 20130524T000000Z
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
VIRTUAL_HOST = "examplebucket.s3.amazonaws.com"

EXAMPLES = {
    "get object": (
        "GET",
        "/test.txt",
        "",
        {"host": VIRTUAL_HOST, "range": "bytes=0-9"},
        EMPTY,
        "host;range;x-amz-content-sha256;x-amz-date",
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "put object": (
        "PUT",
        "/test$file.text",
        "",
        {
            "host": VIRTUAL_HOST,
            "date": "Fri, 24 May 2013 00:00:00 GMT",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
        },
        "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
        "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "get bucket lifecycle": (
        "GET",
        "/",
        "lifecycle",
        {"host": VIRTUAL_HOST},
        EMPTY,
        "host;x-amz-content-sha256;x-amz-date",
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "list objects": (
        "GET",
        "/",
        "max-keys=2&prefix=J",
        {"host": VIRTUAL_HOST},
        EMPTY,
        "host;x-amz-content-sha256;x-amz-date",
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "chunked upload": (
        "PUT",
        "/examplebucket/chunkObject.txt",
        "",
        {
            "host": "s3.amazonaws.com",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": "66560",
            "content-length": "66824",
        },
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "content-encoding;content-length;host;x-amz-content-sha256;x-amz-date;x-amz-decoded-content-length;"
        "x-amz-storage-class",
        "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    ),
    "chunked upload with trailer": (
        "PUT",
        "/examplebucket/chunkObject.txt",
        "",
        {
            "host": "s3.amazonaws.com",
            "x-amz-storage-class": "REDUCED_REDUNDANCY",
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": "66560",
            "x-amz-trailer": "x-amz-checksum-crc32c",
        },
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
        "content-encoding;host;x-amz-content-sha256;x-amz-date;x-amz-decoded-content-length;x-amz-storage-class;"
        "x-amz-trailer",
        "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    ),
}


def example(name: str, **changed: str) -> RequestHead:
    method, path, query, headers, payload_hash, signed, signature = EXAMPLES[name]
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20130524/us-east-1/s3/aws4_request,"
        f"SignedHeaders={signed},Signature={signature}"
    )
    added = {"x-amz-date": "20130524T000000Z", "x-amz-content-sha256": payload_hash}
    return RequestHead(method, path, query, {**headers, **added, "authorization": authorization, **changed})


def verified(head: RequestHead) -> Verified:
    claim = read_claim(head)
    assert claim is not None
    assert claim.access_key == ACCESS_KEY
    return verify(claim, head, SECRET_KEY, NOW)


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_signature_verifies(name: str) -> None:
    assert verified(example(name)).seed_signature == EXAMPLES[name][-1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_changed_request_does_not(name: str) -> None:
    head = example(name, host="other.example")
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verified(head)


PRESIGNED = (
    "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
    "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z"
    "&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)


def test_presigned_url_is_the_published_one() -> None:
    url = presign(
        "GET",
        "https://examplebucket.s3.amazonaws.com/test.txt",
        Credential(ACCESS_KEY, SECRET_KEY),
        region="us-east-1",
        expires=86400,
        timestamp=NOW,
    )
    assert url == PRESIGNED


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (NOW, None),
        (NOW + 86400, None),
        (NOW + 86401, "expired"),
        (NOW - 900, None),
        (NOW - 901, "not valid yet"),
    ],
)
def test_presigned_url_lives_as_long_as_it_says(now: int, code: str | None) -> None:
    head = RequestHead("GET", "/test.txt", PRESIGNED.partition("?")[2], {"host": VIRTUAL_HOST})
    claim = read_claim(head)
    assert claim is not None
    assert claim.presigned
    if code is None:
        verify(claim, head, SECRET_KEY, now)
        return
    with pytest.raises(S3Error, match=code) as caught:
        verify(claim, head, SECRET_KEY, now)
    assert caught.value.code == "AccessDenied"


CHUNKS = (
    b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n"
    + b"a" * 65536
    + b"\r\n400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n"
    + b"a" * 1024
    + b"\r\n0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n"
)
CHUNKS_WITH_TRAILER = (
    b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n"
    + b"a" * 65536
    + b"\r\n400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n"
    + b"a" * 1024
    + b"\r\n0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n"
    + b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    + b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
)


def decoder(name: str) -> ChunkedDecoder:
    head = example(name)
    trailers = [head.headers["x-amz-trailer"]] if "x-amz-trailer" in head.headers else []
    return ChunkedDecoder(head.headers["x-amz-content-sha256"], verified(head), trailers, 66560)


def test_published_chunks_decode() -> None:
    body = decoder("chunked upload")
    assert b"".join(body.feed(CHUNKS)) == b"a" * 66560
    assert body.finish() == {}


def test_published_chunks_with_trailer_decode() -> None:
    body = decoder("chunked upload with trailer")
    assert b"".join(body.feed(CHUNKS_WITH_TRAILER)) == b"a" * 66560
    assert body.finish() == {"x-amz-checksum-crc32c": "sOO8/Q=="}


@pytest.mark.parametrize("old", [b"aaaa", b"ad80c7", b"005562", b"b6c6ea"])
def test_tampered_chunks_are_refused(old: bytes) -> None:
    new = b"aaab" if old == b"aaaa" else b"000000"
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        decoder("chunked upload").feed(CHUNKS.replace(old, new, 1))


@pytest.mark.parametrize("old", [b"sOO8", b"d81f82", b"2ca2ab"])
def test_tampered_trailers_are_refused(old: bytes) -> None:
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        decoder("chunked upload with trailer").feed(CHUNKS_WITH_TRAILER.replace(old, b"0000" + old[4:], 1))
