"""What is fuzzed: for each target a function of any bytes that returns, or fails with what was found.

Law: whatever stands outside the errors a reader documents is a crash, and so is an answer that contradicts
itself: a body that decodes differently when it is split differently, a document that changes when it is read
back. Invariant: a target is deterministic and does no I/O.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from meshd.server.s3.request_auth import VirtualHosts
from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.expression_parser import parse_expression, sort_key
from meshwire.errors import S3Error
from meshwire.formats import tar as tar_format
from meshwire.http_values import dates, percent_encoding
from meshwire.http_values.conditional_requests import UnsatisfiableRangeError, parse_range, resolve_range
from meshwire.http_values.multipart_form_data import FormError, FormReader
from meshwire.iam import AccessRequest, PolicyError, evaluate, is_public_policy, parse_policy
from meshwire.plan.op_declarations import output_shape, parse_declaration
from meshwire.s3 import acl_xml, lifecycle_xml, settings_xml, xml_documents
from meshwire.s3.operations import operation_name
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.s3.responses import render_error
from meshwire.sigv4 import STREAMING_PAYLOADS, Verified, post_object, read_claim, verify
from meshwire.sigv4.aws_chunked import ChunkedDecoder
from meshwire.sigv4.sigv2 import read_sigv2_claim, verify_sigv2
from meshwire.strict_json import PlanError, canonical_json, read_json
from meshwire.views.view_kinds import parse_view
from tests.fuzz import archives, datasets, images, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwire.iam import PolicyKind

T = TypeVar("T")
_HOSTS = VirtualHosts(("s3.example.com",))


@dataclass(frozen=True, slots=True)
class Target:
    """`words` are what its grammar is made of; `limit` the longest input in bytes that is worth trying."""

    name: str
    run: Callable[[bytes], None]
    words: Sequence[str] = ()
    limit: int = 2048


def head_of(data: bytes) -> RequestHead:
    """A request's head as the server hands it on: `METHOD target`, then `name: value` lines."""
    text = data.decode("utf-8", "surrogateescape")
    first, *lines = text.split("\n")
    method, _, target = first.partition(" ")
    raw_path, _, raw_query = target.partition("?")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        if name:
            headers[name] = f"{headers[name]},{value}" if name in headers else value
    return RequestHead(method, raw_path, raw_query, headers, _HOSTS.bucket_of(headers.get("host", "")))


def request(data: bytes) -> None:
    """The request parser, both readers of signatures, and the verifiers of what they read."""
    head = head_of(data)
    refusal = None
    try:
        name = operation_name(parse_request(head))
        assert name.isalnum(), name
    except S3Error as error:
        refusal = error
    if refusal is not None:
        assert render_error(refusal, resource=head.raw_path, request_id="0").status >= 300
    with contextlib.suppress(S3Error):
        if (claim := read_claim(head)) is not None:
            verify(claim, head, "secret", dates.parse_amz(claim.timestamp) or 0)
    with contextlib.suppress(S3Error):
        if (old := read_sigv2_claim(head)) is not None:
            verify_sigv2(old, head, "secret", 0)


_KINDS = sorted(STREAMING_PAYLOADS)
_VERIFIED = Verified(b"k" * 32, "0" * 64, "20260101/us-east-1/s3/aws4_request", "20260101T000000Z")
_FOREIGN = _VERIFIED._replace(scope="20260101/\udcff\udcfe/s3/aws4_request")  # a region of any bytes


def chunked(data: bytes) -> None:
    """The aws-chunked decoder: the first bytes choose the variant, a declared length, and where to split."""
    if len(data) < 4:
        return
    kind = _KINDS[data[0] % len(_KINDS)]
    length = None if data[1] == 255 else data[1]
    step, body = data[2] + 1, data[4:]
    trailers = ("x-amz-checksum-crc32",) if kind.endswith("-TRAILER") and data[3] % 2 else ()
    seed = _FOREIGN if data[3] & 2 else _VERIFIED
    whole = _decode(seed, kind, trailers, length, [body])
    split = _decode(seed, kind, trailers, length, [body[at : at + step] for at in range(0, len(body), step)])
    assert whole == split, (whole, split)
    if whole[0] == "":
        assert length is None or len(whole[1]) == length
        assert len(whole[1]) < len(body)


def _decode(
    seed: Verified, kind: str, trailers: tuple[str, ...], length: int | None, pieces: Sequence[bytes]
) -> tuple[str, bytes, dict[str, str]]:
    """Error code (empty when there was none), payload, trailers. After an error no payload."""
    decoder = ChunkedDecoder(kind, seed, trailers, length)
    payload = b""
    try:
        for piece in pieces:
            payload += b"".join(decoder.feed(piece))
        return "", payload, dict(decoder.finish())
    except S3Error as error:
        return error.code, b"", {}


_READERS: tuple[Callable[[bytes], object], ...] = (
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
    acl_xml.parse_acl,
    settings_xml.parse_tagging,
)


def xml(data: bytes) -> None:
    """Every reader of an XML document; what settings are read into is written and read back."""
    for read in _READERS:
        with contextlib.suppress(S3Error):
            read(data)
    _round(data, settings_xml.parse_versioning, settings_xml.versioning_document)
    _round(data, settings_xml.parse_public_access, settings_xml.public_access_document)
    _round(data, settings_xml.parse_ownership, settings_xml.ownership_document)
    _round(data, settings_xml.parse_cors, settings_xml.cors_document)
    _round(data, lifecycle_xml.parse_lifecycle, lifecycle_xml.lifecycle_document)


def _round(data: bytes, read: Callable[[bytes], T], write: Callable[[T], bytes]) -> None:
    try:
        value = read(data)
    except S3Error:
        return
    assert read(write(value)) == value, value


def tar(data: bytes) -> None:
    """The tar scanner: members lie inside the file, in order, and an index can be made of them."""

    def read(offset: int, length: int) -> bytes:
        assert offset >= 0
        assert 0 <= length <= tar_format.MAX_PAX
        return data[offset : offset + length]

    found, at, torn = [], 0, 0
    try:
        for member in tar_format.scan_tar(read, 0, len(data)):
            assert at <= member.start < member.data_offset
            assert member.data_offset + member.size <= len(data)
            assert member.next_offset > at
            at = member.next_offset
            found.append(member)
    except tar_format.TarError as error:
        torn = error.offset
    assert 0 <= torn <= len(data)
    index = index_tar(found)
    assert index.to_bytes() == type(index).from_bytes(index.to_bytes()).to_bytes()


_QUESTIONS = (
    AccessRequest("s3:GetObject", "arn:aws:s3:::bucket/a/b"),
    AccessRequest(
        "s3:PutObject", "arn:aws:s3:::bucket/ü", "user", {"aws:username": "user", "aws:sourceip": "::1"}
    ),
    AccessRequest("s3:ListBucket", "arn:aws:s3:::bucket", "user", {"s3:prefix": "a/", "s3:max-keys": "7"}),
)


def form(data: bytes) -> None:
    """The form reader, cut in two ways, and what is made of the fields; the first byte says where to cut."""
    if not data:
        return
    step, body = data[0] + 1, data[1:]
    whole = _read_form([body])
    split = _read_form([body[at : at + step] for at in range(0, len(body), step)])
    assert whole == split, (whole, split)
    if whole is None:
        return
    fields, filename, file = whole
    assert len(file) < len(body)
    expanded = post_object.expand_filename(fields, filename)
    for read in (post_object.read_form_claim, post_object.read_status, post_object.read_redirect):
        with contextlib.suppress(S3Error):
            read(expanded)
    with contextlib.suppress(S3Error):
        post_object.read_post_object(expanded, "bucket")
    with contextlib.suppress(S3Error):
        post_object.parse_post_policy(expanded.get("policy", "")).check(expanded, "bucket", 0)


def _read_form(pieces: Sequence[bytes]) -> tuple[dict[str, str], str, bytes] | None:
    """Fields, file name and file; None when it is no form."""
    reader = FormReader("xyz")
    try:
        file = b"".join(part for piece in pieces for part in reader.feed(piece))
        reader.finish()
    except FormError:
        return None
    return reader.fields, reader.filename, file


def post_policy(data: bytes) -> None:
    """The policy document of a form, in base64 and as it stands."""
    given = {"key": "a", "content-type": "image/png", "x-amz-meta-a": "1"}
    for text in (base64.b64encode(data).decode(), data.decode("utf-8", "surrogateescape")):
        with contextlib.suppress(S3Error):
            read = post_object.parse_post_policy(text)
            assert read.least >= 0
            read.check(given, "bucket", 0)


_POLICY_KINDS: tuple[PolicyKind, ...] = ("bucket", "identity")


def policy(data: bytes) -> None:
    """The policy reader of both kinds; what it takes is asked, in either order."""
    for kind in _POLICY_KINDS:
        try:
            read = parse_policy(data, kind=kind, bucket="bucket")
        except PolicyError:
            continue
        is_public_policy(read)
        for question in _QUESTIONS:
            verdict = evaluate([read], question)
            assert verdict == evaluate([read, read], question)
        with contextlib.suppress(ValueError):
            again = parse_policy(json.dumps(json.loads(data)), kind=kind, bucket="bucket")
            assert [evaluate([again], q) for q in _QUESTIONS] == [evaluate([read], q) for q in _QUESTIONS]


def fields(data: bytes) -> None:
    """The small grammars: ranges, dates, percent-encoding, tags in a header."""
    text = data.decode("utf-8", "surrogateescape")
    span = parse_range(text)
    if span is not None:
        for size in (0, 1, 1000):
            with contextlib.suppress(UnsatisfiableRangeError):
                offset, length = resolve_range(span, size)
                assert 0 <= offset < offset + length <= size
    for read in (dates.parse_http, dates.parse_iso, dates.parse_amz):
        read(text)
    with contextlib.suppress(percent_encoding.PercentError):
        assert percent_encoding.decode(
            percent_encoding.encode(percent_encoding.decode(text))
        ) == percent_encoding.decode(text)
    with contextlib.suppress(percent_encoding.PercentError):
        percent_encoding.split_query(text)
    with contextlib.suppress(S3Error):
        settings_xml.read_tagging_header({"x-amz-tagging": text})


_SAMPLE = {"key": "a/b.jpg", "size": 12, "json": b'{"a": [1, {"b": "x"}], "c": null}', "raw": b"\xff"}


def expression(data: bytes) -> None:
    """The expression reader; what it takes has a value for a full sample and for an empty one."""
    try:
        read = parse_expression(data.decode("utf-8", "surrogateescape"))
    except PlanError:
        return
    for sample in (_SAMPLE, {}):
        value = read.evaluate(sample)
        assert value is None or type(value) in (str, bool, float)
        assert sort_key(value) == sort_key(read.evaluate(sample))


def view(data: bytes) -> None:
    """A view's document; what is taken is read back the same, whatever the kind."""
    with contextlib.suppress(PlanError):
        read = parse_view(data.decode("utf-8", "surrogateescape"), "bucket")
        assert parse_view(read.to_json(), "bucket") == read


def declaration(data: bytes) -> None:
    """What a confined process says of its module: read back it is the same, and types never surprise."""
    with contextlib.suppress(PlanError):
        read = parse_declaration(read_json(data))
        assert parse_declaration(json.loads(canonical_json(read.document()))) == read
        args = {argument.name: 3 for argument in read.arguments}
        for shape in ((), (1,), (4, None, 3), (None,) * 16):
            with contextlib.suppress(ValueError):
                made = output_shape(read, shape, args)
                assert len(made) == len(read.output.shape or ())


TARGETS = {
    target.name: target
    for target in (
        Target("request", request, words.REQUEST),
        Target("chunked", chunked, words.CHUNKS, 1024),
        Target("xml", xml, words.XML),
        Target("tar", tar, words.TARS, 8192),
        Target("zip", archives.zipped, words.ZIPS, 4096),
        Target("packed", archives.packed, words.ZIPS, 4096),
        Target("archive-index", archives.index, words.ZIPS, 8192),
        Target("image", images.image, words.IMAGES, 4096),
        Target("policy", policy, words.POLICY),
        Target("form", form, words.FORMS, 4096),
        Target("post-policy", post_policy, words.FORMS),
        Target("fields", fields, words.FIELDS, 512),
        Target("expression", expression, words.EXPRESSIONS, 512),
        Target("declaration", declaration, words.DECLARATIONS, 2048),
        Target("view", view, words.VIEWS, 1024),
        Target("lines", datasets.lines, words.TABLES, 2048),
        Target("snapshot", datasets.snapshot, words.TABLES, 8192),
        Target("plan", datasets.plan, words.DATASETS, 1024),
        Target("array", datasets.array, words.DATASETS, 2048),
        Target("chunks", datasets.chunks, words.DATASETS, 2048),
        Target("records", datasets.records, words.TABLES, 2048),
        Target("mds", datasets.mds, words.DATASETS, 2048),
        Target("reader", datasets.reader, words.TABLES, 2048),
    )
}
