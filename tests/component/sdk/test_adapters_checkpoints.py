"""torch's distributed checkpoints over a real daemon: parallel parts and ranges, nothing of what failed."""

from __future__ import annotations

import io
import os
import subprocess
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

import meshsdk as mesh
from meshsdk.adapters.checkpoints import CheckpointReader, CheckpointWriter, Ranges, Sending, merged
from meshsdk.errors import ConfigurationError, MeshError, NotFoundError, PreconditionError
from meshsdk.transfers import Tuning
from tests.support.daemons import Daemon
from tests.support.interpreters import python
from tests.support.origin_fixtures import bucket as backed_bucket
from tests.support.origin_fixtures import eventually, sdk, write_credentials
from tests.support.origin_places import Faults

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.origin_places import Place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
PART = 5 << 20  # the least that S3 takes
TUNING = Tuning(PART, 3)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as made:
        yield made


def model(seed: int) -> dict[str, Any]:
    """A large tensor of several parts, many small ones, and what is no tensor."""
    random = torch.Generator().manual_seed(seed)
    small = {f"layer.{number}": torch.randn(33, generator=random) for number in range(40)}
    return {"large": torch.randn(2_600_000, generator=random), **small, "step": seed, "name": "run"}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_a_checkpoint_comes_back(client: mesh.Client, bucket: str, threads: int) -> None:
    url = f"s3://{bucket}/run/{threads}"
    checkpoint.save(
        model(1), storage_writer=CheckpointWriter(url, client, tuning=TUNING, thread_count=threads)
    )
    files = sorted(entry.key for entry in client.list(bucket, f"run/{threads}/"))
    assert files == [f"run/{threads}/.metadata", *(f"run/{threads}/__0_{n}.distcp" for n in range(threads))]
    loaded = model(2)
    checkpoint.load(loaded, storage_reader=CheckpointReader(url, client, tuning=TUNING))
    assert same(loaded, model(1))
    part = {"layer.7": torch.zeros(33)}
    checkpoint.load(part, storage_reader=CheckpointReader(url.replace("s3://", "mesh://"), client))
    assert torch.equal(part["layer.7"], model(1)["layer.7"])


RANK = """
import sys
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from meshsdk.adapters.checkpoints import CheckpointReader, CheckpointWriter

url, meeting, rank = sys.argv[1:]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=2)
ranks = init_device_mesh("cpu", (2,))
whole = torch.arange(600_002.0).reshape(-1, 2)
rows = distribute_tensor(whole, ranks, [Shard(0)])
checkpoint.save({"weight": rows, "step": 7}, storage_writer=CheckpointWriter(url))
found = {"weight": distribute_tensor(torch.zeros_like(whole), ranks, [Shard(1)]), "step": 0}
checkpoint.load(found, storage_reader=CheckpointReader(url))
assert torch.equal(found["weight"].full_tensor(), whole) and found["step"] == 7
distributed.destroy_process_group()
"""


def test_ranks_write_their_parts_and_read_other_ones(
    client: mesh.Client, daemon: Daemon, bucket: str, tmp_path: Path
) -> None:
    """Two ranks save rows of a tensor each and load columns of it; one process loads all."""
    url = f"s3://{bucket}/run"
    keys = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
    env = os.environ | keys | {"MESH_ENDPOINT": daemon.endpoint, "GLOO_SOCKET_IFNAME": "lo"}
    command = [python(), "-c", RANK, url, str(tmp_path / "meeting")]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(subprocess.Popen([*command, str(rank)], env=env, stderr=subprocess.PIPE))
            for rank in range(2)
        ]
        for each in ranks:
            stack.callback(each.kill)
        errors = [each.communicate(timeout=100)[1].decode() for each in ranks]
        assert [each.returncode for each in ranks] == [0, 0], errors
    files = sorted(entry.key for entry in client.list(bucket, "run/"))
    assert files == ["run/.metadata", "run/__0_0.distcp", "run/__1_0.distcp"]
    found = {"weight": torch.zeros(300_001, 2), "step": 0}
    checkpoint.load(found, storage_reader=CheckpointReader(url, client))
    assert same(found, {"weight": torch.arange(600_002.0).reshape(-1, 2), "step": 7})


def test_a_checkpoint_is_replaced_or_refused(client: mesh.Client, bucket: str) -> None:
    url = f"s3://{bucket}/run"
    checkpoint.save(model(1), storage_writer=CheckpointWriter(url, client, overwrite=False))
    with pytest.raises(CheckpointException, match="already exists"):
        checkpoint.save(model(2), storage_writer=CheckpointWriter(url, client, overwrite=False))
    checkpoint.async_save(model(2), storage_writer=CheckpointWriter(f"{url}-2", client)).result(60)
    loaded = model(1)
    checkpoint.load(loaded, storage_reader=CheckpointReader(f"{url}-2", client))
    assert same(loaded, model(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # torch does not catch it
def test_a_file_that_fails_in_a_thread_of_torch_fails_the_checkpoint(
    client: mesh.Client, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(sending: Sending, data: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise MeshError("the disk is full")
        return written(sending, data)

    written, url = Sending.write, f"s3://{bucket}/run"
    monkeypatch.setattr(Sending, "write", refuse)
    with pytest.raises(CheckpointException, match="the disk is full"):
        checkpoint.save(model(1), storage_writer=CheckpointWriter(url, client, thread_count=3))
    assert "run/.metadata" not in {entry.key for entry in client.list(bucket)}


def test_what_fails_leaves_nothing(daemon: Daemon, client: mesh.Client, bucket: str) -> None:
    def write(key: str, parts: int, of: str = bucket) -> None:
        with Sending(client, of, key, TUNING) as sending:
            for _ in range(parts):
                sending.write(bytes(PART))
            sending.write(b"small")
            assert sending.tell() == parts * PART + 5
            if key == "half":
                raise ZeroDivisionError

    for parts in (0, 3):
        with pytest.raises(ZeroDivisionError):
            write("half", parts)
    s3 = daemon.client()
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    assert list(client.list(bucket)) == []
    for parts in (0, 1, 100):
        with pytest.raises(NotFoundError):
            write("whole", parts, "no-such-bucket-here")
    write("whole", 2)
    assert client.head(bucket, "whole").size == 2 * PART + 5


def test_written_back_it_waits_for_no_origin_and_survives_the_node(origin: Place, tmp_path: Path) -> None:
    """The origin would take half an hour for what is saved; the node is killed half way, and goes on."""
    write_credentials(tmp_path, origin)
    place = "checkpoints/run"

    def files() -> dict[str, bytes]:
        listed = origin.client.list_objects_v2(Bucket=origin.bucket, Prefix=place).get("Contents", ())
        found = {
            each["Key"]: origin.client.get_object(Bucket=origin.bucket, Key=each["Key"]) for each in listed
        }
        return {key.removeprefix("checkpoints/"): answer["Body"].read() for key, answer in found.items()}

    with Daemon.start(args=["--origin-credentials", str(tmp_path)]) as daemon:
        backed_bucket(daemon, origin, "checkpoints", write="back")
        origin.proxy.faults = Faults(upload_rate=5_000)
        with sdk(daemon) as client:
            writer = CheckpointWriter(f"s3://{place}", client, tuning=TUNING, thread_count=2)
            checkpoint.save(model(1), storage_writer=writer)
        assert not any(len(data) > 1 << 20 for data in files().values())  # it was acknowledged all the same
        eventually(lambda: any(".distcp" in head and "GET" not in head for head in origin.faults.heads))
        daemon.kill()
        origin.proxy.faults = Faults()
        daemon.up()
        loaded = model(2)
        with sdk(daemon) as client:
            reader = CheckpointReader(f"s3://{place}", client, tuning=TUNING)
            checkpoint.load(loaded, storage_reader=reader)
            assert same(loaded, model(1))
            names = ["run/.metadata", "run/__0_0.distcp", "run/__0_1.distcp"]
            saved = {name: client.get("checkpoints", name) for name in names}
        eventually(lambda: files() == saved)


def test_what_is_wrong_is_told_at_once(client: mesh.Client, bucket: str) -> None:
    for url in ("s3://runs", "/tmp/runs", "https://runs/1"):
        with pytest.raises(ConfigurationError, match="s3://runs/step-700"):
            CheckpointWriter(url, client)
    with pytest.raises(CheckpointException, match="mesh mb s3://no-such-bucket-here"):
        checkpoint.save(model(1), storage_writer=CheckpointWriter("s3://no-such-bucket-here/x", client))
    with pytest.raises(CheckpointException, match="no object"):
        checkpoint.load(model(1), storage_reader=CheckpointReader(f"s3://{bucket}/none", client))


def test_ranges_are_one_version(client: mesh.Client, bucket: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8).tobytes()
    client.put(bucket, "data", data)
    spans = merged([(900_000, 900_010), (5, 9), (9, 400), (1000, 1001), (300_000, 700_000)], 1 << 19)
    assert spans == [(5, 1001), (300_000, 700_000), (900_000, 900_010)]
    with Ranges(client, bucket, "data", spans, Tuning(100_000, 2)) as ranges:
        reader = io.BufferedReader(ranges, 8)
        for start, size in ((7, 300), (300_000, 400_000), (310_000, 5), (900_003, 7)):
            reader.seek(start)
            assert reader.read(size) == data[start : start + size]
        ranges.seek(2000)
        assert ranges.read(1) == b""
    with Ranges(client, bucket, "data", [(0, 10), (900_000, 900_010)], Tuning(100_000, 1)) as ranges:
        client.put(bucket, "data", data[::-1])
        with pytest.raises(PreconditionError):
            ranges.read(10)


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")
@pytest.mark.filterwarnings("ignore:torch.distributed.checkpoint._fsspec_filesystem is deprecated")
def test_it_is_not_slower_than_fsspec(client: mesh.Client, daemon: Daemon, bucket: str) -> None:
    """Prints the ratio; asserts only that both give the same."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    import meshsdk.adapters.filesystems  # noqa: F401  its scheme

    keys = {"access_key": daemon.access_key, "secret_key": daemon.secret_key}
    options = {"endpoint": daemon.endpoint, **keys}
    state, seconds = model(1), {}
    for name, writer, reader in (
        ("fsspec", lambda url: FsspecWriter(url, **options), lambda url: FsspecReader(url, **options)),
        ("ours", lambda url: CheckpointWriter(url, client), lambda url: CheckpointReader(url, client)),
    ):
        loaded, url = model(2), f"mesh://{bucket}/{name}"
        began = time.perf_counter()
        checkpoint.save(state, storage_writer=writer(url))
        saved = time.perf_counter()
        checkpoint.load(loaded, storage_reader=reader(url))
        seconds[name] = saved - began, time.perf_counter() - saved
        assert same(loaded, state)
    save, load = (theirs / ours for theirs, ours in zip(seconds["fsspec"], seconds["ours"], strict=True))
    print(f"checkpoint of 10 MB: saved {save:.1f}×, loaded {load:.1f}× as fast as over fsspec")
