"""Views of a bucket with an origin beside the same views of one whose objects live here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.admin import views
from tests.support.origin_fixtures import sdk

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

SMALL = [{"op": "decode", "args": {}}, {"op": "resize", "args": {"size": 8}}, {"op": "to_npy", "args": {}}]
ROWS = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "center_crop", "field": "image", "args": {"size": 12}},
]
FIELDS = {"image": {"ext": ["jpg"]}}
VIEWS: dict[str, dict[str, Any]] = {
    "small": views.transform_view(SMALL, match=[".jpg"], suffix=".npy", prefix="train/"),
    "tars": views.shards_view(count=7, prefix="train/", match=[".jpg"]),
    "arrays": views.zarr_view(FIELDS, ROWS, prefix="train/", chunk=8),
    "now": views.zarr_view(FIELDS, ROWS, prefix="train/", chunk=8, follow=True),
}


def make(daemon: Daemon, *buckets: str) -> None:
    """All of them, of each bucket."""
    with sdk(daemon) as client:
        for bucket in buckets:
            for name, view in VIEWS.items():
                views.create_view(client.transport, bucket, name, view)


def contents(client: Any, bucket: str) -> dict[str, bytes]:
    """What is listed of a view, with its bytes, which are as many as its listing says; without what names the
    source."""
    found: dict[str, bytes] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", ()):
            body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            assert len(body) == entry["Size"]
            if not entry["Key"].endswith("zarr.json"):
                found[entry["Key"]] = bytes(body)
    return found
