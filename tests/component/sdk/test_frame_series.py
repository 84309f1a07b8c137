"""Frames of several steps in one response: the same batches, whatever befalls it, and fewer requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk.client.transport import InFlightRequests
from meshsdk.errors import BadSampleError, SnapshotChangedError
from meshwire.formats.token_index import encode_token_index
from tests.component.sdk.test_sdk_scripted import labels, loader, scripted_server, undisturbed, wait_for
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from tests.component.sdk.test_sdk_scripted import ScriptedMesh

__all__ = ["scripted_server", "undisturbed"]
TEXTS, LENGTH = 9000, 64


@pytest.fixture(autouse=True)
def with_series(server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("meshsdk.loader.series_planner._LONGEST", 1000.0)  # however busy this machine is
    # Another test of this process may have given it a tracer provider, for ever; traced loops have no series.
    monkeypatch.setattr("meshsdk.loader.prefetch_worker.start_batch_traces", lambda: None)
    server.series = 32
    yield
    server.series = 1


def in_order(server: ScriptedMesh, batch: int) -> list[int]:
    server.series = 1
    with loader(server, batch) as one:
        found = labels(one)
    server.series = 32
    server.asked.clear()
    return found


def test_an_epoch_of_small_batches_takes_few_requests(server: ScriptedMesh) -> None:
    wanted = in_order(server, 1)
    with loader(server, 1) as one:
        assert labels(one) == wanted
        assert sum(one.stats().frames.values()) == 103
    assert len(server.asked) < 40
    server.asked.clear()
    with loader(server, 1, connections=1) as one:
        assert labels(one) == wanted
    assert len(server.asked) == 9  # 1, 3, 12, 16, 2 × 32, 4, 2, 1


@pytest.mark.parametrize("fault", ["cut", "flip", "busy", "silent"])
def test_whatever_befalls_a_response_the_batches_are_the_same(server: ScriptedMesh, fault: str) -> None:
    wanted = in_order(server, 1)
    for at in (0, 3, 5, 7):
        server.faults.extend([*[None] * at, fault, None, fault])
        with loader(server, 1, deadline=30.0) as one:
            assert labels(one) == wanted
            assert one.stats().retries >= 1
        server.faults.clear()


def test_retries_that_are_due_wait_for_a_connection(
    server: ScriptedMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A series that failed is requested again step by step: the next steps wait for an answer."""
    waits: list[float | None] = []
    answered = InFlightRequests.answered

    def counted(flights: InFlightRequests[Any], seconds: float | None) -> Any:
        waits.append(seconds)
        return answered(flights, seconds)

    monkeypatch.setattr(InFlightRequests, "answered", counted)
    wanted = in_order(server, 1)
    server.faults.extend([None, None, "cut"])
    server.frames_left = 3
    with loader(server, 1, connections=1) as one:
        begun = iter(one)
        first = labels([next(begun)])
        wait_for(lambda: server.still)
        before = len(waits)
        wait_for(lambda: len(waits) > before + 20, 0.3)
        assert len(waits) <= before + 20
        server.frames_left = None
        server.gate.set()
        assert first + labels(begun) == wanted


@pytest.mark.parametrize(("fault", "error"), [("gone", SnapshotChangedError), ("bad", BadSampleError)])
def test_a_step_that_fails_does_so_after_those_before_it(
    server: ScriptedMesh, fault: str, error: type[Exception]
) -> None:
    wanted = in_order(server, 1)
    seen: list[int] = []

    def take_all(one: mesh.Loader) -> None:
        for batch in one:
            seen.extend(labels([batch]))
            if len(seen) == 20:
                server.away = range(0)
                server.faults.append(fault)

    server.away = range(40, 41)  # a series ends before it
    with loader(server, 1, connections=1, deadline=30.0) as one, pytest.raises(error):
        take_all(one)
    assert seen == wanted[: len(seen)]
    assert len(seen) >= 20


def test_a_node_of_an_earlier_release_gives_one_after_the_other(server: ScriptedMesh) -> None:
    wanted = in_order(server, 1)
    server.series = 1
    with loader(server, 1) as one:
        assert labels(one) == wanted
        assert one.stats().retries == 0
    assert len(server.asked) == 103


def test_positions_states_and_a_small_arena(server: ScriptedMesh) -> None:
    wanted = in_order(server, 2)
    with loader(server, 2) as one:
        begun = iter(one)
        first = labels(next(begun) for _ in range(17))
        state = one.state_dict()
        begun.close()  # type: ignore[attr-defined]  # it is a generator
        one.load_state_dict(state)
        assert first + labels(one) == wanted
    with loader(server, 2, prefetch_bytes=3 * 8192) as one:
        assert labels(one) == wanted
    with loader(server, 2) as one:
        held = list(one)  # every batch, beyond any budget
        assert labels(held) == wanted


@pytest.fixture(scope="module")
def stored() -> Iterator[tuple[Daemon, Client]]:
    draw = np.random.default_rng(3)
    lengths = draw.integers(1, 200, TEXTS)
    tokens = draw.integers(0, 60_000, int(lengths.sum())).astype(np.uint16)
    with (
        Daemon.start(workers=2) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("corpus")
        client.put("corpus", "stored/00000.bin", tokens.tobytes())
        client.put("corpus", "stored/00000.idx", encode_token_index(lengths, "uint16"))
        yield daemon, client


def series_served(daemon: Daemon) -> float:
    with urlopen(daemon.endpoint + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^meshd_frame_series_total(?:{.*})? (\S+)$", text, re.MULTILINE)))


@pytest.mark.parametrize(
    ("batch", "length", "local"), [(4, LENGTH, False), (16, 1024, True), (16, 1024, False)]
)
def test_batches_of_a_node_are_those_of_single_requests(
    stored: tuple[Daemon, Client], monkeypatch: pytest.MonkeyPatch, batch: int, length: int, *, local: bool
) -> None:
    daemon, _ = stored
    if not local:
        monkeypatch.setenv("MESH_LOCAL", "off")
    keys = daemon.access_key, daemon.secret_key
    with mesh.connect(daemon.endpoint, access_key=keys[0], secret_key=keys[1]) as client:
        packed = mesh.open("s3://corpus/stored", kind="tokens", client=client).pack("tokens", length=length)
        with mesh.Loader(packed, batch, seed=7, output="numpy", rank=1, world=2) as one:
            before = series_served(daemon)
            # Copied: a batch is released at once, so that its memory is used again.
            found = [{name: np.array(value) for name, value in each.items()} for each in one]
            assert series_served(daemon) > before
            assert bool(one.stats().local) == local
            for step, each in enumerate(found):
                alone = one.at(step, epoch=0)
                assert set(each) == set(alone)
                for name, value in each.items():
                    assert value.tobytes() == np.asarray(alone[name]).tobytes()
                    assert value.dtype == np.asarray(alone[name]).dtype


def test_held_batches_of_shared_memory_stay_as_they_were(stored: tuple[Daemon, Client]) -> None:
    _, client = stored
    one = mesh.open("s3://corpus/stored", kind="tokens", client=client).pack("tokens", length=2048)
    with mesh.Loader(one, 16, seed=7, output="numpy") as made:
        held = [(batch, batch["tokens"].copy()) for _ in range(3) for batch in made]
        assert made.stats().local
        assert not made.stats().retries
        for batch, copied in held:
            assert np.array_equal(batch["tokens"], copied)


def test_small_arenas_and_batches_that_are_kept_do_not_stop_blocks(stored: tuple[Daemon, Client]) -> None:
    _, client = stored
    one = mesh.open("s3://corpus/stored", kind="tokens", client=client).pack(
        "tokens", length=1024, segments=False, positions="none"
    )
    with mesh.Loader(one, 64, seed=7, output="numpy", prefetch_bytes=4 << 20) as made:
        assert len(made) > 8
        kept, copies = [], []
        for _ in range(4):
            for step, batch in enumerate(made):
                copies.append(batch["tokens"].copy())
                kept.append(batch if step % 4 == 3 else None)  # one of each block
        for held, copy in zip(kept, copies, strict=True):
            assert held is None or np.array_equal(held["tokens"], copy)
        assert made.stats().local
        assert len(kept) == 4 * len(made)


KEPT_AT_EXIT = """
import sys
import torch  # first: the names of meshsdk's modules are then gone before the batch is
import meshsdk as mesh

client = mesh.connect(sys.argv[1])
ds = mesh.open("s3://corpus/stored", kind="tokens", client=client).pack("tokens", length=1024)
loader = mesh.Loader(ds, 64, seed=7, output="numpy")
for batch in loader:
    tokens = batch["tokens"]
assert loader.stats().local
"""


def test_a_program_that_ends_with_a_batch_in_hand_says_nothing(stored: tuple[Daemon, Client]) -> None:
    daemon, _ = stored
    keys = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
    ended = subprocess.run(
        [sys.executable, "-c", KEPT_AT_EXIT, daemon.endpoint],
        env={**os.environ, **keys},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
