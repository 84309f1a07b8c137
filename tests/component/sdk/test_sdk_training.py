"""The whole way: photographs and digits into a real daemon, batches out of it, as a training job has them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, MeshError, NotFoundError
from tests.support.bounded_wait import await_end
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PHOTOS = 50


def picture(number: int) -> bytes:
    """A JPEG whose average colour tells its number."""
    image = np.full((60 + number, 80, 3), (number * 5) % 256, np.uint8)
    return bytes(cv2.imencode(".jpg", image)[1])


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


@pytest.fixture(scope="module")
def photos(client: mesh.Client) -> Iterator[str]:
    bucket = f"photos-{os.getpid()}"
    client.create_bucket(bucket)
    for number in range(PHOTOS):
        client.put(bucket, f"train/{'cat' if number % 2 else 'dog'}/{number:03}.jpg", picture(number))
    yield bucket
    client.delete_many(bucket, [entry.key for entry in client.list(bucket)])
    client.delete_bucket(bucket)


@pytest.fixture
def ds(client: mesh.Client, photos: str) -> mesh.Dataset:
    opened = mesh.open(f"s3://{photos}/train", fields={"image": "jpg", "label": "@class"}, client=client)
    return opened.map(
        ops.decode("image"), ops.random_resized_crop("image", 32), ops.hflip("image"), ops.to_chw("image")
    )


def hashes(ds: mesh.Dataset, world: int, **more: Any) -> list[str]:
    """A hash of each global batch of an epoch, put together from `world` ranks."""
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(mesh.Loader(ds, 16, seed=5, rank=rank, world=world, output="numpy", **more))
            for rank in range(world)
        ]
        found = []
        for parts in zip(*loaders, strict=True):
            whole = hashlib.sha256()
            for part in parts:
                whole.update(np.ascontiguousarray(part["image"]).tobytes())
            for part in parts:
                whole.update(np.ascontiguousarray(part["label"]).tobytes())
            found.append(whole.hexdigest())
        return found


@pytest.mark.parametrize("shuffle", [True, mesh.Blocks(shards=2), False])
def test_equal_batches_at_every_world_size(ds: mesh.Dataset, shuffle: Any) -> None:
    one, two, three = (hashes(ds, world, shuffle=shuffle) for world in (1, 2, 3))
    assert one == two == three
    assert len(set(one)) == len(one) == 4


def test_a_job_that_stops_goes_on_with_another_world_and_batch(ds: mesh.Dataset) -> None:
    with mesh.Loader(ds, 8, seed=1, output="numpy") as loader:
        whole = [position for batch in loader for position in batch.positions[batch.status == 0]]
        loader.seek(0, 0)
        images = np.concatenate([batch["image"] for batch in loader])[:PHOTOS]
        loader.seek(0, 2)
        state = loader.state_dict()
    rest: list[np.ndarray] = []
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(mesh.Loader(ds, 10, seed=1, rank=rank, world=2, output="numpy"))
            for rank in range(2)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
        for parts in zip(*loaders, strict=True):
            rest += [part["image"][part.status == 0] for part in parts]
    assert whole == list(range(PHOTOS))
    assert (np.concatenate(rest) == images[16:]).all()


def test_tensors_for_a_model(ds: mesh.Dataset) -> None:
    with mesh.Loader(ds, 16) as loader:
        for batch in loader:
            assert batch["image"].shape == (16, 3, 32, 32)
            assert batch["image"].dtype == torch.uint8
            # The pixels prove the label: a picture's colour is five times its number, even ones are dogs.
            numbers = torch.round(batch["image"].float().mean((1, 2, 3)) / 5).long()
            assert torch.equal(batch["label"], (numbers + 1) % 2)
        assert loader.stats().samples == 64


def test_datasets_describe_themselves(ds: mesh.Dataset) -> None:
    assert len(ds) == PHOTOS
    assert ds.classes == ("cat", "dog")
    assert {name: str(field) for name, field in ds.schema().items()} == {
        "image": "uint8 [3, 32, 32], decoded as rgb",
        "label": "int64 []",
    }
    manifest = ds.manifest()
    assert (manifest.hash, manifest.samples) == (ds.snapshot.hash, PHOTOS)
    assert "random_resized_crop" in repr(ds)


def test_an_old_snapshot_is_opened_again(ds: mesh.Dataset, client: mesh.Client, photos: str) -> None:
    again = mesh.open(f"s3://{photos}/train", snapshot=ds.snapshot.hash, client=client)
    assert again.snapshot.fields == ds.snapshot.fields
    assert len(again) == PHOTOS
    with pytest.raises(NotFoundError):
        mesh.open(f"s3://{photos}/train", snapshot="0" * 64, client=client)
    with pytest.raises(ConfigurationError, match=r"all 64 hexadecimal digits .* `mesh snapshots show"):
        mesh.open(f"s3://{photos}/train", snapshot=ds.snapshot.hash[:12], client=client)
    with pytest.raises(ConfigurationError, match=rf"is of s3://{photos}/train/, not of s3://other/v1/: open"):
        mesh.open("s3://other/v1", snapshot=ds.snapshot.hash, client=client)


def test_fields_are_guessed(client: mesh.Client, photos: str) -> None:
    assert mesh.open(f"s3://{photos}/train", client=client).snapshot.fields.keys() == {"image", "label"}


def test_files_of_a_desktop_are_no_fields(client: mesh.Client, bucket: str) -> None:
    for key in ("cat/1.jpg", "dog/2.jpg", "cat/Thumbs.db", ".DS_Store", "dog/desktop.ini"):
        client.put(bucket, key, b"some bytes")
    found = mesh.open(f"s3://{bucket}", client=client).snapshot
    assert (found.samples, sorted(found.fields)) == (2, ["image", "label"])
    client.put(bucket, "dog/3.mp4", b"some bytes")
    with pytest.raises(NotFoundError, match=r"were inferred .* --field image=jpg --field label=@class\)\.$"):
        mesh.open(f"s3://{bucket}", client=client)


def test_samples_by_index(ds: mesh.Dataset) -> None:
    assert ds[0]["image"].shape == (3, 32, 32)
    rows = ds.__getitems__([4, 40])
    assert [int(row["label"]) for row in rows] == [0, 1]
    assert (rows[0]["image"] == ds[4]["image"]).all()
    assert pickle.loads(pickle.dumps(ds))[4]["label"] == 0


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_torchs_own_dataloader(ds: mesh.Dataset, context: str) -> None:
    ds.schema()
    loader = DataLoader(ds, batch_size=10, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    assert [batch["image"].shape for batch in batches] == [(10, 3, 32, 32)] * 5
    assert torch.cat([batch["label"] for batch in batches]).sum() == PHOTOS // 2


def test_torchs_own_dataloader_in_this_process(ds: mesh.Dataset) -> None:
    (batch,) = list(DataLoader(ds.as_torch(), batch_size=PHOTOS, shuffle=True))
    assert ds.as_torch() is ds
    assert batch["image"].shape == (PHOTOS, 3, 32, 32)


def test_jobs_that_share_have_the_same_batches(ds: mesh.Dataset) -> None:
    first, second = (hashes(ds, 1, share="sweep") for _ in range(2))
    assert first == second == hashes(ds, 1)
    with mesh.Loader(ds, 16, seed=5, share="sweep", output="numpy") as loader:
        list(loader)
        assert loader.stats().hits == 4


def test_tar_shards_with_ragged_text(client: mesh.Client, photos: str) -> None:
    for shard in range(2):
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as archive:
            for number in range(shard * 6, shard * 6 + 6):
                parts = {"jpg": picture(number), "cls": b"%d" % number, "txt": b"x" * number}
                for ext, data in parts.items():
                    member = tarfile.TarInfo(f"{number:03}.{ext}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        client.put(photos, f"shards/{shard}.tar", body.getvalue())
    fields = {"image": "jpg", "label": "cls", "text": "txt"}
    ds = mesh.open(f"s3://{photos}/shards", fields=fields, client=client)
    assert mesh.open(f"s3://{photos}/shards", client=client).fields == ("image", "label", "txt")
    ds = ds.map(ops.decode("image"), ops.center_crop("image", 16), ops.int_label("label"))
    for output in ("numpy", "torch"):
        with mesh.Loader(ds, 5, shuffle=False, output=output, tail="ragged") as loader:
            batches = list(loader)
        labels = [int(label) for batch in batches for label in batch["label"]]
        assert labels == list(range(12))
        texts = [len(text) for batch in batches for text in batch["text"]]
        assert texts == list(range(12))
        assert batches[0]["image"].shape == (5, 16, 16, 3)
    assert bytes(ds[3]["text"]) == b"xxx"


def test_a_bad_photograph(client: mesh.Client, photos: str, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(8):
        body = picture(number) if number != 3 else b"\xff\xd8 torn"
        client.put(photos, f"torn/{number}.jpg", body)
    ds = mesh.open(f"s3://{photos}/torn", fields={"image": "jpg"}, client=client)
    ds = ds.map(ops.decode("image"), ops.center_crop("image", 16))
    caplog.set_level(logging.WARNING, "meshsdk")
    with mesh.Loader(ds, 8, max_bad=0.5, output="numpy") as loader:
        (batch,) = loader
        assert sorted(batch.status) == [0] * 7 + [1]
        assert loader.stats().flagged == 1
        assert len(list(loader)) == 1
        assert str(loader.stats()).endswith(", stand-ins: 2")
        (told,) = caplog.messages  # once a loader
        assert told.startswith("epoch 0, step 0: a sample could not be prepared")
        assert ["torn/3" in bad.key for bad in loader.bad()] == [True]
    with (
        mesh.Loader(ds, 8, on_bad="raise", output="numpy") as loader,
        pytest.raises(BadSampleError, match=r"torn/3") as raised,
    ):
        list(loader)
    assert "readers.py" not in {os.path.basename(entry.path) for entry in raised.traceback}
    with pytest.raises(BadSampleError, match=r"torn/3"):
        ds[3]


def test_what_the_node_refuses_is_told(client: mesh.Client, photos: str, ds: mesh.Dataset) -> None:
    with pytest.raises(NotFoundError, match="png"):
        mesh.open(f"s3://{photos}/train", fields={"image": "png"}, client=client)
    with pytest.raises(NotFoundError, match="mesh"):
        mesh.open("s3://no-such-bucket-here/train", fields={"image": "png"}, client=client)
    with pytest.raises((InvalidPlanError, ConfigurationError)):
        ds.map(ops.decode("image")).schema()
    with pytest.raises(MeshError):
        mesh.open(f"s3://{photos}/none", client=client)


def test_a_node_that_is_killed_and_comes_back_costs_only_time(tmp_path: Path) -> None:
    with Daemon.start(tmp_path / "data") as node:
        client = mesh.connect(node.endpoint, access_key=node.access_key, secret_key=node.secret_key)
        client.create_bucket("photos")
        for number in range(PHOTOS):
            client.put("photos", f"train/{number:03}.jpg", picture(number))
        ds = mesh.open("s3://photos/train", fields={"image": "jpg"}, client=client)
        ds = ds.map(ops.decode("image"), ops.random_resized_crop("image", 64), ops.to_chw("image"))
        with mesh.Loader(ds, 4, output="numpy", prefetch_bytes=200_000) as loader:
            whole = [batch["image"].tobytes() for batch in loader]
            loader.set_epoch(0)
            again = []
            for batch in loader:
                again.append(batch["image"].tobytes())
                if batch.step == 2:
                    node.kill()
                    comeback = threading.Timer(0.5, node.up)
                    comeback.start()
            await_end(comeback)
            assert again == whole
            assert loader.stats().retries > 0
        client.close()


INTERRUPTED = """
import sys
import meshsdk as mesh
from meshsdk import ops
ds = mesh.open(sys.argv[1], fields={"image": "jpg", "label": "@class"})
ds = ds.map(ops.decode("image"), ops.center_crop("image", 32))
loader = mesh.Loader(ds, 4, output="numpy")
print("ready", flush=True)
while True:
    for batch in loader:
        pass
"""


@pytest.mark.parametrize(("signal_number", "ended"), [(signal.SIGINT, "KeyboardInterrupt"), (None, "")])
def test_interrupted_and_at_exit_it_ends_at_once(
    daemon: Daemon, photos: str, signal_number: signal.Signals | None, ended: str
) -> None:
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    # At exit: an iterator is still held by the module when the interpreter ends.
    held = INTERRUPTED.replace(
        "while True:\n    for batch in loader:\n        pass", "it = iter(loader); next(it)"
    )
    program = INTERRUPTED if signal_number else held
    command = [sys.executable, "-W", "error", "-c", program, f"s3://{photos}/train"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if signal_number:
        process.send_signal(signal_number)
    _, errors = process.communicate(timeout=60)
    assert ended in errors if ended else errors == ""
    assert process.returncode == (0 if signal_number is None else -signal_number)
