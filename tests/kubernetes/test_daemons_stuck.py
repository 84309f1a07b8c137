"""Daemons that do not start, on a real API server with its scheduler and controllers: what `kubectl get
meshclusters`, conditions, events and metrics say of each. Statuses of containers are written as a kubelet
writes them; pods, claims and their events are Kubernetes' own."""

from __future__ import annotations

import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from lightkube import ApiError
from lightkube.resources.core_v1 import Event, Node, Pod
from lightkube.types import PatchType

from meshoperator import metrics
from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.kube.client import Kube
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.resources import KINDS
from meshoperator.settings import OperatorSettings
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_crds_served import create, resource
from tests.kubernetes.test_webhook import GROUP_VERSION, POOL, account, node, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lightkube import Client

MESH, MESH_NODE = (
    resource(next(kind for kind in KINDS if kind.name == n)) for n in ("MeshCluster", "MeshNode")
)
NAME = "mesh-s-0"


@dataclass
class Scene:
    """A mesh of one daemon, and an operator whose passes are made by hand. `later`: how far ahead its clock
    is."""

    kube: Client
    namespace: str
    run: Callable[[], object]
    later: list[timedelta] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        self.run()
        return dict(self.kube.get(MESH, "mesh", namespace=self.namespace).to_dict()["status"])

    def available(self) -> str:
        return str(
            next(each["message"] for each in self.status()["conditions"] if each["type"] == "Available")
        )

    def told(self) -> list[str]:
        """Events about it, a while later, however often it is looked at."""
        self.later.append(timedelta(minutes=2))
        self.run()
        self.run()
        chosen: dict[str, Any] = {"reason": "DaemonStuck", "involvedObject.name": "mesh"}
        return [each.message or "" for each in self.kube.list(Event, namespace=self.namespace, fields=chosen)]

    def pod(self) -> dict[str, Any]:
        def there() -> Any:
            self.run()
            pods: Any = self.kube.list(Pod, namespace=self.namespace)
            return [each for each in pods if each.metadata.name == NAME]

        (found,) = until(there)
        return dict(found.to_dict())

    def say(self, **status: Any) -> None:
        """As a kubelet does."""
        self.pod()
        self.kube.patch(
            Pod.Status, NAME, {"status": status}, namespace=self.namespace, patch_type=PatchType.MERGE
        )

    def container(self, **state: Any) -> None:
        about = {"name": "meshd", "image": "i:1", "imageID": "", "ready": False, "restartCount": 3}
        self.say(containerStatuses=[about | state])

    def event(self, reason: str, message: str) -> None:
        """As a kubelet writes it."""
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        metadata = {"name": f"{NAME}.{uuid.uuid4().hex[:8]}", "namespace": self.namespace}
        about = {
            "kind": "Pod",
            "name": NAME,
            "namespace": self.namespace,
            "uid": self.pod()["metadata"]["uid"],
        }
        found: Any = {"metadata": metadata, "involvedObject": about, "reason": reason, "message": message}
        made: Any = Event.from_dict(found | {"type": "Warning", "lastTimestamp": now})
        self.kube.create(made)


@contextmanager
def staged(
    kubeconfig: Path, kube: Client, namespace: str, pool: dict[str, Any], **spec: Any
) -> Iterator[Scene]:
    account(kube, namespace)
    # meshes of other tests are on this API server, too: its directories are nobody else's
    tiers = [{"name": "d", "class": "nvme", "hostPath": "/stuck"}]
    whole = {"image": "i:1", "nodePools": [POOL | {"tiers": tiers} | pool]} | spec
    create(
        kube,
        namespace,
        {"apiVersion": GROUP_VERSION, "kind": "MeshCluster", "metadata": {"name": "mesh"}, "spec": whole},
    )
    later: list[timedelta] = []

    def now() -> str:
        told = datetime.now(UTC) + sum(later, timedelta())
        return told.isoformat(timespec="seconds").replace("+00:00", "Z")

    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        own = Kube(api)
        clusters = ClusterController(own, OperatorSettings(), EventRecorder(own, now), now)
        try:
            yield Scene(kube, namespace, lambda: loop.run(clusters.reconcile(namespace, "mesh")), later)
        finally:
            loop.run(api.close())
            metrics.forget_cluster(namespace, "mesh")
            free: Any = {"metadata": {"finalizers": None}}
            with suppress(ApiError):  # a test may have deleted it
                kube.patch(MESH, "mesh", free, namespace=namespace, patch_type=PatchType.MERGE)
                kube.delete(MESH, "mesh", namespace=namespace)


@pytest.fixture
def host(kube: Client) -> Iterator[dict[str, Any]]:
    """A machine of its own, as a pool's nodeSelector."""
    name = f"h-{uuid.uuid4().hex[:8]}"
    kube.create(node(name, {"pool": name}))
    kube.patch(Node, name, {"spec": {"taints": None}})
    yield {"nodeSelector": {"pool": name}}
    kube.delete(Node, name)


def judge(scene: Scene, word: str, said: str, advice: str) -> None:
    """Everywhere the pod, the reason, and what to do."""
    until(lambda: said in scene.available())
    message = scene.available()
    assert f"0 of 1 daemons are ready: {NAME} " in message
    assert f"; to do: {advice}" in message
    assert scene.status()["trouble"] == f"{word}: {NAME}"
    (event,) = scene.told()
    assert event.startswith(f"{NAME} ")
    assert said in event
    assert f"; to do: {advice}" in event
    (about,) = (each.to_dict() for each in scene.kube.list(MESH_NODE, namespace=scene.namespace))
    (ready,) = (each for each in about["status"]["conditions"] if each["type"] == "Ready")
    assert said in ready["message"]
    assert advice in ready["message"]
    assert (scene.namespace, "mesh", NAME, word) in metrics.stuck._metrics


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, reason: str, message: str = "") -> dict[str, Any]:
    return {"lastState": {"terminated": {"exitCode": code, "reason": reason, "message": message}}}


PULL = waiting("ImagePullBackOff", 'Back-off pulling image "i:1"')
BACK_OFF = waiting("CrashLoopBackOff", "back-off 40s restarting failed container")
KEYS = waiting("CreateContainerConfigError", 'secret "mesh-root" not found')


@pytest.mark.parametrize(
    ("state", "word", "said", "advice"),
    [
        (PULL, "Image", "ImagePullBackOff: Back-off pulling", "correct the image"),
        (
            BACK_OFF | ended(78, "Error", "refuses to start: the disk is empty"),
            "Crash",
            "exited with 78: refuses to start: the disk is empty",
            "follow its last log lines; for all of them: kubectl -n {namespace} logs mesh-s-0 --previous",
        ),
        (
            BACK_OFF | ended(137, "OOMKilled"),
            "OutOfMemory",
            "exited with 137 (OOMKilled)",
            "raise resources.limits.memory",
        ),
        (KEYS, "Reference", 'secret "mesh-root" not found', "create what is missing"),
    ],
    ids=["image", "crash", "memory", "key"],
)
def test_a_container_that_does_not_start(
    kubeconfig: Path,
    kube: Client,
    namespace: str,
    host: dict[str, Any],
    state: dict[str, Any],
    word: str,
    said: str,
    advice: str,
) -> None:
    with staged(kubeconfig, kube, namespace, host) as scene:
        until(lambda: scene.pod()["spec"].get("nodeName"))
        scene.container(**waiting("ContainerCreating", ""))
        assert scene.status().get("trouble") is None  # it is on its way
        scene.container(**state)
        judge(scene, word, said, advice.format(namespace=namespace))
        scene.container(state={"running": {}}, ready=True, lastState={})
        scene.say(conditions=[{"type": "Ready", "status": "True"}])
        assert scene.status().get("trouble") is None
        assert not [key for key in metrics.stuck._metrics if key[0] == namespace]


def test_a_volume_that_cannot_be_mounted(
    kubeconfig: Path, kube: Client, namespace: str, host: dict[str, Any]
) -> None:
    with staged(kubeconfig, kube, namespace, host) as scene:
        until(lambda: scene.pod()["spec"].get("nodeName"))
        scene.event("FailedMount", 'MountVolume.SetUp failed: configmap "mesh-settings" not found')
        judge(scene, "Reference", 'configmap "mesh-settings" not found', "create what is missing")


def test_a_pod_that_no_machine_takes(kubeconfig: Path, kube: Client, namespace: str) -> None:
    with staged(kubeconfig, kube, namespace, {"nodeSelector": {"pool": "none"}}) as scene:
        scene.pod()
        judge(
            scene,
            "NoPlace",
            "is unschedulable: ",
            "add a machine with the pool's labels and enough resources",
        )


def test_a_claim_that_stays_pending(
    kubeconfig: Path, kube: Client, namespace: str, host: dict[str, Any]
) -> None:
    tiers = [{"name": "d", "class": "nvme", "volumeClaim": {"size": "1Gi", "storageClass": "nowhere"}}]
    with staged(kubeconfig, kube, namespace, host | {"tiers": tiers}) as scene:
        scene.pod()
        advice = f"kubectl -n {namespace} describe pvc"
        judge(
            scene,
            "Volume",
            f'its volume d-{NAME}: ProvisioningFailed: storageclass.storage.k8s.io "nowhere"',
            advice,
        )


def test_a_secret_that_the_spec_names_is_in_the_column(
    kubeconfig: Path, kube: Client, namespace: str
) -> None:
    keys = {"auth": {"rootSecretRef": {"name": "keys"}}}
    with staged(kubeconfig, kube, namespace, {}, **keys) as scene:
        status = scene.status()
        assert status["trouble"] == "SecretMissing"
        (told,) = (each["message"] for each in status["conditions"] if each["type"] == "Progressing")
        assert f"Secret keys does not exist; create it in the namespace {namespace}" in told
