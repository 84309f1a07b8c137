"""The cluster, put together: a process's view of it, and what the steward does for it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from meshd.cluster.agreeing import other_domains, tell_domains
from meshd.cluster.belonging import keep_counting, read_belonging
from meshd.cluster.guardian import Guardian, Looking, Marking
from meshd.cluster.membership import Membership
from meshd.cluster.mesh import Mesh, lone_map
from meshd.cluster.retry_after import RetryAfter
from meshd.control.clustermaps import ClusterMaps
from meshd.errors import StartupError
from meshd.kit import pulse
from meshd.runtime.moving import mover
from meshwire.cluster import Node as Member
from meshwire.cluster.maps import MAX_WEIGHT

if TYPE_CHECKING:
    from meshd.cluster.moving import Mover
    from meshd.config import NodeSettings
    from meshd.control.buckets import BucketTable
    from meshd.control.interface import ControlStore
    from meshd.kit.clock import Clock
    from meshd.kit.tasks import Tasks
    from meshd.runtime.node import Node
    from meshwire.cluster.maps import Role

_log = logging.getLogger("meshd.cluster")
_GIB: Final = 1 << 30


def open_mesh(
    settings: NodeSettings, control: ControlStore, buckets: BucketTable, clock: Clock, process: int | None
) -> Mesh:
    """The view of one process of a node, which is number `process` of those that answer by a map."""
    if settings.cluster.control is None:
        lone = lone_map(settings.node_id, settings.endpoint)
        return Mesh(settings.node_id, control, buckets.copies, lone=lone, writes_of=buckets.writes)
    marking = Marking(control, ClusterMaps(control))
    look = Looking(marking, clock, settings.cluster.lease)

    def goes_by(version: int) -> None:
        if process is not None:
            pulse.goes_by(process, version, clock.monotonic())

    def held() -> tuple[int, float]:
        version, until = pulse.held()
        return version, until - clock.monotonic()

    return Mesh(
        settings.node_id,
        control,
        buckets.copies,
        look=look,
        writes_of=buckets.writes,
        homes_of=buckets.homes,
        born_of=buckets.born,
        goes_by=goes_by,
        held=held,
        newest=pulse.newest_gone_by,
        retry_after=RetryAfter(settings.cluster.lease, clock),
    )


def member(settings: NodeSettings) -> Member:
    """The node as it says of itself."""
    wanted = settings.cluster
    roles = cast("tuple[Role, ...]", wanted.roles)
    weight = wanted.weight or _gibibytes(settings)
    return Member(settings.node_id, settings.endpoint, wanted.zone, wanted.rack, weight, roles)


def _gibibytes(settings: NodeSettings) -> int:
    """Of the disks, each file system once."""
    sizes = {}
    for disk in settings.store.disks:
        with suppress(OSError):  # it fails, and the node does without
            found = os.statvfs(disk)
            sizes[os.stat(disk).st_dev] = found.f_blocks * found.f_frsize
    return min(max(1, sum(sizes.values()) // _GIB), MAX_WEIGHT)


async def join(node: Node, tasks: Tasks) -> Mover | None:
    """Take the node's place in the map, and look after it and the others from now on; gives its mover. A lone
    node does nothing. Raises StartupError, ControlError."""
    settings, control, clock = node.settings, node.control, node.clock
    if settings.cluster.control is None:
        return None
    belonging = read_belonging(settings.store.data_dir)
    if belonging is None:
        raise StartupError(f"{settings.store.data_dir} belongs to no mesh; start the node again")
    maps = ClusterMaps(control)
    membership = Membership(control, maps, member(settings), belonging.holder, clock, settings.cluster)
    await membership.join()
    await tell_domains(control, settings.node_id, settings.http.domains)
    for node_id, why in other_domains(control, node.mesh.map()).items():
        _log.warning("a node answers for other domains", extra={"node": node_id, "why": why})
    guardian = Guardian(
        node.mesh,
        control,
        Marking(control, maps),
        lambda: node.buckets.fewest_copies(node.mesh.map().copies, node.mesh.map().counts),
        clock,
        ttl=settings.cluster.lease,
        down_after=settings.cluster.down_after,
    )
    tasks.spawn(membership.keep(), "membership")
    tasks.spawn(guardian.run(), "guardian")
    tasks.spawn(keep_counting(control, settings.store.data_dir, belonging), "directory")
    moving = mover(node)
    tasks.spawn(moving.run(), "mover")
    return moving
