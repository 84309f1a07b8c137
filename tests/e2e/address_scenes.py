"""A scene of clients that use addresses instead of names: of the Service, and of each daemon's pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightkube.resources.core_v1 import Service

from tests.e2e.cluster_client import EndToEndError, host_port
from tests.e2e.stage import MESH_PODS

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

PORT = 9000


def by_address(stage: Stage) -> None:
    """A pod uses every address, of each family that the cluster has: the SDK, boto3, presigned URLs, a policy
    with an address. Raises EndToEndError."""
    cluster = stage.cluster
    with stage.step("a pod uses the addresses of the Service and of each daemon as URLs") as told:
        service = cluster.kube.get(Service, "mesh-s3").spec
        addresses = list(service.clusterIPs or [service.clusterIP])
        for pod in cluster.ready_pods(MESH_PODS):
            addresses += [each.ip for each in pod.status.podIPs]
        urls = [f"http://{host_port(address, PORT)}" for address in addresses]
        cluster.run_script("addresses", "addresses_pod.py", urls, env=stage.keys())
        found = cluster.result("addresses")
        cluster.delete_pod("addresses")
        told["IPv6"] = sum(":" in address for address in addresses)
        told["IPv4"] = len(addresses) - told["IPv6"]
        stage.tell_load(told)
    if wrong := {url: said for url, said in found.items() if said}:
        raise EndToEndError(f"S3 by addresses: {wrong}")
