"""Iceberg tables that PyIceberg writes into a node's buckets, and Lance datasets, opened as tables.

Lance is 300 MB, which not every developer has: `pip install --group adapters`.
"""

from __future__ import annotations

import importlib.util
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk.errors import ConfigurationError, InvalidPlanError, NotFoundError
from tests.support.daemons import Daemon
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

pa = required_module("pyarrow")
pq = required_module("pyarrow.parquet")
required_module("pyiceberg")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

DAY = 400


def rows(day: int, count: int = DAY) -> Any:
    numbers = np.arange(count) + day * DAY
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "day": pa.array([day] * count, pa.int32()),
            "price": pa.array([None if n % 10 == 0 else n / 2 for n in numbers]),
            "city": pa.array([("Oslo", "Rome")[n % 2] for n in numbers]),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 3).astype("f4")), 3),
            "user": pa.array([{"age": int(n) % 90} for n in numbers]),
        }
    )


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    access, secret = daemon.access_key, daemon.secret_key
    with mesh.connect(daemon.endpoint, access_key=access, secret_key=secret) as client:
        client.create_bucket("lake")
        yield client


@pytest.fixture(scope="module")
def catalog(daemon: Daemon, client: Client, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    options = {
        "uri": f"sqlite:///{tmp_path_factory.mktemp('catalog')}/catalog.db",
        "warehouse": "s3://lake/house",
        "s3.endpoint": daemon.endpoint,
        "s3.access-key-id": daemon.access_key,
        "s3.secret-access-key": daemon.secret_key,
        "s3.region": "us-east-1",
    }
    catalog = SqlCatalog("test", **options)
    catalog.create_namespace("db")
    return catalog


def test_snapshots_of_an_iceberg_table(client: Client, catalog: Any) -> None:
    table = catalog.create_table("db.sales", schema=rows(0).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    for day in range(2):
        table.append(rows(day))
    first = table.current_snapshot().snapshot_id
    table.append(rows(2))
    url = "s3://lake/house/db/sales"
    ds = mesh.open_iceberg(url, client=client)
    assert ds.fields == ("city", "day", "id", "price", "user_age", "vector")
    assert (len(ds), ds.snapshot.skipped) == (3 * DAY * 9 // 10, 3 * DAY // 10)
    whole = mesh.open_iceberg(url, columns=["id", "city"], ids=["city"], client=client)
    found = list(mesh.Loader(whole, 256, shuffle=True, seed=3, tail="ragged", output="numpy"))
    numbers, cities = (np.concatenate([batch[name] for batch in found]) for name in ("id", "city"))
    assert np.array_equal(np.sort(numbers), np.arange(3 * DAY))
    assert np.array_equal(cities, numbers % 2)
    for table_or_url in (url, table, f"{url}/metadata/{table.metadata_location.rpartition('/')[2]}"):
        chosen = mesh.open_iceberg(
            table_or_url,
            columns=["id", "price", "user.age"],
            nulls="mask",
            filter=[("day", "==", 1), ("id", "<", DAY + 5)],
            client=client,
        )
        assert sorted(int(sample["id"]) for sample in chosen) == list(range(DAY, DAY + 5))
        assert chosen.snapshot.objects == 1  # the partition of that day
    assert len(mesh.open_iceberg(url, columns=["id"], snapshot_id=first, client=client)) == 2 * DAY
    for entry in list(client.list("lake", "house/db/sales/")):  # a table that was copied is where it is
        name = entry.key.removeprefix("house/db/sales/")
        client.put("lake", f"copied/{name}", client.get("lake", entry.key))
    assert len(mesh.open_iceberg("s3://lake/copied", columns=["id"], client=client)) == 3 * DAY
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"columns": ["prise"]}, ConfigurationError, "did you mean 'price'"),
        ({"snapshot_id": 7}, ConfigurationError, "Snapshot not found"),
        ({"filter": [("day", ">", 9)]}, NotFoundError, "no row in this snapshot"),
        ({"filter": [("day", ">", "x")]}, InvalidPlanError, "not compared with 'x'"),
    ]
    for how, error, message in bad:
        with pytest.raises(error, match=message):
            mesh.open_iceberg(url, client=client, **how)
    with pytest.raises(NotFoundError, match="no Iceberg table"):
        mesh.open_iceberg("s3://lake/house/db", client=client)


def seen(ds: mesh.Dataset, *names: str) -> list[tuple[Any, ...]]:
    """The values of all rows, sorted."""
    found = list(mesh.Loader(ds, 256, shuffle=True, seed=3, tail="ragged", output="numpy"))
    columns = [np.concatenate([batch[name] for batch in found]).tolist() for name in names]
    return sorted(zip(*columns, strict=True))


def expected(table: Any, *names: str, **scan: Any) -> list[tuple[Any, ...]]:
    """The same, as PyIceberg reads it; a null is 0."""
    found = table.scan(selected_fields=names, **scan).to_arrow()
    columns = [found.column(name).fill_null(0).to_pylist() for name in names]
    return sorted(zip(*columns, strict=True))


def add_deletes(
    client: Client, table: Any, content: Any, number: int, deleted: Any, **described: Any
) -> None:
    """Add a file of deletes, as other writers of Iceberg do: a table, or the bytes of a Puffin file."""
    from pyiceberg.manifest import DataFile, FileFormat
    from pyiceberg.typedef import Record

    vector = isinstance(deleted, bytes)
    out = pa.BufferOutputStream()
    if not vector:
        pq.write_table(deleted, out)
    data = deleted if vector else out.getvalue().to_pybytes()
    key = f"{table.location().removeprefix('s3://lake/')}/data/deletes-{number}"
    client.put("lake", key, data)
    file = DataFile.from_args(
        content=content,
        file_path=f"s3://lake/{key}",
        file_format=FileFormat.PUFFIN if vector else FileFormat.PARQUET,
        record_count=1 if vector else deleted.num_rows,
        file_size_in_bytes=len(data),
        **{"partition": Record(), **described},
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as change, change.update_snapshot().fast_append() as append:
        append.append_data_file(file)


def deletion_vector(data_file: str, places: list[int]) -> bytes:
    """A Puffin file with a deletion vector of one data file."""
    bitmap = bytes(required_module("pyroaring").BitMap(places).serialize())
    vector = b"\xd1\xd3\x39\x64" + (1).to_bytes(8, "little") + bytes(4) + bitmap
    blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
    described = {
        "type": "deletion-vector-v1",
        "fields": [],
        "snapshot-id": -1,
        "sequence-number": -1,
        "offset": 4,
        "length": len(blob),
        "properties": {"referenced-data-file": data_file, "cardinality": str(len(places))},
    }
    footer = json.dumps({"blobs": [described]}).encode()
    return b"PFA1" + blob + b"PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"


def test_columns_of_an_iceberg_table_that_changed(client: Client, catalog: Any) -> None:
    from pyiceberg.types import LongType

    table = catalog.create_table("db.changed", schema=rows(0).schema)
    table.append(rows(0))
    url = "s3://lake/house/db/changed"
    plain = mesh.open_iceberg(url, columns=["id"], client=client)
    with table.update_schema() as change:
        change.rename_column("price", "cost")
        change.add_column("rank", LongType())
        change.update_column("day", LongType())
    with table.update_schema() as change:
        change.add_column("price", LongType())  # another column with the name that a file has
    names = ("id", "cost", "rank", "price", "day")
    found = mesh.open_iceberg(url, columns=names, nulls="mask", client=client)
    assert seen(found, *names) == expected(table, *names)
    assert str(found.schema()["day"]) == "int64 []"
    assert mesh.open_iceberg(url, columns=["id"], client=client).snapshot.hash == plain.snapshot.hash
    days, ranks = pa.array([1] * DAY, pa.int64()), pa.array(range(DAY))
    later = rows(1).rename_columns({"price": "cost"}).set_column(1, "day", days)
    table.append(later.append_column("rank", ranks).append_column("price", ranks))
    both = mesh.open_iceberg(url, columns=names, nulls="mask", client=client)
    assert seen(both, *names) == expected(table, *names)
    some = mesh.open_iceberg(url, columns=["id"], filter=[("price", ">=", DAY - 9)], client=client)
    assert seen(some, "id") == expected(table, "id", row_filter=f"price >= {DAY - 9}")
    assert len(some) == 9  # no row of the first file, whose column of that name is another one
    stored = {entry.key for entry in client.list("lake", "house/db/changed/_rows/")}
    again = mesh.open_iceberg(url, columns=names, nulls="mask", client=client)
    assert again.snapshot.hash == both.snapshot.hash
    assert {entry.key for entry in client.list("lake", "house/db/changed/_rows/")} == stored


def test_deleted_rows_of_an_iceberg_table(client: Client, catalog: Any) -> None:
    from pyiceberg.manifest import DataFileContent

    table = catalog.create_table("db.deleted", schema=rows(0).schema)
    for day in range(2):
        table.append(rows(day))
    url, names = "s3://lake/house/db/deleted", ("id", "day")
    whole = mesh.open_iceberg(url, columns=names, client=client)
    first = min(task.file.file_path for task in table.scan(row_filter="day == 0").plan_files())
    for number, places in enumerate(([0, 7, 399], [7, 8])):
        deleted = pa.table({"file_path": [first] * len(places), "pos": pa.array(places, pa.int64())})
        add_deletes(client, table, DataFileContent.POSITION_DELETES, number, deleted)
    left = mesh.open_iceberg(url, columns=names, client=client)
    assert [int(number) for number, _ in seen(left, *names)] == [
        number for number in range(2 * DAY) if number not in (0, 7, 8, 399)
    ]
    assert seen(left, *names) == expected(table, *names)
    assert len(mesh.open_iceberg(url, columns=["id"], filter=[("id", "<", 10)], client=client)) == 7
    assert len(whole) == len(mesh.open(url, snapshot=whole.snapshot.hash, client=client)) == 2 * DAY
    add_deletes(client, table, DataFileContent.POSITION_DELETES, 4, deletion_vector(first, [1, 2]))
    fewer = seen(mesh.open_iceberg(url, columns=names, client=client), *names)
    assert [int(number) for number, _ in fewer][:4] == [3, 4, 5, 6]
    assert len(fewer) == 2 * DAY - 6
    everything = pa.table({"file_path": [first] * DAY, "pos": pa.array(range(DAY), pa.int64())})
    add_deletes(client, table, DataFileContent.POSITION_DELETES, 2, everything)
    assert {day for _, day in seen(mesh.open_iceberg(url, columns=names, client=client), *names)} == {1}


def keyed(columns: dict[str, tuple[Any, int, Any]]) -> Any:
    """A file of equality deletes: by column its values, its field's id and its type."""
    fields = [
        pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})
        for name, (_, number, kind) in columns.items()
    ]
    arrays = [pa.array(values, kind) for values, _, kind in columns.values()]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def test_rows_of_an_iceberg_table_deleted_by_equality(client: Client, catalog: Any) -> None:
    from pyiceberg.manifest import DataFileContent

    table = catalog.create_table("db.upserted", schema=rows(0).schema)
    url, names = "s3://lake/house/db/upserted", ("id", "price")
    number_of = {field.name: field.field_id for field in table.schema().fields}
    age = table.schema().find_field("user.age").field_id

    def delete(number: int, ids: list[int], columns: dict[str, tuple[Any, int, Any]]) -> None:
        add_deletes(client, table, DataFileContent.EQUALITY_DELETES, number, keyed(columns), equality_ids=ids)

    def left(**how: Any) -> list[int]:
        ds = mesh.open_iceberg(url, columns=names, nulls="mask", client=client, **how)
        return sorted(int(sample["id"]) for sample in ds)

    for day in range(2):
        table.append(rows(day))
    first = table.current_snapshot().snapshot_id
    delete(1, [number_of["id"]], {"id": ([3, 401, 9999], number_of["id"], pa.int64())})
    gone = {3, 401}
    assert left() == [n for n in range(2 * DAY) if n not in gone]
    assert left(filter=[("id", "<", 10)]) == [n for n in range(10) if n not in gone]
    table.append(rows(0).slice(3, 1))  # written after the delete, so it stays
    assert left() == sorted([n for n in range(2 * DAY) if n not in gone] + [3])
    both = {
        "price": ([None, 7.5, 8.0], number_of["price"], pa.float64()),
        "city": (["Oslo", "Rome", "Rome"], number_of["city"], pa.string()),
    }
    delete(
        2, [number_of["price"], number_of["city"]], both
    )  # a null price equals a null price; id 16 is Oslo
    gone |= {n for n in range(2 * DAY) if n % 10 == 0} | {15}
    assert left() == sorted([n for n in range(2 * DAY) if n not in gone] + [3])
    assert len(left(snapshot_id=first)) == 2 * DAY
    places = min(
        task.file.file_path for task in table.scan(snapshot_id=first, row_filter="day == 1").plan_files()
    )
    deleted = pa.table({"file_path": [places], "pos": pa.array([5], pa.int64())})
    add_deletes(client, table, DataFileContent.POSITION_DELETES, 3, deleted)
    assert left() == sorted([n for n in range(2 * DAY) if n not in gone | {405}] + [3])
    struct = pa.struct([pa.field("age", pa.int64(), metadata={"PARQUET:field_id": str(age)})])
    delete(4, [age], {"user": ([{"age": 7}], number_of["user"], struct)})
    gone |= {n for n in range(2 * DAY) if n % 90 == 7} | {405}
    assert left() == sorted([n for n in range(2 * DAY) if n not in gone] + [3])
    stored = {entry.key for entry in client.list("lake", "house/db/upserted/_rows/")}
    left()
    assert {entry.key for entry in client.list("lake", "house/db/upserted/_rows/")} == stored
    with table.update_schema() as change:
        change.delete_column("price")
    with pytest.raises(ConfigurationError, match="a column that the table has no longer"):
        mesh.open_iceberg(url, columns=["id"], client=client)


def test_equality_deletes_are_of_their_partition(client: Client, catalog: Any) -> None:
    from pyiceberg.manifest import DataFileContent
    from pyiceberg.typedef import Record

    table = catalog.create_table("db.parts", schema=rows(0).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    for day in range(2):
        table.append(rows(day))
    city = table.schema().find_field("city").field_id
    deleted = keyed({"city": (["Rome"], city, pa.string())})
    content = DataFileContent.EQUALITY_DELETES
    add_deletes(client, table, content, 1, deleted, equality_ids=[city], partition=Record(1))
    ds = mesh.open_iceberg("s3://lake/house/db/parts", columns=["id", "day"], client=client)
    assert sorted(int(sample["id"]) for sample in ds) == [n for n in range(2 * DAY) if n < DAY or n % 2 == 0]


@pytest.mark.skipif(importlib.util.find_spec("lance") is None, reason="pip install --group adapters")
def test_versions_of_a_lance_dataset(client: Client, tmp_path: Path) -> None:
    import lance  # type: ignore[import-not-found, unused-ignore]

    place, url = tmp_path / "items.lance", "s3://lake/items.lance"

    def upload() -> None:
        for file in place.rglob("*"):
            if file.is_file():
                client.put("lake", f"items.lance/{file.relative_to(place)}", file.read_bytes())

    def opened(**how: Any) -> Any:
        return mesh.open_lance(url, client=client, **how)

    lance.write_dataset(rows(0), place)
    held = lance.write_dataset(rows(1), place, mode="append")
    upload()
    names = ["id", "price", "city", "vector", "user.age"]
    ds = opened(columns=names, nulls="mask", ids=["city"])
    assert (len(ds), ds.classes) == (2 * DAY, ("Oslo", "Rome"))
    for number in (0, 1, DAY, 2 * DAY - 1):  # in the order of the dataset
        sample = ds[number]
        assert (int(sample["id"]), int(sample["city"])) == (number, number % 2)
        assert sample["vector"].tolist() == [number] * 3
        assert (bool(sample["price_valid"]), int(sample["user_age"])) == (number % 10 != 0, number % 90)
    stored = {entry.key for entry in client.list("lake", "items.lance.rows/")}
    assert opened(columns=names, nulls="mask", ids=["city"]).snapshot.hash == ds.snapshot.hash
    held.delete("id < 10")
    upload()
    left = opened(columns=names, nulls="mask")
    assert (len(left), int(left[0]["id"])) == (2 * DAY - 10, 10)
    added = {entry.key for entry in client.list("lake", "items.lance.rows/")} - stored
    assert len(added) == 2  # of the fragment that lost rows: its stream, and the mark that it is complete
    chosen = opened(columns=["id"], version=held.version - 1, filter=[("price", ">=", DAY - 1)])
    assert [int(sample["id"]) for sample in chosen] == [n for n in range(2 * DAY - 2, 2 * DAY) if n % 10]
    for how, error, message in (
        ({"columns": ["idd"]}, ConfigurationError, "did you mean 'id'"),
        ({"version": 99}, ConfigurationError, "cannot be opened"),
    ):
        with pytest.raises(error, match=message):
            opened(**how)
    with pytest.raises(NotFoundError, match="no Lance dataset"):
        mesh.open_lance("s3://lake/none", client=client)
