"""Tables of Parquet and Arrow files through a node: typed columns, masks, ids, filters, and hostile files."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from datetime import date, datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import meshsdk as mesh
from meshd.transform.parquet.client import ParquetError, parquet_rows
from meshsdk import ops
from meshsdk.client.native_api import fetch_snapshot
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, NotFoundError
from meshwire.dataset.archive_paths import MEMBERS, pinned_size, pinned_table, table_kind
from meshwire.formats.table_rows import FOOTER_BYTES, TableIndex, index_range
from tests.support.daemons import Daemon
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.open_dataset import Kind

pa = required_module("pyarrow")
pq = required_module("pyarrow.parquet")

ROWS = 600
CITIES = ("Rome", "Oslo", "Bonn")


def table(numbers: range) -> Any:
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "price": pa.array([None if n % 10 == 3 else n / 2 for n in numbers]),
            "city": pa.array([CITIES[n % 3] for n in numbers]).dictionary_encode(),
            "walk": pa.array([[n] * (n % 4) for n in numbers], pa.list_(pa.int16())),
            "pair": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.float32(), 2)),
            "user": [{"ok": n % 2 == 0} for n in numbers],
            "cost": pa.array([None] * len(numbers), pa.decimal128(9, 2)),
        }
    )


def as_parquet(some: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(some, out, **how)
    return out.getvalue()


def as_arrow(some: Any, rows: int = 77, compression: str | None = None) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression, unify_dictionaries=True)
    with pa.ipc.new_file(out, some.schema, options=options) as writer:
        writer.write_table(some, max_chunksize=rows)
    return out.getvalue()


def as_stream(some: Any, rows: int = 77) -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_stream(out, some.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(some, max_chunksize=rows)
    return out.getvalue()


def converted(data: bytes) -> tuple[bytes, TableIndex]:
    copy = b"".join(parquet_rows(lambda at, length: data[at : at + length], len(data), kind="table"))
    at, length = index_range(copy[-FOOTER_BYTES:], len(copy))
    return copy, TableIndex.from_bytes(copy[at : at + length])


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("rows")
        client.put("rows", "v1/a.parquet", as_parquet(table(range(ROWS // 2)), row_group_size=70))
        client.put("rows", "v1/b.arrow", as_arrow(table(range(ROWS // 2, ROWS)), compression="zstd"))
        yield client


def test_columns_have_their_types(client: Client) -> None:
    ds = mesh.open("s3://rows/v1", columns=["id", "pair", "user.ok", "price"], kind="table", client=client)
    assert ds.fields == ("id", "pair", "price", "user_ok")
    assert (len(ds), ds.snapshot.skipped) == (ROWS - ROWS // 10, ROWS // 10)
    seen = []
    for batch in mesh.Loader(ds, global_batch=128, shuffle=True, seed=5, tail="ragged"):
        number, pair, price, even = (batch[name].numpy() for name in ds.fields)
        seen += number.tolist()
        assert (number.dtype, price.dtype, pair.dtype, even.dtype) == ("int32", "float64", "float32", "bool")
        assert np.array_equal(price, number / 2)
        assert np.array_equal(pair, np.stack([number, number + 1], 1))
        assert np.array_equal(even, number % 2 == 0)
    assert sorted(seen) == [n for n in range(ROWS) if n % 10 != 3]


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_block_has_the_bytes_of_rows(client: Client, dtype: str) -> None:
    """Batches below the size from which rows are copied as arrays are rendered one by one, and so are the
    rows of a block in which an op refuses one: 344 numbers do not fit into uint8."""
    ds = mesh.open("s3://rows/v1", columns=["id", "pair", "walk"], kind="table", client=client)
    ds = ds.map(ops.cast("id", dtype))
    how: dict[str, Any] = {"shuffle": True, "seed": 1, "on_bad": "mask", "max_bad": 1.0, "output": "numpy"}
    small, large = (list(mesh.Loader(ds, global_batch=size, **how)) for size in (25, 200))
    for name in ("id", "pair"):
        one_by_one = np.concatenate([batch[name] for batch in small])
        assert np.array_equal(one_by_one, np.concatenate([batch[name] for batch in large]))
    walks = [[row.tolist() for batch in some for row in batch["walk"]] for some in (small, large)]
    assert walks[0] == walks[1]
    masked = [np.concatenate([batch.status for batch in some]) == 2 for some in (small, large)]
    assert np.array_equal(*masked)
    assert masked[0].sum() == (344 if dtype == "uint8" else 0)


def test_masks_ids_and_lists(client: Client) -> None:
    ds = mesh.open(
        "s3://rows/v1",
        columns=["id", "price", "city", "walk"],
        nulls="mask",
        ids=["city"],
        kind="table",
        client=client,
    )
    assert len(ds) == ROWS
    assert ds.classes == tuple(sorted(CITIES))
    for number in (0, 3, 299, 300, 313, 599):
        row = ds[number]
        assert (row["id"], row["price_valid"]) == (number, number % 10 != 3)
        assert row["price"] == (0 if number % 10 == 3 else number / 2)
        assert ds.classes[int(row["city"])] == CITIES[number % 3]
        assert row["walk"].tolist() == [number] * (number % 4)
        assert row["walk"].dtype == "int16"


def test_ids_alone_are_no_dataset(client: Client) -> None:
    with pytest.raises(InvalidPlanError, match="ids: these are all columns of the dataset"):
        mesh.open("s3://rows/v1", columns=["city"], ids=["city"], kind="table", client=client)


def test_filter(client: Client) -> None:
    conditions = [("id", ">=", 5), ("price", "<", 200), ("city", "in", {"Rome", "Bonn"})]
    ds = mesh.open("s3://rows/v1", columns=["id"], filter=conditions, kind="table", client=client)
    expected = [n for n in range(5, 400) if n % 10 != 3 and n % 3 != 1]
    assert [int(ds[at]["id"]) for at in (0, 1, -1)] == [expected[0], expected[1], expected[-1]]
    assert (len(ds), ds.snapshot.skipped) == (len(expected), 0)
    everything = mesh.open("s3://rows/v1", columns=["id"], kind="table", client=client)
    assert everything.snapshot.hash != ds.snapshot.hash
    again = mesh.open("s3://rows/v1", snapshot=ds.snapshot.hash, client=client)
    assert again[0]["id"] == expected[0]
    train = ds.split(train=0.9, test=0.1)["train"]
    assert train[0]["id"].dtype == "int32"


def test_an_expression_over_a_column_names_the_filter_of_tables(client: Client) -> None:
    """It compares stored bytes, which are no text of a number."""
    rows = mesh.open("s3://rows/v1", columns=["id"], kind="table", client=client)
    with pytest.raises(NotFoundError, match=r"mesh\.open\(…, kind='table', filter="):
        rows.filter("number(id) >= 5")


def test_filter_by_dates_and_numbers_of_numpy(client: Client) -> None:
    first, hour = datetime(2026, 1, 1), timedelta(hours=1)
    times = [first + number * hour for number in range(72)]
    table = pa.table({
        "id": np.arange(72), "day": pa.array([time.date() for time in times]),
        "time": pa.array(times, pa.timestamp("us")), "utc": pa.array(times, pa.timestamp("ms", "UTC")),
    })  # fmt: skip
    client.put("rows", "times/1.parquet", as_parquet(table))

    def ids(*conditions: Any) -> list[int]:
        ds = mesh.open("s3://rows/times", kind="table", columns=["id"], filter=conditions, client=client)
        return [int(sample["id"]) for sample in ds]

    assert ids(("day", ">", date(2026, 1, 2))) == list(range(48, 72))
    assert ids(("day", "in", ["2026-01-01", date(2026, 1, 3)])) == [*range(24), *range(48, 72)]
    assert ids(("time", "<=", first + 3 * hour), ("id", ">=", np.int64(1))) == [1, 2, 3]
    assert ids(("time", "==", np.datetime64("2026-01-01T05"))) == [5]
    assert ids(("utc", "<", datetime(2026, 1, 1, 3, tzinfo=timezone(2 * hour)))) == [0]
    with pytest.raises(
        InvalidPlanError,
        match=r"'day' is date32.*, which is not compared with 'monday'; write dates and times as",
    ):
        ids(("day", "==", "monday"))
    with pytest.raises(NotFoundError, match=r"no row of the 72 in .* matches the filter"):
        ids(("id", ">", 99))


def test_filter_leaves_files_out_by_their_statistics(client: Client) -> None:
    """The second file has a footer and no readable rows: a filter that it cannot match does not read them."""
    client.put(
        "rows", "days/1.parquet", as_parquet(pa.table({"day": pa.array([3, 4], pa.int64()), "x": [1, 2]}))
    )
    days = pa.array(np.full(700_000, 9), pa.int64())
    large = bytearray(
        as_parquet(pa.table({"day": days, "x": np.random.default_rng(1).integers(0, 1 << 40, 700_000)}))
    )
    large[1 << 20 : 4 << 20] = bytes(3 << 20)
    client.put("rows", "days/2.parquet", bytes(large))

    def opened(*conditions: Any) -> Any:
        return mesh.open("s3://rows/days", kind="table", filter=conditions, client=client)

    with pytest.raises(BadSampleError, match=r"days/2\.parquet"):
        opened(("day", ">=", 3))
    assert [int(sample["x"]) for sample in opened(("day", "<", 9))] == [1, 2]
    assert [int(sample["x"]) for sample in opened(("day", "in", [4, 8]), ("x", ">", 0))] == [2]
    with pytest.raises(NotFoundError, match="no row of the 2"):
        opened(("day", "==", 8))
    with pytest.raises(InvalidPlanError, match="no column 'dya'"):
        opened(("dya", "==", 8), ("day", "==", 8))


def test_filter_reads_only_row_groups_that_may_match(client: Client) -> None:
    """The middle of the file is damaged: a filter that it cannot match does not read it, and has the same
    samples as one over the whole file before."""
    count, rows = 5, 60_000
    random = np.random.default_rng(2)
    whole = pa.table(
        {
            "at": np.arange(count * rows),
            "x": random.integers(0, 1 << 40, count * rows),
            "even": [None if n % 7 == 0 else n % 2 == 0 for n in range(count * rows)],
        }
    )
    data = bytearray(as_parquet(whole, row_group_size=rows, compression="none", use_dictionary=False))
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(2).column(1)
    data[group.data_page_offset : group.data_page_offset + group.total_compressed_size] = bytes(
        group.total_compressed_size
    )
    client.put("rows", "groups/1.parquet", bytes(data))

    def opened(*conditions: Any, **how: Any) -> Any:
        return mesh.open("s3://rows/groups", kind="table", filter=conditions, client=client, **how)

    with pytest.raises(BadSampleError, match=r"groups/1\.parquet"):
        opened(("at", ">", 0))
    wanted = [3, 59_999, 3 * rows + 4, 5 * rows - 7]
    chosen = opened(("at", "in", wanted), ("at", "not in", [7]))
    assert [int(sample["at"]) for sample in chosen] == [n for n in wanted if n % 7]
    assert [int(sample["x"]) for sample in chosen] == whole["x"].take(
        [n for n in wanted if n % 7]
    ).to_pylist()
    document = fetch_snapshot(client.transport, chosen.snapshot.hash)
    names = [document.sample_name(number) for number in range(len(chosen))]
    assert [int(name.rpartition("/")[2]) for name in names] == [n for n in wanted if n % 7]
    late = opened(("at", ">=", 3 * rows), nulls="mask", columns=["at", "even"])
    seen = [
        batch["at"] for batch in mesh.Loader(late, 8192, shuffle=True, seed=1, tail="ragged", output="numpy")
    ]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(3 * rows, count * rows))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"columns": ["prise"]},
            InvalidPlanError,
            "no column 'prise' in 'v1/a.parquet'",
        ),
        ({"columns": ["cost"]}, InvalidPlanError, "decimal128"),
        ({"filter": [("city", "<", 3)]}, InvalidPlanError, "'city' is str, which is not compared with 3"),
        ({"filter": [("walk", "<", 3)]}, InvalidPlanError, "numbers and texts can be compared"),
        ({"filter": [("id", "~", 3)]}, ConfigurationError, "all must hold"),
        ({"filter": [("id", "=", 3)]}, ConfigurationError, "'=' is no operator; compare with '=='"),
        ({"filter": [("city", "==", None)]}, ConfigurationError, "a condition on a null never holds"),
        ({"filter": "id > 3"}, ConfigurationError, "all must hold"),
        ({"filter": [("id", ">", ROWS)]}, NotFoundError, f"no row of the {ROWS}"),
        ({"columns": ["id"], "ids": ["id"]}, InvalidPlanError, "only text has ids"),
        ({"columns": "id"}, ConfigurationError, "expected names"),
        ({"nulls": "zero"}, ConfigurationError, "'mask'"),
    ],
)
def test_errors_say_what_to_write(
    client: Client, how: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("[", r"\[")):
        mesh.open("s3://rows/v1", kind="table", client=client, **how)


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_columns_that_not_all_files_have(
    client: Client, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    few, more = pa.table({"x": [1, 2]}), pa.table({"x": [3], "text": ["a"]})
    for folder, tables in (("more", (few, more)), ("less", (more, few))):
        for number, some in enumerate(tables):
            client.put("rows", f"{kind}/{folder}/{number}.parquet", as_parquet(some))
    ds = mesh.open(f"s3://rows/{kind}/more", kind=kind, client=client)
    assert (ds.fields, len(ds)) == (("x",), 3)
    if kind == "table":
        assert (
            "left out the column 'text' of table/more/1.parquet, which table/more/0.parquet lacks"
            in caplog.text
        )
        with pytest.raises(InvalidPlanError, match=r"no column 'text' in .*: name those that all files have"):
            mesh.open(f"s3://rows/{kind}/less", kind=kind, client=client)
        return
    assert len(mesh.open(f"s3://rows/{kind}/less", kind=kind, client=client)) == 1
    assert "left out 2 of 3: parquet/less/1.parquet: there is no column 'text'" in caplog.text


def test_columns_of_other_types_are_told(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Without columns=, they are no fields; pandas writes boxes and words as such."""
    caplog.set_level(logging.WARNING, "meshsdk")
    some = pa.table(
        {"x": [1, None, 3], "boxes": [[[1.0, 2.0, 3.0, 4.0]]] * 3, "words": [["a", "b"]] * 3},
    )
    client.put("rows", "nested/0.parquet", as_parquet(some))
    ds = mesh.open("s3://rows/nested", kind="table", client=client)
    assert (ds.fields, len(ds)) == (("x",), 2)
    assert "left out the columns 'boxes', 'words' of nested/0.parquet: columns of such types" in caplog.text
    assert "left out 1 of 3: nested/0.parquet: row 1 has null in 'x'; nulls='mask'" in caplog.text
    caplog.clear()
    mesh.open("s3://rows/nested", kind="table", columns=["x"], nulls="mask", client=client)
    assert not caplog.text
    with pytest.raises(InvalidPlanError, match=r"'boxes' has the type list.*such as pa\.list_\(pa\.list_"):
        mesh.open("s3://rows/nested", kind="table", columns=["boxes"], client=client)
    with pytest.raises(InvalidPlanError, match=r"'words' has the type list.*: write it as text, a number"):
        mesh.open("s3://rows/nested", kind="table", columns=["words"], client=client)


def test_tables_without_rows_or_with_a_name_twice(client: Client) -> None:
    client.put("rows", "rowless/0.parquet", as_parquet(pa.table({"x": pa.array([], pa.int32())})))
    with pytest.raises(NotFoundError, match="the tables in s3://rows/rowless/ have no rows"):
        mesh.open("s3://rows/rowless", kind="table", client=client)
    client.put("rows", "twice/0.parquet", as_parquet(pa.table([[1], [2]], names=["x", "x"])))
    with pytest.raises(BadSampleError, match="two columns with the name 'x': rename one"):
        mesh.open("s3://rows/twice", kind="table", client=client)


def test_copy_depends_on_the_rows_alone() -> None:
    data = as_parquet(table(range(500)), row_group_size=100)
    first = converted(data)
    assert len(first[0]) % 4096 == 0
    for other in (as_arrow(table(range(500)), rows=11), as_stream(table(range(500)), rows=17)):
        copy, index = converted(other)
        assert index.to_bytes() == first[1].to_bytes()
        assert copy[: index.data_bytes] == first[0][: index.data_bytes]


@pytest.mark.parametrize("write", [as_arrow, as_stream])
def test_cut_arrow_file_is_refused(write: Any) -> None:
    """A reader of streams takes the end of a file for that of the stream: the marks at the end tell."""
    data = write(table(range(500)), rows=100)
    ends = [at for at in range(1, len(data)) if data[at : at + 4] == b"\xff\xff\xff\xff"]
    for end in (ends[2], ends[-1], len(data) - 4):
        with pytest.raises(ParquetError, match="cut, or its writer was not closed"):
            converted(data[:end])
    with pytest.raises(ParquetError, match="neither Parquet nor an Arrow file or stream"):
        converted(b"FEA1" + data)


def test_hostile_files(client: Client) -> None:
    """Damage gives rows or a reason, in the child; the node goes on."""
    draw = random.Random(4)
    for data in (as_parquet(table(range(50))), as_arrow(table(range(50)))):
        damaged = bytearray(data)
        for _ in range(8):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        with contextlib.suppress(ParquetError):
            converted(bytes(damaged))
    client.put("rows", "bad/a.arrow", as_arrow(table(range(50)))[:200])
    client.put("rows", "bad/b.parquet", b"PAR1 is not all")
    with pytest.raises(BadSampleError, match="cannot be read as a table"):
        mesh.open("s3://rows/bad", kind="table", client=client)
    assert len(mesh.open("s3://rows/v1", columns=["id"], kind="table", client=client)) == ROWS


def scenes(numbers: range) -> Any:
    """Rows as detection datasets have them: boxes beside what is in them, in structs or in lists."""
    box = pa.list_(pa.float32(), 4)
    objects = [
        None
        if n % 11 == 5
        else [
            {"box": [n, i, 2, 3.5], "kind": None if n % 7 == 3 else i, "at": {"day": n * i}, "name": "x"}
            for i in range(n % 4)
        ]
        for n in numbers
    ]
    kind = pa.struct(
        [("box", box), ("kind", pa.int64()), ("at", pa.struct([("day", pa.int16())])), ("name", pa.string())]
    )
    three = pa.list_(pa.struct([("x", pa.float64())]), 3)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "objects": pa.array(objects, pa.list_(kind)),
            "boxes": pa.array([[[n, i, 2, 3]] * (n % 3) for i, n in enumerate(numbers)], pa.list_(box)),
            "corners": pa.array([[{"x": n}, {"x": 1}, {"x": 2}] for n in numbers], three),
            "tally": pa.array([[(n, 2 * n)] * (n % 3) for n in numbers], pa.map_(pa.int32(), pa.int64())),
            "deep": pa.array([[[1]] for _ in numbers], pa.list_(pa.list_(pa.int8()))),
        }
    )


def test_members_of_structs_in_lists(client: Client) -> None:
    count = 200
    client.put("rows", "scenes/a.parquet", as_parquet(scenes(range(90)), row_group_size=40))
    client.put("rows", "scenes/b.arrow", as_arrow(scenes(range(90, count))))
    url = "s3://rows/scenes"
    plain = mesh.open(url, columns=["id"], kind="table", client=client)
    assert mesh.open(url, kind="table", client=client).fields == ("id",)  # as before there were members
    names = ["id", "objects.box", "objects.kind", "objects.at.day", "boxes", "corners.x", "tally.value"]
    ds = mesh.open(url, columns=names, nulls="mask", kind="table", client=client)
    found = {
        int(number): {name: batch[name][at] for name in ds.fields}
        for batch in mesh.Loader(ds, 64, shuffle=True, seed=5, tail="ragged", output="numpy")
        for at, number in enumerate(batch["id"])
    }
    assert sorted(found) == list(range(count))
    for number, row in found.items():
        length = 0 if number % 11 == 5 else number % 4
        assert bool(row["objects_box_valid"]) == (number % 11 != 5)
        assert (row["objects_box"].shape, row["objects_box"].dtype) == ((length, 4), np.float32)
        assert row["objects_box"].tolist() == [[number, i, 2, 3.5] for i in range(length)]
        assert row["objects_at_day"].tolist() == [number * i for i in range(length)]
        has_null = number % 7 == 3 and length > 0
        assert row["objects_kind"].tolist() == ([] if has_null else [*range(length)])
        assert bool(row["objects_kind_valid"]) == (number % 11 != 5 and not has_null)
        assert row["boxes"].shape == (number % 3, 4)
        assert row["corners_x"].tolist() == [number, 1, 2]
        assert row["tally_value"].tolist() == [2 * number] * (number % 3)
    assert mesh.open(url, columns=["id"], kind="table", client=client).snapshot.hash == plain.snapshot.hash
    some = mesh.open(
        url, columns=["id", "boxes"], filter=[("id", ">=", 190)], nulls="mask", kind="table", client=client
    )
    assert [int(sample["id"]) for sample in some] == list(range(190, count))
    for column, message in [
        ("objects", r"has members: name those that you want, such as objects\.box"),
        ("objects.name", "list<"),
        ("objects.bix", r"no column 'objects\.bix'.*objects\.box"),
        ("deep", "list<"),
    ]:
        with pytest.raises(InvalidPlanError, match=message):
            mesh.open(url, columns=["id", column], kind="table", client=client)


def test_copies_with_members_have_sizes_of_their_own() -> None:
    for slices in (0, 5, (1 << 16) - 1):
        for members in (0, MEMBERS):
            pinned = pinned_size(slices | members, 4096 * 7)
            assert pinned < 1 << 60
            assert pinned % 4096 == 0
            assert pinned_table(pinned) == (table_kind(slices | members), 4096 * 7)
    whole = as_parquet(scenes(range(50)), row_group_size=20)
    kinds = (table_kind(MEMBERS), table_kind(MEMBERS | 2))
    copies = [b"".join(parquet_rows(partial(cut, whole), len(whole), kind=kind)) for kind in kinds]
    indexes = [TableIndex.from_bytes(copy[slice(*bounds(copy))]) for copy in copies]
    assert [index.rows for index in indexes] == [50, 20]
    assert indexes[0].columns["objects.box"].shape == (None, 4)
    assert indexes[0].refused.keys() == {"objects.name", "deep"}


def cut(data: bytes, at: int, length: int) -> bytes:
    return data[at : at + length]


def bounds(copy: bytes) -> tuple[int, int]:
    at, length = index_range(copy[-FOOTER_BYTES:], len(copy))
    return at, at + length
