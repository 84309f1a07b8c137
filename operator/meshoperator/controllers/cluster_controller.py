"""Controller of MeshClusters: observes, plans the rollout, acts, writes status; reports stuck pods as events.

Law: each pass starts from the current state; the next pass does what this one leaves undone. A stuck pod
gets one event per reason once the problem has lasted. After a restart of the operator the names of events
prevent duplicates.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import compress
from typing import TYPE_CHECKING, Any, Final

from lightkube import ApiError

from meshoperator import metrics
from meshoperator.cluster_model import POOL_LABEL, owned
from meshoperator.controllers import storage
from meshoperator.controllers.daemon_machines import NONCE, forget_lost_machines
from meshoperator.controllers.observed_state import Observer, load_map
from meshoperator.controllers.preconditions import DisksTakenError, MissingSecretError, check_secrets
from meshoperator.controllers.preconditions import check_disks as check_neighbours
from meshoperator.controllers.storage import VolumeClaims
from meshoperator.controllers.teardown import Teardown
from meshoperator.planners.cluster_state import is_settled
from meshoperator.planners.manifests import cluster_manifests, root_keys
from meshoperator.planners.rollout_planner import apply_map_change, plan_rollout
from meshoperator.planners.status import (
    DISKS_APART,
    advice_text,
    cluster_status,
    conditions,
    node_status,
    previous_message,
    stuck_pods,
)
from meshoperator.resources import GROUP, VERSION, ResourceError
from meshwire.cluster.transitions import TransitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.controllers.base_controller import EventWriter
    from meshoperator.controllers.observed_state import ObservedState
    from meshoperator.kube.client import Kube
    from meshoperator.kube.event_recorder import EventRecorder
    from meshoperator.planners.cluster_state import ClusterState, Pod
    from meshoperator.planners.rollout_planner import Actions, MapChange
    from meshoperator.settings import OperatorSettings


_PATIENCE: Final = timedelta(minutes=1)


class StuckPodEvents:
    """`now` returns the time as Kubernetes writes it."""

    def __init__(self, recorder: EventWriter, now: Callable[[], str]) -> None:
        self._recorder, self._now = recorder, now
        self._since: dict[str, dict[tuple[str, str], datetime | None]] = {}
        """By MeshCluster uid: when each (pod, reason) was first seen; None once its event was written."""

    def __repr__(self) -> str:
        return f"<StuckPodEvents of {sum(map(len, self._since.values()))} daemons>"

    async def record_events(self, document: Manifest, pods: Iterable[Pod]) -> None:
        """Write events about stuck pods of a MeshCluster. Raises nothing; an event may be lost."""
        metadata, now = document["metadata"], datetime.fromisoformat(self._now())
        by_name = {pod.name: pod for pod in pods}
        found = stuck_pods(by_name.values())
        before = self._since.pop(metadata["uid"], {})
        since = {
            (by_name[name].uid, each.word): before.get((by_name[name].uid, each.word), now)
            for name, each in found.items()
        }
        if since:
            self._since[metadata["uid"]] = since
        for name, each in found.items():
            key = by_name[name].uid, each.word
            began = since[key]
            if began is not None and now - began >= _PATIENCE:
                since[key] = None
                what_to_do = advice_text({name: each}, metadata["namespace"])
                message = f"{name} {by_name[name].trouble}; {what_to_do}"
                await self._recorder.record_event(document, "DaemonStuck", message, once="/".join(key))

    def forget(self, uid: str) -> None:
        """Forget a deleted MeshCluster."""
        self._since.pop(uid, None)


_log = logging.getLogger(__name__)
_TRIES: Final = 5
_REFUSALS: Final = (400, 403, 422)
_UNKNOWN_FIELD: Final = "field not declared in schema"
"""What an API server says to a field that it does not know: 1.20 does so with status 500."""
_CHANGE_EVENTS: Final = {
    "drain": ("Draining", "{} is drained: its data moves to other daemons"),
    "stay": ("Staying", "{} is no longer drained, and keeps its data"),
    "leave": ("Left", "{} holds no data any more, and was removed from the cluster map"),
}
"""Reason and message of the event about a change of the map."""


class ClusterController:
    """`now` returns the time as Kubernetes writes it."""

    def __init__(
        self, kube: Kube, settings: OperatorSettings, recorder: EventRecorder, now: Callable[[], str]
    ) -> None:
        self._kube, self._settings, self._recorder, self._now = kube, settings, recorder, now
        self._looking = Observer(kube, settings, now)
        self._complaints = StuckPodEvents(recorder, now)
        self._ending, self._volumes = Teardown(kube, settings, recorder, now), VolumeClaims(kube, recorder)

    def __repr__(self) -> str:
        return f"<ClusterController {self._kube!r}>"

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass; return the seconds until the next, or None if the MeshCluster does not exist. Raises
        ResourceError, ApiError."""
        document = await self._kube.get("MeshCluster", name, namespace)
        if document is None:
            metrics.forget_cluster(namespace, name)
            return None
        if document["metadata"].get("deletionTimestamp"):
            self._complaints.forget(document["metadata"]["uid"])
            return await self._ending.reconcile_deletion(document)
        await self._ending.add_finalizer(document)
        try:
            steps, status = await self._steer(document)
        except MissingSecretError as error:
            await self._report_refusal(document, "SecretMissing", str(error))
            return self._settings.eager_seconds
        except DisksTakenError as error:
            await self._report_refusal(document, "DisksTaken", str(error))
            return self._settings.eager_seconds  # the end of the other mesh is not an event of this one
        except ResourceError as error:
            await self._report_refusal(document, "SpecRefused", str(error))
            return self._settings.resync_seconds
        except ApiError as error:
            if error.status.code in _REFUSALS or _UNKNOWN_FIELD in (error.status.message or ""):
                await self._report_refusal(
                    document, "ApiRefused", f"the API server rejected a change: {error.status.message}"
                )
            raise
        metrics.record_cluster(namespace, name, status)
        ready = status["ready"] == status["desired"]
        calm = steps.settled and ready and not steps.pending
        return self._settings.resync_seconds if calm else self._settings.eager_seconds

    async def _report_refusal(self, document: Manifest, reason: str, why: str) -> None:
        """Report in status and event why the MeshCluster cannot be reconciled. Its daemons keep running."""
        metadata, before = document["metadata"], (document.get("status") or {}).get("conditions") or ()
        message = f"cannot be reconciled: {why}"[:1024]
        if any(each["type"] == "Progressing" and each["message"] == message for each in before):
            return
        found = conditions(document, [("Progressing", False, reason, message)], self._now())
        kept = [each for each in before if each["type"] != "Progressing"]
        status = {"observedGeneration": metadata.get("generation"), "conditions": [*kept, *found]}
        status |= {} if (document.get("status") or {}).get("phase") else {"phase": "Pending"}
        status["trouble"] = reason
        await self._recorder.record_event(document, "Refused", message)
        with suppress(ApiError):
            await self._kube.set_status("MeshCluster", metadata["name"], metadata["namespace"], status)

    async def _steer(self, document: Manifest) -> tuple[Actions, dict[str, Any]]:
        cluster = await self._looking.load_cluster(document)
        await check_secrets(self._kube, cluster)
        beside = await check_neighbours(self._kube, self._settings, cluster, document)
        await self._unmake(cluster, document)
        await self._prepare(cluster)
        seen = await self._looking.observe(cluster)
        waiting, held = await self._volumes.reconcile_claims(cluster, seen.sets, document)
        steps = plan_rollout(seen.state)
        steps = replace(steps, waiting=(*steps.waiting, *waiting))
        await self._change_map(cluster, steps.changes, document)
        await self._make(seen, steps, document, held)
        await storage.label_nodes(self._kube, cluster, seen.state, seen.nodes)
        await forget_lost_machines(self._kube, cluster.namespace, seen.state)
        uids = {pod.name: pod.uid for pod in seen.state.pods}
        for name, why in steps.force_delete:
            if await self._kube.delete_pod(name, cluster.namespace, uids[name], now=True):
                await self._recorder.record_event(
                    document, "Replacing", f"{name} was deleted, so that it can start elsewhere: {why}"
                )
        await self._restart(cluster, dict(steps.displaced), uids, document, now=True)
        unclaimed = await self._volumes.pods_without_claims(cluster, seen.state.pods)
        why = "its volume claim is gone, and a new one is created with a new pod"
        await self._restart(cluster, dict(steps.delete) | dict.fromkeys(unclaimed, why), uids, document)
        for name in steps.discard:
            await self._discard(cluster, name, uids.get(name, ""), document)
        return steps, await self._tell(await self._looking.observe(cluster), steps, document, beside)

    # --- acting -------------------------------------------------------------------------------------------

    async def _restart(
        self,
        cluster: Cluster,
        reasons: Mapping[str, str],
        uids: Mapping[str, str],
        document: Manifest,
        *,
        now: bool = False,
    ) -> None:
        """Delete pods, by name, so that they are created again. `now`: without grace. Of two that have each
        other's Kubernetes nodes, the one that ends first would find only its own place free."""
        deletions = (self._kube.delete_pod(name, cluster.namespace, uids[name], now=now) for name in reasons)
        answers = await asyncio.gather(*deletions, return_exceptions=True)
        for name in compress(reasons, (answer is True for answer in answers)):
            await self._recorder.record_event(document, "Restarting", f"{name} is restarted: {reasons[name]}")
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

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
                | _shared_object(cluster, "ServiceAccount")
            )
            await self._kube.apply(_binding(cluster, self._settings.daemon_role))

    async def _unmake(self, cluster: Cluster, document: Manifest) -> None:
        """Delete what a changed spec no longer asks for; runs once per generation, before it is observed."""
        if document["metadata"].get("generation") == (document.get("status") or {}).get("observedGeneration"):
            return
        if not cluster.spec.network_policy.enabled:
            await self._kube.delete_all("NetworkPolicy", cluster.namespace, cluster.labels())
        if not cluster.spec.metrics.service_monitor:
            await self._kube.delete_all("ServiceMonitor", cluster.namespace, cluster.labels())

    async def _make(
        self, seen: ObservedState, steps: Actions, document: Manifest, held: frozenset[str]
    ) -> None:
        """Apply the manifests. The StatefulSets of `held` pools are left alone."""
        cluster = seen.cluster
        for manifest in cluster_manifests(cluster, settled=steps.settled):
            if manifest["kind"] == "StatefulSet":
                pool = manifest["metadata"]["labels"][POOL_LABEL]
                if pool in held:
                    continue
                manifest["spec"]["replicas"] = steps.scale[pool]
            if manifest["kind"] != "ServiceMonitor":
                await self._kube.apply(manifest)
            elif not await self._kube.apply_if_known(manifest):
                _log.info(
                    "%s: no ServiceMonitor created: the API server does not serve that kind", cluster.name
                )
        await self._resize_pools(seen, steps, document)
        there = {each["metadata"]["name"] for each in seen.nodes}
        pods = {pod.name: pod for pod in seen.state.pods}
        for name in sorted(pods.keys() - there):
            await self._kube.apply(_node(cluster, pods[name]))
        for name in sorted(there - pods.keys()):
            if seen.state.map and seen.state.map.node(name) is None:
                await self._kube.delete("MeshNode", name, cluster.namespace)

    async def _resize_pools(self, seen: ObservedState, steps: Actions, document: Manifest) -> None:
        """Record resized pools; shrink pools that left the spec, and delete them once they are empty."""
        cluster = seen.cluster
        known = {pool.name for pool in cluster.spec.node_pools}
        for pool, before in seen.state.replicas.items():
            after, name = steps.scale[pool], f"{cluster.name}-{pool}"
            if pool not in known and after:
                await self._kube.patch("StatefulSet", name, cluster.namespace, {"spec": {"replicas": after}})
            elif pool not in known:
                await self._kube.delete("StatefulSet", name, cluster.namespace)
            if before != after:
                await self._recorder.record_event(
                    document, "Scaled", f"pool {pool}: {before} → {after} daemons"
                )

    async def _discard(self, cluster: Cluster, name: str, uid: str, document: Manifest) -> None:
        """Delete a daemon and its volumes for good. Its MeshNode, which records the request, goes last."""
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
        await self._recorder.record_event(
            document, "Decommissioned", f"{name} holds no data any more, and was deleted with its volumes"
        )

    async def _change_map(self, cluster: Cluster, changes: tuple[MapChange, ...], document: Manifest) -> None:
        """Change the map by compare-and-swap, as daemons do: of two changes to one version only one
        succeeds."""
        for change in changes:
            for _ in range(_TRIES):
                found = await load_map(self._kube, cluster.namespace, cluster.name)
                if found is None:
                    return
                entry, present = found
                try:
                    wanted = apply_map_change(present, change)
                except TransitionError as error:
                    _log.info("%s of %s: %s", *change, error)
                    break
                if wanted == present:
                    break
                entry["data"] = {"value": wanted.to_json().decode()}
                entry["metadata"]["annotations"][NONCE] = secrets.token_hex(16)
                if await self._kube.replace(entry):
                    reason, message = _CHANGE_EVENTS[change[0]]
                    await self._recorder.record_event(document, reason, message.format(change[1]))
                    break

    async def _tell(
        self, seen: ObservedState, steps: Actions, document: Manifest, beside: str
    ) -> dict[str, Any]:
        """Write the statuses of the nodes and of the mesh. `beside` describes directories shared with other
        meshes."""
        cluster = seen.cluster
        status = cluster_status(cluster, state_after(seen, steps), document, self._now(), beside)
        if beside and beside not in previous_message(document, DISKS_APART):
            await self._recorder.record_event(document, "DisksShared", beside)
        metrics.record_stuck(cluster.namespace, cluster.name, stuck_pods(seen.state.pods))
        await self._complaints.record_events(document, seen.state.pods)
        for each in seen.nodes:
            written = node_status(each, seen.state, seen.work, self._now())
            before = each.get("status") or {}
            if written != {name: before.get(name) for name in written}:  # UsageUpdater writes usage
                await self._kube.set_status("MeshNode", each["metadata"]["name"], cluster.namespace, written)
        # Last: what it says of a node can be read at the node then.
        await self._kube.set_status("MeshCluster", cluster.name, cluster.namespace, status)
        return status


def state_after(seen: ObservedState, steps: Actions) -> tuple[ClusterState, Actions]:
    """Return the state to report: the latest observation, and the steps whose effects it may show."""
    return seen.state, replace(steps, settled=is_settled(seen.state))


def _node(cluster: Cluster, pod: Pod) -> Manifest:
    """Return the MeshNode of a pod, without `desiredState`: users own that field."""
    spec = {"clusterRef": cluster.name, "pool": pod.pool, "nodeId": pod.name}
    return owned(cluster, f"{GROUP}/{VERSION}", "MeshNode", pod.name, cluster.labels(pod.pool), spec=spec)


def _shared_object(cluster: Cluster, kind: str) -> Manifest:
    """Return an object that all meshes of a namespace share; deleting one mesh does not delete it."""
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
    return _shared_object(cluster, "RoleBinding") | {"roleRef": reference, "subjects": [subject]}
