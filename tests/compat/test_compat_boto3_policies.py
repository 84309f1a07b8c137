"""Who may do what, as boto3 sees it: two users and nobody, policies, ACLs, access blocks, temporary keys."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

USERS = [
    {"user_id": name, "access_key": f"AK{name.upper()}", "secret_key": f"secret-of-{name}"}
    for name in ("ann", "bob")
]
DENIED = (403, "AccessDenied")
PREFIX = "train/"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(yaml.safe_dump(USERS))
    users.chmod(0o600)
    with Daemon.start(args=("--users", str(users))) as running:
        yield running
        assert "Traceback" not in running.output()


def client_of(daemon: Daemon, name: str) -> Any:
    return daemon.client(aws_access_key_id=f"AK{name.upper()}", aws_secret_access_key=f"secret-of-{name}")


@pytest.fixture(scope="module")
def ann(node: Daemon) -> Iterator[Any]:
    client = client_of(node, "ann")
    yield client
    client.close()


@pytest.fixture(scope="module")
def bob(node: Daemon) -> Iterator[Any]:
    client = client_of(node, "bob")
    yield client
    client.close()


@pytest.fixture(scope="module")
def root(node: Daemon) -> Iterator[Any]:
    client = node.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def nobody(node: Daemon) -> Iterator[Any]:
    client = node.client(config=Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}))
    yield client
    client.close()


@pytest.fixture
def bucket(ann: Any) -> str:
    """A bucket of ann's with one object in `train/` and one beside."""
    name = f"policies-{uuid.uuid4().hex[:16]}"
    ann.create_bucket(Bucket=name)
    ann.put_object(Bucket=name, Key="train/1", Body=b"one")
    ann.put_object(Bucket=name, Key="other", Body=b"two")
    return name


def refused(call: Callable[..., Any], **options: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as excinfo:
        call(**options)
    answer = excinfo.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def body(client: Any, bucket: str, key: str, **options: Any) -> bytes:
    with client.get_object(Bucket=bucket, Key=key, **options)["Body"] as stream:
        return bytes(stream.read())


def keys(client: Any, bucket: str, **options: Any) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, **options).get("Contents", [])]


def put_policy(client: Any, bucket: str, *statements: dict[str, Any]) -> None:
    document = {"Version": "2012-10-17", "Statement": [on(bucket, each) for each in statements]}
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(document))


def on(bucket: str, statement: dict[str, Any]) -> dict[str, Any]:
    """With the bucket's name in the resources."""
    resources = statement.get("Resource", ["/*"])
    return {
        "Effect": "Allow",
        **statement,
        "Resource": [f"arn:aws:s3:::{bucket}{rest}" for rest in resources],
    }


# --- the default ------------------------------------------------------------------------------------------


def test_users_are_strangers_to_each_other(bob: Any, nobody: Any, root: Any, bucket: str) -> None:
    for client in (bob, nobody):
        assert refused(client.get_object, Bucket=bucket, Key="train/1") == DENIED
        assert refused(client.put_object, Bucket=bucket, Key="new", Body=b"") == DENIED
        assert refused(client.list_objects_v2, Bucket=bucket) == DENIED
        assert refused(client.head_object, Bucket=bucket, Key="train/1") == (403, "403")
        assert refused(client.get_bucket_policy, Bucket=bucket) == DENIED
    assert body(root, bucket, "train/1") == b"one"
    assert bucket not in [entry["Name"] for entry in bob.list_buckets()["Buckets"]]


def test_what_is_not_there(ann: Any, bob: Any, nobody: Any, bucket: str) -> None:
    assert refused(ann.get_object, Bucket=bucket, Key="none") == (404, "NoSuchKey")
    for client in (bob, nobody):
        assert refused(client.get_object, Bucket=bucket, Key="none") == DENIED
        assert refused(client.get_object, Bucket="no-such-bucket", Key="none") == (404, "NoSuchBucket")
    put_policy(ann, bucket, {"Principal": "*", "Action": "s3:GetObject"})
    for client in (bob, nobody):
        assert body(client, bucket, "other") == b"two"
        assert refused(client.get_object, Bucket=bucket, Key="none") == DENIED
        assert refused(client.head_object, Bucket=bucket, Key="none") == (403, "403")
    listing = {"Principal": "*", "Action": "s3:ListBucket", "Resource": [""]}
    put_policy(ann, bucket, {"Principal": "*", "Action": "s3:GetObject"}, listing)
    assert refused(nobody.get_object, Bucket=bucket, Key="none") == (404, "NoSuchKey")


# --- bucket policies --------------------------------------------------------------------------------------


def test_a_policy_for_one_user_and_prefix(ann: Any, bob: Any, nobody: Any, bucket: str) -> None:
    reading = {"Action": "s3:GetObject", "Resource": ["/train/*"]}
    inside = {"StringLike": {"s3:prefix": "train/*"}}
    listing = {"Action": "s3:ListBucket", "Resource": [""], "Condition": inside}
    principal = {"Principal": {"AWS": "arn:aws:iam::123456789012:user/bob"}}
    put_policy(ann, bucket, {**principal, **reading}, {**principal, **listing})
    assert body(bob, bucket, "train/1") == b"one"
    assert keys(bob, bucket, Prefix=PREFIX) == ["train/1"]
    assert refused(bob.list_objects_v2, Bucket=bucket) == DENIED
    assert refused(bob.list_objects, Bucket=bucket, Prefix="tra") == DENIED
    assert refused(bob.get_object, Bucket=bucket, Key="other") == DENIED
    assert refused(bob.put_object, Bucket=bucket, Key="train/2", Body=b"") == DENIED
    assert refused(nobody.get_object, Bucket=bucket, Key="train/1") == DENIED
    ann.delete_bucket_policy(Bucket=bucket)
    assert refused(bob.get_object, Bucket=bucket, Key="train/1") == DENIED


def test_a_place_to_drop_things(ann: Any, bob: Any, bucket: str) -> None:
    put_policy(ann, bucket, {"Principal": {"AWS": ["bob"]}, "Action": "s3:PutObject", "Resource": ["/in/*"]})
    bob.put_object(Bucket=bucket, Key="in/1", Body=b"from bob")
    upload = bob.create_multipart_upload(Bucket=bucket, Key="in/2")["UploadId"]
    where = {"Bucket": bucket, "Key": "in/2", "UploadId": upload}
    part = bob.upload_part(PartNumber=1, Body=b"part", **where)
    assert refused(bob.list_parts, **where) == DENIED
    bob.complete_multipart_upload(
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}, **where
    )
    assert body(ann, bucket, "in/2") == b"part"
    assert refused(bob.delete_object, Bucket=bucket, Key="in/1") == DENIED
    assert refused(bob.put_object, Bucket=bucket, Key="in/3", Body=b"", Tagging="a=b") == DENIED
    assert refused(bob.put_object, Bucket=bucket, Key="in/3", Body=b"", ACL="public-read") == DENIED
    assert refused(bob.list_multipart_uploads, Bucket=bucket) == DENIED


def test_a_copy_reads_and_writes(ann: Any, bob: Any, bucket: str) -> None:
    mine = f"bobs-{uuid.uuid4().hex[:16]}"
    bob.create_bucket(Bucket=mine)
    source = {"Bucket": bucket, "Key": "train/1"}
    assert refused(bob.copy_object, Bucket=mine, Key="k", CopySource=source) == DENIED
    put_policy(ann, bucket, {"Principal": {"AWS": "bob"}, "Action": "s3:GetObject"})
    bob.copy_object(Bucket=mine, Key="k", CopySource=source)
    assert body(bob, mine, "k") == b"one"
    assert refused(ann.copy_object, Bucket=mine, Key="k", CopySource=source) == DENIED
    ann.put_object_tagging(Bucket=bucket, Key="train/1", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    assert refused(bob.copy_object, Bucket=mine, Key="k", CopySource=source) == DENIED
    bob.copy_object(Bucket=mine, Key="k", CopySource=source, TaggingDirective="REPLACE", Tagging="c=d")


def test_a_deny_wins_and_the_owner_keeps_the_key(ann: Any, root: Any, bucket: str) -> None:
    everything = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": ["", "/*"]}
    put_policy(ann, bucket, everything, {"Principal": {"AWS": "ann"}, "Action": "s3:GetObject"})
    assert refused(ann.get_object, Bucket=bucket, Key="train/1") == DENIED
    assert refused(ann.list_objects_v2, Bucket=bucket) == DENIED
    assert body(root, bucket, "train/1") == b"one"
    assert "Deny" in ann.get_bucket_policy(Bucket=bucket)["Policy"]
    ann.delete_bucket_policy(Bucket=bucket)
    assert body(ann, bucket, "train/1") == b"one"


def test_conditions_of_the_connection(ann: Any, nobody: Any, bucket: str) -> None:
    here, there = ({"IpAddress": {"aws:SourceIp": ip}} for ip in ("127.0.0.0/8", "192.0.2.0/24"))
    reading = {"Principal": "*", "Action": "s3:GetObject"}
    put_policy(ann, bucket, {**reading, "Condition": here})
    assert body(nobody, bucket, "other") == b"two"
    put_policy(ann, bucket, {**reading, "Condition": there})
    assert refused(nobody.get_object, Bucket=bucket, Key="other") == DENIED
    insecure = {"Bool": {"aws:SecureTransport": "false"}}
    put_policy(ann, bucket, reading, {**reading, "Effect": "Deny", "Condition": insecure})
    assert refused(nobody.get_object, Bucket=bucket, Key="other") == DENIED
    assert refused(ann.get_object, Bucket=bucket, Key="other") == DENIED


def test_a_page_that_may_show_the_pictures(ann: Any, node: Daemon, bucket: str) -> None:
    page = {"StringLike": {"aws:Referer": "https://example.org/*"}}
    put_policy(ann, bucket, {"Principal": "*", "Action": "s3:GetObject", "Condition": page})
    url = f"{node.endpoint}/{bucket}/other"
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Referer": "https://example.org/a"})
    ) as answer:
        assert answer.read() == b"two"
    with pytest.raises(urllib.error.HTTPError) as excinfo:
        urllib.request.urlopen(url)
    with excinfo.value as refusal:
        assert refusal.code == 403


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_presigned_urls_are_asked_like_others(ann: Any, node: Daemon, bucket: str, version: str) -> None:
    signing = client_of_version(node, version)
    url = signing.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "other"})
    signing.close()
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"two"
    presigned = {"StringEquals": {"s3:authType": "REST-QUERY-STRING"}}
    put_policy(
        ann, bucket, {"Effect": "Deny", "Principal": "*", "Action": "s3:GetObject", "Condition": presigned}
    )
    with pytest.raises(urllib.error.HTTPError) as excinfo:
        urllib.request.urlopen(url)
    with excinfo.value as refusal:
        assert refusal.code == 403
    assert body(ann, bucket, "other") == b"two"


def client_of_version(daemon: Daemon, version: str) -> Any:
    keys = {"aws_access_key_id": "AKANN", "aws_secret_access_key": "secret-of-ann"}
    return daemon.client(config=Config(signature_version=version, s3={"addressing_style": "path"}), **keys)


def test_versions_have_a_right_of_their_own(ann: Any, bob: Any, bucket: str) -> None:
    ann.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    old = ann.put_object(Bucket=bucket, Key="v", Body=b"old")["VersionId"]
    ann.put_object(Bucket=bucket, Key="v", Body=b"new")
    put_policy(ann, bucket, {"Principal": {"AWS": "bob"}, "Action": "s3:GetObject"})
    assert body(bob, bucket, "v") == b"new"
    assert refused(bob.get_object, Bucket=bucket, Key="v", VersionId=old) == DENIED
    put_policy(ann, bucket, {"Principal": {"AWS": "bob"}, "Action": "s3:GetObjectVersion"})
    assert body(bob, bucket, "v", VersionId=old) == b"old"
    assert refused(bob.get_object, Bucket=bucket, Key="v") == DENIED
    assert refused(bob.list_object_versions, Bucket=bucket) == DENIED


def test_tags_decide(ann: Any, bob: Any, bucket: str) -> None:
    shared = {"StringEquals": {"s3:ExistingObjectTag/share": "yes"}}
    put_policy(ann, bucket, {"Principal": {"AWS": "bob"}, "Action": "s3:GetObject", "Condition": shared})
    assert refused(bob.get_object, Bucket=bucket, Key="other") == DENIED
    ann.put_object_tagging(Bucket=bucket, Key="other", Tagging={"TagSet": [{"Key": "share", "Value": "yes"}]})
    assert body(bob, bucket, "other") == b"two"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("no JSON", (400, "MalformedPolicy")),
        ({"Principal": "*", "Action": "s3:GetObjcet"}, (400, "MalformedPolicy")),
        ({"Principal": "*", "Action": "s3:GetObject", "Resource": [""]}, (400, "MalformedPolicy")),
        ({"Action": "s3:GetObject"}, (400, "MalformedPolicy")),
        (
            {"Principal": "*", "Action": "s3:*", "Condition": {"StringEquals": {"aws:RequestedRegion": "x"}}},
            (501, "NotImplemented"),
        ),
    ],
)
def test_a_policy_that_is_none(ann: Any, bucket: str, policy: Any, expected: tuple[int, str]) -> None:
    text = policy if isinstance(policy, str) else json.dumps({"Statement": on(bucket, policy)})
    assert refused(ann.put_bucket_policy, Bucket=bucket, Policy=text) == expected
    assert refused(ann.get_bucket_policy, Bucket=bucket) == (404, "NoSuchBucketPolicy")


def test_forms_are_asked_like_others(ann: Any, bob: Any, bucket: str) -> None:
    allowed = {"StringEquals": {"s3:authType": "POST", "s3:signatureversion": "AWS"}}
    dropping = {"Principal": {"AWS": "bob"}, "Action": "s3:PutObject", "Resource": ["/in/*"]}
    put_policy(ann, bucket, {**dropping, "Condition": allowed})
    for key, expected in (("in/1", 204), ("other", 403)):
        form = bob.generate_presigned_post(bucket, key)
        assert send_form(form, b"dropped") == expected
    assert body(ann, bucket, "in/1") == b"dropped"
    assert body(ann, bucket, "other") == b"two"
    assert refused(bob.put_object, Bucket=bucket, Key="in/2", Body=b"") == DENIED


def send_form(form: dict[str, Any], content: bytes) -> int:
    """The status of an upload by HTML form."""
    lines = [f'name="{name}"\r\n\r\n{value}' for name, value in form["fields"].items()]
    lines.append(f'name="file"; filename="f"\r\n\r\n{content.decode()}')
    text = "".join(f"--x\r\nContent-Disposition: form-data; {line}\r\n" for line in lines) + "--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(form["url"], text.encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


# --- ACLs and access blocks -------------------------------------------------------------------------------


def test_an_object_for_everyone(ann: Any, bob: Any, nobody: Any, bucket: str) -> None:
    ann.put_object(Bucket=bucket, Key="open", Body=b"open", ACL="public-read")
    ann.put_object(Bucket=bucket, Key="signed", Body=b"signed", ACL="authenticated-read")
    assert body(nobody, bucket, "open") == b"open"
    assert body(bob, bucket, "signed") == b"signed"
    assert refused(nobody.get_object, Bucket=bucket, Key="signed") == DENIED
    assert refused(nobody.list_objects_v2, Bucket=bucket) == DENIED
    assert refused(bob.get_object_acl, Bucket=bucket, Key="open") == DENIED
    ann.put_object_acl(Bucket=bucket, Key="open", ACL="private")
    assert refused(nobody.get_object, Bucket=bucket, Key="open") == DENIED
    ann.put_object(Bucket=bucket, Key="for-bob", Body=b"x", GrantRead='id="bob"', GrantReadACP='id="bob"')
    assert body(bob, bucket, "for-bob") == b"x"
    assert len(bob.get_object_acl(Bucket=bucket, Key="for-bob")["Grants"]) == 2
    assert refused(nobody.get_object, Bucket=bucket, Key="for-bob") == DENIED


def test_a_bucket_for_everyone(ann: Any, bob: Any, nobody: Any, bucket: str) -> None:
    ann.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    assert keys(nobody, bucket) == ["other", "train/1"]
    assert refused(nobody.get_object, Bucket=bucket, Key="other") == DENIED
    nobody.put_object(Bucket=bucket, Key="anonymous", Body=b"a")
    bob.put_object(Bucket=bucket, Key="bobs", Body=b"b")
    assert body(bob, bucket, "bobs") == b"b"
    assert refused(nobody.get_object, Bucket=bucket, Key="anonymous") == DENIED
    assert refused(nobody.get_object, Bucket=bucket, Key="bobs") == DENIED
    assert body(ann, bucket, "bobs") == b"b"
    nobody.delete_object(Bucket=bucket, Key="other")
    assert refused(ann.head_object, Bucket=bucket, Key="other") == (404, "404")
    assert refused(nobody.delete_bucket, Bucket=bucket) == DENIED


def test_the_public_access_block(ann: Any, nobody: Any, bucket: str) -> None:
    def block(**settings: bool) -> None:
        ann.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=settings)

    reading = {"Principal": "*", "Action": "s3:GetObject"}
    ann.put_object(Bucket=bucket, Key="open", Body=b"open", ACL="public-read")
    block(IgnorePublicAcls=True)
    assert refused(nobody.get_object, Bucket=bucket, Key="open") == DENIED
    block(BlockPublicAcls=True)
    assert body(nobody, bucket, "open") == b"open"
    assert refused(ann.put_object, Bucket=bucket, Key="k", Body=b"", ACL="public-read") == DENIED
    assert refused(ann.put_bucket_acl, Bucket=bucket, ACL="public-read") == DENIED
    block(BlockPublicPolicy=True)
    with pytest.raises(ClientError, match="AccessDenied"):
        put_policy(ann, bucket, reading)
    block()
    put_policy(ann, bucket, reading)
    assert ann.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"] is True
    assert body(nobody, bucket, "other") == b"two"
    block(RestrictPublicBuckets=True)
    assert refused(nobody.get_object, Bucket=bucket, Key="other") == DENIED
    assert body(ann, bucket, "other") == b"two"


def test_ownership_switches_acls_off(ann: Any, nobody: Any, bucket: str) -> None:
    ann.put_object(Bucket=bucket, Key="open", Body=b"open", ACL="public-read")
    rules = {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}
    ann.put_bucket_ownership_controls(Bucket=bucket, OwnershipControls=rules)
    assert refused(nobody.get_object, Bucket=bucket, Key="open") == DENIED
    unsupported = (400, "AccessControlListNotSupported")
    assert refused(ann.put_object_acl, Bucket=bucket, Key="open", ACL="public-read") == unsupported
    assert refused(ann.put_object, Bucket=bucket, Key="k", Body=b"", ACL="public-read") == unsupported


# --- temporary keys ---------------------------------------------------------------------------------------


def pod_policy(bucket: str) -> dict[str, Any]:
    inside = {"StringLike": {"s3:prefix": "train/*"}}
    statements = [
        on(bucket, {"Action": "s3:GetObject", "Resource": ["/train/*"]}),
        on(bucket, {"Action": "s3:ListBucket", "Resource": [""], "Condition": inside}),
    ]
    return {"Version": "2012-10-17", "Statement": statements}


def test_a_training_pods_key_reads_one_prefix(root: Any, node: Daemon) -> None:
    bucket = f"pods-{uuid.uuid4().hex[:16]}"
    root.create_bucket(Bucket=bucket)
    root.put_object(Bucket=bucket, Key="train/1", Body=b"one")
    root.put_object(Bucket=bucket, Key="other", Body=b"two")
    answer = node.request("POST", "/-/sts", json.dumps({"policy": pod_policy(bucket)}).encode())
    assert answer.status == 200, answer.body
    made = json.loads(answer.body)
    pod = node.client(
        aws_access_key_id=made["AccessKeyId"],
        aws_secret_access_key=made["SecretAccessKey"],
        aws_session_token=made["SessionToken"],
    )
    try:
        assert body(pod, bucket, "train/1") == b"one"
        assert keys(pod, bucket, Prefix=PREFIX) == ["train/1"]
        assert refused(pod.get_object, Bucket=bucket, Key="train/none") == (404, "NoSuchKey")
        assert refused(pod.get_object, Bucket=bucket, Key="other") == DENIED
        assert refused(pod.put_object, Bucket=bucket, Key="train/1", Body=b"") == DENIED
        assert refused(pod.delete_object, Bucket=bucket, Key="train/1") == DENIED
        assert refused(pod.list_objects_v2, Bucket=bucket) == DENIED
        assert refused(pod.list_buckets) == DENIED
        refusals = pod.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "train/1"}]})["Errors"]
        assert [entry["Code"] for entry in refusals] == ["AccessDenied"]
        url = pod.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "train/1"})
        with urllib.request.urlopen(url) as stream:
            assert stream.read() == b"one"
    finally:
        pod.close()
