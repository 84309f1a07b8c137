"""Frozen results of everything that a plan's content depends on: other numbers mean other batches.

`GOLDEN=rewrite pytest tests/golden/test_plans_vectors.py` writes the files anew, for a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from meshwire.dataset.archive_index import index_tar
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.formats.tar import TarMember
from meshwire.frame.sample_frames import SampleFrame, sample_layout
from meshwire.frame.tensor_frame import frame_layout, parse_frame_header, tensor_views, verify_frame
from meshwire.plan.epoch_order import epoch_order
from meshwire.plan.keyed_random import KeyedRandom, derive_key
from meshwire.plan.loader_state import LoaderState
from meshwire.plan.plan_spec import canonical_spec, parse_spec, plan_hash
from meshwire.plan.shuffle import BucketOrder, Feistel, ShuffleSpec, shuffle_order
from tests.support.paged_snapshots import build_from_tars

DATA = Path(__file__).parent / "plans"
REWRITE = os.environ.get("GOLDEN") == "rewrite"
SPEC = {
    "ops": [
        {"op": "decode", "field": "image", "version": "1"},
        {
            "op": "random_resized_crop",
            "field": "image",
            "args": {"size": 224, "scale": [0.08, 1.0]},
            "version": "1",
        },
    ],
    "seed": 7,
    "shuffle": {"kind": "blocks", "shards": 64},
}


def randomness() -> dict[str, Any]:
    draws = KeyedRandom(7, 3, 12345, 2)
    return {
        "derive_key": [derive_key(), derive_key(0), derive_key(7, 3, 12345, 2), derive_key(2**64 - 1, 1)],
        "bits": [draws.bits() for _ in range(4)],
        "uniform": [draws.uniform() for _ in range(4)],
        "integer": [draws.integer(n) for n in (1, 10, 1000, 2**40, 2**63)],
        "log_uniform": [draws.log_uniform(3 / 4, 4 / 3).hex() for _ in range(4)],
        "chance": [draws.chance(0.5) for _ in range(8)],
    }


def orders() -> dict[str, Any]:
    starts = np.array([0, 3, 3, 10, 11, 20], dtype=np.int64)
    large = np.array([0, 1, 2**40, 2**62 - 1], dtype=np.int64)
    return {
        "feistel_10": Feistel(10, 1).samples_at(np.arange(10)).tolist(),
        "feistel_1000": Feistel(1000, 2**64 - 1).samples_at(np.arange(0, 1000, 97)).tolist(),
        "feistel_large": Feistel(2**62, 5).samples_at(large).tolist(),
        "global": shuffle_order(ShuffleSpec("global"), starts, 7, 0).samples_at(np.arange(20)).tolist(),
        "global_epoch_1": shuffle_order(ShuffleSpec("global"), starts, 7, 1)
        .samples_at(np.arange(20))
        .tolist(),
        "blocks_2": shuffle_order(ShuffleSpec("blocks", 2), starts, 7, 0).samples_at(np.arange(20)).tolist(),
        "none": shuffle_order(ShuffleSpec("none"), starts, 7, 0).samples_at(np.arange(20)).tolist(),
    }


def mixes() -> dict[str, Any]:
    stages = [
        {"weights": [3, 1, 0]},
        {"weights": [1, 1, 2], "position": 20},
        {"weights": [1, 0, 0], "epoch": 2},
    ]
    mix = {"parts": [10, 7, 3], "stages": stages, "positions": 40, "block": 8}
    starts, found = np.array([0, 4, 10, 15, 17, 20], dtype=np.int64), {}
    for shuffle in ({"kind": "global"}, {"kind": "blocks", "shards": 2}, {"kind": "none"}):
        spec = parse_spec({"seed": 7, "shuffle": shuffle, "mix": mix})
        found[f"plan_{shuffle['kind']}"] = plan_hash("ab" * 32, spec)
        for epoch in range(3):
            samples = epoch_order(spec, starts, epoch).samples_at(np.arange(40))
            found[f"{shuffle['kind']}_{epoch}"] = samples.tolist()
    spec = parse_spec({"seed": 7, "buckets": {"field": "text", "rows": 4, "window": 3}})
    assert spec.buckets is not None
    found["plan_buckets"] = plan_hash("ab" * 32, spec)
    order = BucketOrder(epoch_order(spec, starts, 1), np.arange(20) * 7 % 20, spec.buckets, 7, 1)
    found["buckets_1"] = order.samples_at(np.arange(20)).tolist()
    return found


def documents() -> dict[str, Any]:
    spec = parse_spec(SPEC)
    fields = parse_fields({"image": ["jpg", "jpeg"], "label": {"class": "prefix"}})
    rows = [
        (f"train/{name}", f"{size:032x}", size) for size, name in enumerate(["cat/1.jpg", "dog/2.jpg"], 100)
    ]
    members = [
        TarMember(name, 9, 512 + 1024 * at, 0, 0, "0") for at, name in enumerate(["c/1.jpg", "d/ü.jpeg"])
    ]
    index = index_tar(members)
    objects = build_from_objects(rows, source="s3://photos/train", fields=fields).snapshot
    tars = build_from_tars([("a.tar", "e", 4096, index)], source="s3://photos", fields=fields).snapshot
    return {
        "canonical": canonical_spec(spec).decode(),
        "plan": plan_hash("ab" * 32, spec),
        "snapshot_of_objects": objects.hash,
        "snapshot_of_tars": tars.hash,
        "shard_index": hashlib.sha256(index.to_bytes()).hexdigest(),
        "state": LoaderState("ab" * 32, "cd" * 32, 7, 3, 12_288).to_json(),
    }


def tensors() -> bytes:
    metadata = {"version": "1", "plan": "ab" * 32, "epoch": "3", "step": "17", "rank": "0", "world": "8"}
    fields = [
        ("image", "U8", (2, 3, 5, 5)),
        ("label", "I64", (2,)),
        ("__pos", "I64", (2,)),
        ("__status", "U8", (2,)),
    ]
    frame = frame_layout(fields, metadata)
    data = bytearray(frame.size)
    frame.tensors["image"].view(data)[...] = np.arange(150, dtype=np.uint8).reshape(2, 3, 5, 5)
    frame.tensors["label"].view(data)[:] = [3, -1]
    frame.tensors["__pos"].view(data)[:] = [34, 35]
    frame.tensors["__status"].view(data)[:] = [0, 1]
    frame.seal(data)
    return bytes(data)


def samples() -> bytes:
    blobs = [b"first", b"second blob"]
    frame = sample_layout([len(blob) for blob in blobs], {"version": "1"}, ["a/1.jpg", "a/2.jpg"])
    data = bytearray(frame.size)
    for blob, (start, length) in zip(blobs, frame.places.tolist(), strict=True):
        data[start : start + length] = blob
    frame.seal(data, np.array([0, 4], dtype=np.uint8))
    return bytes(data)


@pytest.mark.parametrize("make", [randomness, orders, mixes, documents])
def test_values_are_those_of_the_file(make: Any) -> None:
    path = DATA / f"{make.__name__}.json"
    if REWRITE:
        lines = [
            f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in make().items()
        ]
        path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
    assert make() == json.loads(path.read_text())


@pytest.mark.parametrize("make", [tensors, samples])
def test_frames_are_those_of_the_file(make: Any) -> None:
    path = DATA / f"{make.__name__}.safetensors"
    if REWRITE:
        path.write_bytes(make())
    assert make() == path.read_bytes()


def test_the_kept_frames_are_read_by_us_and_by_stock_safetensors() -> None:
    data = (DATA / "tensors.safetensors").read_bytes()
    verify_frame(data)
    assert parse_frame_header(data).metadata["step"] == "17"
    assert safetensors.numpy.load(data)["label"].tolist() == tensor_views(data)["label"].tolist() == [3, -1]
    frame = SampleFrame((DATA / "samples.safetensors").read_bytes())
    assert [bytes(blob) for blob in frame] == [b"first", b"second blob"]
    assert [frame.name(0), frame.status.tolist()] == ["a/1.jpg", [0, 4]]
