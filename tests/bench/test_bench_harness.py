"""The harness at toy size, and its parts that decide what a figure is."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import (
    accelerator_threads,
    accelerators,
    checkpoints,
    download_row,
    fill_and_check,
    foretold,
    loader_cpu_cost,
    loader_report,
    loader_timing,
    long_texts,
    media_row,
    owners,
    report,
    shared_jobs,
    store_report,
    table_row,
    tables,
    windows,
)
from bench.load_generator import available
from bench.loader_timing import Turn
from bench.photo_dataset import environment, make_album, tars
from bench.presigned_requests import Account, Request, head
from bench.results import Figure, RowResult, keep, load
from bench.rows import QUICK, store_rows
from bench.servers import SERVERS, Server
from bench.store_timing import requests_of
from bench.timing import Pass, time_import, time_pass
from tests.support.fork_server import PLACES
from tests.support.interpreters import python
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 280
"""Seconds a bench may take: some start several nodes, or load torch, on a machine that may be busy."""
pytestmark = pytest.mark.timeout(PATIENCE + 20)


def row(*figures: Figure, name: str = "get-10k", **skipped: str) -> RowResult:
    return RowResult(
        name, name, "2026-01-01T00:00:00+00:00", "abc", {"rounds": 1, "busy": 0.0}, figures, skipped
    )


def quick_rows(scratch: Path, *names: str, interpreter: str | None = None) -> dict[str, RowResult]:
    """Measure rows at toy size in a process of their own, and return what it kept. Nothing is installed.
    With an interpreter that is executed, nodes are executed, too."""
    env = os.environ | {"BENCH_INSTALL": "0"} | ({PLACES: ""} if interpreter else {})
    argv = [interpreter or python(), "-m", "bench", "--quick", "--only", ",".join(names)]
    done = subprocess.run(
        [*argv, "--scratch", str(scratch)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return load(scratch / "quick")


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_store_and_memory_rows_at_toy_size(tmp_path: Path) -> None:
    """The real programs where they are installed; a missing one is skipped with what to do about it."""
    rows = quick_rows(tmp_path, "get-10k", "memory", interpreter=sys.executable)
    assert set(rows) == {"get-10k", "memory"}
    assert rows["memory"].value("mixed", "moved")
    if available():
        assert rows["get-10k"].value("meshd", "rate")
    else:
        assert "apt-get install" in rows["get-10k"].skipped["meshd"]
    assert "## The store" in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_rows_of_origins_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, "cold", "cold-eight", "cold-1g", "epochs")
    warm = rows["epochs"].value("segments", "warm")
    assert warm is not None
    assert warm > 0.25
    if SERVERS["seaweedfs"].missing():
        assert rows["cold"].skipped["seaweedfs"]
    else:
        assert rows["cold-eight"].value("through meshd", "rate") == 1.0
        assert "## Buckets with an origin" in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_windows_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, windows.NAME).values()
    assert found.contenders() == list(windows.CONTENDERS)
    ratio = found.ratio(windows.OURS, windows.NAIVE, "rate")
    assert ratio is not None  # how much it is says nothing at this size
    assert found.value(windows.NAIVE, "client_us")
    assert windows.TEXT in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_rows_of_texts_and_tables_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, long_texts.NAME, table_row.NAME)
    texts, found = rows[long_texts.NAME], rows[table_row.NAME]
    assert texts.contenders() == list(long_texts.CONTENDERS)
    assert texts.ratio(long_texts.LONG, long_texts.SHORT, "rate") is not None
    installed = [name for name in table_row.CONTENDERS if name != table_row.RAY or find_spec("ray")]
    assert found.contenders() == installed
    assert found.value(table_row.PYARROW, "client_us")
    report = (tmp_path / "quick.md").read_text()
    assert long_texts.TEXT in report
    assert table_row.TEXT in report


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_rows_of_media_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, *(each.name for each in media_row.ROWS))
    for each in media_row.ROWS:
        assert rows[each.name].contenders() == list(media_row.CONTENDERS)
        assert rows[each.name].ratio(media_row.OURS, media_row.NAIVE, "rate") is not None
    assert media_row.FILMS.text in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_checkpoints_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, checkpoints.NAME).values()
    assert found.contenders() == list(checkpoints.CONTENDERS)
    for name in checkpoints.CONTENDERS:
        assert found.value(name, "save")
        assert found.value(name, "load")
    assert checkpoints.TEXT in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_rows_of_downloads_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, "download-1m", "download-40m")
    assert set(rows) == {"download-1m", "download-40m"}
    for found in rows.values():
        names = [name for name in download_row.CONTENDERS if name not in found.skipped]
        assert found.contenders() == names
        assert not any(found.problem(name) for name in names)
        assert found.ratio(download_row.OURS, download_row.BOTO, "rate")
        assert found.value(download_row.OURS, "server_us") is not None
    assert download_row.TEXT in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_rows_from_their_owners_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, owners.NAME).values()
    if not found.skipped:
        assert {*found.contenders()} == {*owners.CONTENDERS}
        assert not any(found.problem(name) for name in owners.CONTENDERS)  # equal batches among them
        for kind in (owners.PHOTOGRAPHS, owners.TENSORS):
            one, many = (f"{kind}, {way}" for way in ("from one node", "from their owners"))
            assert found.value(many, "parted") == 1
            assert found.value(one, "parted") == 0
            assert found.value(many, "crossed") == 0
            assert (found.value(one, "crossed") or 0) > 0
    assert owners.TEXT in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_what_the_simulator_foretells_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, foretold.NAME).values()
    if not found.skipped:
        assert {*found.contenders()} == {*foretold.CONTENDERS}
        for way in foretold.WAYS:
            for metric, most in {"read": 3, "sent": 10, "cached": 3, "shared": 3}.items():  # no time in them
                assert abs(foretold.error(found, way.name, metric) or 0) < most, (way.name, metric)
            assert found.value(f"{way.name}, {foretold.REAL}", "seconds")
    assert foretold.TEXT in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_jobs_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, "reshard").values()
    assert found.contenders() == ["cp", "cp, then sync", "reshard", "reshard, shuffled"]
    assert not any(found.problem(name) for name in found.contenders())
    assert found.ratio("reshard", "cp", "gigabytes")
    assert "## Shards of shards" in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_redundancy_at_toy_size(tmp_path: Path) -> None:
    require_etcd()
    [found] = quick_rows(tmp_path, "restore").values()
    assert not any(found.problem(name) for name in found.contenders())
    assert found.value("clients read", "p99_ratio")
    assert "## Redundancy restored" in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_gather_rows_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, "gather-10k", "gather-members")
    assert set(rows) == {"gather-10k", "gather-members"}
    assert len(rows["gather-10k"].contenders()) == 5
    assert all(rows[name].value("gather", "rate") for name in rows)
    assert "gather ÷ boto3 × 16" in (tmp_path / "quick.md").read_text()


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_passing_on_at_toy_size(tmp_path: Path) -> None:
    [found] = quick_rows(tmp_path, "passing").values()
    if not found.skipped:
        assert len(found.contenders()) == 6
        assert all(found.value(name, "rate") for name in found.contenders())
    assert "## Any node of a mesh" in (tmp_path / "quick.md").read_text()


def photographs_in(daemon: Daemon, s3: Any, folder: Path, count: int, bucket: str) -> Server:
    """The daemon of all tests as one of the bench's servers, with photographs in a bucket."""
    s3.create_bucket(Bucket=bucket)
    for file in make_album(folder, count).files():
        s3.put_object(Bucket=bucket, Key=f"raw/{file.parent.name}/{file.name}", Body=file.read_bytes())
    account = Account(daemon.access_key, daemon.secret_key)
    return Server("meshd", int(daemon.endpoint.rpartition(":")[2]), account, None)  # type: ignore[arg-type]


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_our_loader_at_toy_size(tmp_path: Path, daemon: Daemon, s3: Any) -> None:
    server = photographs_in(daemon, s3, tmp_path, 12, "bench-loaders")
    argv = [python(), "-m", "bench.meshsdk_contender", server.endpoint, "bench-loaders", "--batch", "8"]
    env = environment(server)
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE, env=env
    )
    passes = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
    seen = [(one["name"], one["samples"]) for one in passes]
    counted = [("first", 12), ("again", 12), ("second", 12), ("kept", 12)]
    assert seen == [("import", 0), *counted], done.stderr[-2000:]


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_delivery_at_toy_size(
    tmp_path: Path, daemon: Daemon, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.photo_dataset.BUCKET", "bench-delivery")
    server = photographs_in(daemon, s3, tmp_path, 12, "bench-delivery")
    figures = loader_cpu_cost.measure(server, replace(QUICK, batch=4, rounds=2), lambda _: None)
    found = row(*figures, name="delivery")
    assert found.contenders() == [loader_cpu_cost.COLD, loader_cpu_cost.WARM, loader_cpu_cost.BARE]
    assert all(found.value(name, "cpu") for name in (loader_cpu_cost.COLD, loader_cpu_cost.WARM))
    assert found.ratio(loader_cpu_cost.WARM, loader_cpu_cost.BARE, "gigabytes")
    text = "\n".join(loader_report.delivery_section({"delivery": found}))
    assert "loader, warm: client CPU s a 1,000" in text
    assert "warm ÷ bare recv_into" in text


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_four_jobs_at_once_at_toy_size(
    tmp_path: Path, daemon: Daemon, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.photo_dataset.BUCKET", "bench-sharing")
    server = photographs_in(daemon, s3, tmp_path, 12, "bench-sharing")
    scale = replace(QUICK, photographs=13, batch=8)  # one more than there are: a short run is no figure
    figure = shared_jobs.together(Turn(loader_timing.TCP, server), scale, tmp_path, 0)
    assert figure.problem == "48 samples instead of 52"
    assert figure.metrics["rate"] > 0


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_an_emulated_accelerator_at_toy_size(tmp_path: Path, daemon: Daemon) -> None:
    """Of each workload, one that takes batches of the right bytes and computes for some of the time."""
    account = Account(daemon.access_key, daemon.secret_key)
    port = int(daemon.endpoint.rpartition(":")[2])
    server = Server("meshd", port, account, None)  # type: ignore[arg-type]
    for name in ("au-resnet50", "au-unet3d"):
        work = replace(accelerators.workload(name, QUICK), step_s=0.02)
        accelerators.fill(work, server, lambda _: None)
        fed = accelerators.Contender(accelerators.OURS, server).utilisation(work, 1, 0.1, tmp_path)
        assert 0 < fed <= 1


def test_batches_of_other_sizes_are_no_figure() -> None:
    assert accelerator_threads.utilisation(iter([b"abc"] * 9), len, 3, 0.001, 0.002) > 0
    with pytest.raises(ValueError, match="a batch of 3 bytes, not 5"):
        accelerator_threads.utilisation(iter([b"abc"] * 9), len, 5, 0.001, 0.01)
    with pytest.raises(ValueError, match="too few records"):
        next(accelerator_threads.forever([]))


@given(st.integers(0, 40), st.integers(1, 32))
def test_the_most_accelerators_are_found_by_doubling_and_halving(answer: int, most: int) -> None:
    asked: list[int] = []

    def busy(count: int) -> bool:
        asked.append(count)
        return count <= answer

    assert accelerators.most_busy(busy, most) == min(answer, most)
    assert max(asked) <= most
    assert len(asked) <= 11


def test_records_are_of_the_sizes_of_the_benchmark() -> None:
    for each in accelerators.WORKLOADS:
        assert each.wanted == each.batch * (each.take or each.record)
    small = accelerators.workload("au-unet3d", QUICK)
    saved = accelerators._record(small, 3)
    assert len(saved) == small.record
    assert np.load(io.BytesIO(saved)).shape == (small.record - 128,)


def test_the_bars_of_loaders_are_of_the_best_peer() -> None:
    mine = {
        "first_rate": 1100.0,
        "second_rate": 1400.0,
        "again_rate": 9000.0,
        "first_cpu": 0.1,
        "kept_rate": 4400.0,
    }
    figures = [
        Figure(loader_report.OURS, 0, {**mine, "imported_rate": 1150.0}),
        Figure("webdataset from seaweedfs", 0, {"first_rate": 500.0, "second_rate": 600.0, "first_cpu": 2.0}),
        Figure("litdata from seaweedfs", 0, {"first_rate": 400.0, "second_rate": 1000.0, "first_cpu": 2.5}),
        Figure("streaming from seaweedfs", 0, {"first_rate": 300.0, "imported_rate": 575.0}),
    ]
    lines = {line[0]: line[1:] for line in loader_report.loader_bars(row(*figures, name="loaders"))}
    assert lines["first epoch ÷ best peer (webdataset from seaweedfs)"] == ["2.20×", "≥ 2 met"]
    assert lines["without imports, best peer streaming from seaweedfs"] == ["2.00×", ""]
    later = "the same plan again ÷ best peer's next epoch (litdata from seaweedfs)"
    assert lines[later] == ["9.0×", "≥ 8 met"]
    kept = "next epoch, decoded once ÷ best peer's next epoch (litdata from seaweedfs)"
    assert lines[kept] == ["4.40×", "≥ 4 met"]
    assert lines["next epoch, decoded once ÷ the first"] == ["4.00×", "≥ 2.5 met"]
    four = row(
        Figure(loader_report.OURS, 0, {"rate": 3000.0}),
        Figure("webdataset from seaweedfs", 0, {"rate": 600.0}),
        name="sharing",
    )
    assert "| 5.0× | ≥ 6 **missed** |" in "\n".join(loader_report.sharing_lines({"sharing": four}))
    plain = Figure(loader_report.OURS_TCP, 0, {"rate": 3900.0, "first_rate": 900.0})
    both = "\n".join(loader_report.sharing_lines({"sharing": row(*four.figures, plain, name="sharing")}))
    assert "| the same over TCP | 6.5× | ≥ 6 met |" in both
    lines = {line[0]: line[1:] for line in loader_report.loader_bars(row(*figures, plain, name="loaders"))}
    assert lines["the same over TCP"] == ["1.80×", "≥ 2 **missed**"]


def test_every_clock_starts_with_a_collected_heap() -> None:
    """What was left before is not looked through at somebody's expense."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

    seen: list[bool] = []

    def make() -> list[int]:
        seen.append(left() is None)
        return [1]

    gc.collect()
    left = ref(Left())
    time_import(["bench.tables"])
    assert left() is None
    left = ref(Left())
    for name in ("first", "second"):
        time_pass(name, make, int)
    assert seen[1:] == [True]


def test_a_first_epoch_has_the_import_in_it() -> None:
    imported = Pass("import", 0, 0.5, 0.0, 0.25)
    passes = [Pass("first", 1000, 2.0, 1.0, 0.75), Pass("second", 1000, 4.0, 1.0, 2.0)]
    assert loader_timing.metrics_of(imported, passes) == {
        "import_s": 0.5,
        "imported_rate": 500.0,
        "first_rate": 400.0,
        "first_wait": 1.5,
        "first_cpu": 1.0,
        "second_rate": 250.0,
        "second_wait": 1.0,
        "second_cpu": 2.0,
    }


def test_a_row_with_any_problem_has_no_figure() -> None:
    good = Figure("meshd", 0, {"rate": 5.0})
    bad = Figure("meshd", 1, {"rate": 50.0}, "3 of 50 requests failed")
    assert row(good).value("meshd", "rate") == 5.0
    assert row(good, bad).value("meshd", "rate") is None
    assert row(good, meshd="not installed").problem("meshd") == "not installed"


def test_medians_and_ratios() -> None:
    rates = {"meshd": (30, 10, 20), "seaweedfs": (10, 10, 40)}
    figures = [Figure(name, at, {"rate": v}) for name, values in rates.items() for at, v in enumerate(values)]
    assert row(*figures).ratio("meshd", "seaweedfs", "rate") == 2.0
    assert row(*figures).ratio("meshd", "nginx", "rate") is None


def test_results_survive_the_file(tmp_path: Path) -> None:
    rows = {name: row(Figure("meshd", 0, {"rate": 1.5}), name=name, nginx="not installed") for name in "ab"}
    for each in rows.values():
        keep(tmp_path, each)
    assert load(tmp_path) == rows
    again = replace(rows["a"], taken="2026-01-02T00:00:00+00:00")
    assert keep(tmp_path, again).name == "a.json"
    assert load(tmp_path) == rows | {"a": again}


def test_report_says_where_a_peer_is_ahead() -> None:
    rates = {"meshd": 80.0, "seaweedfs": 100.0}
    rows = {"get-10k": row(*(Figure(name, 0, {"rate": rate}) for name, rate in rates.items()))}
    text = report.render(rows, QUICK)
    assert "GET 10 KiB × 16: 0.80× SeaweedFS" in text
    assert "≥ 1.5 **missed**" in text


def test_every_bar_of_a_row_is_shown_with_its_tail() -> None:
    row_named = {each.name: each for each in store_rows(QUICK)}
    figures = [
        Figure(n, 0, {"rate": r, "p99_ms": p}) for n, r, p in (("meshd", 40.0, 5.0), ("seaweedfs", 10.0, 4.0))
    ]
    few = row(Figure("meshd", 0, {"rate": 80.0}), name="list-few")
    lines = store_report.bar_lines(row_named["list"], {"list": row(*figures, name="list"), "list-few": few})
    assert [line[1:] for line in lines] == [
        ["4.00×", "≥ 3 met"],
        ["1.25×", "≤ 1 **missed**"],
        ["0.50×", "≥ 0.8 **missed**"],
    ]
    assert store_report.bar_lines(row_named["put-10k"], {}) == []


def test_the_cpu_of_a_request_is_that_of_the_server_and_is_judged() -> None:
    [wanted] = [each for each in store_rows(QUICK) if each.name == "get-10k"]
    costs = {"seaweedfs": 300.0, "meshd": 90.0}
    result = row(*(Figure(name, 0, {"rate": 1.0, "cpu_us": cost}) for name, cost in costs.items()))
    lines = store_report.cpu_bars(wanted, result)
    assert [line[1:] for line in lines] == [["90", "≤ 100 met"], ["0.30×", "≤ 0.4 met"]]
    text = report.render({"get-10k": result}, QUICK)
    assert "| GET 10 KiB × 16 | 300 | 90 | – | – | 0.30× |" in text
    dear = row(*(Figure(name, 0, {"rate": 1.0, "cpu_us": 200.0}) for name in costs))
    assert [line[2] for line in store_report.cpu_bars(wanted, dear)] == [
        "≤ 100 **missed**",
        "≤ 0.4 **missed**",
    ]
    earlier = row(Figure("meshd", 0, {"rate": 1.0}))
    assert store_report.cpu_bars(wanted, earlier) == []
    assert store_report.cpu_table({"get-10k": earlier}, QUICK) == []


def test_bars_both_ways() -> None:
    assert tables.verdict(1.2, 1.0) == "≥ 1 met"
    assert tables.verdict(0.2, 0.1, at_most=True) == "≤ 0.1 **missed**"
    assert tables.verdict(None, None) == ""


def test_each_request_is_signed_for_its_own_path() -> None:
    account = Account("key", "secret")
    heads = [head(Request("GET", f"/b/{n}"), "127.0.0.1:1", account) for n in range(2)]
    assert all(b"Signature=" in each and each.endswith(b"\r\n\r\n") for each in heads)
    assert heads[0].split(b"Signature=")[1] != heads[1].split(b"Signature=")[1]
    assert b"Authorization" not in head(Request("GET", "/b/1"), "127.0.0.1:1", None)


def test_every_row_names_servers_there_are_and_has_requests() -> None:
    for each in store_rows(QUICK):
        assert set(each.servers) <= set(SERVERS)
        assert requests_of(each, fill_and_check.pattern(each.size))


def test_shards_hold_every_photograph_once(tmp_path: Path) -> None:
    album = make_album(tmp_path, 12)
    names = []
    for _, body in tars(album):
        with tarfile.open(fileobj=io.BytesIO(body)) as shard:
            names += shard.getnames()
    jpegs = sorted(name for name in names if name.endswith(".jpg"))
    assert jpegs == sorted(file.name for file in album.files())


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_ops_row_at_toy_size(tmp_path: Path) -> None:
    assert quick_rows(tmp_path, "ops")["ops"].value("meshd", "rate")
    assert "## Ops, on one core" in (tmp_path / "quick.md").read_text()


def test_the_ops_bar_is_of_time_not_of_rate() -> None:
    rates = {"libjpeg-turbo, bare": 1000.0, "meshd": 800.0, "Pillow": 200.0}
    result = row(*(Figure(name, 0, {"rate": rate}) for name, rate in rates.items()), name="ops")
    text = "\n".join(report.ops_section({"ops": result}))
    assert "| meshd ÷ bare decode, time | 1.25× | ≤ 1.6 met |" in text
    slow = row(
        Figure("libjpeg-turbo, bare", 0, {"rate": 900.0}), Figure("meshd", 0, {"rate": 500.0}), name="ops"
    )
    assert "1.80× | ≤ 1.6 **missed**" in "\n".join(report.ops_section({"ops": slow}))


@pytest.mark.bench
@pytest.mark.sampled(3)
def test_the_row_of_user_ops_at_toy_size(tmp_path: Path) -> None:
    rows = quick_rows(tmp_path, "userops")
    assert all(rows["userops"].value(name, "rate") for name in rows["userops"].contenders())
    assert "## Ops of users" in (tmp_path / "quick.md").read_text()
