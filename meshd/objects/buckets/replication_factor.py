"""Replication factor of a bucket: set when the bucket is created, changed later.

Only root may set it. A factor larger than the number of storing nodes is refused with that number. A
change edits the cluster map and completes when all nodes have compared their data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.control.buckets import Bucket, BucketExistsError
from meshd.core.api_errors import BatchError
from meshwire.cluster import transitions as turn
from meshwire.cluster.cluster_map import MAX_COPIES, read_and_write_copies
from meshwire.names import BucketNameError, check_bucket_name

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap


class ReplicationFactors:
    """Shows and changes replication factors. One instance per worker."""

    def __init__(
        self, buckets: BucketTable, mesh: ClusterView, maps: ClusterMapStore, clock: Clock, region: str
    ) -> None:
        self._buckets, self._mesh, self._maps = buckets, mesh, maps
        self._clock, self._region = clock, region

    def __repr__(self) -> str:
        return f"<ReplicationFactors of {self._mesh!r}>"

    def list_buckets(self, identity: Identity) -> list[dict[str, Any]]:
        """Return every bucket without an origin that has a factor of its own. Raises BatchError."""
        _require_root(identity)
        every = [bucket for bucket in self._buckets.list_all() if bucket.origin is None and not bucket.view]
        return [
            self._describe(each)
            for each in every
            if each.copies or self._mesh.current_map().copies_of_bucket(each.name)
        ]

    def show(self, identity: Identity, name: str) -> dict[str, Any]:
        """Return a bucket without an origin. Raises BatchError."""
        _require_root(identity)
        return self._describe(self._existing(name))

    def is_backed(self, name: str) -> bool:
        """Whether a bucket has an origin."""
        found = self._buckets.get(name)
        return found is not None and found.origin is not None

    async def create(self, identity: Identity, name: str, document: dict[str, Any]) -> dict[str, Any]:
        """Create a bucket without an origin; succeeds if it exists with the same factor. Raises
        BatchError."""
        _require_root(identity)
        try:
            check_bucket_name(name)
        except BucketNameError as error:
            raise BatchError("BadRequest", f"{name[:80]!r} is not a valid bucket name: {error}") from None
        wanted = _number(document) if document else 0
        nodes = len(self._mesh.current_map().target_shares)
        if wanted > nodes:
            raise BatchError(
                "BadRequest",
                f"{wanted} copies need {wanted} nodes that store, and this mesh has {nodes}",
                help=f"ask for 1 to {min(nodes, MAX_COPIES)}, or add nodes first",
            )
        bucket = Bucket(name, identity.user_id, self._clock.now_ms(), self._region, copies=wanted)
        try:
            return self._describe(await self._buckets.create(bucket))
        except BucketExistsError as error:
            found = error.bucket
            if found is not None and found.origin is None and not found.view and found.copies == wanted:
                return self._describe(found)
            raise BatchError(
                "BucketExists",
                f"the bucket {name[:80]!r} exists already, with another owner or other settings",
                help=f"choose another name, or run: mesh bucket change {name} --copies N",
            ) from None

    async def change(self, identity: Identity, name: str, document: dict[str, Any]) -> dict[str, Any]:
        """Change the factor: the nodes then make or remove copies. Raises BatchError, ControlError."""
        _require_root(identity)
        bucket, wanted = self._existing(name), _number(document)
        gone = {
            count.bucket
            for count in self._mesh.current_map().counts
            if self._buckets.created_at_ms(count.bucket) != count.born
        }

        def recount(present: ClusterMap | None) -> ClusterMap:
            assert present is not None
            cluster = turn.forget_bucket_copies(present, gone)
            count = cluster.copies_of_bucket(name)
            copies = count.copies if count is not None else bucket.copies or cluster.copies
            return turn.set_bucket_copies(cluster, name, bucket.created_ms, copies, wanted)

        if self._mesh.standalone:
            raise BatchError(
                "BadRequest",
                "this node is the only one of its mesh, so there is one copy of everything",
                help="start nodes with --control etcd://… to form a mesh of several",
            )
        try:
            cluster = await self._maps.update_map(recount)
        except turn.TransitionError as error:
            raise BatchError("BadRequest", str(error)) from None
        await self._mesh.wait_for_newer_map(cluster.version - 1, 5.0)
        return self._describe(bucket)

    def _existing(self, name: str) -> Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {name[:80]!r}")
        if bucket.origin is not None or bucket.view:
            what = "has an origin, whose data is cached once" if bucket.origin else "is a view"
            raise BatchError("BadRequest", f"{name} {what}; its number of copies cannot be set")
        return bucket

    def _describe(self, bucket: Bucket) -> dict[str, Any]:
        relied, _ = read_and_write_copies(self._mesh.replica_count(bucket.name))
        count = self._mesh.current_map().copies_of_bucket(bucket.name)
        moving = count is not None and count.born == bucket.created_ms and count.is_rebalancing
        return {
            "name": bucket.name,
            "created_ms": bucket.created_ms,
            "origin": None,
            "copies": relied,
            "wanted": count.wanted if moving and count is not None else relied,
        }


def _number(document: dict[str, Any]) -> int:
    wanted = document.get("copies")
    if set(document) != {"copies"} or not isinstance(wanted, int) or not 1 <= wanted <= MAX_COPIES:
        raise BatchError("BadRequest", f'expected {{"copies": N}} with N of 1 to {MAX_COPIES}')
    return wanted


def _require_root(identity: Identity) -> None:
    if not identity.root:
        raise BatchError(
            "AccessDenied", "only root may see or set the number of copies: ask an administrator of the mesh"
        )
