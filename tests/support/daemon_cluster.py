"""A cluster of daemons with an etcd, as processes on loopback: killed, stopped and started by node id.

Law: it ends what it started, by process id; everything lies under one directory. Nodes are n1, n2, …;
all have the root key pair of the cluster.

    with DaemonCluster.start(3) as mesh:
        mesh.kill("n1")
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from meshd.process.local_etcd import reserve_port
from meshd.util.clock import SystemClock
from meshwire.cluster import ClusterMap, parse_map, routes
from tests.support.bounded_wait import await_true, pause
from tests.support.daemons import Daemon, authority_in
from tests.support.etcd import OperatedEtcd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from meshwire.cluster import Route

PATIENCE = 60.0
_clock = SystemClock()
_open: WeakSet[DaemonCluster] = WeakSet()


def running_nodes() -> set[int]:
    """Process ids of the daemons and etcds of all meshes that are not closed."""
    nodes = {node.pid for mesh in _open for node in mesh.nodes.values()}
    return nodes.union(*[mesh.etcd.pids for mesh in _open])


class DaemonCluster:
    """`nodes` by id; those that do not run are there, too. `args`: more flags of all, `own` of some. With
    `tls` they speak https, each with a certificate of one `authority`. `checkout`: of an earlier release,
    whose code they run. `etcd_syncs`: etcd syncs, as it does outside of tests."""

    def __init__(
        self,
        size: int,
        place: Path | None = None,
        *,
        args: Sequence[str] = (),
        own: Mapping[str, Sequence[str]] | None = None,
        workers: int = 1,
        lease: float = 2.0,
        env: Mapping[str, str] | None = None,
        etcd_host: str = "127.0.0.1",
        etcd_flags: Sequence[str] = (),
        tls: bool = False,
        checkout: Path | None = None,
        etcd_syncs: bool = False,
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="mesh-"))
        self.place = place or self._scratch
        (self.place / "etcd").mkdir(parents=True, exist_ok=True)
        ports = (reserve_port(etcd_host), reserve_port())
        unsafe = () if etcd_syncs else ("--unsafe-no-fsync",)
        self.etcd = OperatedEtcd(self.place / "etcd", 1, *unsafe, *etcd_flags, host=etcd_host, ports=ports)
        self._args, self._own, self._workers, self._lease = tuple(args), dict(own or {}), workers, lease
        self.authority = authority_in(self.place / "tls") if tls else None
        self._checkout = checkout
        self._env = dict(env or {})
        self._env.setdefault("MESHD_ROOT_ACCESS_KEY", "MESHROOT" + secrets.token_hex(4))
        self._env.setdefault("MESHD_ROOT_SECRET_KEY", secrets.token_urlsafe(24))
        self.nodes: dict[str, Daemon] = {}
        self._paused = set[str]()
        _open.add(self)
        for number in range(1, size + 1):
            self._make(f"n{number}")

    def __repr__(self) -> str:
        return f"<Mesh of {', '.join(map(repr, self.nodes.values()))}>"

    @classmethod
    def start(cls, size: int, place: Path | None = None, *, ready: bool = True, **options: Any) -> Self:
        """Start etcd and `size` nodes, together; with `ready` wait until all of them are up in the map."""
        mesh = cls(size, place, **options)
        try:
            mesh.etcd.__enter__()
            mesh.start_all(ready=ready)
        except BaseException:
            mesh.close()
            raise
        return mesh

    def __getitem__(self, node_id: str) -> Daemon:
        return self.nodes[node_id]

    @property
    def access_key(self) -> str:
        """Of root, at every node."""
        return self._env["MESHD_ROOT_ACCESS_KEY"]

    @property
    def secret_key(self) -> str:
        """Of root, at every node."""
        return self._env["MESHD_ROOT_SECRET_KEY"]

    @property
    def endpoints(self) -> dict[str, str]:
        """URLs by id."""
        return {node_id: node.endpoint for node_id, node in self.nodes.items()}

    @property
    def control(self) -> str:
        """What `--control` says."""
        return f"etcd://{','.join(map(str, self.etcd.members))}"

    # --- the lives of nodes -------------------------------------------------------------------------

    def add(self, node_id: str, *args: str, env: Mapping[str, str] | None = None) -> Daemon:
        """One more node, started; `args` are more flags of its own."""
        if args:
            self._own[node_id] = args
        daemon = self._make(node_id, env)
        daemon.up(PATIENCE)
        return daemon

    def start_all(self, *, ready: bool = True) -> None:
        """Start all nodes, together; etcd runs already."""
        self._together(list(self.nodes))
        if ready:
            self.await_map(lambda cluster: all(node.state == "up" for node in cluster.nodes))

    def up(self, node_id: str) -> None:
        """Start one again, on its data and port."""
        self._paused.discard(node_id)
        self.nodes[node_id].up(PATIENCE)

    def stop(self, node_id: str) -> None:
        """SIGTERM, and wait."""
        self.nodes[node_id].stop()

    def kill(self, node_id: str) -> None:
        """SIGKILL, and wait."""
        self._paused.discard(node_id)
        self.nodes[node_id].kill()

    def pause(self, node_id: str) -> None:
        """SIGSTOP to all its processes."""
        self._paused.add(node_id)
        self.nodes[node_id].pause()

    def resume(self, node_id: str) -> None:
        """SIGCONT to all its processes."""
        self._paused.discard(node_id)
        self.nodes[node_id].resume()

    def await_healthy(self) -> Self:
        """Itself, once every node and etcd run, all nodes are up and no data moves, whatever was done before:
        what a test that shares it with others begins with."""
        for node_id in list(self._paused):
            self.resume(node_id)
        self.etcd.start_all()
        self._together([node_id for node_id, node in self.nodes.items() if not node.running])
        for found in self.map_of().nodes:
            if found.leaving or found.state == "draining":
                self._change(found.node_id, "undrain")
        self.await_map(
            lambda cluster: not cluster.is_rebalancing and all(node.state == "up" for node in cluster.nodes)
        )
        return self

    def remove_lost(self, node_id: str) -> None:
        """Kill a node for good: it is lost, and no member any more once others have what it had."""
        self.kill(node_id)
        if self.map_of().node(node_id) is not None:
            self._change(node_id, "lost", anyway=True)
            self.await_map(lambda cluster: not cluster.is_rebalancing)
            self._change(node_id, "remove")
        gone = self.nodes.pop(node_id)
        gone.close()
        shutil.rmtree(gone.data_dir, ignore_errors=True)

    def _change(self, node_id: str, action: str, **more: Any) -> None:
        asked = next(node for node in self.nodes.values() if node.running)
        body = json.dumps({"action": action, **more}).encode()
        answer = asked.request("POST", f"/-/cluster/nodes/{node_id}", body)
        assert answer.status == 200, answer.body

    def remove_data(self, node_id: str) -> None:
        """Take all data from a node that does not run: its disk is lost."""
        assert not self.nodes[node_id].running
        shutil.rmtree(self.nodes[node_id].data_dir)

    # --- what they say ------------------------------------------------------------------------------

    def map_of(self, node_id: str = "") -> ClusterMap:
        """The map as a node has it (default: the first that runs)."""
        running = [name for name, node in self.nodes.items() if node.running]
        answer = self.nodes[node_id or running[0]].request("GET", "/-/map")
        assert answer.status == 200, answer.body
        return parse_map(json.dumps(json.loads(answer.body)["map"]))

    def route_for(self, bucket: str, key: str, copies: int = 2) -> Route:
        """Who answers for a name now."""
        return routes(self.map_of(), copies).route_of_key(bucket, key)

    def key_with_primary(self, node_id: str, bucket: str, prefix: str = "key", copies: int = 2) -> str:
        """A key whose decider a node is."""
        table = routes(self.map_of(), copies)
        for number in range(100_000):
            route = table.route_of_key(bucket, f"{prefix}-{number}")
            if route.primary is not None and route.primary.node_id == node_id:
                return f"{prefix}-{number}"
        raise AssertionError(f"{node_id} decides nothing")

    def await_map(
        self, wanted: Callable[[ClusterMap], bool], patience: float = PATIENCE, *, everywhere: bool = True
    ) -> ClusterMap:
        """Wait until the map is as wanted, at every node that runs and was not stopped. One that does not
        answer just now is asked again."""
        begun = _clock.monotonic()
        while True:
            running = [name for name, node in self.nodes.items() if node.running and name not in self._paused]
            found, trouble = list[ClusterMap](), ""
            try:
                found = [self.map_of(name) for name in (running if everywhere else running[:1])]
            except (OSError, HTTPException, AssertionError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if found and all(wanted(cluster) for cluster in found):
                return max(found, key=lambda cluster: cluster.version)
            if _clock.monotonic() - begun > patience:
                raise AssertionError(
                    f"the map is not as it should be: {trouble or found[-1:]}\n{self.output()}"
                )
            pause(begun)

    def await_state(self, node_id: str, *states: str, patience: float = PATIENCE) -> ClusterMap:
        """Wait until every node that runs and was not stopped has a node in one of these states."""

        def wanted(cluster: ClusterMap) -> bool:
            node = cluster.node(node_id)
            return node is not None and node.state in states

        return self.await_map(wanted, patience)

    def metric(self, node_id: str, name: str) -> float:
        """The sum of a node's samples of a metric, of all label sets."""
        with closing(self.nodes[node_id].connect()) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    def await_metric(self, node_id: str, name: str, least: float, patience: float = PATIENCE) -> None:
        """Wait until a metric of a node is at least so much."""
        await_true(
            lambda: self.metric(node_id, name) >= least,
            patience,
            told=lambda: f"{name} of {node_id} stays below {least}\n{self.output()}",
        )

    def await_value(self, node_id: str, name: str, value: float, patience: float = PATIENCE) -> None:
        """Wait until a metric of a node has this value."""
        await_true(
            lambda: self.metric(node_id, name) == value,
            patience,
            told=lambda: f"{name} of {node_id} is not {value}\n{self.output()}",
        )

    def away_count(self) -> int:
        """How often nodes were taken for gone so far. On a busy machine that may be one that runs: it was
        silent for longer than its lease."""
        return len(re.findall(r": a node is (?:away|down) ", self.output()))

    def output(self) -> str:
        """What all of them printed and logged."""
        return "\n".join(f"=== {node_id}\n{node.output()}" for node_id, node in self.nodes.items())

    # --- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything, and remove what was temporary."""
        _open.discard(self)
        try:
            for node in self.nodes.values():
                node.kill()
                node.close()
        finally:
            self.etcd.__exit__()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.output(), file=sys.stderr)
        self.close()

    def _make(self, node_id: str, env: Mapping[str, str] | None = None) -> Daemon:
        args = ["--control", self.control, "--node-id", node_id, "--lease", str(self._lease)]
        args += ["--weight", "1", *self._args, *self._own.get(node_id, ())]
        daemon = Daemon(self.place / node_id, args, self._env | dict(env or {}), self._workers)
        daemon.checkout = self._checkout
        if self.authority is not None:
            daemon.authority, daemon.pair = self.authority, self.authority.issue(node_id)
            daemon.args += ("--peer-ca", str(self.authority.cert))
        self.nodes[node_id] = daemon
        return daemon

    def _together(self, node_ids: Sequence[str]) -> None:
        with ThreadPoolExecutor(max(1, len(node_ids))) as pool:
            for done in [pool.submit(self.nodes[node_id].up, PATIENCE) for node_id in node_ids]:
                done.result(60)
