"""Tokens of service accounts that a real API server issues, exchanged for keys at a real daemon."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from lightkube import AsyncClient, Client, KubeConfig
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.authentication_v1 import TokenRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Secret, ServiceAccount, ServiceAccountToken

from meshoperator.controllers.issuer_registration import IssuerRegistration
from meshoperator.daemon_client import DaemonClient
from meshoperator.kube.client import Kube
from meshoperator.resources import GROUP, VERSION
from meshsdk.client.s3_client import Client as MeshClient
from meshsdk.client.settings import load_settings
from meshsdk.errors import AccessError, MeshError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AUDIENCE = "shardmesh.io"
CLUSTER = create_namespaced_resource(GROUP, VERSION, "MeshCluster", "meshclusters")
READ = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/*"}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start() as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket="photos")
            client.put_object(Bucket="photos", Key="1", Body=b"one")
        ask(running, "PUT", "policies/read", {"Version": "2012-10-17", "Statement": [READ]})
        yield running


def ask(node: Daemon, method: str, path: str, body: Any) -> None:
    answer = node.request(method, f"/-/admin/{path}", b"" if body is None else json.dumps(body).encode())
    assert answer.status in (200, 201), answer.body


def raw(kubeconfig: Path, path: str) -> str:
    """A document of the API server that is no resource, as `kubectl get --raw` has it."""
    with Client(config=KubeConfig.from_file(kubeconfig).get()) as kube:
        answer = kube._client._client.get(path)
        answer.raise_for_status()
        return str(answer.text)


def token(kube: Client, namespace: str, account: str, audience: str) -> str:
    """What the kubelet requests for a projected volume."""
    wanted = ServiceAccountToken(
        metadata=ObjectMeta(), spec=TokenRequestSpec(audiences=[audience], expirationSeconds=600)
    )
    made = kube.create(wanted, account, namespace=namespace)
    assert made.status is not None
    return str(made.status.token)


def read(node: Daemon, folder: Path, text: str) -> bytes:
    """As a pod with this token reads an object."""
    (folder / "token").write_text(text)
    settings = load_settings(
        env={
            "AWS_ENDPOINT_URL": node.endpoint,
            "AWS_ROLE_ARN": "arn:aws:iam:::role/trainer",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "token"),
        }
    )
    with MeshClient(settings) as client:
        return bytes(client.get("photos", "1"))


def test_the_operator_registers_the_issuer_of_its_cluster(
    node: Daemon, kube: Client, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    """It stores the API server's keys in the mesh, and puts right what differs later."""
    spec = {
        "image": "meshd",
        "nodePools": [
            {
                "name": "store",
                "replicas": 1,
                "roles": ["store"],
                "tiers": [{"name": "d", "class": "ssd", "hostPath": "/d"}],
            }
        ],
        "auth": {"webIdentity": {}},
    }
    kube.apply(
        CLUSTER(metadata=ObjectMeta(name="mesh", namespace=namespace), spec=spec),
        field_manager="test",
        force=True,
    )
    root = {"AWS_ACCESS_KEY_ID": node.access_key, "AWS_SECRET_ACCESS_KEY": node.secret_key}
    kube.create(Secret(metadata=ObjectMeta(name="mesh-root", namespace=namespace), stringData=root))
    kube.create(ServiceAccount(metadata=ObjectMeta(name="trainer", namespace=namespace)))

    async def register() -> int:
        client = AsyncClient(config=KubeConfig.from_file(kubeconfig).get())
        daemons = DaemonClient(Kube(client), time.time, lambda _: node.endpoint)
        try:
            return await IssuerRegistration(Kube(client), daemons).register_all([namespace])
        finally:
            await daemons.aclose()
            await client.aclose()

    assert asyncio.run(register()) == 0
    condition = {"claim": "sub", "values": [f"system:serviceaccount:{namespace}:trainer"]}
    role = {"name": "trainer", "provider": "kubernetes", "policies": ["read"], "conditions": [condition]}
    ask(node, "POST", "roles", role)
    assert read(node, tmp_path, token(kube, namespace, "trainer", AUDIENCE)) == b"one"
    ask(node, "PATCH", "idps/kubernetes", {"audiences": ["other"]})
    with pytest.raises(MeshError, match="audience"):
        read(node, tmp_path, token(kube, namespace, "trainer", AUDIENCE))
    assert asyncio.run(register()) == 0
    assert read(node, tmp_path, token(kube, namespace, "trainer", AUDIENCE)) == b"one"
    ask(node, "DELETE", "roles/trainer", None)
    ask(node, "DELETE", "idps/kubernetes?force=true", None)


def test_a_token_of_a_service_account_is_exchanged(
    node: Daemon, kube: Client, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    discovery = json.loads(raw(kubeconfig, "/.well-known/openid-configuration"))
    ask(
        node,
        "POST",
        "idps",
        {
            "name": "cluster",
            "issuer": discovery["issuer"],
            "audiences": [AUDIENCE],
            "jwks": raw(kubeconfig, "/openid/v1/jwks"),
        },
    )
    conditions = [
        {"claim": "sub", "values": [f"system:serviceaccount:{namespace}:trainer"]},
        {"claim": "/kubernetes.io/namespace", "values": [namespace]},
    ]
    role = {"name": "trainer", "provider": "cluster", "policies": ["read"], "conditions": conditions}
    ask(node, "POST", "roles", role)
    for account in ("trainer", "other"):
        kube.create(ServiceAccount(metadata=ObjectMeta(name=account, namespace=namespace)))
    good = token(kube, namespace, "trainer", AUDIENCE)
    assert read(node, tmp_path, good) == b"one"
    with pytest.raises(AccessError, match="AccessDenied"):
        read(node, tmp_path, token(kube, namespace, "other", AUDIENCE))
    with pytest.raises(MeshError, match="audience"):
        read(node, tmp_path, token(kube, namespace, "trainer", discovery["issuer"]))
    head, _, signature = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(good.split(".")[1] + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "exp": claims["exp"] + 9}).encode())
    with pytest.raises(MeshError, match="signature"):
        read(node, tmp_path, f"{head}.{forged.rstrip(b'=').decode()}.{signature}")
