"""Any bytes are an operation or an S3Error; what is written is read back the same."""

from __future__ import annotations

import base64
import re
import string
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwire import names
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import CODES, S3Error
from meshwire.http_values import conditional_requests, dates, percent_encoding
from meshwire.http_values.conditional_requests import UnsatisfiableRangeError, parse_range, resolve_range
from meshwire.s3 import listings, settings_xml, xml_documents
from meshwire.s3 import operations as ops
from meshwire.s3 import result_types as res
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.s3.responses import render, render_error
from meshwire.s3.xml_io import escape_xml, parse_xml
from tests.support.xml_text import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwire.s3.xml_io import Element

METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "get", ""]
PARAMETERS = [
    "acl",
    "location",
    "uploads",
    "uploadId",
    "partNumber",
    "delete",
    "list-type",
    "prefix",
    "delimiter",
    "max-keys",
    "marker",
    "versionId",
    "encoding-type",
    "continuation-token",
    "start-after",
    "max-parts",
    "part-number-marker",
    "x-id",
    "X-Amz-Signature",
    "x-amz-meta-a",
    "response-content-type",
    "response-expires",
    "key-marker",
    "max-uploads",
    "tagging",
    "attributes",
    "versions",
    "version-id-marker",
    "frobnicate",
]
HEADERS = [
    "range",
    "if-match",
    "if-none-match",
    "if-modified-since",
    "if-unmodified-since",
    "content-md5",
    "content-type",
    "content-encoding",
    "expires",
    "x-amz-meta-a",
    "x-amz-meta-é",
    "x-amz-copy-source",
    "x-amz-copy-source-range",
    "x-amz-acl",
    "x-amz-copy-source-if-match",
    "x-amz-metadata-directive",
    "x-amz-checksum-crc32",
    "x-amz-checksum-sha256",
    "x-amz-checksum-zz",
    "x-amz-checksum-type",
    "x-amz-checksum-mode",
    "x-amz-trailer",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-checksum-algorithm",
    "x-amz-storage-class",
    "x-amz-tagging",
    "x-amz-server-side-encryption",
    "origin",
    "x-amz-mp-object-size",
    "x-amz-tagging-directive",
    "x-amz-object-attributes",
    "x-amz-max-parts",
    "x-amz-part-number-marker",
]
VALUES = [
    "",
    "1",
    "2",
    "0",
    "-1",
    "99999999999",
    "url",
    "bytes=0-1",
    "null",
    "a/b",
    "CRC32",
    "AAAAAA==",
    "ENABLED",
    "REPLACE",
    "a=1&b=2",
    "ETag,Checksum",
]


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` returns, or the S3Error it raises; anything else it raises fails the test."""
    try:
        return call(*arguments)
    except S3Error as error:
        return error


anything = st.text(max_size=40)
paths = (
    anything | st.just("/bucket/key") | st.just("/bucket") | st.just("/") | anything.map("/bucket/".__add__)
)
query_values = (
    st.sampled_from(VALUES) | st.text(string.printable, max_size=10) | st.just("%") | st.just("%ff")
)
queries = anything | st.lists(
    st.tuples(st.sampled_from(PARAMETERS), query_values).map("=".join) | st.sampled_from(PARAMETERS),
    max_size=4,
).map("&".join)
headers = st.dictionaries(st.sampled_from(HEADERS), st.sampled_from(VALUES) | anything, max_size=6)


@given(st.sampled_from(METHODS), paths, queries, headers)
@example("GET", "/bucket/\udcff", "", {})
@example("GET", "/bucket/\ud800", "prefix=\ud800", {})
@example("PUT", "/bucket/key", "", {"x-amz-meta-a": "\udcff"})
@example("PUT", "/bucket/key", "", {"x-amz-meta-a": "\ud800"})
@example("PUT", "/bucket/key", "", {"x-amz-copy-source": "\ud800/k"})
def test_any_request_is_an_operation_or_an_s3_error(
    method: str, path: str, query: str, headers: dict[str, str]
) -> None:
    operation = outcome(parse_request, RequestHead(method, path, query, headers))
    if isinstance(operation, S3Error):
        rendered = render_error(operation, "id", path)
        assert rendered.status == CODES[operation.code].status
        ElementTree.fromstring(rendered.body)
        return
    assert isinstance(operation, ops.Operation)
    assert_storable(operation)


def assert_storable(operation: Any) -> None:
    """Every text of an operation can be encoded, and nothing could split a header."""
    for name in operation.__slots__:
        value = getattr(operation, name)
        if hasattr(value, "__slots__") and not isinstance(value, str):
            assert_storable(value)
        for text in value.values() if isinstance(value, dict) else [value]:
            if isinstance(text, str):
                text.encode()
        if isinstance(value, dict):
            assert not any(c in text for text in value.values() for c in "\r\n\0")


DOCUMENTS: list[Callable[[bytes], object]] = [
    xml_documents.parse_delete,
    xml_documents.parse_complete,
    xml_documents.parse_create_bucket,
    xml_documents.parse_error,
    xml_documents.parse_list_result,
    xml_documents.parse_list_buckets,
    xml_documents.parse_create_upload_result,
    xml_documents.parse_complete_result,
    xml_documents.parse_copy_result,
    xml_documents.parse_delete_result,
    settings_xml.parse_tagging,
]
TAGS = [
    "Delete",
    "Object",
    "Key",
    "ETag",
    "Quiet",
    "CompleteMultipartUpload",
    "Part",
    "PartNumber",
    "ChecksumCRC32",
    "Error",
    "Code",
    "CreateBucketConfiguration",
    "LocationConstraint",
    "ListBucketResult",
    "Contents",
    "Size",
    "LastModified",
    "a:b",
    "Tagging",
    "TagSet",
    "Tag",
    "Value",
    "ListVersionsResult",
    "DeleteMarker",
    "VersionId",
]
trees = st.recursive(
    st.tuples(st.sampled_from(TAGS), st.sampled_from(["", "1", "k", "&amp;", "<![CDATA[x]]>", "&x;"])).map(
        lambda pair: f"<{pair[0]}>{pair[1]}</{pair[0]}>"
    ),
    lambda inner: st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=4)).map(
        lambda pair: f"<{pair[0]}>{''.join(pair[1])}</{pair[0]}>"
    ),
)


@pytest.mark.parametrize("parse", DOCUMENTS, ids=lambda parse: parse.__name__)
@given(body=st.binary(max_size=100) | trees.map(str.encode))
def test_any_document_is_a_value_or_an_s3_error(parse: Callable[[bytes], object], body: bytes) -> None:
    value = outcome(parse, body)
    if isinstance(value, S3Error) and value.code == "InternalError":
        assert b"<Error>" in body  # an error was read: one with a code of its own
    else:
        assert not isinstance(value, S3Error) or value.status < 500


# --- parse ∘ render --------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
times = st.integers(0, 4_000_000_000_000)
hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
owners = st.builds(res.Owner, texts.filter(is_plain), texts.filter(is_plain))
checksums = st.dictionaries(st.sampled_from(["crc32", "sha256"]), st.just("AAAAAA=="), max_size=2)
entries = st.builds(
    res.ObjectEntry,
    texts,
    st.integers(0, 1 << 62),
    hexes,
    times,
    st.none() | owners,
    storage_class=st.just("STANDARD"),
    checksum_algorithm=st.sampled_from(["", "crc32c"]),
    checksum_type=st.just(""),
)


@given(
    st.lists(entries, max_size=5).map(tuple),
    st.lists(texts, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2]),
    texts,
)
def test_listings_are_read_back(
    found: tuple[res.ObjectEntry, ...],
    prefixes: tuple[str, ...],
    truncated: bool,
    encode: bool,
    version: Any,
    after: str,
) -> None:
    op = ops.ListObjects("bucket", version, "", "/", encode_url=encode, fetch_owner=True)
    page = res.ObjectListing(found, prefixes, truncated, after if truncated else "")
    document = listings.list_objects_document(op, page)
    named = [*(entry.key for entry in found), *prefixes]
    if not encode and not is_plain("".join([*named, after if truncated and version == 1 else ""])):
        _is_refused_but_for_references(document, xml_documents.parse_list_result)
        return
    read = xml_documents.parse_list_result(document.encode())
    assert (read.entries, read.common_prefixes, read.truncated) == (found, prefixes, truncated)
    if truncated:
        assert (
            listings.read_continuation_token(read.next_after) if version == 2 else read.next_after
        ) == after


versions = st.builds(
    res.VersionEntry,
    texts,
    st.sampled_from(["null", "v1", "0" * 16]),
    st.booleans(),
    times,
    owners,
    st.just(False),
    st.integers(0, 1 << 62),
    hexes,
    st.sampled_from(["", "crc32c"]),
)
markers = st.builds(res.VersionEntry, texts, st.just("v"), st.booleans(), times, owners, st.just(True))


def parse_list_versions(body: bytes) -> res.VersionListing:
    """Parse a page of ListObjectVersions. Raises S3Error MalformedXML."""
    root = parse_xml(body, root="ListVersionsResult", max_bytes=xml_documents.MAX_RESPONSE_BYTES)
    text = xml_documents.key_decoder(root)
    return res.VersionListing(
        tuple(
            _read_entry(element, text)
            for element in root.children
            if element.name in {"Version", "DeleteMarker"}
        ),
        tuple(text(element.child_text("Prefix")) for element in root.find_all("CommonPrefixes")),
        root.child_text("IsTruncated") == "true",
        text(root.child_text("NextKeyMarker")),
        root.child_text("NextVersionIdMarker"),
    )


def _read_entry(element: Element, text: Callable[[str], str]) -> res.VersionEntry:
    owner, marker = element.find_first("Owner"), element.name == "DeleteMarker"
    return res.VersionEntry(
        text(element.child_text("Key")),
        element.child_text("VersionId"),
        element.child_text("IsLatest") == "true",
        xml_documents.parse_milliseconds(element.child_text("LastModified")),
        res.Owner("") if owner is None else xml_documents.parse_owner(owner),
        marker,
        0 if marker else xml_documents.parse_integer(element.child_text("Size")),
        conditional_requests.unquote_etag(element.child_text("ETag")),
        element.child_text("ChecksumAlgorithm").lower(),
        element.child_text("ChecksumType"),
    )


@given(
    st.lists(versions | markers, max_size=5).map(tuple),
    st.lists(texts, max_size=3).map(tuple),
    texts,
    st.sampled_from(["", "null", "v"]),
    st.booleans(),
)
def test_version_listings_are_read_back(
    found: tuple[res.VersionEntry, ...],
    prefixes: tuple[str, ...],
    next_key: str,
    next_version: str,
    encode: bool,
) -> None:
    op = ops.ListObjectVersions("bucket", delimiter="/", encode_url=encode)
    page = res.VersionListing(found, prefixes, True, next_key, next_version)
    body = render(op, page, "id").body
    if not encode and not is_plain("".join([*(entry.key for entry in found), *prefixes, next_key])):
        _is_refused_but_for_references(body.decode(), parse_list_versions)
        return
    assert parse_list_versions(body) == page


def _is_refused_but_for_references(document: str, parse: Callable[[bytes], object]) -> None:
    """Names that XML 1.0 cannot carry make their page unreadable, and nothing else does."""
    assert is_plain(document)
    with pytest.raises(S3Error, match="MalformedXML"):
        parse(document.encode())
    parse(re.sub("&#x[0-9a-f]+;", "", document).encode())


tag_texts = st.text(st.characters(categories=["L", "Nd"]) | st.sampled_from(" +-=._:/@"), max_size=128)


@given(
    st.dictionaries(
        tag_texts.filter(lambda text: bool(text) and not text.startswith("aws:")), tag_texts, max_size=10
    )
)
def test_tags_are_read_back(tags: dict[str, str]) -> None:
    body = render(ops.GetObjectTagging("b", "k"), res.ObjectTags(tags), "id").body
    assert list(settings_xml.parse_tagging(body).items()) == list(tags.items())
    header = "&".join(
        f"{percent_encoding.encode(key)}={percent_encoding.encode(value)}" for key, value in tags.items()
    )
    assert settings_xml.read_tagging_header({"x-amz-tagging": header}) == tags


@given(anything | query_values | queries)
def test_any_tagging_header_is_tags_or_an_s3_error(text: str) -> None:
    tags = outcome(settings_xml.read_tagging_header, {"x-amz-tagging": text})
    assert isinstance(tags, S3Error) or len(tags) <= 10


@given(texts)
def test_documents_are_read_back(key: str) -> None:
    plain = "".join(c for c in key if is_plain(c)) or "k"
    put = ops.CreateMultipartUpload("bucket", plain, ops.ObjectHeaders())
    created = res.UploadCreated("bucket", plain, "upload")
    assert xml_documents.parse_create_upload_result(render(put, created, "id").body) == created
    keys = (res.DeletedKey(plain), res.DeletedKey("b", "v1", "v2"))
    deleted = res.DeleteResult(keys, (res.DeleteFailure(plain, "AccessDenied", plain, "v3"),))
    op = ops.DeleteObjects("bucket", BodyDigests())
    assert xml_documents.parse_delete_result(render(op, deleted, "id").body) == deleted


@given(times, st.sampled_from(["", "FULL_OBJECT"]), checksums)
def test_copies_and_completions_are_read_back(ms: int, kind: str, sums: dict[str, str]) -> None:
    copied = res.CopyResult("a" * 32, ms, sums, kind)
    op = ops.CopyObject("b", "k", ops.CopySource("b", "k"), False, ops.ObjectHeaders())
    assert xml_documents.parse_copy_result(render(op, copied, "id").body) == copied
    done = res.CompleteResult("b", "k", "e-2", "http://here/b/k", sums, kind)
    complete = ops.CompleteMultipartUpload("b", "k", "u", BodyDigests())
    assert xml_documents.parse_complete_result(render(complete, done, "id").body) == done


@given(st.lists(st.tuples(texts.filter(is_plain), times), max_size=3), owners, st.none() | texts)
def test_bucket_listings_are_read_back(
    pairs: list[tuple[str, int]], owner: res.Owner, after: str | None
) -> None:
    listing = res.BucketListing(owner, tuple(res.BucketEntry(*pair, "r") for pair in pairs), after)
    read = xml_documents.parse_list_buckets(render(ops.ListBuckets(), listing, "id").body)
    assert (read.owner, read.buckets) == (listing.owner, listing.buckets)
    assert (
        (read.next_after is None)
        if after is None
        else (listings.read_continuation_token(read.next_after or "") == after)
    )


@given(st.sampled_from(sorted(CODES)), texts, texts)
def test_errors_are_read_back(code: str, message: str, resource: str) -> None:
    rendered = render_error(S3Error(code, message, extra={"Size": "1"}), "id", resource)
    if code == "NotModified":
        assert rendered.body == b""
        return
    read = xml_documents.parse_error(rendered.body)
    assert read.code == code
    assert read.extra["Size"] == "1"
    if is_plain(message):
        assert read.message == message


@given(texts)
def test_names_survive_their_encodings(text: str) -> None:
    assert listings.read_continuation_token(listings.write_continuation_token(text)) == text
    assert percent_encoding.decode(percent_encoding.encode(text)) == text
    assert (
        percent_encoding.decode(percent_encoding.encode_path(f"/{text.replace('%', '')}"))
        == f"/{text.replace('%', '')}"
    )
    parsed = ElementTree.fromstring(f"<a>{escape_xml(text)}</a>").text or ""
    assert parsed == "".join(c if is_plain(c) else "\ufffd" for c in text)


@given(anything)
def test_any_token_is_read_or_refused(text: str) -> None:
    try:
        assert listings.write_continuation_token(listings.read_continuation_token(text)) == text
    except listings.ContinuationTokenError:
        return


@given(st.none() | st.integers(0, 99), st.none() | st.integers(0, 99), st.integers(0, 99))
def test_ranges_cover_what_python_slices_cover(first: int | None, last: int | None, size: int) -> None:
    spec = parse_range(f"bytes={'' if first is None else first}-{'' if last is None else last}")
    if spec is None:
        assert (first is None and last is None) or (first is not None and last is not None and last < first)
        return
    data = bytes(range(size))
    expected = (
        data[-last or size :]
        if first is None and last is not None
        else data[first : None if last is None else last + 1]
    )
    try:
        offset, length = resolve_range(spec, size)
    except UnsatisfiableRangeError:
        assert expected == b""
        return
    assert data[offset : offset + length] == expected
    assert len(expected) == length > 0


@given(times)
def test_dates_are_read_back(ms: int) -> None:
    seconds = ms // 1000
    assert dates.parse_http(dates.format_http(seconds)) == seconds
    assert dates.parse_iso(dates.format_iso(ms)) == ms
    assert dates.parse_amz(dates.format_amz(seconds)) == seconds


@given(anything)
def test_any_text_is_a_date_or_none(text: str) -> None:
    for parse in (dates.parse_http, dates.parse_iso, dates.parse_amz):
        assert parse(text) is None or isinstance(parse(text), int)


@given(st.lists(st.text(st.characters(exclude_characters='"', exclude_categories=["Cs"]), max_size=10)))
def test_etag_lists_are_read_back(tags: list[str]) -> None:
    assert conditional_requests.parse_etag_list(
        ", ".join(map(conditional_requests.quote_etag, tags))
    ) == tuple(tags)


@given(anything)
def test_any_key_is_checked(text: str) -> None:
    try:
        names.check_key(text)
    except names.KeyNameError:
        return
    assert 1 <= len(text.encode()) <= 1024


@given(st.binary(min_size=1, max_size=50))
def test_keys_of_any_bytes(raw: bytes) -> None:
    """Every key that is UTF-8 arrives, every other one is refused."""
    path = "/bucket/" + "".join(f"%{byte:02x}" for byte in raw)
    operation = outcome(parse_request, RequestHead("GET", path, "", {}))
    if isinstance(operation, S3Error):
        assert operation.code == "InvalidURI"
        assert b"\0" in raw or "\ufffd" in raw.decode(errors="replace")
        return
    assert isinstance(operation, ops.GetObject)
    assert operation.key.encode() == raw


@given(st.binary(max_size=40))
def test_any_content_md5(raw: bytes) -> None:
    header = base64.b64encode(raw).decode()
    operation = outcome(parse_request, RequestHead("PUT", "/bucket/k", "", {"content-md5": header}))
    if len(raw) == 16:
        assert isinstance(operation, ops.PutObject)
    else:
        assert isinstance(operation, S3Error)
        assert operation.code == "InvalidDigest"
