"""A small kubelet for tests: pods on its nodes are real processes, each on a loopback address of its own.

What it does as a real one: mounts (ConfigMaps, Secrets, hostPath under a folder a node, emptyDir, tokens of
the pod's ServiceAccount), environment and `$(NAME)` in arguments, readiness by the pod's HTTP probe,
restarts, SIGTERM and after the grace period SIGKILL. What it stands in for: an image is this checkout's
program, `0.0.0.0` is the pod's own address, and names of pods within the cluster are their addresses (no
DNS). What it does not: containers, limits, liveness, several containers in a pod.

Law: ends what it started, by process id.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import traceback
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightkube import ApiError, Client, KubeConfig
from lightkube.core.decoders import decode_list, decode_status
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import (
    ConfigMap,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Secret,
    ServiceAccountToken,
)
from lightkube.types import PatchType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAMS = {
    "meshd": [sys.executable, "-m", "meshd"],
    "operator": [sys.executable, "-m", "kopf"],
    "i": ["sleep", "600"],  # a training pod
}
_KINDS: tuple[type, ...] = (
    ConfigMap,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Secret,
    ServiceAccountToken,
)
_TICK = 0.2
_FIELDS = {
    "metadata.name": lambda pod: pod["metadata"]["name"],
    "metadata.namespace": lambda pod: pod["metadata"]["namespace"],
    "spec.nodeName": lambda pod: pod["spec"]["nodeName"],
}


class NotYetError(Exception):
    """Something that a pod names is not there yet."""


@dataclass
class Running:
    """A pod's process. `ready`: as the API was told last."""

    document: dict[str, Any]
    address: str
    place: Path
    process: subprocess.Popen[bytes] | None = None
    ready: bool | None = None
    asked_to_end: float = 0.0
    restarts: int = 0
    again: float = 0.0
    mounts: dict[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the pod."""
        return str(self.document["metadata"]["name"])

    def output(self) -> str:
        """What it printed, in all its lives."""
        log = self.place / "log"
        return log.read_text(errors="replace") if log.exists() else ""


class Kubelet:
    """Of all nodes of a test, in one thread."""

    def __init__(self, kubeconfig: Path, place: Path, namespace: str) -> None:
        self._config, self._place, self._namespace = kubeconfig, place, namespace
        self._client: Any = Client(config=KubeConfig.from_file(kubeconfig).get(), namespace=namespace)
        self._subnet = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
        self._last = 0
        self._nodes: dict[str, Path] = {}
        self.pods: dict[str, Running] = {}
        self._volumes: dict[str, str] = {}  # of claims, by their uid
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        for kind in _KINDS:  # msgspec ends the process where two threads meet a type for the first time
            decode_list(b'{"items":[]}', kind)
        decode_status(b"{}")
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join(30)
        for running in self.pods.values():
            self._kill(running)
        for name in list(self._nodes):
            self._delete_node(name)
        self._client.close()
        if error is not None:
            print(self.output(), file=sys.stderr)

    def output(self) -> str:
        """The last words of all that ran."""
        return "\n".join(
            f"=== {each.name} ({each.address})\n{each.output()[-4000:]}" for each in self.pods.values()
        )

    def addresses(self, count: int) -> list[str]:
        """Those that pods get first."""
        return [f"{self._subnet}.{number}" for number in range(1, count + 1)]

    # --- nodes --------------------------------------------------------------------------------------------

    def add_node(self, name: str, labels: Mapping[str, str]) -> None:
        """A machine: schedulable, with an empty disk."""
        self._nodes[name] = self._place / name
        self._nodes[name].mkdir(parents=True, exist_ok=True)
        found = {"kubernetes.io/hostname": name, **labels}
        try:
            self._client.create(Node.from_dict({"metadata": {"name": name, "labels": found}}))
        except ApiError as error:
            if error.status.code != 409:  # of a try before
                raise
        room = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Test",
            "message": "",
            "lastHeartbeatTime": None,
        }
        status = {"status": {"allocatable": room, "capacity": room, "conditions": [ready]}}
        self._client.patch(Node.Status, name, status, patch_type=PatchType.MERGE)
        self._client.patch(Node, name, {"spec": {"taints": None}}, patch_type=PatchType.MERGE)

    @property
    def nodes(self) -> list[str]:
        """Names of the machines that are there."""
        return list(self._nodes)

    def cordon(self, name: str, *, back: bool = False) -> None:
        """As `kubectl cordon`."""
        self._client.patch(
            Node, name, {"spec": {"unschedulable": None if back else True}}, patch_type=PatchType.MERGE
        )

    def lose(self, name: str) -> None:
        """A machine that burns: its processes, its disk and its Node are gone."""
        with self._lock:
            for running in self.pods.values():
                if running.document["spec"]["nodeName"] == name:
                    self._kill(running)
                    running.again = float("inf")
            shutil.rmtree(self._nodes[name])
        self._delete_node(name)

    def _delete_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        try:
            self._client.delete(Node, name)
        except ApiError as error:
            if error.status.code != 404:
                raise

    # --- pods ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._lock:
                    self._tick()
            except Exception:
                traceback.print_exc()
            self._stop.wait(_TICK)

    def _tick(self) -> None:
        self._provide()
        there = {each.metadata.uid: each.to_dict() for each in self._client.list(Pod)}
        for uid in self.pods.keys() - there.keys():
            self._kill(self.pods[uid])
            del self.pods[uid]
        for uid, document in there.items():
            if document["spec"].get("nodeName") in self._nodes:
                running = self.pods.get(uid) or self._admit(uid, document)
                running.document = document
                self._attend(running)

    def _admit(self, uid: str, document: dict[str, Any]) -> Running:
        self._last += 1
        place = self._place / "pods" / f"{document['metadata']['name']}-{uid[:8]}"
        place.mkdir(parents=True)
        running = self.pods[uid] = Running(document, f"{self._subnet}.{self._last}", place)
        return running

    def _attend(self, running: Running) -> None:
        if running.document["metadata"].get("deletionTimestamp"):
            self._end(running)
            return
        process = running.process
        if process is None or process.poll() is not None:
            if time.monotonic() < running.again:
                return
            if process is not None:
                running.restarts += 1
            running.again = time.monotonic() + min(5.0, 0.5 * 2**running.restarts)
            try:
                self._start(running)
            except NotYetError:
                return
            self._tell(running, ready=False)
        elif (ready := self._is_ready(running)) != running.ready:
            self._tell(running, ready=ready)

    def _end(self, running: Running) -> None:
        process, now = running.process, time.monotonic()
        if process is not None and process.poll() is None:
            grace = float(running.document["metadata"].get("deletionGracePeriodSeconds") or 0)
            if not running.asked_to_end:
                running.asked_to_end = now
                process.terminate()
            elif now > running.asked_to_end + grace:
                self._kill(running)
            return
        metadata = running.document["metadata"]
        try:
            self._client.delete(Pod, metadata["name"], grace_period=0)
        except ApiError as error:
            if error.status.code != 404:
                raise

    def _kill(self, running: Running) -> None:
        process = running.process
        if process is None or process.poll() is not None:
            return
        family = [process.pid, *_children(process.pid)]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(60)

    def _start(self, running: Running) -> None:
        pod = running.document
        (container,) = pod["spec"]["containers"]
        for mount in container.get("volumeMounts") or ():
            running.mounts[mount["mountPath"]] = self._mounted(running, mount)
        for volume in pod["spec"].get("volumes") or ():
            self._localize(running, volume)
        variables = {each["name"]: self._value(pod, each) for each in container.get("env") or ()}
        own = {name: self._here(running, value) for name, value in variables.items() if value is not None}
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("MESHD_", "MESH_", "KUBERNETES_"))
        }
        kept = {k: os.environ[k] for k in ("PYTHONPATH",) if k in os.environ}
        environment = (
            inherited | kept | {"KUBECONFIG": str(self._kubeconfig(running)), "HOSTNAME": running.name} | own
        )
        image = str(container["image"]).rpartition("/")[2].partition(":")[0].partition("@")[0]
        arguments = [self._here(running, _expanded(each, variables)) for each in container.get("args") or ()]
        with (running.place / "log").open("ab") as log:
            running.process = subprocess.Popen(
                [*PROGRAMS[image], *arguments], env=environment, stdout=log, stderr=log, cwd=running.place
            )

    def _value(self, pod: Mapping[str, Any], variable: Mapping[str, Any]) -> str | None:
        source = variable.get("valueFrom") or {}
        if "fieldRef" in source:
            return str(_FIELDS[source["fieldRef"]["fieldPath"]](pod))
        if "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            return self._read(Secret, wanted["name"])[wanted["key"]].decode()
        return str(variable.get("value") or "")

    def _here(self, running: Running, text: str) -> str:
        """Paths, addresses and names of the pod as they are on this machine."""
        for path in sorted(running.mounts, key=len, reverse=True):
            if text == path or text.startswith(path + "/"):
                return str(running.mounts[path]) + text[len(path) :]
        name = re.escape(running.name) + rf"\.[a-z0-9-]+\.{self._namespace}\.svc"
        return re.sub(name, running.address, text.replace("0.0.0.0", running.address))

    # --- volumes ------------------------------------------------------------------------------------------

    def _mounted(self, running: Running, mount: Mapping[str, Any]) -> Path:
        pod = running.document
        volume = next(each for each in pod["spec"]["volumes"] if each["name"] == mount["name"])
        below = mount.get("subPath") or _expanded(mount.get("subPathExpr") or "", {"POD_NAME": running.name})
        if "hostPath" in volume:
            found: Path = (
                self._nodes[pod["spec"]["nodeName"]] / volume["hostPath"]["path"].lstrip("/") / below
            )
        elif "persistentVolumeClaim" in volume:
            found = self._place / "volumes" / volume["persistentVolumeClaim"]["claimName"] / below
        else:
            found = running.place / mount["name"] / below
        found.mkdir(parents=True, exist_ok=True)
        files: dict[str, bytes] = {}
        if "configMap" in volume:
            files = self._read(ConfigMap, volume["configMap"]["name"])
        elif "secret" in volume:
            try:
                files = self._read(Secret, volume["secret"]["secretName"])
            except NotYetError:
                if not volume["secret"].get("optional"):
                    raise
        for name, content in files.items():
            (found / name).write_bytes(content.replace(b"0.0.0.0", running.address.encode()))
        return found

    def _localize(self, running: Running, volume: Mapping[str, Any]) -> None:
        """Settings name files of other mounts: as they are on this machine."""
        if "configMap" in volume:
            paths = "|".join(map(re.escape, sorted(running.mounts, key=len, reverse=True)))
            for file in (running.place / volume["name"]).iterdir():
                text = file.read_text()
                file.write_text(re.sub(f"(?<= )({paths})(?=/)", lambda m: str(running.mounts[m[1]]), text))

    def _provide(self) -> None:
        """As a storage plug-in: a volume for each claim that has none; it grows, and goes, with its claim."""
        claims = {each.metadata.name: each for each in self._client.list(PersistentVolumeClaim)}
        for name, claim in claims.items():
            if claim.status.phase == "Pending" and claim.metadata.uid not in self._volumes:
                self._volumes[claim.metadata.uid] = name
                self._client.create(_volume(claim, self._namespace))
            elif claim.status.phase == "Bound" and claim.status.capacity != claim.spec.resources.requests:
                self._enlarge(claim)
        for uid, name in list(self._volumes.items()):
            if uid not in {claim.metadata.uid for claim in claims.values()}:
                self._client.delete(PersistentVolume, f"pv-{uid}")
                shutil.rmtree(self._place / "volumes" / name, ignore_errors=True)
                del self._volumes[uid]

    def _enlarge(self, claim: Any) -> None:
        size = dict(claim.spec.resources.requests)
        volume, change = {"spec": {"capacity": size}}, {"status": {"capacity": size}}
        merge = PatchType.MERGE
        self._client.patch(PersistentVolume, f"pv-{claim.metadata.uid}", volume, patch_type=merge)
        self._client.patch(PersistentVolumeClaim.Status, claim.metadata.name, change, patch_type=merge)

    def _read(self, kind: Any, name: str) -> dict[str, bytes]:
        try:
            found = self._client.get(kind, name)
        except ApiError as error:
            if error.status.code == 404:
                raise NotYetError(name) from None
            raise
        if kind is Secret:
            return {key: b64decode(value) for key, value in (found.data or {}).items()}
        return {key: value.encode() for key, value in (found.data or {}).items()}

    def _kubeconfig(self, running: Running) -> Path:
        """With the rights of the pod's ServiceAccount, and no others."""
        account = running.document["spec"].get("serviceAccountName") or "default"
        wanted = ServiceAccountToken(
            metadata=ObjectMeta(), spec=TokenRequestSpec(audiences=[], expirationSeconds=3600)
        )
        try:
            token = str(self._client.create(wanted, account).status.token)
        except ApiError as error:
            if error.status.code == 404:
                raise NotYetError(account) from None
            raise
        document = json.loads(self._config.read_text())
        document["users"][0]["user"] = {"token": token}
        document["contexts"][0]["context"]["namespace"] = self._namespace
        path = running.place / "kubeconfig"
        path.write_text(json.dumps(document))
        return path

    # --- what it tells ------------------------------------------------------------------------------------

    def _is_ready(self, running: Running) -> bool:
        (container,) = running.document["spec"]["containers"]
        probe = (container.get("readinessProbe") or {}).get("httpGet")
        if probe is None:
            return True
        port = probe["port"]
        if isinstance(port, str):
            port = next(each["containerPort"] for each in container["ports"] if each["name"] == port)
        connection = http.client.HTTPConnection(running.address, port, timeout=2)
        if probe.get("scheme") == "HTTPS":  # probes verify nothing
            whoever = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            whoever.check_hostname, whoever.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(running.address, port, timeout=2, context=whoever)
        try:
            connection.request("GET", probe["path"])
            return connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tell(self, running: Running, *, ready: bool) -> None:
        word = "True" if ready else "False"
        conditions = [{"type": kind, "status": word} for kind in ("Ready", "ContainersReady")]
        conditions += [{"type": kind, "status": "True"} for kind in ("Initialized", "PodScheduled")]
        status = {
            "phase": "Running",
            "podIP": running.address,
            "podIPs": [{"ip": running.address}],
            "conditions": conditions,
        }
        try:
            self._client.patch(Pod.Status, running.name, {"status": status}, patch_type=PatchType.MERGE)
        except ApiError as error:
            if error.status.code != 404:
                raise
        running.ready = ready


def _volume(claim: Any, namespace: str) -> Any:
    name, uid = claim.metadata.name, claim.metadata.uid
    spec = {
        "capacity": claim.spec.resources.requests,
        "accessModes": claim.spec.accessModes,
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": name, "uid": uid},
        "hostPath": {"path": f"/volumes/{name}"},
        "storageClassName": claim.spec.storageClassName or "",
    }
    return PersistentVolume.from_dict({"metadata": {"name": f"pv-{uid}"}, "spec": spec})


def _expanded(text: str, variables: Mapping[str, str | None]) -> str:
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: variables.get(found[1]) or found[0], text)


def _children(pid: int) -> Iterator[int]:
    """All processes below one."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _children(int(child))
    except OSError:
        return
