"""Mixes over a running daemon: exact shares in every batch, for every world size, across a resume."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

PETS, BIRDS, BAD = 30, 11, 7  # a bird's number


def document(number: int) -> bytes:
    return b"{" if number == 1000 + BAD else json.dumps({"id": number}).encode()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=1) as daemon:
        s3 = daemon.client()
        for bucket in ("pets", "birds"):
            s3.create_bucket(Bucket=bucket)
        for number in range(PETS):
            key = f"v1/{('cat', 'dog')[number % 2]}/{number:03}.json"
            s3.put_object(Bucket="pets", Key=key, Body=document(number))
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for number in range(BIRDS):
                info, body = tarfile.TarInfo(f"{number:03}.json"), document(1000 + number)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
        s3.put_object(Bucket="birds", Key="v1/crow/all.tar", Body=out.getvalue())
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


@pytest.fixture
def pets(client: Client) -> Dataset:
    return mesh.open("s3://pets/v1", fields={"id": "json", "label": "@class"}, client=client)


@pytest.fixture
def birds(client: Client) -> Dataset:
    return mesh.open("s3://birds/v1", fields={"id": "json", "label": "@class"}, client=client)


def numbered(ds: Dataset) -> Dataset:
    return ds.map(ops.json("id", "id", type="integer"))


def loader(ds: Dataset, batch: int = 8, rank: int = 0, world: int = 1, **more: Any) -> mesh.Loader:
    return mesh.Loader(ds, batch, seed=5, rank=rank, world=world, output="numpy", max_bad=1.0, **more)


def epoch(ds: Dataset, world: int = 1, **more: Any) -> list[list[int]]:
    """Each global batch's numbers, put together from the ranks' slices."""
    slices = []
    for rank in range(world):
        with loader(ds, rank=rank, world=world, **more) as one:
            slices.append([batch["id"].tolist() for batch in one])
    return [list(itertools.chain(*parts)) for parts in zip(*slices, strict=True)]


def shares(batches: list[list[int]]) -> list[int]:
    """Birds in each batch."""
    return [sum(number >= 1000 for number in batch) for batch in batches]


def test_parts_of_two_buckets_and_kinds_are_one_dataset(pets: Dataset, birds: Dataset) -> None:
    ds = numbered(mesh.mix(pets, birds))
    assert (len(ds), ds.classes) == (PETS + BIRDS, ("cat", "crow", "dog"))
    assert "mix(30, 11)" in repr(ds)
    assert (ds[PETS]["id"], ds.classes[ds[PETS]["label"]]) == (1000, "crow")
    assert [ds.classes[row["label"]] for row in ds.__getitems__([0, PETS - 1])] == ["cat", "dog"]
    seen = Counter(itertools.chain(*epoch(ds, tail="ragged", on_bad="drop")))
    assert len(seen) == PETS + BIRDS - 1
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("shuffle", [True, mesh.Blocks(shards=2), False])
def test_each_batch_has_its_share_for_every_world(pets: Dataset, birds: Dataset, shuffle: Any) -> None:
    ds = numbered(mesh.mix(pets, birds, weights=[0.75, 0.25], positions=80, block=8))
    batches = epoch(ds, shuffle=shuffle)
    assert shares(batches) == [2] * 10
    times = Counter(number for batch in batches for number in batch if number < 1000)
    assert sorted(times.values()) == [2] * PETS
    assert epoch(ds, 3, shuffle=shuffle) == batches


def test_a_stand_in_is_of_the_same_part_and_the_ledger_names_it(pets: Dataset, birds: Dataset) -> None:
    ds = numbered(mesh.mix(pets, birds, weights=[1, 3], positions=48, block=8))
    with loader(ds) as one:
        batches = list(one)
        assert shares([batch["id"].tolist() for batch in batches]) == [6] * 6
        assert sum(int((batch.status == 1).sum()) for batch in batches) == one.stats().flagged >= 3
        assert {sample.key for sample in one.bad()} == {f"v1/crow/all.tar/{BAD:03}"}
    with pytest.raises(BadSampleError, match="007"):
        epoch(ds, on_bad="raise")


def test_weights_change_at_a_step_and_at_an_epoch_across_a_resume(pets: Dataset, birds: Dataset) -> None:
    schedule = [mesh.Stage([1, 1], step=3), mesh.Stage([0, 1], epoch=1)]
    ds = numbered(mesh.mix(pets, birds, weights=[1, 0], schedule=schedule, positions=48, block=8))
    whole = epoch(ds)
    assert shares(whole) == [0, 0, 0, 4, 4, 4]
    with loader(ds) as one:
        for batch in one:
            if batch.step == 2:
                break
        state = one.state_dict()
    rest = []
    for rank in range(2):
        with loader(ds, rank=rank, world=2) as one:
            one.load_state_dict(state)
            rest.append([batch["id"].tolist() for batch in one])
            assert shares([batch["id"].tolist() for batch in one]) == [4] * 6  # its half of epoch 1
    assert [first + second for first, second in zip(*rest, strict=True)] == whole[3:]


def test_a_mix_is_packed(pets: Dataset, birds: Dataset) -> None:
    ds = mesh.mix(pets.select("id"), birds.select("id"), weights=[1, 3], positions=16, block=4)
    packed = ds.pack("id", length=32, value=0)
    with loader(packed, 4) as one:
        assert len(one) == 4
        for batch in one:
            birds_rows = ["100" in bytes(row.astype(np.uint8)).decode("latin1") for row in batch["id"]]
            assert sum(birds_rows) == 3


def test_what_cannot_be_mixed_says_what_to_do(pets: Dataset, birds: Dataset, client: Client) -> None:
    with pytest.raises(ConfigurationError, match="map after mixing"):
        mesh.mix(numbered(pets), birds)
    with pytest.raises(ConfigurationError, match="same"):
        mesh.mix(pets, birds.select("id"))
    with pytest.raises(ConfigurationError, match="3 weights for 2"):
        mesh.mix(pets, birds, weights=[1, 2, 3])
    with pytest.raises(ConfigurationError, match="all weights are 0"):
        mesh.mix(pets, birds, weights=[0, 0])
    mixed = mesh.mix(pets, birds)
    with pytest.raises(ConfigurationError, match="before mix"):
        mixed.filter("index > 3")
    with pytest.raises(ConfigurationError, match="split each dataset with the same fractions, then mix"):
        mixed.split(train=0.5, val=0.5)
    with pytest.raises(ConfigurationError, match="positions=0"):
        mesh.mix(pets, birds, positions=0)
    assert mixed.select("id").mixing == mixed.mixing
    assert mixed.select("id").pack("id", length=32).unpacked().mixing == mixed.mixing
    assert numbered(mixed).unmapped().mixing == mixed.mixing
    with pytest.raises(ConfigurationError, match="cannot join a mixed dataset"):
        birds.select("label", "id").rename(id="other").join(mixed, on="key")
    stepped = mesh.mix(pets, birds, schedule=[mesh.Stage([1, 1], step=1)])
    with pytest.raises(ConfigurationError, match="needs the rows of a step"):
        stepped.spec()
    made = mesh.mix(pets, birds).mixing
    assert made is not None
    wrong = mesh.Dataset(client, pets.snapshot, mixing=made)
    with pytest.raises(InvalidPlanError, match=r"mix\.parts: the parts do not match the snapshot's 30"):
        loader(wrong)
