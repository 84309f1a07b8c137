"""The order of a loader without `shuffle` on a rotational disk: chosen once, and kept by a resume."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk.errors import StateMismatchError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, SIZE, SHARD = 1600, 135_000, 50  # gaps of a full shuffle are not read through: 1,600 seeks
ROTATIONAL = ("--disk-type", "rotational", "--read-ahead", "64MiB")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=ROTATIONAL) as daemon, client_of(daemon) as client:
        client.create_bucket("tars")
        for first in range(0, SAMPLES, SHARD):
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w") as archive:
                for number in range(first, first + SHARD):
                    member = tarfile.TarInfo(f"{number:05d}.bin")
                    member.size = SIZE
                    archive.addfile(member, io.BytesIO(number.to_bytes(4, "big") * (SIZE // 4)))
            client.put("tars", f"{first:05d}.tar", file.getvalue())
        yield daemon


def client_of(daemon: Daemon) -> mesh.Client:
    return mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key)


def opened(client: mesh.Client, seed: int = 0, **options: mesh.Blocks | bool | None) -> mesh.Loader:
    ds = mesh.open("s3://tars/", fields={"data": "bin"}, client=client)
    return mesh.Loader(ds, 50, seed=seed, output="numpy", rank=0, world=1, **options)  # type: ignore[arg-type]


def rows(loader: mesh.Loader) -> list[int]:
    """The samples of the next batch."""
    return [int.from_bytes(bytes(row[:4]), "big") for row in next(iter(loader))["data"]]


def test_the_order_is_chosen_once_told_and_kept(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    with (
        client_of(daemon) as client,
        ThreadPoolExecutor(4) as pool,
        caplog.at_level(logging.WARNING, "meshsdk"),
    ):
        ranks = list(pool.map(lambda _: opened(client), range(4)))
        first = ranks[0]
        assert isinstance(first.order.shuffle, mesh.Blocks)
        assert first.order.shuffle.shards == 4
        assert {rank.plan.hash for rank in ranks} == {first.plan.hash}
        assert opened(client, shuffle=first.order.shuffle).plan.hash == first.plan.hash
        assert f"shuffle={first.order.shuffle!r}" in repr(first)
        assert 0.9 < first.order.distance < 1.1
        assert " seeks and " in str(first.order)
        assert sum(str(first.order) in record.getMessage() for record in caplog.records) == 1
        flight = first.dataset.preflight(50)
        assert flight.order == first.order
        assert str(first.order) in str(flight)
        # what a caller says is what it gets
        assert opened(client, shuffle=True).order.shuffle is True
        assert opened(client, shuffle=False).order.shuffle is False
        small = mesh.open("s3://tars/", fields={"data": "bin"}, client=client).filter("name < '00100'")
        assert mesh.Loader(small, 10, output="numpy").order.shuffle is True  # fits the memory
        next(iter(first))
        state, following = first.state_dict(), rows(first)

    daemon.stop()
    daemon.args = ("--disk-type", "solid-state")
    daemon.restart()
    with client_of(daemon) as client:
        again = opened(client)
        assert again.order == first.order
        again.load_state_dict(state)
        assert rows(again) == following
        # A job that began with another order goes on with it, if it names none.
        for shuffle in (True, False, mesh.Blocks(shards=3)):
            other = opened(client, shuffle=shuffle)
            other.skip(3)
            resumed = opened(client)
            resumed.load_state_dict(json.dumps(other.state_dict()))
            assert (resumed.order.shuffle, resumed.step) == (shuffle, 3)
            assert rows(resumed) == rows(other)
        with pytest.raises(StateMismatchError):
            opened(client, shuffle=True).load_state_dict(state)
        with pytest.raises(StateMismatchError):
            opened(client, seed=1).load_state_dict(state)
