"""`python -m tests.e2e`: the chart on a real cluster, from `helm install` to `helm uninstall`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, Pod

from tests.e2e.cluster_client import EndToEndError, RealCluster
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.releases import copied_chart, run_helm
from tests.kubernetes.scenes import MeshCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

DAEMONS = 3
SAMPLES = 400
MeshDataset: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshDataset", "meshdatasets")


class Scenes:
    """The scenes, in order: each leaves the mesh whole for the next."""

    def __init__(self, options: argparse.Namespace, place: Path) -> None:
        self._options, self._place = options, place
        daemon = f"{options.registry}/meshd"
        self._image, self._next = f"{daemon}:{options.tag}", f"{daemon}:{options.next_tag or options.tag}"
        self.cluster = RealCluster(Path(options.kubeconfig), options.namespace, self._image)
        self.figures: list[tuple[str, str]] = []
        self._told = 0
        self._chart, self._values = copied_chart(place), dict[str, Any]()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a step and print its line; what it puts into the dict is printed with it."""
        print(f"{name} …", file=sys.stderr, flush=True)
        began, told = time.monotonic(), dict[str, Any]()
        yield told
        words = ", ".join(f"{key} {value}" for key, value in told.items())
        self.figures.append((name, f"{time.monotonic() - began:.1f} s" + (f": {words}" if words else "")))
        print(f"  {self.figures[-1][1]}", file=sys.stderr, flush=True)

    def keys(self) -> list[dict[str, Any]]:
        endpoint = f"http://mesh-s3.{self.cluster.namespace}.svc:9000"
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        secrets = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "mesh-root", "key": name}}}
            for name in names
        ]
        return [{"name": "MESH_ENDPOINT", "value": endpoint}, *secrets]

    def install(self) -> None:
        options, cluster = self._options, self.cluster
        cluster.create_namespace()
        images = {
            kind: {"image": {"repository": f"{options.registry}/{name}", "tag": options.tag}}
            for kind, name in (("operator", "operator"), ("daemon", "meshd"))
        }
        self._values = images | {"monitoring": {"rules": False}}
        with self.step("helm install until the operator is ready"):
            self.install_chart()
        path = options.host_path
        tiers = [{"name": "disk", "class": "ssd", "hostPath": path}] if path else []
        pool = {"name": "s", "replicas": DAEMONS, "roles": ["store", "cache", "compute"], "tiers": tiers}
        pool["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
        spec = {"image": self._image, "nodePools": [pool], "copies": 2}
        document = {"metadata": {"name": "mesh", "namespace": cluster.namespace}, "spec": spec}
        with self.step(f"a MeshCluster of {DAEMONS} until it is settled"):
            cluster.kube.create(MeshCluster(**document))
            cluster.until(lambda: cluster.is_settled(DAEMONS), "the mesh is settled")

    def install_chart(self) -> None:
        chart, values, cluster = str(self._chart), self._values, self.cluster
        run_helm(helm(), "install", "mesh", chart, *self.where(), "--values", "-", given=values)
        name = "mesh-shardmesh-operator"
        cluster.until(
            lambda: (cluster.kube.get(Deployment, name).status.readyReplicas or 0) == 1,
            "the operator is ready",
        )

    def where(self) -> list[str]:
        options = self._options
        return ["--namespace", options.namespace, "--kubeconfig", str(options.kubeconfig)]

    def load(self) -> None:
        cluster = self.cluster
        with self.step("a pod reads and writes through the Service"):
            cluster.run_script("load", "load_pod.py", env=self.keys())
            cluster.until(lambda: len(cluster.printed("load")) > 1, "clients read and write")
        with self.step("the same for 10 s, undisturbed") as told:
            time.sleep(10)
            self.tell_load(told)

    def tell_load(self, told: dict[str, Any]) -> None:
        """What clients saw since it was told last. Raises EndToEndError if a request failed."""
        cluster = self.cluster
        cluster.until(lambda: len(cluster.printed("load")) >= self._told + 2, "clients print more")
        lines = cluster.printed("load")
        lines, self._told = lines[self._told :], len(lines)
        for kind, name in (("read", "reads"), ("written", "writes")):
            seconds = sorted(second for line in lines for second in line["seconds"][kind])
            if not seconds:
                raise EndToEndError(f"no {name} since the last step")
            high = seconds[int(len(seconds) * 0.99)]
            told[name] = f"{len(seconds)}, p99 {1000 * high:.0f} ms, longest {seconds[-1]:.2f} s"
        failed = [failure for line in lines for failure in line["failed"]]
        told["failed"] = len(failed)
        if failed:
            raise EndToEndError(f"clients saw {len(failed)} failures: {failed[:5]}")

    def train(self) -> str:
        """Returns the epoch's hash."""
        cluster = self.cluster
        with self.step("samples and a MeshDataset of them"):
            cluster.run_script("samples", "samples_pod.py", [str(SAMPLES)], env=self.keys())
            cluster.result("samples")
            source = {"clusterRef": "mesh", "source": {"uri": "mesh://samples/"}}
            metadata = {"name": "photos", "namespace": cluster.namespace}
            cluster.kube.create(MeshDataset(metadata=metadata, spec=source))
            cluster.until(
                lambda: (
                    (cluster.kube.get(MeshDataset, "photos").to_dict().get("status") or {}).get("phase")
                    == "Ready"
                ),
                "the dataset is ready",
            )
        with self.step("a training pod, with no more than its label, an epoch") as told:
            cluster.run_script("train", "training_pod.py", ["0"], labels={"shardmesh.io/dataset": "photos"})
            found = cluster.result("train")
            told["samples"], told["first batch"] = found["samples"], f"{found['first']:.2f} s"
        if found["samples"] != SAMPLES:
            raise EndToEndError(f"the epoch had {found['samples']} of {SAMPLES} samples")
        return str(found["sha256"])

    def upgrade(self, epoch: str) -> None:
        cluster = self.cluster
        with self.step("daemons rolled to another image, one by one") as told:
            labels = {"shardmesh.io/dataset": "photos"}
            cluster.run_script("train-on", "training_pod.py", ["2"], labels=labels)
            cluster.until(lambda: cluster.kube.get(Pod, "train-on").status.phase == "Running", "it trains")
            cluster.change(image=self._next)
            cluster.until(lambda: cluster.is_settled(DAEMONS), "the mesh is settled again", 300)
            self.tell_load(told)
        with self.step("the epoch that was under way, to its end") as told:
            found = cluster.result("train-on")
            told["longest wait"] = f"{found['longest']:.2f} s"
            told["equal"] = found["sha256"] == epoch
        if found["sha256"] != epoch:
            raise EndToEndError("the epoch during the upgrade had other batches")

    def kill_containers(self) -> None:
        cluster = self.cluster
        with self.step("a daemon's pod is deleted without grace") as told:
            victim = cluster.pods({"shardmesh.io/cluster": "mesh"})[0]
            name, uid = victim.metadata.name, victim.metadata.uid
            cluster.kube.delete(Pod, name, grace_period=0)
            cluster.until(
                lambda: cluster.is_settled(DAEMONS) and cluster.kube.get(Pod, name).metadata.uid != uid,
                "the mesh is settled again",
            )
            self.tell_load(told)

    def lose_node(self, what: str, command: str, back: str) -> None:
        """Run `command` for a node, which is then lost, and `back`, which returns it."""
        cluster, node = self.cluster, self.spare_node()
        if node is None:
            return
        with self.step(f"node {node}: {what}; clients for 30 s") as told:
            _shell(command, node)
            time.sleep(30)
            self.tell_load(told)
        with self.step(f"after {what}, until the mesh is settled") as told:
            _shell(back, node)
            cluster.until(lambda: cluster.is_settled(DAEMONS), "the mesh is settled again", 300)
            self.tell_load(told)

    def spare_node(self) -> str | None:
        """Return a node with neither the operator nor the load."""
        cluster = self.cluster
        operator = cluster.pods({"app.kubernetes.io/component": "operator"})[0].spec.nodeName
        load = cluster.kube.get(Pod, "load").spec.nodeName
        nodes = [each.metadata.name for each in cluster.kube.list(Node)]
        found = next((each for each in nodes if each not in (operator, load)), None)
        if found is None:
            print("no node without the operator and the load: none is lost", file=sys.stderr)
        return found

    def uninstall(self) -> None:
        cluster = self.cluster
        with self.step("helm uninstall; clients for 10 s") as told:
            run_helm(helm(), "uninstall", "mesh", *self.where())
            time.sleep(10)
            self.tell_load(told)
        with self.step("helm install again, until the operator works on the mesh") as told:
            self.install_chart()
            generation = cluster.change(update={"paused": False})
            cluster.until(
                lambda: cluster.mesh()["status"].get("observedGeneration") == generation, "it is seen"
            )
            self.tell_load(told)

    def remove(self) -> None:
        cluster = self.cluster
        with self.step("the MeshCluster is deleted, helm uninstall, the namespace is deleted"):
            cluster.delete_pod("load")
            cluster.kube.delete(MeshDataset, "photos")
            cluster.until(lambda: not list(cluster.kube.list(MeshDataset)), "the dataset is gone")
            cluster.kube.delete(MeshCluster, "mesh")
            cluster.until(lambda: not cluster.mesh(), "the mesh is gone")
            run_helm(helm(), "uninstall", "mesh", *self.where())
            cluster.delete_namespace()

    def run(self) -> None:
        self.install()
        self.load()
        epoch = self.train()
        self.upgrade(epoch)
        self.kill_containers()
        if self._options.crash:
            self.lose_node("power cut", self._options.crash, self._options.restore)
        if self._options.cut:
            self.lose_node("cable out", self._options.cut, self._options.mend)
        self.uninstall()
        if not self._options.keep:
            self.remove()


def _shell(command: str, node: str) -> None:
    subprocess.run(command.format(node=node), shell=True, check=True, stdout=subprocess.DEVNULL, timeout=120)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.e2e",
        description="Installs the chart on a real cluster and uses it: objects through the Service, "
        "a training pod, a rolling upgrade, a lost daemon, a crashed node, helm uninstall. Prints what "
        "each step took, and exits with 1 if a client saw a failure. The definitions "
        "(helm/shardmesh/crds) must be there, and both images on its nodes or in a registry.",
    )
    made.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG", ""), help="default: $KUBECONFIG")
    made.add_argument("--namespace", default="mesh-e2e", help="created, and deleted if all goes well")
    made.add_argument(
        "--registry", default="registry.example.com/shardmesh", help="of the images meshd, operator"
    )
    made.add_argument("--tag", default="0.1.0", help="the images' tag")
    made.add_argument("--next-tag", help="to which daemons are rolled; default: none")
    made.add_argument("--host-path", default="/mnt/shardmesh", help='the disk of each node; "": emptyDir')
    made.add_argument("--crash", help='a command that cuts the power of a node: "… {node} …"')
    made.add_argument("--restore", help="a command that starts that node again")
    made.add_argument("--cut", help="a command that takes the cable of a node out")
    made.add_argument("--mend", help="a command that puts it in again")
    made.add_argument("--keep", action="store_true", help="leave everything there at the end")
    return made


def main() -> int:
    options = parser().parse_args()
    if not options.kubeconfig:
        sys.exit("no cluster: set KUBECONFIG or pass --kubeconfig")
    if bool(options.crash) != bool(options.restore):
        sys.exit("--crash and --restore come together")
    if bool(options.cut) != bool(options.mend):
        sys.exit("--cut and --mend come together")
    with tempfile.TemporaryDirectory() as place:
        scenes = Scenes(options, Path(place))
        try:
            scenes.run()
        except EndToEndError as error:
            print(f"failed: {error}", file=sys.stderr)
            print(f"all of it is still in the namespace {options.namespace}", file=sys.stderr)
            return 1
        finally:
            print(json.dumps(dict(scenes.figures), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
