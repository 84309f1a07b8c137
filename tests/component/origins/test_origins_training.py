"""Datasets, batches and gathers over buckets with origins: as of buckets whose objects live here."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import secrets
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.admin import cluster_admin, jobs
from meshsdk.client.gather import Item
from meshsdk.errors import MeshError
from tests.component.sdk.test_sdk_training import picture
from tests.support import origin_views
from tests.support.origin_fixtures import bucket, eventually, metric, put, sdk, small_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon
    from tests.support.origin_places import Place

PHOTOS = 40


@pytest.fixture(scope="module")
def small(_origin: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with small_daemon(_origin, tmp_path_factory.mktemp("small"), cache="64MiB") as daemon:
        yield daemon


def keys() -> list[str]:
    return [f"train/{'cat' if number % 2 else 'dog'}/{number:03}.jpg" for number in range(PHOTOS)]


def fill(daemon: Daemon, origin: Place, far: str, here: str = "", *, first: int = 0, **options: Any) -> None:
    """The same photographs, from this one on, in a bucket at the origin, and in one that lives `here`."""
    client = bucket(daemon, origin, far, **options)
    if here:
        client.create_bucket(Bucket=here)
    for number, key in enumerate(keys()):
        put(origin, far, key, picture(first + number))
        if here:
            client.put_object(Bucket=here, Key=key, Body=picture(first + number))


def opened(client: mesh.Client, name: str) -> mesh.Dataset:
    found = mesh.open(f"s3://{name}/train", fields={"image": "jpg", "label": "@class"}, client=client)
    return found.map(ops.decode("image"), ops.random_resized_crop("image", 16), ops.to_chw("image"))


def epoch(dataset: mesh.Dataset, number: int = 0) -> list[str]:
    with mesh.Loader(dataset, 8, seed=5, output="numpy", verify=True) as loader:
        loader.set_epoch(number)
        return [
            hashlib.sha256(np.ascontiguousarray(batch["image"]).tobytes()).hexdigest() for batch in loader
        ]


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_an_epoch_is_that_of_a_bucket_that_lives_here(small: Daemon, origin: Place) -> None:
    fill(small, origin, "far", "here")
    with sdk(small) as client:
        far = opened(client, "far")
        numbers = itertools.count(secrets.randbelow(1 << 30))  # of epochs nobody asked for
        number = next(numbers)
        assert epoch(far, number) == epoch(opened(client, "here"), number)
        fetched = len(origin.faults.gets("far/train"))
        assert fetched <= PHOTOS + 1
        eventually(lambda: metric(small, "meshd_cache_plans") >= 1)  # what is read next is known to the cache

        def is_kept() -> bool:
            before = len(origin.faults.gets("far/train"))
            epoch(far, next(numbers))
            return len(origin.faults.gets("far/train")) == before

        eventually(is_kept)  # it is written behind the answers
        origin.faults.refuse = True  # content by its ETag needs no question
        assert len(epoch(far, next(numbers))) == 5


def test_views_are_those_of_a_bucket_that_lives_here(small: Daemon, origin: Place) -> None:
    fill(small, origin, "seen", "lives")
    origin_views.make(small, "seen", "lives")
    client = small.client()
    for name in origin_views.VIEWS:
        expected = origin_views.contents(client, f"lives--{name}")
        assert len(expected) >= 4
        assert origin_views.contents(client, f"seen--{name}") == expected
    assert len(origin.faults.gets("seen/train")) <= PHOTOS + 1  # each was fetched once for all views


def test_jobs_make_the_same_of_both(small: Daemon, origin: Place) -> None:
    fill(small, origin, "raw", "kept")
    client = small.client()
    client.create_bucket(Bucket="made")
    with sdk(small) as mesh_client:
        for source in ("raw", "kept"):
            wanted = jobs.shard_job(f"s3://{source}/train/", f"s3://made/{source}/", count=10)
            done = jobs.wait_for_job(mesh_client.transport, jobs.start_job(mesh_client.transport, wanted).id)
            assert (done.state, done.failed) == ("done", 0), done
    listed = client.list_objects_v2(Bucket="made")["Contents"]
    found = [(each["Key"].partition("/")[2], each["ETag"]) for each in listed]
    assert len(found) >= 8
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_source_is_listed_once_as_long_as_the_ttl_says(origin: Place, tmp_path: Path) -> None:
    def listings() -> int:
        return sum("list-type" in head for head in origin.faults.heads)

    with small_daemon(origin, tmp_path, workers=1) as alone, sdk(alone) as client:
        fill(alone, origin, "once", ttl=600.0)
        assert opened(client, "once").snapshot.samples == PHOTOS
        before = listings()
        for _ in range(3):
            assert opened(client, "once").snapshot.samples == PHOTOS
        pictures = mesh.open("s3://once/train", fields={"image": "jpg"}, client=client)
        assert pictures.snapshot.samples == PHOTOS  # of the same listing
        assert listings() == before
        put(origin, "once", "train/cat/998.jpg", picture(1))  # by a client of the origin
        assert opened(client, "once").snapshot.samples == PHOTOS
        alone.client().put_object(Bucket="once", Key="train/dog/999.jpg", Body=picture(2))
        assert opened(client, "once").snapshot.samples == PHOTOS + 2  # written through the mesh: at once
        assert listings() > before
        cluster_admin.change_bucket(client.transport, "once", {"ttl": 0.0})
        put(origin, "once", "train/cat/997.jpg", picture(3))
        eventually(lambda: opened(client, "once").snapshot.samples == PHOTOS + 3)


def test_an_object_that_changed_is_told(small: Daemon, origin: Place) -> None:
    fill(small, origin, "changes", ttl=0.0)
    with sdk(small) as client:
        far = opened(client, "changes")
        assert far.plan()
        put(origin, "changes", keys()[3], picture(7) + b"\0")
        with pytest.raises(MeshError, match=r"replaced|changed"):
            epoch(far)


def test_a_plan_is_prefetched_in_its_order(small: Daemon, origin: Place) -> None:
    fill(small, origin, "planned")
    with sdk(small) as client:
        far = opened(client, "planned")
        plan = mesh.Loader(far, 8, seed=5, output="numpy").plan
        wanted = {"kind": "prefetch", "source": "s3://planned/train/", "plan": plan.hash, "epoch": 1}
        done = jobs.wait_for_job(client.transport, jobs.start_job(client.transport, wanted).id)
        assert (done.state, done.progress.outputs, done.failed) == ("done", PHOTOS, 0), done
        before = len(origin.faults.gets("planned/train"))
        assert len(epoch(far, 1)) == 5
        assert len(origin.faults.gets("planned/train")) == before


def test_shards_lines_and_gathers(small: Daemon, origin: Place) -> None:
    client = bucket(small, origin, "mixed")
    client.create_bucket(Bucket="twin")
    members = {f"{n:03}.cls": b"%d" % n for n in range(30)}
    files = {
        "tars/a.tar": tar_of(members),
        "tgz/a.tar.gz": gzip.compress(tar_of(members), mtime=0),
        "lines/a.jsonl": b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(20)),
        "plain/x.bin": bytes(range(256)) * 900,
    }
    for key, data in files.items():
        put(origin, "mixed", key, data)
        client.put_object(Bucket="twin", Key=key, Body=data)
    with sdk(small) as one:
        found = [
            [(b"" if got.error else bytes(got.data), got.error is None) for got in one.gather(_items(name))]
            for name in ("mixed", "twin")
        ]
        assert found[0] == found[1]
        assert found[0][2][0] == b"7"
        for prefix in ("tars", "tgz"):
            pair = [_numbers(one, f"s3://{name}/{prefix}") for name in ("mixed", "twin")]
            assert pair[0] == pair[1]
            assert sorted(pair[0]) == list(range(30))


def _items(name: str) -> list[Item]:
    return [
        Item(name, "plain/x.bin"),
        Item(name, "plain/x.bin", offset=1000, length=50),
        Item(name, "tars/a.tar", member="007.cls"),
        Item(name, "tgz/a.tar.gz", member="011.cls"),
        Item(name, "plain/none"),
    ]


def _numbers(client: mesh.Client, source: str) -> list[int]:
    dataset = mesh.open(source, fields={"n": "cls"}, client=client).map(ops.int_label("n"))
    with mesh.Loader(dataset, 10, seed=1, output="numpy") as loader:
        return [int(number) for batch in loader for number in batch["n"]]
