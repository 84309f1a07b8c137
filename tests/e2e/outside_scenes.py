"""Scenes of clients outside the cluster, by the Service's NodePort: behind nginx, with a token of a service
account and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

from tests.e2e.cluster_client import EndToEndError
from tests.support.multipart_clients import aws, by_awscli, by_boto3
from tests.support.nginx_proxy import nginx

if TYPE_CHECKING:
    from typing import Any

    from tests.e2e.stage import Stage

MIB = 1 << 20
LARGE = 64 * MIB
GROWTH = 8 * MIB
AUDIENCE = "shardmesh.io"


def behind_nginx(stage: Stage, addresses: list[str], bucket: str, s3_at: Any) -> None:
    """boto3 and awscli send and fetch a large file by nginx, which has the Ingress example's settings.
    `s3_at` returns root's boto3 client for a URL."""
    if shutil.which("nginx") is None:
        print("no nginx here: the Ingress example is not tried", file=sys.stderr)
        return
    source, target = stage.place / "large", stage.place / "large-again"
    source.write_bytes(os.urandom(LARGE))
    with (
        stage.step(f"nginx before the NodePorts: {LARGE // MIB} MiB in parts, there and back") as told,
        nginx(addresses, stage.place / "nginx") as proxy,
    ):
        s3 = s3_at(proxy.endpoint)
        s3.list_buckets()
        before = proxy.peak_memory()
        by_boto3(s3, bucket, "boto3", source, target)
        by_awscli(root_environment(stage, proxy.endpoint), bucket, "awscli", source, target)
        told["requests"], told["files written"] = proxy.requests(), sorted(proxy.buffered()) or "none"
        told["nginx has had"] = f"{before / MIB:.1f} MiB, then {proxy.peak_memory() / MIB:.1f} MiB at most"
        stage.tell_load(told)
        if proxy.buffered() or proxy.peak_memory() - before > GROWTH:
            raise EndToEndError(f"nginx did not stream: {told}")


def root_environment(stage: Stage, endpoint: str) -> dict[str, str]:
    """Return the environment of a client with root's keys."""
    return {**stage.root_keys(), "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}


def awscli_with_a_role(stage: Stage, endpoint: str) -> None:
    """awscli with a role and a token that the API server issued (TokenRequest), as pods have them: it may do
    what the role allows. The token of another account gets no keys."""
    for account in ("trainer", "default"):
        with stage.step(f"awscli with a token of the account {account}, by the NodePort") as told:
            found = answers_to_awscli(stage, endpoint, account)
            told |= {f"awscli {what}": answer for what, answer in found.items()}
            stage.tell_load(told)
        allowed = {what for what, answer in found.items() if answer is True}
        known = "assumed-role/trainer" in found["is"]
        if account == "trainer":
            as_wanted = known and allowed == {"lists", "reads"}
        else:
            as_wanted = not known and not allowed
        if not as_wanted:
            raise EndToEndError(f"awscli with a token of {account}: {found}")


def answers_to_awscli(stage: Stage, endpoint: str, account: str) -> dict[str, Any]:
    """Return what awscli was allowed with the token of an account. Raises EndToEndError for an error that is
    no refusal."""
    token = stage.place / f"token-{account}"
    token.write_text(stage.cluster.token(account, AUDIENCE))
    env = {
        "AWS_ROLE_ARN": "arn:aws:iam:::role/trainer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def may(*words: str, given: bytes = b"") -> str | None:
        done = aws(*words, env=env, given=given)
        said = done.stderr.decode()
        if done.returncode and "AccessDenied" not in said:
            raise EndToEndError(f"aws {' '.join(words)}: {said}")
        return None if done.returncode else done.stdout.decode(errors="replace")

    identity = may("sts", "get-caller-identity")
    return {
        "is": json.loads(identity)["Arn"] if identity else "nobody",
        "lists": may("s3", "ls", "s3://samples/") is not None,
        "reads": may("s3", "cp", "s3://samples/0001.bin", "-") is not None,
        "writes": may("s3", "cp", "-", "s3://samples/written", given=b"x") is not None,
        "reads another bucket": may("s3api", "get-object", "--bucket", "load", "--key", "old/1", "/dev/null")
        is not None,
    }
