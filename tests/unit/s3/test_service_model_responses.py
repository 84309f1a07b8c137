"""Responses against botocore's model of S3: botocore's parser finds a value for every member of the model,
and every header and element of ours is one of the model's. Exceptions are listed with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshwire.checksums.body_checksums import ALGORITHMS, BodyDigests
from meshwire.errors import CODES
from meshwire.http_values.conditional_requests import RangeSpec
from meshwire.s3 import lifecycle_xml, settings_xml
from meshwire.s3 import operations as ops
from meshwire.s3 import result_types as res
from meshwire.s3.bucket_settings import ALL_USERS, Acl, CorsRule, Grant, LifecycleRule, PublicAccessBlock
from meshwire.s3.responses import render
from meshwire.s3.xml_io import parse_xml
from tests.support import s3_model_exceptions as listed
from tests.support import s3_service_model as model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshwire.s3.bucket_settings import BucketSetting
    from meshwire.s3.responses import RenderedResponse
    from meshwire.s3.xml_io import Element

_ROOT = Path(__file__).resolve().parents[3]
_SUMS = dict.fromkeys(ALGORITHMS, "AAAAAA==")
_OWNER = res.Owner("ann", "Ann")
_DIGESTS = BodyDigests()
_GRANTS = Acl("", (Grant("ann", "READ"), Grant(ALL_USERS, "WRITE")))
_SYSTEM = dict.fromkeys(
    (
        "content-type",
        "content-encoding",
        "content-disposition",
        "content-language",
        "cache-control",
        "x-amz-website-redirect-location",
    ),
    "a",
) | {"expires": "Tue, 01 Jan 2030 00:00:00 GMT"}
_HEAD = res.ObjectHead(
    10, "e", 1000, _SYSTEM, {"a": "b"}, _SUMS, "FULL_OBJECT", 2, "v", 1, {"x-amz-expiration": "expiry-date"}
)
_COPY = res.CopyResult("e", 1000, _SUMS, "FULL_OBJECT", "v", "s", {"x-amz-expiration": "expiry-date"})
_OBJECT = res.ObjectEntry("k", 1, "e", 1000, _OWNER, "STANDARD", "crc32", "FULL_OBJECT")
_ACL = res.ObjectAcl(_OWNER, _GRANTS, _OWNER, "v", {"ann": "Ann"})
_RULES = (
    LifecycleRule("a", True, "p", {"k": "v"}, 1, 9, expire_days=1, noncurrent_days=1, noncurrent_keep=2),
    LifecycleRule("b", False, "p", expire_date=86_400, abort_uploads_days=3),
    LifecycleRule("c", True, "p", form="prefix", expire_markers=True),
    LifecycleRule("d", True, tags={"k": "v"}, expire_days=1),
    LifecycleRule("e", True, larger_than=1, expire_days=1),
    LifecycleRule("f", True, smaller_than=9, expire_days=1),
)
SETTABLE: list[BucketSetting] = [
    "acl",
    "cors",
    "lifecycle",
    "ownershipControls",
    "policy",
    "publicAccessBlock",
    "tagging",
    "versioning",
]
REMOVABLE: list[BucketSetting] = [
    "cors",
    "encryption",
    "lifecycle",
    "ownershipControls",
    "policy",
    "publicAccessBlock",
    "replication",
    "tagging",
    "website",
]
_CORS = CorsRule(("*",), ("GET",), ("a",), ("b",), 5, "id", ("A",))


def _setting(name: Any, document: str | bytes) -> tuple[ops.Operation, res.Result]:
    body = document.encode() if isinstance(document, str) else document
    return ops.GetBucketSetting("photos", name), res.SettingDocument(body)


def _unset(name: Any) -> tuple[ops.Operation, res.Result]:
    return _setting(name, settings_xml.unset_setting_document(name))


# Of every operation with a response, a result with everything that it can have.
FULL: dict[str, tuple[ops.Operation, res.Result]] = {
    "AbortMultipartUpload": (ops.AbortMultipartUpload("photos", "k", "u"), res.UploadAborted()),
    "CompleteMultipartUpload": (
        ops.CompleteMultipartUpload("photos", "k", "u", _DIGESTS),
        res.CompleteResult(
            "photos", "k", "e", "http://a/k", _SUMS, "COMPOSITE", "v", {"x-amz-expiration": "expiry-date"}
        ),
    ),
    "CopyObject": (
        ops.CopyObject("photos", "k", ops.CopySource("photos", "s"), False, ops.ObjectHeaders()),
        _COPY,
    ),
    "CreateBucket": (ops.CreateBucket("photos"), res.BucketCreated("photos")),
    "CreateMultipartUpload": (
        ops.CreateMultipartUpload("photos", "k", ops.ObjectHeaders()),
        res.UploadCreated("photos", "k", "u", "crc32", "COMPOSITE"),
    ),
    "DeleteBucket": (ops.DeleteBucket("photos"), res.BucketDeleted()),
    "DeleteObject": (ops.DeleteObject("photos", "k"), res.ObjectDeleted("v", True)),
    "DeleteObjectTagging": (ops.DeleteObjectTagging("photos", "k"), res.ObjectTagged("v")),
    "DeleteObjects": (
        ops.DeleteObjects("photos", _DIGESTS),
        res.DeleteResult((res.DeletedKey("k", "v", "m"),), (res.DeleteFailure("k", "c", "m", "v"),)),
    ),
    "GetBucketAccelerateConfiguration": _unset("accelerate"),
    "GetBucketAcl": _setting("acl", render(ops.GetObjectAcl("photos", "k"), _ACL, "").body),
    "GetBucketCors": _setting("cors", settings_xml.cors_document((_CORS,))),
    "GetBucketLifecycleConfiguration": _setting("lifecycle", lifecycle_xml.lifecycle_document(_RULES)),
    "GetBucketLocation": (ops.GetBucketLocation("photos"), res.BucketLocation("eu-west-1")),
    "GetBucketLogging": _unset("logging"),
    "GetBucketNotificationConfiguration": _unset("notification"),
    "GetBucketOwnershipControls": _setting(
        "ownershipControls", settings_xml.ownership_document("ObjectWriter")
    ),
    "GetBucketPolicy": _setting("policy", "{}"),
    "GetBucketPolicyStatus": _setting("policyStatus", settings_xml.policy_status_document(public=True)),
    "GetBucketRequestPayment": _unset("requestPayment"),
    "GetBucketTagging": _setting(
        "tagging", render(ops.GetObjectTagging("photos", "k"), res.ObjectTags({"a": "b"}), "").body
    ),
    "GetBucketVersioning": _setting("versioning", settings_xml.versioning_document("Enabled")),
    "GetObject": (ops.GetObject("photos", "k", range=RangeSpec(1, 2), checksum_mode=True), _HEAD),
    "GetObjectAcl": (ops.GetObjectAcl("photos", "k"), _ACL),
    "GetObjectAttributes": (
        ops.GetObjectAttributes(
            "photos", "k", frozenset({"ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"})
        ),
        res.ObjectAttributes(
            1, "e", 1000, _SUMS, "COMPOSITE", "v", 2, (res.PartEntry(1, 1, "e", 1000, _SUMS),), True, 1
        ),
    ),
    "GetObjectTagging": (ops.GetObjectTagging("photos", "k"), res.ObjectTags({"a": "b"}, "v")),
    "GetPublicAccessBlock": _setting(
        "publicAccessBlock", settings_xml.public_access_document(PublicAccessBlock(True, True, True, True))
    ),
    "HeadBucket": (ops.HeadBucket("photos"), res.BucketFound("eu-west-1")),
    "HeadObject": (
        ops.GetObject("photos", "k", head=True, range=RangeSpec(1, 2), checksum_mode=True),
        _HEAD,
    ),
    "ListBuckets": (
        ops.ListBuckets("p"),
        res.BucketListing(_OWNER, (res.BucketEntry("photos", 1000, "eu-west-1"),), "photos"),
    ),
    "ListMultipartUploads": (
        ops.ListMultipartUploads("photos", "p", "/", "k", "u", encode_url=True),
        res.UploadListing(
            (res.UploadEntry("k", "u", 1000, _OWNER, "crc32", "COMPOSITE"),), ("a/",), True, "k", "u"
        ),
    ),
    "ListObjectVersions": (
        ops.ListObjectVersions("photos", "p", "/", "k", "v", encode_url=True),
        res.VersionListing(
            (
                res.VersionEntry("k", "v", True, 1000, _OWNER, False, 1, "e", "crc32", "FULL_OBJECT"),
                res.VersionEntry("k", "w", False, 1000, _OWNER, True),
            ),
            ("a/",),
            True,
            "k",
            "v",
        ),
    ),
    "ListObjects": (
        ops.ListObjects("photos", 1, "p", "/", 1, "m", encode_url=True),
        res.ObjectListing((_OBJECT,), ("a/",), True, "n"),
    ),
    "ListObjectsV2": (
        ops.ListObjects("photos", 2, "p", "/", 1, "m", "token", "s", encode_url=True, fetch_owner=True),
        res.ObjectListing((_OBJECT,), ("a/",), True, "n"),
    ),
    "ListParts": (
        ops.ListParts("photos", "k", "u", 1, 1),
        res.PartList((res.PartEntry(2, 1, "e", 1000, _SUMS),), True, _OWNER, "crc32", "COMPOSITE"),
    ),
    "PutObject": (
        ops.PutObject("photos", "k", ops.ObjectHeaders(), _DIGESTS),
        res.ObjectStored("e", _SUMS, "FULL_OBJECT", "v", {"x-amz-expiration": "expiry-date"}),
    ),
    "PutObjectAcl": (ops.PutObjectAcl("photos", "k", _DIGESTS), res.ObjectAclStored("v")),
    "PutObjectTagging": (ops.PutObjectTagging("photos", "k", _DIGESTS), res.ObjectTagged("v")),
    "UploadPart": (ops.UploadPart("photos", "k", "u", 1, _DIGESTS), res.PartStored("e", _SUMS)),
    "UploadPartCopy": (
        ops.UploadPartCopy("photos", "k", "u", 1, ops.CopySource("photos", "s")),
        res.CopyResult("e", 1000, _SUMS, source_version="s"),
    ),
}
_STORED: list[ops.Operation] = [
    *(ops.PutBucketSetting("photos", name, _DIGESTS) for name in SETTABLE),
    *(ops.DeleteBucketSetting("photos", name) for name in REMOVABLE),
]
FULL |= {ops.operation_name(operation): (operation, res.SettingStored()) for operation in _STORED}


def responses(s3: Any) -> Iterator[tuple[Any, RenderedResponse]]:
    for name, (operation, result) in FULL.items():
        yield s3.operation_model(name), render(operation, result, "req-1")


def root_of(response: RenderedResponse) -> Element | None:
    named = re.search(rb"<([A-Za-z]+)[ >]", response.body)
    return parse_xml(response.body, root=named[1].decode(), max_bytes=1 << 20) if named else None


# --- findings: one line for each deviation from model and lists ---------------------------------------------


def statuses(s3: Any) -> Iterator[str]:
    for operation, response in responses(s3):
        expected = listed.STATUSES.get(operation.name, (operation.http.get("responseCode", 200), ""))[0]
        if response.status != expected:
            yield f"{operation.name}: status {response.status}, expected {expected}"


def response_members(s3: Any) -> Iterator[str]:
    used: set[tuple[str, str]] = set()
    for operation, response in responses(s3):
        found = model.read_response(operation, response) if operation.output_shape else set()
        for member in model.members(operation.output_shape):
            key = listed.exception_for(listed.RESPONSE_MEMBERS, operation.name, member.name)
            if key is not None and member.name not in found:
                used.add(key)
            elif member.name not in found:
                yield f"{operation.name} {member.name}: missing"
    yield from (f"{key}: listed for nothing" for key in listed.RESPONSE_MEMBERS.keys() - used)


def response_names(s3: Any) -> Iterator[str]:
    """Headers and elements of ours that the model does not have."""
    used: set[tuple[str, str]] = set()
    for operation, response in responses(s3):
        known = {member.name for member in model.members(operation.output_shape)}
        root = root_of(response)
        payload = operation.output_shape and operation.output_shape.serialization.get("payload")
        if root is not None and payload:
            wire = operation.output_shape.members[payload].serialization.get("name", payload)
            if root.name != wire:
                yield f"{operation.name}: root {root.name}, expected {wire}"
        names = {re.sub("(?<=x-amz-meta-).*", "", name) for name, _ in response.headers}
        for name in names | (model.element_names(root) if root is not None else set()):
            key = listed.exception_for(listed.RESPONSE_EXTRAS, operation.name, name)
            if key is not None:
                used.add(key)
            elif name not in known:
                yield f"{operation.name} {name}: not in the model"
    yield from (f"{key}: listed for nothing" for key in listed.RESPONSE_EXTRAS.keys() - used)


def errors(s3: Any) -> Iterator[str]:
    """Error codes that the model names: known here, with the same status."""
    for name in FULL:
        for shape in s3.operation_model(name).error_shapes:
            if shape.name in listed.ERRORS:
                continue
            status = shape.metadata.get("error", {}).get("httpStatusCode")
            if shape.name not in CODES or CODES[shape.name].status != status:
                yield f"{name}: {shape.name} is {status} in the model"


CHECKS = [statuses, response_members, response_names, errors]


@pytest.mark.parametrize("check", CHECKS)
def test_responses_are_those_of_the_model(check: Callable[[Any], Iterator[str]]) -> None:
    assert not list(check(model.service_model()))


def test_every_operation_has_a_response() -> None:
    served = set(model.service_model().operation_names) - listed.NOT_SERVED.keys()
    assert served == FULL.keys() | listed.NO_RESPONSE.keys()
    assert not FULL.keys() & listed.NO_RESPONSE.keys()


# --- names in our source ------------------------------------------------------------------------------------

# Functions that take the name of an element, and which argument it is.
_NAME_ARGUMENT = {
    "child_text": 0,
    "find_all": 0,
    "find_first": 0,
    "xml_element": 0,
    "optional_element": 0,
    "boolean_element": 0,
    "owner_element": 0,
    "root_element": 0,
    "parse_setting": 1,
    "_number": 1,
    "_days": 1,
}
_CAMEL = re.compile("[A-Z]+[a-z][A-Za-z0-9]*")


def model_names() -> tuple[set[str], set[str]]:
    """All headers (lower-case) and all elements that the model has anywhere."""
    headers: set[str] = set()
    elements: set[str] = set()
    for shape in model.model_document()["shapes"].values():
        for name, member in shape.get("members", {}).items():
            wire = member.get("locationName", name)
            (headers if member.get("location") in {"header", "headers"} else elements).add(wire)
        elements.add(shape.get("member", {}).get("locationName", "member"))
    return {name.lower() for name in headers}, elements


def source_nodes(*patterns: str, having: str = "") -> Iterator[ast.AST]:
    """The nodes of our modules whose text has `having` in it, in whatever case."""
    for pattern in patterns:
        for path in sorted(_ROOT.glob(pattern)):
            text = path.read_text()
            if having in text.lower():
                yield from ast.walk(ast.parse(text))


def texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def elements_named_by(node: ast.AST) -> Iterator[str]:
    """The names of elements in one node: in a text, as an argument, or in a table of a module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from re.findall("<([A-Z][A-Za-z0-9]*)[ >{]", node.value)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "require_known":
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                yield from texts(argument)
        elif len(node.args) > _NAME_ARGUMENT.get(name, 99):
            yield from texts(node.args[_NAME_ARGUMENT[name]])
    elif isinstance(node, ast.Assign) and all(
        isinstance(t, ast.Name) and t.id.isupper() for t in node.targets
    ):
        yield from (text for text in texts(node.value) if _CAMEL.fullmatch(text) and text not in CODES)


def test_headers_named_in_our_source_are_those_of_the_model() -> None:
    named = {
        text.lower()
        for node in source_nodes("sdk/mesh*/**/*.py", "meshd/**/*.py", having="x-amz-")
        for text in ([node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else ())
        if re.fullmatch("[xX]-[aA]mz-[A-Za-z0-9-]*[A-Za-z0-9]", text)
    }
    assert named - model_names()[0] == set(listed.OTHER_HEADERS)


def test_elements_named_in_our_source_are_those_of_the_model() -> None:
    files = ("*_xml.py", "listings.py", "responses.py", "xml_documents.py")
    nodes = source_nodes(*(f"sdk/meshwire/s3/{name}" for name in files))
    named = {name for node in nodes for name in elements_named_by(node)}
    assert named - model_names()[1] == set(listed.OTHER_ELEMENTS)


# --- the checks find what they are for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "path", "changes", "finding"),
    [
        (statuses, ("operations", "DeleteObject", "http"), {"responseCode": 200}, "DeleteObject: status 204"),
        (
            response_members,
            ("shapes", "HeadObjectOutput", "members", "PartsCount"),
            {"locationName": "x-amz-parts"},
            "HeadObject x-amz-parts: missing",
        ),
        (
            response_names,
            ("shapes", "HeadObjectOutput", "members", "PartsCount"),
            {"locationName": "x-amz-parts"},
            "HeadObject x-amz-mp-parts-count: not in the model",
        ),
        (
            response_members,
            ("shapes", "ListPartsOutput", "members", "NextPartNumberMarker"),
            {"locationName": "NextPartMarker"},
            "ListParts NextPartMarker: missing",
        ),
        (
            response_names,
            ("shapes", "Part", "members", "PartNumber"),
            {"locationName": "Number"},
            "ListParts Part/PartNumber: not in the model",
        ),
        (
            response_names,
            ("shapes", "TagSet", "member"),
            {"locationName": "Label"},
            "GetBucketTagging TagSet/Tag/Key: not in the model",
        ),
        (
            response_names,
            ("shapes", "CopyObjectOutput", "members", "CopyObjectResult"),
            {"locationName": "CopyResult"},
            "CopyObject: root CopyObjectResult",
        ),
        (errors, ("shapes", "NoSuchKey", "error"), {"httpStatusCode": 410}, "NoSuchKey is 410"),
    ],
)
def test_a_model_with_another_name_is_found(
    check: Callable[[Any], Iterator[str]], path: tuple[str, ...], changes: dict[str, Any], finding: str
) -> None:
    found = list(check(model.changed_model(*path, **changes)))
    assert any(finding in line for line in found), found
