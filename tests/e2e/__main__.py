"""`python -m tests.e2e`: the chart on a real cluster, from `helm install` to `helm uninstall`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.e2e import (
    address_scenes,
    alert_scenes,
    client_scenes,
    control_plane_scenes,
    data_scenes,
    disk_alert_scenes,
    failure_scenes,
    ingress_scenes,
    monitoring_scenes,
    network_scenes,
    operator_kill_scenes,
    policy_scenes,
    release_scenes,
    scaling_scenes,
    service_scenes,
    storage_scenes,
)
from tests.e2e.cluster_client import EndToEndError, RealCluster
from tests.e2e.rights import used
from tests.e2e.stage import Stage


def run(stage: Stage) -> None:
    """Play all scenes, in order. Raises EndToEndError."""
    options = stage.options
    release_scenes.install(stage)
    with ExitStack() as stack:
        if options.prometheus:
            monitoring_scenes.observe(stage, stack)
        if options.only:
            play_only(stage)
        else:
            play_on_one_release(stage)
    if options.keep:
        return
    release_scenes.remove(stage)
    if options.only:
        return
    release_scenes.mesh_of_values(stage)
    if options.audit_log:
        tell_rights(stage)


def play_on_one_release(stage: Stage) -> None:
    """Play the scenes between the installation and the end of one mesh. Raises EndToEndError."""
    options = stage.options
    client_scenes.load(stage)
    epoch = client_scenes.train(stage)
    data_scenes.load_from_source(stage)
    data_scenes.view(stage)
    client_scenes.assume_role(stage)
    address_scenes.by_address(stage)
    if options.prometheus:
        monitoring_scenes.fill_dashboards(stage)
        monitoring_scenes.expect_silence(stage)
    policy_scenes.enforced(stage)
    if options.ingress_address:
        ingress_scenes.through_ingress(stage, epoch)
    client_scenes.upgrade(stage, epoch)
    replace_daemons(stage)
    if options.outside:
        service_scenes.traffic_policies(stage)
    if options.on_node:
        network_scenes.connections(stage)
    lose_nodes(stage)
    if options.on_node:
        storage_scenes.two_meshes(stage)
    storage_scenes.daemons_without_disks(stage)
    if options.kill:
        control_plane_scenes.kill_operator(stage)
    if options.kill_operator:
        operator_kill_scenes.kill_in_each_step(stage)
        if options.prometheus:
            monitoring_scenes.lose_operator(stage)
    if options.stop_api:
        if options.prometheus:
            monitoring_scenes.expect_alerts(stage)
        control_plane_scenes.lose_control_plane(stage, epoch)
        if options.prometheus:
            monitoring_scenes.expect_alerts(stage, "ShardmeshControlStoreLost")
    if options.prometheus:
        if options.on_node:
            alert_scenes.sick_mesh(stage)
            disk_alert_scenes.sick_disk(stage)
        monitoring_scenes.expect_alerts_at_once(stage)
    release_scenes.reinstall(stage)
    if options.prometheus:
        monitoring_scenes.tell_alerts(stage)


def play_only(stage: Stage) -> None:
    """Play the scenes of `--only`, on a mesh that clients use. Raises EndToEndError."""
    client_scenes.load(stage)
    epoch = client_scenes.train(stage)
    if "addresses" in stage.options.only:
        address_scenes.by_address(stage)
    if "data" in stage.options.only:
        data_scenes.load_from_source(stage)
        data_scenes.view(stage)
    if "upgrade" in stage.options.only:
        client_scenes.upgrade(stage, epoch)
        failure_scenes.delete_pod(stage)
    if "failures" in stage.options.only:
        replace_daemons(stage)
        lose_nodes(stage)
    if "policies" in stage.options.only:
        client_scenes.assume_role(stage)
        policy_scenes.enforced(stage)
    if "ingress" in stage.options.only:
        ingress_scenes.through_ingress(stage, epoch)
    if "connections" in stage.options.only:
        network_scenes.connections(stage)
    if "alerts" in stage.options.only:
        alert_scenes.sick_mesh(stage)
    if "disk-alerts" in stage.options.only:
        disk_alert_scenes.sick_disk(stage)


def replace_daemons(stage: Stage) -> None:
    """Play the scenes of daemons that end and are replaced, one way or another. Raises EndToEndError."""
    failure_scenes.bad_image(stage)
    failure_scenes.delete_pod(stage)
    if stage.options.kill:
        failure_scenes.kill_container(stage)
    scaling_scenes.scale(stage)
    scaling_scenes.drain(stage)


def lose_nodes(stage: Stage) -> None:
    """Play the scenes of nodes without power and without network. Raises EndToEndError."""
    options = stage.options
    if options.crash:
        failure_scenes.lose_node(stage, "power cut", options.crash, options.restore)
    if options.cut:
        failure_scenes.lose_node(stage, "cable out", options.cut, options.mend)


def tell_rights(stage: Stage) -> None:
    """Print which rights the chart grants and the run did not use. Raises EndToEndError for one refused."""
    found, refused = used(Path(stage.options.audit_log))
    for account, rights in stage.granted.items():
        unused = sorted(rights - found[account])
        print(f"{account}: {len(rights)} rights granted, not used: {unused}", file=sys.stderr)
    # An uninstalled operator asks once more for its Lease, and ends.
    if unexpected := set(refused) - {"operator: get leases.coordination.k8s.io"}:
        raise EndToEndError(f"refused: {sorted(unexpected)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.e2e",
        description="Installs the chart on a real cluster and uses it: objects through the Service, "
        "a training pod, a rolling upgrade, a bad image, lost daemons and nodes, fewer daemons and more, "
        "a drained node, daemons without disks, helm uninstall; then a mesh on https made by the chart's "
        "values. Prints what each step took, and exits with 1 if a client saw a failure. The definitions "
        "(helm/shardmesh/crds) must be there, and both images on its nodes or in a registry.",
    )
    made.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG", ""), help="default: $KUBECONFIG")
    made.add_argument("--namespace", default="mesh-e2e", help="created, and deleted if all goes well")
    made.add_argument(
        "--registry", default="registry.example.com/shardmesh", help="of the images meshd, operator"
    )
    made.add_argument("--tag", default="0.1.0", help="the images' tag")
    made.add_argument("--next-tag", help="to which daemons are rolled; default: none")
    made.add_argument("--client-image", help="of clients.Dockerfile; default: the daemon's, without boto3")
    made.add_argument("--prometheus", help="one with kubernetes_sd_configs; it has to reach pods from here")
    made.add_argument(
        "--outside",
        action="store_true",
        help="use the Service's NodePort, by nginx, too, if it is here: nodes can be reached",
    )
    made.add_argument("--ingress-address", help="where an Ingress controller listens, on ports 80 and 443")
    made.add_argument("--ingress-class", default="nginx", help="its IngressClass")
    made.add_argument("--ingress-pods", help="NAMESPACE/LABEL=VALUE of its pods, to watch their memory")
    made.add_argument(
        "--only",
        nargs="+",
        choices=(
            "addresses",
            "alerts",
            "connections",
            "data",
            "disk-alerts",
            "failures",
            "ingress",
            "policies",
            "upgrade",
        ),
        help="these scenes only, after what they need",
    )
    made.add_argument(
        "--ip-family-policy",
        choices=("SingleStack", "PreferDualStack", "RequireDualStack"),
        help="of the Services of mesh and operator; default: the cluster's",
    )
    made.add_argument("--host-path", default="/mnt/shardmesh", help="the disk of each node")
    made.add_argument("--crash", help='a command that cuts the power of a node: "… {node} …"')
    made.add_argument("--restore", help="a command that starts that node again")
    made.add_argument("--cut", help="a command that takes the cable of a node out")
    made.add_argument("--mend", help="a command that puts it in again")
    made.add_argument("--kill", help="a command that kills a container: … {node} … {container} …")
    made.add_argument(
        "--kill-operator",
        action="store_true",
        help="kill it in the middle of each kind of its work",
    )
    made.add_argument("--on-node", help="runs a command of the shell on a node: … {node} … sh -c {script}")
    made.add_argument("--stop-api", help="a command that ends the API servers")
    made.add_argument("--start-api", help="a command that starts them again")
    made.add_argument("--kubectl", default="kubectl", help="for drain and uncordon")
    made.add_argument("--audit-log", help="the API server's, to compare rights granted and used")
    made.add_argument("--keep", action="store_true", help="leave everything there at the end")
    return made


def main() -> int:
    options = parser().parse_args()
    if not options.kubeconfig:
        sys.exit("no cluster: set KUBECONFIG or pass --kubeconfig")
    if options.only and "ingress" in options.only and not options.ingress_address:
        sys.exit("--only ingress needs --ingress-address")
    for scene in {"alerts", "connections", "disk-alerts"} & set(options.only or ()):
        if not options.on_node:
            sys.exit(f"--only {scene} needs --on-node")
    for scene in {"alerts", "disk-alerts"} & set(options.only or ()):
        if not options.prometheus:
            sys.exit(f"--only {scene} needs --prometheus")
    if bool(options.crash) != bool(options.restore):
        sys.exit("--crash and --restore come together")
    if bool(options.cut) != bool(options.mend):
        sys.exit("--cut and --mend come together")
    if bool(options.stop_api) != bool(options.start_api):
        sys.exit("--stop-api and --start-api come together")
    with tempfile.TemporaryDirectory() as place:
        image = options.client_image or f"{options.registry}/meshd:{options.tag}"
        cluster = RealCluster(Path(options.kubeconfig), options.namespace, image)
        stage = Stage(options, cluster, Path(place))
        try:
            run(stage)
        except EndToEndError as error:
            print(f"failed: {error}", file=sys.stderr)
            print(f"all of it is still in the namespace {options.namespace}", file=sys.stderr)
            return 1
        finally:
            print(json.dumps(dict(stage.figures), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
