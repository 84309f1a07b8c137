"""Identity of a data directory: the cluster and the node it belongs to (`DATA_DIR/cluster.json`).

Law: a directory belongs to one node of one cluster for good. A node refuses to start on objects of
another cluster or node, or on objects written before the map existed; they are never mixed. The control
store keeps a generation count per directory (`directories/NODE`). A directory whose count differs (the
node has run on another one since, or this is an older disk image) is not trusted: the node compares its
contents with the other owners as if it were empty. The same entry records the count at which the node last
started or lost a process; the other owners then compare with it, since they may lack its last writes.
Disks apart from the data directory have a copy of the file, without a count. A data directory that was lost
gets it back from them; once its index is rebuilt, its contents are compared, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.control_api import ABSENT, MESH_ID, ControlError, VersionConflictError
from meshd.errors import StartupError
from meshd.store.disks.layout import EXTENTS
from meshd.store.disks.startup_recovery import refuse_orphaned_data
from meshd.util import shared_counters
from meshd.util.durable_directories import sync_directory
from meshwire.cluster import transitions

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import NodeSettings, StoreSettings
    from meshd.control.cluster_map_store import ClusterMapStore
    from meshd.control.control_api import ControlStore
    from meshwire.cluster import ClusterMap

IDENTITY_FILE: Final = "cluster.json"
DIRECTORIES_TOPIC: Final = "directories"
MACHINES_TOPIC: Final = "machines"
_EMPTY: Final = "is empty"
_FROM_DISKS: Final = "was lost, and its index was rebuilt from the disks"
_EVERY: Final = 3600.0  # seconds between two counts
_DEATH_CHECK: Final = 1.0  # seconds
_log = logging.getLogger("meshd.cluster")


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Identity of a data directory. `directory` distinguishes two directories of the same node; `count`,
    which rises with each start and every hour, distinguishes two states of one directory."""

    mesh: str
    node_id: str
    directory: str
    count: int = 0

    @property
    def lease_holder(self) -> str:
        """The holder name of the node's lease."""
        return f"{self.node_id}/{self.directory}"


def read_identity(data_dir: Path) -> NodeIdentity | None:
    """Reads the identity of a directory; None if it has none yet. Raises StartupError."""
    return _read(data_dir / IDENTITY_FILE)


def _read(path: Path) -> NodeIdentity | None:
    try:
        document = json.loads(path.read_bytes())
        mesh, node_id, directory = (str(document[name]) for name in ("mesh", "node_id", "directory"))
        return NodeIdentity(mesh, node_id, directory, int(document.get("count", 0)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"{path} cannot be read ({type(error).__name__}); restore it from a backup"
        ) from None


def require_single_node(settings: StoreSettings) -> None:
    """Raises StartupError if a directory belongs to a mesh node but the node was started without a mesh."""
    own = {settings.data_dir: read_identity(settings.data_dir)}
    for path, found in (own | _copies(settings)).items():
        if found is not None:
            raise StartupError(
                f"{path} belongs to node {found.node_id} of a mesh; start it with its previous --control"
            )


def belongs_to_mesh(settings: StoreSettings) -> bool:
    """Returns True if the data directory or one of its disks belongs to a node of a mesh."""
    return (settings.data_dir / IDENTITY_FILE).exists() or bool(_copies(settings))


def copy_identity(settings: StoreSettings) -> None:
    """Copies the identity of the data directory to its disks (blocking); one that fails is left out."""
    found = read_identity(settings.data_dir)
    if found is None:
        return
    copy, present = replace(found, count=0), _copies(settings)
    for disk in _other_disks(settings):
        base = disk / EXTENTS
        if present.get(disk) == copy or not os.path.isdir(base):
            continue
        try:
            _write(base / IDENTITY_FILE, copy)
        except OSError as error:
            _log.warning("cannot write a copy of %s: %s", IDENTITY_FILE, error)


def restore_identity(settings: StoreSettings) -> None:
    """Writes the identity of a data directory that has none from the copies on its disks, if there are any
    (blocking). Raises StartupError, also if a disk belongs to another node of the same mesh; OSError."""
    own, found = read_identity(settings.data_dir), _copies(settings)
    if own is not None:
        for disk, identity in found.items():
            if identity.mesh == own.mesh and identity.node_id != own.node_id:
                raise StartupError(
                    f"{disk} is a disk of node {identity.node_id}, and this is {own.node_id}: mount each "
                    f"disk at its own node. Only if {identity.node_id} no longer uses it, remove "
                    f"{disk / EXTENTS}"
                )
    if own is not None or not found:
        return
    if len(set(found.values())) > 1:
        holders = ", ".join(f"{disk} of {identity.node_id}" for disk, identity in found.items())
        raise StartupError(f"the disks belong to different data directories ({holders}); check --disk")
    disk, identity = next(iter(found.items()))
    _log.warning("%s has no %s: restored from %s", settings.data_dir, IDENTITY_FILE, disk)
    _write(settings.data_dir / IDENTITY_FILE, identity)


def _copies(settings: StoreSettings) -> dict[Path, NodeIdentity]:
    """Returns the readable copies by disk."""
    copies = {}
    for disk in _other_disks(settings):
        with suppress(StartupError):
            if (found := _read(disk / EXTENTS / IDENTITY_FILE)) is not None:
                copies[disk] = found
    return copies


def _other_disks(settings: StoreSettings) -> list[Path]:
    return [disk for disk in settings.disks if disk != settings.data_dir]


async def establish_identity(
    control: ControlStore, maps: ClusterMapStore, settings: NodeSettings, copies: int
) -> NodeIdentity:
    """Returns the directory's identity in the mesh; creates and stores one if it has none. `copies`: the
    smallest replica count of any bucket. Raises StartupError, ControlError."""
    data_dir, node_id = settings.store.data_dir, settings.node_id
    mesh, cluster = await _mesh_id(control), maps.current()
    found = read_identity(data_dir)
    if found is None:
        if cluster is not None and cluster.nodes and has_been_used(settings):
            raise StartupError(
                f"{data_dir} holds objects of a node without a mesh, but this mesh already exists; give the "
                "node an empty directory and copy the objects over S3"
            )
        await _admit(maps, settings, copies, _EMPTY)
        found = NodeIdentity(mesh, node_id, secrets.token_hex(8))
    elif found.node_id != node_id:
        raise StartupError(
            f"{data_dir} belongs to node {found.node_id}; start it with --node-id {found.node_id}, "
            "or give this node a directory of its own"
        )
    elif found.mesh != mesh:
        what = "the control store is new or was emptied" if cluster is None else "that is another mesh"
        raise StartupError(
            f"{data_dir} belongs to mesh {found.mesh}, the control store to {mesh}: {what}. "
            "Check --control; objects of another mesh are copied over S3"
        )
    elif not _has_index(settings):  # its disks were emptied, but not the directory of the identity file
        await _admit(maps, settings, copies, _EMPTY)
    elif why := _difference(found, await _read_generation(control, node_id)):
        await _admit(maps, settings, copies, why)
    counted = await increment_generation(control, data_dir, found)
    await _record_machine(control, settings)
    return counted


class _Machine(msgspec.Struct, frozen=True):
    """The machine whose disks have a node's directories."""

    machine: str


async def recorded_machine(control: ControlStore, node_id: str) -> str:
    """Returns the machine on which a node last ran on its directory; "" if none is known."""
    entry = await control.get(f"{MACHINES_TOPIC}/{node_id}")
    return "" if entry is None else msgspec.json.decode(entry.value, type=_Machine).machine


async def _record_machine(control: ControlStore, settings: NodeSettings) -> None:
    machine = settings.cluster.machine
    if machine and machine != await recorded_machine(control, settings.node_id):
        value = msgspec.json.encode(_Machine(machine))
        await control.put(f"{MACHINES_TOPIC}/{settings.node_id}", value)


class _Generation(msgspec.Struct, frozen=True):
    """The directory on which a node last ran, its count, and the count at the node's last start (or at the
    last death of one of its processes; 0 in entries of earlier releases)."""

    directory: str
    count: int
    started: int = 0


async def increment_generation(
    control: ControlStore, data_dir: Path, identity: NodeIdentity, *, started: bool = True
) -> NodeIdentity:
    """Stores the next count, first in the directory, then in the control store. So a directory that is ahead
    was interrupted in between, and one that is behind is an older disk image. `started`: the other owners are
    to compare with this node. Raises ControlError, OSError."""
    known = await _read_generation(control, identity.node_id)
    counted = replace(identity, count=max(identity.count, known.count if known else 0) + 1)
    await asyncio.to_thread(_write, data_dir / IDENTITY_FILE, counted)
    since = counted.count if started else known.started if known else 0
    value = msgspec.json.encode(_Generation(counted.directory, counted.count, since))
    await control.put(f"{DIRECTORIES_TOPIC}/{counted.node_id}", value)
    return counted


def latest_starts(control: ControlStore) -> dict[str, int]:
    """Returns, by node id, a number that rises when a node starts or loses a process that writes."""
    entries = control.cached_entries(DIRECTORIES_TOPIC)
    return {
        key.partition("/")[2]: msgspec.json.decode(entry.value, type=_Generation).started
        for key, entry in entries.items()
    }


async def maintain_generation(control: ControlStore, data_dir: Path, identity: NodeIdentity) -> None:
    """Runs forever. Counts every hour, so that a disk image more than an hour old is recognized, and when a
    process of this node has died."""
    deaths = 0
    while True:
        for _ in range(round(_EVERY / _DEATH_CHECK)):
            await asyncio.sleep(_DEATH_CHECK)
            if shared_counters.count_deaths() != deaths:
                break
        known_deaths = shared_counters.count_deaths()
        try:
            known = await _read_generation(control, identity.node_id)
            if known is None or known.directory == identity.directory:
                started = known_deaths != deaths
                identity = await increment_generation(control, data_dir, identity, started=started)
            deaths = known_deaths
        except (ControlError, OSError, RuntimeError) as error:  # the last: no thread can be started
            _log.warning("cannot store the generation of the data directory", extra={"why": str(error)})


async def _read_generation(control: ControlStore, node_id: str) -> _Generation | None:
    entry = await control.get(f"{DIRECTORIES_TOPIC}/{node_id}")
    return None if entry is None else msgspec.json.decode(entry.value, type=_Generation)


def _difference(found: NodeIdentity, known: _Generation | None) -> str:
    """Returns how a directory differs from the one its node last ran on; "" if it does not."""
    if known is None:
        return ""
    if known.directory != found.directory:
        return f"is not the directory that {found.node_id} last ran on"
    if found.count == 0:
        return _FROM_DISKS
    return "is an older image of that directory" if known.count > found.count else ""


async def _mesh_id(control: ControlStore) -> str:
    entry = await control.get(MESH_ID)
    if entry is None:
        with suppress(VersionConflictError):
            await control.put(MESH_ID, secrets.token_hex(8).encode(), expect=ABSENT)
        entry = await control.get(MESH_ID)
        assert entry is not None
    return entry.value.decode()


async def _admit(maps: ClusterMapStore, settings: NodeSettings, copies: int, why: str) -> None:
    """Admits a node with an empty or untrusted directory: marks its data in the map as lost, or refuses if it
    may hold the last copy. Existing data is compared when the node joins again."""
    cluster, node_id, data_dir = maps.current(), settings.node_id, settings.store.data_dir
    if cluster is None or not cluster.nodes:
        return
    if why == _EMPTY:  # with a rebuilt index the disks have everything again
        await asyncio.to_thread(refuse_orphaned_data, settings.store)

    def distrusted(present: ClusterMap | None) -> ClusterMap:
        assert present is not None
        node = present.node(node_id)
        if node is None or node.state == "down" or not node.stores:
            return present
        if transitions.can_lose_node(present, node_id, copies):
            return transitions.mark_node_down(present, node_id)
        if why != _EMPTY and data_dir in settings.lost_disks:
            return transitions.mark_node_away(present, node_id)
        raise StartupError(
            f"according to the map, {node_id} holds objects that no other available node has, and {data_dir} "
            f"{why}: {_remedy(settings, why)}"
        )

    after = await maps.update_map(distrusted)
    if why != _EMPTY and after != cluster:
        _log.warning("the directory %s: comparing it with the other nodes", why, extra={"node": node_id})


def _remedy(settings: NodeSettings, why: str) -> str:
    if why == _EMPTY:
        return (
            "start it on its previous directory, or give those objects up with "
            f"`mesh cluster lost {settings.node_id} --anyway`"
        )
    if why == _FROM_DISKS:
        return (
            "bring the other nodes back first. If the disks have the latest data that there is, start once "
            f"with --lost-disk {settings.store.data_dir}"
        )
    return (
        "start it on the directory it last ran on, or bring the other nodes back first. If that directory "
        f"and its data are lost for good, start once with --lost-disk {settings.store.data_dir}"
    )


def has_been_used(settings: NodeSettings) -> bool:
    """Returns True if a node has run on these directories before."""
    return settings.control_dir.exists() or _has_index(settings)


def _has_index(settings: NodeSettings) -> bool:
    index, cache = settings.store.index_dir, settings.cache_store.index_dir  # the cache's may be in it
    others = {cache, index / "lost+found"}  # which the root of an ext4 file system has
    return index.is_dir() and any(entry not in others for entry in index.iterdir())


def _write(path: Path, identity: NodeIdentity) -> None:
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps(asdict(identity)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync_directory(path.parent)  # otherwise a power failure may bring back an older count
