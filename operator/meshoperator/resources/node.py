"""MeshNode: one daemon. The operator creates it; users set `desiredState`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.cluster_disks import DiskClass
from meshoperator.resources.spec_types import (
    Column,
    Conditions,
    Count,
    Kind,
    Name,
    ObservedGeneration,
    Part,
    ResourceName,
    Rule,
    Text,
    immutable,
    keyed,
)

DesiredState = Literal["Active", "Cordoned", "Drained", "Decommissioned"]


class MeshNodeSpec(Part, frozen=True, kw_only=True):
    """Wanted state of a daemon."""

    rules: ClassVar = (
        Rule(
            "oldSelf.desiredState != 'Decommissioned' || self.desiredState == 'Decommissioned'",
            "a decommissioned node cannot be reactivated; the pool gets a new one",
        ),
    )

    cluster_ref: Annotated[
        Name, Meta(description="MeshCluster of the daemon.", extra_json_schema=immutable("clusterRef"))
    ]
    pool: Annotated[Name, Meta(description="Pool of the daemon.", extra_json_schema=immutable("pool"))]
    node_id: Annotated[
        ResourceName,
        Meta(
            description="Name in the cluster map; equals its pod's name.",
            extra_json_schema=immutable("nodeId"),
        ),
    ]
    desired_state: Annotated[
        DesiredState,
        Meta(
            description="Active: takes part. Cordoned: gets no new copies of datasets; existing ones stay. "
            "Drained: moves all its data away, and stays. Decommissioned: moves all its data away, then is "
            "deleted with its disks."
        ),
    ] = "Active"


class NodeTier(Part, frozen=True, kw_only=True):
    """A disk of the daemon."""

    name: Annotated[Name, Meta(description="Name of the tier.")]
    class_: Annotated[DiskClass, Meta(description="Kind of disk.")] | None = None
    capacity: Annotated[Count, Meta(description="Bytes of the disk.")] = 0
    used: Annotated[Count, Meta(description="Bytes in use, by any program.")] = 0


class Drain(Part, frozen=True, kw_only=True):
    """Progress of a drain."""

    bytes_total: Annotated[Count, Meta(description="Bytes to move when the drain started.")] = 0
    bytes_moved: Annotated[Count, Meta(description="Moved.")] = 0
    eta_seconds: Annotated[Count, Meta(description="Seconds left at the present rate.")] | None = None
    blocked_by: Annotated[Text, Meta(description="Why it does not proceed.")] | None = None


class MeshNodeStatus(Part, frozen=True, kw_only=True):
    """Observed state of a daemon."""

    observed_generation: ObservedGeneration = None
    node: Annotated[Text, Meta(description="Kubernetes node that it runs on.")] | None = None
    pod: Annotated[Text, Meta(description="Pod of the daemon.")] | None = None
    state: (
        Annotated[
            Literal["joining", "up", "draining", "returning", "away", "down"],
            Meta(description="State in the cluster map."),
        ]
        | None
    ) = None
    zone: Annotated[Text, Meta(description="Failure domain.")] | None = None
    rack: Annotated[Text, Meta(description="Rack.")] | None = None
    tiers: Annotated[
        tuple[NodeTier, ...], Meta(max_length=8, description="Disks.", extra_json_schema=keyed("name"))
    ] = ()
    objects: Annotated[Count, Meta(description="Objects stored.")] | None = None
    bytes: Annotated[Count, Meta(description="Bytes stored.")] | None = None
    cached_bytes: Annotated[Count, Meta(description="Bytes of cached remote data.")] | None = None
    drain: Annotated[Drain, Meta(description="Progress, while it is drained.")] | None = None
    conditions: Conditions = ()


MeshNode = Kind(
    "MeshNode",
    "mn",
    "One daemon; the operator creates it, users set its desiredState.",
    MeshNodeSpec,
    MeshNodeStatus,
    (
        Column("Cluster", ".spec.clusterRef"),
        Column("Wanted", ".spec.desiredState"),
        Column("State", ".status.state"),
        Column("Node", ".status.node"),
        Column("Bytes", ".status.bytes", "integer"),
        Column("Cached", ".status.cachedBytes", "integer"),
        Column("Zone", ".status.zone", wide=True),
        Column("Rack", ".status.rack", wide=True),
        Column("Moved", ".status.drain.bytesMoved", "integer", wide=True),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
