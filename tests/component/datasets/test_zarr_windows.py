"""Windows over several variables through a node, compared with xarray: Zarr 2 and 3, and references."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import pytest
import xarray
import zarr.codecs

import meshsdk as mesh
from meshsdk import ops
from meshsdk.adapters.zarrs import MeshStore
from meshsdk.errors import AccessError, ConfigurationError, NotFoundError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

TIMES, ROWS, COLUMNS = 30, 7, 11
NAMES = ["t2m", "sst", "time", "lat"]
PACKED = {
    "chunks": (5, 7, 11),
    "dtype": "i2",
    "scale_factor": 0.01,
    "add_offset": 290.0,
    "_FillValue": -32768,
}


def weather() -> Any:
    random = np.random.default_rng(5)
    shape, dims = (TIMES, ROWS, COLUMNS), ("time", "lat", "lon")
    warm = random.normal(280, 10, shape).astype(np.float32)
    sea = np.where(random.random(shape) < 0.2, np.nan, random.normal(290, 3, shape)).astype(np.float32)
    coordinates = {"time": np.arange(TIMES), "lat": np.linspace(-60, 60, ROWS, dtype=np.float32)}
    return xarray.Dataset({"t2m": (dims, warm), "sst": (dims, sea)}, coords=coordinates)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("climate")
        how = {
            2: {"t2m": {"chunks": (4, 3, 11), "compressors": (numcodecs.Blosc("lz4"),)}, "sst": PACKED},
            3: {
                "t2m": {"chunks": (2, 7, 11), "shards": (8, 7, 11), "compressors": zarr.codecs.BloscCodec()},
                "sst": PACKED,
            },
        }
        for version, encoding in how.items():
            store = MeshStore(f"s3://climate/v{version}.zarr", client=client)
            weather().to_zarr(store, zarr_format=version, encoding=encoding, consolidated=False)
        yield client


def check(dataset: Any, whole: Any, stride: int, length: int, rows: int) -> None:
    """Every sample is the slice of each variable."""
    starts = [
        (time, row)
        for time in range(0, TIMES - length + 1, stride)
        for row in range(0, ROWS - rows + 1, rows)
    ]
    assert len(dataset) == len(starts)
    for sample, (time, row) in zip(dataset, starts, strict=True):
        part = whole.isel(time=slice(time, time + length), lat=slice(row, row + rows))
        for name in NAMES:
            assert sample[name].shape == part[name].shape
            np.testing.assert_allclose(sample[name], part[name].values, rtol=1e-6)


@pytest.mark.parametrize("version", [2, 3])
def test_windows_are_xarrays_slices(client: Client, version: int) -> None:
    url = f"s3://climate/v{version}.zarr"
    whole = xarray.open_zarr(MeshStore(url, client=client), consolidated=False).load()
    options: dict[str, Any] = {"window": {"time": 6, "lat": 3}, "stride": {"time": 4}, "client": client}
    found = mesh.open_zarr(url, NAMES, **options)
    check(found, whole, 4, 6, 3)
    assert np.isnan(whole["sst"].values).any()
    assert mesh.open_zarr(url, NAMES, **options).snapshot.hash == found.snapshot.hash
    assert found.stats().sizes.keys() == set(NAMES)
    # Every window once, over two ranks, in other orders; the variables of a row belong together.
    times = []
    for rank in range(2):
        with mesh.Loader(found, 4, seed=3, rank=rank, world=2, output="numpy") as loader:
            for batch in loader:
                kept = np.asarray(batch.status) == 0
                fields = (batch[name][kept] for name in ("time", "t2m", "lat"))
                for (first, *_), warm, row in zip(*fields, strict=True):
                    at = int(np.searchsorted(whole["lat"].values, row[0]))
                    part = whole["t2m"].values[first : first + 6, at : at + 3]
                    np.testing.assert_array_equal(warm, part)
                    times.append((int(first), at))
    assert sorted(times) == sorted((time, row) for time in range(0, 25, 4) for row in (0, 3))


def test_indexes_of_shards_are_read_once_and_again_if_their_copy_is_damaged(client: Client) -> None:
    values = np.arange(40 * ROWS, dtype=np.float32).reshape(40, ROWS)
    url, place = "s3://climate/shards.zarr", "shards.zarr.windows/shards-"

    def write(first: float) -> None:
        array = zarr.create_array(
            MeshStore(url, client=client), shape=values.shape, chunks=(2, ROWS), shards=(4, ROWS),
            dtype="f4", overwrite=True,
        )  # fmt: skip
        array[:] = values + first

    def opened() -> mesh.Dataset:
        return mesh.open_zarr(url, {"values": "/"}, window={"dim_0": 6}, client=client)

    write(1)
    found = opened()
    (copy,) = [entry.key for entry in client.list("climate", place)]
    good = client.get("climate", copy)
    for damaged in (b"", good[:-1], good[:300] + bytes(len(good) - 300)):
        client.put("climate", copy, damaged)
        again = opened()
        assert again.snapshot.hash == found.snapshot.hash
        np.testing.assert_array_equal(again[5]["values"], values[30:36] + 1)
        assert client.get("climate", copy) in (good, damaged)
    write(2)  # other shards: another copy
    np.testing.assert_array_equal(opened()[5]["values"], values[30:36] + 2)
    assert len([*client.list("climate", place)]) == 2


def test_windows_are_filtered_split_renamed_and_mixed_like_any_samples(client: Client) -> None:
    def between(first: int, end: int) -> Any:
        within = {"time": (first, end)}
        return mesh.open_zarr(
            "s3://climate/v2.zarr",
            {"x": "t2m", "when": "time"},
            window={"time": 8},
            within=within,
            client=client,
        )

    train, test = between(0, 16), between(16, 32 - 2)
    assert [int(sample["when"][0]) for sample in train] == [0, 8]
    assert [int(sample["when"][0]) for sample in test] == [16]
    assert len(train.filter("name == 'time=8'")) == 1
    renamed = train.select("x").rename(x="warm")
    np.testing.assert_array_equal(renamed[1]["warm"], train[1]["x"])
    both = train.join(renamed)
    assert both.fields == ("warm", "when", "x")
    np.testing.assert_array_equal(both[1]["warm"], both[1]["x"])


@pytest.mark.parametrize("version", [2, 3])
def test_a_store_may_be_one_array(client: Client, version: int) -> None:
    values = np.arange(TIMES * ROWS, dtype=np.float32).reshape(TIMES, ROWS)
    store = MeshStore(f"s3://climate/one{version}.zarr", client=client)
    zarr.create_array(store, shape=values.shape, chunks=(4, ROWS), dtype="f4", zarr_format=version)[:] = (
        values
    )
    dataset = mesh.open_zarr(
        f"s3://climate/one{version}.zarr", {"values": "/"}, window={"dim_0": 6}, client=client
    )
    assert len(dataset) == TIMES // 6
    for number, sample in enumerate(dataset):
        assert np.array_equal(sample["values"], values[6 * number :][:6])
    with pytest.raises(NotFoundError, match="known: /"):
        mesh.open_zarr(f"s3://climate/one{version}.zarr", ["values"], window={"dim_0": 6}, client=client)


def test_statistics_are_numpys(client: Client) -> None:
    found = mesh.open_zarr("s3://climate/v2.zarr", ["t2m", "sst"], window={"time": 3}, client=client)
    whole = weather()
    sea = mesh.field_statistics(found, "sst")["sst"]
    values = whole["sst"].values.astype(np.float64)
    assert sea.missing == np.isnan(values).sum()
    assert sea.count == values.size - sea.missing
    np.testing.assert_allclose([sea.mean, sea.std], [np.nanmean(values), np.nanstd(values)], rtol=1e-4)
    np.testing.assert_allclose([sea.low, sea.high], [np.nanmin(values), np.nanmax(values)], rtol=1e-4)
    by_row = mesh.field_statistics(found, "t2m", axis=1)["t2m"]
    warm = whole["t2m"].values.astype(np.float64)
    np.testing.assert_allclose(by_row.mean, warm.mean(axis=(0, 2)))
    np.testing.assert_allclose(by_row.std, warm.std(axis=(0, 2)))
    some = mesh.field_statistics(found, "t2m", samples=4)["t2m"]
    assert some.count == 4 * 3 * ROWS * COLUMNS
    normal = found.map(ops.normalize("t2m", mean=float(warm.mean()), std=float(warm.std()), scale=1.0))
    assert abs(mesh.field_statistics(normal, "t2m")["t2m"].mean) < 1e-3


def test_a_netcdf_file_is_read_in_place_by_references(client: Client, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    hdf = pytest.importorskip("kerchunk.hdf")
    whole, file = weather().drop_vars("sst"), tmp_path / "day.nc"
    with h5py.File(file, "w") as made:
        for name in ("time", "lat", "t2m"):
            values = whole[name].values
            how = {"chunks": (4, 3, 11), "compression": "gzip", "shuffle": True} if name == "t2m" else {}
            made.create_dataset(name, data=values, **how)
        for axis, name in enumerate(("time", "lat")):
            made[name].make_scale(name)
            made["t2m"].dims[axis].attach_scale(made[name])
    client.put("climate", "nc/day.nc", file.read_bytes())
    with file.open("rb") as opened:
        reader = hdf.SingleHdf5ToZarr(opened, "s3://climate/nc/day.nc", inline_threshold=100)
        references = reader.translate()
    client.put("climate", "nc/day.json", json.dumps(references).encode())
    found = mesh.open_zarr(
        "s3://climate/nc/day.json", ["t2m", "lat"], window={"time": 6, "lat": 3}, client=client
    )
    assert found[3]["lat"].tolist() == whole["lat"].values[3:6].tolist()
    np.testing.assert_array_equal(found[3]["t2m"], whole["t2m"].values[6:12, 3:6])


def grib_message(eccodes: Any, step: int, level: int, name: str) -> tuple[bytes, Any]:
    """A field of 31 × 16 points, and its values as the library reads them; some of `u` are missing."""
    handle = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib2")
    values = np.random.default_rng(step + level).normal(280, 10, 496)
    for key, value in (("dataDate", 20260101), ("step", step), ("level", level), ("shortName", name)):
        eccodes.codes_set(handle, key, value)
    if name == "u":
        eccodes.codes_set(handle, "bitmapPresent", 1)
        values[::7] = eccodes.codes_get(handle, "missingValue")
    eccodes.codes_set_values(handle, values)
    packed = eccodes.codes_get_values(handle)
    found = np.where(packed == 9999, np.nan, packed).reshape(31, 16)
    return eccodes.codes_get_message(handle), found


def test_a_grib_file_is_read_in_place_by_references(client: Client, tmp_path: Path) -> None:
    eccodes, combine = pytest.importorskip("eccodes"), pytest.importorskip("kerchunk.combine")
    grib, file = pytest.importorskip("kerchunk.grib2"), tmp_path / "day.grib2"
    made = {
        (name, step, level): grib_message(eccodes, step, level, name)
        for step in (0, 6, 12, 18)
        for level in (500, 850)
        for name in ("t", "u")
    }
    file.write_bytes(b"".join(data for data, _ in made.values()))
    client.put("climate", "grib/day.grib2", file.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kerchunk's own use of xarray
        messages = grib.scan_grib(str(file))
        together = combine.MultiZarrToZarr(
            messages, concat_dims=["step", "isobaricInhPa"], identical_dims=["latitude", "longitude"]
        ).translate()
    text = json.dumps(together).replace(str(file), "day.grib2")
    client.put("climate", "grib/day.json", text.encode())
    found = mesh.open_zarr(
        "s3://climate/grib/day.json", ["t", "u", "latitude"],
        window={"step": 2, "latitude": 10}, stride={"step": 1, "latitude": 6}, client=client,
    )  # fmt: skip
    assert len(found) == 3 * 4
    for sample, (step, row) in zip(
        found, ((at, row) for at in range(3) for row in (0, 6, 12, 18)), strict=True
    ):
        for name in ("t", "u"):
            wanted = np.stack(
                [
                    [made[name, each, level][1][row : row + 10] for level in (500, 850)]
                    for each in (6 * step, 6 * step + 6)
                ]
            )
            np.testing.assert_array_equal(sample[name], wanted)
        assert sample["latitude"].tolist() == [60 - 2 * at for at in range(row, row + 10)]


def test_references_may_have_templates_inline_chunks_and_files_of_their_folder(client: Client) -> None:
    data = np.arange(12, dtype="<i4")
    client.put("climate", "raw/part.bin", b"head" + data[:8].tobytes())
    array = {"zarr_format": 2, "shape": [12], "chunks": [4], "dtype": "<i4", "order": "C"}
    array |= {"filters": None, "compressor": None, "fill_value": 5}
    references = {
        "version": 1,
        "templates": {"u": "s3://climate/raw"},
        "refs": {
            "x/.zarray": json.dumps(array),
            "x/.zattrs": {"_ARRAY_DIMENSIONS": ["t"]},
            "x/0": ["{{u}}/part.bin", 4, 16],
            "x/1": ["part.bin", 20, 16],
            "x/2": "base64:CAAAAAkAAAAKAAAACwAAAA==",
        },
    }
    client.put("climate", "raw/refs.json", json.dumps(references).encode())
    found = mesh.open_zarr("s3://climate/raw/refs.json", ["x"], window={"t": 6}, decode=False, client=client)
    assert [sample["x"].tolist() for sample in found] == [list(range(6)), list(range(6, 12))]
    references["refs"]["x/1"] = ["/home/me/part.bin", 20, 16]  # type: ignore[index]
    client.put("climate", "raw/refs.json", json.dumps(references).encode())
    with pytest.raises(ConfigurationError, match="upload the files"):
        mesh.open_zarr("s3://climate/raw/refs.json", ["x"], window={"t": 6}, client=client)
    references["refs"]["x/1"] = ["part.bin", 30, 16]  # type: ignore[index]
    client.put("climate", "raw/refs.json", json.dumps(references).encode())
    with pytest.raises(ConfigurationError, match=r"beyond the end of part\.bin"):
        mesh.open_zarr("s3://climate/raw/refs.json", ["x"], window={"t": 6}, client=client)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"variables": ["t2"]}, NotFoundError, "no array 't2'.*did you mean 't2m'"),
        ({"variables": "t2m"}, ConfigurationError, "give a list"),
        ({"variables": {"no name": "t2m"}}, ConfigurationError, "letters, digits"),
        ({"window": {"tim": 2}}, ConfigurationError, "no dimension 'tim'; use 'time', 'lat', 'lon'"),
        ({"window": {}}, ConfigurationError, "give a length"),
        ({"within": {"time": 20}}, ConfigurationError, r"'time' has 20; give \(first, end\)"),
        ({"window": {"time": 31}}, ConfigurationError, "do not fit into 0…30"),
        ({"stride": {"lat": 2}}, ConfigurationError, "stride: there is no dimension 'lat'"),
        ({"url": "s3://climate/nothing"}, NotFoundError, "there are no arrays"),
        ({"url": "s3://climate/v2.zarr/.zattrs.json"}, NotFoundError, "no object"),
    ],
)
def test_what_is_wrong_is_named(
    client: Client, change: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    given: dict[str, Any] = {
        "url": "s3://climate/v2.zarr",
        "variables": ["t2m"],
        "window": {"time": 2},
    } | change
    with pytest.raises(kind, match=reason):
        mesh.open_zarr(given.pop("url"), given.pop("variables"), **given, client=client)


def test_a_prepared_snapshot_is_not_believed(daemon: Daemon, client: Client) -> None:
    found = mesh.open_zarr("s3://climate/v2.zarr", ["t2m"], window={"time": 2}, client=client)
    document = found.manifest().to_bytes()
    client.create_bucket("mine")
    for body, reason in ((document[:-9], "is not a snapshot"), (b"{}", "is not a snapshot")):
        client.put("mine", "x/samples.snapshot", body)
        with pytest.raises(mesh.MeshError, match=reason):
            pin(client, "s3://mine/x/")
    with pytest.raises(NotFoundError, match=r"no samples\.snapshot"):
        pin(client, "s3://mine/y/")
    client.put("mine", "x/samples.snapshot", document)
    assert pin(client, "s3://mine/x/").hash == found.snapshot.hash
    resources = ["arn:aws:s3:::mine", "arn:aws:s3:::mine/*"]
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": resources}],
    }
    made = json.loads(daemon.request("POST", "/-/sts", json.dumps({"policy": policy}).encode()).body)
    names = {"access_key": "AccessKeyId", "secret_key": "SecretAccessKey", "session_token": "SessionToken"}
    bounded = {name: made[key] for name, key in names.items()}
    with mesh.connect(daemon.endpoint, **bounded) as reader, pytest.raises(AccessError):
        pin(reader, "s3://mine/x/")


def pin(client: Client, source: str) -> Any:
    from meshsdk.client.native_api import pin_snapshot

    return pin_snapshot(client.transport, source, "prepared", None)
