"""Settings of a node: frozen dataclasses, one table of options, one loader.

Law: validated once, here; passed down as values; nothing else reads flags, files or MESHD_* settings.
Precedence: flags, then environment (MESHD_*), then the configuration file, then the default.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Durability = Literal["commit", "relaxed"]
LogFormat = Literal["text", "json"]

_SHORTEST_MEMORY = 3600.0
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)}


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
    """A request body that brings nothing for this long is given up (408-like, nothing is stored)."""
    idle_timeout: float = 75.0
    """A keep-alive connection without a request is closed after this."""
    head_timeout: float = 20.0
    """A request line and headers whose end does not come within this are given up."""
    max_connections: int = 16_384
    """Open connections of one worker. Beyond, those idle longest are closed; a new one is refused (503) if
    none is."""
    drain_timeout: float = 30.0
    """After SIGTERM, running requests get this long to finish."""
    sigv2: bool = True
    """Whether signature version 2 is taken, in presigned URLs (boto3's default), headers and forms."""
    backlog: int = 1024
    """Connections the kernel queues for a worker."""


@dataclass(frozen=True, slots=True)
class TransformSettings:
    """The pool that decodes and augments, and the cache of finished batches."""

    processes: int = 2
    """Transform processes. Default: the cores this process may run on."""
    frame_cache_bytes: int = 1 << 30
    """Finished batches kept in shared memory, least recently used out first. It is RAM of the machine."""
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
    """HTTP processes on the one port. Default: min(4, cores). With 1, the steward lives in the worker."""
    lost_disks: tuple[Path, ...] = ()
    """Disks that are gone for good: the node starts without what was on them, whoever else has it."""
    users_file: Path | None = None
    """YAML list of users; read at start and on SIGHUP."""
    hang_timeout: float = 60.0
    """Seconds after which a process whose event loop stands still is killed and replaced."""
    view_cache_bytes: int = 10 << 30
    """Results of views and inflated archives kept on the disks; the least recently used go beyond."""
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
    stale_upload_days: int = 7
    """A multipart upload this old is aborted where no lifecycle rule is about it; 0: never."""
    audit_log: Path | None = None
    """JSON lines, one a request; `-` is the standard output. Opened anew on SIGHUP."""
    region: str = "us-east-1"
    """What GetBucketLocation answers, and the region new buckets get."""
    log_format: LogFormat = "text"
    log_level: str = "info"

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
    def fresh_path(self) -> Path:
        """When what is cached of origins was last known to be so."""
        return self.run_dir / "fresh"

    def fetch_socket(self, index: int) -> Path:
        """Unix socket on which worker `index` fetches from origins for the others."""
        return self.run_dir / f"fetch-{index}.sock"

    @property
    def keeper_socket(self) -> Path:
        """Unix socket on which the cache's policy is asked."""
        return self.run_dir / "keeper.sock"

    @property
    def control_dir(self) -> Path:
        """The embedded control store."""
        return self.store.data_dir / "control"

    @property
    def uses_path(self) -> Path:
        """When results of views were last read."""
        return self.store.data_dir / "view-uses"

    @property
    def steward_socket(self) -> Path:
        """Unix socket on which the steward serves the workers."""
        return self.run_dir / "steward.sock"

    def transform_socket(self, index: int) -> Path:
        """Unix socket of transform process `index`."""
        return self.run_dir / f"transform-{index}.sock"


def cores() -> int:
    """CPUs this process may run on (an affinity mask or cpuset counts, unlike `os.cpu_count`)."""
    return len(os.sched_getaffinity(0))


def parse_size(text: object) -> int:
    """Bytes of `4096`, `64KiB`, `1.5G`: decimal units and, with an i, binary ones. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a size such as 64MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _at_least(minimum: int) -> Callable[[object], int]:
    def parse(text: object) -> int:
        size = parse_size(text)
        if size < minimum:
            raise ValueError(f"expected at least {minimum >> 20} MiB")
        return size

    return parse


def _positive(text: object) -> int:
    value = int(str(text))
    if value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def _seconds(text: object) -> float:
    value = float(str(text))
    if not 0 < value < 1e7:
        raise ValueError("expected a number of seconds above 0")
    return value


def _days(text: object) -> int:
    value = int(str(text))
    if not 0 <= value <= 36_500:
        raise ValueError("expected a whole number of days, or 0 for never")
    return value


def _choice(*allowed: str) -> Callable[[object], str]:
    def parse(text: object) -> str:
        if str(text) not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(text)

    return parse


def _switch(text: object) -> bool:
    # YAML 1.1 reads `on` and `off` as booleans.
    if str(text).lower() not in {"on", "off", "true", "false"}:
        raise ValueError("expected on or off")
    return str(text).lower() in {"on", "true"}


def _name(text: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", str(text)):
        raise ValueError("expected letters, digits, dots and dashes, at most 63")
    return str(text)


def _path(text: object) -> Path:
    if not isinstance(text, str | os.PathLike) or not str(text):
        raise ValueError("expected a path")
    return Path(os.path.abspath(Path(text).expanduser()))


def _audit(text: object) -> Path:
    return Path("-") if text == "-" else _path(text)


def _paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = [item for item in value.split(os.pathsep) if item]
    if not isinstance(value, list | tuple):
        raise ValueError("expected a path or a list of paths")  # noqa: TRY004  reported as a bad setting
    return tuple(_path(item) for item in value)


def _domains(value: object) -> tuple[str, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("expected a domain or a list of domains")  # noqa: TRY004  reported as a bad setting
    found = tuple(str(item).lower().strip(".") for item in items)
    label = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
    for name in found:
        if len(name) > 180 or not re.fullmatch(rf"(?:{label}\.)*[a-z][a-z0-9-]*", name):
            raise ValueError("expected a domain such as s3.example.com, without a port")
    return found


_KUBERNETES_NAME = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"


def parse_control(value: object) -> ControlAddress | KubernetesAddress | None:
    """`embedded` → None; `etcd://HOST:PORT[,HOST:PORT][/PREFIX]` and `kubernetes://NAMESPACE/NAME` → their
    addresses. Raises ValueError."""
    text = str(value)
    if text == "embedded":
        return None
    if text.startswith("kubernetes:"):
        found = re.fullmatch(rf"kubernetes://({_KUBERNETES_NAME})?/({_KUBERNETES_NAME})", text)
        if found is None or len(found[2]) > 40:
            raise ValueError("expected kubernetes://NAMESPACE/NAME, in lower case, NAME of at most 40")
        return KubernetesAddress(found[1] or "", found[2])
    form = r"etcd(s?)://(?:([^:@/]+):([^@/]*)@)?([^/@]+)(/[A-Za-z0-9._/-]*)?"
    match = re.fullmatch(form, text)
    hint = "expected embedded, etcd://HOST:PORT[,HOST:PORT][/PREFIX] or kubernetes://NAMESPACE/NAME"
    if match is None:
        raise ValueError(hint)
    try:
        members = tuple(parse_listen(item) for item in match[4].split(","))
    except ValueError:
        raise ValueError(hint) from None
    login = (unquote(match[2]), unquote(match[3])) if match[2] else None
    prefix = f"/{(match[5] or '').strip('/') or 'shardmesh'}/"
    return ControlAddress(members, prefix, bool(match[1]), login)


def _roles(value: object) -> tuple[str, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if isinstance(items, list | tuple):
        items = [word for item in items for word in str(item).replace(",", " ").split()]
    known = ("store", "cache", "compute")
    if not isinstance(items, list) or not items or not set(items) <= set(known):
        raise ValueError("expected some of store, cache, compute")
    return tuple(role for role in known if role in items)


def _place(text: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/-]{0,63}", str(text)):
        raise ValueError("expected letters, digits, dots, dashes and slashes, at most 63")
    return str(text)


def _url(text: object) -> str:
    if not re.fullmatch(r"https?://[A-Za-z0-9._:\[\]-]{1,255}", str(text)):
        raise ValueError("expected a URL such as http://10.0.0.5:9000, without a path")
    return str(text)


def _copies(text: object) -> int:
    value = int(str(text))
    if not 1 <= value <= 8:
        raise ValueError("expected 1 to 8")
    return value


def _weight(text: object) -> int:
    value = int(str(text))
    if not 0 <= value <= 1 << 20:
        raise ValueError("expected a whole number up to 1048576, or 0 for the GiB of its disks")
    return value


def parse_listen(text: object) -> tuple[str, int]:
    """`HOST:PORT`, `:PORT`, `[v6]:PORT` → (host, port). Raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^:\[\]]*)):(\d{1,5})", str(text))
    if match is None or int(match[3]) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:9000 or [::1]:9000")
    return match[1] or match[2] or "0.0.0.0", int(match[3])


@dataclass(frozen=True, slots=True)
class Option:
    """One setting under its one name: `--name`, `MESHD_NAME`, `name:` in the file."""

    name: str
    parse: Callable[[object], object]
    default: Callable[[], object]

    @property
    def env(self) -> str:
        return "MESHD_" + self.name.replace("-", "_").upper()


OPTIONS: Mapping[str, Option] = {
    option.name: option
    for option in (
        Option("data-dir", _path, lambda: None),
        Option("disk", _paths, tuple),
        Option("lost-disk", _paths, tuple),
        Option("index-dir", _path, lambda: None),
        Option("durability", _choice("commit", "relaxed"), lambda: "commit"),
        Option("small-object", parse_size, lambda: 1 << 20),
        Option("segment-size", _at_least(1 << 20), lambda: 256 << 20),
        Option("index-map", _at_least(16 << 20), lambda: 64 << 30),
        Option("listen", parse_listen, lambda: ("127.0.0.1", 9000)),
        Option("tls-cert", _path, lambda: None),
        Option("tls-key", _path, lambda: None),
        Option("domain", _domains, tuple),
        Option("body-timeout", _seconds, lambda: 120.0),
        Option("idle-timeout", _seconds, lambda: 75.0),
        Option("head-timeout", _seconds, lambda: 20.0),
        Option("max-connections", _positive, lambda: 16_384),
        Option("drain-timeout", _seconds, lambda: 30.0),
        Option("sigv2", _switch, lambda: True),
        Option("hang-timeout", _seconds, lambda: 60.0),
        Option("workers", _positive, lambda: min(4, cores())),
        Option("transforms", _positive, cores),
        Option("transform-memory", _at_least(64 << 20), lambda: 2 << 30),
        Option("frame-cache", _at_least(1 << 20), lambda: 1 << 30),
        Option("user-ops", _switch, lambda: True),
        Option("user-op-seconds", _seconds, lambda: 30.0),
        Option("user-op-memory", _at_least(64 << 20), lambda: 4 << 30),
        Option("view-cache", _at_least(1 << 20), lambda: 10 << 30),
        Option("cache", _at_least(1 << 20), lambda: 0),
        Option("origin-credentials", _path, lambda: None),
        Option("lifecycle-interval", _seconds, lambda: 900.0),
        Option("stale-uploads", _days, lambda: 7),
        Option("scrub-interval", _seconds, lambda: 14 * 86400.0),
        Option("scrub-rate", _at_least(1 << 20), lambda: 64 << 20),
        Option("repair-interval", _seconds, lambda: 6 * 3600.0),
        Option("remember-removals", _seconds, lambda: 10 * 86400.0),
        Option("users", _path, lambda: None),
        Option("audit-log", _audit, lambda: None),
        Option("control", parse_control, lambda: None),
        Option("control-ca", _path, lambda: None),
        Option("zone", _place, str),
        Option("rack", _place, str),
        Option("role", _roles, lambda: ("store", "cache", "compute")),
        Option("weight", _weight, lambda: 0),
        Option("copies", _copies, lambda: 2),
        Option("advertise", _url, str),
        Option("lease", _seconds, lambda: 5.0),
        Option("down-after", _seconds, lambda: 900.0),
        Option("node-id", _name, lambda: _name(socket.gethostname())),
        Option("region", _name, lambda: "us-east-1"),
        Option("log-format", _choice("text", "json"), lambda: "text"),
        Option("log-level", _choice("debug", "info", "warning", "error"), lambda: "info"),
    )
}


def load_settings(
    flags: Mapping[str, object], *, config_file: Path | None = None, env: Mapping[str, str] | None = None
) -> NodeSettings:
    """The node's settings from flags (None means not given), MESHD_* variables and a YAML file.

    Raises ConfigError, which names the setting, where it came from and what would be accepted.
    """
    environment = os.environ if env is None else env
    given: dict[str, object] = {}
    if config_file is not None:
        given.update(_read_file(config_file))
    sources = dict.fromkeys(given, str(config_file))
    for option in OPTIONS.values():
        if environment.get(option.env):
            given[option.name], sources[option.name] = environment[option.env], option.env
    for name, value in flags.items():
        key = _known(name, "the command line")
        if value is not None and value != ():
            given[key], sources[key] = value, f"--{key}"
    return _assemble({name: _value(option, given, sources) for name, option in OPTIONS.items()})


def _value(option: Option, given: Mapping[str, object], sources: Mapping[str, str]) -> object:
    if option.name not in given:
        return option.default()
    try:
        return option.parse(given[option.name])
    except ValueError as error:
        shown = str(given[option.name])[:80]
        raise ConfigError(f"{option.name}: {error}, not {shown!r} (from {sources[option.name]})") from None


def _known(name: str, source: str) -> str:
    key = str(name).replace("_", "-")
    if key in OPTIONS:
        return key
    close = difflib.get_close_matches(key, OPTIONS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known settings: {', '.join(OPTIONS)}"
    raise ConfigError(f"unknown setting {str(name)[:80]!r} in {source}; {hint}")


def _read_file(path: Path) -> dict[str, object]:
    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path} must be a mapping of settings, such as `workers: 2`")
    return {_known(name, str(path)): value for name, value in (document or {}).items() if value is not None}


def _one_line(error: yaml.YAMLError) -> str:
    """The problem and its place, without the source lines PyYAML quotes: they may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or 'unreadable characters'}{place}"


def _assemble(values: Mapping[str, object]) -> NodeSettings:
    value = cast("Mapping[str, Any]", values)
    if value["data-dir"] is None:
        raise ConfigError("data-dir is required: say where the node keeps its data, as in --data-dir ./data")
    if (value["tls-cert"] is None) != (value["tls-key"] is None):
        given, missing = ("tls-key", "tls-cert") if value["tls-cert"] is None else ("tls-cert", "tls-key")
        raise ConfigError(f"{given} needs {missing}: give the certificate and its private key, or neither")
    host, port = value["listen"]
    data_dir: Path = value["data-dir"]
    store = StoreSettings(
        data_dir=data_dir,
        disks=_distinct(value["disk"]) or (data_dir,),
        index_dir=value["index-dir"] or data_dir / "index",
        durability=value["durability"],
        small_object_bytes=value["small-object"],
        segment_bytes=value["segment-size"],
        index_map_bytes=value["index-map"],
        tombstone_seconds=_memory(value) if value["control"] is not None else 0.0,
    )
    http = HttpSettings(
        host=host,
        port=port,
        domains=value["domain"],
        tls_cert=value["tls-cert"],
        tls_key=value["tls-key"],
        body_timeout=value["body-timeout"],
        idle_timeout=value["idle-timeout"],
        head_timeout=value["head-timeout"],
        max_connections=-(-value["max-connections"] // value["workers"]),
        drain_timeout=value["drain-timeout"],
        sigv2=value["sigv2"],
    )
    return NodeSettings(
        node_id=value["node-id"],
        store=store,
        http=http,
        transform=TransformSettings(
            value["transforms"],
            value["frame-cache"],
            value["transform-memory"],
            user_ops=value["user-ops"],
            user_op_seconds=value["user-op-seconds"],
            user_op_memory=value["user-op-memory"],
        ),
        cluster=_cluster(value),
        workers=value["workers"],
        lost_disks=value["lost-disk"],
        users_file=value["users"],
        view_cache_bytes=value["view-cache"],
        cache_bytes=value["cache"],
        credentials_dir=value["origin-credentials"],
        lifecycle_interval=value["lifecycle-interval"],
        stale_upload_days=value["stale-uploads"],
        scrub_interval=value["scrub-interval"],
        scrub_rate=value["scrub-rate"],
        audit_log=value["audit-log"],
        region=value["region"],
        hang_timeout=value["hang-timeout"],
        log_format=value["log-format"],
        log_level=value["log-level"],
    )


def _memory(value: Mapping[str, Any]) -> float:
    """How long removals are remembered: longer than a node may be away without being given up."""
    seconds: float = value["remember-removals"]
    least = max(_SHORTEST_MEMORY, 2 * value["down-after"])
    if seconds < least:
        raise ConfigError(
            f"remember-removals: {seconds:g} seconds are too few: a node that is away for longer begins "
            f"anew. Say at least {least:g} (twice down-after, and an hour)"
        )
    return seconds


def _cluster(value: Mapping[str, Any]) -> ClusterSettings:
    control = value["control"]
    if value["control-ca"] is not None:
        if not isinstance(control, ControlAddress) or not control.tls:
            raise ConfigError(
                "control-ca: give it with --control etcds://…, whose certificates it vouches for"
            )
        control = replace(control, ca=value["control-ca"])
    host = value["listen"][0]
    if control is not None and not value["advertise"] and host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"advertise is required where the node listens on every address ({host}): say under which URL "
            "others reach it, as in --advertise http://10.0.0.5:9000"
        )
    return ClusterSettings(
        control,
        value["zone"],
        value["rack"],
        value["role"],
        value["weight"],
        value["copies"],
        value["advertise"],
        value["lease"],
        value["down-after"],
        value["repair-interval"],
    )


def _distinct(disks: tuple[Path, ...]) -> tuple[Path, ...]:
    if len(set(disks)) != len(disks):
        raise ConfigError("disk: the same directory is given twice; each --disk needs its own")
    return disks
