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
    """A bucket and its configuration. `owner` is a user_id; `created_ms` is since 1970.

    `view`: the canonical document of a view (see `meshwire.views.view_kinds`), "" for a bucket of objects.
    `origin`: where the objects of a backed bucket are. `policy`: the JSON text as it was put, "" if there is
    none. None stands for a setting that was never made. `copies`: how many nodes keep its objects, 0 for the
    mesh's default; while it is being changed, the cluster map has the count (`BucketCopies`).
    `decoded_quota`: bytes that results of its samples may take in the decoded cache of a node.
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
    decoded_quota: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a bucket of objects without an origin."""
        return not self.view and self.origin is None


class BucketExistsError(ControlError):
    """The name is taken; `bucket` is the existing one if it still exists."""

    def __init__(self, name: str, bucket: Bucket | None) -> None:
        super().__init__(f"the bucket {name} already exists; choose another name")
        self.name, self.bucket = name, bucket


_decode = msgspec.json.Decoder(Bucket).decode


class BucketTable:
    """Buckets by name. `get` and `list_all` are dictionary reads."""

    def __init__(self, control: ControlStore) -> None:
        self._documents = CachedTopic(control, "buckets", _decode)
        self._seen: Mapping[str, Bucket] | None = None
        self._backed = False

    def get(self, name: str) -> Bucket | None:
        """Returns the bucket, or None. Takes about a microsecond; sees every process's finished writes."""
        return self._documents.current().get(name)

    async def get_latest(self, name: str) -> Bucket | None:
        """Returns the bucket as the engine has it, also if another node has just changed or removed it.
        Raises ControlError if that takes too long."""
        return await self._documents.get_latest(name)

    def is_plain(self, name: str) -> bool:
        """Returns True unless the bucket is a view or has an origin. Takes about a microsecond."""
        found = self._documents.current().get(name)
        return found is None or found.is_plain

    def replica_count(self, name: str) -> int:
        """Returns the replica count of a bucket; 0 for the mesh's default."""
        found = self._documents.current().get(name)
        return 0 if found is None else found.copies

    def created_at_ms(self, name: str) -> int:
        """Returns when a bucket was created, in ms since the epoch; 0 if it does not exist."""
        found = self._documents.current().get(name)
        return 0 if found is None else found.created_ms

    def decoded_quota(self, name: str) -> int | None:
        """Returns the bytes that results of a bucket's samples may take in a node's decoded cache; None
        without a quota."""
        found = self._documents.current().get(name)
        return None if found is None else found.decoded_quota

    def origin_write_mode(self, name: str) -> str:
        """Returns how writes to a bucket reach its origin: "through", "back" or "off"; "" without an
        origin."""
        found = self._documents.current().get(name)
        return "" if found is None or found.origin is None else found.origin.write

    def origin_home_nodes(self, name: str) -> tuple[str, ...]:
        """Returns the ids of the nodes that cache a bucket's origin; () if its names are distributed over all
        nodes."""
        found = self._documents.current().get(name)
        return () if found is None or found.origin is None else found.origin.homes

    def has_backed_buckets(self) -> bool:
        """Returns True if any bucket has an origin. Takes microseconds."""
        buckets = self._documents.current()
        if buckets is not self._seen:
            self._seen = buckets
            self._backed = any(bucket.origin is not None for bucket in buckets.values())
        return self._backed

    def min_replica_count(self, default: int, counts: Iterable[BucketCopies] = ()) -> int:
        """Returns the smallest replica count of all buckets. `default`: the mesh's; `counts`: those in the
        map, which take precedence."""
        map_counts = {(count.bucket, count.born): count.relied for count in counts}
        buckets = [bucket for bucket in self._documents.current().values() if not bucket.view]
        found = [map_counts.get((each.name, each.created_ms), each.copies or default) for each in buckets]
        return min(found, default=default)

    def list_all(self, owner: str | None = None) -> tuple[Bucket, ...]:
        """Returns all buckets (of one owner) in order of name."""
        buckets = self._documents.current()
        return tuple(
            buckets[name] for name in sorted(buckets) if owner is None or buckets[name].owner == owner
        )

    async def create(self, bucket: Bucket) -> Bucket:
        """Creates a bucket durably. Raises BucketExistsError."""
        try:
            await self._documents.put(bucket.name, bucket, expect=ABSENT)
        except VersionConflictError:
            raise BucketExistsError(bucket.name, self.get(bucket.name)) from None
        return bucket

    async def update(self, name: str, change: Callable[[Bucket], Bucket]) -> Bucket | None:
        """Changes a bucket durably and atomically; returns None if it does not exist. `change` may be called
        repeatedly, and may raise."""
        result: Bucket | None = None

        def replace(present: Bucket | None) -> Bucket | None:
            nonlocal result
            result = None if present is None else change(present)
            return result

        await self._documents.update(name, replace)
        return result

    async def delete(self, name: str) -> Bucket | None:
        """Removes a bucket durably; returns it as it was then, None if it did not exist. The caller ensures
        that it is empty."""
        deleted: Bucket | None = None

        def remove(present: Bucket | None) -> None:
            nonlocal deleted
            deleted = present

        await self._documents.update(name, remove)
        return deleted
