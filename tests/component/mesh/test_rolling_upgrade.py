"""From an earlier release to this one, as docs/operations.md, "Upgrade", says: nodes of both serve together,
and what the earlier one kept is there afterwards. Real daemons, a real etcd; the earlier code is of this
repository's history.

Law: nothing is forgiven but what boto3 tries again by itself, behind a balancer that knows which nodes accept
connections.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support import training_script
from tests.support.bounded_wait import await_end, await_true
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon
from tests.support.earlier_release import EARLIER, FORMER, code_path, unpack
from tests.support.fork_server import outcome_of
from tests.support.front import Front
from tests.support.one_of_each import SAMPLES, complete_uploads, fill, seen
from tests.support.required import require_etcd
from tests.support.training_script import EPOCHS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Told = Callable[..., dict[str, str]]

require_etcd()

RELEASES = {"former": (FORMER, "2"), "earlier": (EARLIER, "1")}
"""With the version of `decode` that a job pins which is to be resumed: there is a later one since."""
CROP = "1"
"""The version of `random_resized_crop` in both."""
FLAGS = ("--frame-cache", "1MiB")
"""Room for one batch: they are made anew, by whichever release a node is of."""
NODES = ("n1", "n2", "n3")
STEPS = SAMPLES // training_script.BATCH
BUSY, BUSY_VERSIONS = "busy", "busy-versions"
KEYS = 11
PAUSE = 0.2
SIZES = (0, 10, 3000, 60_000, 400_000)
RETRIES = Config(s3={"addressing_style": "path"})
"""Those of boto3."""


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Which of them; a test may name those that it is about."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkout(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(RELEASES[release][0], tmp_path_factory.mktemp(release), "meshd", "sdk")


class Script:
    """`training_script.py`, run by the SDK of a checkout, at a mesh or a node."""

    def __init__(self, checkout: Path, environment: dict[str, str]) -> None:
        env = os.environ | environment | {"PYTHONPATH": code_path(checkout)}
        words = [sys.executable, "-P", training_script.__file__]  # -P: what lies beside it is no module of it
        self._process = subprocess.Popen(
            words, env=env, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, verb: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([verb, *arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the script has ended with {self._process.wait(60)} at {verb}"
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=60)


class Busy:
    """A boto3 client that does all kinds of writes in a thread, and reads what it wrote.

    `last` is what was acknowledged for each key (None: deleted), `versions` for each version; `failed`, what
    boto3 did not hide, or what was read instead."""

    def __init__(self, connect: Callable[[], Any], name: str) -> None:
        self._connect, self._name, self._s3 = connect, name, connect()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"busy-{name}")
        self.last: dict[str, bytes | None] = {}
        self.versions: dict[tuple[str, str], bytes] = {}
        self.failed: list[str] = []
        self.rounds = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        await_end(self._thread)
        self._s3.close()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            if self.rounds % 8 == 7:  # or it would stay with one node for as long as that runs
                self._s3.close()
                self._s3 = self._connect()
            try:
                self._round(self.rounds)
            except (BotoCoreError, ClientError) as error:
                self.failed.append(f"{self._name}, round {self.rounds}: {error}")
            self.rounds += 1

    def _round(self, number: int) -> None:
        key, body = f"{self._name}/{number % KEYS}", os.urandom(SIZES[number % len(SIZES)])
        put = self._upload if number % 4 == 3 else self._put
        put(key, body)
        self.last[key] = body
        self._check(key)
        if number % 4 == 0:
            made = self._s3.put_object(Bucket=BUSY_VERSIONS, Key=key, Body=body)["VersionId"]
            self.versions[key, made] = body
        if number % 3 == 0:
            gone = f"{self._name}/{number * 7 % KEYS}"
            self._s3.delete_object(Bucket=BUSY, Key=gone)
            self.last[gone] = None
            self._check(gone)
        if number % 5 == 0:
            listed = self._s3.list_objects_v2(Bucket=BUSY, Prefix=f"{self._name}/")
            found = {each["Key"]: each["Size"] for each in listed.get("Contents", [])}
            wanted = {name: len(wrote) for name, wrote in self.last.items() if wrote is not None}
            if found != wanted:
                self.failed.append(f"{self._name} lists {found}, not {wanted}")

    def _put(self, key: str, body: bytes) -> None:
        self._s3.put_object(Bucket=BUSY, Key=key, Body=body)

    def _upload(self, key: str, body: bytes) -> None:
        name = {"Bucket": BUSY, "Key": key}
        upload = self._s3.create_multipart_upload(**name)["UploadId"]
        part = self._s3.upload_part(**name, UploadId=upload, PartNumber=1, Body=body)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        self._s3.complete_multipart_upload(**name, UploadId=upload, MultipartUpload=parts)

    def _check(self, key: str) -> None:
        if (found := _read(self._s3, Bucket=BUSY, Key=key)) != self.last[key]:
            self.failed.append(f"{self._name} reads {found and len(found)} bytes of {key}: another content")

    def check_at(self, node: Daemon) -> None:
        """Every acknowledged write is there, as a node says."""
        s3 = node.client(config=RETRIES)
        for key, body in self.last.items():
            assert _read(s3, Bucket=BUSY, Key=key) == body, (node, key)
        listed = s3.list_object_versions(Bucket=BUSY_VERSIONS, Prefix=f"{self._name}/").get("Versions", [])
        # A write that was tried again may have made a version that nobody was told of.
        assert self.versions.keys() <= {(each["Key"], each["VersionId"]) for each in listed}
        for (key, version), body in self.versions.items():
            assert _read(s3, Bucket=BUSY_VERSIONS, Key=key, VersionId=version) == body, (node, key, version)
        s3.close()


def _read(s3: Any, **name: str) -> bytes | None:
    try:
        return bytes(s3.get_object(**name)["Body"].read())
    except s3.exceptions.NoSuchKey:
        return None


@pytest.fixture
def told(release: str, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Sets what a training script is told by its environment, here too; returns it."""

    def tell(node: Daemon, *endpoints: str) -> dict[str, str]:
        variables = {
            "MESH_ENDPOINT": ",".join(endpoints or [node.endpoint]),
            "AWS_ACCESS_KEY_ID": node.access_key,
            "AWS_SECRET_ACCESS_KEY": node.secret_key,
            "TRAINING_DECODE": RELEASES[release][1],
            "TRAINING_CROP": CROP,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return variables

    return tell


def fsck(data_dir: Path) -> dict[str, Any]:
    """What this release's `meshd fsck` says of a stopped node's directory."""
    done = outcome_of("fsck", "--json", "--data-dir", str(data_dir))
    assert done.returncode == 0, done
    return dict(json.loads(done.stdout))


def accepting(mesh: DaemonCluster) -> list[tuple[str, int]]:
    """Addresses of the nodes that accept connections."""
    found = []
    for node in mesh.nodes.values():
        place = urlsplit(node.endpoint)
        address = str(place.hostname), int(place.port or 0)
        with suppress(OSError), socket.create_connection(address, timeout=2):
            found.append(address)
    return found


@contextmanager
def busy_clients(mesh: DaemonCluster) -> Iterator[list[Busy]]:
    """Two, behind a balancer. Nothing may have failed them in the end."""
    root = mesh["n1"].client()
    for bucket in (BUSY, BUSY_VERSIONS):
        root.create_bucket(Bucket=bucket)
    root.put_bucket_versioning(Bucket=BUSY_VERSIONS, VersioningConfiguration={"Status": "Enabled"})

    with Front(lambda: accepting(mesh)) as front:
        connect = partial(mesh["n1"].client, endpoint_url=front.endpoint, config=RETRIES)
        with Busy(connect, "a") as one, Busy(connect, "b") as other:
            yield [one, other]
    assert one.failed + other.failed == []


def upgrade(mesh: DaemonCluster, node_id: str, clients: list[Busy], steps: Callable[[], int]) -> None:
    """Stop a node, start this release in its place once the others have served the clients for a while, and
    wait until all is as it was."""
    assert mesh[node_id].stop() == 0
    rounds, step = [busy.rounds for busy in clients], steps()
    await_true(lambda: all(busy.rounds > was + 1 for busy, was in zip(clients, rounds, strict=True)))
    await_true(lambda: steps() > step)
    mesh[node_id].checkout = None
    mesh.up(node_id)
    mesh.await_map(lambda found: not found.is_rebalancing and all(each.state == "up" for each in found.nodes))


def check_training(training: dict[str, Any], expected: list[list[str]]) -> None:
    """Whatever went on meanwhile, each step was the one of an undisturbed epoch."""
    assert training["error"] == ""
    for epoch, step, digest in training["steps"]:
        assert digest == expected[epoch][step], (epoch, step)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("release", ["former"], indirect=True)  # one release back, as CHANGELOG.md promises
def test_a_mesh_is_taken_over_node_by_node(checkout: Path, tmp_path: Path, told: Told) -> None:
    with DaemonCluster.start(3, args=FLAGS, checkout=checkout) as mesh:
        kept = fill(mesh["n1"], tmp_path)
        with Script(checkout, told(mesh["n1"], *mesh.endpoints.values())) as script:
            expected = [script.ask("epoch", number) for number in range(EPOCHS)]
            assert len({digest for epoch in expected for digest in epoch}) == EPOCHS * STEPS
            assert script.ask("checkpoint", str(tmp_path), 1, 2) == expected[1][:2]
            before = seen(mesh["n1"], kept)
            script.ask("begin")
            with busy_clients(mesh) as clients:
                for number, node_id in enumerate(mesh.nodes):
                    upgrade(mesh, node_id, clients, lambda: int(script.ask("steps")))
                    assert training_script.epoch(number) == expected[number]  # by the present SDK
            check_training(script.ask("end"), expected)
            for node in mesh.nodes.values():
                assert seen(node, kept) == before
                for client in clients:
                    client.check_at(node)
            assert training_script.resume(str(tmp_path)) == [expected[1][2:]] * 2
            complete_uploads(mesh["n2"], kept)
            check_earlier_sdk(script, str(tmp_path), expected)
            if (checkout / "sdk" / "meshsdk" / "keeping.py").exists():  # its command for plans that are kept
                code, said = script.ask("command", "plan", "ls", "--json")
                assert (code, kept.plan in said) == (0, True), said
        assert mesh["n1"].stop() == 0
        assert fsck(mesh["n1"].data_dir)["clean"]
        for client in clients:  # the others have their copies
            client.check_at(mesh["n2"])
        for node_id in ("n2", "n3"):
            assert mesh[node_id].stop() == 0
            assert fsck(mesh[node_id].data_dir)["clean"]
        assert "Traceback" not in mesh.output()


def check_earlier_sdk(script: Script, place: str, expected: list[list[str]]) -> None:
    """One release back still talks to a mesh of this one: batches, objects, the command."""
    assert script.ask("epoch", 2) == expected[2]
    assert script.ask("resume", place) == [expected[1][2:]] * 2
    assert script.ask("put", "plain", "by-the-earlier-sdk", "text")
    assert script.ask("objects", "plain", "") == training_script.objects("plain", "")
    code, said = script.ask("command", "cluster", "status", "--json")
    assert code == 0, said
    assert {node["id"]: node["state"] for node in json.loads(said)["nodes"]} == dict.fromkeys(NODES, "up")


@pytest.mark.sampled(2)
def test_a_lone_node_is_taken_over_and_given_back(checkout: Path, tmp_path: Path, told: Told) -> None:
    """The control store is the one in its directory."""
    node = Daemon(tmp_path / "node", FLAGS, {}, 1)
    node.checkout = checkout
    try:
        node.up()
        kept = fill(node, tmp_path)
        with Script(checkout, told(node)) as script:
            expected = script.ask("epoch", 1)
            assert script.ask("checkpoint", str(tmp_path), 1, 2) == expected[:2]
            before = seen(node, kept)
            assert node.stop() == 0
            assert fsck(node.data_dir)["clean"]
            node.checkout = None
            node.up()
            assert seen(node, kept) == before
            assert training_script.resume(str(tmp_path)) == [expected[2:]] * 2
            complete_uploads(node, kept)
            node.client().put_object(Bucket="plain", Key="written-since", Body=b"now" * 1000)
            after = seen(node, kept)
            assert node.stop() == 0
            node.checkout = checkout
            node.up()
            assert seen(node, kept) == after
            assert script.ask("epoch", 1) == expected
        assert "Traceback" not in node.output()
    finally:
        node.close()
