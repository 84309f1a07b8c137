"""Creates, shows and changes buckets with origins.

Only root may do this. Creating a bucket sends one request to the origin, so a wrong credential is reported
at once. No response contains a secret. The location of an origin never changes, because cached objects are
named by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshd.control.buckets import Bucket, BucketExistsError
from meshd.core.api_errors import BatchError
from meshd.origins.client.origin_api import OriginCredentialsError, OriginError, OriginMissingError
from meshwire import origin as descriptions
from meshwire.names import BucketNameError, check_bucket_name

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.control.buckets import BucketTable
    from meshd.origins.client.origin_pool import OriginPool
    from meshd.util.clock import Clock

_FIXED = ("url", "endpoint", "region")


class BackedAdmin:
    """Manages buckets with origins. One instance per worker."""

    def __init__(self, buckets: BucketTable, origins: OriginPool, clock: Clock, region: str) -> None:
        self._buckets, self._origins, self._clock, self._region = buckets, origins, clock, region

    def list_all(self, identity: Identity) -> list[dict[str, Any]]:
        """Return every bucket that has an origin. Raises BatchError."""
        _require_root(identity)
        return [_describe(bucket) for bucket in self._buckets.list_all() if bucket.origin is not None]

    def show(self, identity: Identity, name: str) -> dict[str, Any]:
        """Return one bucket with an origin. Raises BatchError."""
        _require_root(identity)
        return _describe(self._existing(name))

    async def create(self, identity: Identity, name: str, document: dict[str, Any]) -> dict[str, Any]:
        """Create a bucket with an origin; succeeds if it exists with the same origin, and this node has its
        credentials. Raises BatchError, ControlError."""
        _require_root(identity)
        try:
            check_bucket_name(name)
        except BucketNameError as error:
            raise BatchError("BadRequest", f"{name[:80]!r} is not a valid bucket name: {error}") from None
        origin = _parse_origin(document)
        bucket = Bucket(name, identity.user_id, self._clock.now_ms(), self._region, origin=origin)
        present = await self._buckets.get_latest(name)
        if present is not None:
            shown = _same(present, origin)
            self._require_credentials(present)
            return shown
        await self._try(bucket)
        try:
            await self._buckets.create(bucket)
        except BucketExistsError as error:
            return _same(error.bucket, origin)
        return _describe(bucket)

    def _require_credentials(self, bucket: Bucket) -> None:
        try:
            self._origins.origin_for(bucket)
        except OriginCredentialsError as error:
            raise BatchError("CredentialsMissing", str(error)) from error
        except OriginError as error:
            raise BatchError("BadRequest", str(error)) from error

    async def _try(self, bucket: Bucket) -> None:
        assert bucket.origin is not None
        try:
            origin = self._origins.origin_for(bucket)
            if bucket.origin.is_web:
                await origin.head("-shardmesh-is-it-there-")
            else:
                await origin.list("", "/", "", 1)
        except OriginMissingError as error:
            if not bucket.origin.is_web:
                raise BatchError(
                    "BadRequest", f"the origin {bucket.origin.url} does not exist: {error}"
                ) from error
        except OriginCredentialsError as error:
            raise BatchError("CredentialsMissing", str(error)) from error
        except OriginError as error:
            raise BatchError("BadRequest", str(error)) from error

    async def change(self, identity: Identity, name: str, document: dict[str, Any]) -> dict[str, Any]:
        """Change how an origin is read, written and cached. Raises BatchError."""
        _require_root(identity)
        fixed = next((field for field in _FIXED if field in document), None)
        if fixed is not None:
            raise BatchError("BadRequest", f"{fixed} cannot be changed; create another bucket")

        def change(now: Bucket) -> Bucket:
            return msgspec.structs.replace(
                now, origin=_parse_origin({**_origin_of(now).document(), **document})
            )

        changed = await self._buckets.update(name, change)
        if changed is None:
            raise _unknown(name)
        return _describe(changed)

    def _existing(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise _unknown(name)
        _origin_of(bucket)
        return bucket


def _origin_of(bucket: Bucket) -> descriptions.Origin:
    if bucket.origin is None:
        raise BatchError("BadRequest", f"{bucket.name} has no origin: its objects are stored in the mesh")
    return bucket.origin


def _unknown(name: str) -> BatchError:
    return BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r}")


def _require_root(identity: Identity) -> None:
    if not identity.root:
        raise BatchError(
            "AccessDenied", "only root may manage buckets with origins: ask an administrator of the mesh"
        )


def _parse_origin(document: dict[str, Any]) -> descriptions.Origin:
    try:
        return descriptions.parse_origin(document)
    except descriptions.OriginError as error:
        raise BatchError("BadRequest", str(error)) from None


def _same(present: Bucket | None, origin: descriptions.Origin) -> dict[str, Any]:
    if present is not None and present.origin == origin:
        return _describe(present)
    raise BatchError(
        "BucketExists",
        "a bucket of that name exists already; choose another name, or change that bucket's origin",
    )


def _describe(bucket: Bucket) -> dict[str, Any]:
    assert bucket.origin is not None
    return {"name": bucket.name, "created_ms": bucket.created_ms, "origin": bucket.origin.document()}
