"""Bucket table: owner, creation time and configuration of each bucket. Objects are the store's business.

Law: a name is created once; the control store decides races between processes and nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.control.control_api import ABSENT, ControlError, VersionConflictError
from meshwire.origin import Origin  # noqa: TC001  msgspec reads the annotations
from meshwire.s3.bucket_settings import (  # noqa: TC001  msgspec reads the annotations
    Acl,
    CorsRule,
    LifecycleRule,
    PublicAccessBlock,
    Versioning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshd.control.control_api import ControlStore
    from meshwire.cluster.cluster_map import BucketCopies


class Bucket(msgspec.Struct, frozen=True, omit_defaults=True):
    """One bucket and its configuration. `owner` is a user_id; `created_ms` is since 1970.

    `view` is the canonical document of a view (see `meshwire.views.view_kinds`), empty for a bucket that
    holds objects.
    `origin` is where the objects of a bucket that is backed by one are.
    `policy` is the JSON text as it was put, empty when there is none; None for a setting never made.
    `copies` is how many nodes keep what is in it, 0 for as many as the mesh says; when that is changed, the
    cluster's map says so (`Count`).
    """

    name: str
    owner: str
    created_ms: int
    region: str = "us-east-1"
    versioning: Versioning = ""
    tags: dict[str, str] | None = None
    acl: Acl | None = None
    policy: str = ""
    cors: tuple[CorsRule, ...] = ()
    lifecycle: tuple[LifecycleRule, ...] = ()
    public_access: PublicAccessBlock | None = None
    ownership: str = ""
    view: str = ""
    copies: int = 0
    origin: Origin | None = None


class BucketExistsError(ControlError):
    """The name is taken; `bucket` is the present one when it is still there."""

    def __init__(self, name: str, bucket: Bucket | None) -> None:
        super().__init__(f"the bucket {name} exists already; choose another name")
        self.name, self.bucket = name, bucket


class BucketTable:
    """Buckets by name. `get` and `list_all` are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, "buckets", Bucket)
        self._seen: Mapping[str, Bucket] | None = None
        self._backed = False

    def get(self, name: str) -> Bucket | None:
        """The bucket, or None. About a microsecond; sees every process's finished writes."""
        return self._documents.current().get(name)

    def replica_count(self, name: str) -> int:
        """How many copies a bucket asks for; 0: as many as the mesh says."""
        found = self._documents.current().get(name)
        return 0 if found is None else found.copies

    def created_at_ms(self, name: str) -> int:
        """When a bucket was made, in ms since the epoch; 0: there is none."""
        found = self._documents.current().get(name)
        return 0 if found is None else found.created_ms

    def origin_write_mode(self, name: str) -> str:
        """How what is written to a bucket comes to its origin: "through", "back" or "off"; "" without one."""
        found = self._documents.current().get(name)
        return "" if found is None or found.origin is None else found.origin.write

    def origin_home_nodes(self, name: str) -> tuple[str, ...]:
        """Ids of the nodes that keep what is read of a bucket's origin; (): its names are laid over all."""
        found = self._documents.current().get(name)
        return () if found is None or found.origin is None else found.origin.homes

    def has_backed_buckets(self) -> bool:
        """Whether any bucket has an origin. Microseconds."""
        every = self._documents.current()
        if every is not self._seen:
            self._seen = every
            self._backed = any(bucket.origin is not None for bucket in every.values())
        return self._backed

    def min_replica_count(self, default: int, counts: Iterable[BucketCopies] = ()) -> int:
        """Of all buckets; `default`: what the mesh says; `counts`: what the map says of some."""
        said = {(count.bucket, count.born): count.relied for count in counts}
        every = [bucket for bucket in self._documents.current().values() if not bucket.view]
        found = [said.get((each.name, each.created_ms), each.copies or default) for each in every]
        return min(found, default=default)

    def list_all(self, owner: str | None = None) -> tuple[Bucket, ...]:
        """All buckets (of one owner) in order of their names."""
        every = self._documents.current()
        return tuple(every[name] for name in sorted(every) if owner is None or every[name].owner == owner)

    async def create(self, bucket: Bucket) -> Bucket:
        """Create it durably. Raises BucketExistsError."""
        try:
            await self._documents.put(bucket.name, bucket, expect=ABSENT)
        except VersionConflictError:
            raise BucketExistsError(bucket.name, self.get(bucket.name)) from None
        return bucket

    async def update(self, name: str, change: Callable[[Bucket], Bucket]) -> Bucket | None:
        """Change it durably, atomically against other changes; None if there is no such bucket."""
        while True:
            version = self._documents.version(name)  # read first: an older one only conflicts
            bucket = self.get(name)
            if bucket is None:
                return None
            changed = change(bucket)
            try:
                await self._documents.put(name, changed, expect=version)
            except VersionConflictError:
                continue
            return changed

    async def delete(self, name: str) -> bool:
        """Remove it durably; False if it was not there. Whether it is empty is for the caller to know."""
        return await self._documents.delete(name)
