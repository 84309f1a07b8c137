"""Dataset access: a caller may read a dataset if it may read each of its objects.

The answer for a snapshot is cached only while it depends on policies alone. A refusal names no object.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.util.async_tasks import CooperativeYield
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller
    from meshd.auth.policy_evaluator import BulkAccess
    from meshd.core.api_errors import Code
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.dataset.fields import Source

_REMEMBERED: Final = 256
_PAGE: Final = 1000  # keys that a listing asks for


class DatasetAccess:
    """Checks whether callers may read datasets. One instance per worker."""

    def __init__(self, access: Authorizer) -> None:
        self._access = access
        self._known: OrderedDict[Hashable, bool] = OrderedDict()

    def __repr__(self) -> str:
        return f"<DatasetAccess, {len(self._known)} snapshots checked>"

    def bulk_access(self, caller: Caller, bucket: str) -> BulkAccess:
        """Return what `caller` may read of `bucket`. Raises BatchError NoSuchBucket."""
        try:
            return self._access.bulk_access(caller.identity, "s3:GetObject", bucket, caller.context)
        except S3Error as error:
            raise BatchError("NoSuchBucket", f"there is no bucket {bucket[:80]!r}") from error

    def reads_whole_bucket(self, caller: Caller, bucket: str) -> bool:
        """Whether `caller` may read every object of the bucket. Raises BatchError NoSuchBucket."""
        return self.bulk_access(caller, bucket).allows_all

    def missing_key_code(self, caller: Caller, bucket: str, key: str) -> Code:
        """Return the error code that `caller` may see for a missing key."""
        known = self._access.may_list_key(caller.identity, bucket, key, caller.context)
        return "NoSuchKey" if known else "AccessDenied"

    def require_listing(self, caller: Caller, source: Source) -> None:
        """Raise BatchError NoSuchBucket, AccessDenied unless `caller` may list the source."""
        if self.bulk_access(caller, source.bucket).allows_all:
            return
        facts = {"s3:prefix": source.prefix, "s3:delimiter": "", "s3:max-keys": str(_PAGE)}
        if not self._access.allows(
            caller.identity, "s3:ListBucket", source.bucket, context=caller.context, extra=facts
        ):
            raise _refusal(source.bucket, f"s3:ListBucket is required for the prefix {source.prefix!r}")

    async def require_keys(self, caller: Caller, bucket: str, keys: Iterable[str]) -> None:
        """Raise BatchError NoSuchBucket, AccessDenied unless `caller` may read every one of `keys`."""
        rights = self.bulk_access(caller, bucket)
        if not rights.allows_all and not await _allows_all(rights, keys):
            raise _refusal(bucket)

    async def require_snapshot(self, caller: Caller, snapshot: Snapshot) -> None:
        """Raise BatchError NoSuchBucket, AccessDenied unless `caller` may read every object of a snapshot."""
        for bucket, keys in snapshot.objects.keys_by_bucket():
            await self._require_of(caller, snapshot.hash, bucket, keys)

    async def _require_of(self, caller: Caller, digest: str, bucket: str, keys: Iterable[str]) -> None:
        rights = self.bulk_access(caller, bucket)
        if rights.allows_all:
            return
        name = None if rights.cache_key is None else (rights.cache_key, digest, bucket)
        allowed = None if name is None else self._known.get(name)
        if allowed is None:
            allowed = await _allows_all(rights, keys)
            if name is not None and rights.policies_only:
                self._remember(name, allowed=allowed)
        if not allowed:
            raise _refusal(bucket)

    def _remember(self, name: Hashable, *, allowed: bool) -> None:
        self._known[name] = allowed
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


async def _allows_all(rights: BulkAccess, keys: Iterable[str]) -> bool:
    turn = CooperativeYield()
    for key in keys:
        if not rights.allows_key(key):
            return False
        await turn.yield_if_due()
    return True


def _refusal(bucket: str, missing: str = "s3:GetObject is required on every object") -> BatchError:
    return BatchError(
        "AccessDenied",
        f"this access key may not read the data in bucket {bucket[:80]!r}: {missing}",
        help="use the key of the bucket's owner, or have the permission added to this key or its user",
    )
