"""Scenes of monitoring: a Prometheus that finds pods by itself, its targets, its alerts, the dashboards."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Event, Service
from lightkube.types import PatchType

from tests.e2e import alert_scenes, disk_alert_scenes
from tests.e2e.alert_watch import fires, rules_at_once
from tests.e2e.cluster_client import EndToEndError, host_port
from tests.e2e.control_plane_scenes import OPERATOR_PODS
from tests.e2e.release_scenes import server_names
from tests.e2e.stage import DAEMONS
from tests.e2e.storage_scenes import second_namespace
from tests.monitoring.node_work import work
from tests.monitoring.scraping import Prometheus
from tests.monitoring.shipped_files import ALERTS, ROOT, RULES, panel_expressions
from tests.support.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from tests.e2e.stage import Stage

OF_FAILURES = {"ShardmeshNodeDown", "ShardmeshNodeAway"}
"""They fire where a daemon with a bad image, or on a lost node, is away for two minutes: on slow machines."""
OF_KILLS = {"ShardmeshPodsNotAdmitted", "ShardmeshOriginFails"}
"""They may fire where the operator is killed: for a pod without webhook, for a source without keys."""
WHILE_ALL_IS_WELL = {"ShardmeshOriginFails"}
"""It may fire for a source, before the kubelets have delivered its keys."""
HOW = (("", False), ("without its `for:` ", True))
OF_A_FULL_DISK = {"ShardmeshDiskFull", "ShardmeshDiskFills", "ShardmeshErrors", "ShardmeshWritesRefused"}
"""They may fire in the second mesh, of which a disk is full for a while."""


@contextmanager
def watched(stage: Stage) -> Iterator[Prometheus]:
    """Run a Prometheus on this machine, with the example's discovery and the chart's rules.

    On https it trusts the authority of the mesh of `alert_scenes`, which that scene makes anew.
    """
    place = stage.place
    ca = Authority(alert_scenes.place_of(stage) / "tls").cert
    name, _ = server_names(alert_scenes.namespace_of(stage))
    config = yaml.safe_load((ROOT / "helm/examples/prometheus.yaml").read_text())
    for job in config["scrape_configs"]:
        for each in job["kubernetes_sd_configs"]:
            each["kubeconfig_file"] = str(Path(stage.options.kubeconfig).resolve())
        job["tls_config"] = {"ca_file": str(ca), "server_name": name}
    at_once = place / "at-once.yaml"
    at_once.write_text(yaml.safe_dump(rules_at_once()))
    config |= {"global": {"scrape_interval": "5s", "evaluation_interval": "5s"}}
    config |= {"rule_files": [str(RULES), str(at_once)]}
    (place / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [stage.options.prometheus, f"--config.file={place / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={place / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen([*command, "--log.level=error"]) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


def observe(stage: Stage, stack: ExitStack) -> None:
    """Start a Prometheus that ends with `stack`; it has to find all daemons and the operator."""
    with stage.step("Prometheus finds daemons and operator by role: pod") as told:
        stage.prometheus = found = stack.enter_context(watched(stage))
        for job, count in (("shardmesh", DAEMONS), ("shardmesh-operator", 1)):
            found.wait(f'count(up{{job="{job}"}} == 1) == {count}')
        targets = found.query("up")
        told["targets"] = ", ".join(sorted(each["metric"]["instance"] for each in targets))
        if len(targets) != DAEMONS + 1 or any(each["value"][1] != "1" for each in targets):
            raise EndToEndError(f"targets: {targets}")


def fill_dashboards(stage: Stage) -> None:
    """Do a little of everything, until every expression of the dashboards gives something."""
    cluster, found = stage.cluster, stage.prometheus
    with stage.step("a little of everything, until every panel of the dashboards has data") as told:
        address = cluster.kube.get(Service, "mesh-s3").spec.clusterIP
        work(f"http://{host_port(address, 9000)}", *stage.root_keys().values())
        expressions = panel_expressions(may_be_empty=False)
        empty = set(expressions)

        def full() -> bool:
            empty.difference_update({each for each in empty if found.query(_asked(each))})
            return not empty

        try:
            cluster.until(full, "every panel has data", 120)
        except EndToEndError as error:
            raise EndToEndError(f"panels without data: {sorted(empty)}") from error
        told["expressions"] = len(expressions)


def expect_silence(stage: Stage) -> None:
    """Raise EndToEndError if an alert would have fired, even without its `for:`, while all was well."""
    with stage.step("alerts that would have fired until now without their `for:`, all being well") as told:
        fired = fired_at_once(stage)
        told["alerts"] = ", ".join(sorted(fired)) or "none"
    if wrong := fired - WHILE_ALL_IS_WELL:
        raise EndToEndError(f"alerts while all is well: {sorted(wrong)}")


def tell_alerts(stage: Stage) -> None:
    """Print in which steps each alert of the chart began to fire, with its `for:` and without, and which
    never did."""
    began: dict[tuple[str, bool], list[str]] = defaultdict(list)
    before = set[tuple[str, bool]]()
    for name, since, until in stage.timeline:
        series = f'ALERTS{{alertstate="firing"}}[{max(10.0, until - since):.0f}s] @ {until:.0f}'
        found = stage.prometheus.query(f"count by (alertname, at_once) (max_over_time({series}))")
        now = {(each["metric"]["alertname"], "at_once" in each["metric"]) for each in found}
        for each in sorted(now - before):
            began[each].append(name)
        before = now
    never = []
    for name in (alert["alert"] for alert in ALERTS):
        told = [f"{how}{began[name, at_once]}" for how, at_once in HOW if began[name, at_once]]
        if told:
            print(f"{name}: {'; '.join(told)}", file=sys.stderr)
        else:
            never.append(name.removeprefix("Shardmesh"))
    print(f"alerts that never fired: {', '.join(never) or 'none'}", file=sys.stderr)


def expect_alerts(stage: Stage, expected: str = "") -> None:
    """Raise EndToEndError unless `expected` fired since the start of Prometheus, and no alert is wrong."""
    with stage.step("alerts that fired until now") as told:
        found = stage.prometheus.query(
            'count by (alertname, instance) (max_over_time(ALERTS{alertstate="firing", at_once=""}[3h]))'
        )
        fired = {(each["metric"]["alertname"], each["metric"].get("instance", "")) for each in found}
        told["alerts"] = ", ".join(sorted({name for name, _ in fired})) or "none"
    second = f"{second_namespace(stage)}/"
    full = {each for each in fired if each[0] in OF_A_FULL_DISK and each[1].startswith(second)}
    names = {name for name, _ in fired - full}
    allowed = OF_FAILURES | (OF_KILLS if stage.options.kill_operator else set())
    if not {expected} - {""} <= names <= {expected, *allowed}:
        raise EndToEndError(f"alerts that fired: {sorted(fired)}, expected: {expected or 'none'}")


def lose_operator(stage: Stage) -> None:
    """No operator runs while a training pod is created: an alert says so."""
    cluster = stage.cluster
    with stage.step("no operator runs; a training pod is created, until an alert says so") as told:
        scale_operator(stage, 0)
        cluster.until(lambda: not cluster.pods(OPERATOR_PODS), "the operator is gone")
        cluster.run_script("unserved", "training_pod.py", ["0"], labels={"shardmesh.io/dataset": "photos"})
        cluster.until(lambda: "ShardmeshOperatorGone" in fired_at_once(stage), "an alert fires")
        stage.tell_load(told)
    with stage.step("an operator runs again, until an event names the pod, and an alert says so") as told:
        scale_operator(stage, 1)
        stage.until_operator()
        cluster.until(
            lambda: any(each.reason == "NotAdmitted" for each in cluster.kube.list(Event)), "an event says so"
        )
        cluster.until(lambda: unserved(stage) == 1 and fires(stage, "PodsNotAdmitted"), "an alert fires")
        cluster.delete_pod("unserved")
        cluster.until(lambda: unserved(stage) == 0, "the pod is not counted any more")
        stage.tell_load(told)


def scale_operator(stage: Stage, replicas: int) -> None:
    """Set how many operators there are."""
    name = "mesh-shardmesh-operator"
    stage.cluster.kube.patch(Deployment, name, {"spec": {"replicas": replicas}}, patch_type=PatchType.MERGE)


def unserved(stage: Stage) -> float:
    """Return how many pods the leader counts that the webhook did not receive, as Prometheus has it."""
    metric = 'mesh_operator_pods_unserved{reason="NotAdmitted"}'
    found = stage.prometheus.query(f"{metric} and ignoring (reason) mesh_operator_leading == 1")
    return max((float(each["value"][1]) for each in found), default=-1.0)


def fired_at_once(stage: Stage) -> set[str]:
    """Return the alerts that fired since the start of Prometheus, if they had no `for:`."""
    found = stage.prometheus.query(
        'count by (alertname) (max_over_time(ALERTS{alertstate="firing", at_once="yes"}[3h]))'
    )
    return {each["metric"]["alertname"] for each in found}


def expect_alerts_at_once(stage: Stage) -> None:
    """Raise EndToEndError unless what happened until now fired its alerts, their `for:` left out."""
    options, expected = stage.options, {"DaemonStuck", "DaemonsMissing", "ClusterUnsettled"}
    if options.crash or options.cut:
        expected |= {"ClusterDegraded", "NodeDown", "NodeAway", "CopiesMissing"}
    if options.kill_operator:
        expected |= {"ClusterUnavailable", "OperatorGone", "PodsNotAdmitted"}
    if options.stop_api:
        expected |= {"ControlStoreLost"}
    if options.on_node:
        expected |= {"WritesRefused", "DiskFull"} | alert_scenes.EXPECTED | disk_alert_scenes.EXPECTED
    with stage.step("alerts that fired until now, if they had no `for:`") as told:
        fired = {name.removeprefix("Shardmesh") for name in fired_at_once(stage)}
        told["alerts"] = ", ".join(sorted(fired))
        if missing := expected - fired:
            raise EndToEndError(f"alerts that did not fire: {sorted(missing)}")


def _asked(expr: str) -> str:
    return expr.replace("$instance", ".*").replace("$__rate_interval", "1m")
