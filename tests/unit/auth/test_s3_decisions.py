"""Decisions with bucket policies, users' policies and keys' bounds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from meshd.auth.identity import ANONYMOUS_IDENTITY, RemoteRecord, RequestContext, Session
from meshd.control.buckets import Bucket
from meshd.store.records import Record
from meshwire.errors import S3Error
from meshwire.iam.actions_and_keys import KNOWN_KEYS
from meshwire.s3 import operations as ops
from meshwire.s3.bucket_settings import Acl
from tests.support.access_world import (
    ANN,
    BOB,
    DELETE,
    DIGESTS,
    GET,
    HEADERS,
    LIST,
    POD,
    PUT,
    ROOT,
    World,
    allow,
    copy,
    deny,
    own,
    to,
)
from tests.unit.auth.test_s3_permissions import PLAIN

if TYPE_CHECKING:
    from meshd.auth.identity import Identity

# --- the default ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [GET, PUT, LIST, DELETE, ops.GetBucketSetting("b", "policy")])
def test_users_are_strangers_to_each_other(operation: ops.Operation) -> None:
    world = World()
    world.put()
    assert world.lets(ROOT, operation)
    assert world.lets(ANN, operation)
    assert not world.lets(BOB, operation)
    assert not world.lets(ANONYMOUS_IDENTITY, operation)


def test_the_ordinary_case_looks_nothing_up() -> None:
    world = World()
    for who in (ROOT, ANN):
        assert world.lets(who, GET)
    assert world.looked == 0


@pytest.mark.parametrize("operation", [operation for operation, _ in PLAIN], ids=ops.operation_name)
@pytest.mark.parametrize("who", [ROOT, ANN])
def test_the_short_way_says_what_the_long_one_says(who: Identity, operation: ops.Operation) -> None:
    """An allow of everything in a bound, and a policy that allows nothing more, take the long way."""
    everything = own(allow("*", "*"))
    for world in (World(), World(policy=to("carl", allow("s3:GetObject")))):
        asyncio.run(world.table.create(Bucket("src", who.user_id, 0)))
        short = world.says(who, operation)
        assert world.says(replace(who, bounds=(everything,)), operation) == short == ""


def test_a_refusal_says_what_is_missing_but_not_to_strangers() -> None:
    world = World()
    with pytest.raises(S3Error, match=r"bob may not do s3:GetObject on arn:aws:s3:::b/k: nothing allows it"):
        world.access.authorize(BOB, GET)
    with pytest.raises(S3Error) as excinfo:
        world.access.authorize(ANONYMOUS_IDENTITY, GET)
    assert excinfo.value.message == "Access Denied"


# --- bucket policies --------------------------------------------------------------------------------------


def test_a_policy_opens_a_bucket_to_a_user() -> None:
    world = World(policy=to("bob", allow(["s3:GetObject", "s3:PutObject"])))
    assert world.lets(BOB, GET)
    assert world.lets(BOB, PUT)
    assert not world.lets(BOB, DELETE)
    assert not world.lets(BOB, LIST)
    assert not world.lets(ANONYMOUS_IDENTITY, GET)


def test_anonymous_read() -> None:
    world = World(policy=to("*", allow("s3:GetObject", "arn:aws:s3:::b/public/*")))
    assert world.lets(ANONYMOUS_IDENTITY, ops.GetObject("b", "public/x"))
    assert world.lets(BOB, ops.GetObject("b", "public/x"))
    assert not world.lets(ANONYMOUS_IDENTITY, ops.GetObject("b", "private/x"))
    assert not world.lets(ANONYMOUS_IDENTITY, ops.PutObject("b", "public/x", HEADERS, DIGESTS))
    assert not world.lets(ANONYMOUS_IDENTITY, ops.GetObject("b", "public/x", version="v"))


def test_a_deny_binds_the_owner_but_not_root() -> None:
    world = World(policy=to("*", deny("s3:*", ["arn:aws:s3:::b", "arn:aws:s3:::b/*"])))
    assert not world.lets(ANN, GET)
    assert not world.lets(ANN, ops.DeleteBucket("b"))
    assert world.lets(ROOT, GET)
    for operation in (
        ops.GetBucketSetting("b", "policy"),
        ops.PutBucketSetting("b", "policy", DIGESTS),
        ops.DeleteBucketSetting("b", "policy"),
    ):
        assert world.lets(ANN, operation)
        assert not world.lets(BOB, operation)


def test_a_changed_policy_counts_at_once() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    assert world.lets(BOB, GET)
    world.change(policy=to("bob", allow("s3:PutObject")))
    assert not world.lets(BOB, GET)
    world.change(policy="")
    assert not world.lets(BOB, PUT)
    world.change(policy=to("bob", allow("s3:GetObject")), tags={"a": "b"})
    assert world.lets(BOB, GET)
    world.change(tags={})
    assert world.lets(BOB, GET)


def test_a_policy_that_cannot_be_read_closes_the_bucket() -> None:
    world = World(policy="{}")
    assert not world.lets(BOB, GET)
    assert not world.lets(ANN, GET)
    assert world.lets(ROOT, GET)
    assert world.lets(ANN, ops.DeleteBucketSetting("b", "policy"))


V4 = "AWS4-HMAC-SHA256"
FACTS: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("IpAddress", {"aws:SourceIp": "10.0.0.0/8"}, {"source_ip": "10.1.2.3"}, True),
    ("IpAddress", {"aws:SourceIp": "10.0.0.0/8"}, {"source_ip": "192.0.2.1"}, False),
    ("Bool", {"aws:SecureTransport": "true"}, {"secure": True}, True),
    ("Bool", {"aws:SecureTransport": "true"}, {}, False),
    ("NumericGreaterThanEquals", {"s3:TlsVersion": "1.3"}, {"tls": "1.3"}, True),
    ("NumericGreaterThanEquals", {"s3:TlsVersion": "1.3"}, {"tls": "1.2"}, False),
    ("StringLike", {"aws:Referer": "http://a/*"}, {"headers": {"referer": "http://a/b"}}, True),
    ("StringLike", {"aws:Referer": "http://a/*"}, {}, False),
    ("StringLike", {"aws:UserAgent": "mesh*"}, {"headers": {"user-agent": "mesh/1"}}, True),
    ("StringEquals", {"s3:authType": "REST-QUERY-STRING"}, {"presigned": True}, True),
    ("StringEquals", {"s3:authType": "REST-QUERY-STRING"}, {}, False),
    ("StringEquals", {"s3:authType": "REST-HEADER"}, {}, True),
    ("StringEquals", {"s3:authType": "POST"}, {"form": True}, True),
    ("StringEquals", {"s3:signatureversion": V4}, {"signature": V4}, True),
    ("StringEquals", {"s3:signatureversion": V4}, {"signature": "AWS"}, False),
    ("NumericLessThan", {"s3:signatureAge": 60000}, {"signed": "20231114T221300Z"}, True),
    ("NumericLessThan", {"s3:signatureAge": 60000}, {"signed": "20231114T221200Z"}, False),
    ("StringEquals", {"s3:x-amz-acl": "private"}, {"headers": {"x-amz-acl": "private"}}, True),
    ("Null", {"s3:if-none-match": "false"}, {"headers": {"if-none-match": "*"}}, True),
    ("DateLessThan", {"aws:CurrentTime": "2023-11-15T00:00:00Z"}, {}, True),
    ("DateLessThan", {"aws:CurrentTime": "2023-11-14T00:00:00Z"}, {}, False),
    ("NumericLessThan", {"aws:EpochTime": "1700000001"}, {}, True),
    ("StringEquals", {"aws:username": "bob", "aws:userid": "bob", "aws:PrincipalType": "User"}, {}, True),
    ("ArnLike", {"aws:PrincipalArn": "arn:aws:iam:::user/b*"}, {}, True),
    ("StringEquals", {"s3:ResourceAccount": "ann"}, {}, True),
    ("StringEquals", {"s3:BucketTag/Team": "red"}, {}, True),
    ("Null", {"aws:SourceVpce": "true", "aws:TokenIssueTime": "true"}, {}, True),
]


@pytest.mark.parametrize(("operator", "test", "context", "expected"), FACTS)
def test_facts_of_the_request(
    operator: str, test: dict[str, Any], context: dict[str, Any], expected: bool
) -> None:
    policy = to("bob", allow("s3:GetObject", Condition={operator: test}))
    world = World(policy=policy, tags={"team": "red"})
    assert world.lets(BOB, GET, context=RequestContext(**context)) is expected


def test_every_key_a_policy_may_ask_for_is_worked_out() -> None:
    tested = {key.lower() for _, test, _, _ in FACTS for key in test}
    elsewhere = {"s3:delimiter", "s3:max-keys", "s3:objectcreationoperation", "s3:prefix", "s3:versionid"}
    elsewhere |= {
        "s3:requestobjecttagkeys",
        "s3:x-amz-copy-source",
        "aws:tokenissuetime",
        "aws:resourceaccount",
    }
    left = KNOWN_KEYS - tested - elsewhere
    assert all(key.startswith("s3:x-amz-") or key == "s3:if-match" for key in left), left


def test_time_is_the_clocks() -> None:
    until = {"DateLessThan": {"aws:CurrentTime": "2023-11-14T22:13:30Z"}}
    world = World(policy=to("bob", allow("s3:GetObject", Condition=until)))
    assert world.lets(BOB, GET)
    world.clock.advance(10)
    assert not world.lets(BOB, GET)


def test_facts_of_a_session() -> None:
    late = {"DateGreaterThan": {"aws:TokenIssueTime": "2023-11-14T22:00:00Z"}}
    world = World(policy=to("bob", allow("s3:GetObject", Condition=late)))
    assert world.lets(replace(BOB, session=Session("AKBOB", 0, issued=1_700_000_000)), GET)
    assert not world.lets(replace(BOB, session=Session("AKBOB", 0, issued=1_600_000_000)), GET)
    assert not world.lets(BOB, GET)


def test_a_listing_is_confined_to_a_prefix() -> None:
    only = {"StringLike": {"s3:prefix": "train/*"}}
    few = {"NumericLessThanEquals": {"s3:max-keys": 10}}
    world = World(policy=to("bob", allow("s3:ListBucket", "arn:aws:s3:::b", Condition={**only, **few})))
    assert world.lets(BOB, ops.ListObjects("b", 2, prefix="train/a", max_keys=10))
    assert not world.lets(BOB, ops.ListObjects("b", 2, prefix="train/a", max_keys=11))
    assert not world.lets(BOB, ops.ListObjects("b", 2, prefix="trai", max_keys=10))
    assert not world.lets(BOB, ops.ListObjects("b", 1, max_keys=10))
    assert not world.lets(BOB, ops.HeadBucket("b"))


def test_the_tags_an_object_has() -> None:
    shared = {"StringEquals": {"s3:ExistingObjectTag/Share": "yes"}}
    world = World(policy=to("bob", allow(["s3:GetObject", "s3:GetObjectVersion"], Condition=shared)))
    world.put("k", tags={"share": "yes"})
    world.put("other")
    world.put("k", version="v", tags={"Share": "no"})
    assert world.lets(BOB, GET)
    assert not world.lets(BOB, ops.GetObject("b", "other"))
    assert not world.lets(BOB, ops.GetObject("b", "none"))
    assert not world.lets(BOB, ops.GetObject("b", "k", version="v"))


def test_the_tags_of_an_object_that_another_node_holds() -> None:
    shared = {"StringEquals": {"s3:ExistingObjectTag/Share": "yes"}}
    world = World(policy=to("bob", allow(["s3:GetObject", "s3:GetObjectVersion"], Condition=shared)))
    world.put("other")
    remote = RemoteRecord("b", "k", None, Record(1, "e", 1, 0, (), tags={"Share": "yes"}))
    context = RequestContext(remote_record=remote)
    assert not world.lets(BOB, GET)
    assert world.lets(BOB, GET, context=context)
    assert not world.lets(BOB, ops.GetObject("b", "other"), context=context)
    assert not world.lets(BOB, ops.GetObject("b", "k", version="v"), context=context)


def test_the_tags_a_request_brings() -> None:
    red = {"StringEquals": {"s3:RequestObjectTag/team": "red"}}
    few = {"ForAllValues:StringLike": {"s3:RequestObjectTagKeys": ["team", "x*"]}}
    condition = {"StringEquals": red["StringEquals"], **few}
    world = World(policy=to("bob", allow("s3:PutObject*", Condition=condition)))

    def put(tags: dict[str, str]) -> bool:
        return world.lets(BOB, replace(PUT, tags=tags))

    assert put({"team": "red"})
    assert put({"team": "red", "x1": ""})
    assert not put({"team": "blue"})
    assert not put({"team": "red", "y": ""})
    assert not put({})
    tagging = ops.PutObjectTagging("b", "k", DIGESTS)
    assert world.lets(BOB, tagging), "the body decides"
    assert world.lets(BOB, tagging, tags={"team": "red"})
    assert not world.lets(BOB, tagging, tags={"team": "blue"})
    assert not world.lets(BOB, tagging, tags={})
    assert not World().lets(BOB, tagging), "nothing asks for tags: refused before the body"


def test_tags_and_acls_in_a_request_need_their_own_actions() -> None:
    world = World(policy=to("bob", allow("s3:PutObject")))
    upload = ops.CreateMultipartUpload("b", "k", HEADERS)
    for plain in (PUT, upload):
        assert world.lets(BOB, plain)
        assert not world.lets(BOB, replace(plain, tags={"a": "b"}))
        assert not world.lets(BOB, replace(plain, acl=Acl("private")))
    world.change(policy=to("bob", allow(["s3:PutObject", "s3:PutObjectTagging", "s3:PutObjectAcl"])))
    assert world.lets(BOB, replace(PUT, tags={"a": "b"}, acl=Acl("public-read")))


def test_an_acl_may_be_demanded() -> None:
    full = {"StringEquals": {"s3:x-amz-acl": "bucket-owner-full-control"}}
    world = World(policy=to("bob", allow(["s3:PutObject", "s3:PutObjectAcl"], Condition=full)))
    acl = replace(PUT, acl=Acl("bucket-owner-full-control"))
    assert world.lets(BOB, acl, context=RequestContext(headers={"x-amz-acl": "bucket-owner-full-control"}))
    assert not world.lets(BOB, PUT)


def test_versions_are_read_and_removed_by_their_own_right() -> None:
    third = {"StringEquals": {"s3:VersionId": "v3"}}
    world = World(policy=to("bob", allow(["s3:GetObject*", "s3:DeleteObjectVersion"], Condition=third)))
    assert world.lets(BOB, ops.GetObject("b", "k", version="v3"))
    assert not world.lets(BOB, ops.GetObject("b", "k", version="v2"))
    assert world.lets(BOB, ops.DeleteObject("b", "k", version="v3"))
    assert not world.lets(BOB, DELETE)


# --- copies -----------------------------------------------------------------------------------------------


def test_a_copy_reads_and_writes() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    world.put()
    assert world.lets(BOB, copy("b", "bobs"))
    assert not world.lets(BOB, copy("bobs", "b"))
    assert not world.lets(BOB, ops.CopyObject("bobs", "k", ops.CopySource("b", "k", "v"), False, HEADERS))
    part = ops.UploadPartCopy("bobs", "k", "u", 1, ops.CopySource("b", "k"))
    assert world.lets(BOB, part)
    assert world.says(BOB, copy("none", "bobs")) == "NoSuchBucket"
    world.change(policy=to("bob", allow("s3:PutObject")))
    assert not world.lets(BOB, part)
    assert world.lets(BOB, copy("bobs", "b"))


def test_tags_that_go_with_a_copy_must_be_readable() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    world.put(tags={"a": "b"})
    assert not world.lets(BOB, copy("b", "bobs"))
    assert world.lets(BOB, copy("b", "bobs", tags={}))
    world.change(policy=to("bob", allow(["s3:GetObject", "s3:GetObjectTagging"])))
    assert world.lets(BOB, copy("b", "bobs"))


def test_a_source_may_be_demanded() -> None:
    inside = {"StringLike": {"s3:x-amz-copy-source": "bobs/*"}}
    world = World(policy=to("bob", allow("s3:PutObject", Condition=inside)))
    assert world.lets(BOB, copy("bobs", "b"))
    lie = RequestContext(headers={"x-amz-copy-source": "bobs/k"})
    assert not world.lets(BOB, PUT, context=lie)


# --- users' policies and keys' bounds ---------------------------------------------------------------------


def test_a_users_policy_adds_rights() -> None:
    world = World()
    reader = replace(BOB, policies=(own(allow("s3:GetObject")),))
    assert world.lets(reader, GET)
    assert not world.lets(reader, PUT)
    assert world.lets(reader, ops.PutObject("bobs", "k", HEADERS, DIGESTS))


def test_a_users_policy_denies() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    assert not world.lets(replace(BOB, policies=(own(deny("s3:*", "*")),)), GET)
    assert not world.lets(replace(ANN, policies=(own(deny("s3:*", "*")),)), GET)
    assert not world.lets(
        replace(ANN, policies=(own(deny("s3:*", "*")),)), ops.DeleteBucketSetting("b", "policy")
    )
    assert world.lets(replace(ROOT, policies=(own(deny("s3:*", "*")),)), GET)


def test_a_buckets_deny_beats_a_users_allow() -> None:
    world = World(policy=to("*", deny("s3:GetObject")))
    assert not world.lets(replace(BOB, policies=(own(allow("s3:*", "*")),)), GET)


@pytest.mark.parametrize("who", [ANN, ROOT])
def test_a_bound_confines_owner_and_root(who: Identity) -> None:
    world, pod = World(), replace(who, bounds=(POD,))
    assert world.lets(pod, ops.GetObject("b", "train/1"))
    assert world.lets(pod, ops.ListObjects("b", 2, prefix="train/"))
    assert not world.lets(pod, ops.GetObject("b", "val/1"))
    assert not world.lets(pod, ops.PutObject("b", "train/1", HEADERS, DIGESTS))
    assert not world.lets(pod, LIST)
    assert not world.lets(pod, ops.GetObject("bobs", "train/1"))
    assert not world.lets(pod, ops.ListBuckets())
    assert not world.lets(pod, ops.CreateBucket("new"))
    assert not world.lets(pod, ops.DeleteBucketSetting("b", "policy"))


def test_a_bound_gives_nothing() -> None:
    world = World()
    assert not world.lets(replace(BOB, bounds=(POD,)), ops.GetObject("b", "train/1"))
    world.change(policy=to("bob", allow("s3:*")))
    assert world.lets(replace(BOB, bounds=(POD,)), ops.GetObject("b", "train/1"))
    assert not world.lets(replace(BOB, bounds=(POD,)), GET)


def test_every_bound_must_allow() -> None:
    world = World()
    narrower = own(allow("s3:GetObject", "arn:aws:s3:::b/train/a*"))
    both = replace(ANN, bounds=(POD, narrower))
    assert world.lets(both, ops.GetObject("b", "train/a1"))
    assert not world.lets(both, ops.GetObject("b", "train/b1"))
    assert not world.lets(both, ops.ListObjects("b", 2, prefix="train/"))


def test_buckets_are_made_and_listed_by_whoever_signs() -> None:
    world = World()
    assert world.lets(BOB, ops.CreateBucket("new", Acl("public-read")))
    assert world.lets(BOB, ops.ListBuckets())
    assert not world.lets(ANONYMOUS_IDENTITY, ops.CreateBucket("new"))
    assert not world.lets(ANONYMOUS_IDENTITY, ops.ListBuckets())
    tame = replace(BOB, policies=(own(deny("s3:CreateBucket", "*")),))
    assert not world.lets(tame, ops.CreateBucket("new"))
    assert not world.lets(replace(BOB, policies=(own(deny("s3:ListAllMyBuckets", "*")),)), ops.ListBuckets())
