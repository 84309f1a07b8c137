"""Imports assets: copies the objects that a spec names into documents named by their hash.

Law: an asset is read once, with the rights of the caller, when the plan or view is created. Later
changes of the object do not change a plan. Assets are bounded in size.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from meshd.core.api_errors import BatchError
from meshd.core.document_store import asset_key
from meshd.errors import missing_asset_message
from meshd.telemetry import metrics
from meshd.transform import registry
from meshd.transform.assets import MAX_ASSET_BYTES, PREFIX, MissingAssetError, no_assets, verify_asset
from meshd.transform.compiler import asset_digests
from meshwire.plan.op_declarations import is_user_op
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from typing import Any

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.batches.user_module_registry import UserModules
    from meshd.core.document_store import DocumentStore
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.transform.assets import Asset
    from meshwire.plan.plan_spec import OpSpec, PlanSpec


class AssetService:
    """Pins, stores and loads assets for a worker."""

    def __init__(
        self,
        catalog: DocumentStore,
        readers: DatasetAccess,
        user_ops: UserModules,
        objects: RemoteObjects,
    ) -> None:
        self._catalog, self._readers, self._objects = catalog, readers, objects
        self._user_ops = user_ops

    async def pin_assets(self, caller: Caller, spec: PlanSpec) -> PlanSpec:
        """Return the spec with pinned user ops and with `sha256:HEX` in place of every asset address.

        The content of each asset is stored. Raises PlanError (with the path), UnknownOpError,
        UnknownBuildError, MissingAssetError; BatchError NoSuchBucket, NoSuchKey, AccessDenied, TooLarge.
        """
        spec = self._user_ops.pin_versions(spec)
        await self._have_modules(spec)
        ops = [await self._pin_assets(caller, op, f"ops[{index}]") for index, op in enumerate(spec.ops)]
        return replace(spec, ops=tuple(ops))

    async def _pin_assets(self, caller: Caller, op: OpSpec, path: str) -> OpSpec:
        names = registry.find(op.op, op.version, path).assets
        given = {name: op.args[name] for name in names if op.args.get(name) is not None}
        if not given:
            return op
        found = {name: await self._pin(caller, value, f"{path}.args.{name}") for name, value in given.items()}
        return replace(op, args={**op.args, **found})

    async def _pin(self, caller: Caller, value: Any, path: str) -> Any:
        if isinstance(value, str) and value.startswith("s3://"):
            data = await self._objects.read_range(*await self._locate_asset(caller, value, path))
            return f"{PREFIX}{await self.store_asset(data)}"
        if isinstance(value, str) and value.startswith(PREFIX):
            digest = value.removeprefix(PREFIX)
            await self._catalog.ensure_local_copies([asset_key(digest)])
            if not self._catalog.has_document(asset_key(digest)):
                raise MissingAssetError(path, missing_asset_message(digest))
        return value  # a value that is not a reference at all is refused when the arguments are parsed

    async def _locate_asset(self, caller: Caller, url: str, path: str) -> tuple[str, str, str, int, int]:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if not bucket or not key:
            raise PlanError(path, f"expected s3://BUCKET/KEY, got {shown_value(url)}")
        try:
            rights = self._readers.bulk_access(caller, bucket)
        except BatchError as error:
            raise BatchError(error.code, f"{path}: {error.message}", help=error.help) from error
        if not rights.allows_key(key):
            raise BatchError(
                "AccessDenied", f"{path}: this key may not read {url[:300]}", help="requires s3:GetObject"
            )
        record = await self._objects.find(bucket, key)
        if record is None:
            code = self._readers.missing_key_code(caller, bucket, key)
            raise BatchError(code, f"{path}: there is no object {url[:300]}", help="list the bucket: mesh ls")
        if record.size > MAX_ASSET_BYTES:
            raise BatchError(
                "TooLarge",
                f"{path}: {url[:300]} has {record.size} bytes; an asset has at most {MAX_ASSET_BYTES}",
            )
        return bucket, key, record.etag, 0, record.size

    def require(self, spec: PlanSpec) -> None:
        """Raises UnknownBuildError if a user op of a pinned spec was removed."""
        for index, op in enumerate(spec.ops):
            if is_user_op(op.op):
                self._user_ops.require_build(op.op, op.version, f"ops[{index}]")

    async def fetch_missing(self, spec: PlanSpec) -> None:
        """Fetch the modules and assets of a pinned spec that this node lacks. Raises BatchError Busy.

        If no node has one of them, compiling the spec fails.
        """
        await self._have_modules(spec)
        with suppress(PlanError):
            await self._catalog.ensure_local_copies(map(asset_key, asset_digests(spec)))

    async def _have_modules(self, spec: PlanSpec) -> None:
        versions = [op.version for op in spec.ops if is_user_op(op.op)]
        await self._catalog.ensure_local_copies(
            asset_key(version.removeprefix(PREFIX)) for version in versions
        )

    async def store_asset(self, data: bytes) -> str:
        """Store content durably and return its sha256 in hex. Idempotent."""
        digest = hashlib.sha256(data).hexdigest()
        metrics.asset_bytes.inc(len(data))
        await self._catalog.put_shared(asset_key(digest), data)
        return digest

    def load_asset_content(self, digest: str) -> Asset:
        """Return the content of an asset (blocking). Raises MissingAssetError, SourceGoneError."""
        return load_asset(self._catalog, digest)


def load_asset(catalog: DocumentStore, digest: str) -> Asset:
    """Return the content of an asset (blocking). Raises MissingAssetError, SourceGoneError."""
    data = catalog.read_document(asset_key(digest))
    return no_assets(digest) if data is None else verify_asset(digest, data)
