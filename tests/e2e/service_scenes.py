"""Scenes of the Service seen from outside the cluster: a NodePort, and whose address daemons see."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Node, Service

from tests.e2e import outside_scenes
from tests.e2e.cluster_client import EndToEndError, host_port
from tests.e2e.stage import DAEMONS, MESH_PODS
from tests.support.boto_sessions import boto_session

if TYPE_CHECKING:
    from tests.e2e.stage import Stage

BUCKET, KEY, BODY = "outside", "object", b"from outside"
TIMEOUT = 3.0
SILENT = 0
"""Instead of a status: the connection was not answered."""


def traffic_policies(stage: Stage) -> None:
    """Reach each node's port from this machine, by both policies; one node is without a daemon."""
    cluster, nodes = stage.cluster, addresses(stage)
    with stage.step("the Service as a NodePort: S3 from outside, by every node") as told:
        cluster.change(s3={"serviceType": "NodePort"})
        stage.until_settled()
        port = service(stage).ports[0].nodePort
        expect(stage, nodes, port, "-/ready", dict.fromkeys(nodes, 200))
        allow_this_machine(stage, next(iter(nodes.values())), port)
        # Each node forwards to any daemon under its own address, which the bucket's policy does not allow.
        expect(stage, nodes, port, f"{BUCKET}/{KEY}", dict.fromkeys(nodes, 403))
        told["statuses"] = "403 from all"
        stage.tell_load(told)
    hosts = [host_port(address, port) for address in nodes.values()]
    outside_scenes.behind_nginx(stage, hosts, BUCKET, partial(root_client, stage))
    outside_scenes.awscli_with_a_role(stage, f"http://{hosts[0]}")
    with stage.step(f"externalTrafficPolicy: Local with {DAEMONS - 1} daemons") as told:
        local = {"serviceType": "LoadBalancer", "externalTrafficPolicy": "Local"}
        cluster.change(s3=local, nodePools=[stage.pool(DAEMONS - 1)])
        stage.until_settled(DAEMONS - 1)
        served = {pod.spec.nodeName for pod in cluster.ready_pods(MESH_PODS)}
        port, health = service(stage).ports[0].nodePort, service(stage).healthCheckNodePort
        wanted = {name: 200 if name in served else SILENT for name in nodes}
        expect(stage, nodes, port, f"{BUCKET}/{KEY}", wanted)
        told["answered"], told["silent"] = len(served), len(nodes.keys() - served)
        expect(stage, nodes, health, "healthz", {name: 200 if name in served else 503 for name in nodes})
        stage.tell_load(told)
    with stage.step(f"a ClusterIP and {DAEMONS} daemons again") as told:
        cluster.change(
            s3={"serviceType": "ClusterIP", "externalTrafficPolicy": None}, nodePools=[stage.pool()]
        )
        stage.until_settled()
        if service(stage).type != "ClusterIP" or service(stage).ports[0].nodePort:
            raise EndToEndError(f"the Service: {service(stage)}")
        stage.tell_load(told)


def addresses(stage: Stage) -> dict[str, str]:
    """Return the address of each node."""
    return {
        node.metadata.name: next(each.address for each in node.status.addresses if each.type == "InternalIP")
        for node in stage.cluster.kube.list(Node)
    }


def service(stage: Stage) -> Any:
    """Return what the API server made of the Service."""
    return stage.cluster.kube.get(Service, "mesh-s3").spec


def allow_this_machine(stage: Stage, address: str, port: int) -> None:
    """Store an object that anybody with this machine's address may read."""
    client = root_client(stage, f"http://{host_port(address, port)}")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # sends nothing
        own = sock.getsockname()[0]
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key=KEY, Body=BODY)
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": f"arn:aws:s3:::{BUCKET}/*",
        "Condition": {"IpAddress": {"aws:SourceIp": own}},
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))


def root_client(stage: Stage, endpoint: str) -> Any:
    """Return a boto3 client with root's keys."""
    access, secret = stage.root_keys().values()
    return boto_session().client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )


def expect(stage: Stage, nodes: dict[str, str], port: int, path: str, wanted: dict[str, int]) -> None:
    """Wait until the nodes answer an unsigned request as wanted, three times in a row; kube-proxy follows
    with a delay. Raises EndToEndError."""
    seen = list[dict[str, int]]()

    def as_wanted() -> bool:
        seen.append({name: status(f"http://{host_port(host, port)}/{path}") for name, host in nodes.items()})
        return seen[-3:] == [wanted] * 3

    try:
        stage.cluster.until(as_wanted, f"port {port} answers {wanted}", 90)
    except EndToEndError as error:
        raise EndToEndError(f"port {port} answered {seen[-1]}: {error}") from error


def status(url: str) -> int:
    """Return the status of a GET; SILENT if there is no connection in time. Raises EndToEndError for a body
    that is not the object's."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return SILENT
    if url.endswith(KEY) and body != BODY:
        raise EndToEndError(f"{url}: {body!r}")
    return 200
