"""Decisions by ACLs, about what is not there, and about many keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from meshd.auth.dataset_access import DatasetAccess
from meshd.auth.identity import ANONYMOUS_IDENTITY, Caller, RequestContext
from meshd.util import async_tasks
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.bucket_settings import ALL_USERS, Acl, Grant, PublicAccessBlock
from meshwire.s3.xml_documents import DeleteKey
from tests.support.access_world import (
    ANN,
    BOB,
    DELETE,
    DIGESTS,
    GET,
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

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from meshd.auth.identity import Identity
    from meshwire.s3.result_types import DeleteFailure

# --- ACLs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acl", "bob", "nobody"),
    [
        (Acl(), "", ""),
        (Acl("public-read"), "list", "list"),
        (Acl("authenticated-read"), "list", ""),
        (Acl("public-read-write"), "list put delete", "list put delete"),
        (Acl("", (Grant("bob", "WRITE"),)), "put delete", ""),
        (Acl("", (Grant("bob", "READ_ACP"),)), "acl", ""),
        (Acl("", (Grant("bob", "FULL_CONTROL"),)), "list put delete acl", ""),
        (Acl("", (Grant("carl", "FULL_CONTROL"),)), "", ""),
        (Acl("", (Grant(ALL_USERS, "READ_ACP"),)), "acl", "acl"),
    ],
)
def test_acls_of_a_bucket(acl: Acl, bob: str, nobody: str) -> None:
    world = World(acl=acl)
    world.put()
    asked: dict[str, ops.Operation] = {
        "list": LIST,
        "put": PUT,
        "delete": DELETE,
        "get": GET,
        "acl": ops.GetBucketSetting("b", "acl"),
    }
    for who, expected in ((BOB, bob), (ANONYMOUS_IDENTITY, nobody)):
        assert [name for name, operation in asked.items() if world.lets(who, operation)] == expected.split()


@pytest.mark.parametrize(
    ("acl", "owner", "bob", "nobody"),
    [
        (None, "ann", "", ""),
        (Acl("public-read"), "ann", "get", "get"),
        (Acl("public-read-write"), "ann", "get", "get"),
        (Acl("authenticated-read"), "ann", "get", ""),
        (Acl("bucket-owner-full-control"), "bob", "get acl put-acl", ""),
        (None, "bob", "get acl put-acl", ""),
        (None, "", "", ""),
        (Acl("", (Grant("bob", "READ"),)), "ann", "get", ""),
        (Acl("", (Grant("bob", "READ_ACP"), Grant("bob", "WRITE_ACP"))), "ann", "acl put-acl", ""),
        (Acl("", (Grant("bob", "FULL_CONTROL"),)), "ann", "get acl put-acl", ""),
    ],
)
def test_acls_of_an_object(acl: Acl | None, owner: str, bob: str, nobody: str) -> None:
    world = World()
    for version in (None, "v"):
        world.put(acl=acl, owner=owner, version=version)
        asked: dict[str, ops.Operation] = {
            "get": ops.GetObject("b", "k", version=version),
            "acl": ops.GetObjectAcl("b", "k", version),
            "put-acl": ops.PutObjectAcl("b", "k", DIGESTS, version=version),
            "delete": ops.DeleteObject("b", "k", version=version),
            "tags": ops.GetObjectTagging("b", "k", version),
        }
        for who, expected in ((BOB, bob), (ANONYMOUS_IDENTITY, nobody)):
            found = [name for name, operation in asked.items() if world.lets(who, operation)]
            assert found == expected.split()


def test_who_may_write_sets_tags_and_acl_of_what_is_written() -> None:
    world = World(acl=Acl("", (Grant("bob", "WRITE"),)))
    world.put()
    assert world.lets(BOB, replace(PUT, acl=Acl("public-read"), tags={"a": "b"}))
    assert not world.lets(BOB, ops.PutObjectAcl("b", "k", DIGESTS, Acl("public-read")))
    assert not world.lets(BOB, ops.PutObjectTagging("b", "k", DIGESTS))


def test_the_owners_acl_may_be_switched_off() -> None:
    world = World(acl=Acl("public-read-write"), ownership="BucketOwnerEnforced")
    world.put(acl=Acl("public-read"), owner="bob")
    assert not any(
        world.lets(who, operation) for who in (BOB, ANONYMOUS_IDENTITY) for operation in (LIST, GET, PUT)
    )


def test_public_acls_may_be_ignored() -> None:
    acl = Acl("", (Grant(ALL_USERS, "READ"), Grant("bob", "READ")))
    world = World(acl=acl, public_access=PublicAccessBlock(ignore_public_acls=True))
    world.put(acl=acl)
    for operation in (LIST, GET):
        assert world.lets(BOB, operation)
        assert not world.lets(ANONYMOUS_IDENTITY, operation)


def test_public_policies_may_be_restricted() -> None:
    block = PublicAccessBlock(restrict_public_buckets=True)
    world = World(policy=to("*", allow("s3:GetObject")), public_access=block)
    assert world.lets(ANN, GET)
    assert not world.lets(BOB, GET)
    assert not world.lets(ANONYMOUS_IDENTITY, GET)
    world.change(policy=to("bob", allow("s3:GetObject")))
    assert world.lets(BOB, GET)


def test_a_deny_beats_an_acl() -> None:
    world = World(policy=to("*", deny("s3:GetObject")))
    world.put(acl=Acl("public-read"))
    assert not world.lets(ANONYMOUS_IDENTITY, GET)


# --- what is not there ------------------------------------------------------------------------------------


def veiled(world: World, who: Identity, operation: ops.Operation, code: str = "NoSuchKey") -> str:
    return world.access.mask_missing_key(who, operation, S3Error(code), RequestContext()).code


def test_only_who_may_list_learns_of_a_missing_key() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    assert world.lets(BOB, GET)
    assert veiled(world, ANN, GET) == "NoSuchKey"
    assert veiled(world, ROOT, GET) == "NoSuchKey"
    assert veiled(world, BOB, GET) == "AccessDenied"
    assert veiled(world, BOB, GET, "NoSuchVersion") == "AccessDenied"
    assert veiled(world, BOB, GET, "InvalidRange") == "InvalidRange"
    assert veiled(world, BOB, copy("b", "bobs")) == "AccessDenied"
    assert veiled(world, BOB, copy("bobs", "b")) == "NoSuchKey"
    only = {"StringLike": {"s3:prefix": "k*"}}
    listing = allow("s3:ListBucket", "arn:aws:s3:::b", Condition=only)
    world.change(policy=to("bob", allow("s3:GetObject"), listing))
    assert veiled(world, BOB, GET) == "NoSuchKey"
    assert veiled(world, BOB, ops.GetObject("b", "other")) == "AccessDenied"


def test_a_missing_key_of_a_public_listing_is_told() -> None:
    world = World(acl=Acl("public-read"))
    assert world.lets(ANONYMOUS_IDENTITY, GET)
    assert veiled(world, ANONYMOUS_IDENTITY, GET) == "NoSuchKey"
    world.put()
    assert not world.lets(ANONYMOUS_IDENTITY, GET)


def test_a_missing_bucket_is_told_to_everyone() -> None:
    world = World()
    for who in (ROOT, BOB, ANONYMOUS_IDENTITY, replace(ANN, bounds=(POD,))):
        assert world.says(who, ops.GetObject("none", "k")) == "NoSuchBucket"
    assert not world.access.allows(ROOT, "s3:GetObject", "none", "k")


# --- many keys --------------------------------------------------------------------------------------------


def test_deletions_are_decided_key_by_key() -> None:
    operation = ops.DeleteObjects("b", DIGESTS)
    world = World(policy=to("bob", allow("s3:DeleteObject", "arn:aws:s3:::b/tmp/*")))
    keys = (DeleteKey("tmp/1"), DeleteKey("k"), DeleteKey("tmp/2", "v"), DeleteKey("tmp/3", etag="e"))
    assert world.lets(BOB, operation)

    def sift(who: Identity) -> tuple[tuple[DeleteKey, ...], tuple[DeleteFailure, ...]]:
        return asyncio.run(world.access.filter_deletions(who, "b", keys, RequestContext()))

    allowed, failures = sift(BOB)
    assert allowed == (DeleteKey("tmp/1"),)
    assert [(each.key, each.code, each.version) for each in failures] == [
        ("k", "AccessDenied", ""),
        ("tmp/2", "AccessDenied", "v"),
        ("tmp/3", "AccessDenied", ""),
    ]
    assert sift(ANN)[1] == ()
    bound = replace(ANN, bounds=(own(allow("s3:DeleteObject", "arn:aws:s3:::b/tmp/*")),))
    assert [entry.key for entry in sift(bound)[0]] == ["tmp/1"]


def test_others_get_their_turn_while_many_keys_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a key costs is up to whoever wrote the policy."""
    monkeypatch.setattr(async_tasks, "_MAX_SLICE", 0.0)
    world = World(policy=to("bob", allow("s3:*", "arn:aws:s3:::b/tmp/*")))
    had = 0

    async def other() -> None:
        nonlocal had
        while True:
            had += 1
            await asyncio.sleep(0)

    async def decide(doing: Awaitable[object]) -> int:
        nonlocal had
        had, beside = 0, asyncio.create_task(other())
        await doing
        beside.cancel()
        return had

    names = [f"tmp/{number}" for number in range(100)]
    keys = tuple(map(DeleteKey, names))
    assert asyncio.run(decide(world.access.filter_deletions(BOB, "b", keys, RequestContext()))) >= 99
    readers = DatasetAccess(world.access)
    assert asyncio.run(decide(readers.require_keys(Caller(BOB), "b", names))) >= 99


def test_who_has_no_right_at_all_is_refused_before_the_keys_are_read() -> None:
    operation, world = ops.DeleteObjects("b", DIGESTS), World()
    assert not world.lets(BOB, operation)
    assert not world.lets(ANONYMOUS_IDENTITY, operation)
    assert world.lets(ANN, operation)
    world.change(acl=Acl("public-read-write"))
    assert world.lets(ANONYMOUS_IDENTITY, operation)


def test_rights_say_what_allows_says() -> None:
    secret = {"StringEquals": {"s3:ExistingObjectTag/secret": "yes"}}
    policies = [
        "",
        to("*", allow("s3:GetObject", "arn:aws:s3:::b/public/*")),
        to("bob", allow("s3:GetObject"), deny("s3:GetObject", "arn:aws:s3:::b/secret/*")),
        to("bob", allow("s3:GetObject", "arn:aws:s3:::b/home/${aws:username}/*")),
        to("*", deny("s3:GetObject", Condition=secret)),
        to("bob", allow("s3:GetObject", Condition={"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}})),
    ]
    users = [ROOT, ANN, BOB, ANONYMOUS_IDENTITY, replace(ANN, bounds=(POD,)), replace(ROOT, bounds=(POD,))]
    users += [
        replace(BOB, policies=(own(allow("s3:*", "*")),)),
        replace(ANN, policies=(own(deny("s3:*", "*")),)),
    ]
    keys = ["public/1", "secret/1", "home/bob/1", "train/1", "open", "tagged", "none"]
    for policy in policies:
        world = World(policy=policy)
        for key in keys[:-1]:
            world.put(key)
        world.put("open", acl=Acl("public-read"))
        world.put("tagged", tags={"secret": "yes"})
        for who in users:
            for context in (RequestContext("10.0.0.1"), RequestContext("192.0.2.1")):
                rights = world.access.bulk_access(who, "s3:GetObject", "b", context)
                for key in keys:
                    expected = world.access.allows(who, "s3:GetObject", "b", key, context)
                    assert rights.allows_key(key) is expected, (policy, who, key)


def test_rights_are_stamped_alike_only_when_they_are_alike() -> None:
    world = World(policy=to("bob", allow("s3:GetObject")))
    first, again = (world.access.bulk_access(BOB, "s3:GetObject", "b") for _ in range(2))
    assert first.cache_key == again.cache_key
    assert first.cache_key != world.access.bulk_access(ANONYMOUS_IDENTITY, "s3:GetObject", "b").cache_key
    assert first.allows_key("k")
    assert first.policies_only
    world.change(policy=to("bob", allow("s3:GetObject", "arn:aws:s3:::b/a*")))
    assert first.cache_key != world.access.bulk_access(BOB, "s3:GetObject", "b").cache_key
    stranger = world.access.bulk_access(ANONYMOUS_IDENTITY, "s3:GetObject", "b")
    assert not stranger.allows_key("k"), "an ACL was looked at"
    assert not stranger.policies_only
    tagged = {"StringEquals": {"s3:ExistingObjectTag/a": "b"}}
    world.change(policy=to("bob", allow("s3:GetObject", Condition=tagged)))
    assert world.access.bulk_access(BOB, "s3:GetObject", "b").cache_key is None
    addressed = allow("s3:GetObject", "arn:aws:s3:::b/${aws:SourceIp}/*")
    world.change(policy=to("bob", addressed))
    assert world.access.bulk_access(BOB, "s3:GetObject", "b").cache_key is None
