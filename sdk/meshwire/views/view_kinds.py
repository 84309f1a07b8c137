"""Names of views (virtual buckets computed from another bucket) and the table of view kinds.

Law: a view's canonical document states everything its bytes depend on besides the source. A kind is a
document class in a module of its own and an entry of `KINDS`. Faults raise PlanError with the field's path.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from meshwire import names
from meshwire.strict_json import PlanError, checked_choice, read_json, required_field
from meshwire.views.batch_view import BatchesView, parse_batches
from meshwire.views.shard_view import ShardsView, parse_shards
from meshwire.views.transform_view import TransformView, parse_transform
from meshwire.views.zarr_view import ZarrView, parse_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SEPARATOR = "--"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}[a-z0-9]|[a-z0-9]")

View = TransformView | ShardsView | BatchesView | ZarrView
"""Every kind has `kind`, `source` (the bucket) and `to_json()`, its canonical document."""

KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], str], View]]] = {
    "transform": parse_transform,
    "shards": parse_shards,
    "batches": parse_batches,
    "zarr": parse_zarr,
}


def is_sample_view(view: View) -> TypeGuard[BatchesView | ZarrView]:
    """Whether a view is computed from samples rather than objects."""
    return isinstance(view, BatchesView | ZarrView)


def source_buckets(view: View) -> tuple[str, ...]:
    """Return every bucket a view is computed from, its own source first."""
    return (view.source, *(view.also if is_sample_view(view) else ()))


def view_name(bucket: str, name: str) -> str:
    """Return the bucket name of a view. Raises PlanError."""
    if _NAME.fullmatch(name) is None or SEPARATOR in name:
        raise PlanError("name", "a view name has at most 42 letters a-z, digits and single dashes")
    full = f"{bucket}{SEPARATOR}{name}"
    try:
        names.check_bucket_name(full)
    except names.BucketNameError as error:
        raise PlanError("name", f"{full!r} is not a valid bucket name: {error}") from None
    return full


def parse_view(source: bytes | str | Mapping[str, Any], bucket: str) -> View:
    """Parse a view document of `bucket`. Raises PlanError with the path of the bad field."""
    value = read_json(source) if isinstance(source, (bytes, str)) else dict(source)
    if not isinstance(value, dict):
        raise PlanError("", "expected an object")
    kind = checked_choice(required_field(value, "kind", ""), "kind", tuple(KINDS))
    return KINDS[kind](value, bucket)
