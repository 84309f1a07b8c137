"""Files of Parquet that pyarrow wrote, through a node: columns as fields, and hostile files contained."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from PIL import Image

import meshsdk as mesh
from meshd.config import StoreSettings
from meshd.core.api_errors import BatchError
from meshd.datasets import table_preview, table_statistics
from meshd.datasets.archives.archive_service import LocalArchives
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.transform.parquet import reader_template
from meshd.transform.parquet.client import (
    ParquetError,
    ParquetInterruptedError,
    ParquetUnsupportedError,
    parquet_rows,
)
from meshd.util.clock import SystemClock
from meshsdk import ops
from meshsdk.cli import run
from meshsdk.errors import BadSampleError, InvalidPlanError, NotFoundError, PreflightError
from meshwire.formats.parquet_rows import FOOTER_BYTES, RowLengths, lengths_range
from tests.support.daemons import Daemon
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

pa = required_module("pyarrow")
pq = required_module("pyarrow.parquet")

ROWS = 60


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (5, 4), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def table(numbers: range) -> Any:
    return pa.table(
        {
            "image": [{"bytes": png(n), "path": f"{n}.png"} for n in numbers],
            "text": pa.array([None if n % 10 == 3 else f"row {n}" for n in numbers]),
            "kind": pa.array([("cat", "dog")[n % 2] for n in numbers]).dictionary_encode(),
            "id": pa.array(numbers, pa.int32()),
            "vector": pa.array([[n, 0.5, 1] for n in numbers], pa.list_(pa.float32())),
            "walk": pa.array([[n] * (n % 4) for n in numbers], pa.large_list(pa.int16())),
            "pair": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.int64(), 2)),
            "ok": [n % 2 == 0 for n in numbers],
            "price": pa.array([None] * len(numbers), pa.decimal128(9, 2)),
            "deep": [[["x"]] for _ in numbers],
        }
    )


def written(some: Any, **how: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(some, out, **how)
    return out.getvalue()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("rows")
        how: tuple[dict[str, Any], ...] = (
            {"row_group_size": 7, "compression": "zstd"},
            {"compression": "snappy", "data_page_version": "2.0", "use_dictionary": False},
        )
        for part, settings in enumerate(how):
            numbers = range(part * ROWS // 2, (part + 1) * ROWS // 2)
            client.put("rows", f"v1/part-{part}.parquet", written(table(numbers), **settings))
        yield client


def opened(client: Client, place: str = "v1", **fields: str) -> mesh.Dataset:
    return mesh.open(f"s3://rows/{place}", fields=fields or None, kind="parquet", client=client)


def test_columns_are_fields(client: Client) -> None:
    fields = {"image": "image.bytes", "kind": "kind", "id": "id", "vector": "vector", "walk": "walk"}
    ds = opened(client, **fields, pair="pair", ok="ok").map(
        ops.decode("image"),
        ops.center_crop("image", 4),
        ops.text_label("kind", ["cat", "dog"]),
        ops.frombuffer("id", "int32"),
        ops.frombuffer("vector", "float32", shape=[3]),
        ops.frombuffer("walk", "int16", shape=[None]),
        ops.frombuffer("pair", "int64", shape=[2]),
        ops.frombuffer("ok", "uint8"),
    )
    assert (len(ds), ds.snapshot.shards, ds.snapshot.skipped) == (ROWS, 2, 0)
    assert str(ds.schema()["vector"]) == "float32 [3]"
    assert ds.stats().sizes["vector"].median == 12
    assert ds.preflight(global_batch=8).notes == ()
    [note] = opened(client, id="id").preflight().notes
    assert "put ops.frombuffer('id', DTYPE)" in note
    seen = set()
    with mesh.Loader(ds, global_batch=8, seed=1, shuffle=mesh.Blocks(shards=1), output="numpy") as loader:
        for batch in loader:
            for at in np.flatnonzero(batch.status == 0):
                number = int(batch["id"][at])
                seen.add(number)
                assert batch["image"][at, 0, 0, 0] == number
                assert (batch["kind"][at], batch["ok"][at]) == (number % 2, number % 2 == 0)
                assert batch["vector"][at].tolist() == [number, 0.5, 1]
                assert batch["walk"][at].tolist() == [number] * (number % 4)
                assert batch["pair"][at].tolist() == [number, number + 1]
    assert seen == set(range(ROWS))


def test_rows_with_a_null_are_left_out_and_counted(client: Client) -> None:
    ds = opened(client, text="text", id="id").map(ops.frombuffer("id", "int32"))
    assert (len(ds), ds.snapshot.skipped) == (ROWS - 6, 6)
    rows = {int(row["id"]): bytes(row["text"]).decode() for row in ds.head(len(ds))}
    assert rows == {number: f"row {number}" for number in range(ROWS) if number % 10 != 3}
    assert int(ds.filter("text == 'row 41'").head()[0]["id"]) == 41


def test_columns_are_guessed(
    client: Client, daemon: Daemon, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = opened(client)
    names = ("id", "image_bytes", "image_path", "kind", "ok", "pair", "text", "vector", "walk")
    assert ds.fields == names
    for name, value in (
        ("MESH_ENDPOINT", daemon.endpoint),
        ("AWS_ACCESS_KEY_ID", daemon.access_key),
        ("AWS_SECRET_ACCESS_KEY", daemon.secret_key),
    ):
        monkeypatch.setenv(name, value)
    assert run(["head", "s3://rows/v1/", "--kind", "parquet", "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[0])["samples"] == ROWS - 6


def test_the_copy_may_go_and_comes_again(client: Client, daemon: Daemon) -> None:
    ds = opened(client, id="id").map(ops.frombuffer("id", "int32"))
    store = daemon.client()
    again = written(table(range(5)))
    client.put("rows", "again/a.parquet", again)
    other = opened(client, "again", id="id").map(ops.frombuffer("id", "int32"))
    store.delete_object(Bucket="rows", Key="again/a.parquet")
    client.put("rows", "again/a.parquet", again)
    assert [int(row["id"]) for row in other.head(5)] == list(range(5))
    assert int(ds[59]["id"]) == 59


def test_refusals_name_the_cause(client: Client) -> None:
    with pytest.raises(NotFoundError, match="no Parquet file"):
        opened(client, "nothing", x="id")
    with pytest.raises(InvalidPlanError, match=r"'deep' has the type list<.*not supported"):
        opened(client, x="deep")
    with pytest.raises(InvalidPlanError, match="decimal128"):
        opened(client, x="price")
    with pytest.raises(InvalidPlanError, match=r"no column 'texd'.*did you mean 'text'"):
        opened(client, x="texd")
    with pytest.raises(InvalidPlanError, match="of the kind mds or parquet"):
        mesh.open("s3://rows/v1", fields={"x": {"column": "id"}}, client=client)
    with pytest.raises(PreflightError, match=r"4 bytes; .* array of float64"):
        opened(client, x="id").map(ops.frombuffer("x", "float64", shape=[3])).preflight()
    whole = written(table(range(20)))
    for place, body, complaint in (
        ("torn", whole[:-9], "Parquet magic bytes|cannot be read as Parquet"),
        ("text", b"id,text\n1,2\n", "cannot be read as Parquet"),
        ("spoilt", whole[:4] + bytes(len(whole) - 400) + whole[-396:], "cannot be read as Parquet"),
    ):
        client.put("rows", f"{place}/x.parquet", body)
        with pytest.raises(BadSampleError, match=complaint) as told:
            opened(client, place, id="id", text="text")
        assert f"{place}/x.parquet" in str(told.value)
    client.put("rows", "mixed/a.parquet", written(pa.table({"id": [1, 2]})))
    client.put("rows", "mixed/b.parquet", written(pa.table({"id": [1.5, 2.5]})))
    with pytest.raises(InvalidPlanError, match=r"int64 in .*a\.parquet.*float64 in"):
        opened(client, "mixed", id="id")


# --- the process that reads ------------------------------------------------------------------------------


def read(data: bytes, **how: Any) -> bytes:
    return b"".join(parquet_rows(lambda offset, length: data[offset : offset + length], len(data), **how))


def readers() -> list[psutil.Process]:
    """Processes that read Parquet for this one."""
    template = reader_template.template_pid()
    return psutil.Process(template).children() if template else []


def rows_in(copy: bytes) -> RowLengths:
    at, length = lengths_range(copy[-FOOTER_BYTES:], len(copy))
    return RowLengths.from_bytes(copy[at : at + length])


def test_lists_that_hold_nulls_and_slices_are_told_apart() -> None:
    some = pa.table(
        {
            "n": pa.array([[1, None], None, [], [3, 4]], pa.list_(pa.int32())),
            "b": pa.array([[True, False], [True], None, []]),
            "t": pa.array(["ä", "", None, "xyz"], pa.large_string()),
            "when": pa.array([1, None, 3, 4], pa.timestamp("us")),
            "raw": pa.array([b"abc", b"def", None, b"ghi"], pa.binary(3)),
            "s": pa.array([{"x": {"y": 1.5}}, {"x": None}, None, {"x": {"y": 2.5}}]),
        }
    )
    copy = read(written(some, row_group_size=3))
    found = rows_in(copy)
    assert found.columns == {
        "n": "list<int32>",
        "b": "list<bool>",
        "t": "str",
        "when": "timestamp[us]",
        "raw": "bytes",
        "s.x.y": "float64",
    }
    lengths = {name: values.tolist() for name, values in found.lengths.items()}
    assert lengths == {
        "n": [-1, -1, 0, 8],
        "b": [2, 1, -1, 0],
        "t": [2, 0, -1, 3],
        "when": [8, -1, 8, 8],
        "raw": [3, 3, -1, 3],
        "s.x.y": [8, -1, -1, 8],
    }
    offsets, _ = found.choose(["n"], len(copy)).places["n"]
    assert copy[offsets[1] : offsets[1] + 11] == np.array([3, 4], "<i4").tobytes() + b"xyz"


def test_a_small_file_that_grows_without_end_is_stopped() -> None:
    bomb = written(pa.table({"x": pa.array(["y" * 1000] * 300_000).dictionary_encode()}), compression="zstd")
    assert len(bomb) < 100_000
    taken = 0
    rows = parquet_rows(lambda offset, length: bomb[offset : offset + length], len(bomb))
    for piece in rows:
        taken += len(piece)
        if taken > 3_000_000:
            break
    assert readers()
    rows.close()  # a generator; its process ends with it
    assert not readers()
    with pytest.raises(ParquetError, match="memory"):
        read(written(pa.table({"x": ["z" * 60_000_000]})), memory=64 << 20)
    with pytest.raises(ParquetError, match="rows of 1 columns, too many"):
        read(written(pa.table({"x": np.zeros((1 << 24) + 1, np.uint8)}), compression="zstd"))


def test_damaged_files_end_in_an_error_or_in_rows() -> None:
    random_ = random.Random(7)
    whole = bytearray(written(table(range(20)), row_group_size=5))
    for _ in range(3):
        data = bytearray(whole)
        for _ in range(4):
            data[random_.randrange(4, len(data) - 8)] ^= random_.randrange(1, 256)
        with contextlib.suppress(ParquetError):
            assert rows_in(read(bytes(data))).rows <= 1 << 24


def test_a_reader_that_says_nothing_or_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(table(range(3)))

    def stop(offset: int, length: int) -> bytes:
        for each in readers():
            each.suspend()
        return whole[offset : offset + length]

    assert read(whole)  # now there is a template, from which a reader starts quickly
    with pytest.raises(ParquetError, match="sent nothing for"):
        list(parquet_rows(stop, len(whole), silent=2))
    assert not readers()  # also one that stands still ends
    assert read(whole)
    monkeypatch.setattr("meshd.transform.parquet.reader_template._CODE", "import time; time.sleep(60)")
    with pytest.raises(ParquetInterruptedError, match="did not start"):
        read(whole, silent=0.1)
    assert not reader_template.template_pid()
    monkeypatch.setattr("meshd.transform.parquet.reader_template._CODE", "import os; os.abort()")
    with pytest.raises(ParquetUnsupportedError, match=r"crashed \(SIGABRT"):
        read(whole)
    monkeypatch.setattr("meshd.transform.parquet.reader_template._CODE", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ParquetInterruptedError, match="ended: SIGKILL"):
        read(whole)
    monkeypatch.setattr(
        "meshd.transform.parquet.reader_template._CODE",
        "import sys; sys.modules['pyarrow'] = None\n"
        "from meshd.transform.parquet.child_main import main; main()",
    )
    with pytest.raises(ParquetUnsupportedError, match="pyarrow is not installed"):
        read(whole)


def test_a_template_that_dies_or_is_not_used_is_replaced() -> None:
    whole = written(table(range(3)))
    expected = read(whole)
    first = reader_template.template_pid()
    assert first
    assert read(whole) == expected
    assert reader_template.template_pid() == first
    psutil.Process(first).kill()
    assert read(whole) == expected
    second = reader_template.template_pid()
    assert second not in (0, first)
    assert reader_template.take_unused_template() is None  # it was used a moment ago
    pieces = parquet_rows(lambda offset, length: whole[offset : offset + length], len(whole))
    first_piece = next(pieces)
    assert reader_template.take_unused_template() is None
    assert reader_template.take_unused_template() is None  # a reader runs
    assert first_piece + b"".join(pieces) == expected
    assert reader_template.take_unused_template() is None
    unused = reader_template.take_unused_template()
    assert unused is not None
    unused.close()
    assert not psutil.pid_exists(second)
    assert reader_template.template_pid() == 0
    assert read(whole) == expected


def test_a_template_that_dies_ends_its_readers() -> None:
    whole = written(table(range(3)))

    def kill(offset: int, length: int) -> bytes:
        template = psutil.Process(reader_template.template_pid())
        readers = template.children()
        template.kill()
        psutil.wait_procs(readers, timeout=60)  # else one that is quick reads all before the signal arrives
        return whole[offset : offset + length]

    with pytest.raises(ParquetInterruptedError, match="ended: SIGKILL"):
        list(parquet_rows(kill, len(whole)))
    assert read(whole)


def test_a_template_that_hangs_is_replaced_and_ends_with_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_template, "_ENDING_SECONDS", 0.2)
    whole = written(table(range(3)))
    expected = read(whole)
    pieces = parquet_rows(lambda offset, length: whole[offset : offset + length], len(whole))
    first_piece, first = next(pieces), reader_template.template_pid()
    psutil.Process(first).suspend()
    with pytest.raises(ParquetInterruptedError, match="did not start"):
        read(whole, silent=0.2)
    assert read(whole) == expected
    second = reader_template.template_pid()
    assert second not in (0, first)
    assert first_piece + b"".join(pieces) == expected
    assert not psutil.pid_exists(first)
    # More than a socket holds: a reader that had come to its end would have been told of already.
    large = written(pa.table({"x": [os.urandom(1 << 20) for _ in range(6)]}))
    pieces = parquet_rows(lambda offset, length: large[offset : offset + length], len(large))
    assert next(pieces)
    psutil.Process(second).suspend()
    pieces.close()  # the template does not end its process
    assert not psutil.pid_exists(second)
    assert read(whole) == expected


def kill_template(*_: object) -> bytes:
    psutil.Process(reader_template.template_pid()).kill()
    return b""


def test_a_file_that_was_being_read_when_its_template_was_killed_is_no_bad_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, place = written(table(range(3))), ("b", "x.parquet")

    async def check(store: Store) -> None:
        writer = store.writer(*place, size=len(whole))
        await writer.write(whole)
        record = await writer.commit(Meta(etag="e"))
        archives = LocalArchives(store, list[str]().append)
        with monkeypatch.context() as patched:
            patched.setattr("meshd.datasets.archives.reader.read_spans", kill_template)
            with pytest.raises(BatchError, match=r"cannot be read now: .* ended: SIGKILL") as told:
                await archives.copy_of("parquet", *place, record)
        assert told.value.code == "Busy"
        objects: Any = SimpleNamespace(read_range=kill_template)
        for read_table in (table_preview._read, table_statistics._read):
            with pytest.raises(BatchError, match=r"cannot be read now: .* ended: SIGKILL") as told:
                read_table(objects, *place, record)
            assert told.value.code == "Busy"
        assert (await archives.copy_of("parquet", *place, record)).size > 0

    with contextlib.closing(Store.open(StoreSettings.at(tmp_path), writer="s", clock=SystemClock())) as store:
        asyncio.run(check(store))


def test_readers_share_no_descriptor() -> None:
    """Beside its own numbers, a reader has a socket of its own, whoever else is read at the time."""
    whole = written(table(range(3)))
    seen = list[list[str]]()

    def look(offset: int, length: int) -> bytes:
        seen[:] = [
            sorted(os.readlink(each) for each in Path(f"/proc/{found.pid}/fd").iterdir())
            for found in readers()
        ]
        return whole[offset : offset + length]

    def read_another(offset: int, length: int) -> bytes:
        assert list(parquet_rows(look, len(whole)))
        return whole[offset : offset + length]

    assert list(parquet_rows(read_another, len(whole)))
    sockets = []
    for files in seen:
        *nothing, statm, link = files
        assert nothing == [os.devnull] * 3
        assert statm.startswith("/proc/")
        assert link.startswith("socket:")
        sockets.append(link)
    assert len(set(sockets)) == len(sockets) == 2


def test_a_reader_does_not_load_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That would double the time until its first row."""
    (tmp_path / "pandas.py").write_text("import os; os.abort()")
    monkeypatch.setattr(
        "meshd.transform.parquet.reader_template._CODE",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from meshd.transform.parquet.child_main import main; main()",
    )
    whole = written(table(range(3)))
    for kind in ("rows", "table", "statistics", "preview"):
        assert read(whole, kind=kind), kind
