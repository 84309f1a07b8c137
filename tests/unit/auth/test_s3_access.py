"""Who may do what: decided from tables alone."""

from __future__ import annotations

import asyncio

import pytest

from meshd.auth.authorizer import Authorizer
from meshd.auth.identity import ANONYMOUS_IDENTITY, Identity
from meshd.control.buckets import Bucket, BucketTable
from meshd.control.identities import Key, Signer, User
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

ROOT = Identity("root", "root", "AKROOT", root=True)
ALICE = Identity("alice", "Alice", "AKALICE")
BOB = Identity("bob", "Bob", "AKBOB")


@pytest.fixture
def access() -> Authorizer:
    control = MemoryControl(ManualClock())
    buckets = BucketTable(control)

    async def fill() -> None:
        await buckets.create(Bucket("hers", "alice", 0))
        await buckets.create(Bucket("his", "bob", 0))

    asyncio.run(fill())
    return Authorizer(buckets)


def refusal(access: Authorizer, who: Identity, operation: ops.Operation) -> str:
    try:
        access.authorize(who, operation)
    except S3Error as error:
        return error.code
    return ""


def copy(source: str, target: str) -> ops.CopyObject:
    return ops.CopyObject(target, "k", ops.CopySource(source, "k"), False, ops.ObjectHeaders())


@pytest.mark.parametrize(
    ("who", "operation", "expected"),
    [
        (ROOT, ops.GetObject("hers", "k"), ""),
        (ALICE, ops.GetObject("hers", "k"), ""),
        (BOB, ops.GetObject("hers", "k"), "AccessDenied"),
        (ANONYMOUS_IDENTITY, ops.GetObject("hers", "k"), "AccessDenied"),
        (ANONYMOUS_IDENTITY, ops.GetObject("none", "k"), "NoSuchBucket"),
        (BOB, ops.GetObject("none", "k"), "NoSuchBucket"),
        (ANONYMOUS_IDENTITY, ops.ListBuckets(), "AccessDenied"),
        (BOB, ops.ListBuckets(), ""),
        (ANONYMOUS_IDENTITY, ops.CreateBucket("new"), "AccessDenied"),
        (BOB, ops.CreateBucket("hers"), ""),
        (BOB, copy("his", "his"), ""),
        (BOB, copy("hers", "his"), "AccessDenied"),
        (BOB, copy("his", "hers"), "AccessDenied"),
        (BOB, copy("none", "his"), "NoSuchBucket"),
        (ROOT, copy("hers", "his"), ""),
    ],
)
def test_admission(access: Authorizer, who: Identity, operation: ops.Operation, expected: str) -> None:
    assert refusal(access, who, operation) == expected


def test_an_identity_is_that_of_a_signer_without_the_secret() -> None:
    user = User(user_id="alice", display_name="Alice")
    signer = Signer(user, Key(access_key="AKALICE", user_id="alice", secret_key="secret"))
    assert Identity.from_signer(signer) == ALICE
    assert "secret" not in repr((signer, Identity.from_signer(signer)))
