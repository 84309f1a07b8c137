"""Bad samples: substituted, masked, dropped, raised, and how many are too many."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.native_fixtures import error, fill, png

if TYPE_CHECKING:
    from tests.support.native_fixtures import Mesh


@pytest.fixture(scope="module")
def spoilt(s3: Any) -> str:
    """A bucket of 40 pictures of which 5 and 17 are cut short. Read only."""
    name = f"spoilt-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=name)
    fill(s3, name, 40, bad=(5, 17))
    return name


def spoilt_plan(mesh: Mesh, spoilt: str, on_bad: str, **spec: Any) -> str:
    snapshot = mesh.snapshot(f"s3://{spoilt}/train")["snapshot"]
    options = {"on_bad": on_bad, "max_bad": 0.5, "tail": "ragged", **spec}
    return str(mesh.plan(snapshot, **options)["plan"])


def test_substitutes_are_flagged_and_the_same_for_every_world(mesh: Mesh, spoilt: str) -> None:
    plan = spoilt_plan(mesh, spoilt, "substitute")
    whole = mesh.frame(plan, batch=40)
    assert whole["__status"].tolist().count(1) == 2
    assert sorted(whole["__pos"].tolist()) == list(range(40))
    seen = whole["image"][:, 0, 0, 0].tolist()
    assert not {5, 17} & set(seen)
    assert ((np.array(seen) % 3 == 0) == whole["label"]).all()
    parts = [mesh.frame(plan, batch=40, world=3, rank=rank) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([part["image"] for part in parts]), whole["image"])
    ledger = json.loads(mesh.call("GET", f"/-/plans/{plan}/bad").body)
    assert {entry["key"] for entry in ledger} == {"train/cat/0005", "train/cat/0017"}
    assert all(entry["op"].startswith("decode") and entry["times"] >= 1 for entry in ledger)


def test_masked_rows_are_zeros(mesh: Mesh, spoilt: str) -> None:
    got = mesh.frame(spoilt_plan(mesh, spoilt, "mask"), batch=40)
    masked = np.flatnonzero(got["__status"] == 2)
    assert masked.size == 2
    assert not got["image"][masked].any()
    assert not got["label"][masked].any()


def test_dropped_rows_make_smaller_batches_not_fewer(mesh: Mesh, spoilt: str) -> None:
    plan = spoilt_plan(mesh, spoilt, "drop")
    got = [mesh.frame(plan, step=step, batch=10) for step in range(4)]
    seen = np.concatenate([step["image"] for step in got])[:, 0, 0, 0]
    assert sorted(seen.tolist()) == sorted(set(range(40)) - {5, 17})
    assert all((step["__status"] == 0).all() for step in got)


def test_raise_names_the_sample_and_how_to_replay_it(mesh: Mesh, spoilt: str) -> None:
    answer = mesh.raw(spoilt_plan(mesh, spoilt, "raise"), batch=40)
    assert answer.status == 422
    got = error(answer)
    assert got["code"] == "BadSample"
    assert got["detail"]["key"] in {"train/cat/0005", "train/cat/0017"}
    assert got["detail"]["node"]
    assert "decode" in got["detail"]["op"]
    replayed = mesh.call("GET", got["detail"]["replay"].removeprefix("GET "))
    assert (replayed.status, error(replayed)["detail"]["key"]) == (422, got["detail"]["key"])


def test_too_many_bad_samples_always_raise(mesh: Mesh, spoilt: str) -> None:
    answer = mesh.raw(spoilt_plan(mesh, spoilt, "substitute", max_bad=0.01), batch=40)
    assert answer.status == 422
    assert "2 bad rows of 40, 1 allowed" in error(answer)["message"]


def test_a_dataset_of_bad_samples_raises_rather_than_searching_for_ever(
    mesh: Mesh, s3: Any, bucket: str
) -> None:
    fill(s3, bucket, 4, bad=(0, 1, 2, 3))
    plan = mesh.plan(mesh.snapshot(f"s3://{bucket}/train")["snapshot"], max_bad=1.0)["plan"]
    answer = mesh.raw(plan, batch=4)
    assert (answer.status, error(answer)["code"]) == (422, "BadSample")


@pytest.mark.parametrize(("on_bad", "bound"), [("raise", 0.01), ("mask", 0.01), ("substitute", 1.0)])
def test_where_every_row_is_bad_the_ops_are_suspected(
    mesh: Mesh, s3: Any, bucket: str, on_bad: str, bound: float
) -> None:
    fill(s3, bucket, 4, bad=(0, 1, 2, 3))
    plan = mesh.plan(mesh.snapshot(f"s3://{bucket}/train")["snapshot"], on_bad=on_bad, max_bad=bound)["plan"]
    told = error(mesh.raw(plan, batch=4))
    assert "ds.preflight()" in told["help"]
    assert ("as are all rows" in told["message"]) == (on_bad == "raise")


def test_an_empty_file_is_told_as_such(mesh: Mesh, s3: Any, bucket: str) -> None:
    fill(s3, bucket, 4)
    s3.put_object(Bucket=bucket, Key="train/cat/a b.png", Body=b"")
    plan = mesh.plan(mesh.snapshot(f"s3://{bucket}/train")["snapshot"], on_bad="raise")["plan"]
    told = error(mesh.raw(plan, batch=5))
    assert "the file is empty (0 bytes)" in told["message"]
    assert "ds.preflight()" not in told["help"]
    assert f"mesh cat 's3://{bucket}/train/cat/a b.png' > sample" in told["help"]  # as a shell needs it


def test_the_bytes_of_a_sample_in_a_shard_are_named(mesh: Mesh, s3: Any, bucket: str) -> None:
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for number, body in enumerate((png(0), b"no picture", png(2))):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    for key, body in (("tars/s.tar", shard.getvalue()), ("packed/s.tgz", gzip.compress(shard.getvalue()))):
        s3.put_object(Bucket=bucket, Key=key, Body=body)
        pinned = mesh.snapshot(f"s3://{bucket}/{key.partition('/')[0]}", fields={"image": {"ext": ["png"]}})
        plan = mesh.plan(pinned["snapshot"], on_bad="raise")["plan"]
        told = error(mesh.raw(plan, batch=3))["help"]
        if key.endswith(".tgz"):  # whose offsets are those of its decompressed copy
            assert f"mesh cat s3://{bucket}/{key} > sample" in told
            continue
        found = re.search(rf"mesh cat --offset (\d+) --length (\d+) s3://{bucket}/{key} > sample", told)
        assert found is not None, told
        start, length = map(int, found.groups())
        assert body[start : start + length] == b"no picture"
