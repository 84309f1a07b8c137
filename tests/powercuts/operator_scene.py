"""A mesh on Kubernetes that loses power as a whole: the control plane with its etcd, the operator, and
daemons on volume claims. etcd and the volumes are on forgetful file systems.

Each object has one copy, so a volume that goes a moment too early, or once too often, takes objects with it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from base64 import b64decode
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import StatefulSet
from lightkube.resources.core_v1 import Namespace, PersistentVolumeClaim, Secret
from lightkube.resources.storage_v1 import StorageClass
from lightkube.types import PatchType

from tests.kubernetes.control_plane import control_plane
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import POOL, SPEC, MeshNode
from tests.kubernetes.scenes import Scene as Mesh
from tests.powercuts.history import SYNC_SECONDS, as_after_a_boot
from tests.powercuts.mesh_scene import ManyNodesScene
from tests.powercuts.readiness import waited
from tests.powercuts.scene import FILE_SYSTEM
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.front import Front
from tests.support.fuse_mount import mounted
from tests.support.required import missing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.powercuts.traffic import Traffic

_NAMESPACE: Final = "mesh-power"
_PATIENCE: Final = 150.0
_STEP: Final = 0.2
_SIZES: Final = (2, 3)
_CLAIMS: Final = [
    {"name": "disk", "class": "nvme", "volumeClaim": {"size": "5Gi", "storageClass": "elastic"}}
]
_ELASTIC: Final = StorageClass(
    metadata=ObjectMeta(name="elastic"), provisioner="tests.shardmesh.io/kubelet", allowVolumeExpansion=True
)
_RUNNING: Final = ("up", "draining", "joining")


class OperatorScene(ManyNodesScene):
    """A pool shrinks and grows, a daemon is decommissioned, or all are restarted, in each life in which what
    was begun has ended; the power of all is cut in the middle. `options` are of the volumes' file system;
    that of etcd keeps names as ext4 does."""

    def __init__(
        self,
        place: Path,
        seed: int,
        *,
        traffic: Sequence[Traffic],
        relaxed: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(place, seed, traffic, relaxed=relaxed)
        shutil.rmtree(place, ignore_errors=True)
        self._options = options
        self._home, self._pods = place / "control-plane", place / "kubelet"
        self._disks = {"etcd": self._home / "etcd", "volumes": self._pods / "volumes"}
        for name, mount in self._disks.items():
            (place / "source" / name).mkdir(parents=True)
            mount.mkdir(parents=True)
        self._all, self._mounts, self._dark = ExitStack(), ExitStack(), ExitStack()
        self._servers: list[_Server] = []
        self._size, self._wishes, self._steps = 3, dict[str, str](), _Steps()
        self._mesh: Mesh | None = None
        self._endpoint = ""

    def cut(self, seconds: float) -> None:
        self._live(seconds)
        self._count()

    def finish(self) -> None:
        """What was begun ends, and everything is there."""
        self._options = ()
        self._live(0.0)

    def close(self) -> None:
        self._kill()
        if self._mesh is not None:
            self._mesh.kubelet.stop()
        self._dark.close()
        with suppress(httpx2.HTTPError):  # the API has ended
            self._all.close()

    def _live(self, seconds: float) -> None:
        try:
            self._power_on()
            nodes = self._serving()
            self._compare(nodes)
            if seconds:
                for traffic in self._traffic:
                    with closing(nodes[0].client()) as client:
                        traffic.prepare(nodes[0], client)
                self._write(nodes, seconds)
            elif not self.report.wrong:
                self._until(self._is_settled, "settled in the end")
                self._compare(self._serving())
        except (DaemonFailedError, AssertionError, ApiError, httpx2.HTTPError) as error:
            self.report.add(str(error))
        finally:
            for problem in self._steps.wrong:
                self.report.add(problem)
            self._steps.wrong.clear()
            self._kill()
            for name in self._disks:
                as_after_a_boot(self._place / "source" / name)

    # --- power

    def _power_on(self) -> None:
        for name, mount in self._disks.items():
            options = ["--seed", str(self._chance.randrange(1 << 31))]
            options += ["--journal"] if name == "etcd" else self._options
            source = self._place / "source" / name
            self._mounts.enter_context(mounted(source, mount, *options, module=FILE_SYSTEM))
        if self._mesh is None:
            self._install()
            return
        for server in self._servers:
            server.start()
        self._mesh.kube = self._kube()
        began = time.monotonic()
        self._dark.close()  # pods start
        self._until(self._is_ready, "started", first=True)
        self._judge_start(time.monotonic() - began - max(map(waited, self._running().values())))

    def _kube(self) -> Any:
        return Client(config=KubeConfig.from_file(self._home / "kubeconfig").get(), namespace=_NAMESPACE)

    def _stop(self, nodes: Sequence[Daemon]) -> None:
        assert self._mesh is not None
        self._dark.enter_context(self._mesh.kubelet.without_power())
        for server in self._servers:
            server.signal(signal.SIGSTOP)

    def _kill(self) -> None:
        if self._mesh is not None:
            self._logs["pods"] = self._mesh.kubelet.output()
            self._mesh.kubelet.end_all()
        for server in self._servers:
            server.end()
            self._logs[server.name] = server.said()
        self._mounts.close()

    # --- the mesh

    def _install(self) -> None:
        if "MESH_TEST_KUBECONFIG" in os.environ:
            missing("control-plane", "unset MESH_TEST_KUBECONFIG, whose cluster cannot lose power")
        config = self._all.enter_context(control_plane(self._place))
        self._servers = _servers(self._home)
        kube, meshes = self._kube(), list[Mesh]()
        kube.create(Namespace(metadata=ObjectMeta(name=_NAMESPACE)))
        kube.create(_ELASTIC)
        kubelet = self._all.enter_context(Kubelet(config, self._pods, _NAMESPACE))
        front = self._all.enter_context(Front(lambda: meshes[0].places() if meshes else []))
        self._mesh, self._endpoint = Mesh(kube, _NAMESPACE, kubelet), front.endpoint
        meshes.append(self._mesh)
        for number in range(3):
            kubelet.add_node(f"k{number}", POOL["nodeSelector"])
        said = {"ENDPOINT": front.endpoint, "EAGER_SECONDS": "0.5"}
        values = {
            "webhook": {"enabled": False},
            "cluster": {"create": True, "spec": SPEC | {"copies": 1, "nodePools": [self._pool()]}},
            "operator": {
                "extraEnv": [{"name": f"MESH_OPERATOR_{name}", "value": v} for name, v in said.items()]
            },
        }
        where = ["--namespace", _NAMESPACE, "--kubeconfig", str(config)]
        run_helm(
            helm(), "install", "mesh", str(copied_chart(self._pods)), *where, "--values", "-", given=values
        )
        self._mesh.settled(self._size)

    def _pool(self) -> dict[str, Any]:
        durability = ["--durability=relaxed", f"--sync-interval={SYNC_SECONDS}"] if self._relaxed else []
        extra = [*POOL["extraArgs"], *durability]
        return POOL | {"replicas": self._size, "tiers": _CLAIMS, "extraArgs": extra}

    def _serving(self) -> list[Daemon]:
        """The Service, once all daemons answer: they may be restarted while it is used."""
        assert self._mesh is not None

        def serves() -> bool:
            assert self._mesh is not None
            states = {node.node_id: node.state for node in self._mesh.map().nodes}
            return states.keys() == self._ready() and set(states.values()) <= {*_RUNNING}

        self._until(serves, "all there after a cut")
        keys = self._mesh.kube.get(Secret, "mesh-root", namespace=_NAMESPACE).to_dict()["data"]
        env = {
            f"MESHD_ROOT_{mine}": b64decode(keys[f"AWS_{theirs}"]).decode()
            for mine, theirs in (("ACCESS_KEY", "ACCESS_KEY_ID"), ("SECRET_KEY", "SECRET_ACCESS_KEY"))
        }
        node = Daemon(self._place, [], env, 1)
        node.endpoint = self._endpoint
        return [node]

    def _ready(self) -> set[str]:
        """Daemons that answer."""
        assert self._mesh is not None
        return {
            each.name
            for each in list(self._mesh.kubelet.pods.values())
            if each.name.startswith("mesh-s-") and each.ready and not each.asked_to_end
        }

    def _is_ready(self) -> bool:
        """All daemons that run answer."""
        running = self._running()
        return bool(running) and running.keys() == self._ready()

    def _running(self) -> dict[str, int]:
        """Process ids by name."""
        assert self._mesh is not None
        return {
            each.name: each.process.pid
            for each in list(self._mesh.kubelet.pods.values())
            if each.name.startswith("mesh-s-") and each.process is not None and not each.asked_to_end
        }

    def _is_settled(self) -> bool:
        """The operator has done what was asked of it, and the mesh is whole."""
        assert self._mesh is not None
        found = self._mesh.mesh()
        status, cluster = found.get("status") or {}, self._mesh.map()
        said = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        claims = self._steps.claims
        return (
            found["spec"]["nodePools"][0]["replicas"] == self._size
            and status.get("observedGeneration") == found["metadata"]["generation"]
            and (said.get("Settled"), said.get("Progressing")) == ("True", "False")
            and (status.get("ready"), status.get("desired")) == (self._size, self._size)
            and all(pool["updated"] == pool["desired"] for pool in status["pools"])
            and [node.state for node in cluster.nodes] == ["up"] * self._size
            and not cluster.is_rebalancing
            and all(claims.get(f"disk-{name}") not in (None, uid) for name, uid in self._wishes.items())
        )

    def _until(self, wanted: Callable[[], bool], what: str, *, first: bool = False) -> None:
        """Looks at what the operator does meanwhile. `first`: the API has just started."""
        assert self._mesh is not None
        end = time.monotonic() + _PATIENCE
        while True:
            with suppress(httpx2.HTTPError, ApiError, ValueError):
                if not first:
                    self._steps.look(self._mesh)
                if wanted():
                    return
            assert time.monotonic() < end, f"not {what} in time\n{self._mesh.state()}"
            time.sleep(_STEP)

    # --- what is asked of the operator

    def _disturb(self, seconds: float) -> None:
        assert self._mesh is not None
        settled = self._is_settled()
        if settled:
            self._wishes.clear()
            self._chance.choice((self._scale, self._scale, self._decommission, self._restart))()
        elif self._chance.random() < 0.3:
            self._scale()
        end = time.monotonic() + self._chance.uniform(0.2, 8.0) * seconds
        while time.monotonic() < end:
            self._steps.look(self._mesh)
            time.sleep(_STEP)
        self.report.moving += not self._is_settled()

    def _scale(self) -> None:
        assert self._mesh is not None
        self._size = next(size for size in _SIZES if size != self._size)
        self._wishes.pop("mesh-s-2", None)
        self._mesh.change(nodePools=[self._pool()])

    def _decommission(self) -> None:
        assert self._mesh is not None
        name = f"mesh-s-{self._chance.randrange(self._size)}"
        self._wishes[name] = self._steps.claims[f"disk-{name}"]
        self._steps.wished[f"disk-{name}"] = self._steps.wished.get(f"disk-{name}", 0) + 1
        self._mesh.kube.patch(
            MeshNode, name, {"spec": {"desiredState": "Decommissioned"}}, patch_type=PatchType.MERGE
        )

    def _restart(self) -> None:
        assert self._mesh is not None
        release = {"example.com/release": str(self._chance.randrange(1 << 30))}
        self._mesh.change(podTemplate={"metadata": {"annotations": release}})


class _Steps:
    """What the operator did, as somebody sees it who looks a few times a second: replicas that are fewer, and
    claims that are gone. `wished`: how often a claim was to go."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.claims: dict[str, str] = {}
        self.wished: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        self._replicas = 0

    def look(self, mesh: Mesh) -> None:
        """Once more. Raises ApiError, HTTPError."""
        claims, replicas = _claims(mesh), _replicas(mesh)
        owners = {share.node_id for share in mesh.map().current_shares}
        for ordinal in range(replicas, self._replicas):
            if f"mesh-s-{ordinal}" in owners and _replicas(mesh) == replicas:
                self.wrong.append(f"mesh-s-{ordinal} was scaled in with data")
        for name, uid in self.claims.items():
            if claims.get(name) == uid:
                continue
            self._gone[name] = self._gone.get(name, 0) + 1
            if self._gone[name] > self.wished.get(name, 0):
                self.wrong.append(f"{name} was deleted {self._gone[name]} times, of {self.wished}")
            if name.removeprefix("disk-") in owners and name not in claims and name not in _claims(mesh):
                self.wrong.append(f"{name} was deleted with data")
        self.claims, self._replicas = claims, replicas


def _claims(mesh: Mesh) -> dict[str, str]:
    """Uids by name, of those that are not about to go."""
    found = mesh.kube.list(PersistentVolumeClaim, namespace=_NAMESPACE)
    return {each.metadata.name: each.metadata.uid for each in found if not each.metadata.deletionTimestamp}


def _replicas(mesh: Mesh) -> int:
    return int(mesh.kube.get(StatefulSet, "mesh-s", namespace=_NAMESPACE).spec.replicas)


class _Server:
    """A program of the control plane, which others have started first."""

    def __init__(self, home: Path, name: str, pid: int, argv: list[str]) -> None:
        self.name, self._home, self._pid, self._argv = name, home, pid, argv
        self._process: subprocess.Popen[bytes] | None = None

    def signal(self, number: int) -> None:
        """If it runs."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def end(self) -> None:
        """SIGKILL, and wait."""
        if not self._pid:
            return
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self._pid)
            self.signal(signal.SIGKILL)
            select.select([handle], [], [], 60)
            os.close(handle)
        if self._process is not None:
            self._process.wait(60)
        self._pid = 0

    def start(self) -> None:
        """As before, and wait until others may use it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdout=log, stderr=log, cwd=self._home, start_new_session=True
            )
        self._pid = self._process.pid
        if self.name == "etcd":
            self._await(lambda: _connects(self._argv[self._argv.index("--listen-client-urls") + 1]))
        elif self.name == "kube-apiserver":
            config = json.loads((self._home / "kubeconfig").read_text())
            url = config["clusters"][0]["cluster"]["server"] + "/readyz"
            self._await(lambda: _answers(url, config["users"][0]["user"]["token"]))

    def _await(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        assert self._process is not None
        while not true():
            assert self._process.poll() is None, f"{self.name} has ended\n{self.said()[-2000:]}"
            assert time.monotonic() < end, f"{self.name} does not answer\n{self.said()[-2000:]}"
            time.sleep(_STEP)

    @property
    def _log(self) -> Path:
        return self._home / f"{self.name}.log"

    def said(self) -> str:
        """Its log, of all its lives."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _servers(home: Path) -> list[_Server]:
    """What runs of a control plane, in the order of its start."""
    found = []
    for line in (home / "pids").read_text().splitlines():
        pid, name = line.split()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        found.append(_Server(home, name, int(pid), argv))
    return found


def _connects(url: str) -> bool:
    host, port = url.rpartition("/")[2].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _answers(url: str, token: str) -> bool:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(asked, context=ssl._create_unverified_context(), timeout=5):
            return True
    except OSError:
        return False
