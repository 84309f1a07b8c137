"""Quota of a bucket in the decoded caches: the bytes that results of its samples may take on each node.

Only root may set it. A lower quota takes effect within seconds: each node drops the results of least value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.core.api_errors import BatchError

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.control.buckets import BucketTable

FIELD: Final = "decoded_quota"
_MOST: Final = 1 << 60


class DecodedQuotas:
    """Shows and changes quotas. One instance per worker."""

    def __init__(self, buckets: BucketTable) -> None:
        self._buckets = buckets

    def buckets(self) -> list[str]:
        """Return the buckets that have a quota."""
        return [bucket.name for bucket in self._buckets.list_all() if bucket.decoded_quota is not None]

    def added(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Return the description of a bucket, with its quota."""
        bucket = self._buckets.get(shown["name"])
        return {**shown, FIELD: None if bucket is None else bucket.decoded_quota}

    async def change(self, identity: Identity, name: str, quota: Any) -> None:
        """Set a quota in bytes, or remove it with None. Raises BatchError."""
        if not identity.root:
            raise BatchError(
                "AccessDenied", "only root may set the quota of a bucket: ask an administrator of the mesh"
            )
        if quota is not None and (type(quota) is not int or not 0 <= quota <= _MOST):
            raise BatchError("BadRequest", f"{FIELD}: expected a number of bytes, or null for no quota")
        bucket = self._buckets.get(name)
        if bucket is not None and bucket.view:
            raise BatchError("BadRequest", f"{name} is a view; set the quota of its source")
        changed = await self._buckets.update(
            name, lambda now: msgspec.structs.replace(now, decoded_quota=quota)
        )
        if changed is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r}")
