"""MeshView: a view of a bucket as a resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.common import (
    Column,
    Conditions,
    FreeObject,
    Kind,
    Name,
    ObservedGeneration,
    Part,
    Reference,
    Rule,
    Text,
    immutable,
)
from meshoperator.resources.dataset import BucketName


class Op(Part, frozen=True, kw_only=True):
    """One op of a chain, as in a plan."""

    op: Annotated[
        str, Meta(min_length=1, max_length=128, description="Its name, with `@build` if it matters.")
    ]
    args: Annotated[FreeObject, Meta(description="Its arguments.")] = {}


class Module(Part, frozen=True, kw_only=True):
    """A module of one's own ops, in a ConfigMap."""

    config_map_ref: Annotated[Reference, Meta(description="Holds the module's files.")]
    name: Annotated[Name, Meta(description="Under which it is pushed.")]


class MeshViewSpec(Part, frozen=True, kw_only=True):
    """A view: made once, read by any S3 client as `BUCKET--NAME`."""

    rules: ClassVar = (
        Rule("self.kind != 'transform' || size(self.ops) > 0", "a view of kind transform needs ops"),
        Rule(
            "self.kind == 'transform' || size(self.ops) == 0",
            "ops are of kind transform; the other kinds take them within `definition`",
        ),
    )

    cluster_ref: Annotated[
        Name, Meta(description="The MeshCluster.", extra_json_schema=immutable("clusterRef"))
    ]
    bucket: Annotated[
        BucketName, Meta(description="What it is made of.", extra_json_schema=immutable("bucket"))
    ]
    name: Annotated[Name, Meta(description="Of the view. Left out: `metadata.name`.")] | None = None
    kind: Annotated[
        Literal["transform", "shards", "batches", "zarr"],
        Meta(description="What it shows.", extra_json_schema=immutable("kind")),
    ]
    ops: Annotated[tuple[Op, ...], Meta(max_length=32, description="Of kind transform: the chain.")] = ()
    module: Annotated[Module, Meta(description="Pushed before the view is made.")] | None = None
    definition: Annotated[
        FreeObject,
        Meta(description="What else the view's document has (docs/views.md): `match`, `suffix`, `count` …"),
    ] = {}
    deletion_policy: Annotated[
        Literal["Delete", "Retain"], Meta(description="What becomes of the view with the MeshView.")
    ] = "Delete"

    def document(self) -> dict[str, Any]:
        """What `POST /-/views` takes as `view`."""
        ops = [{"op": each.op} | ({"args": each.args} if each.args else {}) for each in self.ops]
        return {**self.definition, "kind": self.kind} | ({"ops": ops} if ops else {})


class Build(Part, frozen=True, kw_only=True):
    """Which build of an op the view is made with."""

    op: Annotated[Text, Meta(description="The op.")]
    build: Annotated[Text, Meta(description="Its build.")]


class MeshViewStatus(Part, frozen=True, kw_only=True):
    """Whether it can be read."""

    observed_generation: ObservedGeneration = None
    ready: Annotated[bool, Meta(description="It can be read.")] = False
    address: Annotated[Text, Meta(description="Its bucket: `BUCKET--NAME`.")] | None = None
    hit_percent: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Of the results asked for since the daemons began: those that were kept.",
            ),
        ]
        | None
    ) = None
    op_builds: Annotated[tuple[Build, ...], Meta(max_length=64, description="What it is made with.")] = ()
    conditions: Conditions = ()


MeshView = Kind(
    "MeshView",
    "mv",
    "A view of a bucket: objects made when they are read.",
    MeshViewSpec,
    MeshViewStatus,
    (
        Column("Bucket", ".spec.bucket"),
        Column("Kind", ".spec.kind"),
        Column("Ready", ".status.ready", "boolean"),
        Column("Address", ".status.address"),
        Column("Hits", ".status.hitPercent", "integer", wide=True),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
