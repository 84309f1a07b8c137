"""Requests as boto3 really makes them (caught before they are sent): each is verified and parsed."""

from __future__ import annotations

import datetime
import io
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config

from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.http_values import dates
from meshwire.s3 import operations as ops
from meshwire.s3.operations import CopySource
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.s3.xml_documents import parse_complete, parse_delete
from meshwire.sigv4 import STREAMING_PAYLOADS, read_claim, verify
from meshwire.sigv4.aws_chunked import ChunkedDecoder

if TYPE_CHECKING:
    from meshwire.sigv4 import Verified

SECRET = "secret/+key"
KEYS = [
    "plain",
    "a b+c",
    "; @ : $ ' ( ) ! * ~ % # ? & = , [ ] { } | \\ ^ ` \" < >",
    "ключ/日本/é/\U0001f600",
    "//double//slashes/",
    "%41%2F",
    "x" * 1024,
    "../up/./and",
]


class Caught:
    """The last request of a client that never sends."""

    def __init__(self, endpoint: str, **config: Any) -> None:
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="eu-central-1",
            aws_access_key_id="AK",
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, **config),
        )
        self.client.meta.events.register("before-send.s3", self._catch)

    def _catch(self, request: Any, **_: Any) -> AWSResponse:
        self.request = request
        return AWSResponse(request.url, 200, {}, _Raw(b"" if request.method == "HEAD" else b"<Answer/>"))

    def head(self) -> RequestHead:
        target = self.request.url.split("://", 1)[1]
        host, _, path = target.partition("/")
        raw_path, _, query = f"/{path}".partition("?")
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value)
            for name, value in self.request.headers.items()
        }
        return RequestHead(self.request.method, raw_path, query, {"host": host, **headers})

    def verified(self) -> Verified:
        head = self.head()
        claim = read_claim(head)
        assert claim is not None
        assert claim.access_key == "AK"
        now = dates.parse_amz(claim.timestamp)
        assert now is not None
        return verify(claim, head, SECRET, now)

    def operation(self) -> ops.Operation:
        self.verified()
        return parse_request(self.head())

    def body(self) -> bytes:
        body = self.request.body
        return body if isinstance(body, bytes) else b"" if body is None else body.read()


class _Raw(io.BytesIO):
    """What botocore wants of urllib3's response."""

    def stream(self, **_: Any) -> list[bytes]:
        return [self.read()]


@pytest.fixture(scope="module")
def plain() -> Caught:
    return Caught("http://127.0.0.1:9000")


@pytest.fixture(scope="module")
def tls() -> Caught:
    return Caught("https://mesh.example")


@pytest.mark.parametrize("key", KEYS)
def test_keys_arrive_as_they_were(plain: Caught, key: str) -> None:
    plain.client.head_object(Bucket="photos", Key=key)
    assert plain.operation() == ops.GetObject("photos", key, head=True)
    plain.client.put_object(Bucket="photos", Key=key, Body=b"x")
    operation = plain.operation()
    assert isinstance(operation, ops.PutObject)
    assert operation.key == key
    plain.client.copy_object(Bucket="photos", Key="to", CopySource={"Bucket": "from-here", "Key": key})
    operation = plain.operation()
    assert isinstance(operation, ops.CopyObject)
    assert operation.source == CopySource("from-here", key)


def test_everything_about_an_object(plain: Caught) -> None:
    plain.client.put_object(
        Bucket="photos",
        Key="k",
        Body=b"hello",
        ContentType="text/plain; charset=utf-8",
        ContentEncoding="gzip",
        CacheControl="max-age=1",
        ContentDisposition='attachment; filename="a  b"',
        ContentLanguage="de",
        Expires=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC),
        Metadata={"Mixed-Case": "two  spaces", "empty": ""},
        IfNoneMatch="*",
        ContentMD5="XUFAKrxLKna5cZ2REBfFkg==",
        ChecksumAlgorithm="CRC32C",
    )
    operation = plain.operation()
    assert isinstance(operation, ops.PutObject)
    assert operation.headers.system == {
        "content-type": "text/plain; charset=utf-8",
        "content-encoding": "gzip",
        "cache-control": "max-age=1",
        "content-disposition": 'attachment; filename="a  b"',
        "content-language": "de",
        "expires": "Tue, 01 Jan 2030 00:00:00 GMT",
    }
    assert operation.headers.metadata == {"mixed-case": "two  spaces", "empty": ""}
    assert operation.conditions is not None
    assert operation.conditions.if_none_match == ("*",)
    assert list(operation.digests.checksums) == ["crc32c"]
    verifier = BodyVerifier(operation.digests, read_payload_hash(plain))
    verifier.update(plain.body())
    assert verifier.finish().checksums == operation.digests.checksums


def read_payload_hash(caught: Caught) -> str:
    claim = read_claim(caught.head())
    assert claim is not None
    return claim.payload_hash


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_trailers_over_tls(tls: Caught, algorithm: str) -> None:
    data = bytes(range(256)) * 5000
    tls.client.put_object(
        Bucket="photos", Key="k", Body=data, ContentEncoding="gzip", ChecksumAlgorithm=algorithm
    )
    head, operation = tls.head(), tls.operation()
    assert isinstance(operation, ops.PutObject)
    assert operation.headers.system == {"content-encoding": "gzip"}
    assert operation.digests.trailer == (algorithm.lower(),)
    payload_hash = read_payload_hash(tls)
    assert payload_hash in STREAMING_PAYLOADS
    decoder = ChunkedDecoder(
        payload_hash,
        tls.verified(),
        head.headers["x-amz-trailer"].split(","),
        int(head.headers["x-amz-decoded-content-length"]),
    )
    verifier = BodyVerifier(operation.digests, payload_hash)
    assert b"".join(decoder.feed(tls.body())) == data
    verifier.update(data)
    assert list(verifier.finish(decoder.finish()).checksums) == [algorithm.lower()]


def test_reads_and_listings(plain: Caught) -> None:
    client = plain.client
    client.get_object(Bucket="photos", Key="k", Range="bytes=-5", IfMatch='"abc"', ResponseContentType="a/b")
    operation = plain.operation()
    assert isinstance(operation, ops.GetObject)
    assert (operation.overrides, operation.conditions and operation.conditions.if_match) == (
        {"content-type": "a/b"},
        ("abc",),
    )
    client.list_objects_v2(Bucket="photos", Prefix="a+b é/", Delimiter="/", MaxKeys=7, StartAfter="a b")
    assert plain.operation() == ops.ListObjects(
        "photos", 2, "a+b é/", "/", 7, "a b", start_after="a b", encode_url=True
    )
    client.list_objects(Bucket="photos", Marker="m&m")
    assert plain.operation() == ops.ListObjects("photos", 1, after="m&m", encode_url=True)
    client.list_buckets()
    assert plain.operation() == ops.ListBuckets()
    client.get_bucket_location(Bucket="photos")
    assert plain.operation() == ops.GetBucketLocation("photos")


def test_deletes(plain: Caught) -> None:
    keys = ["a&b", "é<", "c+d e"]
    plain.client.delete_objects(
        Bucket="photos", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
    )
    assert isinstance(plain.operation(), ops.DeleteObjects)
    request = parse_delete(plain.body())
    assert [key for key, _, _ in request.keys] == keys
    assert request.quiet


def test_multipart(plain: Caught) -> None:
    client, upload = plain.client, {"Bucket": "photos", "Key": "k", "UploadId": "u-1"}
    client.create_multipart_upload(
        Bucket="photos", Key="k", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
    )
    operation = plain.operation()
    assert isinstance(operation, ops.CreateMultipartUpload)
    assert (operation.checksum_algorithm, operation.checksum_type) == ("crc64nvme", "FULL_OBJECT")
    client.upload_part(**upload, PartNumber=3, Body=b"part")
    operation = plain.operation()
    assert isinstance(operation, ops.UploadPart)
    assert (operation.upload_id, operation.part_number) == ("u-1", 3)
    client.upload_part_copy(
        **upload,
        PartNumber=4,
        CopySource="from-here/a b",
        CopySourceRange="bytes=5-9",
        CopySourceIfMatch="tag",
    )
    operation = plain.operation()
    assert isinstance(operation, ops.UploadPartCopy)
    assert (operation.source, operation.range) == (CopySource("from-here", "a b"), (5, 9))
    assert operation.source_conditions is not None
    parts = [{"PartNumber": 1, "ETag": '"x"', "ChecksumCRC32": "AAAAAA=="}, {"PartNumber": 2, "ETag": "y"}]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, MpuObjectSize=77)
    operation = plain.operation()
    assert isinstance(operation, ops.CompleteMultipartUpload)
    assert operation.object_size == 77
    assert parse_complete(plain.body()) == ((1, "x", {"crc32": "AAAAAA=="}), (2, "y", {}))
    client.list_parts(**upload, MaxParts=2, PartNumberMarker=1)
    assert plain.operation() == ops.ListParts("photos", "k", "u-1", 2, 1)
    client.abort_multipart_upload(**upload)
    assert plain.operation() == ops.AbortMultipartUpload("photos", "k", "u-1")
    client.list_multipart_uploads(Bucket="photos", Prefix="p")
    assert plain.operation() == ops.ListMultipartUploads("photos", prefix="p")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("method", ["get_object", "put_object"])
def test_presigned_urls(key: str, method: str) -> None:
    caught = Caught("http://127.0.0.1:9000", signature_version="s3v4")
    url = caught.client.generate_presigned_url(method, Params={"Bucket": "photos", "Key": key}, ExpiresIn=60)
    host, _, path = url.removeprefix("http://").partition("/")
    raw_path, _, query = f"/{path}".partition("?")
    head = RequestHead(method[:3].upper(), raw_path, query, {"host": host})
    claim = read_claim(head)
    assert claim is not None
    now = dates.parse_amz(claim.timestamp)
    assert now is not None
    verify(claim, head, SECRET, now + 59)
    operation = parse_request(head)
    assert isinstance(operation, ops.GetObject | ops.PutObject)
    assert operation.key == key
