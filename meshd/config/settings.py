"""Settings of a node, field by field: frozen dataclasses. Sizes in bytes, times in seconds.

Values and what follows from them, nothing else; `loader` knows their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

Durability = Literal["commit", "relaxed"]
LogFormat = Literal["text", "json"]
DiskType = Literal["auto", "rotational", "solid-state"]


_CACHE_SYNC_SECONDS: Final = 10.0
"""Seconds of caching that a power cut may lose."""


class ConfigError(Exception):
    """A setting, the configuration file or the users file is invalid. The message is one line."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where and how objects are stored. Sizes in bytes."""

    data_dir: Path
    """Holds `lock`, `run/`, `control/`, credentials and, by default, data and index."""
    disks: tuple[Path, ...]
    """Directories of the data files; objects are spread over them. Default: the data directory itself."""
    index_dir: Path
    """Holds the LMDB index; use the fastest device. Default: `<data_dir>/index`."""
    durability: Durability = "commit"
    """commit: a PUT is on disk before it is answered. relaxed: within `sync_seconds` after it was answered,
    which is all that a power cut may lose."""
    sync_seconds: float = 1.0
    """With `durability: relaxed`, seconds after which an acknowledged write is on disk."""
    small_object_bytes: int = 1 << 20
    """Objects up to this size share segments; larger ones get a file of their own."""
    segment_bytes: int = 256 << 20
    """A segment is sealed at about this size."""
    index_map_bytes: int = 64 << 30
    """Address space reserved for the index; not memory, not disk."""
    tombstone_seconds: float = 0.0
    """How long deletions are remembered, in a cluster: a node that is away for longer comes back empty. 0: a
    single node, where no other node must learn of them."""
    disk_type: DiskType = "auto"
    """What the disks are: on rotational ones, coming batches are read ahead in the order of the disk. auto:
    as the kernel reports it; virtual disks and network file systems count as solid-state."""
    space_check_seconds: float = 0.1
    """While disks have ample free space, it is measured no more often than this. 0: for each commit group."""
    any_index_file_system: bool = False
    """Whether the index may be on a network file system."""
    family: int = 0
    """Where the numbers of disks and data files begin; a store next to another one must use other numbers."""

    @property
    def evictable(self) -> bool:
        """Whether nothing in it is the only copy, so that it runs without failed disks unasked."""
        return self.family != 0

    @property
    def first_disk(self) -> int:
        return self.family << 16

    @property
    def first_file(self) -> int:
        return (self.family << 40) + 1

    @classmethod
    def at(cls, data_dir: Path, **changes: Any) -> StoreSettings:
        """Return settings for one directory, with every default derived from it."""
        data_dir = Path(data_dir)
        defaults: dict[str, Any] = {"disks": (data_dir,), "index_dir": data_dir / "index"}
        return cls(data_dir, **(defaults | changes))


class ConsoleOidc(msgspec.Struct, frozen=True):
    """Sign-in to the console by OpenID Connect. `role`: the role that people get, whose provider signs them
    in; `client_id`: the console's name there; `secret`: a file with its secret, None for a public client."""

    role: str
    client_id: str
    secret: Path | None = None


class HttpSettings(msgspec.Struct, frozen=True):
    """The S3 and native endpoint. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default: without `tls_cert` the daemon speaks plain HTTP."""
    port: int = 9000
    """TCP port; 0 chooses a free one, which the ready line shows."""
    tls_cert: Path | None = None
    """PEM file: the server's certificate, then its chain. With it the endpoint is https."""
    tls_key: Path | None = None
    """PEM file: its private key, without a password. Both files are reloaded when they change."""
    domains: tuple[str, ...] = ()
    """Names of this endpoint whose subdomains are buckets: `s3.example.com` for `BUCKET.s3.example.com`."""
    max_header_bytes: int = 64 << 10
    """Request line and headers together; S3 itself allows about 8 KiB of headers."""
    max_xml_bytes: int = 2 << 20
    """Largest XML or JSON body (DeleteObjects of 1,000 long keys fits)."""
    body_timeout: float = 120.0
    """A request body that brings nothing for this long is given up (RequestTimeout, nothing is stored). A
    refused body is read and dropped for at most this time in total, so that its client can read the error."""
    idle_timeout: float = 75.0
    """A keep-alive connection without a request is closed after this."""
    head_timeout: float = 20.0
    """A request head that is not complete after this time is given up."""
    max_connections: int = 16_384
    """Maximum connections of one worker. Beyond, the longest idle ones are closed; a new one is refused (503)
    if none is idle."""
    drain_timeout: float = 30.0
    """Time for running requests after SIGTERM, and after `shutdown_delay`."""
    shutdown_delay: float = 0.0
    """Time after SIGTERM during which connections are still accepted, but the node is not ready: until then,
    those who send clients to it (kube-proxy, load balancers) may not know that it ends."""
    sigv2: str = "presigned"
    """Which requests may be signed with version 2: `presigned` (URLs, boto3's default, and forms), `all`
    (also the Authorization header, which leaves most of a request unsigned), or `off`."""
    console: bool = False
    """Whether the node serves the web console at `/console`."""
    console_grafana: str = ""
    """The URL of a Grafana that the console links to."""
    console_oidc: ConsoleOidc | None = None
    """How people sign in to the console at an identity provider; None: by access keys alone."""
    backlog: int = 1024
    """Connections that the kernel queues for the listening socket."""


class TransformSettings(msgspec.Struct, frozen=True):
    """The pool that decodes and augments, and the cache of finished batches."""

    processes: int = 2
    """Transform processes. Default: the cores this process may run on."""
    frame_cache_bytes: int = 1 << 30
    """Shared memory for finished batches, evicted by least recent use. It is RAM of the machine."""
    local_frames: bool | Path = True
    """Whether jobs on this host get batches as shared memory, and the directory where they find them. True:
    `run/local` in the data directory; a path: a directory that pods mount."""
    decoded_cache_bytes: int | None = None
    """Disk space for decoded samples, which later epochs begin with. None: a quarter of the free space at
    start, on a rotational disk at most half of the free memory. 0: none are kept."""
    decoded_cache_dir: Path | None = None
    """Directory of the decoded samples, emptied at start. Default: `<data_dir>/decoded`."""
    process_bytes: int = 2 << 30
    """Memory that a transform process may use for its samples, in addition to its initial memory."""
    user_ops: bool = True
    """Whether ops of users may be pushed and run. They run in a sandbox, in processes of their own."""
    user_op_seconds: float = 30.0
    """Maximum time of a user's op per sample, whatever it declares."""
    user_op_memory: int = 4 << 30
    """Maximum memory of a process for users' ops beyond its imports, whatever they declare."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """An etcd cluster and a prefix in it: `etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…][/PREFIX]`, or
    `etcds` for TLS."""

    members: tuple[tuple[str, int], ...]
    prefix: str = "/shardmesh/"
    tls: bool = False
    login: tuple[str, str] | None = None
    """User and password."""
    ca: Path | None = None
    """PEM file of CA certificates for its certificates. Default: the system's."""

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.members)
        return f"etcd{'s' if self.tls else ''}://{hosts}{self.prefix.rstrip('/')}"


class KubernetesAddress(msgspec.Struct, frozen=True):
    """A control store on the Kubernetes API: `kubernetes://NAMESPACE/NAME`. Without a namespace: the pod's
    own."""

    namespace: str
    name: str

    def __repr__(self) -> str:
        return f"kubernetes://{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """This node's place in a cluster. Without `control` it is a single node."""

    control: ControlAddress | KubernetesAddress | None = None
    """The control store; None: a local one in the data directory of a single node."""
    zone: str = ""
    """Failure domain: copies are placed in different zones."""
    rack: str = ""
    """Network locality: reads prefer nodes of the same rack."""
    roles: tuple[str, ...] = ("store", "cache", "compute")
    """The roles of this node."""
    weight: int = 0
    """Its share of the data, in the same unit for all nodes. 0: GiB of its disks."""
    copies: int = 2
    """Nodes that store each object of buckets without a factor of their own. Used when a cluster is
    created."""
    advertise: str = ""
    """URL under which peers and the SDK reach this node. Default: where it listens."""
    lease: float = 5.0
    """Seconds without a renewed lease after which a node is probed, and counts as away."""
    down_after: float = 900.0
    """Seconds after which a node that is away counts as down, if all of its objects have other copies."""
    peer_ca: Path | None = None
    """PEM file of CA certificates for other nodes, in addition to those this machine trusts."""
    repair_interval: float = 6 * 3600.0
    """Seconds between two periodic comparisons with the other owners."""
    machine: str = ""
    """The machine whose disks have the node's directories, if it may start on another one; recorded in the
    control store."""
    slots: int = 1 << 14
    """Parts into which names hash, a power of two. Used when a cluster is created."""


class TracingSettings(msgspec.Struct, frozen=True):
    """Where the spans of recorded requests go."""

    traces_url: str
    """URL to which OTLP over HTTP posts spans, such as `http://collector:4318/v1/traces`."""
    ratio: float = 0.01
    """Share of the requests without `traceparent` that are recorded, 0…1."""
    keys: bool = False
    """Whether spans name the keys of objects."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """All validated settings of one daemon."""

    node_id: str
    """Names the node in metrics, logs and the cluster map. Default: the host name."""
    store: StoreSettings
    http: HttpSettings = field(default_factory=HttpSettings)
    transform: TransformSettings = field(default_factory=TransformSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    workers: int = 1
    """HTTP processes on the port. Default: min(4, cores). With 1, the worker also runs the coordinator's
    work."""
    lost_disks: tuple[Path, ...] = ()
    """Disks that are lost permanently: the node starts without them, even if no other node has their data."""
    users_file: Path | None = None
    """YAML list of users; read at start and on SIGHUP."""
    hang_timeout: float = 60.0
    """Seconds after which a process whose event loop stands still is killed and replaced."""
    view_cache_bytes: int = 10 << 30
    """Disk space for results of views and decompressed archives, evicted by least recent use."""
    read_ahead_bytes: int = 0
    """Page cache for reads of coming batches from rotational disks. Default (0): a quarter of the memory that
    is free at start."""
    archive_ratio: int = 50
    """Maximum ratio of an archive's decompressed to its own size, beyond 64 MiB; archives above it are
    refused."""
    lifecycle_interval: float = 900.0
    """Seconds between two lifecycle sweeps."""
    scrub_interval: float = 14 * 86400.0
    """Seconds between the starts of two scrub passes over all bytes in use."""
    scrub_rate: int = 64 << 20
    """Maximum bytes per second that a scrub pass reads."""
    cache_bytes: int = 0
    """Maximum bytes cached from origins. Default (0): half of the free space at start."""
    credentials_dir: Path | None = None
    """Directory of credentials files for origins, by name. Default: `<data_dir>/origins`."""
    origin_patience: float = 3.0
    """Seconds that a reader of cached data waits for its revalidation by the origin."""
    stale_upload_days: int = 7
    """Days after which a multipart upload is aborted to which no lifecycle rule applies; 0: never."""
    keep_documents_days: int = 90
    """Days without use after which an unreferenced plan, snapshot or asset is removed; 0: never."""
    tombstone_ttl: float = 10 * 86400.0
    """Seconds for which deletions are remembered: longer than a node may be away."""
    audit_log: Path | None = None
    """JSON lines, one per request; `-` is the standard output. Reopened on SIGHUP."""
    audit_bytes: int = 0
    """Size at which the audit log is renamed to `.1` and a new one begun; 0: never, since old lines get
    lost."""
    audit_files: int = 10
    """Renamed audit logs to keep, if `audit_bytes` is set."""
    tracing: TracingSettings | None = None
    """None: no request is traced."""
    region: str = "us-east-1"
    """The region that GetBucketLocation returns, and that new buckets get."""
    log_format: LogFormat = "text"
    log_level: str = "info"
    legacy_metric_names: bool = True
    """Whether `/metrics` repeats renamed metrics under their earlier names."""
    moved_run_dir: Path | None = None
    """The run directory, if the data directory's file system has no Unix sockets."""
    start_warnings: tuple[str, ...] = ()
    """Warnings about settings and directories; logged once at start."""

    @property
    def endpoint(self) -> str:
        """URL under which other nodes and clients reach this node."""
        if self.cluster.advertise:
            return self.cluster.advertise
        host = f"[{self.http.host}]" if ":" in self.http.host else self.http.host
        return f"{'https' if self.http.tls_cert else 'http'}://{host}:{self.http.port}"

    @property
    def run_dir(self) -> Path:
        """Sockets and metrics of the running processes; emptied at start."""
        return self.moved_run_dir or self.store.data_dir / "run"

    @property
    def local_handover_dir(self) -> Path | None:
        """Directory in which jobs on this host find frames; None if local handover is off."""
        where = self.transform.local_frames
        return where if isinstance(where, Path) else self.run_dir / "local" if where else None

    @property
    def metrics_dir(self) -> Path:
        """Files in which the processes share their counters."""
        return self.run_dir / "metrics"

    @property
    def activity_file(self) -> Path:
        """The last hour of the node's activity, for the console."""
        return self.run_dir / "activity"

    @property
    def cache_store(self) -> StoreSettings:
        """Settings of the evictable store next to the durable one."""
        store = self.store
        return StoreSettings(
            data_dir=store.data_dir / "cache",
            disks=tuple(disk / "cache" for disk in store.disks),
            index_dir=store.index_dir / "cache-index"
            if self._has_own_index_dir
            else self.earlier_cache_index,
            durability="relaxed",
            sync_seconds=_CACHE_SYNC_SECONDS,
            small_object_bytes=store.small_object_bytes,
            segment_bytes=store.segment_bytes,
            index_map_bytes=store.index_map_bytes,
            disk_type=store.disk_type,
            family=1,
        )

    @property
    def _has_own_index_dir(self) -> bool:
        """Whether the index is in a directory of its own: then nothing is written beside that directory."""
        return self.store.index_dir != self.store.data_dir / "index"

    @property
    def earlier_cache_index(self) -> Path:
        """Directory of the cache's index in the data directory and, by earlier releases, beside any index."""
        return self.store.index_dir.with_name(f"{self.store.index_dir.name}-cache")

    @property
    def origin_credentials(self) -> Path:
        """Directory of credentials files for origins."""
        return self.credentials_dir or self.store.data_dir / "origins"

    @property
    def freshness_path(self) -> Path:
        """File with the times at which cached objects were last known to be current."""
        return self.run_dir / "fresh"

    def fetch_socket(self, index: int) -> Path:
        """Return the Unix socket on which worker `index` fetches from origins for the others."""
        return self.run_dir / f"fetch-{index}.sock"

    @property
    def cache_manager_socket(self) -> Path:
        """Unix socket of the cache manager."""
        return self.run_dir / "cache-manager.sock"

    @property
    def control_dir(self) -> Path:
        """Directory of the embedded control store."""
        return self.store.data_dir / "control"

    @property
    def decoded_cache_dir(self) -> Path:
        """Directory of decoded samples; nothing in it outlives the node's processes."""
        return self.transform.decoded_cache_dir or self.store.data_dir / "decoded"

    @property
    def last_used_path(self) -> Path:
        """File with the times at which results of views were last read."""
        return self.store.data_dir / "view-uses"

    @property
    def clock_file(self) -> Path:
        """File with the time that the node last saw; see `ClockWatch`."""
        return self.store.data_dir / "clock"

    @property
    def coordinator_socket(self) -> Path:
        """Unix socket on which the coordinator serves the workers."""
        return self.run_dir / "coordinator.sock"

    @property
    def rebalancer_socket(self) -> Path:
        """Unix socket on which the rebalance process receives work and connections."""
        return self.run_dir / "rebalancer.sock"

    def transform_socket(self, index: int) -> Path:
        """Return the Unix socket of transform process `index`."""
        return self.run_dir / f"transform-{index}.sock"
