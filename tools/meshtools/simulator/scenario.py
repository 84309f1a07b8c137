"""Scenarios: a mesh, a dataset, jobs and faults, as TOML.

Law: bytes, seconds and their quotients, as the names say; a name that is not known is an error.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np

from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.strict_json import suggestion

_Table = TypeVar("_Table")
_EXPECTED = {
    "int": "a whole number from 0 up, such as 1_000_000",
    "float": "a number from 0 up, such as 2e9",
    "bool": "true or false",
}
_ABOVE_ZERO = {
    "mesh": (
        *("nodes", "copies", "slots", "nodes_per_rack", "disks_per_node", "cores_per_node"),
        *("disk_bytes_per_second", "nic_bytes_per_second", "rack_oversubscription"),
        *("repair_bytes_per_second", "lease_seconds"),
    ),
    "data": ("samples", "sample_bytes", "samples_per_shard"),
    "jobs": (
        *("count", "epochs", "batch", "prefetch", "block_shards", "trainer_bytes_per_second"),
        "share",
    ),
    "fault": ("count", "at_once", "factor"),
    "origin": ("bytes_per_second",),
    "writes": ("bytes_per_second", "object_bytes", "retry_seconds"),
    "disks": ("years", "failures_per_year", "repair_seconds"),
}
"""Names of each table whose values are not 0."""
FaultKind = Literal["lose", "restart", "slow", "join", "partition"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The nodes, all alike.

    copies: of every shard; slots: of the map; nodes_per_rack: a rack is a zone. read_ahead_bytes: the setting
    of a node; disk_rest_seconds: between two reads of a window, beside what the disk takes; page_cache_bytes:
    memory in which it has what it read. rack_oversubscription: sum of the nodes' ports ÷ the uplink.
    lease_seconds: until the map says that a node is away; lost_seconds: until it is given up, and repair
    begins; repair_bytes_per_second: that each node receives, and sends, at most; stored_bytes: of one copy of
    other data than the jobs', which repairs move, too."""

    nodes: int
    copies: int = 2
    slots: int = 16_384
    nodes_per_rack: int = 40
    disks_per_node: int = 12
    disk_bytes_per_second: float = 200e6
    seek_scale: float = 1.0
    disk_rest_seconds: float = 0.0
    read_ahead_bytes: float = 64e9
    page_cache_bytes: float = 64e9
    cores_per_node: float = 32
    nic_bytes_per_second: float = 3.125e9
    rack_oversubscription: float = 1.0
    lease_seconds: float = 10.0
    lost_seconds: float = 600.0
    repair_bytes_per_second: float = 50e6
    stored_bytes: float = 0.0
    request_seconds: float = 0.002


@dataclass(frozen=True, slots=True)
class Data:
    """A dataset of equal samples in tar shards. cpu_seconds_per_sample: of ops and delivery; …_sent_sample:
    of the delivery of what was prepared for another job; …_read_byte: of reads from disks; …_seek: of rows
    that come scattered, where each node builds its own rows of a batch, and not whole ones."""

    samples: int
    sample_bytes: int = 70_000
    samples_per_shard: int = 1024
    cpu_seconds_per_sample: float = 0.0
    cpu_seconds_per_sent_sample: float = 0.0
    cpu_seconds_per_read_byte: float = 0.0
    cpu_seconds_per_seek: float = 0.0
    delivered_bytes_per_sample: int = 0


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs that begin together. batch: samples of a step of all ranks; step_seconds: of compute; prefetch:
    batches requested ahead. shuffle: `blocks` of block_shards shards, `global` or `none`. sharing: all have
    one plan, and a batch is prepared once, by one node, while all nodes read ahead what is on their disks;
    else each has a seed of its own, and nodes read and prepare their rows. trainer_bytes_per_second: that
    all hosts of a job receive. share: of the samples that are trained on, from the beginning of the data."""

    count: int = 1
    epochs: int = 1
    batch: int = 4096
    step_seconds: float = 0.1
    prefetch: int = 8
    shuffle: Literal["blocks", "global", "none"] = "blocks"
    block_shards: int = 64
    sharing: bool = False
    trainer_bytes_per_second: float = 1e12
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at `at_seconds` after the start: `lose` nodes for good, `restart` nodes one group after
    the other, `slow` disks by `factor`, `join` new nodes, `partition`: nodes reach neither the others, nor
    trainers, nor the control store. first, count: which nodes; at_once: of a group; seconds: how long each
    group is away, disks are slow, or nodes are cut off."""

    kind: FaultKind
    at_seconds: float
    first: int = 0
    count: int = 1
    at_once: int = 1
    seconds: float = 30.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Origin:
    """A remote store from which all shards come; nodes cache them. bytes_per_second: that it gives to all
    nodes together; cache_bytes: of each node."""

    bytes_per_second: float
    cache_bytes: float
    request_seconds: float = 0.05


@dataclass(frozen=True, slots=True)
class Writes:
    """Objects that are written beside the jobs. bytes_per_second: of objects, each of which is stored as
    often as the mesh has copies; retry_seconds: until a write is repeated that a node did not answer."""

    bytes_per_second: float
    object_bytes: int = 64_000_000
    retry_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class Disks:
    """Ten years of disk failures instead of an epoch. failures_per_year: of a disk; repair_seconds: until its
    data has its copies again."""

    years: float = 10.0
    failures_per_year: float = 0.015
    repair_seconds: float = 36_000.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole scenario. `disks`: set for durability; else `data` and `jobs` are."""

    name: str
    mesh: Mesh
    data: Data | None
    jobs: Jobs
    faults: tuple[Fault, ...]
    disks: Disks | None
    seed: int = 0
    origin: Origin | None = None
    writes: Writes | None = None


def shipped_scenarios() -> list[str]:
    """Return the names of the scenarios that ship with the package."""
    found = files("meshtools.simulator").joinpath("scenarios").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def scenario_text(name: str) -> str:
    """Return the TOML of a scenario, from a file, or of one that ships by its name.

    Raises NotFoundError, ConfigurationError.
    """
    path = Path(name)
    try:
        if path.suffix == ".toml" and path.is_file():
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}") from None
    if path.suffix == ".toml":
        raise NotFoundError(f"there is no file {name}", status=404)
    known = shipped_scenarios()
    if name not in known:
        raise NotFoundError(
            f"there is no scenario {name!r}{suggestion(name, known)} (mesh simulate --list shows those that "
            "ship; scenarios of your own are files that end in .toml)",
            status=404,
        )
    shipped = files("meshtools.simulator").joinpath("scenarios").joinpath(f"{name}.toml")
    return shipped.read_text(encoding="utf-8")


def summary(text: str) -> str:
    """Return what a scenario is about: its first line, a comment; "" without one."""
    first = text.partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def parse_scenario(text: str, name: str) -> Scenario:
    """Parse a scenario. Raises ConfigurationError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{name} is not TOML: {error}") from None
    known = ("mesh", "data", "jobs", "fault", "disks", "seed", "origin", "writes")
    for key in document:
        if key not in known:
            raise ConfigurationError(f"{name}: there is no table {key!r}{suggestion(key, known)}")
    seed = document.pop("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigurationError(f"{name}: seed = {seed!r}: expected {_EXPECTED['int']}")
    for key, value in document.items():
        if key == "fault" and not isinstance(value, list):
            raise ConfigurationError(f"{name}: faults are a list: write [[fault]], with two brackets")
        if key != "fault" and not isinstance(value, dict):
            raise ConfigurationError(f"{name}: {key} is a table: write [{key}], with one pair of brackets")
    if "mesh" not in document or ("data" in document) == ("disks" in document):
        raise ConfigurationError(f"{name}: give [mesh], and either [data] or [disks]")
    found = Scenario(
        name,
        _parse_table(Mesh, document["mesh"], "mesh"),
        _parse_table(Data, document["data"], "data") if "data" in document else None,
        _parse_table(Jobs, document.get("jobs", {}), "jobs"),
        tuple(_parse_table(Fault, each, "fault") for each in document.get("fault", [])),
        _parse_table(Disks, document["disks"], "disks") if "disks" in document else None,
        seed,
        _parse_table(Origin, document["origin"], "origin") if "origin" in document else None,
        _parse_table(Writes, document["writes"], "writes") if "writes" in document else None,
    )
    _check(found)
    return found


def _parse_table(kind: type[_Table], values: dict[str, Any], table: str) -> _Table:
    """Raises ConfigurationError for names that are not known, values of another type, and values below 0."""
    known = {field.name: field for field in fields(cast("Any", kind))}
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(f"[{table}]: there is no {name!r}{suggestion(name, known)}")
        wanted = str(known[name].type)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if wanted == "int":
            fits = number and isinstance(value, int) and value >= 0
        elif wanted == "float":
            fits = number and 0 <= value < math.inf
        elif wanted == "bool":
            fits = isinstance(value, bool)
        else:
            fits = isinstance(value, str)
        if not fits:
            raise ConfigurationError(
                f"[{table}] {name} = {value!r}: expected {_EXPECTED.get(wanted, 'text')}"
            )
    missing = [name for name, each in known.items() if each.default is MISSING and name not in values]
    if missing:
        raise ConfigurationError(f"[{table}]: {' and '.join(missing)} missing")
    found = kind(**values)
    for name in _ABOVE_ZERO[table]:
        if not getattr(found, name) > 0:
            least = "at least 1" if known[name].type == "int" else "above 0"
            raise ConfigurationError(f"[{table}] {name} = {getattr(found, name)!r}: it must be {least}")
    return found


def _check(found: Scenario) -> None:
    """Raises ConfigurationError for what cannot be simulated."""
    mesh, jobs = found.mesh, found.jobs
    if mesh.copies > min(mesh.nodes, 8):
        raise ConfigurationError(f"[mesh] copies = {mesh.copies}: at most 8, and at most as many as nodes")
    if mesh.nodes > np.iinfo(np.int16).max or mesh.slots & (mesh.slots - 1):
        raise ConfigurationError("[mesh]: at most 32,767 nodes; slots is a power of two")
    if jobs.shuffle not in ("blocks", "global", "none"):
        raise ConfigurationError(f"[jobs] shuffle = {jobs.shuffle!r}: blocks, global or none")
    if jobs.share > 1:
        raise ConfigurationError(f"[jobs] share = {jobs.share}: at most 1")
    if found.disks is not None and (found.origin is not None or found.writes is not None):
        raise ConfigurationError("years of failures have no [origin] and no [writes]")
    if found.origin is not None and jobs.shuffle == "global":
        raise ConfigurationError("[origin]: shuffle is blocks or none")
    for fault in found.faults:
        if fault.kind not in get_args(FaultKind):
            raise ConfigurationError(f"[[fault]] kind = {fault.kind!r}: {', '.join(get_args(FaultKind))}")
        if fault.kind != "join" and fault.first + fault.count > mesh.nodes:
            raise ConfigurationError(
                f"[[fault]] of nodes {fault.first} to {fault.first + fault.count - 1}: the mesh has nodes 0 "
                f"to {mesh.nodes - 1}"
            )
