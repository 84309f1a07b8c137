"""Several nodes in one process: servers with stores of their own over one control store."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from meshd.batches.assembly.assembler_client import AssemblerClient
from meshd.cluster.cluster_view import ClusterView
from meshd.cluster.replication.replicated_store import ReplicatedStore, replicated_store
from meshd.config import NodeSettings, StoreSettings
from meshd.control.buckets import BucketTable
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.control.identities import Account, IdentityTable, Key, KeyLastUsed, User
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.documents.inventory import UsageFile
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.process.wiring.data_services import data_services
from meshd.process.wiring.node_context import NodeContext, node_access
from meshd.process.wiring.services import peer_services, server_services
from meshd.rpc.peer_client import PeerClient
from meshd.server.http_server import build_server
from meshd.store.store import Store
from meshd.util.clock import SystemClock
from meshwire.cluster import Node as Member
from meshwire.cluster.transitions import bootstrap_map, join_node, mark_complete
from tests.support.boto_sessions import boto_session
from tests.support.bounded_wait import await_end
from tests.support.reference_control import MemoryControl
from tests.support.server_shutdown import stop_listening
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence

    from meshd.control.control_api import ControlStore
    from meshd.server.http_route import HttpRoute
    from meshd.server.http_server import MeshServer
    from meshwire.cluster import ClusterMap

T = TypeVar("T")
ROOT = ("root-key", "root-secret-key")
_THREADS = 64
"""Clients of tests wait in threads of the loop that the nodes read in: some have to be left for them, and of
as many as asyncio makes on a machine of few cores there are not."""


@dataclass(slots=True)
class Running:
    """One node that listens."""

    node: NodeContext
    server: MeshServer
    listener: asyncio.Server
    loop: asyncio.AbstractEventLoop

    @property
    def peers(self) -> PeerClient:
        return self.node.peers

    def client(self, **changes: Any) -> Any:
        """A boto3 client of this node. It waits: use it in a thread."""
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            connect_timeout=60,
            read_timeout=60,
        )
        options = {
            "endpoint_url": self.member.endpoint,
            "aws_access_key_id": ROOT[0],
            "aws_secret_access_key": ROOT[1],
            "region_name": "us-east-1",
            "config": config,
        }
        return boto_session().client("s3", **(options | changes))

    @property
    def member(self) -> Member:
        """As it stands in the map."""
        port = self.listener.sockets[0].getsockname()[1]
        return Member(self.node.settings.node_id, f"http://127.0.0.1:{port}")


@asynccontextmanager
async def running_nodes(
    loop: asyncio.AbstractEventLoop, number: int, routes: Sequence[HttpRoute] = (), *, copies: int = 1
) -> AsyncIterator[list[Running]]:
    """`number` nodes, n1, n2, …, with `routes` beside S3, all up in one map; they have one root user, with
    the keys ROOT."""
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    place = Path(tempfile.mkdtemp(prefix="nodes-"))
    clock = SystemClock()
    control = MemoryControl(clock)
    await ClusterSecret(control).create_if_missing()
    account = Account(
        User(user_id="root", display_name="root", root=True, origin="root"),
        Key(access_key=ROOT[0], user_id="root", secret_key=ROOT[1], origin="root"),
    )
    await IdentityTable(control).replace_accounts(frozenset({"root"}), [account], clock.now_ms())
    nodes = [await _run(loop, place / f"n{i + 1}", control, routes) for i in range(number)]
    await ClusterMapStore(control).update_map(lambda _: everybody([node.member for node in nodes], copies))
    try:
        yield nodes
    finally:
        for one in nodes:
            await _end(one)
        _remove(place)


def _remove(place: Path) -> None:
    while place.exists():  # a thread may still remove a draft of a refused write
        with suppress(FileNotFoundError):
            shutil.rmtree(place)


def everybody(members: list[Member], copies: int) -> ClusterMap:
    """A map in which all of these are up and have what they should."""
    cluster = bootstrap_map(members[0], copies=copies)
    for member in members[1:]:
        cluster = join_node(cluster, member)
    for member in members:
        cluster = mark_complete(cluster, member.node_id)
    return cluster


def decider_of(nodes: Sequence[Running], bucket: str, key: str) -> Running:
    """The node that decides about a name by the present map."""
    decider = nodes[0].node.mesh.route_for(bucket, key).primary
    assert decider is not None
    return next(one for one in nodes if one.node.settings.node_id == decider.node_id)


def shared_store(one: Running) -> ReplicatedStore:
    """What the services of a node write to."""
    store = one.node.replicated_store
    assert isinstance(store, ReplicatedStore)
    return store


def accept_map(nodes: Iterable[Running]) -> None:
    """Of the deciders before the present map nobody is asked for a handover."""
    for one in nodes:
        handover = shared_store(one).primary.handover
        window, handover.window = handover.window, 0.0
        handover.observe_map()
        handover.window = window


async def change_map(nodes: Sequence[Running], change: Callable[[ClusterMap], ClusterMap]) -> int:
    """The version of the map after `change` was made to it."""

    def changed(cluster: ClusterMap | None) -> ClusterMap:
        assert cluster is not None
        return change(cluster)

    return (await ClusterMapStore(nodes[0].node.control).update_map(changed)).version


def among(
    number: int, test: Callable[[list[Running]], Awaitable[None]], *, copies: int = 2, patience: float = 15.0
) -> None:
    """Runs `test` with so many nodes, whose writes wait `patience` seconds for the others."""

    async def run() -> None:
        async with running_nodes(asyncio.get_running_loop(), number, copies=copies) as nodes:
            accept_map(nodes)
            for node in nodes:
                shared_store(node).primary.replicator.timeout = patience
            await test(nodes)

    asyncio.run(run())


def with_clients(number: int, test: Callable[[list[Any], list[Running]], None], copies: int = 2) -> None:
    """Runs `test` in a thread, with a client of each node; they share a bucket `bench`."""

    async def run(nodes: list[Running]) -> None:
        clients = [node.client() for node in nodes]
        await asyncio.to_thread(clients[0].create_bucket, Bucket="bench")
        try:
            await asyncio.to_thread(test, clients, nodes)
        finally:
            for client in clients:
                client.close()

    among(number, run, copies=copies)


def owners_alike(nodes: list[Running], key: str, body: bytes | None) -> None:
    """Every owner of a name in bucket `b` has these bytes; None: has nothing."""
    for owner in nodes[0].node.mesh.route_for("b", key).write_set:
        store = next(node.node.store for node in nodes if node.node.settings.node_id == owner.node_id)
        found = store.get("b", key)
        assert (None if found is None else store.read_range(found, 0, found.size)) == body, owner


async def _run(
    loop: asyncio.AbstractEventLoop, place: Path, control: ControlStore, routes: Sequence[HttpRoute]
) -> Running:
    clock = SystemClock()
    settings = NodeSettings(place.name, StoreSettings.at(place, durability="relaxed", tombstone_seconds=3600))
    store = Store.open(settings.store, writer="w0", clock=clock)
    uses = UsageFile(settings.last_used_path, clock)
    buckets, secret = BucketTable(control), ClusterSecret(control)
    mesh = ClusterView(settings.node_id, control, buckets.replica_count)
    peers = PeerClient(place.name, secret.derive_key, clock, lambda: mesh.current_map().version)
    node = NodeContext(
        settings,
        clock,
        store,
        control,
        buckets,
        IdentityTable(control),
        KeyLastUsed(control),
        uses,
        DeletedDocumentTable(control),
        ArchiveService(LocalArchives(store, uses.note), single_node_objects(store)),
        mesh,
        peers,
        RemoteObjects(store, mesh, peers),
        replicated_store(store, mesh, peers, clock),
    )
    access = node_access(node)
    data = data_services(
        node, access, AssemblerClient(settings.coordinator_socket)
    )  # nobody asks it anything
    peer = peer_services(node)
    server = build_server(server_services(node, access, data, peer), [*routes, *peer.routes()])
    listener = await loop.create_server(server, "127.0.0.1", 0)
    return Running(node, server, listener, loop)


async def _end(one: Running) -> None:
    await stop_listening(one.listener)
    one.server.pre_shutdown()
    await one.server.shutdown(1)
    await one.node.peers.aclose()
    one.node.store.close()
    one.node.last_used.close()


class NodesBeside:
    """`running_nodes` on a loop in a thread of their own, for tests that wait.
    They share a bucket `bench`; `do` and `run` have something done on their loop."""

    def __init__(self, number: int, *, copies: int = 1) -> None:
        self._number, self._copies = number, copies
        self._started: Future[list[Running]] = Future()
        self._thread = threading.Thread(target=self._serve)
        self._ended: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.nodes: list[Running] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self.nodes = self._started.result(60)
        client = self.nodes[0].client()
        client.create_bucket(Bucket="bench")
        client.close()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        await_end(self._thread)

    def do(self, work: Callable[[], T]) -> T:
        """What `work` returns, run between two callbacks of the nodes."""

        async def run() -> T:
            return work()

        return self.run(run())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """A coroutine, on the nodes' loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def key_of(self, number: int, prefix: str = "key") -> str:
        """A key that node `number` alone answers for."""
        mesh = self.nodes[0].node.mesh
        wanted = self.nodes[number].node.mesh.node_id
        keys = (f"{prefix}-{count}" for count in itertools.count())
        return next(key for key in keys if mesh.route_for("bench", key).read_set[0].node_id == wanted)

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            async with running_nodes(self._loop, self._number, copies=self._copies) as nodes:
                self._started.set_result(nodes)
                await self._ended.wait()

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as daemons run
                runner.run(serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
