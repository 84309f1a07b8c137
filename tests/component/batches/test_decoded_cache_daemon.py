"""A daemon with a decoded cache: later epochs with new crops do not decode again, and no byte differs."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import threading
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from tests.support.daemons import Daemon, with_failpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemons import Answer

SAMPLES, BATCH = 96, 16
STEPS = SAMPLES // BATCH
OPS: list[dict[str, Any]] = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "random_resized_crop", "field": "image", "args": {"size": 160}},
    {"op": "hflip", "field": "image", "args": {}},
    {"op": "to_chw", "field": "image", "args": {}},
]
ARGUMENTS = ("--transform-workers", "2", "--frame-cache", "1MiB")


@cache
def picture(number: int) -> bytes:
    small = np.random.default_rng(number).integers(0, 256, (60, 80, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((320, 240)).save(file, "JPEG", quality=95)
    return file.getvalue()


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Daemon]:
    """A daemon with the samples."""
    with Daemon.start(workers=2, args=(*ARGUMENTS, *arguments)) as daemon:
        fill(daemon)
        yield daemon


def fill(daemon: Daemon) -> None:
    with connected(daemon) as client:
        client.create_bucket("photos")
        client.put_many("photos", [(f"train/{n:04}.jpg", picture(n)) for n in range(SAMPLES)])


def connected(daemon: Daemon) -> mesh.Client:
    """The SDK, as root."""
    return mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)


def post(daemon: Daemon, path: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = daemon.request("POST", path, json.dumps(document).encode())
    assert answer.status == 200, answer.body
    result: dict[str, Any] = json.loads(answer.body)
    return result


def plan_of(daemon: Daemon, ops: list[dict[str, Any]] = OPS) -> str:
    fields = {"image": {"ext": ["jpg"]}}
    snapshot = post(
        daemon, "/-/snapshots", {"source": "s3://photos/train/", "kind": "auto", "fields": fields}
    )
    spec = {
        "version": 1,
        "ops": ops,
        "seed": 7,
        "shuffle": {"kind": "global"},
        "tail": "pad",
        "on_bad": "raise",
        "max_bad": 0.0,
    }
    return str(
        post(daemon, "/-/plans", {"snapshot": snapshot["snapshot"], "spec": spec, "batch": BATCH})["plan"]
    )


def frame(daemon: Daemon, plan: str, epoch: int, step: int) -> bytes:
    """A frame, asked for until it comes."""
    answer: Answer | None = None
    for _ in range(1200):
        with contextlib.suppress(OSError):
            answer = daemon.request("GET", f"/-/plans/{plan}/{epoch}/{step}?batch={BATCH}")
            if answer.status == 200:
                return answer.body
            assert answer.status == 503, answer.body
        threading.Event().wait(0.05)
    raise AssertionError(f"no frame: {answer}")


def epoch(daemon: Daemon, plan: str, number: int) -> list[bytes]:
    return [frame(daemon, plan, number, step) for step in range(STEPS)]


def wait_until(what: Callable[[], bool]) -> bool:
    """Whether something is so within a minute."""
    for _ in range(1200):
        if what():
            return True
        threading.Event().wait(0.05)
    return False


def counted(daemon: Daemon, name: str) -> float:
    with urlopen(daemon.endpoint + "/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf"^meshd_decoded_cache_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def reads(daemon: Daemon, result: str) -> float:
    return counted(daemon, f'reads_total{{result="{result}"}}')


def hits_of(daemon: Daemon, plan: str, number: int) -> float:
    """How many samples of an epoch are read from the cache."""
    before = reads(daemon, "hit")
    epoch(daemon, plan, number)
    return reads(daemon, "hit") - before


def segments(daemon: Daemon) -> list[Path]:
    return sorted((daemon.data_dir / "decoded").iterdir())


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[bytes]]]:
    """The frames of four epochs, made without a decoded cache."""
    with started("--decoded-cache", "off") as daemon:
        plan = plan_of(daemon)
        yield [epoch(daemon, plan, number) for number in range(4)]
        assert not (daemon.data_dir / "decoded").exists()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with started("--decoded-cache", "256MiB") as running:
        yield running


def test_later_epochs_with_new_crops_decode_nothing(daemon: Daemon, expected: list[list[bytes]]) -> None:
    plan = plan_of(daemon)
    for number in range(2):
        assert epoch(daemon, plan, number) == expected[number]
    assert reads(daemon, "hit") > 0
    later = itertools.count(4)
    assert wait_until(lambda: hits_of(daemon, plan, next(later)) == SAMPLES)
    missed, before = reads(daemon, "miss"), reads(daemon, "hit")
    assert epoch(daemon, plan, 2) == expected[2]
    assert reads(daemon, "miss") == missed
    assert reads(daemon, "hit") - before == SAMPLES
    assert counted(daemon, "cpu_seconds_saved_total") > 0
    assert counted(daemon, "bytes") > SAMPLES * 320 * 240 * 3

    other = plan_of(
        daemon, [OPS[0], {**OPS[1], "args": {"size": 128}}]
    )  # begins behind the same decoded images
    before = reads(daemon, "hit")
    epoch(daemon, other, 0)
    assert reads(daemon, "hit") > before
    assert reads(daemon, "miss") == missed


@pytest.mark.parametrize("victim", ["transform-0", "coordinator-0"])
def test_killing_a_process_costs_entries_at_most(
    daemon: Daemon, expected: list[list[bytes]], victim: str
) -> None:
    plan = plan_of(daemon)
    for number in range(4):
        frames = [frame(daemon, plan, number, step) for step in range(number)]
        assert wait_until(lambda: victim in daemon.children())
        daemon.signal_child(victim)
        frames += [frame(daemon, plan, number, step) for step in range(number, STEPS)]
        assert frames == expected[number]
    before = reads(daemon, "hit")
    assert [epoch(daemon, plan, number) for number in (0, 1)] == expected[:2]
    assert reads(daemon, "hit") > before


def test_damaged_entries_are_computed_again(daemon: Daemon, expected: list[list[bytes]]) -> None:
    plan, rng = plan_of(daemon), random.Random(5)
    for number in range(2):
        epoch(daemon, plan, number)
    for path in segments(daemon):
        size = path.stat().st_size
        with path.open("r+b") as file:
            for at in range(0, size, 50_000):
                file.seek(min(at + rng.randrange(50_000), size - 1))
                file.write(bytes([rng.randrange(256)]))
    assert epoch(daemon, plan, 2) == expected[2]
    assert reads(daemon, "damaged") > 0
    for path in segments(daemon):
        path.unlink()
    assert epoch(daemon, plan, 3) == expected[3]


def test_a_full_disk_costs_nothing_but_the_cache(expected: list[list[bytes]]) -> None:
    with with_failpoints("decoded_cache.append=error(28):after 10"), started() as daemon:
        plan = plan_of(daemon)
        for number in range(3):
            assert epoch(daemon, plan, number) == expected[number]
        assert 0 < counted(daemon, "stored_bytes_total") < SAMPLES * 320 * 240 * 3
        assert reads(daemon, "hit") > 0


def test_a_restart_begins_with_an_empty_directory(daemon: Daemon, expected: list[list[bytes]]) -> None:
    plan = plan_of(daemon)
    epoch(daemon, plan, 0)
    assert any(path.stat().st_size for path in segments(daemon))
    daemon.restart()
    assert segments(daemon) == []
    assert epoch(daemon, plan, 1) == expected[1]


def test_a_loader_says_how_much_is_kept(daemon: Daemon) -> None:
    with connected(daemon) as client:
        data = mesh.open("s3://photos/train/", {"image": "jpg"}, client=client)
        data = data.map(ops.decode("image"), ops.random_resized_crop("image", size=160))
        found = {}
        for cache in ("off", "auto"):
            with mesh.Loader(data, BATCH, output="numpy", cache=cache) as loader:
                found[cache] = [batch["image"].copy() for _ in range(2) for batch in loader]
                assert (counted(daemon, "stored_bytes_total") > 0) == (cache == "auto")
            daemon.signal_child("coordinator-0")  # forgets the finished frames
        assert all(map(np.array_equal, found["off"], found["auto"]))
