"""The order of a plan's epoch: its shuffle, its mix, its length buckets, one over the other.

Law: a pure function of (plan, snapshot, epoch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.documents import PlanError, suggestion
from meshwire.lengthbuckets import BucketOrder
from meshwire.mixorders import MixOrder, mix_bounds
from meshwire.permutations import order
from meshwire.snapshotdocuments import BytesColumn

if TYPE_CHECKING:
    from meshwire.permutations import Indices, Order
    from meshwire.plans import PlanSpec
    from meshwire.snapshotdocuments import Snapshot


def epoch_order(spec: PlanSpec, shard_starts: Indices, epoch: int, bounds: Indices | None = None) -> Order:
    """The order of an epoch but for its buckets. `bounds`: of a mix whose rows are not samples, where its
    parts begin."""
    if spec.mix is None:
        return order(spec.shuffle, shard_starts, spec.seed, epoch)
    bounds = mix_bounds(spec.mix) if bounds is None else bounds
    return MixOrder(spec.mix, bounds, shard_starts, spec.shuffle, spec.seed, epoch)


def snapshot_order(spec: PlanSpec, snapshot: Snapshot, epoch: int) -> Order:
    """The order of an epoch whose rows are samples. Raises PlanError as `bucket_lengths` does."""
    found = epoch_order(spec, snapshot.shard_starts, epoch)
    if spec.buckets is None:
        return found
    return BucketOrder(found, bucket_lengths(spec, snapshot), spec.buckets, spec.seed, epoch)


def bucket_lengths(spec: PlanSpec, snapshot: Snapshot) -> Indices:
    """The stored bytes of the field that buckets go by. Raises PlanError when it has none, or rows are
    packed."""
    assert spec.buckets is not None
    if spec.pack is not None:
        raise PlanError("buckets", "packed rows are of one length: leave out `buckets`, or `pack`")
    name = spec.buckets.field
    column = snapshot.fields.get(name)
    if not isinstance(column, BytesColumn):
        if column is not None:
            raise PlanError("buckets.field", f"{name!r} is a class label: its rows are of one length")
        hint = suggestion(name, snapshot.fields)
        raise PlanError("buckets.field", f"the snapshot has no bytes field {name!r}{hint}")
    return column.length
