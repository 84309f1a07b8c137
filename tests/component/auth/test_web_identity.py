"""Tokens of an OpenID Connect issuer exchanged for keys, as boto3, awscli and the SDK do it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.config
import pytest
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshsdk import ops
from meshsdk.client.s3_client import Client
from meshsdk.client.settings import load_settings
from meshsdk.errors import AccessError
from tests.support.boto_sessions import boto_session
from tests.support.bounded_wait import await_true
from tests.support.daemons import Daemon
from tests.support.interpreters import program, python
from tests.support.oidc_issuer import AUDIENCE, OidcIssuer, SigningKey, claims, encoded, key_set
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_TRAIN = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/train/*"}],
}
ROLE_ARN = "arn:aws:iam:::role/trainer"
STORED = "https://kubernetes.default.svc.cluster.local"  # an issuer that nobody can reach
STORED_KEY = SigningKey("stored", "ES256")


@pytest.fixture(scope="module")
def issuer() -> Iterator[OidcIssuer]:
    with OidcIssuer() as running:
        yield running


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.jsonl"


@pytest.fixture(scope="module")
def node(issuer: OidcIssuer, audit_log: Path) -> Iterator[Daemon]:
    with Daemon.start(workers=2, args=["--audit-log", str(audit_log)]) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket="photos")
            client.put_object(Bucket="photos", Key="train/1", Body=b"one")
            client.put_object(Bucket="photos", Key="test/1", Body=b"two")
        ask(running, "PUT", "policies/read-train", READ_TRAIN)
        provider = {"name": "company", "issuer": issuer.url, "audiences": [AUDIENCE], "allow_http": True}
        ask(running, "POST", "idps", provider)
        stored = {"name": "cluster", "issuer": STORED, "audiences": [AUDIENCE], "jwks": key_set(STORED_KEY)}
        ask(running, "POST", "idps", stored)
        role = {
            "name": "trainer",
            "provider": "company",
            "policies": ["read-train"],
            "conditions": [{"claim": "sub", "values": ["ann", "bob"]}],
        }
        ask(running, "POST", "roles", role)
        subject = {"claim": "sub", "values": ["system:serviceaccount:train:*"], "wildcard": True}
        ask(running, "POST", "roles", role | {"name": "pods", "provider": "cluster", "conditions": [subject]})
        yield running
        assert "Traceback" not in running.output()
        assert "eyJ" not in running.output(), "a token is in the log"


def ask(
    node: Daemon, method: str, path: str, body: Any = None, *, status: tuple[int, ...] = (200, 201)
) -> Any:
    answer = node.request(method, f"/-/admin/{path}", b"" if body is None else json.dumps(body).encode())
    assert answer.status in status, answer.body
    return json.loads(answer.body)


def sts(node: Daemon) -> Any:
    """An STS client that has no keys of its own."""
    config = botocore.config.Config(signature_version=botocore.UNSIGNED, retries={"max_attempts": 0})
    made = boto_session().client("sts", endpoint_url=node.endpoint, region_name="us-east-1", config=config)
    return contextlib.closing(made)


def exchange(node: Daemon, token: str, role: str = ROLE_ARN, *, patience: float = 60.0, **more: Any) -> Any:
    """A worker that has not seen the issuer's newest key asks for it at most every 10 s: patience."""
    end = time.monotonic() + patience
    with sts(node) as client:
        while True:
            try:
                return client.assume_role_with_web_identity(
                    RoleArn=role, RoleSessionName="pod-7", WebIdentityToken=token, **more
                )
            except ClientError as error:
                if "does not publish" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(0.5)


def refusal(node: Daemon, token: str, role: str = ROLE_ARN, **more: Any) -> str:
    try:
        exchange(node, token, role, patience=20.0, **more)
    except ClientError as error:
        told = error.response["Error"]
        assert token[:40] not in told["Message"]
        return str(told["Code"])
    return ""


def reader(node: Daemon, answer: Any) -> Any:
    keys = answer["Credentials"]
    return contextlib.closing(
        node.client(
            aws_access_key_id=keys["AccessKeyId"],
            aws_secret_access_key=keys["SecretAccessKey"],
            aws_session_token=keys["SessionToken"],
        )
    )


def test_boto3_exchanges_a_token_and_reads_what_the_role_may(node: Daemon, issuer: OidcIssuer) -> None:
    answer = exchange(node, issuer.token("ann"))
    assert answer["SubjectFromWebIdentityToken"] == "ann"
    assert answer["Audience"] == AUDIENCE
    assert answer["Provider"] == issuer.url
    assert answer["AssumedRoleUser"]["Arn"] == "arn:aws:sts:::assumed-role/trainer/pod-7"
    with reader(node, answer) as pod:
        assert pod.get_object(Bucket="photos", Key="train/1")["Body"].read() == b"one"
        for call, arguments in (
            (pod.get_object, {"Bucket": "photos", "Key": "test/1"}),
            (pod.create_bucket, {"Bucket": "mine"}),
            (pod.delete_bucket, {"Bucket": "photos"}),
        ):
            with pytest.raises(ClientError) as refused:
                call(**arguments)
            assert refused.value.response["Error"]["Code"] == "AccessDenied"


def test_the_sdk_needs_two_variables_and_the_endpoint(pod_environment: dict[str, str]) -> None:
    settings = load_settings(env=pod_environment)
    with Client(settings) as client:
        assert bytes(client.get("photos", "train/1")) == b"one"
        with pytest.raises(AccessError):
            client.get("photos", "test/1")


@pytest.fixture
def pod_environment(node: Daemon, issuer: OidcIssuer, tmp_path: Path) -> dict[str, str]:
    """What a pod has in its environment: a role, a token, and the mesh."""
    (tmp_path / "token").write_text(issuer.token("ann"))
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "AWS_ROLE_ARN": ROLE_ARN,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def test_a_job_goes_on_when_its_keys_end(
    node: Daemon, issuer: OidcIssuer, pod_environment: dict[str, str]
) -> None:
    """As in a pod whose token the kubelet renews: the keys are no longer good in the middle of an epoch, the
    file has another token, and every sample comes once."""
    with contextlib.closing(node.client()) as client:
        for sample in range(64):
            client.put_object(Bucket="photos", Key=f"job/{sample:02d}.bin", Body=bytes([sample]) * 64)
    rights = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    ask(node, "PUT", "policies/all", {"Version": "2012-10-17", "Statement": [rights]})
    condition = {"claim": "sub", "values": ["ann"]}
    role = {"name": "job", "provider": "company", "policies": ["all"], "conditions": [condition]}
    ask(node, "POST", "roles", role)
    early = exchange(node, issuer.token("ann"), "arn:aws:iam:::role/job")
    token = Path(pod_environment["AWS_WEB_IDENTITY_TOKEN_FILE"])
    with Client(load_settings(env=pod_environment | {"AWS_ROLE_ARN": "arn:aws:iam:::role/job"})) as inside:
        dataset = mesh.open("s3://photos/job", fields={"x": "bin"}, client=inside)
        dataset = dataset.map(ops.frombuffer("x", "uint8", shape=[64]))
        with mesh.Loader(dataset, 4, seed=1, shuffle=True, output="numpy", prefetch_bytes=96 << 10) as loader:
            seen: list[int] = []
            for step, batch in enumerate(loader):
                seen += batch["x"][:, 0].tolist()
                if step == 3:
                    time.sleep(2.1)  # keys that are refused as soon as they are made are not replaced
                    token.write_text(issuer.token("ann", jti="renewed"))
                    ask(node, "DELETE", "roles/job/sessions")
                    with pytest.raises(ClientError), reader(node, early) as refused:
                        refused.get_object(Bucket="photos", Key="job/00.bin")
            assert sorted(seen) == list(range(64))
    ask(node, "DELETE", "roles/job")


def test_boto3_needs_two_variables_and_the_endpoint(pod_environment: dict[str, str]) -> None:
    program = (
        "import boto3; print(boto3.client('s3').get_object(Bucket='photos', Key='train/1')['Body'].read())"
    )
    done = subprocess.run(
        [python(), "-c", program], env=pod_environment, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout) == (0, "b'one'\n"), done.stderr


def test_awscli_needs_two_variables_and_the_endpoint(pod_environment: dict[str, str]) -> None:
    def aws(*words: str) -> str:
        done = subprocess.run(
            [program("aws"), *words],
            env=pod_environment,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert aws("s3", "cp", "s3://photos/train/1", "-") == "one"
    identity = json.loads(aws("sts", "get-caller-identity"))
    assert identity["Arn"].startswith("arn:aws:sts:::assumed-role/trainer/botocore-session-")


def test_a_stored_key_set_needs_no_issuer(node: Daemon) -> None:
    pods = "arn:aws:iam::123456789012:role/pods"
    token = STORED_KEY.sign(claims(STORED, "system:serviceaccount:train:trainer"))
    assert exchange(node, token, pods)["SubjectFromWebIdentityToken"] == "system:serviceaccount:train:trainer"
    assert (
        refusal(node, STORED_KEY.sign(claims(STORED, "system:serviceaccount:other:trainer")), pods)
        == "AccessDenied"
    )
    assert refusal(node, STORED_KEY.sign(claims(STORED, "ann")), ROLE_ARN) == "AccessDenied"


def test_refusals_have_the_codes_that_clients_know(node: Daemon, issuer: OidcIssuer) -> None:
    token = issuer.token("ann")
    head, body, signature = token.split(".")
    none = encoded(b'{"alg":"none"}') + f".{body}."
    assert refusal(node, issuer.token("eve")) == "AccessDenied"
    assert refusal(node, token, "arn:aws:iam:::role/nobody") == "AccessDenied"
    assert refusal(node, issuer.token("ann", exp=1)) == "ExpiredTokenException"
    assert refusal(node, issuer.token("ann", aud="other")) == "InvalidIdentityToken"
    assert refusal(node, issuer.token("ann", iss="https://other.example")) == "InvalidIdentityToken"
    assert refusal(node, f"{head}.{body}.{signature[:-8]}") == "InvalidIdentityToken"
    assert refusal(node, none) == "InvalidIdentityToken"
    assert refusal(node, token, "arn:aws:iam:::user/ann-has-no-role") == "ValidationError"
    assert refusal(node, token, DurationSeconds=7200) == "ValidationError"
    assert refusal(node, token, Policy="{}") == "MalformedPolicyDocument"
    assert refusal(node, token, Policy=" " * 2048 + "{}") in ("PackedPolicyTooLarge", "ValidationError")


def test_a_session_policy_limits_further(node: Daemon, issuer: OidcIssuer) -> None:
    nothing = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]}
    answer = exchange(node, issuer.token("ann"), Policy=json.dumps(nothing))
    with reader(node, answer) as pod, pytest.raises(ClientError):
        pod.get_object(Bucket="photos", Key="train/1")


def test_a_new_key_of_the_issuer_is_found(node: Daemon, issuer: OidcIssuer) -> None:
    exchange(node, issuer.token("ann"))
    issuer.keys.append(SigningKey("second", "ES256"))
    # Each worker asks the issuer again for an unknown key, but not more often than every few seconds.
    await_true(lambda: refusal(node, issuer.token("ann")) == "")
    assert refusal(node, SigningKey("third").sign(claims(issuer.url))) == "InvalidIdentityToken"


def test_revoking_and_removing_a_role_ends_its_credentials(node: Daemon, issuer: OidcIssuer) -> None:
    role = {
        "name": "short",
        "provider": "company",
        "policies": ["read-train"],
        "conditions": [{"claim": "sub", "values": ["ann"]}],
    }

    def code(answer: Any) -> str:
        with reader(node, answer) as pod:
            try:
                pod.get_object(Bucket="photos", Key="train/1")
            except ClientError as error:
                return str(error.response["Error"]["Code"])
        return ""

    ask(node, "POST", "roles", role)
    first = exchange(node, issuer.token("ann"), "arn:aws:iam:::role/short")
    assert code(first) == ""
    ask(node, "DELETE", "roles/short/sessions")
    assert code(first) == "InvalidToken"
    second = exchange(node, issuer.token("ann"), "arn:aws:iam:::role/short")
    assert code(second) == ""
    ask(node, "DELETE", "roles/short/policies/read-train")
    assert code(second) == "AccessDenied"
    ask(node, "DELETE", "roles/short")
    assert code(second) == "InvalidToken"
    ask(node, "POST", "roles", role)
    assert code(second) == "InvalidToken"


def test_post_on_the_service_is_otherwise_as_before(node: Daemon) -> None:
    form = b"Action=AssumeRoleWithWebIdentity&Version=2011-06-15"
    wire = Wire(node.endpoint, "", "")

    def post(target: str, kind: str, body: bytes = form, host: str = "") -> int:
        head = f"POST {target} HTTP/1.1\r\nHost: {host or wire.host}\r\nContent-Type: {kind}\r\n"
        answer = wire.exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, method="POST")
        return answer.status

    with contextlib.closing(wire):
        assert post("/", "application/x-www-form-urlencoded; charset=utf-8") == 400
        assert post("/", "multipart/form-data; boundary=x") == 405
        assert post("/", "text/plain") == 405
        assert post("/?Action=AssumeRoleWithWebIdentity", "application/x-www-form-urlencoded") == 501
        assert post("//", "application/x-www-form-urlencoded") in (400, 405)
        assert post("/photos", "application/x-www-form-urlencoded") == 405


def test_the_audit_log_says_who_got_which_role(node: Daemon, issuer: OidcIssuer, audit_log: Path) -> None:
    with reader(node, exchange(node, issuer.token("bob"))) as pod:
        pod.get_object(Bucket="photos", Key="train/1")
    refusal(node, issuer.token("eve"))
    node.stop()
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert "eyJ" not in audit_log.read_text()
    exchanged = [line for line in lines if line["operation"] == "AssumeRoleWithWebIdentity"]
    given = next(line for line in exchanged if line.get("subject") == "bob")
    assert given["user"] == "assumed-role/trainer/pod-7"
    assert (given["role"], given["session"], given["made_with"]) == ("trainer", "pod-7", "role/trainer")
    refused = [
        line["role"] for line in exchanged if line.get("code") == "AccessDenied" and "user" not in line
    ]
    assert "trainer" in refused
    read = next(
        line
        for line in lines
        if line.get("access_key") == given["access_key"] and line["operation"] == "GetObject"
    )
    assert (read["user"], read["subject"]) == ("assumed-role/trainer/pod-7", "bob")
    node.up()
