"""Daemons that hold what they are told to, for tests of what the operator does with data: buckets with homes,
jobs that bring a part with every tick, views.

Law: they answer as real ones do (`tests/kubernetes/test_data_end_to_end.py` has those), and check at every
tick what must never happen: a dataset that was whole is whole nowhere that reads go to.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from meshoperator.cluster_model import Cluster
from meshoperator.daemon_client import DaemonError, MeshAccess
from meshoperator.resources import MeshClusterSpec, parse
from tests.kubernetes.world import NAME, NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.kubernetes.world import World

OBJECTS, SIZE = 10, 100
"""Of every source."""
_PART = 4  # objects that a job brings with a tick
_ANSWER = ("up", "draining", "joining", "returning")


@dataclass
class State:
    """`held`: by node and bucket, how many of its objects; `version` counts changes."""

    buckets: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    version: int = 0
    ticks: int = 0


class FakeDaemons:
    """As `Daemons`, of the mesh in `world`."""

    def __init__(self, world: World, state: State | None = None) -> None:
        self.world, self.state = world, state or State()

    def now(self) -> float:
        """Seconds since 1970."""
        return 1_900_000_000.0 + 5 * self.state.ticks

    async def aclose(self) -> None: ...

    async def locate_mesh(self, namespace: str, name: str) -> tuple[Cluster, MeshAccess]:
        found = self.world.api.find("meshclusters", NAME)
        assert found is not None
        spec = parse(MeshClusterSpec, found["spec"])
        return Cluster(name, namespace, found["metadata"]["uid"], spec), MeshAccess("mesh", "", "")

    async def access_daemons(self, access: MeshAccess) -> list[MeshAccess]:
        return [MeshAccess(name, "", "") for name in self.answering()]

    async def read_metrics(self, access: MeshAccess) -> str:
        return ""

    async def request_json(self, access: MeshAccess, method: str, target: str, document: Any = None) -> Any:
        """Raises DaemonError."""
        before = copy.deepcopy(self.state)
        document = json.loads(json.dumps(document)) if document is not None else None
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        found = self._answer(
            access.endpoint, method, [unquote(each) for each in path.split("/")[1:]], document
        )
        assert not query.get("prefix", [""])[0]
        self.state.version += self.state != before
        return json.loads(json.dumps(found))

    # --- what happens by itself

    def tick(self) -> None:
        self.state.ticks += 1
        for job in self.state.jobs.values():
            if job["state"] == "running":
                self._bring(job)
        for bucket in self.state.whole & self.state.buckets.keys():
            assert any(self.count(name, bucket) == OBJECTS for name in self.readers(bucket)), bucket
        self.state.whole |= {
            bucket
            for bucket in self.state.buckets
            if any(
                self.count(name, bucket) == OBJECTS for name in self.homes(bucket) if name in self.answering()
            )
        }

    def _bring(self, job: dict[str, Any]) -> None:
        """One home after the other."""
        progress, bucket = job["progress"], urlsplit(job["spec"]["source"]).netloc
        homes = self.readers(bucket)
        progress |= {"copies": len(homes), "outputs_total": OBJECTS * len(homes), "phase": "fetching"}
        progress["bytes_total"] = SIZE * progress["outputs_total"]
        behind = [name for name in homes if self.count(name, bucket) < OBJECTS]
        for name in behind[:1]:
            held = self.state.held.setdefault(name, {})
            held[bucket] = min(OBJECTS, self.count(name, bucket) + _PART)
        progress["outputs"] = sum(self.count(name, bucket) for name in homes)
        progress["bytes"] = SIZE * progress["outputs"]
        if not behind:
            job |= {"state": "done", "ended_ms": int(1000 * self.now())}

    # --- what is so

    def answering(self) -> list[str]:
        cluster = self.world.map()
        return [node.node_id for node in cluster.nodes if node.state in _ANSWER] if cluster else []

    def homes(self, bucket: str) -> Iterable[str]:
        return tuple(self.state.buckets[bucket]["origin"]["homes"])

    def readers(self, bucket: str) -> list[str]:
        """Where reads go: homes that answer, or else the first node, for all."""
        return [name for name in self.homes(bucket) if name in self.answering()] or self.answering()[:1]

    def count(self, node: str, bucket: str) -> int:
        return self.state.held.get(node, {}).get(bucket, 0)

    # --- what is asked

    def _answer(self, node: str, method: str, path: list[str], document: Any) -> Any:
        match method, path:
            case "GET" | "PUT" | "PATCH", ["-", "buckets", name]:
                return self._bucket(method, name, document)
            case "GET", ["-", "jobs"]:
                return {"jobs": list(self.state.jobs.values())}
            case "POST", ["-", "jobs"]:
                return self._start(document)
            case "GET" | "DELETE", ["-", "jobs", name]:
                return self._job(method, name)
            case "GET" | "DELETE", ["-", "residence", name]:
                return self._residence(node, method, name)
            case "POST", ["-", "views"]:
                return self._view(document)
            case "GET", ["-", "views", name]:
                if name not in self.state.views:
                    raise DaemonError(404, "NoSuchView", name)
                return {"name": name, "view": self.state.views[name]}
            case "DELETE", [name]:
                if self.state.buckets.pop(name, None) is None and self.state.views.pop(name, None) is None:
                    raise DaemonError(404, "NoSuchBucket", name)
                return None
        raise AssertionError((method, path))

    def _bucket(self, method: str, name: str, document: Any) -> Any:
        if method == "PUT":
            self.state.buckets[name] = {"name": name, "origin": {"homes": [], **document}}
        elif name not in self.state.buckets:
            raise DaemonError(404, "NoSuchBucket", name)
        elif method == "PATCH":
            self.state.buckets[name]["origin"] |= document
        return self.state.buckets[name]

    def _start(self, spec: dict[str, Any]) -> Any:
        name = f"j{sorted(spec.items())}".translate(str.maketrans("", "", "/?,"))
        before = self.state.jobs.get(name)
        if before is None or before["state"] != "running":
            progress = {"phase": "", "outputs": 0, "outputs_total": 0, "bytes": 0, "bytes_total": 0}
            self.state.jobs[name] = {
                "id": name,
                "kind": "prefetch",
                "run": before["run"] + 1 if before else 1,
                "state": "running",
                "spec": spec,
                "progress": progress,
                "failed": 0,
                "failures": [],
                "error": "",
                "created_ms": int(1000 * self.now()),
                "ended_ms": 0,
            }
        return self.state.jobs[name]

    def _job(self, method: str, name: str) -> Any:
        if name not in self.state.jobs:
            raise DaemonError(404, "NoSuchJob", name)
        job = self.state.jobs[name]
        if method == "DELETE" and job["state"] == "running":
            job |= {"state": "cancelled", "ended_ms": int(1000 * self.now())}
        return job

    def _residence(self, node: str, method: str, bucket: str) -> Any:
        if bucket not in self.state.buckets:
            raise DaemonError(404, "NoSuchBucket", bucket)
        count = self.count(node, bucket)
        if method == "DELETE":
            self.state.held.get(node, {}).pop(bucket, None)
            if node in self.homes(bucket):
                self.state.whole.discard(bucket)
        room = {"capacity": 1 << 20, "used": SIZE * sum(self.state.held.get(node, {}).values())}
        return {"node": node, "objects": count, "bytes": SIZE * count, **room}

    def _view(self, document: dict[str, Any]) -> Any:
        name = f"{document['bucket']}--{document['name']}"
        if document["bucket"] not in self.state.buckets:
            raise DaemonError(404, "NoSuchBucket", document["bucket"])
        if self.state.views.setdefault(name, document["view"]) != document["view"]:
            raise DaemonError(409, "ViewExists", name)
        return {"name": name, "view": document["view"]}


def resource(kind: str, name: str, /, **spec: Any) -> dict[str, Any]:
    """One of ours."""
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "shardmesh.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
