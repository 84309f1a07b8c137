"""The SDK and the `mesh` command over https: whom they believe, and what they say when they do not."""

from __future__ import annotations

import io
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk.cli import run
from meshsdk.client.http_connection import Connection
from meshsdk.client.settings import load_settings, parse_endpoint
from meshsdk.errors import ConfigurationError
from tests.support.certificates import Authority
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

MIB = 1 << 20
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "MESH_ENDPOINT": "https://h"}


@pytest.fixture(scope="module")
def secured() -> Iterator[Daemon]:
    with Daemon.start(tls=True, workers=2) as daemon:
        yield daemon


def client_of(daemon: Daemon, ca_cert: str) -> Client:
    return mesh.connect(
        daemon.endpoint,
        access_key=daemon.access_key,
        secret_key=daemon.secret_key,
        ca_cert=ca_cert,
        deadline=10,
    )


@pytest.fixture(scope="module")
def store(secured: Daemon) -> Iterator[Client]:
    with client_of(secured, secured.ca_cert) as client:
        client.create_bucket("photos")
        yield client


@pytest.mark.parametrize("size", [0, 10, 100_000, 9 * MIB])
def test_there_and_back(store: Client, size: int) -> None:
    body = os.urandom(size)
    store.put("photos", "k", body)
    assert store.get("photos", "k") == body


def test_connections_are_used_again(store: Client) -> None:
    """Session tickets arrive on their own: they must not make an idle connection look used."""
    store.put("photos", "again", b"x")
    first = store.transport.pool.acquire(5.0)
    store.transport.pool.release(first)
    for _ in range(5):
        assert store.get("photos", "again") == b"x"
    second = store.transport.pool.acquire(5.0)
    assert second is first
    store.transport.pool.release(second)


def test_nothing_begins_before_it_is_asked(secured: Daemon) -> None:
    connection = Connection(parse_endpoint(secured.endpoint, secured.ca_cert), 20, 5.0)
    assert connection.idle()
    assert not connection.began()
    connection.send([b"GET /-/healthy HTTP/1.1\r\nHost: h\r\n\r\n"])
    assert connection.receive().read() == b"healthy\n"
    connection.abort()
    connection.close()


def test_batches(secured: Daemon, store: Client) -> None:
    for number in range(24):
        file = io.BytesIO()
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        store.put("photos", f"train/c{number % 2}/{number}.png", file.getvalue())
    dataset = mesh.open("s3://photos/train", {"image": "png", "label": "@class"}, client=store)
    dataset = dataset.map(mesh.ops.decode("image"))
    with mesh.Loader(dataset, 8, output="numpy", rank=0, world=1) as loader:
        batches = list(loader)
    assert [batch["label"].shape for batch in batches] == [(8,)] * 3


def test_an_unknown_authority_is_refused_at_once(secured: Daemon, tmp_path: Path) -> None:
    with client_of(secured, str(Authority(tmp_path).cert)) as client, pytest.raises(ConfigurationError) as e:
        client.buckets()
    assert "--ca-cert or MESH_CA_BUNDLE" in str(e.value)


def test_a_name_that_is_not_in_the_certificate() -> None:
    with Daemon.start(tls=True) as daemon:
        assert daemon.authority is not None
        assert daemon.pair is not None
        daemon.authority.issue(names=["elsewhere.example.com"])
        daemon.restart()
        with client_of(daemon, daemon.ca_cert) as client, pytest.raises(ConfigurationError, match="mismatch"):
            client.buckets()


def test_https_to_a_plain_port(daemon: Daemon) -> None:
    endpoint = daemon.endpoint.replace("http:", "https:")
    with (
        mesh.connect(endpoint, access_key="k", secret_key="s", deadline=10) as client,
        pytest.raises(ConfigurationError, match="http://"),
    ):
        client.buckets()


def test_bundles_that_are_none(secured: Daemon, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("nothing.pem", "empty.pem"):
        with (
            client_of(secured, str(tmp_path / name)) as client,
            pytest.raises(ConfigurationError, match="CA bundle"),
        ):
            client.buckets()


@pytest.mark.parametrize(
    ("env", "argument", "bundle"),
    [
        ({}, None, ""),
        ({"AWS_CA_BUNDLE": "a"}, None, "a"),
        ({"AWS_CA_BUNDLE": "a", "MESH_CA_BUNDLE": "m"}, None, "m"),
        ({"AWS_CA_BUNDLE": "a", "MESH_CA_BUNDLE": "m"}, "given", "given"),
    ],
)
def test_where_the_bundle_comes_from(env: dict[str, str], argument: str | None, bundle: str) -> None:
    assert load_settings(env=KEYS | env, ca_cert=argument).endpoint.ca_bundle == bundle


@pytest.fixture
def command(
    secured: Daemon, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("MESH_ENDPOINT", secured.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", secured.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secured.secret_key)

    def call(*arguments: object) -> tuple[int, str]:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, "".join(capfd.readouterr())

    return call


def test_the_command(command: Any, secured: Daemon, store: Client, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(9 * MIB))
    assert command("cp", "--ca-cert", secured.ca_cert, source, "s3://photos/big")[0] == 0
    assert command("--ca-cert", secured.ca_cert, "cp", "s3://photos/big", target)[0] == 0
    assert target.read_bytes() == source.read_bytes()
    code, said = command("ls", "--json")
    assert (code, "certificate verification failed" in said) == (2, True)


def test_the_command_reads_the_environment(
    command: Any, secured: Daemon, store: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MESH_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.setenv(name, secured.ca_cert)
        code, said = command("ls", "--json")
        assert code == 0, said
        assert "photos" in {json.loads(line)["bucket"] for line in said.splitlines()}
        monkeypatch.delenv(name)
