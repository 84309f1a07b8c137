"""Keys that end under a training job: at their time, or revoked; renewed in a file, late, or never."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshd.util.clock import CLOCK_SHIFT_ENV, write_clock_shift
from meshsdk import ops
from meshsdk.errors import AccessError, DeadlineError
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SAMPLES, BATCH = 100, 4


class World:
    """A node whose clock can be set, and a file with keys of its own making."""

    def __init__(self, daemon: Daemon, clock: Path, file: Path) -> None:
        self.daemon, self.file, self._clock = daemon, file, clock

    def begin(self) -> dict[str, str]:
        """Keys of which five minutes are left."""
        self.set_clock(-600)
        return self.write()

    def write(self) -> dict[str, str]:
        """New keys, in the file."""
        answer = self.daemon.request("POST", "/-/sts", b'{"duration_seconds": 900}')
        assert answer.status == 200
        beside = self.file.with_suffix(".new")
        beside.write_bytes(answer.body)
        beside.replace(self.file)
        made: dict[str, str] = json.loads(answer.body)
        return made

    def end(self) -> None:
        """Their time is over."""
        self.set_clock(400)

    def revoke(self, query: str = "") -> None:
        root = self.daemon.access_key
        assert self.daemon.request("DELETE", f"/-/admin/keys/{root}/sessions{query}").status == 200

    def exchange(self) -> None:
        """New keys, five minutes younger, are in the file when those before are revoked, for a loader asks
        all the time."""
        self.set_clock(-300)
        self.write()
        between = datetime.now(UTC) - timedelta(seconds=450)
        self.revoke(f"?before={between:%Y-%m-%dT%H:%M:%SZ}")

    def set_clock(self, seconds: int) -> None:
        write_clock_shift(self._clock, seconds)


@pytest.fixture(scope="module", name="node")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    clock = tmp_path_factory.mktemp("clock") / "shift"
    write_clock_shift(clock, 0)
    with Daemon.start(env={CLOCK_SHIFT_ENV: str(clock)}) as daemon:
        with mesh.connect(
            daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key
        ) as root:
            root.create_bucket("ending")
            for number in range(SAMPLES):
                root.put("ending", f"{number:03}.bin", np.full(4, number, np.uint8).tobytes())
        yield daemon, clock


@pytest.fixture
def world(node: tuple[Daemon, Path], tmp_path: Path) -> World:
    return World(*node, tmp_path / "pod.json")


@pytest.fixture
def renewed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Its keys are those of the environment, by their file."""
    world.begin()
    monkeypatch.setenv("MESH_CREDENTIALS_FILE", str(world.file))
    return world


def loader_of(client: mesh.Client, **more: Any) -> mesh.Loader:
    ds = mesh.open("s3://ending/", fields={"x": "bin"}, client=client).map(
        ops.frombuffer("x", "uint8", shape=[4])
    )
    return mesh.Loader(ds, BATCH, seed=3, output="numpy", prefetch_bytes=1 << 12, **more)


def train(loader: mesh.Loader, after_five: Callable[[], object]) -> list[int]:
    """The samples of an epoch; something happens after five batches."""
    found: list[int] = []
    for number, batch in enumerate(loader):
        found += batch["x"][:, 0].tolist()
        if number == 4:
            after_five()
    return found


def assert_stopped(loader: mesh.Loader) -> None:
    """It stands behind the five batches, or behind the one that was requested while the fifth was used."""
    assert loader.step in (5, 6)


def test_keys_that_are_renewed_as_they_end_are_taken_at_once(renewed: World) -> None:
    def both() -> None:
        renewed.end()
        renewed.write()

    with mesh.connect(renewed.daemon.endpoint) as client, loader_of(client) as loader:
        assert sorted(train(loader, both)) == list(range(SAMPLES))
        assert 1 <= loader.stats().retries <= 4  # what was under way


def test_those_of_a_file_that_is_late_are_waited_for(renewed: World) -> None:
    timers: list[threading.Timer] = []

    def end() -> None:
        renewed.end()
        timers.append(threading.Timer(1.5, renewed.write))
        timers[0].start()

    with mesh.connect(renewed.daemon.endpoint) as client, loader_of(client) as loader:
        assert sorted(train(loader, end)) == list(range(SAMPLES))
        assert 2 <= loader.stats().retries < 50
    await_end(*timers)


def test_a_file_that_nobody_renews_is_named(renewed: World) -> None:
    with mesh.connect(renewed.daemon.endpoint) as client, loader_of(client, deadline=5.0) as loader:
        with pytest.raises(
            DeadlineError, match=r"expired.*pod\.json has no newer keys: it was last written at 20"
        ):
            train(loader, renewed.end)
        assert isinstance(loader.state_dict(), dict)
        assert_stopped(loader)
        left = SAMPLES - loader.step * BATCH
        renewed.write()
        assert len(train(loader, lambda: None)) == left  # nothing is lost


def test_keys_that_nobody_can_renew_end_the_job_in_one_sentence(world: World) -> None:
    made = world.begin()
    names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
    key, secret, token = (made[name] for name in names)
    client = mesh.connect(world.daemon.endpoint, access_key=key, secret_key=secret, session_token=token)
    with client, loader_of(client) as loader:
        with pytest.raises(AccessError, match=r"meshd admin sts.*MESH_CREDENTIALS_FILE") as refused:
            train(loader, world.end)
        assert loader.stats().retries <= 4  # the node's clock jumped: it may have ended what was idle
        assert_stopped(loader)
    assert secret not in repr(refused.value)
    assert token not in repr(refused.value)


def test_revoked_ones_are_taken_from_the_file_anew_and_not_waited_for(renewed: World) -> None:
    with mesh.connect(renewed.daemon.endpoint) as client, loader_of(client) as loader:
        assert sorted(train(loader, renewed.exchange)) == list(range(SAMPLES))
        with pytest.raises(AccessError, match=r"revoked.*pod\.json has no newer keys"):
            train(loader, renewed.revoke)
        assert loader.stats().retries <= 8


def test_other_calls_take_renewed_keys_too(renewed: World) -> None:
    with mesh.connect(renewed.daemon.endpoint) as client:
        client.put("ending", "extra/1", b"one")
        renewed.end()
        renewed.write()
        client.put("ending", "extra/2", b"two")
        renewed.revoke()
        with pytest.raises(AccessError, match=r"pod\.json has no newer keys"):
            client.get("ending", "extra/2")
        renewed.file.write_text("{")
        with pytest.raises(AccessError, match=r"pod\.json cannot be used"):
            client.get("ending", "extra/2")
        renewed.write()
        assert client.get("ending", "extra/2") == b"two"
        client.delete("ending", "extra/1")
        client.delete("ending", "extra/2")
