"""The loop of a MeshCluster: look at everything, decide (`steering`), act, say how it is.

Law: each pass begins from what is there; whatever a pass leaves undone, the next one does.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from lightkube import ApiError

from meshoperator import gauges
from meshoperator.children import (
    CLUSTER_LABEL,
    POOL_LABEL,
    TEMPLATE_ANNOTATION,
    Cluster,
    Place,
    children,
    owned,
    root_keys,
)
from meshoperator.ending import Ending
from meshoperator.resources import GROUP, VERSION, MeshClusterSpec, ResourceError, parse
from meshoperator.statuses import cluster_status, conditions, node_status
from meshoperator.steering import Pod, Sight, applied, settled, steer
from meshoperator.volumes import Volumes
from meshwire.cluster import parse_map
from meshwire.cluster.transitions import TransitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshoperator.children import Manifest
    from meshoperator.kube import Kube
    from meshoperator.recording import Recorder
    from meshoperator.settings import OperatorSettings
    from meshoperator.steering import MapChange, Steps
    from meshwire.cluster import ClusterMap

_log = logging.getLogger(__name__)
_TRIES: Final = 5
_REFUSALS: Final = (400, 403, 422)
_LONGEST: Final = 300
_OVERDUE: Final = timedelta(seconds=30)
_NONCE: Final = f"{GROUP}/write"
_STORE, _TOPIC, _KEY = f"{GROUP}/store", f"{GROUP}/topic", f"{GROUP}/key"
_SAID: Final = {"drain": "Draining", "stay": "Staying", "leave": "Left"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass found. `sets`: StatefulSets; `nodes`: MeshNodes; `work`: what movers say, by node id."""

    cluster: Cluster
    sight: Sight
    sets: tuple[Manifest, ...]
    nodes: tuple[Manifest, ...]
    work: Mapping[str, Mapping[str, Any]]


class ClusterLoop:
    """`now`: the time as Kubernetes writes it."""

    def __init__(
        self, kube: Kube, settings: OperatorSettings, recorder: Recorder, now: Callable[[], str]
    ) -> None:
        self._kube, self._settings, self._recorder, self._now = kube, settings, recorder, now
        self._ending, self._volumes = Ending(kube, settings, recorder, now), Volumes(kube, recorder)

    def __repr__(self) -> str:
        return f"<ClusterLoop {self._kube!r}>"

    async def run(self, namespace: str, name: str) -> float | None:
        """One pass: seconds until the next, None when there is no such MeshCluster. Raises ResourceError,
        ApiError."""
        document = await self._kube.get("MeshCluster", name, namespace)
        if document is None:
            gauges.forget_cluster(namespace, name)
            return None
        if document["metadata"].get("deletionTimestamp"):
            return await self._ending.run(document)
        await self._ending.hold(document)
        try:
            steps, status = await self._steer(document)
        except ResourceError as error:
            await self._refused(document, "SpecRefused", str(error))
            return self._settings.resync_seconds
        except ApiError as error:
            if error.status.code in _REFUSALS:
                await self._refused(document, "ApiRefused", f"the API server says: {error.status.message}")
            raise
        gauges.tell_cluster(namespace, name, status)
        ready = status["ready"] == status["desired"]
        calm = steps.settled and ready and not (steps.waiting or steps.changes or steps.delete)
        return self._settings.resync_seconds if calm else self._settings.eager_seconds

    async def _refused(self, document: Manifest, reason: str, why: str) -> None:
        """Said where people look: what holds everything up. The daemons go on as they are."""
        metadata, before = document["metadata"], (document.get("status") or {}).get("conditions") or ()
        message = f"nothing can be done: {why}"[:1024]
        if any(each["type"] == "Progressing" and each["message"] == message for each in before):
            return
        found = conditions(document, [("Progressing", False, reason, message)], self._now())
        kept = [each for each in before if each["type"] != "Progressing"]
        status = {"observedGeneration": metadata.get("generation"), "conditions": [*kept, *found]}
        await self._recorder.say(document, "Refused", message)
        with suppress(ApiError):
            await self._kube.set_status("MeshCluster", metadata["name"], metadata["namespace"], status)

    async def _steer(self, document: Manifest) -> tuple[Steps, dict[str, Any]]:
        cluster = await self._known(document)
        await self._unmake(cluster, document)
        await self._prepare(cluster)
        seen = await self._look(cluster)
        waiting, held = await self._volumes.run(cluster, seen.sets, document)
        steps = steer(seen.sight)
        steps = replace(steps, waiting=(*steps.waiting, *waiting))
        await self._change_map(cluster, steps.changes, document)
        await self._make(seen, steps, document, held)
        uids = {pod.name: pod.uid for pod in seen.sight.pods}
        for name, why in steps.bury:
            if await self._kube.delete_pod(name, cluster.namespace, uids[name], now=True):
                await self._recorder.say(document, "Replacing", f"{name}: {why}")
        for name, why in steps.delete:
            if await self._kube.delete_pod(name, cluster.namespace, uids[name]):
                await self._recorder.say(document, "Restarting", f"{name}: {why}")
        for name in steps.discard:
            await self._discard(cluster, name, uids.get(name, ""), document)
        return steps, await self._tell(await self._look(cluster), steps, document)

    # --- looking ------------------------------------------------------------------------------------------

    async def _known(self, document: Manifest) -> Cluster:
        metadata = document["metadata"]
        spec = parse(MeshClusterSpec, document["spec"])
        places = None
        if self._settings.reads_nodes:
            found = await self._kube.list_all("Node")
            places = tuple(
                Place(
                    each["metadata"]["name"],
                    each["metadata"].get("labels") or {},
                    not (each.get("spec") or {}).get("unschedulable"),
                    ready=is_ready(each),
                )
                for each in found
            )
        return Cluster(
            metadata["name"],
            metadata["namespace"],
            metadata["uid"],
            spec,
            places,
            self._settings.daemon_account,
        )

    async def _look(self, cluster: Cluster) -> Seen:
        labels = {CLUSTER_LABEL: cluster.name}
        now = self._now()
        pods = [_pod(each, now) for each in await self._kube.list_all("Pod", cluster.namespace, labels)]
        sets = await self._kube.list_all("StatefulSet", cluster.namespace, labels)
        replicas = {_pool_of(each): int(each["spec"].get("replicas") or 0) for each in sets}
        wanted = {pool.name: cluster.replicas(pool) for pool in cluster.spec.node_pools}
        for pool in wanted.keys() - replicas.keys():  # its StatefulSet is being made anew: as many as it had
            ordinals = [pod.name.rpartition("-")[2] for pod in pods if pod.pool == pool]
            replicas |= {pool: max(map(int, ordinals)) + 1} if ordinals else {}
        templates = {
            each["metadata"]["labels"][POOL_LABEL]: each["spec"]["template"]["metadata"]["annotations"][
                TEMPLATE_ANNOTATION
            ]
            for each in children(cluster, settled=True)
            if each["kind"] == "StatefulSet"
        }
        nodes = [
            each
            for each in await self._kube.list_all("MeshNode", cluster.namespace)
            if each["spec"]["clusterRef"] == cluster.name
        ]
        found, work = await self._map(cluster), await self._work(cluster)
        sight = Sight(
            cluster.name,
            cluster.spec,
            {name: replicas.get(name, 0) if count is None else count for name, count in wanted.items()},
            templates,
            replicas,
            tuple(pods),
            found[1] if found else None,
            {each["spec"]["nodeId"]: each["spec"].get("desiredState", "Active") for each in nodes},
            frozenset(place.name for place in cluster.places or () if not place.schedulable),
            None if cluster.places is None else {place.name: place.ready for place in cluster.places},
            {name: int(each.get("clear") or 0) for name, each in work.items()},
        )
        return Seen(cluster, sight, tuple(sets), tuple(nodes), work)

    async def _work(self, cluster: Cluster) -> dict[str, dict[str, Any]]:
        found = await self._kube.list_all(
            "ConfigMap", cluster.namespace, {_STORE: cluster.name, _TOPIC: "moves"}
        )
        keys = [((each["metadata"].get("annotations") or {}).get(_KEY, ""), each) for each in found]
        return {
            key.removeprefix("moves/"): json.loads(each["data"]["value"])
            for key, each in keys
            if key.startswith("moves/")
        }

    async def _map(self, cluster: Cluster) -> tuple[Manifest, ClusterMap] | None:
        """The ConfigMap in which the daemons keep their map, and what it says; None before there is one."""
        labels = {_STORE: cluster.name, _TOPIC: "cluster"}
        for each in await self._kube.list_all("ConfigMap", cluster.namespace, labels):
            if (each["metadata"].get("annotations") or {}).get(_KEY) == "cluster/map":
                return each, parse_map(each["data"]["value"])
        return None

    # --- acting -------------------------------------------------------------------------------------------

    async def _prepare(self, cluster: Cluster) -> None:
        if cluster.spec.auth.root_secret_ref is None:
            there = await self._kube.get("Secret", cluster.root_secret, cluster.namespace)
            if there is None:
                keys = root_keys(
                    cluster, f"MESHROOT{secrets.token_hex(6).upper()}", secrets.token_urlsafe(30)
                )
                await self._kube.create(keys)
        if self._settings.daemon_role:
            await self._kube.apply(
                owned(
                    cluster,
                    "v1",
                    "ServiceAccount",
                    cluster.account,
                    cluster.labels(),
                    automountServiceAccountToken=False,
                )
                | _shared(cluster, "ServiceAccount")
            )
            await self._kube.apply(_binding(cluster, self._settings.daemon_role))

    async def _unmake(self, cluster: Cluster, document: Manifest) -> None:
        """What a changed spec asks for no more; looked at once a change, before it is said to be seen."""
        if document["metadata"].get("generation") == (document.get("status") or {}).get("observedGeneration"):
            return
        if not cluster.spec.network_policy.enabled:
            await self._kube.delete_all("NetworkPolicy", cluster.namespace, cluster.labels())
        if not cluster.spec.metrics.service_monitor:
            await self._kube.delete_all("ServiceMonitor", cluster.namespace, cluster.labels())

    async def _make(self, seen: Seen, steps: Steps, document: Manifest, held: frozenset[str]) -> None:
        """`held`: pools whose StatefulSet is left alone."""
        cluster = seen.cluster
        for manifest in children(cluster, settled=steps.settled):
            if manifest["kind"] == "StatefulSet":
                pool = manifest["metadata"]["labels"][POOL_LABEL]
                if pool in held:
                    continue
                manifest["spec"]["replicas"] = steps.scale[pool]
            if manifest["kind"] != "ServiceMonitor":
                await self._kube.apply(manifest)
            elif not await self._kube.apply_if_known(manifest):
                _log.info("%s: no ServiceMonitor is made: its API is not there", cluster.name)
        await self._resized(seen, steps, document)
        there = {each["metadata"]["name"] for each in seen.nodes}
        pods = {pod.name: pod for pod in seen.sight.pods}
        for name in sorted(pods.keys() - there):
            await self._kube.apply(_node(cluster, pods[name]))
        for name in sorted(there - pods.keys()):
            if seen.sight.map and seen.sight.map.node(name) is None:
                await self._kube.delete("MeshNode", name, cluster.namespace)

    async def _resized(self, seen: Seen, steps: Steps, document: Manifest) -> None:
        """Say so; and pools that the spec has no more become smaller, and go when they are empty."""
        cluster = seen.cluster
        known = {pool.name for pool in cluster.spec.node_pools}
        for pool, before in seen.sight.replicas.items():
            after, name = steps.scale[pool], f"{cluster.name}-{pool}"
            if pool not in known and after:
                await self._kube.patch("StatefulSet", name, cluster.namespace, {"spec": {"replicas": after}})
            elif pool not in known:
                await self._kube.delete("StatefulSet", name, cluster.namespace)
            if before != after:
                await self._recorder.say(document, "Scaled", f"pool {pool}: {before} → {after}")

    async def _discard(self, cluster: Cluster, name: str, uid: str, document: Manifest) -> None:
        """A daemon with its volumes, for good; the last step is what says that it was wanted."""
        claims = [
            f"{tier.name}-{name}"
            for pool in cluster.spec.node_pools
            for tier in pool.tiers
            if tier.volume_claim and name.rpartition("-")[0] == f"{cluster.name}-{pool.name}"
        ]
        for claim in claims:
            await self._kube.delete("PersistentVolumeClaim", claim, cluster.namespace)
        if uid:
            await self._kube.delete_pod(name, cluster.namespace, uid)
        await self._kube.delete("MeshNode", name, cluster.namespace)
        await self._recorder.say(document, "Decommissioned", f"{name} is empty, and goes with its volumes")

    async def _change_map(self, cluster: Cluster, changes: tuple[MapChange, ...], document: Manifest) -> None:
        """By comparing and swapping, as daemons do: of two changes to one version only one happens."""
        for change in changes:
            for _ in range(_TRIES):
                found = await self._map(cluster)
                if found is None:
                    return
                entry, present = found
                try:
                    wanted = applied(present, change)
                except TransitionError as error:
                    _log.info("%s of %s: %s", *change, error)
                    break
                if wanted == present:
                    break
                entry["data"] = {"value": wanted.to_json().decode()}
                entry["metadata"]["annotations"][_NONCE] = secrets.token_hex(16)
                if await self._kube.replace(entry):
                    await self._recorder.say(document, _SAID[change[0]], change[1])
                    break

    async def _tell(self, seen: Seen, steps: Steps, document: Manifest) -> dict[str, Any]:
        cluster = seen.cluster
        status = cluster_status(cluster, replace_settled(seen, steps), document, self._now())
        await self._kube.set_status("MeshCluster", cluster.name, cluster.namespace, status)
        for each in seen.nodes:
            written = node_status(each, seen.sight, seen.work, self._now())
            before = each.get("status") or {}
            if written != {name: before.get(name) for name in written}:  # figures are another loop's
                await self._kube.set_status("MeshNode", each["metadata"]["name"], cluster.namespace, written)
        return status


def replace_settled(seen: Seen, steps: Steps) -> tuple[Sight, Steps]:
    """What is told: the latest sight, with the steps whose effects it may show."""
    return seen.sight, replace(steps, settled=settled(seen.sight))


def _pool_of(document: Manifest) -> str:
    return str(document["metadata"]["labels"].get(POOL_LABEL, ""))


def is_ready(node: Manifest) -> bool:
    """Whether a Kubernetes node says so, or says nothing."""
    found = (node.get("status") or {}).get("conditions") or ()
    return all(each["status"] == "True" for each in found if each["type"] == "Ready")


def _pod(document: Manifest, now: str) -> Pod:
    metadata, status = document["metadata"], document.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    node = (document.get("spec") or {}).get("nodeName") or ""
    return Pod(
        metadata["name"],
        metadata["labels"].get(POOL_LABEL, ""),
        (metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION, ""),
        conditions.get("Ready") == "True",
        bool(node),
        node,
        bool(metadata.get("deletionTimestamp")),
        bool(
            metadata.get("deletionTimestamp")
            and datetime.fromisoformat(now) > datetime.fromisoformat(metadata["deletionTimestamp"]) + _OVERDUE
        ),
        metadata.get("uid", ""),
        trouble(status),
    )


def trouble(status: Manifest) -> str:
    """Why a pod is not ready, as far as Kubernetes says; empty: it does not."""
    for each in status.get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return f"has no place: {each.get('message') or each.get('reason') or 'nobody says why'}"[
                :_LONGEST
            ]
    for each in status.get("containerStatuses") or ():
        state, last = each.get("state") or {}, each.get("lastState") or {}
        waiting, ended = state.get("waiting"), state.get("terminated") or last.get("terminated")
        if not waiting and not state.get("terminated"):
            continue
        said = (
            [f"{waiting['reason']}: {waiting.get('message', '')}"]
            if waiting and waiting.get("reason")
            else []
        )
        said += [f"it ended with {ended.get('exitCode')}: {ended.get('message', '')}"] if ended else []
        if said:
            return "; ".join(text.strip().rstrip(":") for text in said)[:_LONGEST]
    return ""


def _node(cluster: Cluster, pod: Pod) -> Manifest:
    """Of a pod; `desiredState` is people's, and not applied."""
    spec = {"clusterRef": cluster.name, "pool": pod.pool, "nodeId": pod.name}
    return owned(cluster, f"{GROUP}/{VERSION}", "MeshNode", pod.name, cluster.labels(pod.pool), spec=spec)


def _shared(cluster: Cluster, kind: str) -> Manifest:
    """Of a namespace, for all its meshes: it goes with none of them."""
    metadata = {
        "name": cluster.account,
        "namespace": cluster.namespace,
        "labels": {"app.kubernetes.io/part-of": "shardmesh"},
    }
    return {
        "apiVersion": "v1" if kind == "ServiceAccount" else "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
    }


def _binding(cluster: Cluster, role: str) -> Manifest:
    subject = {"kind": "ServiceAccount", "name": cluster.account, "namespace": cluster.namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    return _shared(cluster, "RoleBinding") | {"roleRef": reference, "subjects": [subject]}
