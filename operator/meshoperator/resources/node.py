"""MeshNode: one daemon. The operator makes it; people change `desiredState`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.cluster import DiskClass
from meshoperator.resources.common import (
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
    """What is wanted of a daemon."""

    rules: ClassVar = (
        Rule(
            "oldSelf.desiredState != 'Decommissioned' || self.desiredState == 'Decommissioned'",
            "a decommissioned node does not come back; the pool gets a new one",
        ),
    )

    cluster_ref: Annotated[
        Name, Meta(description="Its MeshCluster.", extra_json_schema=immutable("clusterRef"))
    ]
    pool: Annotated[Name, Meta(description="Its pool.", extra_json_schema=immutable("pool"))]
    node_id: Annotated[
        ResourceName,
        Meta(description="Its name in the cluster map: its pod's.", extra_json_schema=immutable("nodeId")),
    ]
    desired_state: Annotated[
        DesiredState,
        Meta(
            description="Active: takes part. Cordoned: gets no new copies of datasets; what is there stays. "
            "Drained: gives everything away, and stays. Decommissioned: gives everything away, then goes "
            "with its disks."
        ),
    ] = "Active"


class NodeTier(Part, frozen=True, kw_only=True):
    """A disk of the daemon."""

    name: Annotated[Name, Meta(description="Of the tier.")]
    class_: Annotated[DiskClass, Meta(description="What kind.")] | None = None
    capacity: Annotated[Count, Meta(description="Bytes of the disk.")] = 0
    used: Annotated[Count, Meta(description="Bytes of it that are taken, by whomever.")] = 0


class Drain(Part, frozen=True, kw_only=True):
    """How far it is with giving its data away."""

    bytes_total: Annotated[Count, Meta(description="To be moved when it began.")] = 0
    bytes_moved: Annotated[Count, Meta(description="Moved.")] = 0
    eta_seconds: Annotated[Count, Meta(description="Left, at the present rate.")] | None = None
    blocked_by: Annotated[Text, Meta(description="Why it does not go on.")] | None = None


class MeshNodeStatus(Part, frozen=True, kw_only=True):
    """How a daemon is."""

    observed_generation: ObservedGeneration = None
    node: Annotated[Text, Meta(description="The Kubernetes node it runs on.")] | None = None
    pod: Annotated[Text, Meta(description="Its pod.")] | None = None
    state: (
        Annotated[
            Literal["joining", "up", "draining", "returning", "away", "down"],
            Meta(description="In the cluster map."),
        ]
        | None
    ) = None
    zone: Annotated[Text, Meta(description="What fails with it.")] | None = None
    rack: Annotated[Text, Meta(description="What is near it.")] | None = None
    tiers: Annotated[
        tuple[NodeTier, ...], Meta(max_length=8, description="Its disks.", extra_json_schema=keyed("name"))
    ] = ()
    objects: Annotated[Count, Meta(description="Objects it stores.")] | None = None
    bytes: Annotated[Count, Meta(description="Bytes it stores.")] | None = None
    cached_bytes: Annotated[Count, Meta(description="Bytes of copies of what is elsewhere.")] | None = None
    drain: Annotated[Drain, Meta(description="While it gives its data away.")] | None = None
    conditions: Conditions = ()


MeshNode = Kind(
    "MeshNode",
    "mn",
    "One daemon; the operator makes it, people set its desiredState.",
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
