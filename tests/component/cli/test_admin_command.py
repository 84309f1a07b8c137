"""`meshd admin` as people and scripts run it, against a node with several workers, over http and https."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from botocore.exceptions import ClientError
from click.testing import CliRunner

from meshd.cli import meshd
from tests.support.daemons import Daemon
from tests.support.interpreters import program
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READ_TRAIN = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/train/*"},
        {
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": "arn:aws:s3:::photos",
            "Condition": {"StringLike": {"s3:prefix": "train/*"}},
        },
    ],
}


class Done(Protocol):
    """What a run left."""

    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...
    @property
    def returncode(self) -> int: ...


@dataclass(frozen=True)
class Command:
    """`meshd admin` with the root keys of a node in its environment, called in this process."""

    daemon: Daemon
    folder: Path

    def environment(self) -> dict[str, str]:
        return {
            "MESHD_ENDPOINT": self.daemon.endpoint,
            "MESHD_ROOT_ACCESS_KEY": self.daemon.access_key,
            "MESHD_ROOT_SECRET_KEY": self.daemon.secret_key,
        }

    def run(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        cleared = {name: None for name in os.environ if name.startswith(("MESH", "AWS_"))}
        given = self.environment() if env is None else env
        with contextlib.chdir(self.folder):
            done = CliRunner(env={**cleared, **given}).invoke(meshd, ["admin", *words], input=stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, returncode=done.exit_code)

    def json(self, *words: str, **options: Any) -> Any:
        done = self.run(*words, "--json", **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refusal(self, *words: str, **options: Any) -> str:
        done = self.run(*words, **options)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.stderr


class Subprocess(Command):
    """The same as a script runs it."""

    def run(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("MESH", "AWS_"))
        }
        return subprocess.run(
            [program("meshd"), "admin", *words],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=inherited | (self.environment() if env is None else env),
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start(workers=3) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket="photos")
            for key in ("train/1", "train/2", "test/1"):
                client.put_object(Bucket="photos", Key=key, Body=key.encode())
        yield running


@pytest.fixture
def command(node: Daemon, tmp_path: Path) -> Command:
    return Command(node, tmp_path)


@pytest.fixture
def script(node: Daemon, tmp_path: Path) -> Command:
    return Subprocess(node, tmp_path)


def client_of(node: Daemon, key: dict[str, str]) -> Any:
    options = {"aws_access_key_id": key["access_key"], "aws_secret_access_key": key["secret_key"]}
    return contextlib.closing(node.client(**options))


def code(call: Any, **arguments: Any) -> str:
    try:
        call(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def codes_of_all_workers(node: Daemon, key: dict[str, str]) -> set[str]:
    """Each request has a connection of its own, and the kernel deals these out to the workers."""
    with contextlib.closing(Wire(node.endpoint, key["access_key"], key["secret_key"])) as wire:
        answers = [wire.call("GET", "/") for _ in range(24)]
    return {"" if answer.status == 200 else answer.code for answer in answers}


def test_from_nothing_to_a_pod_that_may_read_one_prefix_and_back(script: Command, node: Daemon) -> None:
    command = script
    (command.folder / "read-train.json").write_text(json.dumps(READ_TRAIN))
    made = command.json("user", "add", "ann", "--name", "Ann Example", "--email", "ann@example.org")
    assert (made["user_id"], made["display_name"], made["keys"]) == ("ann", "Ann Example", [])
    key = command.json("key", "add", "ann", "--name", "laptop")
    with client_of(node, key) as client:
        client.create_bucket(Bucket="anns")
        assert code(client.get_object, Bucket="photos", Key="train/1") == "AccessDenied"
        command.json("policy", "put", "read-train", "read-train.json")
        command.json("policy", "attach", "read-train", "--user", "ann")
        assert client.get_object(Bucket="photos", Key="train/1")["Body"].read() == b"train/1"
        assert code(client.get_object, Bucket="photos", Key="test/1") == "AccessDenied"
        assert code(client.put_object, Bucket="photos", Key="train/1") == "AccessDenied"
        client.put_object(Bucket="anns", Key="k", Body=b"")
        # bound to the policy, the key may not even use what ann owns
        command.json("policy", "attach", "read-train", "--key", key["access_key"])
        assert code(client.get_object, Bucket="anns", Key="k") == "AccessDenied"
        assert client.get_object(Bucket="photos", Key="train/2")["Body"].read() == b"train/2"
        listed = client.list_objects_v2(Bucket="photos", Prefix="train/")
        assert [entry["Key"] for entry in listed["Contents"]] == ["train/1", "train/2"]
        assert code(client.list_objects_v2, Bucket="photos") == "AccessDenied"
        command.json("policy", "detach", "read-train", "--key", key["access_key"])
        client.delete_object(Bucket="anns", Key="k")
        client.delete_bucket(Bucket="anns")
    shown = command.json("user", "show", "ann")
    assert (shown["policies"], shown["buckets"]) == (["read-train"], [])
    assert [one["access_key"] for one in shown["keys"]] == [key["access_key"]]
    assert "attached to 1 user" in command.refusal("policy", "rm", "read-train", "--yes")
    command.json("policy", "detach", "read-train", "--user", "ann")
    command.json("policy", "rm", "read-train", "--yes")
    command.json("user", "rm", "ann", "--yes")
    assert codes_of_all_workers(node, key) == {"InvalidAccessKeyId"}
    assert "there is no user 'ann'" in command.refusal("user", "show", "ann")


def test_a_disabled_key_is_refused_by_every_worker_at_once(command: Command, node: Daemon) -> None:
    command.json("user", "add", "bob")
    key = command.json("key", "add", "bob")
    assert codes_of_all_workers(node, key) == {""}
    command.json("key", "disable", key["access_key"])
    assert codes_of_all_workers(node, key) == {"InvalidAccessKeyId"}
    command.json("key", "enable", key["access_key"])
    assert codes_of_all_workers(node, key) == {""}
    command.json("key", "rm", key["access_key"], "--yes")
    assert codes_of_all_workers(node, key) == {"InvalidAccessKeyId"}
    command.json("user", "rm", "bob", "--yes")


def test_tables_are_for_people_and_show_no_secret_twice(command: Command) -> None:
    done = command.run("user", "add", "carol")
    assert "meshd admin key add carol" in done.stderr
    made = command.run("key", "add", "carol", "--name", "laptop")
    secret = next(word for word in made.stdout.split() if word.startswith("mss-"))
    assert "not shown again" in made.stderr
    for words in (("user", "ls"), ("user", "show", "carol"), ("key", "ls"), ("key", "ls", "--user", "carol")):
        shown = command.run(*words)
        assert shown.returncode == 0, shown.stderr
        assert "carol" in shown.stdout
        assert secret not in shown.stdout
        assert secret not in json.dumps(command.json(*words))
    command.json("user", "rm", "carol", "--yes")


def test_a_key_of_ones_own_has_its_secret_from_stdin(command: Command, node: Daemon) -> None:
    command.json("user", "add", "dora")
    words = ("key", "add", "dora", "--access-key", "DORASOWN")
    made = command.json(*words, stdin="doras-own-secret\n")
    assert (made["access_key"], made["secret_key"]) == ("DORASOWN", "doras-own-secret")
    assert codes_of_all_workers(node, made) == {""}
    assert "is taken" in command.refusal(*words, stdin="another-secret\n")
    assert "8 to 128" in command.refusal("key", "add", "dora", "--access-key", "DORA2", stdin="short\n")
    command.json("user", "rm", "dora", "--yes")
    assert "doras-own-secret" not in node.output()


def test_users_who_own_buckets_are_removed_by_force_only(command: Command, node: Daemon) -> None:
    command.json("user", "add", "eve")
    with client_of(node, command.json("key", "add", "eve")) as client:
        client.create_bucket(Bucket="eves")
    refusal = command.refusal("user", "rm", "eve", "--yes")
    assert "owns 1 bucket: eves" in refusal
    assert "force" in refusal
    command.json("user", "rm", "eve", "--yes", "--force")
    with contextlib.closing(node.client()) as root:
        root.delete_bucket(Bucket="eves")


def test_names_with_marks_are_found_again(command: Command) -> None:
    for name in ("ann@example.org", "a+b", "x.y-z_0"):
        command.json("user", "add", name)
        assert command.json("user", "show", name)["user_id"] == name
        assert command.json("user", "set", name, "--email", "ä@example.org")["email"] == "ä@example.org"
        command.json("user", "rm", name, "--yes")


def test_lists_go_on_over_pages(command: Command, node: Daemon) -> None:
    for number in range(7):
        node.request("POST", "/-/admin/users", json.dumps({"user_id": f"page-{number}"}).encode())
    seen: list[str] = []
    after, pages = "", 0
    while True:
        page = json.loads(node.request("GET", f"/-/admin/users?after={after}&limit=3").body)
        seen += [user["user_id"] for user in page["users"]]
        after, pages = page["next"], pages + 1
        if not after:
            break
    assert seen == sorted(seen)
    assert [name for name in seen if name.startswith("page-")] == [f"page-{number}" for number in range(7)]
    assert pages == -(-len(seen) // 3)
    assert [user["user_id"] for user in command.json("user", "ls")] == seen


def test_refusals_say_what_to_do(command: Command, node: Daemon, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"Version": "2012-10-17", "Statement": {"Effect": "Alow"}}')
    (tmp_path / "keys.json").write_text('{"access_key": "X"}')
    none: dict[str, str] = {}
    wrong = {"MESHD_ROOT_ACCESS_KEY": node.access_key, "MESHD_ROOT_SECRET_KEY": "x" * 20}
    for words, options, told in (
        (("user", "rm", "root", "--yes"), {}, "the user root is the node's own"),
        (("user", "rm", "root"), {}, "Add --yes"),
        (("user", "add", "root"), {}, "the user root exists already"),
        (("user", "add", "a/b"), {}, "letters, digits or"),
        (("key", "add", "nobody"), {}, "there is no user 'nobody'"),
        (("key", "disable", node.access_key), {}, "is the node's root key"),
        (("key", "rm", "NONE", "--yes"), {}, "there is no access key 'NONE'"),
        (("policy", "attach", "none", "--user", "root"), {}, "there is no policy 'none'"),
        (("policy", "attach", "none"), {}, "either --user USER_ID, --key ACCESS_KEY or --role NAME"),
        (("policy", "put", "bad", "bad.json"), {}, "Statement"),
        (("sts", "--duration", "37h"), {}, "36 hours"),
        (("sts", "--duration", "soon"), {}, "such as 15m"),
        (("user", "ls"), {"env": none}, "set MESHD_ROOT_ACCESS_KEY"),
        (("user", "ls", "--endpoint", "ftp://x"), {}, "is not an endpoint"),
        (("user", "ls", "--endpoint", "http://127.0.0.1:1"), {}, "is the node running?"),
        (("user", "ls", "--keys", "keys.json"), {}, "contains no key pair"),
        (("user", "ls", "--data-dir", "."), {}, "MESHD_ROOT_ACCESS_KEY"),
        (("user", "ls", "--ca-cert", "none.pem"), {}, "no file none.pem"),
        (("user", "ls", "--endpoint", node.endpoint), {"env": wrong}, "SignatureDoesNotMatch"),
    ):
        assert told in command.refusal(*words, **options), words


def test_only_root_with_permanent_keys_administers(command: Command, node: Daemon) -> None:
    command.json("user", "add", "finn")
    key = command.json("key", "add", "finn")
    (command.folder / "finn.json").write_text(json.dumps(key))
    refusal = command.refusal("user", "ls", "--keys", "finn.json")
    assert "only root may use the admin API" in refusal
    (command.folder / "pod.json").write_text(command.run("sts").stdout)
    assert "temporary credentials may not use the admin API" in command.refusal(
        "user", "ls", "--keys", "pod.json"
    )
    assert command.json("whoami", "--keys", "finn.json")["user_id"] == "finn"
    assert command.json("whoami", "--keys", "pod.json")["temporary"]
    command.json("user", "rm", "finn", "--yes")


@pytest.mark.parametrize("words", [[], ["user"], ["key"], ["policy"], ["sts"], ["key", "add"]])
def test_help_teaches(command: Command, words: list[str]) -> None:
    done = command.run(*words, "--help", env={})
    assert done.returncode == 0
    if len(words) < 2:
        assert "meshd admin" in done.stdout.partition("Usage:")[2].partition("\n")[2]  # an example


def test_over_https_it_believes_the_authority_it_is_told(tmp_path: Path) -> None:
    with Daemon.start(tls=True) as node:
        command = Command(node, tmp_path)
        found = command.json("user", "ls", "--ca-cert", node.ca_cert)
        assert [user["user_id"] for user in found] == ["root"]
        assert command.json("whoami", env=command.environment() | {"MESH_CA_BUNDLE": node.ca_cert})["root"]
        assert json.loads(command.run("sts", "--ca-cert", node.ca_cert).stdout)["Version"] == 1
        assert "give --ca-cert FILE" in command.refusal("user", "ls")


def test_keys_from_the_data_directory(tmp_path: Path) -> None:
    from tests.support.daemons import Daemon as Node

    class Own(Node):
        """A node that makes its own root keys."""

        def up(self, timeout: float = 60.0) -> None:
            self.env.pop("MESHD_ROOT_ACCESS_KEY", None)
            self.env.pop("MESHD_ROOT_SECRET_KEY", None)
            super().up(timeout)

    with Own.start(tmp_path / "data") as node:
        command = Command(node, tmp_path)
        env = {"MESHD_ENDPOINT": node.endpoint}
        found = command.json("user", "ls", "--data-dir", "data", env=env)
        assert [user["user_id"] for user in found] == ["root"]
