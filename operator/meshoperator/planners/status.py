"""Status and conditions of MeshCluster and MeshNode, and the reasons of stuck pods. Pure.

Law: a condition keeps the time of its last change, so repeating it changes nothing. Reasons come from a
table, so metrics and events can use them as labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshoperator.planners.cluster_state import holds_no_data, stores_outside_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.planners.cluster_state import ClusterState, Disk, Pod
    from meshoperator.planners.rollout_planner import Actions


class Diagnosis(NamedTuple):
    """`word`: a reason; `signs`: texts, one of which is in Kubernetes' message; `advice`: may contain `{pod}`
    and `{namespace}`."""

    word: str
    signs: tuple[str, ...]
    advice: str


_STARTING: Final = ("", "ContainerCreating", "PodInitializing")
_OTHER: Final = Diagnosis("Other", ("",), "kubectl -n {namespace} describe pod {pod}")
_TABLE: Final = (
    Diagnosis(
        "Machine",
        ("waits for Kubernetes node",),
        "bring that Kubernetes node back, or uncordon it; if its disks are lost for good, kubectl delete "
        "node: the daemon then starts on another one",
    ),
    Diagnosis(
        "Volume",
        ("PersistentVolumeClaim", "is unschedulable: its volume", "FailedAttachVolume", "FailedMapVolume"),
        "kubectl -n {namespace} describe pvc; set volumeClaim.storageClass to a class that "
        "exists and has space",
    ),
    Diagnosis(
        "NoPlace",
        ("is unschedulable",),
        "add a machine with the pool's labels and enough resources, or lower the pool's replicas",
    ),
    Diagnosis(
        "Image",
        (
            "ErrImagePull",
            "ImagePullBackOff",
            "InvalidImageName",
            "ErrImageNeverPull",
            "ImageInspectError",
            "RegistryUnavailable",
        ),
        "correct the image, or name the registry's Secret in imagePullSecrets",
    ),
    Diagnosis(
        "Reference",
        ("CreateContainerConfigError", "FailedMount"),
        "create what is missing; the pod then starts by itself",
    ),
    Diagnosis("OutOfMemory", ("(OOMKilled)",), "raise resources.limits.memory of its pool"),
    Diagnosis("Evicted", ("Evicted",), "free what its machine lacks, or reserve it in the pool's resources"),
    Diagnosis(
        "Network",
        ("FailedCreatePodSandBox", "NetworkNotReady"),
        "check the network plug-in of its machine",
    ),
    Diagnosis(
        "Crash",
        ("CrashLoopBackOff", "exited with", "RunContainerError", "CreateContainerError", "StartError"),
        "follow its last log lines; for all of them: kubectl -n {namespace} logs {pod} --previous",
    ),
    _OTHER,
)


def diagnosis(trouble: str) -> Diagnosis:
    """Return the diagnosis for Kubernetes' message about a pod."""
    return next(each for each in _TABLE if any(sign in trouble for sign in each.signs))


def stuck_pods(pods: Iterable[Pod]) -> dict[str, Diagnosis]:
    """Return, by name, the pods that do not start and for which Kubernetes gives a reason."""
    return {
        pod.name: diagnosis(pod.trouble)
        for pod in sorted(pods, key=lambda pod: pod.name)
        if pod.trouble.partition(":")[0] not in _STARTING and not pod.ready and not pod.leaving
    }


def advice_text(found: dict[str, Diagnosis], namespace: str) -> str:
    """Return what to do, each advice once."""
    first = {each.word: (each, pod) for pod, each in reversed(found.items())}
    said = [each.advice.format(pod=pod, namespace=namespace) for each, pod in reversed(first.values())]
    return f"to do: {'; '.join(said)}" if said else ""


def brief_text(found: dict[str, Diagnosis]) -> str:
    """Return a short text for a column: the most frequent reason, with one of its pods."""
    words = [each.word for each in found.values()]
    if not words:
        return ""
    word = max(words, key=words.count)
    pods = [pod for pod, each in found.items() if each.word == word]
    return f"{word}: {pods[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")


_AMISS: Final = {
    "away": "its pod is being restarted; after {} s its share is rebuilt on other nodes",
    "returning": "it is fetching what it missed",
    "down": "it is given up; its share is rebuilt on other nodes from the remaining copies",
}
"""Node states, and what happens next."""
_STUCK: Final = "the condition Available gives the reason; all data is on the other nodes"
DISKS_APART: Final = "DisksApart"
DISKS_HEALTHY: Final = "DisksHealthy"
_LOST, _FULL = "out of service", "full, so it takes no new data"
_NAMED: Final = 5
_SENTENCE: Final = 900
Condition = tuple[str, bool | None, str, str]  # type, whether, reason, message


def conditions(document: Manifest, found: list[Condition], now: str) -> list[dict[str, Any]]:
    """Return metav1 Conditions; an unchanged one keeps its time."""
    before = {each["type"]: each for each in (document.get("status") or {}).get("conditions") or ()}
    generation = document["metadata"].get("generation")
    result = []
    for kind, whether, reason, message in found:
        status = {True: "True", False: "False", None: "Unknown"}[whether]
        old = before.get(kind) or {}
        since = old["lastTransitionTime"] if old.get("status") == status else now
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since,
            }
            | ({"observedGeneration": generation} if generation else {})
        )
    return result


def previous_message(document: Manifest, kind: str) -> str:
    """Return the message of a condition as it was read; empty if there is none."""
    found = (document.get("status") or {}).get("conditions") or ()
    return next((str(each["message"]) for each in found if each["type"] == kind), "")


def cluster_status(
    cluster: Cluster, told: tuple[ClusterState, Actions], document: Manifest, now: str, beside: str = ""
) -> dict[str, Any]:
    """Return the status of a MeshCluster. `beside`: directories shared with other meshes."""
    sight, steps = told
    ready = sum(pod.ready for pod in sight.pods)
    desired = sum(sight.wanted.values())
    outdated = [pod for pod in sight.pods if pod.template != sight.templates.get(pod.pool)]
    progressing = bool(steps.pending or outdated or len(sight.pods) != desired or ready < desired)
    degraded, outside = _degraded_reasons(sight), stores_outside_map(sight)
    settled = steps.settled and not outside
    waiting = "; ".join(steps.waiting)[:1000]
    found: list[Condition] = [
        (
            "Available",
            ready > 0,
            "Answers" if ready else "NobodyAnswers",
            f"{ready} of {desired} daemons are ready{_unready(sight, cluster.namespace)}",
        ),
        (
            "Progressing",
            progressing,
            "Working" if progressing else "Done",
            waiting or (_doing(sight, desired, outdated) if progressing else "nothing to do"),
        ),
        (
            "Degraded",
            bool(degraded),
            "NodesMissing" if degraded else "AllWell",
            degraded or "every node is healthy",
        ),
        (
            "Settled",
            settled,
            "Settled" if settled else "NotJoined" if steps.settled else "Moving",
            "all data is in place" if settled else waiting or _unsettled(outside, moving=not steps.settled),
        ),
        (
            DISKS_APART,
            not beside,
            "Shared" if beside else "Apart",
            beside or "no older MeshCluster uses its directories",
        ),
        _disks_condition(sight),
    ]
    status: dict[str, Any] = {
        "observedGeneration": document["metadata"].get("generation"),
        "phase": _phase(sight, degraded, ready, outdated),
        "conditions": conditions(document, found, now),
        "pools": _pools(sight),
        "desired": desired,
        "ready": ready,
        "endpoint": cluster.endpoint,
        # None deletes an old message.
        "trouble": brief_text(stuck_pods(sight.pods)) or _brief_disks(sight) or None,
    }
    return status | ({"mapVersion": sight.map.version} if sight.map else {})


def _unsettled(outside: list[str], *, moving: bool) -> str:
    if moving:
        return "data is moving, or a node is not healthy"
    return f"not in the mesh yet, so without a share of its data: {_listed(outside)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _degraded_reasons(sight: ClusterState) -> str:
    said = []
    for state, help_ in _AMISS.items():
        names = sorted(node.node_id for node in sight.map.nodes if node.state == state) if sight.map else []
        if names:
            said.append(f"{_listed(names)} {state}: {help_.format(sight.spec.down_after_seconds)}")
    outside = set(stores_outside_map(sight)) if sight.map else set[str]()
    if stuck := sorted(outside & stuck_pods(sight.pods).keys()):
        said.append(f"{_listed(stuck)} cannot join: {_STUCK}")
    return "; ".join(said)


def _troubled_disks(sight: ClusterState) -> list[tuple[str, Disk]]:
    """Return the disks that are or should be out of service, or take no new data, with their nodes' ids."""
    known = sorted(node.node_id for node in sight.map.nodes) if sight.map else []
    return [
        (name, disk)
        for name in known
        for disk in sight.disks.get(name, ())
        if disk.why or disk.refuses_writes or not disk.serves
    ]


def _disks_condition(sight: ClusterState) -> Condition:
    found = _troubled_disks(sight)
    failed = any(not disk.serves for _, disk in found)
    said = [f"{disk.path} of {name}: {disk.why or (_FULL if disk.serves else _LOST)}" for name, disk in found]
    more = [f"{len(said) - _NAMED} more"] if len(said) > _NAMED else []
    return (
        DISKS_HEALTHY,
        not found,
        "Failed" if failed else "Full" if found else "Healthy",
        "; ".join([*said[:_NAMED], *more])[:_SENTENCE] or "every disk is in service and takes data",
    )


def _brief_disks(sight: ClusterState) -> str:
    """Return a short text for a column: a node with such a disk."""
    names = list(dict.fromkeys(name for name, _ in _troubled_disks(sight)))
    return f"Disk: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def _unready(sight: ClusterState, namespace: str) -> str:
    """Return which pods are not ready, why, and what to do."""
    pods = sorted((pod for pod in sight.pods if not pod.ready), key=lambda pod: (not pod.trouble, pod.name))
    if not pods:
        return ""
    said = [f"{pod.name} {pod.trouble or 'is not ready yet; see its log'}" for pod in pods[:_NAMED]]
    more = [f"{len(pods) - _NAMED} more"] if len(pods) > _NAMED else []
    advice = advice_text(stuck_pods(pods[:_NAMED]), namespace)[: _SENTENCE // 2]
    return "; ".join([f": {'; '.join([*said, *more])}"[: _SENTENCE - len(advice)], advice]).rstrip("; ")


def _doing(sight: ClusterState, desired: int, outdated: list[Pod]) -> str:
    if outdated and sight.spec.update.paused:
        return f"{len(outdated)} pods are outdated and not replaced: update.paused is set"
    if len(sight.pods) != desired:
        why = "".join(f"; pool {pool}: {said}" for pool, said in sorted(sight.unmade.items()))
        return f"{len(sight.pods)} of {desired} pods exist{why}"[:_SENTENCE]
    if outdated:
        return f"{len(outdated)} pods are outdated"
    if unready := [pod.name for pod in sight.pods if not pod.ready]:
        return (
            f"waiting for {', '.join(sorted(unready)[:_NAMED])} to be ready; Available says why they are not"
        )
    return "the cluster map is changing, or a pod is being replaced"


def _phase(sight: ClusterState, degraded: str, ready: int, outdated: list[Pod]) -> str:
    if sight.map is None or not ready:
        return "Creating"
    if degraded:
        return "Degraded"
    return "Updating" if outdated else "Running"


def _pools(sight: ClusterState) -> list[dict[str, Any]]:
    leaving = {node.node_id for node in sight.map.nodes if node.leaving} if sight.map else set[str]()
    found = []
    for pool, wanted in sight.wanted.items():
        pods = [pod for pod in sight.pods if pod.pool == pool]
        found.append(
            {
                "name": pool,
                "desired": wanted,
                "ready": sum(pod.ready for pod in pods),
                "updated": sum(pod.template == sight.templates.get(pool) for pod in pods),
                "draining": sum(pod.name in leaving for pod in pods),
            }
        )
    return found


def node_status(
    document: Manifest, sight: ClusterState, work: Mapping[str, Mapping[str, Any]], now: str
) -> dict[str, Any]:
    """Return the status of a MeshNode. `work`: rebalance progress, by node id."""
    name = document["spec"]["nodeId"]
    pod = next((pod for pod in sight.pods if pod.name == name), None)
    known = sight.map.node(name) if sight.map else None
    holds = not holds_no_data(sight, name)
    ready = bool(pod and pod.ready)
    found: list[Condition] = [
        (
            "Ready",
            ready,
            "Answers" if ready else "NoAnswer",
            "its pod is ready" if ready else _unready_reason(pod, document["metadata"]["namespace"]),
        )
    ]
    if known and known.leaving:
        message = (
            "its share is not yet complete on other nodes"
            if holds
            else "its share is on other nodes; it holds nothing needed"
        )
        found.append(("Drained", not holds, "Moving" if holds else "Empty", message))
    status: dict[str, Any] = {
        "observedGeneration": document["metadata"].get("generation"),
        "conditions": conditions(document, found, now),
    }
    if pod:
        status |= {"pod": pod.name} | ({"node": pod.node} if pod.node else {})
    if known and known.leaving and holds:
        status["drain"] = _drain(known.turned, work)
    elif (document.get("status") or {}).get("drain"):
        status["drain"] = None  # None deletes the field
    if known:
        status |= {"state": known.state, "zone": known.zone, "rack": known.rack}
    return status


def _unready_reason(pod: Pod | None, namespace: str) -> str:
    if pod is None:
        return "its pod does not exist; see the events of its StatefulSet"
    if not pod.trouble:
        return "its pod is not ready; see its log"
    return f"its pod {pod.trouble}; {advice_text(stuck_pods([pod]), namespace)}".rstrip("; ")


def _drain(since: int, work: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the progress of the nodes that take over, under a map at least as new as the drain."""
    takers = [each for each in work.values() if int(each.get("version") or 0) >= since]
    blocked = sorted({str(each["why"]) for each in takers if each.get("why")})
    found: dict[str, Any] = {
        "bytesTotal": sum(int(each.get("total") or 0) for each in takers),
        "bytesMoved": sum(int(each.get("bytes") or 0) for each in takers),
    }
    left = [each["eta"] for each in takers if each.get("eta") is not None]
    if left:
        found["etaSeconds"] = max(left)
    return found | ({"blockedBy": "; ".join(blocked)[:1024]} if blocked else {})
