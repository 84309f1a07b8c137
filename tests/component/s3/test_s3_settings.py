"""What a bucket can be told, through boto3 and by hand."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError
from minio import Minio
from minio.commonconfig import ENABLED
from minio.error import S3Error as MinioError
from minio.versioningconfig import VersioningConfig

from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.s3_raw import Wire


def refusal(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(ClientError) as excinfo:
        call()
    response = excinfo.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_versioning(s3: Any, bucket: str) -> None:
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)
    for status in ("Enabled", "Suspended", "Enabled"):
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
        assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == status


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (b"", "MissingRequestBodyError"),
        (b"<VersioningConfiguration/>", "IllegalVersioningConfigurationException"),
        (b"<VersioningConfiguration><Status>On</Status></VersioningConfiguration>", "MalformedXML"),
        (b"<Versioning><Status>Enabled</Status></Versioning>", "MalformedXML"),
        (
            b"<VersioningConfiguration><Status>Enabled</Status><MfaDelete>Enabled</MfaDelete>"
            b"</VersioningConfiguration>",
            "NotImplemented",
        ),
    ],
)
def test_versioning_documents_that_are_refused(
    wire: Wire, s3: Any, bucket: str, document: bytes, code: str
) -> None:
    assert wire.call("PUT", f"/{bucket}?versioning", document).code == code
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)


def test_a_misspelt_block_is_refused(wire: Wire, s3: Any, bucket: str) -> None:
    document = b"<PublicAccessBlockConfiguration><BlockPublicACLs>true</BlockPublicACLs>"
    document += b"</PublicAccessBlockConfiguration>"
    assert wire.call("PUT", f"/{bucket}?publicAccessBlock", document).code == "MalformedXML"


def test_digests_of_a_document_are_verified(wire: Wire, s3: Any, bucket: str) -> None:
    document = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    wrong = {"content-md5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}
    assert wire.call("PUT", f"/{bucket}?versioning", document, headers=wrong).code == "BadDigest"
    wrong = {"x-amz-checksum-crc32": "AAAAAA=="}
    assert wire.call("PUT", f"/{bucket}?versioning", document, headers=wrong).code == "BadDigest"
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)
    right = {"content-md5": base64.b64encode(hashlib.md5(document).digest()).decode()}
    assert wire.call("PUT", f"/{bucket}?versioning", document, headers=right).status == 200
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"


def test_settings_of_a_bucket_that_is_not_there(s3: Any) -> None:
    gone = "no-such-bucket-here"
    assert refusal(lambda: s3.get_bucket_versioning(Bucket=gone)) == (404, "NoSuchBucket")
    status = {"Status": "Enabled"}
    put = refusal(lambda: s3.put_bucket_versioning(Bucket=gone, VersioningConfiguration=status))
    assert put == (404, "NoSuchBucket")


# --- what is never set ------------------------------------------------------------------------------------


def test_empty_documents_of_what_is_never_set(s3: Any, bucket: str) -> None:
    assert "Status" not in s3.get_bucket_accelerate_configuration(Bucket=bucket)
    assert "LoggingEnabled" not in s3.get_bucket_logging(Bucket=bucket)
    notification = s3.get_bucket_notification_configuration(Bucket=bucket)
    assert set(notification) == {"ResponseMetadata"}
    assert s3.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("get_bucket_website", "NoSuchWebsiteConfiguration"),
        ("get_bucket_replication", "ReplicationConfigurationNotFoundError"),
        ("get_bucket_encryption", "ServerSideEncryptionConfigurationNotFoundError"),
        ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError"),
    ],
)
def test_not_found_of_what_is_never_set(s3: Any, bucket: str, call: str, code: str) -> None:
    assert refusal(lambda: getattr(s3, call)(Bucket=bucket)) == (404, code)


@pytest.mark.parametrize(
    "call", ["delete_bucket_website", "delete_bucket_replication", "delete_bucket_encryption"]
)
def test_removing_what_is_never_set_is_a_success(s3: Any, bucket: str, call: str) -> None:
    assert getattr(s3, call)(Bucket=bucket)["ResponseMetadata"]["HTTPStatusCode"] == 204


@pytest.mark.parametrize(
    "setting",
    [
        "accelerate",
        "encryption",
        "logging",
        "notification",
        "object-lock",
        "replication",
        "requestPayment",
        "website",
    ],
)
def test_setting_what_is_never_set_is_not_implemented(wire: Wire, s3: Any, bucket: str, setting: str) -> None:
    answer = wire.call("PUT", f"/{bucket}?{setting}", b"<Any/>")
    assert (answer.status, answer.code) == (501, "NotImplemented")
    s3.head_bucket(Bucket=bucket)


# --- tags -------------------------------------------------------------------------------------------------


def test_tags(s3: Any, bucket: str) -> None:
    missing = (404, "NoSuchTagSet")
    assert refusal(lambda: s3.get_bucket_tagging(Bucket=bucket)) == missing
    tags = [{"Key": f"key {n}", "Value": "é+-=._:/@"} for n in range(50)]
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags})
    assert s3.get_bucket_tagging(Bucket=bucket)["TagSet"] == tags
    more = [*tags, {"Key": "one", "Value": "more"}]
    refused = refusal(lambda: s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": more}))
    assert refused == (400, "BadRequest")
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": []})
    assert refusal(lambda: s3.get_bucket_tagging(Bucket=bucket)) == missing
    s3.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags[:1]})
    s3.delete_bucket_tagging(Bucket=bucket)
    assert refusal(lambda: s3.get_bucket_tagging(Bucket=bucket)) == missing


def test_a_bucket_is_created_with_tags(s3: Any) -> None:
    name = f"tagged-{uuid.uuid4().hex[:20]}"
    tags = [{"Key": "team", "Value": "vision"}]
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"Tags": tags})
    assert s3.get_bucket_tagging(Bucket=name)["TagSet"] == tags
    s3.delete_bucket(Bucket=name)
    directory = {"Location": {"Type": "AvailabilityZone", "Name": "a"}}
    refused = refusal(lambda: s3.create_bucket(Bucket=name, CreateBucketConfiguration=directory))
    assert refused == (501, "NotImplemented")


def test_settings_changed_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """By two processes: each change is made to what is there, not to what was there."""
    with Daemon.start(tmp_path / "data", workers=2) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="shared")
        rule = {"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]}
        changes: list[Callable[[Any], Any]] = [
            lambda s3: s3.put_bucket_tagging(
                Bucket="shared", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]}
            ),
            lambda s3: s3.put_bucket_cors(Bucket="shared", CORSConfiguration={"CORSRules": [rule]}),
            lambda s3: s3.put_bucket_policy(Bucket="shared", Policy=policy("shared")),
            lambda s3: s3.put_bucket_acl(Bucket="shared", ACL="public-read"),
            lambda s3: s3.put_bucket_versioning(
                Bucket="shared", VersioningConfiguration={"Status": "Enabled"}
            ),
        ]
        removals = ["delete_bucket_tagging", "delete_bucket_cors", "delete_bucket_policy"]

        def again(change: Callable[[Any], Any]) -> None:
            own = daemon.client()  # a connection of its own: the kernel deals them out to both workers
            for _ in range(10):
                change(own)
            own.close()

        with ThreadPoolExecutor(len(changes)) as pool:
            list(pool.map(again, changes))
        assert client.get_bucket_tagging(Bucket="shared")["TagSet"]
        assert client.get_bucket_cors(Bucket="shared")["CORSRules"] == [rule]
        assert client.get_bucket_policy_status(Bucket="shared")["PolicyStatus"]["IsPublic"]
        assert len(client.get_bucket_acl(Bucket="shared")["Grants"]) == 2
        assert client.get_bucket_versioning(Bucket="shared")["Status"] == "Enabled"
        with ThreadPoolExecutor(len(removals)) as pool:
            list(pool.map(lambda name: getattr(client, name)(Bucket="shared"), removals))
        for missing in ("get_bucket_tagging", "get_bucket_cors", "get_bucket_policy"):
            status, _ = refusal(lambda call=missing: getattr(client, call)(Bucket="shared"))  # type: ignore[misc]
            assert status == 404
        client.close()


# --- policies ---------------------------------------------------------------------------------------------


def policy(bucket: str, principal: Any = "*", **condition: Any) -> str:
    statement = {
        "Effect": "Allow",
        "Principal": principal,
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement | condition]})


def test_policy(s3: Any, bucket: str) -> None:
    missing = (404, "NoSuchBucketPolicy")
    assert refusal(lambda: s3.get_bucket_policy(Bucket=bucket)) == missing
    assert s3.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"] == {"IsPublic": False}
    text = policy(bucket)
    s3.put_bucket_policy(Bucket=bucket, Policy=text)
    assert s3.get_bucket_policy(Bucket=bucket)["Policy"] == text
    assert s3.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"] == {"IsPublic": True}
    s3.put_bucket_policy(
        Bucket=bucket, Policy=policy(bucket, Condition={"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}})
    )
    assert s3.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"] == {"IsPublic": False}
    s3.delete_bucket_policy(Bucket=bucket)
    assert refusal(lambda: s3.get_bucket_policy(Bucket=bucket)) == missing
    s3.delete_bucket_policy(Bucket=bucket)


def test_a_bucket_is_public_by_its_acl_too(s3: Any, bucket: str) -> None:
    def public() -> bool:
        return bool(s3.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"])

    s3.put_bucket_acl(Bucket=bucket, ACL="authenticated-read")
    assert public()
    block = {"IgnorePublicAcls": True}
    s3.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=block)
    assert not public()
    s3.put_bucket_policy(Bucket=bucket, Policy=policy(bucket))
    assert public()


def test_policies_that_are_refused(s3: Any, bucket: str) -> None:
    for text, code in (
        ("no json", "MalformedPolicy"),
        ("{}", "MalformedPolicy"),
        (policy("another-bucket"), "MalformedPolicy"),
        (policy(bucket, Condition={"StringEquals": {"aws:NoSuchKey": "v"}}), "MalformedPolicy"),
        (policy(bucket).replace("{", "{" + " " * (20 << 10), 1), "PolicyTooLarge"),
    ):
        refused = refusal(lambda text=text: s3.put_bucket_policy(Bucket=bucket, Policy=text))  # type: ignore[misc]
        assert refused == (400, code)
    assert refusal(lambda: s3.get_bucket_policy(Bucket=bucket)) == (404, "NoSuchBucketPolicy")


def test_public_policies_are_blocked(s3: Any, bucket: str) -> None:
    block = {"BlockPublicPolicy": True}
    s3.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=block)
    blocked = refusal(lambda: s3.put_bucket_policy(Bucket=bucket, Policy=policy(bucket)))
    assert blocked == (403, "AccessDenied")
    s3.delete_public_access_block(Bucket=bucket)
    s3.put_bucket_policy(Bucket=bucket, Policy=policy(bucket))


# --- CORS -------------------------------------------------------------------------------------------------


def test_cors(s3: Any, bucket: str) -> None:
    missing = (404, "NoSuchCORSConfiguration")
    assert refusal(lambda: s3.get_bucket_cors(Bucket=bucket)) == missing
    rules = [
        {
            "ID": "uploads",
            "AllowedMethods": ["PUT", "POST"],
            "AllowedOrigins": ["https://*.example.org", "http://localhost:8080"],
            "AllowedHeaders": ["Content-Type", "x-amz-*"],
            "ExposeHeaders": ["ETag", "x-amz-request-id"],
            "MaxAgeSeconds": 3000,
        },
        {"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]},
    ]
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": rules})
    assert s3.get_bucket_cors(Bucket=bucket)["CORSRules"] == rules
    s3.delete_bucket_cors(Bucket=bucket)
    assert refusal(lambda: s3.get_bucket_cors(Bucket=bucket)) == missing
    s3.delete_bucket_cors(Bucket=bucket)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ({"AllowedMethods": ["PATCH"], "AllowedOrigins": ["*"]}, "InvalidRequest"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": ["http://*.*"]}, "InvalidRequest"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": ["*"], "AllowedHeaders": ["*-*"]}, "InvalidRequest"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": ["*"], "ExposeHeaders": ["*"]}, "InvalidRequest"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": ["*"], "ExposeHeaders": ["a b"]}, "InvalidRequest"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": ["*"], "MaxAgeSeconds": -1}, "MalformedXML"),
        ({"AllowedMethods": ["GET"], "AllowedOrigins": []}, "MalformedXML"),
    ],
)
def test_cors_rules_that_are_refused(s3: Any, bucket: str, rule: dict[str, Any], code: str) -> None:
    refused = refusal(lambda: s3.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": [rule]}))
    assert refused == (400, code)


def test_a_hundred_cors_rules_are_the_limit(s3: Any, bucket: str) -> None:
    rules = [{"AllowedMethods": ["GET"], "AllowedOrigins": [f"http://{n}"]} for n in range(101)]
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": rules[:100]})
    assert len(s3.get_bucket_cors(Bucket=bucket)["CORSRules"]) == 100
    more = refusal(lambda: s3.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": rules}))
    assert more == (400, "MalformedXML")


# --- elements that are not known --------------------------------------------------------------------------

CORS_RULE = "<AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod>"
ODD = "<Nonsense>1</Nonsense>"


@pytest.mark.parametrize(
    ("setting", "document"),
    [
        ("versioning", f"<VersioningConfiguration><Status>Enabled</Status>{ODD}</VersioningConfiguration>"),
        (
            "versioning",
            "<VersioningConfiguration><Status>Enabled</Status><Status>Suspended</Status>"
            "</VersioningConfiguration>",
        ),
        ("tagging", f"<Tagging><TagSet/>{ODD}</Tagging>"),
        ("tagging", f"<Tagging><TagSet>{ODD}</TagSet></Tagging>"),
        ("tagging", f"<Tagging><TagSet><Tag><Key>a</Key><Value/>{ODD}</Tag></TagSet></Tagging>"),
        ("cors", f"<CORSConfiguration><CORSRule>{CORS_RULE}</CORSRule>{ODD}</CORSConfiguration>"),
        ("cors", f"<CORSConfiguration><CORSRule>{CORS_RULE}{ODD}</CORSRule></CORSConfiguration>"),
        (
            "ownershipControls",
            "<OwnershipControls><Rule><ObjectOwnership>ObjectWriter</ObjectOwnership></Rule>"
            f"{ODD}</OwnershipControls>",
        ),
        (
            "lifecycle",
            "<LifecycleConfiguration><Rule><Status>Enabled</Status><Prefix/><Expiration><Days>1</Days>"
            f"</Expiration></Rule>{ODD}</LifecycleConfiguration>",
        ),
    ],
)
def test_an_element_that_is_not_known_is_refused(
    wire: Wire, bucket: str, setting: str, document: str
) -> None:
    answer = wire.call("PUT", f"/{bucket}?{setting}", document.encode())
    assert (answer.status, answer.code) == (400, "MalformedXML")
    odd = b"Nonsense" if ODD in document else b"Status"
    assert odd in answer.body
    without = document.replace(ODD, "").replace("<Status>Suspended</Status>", "")
    assert wire.call("PUT", f"/{bucket}?{setting}", without.encode()).status < 300


def test_versioning_without_some_folders_is_refused(daemon: Daemon, s3: Any, bucket: str) -> None:
    """MinIO's: their versions would pile up unseen."""
    where = urlsplit(daemon.endpoint)
    client = Minio(where.netloc, access_key=daemon.access_key, secret_key=daemon.secret_key, secure=False)
    for config in (
        VersioningConfig(ENABLED, exclude_folders=True),
        VersioningConfig(ENABLED, excluded_prefixes=["_temporary/"]),
    ):
        with pytest.raises(MinioError, match="MalformedXML"):
            client.set_bucket_versioning(bucket, config)
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)
    client.set_bucket_versioning(bucket, VersioningConfig(ENABLED))
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"


def test_tags_of_an_object_with_an_element_that_is_not_known(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    document = f"<Tagging><TagSet/>{ODD}</Tagging>".encode()
    assert wire.call("PUT", f"/{bucket}/k?tagging", document).code == "MalformedXML"


OWNER = "<Owner><ID>{}</ID></Owner>"
XSI = "http://www.w3.org/2001/XMLSchema-instance"
GRANTEE = f'<Grantee xmlns:xsi="{XSI}" xsi:type="CanonicalUser"><ID>%s</ID></Grantee>'
PERMISSION = "<Permission>READ</Permission>"


@pytest.mark.parametrize(
    "where",
    ["root", "owner", "list", "grant", "grantee", "two lists", "two permissions"],
)
@pytest.mark.parametrize("key", ["", "k"], ids=["bucket", "object"])
def test_an_acl_with_an_element_that_is_unknown_or_there_twice_is_refused(
    wire: Wire, s3: Any, bucket: str, key: str, where: str
) -> None:
    if key:
        s3.put_object(Bucket=bucket, Key=key, Body=b"x")
    shown = s3.get_bucket_acl(Bucket=bucket)["Owner"]["ID"]

    def document(wrong: str = "") -> bytes:
        odd = {name: ODD if name == wrong else "" for name in ("root", "owner", "list", "grant", "grantee")}
        owner = OWNER.format(shown).replace("</Owner>", f"{odd['owner']}</Owner>")
        grantee = (GRANTEE % shown).replace("</Grantee>", f"{odd['grantee']}</Grantee>")
        permission = PERMISSION * (2 if wrong == "two permissions" else 1)
        listed = f"<Grant>{grantee}{permission}{odd['grant']}</Grant>{odd['list']}"
        lists = f"<AccessControlList>{listed}</AccessControlList>" * (2 if wrong == "two lists" else 1)
        return f"<AccessControlPolicy>{owner}{lists}{odd['root']}</AccessControlPolicy>".encode()

    answer = wire.call("PUT", f"/{bucket}/{key}?acl", document(where))
    assert (answer.status, answer.code) == (400, "MalformedACLError")
    assert wire.call("PUT", f"/{bucket}/{key}?acl", document()).status == 200


def test_a_deletion_with_an_element_that_is_unknown_is_refused(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    for document in (
        '<Delete><Object><Key>k</Key><Etag>"wrong"</Etag></Object></Delete>',
        f"<Delete><Object><Key>k</Key></Object>{ODD}</Delete>",
        "<Delete><Object><Key>k</Key><Key>other</Key></Object></Delete>",
    ):
        answer = wire.call("POST", f"/{bucket}?delete", document.encode())
        assert (answer.status, answer.code) == (400, "MalformedXML")
    assert s3.head_object(Bucket=bucket, Key="k")["ContentLength"] == 1


@pytest.mark.parametrize("header", ["Bad/Header", "two words", "a:b", "", "x-\x7f"])
@pytest.mark.parametrize("name", ["AllowedHeader", "ExposeHeader"])
def test_names_that_no_header_has(wire: Wire, bucket: str, name: str, header: str) -> None:
    rule = f"<CORSRule>{CORS_RULE}<{name}>{header}</{name}></CORSRule>"
    document = f"<CORSConfiguration>{rule}</CORSConfiguration>".encode()
    answer = wire.call("PUT", f"/{bucket}?cors", document)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
