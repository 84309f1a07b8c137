"""Scenes of a mesh that shrinks and grows: fewer replicas and more, `kubectl drain` and `uncordon`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.e2e.cluster_client import EndToEndError
from tests.e2e.stage import DAEMONS, MESH_PODS, run_command
from tests.kubernetes.scenes import MeshNode

if TYPE_CHECKING:
    from typing import Any

    from tests.e2e.stage import Stage

METRIC = "meshd_rebalance_bytes_total"
READ_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9000/metrics').read().decode())"


def scale(stage: Stage) -> None:
    """One replica less, and one more again: bytes move, and clients read them all the time."""
    cluster, last = stage.cluster, f"mesh-s-{DAEMONS - 1}"
    before = fetched_bytes(stage)
    with stage.step(f"{DAEMONS} daemons become {DAEMONS - 1}") as told:
        cluster.change(nodePools=[stage.pool(DAEMONS - 1)])
        cluster.until(
            lambda: last not in {each.metadata.name for each in cluster.kube.list(MeshNode)},
            f"{last} has left the mesh",
            300,
        )
        stage.until_settled(DAEMONS - 1)
        stage.tell_load(told)
        tell_moved(stage, told, before)
    before = fetched_bytes(stage)
    with stage.step(f"{DAEMONS - 1} daemons become {DAEMONS}") as told:
        cluster.change(nodePools=[stage.pool()])
        stage.until_settled()
        stage.tell_load(told)
        tell_moved(stage, told, before)


def drain(stage: Stage) -> None:
    """`kubectl drain` of a machine, and `kubectl uncordon`."""
    node = stage.spare_node()
    if node is None:
        return
    before = fetched_bytes(stage)
    with stage.step("kubectl drain of a machine, until it returns") as told:
        kubectl(stage, f"drain {node} --ignore-daemonsets --delete-emptydir-data --timeout=280s")
        stage.tell_load(told)
        tell_moved(stage, told, before)
    before = fetched_bytes(stage)
    with stage.step("kubectl uncordon, until the mesh is settled") as told:
        kubectl(stage, f"uncordon {node}")
        stage.until_settled()
        stage.tell_load(told)
        tell_moved(stage, told, before)


def tell_moved(stage: Stage, told: dict[str, Any], before: dict[str, int]) -> None:
    """Put into `told` what daemons fetched from each other since `before`. Raises EndToEndError for 0."""
    now = fetched_bytes(stage)
    moved = sum(value - before.get(name, 0) for name, value in now.items())
    told["bytes moved"] = f"{moved:,}"
    if moved <= 0:
        raise EndToEndError(f"no bytes were moved: {before}, then {now}")


def fetched_bytes(stage: Stage) -> dict[str, int]:
    """Return, for each ready daemon, the bytes that it fetched from others since its pod started."""
    found = {}
    for pod in stage.cluster.ready_pods(MESH_PODS):
        name = pod.metadata.name
        command = f'exec {name} --namespace {stage.cluster.namespace} -c meshd -- python -c "{READ_METRICS}"'
        try:
            text = kubectl(stage, command)
        except EndToEndError:
            if is_there(stage, pod):
                raise
            continue  # it left between the list and the command
        values = [line.split()[1] for line in text.splitlines() if line.startswith(f"{METRIC} ")]
        found[name] = int(float(values[0]))
    return found


def is_there(stage: Stage, pod: Any) -> bool:
    """Return whether this very pod is ready still."""
    return pod.metadata.uid in {each.metadata.uid for each in stage.cluster.ready_pods(MESH_PODS)}


def kubectl(stage: Stage, arguments: str, given: str = "") -> str:
    """Run kubectl; return what it printed. Raises EndToEndError."""
    return run_command(f"{stage.options.kubectl} --kubeconfig {stage.options.kubeconfig} {arguments}", given)
