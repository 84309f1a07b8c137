"""MeshCluster: a mesh of daemons, in pools."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from meshoperator.resources.common import (
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
    SecretKey,
    ShortName,
    Size,
    Text,
    immutable,
    keyed,
)

Role = Literal["store", "cache", "compute"]
DiskClass = Literal["nvme", "ssd", "hdd", "mem"]


class VolumeClaim(Part, frozen=True, kw_only=True):
    """A claim that each daemon of the pool gets for itself."""

    storage_class: (
        Annotated[
            ResourceName,
            Meta(
                description="Its StorageClass. Left out: the cluster's default. Changed: of volumes to come."
            ),
        ]
        | None
    ) = None
    size: Annotated[Size, Meta(description="How large. It may grow, where the StorageClass allows it.")]


class Tier(Part, frozen=True, kw_only=True):
    """Disks of one kind in every node of a pool."""

    rules: ClassVar = (
        Rule(
            "self.class == 'mem' ? !has(self.hostPath) && !has(self.volumeClaim)"
            " : has(self.hostPath) != has(self.volumeClaim)",
            "a tier on disk has either hostPath or volumeClaim; one of class mem has neither",
        ),
        Rule("self.class != 'mem' || has(self.quota)", "a tier of class mem needs a quota"),
    )

    name: Annotated[ShortName, Meta(description="Its name; the mount is `/var/lib/meshd/NAME`.")]
    class_: Annotated[
        DiskClass,
        Meta(
            description="What kind of disk it is. The fastest holds the index. mem: memory.",
            extra_json_schema=immutable("class"),
        ),
    ] = field(name="class")
    host_path: (
        Annotated[
            str,
            Meta(
                min_length=2,
                max_length=255,
                pattern=r"^/[^:]*[^:/]$",
                description="A directory of the Kubernetes node.",
                extra_json_schema=immutable("hostPath"),
            ),
        ]
        | None
    ) = None
    volume_claim: Annotated[VolumeClaim, Meta(description="Or a volume of its own.")] | None = None
    quota: (
        Annotated[
            Size,
            Meta(
                description="The most that copies of what is elsewhere may take of it (of all tiers on disk "
                "together; left out of one: half of what is free). What the mesh itself stores only the disk "
                "bounds. Of class mem: memory for finished batches."
            ),
        ]
        | None
    ) = None


class Resources(Part, frozen=True, kw_only=True):
    """What a daemon asks for, and gets at most, as in any container."""

    requests: Annotated[Labels, Meta(description="cpu, memory.")] = {}
    limits: Annotated[Labels, Meta(description="cpu, memory.")] = {}


class Toleration(Part, frozen=True, kw_only=True):
    """As of any pod."""

    key: Annotated[Text, Meta(description="Of the taint. Left out: every one.")] | None = None
    operator: Annotated[Literal["Exists", "Equal"], Meta(description="How `value` is compared.")] = "Equal"
    value: Annotated[Text, Meta(description="Of the taint.")] | None = None
    effect: (
        Annotated[
            Literal["NoSchedule", "PreferNoSchedule", "NoExecute"],
            Meta(description="Left out: every one."),
        ]
        | None
    ) = None
    toleration_seconds: Annotated[Seconds, Meta(description="For NoExecute: how long.")] | None = None


class NodePool(Part, frozen=True, kw_only=True):
    """Daemons that are alike. `replicas` of them, or one on each node that matches."""

    rules: ClassVar = (
        Rule(
            "has(self.replicas) != self.perMatchingNode",
            "say either replicas or perMatchingNode: true",
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
            "two tiers of a pool cannot have the same hostPath: they would be one directory",
        ),
    )

    name: Annotated[ShortName, Meta(description="Its name: part of the names of its pods.")]
    replicas: (
        Annotated[int, Meta(ge=0, le=4096, description="How many daemons. Kubernetes chooses where.")] | None
    ) = None
    per_matching_node: Annotated[bool, Meta(description="One daemon on each node of `nodeSelector`.")] = False
    node_selector: Annotated[Labels, Meta(description="Labels a node must have.")] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=16, description="Taints it bears.")] = ()
    roles: Annotated[
        tuple[Role, ...],
        Meta(
            min_length=1,
            max_length=3,
            description="store: owns data. cache: keeps copies that may go. compute: prepares batches.",
            extra_json_schema=SET,
        ),
    ] = ("store", "cache", "compute")
    tiers: Annotated[
        tuple[Tier, ...], Meta(max_length=8, description="Its disks.", extra_json_schema=keyed("name"))
    ] = ()
    weight: (
        Annotated[
            int,
            Meta(ge=1, le=1 << 20, description="Share of the data of one daemon. Left out: its tiers' GiB."),
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


class Tls(Part, frozen=True, kw_only=True):
    """Serve https with this Secret of type kubernetes.io/tls."""

    secret_ref: Annotated[Reference, Meta(description="Holds `tls.crt` and `tls.key`.")]


class S3Endpoint(Part, frozen=True, kw_only=True):
    """Where clients find the mesh."""

    port: Annotated[int, Meta(ge=1, le=65535, description="Port of the Service and of every daemon.")] = 9000
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Service.")
    ] = "ClusterIP"
    domains: Annotated[
        tuple[ResourceName, ...],
        Meta(max_length=16, description="Names whose subdomains are buckets.", extra_json_schema=SET),
    ] = ()
    tls: Annotated[Tls, Meta(description="Left out: plain HTTP.")] | None = None


class Auth(Part, frozen=True, kw_only=True):
    """Who may do what."""

    root_secret_ref: (
        Annotated[
            Reference,
            Meta(
                description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of root. Left out: the "
                "operator makes `CLUSTER-root`."
            ),
        ]
        | None
    ) = None
    users_secret_ref: (
        Annotated[SecretKey, Meta(description="A file of users, as `meshd serve --users` takes.")] | None
    ) = None


class Topology(Part, frozen=True, kw_only=True):
    """Labels of Kubernetes nodes that say what fails together, and what is near."""

    zone: Annotated[LabelKey, Meta(description="Copies are kept in different zones.")] = (
        "topology.kubernetes.io/zone"
    )
    rack: Annotated[LabelKey, Meta(description="What shares a switch.")] = "topology.shardmesh.io/rack"
    host: Annotated[LabelKey, Meta(description="One machine.")] = "kubernetes.io/hostname"


class Update(Part, frozen=True, kw_only=True):
    """How a new image or new settings reach the daemons."""

    mode: Annotated[
        Literal["Maintenance", "Drain"],
        Meta(
            description="Maintenance: a daemon is back before its share is made again elsewhere. Drain: it "
            "gives everything away first (hours; where its disks do not survive)."
        ),
    ] = "Maintenance"
    max_unavailable: Annotated[
        int, Meta(ge=1, le=64, description="Daemons at a time, of different pools.")
    ] = 1
    paused: Annotated[bool, Meta(description="Nothing is rolled out.")] = False


class Upkeep(Part, frozen=True, kw_only=True):
    """How often a daemon looks at what it keeps, and how long it remembers what was removed."""

    scrub_interval_seconds: Annotated[
        int, Meta(ge=60, le=315_360_000, description="From one look at all bytes to the next.")
    ] = 1209600
    repair_interval_seconds: Annotated[
        int, Meta(ge=60, le=315_360_000, description="From one comparison of all copies to the next.")
    ] = 21600
    remember_removals_seconds: Annotated[
        int,
        Meta(
            ge=3600,
            le=315_360_000,
            description="For daemons that are away; one that is away for longer begins anew. At least twice "
            "downAfterSeconds.",
        ),
    ] = 864000


class Metrics(Part, frozen=True, kw_only=True):
    """How Prometheus finds the daemons."""

    enabled: Annotated[bool, Meta(description="Scrape annotations on the pods.")] = True
    service_monitor: Annotated[bool, Meta(description="A ServiceMonitor, where that API exists.")] = False
    interval: Annotated[Text, Meta(pattern=r"^[0-9]+(ms|s|m)$", description="Between two scrapes.")] = "30s"


class NetworkPolicy(Part, frozen=True, kw_only=True):
    """Who may talk to the daemons."""

    enabled: Annotated[bool, Meta(description="Make a NetworkPolicy.")] = True
    from_namespaces: Annotated[
        Labels, Meta(description="Namespaces with these labels may reach the S3 port. Empty: every one.")
    ] = {}


class MeshClusterSpec(Part, frozen=True, kw_only=True):
    """A mesh: which daemons, where, with which disks."""

    rules: ClassVar = (
        Rule(
            "self.nodePools.exists(p, 'store' in p.roles)",
            "at least one pool needs the role store: somebody must own the data",
        ),
        Rule(
            "self.upkeep.rememberRemovalsSeconds >= 2 * self.downAfterSeconds",
            "upkeep.rememberRemovalsSeconds must be at least twice downAfterSeconds",
        ),
        Rule(
            "self.nodePools.all(p, p.perMatchingNode || !('store' in p.roles) || p.replicas > 0)"
            " || self.nodePools.exists(p, 'store' in p.roles && (p.perMatchingNode || p.replicas > 0))",
            "every pool with the role store has 0 replicas; nobody would own the data",
        ),
    )

    image: Annotated[
        str, Meta(min_length=1, max_length=512, pattern=r"^[^\s]+$", description="The daemons' image.")
    ]
    image_pull_policy: (
        Annotated[Literal["Always", "IfNotPresent", "Never"], Meta(description="As of any container.")] | None
    ) = None
    image_pull_secrets: Annotated[
        tuple[Reference, ...],
        Meta(max_length=8, description="Secrets of the registry.", extra_json_schema=keyed("name")),
    ] = ()
    node_pools: Annotated[
        tuple[NodePool, ...],
        Meta(min_length=1, max_length=16, description="The daemons.", extra_json_schema=keyed("name")),
    ]
    copies: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="Of each object, on as many nodes; of buckets that say nothing else.",
            extra_json_schema=immutable("copies"),
        ),
    ] = 2
    s3: Annotated[S3Endpoint, Meta(description="The endpoint.")] = S3Endpoint()
    auth: Annotated[Auth, Meta(description="Keys and users, by reference only.")] = Auth()
    topology: Annotated[Topology, Meta(description="Labels of places.")] = Topology()
    update: Annotated[Update, Meta(description="Roll-outs.")] = Update()
    scale_down: Annotated[
        Literal["Drain", "Retain"],
        Meta(
            description="Drain: a daemon gives its data away before it goes. Retain: it just stops, and its "
            "disks keep what they hold."
        ),
    ] = "Drain"
    down_after_seconds: Annotated[
        Seconds, Meta(description="After how long without a daemon its share is made again elsewhere.")
    ] = 900
    upkeep: Annotated[Upkeep, Meta(description="What daemons do by themselves, and when.")] = Upkeep()
    deletion_policy: Annotated[
        Literal["Retain", "Delete"],
        Meta(description="Whether volumes and keys stay when the MeshCluster is deleted."),
    ] = "Retain"
    metrics: Annotated[Metrics, Meta(description="Monitoring.")] = Metrics()
    network_policy: Annotated[NetworkPolicy, Meta(description="Isolation.")] = NetworkPolicy()
    pod_template: (
        Annotated[
            FreeObject,
            Meta(
                description="Labels, annotations and pod fields laid over what the operator makes; for what "
                "this spec has no word for."
            ),
        ]
        | None
    ) = None


class PoolStatus(Part, frozen=True, kw_only=True):
    """The daemons of a pool."""

    name: Annotated[Name, Meta(description="Of the pool.")]
    desired: Annotated[Count, Meta(description="How many there should be.")] = 0
    ready: Annotated[Count, Meta(description="Answer.")] = 0
    updated: Annotated[Count, Meta(description="Have the present template.")] = 0
    draining: Annotated[Count, Meta(description="Give their data away.")] = 0


class TierStatus(Part, frozen=True, kw_only=True):
    """Bytes of one tier, all daemons together."""

    name: Annotated[Name, Meta(description="Of the tier.")]
    capacity: Annotated[Count, Meta(description="Bytes of its disks.")] = 0
    used: Annotated[Count, Meta(description="Bytes of them that are taken, by whomever.")] = 0


class MeshClusterStatus(Part, frozen=True, kw_only=True):
    """How the mesh is."""

    observed_generation: ObservedGeneration = None
    phase: (
        Annotated[
            Literal["Pending", "Creating", "Running", "Updating", "Degraded", "Deleting"],
            Meta(description="In one word."),
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
    desired: Annotated[Count, Meta(description="Daemons there should be.")] = 0
    ready: Annotated[Count, Meta(description="Daemons that answer.")] = 0
    trouble: (
        Annotated[
            Text,
            Meta(description="What keeps daemons from starting, in a few words; all of it is in Available."),
        ]
        | None
    ) = None
    map_version: Annotated[Count, Meta(description="Of the cluster map.")] | None = None
    endpoint: Annotated[Text, Meta(description="Where S3 clients within the cluster go.")] | None = None


MeshCluster = Kind(
    "MeshCluster",
    "mesh",
    "A mesh of daemons: which, where, with which disks.",
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
