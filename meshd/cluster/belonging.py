"""Which mesh a data directory belongs to, and as which node: `DATA_DIR/cluster.json`.

Law: a directory belongs to one node of one mesh for ever. Objects of another mesh, of another node, or of a
time before the map was made are refused with a sentence, never mixed in.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from meshd.control.interface import ABSENT, MESH_ID, VersionConflictError
from meshd.errors import StartupError
from meshwire.cluster import transitions as turn

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import NodeSettings
    from meshd.control.clustermaps import ClusterMaps
    from meshd.control.interface import ControlStore
    from meshwire.cluster import ClusterMap

FILE: Final = "cluster.json"


@dataclass(frozen=True, slots=True)
class Belonging:
    """`directory` tells two directories apart that say they are the same node."""

    mesh: str
    node_id: str
    directory: str

    @property
    def holder(self) -> str:
        """As whom the node holds its lease."""
        return f"{self.node_id}/{self.directory}"


def read_belonging(data_dir: Path) -> Belonging | None:
    """What the directory says; None for one that belongs to nobody yet. Raises StartupError."""
    path = data_dir / FILE
    try:
        document = json.loads(path.read_bytes())
        return Belonging(str(document["mesh"]), str(document["node_id"]), str(document["directory"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"{path} cannot be read ({type(error).__name__}); restore it from a copy"
        ) from None


def check_lone(data_dir: Path) -> None:
    """Raise StartupError when the directory is a mesh's and the node was started without that."""
    found = read_belonging(data_dir)
    if found is not None:
        raise StartupError(
            f"{data_dir} belongs to node {found.node_id} of a mesh; start it with the --control it had"
        )


async def belong(control: ControlStore, maps: ClusterMaps, settings: NodeSettings, copies: int) -> Belonging:
    """The directory's place in the mesh; made, and kept, when it has none. `copies`: the fewest that any
    bucket has. Raises StartupError, ControlError."""
    data_dir, node_id = settings.store.data_dir, settings.node_id
    mesh, cluster = await _mesh_id(control), maps.current()
    found = read_belonging(data_dir)
    if found is None:
        if cluster is not None and cluster.nodes and was_used(settings):
            raise StartupError(
                f"{data_dir} holds objects of a node without a mesh, and this mesh exists already; give the "
                "node an empty directory and copy the objects over S3"
            )
        await _admit(maps, settings, copies)
        found = Belonging(mesh, node_id, secrets.token_hex(8))
        _write(data_dir, found)
    elif found.node_id != node_id:
        raise StartupError(
            f"{data_dir} belongs to node {found.node_id}; start it with --node-id {found.node_id}, "
            "or give this node a directory of its own"
        )
    elif found.mesh != mesh:
        what = "the control store is new or was emptied" if cluster is None else "that is another mesh"
        raise StartupError(
            f"{data_dir} belongs to mesh {found.mesh}, and the control store speaks for {mesh}: {what}. "
            "Check --control; objects of another mesh are copied over S3"
        )
    elif not _has_index(settings):  # its disks were emptied, and the file that says whose it is was not
        await _admit(maps, settings, copies)
    return found


async def _mesh_id(control: ControlStore) -> str:
    entry = await control.get(MESH_ID)
    if entry is None:
        with suppress(VersionConflictError):
            await control.put(MESH_ID, secrets.token_hex(8).encode(), expect=ABSENT)
        entry = await control.get(MESH_ID)
        assert entry is not None
    return entry.value.decode()


async def _admit(maps: ClusterMaps, settings: NodeSettings, copies: int) -> None:
    """A node that has nothing: whatever the map says that it has is lost, or, of the last copy, refused."""
    cluster, node_id = maps.current(), settings.node_id
    if cluster is None or not cluster.nodes:
        return

    def replace(present: ClusterMap | None) -> ClusterMap:
        assert present is not None
        node = present.node(node_id)
        if node is None or node.state in ("joining", "down") or not node.stores:
            return present
        if not turn.covered(present, node_id, copies):
            raise StartupError(
                f"by the map {node_id} has objects of which no other node that is up has a copy, and "
                f"{settings.store.data_dir} is empty: start it on the directory it had, or give those "
                f"objects up with `mesh cluster lost {node_id} --anyway`"
            )
        return turn.lost(present, node_id)

    await maps.change(replace)


def was_used(settings: NodeSettings) -> bool:
    """Whether a node has run on these directories before."""
    return settings.control_dir.exists() or _has_index(settings)


def _has_index(settings: NodeSettings) -> bool:
    index = settings.store.index_dir
    return index.is_dir() and any(index.iterdir())


def _write(data_dir: Path, belonging: Belonging) -> None:
    path = data_dir / FILE
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(json.dumps(asdict(belonging)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
