"""Roles on a mesh: a token is exchanged at any node, and the keys are good at all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.client.s3_client import Client
from meshsdk.client.settings import load_settings
from meshsdk.errors import AccessError, MeshError
from tests.support.bounded_wait import await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.oidc_issuer import AUDIENCE, SigningKey, claims, key_set
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

require_etcd()

ISSUER, KEY = "https://issuer.example", SigningKey("k", "ES256")
RIGHTS = {"Effect": "Allow", "Action": "s3:*", "Resource": ["arn:aws:s3:::pods", "arn:aws:s3:::pods/*"]}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DaemonCluster]:
    with DaemonCluster.start(2) as two:
        yield two


def ask(node: Daemon, method: str, path: str, body: Any = None) -> None:
    answer = node.request(method, f"/-/admin/{path}", b"" if body is None else json.dumps(body).encode())
    assert answer.status in (200, 201), answer.body


def test_a_role_is_one_role_on_all_nodes(mesh: DaemonCluster, tmp_path: Path) -> None:
    first, second = mesh["n1"], mesh["n2"]
    ask(first, "PUT", "policies/pods", {"Version": "2012-10-17", "Statement": [RIGHTS]})
    ask(first, "POST", "idps", {"name": "p", "issuer": ISSUER, "audiences": [AUDIENCE], "jwks": key_set(KEY)})
    condition = {"claim": "sub", "values": ["ann"]}
    ask(
        first,
        "POST",
        "roles",
        {"name": "pod", "provider": "p", "policies": ["pods"], "conditions": [condition]},
    )
    (tmp_path / "token").write_text(KEY.sign(claims(ISSUER, "ann")))

    def client(data: Daemon, sts: Daemon) -> Client:
        variables = {
            "MESH_ENDPOINT": data.endpoint,
            "AWS_ENDPOINT_URL_STS": sts.endpoint,
            "AWS_ROLE_ARN": "arn:aws:iam:::role/pod",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        }
        return Client(load_settings(env=variables))

    def exchanged() -> bool:
        try:
            with client(second, second) as known:
                known.has_bucket("pods")
        except AccessError:
            return False
        return True

    await_true(exchanged)  # the role reaches the other node with the control store's next change
    with client(first, second) as here, client(second, first) as there:
        here.create_bucket("pods")
        for number in range(8):
            here.put("pods", f"{number}", b"x%d" % number)
            assert bytes(there.get("pods", f"{number}")) == b"x%d" % number
        ask(second, "DELETE", "roles/pod")

        def refused() -> bool:
            try:
                here.get("pods", "1")
            except MeshError:
                return True
            return False

        await_true(refused)
        with pytest.raises(MeshError):
            there.get("pods", "1")
