"""MeshCluster: a mesh of daemons, in pools."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from meshoperator.resources.cluster_access import Auth, NetworkPolicy, S3Endpoint
from meshoperator.resources.cluster_disks import Tier
from meshoperator.resources.spec_types import (
    SET,
    Column,
    Conditions,
    Count,
    FreeObject,
    Kind,
    LabelKey,
    Labels,
    Name,
    ObservedGeneration,
    Part,
    Reference,
    ResourceName,
    Rule,
    Seconds,
    ShortName,
    Text,
    immutable,
    keyed,
)
from meshwire.cluster.cluster_map import DEFAULT_SLOTS

Role = Literal["store", "cache", "compute"]


class Resources(Part, frozen=True, kw_only=True):
    """Requests and limits, as in any container."""

    requests: Annotated[Labels, Meta(description="cpu, memory.")] = {}
    limits: Annotated[Labels, Meta(description="cpu, memory.")] = {}


class Toleration(Part, frozen=True, kw_only=True):
    """As in any pod."""

    key: Annotated[Text, Meta(description="Key of the taint. Default: any.")] | None = None
    operator: Annotated[Literal["Exists", "Equal"], Meta(description="How `value` is compared.")] = "Equal"
    value: Annotated[Text, Meta(description="Value of the taint.")] | None = None
    effect: (
        Annotated[
            Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
            Meta(description="Effect of the taint. Default: any."),
        ]
        | None
    ) = None
    toleration_seconds: (
        Annotated[Seconds, Meta(description="For NoExecute: seconds before eviction.")] | None
    ) = None


class NodePool(Part, frozen=True, kw_only=True):
    """Identical daemons: `replicas` of them, or one on each matching node."""

    rules: ClassVar = (
        Rule(
            "has(self.replicas) != self.perMatchingNode",
            "set either replicas or perMatchingNode: true",
        ),
        Rule(
            "!self.perMatchingNode || size(self.nodeSelector) > 0",
            "perMatchingNode needs a nodeSelector: without one every node of the cluster would match",
        ),
        Rule(
            "!self.roles.exists(r, r == 'store' || r == 'cache') || size(self.tiers) > 0",
            "a pool with the role store or cache needs at least one tier",
        ),
        Rule(
            "!('store' in self.roles) || self.tiers.exists(t, t.class != 'mem')",
            "a pool with the role store needs a tier that is not mem",
        ),
        Rule(
            "self.tiers.all(t, !has(t.hostPath)"
            " || self.tiers.exists_one(u, has(u.hostPath) && u.hostPath == t.hostPath))",
            "two tiers of a pool cannot have the same hostPath: they would share one directory",
        ),
        Rule(
            "!self.tiers.exists(t, t.content == 'Index') || (self.tiers.exists_one(t, t.content == 'Index')"
            " && self.tiers.exists(t, t.content == 'Data' && t.class != 'mem'))",
            "a pool has one tier for the index at most, beside another disk tier, for data",
        ),
        Rule(
            "self.tiers.filter(t, t.content == 'Index').map(t, t.name)"
            " == oldSelf.tiers.filter(t, t.content == 'Index').map(t, t.name)",
            "the index of a pool's daemons cannot move to another tier; create a new pool",
        ),
    )

    name: Annotated[ShortName, Meta(description="Name; part of the names of its pods.")]
    replicas: (
        Annotated[int, Meta(ge=0, le=4096, description="Number of daemons. Kubernetes places them.")] | None
    ) = None
    per_matching_node: Annotated[
        bool, Meta(description="One daemon on each node that matches `nodeSelector`.")
    ] = False
    node_selector: Annotated[Labels, Meta(description="Labels a node must have.")] = {}
    tolerations: Annotated[
        tuple[Toleration, ...], Meta(max_length=16, description="Taints that it tolerates.")
    ] = ()
    roles: Annotated[
        tuple[Role, ...],
        Meta(
            min_length=1,
            max_length=3,
            description="store: owns data. cache: keeps evictable copies. compute: prepares batches.",
            extra_json_schema=SET,
        ),
    ] = ("store", "cache", "compute")
    tiers: Annotated[
        tuple[Tier, ...], Meta(max_length=8, description="Disks.", extra_json_schema=keyed("name"))
    ] = ()
    weight: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=1 << 20,
                description="Weight of one daemon when data is distributed. Default: GiB of its tiers.",
            ),
        ]
        | None
    ) = None
    resources: Annotated[Resources, Meta(description="CPU and memory.")] = Resources()
    priority_class_name: Annotated[ResourceName, Meta(description="PriorityClass of its pods.")] | None = None
    extra_args: Annotated[
        tuple[Annotated[str, Meta(max_length=512)], ...],
        Meta(
            max_length=32,
            description="Further flags of `meshd serve`.",
            extra_json_schema={"x-kubernetes-list-type": "atomic"},
        ),
    ] = ()

    @property
    def data_tiers(self) -> tuple[Tier, ...]:
        """The disks for data: `--disk` of the daemons, in this order."""
        return tuple(tier for tier in self.tiers if tier.class_ != "mem" and tier.content == "Data")


class Topology(Part, frozen=True, kw_only=True):
    """Labels of Kubernetes nodes that describe failure domains and proximity."""

    zone: Annotated[LabelKey, Meta(description="Failure domain: copies are kept in different zones.")] = (
        "topology.kubernetes.io/zone"
    )
    rack: Annotated[LabelKey, Meta(description="Nodes on one switch.")] = "topology.shardmesh.io/rack"
    host: Annotated[LabelKey, Meta(description="One machine.")] = "kubernetes.io/hostname"


class Update(Part, frozen=True, kw_only=True):
    """How a new image or new settings are rolled out."""

    mode: Annotated[
        Literal["Maintenance", "Drain"],
        Meta(
            description="Maintenance: a daemon restarts before its share is rebuilt on other nodes. Drain: "
            "it moves all its data first (takes hours; for disks that do not survive a restart)."
        ),
    ] = "Maintenance"
    max_unavailable: Annotated[
        int, Meta(ge=1, le=64, description="Daemons replaced at a time, from different pools.")
    ] = 1
    paused: Annotated[bool, Meta(description="Roll out nothing.")] = False


class Upkeep(Part, frozen=True, kw_only=True):
    """How often a daemon verifies its data, and how long it remembers deletions."""

    scrub_interval_seconds: Annotated[
        int, Meta(ge=60, le=315_360_000, description="Seconds between verifications of all bytes.")
    ] = 1209600
    repair_interval_seconds: Annotated[
        int, Meta(ge=60, le=315_360_000, description="Seconds between comparisons of all copies.")
    ] = 21600
    remember_removals_seconds: Annotated[
        int,
        Meta(
            ge=3600,
            le=315_360_000,
            description="For daemons that are away; one that is away longer resyncs from scratch. At least "
            "twice downAfterSeconds.",
        ),
    ] = 864000


class Metrics(Part, frozen=True, kw_only=True):
    """How Prometheus finds the daemons."""

    enabled: Annotated[bool, Meta(description="Scrape annotations on the pods.")] = True
    service_monitor: Annotated[bool, Meta(description="Create a ServiceMonitor, if that API exists.")] = False
    interval: Annotated[Text, Meta(pattern=r"^[0-9]+(ms|s|m)$", description="Scrape interval.")] = "30s"


class Tracing(Part, frozen=True, kw_only=True):
    """Where the daemons send traces."""

    endpoint: Annotated[
        str,
        Meta(
            max_length=512,
            pattern=r"^https?://[A-Za-z0-9._:-]+(/[A-Za-z0-9._~/-]*)?$",
            description="OTLP over HTTP, such as `http://collector.observability:4318`.",
        ),
    ]
    ratio: Annotated[
        float, Meta(ge=0, le=1, description="Share of requests that are traced unless their client decides.")
    ] = 0.01


class Console(Part, frozen=True, kw_only=True):
    """The web console of the daemons."""

    enabled: Annotated[bool, Meta(description="Whether each daemon serves it at `/console`.")] = False
    grafana: Annotated[
        str,
        Meta(
            max_length=512,
            pattern=r"^(https?://[A-Za-z0-9._:-]+(/[A-Za-z0-9._~/-]*)?)?$",
            description="URL of a Grafana that it links to.",
        ),
    ] = ""


class MeshClusterSpec(Part, frozen=True, kw_only=True):
    """A mesh: its daemons, their nodes and disks."""

    rules: ClassVar = (
        Rule(
            "self.nodePools.exists(p, 'store' in p.roles)",
            "at least one pool needs the role store, to own the data",
        ),
        Rule(
            "self.upkeep.rememberRemovalsSeconds >= 2 * self.downAfterSeconds",
            "upkeep.rememberRemovalsSeconds must be at least twice downAfterSeconds",
        ),
        Rule(
            "self.nodePools.all(p, p.perMatchingNode || !('store' in p.roles) || p.replicas > 0)"
            " || self.nodePools.exists(p, 'store' in p.roles && (p.perMatchingNode || p.replicas > 0))",
            "every pool with the role store has 0 replicas; no daemon would own the data",
        ),
    )

    image: Annotated[
        str, Meta(min_length=1, max_length=512, pattern=r"^[^\s]+$", description="Image of the daemons.")
    ]
    image_pull_policy: (
        Annotated[Literal["Always", "IfNotPresent", "Never"], Meta(description="As in any container.")] | None
    ) = None
    image_pull_secrets: Annotated[
        tuple[Reference, ...],
        Meta(max_length=8, description="Pull Secrets of the registry.", extra_json_schema=keyed("name")),
    ] = ()
    node_pools: Annotated[
        tuple[NodePool, ...],
        Meta(min_length=1, max_length=16, description="Pools of daemons.", extra_json_schema=keyed("name")),
    ]
    copies: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="Copies of each object, on different nodes; default of buckets.",
            extra_json_schema=immutable("copies"),
        ),
    ] = 2
    slots: Annotated[
        Literal[16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576],
        Meta(
            description="Slots of a new mesh, 16 or more for each daemon that it is to have; "
            "`mesh cluster slots` splits those of a mesh that exists.",
            extra_json_schema=immutable("slots"),
        ),
    ] = DEFAULT_SLOTS
    s3: Annotated[S3Endpoint, Meta(description="The endpoint.")] = S3Endpoint()
    auth: Annotated[Auth, Meta(description="Keys and users, by reference only.")] = Auth()
    topology: Annotated[Topology, Meta(description="Topology labels of Kubernetes nodes.")] = Topology()
    update: Annotated[Update, Meta(description="Roll-outs.")] = Update()
    scale_down: Annotated[
        Literal["Drain", "Retain"],
        Meta(
            description="Drain: a daemon moves its data away before it is removed. Retain: it just stops, "
            "and its disks keep their data."
        ),
    ] = "Drain"
    down_after_seconds: Annotated[
        Seconds,
        Meta(description="Seconds after which the share of an absent daemon is rebuilt on other nodes."),
    ] = 900
    upkeep: Annotated[Upkeep, Meta(description="Periodic maintenance of the daemons.")] = Upkeep()
    deletion_policy: Annotated[
        Literal["Retain", "Delete"],
        Meta(description="Whether volumes and keys are kept when the MeshCluster is deleted."),
    ] = "Retain"
    metrics: Annotated[Metrics, Meta(description="Monitoring.")] = Metrics()
    console: Annotated[Console, Meta(description="The web console.")] = Console()
    tracing: Annotated[Tracing, Meta(description="Traces over OpenTelemetry. Default: none.")] | None = None
    network_policy: Annotated[NetworkPolicy, Meta(description="Isolation.")] = NetworkPolicy()
    pod_template: (
        Annotated[
            FreeObject,
            Meta(
                description="Labels, annotations and pod fields merged over the generated pod, for settings "
                "that this spec does not have."
            ),
        ]
        | None
    ) = None


class PoolStatus(Part, frozen=True, kw_only=True):
    """Status of a pool."""

    name: Annotated[Name, Meta(description="Name of the pool.")]
    desired: Annotated[Count, Meta(description="Wanted daemons.")] = 0
    ready: Annotated[Count, Meta(description="Answer.")] = 0
    updated: Annotated[Count, Meta(description="Daemons with the present template.")] = 0
    draining: Annotated[Count, Meta(description="Daemons that are being drained.")] = 0


class TierStatus(Part, frozen=True, kw_only=True):
    """Bytes of one tier over all daemons."""

    name: Annotated[Name, Meta(description="Name of the tier.")]
    capacity: Annotated[Count, Meta(description="Bytes of its disks.")] = 0
    used: Annotated[Count, Meta(description="Bytes in use, by any program.")] = 0


class MeshClusterStatus(Part, frozen=True, kw_only=True):
    """Observed state of the mesh."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Creating", "Running", "Updating", "Degraded", "Deleting"],
            Meta(description="Summary in one word."),
        ]
        | None
    ) = None
    conditions: Conditions = ()
    pools: Annotated[
        tuple[PoolStatus, ...], Meta(max_length=16, description="By pool.", extra_json_schema=keyed("name"))
    ] = ()
    tiers: Annotated[
        tuple[TierStatus, ...], Meta(max_length=64, description="By tier.", extra_json_schema=keyed("name"))
    ] = ()
    desired: Annotated[Count, Meta(description="Wanted daemons.")] = 0
    ready: Annotated[Count, Meta(description="Ready daemons.")] = 0
    trouble: (
        Annotated[
            Text,
            Meta(
                description="In a few words why daemons do not start, or whose disks fail or are full; "
                "details are in the conditions."
            ),
        ]
        | None
    ) = None
    map_version: Annotated[Count, Meta(description="Version of the cluster map.")] | None = None
    endpoint: Annotated[Text, Meta(description="Endpoint for S3 clients in the cluster.")] | None = None


MeshCluster = Kind(
    "MeshCluster",
    "mesh",
    "A mesh of daemons: how many, on which nodes, with which disks.",
    MeshClusterSpec,
    MeshClusterStatus,
    (
        Column("Phase", ".status.phase"),
        Column("Ready", ".status.ready", "integer"),
        Column("Desired", ".status.desired", "integer"),
        Column("Settled", ".status.conditions[?(@.type=='Settled')].status"),
        Column("Trouble", ".status.trouble"),
        Column("Endpoint", ".status.endpoint", wide=True),
        Column("Map", ".status.mapVersion", "integer", wide=True),
        Column("Image", ".spec.image", wide=True),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
    (
        Rule(
            "size(self.metadata.name) <= 30",
            "a MeshCluster's name has at most 30 characters: pods are named after it",
        ),
    ),
)
