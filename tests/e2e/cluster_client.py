"""A real cluster as the scenes see it: its API, and pods that run a script of this folder."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightkube import ApiError, Client, KubeConfig
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Namespace, Pod, ServiceAccountToken
from lightkube.types import PatchType

from tests.kubernetes.scenes import MeshCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).parent
USER = 65532


class EndToEndError(Exception):
    """A step failed; the message has what there is to see."""


class RealCluster:
    """One namespace of a real cluster. `image` runs the scripts: the daemon's, which has the SDK."""

    def __init__(self, kubeconfig: Path, namespace: str, image: str) -> None:
        self.kube: Any = Client(config=KubeConfig.from_file(kubeconfig).get(), namespace=namespace)
        self.kubeconfig, self.namespace, self.image = kubeconfig, namespace, image

    def create_namespace(self) -> None:
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}  # hostPath tiers
        self.kube.create(Namespace(metadata=ObjectMeta(name=self.namespace, labels=labels)))

    def delete_namespace(self, patience: float = 120.0) -> None:
        with suppress(ApiError):
            self.kube.delete(Namespace, self.namespace)
        self.until(
            lambda: self.namespace not in {each.metadata.name for each in self.kube.list(Namespace)},
            "the namespace is gone",
            patience,
        )

    def until(self, condition: Callable[[], object], what: str, patience: float = 180.0) -> float:
        """Wait; return the seconds. Raises EndToEndError."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > patience:
                raise EndToEndError(f"not in {patience:.0f} s: {what}\n{self.describe()}")
            time.sleep(0.25)
        return time.monotonic() - began

    def mesh(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.kube.get(MeshCluster, "mesh").to_dict()
        except ApiError:
            return {}
        return found

    def change(self, **spec: Any) -> int:
        """Change the spec of the MeshCluster; return its generation."""
        found = self.kube.patch(MeshCluster, "mesh", {"spec": spec}, patch_type=PatchType.MERGE)
        return int(found.metadata.generation)

    def is_settled(self, daemons: int) -> bool:
        """Whether the mesh runs that many daemons of its present spec and moves nothing."""
        mesh = self.mesh()
        status = mesh.get("status") or {}
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        ready = self.ready_pods({"shardmesh.io/cluster": "mesh"})
        return (
            status.get("phase") == "Running"
            and conditions.get("Settled") == "True"
            and status.get("observedGeneration") == mesh["metadata"]["generation"]
            and len(ready) == daemons
            and all(pod.spec.containers[0].image == mesh["spec"]["image"] for pod in ready)
        )

    def pods(self, labels: dict[str, str]) -> list[Any]:
        return list(self.kube.list(Pod, labels=labels))

    def ready_pods(self, labels: dict[str, str]) -> list[Any]:
        return [pod for pod in self.pods(labels) if _is_ready(pod)]

    def run_script(
        self,
        name: str,
        script: str,
        arguments: Sequence[str] = (),
        *,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        account: str = "default",
        env: Sequence[dict[str, Any]] = (),
        node: str | None = None,
    ) -> None:
        """Start a pod that runs a script of this folder, on `node` if it is given."""
        container = {
            "name": "script",
            "image": self.image,
            "command": ["python", "-c", (HERE / script).read_text(), *arguments],
            "env": list(env),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
        spec = {
            "restartPolicy": "Never",
            "serviceAccountName": account,
            "nodeName": node,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER},
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
        labels, annotations = labels or {}, annotations or {}
        metadata = {"name": name, "namespace": self.namespace, "labels": labels, "annotations": annotations}
        self.kube.create(Pod.from_dict({"metadata": metadata, "spec": spec}))

    def printed(self, name: str) -> list[dict[str, Any]]:
        """Return all complete lines of JSON that a pod printed."""
        try:
            text = "".join(self.kube.log(name))
        except ApiError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line.startswith("{")]

    def result(self, name: str, patience: float = 180.0) -> dict[str, Any]:
        """Wait until a pod has ended well; return what it printed. Raises EndToEndError."""

        def phase() -> str:
            return str(self.kube.get(Pod, name).status.phase)

        self.until(lambda: phase() in ("Succeeded", "Failed"), f"pod {name} ended", patience)
        found = self.printed(name)
        if phase() == "Failed" or not found:
            raise EndToEndError(f"pod {name} failed: {' '.join(self.kube.log(name, tail_lines=20))}")
        return found[-1]

    def delete_pod(self, name: str) -> None:
        self.kube.delete(Pod, name)
        self.until(lambda: name not in {pod.metadata.name for pod in self.kube.list(Pod)}, f"{name} gone")

    def delete_pod_at_once(self, name: str) -> None:
        """Delete a pod without grace, and wait until it is another one, or none."""
        uid = self.kube.get(Pod, name).metadata.uid
        self.kube.delete(Pod, name, grace_period=0)
        self.until(lambda: uid not in {pod.metadata.uid for pod in self.kube.list(Pod)}, f"{name} is gone")

    def token(self, account: str, audience: str) -> str:
        """Return a token of a service account, as a kubelet requests it for a pod."""
        wanted = TokenRequestSpec(audiences=[audience], expirationSeconds=3600)
        made = self.kube.create(ServiceAccountToken(metadata=ObjectMeta(), spec=wanted), account)
        return str(made.status.token)

    def describe(self) -> str:
        """Return what one would look at: the mesh's status, pods and last events."""
        pods = [
            f"{pod.metadata.name} {pod.status.phase} {[_state(each) for each in _statuses(pod)]}"
            for pod in self.kube.list(Pod)
        ]
        events = sorted(self.kube.list(Event), key=lambda each: str(each.lastTimestamp))[-15:]
        said = [f"{each.involvedObject.name}: {each.reason}: {each.message}" for each in events]
        status = json.dumps((self.mesh().get("status") or {}).get("conditions", []), indent=1)
        return "\n".join((status, *pods, *said))


def host_port(address: str, port: int) -> str:
    """Return HOST:PORT of an address of either family."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _statuses(pod: Any) -> list[Any]:
    return [*(pod.status.initContainerStatuses or ()), *(pod.status.containerStatuses or ())]


def _state(status: Any) -> str:
    found = {name: value for name, value in status.state.to_dict().items() if value}
    return f"{status.name}: {json.dumps(found, default=str)}"


def _is_ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return ready and pod.metadata.deletionTimestamp is None
