"""Arrays that zarr-python wrote, cut into windows over any axes through the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, InvalidPlanError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

SERIES = np.random.default_rng(7).standard_normal((9, 20, 6)).astype(np.float32)
TILE = (2, 5, 3)
GRID = (4, 4, 2)  # the last of the first axis reaches beyond the array
LABELS = np.arange(1, 33, dtype=np.int64)  # none is the fill value, whose chunks are not written


def tiles() -> list[Any]:
    return [
        SERIES[tuple(slice(at * size, at * size + size) for at, size in zip(place, TILE, strict=True))]
        for place in np.ndindex(GRID)
    ]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    stored: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(stored), mode="w", zarr_format=3)

    def add(name: str, data: Any, **how: Any) -> None:
        group.create_array(name, shape=data.shape, dtype=data.dtype, **how)[:] = data

    add("plain", SERIES, chunks=TILE, compressors=None)
    add("packed", SERIES, chunks=TILE, compressors=ZstdCodec())
    add("sharded", SERIES, chunks=TILE, shards=(4, 10, 6), compressors=[GzipCodec(), Crc32cCodec()])
    add("labels", LABELS, chunks=(1,), compressors=None)
    add("long", np.arange(100.0), chunks=(50,), compressors=ZstdCodec())
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("arrays")
        for key, value in stored.items():
            client.put("arrays", f"v1/{key}", value.to_bytes())
        yield client


def opened(client: Client, *names: str) -> mesh.Dataset:
    fields = {name: name for name in names}
    ds = mesh.open("s3://arrays/v1", fields=fields, kind="chunks", client=client)
    return ds.map(*(ops.zarr_chunk(name, f"s3://arrays/v1/{name}/zarr.json") for name in names))


@pytest.mark.parametrize("name", ["plain", "packed", "sharded"])
def test_chunks_are_windows_over_all_axes(client: Client, name: str) -> None:
    ds = opened(client, name, "labels")
    assert (len(ds), ds.snapshot.skipped) == (32, 8)
    assert ds.snapshot.shards == (4 if name == "sharded" else 32)
    expected = tiles()
    with mesh.Loader(ds, 8, seed=2, shuffle=mesh.Blocks(shards=2), output="numpy") as loader:
        seen = []
        for batch in loader:
            for row in range(8):
                number = int(batch["labels"][row, 0]) - 1
                seen.append(number)
                assert np.array_equal(batch[name][row], expected[number])
    assert sorted(seen) == list(range(32))


def test_random_windows_within_chunks_are_the_same_for_every_world_size(client: Client) -> None:
    ds = opened(client, "long").map(ops.window("long", [8]))
    whole = mesh.Loader(ds, 2, seed=5, output="numpy", rank=0, world=1).at(0)["long"]
    parts = [mesh.Loader(ds, 2, seed=5, output="numpy", rank=r, world=2).at(0)["long"] for r in range(2)]
    assert np.array_equal(np.concatenate(parts), whole)
    for row in whole:
        assert np.array_equal(np.diff(row), np.ones(7))
        assert row[0] // 50 == row[-1] // 50
    other = mesh.Loader(ds, 2, seed=6, output="numpy", rank=0, world=1).at(0)["long"]
    assert not np.array_equal(np.sort(other, axis=0), np.sort(whole, axis=0))


def test_what_cannot_be_chunks_says_so(client: Client) -> None:
    with pytest.raises(InvalidPlanError, match="the arrays have 2 and 32 chunks"):
        opened(client, "long", "packed")
    fields = {"x": {"array": "long", "chunks": True}, "y": {"array": "labels"}}
    with pytest.raises(InvalidPlanError, match="use one for all fields"):
        mesh.open("s3://arrays/v1", fields=fields, kind="zarr", client=client)
    with pytest.raises(InvalidPlanError, match="or with kind='chunks'"):
        mesh.open("s3://arrays/v1", fields={"x": "long"}, kind="zarr", client=client)
    client.put("arrays", "v1/packed/c/0/0/0", b"\x28\xb5\x2f\xfd garbage")
    with pytest.raises(BadSampleError, match="not zstd"):
        opened(client, "packed")[0]
    client.put("arrays", "v1/plain/c/0/0/0", b"short")
    with pytest.raises(BadSampleError, match="a chunk has 5 bytes instead of 120"):
        opened(client, "plain")
