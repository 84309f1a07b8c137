"""Users from a file, settings from a file, and secrets that never show."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from meshd.control.embedded import EmbeddedControl
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.manual_clock import ManualClock
from tests.support.required import missing

if TYPE_CHECKING:
    from pathlib import Path

ANN = ("ANNKEY", "anns-most-secret-key")
BOB = ("BOBKEY", "bobs-most/secret+key")


def users(*pairs: tuple[str, str]) -> str:
    lines = [
        f"- {{user_id: u-{access}, access_key: {access}, secret_key: {secret}}}" for access, secret in pairs
    ]
    return "\n".join(lines)


def client(daemon: Daemon, pair: tuple[str, str], **changes: Any) -> Any:
    return contextlib.closing(
        daemon.client(aws_access_key_id=pair[0], aws_secret_access_key=pair[1], **changes)
    )


def works(daemon: Daemon, pair: tuple[str, str]) -> bool:
    with client(daemon, pair) as s3:
        try:
            s3.list_buckets()
        except s3.exceptions.from_code("InvalidAccessKeyId") as error:
            return bool(error.response["Error"]["Code"] != "InvalidAccessKeyId")
        return True


@pytest.mark.parametrize("workers", [1, 2])
def test_users_sign_and_sighup_reads_the_file_again(tmp_path: Path, workers: int) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN))
    with Daemon.start(args=("--users", str(file)), workers=workers) as daemon:
        assert works(daemon, ANN)
        assert not works(daemon, BOB)
        file.write_text(users(BOB))
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: works(daemon, BOB) and not works(daemon, ANN))
        file.write_text("- {user_id: broken}")
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "users not reloaded" in daemon.output())
        assert works(daemon, BOB)
        assert works(daemon, (daemon.access_key, daemon.secret_key))


def test_a_start_that_replaces_roots_pair_says_so(tmp_path: Path) -> None:
    with Daemon.start(tmp_path, env={"MESHD_ROOT_SECRET_KEY": "one-secret-of-root"}) as daemon:
        former = daemon.access_key
    for access_key, secret_key in (
        (former, "another-secret-of-root"),
        ("OTHERROOT", "another-secret-of-root"),
    ):
        env = {"MESHD_ROOT_ACCESS_KEY": access_key, "MESHD_ROOT_SECRET_KEY": secret_key}
        for replaced in (True, False):
            with Daemon.start(tmp_path, env=env) as daemon:
                told = daemon.output()
            line = f"the former pair is refused former={former} now={access_key}"
            assert (line in told) == replaced, told


def eventually(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it did not happen")


def test_a_user_taken_out_of_the_file_is_gone_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN, BOB))
    with Daemon.start(args=("--users", str(file))) as daemon:
        assert works(daemon, ANN)
        file.write_text(users(BOB))
        daemon.restart()
        assert not works(daemon, ANN)
        assert works(daemon, BOB)


def test_a_reload_leaves_alone_what_the_admin_api_made_and_disabled(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN, BOB))
    with Daemon.start(args=("--users", str(file)), workers=2) as daemon:
        daemon.request("POST", "/-/admin/users", b'{"user_id": "carol"}')
        carols = b'{"user_id": "carol", "access_key": "CAROLKEY", "secret_key": "carols-secret-key"}'
        daemon.request("POST", "/-/admin/keys", carols)
        carol = ("CAROLKEY", "carols-secret-key")
        assert daemon.request("PATCH", "/-/admin/keys/ANNKEY", b'{"enabled": false}').status == 200
        refused = daemon.request("DELETE", "/-/admin/keys/BOBKEY")
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (409, "NotChangeableHere")
        expected = (True, False, True)
        assert (works(daemon, carol), works(daemon, ANN), works(daemon, BOB)) == expected
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "users reloaded" in daemon.output())
        assert (works(daemon, carol), works(daemon, ANN), works(daemon, BOB)) == expected
        daemon.restart()
        assert (works(daemon, carol), works(daemon, ANN), works(daemon, BOB)) == expected
        file.write_text(users(ANN))
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: not works(daemon, BOB))
        assert works(daemon, carol)
        assert "carols-secret-key" not in daemon.output()


def test_a_node_of_an_earlier_version_keeps_its_users(tmp_path: Path) -> None:
    """As version 0.1 left it: one document a key under `identities/`."""
    root = {"MESHD_ROOT_ACCESS_KEY": "ROOTKEY", "MESHD_ROOT_SECRET_KEY": "roots-secret-key"}
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN))

    async def leave() -> None:
        control = EmbeddedControl(tmp_path / "data" / "control", ManualClock())
        for user_id, access_key, secret in (("u-ANNKEY", *ANN), ("root", "ROOTKEY", "roots-secret-key")):
            document = {
                "user_id": user_id,
                "display_name": user_id.title(),
                "email": "",
                "access_key": access_key,
                "secret_key": secret,
                "root": user_id == "root",
                "origin": "root" if user_id == "root" else "file",
            }
            await control.put(f"identities/{access_key}", json.dumps(document).encode())
        await control.put("buckets/anns", b'{"name": "anns", "owner": "u-ANNKEY", "created_ms": 17}')
        control.close()

    (tmp_path / "data").mkdir(mode=0o700)
    asyncio.run(leave())
    with Daemon.start(tmp_path / "data", args=("--users", str(file)), env=root) as daemon:
        with client(daemon, ANN) as s3:
            s3.put_object(Bucket="anns", Key="k", Body=b"hers")
        found = json.loads(daemon.request("GET", "/-/admin/users").body)["users"]
        assert [(user["user_id"], user["origin"]) for user in found] == [
            ("root", "root"),
            ("u-ANNKEY", "file"),
        ]


def test_a_bad_users_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN, BOB, ANN))
    with pytest.raises(
        DaemonFailedError, match=r"exit code 2(.|\n)*line 3: access_key ANNKEY is already"
    ) as refusal:
        Daemon.start(args=("--users", str(file)))
    assert ANN[1] not in str(refusal.value)


def test_settings_from_a_file_and_their_precedence(tmp_path: Path) -> None:
    file = tmp_path / "meshd.yaml"
    file.write_text("node-id: from-file\nlog_format: json\nregion: eu-test-1\nworkers: 1\n")
    with Daemon.start(args=("--config", str(file)), env={"MESHD_NODE_ID": "from-env"}) as daemon:
        assert "node=from-env" in daemon.output()
        with client(daemon, (daemon.access_key, daemon.secret_key), region_name="eu-test-1") as s3:
            s3.create_bucket(Bucket="here", CreateBucketConfiguration={"LocationConstraint": "eu-test-1"})
            assert s3.get_bucket_location(Bucket="here")["LocationConstraint"] == "eu-test-1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("worker: 2", "did you mean 'workers'"),
        ("- workers", "must be a mapping of settings"),
        ("workers: [", "not valid YAML"),
        ("frame-cache: {a: 1}", "frame-cache: expected a size"),
        ("body-timeout: soon", "body-timeout: "),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_bad_settings_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "meshd.yaml"
    file.write_text(text)
    with pytest.raises(DaemonFailedError, match=complaint) as refusal:
        Daemon.start(args=("--config", str(file)))
    assert "exit code 2" in str(refusal.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="not run here: takes root and a mount")
def test_credentials_of_origins_may_be_on_a_read_only_volume(tmp_path: Path) -> None:
    """As a Secret is in a pod."""
    volume = tmp_path / "origins"
    volume.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(volume)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    if mounted.returncode:
        missing("the right to mount", f"run as root with CAP_SYS_ADMIN ({mounted.stderr!r})")
    try:
        with Daemon.start(args=("--origin-credentials", str(volume))) as daemon:
            assert daemon.request("GET", "/-/ready").status == 200
    finally:
        subprocess.run(["umount", str(volume)], check=True, timeout=60)


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_in_any_output(tmp_path: Path, form: str) -> None:
    """Good and bad requests, a crash, a reload, at the most talkative level: no secret, no signature."""
    file = tmp_path / "users.yaml"
    file.write_text(users(ANN, BOB))
    arguments = ("--users", str(file), "--log-format", form, "--log-level", "debug")
    with Daemon.start(args=arguments) as daemon:
        root = (daemon.access_key, daemon.secret_key)
        with client(daemon, root) as s3:
            s3.create_bucket(Bucket="photos")
        urls = {version: presigned(daemon, root, version) for version in ("s3", "s3v4")}
        for url in urls.values():
            ask(url)
        made = json.loads(daemon.request("POST", "/-/sts", b'{"name": "pod"}').body)
        made_key = json.loads(daemon.request("POST", "/-/admin/keys", b'{"user_id": "root"}').body)
        own = b'{"user_id": "root", "access_key": "OWNKEY", "secret_key": "a-secret-of-ones-own"}'
        assert daemon.request("POST", "/-/admin/keys", own).status == 201
        for pair, token in ((("OWNKEY", "wrong-secret"), None), (("OWNKEY", "x" * 20), made["SessionToken"])):
            with client(daemon, pair, aws_session_token=token) as s3, pytest.raises(ClientError):
                s3.list_buckets()
            ask(url.replace("photos", "%00%ff"))
        with client(daemon, (ANN[0], "wrong-" + ANN[1])) as s3, pytest.raises(ClientError):
            s3.list_buckets()
        with client(daemon, BOB) as s3, pytest.raises(ClientError):
            s3.get_object(Bucket="photos", Key="none")
        daemon.signal_child("transform-0")
        os.kill(daemon.pid, signal.SIGHUP)
        eventually(lambda: "users reloaded" in daemon.output())
        daemon.stop()
        output = daemon.output()
    signatures = [signature_of(url) for url in urls.values()]
    assert [len(signature) for signature in signatures] == [28, 64]
    secrets = [root[1], ANN[1], BOB[1], "a-secret-of-ones-own", made_key["secret_key"], *signatures]
    for secret in (*secrets, made["SecretAccessKey"], made["SessionToken"]):
        assert secret not in output


def presigned(daemon: Daemon, pair: tuple[str, str], version: str) -> str:
    """The URL of an object that is not there, in signature version 2 (`s3`) or 4."""
    with client(daemon, pair, config=Config(signature_version=version)) as s3:
        url = s3.generate_presigned_url("get_object", {"Bucket": "photos", "Key": "none"})
    assert isinstance(url, str)
    return url


def signature_of(url: str) -> str:
    fields = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)
    return (fields.get("X-Amz-Signature") or fields["Signature"])[0]


def ask(url: str) -> None:
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", f"{where.path}?{where.query}")
        connection.getresponse().read()
