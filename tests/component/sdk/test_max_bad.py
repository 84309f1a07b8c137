"""`max_bad` is of the global batch: the same step raises for every number of ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

BATCH, STEPS = 16, 4
BAD = (18, 19, 26, 34, 35, 42, 47)  # three in step 1 of stored order, four in step 2


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(workers=1) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("data")
        for number in range(BATCH * STEPS - 3):
            client.put("data", f"a/{number:03}.json", b"{" if number in BAD else b'{"id": %d}' % number)
        yield client


def loader(client: Client, rank: int, world: int, **more: Any) -> mesh.Loader:
    ds = mesh.open("s3://data/a", fields={"id": "json"}, client=client)
    ds = ds.map(ops.json("id", "id", type="integer"))
    more = {"max_bad": 0.2, "on_bad": "mask", **more}  # three of sixteen
    return mesh.Loader(ds, BATCH, rank=rank, world=world, output="numpy", shuffle=False, **more)


def steps_before_it_raises(client: Client, world: int, **more: Any) -> list[int]:
    """Of each rank; all steps where it does not raise."""
    found = []
    for rank in range(world):
        with loader(client, rank, world, **more) as one:
            steps = 0
            with contextlib.suppress(BadSampleError):
                for _ in one:
                    steps += 1
            found.append(steps)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("on_bad", ["mask", "drop", "substitute"])
def test_the_same_step_raises_for_every_world(client: Client, world: int, on_bad: str) -> None:
    found = steps_before_it_raises(client, world, on_bad=on_bad)
    assert min(found) == 2
    assert {*found} <= {2, STEPS}


@pytest.mark.parametrize("world", [1, 4, 16])
def test_what_a_slice_has_more_of_than_its_share_is_borne_by_the_others(client: Client, world: int) -> None:
    assert steps_before_it_raises(client, world, max_bad=0.25) == [STEPS] * world
    with loader(client, world - 1, world, max_bad=0.2) as one:
        one.seek(0, 2)
        for _ in range(2):  # kept frames are judged as new ones are
            with pytest.raises(BadSampleError, match=r"bad rows of 16[,;] 3 allowed"):
                one.at(2)
