"""View definitions: create, describe and list views; deletion is that of a bucket.

Law: only the owner of the source bucket, or root, creates a view of it, and the view belongs to that
owner. The signing key must be allowed to list and read every key the view can show. Invariant: a view
whose source is gone or has another owner shows nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshd.auth.required_actions import RequiredAction
from meshd.control.buckets import Bucket, BucketExistsError
from meshd.core.api_errors import BatchError
from meshd.datasets.service import invalid_plan
from meshd.transform import registry
from meshd.transform.compiler import compile_program, complete_spec
from meshwire.errors import S3Error
from meshwire.strict_json import (
    PlanError,
    checked_object,
    checked_text,
    read_json,
    required_field,
    suggestion,
)
from meshwire.views.batch_view import BatchesView
from meshwire.views.transform_view import OBJECT_FIELD
from meshwire.views.view_kinds import is_sample_view, parse_view, source_buckets, view_name
from meshwire.views.zarr_view import ZarrView

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller, Identity
    from meshd.batches.assets import AssetService
    from meshd.control.buckets import BucketTable
    from meshd.util.clock import Clock
    from meshd.views.view_kind import ViewCompleter
    from meshwire.views.transform_view import TransformView
    from meshwire.views.view_kinds import View

_NO_MAKERS: Mapping[type, ViewCompleter] = MappingProxyType({})


@lru_cache(maxsize=1024)
def _parse(text: str, source: str) -> View:
    return parse_view(text, source)


def view_of(bucket: Bucket) -> View:
    """Return the view of a bucket with `view` set."""
    source = json.loads(bucket.view)["source"]
    return _parse(bucket.view, source)


class ViewDefinitions:
    """Creates and lists views, for a worker."""

    def __init__(
        self,
        table: BucketTable,
        clock: Clock,
        access: Authorizer,
        makers: Mapping[type, ViewCompleter] = _NO_MAKERS,
        announce: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`announce`: returns when the other nodes know the buckets that this process knows."""
        self._table, self._clock, self._access, self._makers = table, clock, access, makers
        self._announce = announce

    def find_view(self, name: str) -> View | None:
        """Return the view behind a bucket name, None for an ordinary bucket.

        Raises S3Error: NoSuchBucket or SourceChanged if the source is gone, AccessDenied if the source has
        another owner.
        """
        bucket = self._table.get(name)
        if bucket is None or not bucket.view:
            return None
        view = view_of(bucket)
        for name in source_buckets(view):
            source = self._table.get(name)
            if source is None:
                raise _deleted_error(view, name)
            if source.owner != bucket.owner:
                raise S3Error("AccessDenied", "The source of this view now has another owner.")
        return view

    async def create(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Create a view and return the answer to `POST /-/views`. Creating the same view again succeeds.

        Raises BatchError: InvalidPlan, UnknownOp, UnknownOpBuild, NoSuchBucket, AccessDenied, ViewExists.
        """
        try:
            of, short, given = _parsed_request(body)
            source = self._source(caller.identity, of)
            name = view_name(source.name, short)
            self._require(caller, RequiredAction("s3:CreateBucket", name), creating=True)
            asked = parse_view(given, source.name)
            self._require_source(caller, asked)
            view = await self._complete(caller, asked)
            self._check_other_sources(caller, source, view)
        except PlanError as error:
            raise invalid_plan(error) from error
        bucket = Bucket(name, source.owner, self._clock.now_ms(), source.region, view=view.to_json().decode())
        try:
            created = await self._table.create(bucket)
        except BucketExistsError as error:
            if error.bucket is None or error.bucket.view != bucket.view:
                raise BatchError(
                    "ViewExists",
                    f"a bucket or another view {name!r} already exists",
                    help="choose another name, or delete it first",
                ) from error
            created = error.bucket
        if self._announce is not None:
            await self._announce()
        return _view_to_json(created)

    def _check_other_sources(self, caller: Caller, source: Bucket, view: View) -> None:
        """Require one owner for all source buckets of a view. Raises PlanError, BatchError."""
        for name in source_buckets(view)[1:]:
            other = self._source(caller.identity, name)
            if other.owner != source.owner:
                raise PlanError(
                    "bucket",
                    f"{name!r} has another owner than {source.name!r}; copy the objects that the view needs",
                )

    async def _complete(self, caller: Caller, view: View) -> View:
        maker = self._makers.get(type(view))
        if maker is None:
            return view
        completed: View = await maker(caller, view)
        return completed

    def list_all(self, caller: Caller, bucket: str = "") -> list[dict[str, Any]]:
        """Return the caller's views (of one bucket), sorted by name. Raises BatchError AccessDenied."""
        self._require(caller, RequiredAction("s3:ListAllMyBuckets"))
        return self._owned_views(caller.identity, bucket)

    def _owned_views(self, identity: Identity, bucket: str = "") -> list[dict[str, Any]]:
        every = self._table.list_all(None if identity.root else identity.user_id)
        found = [_view_to_json(item) for item in every if item.view]
        return [item for item in found if bucket in ("", item["bucket"])]

    def describe(self, caller: Caller, name: str) -> dict[str, Any]:
        """Return the description of a view. Raises BatchError NoSuchView, AccessDenied."""
        self._require(caller, RequiredAction("s3:ListAllMyBuckets"))
        identity, bucket = caller.identity, self._table.get(name)
        if bucket is None or not bucket.view or not (identity.root or bucket.owner == identity.user_id):
            mine = [item["name"] for item in self._owned_views(identity)]
            raise BatchError("NoSuchView", f"there is no view {name[:80]!r}{suggestion(name, mine)}")
        return _view_to_json(bucket)

    def _require_source(self, caller: Caller, view: View) -> None:
        """Require that the key may read everything below the prefix of the view. Raises BatchError.

        Views of a snapshot or plan are exempt: each of their samples is authorized where it is looked up.
        """
        if isinstance(view, BatchesView) or (isinstance(view, ZarrView) and view.snapshot):
            return
        listing = {"s3:prefix": view.prefix, "s3:delimiter": "", "s3:max-keys": "1000"}
        self._require(caller, RequiredAction("s3:ListBucket", view.source, facts=listing))
        try:
            self._access.require_prefix(caller, "s3:GetObject", view.source, view.prefix)
        except S3Error as error:
            raise BatchError(
                "AccessDenied",
                f"{error.message} A view shows everything below s3://{view.source}/{view.prefix}",
                help="create the view with a key that may read all of it, or with a prefix that this key may "
                "read in full",
            ) from error

    def _require(self, caller: Caller, need: RequiredAction, *, creating: bool = False) -> None:
        """Require an action; the bounds of a key apply to views, too. Raises BatchError AccessDenied."""
        try:
            self._access.require_action(caller.identity, need, caller.context, creating=creating)
        except S3Error as error:
            raise BatchError("AccessDenied", error.message) from error

    def _source(self, identity: Identity, name: str) -> Bucket:
        bucket = self._table.get(name)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r}")
        if not (identity.root or identity.user_id == bucket.owner):
            raise BatchError("AccessDenied", "only the owner of a bucket may create views of it")
        if bucket.view:
            raise PlanError("bucket", f"{name!r} is itself a view; create the view on its source")
        return bucket


def _deleted_error(view: View, name: str) -> S3Error:
    """Return the error for a deleted source.

    A Zarr reader takes a missing key as zeros, so a view of samples must not answer that they are missing.
    """
    message = "The source of this view was deleted."
    if is_sample_view(view):
        return S3Error("SourceChanged", message)
    return S3Error("NoSuchBucket", message, extra={"BucketName": name})


def _parsed_request(body: bytes) -> tuple[str, str, dict[str, Any]]:
    """Parse a request into (bucket, name, view)."""
    document = checked_object(read_json(body), "", ("bucket", "name", "view"))
    given = required_field(document, "view", "")
    if not isinstance(given, dict):
        raise PlanError("view", "expected an object")
    bucket = checked_text(required_field(document, "bucket", ""), "bucket", at_most=63)
    return bucket, checked_text(required_field(document, "name", ""), "name", at_most=63), given


def _view_to_json(bucket: Bucket) -> dict[str, Any]:
    view = view_of(bucket)
    return {
        "name": bucket.name,
        "bucket": view.source,
        "created_ms": bucket.created_ms,
        "owner": bucket.owner,
        "view": json.loads(bucket.view),
    }


async def complete_transform(assets: AssetService, caller: Caller, view: TransformView) -> TransformView:
    """Pin the op builds and assets of a view and check that its chain ends in bytes. Raises PlanError."""
    spec = complete_spec(await assets.pin_assets(caller, view.plan), _no_sample)
    program = await asyncio.to_thread(compile_program, spec, [OBJECT_FIELD], load=assets.load_asset_content)
    program.require_unmixed("a view transforms one object at a time")
    output = program.outputs[OBJECT_FIELD]
    if output.kind != "bytes":
        raise PlanError(
            "ops", f"the chain ends in {output}, but an object needs bytes; add `encode` or `to_npy`"
        )
    return replace(view, ops=spec.ops)


def _no_sample(field: str) -> bytes:
    raise KeyError(field)


def is_random(view: TransformView) -> bool:
    """Return whether an op of the view is random: its results then depend on the key, too.

    Raises BatchError UnknownOpBuild if an op was removed.
    """
    try:
        return any(registry.find(op.op, op.version, "").random for op in view.ops)
    except PlanError as error:
        raise invalid_plan(error) from error
