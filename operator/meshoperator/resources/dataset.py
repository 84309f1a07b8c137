"""MeshDataset: training data, its source and its placement."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.cluster_disks import DiskClass
from meshoperator.resources.spec_types import (
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
    """Location of the data."""

    rules: ClassVar = (
        Rule(
            "!has(self.secretRef) || !self.uri.startsWith('file:')",
            "a folder (file://) needs no secretRef",
        ),
    )

    uri: Annotated[
        str,
        Meta(
            min_length=6,
            max_length=1024,
            pattern=r"^(s3|gs|az|https?|file|mesh)://[^\s]+$",
            description="`s3://bucket/prefix`, gs, az, https, file; `mesh://bucket/prefix`: in the mesh.",
            extra_json_schema=immutable("source.uri"),
        ),
    ]
    secret_ref: (
        Annotated[Reference, Meta(description="Secret with the source's keys, named as its client expects.")]
        | None
    ) = None
    revision: (
        Annotated[Text, Meta(description="Revision of the data; a change reads the source again.")] | None
    ) = None


class Placement(Part, frozen=True, kw_only=True):
    """Wanted copies."""

    rules: ClassVar = (
        Rule("!(self.full && has(self.copies))", "set either copies or full: true"),
        Rule(
            "self.nearPods != 'Off' || !has(self.maxCopiesNearPods)",
            "maxCopiesNearPods has no effect with nearPods: Off",
        ),
    )

    copies: Annotated[int, Meta(ge=1, le=8, description="Number of copies. Default: 1.")] | None = None
    full: Annotated[bool, Meta(description="One copy on every matching node.")] = False
    spread: Annotated[
        Literal["Zone", "Rack", "Host"],
        Meta(description="Spread copies over different ones of these, as far as possible."),
    ] = "Rack"
    near_pods: Annotated[
        Literal["Off", "Preferred", "Required"],
        Meta(
            description="Whether pods and copies attract each other. Required: pods that read the dataset "
            "run only where a copy is."
        ),
    ] = "Preferred"
    max_copies_near_pods: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=64,
                description="Limit of additional copies for GPUs that are far from the first ones.",
            ),
        ]
        | None
    ) = None
    node_selector: Annotated[Labels, Meta(description="Only on nodes with these labels.")] = {}
    tier_preference: Annotated[
        tuple[DiskClass, ...],
        Meta(max_length=4, description="Preferred disk classes, best first.", extra_json_schema=SET),
    ] = ("nvme", "ssd", "hdd")
    pin: Annotated[bool, Meta(description="Never evicted.")] = False
    priority: Annotated[int, Meta(ge=-1000, le=1000, description="Higher values get scarce space first.")] = 0


class Refresh(Part, frozen=True, kw_only=True):
    """When the source is checked again."""

    policy: Annotated[
        Literal["Never", "Interval"], Meta(description="Never: data that was read is not checked again.")
    ] = "Interval"
    interval_seconds: Annotated[Seconds, Meta(description="Seconds between checks.")] = 300


class Retention(Part, frozen=True, kw_only=True):
    """When cached copies are evicted."""

    idle_seconds: (
        Annotated[
            Seconds, Meta(description="Evict after so many seconds without a read or load on any node.")
        ]
        | None
    ) = None
    on_delete: Annotated[
        Literal["Evict", "Keep"],
        Meta(description="What happens to cached copies when the MeshDataset is deleted."),
    ] = "Evict"


class MeshDatasetSpec(Part, frozen=True, kw_only=True):
    """Data that training reads."""

    rules: ClassVar = (
        Rule(
            "!self.placement.pin || !has(self.retention.idleSeconds)",
            "a pinned dataset cannot be evicted when idle: remove pin or retention.idleSeconds",
        ),
        Rule("has(self.bucket) == has(oldSelf.bucket)", "bucket cannot be changed; create a new resource"),
    )

    cluster_ref: Annotated[
        Name, Meta(description="The MeshCluster that holds it.", extra_json_schema=immutable("clusterRef"))
    ]
    bucket: (
        Annotated[
            BucketName,
            Meta(
                description="Bucket in the mesh. Default: `metadata.name`.",
                extra_json_schema=immutable("bucket"),
            ),
        ]
        | None
    ) = None
    source: Annotated[Source, Meta(description="Source of the data.")]
    placement: Annotated[Placement, Meta(description="Wanted copies and their places.")] = Placement()
    quota: Annotated[Size, Meta(description="Limit on its copies, per node.")] | None = None
    refresh: Annotated[Refresh, Meta(description="Freshness.")] = Refresh()
    retention: Annotated[Retention, Meta(description="Ends.")] = Retention()


class Placed(Part, frozen=True, kw_only=True):
    """One copy."""

    node: Annotated[Text, Meta(description="MeshNode that has the copy, or will have it.")]
    bytes: Annotated[Count, Meta(description="Bytes present.")] = 0
    reason: Annotated[Text, Meta(description="Why it is placed there.")]


class MeshDatasetStatus(Part, frozen=True, kw_only=True):
    """Observed state of a dataset."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Placing", "Loading", "Ready", "Degraded", "Failed", "Deleting"],
            Meta(description="Summary in one word."),
        ]
        | None
    ) = None
    conditions: Conditions = ()
    bucket: Annotated[Text, Meta(description="Bucket in the mesh.")] | None = None
    source_bytes: Annotated[Count, Meta(description="Size of the source.")] | None = None
    cached_bytes: Annotated[Count, Meta(description="Bytes of one copy that are present.")] | None = None
    objects: Annotated[Count, Meta(description="Objects of the source.")] | None = None
    hit_percent: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=100,
                description="Percentage of pieces read or loaded in the last ten minutes that did not need "
                "the source. Absent: none were read.",
            ),
        ]
        | None
    ) = None
    placement: Annotated[
        tuple[Placed, ...],
        Meta(max_length=4096, description="Its copies.", extra_json_schema=keyed("node")),
    ] = ()
    node_label: (
        Annotated[Text, Meta(description="Label of the Kubernetes nodes that have a copy, for affinity.")]
        | None
    ) = None


MeshDataset = Kind(
    "MeshDataset",
    "md",
    "Data that training reads: its source and its placement.",
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
