"""Other libraries over a real daemon, through the adapters: files, arrays, torchdata's loaders."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import urllib.request
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import meshsdk as mesh
from meshsdk.adapters import filesystems
from meshsdk.adapters.filesystems import MeshFileSystem
from meshsdk.adapters.zarrs import MeshStore
from meshsdk.errors import ConfigurationError, PreconditionError
from meshsdk.transfers import Tuning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[mesh.Client]:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    with mesh.connect() as client:
        yield client


@pytest.fixture
def fs(client: mesh.Client) -> MeshFileSystem:
    made = fsspec.filesystem("mesh", skip_instance_cache=True)
    assert isinstance(made, MeshFileSystem)
    return made


# --- fsspec ---------------------------------------------------------------------------------------


def test_files_are_written_read_and_found(fs: MeshFileSystem, bucket: str) -> None:
    for name in ("a/1.txt", "a/b/2.txt", "a/b/3.txt", "z.txt"):
        with fs.open(f"mesh://{bucket}/{name}", "wb") as file:
            file.write(b"this is ")
            file.write(name.encode())
    with fs.open(f"{bucket}/a/b/2.txt", "rb", block_size=4) as file:
        assert (file.read(4), file.seek(-5, 2), file.read()) == (b"this", 12, b"2.txt")
    assert fs.ls(f"mesh://{bucket}", detail=False) == [f"{bucket}/a", f"{bucket}/z.txt"]
    assert fs.ls(f"{bucket}/a/1.txt", detail=False) == [f"{bucket}/a/1.txt"]
    assert fs.find(f"{bucket}/a") == [f"{bucket}/a/{name}" for name in ("1.txt", "b/2.txt", "b/3.txt")]
    assert fs.find(f"{bucket}/z.txt") == [f"{bucket}/z.txt"]
    assert fs.glob(f"mesh://{bucket}/**/3.txt") == [f"{bucket}/a/b/3.txt"]
    assert (fs.isdir(f"{bucket}/a"), fs.isdir(f"{bucket}/z.txt"), fs.isdir(bucket)) == (True, False, True)
    assert f"{bucket}" in fs.ls("mesh://", detail=False)
    assert fs.info(f"{bucket}/z.txt")["size"] == fs.size(f"{bucket}/z.txt") == 13
    fs.cp(f"{bucket}/a/b", f"{bucket}/c", recursive=True)
    assert fs.find(f"{bucket}/c") == [f"{bucket}/c/2.txt", f"{bucket}/c/3.txt"]
    fs.mv(f"{bucket}/c/2.txt", f"{bucket}/c/4.txt")
    fs.rm(f"{bucket}/a", recursive=True)
    fs.rm(f"{bucket}/c/3.txt")
    assert fs.find(bucket) == [f"{bucket}/c/4.txt", f"{bucket}/z.txt"]


def test_text_whose_block_failed_is_not_stored(fs: MeshFileSystem, bucket: str) -> None:
    """What was there stays, as of bytes."""
    path = f"{bucket}/text"
    fs.write_text(path, "all of it")
    for mode in ("w", "wt", "a", "wb"):
        with contextlib.suppress(KeyboardInterrupt), fs.open(path, mode) as file:
            file.write("a part" if mode != "wb" else b"a part")
            raise KeyboardInterrupt
        assert fs.read_text(path) == "all of it"
    with fs.open(path, "w", encoding="utf-16-le", newline="\r\n") as file:
        file.write("ä\n")
    with fs.open(path, "a", None, encoding="utf-16-le") as file:
        file.write("b")
    assert fs.cat_file(path) == "ä\r\nb".encode("utf-16-le")
    with pytest.raises(FileExistsError):
        fs.open(path, "x")


def test_ranges_beyond_the_end_are_empty(fs: MeshFileSystem, bucket: str) -> None:
    """As of a local file; `head` of an empty one asks for such a range."""
    fs.pipe({f"{bucket}/empty": b"", f"{bucket}/three": b"abc"})
    assert fs.cat_file(f"{bucket}/empty", 0, 10) == fs.head(f"{bucket}/empty") == b""
    assert fs.cat_file(f"{bucket}/three", 3) == fs.cat_file(f"{bucket}/three", 7, 9) == b""
    assert fs.cat_ranges([f"{bucket}/three"] * 3, [1, 3, 7], [10, 4, 9]) == [b"bc", b"", b""]
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{bucket}/none", 0, 10)


def test_an_empty_folder_has_nothing_in_it(fs: MeshFileSystem, bucket: str) -> None:
    fs.client.put(bucket, "folder/", b"")
    assert fs.isdir(f"{bucket}/folder")
    assert fs.ls(f"{bucket}/folder") == list(fs.find(f"{bucket}/folder")) == []


def test_a_checksum_is_the_same_in_every_process(fs: MeshFileSystem, bucket: str) -> None:
    """Caches on disk compare it with that of an earlier program."""
    fs.pipe({f"{bucket}/a": b"abc", f"{bucket}/b": b"abc", f"{bucket}/c": b"abd"})
    assert fs.checksum(f"{bucket}/a") == fs.checksum(f"{bucket}/b") != fs.checksum(f"{bucket}/c")
    code = f"import fsspec; print(fsspec.filesystem('mesh').checksum('{bucket}/a'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {f"{fs.checksum(f'{bucket}/a')}\n"}


def test_a_copy_of_more_than_s3_copies_at_once_is_one_of_parts(
    fs: MeshFileSystem, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(11 << 20)
    fs.pipe_file(f"{bucket}/a", data)
    monkeypatch.setattr(filesystems, "COPYING_WHOLE", Tuning(5 << 20, 2))
    fs.mv(f"{bucket}/a", f"{bucket}/b")
    assert fs.cat_file(f"{bucket}/b") == data
    assert fs.info(f"{bucket}/b")["ETag"].endswith("-3")


def test_ranges_come_in_one_gather(fs: MeshFileSystem, bucket: str) -> None:
    fs.pipe({f"{bucket}/one": b"0123456789", f"{bucket}/two": b"abc"})
    assert fs.cat([f"{bucket}/one", f"{bucket}/two"]) == {
        f"{bucket}/one": b"0123456789",
        f"{bucket}/two": b"abc",
    }
    assert fs.cat_file(f"{bucket}/one", start=-3) == b"789"
    assert fs.cat_file(f"{bucket}/one", start=2, end=4) == b"23"
    paths = [f"mesh://{bucket}/{name}" for name in ("one", "two", "none", "one")]
    found = fs.cat_ranges(paths, [1, 0, 0, 5], [3, 2, 1, 9])
    assert (found[0], found[1], found[3]) == (b"12", b"ab", b"5678")
    assert isinstance(found[2], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, [1, 0, 0, 5], [3, 2, 1, 9], on_error="raise")
    assert fs.cat_ranges(paths[:2], 1, None) == [b"123456789", b"bc"]


def test_folders_go_up_and_down(fs: MeshFileSystem, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "up" / "deep").mkdir(parents=True)
    (tmp_path / "up" / "deep" / "file").write_bytes(b"x" * 100)
    fs.put(f"{tmp_path}/up", f"{bucket}/up", recursive=True)
    fs.get(f"{bucket}/up", f"{tmp_path}/down", recursive=True)
    assert (tmp_path / "down" / "deep" / "file").read_bytes() == b"x" * 100


def test_what_is_missing_replaced_or_failed_is_told(fs: MeshFileSystem, bucket: str) -> None:
    for ask in (fs.info, fs.cat_file, fs.open, fs.ls):
        with pytest.raises(FileNotFoundError):
            ask(f"{bucket}/none")
    with pytest.raises(FileNotFoundError):
        fs.info("no-such-bucket-here")
    with pytest.raises(ConfigurationError, match="as a whole"):
        fs.open(f"{bucket}/log", "r+b")
    with contextlib.suppress(ZeroDivisionError), fs.open(f"{bucket}/half", "wb") as file:
        file.write(b"half")
        _ = 1 / 0
    assert not fs.exists(f"{bucket}/half")
    fs.pipe_file(f"{bucket}/file", b"old", mode="create")
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{bucket}/file", b"other", mode="create")
    with fs.open(f"{bucket}/file", "rb") as file:
        fs.pipe_file(f"{bucket}/file", b"new")
        with pytest.raises(PreconditionError):
            file.read()


@pytest.mark.parametrize("size", [10, 17 << 20])  # in one request, and in parts
def test_a_file_is_created_once(fs: MeshFileSystem, bucket: str, size: int) -> None:
    with fs.open(f"{bucket}/lock", "xb") as file:
        file.write(b"1" * size)
    with pytest.raises(FileExistsError):
        fs.open(f"{bucket}/lock", "xb")
    late = fs.open(f"{bucket}/late", "xb")
    late.write(b"2" * size)
    fs.pipe_file(f"{bucket}/late", b"first")
    with pytest.raises(FileExistsError):
        late.close()
    assert (fs.size(f"{bucket}/lock"), fs.cat_file(f"{bucket}/late")) == (size, b"first")


@pytest.mark.parametrize("size", [10, 17 << 20])
def test_a_file_grows_by_what_is_appended(
    fs: MeshFileSystem, client: mesh.Client, bucket: str, size: int
) -> None:
    client.put(bucket, "log", b"1" * size, metadata={"of": "run"}, content_type="text/x-log")
    for mode in ("ab", "a"):
        with fs.open(f"{bucket}/log", mode) as file:
            assert file.tell() >= size
            file.write(b"2" if mode == "ab" else "3")
    assert fs.cat_file(f"{bucket}/log") == b"1" * size + b"23"
    found = client.head(bucket, "log")
    assert (found.metadata, found.content_type) == ({"of": "run"}, "text/x-log")
    with fs.open(f"{bucket}/log", "ab") as file:
        file.write(b"4")
        fs.pipe_file(f"{bucket}/log", b"other")
        with pytest.raises(PreconditionError):
            file.close()
    assert fs.cat_file(f"{bucket}/log") == b"other"
    with fs.open(f"{bucket}/new", "ab") as file:
        file.write(b"5")
    assert fs.cat_file(f"{bucket}/new") == b"5"


def test_a_signed_url_is_read_without_keys(fs: MeshFileSystem, bucket: str) -> None:
    fs.pipe_file(f"{bucket}/ä b+c.txt", b"hello")
    url = fs.sign(f"mesh://{bucket}/ä b+c.txt", expiration=60)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"hello"
    with pytest.raises(ValueError, match="604800"):
        fs.sign(f"{bucket}/k", expiration=10**7)
    with pytest.raises(ConfigurationError, match="a bucket and a key"):
        fs.sign(bucket)


def test_a_bucket_goes_when_it_is_empty(fs: MeshFileSystem, bucket: str) -> None:
    own = f"{bucket}-own"
    fs.mkdir(own)
    fs.pipe_file(f"{own}/folder/file", b"1")
    with pytest.raises(OSError, match="not empty") as met:
        fs.rmdir(f"mesh://{own}")
    assert met.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileNotFoundError):
        fs.rmdir("no-such-bucket-here")
    fs.rm(f"{own}/folder", recursive=True)
    fs.rmdir(own)
    assert not fs.exists(own)


def test_text_and_urls_of_other_libraries(fs: MeshFileSystem, bucket: str) -> None:
    with fsspec.open(f"mesh://{bucket}/lines.jsonl", "w") as file:
        file.write(json.dumps({"text": "für"}) + "\n")
    with fsspec.open(f"mesh://{bucket}/lines.jsonl", "r") as file:
        assert json.loads(file.readline()) == {"text": "für"}
    again = pickle.loads(pickle.dumps(fs))
    assert again.cat(f"{bucket}/lines.jsonl") == fs.cat(f"{bucket}/lines.jsonl")


def test_files_of_a_transaction_are_there_together_or_not_at_all(fs: MeshFileSystem, bucket: str) -> None:
    with fs.transaction:
        for name in ("one", "two"):
            with fs.open(f"{bucket}/{name}", "wb") as file:
                file.write(b"whole")
        assert fs.find(bucket) == []
    assert fs.find(bucket) == [f"{bucket}/one", f"{bucket}/two"]
    assert fs.cat_file(f"{bucket}/two") == b"whole"
    with contextlib.suppress(ZeroDivisionError), fs.transaction:
        with fs.open(f"{bucket}/three", "wb") as file:
            file.write(b"half")
        _ = 1 / 0
    with contextlib.suppress(ZeroDivisionError), fs.transaction, fs.open(f"{bucket}/four", "wb") as file:
        file.write(b"half")
        _ = 1 / 0
    assert len(fs.find(bucket)) == 2


@pytest.mark.usefixtures("client")
def test_options_that_are_any_file_systems_are_taken(bucket: str) -> None:
    """zarr gives `asynchronous` to whatever is behind a URL."""
    MeshFileSystem.clear_instance_cache()  # of those with another endpoint in the environment
    array = zarr.create_array(f"mesh://{bucket}/waves", shape=(4, 3), chunks=(2, 3), dtype="int32")
    array[:] = np.arange(12).reshape(4, 3)
    assert zarr.open_array(f"mesh://{bucket}/waves", mode="r")[2].tolist() == [6, 7, 8]
    with fsspec.open(f"mesh://{bucket}/waves/zarr.json", block_size=7) as file:
        assert file.blocksize == 7
        assert json.load(file)["shape"] == [4, 3]
    with pytest.raises(TypeError, match="endpont"):
        fsspec.filesystem("mesh", endpont="http://127.0.0.1:1")
    MeshFileSystem.clear_instance_cache()


# --- zarr -----------------------------------------------------------------------------------------


def test_arrays_are_written_and_read(client: mesh.Client, bucket: str) -> None:
    store = MeshStore(f"s3://{bucket}/arrays", client)
    values = np.arange(2000, dtype="int32").reshape(40, 50)
    group = zarr.create_group(store)
    group.create_array("grid", data=values, chunks=(1, 50), shards=(16, 50))
    group.create_group("empty").attrs["why"] = "none"
    again = zarr.open_group(MeshStore(f"s3://{bucket}/arrays"), mode="r")
    assert np.array_equal(again["grid"][3:30:5, ::7], values[3:30:5, ::7])
    assert sorted(again.keys()) == ["empty", "grid"]
    assert again["empty"].attrs["why"] == "none"
    plain = {entry.key for entry in client.list(bucket)}
    assert "arrays/grid/zarr.json" in plain
    ours = mesh.open(f"s3://{bucket}/arrays", fields={"row": "grid"}, kind="zarr", client=client)
    assert len(ours) == 40
    del group["grid"]
    assert not any("grid" in entry.key for entry in client.list(bucket))


def test_the_store_keeps_zarrs_rules(client: mesh.Client, bucket: str) -> None:
    store = MeshStore(f"s3://{bucket}/raw", client)
    prototype = default_buffer_prototype()

    def buffer(body: bytes) -> Any:
        return prototype.buffer.from_bytes(body)

    async def check() -> None:
        await store.set("a/b", buffer(b"0123456789"))
        await store.set_if_not_exists("a/b", buffer(b"other"))
        await store.set("a/c/d", buffer(b"deep"))
        ranges = [RangeByteRequest(2, 5), OffsetByteRequest(7), SuffixByteRequest(2), None]
        found = await store.get_partial_values(prototype, [("a/b", wanted) for wanted in ranges])
        assert [part.to_bytes() for part in found] == [b"234", b"789", b"89", b"0123456789"]
        wrong: Any = (2, 5)
        with pytest.raises(ValueError, match="Unexpected byte_range"):
            await store.get("a/b", prototype, wrong)
        assert await store.get("none", prototype) is None
        assert (await store.exists("a/b"), await store.exists("a")) == (True, False)
        assert await store.getsize("a/c/d") == 4
        assert [name async for name in store.list()] == ["a/b", "a/c/d"]
        assert sorted([name async for name in store.list_dir("a")]) == ["b", "c"]
        assert [name async for name in store.list_prefix("a/c")] == ["a/c/d"]
        assert not await store.is_empty("a")
        await store.delete("a/b")
        await store.delete_dir("a")
        assert await store.is_empty("")
        with pytest.raises(ValueError, match="read-only"):
            await store.with_read_only(True).set("x", buffer(b""))

    asyncio.run(check())
    assert pickle.loads(pickle.dumps(store)) == store


# --- torchdata ------------------------------------------------------------------------------------


@pytest.fixture
def numbers(client: mesh.Client, bucket: str) -> mesh.Dataset:
    """Twenty samples that are their own number."""
    from meshsdk import ops

    for number in range(20):
        client.put(bucket, f"n/{number:02}.cls", str(number).encode())
    return mesh.open(f"s3://{bucket}/n", fields={"n": "cls"}, client=client).map(ops.int_label("n"))


def values(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch["n"]]


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata 0.11 on torch 2.13
def test_a_stateful_data_loader_resumes(numbers: mesh.Dataset) -> None:
    from torchdata import stateful_dataloader as stateful

    from meshsdk.adapters.torchdata import LoaderDataset, as_it_is

    def make() -> Any:
        dataset = LoaderDataset(mesh.Loader(numbers, 4, seed=3))
        return stateful.StatefulDataLoader(dataset, batch_size=None, collate_fn=as_it_is)

    whole = values(make())
    assert sorted(whole) == list(range(20))
    first = make()
    batches = iter(first)
    begun = values([next(batches), next(batches)])
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert begun + values(resumed) == whole
    assert sorted(values(resumed)) == list(range(20))  # the next epoch


def test_a_node_of_a_graph_resumes(numbers: mesh.Dataset) -> None:
    from torchdata import nodes

    from meshsdk.adapters.torchdata import LoaderNode

    def make() -> Any:
        mapped = nodes.Mapper(LoaderNode(mesh.Loader(numbers, 4, seed=3)), lambda batch: batch["n"] * 2)
        return nodes.Loader(mapped)

    whole = [row.tolist() for row in make()]
    first = make()
    batches = iter(first)
    begun = [next(batches).tolist() for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert begun + [row.tolist() for row in resumed] == whole


# --- webdataset and torch's checkpoints -----------------------------------------------------------


def test_webdataset_reads_shards(client: mesh.Client, bucket: str) -> None:
    import webdataset

    from meshsdk.adapters.webdatasets import register

    for shard in range(2):
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as tar:
            for number in range(3 * shard, 3 * shard + 3):
                member = tarfile.TarInfo(f"{number:03}.txt")
                member.size = 300_000
                tar.addfile(member, io.BytesIO(b"%d" % number * 300_000))
        client.put(bucket, f"shard-{shard}.tar", body.getvalue())
    register(client)
    samples = list(webdataset.WebDataset(f"mesh://{bucket}/shard-{{0..1}}.tar", shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"{number:03}" for number in range(6)]
    assert all(sample["txt"] == sample["__key__"][-1:].encode() * 300_000 for sample in samples)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")  # torch 2.15, of any fsspec store
def test_torchs_distributed_checkpoints_are_folders_of_the_store(fs: MeshFileSystem, bucket: str) -> None:
    import torch
    from torch.distributed import checkpoint

    weights = {"weight": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7)}
    checkpoint.save(weights, checkpoint_id=f"mesh://{bucket}/run/1")
    assert {name.rpartition("/")[2] for name in fs.find(f"{bucket}/run/1")} == {".metadata", "__0_0.distcp"}
    loaded = {"weight": torch.zeros(3, 4), "step": torch.tensor(0)}
    checkpoint.load(loaded, checkpoint_id=f"mesh://{bucket}/run/1")
    assert torch.equal(loaded["weight"], weights["weight"])
    assert int(loaded["step"]) == 7
