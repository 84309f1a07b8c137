"""MeshDataset: training data, its source and its placement."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.cluster import DiskClass
from meshoperator.resources.common import (
    SET,
    Column,
    Conditions,
    Count,
    Kind,
    Labels,
    Name,
    ObservedGeneration,
    Part,
    Reference,
    Rule,
    Seconds,
    Size,
    Text,
    immutable,
    keyed,
)

BucketName = Annotated[str, Meta(min_length=3, max_length=63, pattern=r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$")]


class Source(Part, frozen=True, kw_only=True):
    """Where the data is."""

    rules: ClassVar = (
        Rule(
            "!has(self.secretRef) || !self.uri.startsWith('file:')",
            "a folder (file://) takes no secretRef",
        ),
    )

    uri: Annotated[
        str,
        Meta(
            min_length=6,
            max_length=1024,
            pattern=r"^(s3|gs|az|https?|file|mesh)://[^\s]+$",
            description="`s3://bucket/prefix`, gs, az, https, file; `mesh://bucket/prefix`: here already.",
            extra_json_schema=immutable("source.uri"),
        ),
    ]
    secret_ref: (
        Annotated[
            Reference, Meta(description="Secret with the keys of the source, in the terms of its client.")
        ]
        | None
    ) = None
    revision: Annotated[Text, Meta(description="What of it: changing this reads the source anew.")] | None = (
        None
    )


class Placement(Part, frozen=True, kw_only=True):
    """Where copies should be."""

    rules: ClassVar = (
        Rule("!(self.full && has(self.copies))", "say either copies or full: true"),
        Rule(
            "self.nearPods != 'Off' || !has(self.maxCopiesNearPods)",
            "maxCopiesNearPods means nothing with nearPods: Off",
        ),
    )

    copies: Annotated[int, Meta(ge=1, le=8, description="How many. Left out: 1.")] | None = None
    full: Annotated[bool, Meta(description="One on every node that matches.")] = False
    spread: Annotated[
        Literal["Zone", "Rack", "Host"],
        Meta(description="Into different ones of these, as far as there are."),
    ] = "Rack"
    near_pods: Annotated[
        Literal["Off", "Preferred", "Required"],
        Meta(
            description="Whether pods that read it are drawn to its copies, and copies to them. Required: "
            "they only run where a copy is."
        ),
    ] = "Preferred"
    max_copies_near_pods: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=64,
                description="Further copies at most, where many GPUs are far from the first ones.",
            ),
        ]
        | None
    ) = None
    node_selector: Annotated[Labels, Meta(description="Only on nodes with these labels.")] = {}
    tier_preference: Annotated[
        tuple[DiskClass, ...], Meta(max_length=4, description="The best first.", extra_json_schema=SET)
    ] = ("nvme", "ssd", "hdd")
    pin: Annotated[bool, Meta(description="Never evicted.")] = False
    priority: Annotated[
        int, Meta(ge=-1000, le=1000, description="Who gets the room where it is scarce: the higher.")
    ] = 0


class Refresh(Part, frozen=True, kw_only=True):
    """When the source is looked at again."""

    policy: Annotated[
        Literal["Never", "Interval"], Meta(description="Never: what was read stays as it is.")
    ] = "Interval"
    interval_seconds: Annotated[Seconds, Meta(description="Between two looks.")] = 300


class Retention(Part, frozen=True, kw_only=True):
    """When cached copies go by themselves."""

    idle_seconds: (
        Annotated[Seconds, Meta(description="After so long without a read or load, anywhere.")] | None
    ) = None
    on_delete: Annotated[
        Literal["Evict", "Keep"], Meta(description="What becomes of the cached copies with the MeshDataset.")
    ] = "Evict"


class MeshDatasetSpec(Part, frozen=True, kw_only=True):
    """Data that training reads."""

    rules: ClassVar = (
        Rule(
            "!self.placement.pin || !has(self.retention.idleSeconds)",
            "a pinned dataset cannot go when it is idle: drop pin or retention.idleSeconds",
        ),
        Rule("has(self.bucket) == has(oldSelf.bucket)", "bucket cannot be changed; make a new resource"),
    )

    cluster_ref: Annotated[
        Name, Meta(description="The MeshCluster that holds it.", extra_json_schema=immutable("clusterRef"))
    ]
    bucket: (
        Annotated[
            BucketName,
            Meta(
                description="Its bucket in the mesh. Left out: `metadata.name`.",
                extra_json_schema=immutable("bucket"),
            ),
        ]
        | None
    ) = None
    source: Annotated[Source, Meta(description="Where it comes from.")]
    placement: Annotated[Placement, Meta(description="Where it should be.")] = Placement()
    quota: Annotated[Size, Meta(description="The most its copies may take of a node.")] | None = None
    refresh: Annotated[Refresh, Meta(description="Freshness.")] = Refresh()
    retention: Annotated[Retention, Meta(description="Ends.")] = Retention()


class Placed(Part, frozen=True, kw_only=True):
    """A copy."""

    node: Annotated[Text, Meta(description="The MeshNode that has it, or will.")]
    bytes: Annotated[Count, Meta(description="There by now.")] = 0
    reason: Annotated[Text, Meta(description="Why there.")]


class MeshDatasetStatus(Part, frozen=True, kw_only=True):
    """How far a dataset is, and where."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Placing", "Loading", "Ready", "Degraded", "Failed", "Deleting"],
            Meta(description="In one word."),
        ]
        | None
    ) = None
    conditions: Conditions = ()
    bucket: Annotated[Text, Meta(description="Its bucket in the mesh.")] | None = None
    source_bytes: Annotated[Count, Meta(description="Size of the source.")] | None = None
    cached_bytes: Annotated[Count, Meta(description="Of one copy, there by now.")] | None = None
    objects: Annotated[Count, Meta(description="Objects of the source.")] | None = None
    hit_percent: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Of the pieces read in the last ten minutes (and loaded), those the source was "
                "not asked for. Left out: nothing was.",
            ),
        ]
        | None
    ) = None
    placement: Annotated[
        tuple[Placed, ...],
        Meta(max_length=4096, description="Where its copies are.", extra_json_schema=keyed("node")),
    ] = ()
    node_label: (
        Annotated[
            Text, Meta(description="Label of the Kubernetes nodes that have a copy; what affinity names.")
        ]
        | None
    ) = None


MeshDataset = Kind(
    "MeshDataset",
    "md",
    "Data that training reads: where it comes from, where it should be.",
    MeshDatasetSpec,
    MeshDatasetStatus,
    (
        Column("Phase", ".status.phase"),
        Column("Source", ".spec.source.uri"),
        Column("Bytes", ".status.sourceBytes", "integer"),
        Column("Cached", ".status.cachedBytes", "integer"),
        Column("Hits", ".status.hitPercent", "integer"),
        Column("Cluster", ".spec.clusterRef", wide=True),
        Column("Warm", ".status.conditions[?(@.type=='Warm')].status", wide=True),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
    (
        Rule(
            "size(self.metadata.name) <= 50",
            "a MeshDataset's name has at most 50 characters: it becomes part of a label",
        ),
    ),
)
