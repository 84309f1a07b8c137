"""What all scenes share: the cluster, the installed chart, timed steps, and what clients saw meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from base64 import b64decode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Node, Pod, Secret

from tests.e2e.cluster_client import EndToEndError
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.releases import copied_chart, run_helm

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.e2e.cluster_client import RealCluster
    from tests.monitoring.scraping import Prometheus

DAEMONS = 3
MESH_PODS = {"shardmesh.io/cluster": "mesh"}
ROOT_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
NUMBERS = 10**6  # of objects that each thread of load_pod.py may write
OLDER = 1000  # objects of each thread, written before a failure and read after it


class Stage:
    """One namespace with the chart's release `mesh`; each scene leaves its mesh whole for the next.

    `figures` has a line for every step that ended, `timeline` when it began and ended, by the wall clock,
    also of other stages; `granted` the rights that the chart gave (rights.py).
    """

    def __init__(
        self,
        options: argparse.Namespace,
        cluster: RealCluster,
        place: Path,
        timeline: list[tuple[str, float, float]] | None = None,
    ) -> None:
        self.timeline = [] if timeline is None else timeline
        self.options, self.cluster, self.place = options, cluster, place
        daemon = f"{options.registry}/meshd"
        self.image, self.next_image = f"{daemon}:{options.tag}", f"{daemon}:{options.next_tag or options.tag}"
        self.figures: list[tuple[str, str]] = []
        self.granted: dict[str, set[str]] = {}
        self.prometheus: Prometheus
        self._told = 0
        self._chart = copied_chart(place)
        images = {
            kind: {"image": {"repository": f"{options.registry}/{name}", "tag": options.tag}}
            for kind, name in (("operator", "operator"), ("daemon", "meshd"))
        }
        self.values: dict[str, Any] = images | {"monitoring": {"rules": False}}
        self.s3 = dict[str, Any]()
        """Of the MeshCluster's spec, for every mesh of this stage."""
        if policy := options.ip_family_policy:
            self.s3 = {"ipFamilyPolicy": policy}
            self.values["operator"]["ipFamilyPolicy"] = policy

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a step and print its line; what it puts into the dict is printed with it."""
        print(f"{name} …", file=sys.stderr, flush=True)
        began, told, since = time.monotonic(), dict[str, Any](), time.time()
        yield told
        self.timeline.append((name, since, time.time()))
        words = ", ".join(f"{key} {value}" for key, value in told.items())
        self.figures.append((name, f"{time.monotonic() - began:.1f} s" + (f": {words}" if words else "")))
        print(f"  {self.figures[-1][1]}", file=sys.stderr, flush=True)

    def helm(self, verb: str, **values: Any) -> None:
        """Run `helm install`, `upgrade` or `uninstall` of the release; `values` replace the stage's own."""
        where = ["--namespace", self.cluster.namespace, "--kubeconfig", str(self.options.kubeconfig)]
        if verb == "uninstall":
            run_helm(helm(), verb, "mesh", *where)
            return
        self.values |= values
        run_helm(helm(), verb, "mesh", str(self._chart), *where, "--values", "-", given=self.values)

    def until_operator(self) -> None:
        """Wait until the operator's pod is ready."""
        name = "mesh-shardmesh-operator"

        def ready() -> bool:
            status = self.cluster.kube.get(Deployment, name).status
            return bool(status and (status.readyReplicas or 0) == 1)

        self.cluster.until(ready, "the operator is ready")

    def until_settled(self, daemons: int = DAEMONS, patience: float = 300.0) -> None:
        """Wait until the mesh runs so many daemons of its present spec and moves nothing."""
        self.cluster.until(lambda: self.cluster.is_settled(daemons), "the mesh is settled", patience)

    def pool(self, replicas: int = DAEMONS) -> dict[str, Any]:
        """Return the pool of the mesh's spec."""
        return {
            "name": "s",
            "replicas": replicas,
            "roles": ["store", "cache", "compute"],
            "tiers": [{"name": "disk", "class": "ssd", "hostPath": self.options.host_path}],
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        }

    def keys(self, scheme: str = "http") -> list[dict[str, Any]]:
        """Return the environment of a client in a pod: the Service's address, root's keys."""
        endpoint = f"{scheme}://mesh-s3.{self.cluster.namespace}.svc:9000"
        secrets = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "mesh-root", "key": name}}}
            for name in ROOT_KEYS
        ]
        return [{"name": "MESH_ENDPOINT", "value": endpoint}, *secrets]

    def root_keys(self) -> dict[str, str]:
        """Return root's keys by the names that clients read."""
        data = self.cluster.kube.get(Secret, "mesh-root").to_dict()["data"]
        return {name: b64decode(data[name]).decode() for name in ROOT_KEYS}

    def start_load(self, env: list[dict[str, Any]]) -> None:
        """Start the pod that reads and writes objects, and wait until it does."""
        self._told = 0
        self.cluster.run_script("load", "load_pod.py", env=env)
        self.cluster.until(lambda: len(self.cluster.printed("load")) > 1, "clients read and write")

    def tell_load(self, told: dict[str, Any], allowed: Sequence[str] = ()) -> None:
        """Put into `told` what clients saw since the last call. Raises EndToEndError if a request failed,
        except for writes whose error has one of the texts of `allowed`."""
        cluster = self.cluster
        cluster.until(lambda: len(cluster.printed("load")) >= self._told + 2, "clients print more")
        lines = cluster.printed("load")
        lines, self._told = lines[self._told :], len(lines)
        for kind in lines[0]["seconds"]:
            seconds = sorted(second for line in lines for second in line["seconds"][kind])
            if not seconds and allowed:
                continue  # a write may wait longer than the step lasts
            if not seconds:
                raise EndToEndError(f"no {kind} since the last step")
            high = seconds[int(len(seconds) * 0.99)]
            told[kind] = f"{len(seconds)}, p99 {1000 * high:.0f} ms, longest {seconds[-1]:.2f} s"
        failed = [failure for line in lines for failure in line["failed"]]
        if allowed:
            refused = [each for each in failed if "writes " in each and any(text in each for text in allowed)]
            failed = [each for each in failed if each not in refused]
            told["refused"] = len(refused)
            told["refusal"] = refused[0] if refused else ""
        told["failed"] = len(failed)
        if failed:
            raise EndToEndError(f"clients saw {len(failed)} failures: {failed[:5]}")

    def written(self) -> dict[str, int]:
        """Return, for each kind of client that writes, the number of its last acknowledged object."""
        return dict(self.cluster.printed("load")[-1]["written"])

    def read_again(self, before: dict[str, int], name: str) -> int:
        """Read what clients wrote since `before`, and some of what they wrote before it; return how many
        objects. Raises EndToEndError unless each of them is there as it was written."""
        ranges = []
        for kind, last in self.written().items():
            start = last // NUMBERS * NUMBERS + 1
            ranges.append([max(start, before[kind] - OLDER), last])
        node = self.cluster.kube.get(Pod, "load").spec.nodeName  # it has not failed
        self.cluster.run_script(name, "load_pod.py", [json.dumps(ranges)], env=self.keys(), node=node)
        found = self.cluster.result(name)
        self.cluster.delete_pod(name)
        if found["problems"]:
            raise EndToEndError(f"{found['problems']} of {found['objects']} objects: {found['first']}")
        return int(found["objects"])

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


def run_command(command: str, given: str = "", **words: str) -> str:
    """Run a command of the command line, with its {words} filled in; return what it printed.

    Raises EndToEndError.
    """
    filled = command.format(**words)
    done = subprocess.run(
        filled, shell=True, check=False, input=given, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        raise EndToEndError(f"{filled}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.stdout
