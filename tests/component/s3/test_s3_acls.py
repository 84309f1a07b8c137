"""ACLs of buckets, and what decides whether one may be set, through boto3."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from botocore.config import Config

from meshwire.s3.bucket_settings import ALL_USERS, AUTHENTICATED_USERS
from tests.component.s3.test_s3_settings import refusal
from tests.support.one_node import one_node
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

USERS = [
    {
        "user_id": f"id-{name}",
        "display_name": name.title(),
        "email": f"{name}@example.org",
        "access_key": f"AK{name.upper()}",
        "secret_key": f"secret-of-{name}",
    }
    for name in ("alice", "bob")
]
ALICE = {"Type": "CanonicalUser", "ID": "id-alice", "DisplayName": "Alice"}
BOB = {"Type": "CanonicalUser", "ID": "id-bob", "DisplayName": "Bob"}
EVERYONE = {"Type": "Group", "URI": ALL_USERS}
SIGNED_IN = {"Type": "Group", "URI": AUTHENTICATED_USERS}
SIGNED_IN_READS = {"Grantee": SIGNED_IN, "Permission": "READ"}
OWNERS = {"Grantee": ALICE, "Permission": "FULL_CONTROL"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with one_node(("--users", str(users))) as daemon:
        yield daemon


def client_of(daemon: Daemon, name: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=daemon.endpoint,
        aws_access_key_id=f"AK{name.upper()}",
        aws_secret_access_key=f"secret-of-{name}",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


@pytest.fixture(scope="module")
def alice(shared: Daemon) -> Any:
    return client_of(shared, "alice")


@pytest.fixture
def wire(shared: Daemon) -> Iterator[Wire]:
    wire = Wire(shared.endpoint, "AKALICE", "secret-of-alice")
    yield wire
    wire.close()


@pytest.fixture
def bucket(alice: Any) -> str:
    name = f"acl-{uuid.uuid4().hex[:20]}"
    alice.create_bucket(Bucket=name)
    return name


def grants(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert answer["Owner"] == {"ID": "id-alice", "DisplayName": "Alice"}
    return list(answer["Grants"])


CANNED = [
    ("private", []),
    ("public-read", [{"Grantee": EVERYONE, "Permission": "READ"}]),
    (
        "public-read-write",
        [{"Grantee": EVERYONE, "Permission": "READ"}, {"Grantee": EVERYONE, "Permission": "WRITE"}],
    ),
    ("authenticated-read", [{"Grantee": SIGNED_IN, "Permission": "READ"}]),
    ("bucket-owner-full-control", []),
]


@pytest.mark.parametrize(("canned", "others"), CANNED)
def test_grants_of_a_canned_acl(alice: Any, bucket: str, canned: str, others: list[dict[str, Any]]) -> None:
    alice.put_bucket_acl(Bucket=bucket, ACL=canned)
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == [*others, OWNERS]


def test_a_bucket_is_created_with_an_acl(alice: Any) -> None:
    name = f"acl-{uuid.uuid4().hex[:20]}"
    alice.create_bucket(Bucket=name, ACL="public-read")
    assert len(alice.get_bucket_acl(Bucket=name)["Grants"]) == 2


def test_grants_in_headers_and_documents_read_back(alice: Any, bucket: str) -> None:
    alice.put_bucket_acl(
        Bucket=bucket,
        GrantRead=f'uri="{AUTHENTICATED_USERS}", emailAddress="BOB@example.org"',
        GrantFullControl="id=id-alice",
    )
    answer = alice.get_bucket_acl(Bucket=bucket)
    assert grants(answer) == [
        SIGNED_IN_READS,
        {"Grantee": BOB, "Permission": "READ"},
        OWNERS,
    ]
    policy = {"Owner": answer["Owner"], "Grants": [SIGNED_IN_READS, OWNERS]}
    alice.put_bucket_acl(Bucket=bucket, AccessControlPolicy=policy)
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == policy["Grants"]


def test_an_acl_may_grant_nothing(alice: Any, bucket: str) -> None:
    policy = {"Owner": {"ID": "id-alice"}, "Grants": []}
    alice.put_bucket_acl(Bucket=bucket, AccessControlPolicy=policy)
    assert grants({"Grants": [], **alice.get_bucket_acl(Bucket=bucket)}) == []


def test_grantees_who_are_not_there(alice: Any, bucket: str) -> None:
    nobody = refusal(lambda: alice.put_bucket_acl(Bucket=bucket, GrantRead="id=id-carol"))
    assert nobody == (400, "InvalidArgument")
    mail = refusal(lambda: alice.put_bucket_acl(Bucket=bucket, GrantRead="emailAddress=carol@example.org"))
    assert mail == (400, "UnresolvableGrantByEmailAddress")
    policy = {"Owner": {"ID": "id-bob"}, "Grants": [OWNERS]}
    thief = refusal(lambda: alice.put_bucket_acl(Bucket=bucket, AccessControlPolicy=policy))
    assert thief == (403, "AccessDenied")
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == [OWNERS]


@pytest.mark.parametrize(
    ("document", "headers", "code"),
    [
        (b"", {}, "MissingSecurityHeader"),
        (b"<AccessControlPolicy>", {}, "MalformedACLError"),
        (b"<AccessControlPolicy/>", {}, "MalformedACLError"),
        (b"<Other/>", {}, "MalformedACLError"),
        (b"<AccessControlPolicy/>", {"x-amz-acl": "private"}, "UnexpectedContent"),
        (
            b"<AccessControlPolicy><Owner><ID>id-alice</ID></Owner><AccessControlList><Grant>"
            b"<Grantee><ID>id-bob</ID></Grantee><Permission>EVERYTHING</Permission>"
            b"</Grant></AccessControlList></AccessControlPolicy>",
            {},
            "MalformedACLError",
        ),
        (
            b"<AccessControlPolicy><Owner><ID>id-alice</ID></Owner><AccessControlList><Grant>"
            b"<Grantee><URI>http://example.org/all</URI></Grantee><Permission>READ</Permission>"
            b"</Grant></AccessControlList></AccessControlPolicy>",
            {},
            "InvalidArgument",
        ),
    ],
)
def test_documents_that_are_refused(
    wire: Wire, alice: Any, bucket: str, document: bytes, headers: dict[str, str], code: str
) -> None:
    assert wire.call("PUT", f"/{bucket}?acl", document, headers=headers).code == code
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == [OWNERS]


# --- what decides whether one may be set --------------------------------------------------------------------


def test_public_access_block(alice: Any, bucket: str) -> None:
    missing = (404, "NoSuchPublicAccessBlockConfiguration")
    assert refusal(lambda: alice.get_public_access_block(Bucket=bucket)) == missing
    block = {
        "BlockPublicAcls": True,
        "IgnorePublicAcls": False,
        "BlockPublicPolicy": False,
        "RestrictPublicBuckets": True,
    }
    alice.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=block)
    assert alice.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"] == block
    for public in ("public-read", "public-read-write", "authenticated-read"):
        blocked = refusal(lambda acl=public: alice.put_bucket_acl(Bucket=bucket, ACL=acl))  # type: ignore[misc]
        assert blocked == (403, "AccessDenied")
        put = refusal(lambda acl=public: alice.put_object(Bucket=bucket, Key="k", ACL=acl))  # type: ignore[misc]
        assert put == (403, "AccessDenied")
    grant = refusal(lambda: alice.put_bucket_acl(Bucket=bucket, GrantRead=f"uri={ALL_USERS}"))
    assert grant == (403, "AccessDenied")
    alice.put_bucket_acl(Bucket=bucket, ACL="private")
    alice.put_object(Bucket=bucket, Key="k", ACL="private")
    alice.delete_public_access_block(Bucket=bucket)
    assert refusal(lambda: alice.get_public_access_block(Bucket=bucket)) == missing
    alice.put_bucket_acl(Bucket=bucket, ACL="public-read")


def test_acls_are_switched_off_by_ownership(alice: Any, bucket: str) -> None:
    missing = (404, "OwnershipControlsNotFoundError")
    assert refusal(lambda: alice.get_bucket_ownership_controls(Bucket=bucket)) == missing
    enforced = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    alice.put_bucket_acl(Bucket=bucket, ACL="public-read")
    refused = refusal(lambda: alice.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=enforced))
    assert refused == (400, "InvalidBucketAclWithObjectOwnership")
    alice.put_bucket_acl(Bucket=bucket, ACL="private")
    alice.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=enforced)
    assert alice.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"] == enforced
    off = (400, "AccessControlListNotSupported")
    assert refusal(lambda: alice.put_bucket_acl(Bucket=bucket, ACL="public-read")) == off
    assert refusal(lambda: alice.put_object(Bucket=bucket, Key="k", ACL="public-read")) == off
    assert refusal(lambda: alice.put_object(Bucket=bucket, Key="k", GrantRead="id=id-bob")) == off
    assert refusal(lambda: alice.put_object(Bucket=bucket, Key="k", ACL="private")) == off
    alice.put_object(Bucket=bucket, Key="k", ACL="bucket-owner-full-control")
    alice.put_object(Bucket=bucket, Key="k", GrantFullControl="id=id-alice")
    alice.put_object(Bucket=bucket, Key="k")
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == [OWNERS]
    alice.delete_bucket_ownership_controls(Bucket=bucket)
    assert refusal(lambda: alice.get_bucket_ownership_controls(Bucket=bucket)) == missing


def test_a_bucket_is_created_with_ownership(alice: Any) -> None:
    name = f"acl-{uuid.uuid4().hex[:20]}"
    both = {"Bucket": name, "ObjectOwnership": "BucketOwnerEnforced", "ACL": "public-read"}
    assert refusal(lambda: alice.create_bucket(**both)) == (400, "InvalidBucketAclWithObjectOwnership")
    alice.create_bucket(Bucket=name, ObjectOwnership="BucketOwnerPreferred")
    rules = alice.get_bucket_ownership_controls(Bucket=name)["OwnershipControls"]["Rules"]
    assert rules == [{"ObjectOwnership": "BucketOwnerPreferred"}]


def test_a_bucket_created_again_with_other_rights(alice: Any, bucket: str) -> None:
    """What cannot be done is not answered as if it were: the ACL of a bucket that is there stays."""
    alice.create_bucket(Bucket=bucket)
    alice.create_bucket(Bucket=bucket, ACL="private")
    for other in ({"ACL": "public-read"}, {"ObjectOwnership": "BucketOwnerEnforced"}):
        again = refusal(lambda more=other: alice.create_bucket(Bucket=bucket, **more))  # type: ignore[misc]
        assert again == (409, "BucketAlreadyExists")
    alice.put_bucket_acl(Bucket=bucket, ACL="public-read")
    alice.create_bucket(Bucket=bucket)
    assert refusal(lambda: alice.create_bucket(Bucket=bucket, ACL="private")) == (409, "BucketAlreadyExists")
    assert len(grants(alice.get_bucket_acl(Bucket=bucket))) == 2


def test_who_owns_what_others_write(shared: Daemon, alice: Any, bucket: str) -> None:
    bob = client_of(shared, "bob")
    alice.put_bucket_acl(Bucket=bucket, GrantFullControl="id=id-alice", GrantWrite="id=id-bob")

    def owner(key: str, **more: Any) -> str:
        bob.put_object(Bucket=bucket, Key=key, Body=b"x", **more)
        entries = alice.list_objects_v2(Bucket=bucket, Prefix=key, FetchOwner=True)["Contents"]
        return str(entries[0]["Owner"]["ID"])

    assert (owner("a"), owner("a", ACL="bucket-owner-full-control")) == ("id-bob", "id-bob")
    preferred = {"Rules": [{"ObjectOwnership": "BucketOwnerPreferred"}]}
    alice.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=preferred)
    assert (owner("a"), owner("a", ACL="bucket-owner-full-control")) == ("id-bob", "id-alice")
    alice.put_bucket_acl(Bucket=bucket, ACL="private")
    enforced = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    alice.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=enforced)
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": "id-bob"},
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    alice.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    assert owner("a") == "id-alice"


def test_a_bucket_of_another_owner_than_expected(alice: Any, bucket: str) -> None:
    alice.put_object(Bucket=bucket, Key="k", Body=b"x", ExpectedBucketOwner="id-alice")
    denied = (403, "AccessDenied")
    wrong = {"Bucket": bucket, "ExpectedBucketOwner": "id-bob"}
    assert refusal(lambda: alice.put_object(Key="k", Body=b"y", **wrong)) == denied
    assert refusal(lambda: alice.get_object(Key="k", **wrong)) == denied
    assert refusal(lambda: alice.delete_bucket_policy(**wrong)) == denied
    assert refusal(lambda: alice.head_bucket(**wrong))[0] == 403
    copy = {"Bucket": bucket, "Key": "copy", "CopySource": f"{bucket}/k"}
    assert refusal(lambda: alice.copy_object(**copy, ExpectedSourceBucketOwner="id-bob")) == denied
    alice.copy_object(**copy, ExpectedSourceBucketOwner="id-alice", ExpectedBucketOwner="id-alice")
    assert alice.get_object(Bucket=bucket, Key="copy")["Body"].read() == b"x"


# --- objects ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("canned", "others"), CANNED)
def test_grants_of_an_objects_canned_acl(
    alice: Any, bucket: str, canned: str, others: list[dict[str, Any]]
) -> None:
    alice.put_object(Bucket=bucket, Key="k", Body=b"x", ACL=canned)
    assert grants(alice.get_object_acl(Bucket=bucket, Key="k")) == [*others, OWNERS]
    alice.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k", ACL=canned)
    assert grants(alice.get_object_acl(Bucket=bucket, Key="copy")) == [*others, OWNERS]
    alice.put_object_acl(Bucket=bucket, Key="copy", ACL="private")
    assert grants(alice.get_object_acl(Bucket=bucket, Key="copy")) == [OWNERS]
    alice.put_object_acl(Bucket=bucket, Key="copy", ACL=canned)
    assert grants(alice.get_object_acl(Bucket=bucket, Key="copy")) == [*others, OWNERS]


def test_a_copy_is_private_whatever_its_source_is(alice: Any, bucket: str) -> None:
    alice.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="public-read")
    alice.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    assert grants(alice.get_object_acl(Bucket=bucket, Key="copy")) == [OWNERS]


def test_an_upload_has_the_acl_it_began_with(alice: Any, bucket: str) -> None:
    upload = alice.create_multipart_upload(Bucket=bucket, Key="k", ACL="public-read")["UploadId"]
    part = alice.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"x")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    alice.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload=parts)
    assert len(grants(alice.get_object_acl(Bucket=bucket, Key="k"))) == 2


def test_an_objects_grants_read_back(alice: Any, bucket: str) -> None:
    alice.put_object(
        Bucket=bucket, Key="k", Body=b"x", GrantFullControl="id=id-alice", GrantReadACP="id=id-bob"
    )
    answer = alice.get_object_acl(Bucket=bucket, Key="k")
    assert grants(answer) == [{"Grantee": BOB, "Permission": "READ_ACP"}, OWNERS]
    policy = {"Owner": answer["Owner"], "Grants": [{"Grantee": EVERYONE, "Permission": "READ"}, OWNERS]}
    before = alice.head_object(Bucket=bucket, Key="k")
    alice.put_object_acl(Bucket=bucket, Key="k", AccessControlPolicy=policy)
    assert grants(alice.get_object_acl(Bucket=bucket, Key="k")) == policy["Grants"]
    after = alice.head_object(Bucket=bucket, Key="k")
    assert (after["ETag"], after["LastModified"]) == (before["ETag"], before["LastModified"])
    policy["Owner"] = {"ID": "id-bob"}
    thief = refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", AccessControlPolicy=policy))
    assert thief == (403, "AccessDenied")


def test_the_acl_of_a_version(alice: Any, bucket: str) -> None:
    alice.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    first = alice.put_object(Bucket=bucket, Key="k", Body=b"1")["VersionId"]
    second = alice.put_object(Bucket=bucket, Key="k", Body=b"2")["VersionId"]
    alice.put_object_acl(Bucket=bucket, Key="k", VersionId=first, ACL="public-read")
    of_first = alice.get_object_acl(Bucket=bucket, Key="k", VersionId=first)
    assert len(grants(of_first)) == 2
    assert of_first["ResponseMetadata"]["HTTPHeaders"]["x-amz-version-id"] == first
    of_second = alice.get_object_acl(Bucket=bucket, Key="k")
    assert grants(of_second) == [OWNERS]
    assert of_second["ResponseMetadata"]["HTTPHeaders"]["x-amz-version-id"] == second
    marker = alice.delete_object(Bucket=bucket, Key="k")["VersionId"]
    assert refusal(lambda: alice.get_object_acl(Bucket=bucket, Key="k")) == (404, "NoSuchKey")
    of_marker = refusal(lambda: alice.get_object_acl(Bucket=bucket, Key="k", VersionId=marker))
    assert of_marker == (405, "MethodNotAllowed")
    put = refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", VersionId=marker, ACL="private"))
    assert put == (405, "MethodNotAllowed")
    other = alice.put_object(Bucket=bucket, Key="other", Body=b"2")["VersionId"]
    gone = refusal(lambda: alice.get_object_acl(Bucket=bucket, Key="k", VersionId=other))
    assert gone == (404, "NoSuchVersion")


def test_an_objects_acl_where_acls_are_switched_off_or_blocked(alice: Any, bucket: str) -> None:
    alice.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="public-read")
    block = {"BlockPublicAcls": True}
    alice.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=block)
    public = refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", ACL="public-read"))
    assert public == (403, "AccessDenied")
    everyone = {"Owner": {"ID": "id-alice"}, "Grants": [{"Grantee": EVERYONE, "Permission": "READ"}]}
    document = refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", AccessControlPolicy=everyone))
    assert document == (403, "AccessDenied")
    enforced = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    alice.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=enforced)
    assert grants(alice.get_object_acl(Bucket=bucket, Key="k")) == [OWNERS]
    off = (400, "AccessControlListNotSupported")
    assert refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", ACL="public-read")) == off
    assert refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", AccessControlPolicy=everyone)) == off


def test_objects_that_are_not_there(alice: Any, wire: Wire, bucket: str) -> None:
    assert refusal(lambda: alice.get_object_acl(Bucket=bucket, Key="k")) == (404, "NoSuchKey")
    assert refusal(lambda: alice.put_object_acl(Bucket=bucket, Key="k", ACL="private")) == (404, "NoSuchKey")
    alice.put_object(Bucket=bucket, Key="k", Body=b"x")
    assert wire.call("PUT", f"/{bucket}/k?acl").code == "MissingSecurityHeader"
    assert wire.call("PUT", f"/{bucket}/k?acl", b"<Grant/>").code == "MalformedACLError"
    assert wire.call("PUT", f"/{bucket}/k?acl", b"x", headers={"x-amz-acl": "private"}).code == (
        "UnexpectedContent"
    )
    assert alice.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_a_bucket_with_hidden_versions_is_not_empty(alice: Any, bucket: str) -> None:
    alice.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    version = alice.put_object(Bucket=bucket, Key="k", Body=b"x")["VersionId"]
    marker = alice.delete_object(Bucket=bucket, Key="k")["VersionId"]
    for left in (version, marker):
        assert refusal(lambda: alice.delete_bucket(Bucket=bucket)) == (409, "BucketNotEmpty")
        alice.delete_object(Bucket=bucket, Key="k", VersionId=left)
    alice.delete_bucket(Bucket=bucket)
