"""A small kubelet for tests: pods on its nodes are real processes, each on a loopback address of its own.

What it does as a real one: mounts (ConfigMaps, Secrets, hostPath under a folder a node, emptyDir, tokens of
the pod's ServiceAccount), environment and `$(NAME)` in arguments, readiness by the pod's HTTP probe,
restarts, SIGTERM and after the grace period SIGKILL, images that nobody has. What it stands in for: an
image is this checkout's program, `0.0.0.0` and `[::]` are the pod's own address, and names of pods within the
cluster are their addresses (no DNS). What it does not: containers, limits, liveness, several containers in a
pod.

Law: ends what it started, by process id.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from lightkube import ApiError, Client, KubeConfig
from lightkube.core.decoders import decode_list, decode_status
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

from tests.kubernetes.provisioning import Provisioning
from tests.kubernetes.running import Running
from tests.kubernetes.starting import NoImageError, NotYetError, Starting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_KINDS: tuple[type, ...] = (
    ConfigMap,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    Secret,
    ServiceAccountToken,
)
_TICK = 0.4


class Kubelet:
    """Of all nodes of a test, in one thread."""

    def __init__(
        self,
        kubeconfig: Path,
        place: Path,
        namespace: str,
        checkouts: Mapping[str, Path] | None = None,
    ) -> None:
        """`checkouts`: by tag of an image, whose program it is, where it is not this checkout's."""
        self._place = place
        self._client: Any = Client(config=KubeConfig.from_file(kubeconfig).get(), namespace=namespace)
        self._subnet = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250 + 1}"
        self._last, self._placements = 0, list[str]()
        self._nodes: dict[str, Path] = {}
        self._silent: set[str] = set()
        self.pods: dict[str, Running] = {}
        self._starting = Starting(self._client, kubeconfig, place, namespace, self._nodes, checkouts or {})
        self._provisioning = Provisioning(self._client, place, namespace)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelet")

    def __enter__(self) -> Self:
        for kind in _KINDS:  # msgspec ends the process where two threads meet a type for the first time
            decode_list(b'{"items":[]}', kind)
        decode_status(b"{}")
        self._thread.start()
        return self

    def stop(self) -> None:
        """It starts nothing any more."""
        self._stop.set()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        self._thread.join(30)
        for running in self.pods.values():
            running.kill()
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
    def admitted(self) -> int:
        """How many pods its machines have been given since the beginning."""
        return self._last

    def placements(self, start: int) -> list[str]:
        """The pods that its machines have been given after the first `start`, each with its machine."""
        return self._placements[start:]

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
                    running.kill()
                    running.again = float("inf")
            shutil.rmtree(self._nodes[name])
        self._delete_node(name)

    def silence(self, name: str, *, back: bool = False) -> None:
        """A machine without power or network: what runs there has ended, and the API is not told."""
        with self._lock:
            if back:
                self._silent.discard(name)
                return
            self._silent.add(name)
            for running in self.pods.values():
                if running.document["spec"]["nodeName"] == name:
                    running.kill()

    def empty_disks(self) -> None:
        """Everything in directories of machines is gone."""
        with self._lock:
            for place in self._nodes.values():
                shutil.rmtree(place)
                place.mkdir()

    @contextmanager
    def without_power(self) -> Iterator[None]:
        """All machines at once: what runs stands still when the block begins, has ended when it ends, and is
        started again after it. In the block, `end_all` ends it."""
        with self._lock:
            for each in self.pods.values():
                each.signal(signal.SIGSTOP)
            yield
            self.end_all()

    def end_all(self) -> None:
        """What runs on its machines has lost power."""
        for each in self.pods.values():
            each.kill()
            each.restarts, each.again, each.asked_to_end, each.ready = 0, 0.0, 0.0, None

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
                    if not self._stop.is_set():
                        self._tick()
            except Exception:
                traceback.print_exc()
            self._stop.wait(_TICK)

    def _tick(self) -> None:
        self._provisioning.run()
        there = {each.metadata.uid: each.to_dict() for each in self._client.list(Pod)}
        for uid in self.pods.keys() - there.keys():
            self.pods[uid].kill()
            del self.pods[uid]
        for uid, document in there.items():
            if document["spec"].get("nodeName") in self._nodes.keys() - self._silent:
                running = self.pods.get(uid) or self._admit(uid, document)
                running.document = document
                self._attend(running)

    def _admit(self, uid: str, document: dict[str, Any]) -> Running:
        self._last += 1
        self._placements.append(f"{document['metadata']['name']} on {document['spec']['nodeName']}")
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
                self._starting.start(running)
            except NotYetError:
                return
            except NoImageError as error:
                self._say(running, _without_image(running, str(error)))
                return
            self._tell(running, ready=False)
        elif (ready := running.answers()) != running.ready:
            self._tell(running, ready=ready)

    def _end(self, running: Running) -> None:
        process, now = running.process, time.monotonic()
        if process is not None and process.poll() is None:
            grace = float(running.document["metadata"].get("deletionGracePeriodSeconds") or 0)
            if not running.asked_to_end:
                running.asked_to_end = now
                process.terminate()
            elif now > running.asked_to_end + grace:
                running.kill()
            return
        metadata = running.document["metadata"]
        try:
            self._client.delete(Pod, metadata["name"], grace_period=0)
        except ApiError as error:
            if error.status.code != 404:
                raise

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
        self._say(running, status)
        running.ready = ready

    def _say(self, running: Running, status: dict[str, Any]) -> None:
        try:
            self._client.patch(Pod.Status, running.name, {"status": status}, patch_type=PatchType.MERGE)
        except ApiError as error:
            if error.status.code != 404:
                raise


def _without_image(running: Running, image: str) -> dict[str, Any]:
    (container,) = running.document["spec"]["containers"]
    waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
    about = {"name": container["name"], "image": image, "imageID": "", "ready": False, "restartCount": 0}
    conditions = [{"type": kind, "status": "False"} for kind in ("Ready", "ContainersReady")]
    conditions += [{"type": kind, "status": "True"} for kind in ("Initialized", "PodScheduled")]
    states = [about | {"state": {"waiting": waiting}}]
    return {"phase": "Pending", "conditions": conditions, "containerStatuses": states}
