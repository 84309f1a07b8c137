"""A mesh of several nodes in one process that share a control store: what is above S3, across nodes.

Objects are put where the map wants them, by hand: how S3 writes get there is another test's subject.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshd.batches.assembly.assembler import Assembler
from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.replication.replicated_store import replicated_store
from meshd.config import NodeSettings, StoreSettings, TransformSettings
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.control.identities import Account, IdentityTable, Key, KeyLastUsed, User
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.documents.inventory import UsageFile
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.process.wiring.data_services import data_services, node_catalog
from meshd.process.wiring.node_context import NodeContext, node_access
from meshd.process.wiring.routes import admin_routes, native_routes
from meshd.process.wiring.services import peer_services, server_services
from meshd.rpc.peer_client import PeerClient
from meshd.server.http_server import build_server
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.transform.pool import TransformPool
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, routes
from meshwire.cluster import Node as Member
from tests.support.bounded_wait import await_end
from tests.support.reference_control import MemoryControl
from tests.support.server_shutdown import stop_listening
from tests.support.transform_processes import Crew

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from meshd.control.control_api import ControlStore
    from meshd.process.wiring.data_services import DataServices
    from meshd.server.http_server import MeshServer

ROOT = ("root-key", "root-secret-key")


@dataclass(slots=True)
class Running:
    """One node that listens."""

    node: NodeContext
    server: MeshServer
    listener: asyncio.Server
    assembler: Assembler
    data: DataServices

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"


class MeshCrew:
    """`number` nodes n1, n2, …, in a thread of their own, and two transform processes they all use."""

    def __init__(self, number: int, copies: int = 2) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="mesh-"))
        self._crew = Crew(self._place, 2)  # forks: before the thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mesh-crew")
        self._thread.start()
        self._stack = AsyncExitStack()
        self.copies = copies
        self.nodes: list[Running] = self.run(self._open(number))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the nodes' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __enter__(self) -> MeshCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await_end(self._thread)
        self._loop.close()
        shutil.rmtree(self._place)

    async def _open(self, number: int) -> list[Running]:
        clock = SystemClock()
        self.control = MemoryControl(clock)
        await ClusterSecret(self.control).create_if_missing()
        account = Account(
            User(user_id="root", display_name="root", root=True, origin="root"),
            Key(access_key=ROOT[0], user_id="root", secret_key=ROOT[1], origin="root"),
        )
        await IdentityTable(self.control).replace_accounts(frozenset({"root"}), [account], clock.now_ms())
        self._watch = asyncio.ensure_future(self._crew.watch())
        self._pool = TransformPool(self._crew.sockets)
        self._pool.start()
        nodes = [await self._start(f"n{i + 1}", self.control) for i in range(number)]
        members = tuple(Member(one.node.settings.node_id, one.endpoint) for one in nodes)
        cluster = ClusterMap(1, members, copies=self.copies)
        await ClusterMapStore(self.control).update_map(lambda _: cluster)
        return nodes

    async def _start(self, name: str, control: ControlStore) -> Running:
        clock = SystemClock()
        settings = NodeSettings(name, StoreSettings.at(self._place / name, durability="relaxed"))
        store = Store.open(settings.store, writer="w0", clock=clock)
        uses = UsageFile(settings.last_used_path, clock)
        buckets = BucketTable(control)
        mesh = ClusterView(name, control, buckets.replica_count)
        peers = PeerClient(name, ClusterSecret(control).derive_key, clock, lambda: mesh.current_map().version)
        objects = RemoteObjects(store, mesh, peers)
        archives = ArchiveService(LocalArchives(store, uses.note), objects)
        identities = IdentityTable(control)
        node = NodeContext(
            settings, clock, store, control, buckets, identities, KeyLastUsed(control), uses,
            DeletedDocumentTable(control), archives, mesh, peers, objects,
            replicated_store(store, mesh, peers, clock),
        )  # fmt: skip
        assembler = Assembler(
            store,
            self._pool,
            TransformSettings(1, 64 << 20),
            archives,
            node=name,
            remote=objects,
            catalog=node_catalog(node),
        )
        access = node_access(node)
        data = data_services(node, access, assembler)
        peer = peer_services(node)
        deps = server_services(node, access, data, peer)
        also = [
            *admin_routes(node, deps.sessions),
            *native_routes(node, access, data, peer.broadcast.broadcast),
            *peer.routes(),
        ]
        server = build_server(deps, also)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        return Running(node, server, listener, assembler, data)

    async def _close(self) -> None:
        for one in self.nodes:
            await self._end(one)
        await self._pool.aclose()
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        self._crew.close()

    async def _end(self, one: Running) -> None:
        if not one.listener.is_serving():
            return
        await stop_listening(one.listener)
        transports = [connection.transport for connection in one.server.connections]
        await one.server.shutdown(0.2)
        for transport in transports:
            if transport is not None:  # with what nobody has read
                transport.abort()
        await one.assembler.aclose()
        await one.node.peers.aclose()
        one.node.store.close()
        one.node.last_used.close()

    def kill(self, number: int) -> None:
        """A node answers nobody any more; the map does not know it."""
        self.run(self._end(self.nodes[number]))

    def put(self, bucket: str, key: str, data: bytes) -> list[str]:
        """An object, at the nodes that are to have it; their ids."""
        return list(self.run(self._put(bucket, key, data)))

    async def _put(self, bucket: str, key: str, data: bytes) -> list[str]:
        cluster = self.nodes[0].node.mesh.current_map()
        names = [node.node_id for node in routes(cluster, self.copies).route_of_key(bucket, key).write_set]
        for one in self.nodes:
            if one.node.settings.node_id in names:
                writer = one.node.store.writer(bucket, key, size=len(data))
                await writer.write(data)
                await writer.commit(Meta(hashlib.md5(data, usedforsecurity=False).hexdigest()))
        return names
