"""ACLs of buckets, and what decides whether one may be set, through boto3."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from botocore.config import Config

from meshd.testing.daemons import Daemon
from meshwire.s3.settings import ALL_USERS, AUTHENTICATED_USERS
from tests.component.s3_raw import Wire
from tests.component.test_s3_settings import refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

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
OWNERS = {"Grantee": ALICE, "Permission": "FULL_CONTROL"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with Daemon.start(args=("--users", str(users))) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def alice(shared: Daemon) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=shared.endpoint,
        aws_access_key_id="AKALICE",
        aws_secret_access_key="secret-of-alice",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


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
    assert grants(alice.get_bucket_acl(Bucket=bucket)) == [OWNERS, *others]


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
        OWNERS,
        {"Grantee": SIGNED_IN, "Permission": "READ"},
        {"Grantee": BOB, "Permission": "READ"},
    ]
    policy = {"Owner": answer["Owner"], "Grants": [*answer["Grants"][1:], OWNERS]}
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
    alice.put_object(Bucket=bucket, Key="k", ACL="bucket-owner-full-control")
    alice.put_object(Bucket=bucket, Key="k", ACL="private")
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
