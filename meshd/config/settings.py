"""Settings of a node, field by field: frozen dataclasses. Sizes in bytes, times in seconds.

Law: values and what follows from them, nothing else; `loader` knows where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Durability = Literal["commit", "relaxed"]
LogFormat = Literal["text", "json"]


class ConfigError(Exception):
    """A setting, the configuration file or the users file is not acceptable. One line."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where and how objects are kept. Sizes in bytes."""

    data_dir: Path
    """Holds `lock`, `run/`, `control/`, credentials, and (unless told otherwise) data and index."""
    disks: tuple[Path, ...]
    """Directories of the data files; objects spread over them. Default: the data directory itself."""
    index_dir: Path
    """Holds the LMDB index; wants the fastest device. Default: `<data_dir>/index`."""
    durability: Durability = "commit"
    """commit: a PUT is on disk before it is answered. relaxed: for caches; a power cut may lose the last."""
    small_object_bytes: int = 1 << 20
    """Objects up to this size share segments; larger ones get a file of their own."""
    segment_bytes: int = 256 << 20
    """A segment is sealed at about this size."""
    index_map_bytes: int = 64 << 30
    """Address space reserved for the index; not memory, not disk."""
    tombstone_seconds: float = 0.0
    """How long deletions are remembered, in a mesh: a node away for longer comes back as an empty one. 0: a
    node of its own, nobody has to be told."""
    family: int = 0
    """Where numbers of disks and data files begin: those of a store beside another one must not be its."""

    @property
    def evictable(self) -> bool:
        """Whether nothing in it is the only copy: it does without disks that fail, unasked."""
        return self.family != 0

    @property
    def first_disk(self) -> int:
        return self.family << 16

    @property
    def first_file(self) -> int:
        return (self.family << 40) + 1

    @classmethod
    def at(cls, data_dir: Path, **changes: Any) -> StoreSettings:
        """Settings for one directory with every default derived from it."""
        data_dir = Path(data_dir)
        defaults: dict[str, Any] = {"disks": (data_dir,), "index_dir": data_dir / "index"}
        return cls(data_dir, **(defaults | changes))


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The S3 and native endpoint. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default: without `tls_cert` the daemon speaks plain HTTP."""
    port: int = 9000
    """TCP port; 0 takes a free one and says which in the ready line."""
    tls_cert: Path | None = None
    """PEM file: the server's certificate, then those that vouch for it. With it the endpoint is https."""
    tls_key: Path | None = None
    """PEM file: its private key, without a password. Both files are read again when they change."""
    domains: tuple[str, ...] = ()
    """Names of this endpoint whose subdomains are buckets: `s3.example.com` for `BUCKET.s3.example.com`."""
    max_header_bytes: int = 64 << 10
    """Request line and headers together; S3 itself allows about 8 KiB of headers."""
    max_xml_bytes: int = 2 << 20
    """Largest XML or JSON body (DeleteObjects of 1,000 long keys fits)."""
    body_timeout: float = 120.0
    """A request body that brings nothing for this long is given up (408-like, nothing is stored). One that
    was refused is read and dropped for no longer altogether, so that its client comes to read why."""
    idle_timeout: float = 75.0
    """A keep-alive connection without a request is closed after this."""
    head_timeout: float = 20.0
    """A request line and headers whose end does not come within this are given up."""
    max_connections: int = 16_384
    """Open connections of one worker. Beyond, those idle longest are closed; a new one is refused (503) if
    none is."""
    drain_timeout: float = 30.0
    """After SIGTERM, running requests get this long to finish."""
    sigv2: str = "presigned"
    """Which requests may be signed with version 2: `presigned` (URLs, boto3's default, and forms), `all` (the
    Authorization header too, which leaves most of a request unsigned), or `off`."""
    backlog: int = 1024
    """Connections the kernel queues for a worker."""


@dataclass(frozen=True, slots=True)
class TransformSettings:
    """The pool that decodes and augments, and the cache of finished batches."""

    processes: int = 2
    """Transform processes. Default: the cores this process may run on."""
    frame_cache_bytes: int = 1 << 30
    """Finished batches kept in shared memory, least recently used out first. It is RAM of the machine."""
    local_frames: bool | Path = True
    """Whether jobs on this host get batches as shared memory, and in which directory they find them. True:
    `run/local` in the data directory; a path: one that pods mount."""
    process_bytes: int = 2 << 30
    """Memory a transform process may take for its samples, beyond what it begins with."""
    user_ops: bool = True
    """Whether ops that users pushed are run, and pushed. They run confined, in processes of their own."""
    user_op_seconds: float = 30.0
    """The longest an op of a user's may take for one sample, whatever it declares."""
    user_op_memory: int = 4 << 30
    """The most memory a process for users' ops may take beyond its imports, whatever they declare."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """An etcd cluster, and where in it: `etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…][/PREFIX]`, or `etcds`
    for TLS."""

    members: tuple[tuple[str, int], ...]
    prefix: str = "/shardmesh/"
    tls: bool = False
    login: tuple[str, str] | None = None
    """User and password."""
    ca: Path | None = None
    """PEM file of who vouches for its certificates. Default: the system's."""

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.members)
        return f"etcd{'s' if self.tls else ''}://{hosts}{self.prefix.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class KubernetesAddress:
    """A store on the Kubernetes API, and which one: `kubernetes://NAMESPACE/NAME`. Without a namespace: the
    pod's own."""

    namespace: str
    name: str

    def __repr__(self) -> str:
        return f"kubernetes://{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """This node among others. Without `control` it is the only one."""

    control: ControlAddress | KubernetesAddress | None = None
    """Where the control store is; None: in the data directory, and the node is the only one."""
    zone: str = ""
    """What fails together: copies are kept in different zones."""
    rack: str = ""
    """What is near each other."""
    roles: tuple[str, ...] = ("store", "cache", "compute")
    """What this node is for."""
    weight: int = 0
    """Its share of the data, in a unit that is the same for all nodes. 0: GiB of its disks."""
    copies: int = 2
    """How many nodes keep each object, of buckets that say nothing else. Counts when a mesh is founded."""
    advertise: str = ""
    """URL under which peers and the SDK reach this node. Default: where it listens."""
    lease: float = 5.0
    """Seconds without a word after which a node is looked after, and counts as away."""
    down_after: float = 900.0
    """Seconds after which a node that is away is given up, if every object of it has another copy."""
    peer_ca: Path | None = None
    """PEM file of who vouches for other nodes' certificates, beside those this machine trusts."""
    repair_interval: float = 6 * 3600.0
    """Seconds between two comparisons with the other owners that nothing else asks for."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Everything one daemon needs to know, validated."""

    node_id: str
    """Names the node in metrics, logs and the cluster map. Default: the host name."""
    store: StoreSettings
    http: HttpSettings = field(default_factory=HttpSettings)
    transform: TransformSettings = field(default_factory=TransformSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    workers: int = 1
    """HTTP processes on the one port. Default: min(4, cores). With 1, the coordinator lives in the worker."""
    lost_disks: tuple[Path, ...] = ()
    """Disks that are gone for good: the node starts without what was on them, whoever else has it."""
    users_file: Path | None = None
    """YAML list of users; read at start and on SIGHUP."""
    hang_timeout: float = 60.0
    """Seconds after which a process whose event loop stands still is killed and replaced."""
    view_cache_bytes: int = 10 << 30
    """Results of views and inflated archives kept on the disks; the least recently used go beyond."""
    archive_ratio: int = 50
    """Bytes that an archive may have inflated for each of its own, beyond 64 MiB; more is refused."""
    lifecycle_interval: float = 900.0
    """Seconds from one look for what lifecycle rules remove to the next."""
    scrub_interval: float = 14 * 86400.0
    """Seconds from the beginning of one pass over all bytes in use to that of the next."""
    scrub_rate: int = 64 << 20
    """Most bytes a second that such a pass reads."""
    cache_bytes: int = 0
    """Most bytes kept of buckets that are backed by origins. Default (0): half of what is free at start."""
    credentials_dir: Path | None = None
    """Files of credentials for origins, by name. Default: `<data_dir>/origins`."""
    origin_patience: float = 3.0
    """Seconds that a reader of what is cached waits for an origin's word that it is still so."""
    stale_upload_days: int = 7
    """A multipart upload this old is aborted where no lifecycle rule is about it; 0: never."""
    keep_documents_days: int = 90
    """Days without use after which a plan, snapshot or asset goes that nothing names; 0: never."""
    tombstone_ttl: float = 10 * 86400.0
    """Seconds for which the deletion of one is remembered: longer than a node may be away."""
    audit_log: Path | None = None
    """JSON lines, one a request; `-` is the standard output. Opened anew on SIGHUP."""
    audit_bytes: int = 0
    """Size at which the audit log is renamed to `.1` and begun anew; 0: never, for lines are lost by it."""
    audit_files: int = 10
    """Renamed audit logs that are kept, where `audit_bytes` says that there are any."""
    region: str = "us-east-1"
    """What GetBucketLocation answers, and the region new buckets get."""
    log_format: LogFormat = "text"
    log_level: str = "info"
    legacy_metric_names: bool = True
    """Whether `/metrics` repeats renamed metrics under their earlier names."""
    deprecations: tuple[str, ...] = ()
    """Warnings about settings given under an earlier name, to be logged once at start."""

    @property
    def endpoint(self) -> str:
        """URL under which others reach this node."""
        if self.cluster.advertise:
            return self.cluster.advertise
        host = f"[{self.http.host}]" if ":" in self.http.host else self.http.host
        return f"{'https' if self.http.tls_cert else 'http'}://{host}:{self.http.port}"

    @property
    def run_dir(self) -> Path:
        """Sockets and metrics of the running processes; emptied at start."""
        return self.store.data_dir / "run"

    @property
    def local_handover_dir(self) -> Path | None:
        """Where jobs on this host find frames; None: nowhere."""
        where = self.transform.local_frames
        return where if isinstance(where, Path) else self.run_dir / "local" if where else None

    @property
    def metrics_dir(self) -> Path:
        """Files through which the processes share their counters."""
        return self.run_dir / "metrics"

    @property
    def cache_store(self) -> StoreSettings:
        """The evictable store beside the durable one."""
        store = self.store
        return StoreSettings(
            data_dir=store.data_dir / "cache",
            disks=tuple(disk / "cache" for disk in store.disks),
            index_dir=store.index_dir.parent / f"{store.index_dir.name}-cache",
            durability="relaxed",
            small_object_bytes=store.small_object_bytes,
            segment_bytes=store.segment_bytes,
            index_map_bytes=store.index_map_bytes,
            family=1,
        )

    @property
    def origin_credentials(self) -> Path:
        """Files of credentials for origins."""
        return self.credentials_dir or self.store.data_dir / "origins"

    @property
    def freshness_path(self) -> Path:
        """When what is cached of origins was last known to be so."""
        return self.run_dir / "fresh"

    def fetch_socket(self, index: int) -> Path:
        """Unix socket on which worker `index` fetches from origins for the others."""
        return self.run_dir / f"fetch-{index}.sock"

    @property
    def cache_manager_socket(self) -> Path:
        """Unix socket on which the cache's policy is asked."""
        return self.run_dir / "keeper.sock"

    @property
    def control_dir(self) -> Path:
        """The embedded control store."""
        return self.store.data_dir / "control"

    @property
    def last_used_path(self) -> Path:
        """When results of views were last read."""
        return self.store.data_dir / "view-uses"

    @property
    def coordinator_socket(self) -> Path:
        """Unix socket on which the coordinator serves the workers."""
        return self.run_dir / "coordinator.sock"

    @property
    def rebalancer_socket(self) -> Path:
        """Unix socket on which the rebalancer is told what to fetch, and whom to serve."""
        return self.run_dir / "rebalancer.sock"

    def transform_socket(self, index: int) -> Path:
        """Unix socket of transform process `index`."""
        return self.run_dir / f"transform-{index}.sock"
