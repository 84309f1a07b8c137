"""A bucket, its objects and some users, to ask who may do what."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from meshd.auth.authorizer import Authorizer
from meshd.auth.identity import Identity, RequestContext
from meshd.control.buckets import Bucket, BucketTable
from meshd.store.records import Record
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error
from meshwire.iam import parse_policy
from meshwire.s3 import operations as ops
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.iam import Policy

ROOT = Identity("root", "root", "AKROOT", root=True)
ANN, BOB = Identity("ann", "Ann", "AKANN"), Identity("bob", "Bob", "AKBOB")
HEADERS, DIGESTS = ops.ObjectHeaders(), BodyDigests()
GET, PUT = ops.GetObject("b", "k"), ops.PutObject("b", "k", HEADERS, DIGESTS)
LIST, DELETE = ops.ListObjects("b", 2), ops.DeleteObject("b", "k")


def statement(effect: str, action: Any, resource: Any, **fields: Any) -> dict[str, Any]:
    return {"Effect": effect, "Action": action, "Resource": resource, **fields}


def allow(action: Any, resource: Any = "arn:aws:s3:::b/*", **fields: Any) -> dict[str, Any]:
    return statement("Allow", action, resource, **fields)


def deny(action: Any, resource: Any = "arn:aws:s3:::b/*", **fields: Any) -> dict[str, Any]:
    return statement("Deny", action, resource, **fields)


def text(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def own(*statements: dict[str, Any]) -> Policy:
    """A policy of a user or key."""
    return parse_policy(text(*statements), kind="identity")


def to(who: str, *statements: dict[str, Any]) -> str:
    """The text of a bucket policy about `who`."""
    principal: Any = who if who == "*" else {"AWS": who}
    return text(*({**each, "Principal": principal} for each in statements))


class World:
    """A bucket `b` of ann's (with changes), its objects, and what they are asked."""

    def __init__(self, **bucket: Any) -> None:
        self.clock = ManualClock()
        self.table = BucketTable(MemoryControl(self.clock))
        self.records: dict[tuple[str, str, str | None], Record] = {}
        self.looked = 0
        asyncio.run(self.table.create(Bucket("b", "ann", 0, **bucket)))
        asyncio.run(self.table.create(Bucket("bobs", "bob", 0)))
        self.access = Authorizer(self.table, self.clock, self._find)

    def _find(self, bucket: str, key: str, version: str | None) -> Record | None:
        self.looked += 1
        return self.records.get((bucket, key, version))

    def put(self, key: str = "k", version: str | None = None, **fields: Any) -> None:
        self.records["b", key, version] = Record(1, "e", 1, 0, (), **{"owner": "ann", **fields})

    def change(self, **changes: Any) -> None:
        def changed(bucket: Bucket) -> Bucket:
            fields = {name: getattr(bucket, name) for name in bucket.__struct_fields__}
            return Bucket(**{**fields, **changes})

        asyncio.run(self.table.update("b", changed))

    def says(
        self,
        who: Identity,
        operation: ops.Operation,
        context: RequestContext | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        try:
            self.access.authorize(who, operation, context or RequestContext(), tags)
        except S3Error as error:
            return error.code
        return ""

    def lets(self, who: Identity, operation: ops.Operation, **more: Any) -> bool:
        code = self.says(who, operation, **more)
        assert code in {"", "AccessDenied"}
        return not code


def copy(source: str, target: str, **more: Any) -> ops.CopyObject:
    return ops.CopyObject(target, "k", ops.CopySource(source, "k"), False, HEADERS, **more)


POD = own(
    allow("s3:GetObject", "arn:aws:s3:::b/train/*"),
    allow("s3:ListBucket", "arn:aws:s3:::b", Condition={"StringLike": {"s3:prefix": "train/*"}}),
)
