"""Assets as the node keeps them: content by its sha256, in the reserved bucket.

Law: written once, never changed; a plan that names one this node does not have is refused, not approximated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import BatchError
from meshd.errors import missing_asset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.assembly.rendering import AssetPlace
    from meshd.store.interface import ObjectStore

ASSETS = "assets/"


def asset_key(digest: str) -> str:
    """Where the reserved bucket keeps it."""
    return f"{ASSETS}{digest}"


def no_such_asset(digest: str) -> BatchError:
    """What is answered when a plan or view names it."""
    return BatchError(
        "NoSuchAsset",
        missing_asset(digest),
        help="make the plan or view anew with the object's address (s3://BUCKET/KEY) in its place",
        detail={"asset": f"sha256:{digest}"},
    )


def asset_places(store: ObjectStore, digests: Sequence[str]) -> tuple[AssetPlace, ...]:
    """The files that hold each asset now. Raises BatchError NoSuchAsset."""
    return tuple(_place(store, digest) for digest in digests)


def _place(store: ObjectStore, digest: str) -> AssetPlace:
    record = store.get(RESERVED_BUCKET, asset_key(digest))
    if record is None:
        raise no_such_asset(digest)
    return digest, tuple((place.path, place.offset, place.length) for place in store.locate(record))
