"""Requests against botocore's model of S3: every member that the model has is understood, refused or ignored,
and the last two are listed with a reason."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import pytest

from meshwire.checksums.body_checksums import ALGORITHMS, DIGEST_SIZES
from meshwire.errors import PolicyError, S3Error
from meshwire.iam import parse_policy
from meshwire.s3 import acl_xml, lifecycle_xml, listings, settings_xml, xml_documents
from meshwire.s3.bucket_settings import ALL_USERS, AUTHENTICATED_USERS, OWNERSHIPS, CannedAcl, Permission
from meshwire.s3.operations import operation_name
from meshwire.s3.parse_request import parse_request
from tests.support import s3_model_exceptions as listed
from tests.support import s3_service_model as model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.s3_service_model import Member, Params


def _policy(body: bytes) -> None:
    """Check a policy, which is JSON; the model says nothing about its content."""
    parse_policy(body, kind="bucket", bucket="photos")


# Bodies that the daemon parses, by operation.
BODIES: dict[str, Callable[[bytes], object]] = {
    "CreateBucket": xml_documents.parse_create_bucket,
    "DeleteObjects": xml_documents.parse_delete,
    "CompleteMultipartUpload": xml_documents.parse_complete,
    "PutBucketAcl": acl_xml.parse_acl,
    "PutObjectAcl": acl_xml.parse_acl,
    "PutBucketCors": settings_xml.parse_cors,
    "PutBucketLifecycle": lifecycle_xml.parse_lifecycle,
    "PutBucketLifecycleConfiguration": lifecycle_xml.parse_lifecycle,
    "PutBucketOwnershipControls": settings_xml.parse_ownership,
    "PutBucketPolicy": _policy,
    "PutBucketTagging": lambda body: settings_xml.parse_tagging(body, settings_xml.BUCKET_TAGS),
    "PutBucketVersioning": settings_xml.parse_versioning,
    "PutObjectTagging": settings_xml.parse_tagging,
    "PutPublicAccessBlock": settings_xml.parse_public_access,
}

_RULE: Params = {"Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
_GRANT: Params = {"Grantee": {"Type": "CanonicalUser", "ID": "ann"}, "Permission": "READ"}
_ACL: Params = {"AccessControlPolicy": {"Owner": {"ID": "ann"}, "Grants": [_GRANT]}}
_POLICY = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", '
    '"Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/*"}]}'
)
_TAG: Params = {"Key": "a", "Value": "b"}


def _lifecycle(**changes: Any) -> Params:
    rule = {name: value for name, value in (_RULE | changes).items() if value is not None}
    return {"LifecycleConfiguration": {"Rules": [rule]}}


# Arguments of a call that is accepted, besides bucket and key.
CALLS: dict[str, Params] = {
    "AbortMultipartUpload": {"UploadId": "u"},
    "CompleteMultipartUpload": {
        "UploadId": "u",
        "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": "e"}]},
    },
    "CopyObject": {"CopySource": "photos/s"},
    "CreateBucket": {"CreateBucketConfiguration": {"LocationConstraint": "eu-west-1"}},
    "DeleteObjects": {"Delete": {"Objects": [{"Key": "a"}]}},
    "GetObjectAttributes": {"ObjectAttributes": ["ETag"]},
    "ListParts": {"UploadId": "u"},
    "PutBucketAcl": _ACL,
    "PutBucketCors": {
        "CORSConfiguration": {"CORSRules": [{"AllowedMethods": ["GET"], "AllowedOrigins": ["http://a"]}]}
    },
    "PutBucketLifecycle": {
        "LifecycleConfiguration": {"Rules": [{"Prefix": "a", "Status": "Enabled", "Expiration": {"Days": 1}}]}
    },
    "PutBucketLifecycleConfiguration": _lifecycle(),
    "PutBucketOwnershipControls": {
        "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerPreferred"}]}
    },
    "PutBucketPolicy": {"Policy": _POLICY},
    "PutBucketTagging": {"Tagging": {"TagSet": [_TAG]}},
    "PutBucketVersioning": {"VersioningConfiguration": {"Status": "Enabled"}},
    "PutObjectAcl": _ACL,
    "PutObjectTagging": {"Tagging": {"TagSet": [_TAG]}},
    "PutPublicAccessBlock": {"PublicAccessBlockConfiguration": {}},
    "UploadPart": {"UploadId": "u", "PartNumber": 1},
    "UploadPartCopy": {"UploadId": "u", "PartNumber": 1, "CopySource": "photos/s"},
    "WriteGetObjectResponse": {"RequestRoute": "r", "RequestToken": "t"},
}
_AND = "Rule/Filter/And"
# Arguments for members that the call above excludes, or that need another one.
CALLS_FOR_MEMBERS: dict[tuple[str, str], Params] = {
    ("CopyObject", "x-amz-tagging"): {"CopySource": "photos/s", "TaggingDirective": "REPLACE"},
    ("CreateBucket", "Tags/Tag/Key"): {"CreateBucketConfiguration": {"Tags": [_TAG]}},
    ("CreateBucket", "Tags/Tag/Value"): {"CreateBucketConfiguration": {"Tags": [_TAG]}},
    ("CreateMultipartUpload", "x-amz-checksum-type"): {"ChecksumAlgorithm": "CRC32"},
    ("ListObjectVersions", "?version-id-marker"): {"KeyMarker": "a"},
    ("PutBucketLifecycle", "Rule/Expiration/Date"): _lifecycle(Filter=None, Prefix="a"),
    ("PutBucketLifecycle", "Rule/Expiration/ExpiredObjectDeleteMarker"): _lifecycle(Filter=None, Prefix="a"),
    ("PutBucketLifecycle", "Rule/NoncurrentVersionExpiration/NewerNoncurrentVersions"): _lifecycle(
        Filter=None, Prefix="a"
    ),
    ("PutBucketLifecycleConfiguration", "Rule/Prefix"): _lifecycle(Filter=None, Prefix="a"),
    ("PutBucketLifecycleConfiguration", f"{_AND}/Prefix"): _lifecycle(
        Filter={"And": {"Tags": [_TAG], "ObjectSizeGreaterThan": 1}}
    ),
    ("PutBucketLifecycleConfiguration", f"{_AND}/Tag/Key"): _lifecycle(
        Filter={"And": {"Prefix": "a", "ObjectSizeGreaterThan": 1, "Tags": [_TAG]}}
    ),
    ("PutBucketLifecycleConfiguration", f"{_AND}/Tag/Value"): _lifecycle(
        Filter={"And": {"Prefix": "a", "ObjectSizeGreaterThan": 1, "Tags": [_TAG]}}
    ),
    ("PutBucketLifecycleConfiguration", f"{_AND}/ObjectSizeGreaterThan"): _lifecycle(
        Filter={"And": {"Prefix": "a", "Tags": [_TAG]}}
    ),
    ("PutBucketLifecycleConfiguration", f"{_AND}/ObjectSizeLessThan"): _lifecycle(
        Filter={"And": {"Prefix": "a", "Tags": [_TAG]}}
    ),
    ("PutBucketLifecycleConfiguration", "Rule/Filter/Tag/Key"): _lifecycle(Filter={"Tag": _TAG}),
    ("PutBucketLifecycleConfiguration", "Rule/Filter/Tag/Value"): _lifecycle(Filter={"Tag": _TAG}),
}
CALLS_FOR_MEMBERS |= {
    (operation, f"AccessControlList/Grant/Grantee/{name}"): {
        "AccessControlPolicy": {
            "Owner": {"ID": "ann"},
            "Grants": [{"Grantee": {"Type": "Group", name: other}, "Permission": "READ"}],
        }
    }
    for operation in ("PutBucketAcl", "PutObjectAcl")
    for name, other in (("URI", AUTHENTICATED_USERS), ("EmailAddress", "ann@example.org"))
}

# Values that the members with these names must have; others get one by their type.
VALUES: dict[str, Any] = {
    "content-md5": "XUFAKrxLKna5cZ2REBfFkg==",
    "range": "bytes=1-2",
    "x-amz-copy-source": "photos/other",
    "x-amz-copy-source-range": "bytes=1-2",
    "x-amz-metadata-directive": "REPLACE",
    "x-amz-tagging-directive": "REPLACE",
    "x-amz-storage-class": "STANDARD_IA",
    "x-amz-bucket-namespace": "account-regional",
    "x-amz-object-lock-legal-hold": "ON",
    "x-amz-object-lock-event-hold": "ON",
    "MfaDelete": "Enabled",
    "x-amz-object-attributes": ["ObjectSize"],
    "x-amz-optional-object-attributes": ["RestoreStatus"],
    "x-amz-tagging": "a=b",
    "x-amz-website-redirect-location": "/a",
    "x-amz-meta-": {"a": "b"},
    "?continuation-token": listings.write_continuation_token("a"),
    "AccessControlList/Grant/Permission": "WRITE",
    "AccessControlList/Grant/Grantee/URI": ALL_USERS,
    "CORSRule/AllowedMethod": "PUT",
    "CORSRule/AllowedOrigin": "http://b",
    "LocationConstraint": "eu-central-1",
    "Rule/ObjectOwnership": "ObjectWriter",
    "Rule/Status": "Disabled",
    "Status": "Suspended",
}
VALUES |= {f"x-amz-grant-{name.lower().replace('_', '-')}": 'id="ann"' for name in get_args(Permission)}
for _name in ALGORITHMS:
    _digest = base64.b64encode(bytes(DIGEST_SIZES[_name])).decode()
    VALUES |= {f"x-amz-checksum-{_name}": _digest, f"Part/Checksum{_name.upper()}": _digest}
_BY_KIND: dict[str, Any] = {
    "boolean": True,
    "timestamp": 1_893_456_000,
    "integer": 7,
    "long": 7,
    "string": "x",
}


class Refusal(NamedTuple):
    code: str


def served(s3: Any) -> list[str]:
    """The operations of the model that the daemon serves."""
    return [name for name in s3.operation_names if name not in listed.NOT_SERVED]


def call(name: str, member: str = "") -> Params:
    least = {"Bucket": "photos", "Key": "k"}
    return least | CALLS_FOR_MEMBERS.get((name, member), CALLS.get(name, {}))


def outcome(operation: Any, params: Params) -> object:
    """What the parsers make of a call: the operation with its document, or the refusal."""
    shape = operation.input_shape
    known = {} if shape is None else {n: v for n, v in params.items() if n in shape.members}
    head, body = model.write_request(operation, known)
    try:
        parsed = parse_request(head)
        if not body and (shape is None or shape.serialization.get("payload") not in shape.required_members):
            return parsed, None
        parse = BODIES.get(operation.name)
        return parsed, None if parse is None else parse(body)
    except S3Error as error:
        return Refusal(error.code)
    except PolicyError:
        return Refusal("MalformedPolicy")


def value_of(member: Member) -> Any:
    if member.name in VALUES:
        return VALUES[member.name]
    return member.enum[-1] if member.enum else _BY_KIND[member.kind]


def probes(s3: Any) -> Iterator[tuple[Any, Member]]:
    for name in served(s3):
        operation = s3.operation_model(name)
        for member in model.members(operation.input_shape):
            yield operation, member


# --- findings: one line for each deviation from model and lists ---------------------------------------------


def routes(s3: Any) -> Iterator[str]:
    for name in s3.operation_names:
        operation = s3.operation_model(name)
        found = outcome(operation, call(name))
        if name in listed.NOT_SERVED:
            expected: object = Refusal(listed.NOT_SERVED[name])
            if found != expected:
                yield f"{name}: expected {expected}, found {found}"
        elif isinstance(found, Refusal):
            yield f"{name}: {found}"
        else:
            parsed = operation_name(found[0])  # type: ignore[index]
            if parsed != listed.OTHER_NAMES.get(name, name):
                yield f"{name}: parsed as {parsed}"


def request_members(s3: Any) -> Iterator[str]:
    used: set[tuple[str, str]] = set()
    for operation, member in probes(s3):
        base = call(operation.name, member.name)
        before = outcome(operation, base)
        after = outcome(operation, model.with_value(base, member.path, value_of(member)))
        if isinstance(before, Refusal):
            yield f"{operation.name} {member.name}: refused without it: {before}"
        what = after.code if isinstance(after, Refusal) else "ignored" if after == before else "understood"
        key = listed.exception_for(listed.REQUEST_MEMBERS, operation.name, member.name)
        if key is not None:
            used.add(key)
        expected = "understood" if key is None else listed.REQUEST_MEMBERS[key].partition(":")[0]
        if what != expected:
            yield f"{operation.name} {member.name}: {what}, expected {expected}"
    yield from (f"{key}: listed for nothing" for key in listed.REQUEST_MEMBERS.keys() - used)


def request_values(s3: Any) -> Iterator[str]:
    """Every value of an enumeration is accepted, and no other one."""
    used: set[tuple[str, str]] = set()
    for operation, member in probes(s3):
        key = listed.exception_for(listed.REQUEST_MEMBERS, operation.name, member.name)
        if not member.enum or (key is not None and listed.REQUEST_MEMBERS[key].startswith("ignored")):
            continue
        base = call(operation.name, member.name)
        for value in (*member.enum, "bogus"):
            sent = [value] if member.kind == "list" else value
            found = outcome(operation, model.with_value(base, member.path, sent))
            what = found.code if isinstance(found, Refusal) else "accepted"
            if key is not None and what == listed.REQUEST_MEMBERS[key].partition(":")[0]:
                continue  # the member is refused whatever it says
            exception = listed.exception_for(listed.REQUEST_VALUES, member.name, value)
            if exception is not None:
                used.add(exception)
            if exception is None:
                fits = (what == "accepted") == (value != "bogus")
            else:
                fits = what == listed.REQUEST_VALUES[exception].partition(":")[0]
            if not fits:
                yield f"{operation.name} {member.name}={value}: {what}"
    yield from (f"{key}: listed for nothing" for key in listed.REQUEST_VALUES.keys() - used)


def required(s3: Any) -> Iterator[str]:
    """A request without a member that the model requires is refused."""
    used: set[tuple[str, str]] = set()
    for name in served(s3):
        operation = s3.operation_model(name)
        for wire, path in model.required_members(operation.input_shape):
            params = model.without_value(call(name, wire), path)
            if params is None:
                continue
            found = outcome(operation, params)
            key = listed.exception_for(listed.OPTIONAL_HERE, name, wire)
            if key is not None:
                used.add(key)
            if isinstance(found, Refusal) == (key is not None):
                yield f"{name}: without {wire}: {found}"
    yield from (f"{key}: listed for nothing" for key in listed.OPTIONAL_HERE.keys() - used)


CHECKS = [routes, request_members, request_values, required]


@pytest.mark.parametrize("check", CHECKS)
def test_requests_are_those_of_the_model(check: Callable[[Any], Iterator[str]]) -> None:
    assert not list(check(model.service_model()))


def test_our_enumerations_have_only_values_of_the_model() -> None:
    shapes = model.model_document()["shapes"]
    ours = {
        "ObjectCannedACL": set(get_args(CannedAcl)) | {"aws-exec-read"},
        "Permission": set(get_args(Permission)),
        "ObjectOwnership": set(OWNERSHIPS),
        "ObjectAttributes": set(listings.ATTRIBUTES),
        "ChecksumAlgorithm": {name.upper() for name in ALGORITHMS},
    }
    assert {name: set(shapes[name]["enum"]) for name in ours} == ours


@pytest.mark.parametrize(
    ("check", "path", "changes", "finding"),
    [
        (
            routes,
            ("operations", "GetBucketCors", "http"),
            {"requestUri": "/{Bucket}?corsRules"},
            "GetBucketCors",
        ),
        (routes, ("operations", "PutBucketCors", "http"), {"method": "POST"}, "PutBucketCors"),
        (
            request_members,
            ("shapes", "PutObjectRequest", "members", "Tagging"),
            {"locationName": "x-amz-tags"},
            "PutObject x-amz-tags: ignored",
        ),
        (
            request_members,
            ("shapes", "ListObjectsV2Request", "members", "StartAfter"),
            {"locationName": "start-behind"},
            "ListObjectsV2 ?start-behind: ignored",
        ),
        (
            request_members,
            ("shapes", "LifecycleRuleFilter", "members", "ObjectSizeLessThan"),
            {"locationName": "ObjectSizeBelow"},
            "Rule/Filter/ObjectSizeBelow: MalformedXML",
        ),
        (
            request_members,
            ("shapes", "CompletedPart", "members", "ChecksumCRC32"),
            {"locationName": "CheckSumCRC32"},
            "Part/CheckSumCRC32: ignored",
        ),
        (request_values, ("shapes", "StorageClass"), {"enum": ["STANDARD", "FROZEN"]}, "FROZEN"),
        (request_values, ("shapes", "ExpirationStatus"), {"enum": ["Enabled", "Off"]}, "Rule/Status=Off"),
        (
            required,
            ("shapes", "CreateBucketConfiguration"),
            {"required": ["LocationConstraint"]},
            "CreateBucket: without LocationConstraint",
        ),
        (
            required,
            ("shapes", "ListObjectsV2Request"),
            {"required": ["Bucket", "Prefix"]},
            "ListObjectsV2: without ?prefix",
        ),
    ],
)
def test_a_model_with_another_name_is_found(
    check: Callable[[Any], Iterator[str]], path: tuple[str, ...], changes: dict[str, Any], finding: str
) -> None:
    found = list(check(model.changed_model(*path, **changes)))
    assert any(finding in line for line in found), found
