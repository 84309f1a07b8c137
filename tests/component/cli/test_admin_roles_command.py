"""`meshd admin idp` and `meshd admin role` against a node."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from meshd.cli import meshd
from tests.support.daemons import Daemon
from tests.support.oidc_issuer import OidcIssuer, SigningKey, key_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.testing import Result

READ = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:Get*", "Resource": "*"}}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start() as running:
        yield running


def run(node: Daemon, *words: str, stdin: str = "") -> Result:
    cleared = {name: None for name in os.environ if name.startswith(("MESH", "AWS_"))}
    given = {
        "MESHD_ENDPOINT": node.endpoint,
        "MESHD_ROOT_ACCESS_KEY": node.access_key,
        "MESHD_ROOT_SECRET_KEY": node.secret_key,
    }
    done = CliRunner(env={**cleared, **given}).invoke(meshd, ["admin", *words], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def found(node: Daemon, *words: str, stdin: str = "") -> Any:
    done = run(node, *words, "--json", stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def refusal(node: Daemon, *words: str) -> str:
    done = run(node, *words)
    assert done.exit_code != 0
    return done.stderr


def test_a_provider_is_registered_checked_changed_and_removed(node: Daemon) -> None:
    with OidcIssuer() as issuer:
        words = ("idp", "add", "here", "--issuer", issuer.url, "--audience", "mesh", "--audience", "other")
        assert "https://" in refusal(node, *words)
        made = found(node, *words, "--allow-http", "--description", "of the tests")
        assert (made["audiences"], made["keys"], made["algorithms"]) == (
            ["mesh", "other"],
            "discovery",
            ["RS256", "ES256"],
        )
        (key,) = found(node, "idp", "check", "here")["keys"]
        assert (key["kid"], key["kind"], key["alg"]) == ("first", "RSA", "RS256")
    assert "here:" in refusal(node, "idp", "check", "here"), "the issuer is gone"
    changed = found(node, "idp", "set", "here", "--jwks", "-", stdin=key_set(SigningKey("stored", "ES256")))
    assert (changed["keys"], changed["audiences"]) == ("a stored document", ["mesh", "other"])
    assert [key["kid"] for key in found(node, "idp", "check", "here")["keys"]] == ["stored"]
    assert "never accepted" in refusal(node, "idp", "set", "here", "--algorithm", "HS256")
    assert [each["name"] for each in found(node, "idp", "ls")] == ["here"]
    assert "here" in run(node, "idp", "ls").stdout
    assert "Add --yes" in refusal(node, "idp", "rm", "here")
    assert run(node, "idp", "rm", "here", "--yes").exit_code == 0
    assert "no identity provider" in refusal(node, "idp", "show", "here")


def test_a_role_is_made_of_conditions_and_policies(node: Daemon) -> None:
    run(node, "policy", "put", "read", "-", stdin=json.dumps(READ))
    stored = ("idp", "add", "cluster", "--issuer", "https://a.example", "--audience", "m", "--jwks", "-")
    run(node, *stored, stdin=key_set(SigningKey("k", "ES256")))
    words = ("role", "add", "trainer", "--idp", "cluster", "--policy", "read")
    assert "who may assume it" in refusal(node, *words)
    assert "CLAIM=VALUE" in refusal(node, *words, "--claim", "sub")
    more = (
        "--claim",
        "groups=ml",
        "--claim",
        "groups=ops",
        "--claim-like",
        "sub=system:*",
        "--max-duration",
        "8h",
    )
    made = found(node, *words, *more)
    assert made["arn"] == "arn:aws:iam:::role/trainer"
    assert made["conditions"] == [
        {"claim": "groups", "values": ["ml", "ops"], "wildcard": False},
        {"claim": "sub", "values": ["system:*"], "wildcard": True},
    ]
    assert made["max_seconds"] == 8 * 3600
    assert "groups is ml or ops; sub like system:*" in run(node, "role", "ls").stdout
    assert "1 role trusts" in refusal(node, "idp", "rm", "cluster", "--yes")
    assert "attached" in refusal(node, "policy", "rm", "read", "--yes")
    assert found(node, "policy", "ls")[0]["roles"] == ["trainer"]
    assert found(node, "policy", "detach", "read", "--role", "trainer")["policies"] == []
    assert found(node, "policy", "attach", "read", "--role", "trainer")["policies"] == ["read"]
    changed = found(node, "role", "set", "trainer", "--claim", "sub=ann")
    assert changed["conditions"] == [{"claim": "sub", "values": ["ann"], "wildcard": False}]
    assert changed["max_seconds"] == 8 * 3600
    assert found(node, "role", "revoke", "trainer", "--yes")["sessions_revoked"]
    assert run(node, "role", "rm", "trainer", "--yes").exit_code == 0
    assert "no role" in refusal(node, "role", "show", "trainer")
