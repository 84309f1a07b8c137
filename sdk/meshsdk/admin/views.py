"""Views: buckets whose objects are computed from another bucket's on demand.

Law: the node validates the view document, and its errors name the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from meshsdk.client.request import Request, json_request
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshsdk.client.transport import Transport


@dataclass(frozen=True, slots=True)
class ViewInfo:
    """A view. `name` is the bucket to read, `bucket` the source, `view` the canonical document."""

    name: str
    bucket: str
    created_ms: int
    owner: str
    view: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.view.get("kind", ""))


def transform_view(
    ops: Sequence[Mapping[str, Any]],
    *,
    match: Sequence[str] = (),
    suffix: str = "",
    prefix: str = "",
    content_type: str = "application/octet-stream",
) -> dict[str, Any]:
    """Return the document of a view that passes every object through `ops` ({"op", "args"} each)."""
    return {
        "kind": "transform",
        "ops": [dict(op) for op in ops],
        "match": list(match),
        "suffix": suffix,
        "prefix": prefix,
        "content_type": content_type,
    }


def shards_view(
    *,
    count: int | None = None,
    size: int | None = None,
    match: Sequence[str] = (),
    prefix: str = "",
    shuffle: int | None = None,
    split: Mapping[str, float] | None = None,
    format: Literal["tar", "tfrecord"] = "tar",
    samples: Literal["objects", "archives"] = "objects",
    where: str = "",
    sort: str = "",
    group: str = "",
    split_by: str = "",
    features: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the document of a view that presents samples as shards of `count` (default 1,000) or of about
    `size` bytes, as tars or TFRecords.

    `shuffle` is a seed, `split` maps folders to shares, `features` extensions to `int64` or `float`;
    `samples` "archives" regroups the members of tars, zips and so on. `where`, `sort`, `group` and
    `split_by` are expressions over a sample.
    """
    document: dict[str, Any] = {"kind": "shards", "match": list(match), "prefix": prefix, "shuffle": shuffle}
    document |= {} if count is None else {"count": count}
    document |= {} if size is None else {"size": size}
    chosen = {"split": dict(split or {}), "features": dict(features or {})}
    chosen |= {"where": where, "sort": sort, "group": group, "split_by": split_by}
    document |= {name: value for name, value in chosen.items() if value}
    document |= {"format": format} if format != "tar" else {}
    return document | ({"samples": samples} if samples != "objects" else {})


def batches_view(plan: str, batch: int, *, world: int = 1, epochs: int = 1) -> dict[str, Any]:
    """Return the document of a view that presents a registered plan's epochs as `.safetensors` files:
    global batches of `batch` rows, divided among `world` ranks."""
    return {"kind": "batches", "plan": plan, "batch": batch, "world": world, "epochs": epochs}


def zarr_view(
    fields: Mapping[str, Any] | None = None,
    ops: Sequence[Mapping[str, Any]] = (),
    *,
    snapshot: str = "",
    follow: bool = False,
    prefix: str = "",
    samples: str = "auto",
    chunk: int = 64,
    shard: int = 0,
    seed: int = 0,
    on_bad: str = "raise",
) -> dict[str, Any]:
    """Return the document of a view that presents samples as a Zarr v3 group, one array per field. `fields`
    in the protocol's form ({"image": {"ext": ["jpg"]}}), `ops` {"op", "field", "args"} each; `chunk`
    samples per chunk, `shard` chunks per shard (0: none); `on_bad`: "raise", or "mask" for rows of zeros.
    The samples are those that exist now, or those of `snapshot` (a hash; leave out `fields`), or with
    `follow` those that exist when the view is read."""
    return {
        "kind": "zarr",
        "fields": dict(fields or {}),
        "snapshot": snapshot,
        "follow": follow,
        "ops": [dict(op) for op in ops],
        "prefix": prefix,
        "samples": samples,
        "chunk": chunk,
        "shard": shard,
        "seed": seed,
        "on_bad": on_bad,
    }


def create_view(transport: Transport, bucket: str, name: str, view: Mapping[str, Any]) -> ViewInfo:
    """Create the view `BUCKET--NAME`; repeating the call succeeds. Raises ServerError naming the bad
    field."""
    document = {"bucket": bucket, "name": name, "view": dict(view)}
    return _view(transport.json(json_request("POST", "/-/views", document)))


def list_views(transport: Transport, bucket: str = "") -> tuple[ViewInfo, ...]:
    """Return the caller's views, or those of one bucket."""
    query = f"bucket={quote(bucket, safe='')}" if bucket else ""
    return tuple(_view(item) for item in transport.json(Request("GET", "/-/views", query))["views"])


def show_view(transport: Transport, name: str) -> ViewInfo:
    """Return one view. Raises NotFoundError."""
    return _view(transport.json(Request("GET", f"/-/views/{quote(name, safe='')}")))


def _view(answer: Mapping[str, Any]) -> ViewInfo:
    try:
        return ViewInfo(
            str(answer["name"]),
            str(answer["bucket"]),
            int(answer["created_ms"]),
            str(answer["owner"]),
            dict(answer["view"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MeshError(
            f"cannot parse the server's view ({error!r}); upgrade the older of SDK and server"
        ) from error
