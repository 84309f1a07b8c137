"""What each operation needs, and the facts that go with it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from meshd.auth.required_actions import RequiredAction, required_actions
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.http_values.conditional_requests import Conditions
from meshwire.iam.actions_and_keys import ACTIONS
from meshwire.s3 import operations as ops
from meshwire.s3.bucket_settings import Acl, BucketSetting

HEADERS = ops.ObjectHeaders()
DIGESTS = BodyDigests()
SOURCE = ops.CopySource("src", "s")
OLD = ops.CopySource("src", "s", "v1")
PUBLIC = Acl("public-read")
MATCH = Conditions(if_match=("etag",))
VERSIONED: list[tuple[ops.Operation, str]] = [
    (ops.GetObject("b", "k", version="v"), "GetObjectVersion"),
    (ops.ListMembers("b", "k", version="v"), "GetObjectVersion"),
    (ops.DeleteObject("b", "k", version="v"), "DeleteObjectVersion"),
    (ops.GetObjectTagging("b", "k", "v"), "GetObjectVersionTagging"),
    (ops.PutObjectTagging("b", "k", DIGESTS, "v"), "PutObjectVersionTagging"),
    (ops.DeleteObjectTagging("b", "k", "v"), "DeleteObjectVersionTagging"),
    (ops.GetObjectAcl("b", "k", "v"), "GetObjectVersionAcl"),
    (ops.PutObjectAcl("b", "k", DIGESTS, version="v"), "PutObjectVersionAcl"),
    (
        ops.GetObjectAttributes("b", "k", frozenset(), "v"),
        "GetObjectVersion GetObjectVersionAttributes",
    ),
]
PLAIN: list[tuple[ops.Operation, str]] = [
    (ops.ListBuckets(), "ListAllMyBuckets"),
    (ops.CreateBucket("b"), "CreateBucket"),
    (ops.CreateBucket("b", PUBLIC, "ObjectWriter"), "CreateBucket PutBucketAcl PutBucketOwnershipControls"),
    (ops.HeadBucket("b"), "ListBucket"),
    (ops.DeleteBucket("b"), "DeleteBucket"),
    (ops.GetBucketLocation("b"), "GetBucketLocation"),
    (ops.GetBucketSetting("b", "policyStatus"), "GetBucketPolicyStatus"),
    (ops.PutBucketSetting("b", "lifecycle", DIGESTS), "PutLifecycleConfiguration"),
    (ops.PutBucketSetting("b", "cors", DIGESTS), "PutBucketCORS"),
    (ops.DeleteBucketSetting("b", "policy"), "DeleteBucketPolicy"),
    (ops.DeleteBucketSetting("b", "tagging"), "PutBucketTagging"),
    (ops.Preflight("b", "k", "http://a", "GET"), ""),
    (ops.ListObjects("b", 2), "ListBucket"),
    (ops.ListObjectVersions("b"), "ListBucketVersions"),
    (ops.GetObject("b", "k"), "GetObject"),
    (ops.GetObject("b", "k", head=True), "GetObject"),
    (ops.GetObject("b", "x.tar", member="a"), "GetObject"),
    (ops.ListMembers("b", "x.tar"), "GetObject"),
    (ops.PutObject("b", "k", HEADERS, DIGESTS), "PutObject"),
    (
        ops.PutObject("b", "k", HEADERS, DIGESTS, tags={"a": "1"}, acl=PUBLIC),
        "PutObject PutObjectTagging PutObjectAcl",
    ),
    (ops.PutObject("b", "k", HEADERS, DIGESTS, MATCH), "PutObject GetObject"),
    (ops.PutObject("b", "k", HEADERS, DIGESTS, Conditions(if_none_match=("*",))), "PutObject"),
    (ops.CopyObject("b", "k", SOURCE, False, HEADERS), "src:GetObject PutObject"),
    (ops.CopyObject("b", "k", OLD, False, HEADERS, tags={}), "src:GetObjectVersion PutObject"),
    (
        ops.CopyObject("b", "k", SOURCE, False, HEADERS, tags={"a": "1"}, acl=PUBLIC),
        "src:GetObject PutObject PutObjectTagging PutObjectAcl",
    ),
    (ops.DeleteObject("b", "k"), "DeleteObject"),
    (ops.DeleteObject("b", "k", MATCH), "DeleteObject GetObject"),
    (ops.DeleteObjects("b", DIGESTS), ""),
    (ops.PostObject("b", "multipart/form-data"), ""),
    (ops.GetObjectTagging("b", "k"), "GetObjectTagging"),
    (ops.PutObjectTagging("b", "k", DIGESTS), "PutObjectTagging"),
    (ops.DeleteObjectTagging("b", "k"), "DeleteObjectTagging"),
    (ops.GetObjectAcl("b", "k"), "GetObjectAcl"),
    (ops.PutObjectAcl("b", "k", DIGESTS, PUBLIC), "PutObjectAcl"),
    (ops.GetObjectAttributes("b", "k", frozenset()), "GetObject GetObjectAttributes"),
    (
        ops.CreateMultipartUpload("b", "k", HEADERS, tags={"a": "1"}, acl=PUBLIC),
        "PutObject PutObjectTagging PutObjectAcl",
    ),
    (ops.UploadPart("b", "k", "u", 1, DIGESTS), "PutObject"),
    (ops.UploadPartCopy("b", "k", "u", 1, SOURCE), "src:GetObject PutObject"),
    (ops.UploadPartCopy("b", "k", "u", 1, OLD), "src:GetObjectVersion PutObject"),
    (ops.CompleteMultipartUpload("b", "k", "u", DIGESTS), "PutObject"),
    (ops.AbortMultipartUpload("b", "k", "u"), "AbortMultipartUpload"),
    (ops.ListParts("b", "k", "u"), "ListMultipartUploadParts"),
    (ops.ListMultipartUploads("b"), "ListBucketMultipartUploads"),
]


def test_every_operation_is_here_and_in_the_table() -> None:
    assert {type(operation) for operation, _ in PLAIN} == set(get_args(ops.Operation))


@pytest.mark.parametrize(("operation", "expected"), PLAIN)
def test_needs(operation: ops.Operation, expected: str) -> None:
    found = required_actions(operation)
    names = [("src:" if need.bucket == "src" else "") + need.action.removeprefix("s3:") for need in found]
    assert names == expected.split()
    for need in found:
        level = ACTIONS[need.action]
        assert (level == "object") == bool(need.key)
        assert (level == "account") == (not need.bucket)


@pytest.mark.parametrize(("operation", "expected"), VERSIONED)
def test_versions_have_actions_of_their_own(operation: ops.Operation, expected: str) -> None:
    assert [need.action.removeprefix("s3:") for need in required_actions(operation)] == expected.split()
    assert {need.version for need in required_actions(operation)} == {"v"}


@pytest.mark.parametrize("setting", get_args(BucketSetting))
def test_every_setting_has_actions(setting: BucketSetting) -> None:
    kinds: list[Any] = [ops.GetBucketSetting, ops.DeleteBucketSetting]
    made = [kind("b", setting) for kind in kinds] + [ops.PutBucketSetting("b", setting, DIGESTS)]
    for operation in made:
        [need] = required_actions(operation)
        # Nobody may put a policy's status: there is no such action.
        assert need.action in ACTIONS or (setting == "policyStatus" and "Put" in need.action)


def test_facts_of_listings() -> None:
    [need] = required_actions(ops.ListObjects("b", 2, prefix="train/", delimiter="/", max_keys=10))
    assert need == RequiredAction(
        "s3:ListBucket",
        "b",
        facts={"s3:prefix": "train/", "s3:delimiter": "/", "s3:max-keys": "10"},
    )
    [need] = required_actions(ops.ListMultipartUploads("b"))
    assert need.facts == {"s3:prefix": "", "s3:delimiter": ""}


def test_facts_of_writes() -> None:
    put, *_ = required_actions(ops.PutObject("b", "k", HEADERS, DIGESTS, tags={"Team": "red", "x": ""}))
    assert put.facts == {
        "s3:objectcreationoperation": "true",
        "s3:requestobjecttag/team": "red",
        "s3:requestobjecttag/x": "",
        "s3:requestobjecttagkeys": ("Team", "x"),
    }
    _, copy = required_actions(ops.UploadPartCopy("b", "k", "u", 1, SOURCE))
    assert copy.facts == {"s3:objectcreationoperation": "false", "s3:x-amz-copy-source": "src/s"}


def test_resources_are_arns() -> None:
    assert RequiredAction("a", "b", "k/x").resource == "arn:aws:s3:::b/k/x"
    assert RequiredAction("a", "b").resource == "arn:aws:s3:::b"
