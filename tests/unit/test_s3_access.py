"""Who may do what: decided from tables alone."""

from __future__ import annotations

import asyncio

import pytest

from meshd.control.buckets import Bucket, BucketTable
from meshd.control.identities import Account, IdentityTable, Key, User
from meshd.control.memory import MemoryControl
from meshd.kit.clock import ManualClock
from meshd.service.access import ANYONE, Access, Identity
from meshwire.s3 import operations as ops
from meshwire.s3.errors import S3Error

ROOT = Identity("root", "root", "AKROOT", root=True)
ALICE = Identity("alice", "Alice", "AKALICE")
BOB = Identity("bob", "Bob", "AKBOB")


@pytest.fixture
def access() -> Access:
    control = MemoryControl(ManualClock())
    buckets, identities = BucketTable(control), IdentityTable(control)

    async def fill() -> None:
        await buckets.create(Bucket("hers", "alice", 0))
        await buckets.create(Bucket("his", "bob", 0))
        user = User(user_id="alice", display_name="Alice")
        key = Key(access_key="AKALICE", user_id="alice", secret_key="secret")
        await identities.replace(frozenset(), [Account(user, key)], 0)

    asyncio.run(fill())
    return Access(identities, buckets)


def refusal(access: Access, who: Identity, operation: ops.Operation) -> str:
    try:
        access.admit(who, operation)
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
        (ANYONE, ops.GetObject("hers", "k"), "AccessDenied"),
        (ANYONE, ops.GetObject("none", "k"), "NoSuchBucket"),
        (BOB, ops.GetObject("none", "k"), "NoSuchBucket"),
        (ANYONE, ops.ListBuckets(), "AccessDenied"),
        (BOB, ops.ListBuckets(), ""),
        (ANYONE, ops.CreateBucket("new"), "AccessDenied"),
        (BOB, ops.CreateBucket("hers"), ""),
        (BOB, copy("his", "his"), ""),
        (BOB, copy("hers", "his"), "AccessDenied"),
        (BOB, copy("his", "hers"), "AccessDenied"),
        (BOB, copy("none", "his"), "NoSuchBucket"),
        (ROOT, copy("hers", "his"), ""),
    ],
)
def test_admission(access: Access, who: Identity, operation: ops.Operation, expected: str) -> None:
    assert refusal(access, who, operation) == expected


def test_signers_by_access_key(access: Access) -> None:
    signer = access.signer("AKALICE")
    assert Identity.of(signer) == ALICE
    assert "secret" not in repr((signer, Identity.of(signer)))
    with pytest.raises(S3Error) as excinfo:
        access.signer("AKNONE")
    assert excinfo.value.code == "InvalidAccessKeyId"
