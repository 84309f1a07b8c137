"""Joining a cluster before start-up: establish the directory's identity and share the root key pair.

It runs in a child, before the store is opened, under a lease: of several nodes that start at once, one
creates the cluster and the others join it. A node with control state of its own creates the cluster with
that state.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

from meshd.cluster.data_dir_identity import (
    establish_identity,
    read_identity,
    recorded_machine,
    restore_identity,
)
from meshd.cluster.membership import id_in_use_message
from meshd.cluster.node_lease import node_lease_name
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import ABSENT, VersionConflictError, Write
from meshd.control.embedded import EmbeddedControl
from meshd.control.factory import open_control
from meshd.control.identities import IdentityTable
from meshd.errors import StartupError
from meshd.process.root_credentials import (
    RootCredentials,
    generate_credentials,
    store_credentials,
    stored_credentials,
)
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from meshd.config import NodeSettings
    from meshd.control.control_api import ControlStore, Lease

_LEASE: Final = "founding"
_LEASE_TTL: Final = 10.0
_STEP: Final = 0.1
_ELSEWHERE_S: Final = 30.0
"""Seconds that a node waits on a machine that is not its own, to be moved to the one with its directory."""
_NODE_LOCAL_PREFIXES: Final = ("leases/", "cluster/", "mesh/")
_log = logging.getLogger("meshd.cluster")
ROOT_MADE: Final = "root-made"
"""File in the run directory that says that this start generated the root key pair."""


def join_cluster(settings: NodeSettings, *, root_given: bool) -> None:
    """Found the cluster, or join it. `root_given`: the environment sets the root key pair. Raises
    StartupError, ControlError."""
    restore_identity(settings.store)
    with closing(open_control(settings, SystemClock())) as control:
        asyncio.run(_join(control, settings, root_given))


async def _join(control: ControlStore, settings: NodeSettings, root_given: bool) -> None:
    await _wait_until_exclusive(control, settings)
    await _wait_while_elsewhere(control, settings)
    lease = await _acquire_founding_lease(control, settings.node_id)
    try:
        maps = ClusterMapStore(control)
        if maps.current() is None:
            await _copy_own_state(control, settings)
        cluster = maps.current()
        copies = settings.cluster.copies if cluster is None else cluster.copies
        counts = () if cluster is None else cluster.counts
        await establish_identity(
            control, maps, settings, BucketTable(control).min_replica_count(copies, counts)
        )
        if not root_given:
            await _share_root(control, settings)
    finally:
        await control.release_lease(lease)


async def _wait_until_exclusive(control: ControlStore, settings: NodeSettings) -> None:
    """Wait until no other directory runs under the node's id, so that its data is not taken for lost. Raises
    StartupError after two lease times."""
    found, clock, name = (
        read_identity(settings.store.data_dir),
        SystemClock(),
        node_lease_name(settings.node_id),
    )
    mine = None if found is None else found.lease_holder
    until = clock.monotonic() + 2 * settings.cluster.lease + 1
    while (await control.lease_holders(name)).get(name, mine) != mine:
        if clock.monotonic() > until:
            raise StartupError(id_in_use_message(settings.node_id))
        await asyncio.sleep(_STEP)


async def _wait_while_elsewhere(control: ControlStore, settings: NodeSettings) -> None:
    """Wait for a while if this machine has no directory of the node, and another one has: whatever started
    it here may move it there, and starting without its data would give that up. Does not wait for a
    machine that was forgotten, or a node whose data the mesh has given up."""
    own, clock, maps = settings.cluster.machine, SystemClock(), ClusterMapStore(control)
    if not own or read_identity(settings.store.data_dir) is not None:
        return
    until, said = clock.monotonic() + _ELSEWHERE_S, False
    while (home := await recorded_machine(control, settings.node_id)) not in ("", own):
        cluster = maps.current()
        node = None if cluster is None else cluster.node(settings.node_id)
        if node is None or not node.stores or node.state == "down" or clock.monotonic() > until:
            return
        if not said:
            _log.warning(
                "the node's directory is on another machine; waiting to be moved there",
                extra={"node": settings.node_id, "machine": home, "here": own},
            )
        said = True
        await asyncio.sleep(_STEP)


async def _acquire_founding_lease(control: ControlStore, node_id: str) -> Lease:
    """Wait until no other node is founding or joining."""
    while True:
        lease = await control.acquire_lease(_LEASE, node_id, _LEASE_TTL)
        if lease is not None:
            return lease
        await asyncio.sleep(_STEP)


async def _copy_own_state(control: ControlStore, settings: NodeSettings) -> None:
    """Copy the node's own control state into the cluster's: buckets, users, keys, jobs."""
    if not settings.control_dir.exists():
        return
    with closing(EmbeddedControl(settings.control_dir, SystemClock())) as own:
        entries = await own.list_all("")
    writes = [
        Write(key, entry.value, ABSENT)
        for key, entry in entries.items()
        if not key.startswith(_NODE_LOCAL_PREFIXES)
    ]
    for write in writes:  # one by one, since an interrupted start is repeated
        with suppress(VersionConflictError):
            await control.write_many([write])


async def _share_root(control: ControlStore, settings: NodeSettings) -> None:
    """Write the cluster's root key pair into the node's file, or the node's into the cluster."""
    data_dir, table = settings.store.data_dir, IdentityTable(control)
    theirs = next((key for key in table.keys().values() if key.origin == "root"), None)
    mine = stored_credentials(data_dir)
    if theirs is not None:
        if mine is None or (mine.access_key, mine.secret_key) != (theirs.access_key, theirs.secret_key):
            store_credentials(data_dir, RootCredentials(theirs.access_key, theirs.secret_key))
        return
    if mine is None:
        mine = generate_credentials(data_dir)
        (settings.run_dir / ROOT_MADE).touch()
    await table.replace_accounts(frozenset({"root"}), [mine.account()], SystemClock().now_ms())
