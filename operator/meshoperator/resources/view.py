"""MeshView: a view of a bucket as a resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.dataset import BucketName
from meshoperator.resources.spec_types import (
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


class Op(Part, frozen=True, kw_only=True):
    """One op of a chain, as in a plan."""

    op: Annotated[str, Meta(min_length=1, max_length=128, description="Name, with `@build` to pin a build.")]
    args: Annotated[FreeObject, Meta(description="Arguments.")] = {}


class Module(Part, frozen=True, kw_only=True):
    """A module of custom ops, in a ConfigMap."""

    config_map_ref: Annotated[Reference, Meta(description="ConfigMap with the module's files.")]
    name: Annotated[Name, Meta(description="Name of the module in the mesh.")]


class MeshViewSpec(Part, frozen=True, kw_only=True):
    """A view, readable by any S3 client as `BUCKET--NAME`."""

    rules: ClassVar = (
        Rule("self.kind != 'transform' || size(self.ops) > 0", "a view of kind transform needs ops"),
        Rule(
            "self.kind == 'transform' || size(self.ops) == 0",
            "ops belong to kind transform; other kinds have them in `definition`",
        ),
    )

    cluster_ref: Annotated[
        Name, Meta(description="The MeshCluster.", extra_json_schema=immutable("clusterRef"))
    ]
    bucket: Annotated[
        BucketName, Meta(description="Bucket that it is made from.", extra_json_schema=immutable("bucket"))
    ]
    name: Annotated[Name, Meta(description="Name of the view. Default: `metadata.name`.")] | None = None
    kind: Annotated[
        Literal["transform", "shards", "batches", "zarr"],
        Meta(description="Kind of view.", extra_json_schema=immutable("kind")),
    ]
    ops: Annotated[tuple[Op, ...], Meta(max_length=32, description="Chain of ops, for kind transform.")] = ()
    module: Annotated[Module, Meta(description="Module to push before the view is created.")] | None = None
    definition: Annotated[
        FreeObject,
        Meta(
            description="Further fields of the view's document (docs/views.md): `match`, `suffix`, `count` …"
        ),
    ] = {}
    deletion_policy: Annotated[
        Literal["Delete", "Retain"],
        Meta(description="What happens to the view when the MeshView is deleted."),
    ] = "Delete"

    def document(self) -> dict[str, Any]:
        """Return the document that `POST /-/views` expects as `view`."""
        ops = [{"op": each.op} | ({"args": each.args} if each.args else {}) for each in self.ops]
        return {**self.definition, "kind": self.kind} | ({"ops": ops} if ops else {})


class Build(Part, frozen=True, kw_only=True):
    """The build of an op that the view uses."""

    op: Annotated[Text, Meta(description="Op.")]
    build: Annotated[Text, Meta(description="Build of the op.")]


class MeshViewStatus(Part, frozen=True, kw_only=True):
    """Observed state of a view."""

    observed_generation: ObservedGeneration = None
    ready: Annotated[bool, Meta(description="Whether it is readable.")] = False
    address: Annotated[Text, Meta(description="Bucket of the view: `BUCKET--NAME`.")] | None = None
    hit_percent: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Percentage of results served from cache since the daemons started.",
            ),
        ]
        | None
    ) = None
    op_builds: Annotated[
        tuple[Build, ...], Meta(max_length=64, description="Builds of the ops it uses.")
    ] = ()
    conditions: Conditions = ()


MeshView = Kind(
    "MeshView",
    "mv",
    "A view of a bucket: objects computed when they are read.",
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
