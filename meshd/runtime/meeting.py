"""What a node does before it starts in a mesh: find out whose directory this is, and share the root key pair.

Law: runs in a child, before the store is opened, under a lease: of nodes that start at once one founds the
mesh and the others find it. A node that comes with control state of its own founds the mesh with it.
"""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from meshd.cluster.belonging import belong, read_belonging
from meshd.cluster.membership import lease_name, taken
from meshd.control.buckets import BucketTable
from meshd.control.clustermaps import ClusterMaps
from meshd.control.embedded import EmbeddedControl
from meshd.control.identities import IdentityTable
from meshd.control.interface import ABSENT, VersionConflictError, Write
from meshd.control.opening import open_control
from meshd.errors import StartupError
from meshd.kit.clock import SystemClock
from meshd.runtime.credentials import RootCredentials, kept_credentials, make_credentials, write_credentials

if TYPE_CHECKING:
    from meshd.config import NodeSettings
    from meshd.control.interface import ControlStore, Lease

_LEASE: Final = "founding"
_TTL: Final = 10.0
_STEP: Final = 0.1
_OWN: Final = ("leases/", "cluster/", "mesh/")
MADE: Final = "root-made"
"""A file in the run directory that says that this start made the root key pair."""


def meet(settings: NodeSettings, *, root_given: bool) -> None:
    """Found the mesh, or be admitted to it. `root_given`: the environment says the root key pair. Raises
    StartupError, ControlError."""
    with closing(open_control(settings, SystemClock())) as control:
        asyncio.run(_meet(control, settings, root_given))


async def _meet(control: ControlStore, settings: NodeSettings, root_given: bool) -> None:
    await _alone(control, settings)
    lease = await _turn(control, settings.node_id)
    try:
        maps = ClusterMaps(control)
        if maps.current() is None:
            await _carry_over(control, settings)
        cluster = maps.current()
        copies = settings.cluster.copies if cluster is None else cluster.copies
        counts = () if cluster is None else cluster.counts
        await belong(control, maps, settings, BucketTable(control).fewest_copies(copies, counts))
        if not root_given:
            await _share_root(control, settings)
    finally:
        await control.release(lease)


async def _alone(control: ControlStore, settings: NodeSettings) -> None:
    """Wait until no other directory runs under the node's id: what it has must not be taken for lost. Raises
    StartupError when that does not come about."""
    found, clock, name = read_belonging(settings.store.data_dir), SystemClock(), lease_name(settings.node_id)
    mine = None if found is None else found.holder
    until = clock.monotonic() + 2 * settings.cluster.lease + 1
    while (await control.leases(name)).get(name, mine) != mine:
        if clock.monotonic() > until:
            raise StartupError(taken(settings.node_id))
        await asyncio.sleep(_STEP)


async def _turn(control: ControlStore, node_id: str) -> Lease:
    """Wait until nobody else founds or joins."""
    while True:
        lease = await control.acquire(_LEASE, node_id, _TTL)
        if lease is not None:
            return lease
        await asyncio.sleep(_STEP)


async def _carry_over(control: ControlStore, settings: NodeSettings) -> None:
    """What the node kept for itself until now: buckets, users, keys, jobs."""
    if not settings.control_dir.exists():
        return
    with closing(EmbeddedControl(settings.control_dir, SystemClock())) as own:
        entries = await own.list_all("")
    writes = [Write(key, entry.value, ABSENT) for key, entry in entries.items() if not key.startswith(_OWN)]
    for write in writes:  # one by one: a start that was interrupted is repeated
        with suppress(VersionConflictError):
            await control.write_many([write])


async def _share_root(control: ControlStore, settings: NodeSettings) -> None:
    """The mesh's root key pair into the node's file, or the node's into the mesh."""
    data_dir, table = settings.store.data_dir, IdentityTable(control)
    theirs = next((key for key in table.keys().values() if key.origin == "root"), None)
    mine = kept_credentials(data_dir)
    if theirs is not None:
        if mine is None or (mine.access_key, mine.secret_key) != (theirs.access_key, theirs.secret_key):
            write_credentials(data_dir, RootCredentials(theirs.access_key, theirs.secret_key))
        return
    if mine is None:
        mine = make_credentials(data_dir)
        (settings.run_dir / MADE).touch()
    await table.replace(frozenset({"root"}), [mine.account()], SystemClock().now_ms())
